"""Prefill of 16-bit inputs where keys repeat: errors, and what hard chunks cost.

    PYTHONPATH=src python benchmarks/gpu_repeats.py [--backends hopper,triton] [--tokens 1000]

Errors of o and of the final state against the recurrence in float64, for ten kinds of keys and five
betas (0: random), each a value head of one call: the worst, and each line with one above 6e-3. Then
microseconds for a prompt of 8,192 tokens whose chunks are ordinary, half of them hard, or all.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import sluice
from sluice.testing import oracle

KEYS = ("identical", "longer", *(f"cosine {x}" for x in (0.99, 0.97, 0.9, 0.6)))
KEYS += ("every 3", "every 4", "every 16", "random")
BETAS = (1.0, 0.9, 0.6, 0.3, 0.0)
K = 128


def keys_of(kind: str, tokens: int) -> Tensor:
    """Keys [tokens, K]; ``longer``: identical, with |k|² = 1.0036."""
    k = normalize(torch.randn(tokens, K), dim=-1)
    name, _, number = kind.partition(" ")
    if name in ("identical", "longer"):
        return k[:1].expand_as(k) * (1.0018 if name == "longer" else 1.0)
    if name == "cosine":
        part = float(number)
        return normalize(part**0.5 * k[:1] + (1 - part) ** 0.5 * k, dim=-1)
    return k[torch.arange(tokens) % int(number)] if name == "every" else k


def call_of(tokens: int, dtype: torch.dtype, decay: float, *, norm: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    HK, HV = len(KEYS), len(KEYS) * len(BETAS)
    k = torch.stack([keys_of(kind, tokens) for kind in KEYS], 1)
    beta = torch.tensor(BETAS).repeat(HK).expand(tokens, HV)
    call = {
        "q": normalize(torch.randn(tokens, HK, K), dim=-1).to(dtype),
        "k": (2 * k if norm else k).to(dtype),
        "v": torch.randn(tokens, HV, K).to(dtype),
        "g": -decay * torch.rand(tokens, HV),
        "beta": torch.where(beta > 0, beta, torch.rand(tokens, HV)),
    }
    call = {name: x[None].contiguous().cuda() for name, x in call.items()}
    return call | {"state": 0.1 * torch.randn(1, HV, K, K).cuda(), "normalize_qk": norm}


def errors(found: Tensor, exact: Tensor, dim: int) -> Tensor:
    rows = [x.double().movedim(dim, 0).flatten(1) for x in (found, exact)]
    return (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1)


def check(backend: str, tokens: int, dtype: torch.dtype, decay: float, *, norm: bool) -> None:
    call = call_of(tokens, dtype, decay, norm=norm)
    exact_o, exact_state = oracle.delta(**call)
    o, state = sluice.prefill(**(call | {"state": call["state"].clone()}), backend=backend)
    of_o = errors(o, exact_o.double(), 2).view(len(KEYS), -1)
    of_state = errors(state, exact_state.double(), 1).view(len(KEYS), -1)
    how = f"{str(dtype)[6:]}, log decays to -{decay}{', normalised inside' if norm else ''}"
    print(f"{backend}, {how}: o {of_o.max():.1e}, state {of_state.max():.1e}", flush=True)
    for kind, a, b in zip(KEYS, of_o.tolist(), of_state.tolist(), strict=True):
        if max(a + b) > 6e-3:
            pairs = zip(BETAS, a, b, strict=True)
            print("   ", kind, "  ".join(f"beta {x}: {y:.1e} {z:.1e}" for x, y, z in pairs))


def timed(backend: str, hard: float) -> float:
    """Microseconds of 8,192 tokens, 16/32 heads; ``hard``: the part of chunks with equal keys."""
    torch.manual_seed(0)
    tokens, HK, HV = 8192, 16, 32
    k = normalize(torch.randn(tokens // 64, 64, HK, K), dim=-1)
    k[: round(hard * len(k))] = k[: round(hard * len(k)), :1]
    k = k[torch.randperm(len(k))].view(1, tokens, HK, K)
    q, v = torch.randn(1, tokens, HK, K), torch.randn(1, tokens, HV, K)
    call: dict[str, Any] = {
        name: x.to(torch.bfloat16).cuda()
        for name, x in (("q", normalize(q, dim=-1)), ("k", k), ("v", v))
    }
    call |= {"g": -0.1 * torch.rand(1, tokens, HV).cuda(), "beta": torch.rand(1, tokens, HV).cuda()}
    call["state"] = torch.zeros(1, HV, K, K).cuda()
    sluice.prefill(**call, backend=backend)
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(True) for _ in range(2))
    with torch.cuda.graph(graph):
        sluice.prefill(**call, backend=backend)
    found = []
    for _ in range(13):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="hopper,triton")
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.tokens} tokens")
    for backend in args.backends.split(","):
        for dtype, decay, norm in (
            (torch.bfloat16, 0.0, False),
            (torch.bfloat16, 0.015, True),
            (torch.float16, 0.0, False),
        ):
            check(backend, args.tokens, dtype, decay, norm=norm)
        parts = "  ".join(f"{part:.0%} hard {timed(backend, part):.0f}" for part in (0, 0.5, 1))
        print(f"{backend}, 8,192 tokens, 16/32 heads, µs: {parts}", flush=True)


if __name__ == "__main__":
    main()
