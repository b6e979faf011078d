"""What prefill's kernels round, emulated in float64 on a CPU: errors where keys are identical.

    python benchmarks/prefill_rounding.py [--tokens 192] [--decay 0.0]

The chunked form of docs/kernels/chunked.md with each operand of a product rounded as the kernels
do, or to more bits, beside the recurrence token by token; keys are given normalised in bfloat16,
beta = 1. A line is one way of rounding: errors of o for eight keys, and the largest of the state.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

BF16, F16 = torch.bfloat16, torch.float16
C, SIZE = 64, 128
Round = Callable[[Tensor], Tensor]


def bf16(x: Tensor) -> Tensor:
    return x.to(BF16).double()


def two_bf16(x: Tensor) -> Tensor:
    return bf16(x) + bf16(x - bf16(x))


def f16(x: Tensor) -> Tensor:
    """Each column, a value's, at a scale of its own."""
    scale = torch.exp2(torch.floor(torch.log2(x.abs().amax(0).clamp(min=1e-300))) - 13)
    return (x / scale).to(F16).double() * scale


WAYS: dict[str, tuple[Round, Round, Round]] = {
    # Ag, W, Vd for the state
    "as the kernels do": (bf16, bf16, bf16),
    "Ag and W in float16": (lambda x: x.to(F16).double(), f16, bf16),
    "Ag as two bfloat16": (two_bf16, bf16, bf16),
    "and Vd for the state": (two_bf16, bf16, two_bf16),
}


def inputs(tokens: int, decay: float, seed: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, SIZE, generator=random) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k[:1].expand_as(k)))
    g = -decay * torch.rand(tokens, generator=random).double()
    return bf16(q), bf16(k), bf16(v), g


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    S, o = torch.zeros(SIZE, SIZE).double(), []
    for q_t, k_t, v_t, g_t in zip(q, k, v, g, strict=True):
        S = S * g_t.exp()
        S = S + torch.outer(k_t, v_t - k_t @ S)
        o.append(q_t @ S)
    return torch.stack(o), S


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, way: tuple[Round, Round, Round]
) -> tuple[Tensor, Tensor]:
    round_a, round_w, round_vd = way
    S, o = torch.zeros(SIZE, SIZE).double(), []
    for q_c, k_c, v_c, g_c in zip(q.split(C), k.split(C), v.split(C), g.split(C), strict=True):
        gc = g_c.cumsum(0)
        G = torch.exp(gc[:, None] - gc[None, :]).tril()
        A = torch.linalg.inv(torch.eye(len(gc)).double() + (k_c @ k_c.T).tril(-1))
        low, past = bf16(S), gc.exp()[:, None]
        Vd = (round_a(G * A) @ round_w(v_c - past * (k_c @ low))).float().double()
        P = f16((G * (q_c @ k_c.T)).T).T
        o.append(bf16(past * (q_c @ low) + P @ f16(Vd)))
        S = gc[-1].exp() * S + k_c.T @ round_vd((gc[-1] - gc).exp()[:, None] * Vd)
        S = S.float().double()
    return torch.cat(o), S


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--decay", type=float, default=0.0, help="largest log decay of a token")
    args = parser.parse_args()
    cases = [inputs(args.tokens, args.decay, seed) for seed in range(8)]
    exact = [recurrence(*case) for case in cases]
    for name, way in WAYS.items():
        found = [chunked(*case, way) for case in cases]
        o = [error(a[0], b[0]) for a, b in zip(found, exact, strict=True)]
        state = max(error(a[1], b[1]) for a, b in zip(found, exact, strict=True))
        print(f"{name:22} o {' '.join(f'{e:.1e}' for e in o)}  state {state:.1e}", flush=True)


if __name__ == "__main__":
    main()
