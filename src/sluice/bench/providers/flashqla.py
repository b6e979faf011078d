"""FlashQLA, the Qwen team's TileLang prefill; FLA does the other parts of a layer."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from sluice.bench import training
from sluice.bench.providers import pipeline
from sluice.bench.providers.base import Call, Job, Provider, RefusalError, load
from sluice.testing.workload import Workload


class FlashQla(Provider):
    name = "flashqla"
    title = "FlashQLA"
    package = "flash_qla"
    distribution = "flash-qla"
    install = "pip install flash-qla tilelang==0.1.9"
    devices = ("cuda",)
    compiles = "disk"
    tunes = ("layer",)  # because of FLA's kernels

    def helper(self, workload: Workload) -> Hashable | None:
        """It compiles again for every number of heads, and for prompts that it splits."""
        if workload.op not in ("prefill", "layer", "train"):
            return None
        return workload.heads, workload.case.N == 1

    def prepare(self, job: Job) -> Call:
        c = job.case
        if c.K != 128 or c.V != 128:
            raise RefusalError(f"K and V must be 128, got {c.K} and {c.V}")
        if job.dtype not in (torch.bfloat16, torch.float16):
            raise RefusalError(f"bfloat16 or float16, got {job.dtype}")
        return super().prepare(job)

    def _prefill(self, job: Job) -> Call:
        i = job.inputs
        chunk = load(self.package).chunk_gated_delta_rule
        state = job.rows()
        bounds = job.once("cu", lambda: i["cu_seqlens"].long())

        def run() -> tuple[Tensor, Tensor]:
            return chunk(
                i["q"], i["k"], i["v"], i["g"], i["beta"],
                initial_state=state, output_final_state=True, cu_seqlens=bounds,
                state_v_first=True, enable_fwd_cp_cache=False,
            )  # fmt: skip

        return Call(
            run,
            lambda r: {"o": r[0], "state": r[1]},
            (pipeline.ROWS, pipeline.FRESH),
        )

    def _train(self, job: Job) -> Call:
        chunk = load(self.package).chunk_gated_delta_rule
        bounds = job.once("cu", lambda: job.inputs["cu_seqlens"].long())
        return training.call(job, lambda *leaves: chunk(*leaves, cu_seqlens=bounds)[0])

    def _layer(self, job: Job) -> Call:
        """FLA's convolution, l2 norm, gates and gated norm around FlashQLA's packed recurrence."""
        pipeline.borrowed()
        grid, cu = (job.case.batch, job.case.tokens), pipeline.bounds(job, torch.int64)
        chunk = load(self.package).chunk_gated_delta_rule
        unit = load("fla.modules.norm.l2norm").l2norm
        gates, state = pipeline.gates(job.inputs), job.rows()

        def rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            packed = (x.flatten(0, 1)[None] for x in (unit(q), unit(k), v, *gates(a, b)))
            o, after = chunk(
                *packed, initial_state=state, output_final_state=True, cu_seqlens=cu,
                state_v_first=True, enable_fwd_cp_cache=False,
            )  # fmt: skip
            return o[0].unflatten(0, grid), after

        return pipeline.whole(job, pipeline.convolution(job), rule, detail="with FLA")


def provider() -> FlashQla:
    return FlashQla()
