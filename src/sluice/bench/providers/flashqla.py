"""FlashQLA, the Qwen team's TileLang prefill; it has nothing else of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.bench.providers.base import Call, Job, Provider, RefusalError, load


class FlashQla(Provider):
    name = "flashqla"
    title = "FlashQLA"
    package = "flash_qla"
    distribution = "flash-qla"
    install = "pip install flash-qla tilelang==0.1.9"
    devices = ("cuda",)
    compiles_long = True

    def _prefill(self, job: Job) -> Call:
        c, i = job.case, job.inputs
        if c.K != 128 or c.V != 128:
            raise RefusalError(f"K and V must be 128, got {c.K} and {c.V}")
        if job.dtype not in (torch.bfloat16, torch.float16):
            raise RefusalError(f"bfloat16 or float16, got {job.dtype}")
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
            ("pool rows gathered", "the state comes back in a fresh tensor"),
        )


def provider() -> FlashQla:
    return FlashQla()
