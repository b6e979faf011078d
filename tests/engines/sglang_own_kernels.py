"""Steps with drafts by SGLang's own Triton kernels, which Triton interprets, and by the plug-in's.

``python -m tests.engines.sglang_own_kernels`` with TRITON_INTERPRET=1: SGLang's kernels must have
been imported so. Copying states into the pool is for a GPU in SGLang; the function that it has for
other states, with a form for a CPU, takes its place. In float32, because Triton's interpreter does
not round to bfloat16 as a GPU does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sluice.testing.compare import assert_same_bits, assert_within, tolerance
from tests import interpreter
from tests.engines.sglang_server import Drafts, Server, hybrid

T = 4
LIVE = [3, 5, 7]
"""Slots of two requests, and of the first one's prefix."""


class Seen(NamedTuple):
    """What a server with drafts computed and left."""

    outputs: list[Tensor]
    windows: Tensor
    states: Tensor


def scatter(
    mamba_caches,
    state_indices_tensor,
    last_correct_step_indices,
    mamba_track_indices,
    mamba_steps_to_track,
    src_indices_raw=None,
) -> None:
    """SGLang's function of this name, on a CPU."""
    copy = hybrid.HybridLinearAttnBackend._scatter_speculative_state_with_mask
    for slots, steps in (
        (state_indices_tensor, last_correct_step_indices),
        (mamba_track_indices, mamba_steps_to_track),
    ):
        if slots is not None:
            copy(mamba_caches.temporal, mamba_caches.intermediate_ssm, slots, steps)
            windows = mamba_caches.intermediate_conv_window[0]
            copy(mamba_caches.conv[0], windows, slots, steps)


def run(verify_backend: str | None, state_dtype: torch.dtype) -> Seen:
    """Prompts, drafts, a decode step and drafts again, of two requests."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    server = Server(
        4,
        layers=(0, 2),
        drafts=Drafts(T, state_dtype),
        W=4,
        linear_attn_verify_backend=verify_backend,
    )
    outputs = []

    def step(mode: ForwardMode, requests: list[int], before: list[int], new: list[int]) -> None:
        slots = [{1: 3, 2: 5}[request] for request in requests]
        batch = server.batch(mode, requests, slots, before, new)
        server.backend.init_forward_metadata(batch)
        for layer in server.layers:
            out = server.forward(batch, *server.inputs(sum(new)), layer)
            outputs.append(out.clone())

    step(ForwardMode.EXTEND, [1, 2], [0, 0], [5, 9])
    step(ForwardMode.TARGET_VERIFY, [1, 2], [5, 9], [T, T])
    server.commit(torch.tensor([1, 3]), torch.tensor([7, 6]), torch.tensor([0, -1]))
    step(ForwardMode.DECODE, [1, 2], [7, 13], [1, 1])
    step(ForwardMode.TARGET_VERIFY, [2, 1], [14, 8], [T, T])
    server.commit(torch.tensor([0, 2]))
    caches = server.runner.req_to_token_pool.mamba_pool.mamba_cache
    assert caches.intermediate_conv_window[0].any() == (verify_backend is not None)
    server.close()
    return Seen(outputs, caches.conv[0], caches.temporal)


def main() -> None:
    interpreter.hasten()
    hybrid.scatter_mamba_states_after_mtp_verify = scatter
    for state_dtype in (torch.float32, torch.bfloat16):
        limit = 10 * tolerance(torch.float32, state_dtype)
        own, mine = run("triton", state_dtype), run(None, state_dtype)
        assert_same_bits(mine.windows[:, LIVE], own.windows[:, LIVE], "windows")
        states = own.states[:, LIVE].double()
        assert_within(mine.states[:, LIVE].double(), states, limit, name="states")
        for i, (a, b) in enumerate(zip(mine.outputs, own.outputs, strict=True)):
            assert_within(a.double(), b.double(), limit, name=f"outputs {i}")
        for seen in (own, mine):
            assert seen.states[:, 6].isnan().all(), "a prefix that nobody asked for"


if __name__ == "__main__":
    main()
