"""FlashInfer's CuTe DSL kernels: prefill, decode and draft tokens, on pools."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from sluice.bench.providers import pipeline
from sluice.bench.providers.base import Call, Job, Provider, RefusalError, load
from sluice.testing.workload import Workload


class FlashInfer(Provider):
    name = "flashinfer"
    title = "FlashInfer"
    package = "flashinfer.gdn_prefill"
    distribution = "flashinfer-python"
    install = "pip install flashinfer-python nvidia-cutlass-dsl"
    devices = ("cuda",)
    compiles = "process"
    tunes = ("layer",)  # because of FLA's kernels

    def helper(self, workload: Workload) -> Hashable | None:
        """Decode kernels are cached on disk; prefill kernels stay in the process."""
        if workload.op in ("decode", "verify"):
            return workload.op
        return "layer" if workload.op == "layer" else None  # FLA's kernels are cached on disk

    def missing(self) -> str | None:
        return super().missing() or _other(self, "flashinfer.gdn_decode")

    def prepare(self, job: Job) -> Call:
        if (job.case.K, job.case.V) != (128, 128):
            raise RefusalError(f"K and V must be 128, got {job.case.K} and {job.case.V}")
        if job.dtype not in (torch.bfloat16, torch.float16):
            raise RefusalError(f"bfloat16 or float16, got {job.dtype}")
        return super().prepare(job)

    def _prefill(self, job: Job) -> Call:
        chunk = load("flashinfer.gdn_prefill").chunk_gated_delta_rule
        i, pool = job.inputs, job.inputs["state"]
        q, k, v = (i[name][0].contiguous() for name in ("q", "k", "v"))
        alpha, beta = i["g"][0].exp(), i["beta"][0].contiguous()
        longest = max(job.case.sequence_lengths)

        def run() -> tuple[Tensor, Tensor]:
            return chunk(
                q, k, v, alpha, beta,
                initial_state=pool, output_state=pool, state_indices=i["slots"],
                output_final_state=True, cu_seqlens=i["cu_seqlens"], max_seqlen=longest,
                output=torch.empty_like(v),
            )  # fmt: skip

        return Call(
            run,
            lambda r: {"o": r[0][None], "state": job.rows()},
            ("decay as exp(g)",),
            mutable=(pool,),
        )

    def _layer(self, job: Job) -> Call:
        """FLA's convolution, l2 norm, gates and gated norm around FlashInfer's packed recurrence.

        FlashInfer takes no strided values, so they are copied out of the conv channels.
        """
        pipeline.borrowed()
        c, i, pool = job.case, job.inputs, job.inputs["state"]
        chunk = load("flashinfer.gdn_prefill").chunk_gated_delta_rule
        unit = load("fla.modules.norm.l2norm").l2norm
        gates, cu = pipeline.gates(i), pipeline.bounds(job, torch.int32)

        def rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            g, beta = (x.flatten(0, 1).contiguous() for x in gates(a, b))
            v = v.flatten(0, 1).contiguous()
            out = torch.empty_like(v)
            o, _ = chunk(
                unit(q).flatten(0, 1), unit(k).flatten(0, 1), v, g.exp(), beta,
                initial_state=pool, output_state=pool, state_indices=i["slots"],
                output_final_state=True, cu_seqlens=cu, max_seqlen=c.tokens, output=out,
            )  # fmt: skip
            return o.unflatten(0, (c.batch, c.tokens)), pool

        return pipeline.whole(
            job, pipeline.convolution(job), rule, after=lambda _: job.rows(), notes=(),
            mutable=(pool,), detail="with FLA",
        )  # fmt: skip

    def _step(self, job: Job) -> Call:
        raise RefusalError("its fused step multiplies by a projection first and has no gated norm")

    def _decode(self, job: Job) -> Call:
        decode = load("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
        i, pool = job.inputs, job.inputs["state"]

        def run() -> tuple[Tensor, Tensor]:
            return decode(
                i["q"], i["k"], i["v"], None, i["A_log"], i["g"], i["dt_bias"], i["beta"],
                initial_state=pool, initial_state_indices=i["slots"],
                output=torch.empty_like(i["v"]),
            )  # fmt: skip

        return Call(run, lambda r: {"o": r[0], "state": job.rows()}, mutable=(pool,))

    def _verify(self, job: Job) -> Call:
        """Keep the state after each draft token, then copy the accepted one into the pool."""
        c, i, pool = job.case, job.inputs, job.inputs["state"]
        decode = load("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
        kept = pool.new_empty(c.N, c.tokens, *pool.shape[1:])
        slots = i["slots"].long()
        row = torch.arange(c.N, device=job.device) * c.tokens
        accepted = i["num_accepted"]

        def run() -> Tensor:
            o, _ = decode(
                i["q"], i["k"], i["v"], None, i["A_log"], i["g"], i["dt_bias"], i["beta"],
                initial_state=pool, initial_state_indices=i["slots"],
                output=torch.empty_like(i["v"]),
                intermediate_states_buffer=kept, disable_state_update=True,
            )  # fmt: skip
            pool.index_copy_(0, slots, kept.flatten(0, 1).index_select(0, row + accepted - 1))
            return o

        return Call(
            run,
            lambda o: {"o": o, "state": job.rows()},
            ("commit by a gather and a copy in torch",),
            mutable=(pool,),
        )


def _other(provider: Provider, package: str) -> str | None:
    first, provider.package = provider.package, package
    try:
        return Provider.missing(provider)
    finally:
        provider.package = first


def provider() -> FlashInfer:
    return FlashInfer()
