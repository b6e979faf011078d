"""sluice itself: what dispatch chooses, one backend (``sluice:triton``), or another way to call it.

A single backend is measured where dispatch chooses another. ``sluice:separate`` does the work of a
fused call as several calls, which shows what fusing gains. ``sluice:invariant`` is prefill with
``batch_invariant=True``, which shows what that costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

import sluice
from sluice import calls, dispatch
from sluice.bench import training
from sluice.bench.providers.base import Call, Job, Provider, RefusalError, heads_of, raw_gates
from sluice.testing.oracle import split_projections
from sluice.testing.workload import Workload

NORM_EPS = 1e-6


class Sluice(Provider):
    """The public operators, called as a program would call them."""

    title = "sluice"
    package = "sluice"
    install = "pip install ."
    is_peer = False
    raw_prefill = True
    compiles = "disk"

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "sluice" if backend is None else f"sluice:{backend}"
        self.title = self.name if backend is None else f"sluice, {backend} alone"

    def helper(self, workload: Workload) -> Hashable | None:
        """One helper per number of heads for prompts; other kernels compile quickly."""
        return workload.heads if workload.bound == "compute" else None

    def missing(self) -> str | None:
        return None if self.backend is None else dispatch.unavailable(self.backend)

    def version(self) -> str:
        return sluice.__version__

    def prepare(self, job: Job) -> Call:
        call = self._call(job)
        with calls.check_only() as found:  # without gradients, so a training step is its forward
            (training.forward_of(job) if job.op == "train" else call.run)()
        served = [dispatch.explain(one.spec, self.backend) for one in found]
        for explanation in served:
            if explanation.chosen is None:
                raise RefusalError(_reasons(explanation))
        if self.backend and all(_first(one.spec) == self.backend for one in found):
            raise RefusalError(f"sluice is served by {self.backend} here: the same row")
        call.detail = "+".join(dict.fromkeys(str(e.chosen) for e in served))
        return call

    def _call(self, job: Job) -> Call:
        if job.op == "train":
            return training.own(job, self.backend)
        return _layer(job, self.backend) if job.op == "layer" else _operator(job, self.backend)


class Invariant(Sluice):
    """``prefill`` with ``batch_invariant=True``."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.title = "sluice:invariant", "sluice, batch-invariant"

    def _call(self, job: Job) -> Call:
        if job.op != "prefill":
            raise RefusalError("is prefill's option; other operators are so anyway")
        return _operator(job, None, batch_invariant=True)


