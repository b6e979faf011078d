"""sluice itself: what dispatch chooses, or one backend by its name (``sluice:triton``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import sluice
from sluice import dispatch, library
from sluice.bench.providers.base import Call, Job, Provider, RefusalError
from sluice.testing.oracle import split_projections


class Sluice(Provider):
    """The public operators, called as a program would call them."""

    title = "sluice"
    package = "sluice"
    install = "pip install ."
    is_peer = False

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "sluice" if backend is None else f"sluice:{backend}"
        self.title = self.name

    def missing(self) -> str | None:
        return None if self.backend is None else dispatch.unavailable(self.backend)

    def version(self) -> str:
        return sluice.__version__

    def prepare(self, job: Job) -> Call:
        call = _layer(job, self.backend) if job.op == "layer" else _operator(job, self.backend)
        with library.probing() as found:
            call.run()
        served = [dispatch.explain_problem(problem, self.backend) for problem in found]
        for explanation in served:
            if explanation.chosen is None:
                raise RefusalError(_reasons(explanation))
        call.detail = "+".join(dict.fromkeys(str(e.chosen) for e in served))
        return call


def _reasons(explanation: dispatch.Explanation) -> str:
    """Why nothing serves, in one line; of the one asked for, where one was."""
    reasons = [f"{n}: {why}" for n, why in explanation.refusals if "not asked for" not in why]
    return f"{explanation.op}: " + "; ".join(reasons)


def _operator(job: Job, backend: str | None) -> Call:
    """One public function, or verify and commit together."""
    inputs = {**job.inputs, "backend": backend}
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
    """A prompt through conv_qkv, prefill and the gated norm, as the layer does it."""
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


def _pools(job: Job) -> tuple[Tensor, ...]:
    return tuple(job.inputs[name] for name in ("state", "conv_state") if name in job.inputs)


def _rows(job: Job) -> dict[str, Tensor]:
    """The pools' rows after a call."""
    return {name: job.rows(name) for name in ("state", "conv_state") if name in job.inputs}


def provider(backend: str | None = None) -> Sluice:
    return Sluice(backend)
