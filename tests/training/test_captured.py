"""A training step in a CUDA graph, replayed with other tensors and other lengths."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.testing.compare import assert_same_bits
from tests.suite import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning"),
]
T, HK, HV, K = 300, 2, 4, 128
BORDERS = ([0, 100, 300], [0, 0, 213])
"""Two sequences, by whose lengths the graph is captured and replayed; the last leaves a rest."""
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


def drawn(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, g, beta, and the gradient of the output."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, generator=gen, device="cuda")

    q, k, v, do = (randn(heads, K).to(dtype) for heads in (HK, HK, HV, HV))
    return [q, k, v, -0.1 * randn(HV).abs(), randn(HV).sigmoid(), do]


def step(x: list[torch.Tensor], borders: torch.Tensor, backend: str) -> list[torch.Tensor]:
    *leaves, do = x
    leaves = [y.requires_grad_() for y in leaves]
    o, _ = sluice.prefill(*leaves, cu_seqlens=borders, normalize_qk=True, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


BACKENDS = {"triton": (torch.bfloat16, torch.float32), "hopper": (torch.bfloat16, torch.float16)}
SERVED = backends("prefill_backward")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, dtype) for name, dtypes in BACKENDS.items() if name in SERVED for dtype in dtypes],
    ids=str,
)
def test_a_captured_step_replays_with_other_tensors_and_lengths(backend, dtype):
    x, borders = drawn(0, dtype), torch.tensor(BORDERS[0], dtype=torch.int32, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([y.clone() for y in x], borders, backend)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = step(x, borders, backend)
    for seed, lengths in ((1, BORDERS[1]), (0, BORDERS[0]), (2, BORDERS[1])):
        other, told = drawn(seed, dtype), torch.tensor(lengths, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            for buffer, y in zip(x, other, strict=True):
                buffer.copy_(y)
            borders.copy_(told)
        for y in found:
            y.fill_(float("nan"))
        graph.replay()
        for name, a, b in zip(NAMES, found, step(other, told, backend), strict=True):
            assert_same_bits(a, b, f"{name}, seed {seed}")
