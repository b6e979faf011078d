"""flash-linear-attention's Triton kernels, without their dispatch to other backends."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sluice.bench import training
from sluice.bench.providers import pipeline
from sluice.bench.providers.base import Call, Job, Provider, RefusalError, heads_of, load, raw_gates
from sluice.bench.providers.pipeline import FRESH, ROWS, WIDE
from sluice.testing.workload import Workload

NORM_BLOCK = 2048 * 32  # rows; FLA tunes its norms once per so many rows
TUNED_BATCH = 64  # sequences at which kernels with one form for every batch are tuned


class Fla(Provider):
    name = "fla"
    title = "FLA"
    package = "fla.ops.gated_delta_rule"
    distribution = "fla-core"
    install = "pip install fla-core triton"
    devices = ("cuda",)
    compiles = "disk"
    # all but decode, whose kernel has one form
    tunes = ("prefill", "train", "step", "layer", "conv_qkv", "causal_conv1d", "rms_norm_gated")
    raw_prefill = True

    def helper(self, workload: Workload) -> Hashable:
        """One helper per heads of prefill, one each for convolutions, layers and the rest."""
        if workload.op == "prefill":
            return workload.heads
        if workload.op in ("conv_qkv", "causal_conv1d"):
            return "convolutions"
        return workload.op if workload.op == "layer" else "rest"

    def kernels(self, workload: Workload) -> Hashable:
        """Its kernels are tuned by heads, and by the number of row blocks of a norm."""
        blocks = tuple(-(-workload.size.tokens * heads // NORM_BLOCK) for heads in workload.heads)
        packed = workload.case.lengths is not None
        key = (workload.op, workload.heads, workload.variant, packed)
        return key if workload.op == "prefill" else (*key, blocks)

    def tuned_at(self, workloads: list[Workload]) -> Workload:
        """The surface's first prompts, or the batch nearest to ``TUNED_BATCH``.

        The convolution of one token is tuned once for all batches. For one sequence all forms take
        the same two microseconds, so chance would choose the form for all batches.
        """
        if workloads[0].size.lengths is not None:
            return workloads[0]
        return min(workloads, key=lambda w: abs(w.size.batch - TUNED_BATCH))

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        backends = load("fla.backends")
        if getattr(backends, "_DISPATCH_DISABLED", True):
            return None
        return "was imported with its dispatch on: set FLA_DISABLE_BACKEND_DISPATCH=1"

    def _prefill(self, job: Job) -> Call:
        chunk = load(self.package).chunk_gated_delta_rule
        i, state = job.inputs, job.rows()
        if job.case.raw:
            keywords = _raw(i)
        else:
            keywords = {"g": i["g"], "beta": i["beta"]}
            keywords |= {"output_final_state": True, "state_v_first": True}
        keywords |= {"initial_state": state, **_packed(job)}

        def run() -> tuple[Tensor, Tensor]:
            return chunk(i["q"], i["k"], i["v"], **keywords)

        return Call(run, _state_and_output, (ROWS, pipeline.fresh(job)))

    def _train(self, job: Job) -> Call:
        chunk, packed = load(self.package).chunk_gated_delta_rule, _packed(job)
        return training.call(job, lambda *leaves: chunk(*leaves, **packed)[0])

    def _decode(self, job: Job) -> Call:
        recurrent = load(self.package).fused_recurrent_gated_delta_rule
        i, state = job.inputs, job.rows()

        def run() -> tuple[Tensor, Tensor]:
            return recurrent(i["q"], i["k"], i["v"], initial_state=state, **_raw(i))

        return Call(run, _state_and_output, (ROWS, pipeline.fresh(job)))

    def _verify(self, job: Job) -> Call:
        raise RefusalError("keeps no state but the last: nothing to go back to")

    def _causal_conv1d(self, job: Job) -> Call:
        roll, notes, mutable = _rolls(job)
        return Call(
            roll,
            lambda r: {"y": r[0], "state": r[1][..., 1:].clone()},
            notes,
            mutable=mutable,
        )

    def _conv_qkv(self, job: Job) -> Call:
        """Convolution and two l2 norms by FLA; gates, which FLA computes elsewhere, in torch."""
        roll, notes, mutable = _rolls(job)
        unit = load("fla.modules.norm.l2norm").l2norm

        def run() -> tuple[Tensor, ...]:
            y, window = roll()
            q, k, v = heads_of(y, job.case)
            return unit(q), unit(k), v, *raw_gates(job.inputs), window

        def outputs(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
            named = dict(zip(("q", "k", "v", "g", "beta"), result, strict=False))
            return {**named, "state": result[-1][..., 1:].clone()}

        return Call(run, outputs, notes, mutable=mutable)

    def _rms_norm_gated(self, job: Job) -> Call:
        norm = load("fla.modules.norm.fused_norm_gate").rms_norm_gated
        i, activation = job.inputs, job.case.gate_activation

        def run() -> Tensor:
            return norm(i["x"], i["z"], i["weight"], None, activation=activation, eps=1e-6)

        return Call(run, lambda y: {"y": y})

    def _step(self, job: Job) -> Call:
        """Three launches: convolution, recurrence with gates and l2 norm inside, gated norm."""
        conv = load("fla.modules.causal_conv1d").causal_conv1d_update
        window = pad(job.rows("conv_state"), (1, 0))

        def roll(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            y, _ = conv(x[:, 0], window, weight=weight, activation="silu")
            return y[:, None], window

        rule = load(self.package).fused_recurrent_gated_delta_rule
        notes = (ROWS, pipeline.fresh(job))
        return pipeline.whole(job, roll, _inside(job, rule), notes=notes, mutable=(window,))

    def _layer(self, job: Job) -> Call:
        rule = load(self.package).chunk_gated_delta_rule
        return pipeline.whole(job, pipeline.convolution(job), _inside(job, rule))


def _inside(job: Job, rule: Any) -> pipeline.Rule:
    """FLA's rule with gates and l2 norm inside its kernels, from the rows of the state."""
    i, state = job.inputs, job.rows()

    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        o, after = rule(q, k, v, initial_state=state, **_raw({**i, "g": a, "beta": b}))
        return o, after

    return run