class Separate(Sluice):
    """The work of one fused call as separate calls."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.title = "sluice:separate", "sluice, separate calls"

    def _call(self, job: Job) -> Call:
        calls = {"step": _apart, "layer": _apart, "conv_qkv": _conv_apart}
        if job.op not in calls:
            raise RefusalError("is one call")
        return calls[job.op](job)


def _first(spec: Any) -> str | None:
    """The backend that dispatch chooses by default."""
    return dispatch.explain(spec).chosen


def _reasons(explanation: dispatch.Explanation) -> str:
    """Why no backend serves the call, in one line; or why the requested one does not."""
    reasons = [f"{n}: {why}" for n, why in explanation.refusals if "not asked for" not in why]
    return f"{explanation.op}: " + "; ".join(reasons)


def _operator(job: Job, backend: str | None, **options: Any) -> Call:
    """One public function, or verify and commit together."""
    inputs = {**job.inputs, "backend": backend, **options}
    accepted = inputs.pop("num_accepted", None)
    function = getattr(sluice, job.op)

    def run() -> Any:
        return function(**inputs)

    def speculate() -> Any:
        o, draft = sluice.verify(**inputs)
        return o, sluice.commit(draft, accepted, backend=backend)

    def outputs(result: Any) -> dict[str, Tensor]:
        names = {
            "conv_qkv": ("q", "k", "v", "g", "beta"),
            "causal_conv1d": ("y",),
            "rms_norm_gated": ("y",),
            "step": ("y",),
        }.get(job.op, ("o",))
        values = result if isinstance(result, tuple) else (result,)
        return {**dict(zip(names, values, strict=False)), **_rows(job)}

    return Call(speculate if job.op == "verify" else run, outputs, mutable=_pools(job))


def _layer(job: Job, backend: str | None) -> Call:
    """A prompt through conv_qkv, prefill and the gated norm, as in the layer."""
    c, i = job.case, job.inputs
    qkv, z, b, a = split_projections(
        i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
    )
    heads = {"num_k_heads": c.Hk, "num_v_heads": c.Hv, "head_k_dim": c.K, "head_v_dim": c.V}
    rows = {"slots": i["slots"], "backend": backend}

    def run() -> Tensor:
        q, k, v, g, beta = sluice.conv_qkv(
            qkv, i["conv_weight"], a=a, b=b, A_log=i["A_log"], dt_bias=i["dt_bias"],
            state=i["conv_state"], **heads, **rows,
        )  # fmt: skip
        o, _ = sluice.prefill(q, k, v, g, beta, state=i["state"], **rows)
        y = sluice.rms_norm_gated(
            o, z, i["norm_weight"], activation=c.gate_activation, backend=backend
        )
        return y.flatten(-2)

    converted = ("projections split",) if c.order == "interleaved" else ()
    return Call(run, lambda y: {"y": y, **_rows(job)}, converted, mutable=_pools(job))


def _apart(job: Job) -> Call:
    """A layer as convolution, recurrence with gates and l2 norm inside, and gated norm."""
    c, i = job.case, job.inputs
    qkv, z, b, a = split_projections(
        i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
    )
    if c.flat:
        qkv, z, b, a = (x[:, None] for x in (qkv, z, b, a))
    rule = sluice.decode if c.flat else sluice.prefill
    inside = {"A_log": i["A_log"], "dt_bias": i["dt_bias"], "normalize_qk": True}
    slots = i["slots"]

    def run() -> Tensor:
        mixed, _ = sluice.causal_conv1d(qkv, i["conv_weight"], state=i["conv_state"], slots=slots)
        o, _ = rule(*heads_of(mixed, c), a, b, state=i["state"], slots=slots, **inside)
        return sluice.rms_norm_gated(o, z, i["norm_weight"], activation=c.gate_activation)

    def outputs(y: Tensor) -> dict[str, Tensor]:
        y = y.flatten(-2)
        return {"y": y[:, 0] if c.flat else y, **_rows(job)}

    converted = ("projections split",) if c.order == "interleaved" else ()
    return Call(run, outputs, converted, mutable=_pools(job))


def _conv_apart(job: Job) -> Call:
    """The convolution, then torch: l2 norms of q and of k, a copy of v, and the gates."""
    c, i = job.case, job.inputs
    # x · rsqrt(Σx² + eps) as torch's rms_norm, which is one launch
    weight = torch.full((c.K,), c.K**-0.5, dtype=i["x"].dtype, device=job.device)
    options = {name: i[name] for name in ("cu_seqlens", "cu_seqlens_cpu") if name in i}

    def run() -> tuple[Tensor, ...]:
        y, _ = sluice.causal_conv1d(
            i["x"], i["weight"], state=i["state"], slots=i["slots"], **options
        )
        q, k, v = heads_of(y, c)
        q, k = (rms_norm(x, (c.K,), weight, NORM_EPS / c.K) for x in (q, k))
        return q, k, v.contiguous(), *raw_gates(i)

    def outputs(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
        named = dict(zip(("q", "k", "v", "g", "beta"), result, strict=True))
        return {**named, **_rows(job)}

    return Call(run, outputs, mutable=_pools(job))


def _pools(job: Job) -> tuple[Tensor, ...]:
    return tuple(job.inputs[name] for name in ("state", "conv_state") if name in job.inputs)


def _rows(job: Job) -> dict[str, Tensor]:
    """The pools' rows after a call."""
    return {name: job.rows(name) for name in ("state", "conv_state") if name in job.inputs}


VARIANTS = {"separate": Separate, "invariant": Invariant}


def provider(name: str | None = None) -> Sluice:
    """The provider for a backend or a variant."""
    return VARIANTS[name]() if name in VARIANTS else Sluice(name)
