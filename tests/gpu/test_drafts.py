"""Drafts as engines keep them, in a captured graph: replayed with other slots and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sluice
from sluice.testing.compare import assert_same_bits

pytestmark = pytest.mark.gpu

HK, HV, K, W, N, T, P, LAYERS = 2, 4, 128, 4, 4, 4, 24, 3
D = (2 * HK + HV) * K
BATCHES = (  # slots with padding, how many tokens count, the column at which windows start
    ([3, 1, 7, 5], [4, 1, 2, 3], [0, 1, 2, 3]),
    ([2, 0, 0, 9], [2, 0, 0, 4], [3, 0, 0, 1]),
    ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def index(values: Any) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


class Step:
    """One engine step of all layers, on tensors that a graph can hold."""

    def __init__(self, state_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.state = randn(LAYERS, P, HV, K, K, dtype=torch.float32).mul(0.1).to(state_dtype)
        self.conv = randn(LAYERS, P, D, W - 1)
        self.wide = randn(LAYERS, P, D, W - 2 + T)
        self.x, self.weight = randn(LAYERS, N, T, D), randn(D, W)
        self.gates = {"a": randn(N, T, HV), "b": randn(N, T, HV)}
        self.gates |= {"A_log": randn(HV), "dt_bias": randn(HV)}
        self.slots, self.counts, self.start = index([0] * N), index([0] * N), index([0] * N)
        self.writes = index([[0] * T] * N)
        lead = (LAYERS, P, T)
        self.buffers = sluice.DraftBuffers(
            torch.zeros(*lead, HK, K, device="cuda"), torch.zeros(*lead, HV, K, device="cuda"),
            torch.zeros(*lead, HV, device="cuda"), torch.zeros(*lead, D, device="cuda").bfloat16(),
        )  # fmt: skip

    def set(self, slots: list[int], counts: list[int], start: list[int]) -> None:
        own = [[s, *(10 + 3 * i + t for t in range(T - 1))] for i, s in enumerate(slots)]
        own = [row if row[0] > 0 else [0] * T for row in own]
        for buffer, values in (
            (self.slots, slots), (self.counts, counts), (self.start, start), (self.writes, own),
        ):  # fmt: skip
            buffer.copy_(index(values))

    def tokens(self, i: int, backend: str, **where: Any) -> tuple[Any, ...]:
        return sluice.conv_qkv(
            self.x[i], self.weight, num_k_heads=HK, num_v_heads=HV, slots=self.slots, pad_slot=0,
            backend=backend, **self.gates, **where,
        )  # fmt: skip

    def buffered(self, backend: str) -> list[Tensor]:
        """verify into buffers, and one commit for all layers."""
        where: dict[str, Any] = {"slots": self.slots, "pad_slot": 0, "backend": backend}
        outs = []
        for i in range(LAYERS):
            tokens = self.tokens(i, backend, state=self.conv[i], freeze=True)
            o, _ = sluice.verify(
                *tokens, state=self.state[i], conv_inputs=self.x[i], conv_state=self.conv[i],
                buffers=self.buffers.layer(i), **where,
            )  # fmt: skip
            outs.append(o)
        sluice.commit_layers(
            self.buffers, self.counts, state=self.state, conv_state=self.conv, **where
        )
        return outs

    def each(self, backend: str) -> list[Tensor]:
        """A state for each token, and windows at a column."""
        outs = []
        for i in range(LAYERS):
            tokens = self.tokens(i, backend, state=self.wide[i], window_start=self.start)
            o, _ = sluice.decode(
                *tokens, state=self.state[i], slots=self.slots, write_slots=self.writes,
                pad_slot=0, backend=backend,
            )  # fmt: skip
            outs.append(o)
        return outs

    def pools(self) -> list[Tensor]:
        return [self.state, self.conv, self.wide]


@pytest.mark.parametrize("way", ["buffered", "each"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_serves_other_slots_and_counts(way, state_dtype):
    replayed, eager = Step(state_dtype), Step(state_dtype)
    run = getattr(replayed, way)
    run("triton")  # all rows are padding: nothing is written
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run("triton")
    for batch in BATCHES:
        replayed.set(*batch)
        eager.set(*batch)
        graph.replay()
        with sluice.validate():
            expected = getattr(eager, way)("triton")
        for i, (o, o2) in enumerate(zip(outs, expected, strict=True)):
            assert_same_bits(o, o2, f"o of layer {i}")
        for a, b in zip(replayed.pools(), eager.pools(), strict=True):
            assert_same_bits(a, b, "a pool")


def test_one_launch_commits_all_layers():
    step = Step(torch.float32)
    step.set(*BATCHES[0])
    step.buffered("triton")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        sluice.commit_layers(
            step.buffers, step.counts, state=step.state, conv_state=step.conv, slots=step.slots,
            pad_slot=0, backend="triton",
        )  # fmt: skip
        torch.cuda.synchronize()
    kernels = [e for e in watched.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [e.name for e in kernels]
