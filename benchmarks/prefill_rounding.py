"""What prefill's kernels round, emulated in float64 on a CPU: errors where keys repeat.

    python benchmarks/prefill_rounding.py [--tokens 256] [--decay 0.0]

The chunked form of docs/kernels/chunked.md with each operand of a product rounded as the kernels do
in ordinary chunks and in hard ones, and in bfloat16 alone, beside the recurrence token by
token; keys are given normalised in bfloat16. A line is one kind of keys and one beta (0: random):
pairs of tokens of the first chunk with a cosine of 0.9 or more, of which 64 make it hard, and for
each way the largest errors of o and of the state over four draws.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

BF16, F16 = torch.bfloat16, torch.float16
C, SIZE, BLOCK = 64, 128, 16
KEYS = (
    "identical",
    "cosine 0.97",
    "cosine 0.9",
    "cosine 0.85",
    "cosine 0.5",
    "every 4",
    "every 16",
    "random",
)
BETAS = (1.0, 0.9985, 0.9, 0.6, 0.3, 0.0)
Round = Callable[[Tensor], Tensor]


def bf16(x: Tensor) -> Tensor:
    return x.to(BF16).double()


def two_bf16(x: Tensor) -> Tensor:
    return bf16(x) + bf16(x - bf16(x))


def f16(x: Tensor) -> Tensor:
    """Each column, a value's, at a scale of its own."""
    scale = torch.exp2(torch.floor(torch.log2(x.abs().amax(0).clamp(min=1e-300))) - 13)
    return (x / scale).to(F16).double() * scale


def compensated(Ag: Tensor, gc: Tensor) -> Tensor:
    """Ag in float16, a column's errors in each block of rows taken up by the block's last row."""
    found = Ag.to(F16).double()
    for first in range(0, len(Ag), BLOCK):
        last = min(first + BLOCK, len(Ag)) - 1
        error = (Ag - found)[first:last] * torch.exp(gc[last] - gc[first:last])[:, None]
        found[last] = (Ag[last] + error.sum(0)).to(F16).double()
    return found


class Way(NamedTuple):
    """How Ag, W, and Vd for the state are rounded; whether W has beta, or Ag."""

    late_beta: bool
    Ag: Callable[[Tensor, Tensor], Tensor]
    W: Round
    Vd: Round


WAYS = {
    "bfloat16": Way(False, lambda x, _: bf16(x), bf16, bf16),
    "ordinary": Way(True, lambda x, _: bf16(x), bf16, bf16),
    "hard": Way(True, compensated, f16, two_bf16),
}


def inputs(tokens: int, decay: float, kind: str, beta: float, seed: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, SIZE, generator=random) for _ in range(3))
    name, _, number = kind.partition(" ")
    if name == "identical":
        k = k[:1].expand_as(k)
    elif name == "cosine":
        part = float(number)
        k = math.sqrt(part) * normalize(k[:1], dim=-1) + math.sqrt(1 - part) * normalize(k, dim=-1)
    elif name == "every":
        k = k[torch.arange(tokens) % int(number)]
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    g = -decay * torch.rand(tokens, generator=random).double()
    betas = torch.full((tokens,), beta) if beta else torch.rand(tokens, generator=random)
    return bf16(q), bf16(k), bf16(v), g, betas.double()


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    S, o = torch.zeros(SIZE, SIZE).double(), []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        S = S * g_t.exp()
        S = S + torch.outer(k_t, beta_t * (v_t - k_t @ S))
        o.append(q_t @ S)
    return torch.stack(o), S


def chunked(
    way: Way, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    S, o = torch.zeros(SIZE, SIZE).double(), []
    for chunk in zip(*(x.split(C) for x in (q, k, v, g, beta)), strict=True):
        q_c, k_c, v_c, g_c, beta_c = chunk
        gc = g_c.cumsum(0)
        G = torch.exp(gc[:, None] - gc[None, :]).tril()
        M = (beta_c[:, None] * (k_c @ k_c.T)).tril(-1)
        A = torch.linalg.inv(torch.eye(len(gc)).double() + M)
        low, past = bf16(S), gc.exp()[:, None]
        W = v_c - past * (k_c @ low)
        Ag = G * A if way.late_beta else G * A * beta_c
        W = beta_c[:, None] * W if way.late_beta else W
        Vd = (way.Ag(Ag, gc) @ way.W(W)).float().double()
        P = f16((G * (q_c @ k_c.T)).T).T
        o.append(bf16(past * (q_c @ low) + P @ f16(Vd)))
        S = gc[-1].exp() * S + k_c.T @ way.Vd((gc[-1] - gc).exp()[:, None] * Vd)
        S = S.float().double()
    return torch.cat(o), S


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--decay", type=float, default=0.0, help="largest log decay of a token")
    args = parser.parse_args()
    for kind in KEYS:
        for beta in BETAS:
            draws = [inputs(args.tokens, args.decay, kind, beta, seed) for seed in range(4)]
            exact = [recurrence(*draw) for draw in draws]
            k = draws[0][1][:C]
            pairs = int(((k @ k.T).abs() > 0.9).tril(-1).sum())
            line = f"{kind:12} beta {beta:<6}  pairs {pairs:4} "
            for name, way in WAYS.items():
                pairs_of = zip((chunked(way, *draw) for draw in draws), exact, strict=True)
                errors = [[error(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs_of]
                o, S = (max(column) for column in zip(*errors, strict=True))
                line += f"  {name} {o:.1e} {S:.1e}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