def _rolls(job: Job) -> tuple[Callable[[], Any], tuple[str, ...], tuple[Tensor, ...]]:
    """A function for the convolution: (y [B, T, D], the final window of W columns)."""
    ops = load("fla.modules.causal_conv1d")
    i, window = job.inputs, pad(job.rows(), (1, 0))
    if job.case.lengths is None:
        x = i["x"][:, 0]

        def decode() -> tuple[Tensor, Tensor]:
            y, _ = ops.causal_conv1d_update(x, window, weight=i["weight"], activation="silu")
            return y[:, None], window

        return decode, (ROWS, WIDE), (window,)
    keywords = {"initial_state": window, "output_final_state": True, "activation": "silu"}
    keywords |= _packed(job)

    def prompts() -> tuple[Tensor, Tensor]:
        return ops.causal_conv1d(i["x"], weight=i["weight"], **keywords)

    return prompts, (ROWS, WIDE, FRESH), ()


def _packed(job: Job) -> dict[str, Any]:
    """The bounds of packed prompts, made once, because FLA caches by tensor identity.

    None for a batch, such as a layer's prompts.
    """
    if job.case.lengths is None:
        return {}
    cu = job.once("cu", lambda: job.inputs["cu_seqlens"].long())
    return {"cu_seqlens": cu, "cu_seqlens_cpu": job.once("cu_cpu", cu.cpu)}


def _raw(i: dict[str, Any]) -> dict[str, Any]:
    """Gates and l2 norm in the kernel."""
    return {
        "g": i["g"],
        "beta": i["beta"],
        "A_log": i["A_log"],
        "dt_bias": i["dt_bias"],
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
        "state_v_first": True,
    }


def _state_and_output(result: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"o": result[0], "state": result[1].to(torch.float32)}


def provider() -> Fla:
    return Fla()
