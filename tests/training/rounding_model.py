"""A model of what the backward of prefill rounds with bfloat16, in float64: no test.

    python -m tests.training.rounding_model 600

draws calls for so many seconds of a processor and says how many have a gradient above its bound:
with what hard chunks keep in two terms, and (before) with states, Bg and its operands rounded there
too, and chunks hard by their keys alone. Draws of which float32 has no digits either are counted
apart.

    python -m tests.training.rounding_model corners

says how seldom the gradients of gates vanish in calls without states, were no sequence hard for
having FEW_GATES or few heads. docs/kernels/backward.md cites what both said.
"""
# ruff: noqa: T201

from __future__ import annotations

import collections
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.training.calls import HALF, Call

C, FEW_GATES, MANY_HEADS = 64, 512, 4
Round = Callable[[Tensor], Tensor]


def once(x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16).double()


def twice(x: Tensor) -> Tensor:
    return once(x) + once(x - once(x))


def exactly(x: Tensor) -> Tensor:
    return x


def scaled(x: Tensor, dims: Any, terms: int = 1) -> Tensor:
    """A sum of float16 terms, over a power of two."""
    most = x.abs().amax(dims, keepdim=True).clamp(min=1e-300)
    power = torch.exp2(torch.floor(torch.log2(most)) - 13)
    made, left = torch.zeros_like(x), x / power
    for _ in range(terms):
        term = left.float().to(torch.float16).double()
        made, left = made + term, left - term
    return made * power


def make(seeds: range, call: Call) -> dict[str, Tensor]:
    """Inputs of one key head, with a row for each seed and value head."""
    rows: dict[str, list[Tensor]] = collections.defaultdict(list)
    for seed in seeds:
        leaves, _ = call.make(torch.bfloat16, seed=seed)
        x = {n: y.detach().double() for n, y in leaves.items()}
        gen = torch.Generator().manual_seed(seed + 1)
        do = torch.randn(1, call.T, call.HV, call.V, generator=gen).to(torch.bfloat16).double()
        dfinal = torch.randn(1, call.HV, call.V, call.K, generator=gen).double()
        for h in range(call.HV):
            for n in ("q", "k"):
                rows[n].append(x[n][0, :, 0])
            for n in ("v", "g", "beta"):
                rows[n].append(x[n][0, :, h])
            rows["S"].append(
                x["initial_state"][0, h] if call.state else torch.zeros(call.V, call.K)
            )
            rows["do"].append(do[0, :, h])
            rows["dS"].append(dfinal[0, h] * call.state)
    return {n: torch.stack(y).double() for n, y in rows.items()}


def repeats(k: Tensor, r: Tensor) -> bool:
    n = k.shape[1]
    close = (k @ k.mT * r[:, :, None] * r[:, None, :]).abs().tril(-1) >= 0.9
    pairs = close.sum((-1, -2))
    return bool(((pairs > 0) & (pairs >= n - 1)).all())


def gradients(
    x: dict[str, Tensor], heads: int, rounds: bool, now: bool = True
) -> dict[str, Tensor]:
    """By chunks, docs/kernels/backward.md; ``rounds``: as the kernels do."""
    q, k, v, g, beta, do = (x[n] for n in ("q", "k", "v", "g", "beta", "do"))
    T, scale = q.shape[1], q.shape[2] ** -0.5
    r_q, r_k = ((y.square().sum(-1) + 1e-6).rsqrt() for y in (q, k))
    S, dS, kept = x["S"].mT, x["dS"].mT, []
    all_hard = heads < MANY_HEADS or T * heads <= FEW_GATES or bool(S.any()) or bool(dS.any())
    for a in range(0, T, C):
        c = slice(a, min(a + C, T))
        m = c.stop - a
        hard = repeats(k[:, c], r_k[:, c]) or (now and (m == 1 or all_hard))
        term: Round = (twice if hard else once) if rounds else exactly
        state: Round = (twice if hard and now else once) if rounds else exactly
        gc = g[:, c].cumsum(1)
        fade = (gc[:, :, None] - gc[:, None, :]).clamp(max=0).exp().tril()
        G = (k[:, c] @ k[:, c].mT * r_k[:, c, None] * r_k[:, None, c]).tril(-1)
        B = fade * (G @ torch.linalg.inv(torch.eye(m).to(G) + beta[:, c, None] * G))
        reads, writes = gc.exp() * r_k[:, c], (gc[:, -1:] - gc).exp() * r_k[:, c]
        E = v[:, c] - reads[:, :, None] * (k[:, c] @ state(S))
        given = E * beta[:, c, None]
        if rounds:
            terms = 2 if hard and now else 1
            B, given = scaled(B, (1, 2), terms), scaled(given, 1, terms)
        E = E - B @ given
        kept.append((c, term, state, hard, gc, fade, B, reads, writes, E, S))
        d = E * (beta[:, c] * writes)[:, :, None]
        S = S * gc[:, -1].exp()[:, None, None] + k[:, c].mT @ term(d)
    made = {n: torch.zeros_like(x[n]) for n in ("q", "k", "v", "g", "beta")}
    for c, term, state, hard, gc, fade, B, reads, writes, E, S in reversed(kept):
        q_c, k_c, do_c, b = q[:, c], k[:, c], do[:, c], beta[:, c]
        one: Round = once if rounds else exactly
        asks = gc.exp() * r_q[:, c] * scale
        P = term(q_c @ k_c.mT * fade * (r_q[:, c] * scale)[:, :, None] * r_k[:, None, c])
        dD = P.mT @ do_c + writes[:, :, None] * (k_c @ term(dS))
        given = dD * b[:, :, None]
        if rounds:
            given = scaled(given, 1, 2 if hard and now else 1)
        Y = dD - B.mT @ given
        dV, after = Y * b[:, :, None], dS
        dS = dS * gc[:, -1].exp()[:, None, None] - k_c.mT @ term(dV * reads[:, :, None])
        dS = dS + q_c.mT @ term(do_c * asks[:, :, None])
        N, H = do_c @ term(E).mT, term(Y) @ term(E).mT
        made["v"][:, c], made["beta"][:, c] = one(dV), H.diagonal(dim1=1, dim2=2)
        written = (b * r_k[:, c])[:, None, :]
        H = -(H * fade * (b * r_k[:, c])[:, :, None] * written).tril(-1)
        pairs = (N * P * b[:, None, :] + H * (k_c @ k_c.mT)).tril(-1)
        N = N * fade * (r_q[:, c] * scale)[:, :, None] * written
        read_q = (do_c @ state(S).mT) * asks[:, :, None]
        write = (term(E) @ state(after).mT) * (b * writes)[:, :, None]
        Y = (state if rounds else exactly)(Y)
        read = -(Y @ state(S).mT) * (b * reads)[:, :, None]
        wrote, asked = (write * k_c).sum(-1), (read * k_c).sum(-1) + (read_q * q_c).sum(-1)
        before = pairs.cumsum(2).roll(1, 2)
        before[:, :, 0] = 0
        dg = before.tril().sum(1) + wrote.cumsum(1) - wrote + asked.flip(1).cumsum(1).flip(1)
        overlap = (state(S) * state(after)).sum((1, 2)) * gc[:, -1].exp()
        made["g"][:, c] = dg + overlap[:, None]
        H = one(H)
        for name, dx, y, r in (
            ("q", read_q + term(N) @ k_c, q_c, r_q[:, c]),
            ("k", write + read + (H + H.mT) @ k_c + one(N).mT @ q_c, k_c, r_k[:, c]),
        ):
            made[name][:, c] = dx - y * ((dx * y).sum(-1) * r * r)[:, :, None]
    return made | {"S": dS.mT}


def errors(found: Tensor, exact: Tensor, heads: int) -> Tensor:
    """The relative error of each draw of so many heads."""
    found, exact = (y.reshape(y.shape[0] // heads, -1) for y in (found, exact))
    return torch.nan_to_num((found - exact).norm(dim=1) / exact.norm(dim=1), nan=0.0, posinf=99.0)


def over_bounds(
    found: dict[str, Tensor], exact: dict[str, Tensor], heads: int, given: bool
) -> Tensor:
    """The error of each gradient of each draw, over its bound."""
    each = [errors(found[n], exact[n], heads) / HALF.get(n, 6e-3) for n in exact]
    return torch.stack(
        [x if given or n != "S" else 0 * x for n, x in zip(exact, each, strict=True)]
    )


LENGTHS = [1, 2, 7, 63, 64, 65, 66, 70, 96, 127, 128, 129, 200, 500]
KEYS = ["identical", "repeated", "correlated", "random"]
RATES = [0.0, 1e-4, 0.01, 0.05, 0.3, 1.0, 5.0, 20.0]
BETAS = ["one", "random", "zero", "small", 0.9, 0.5]


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    drawn, start = random.Random(7), time.process_time()
    table: dict[Any, list[Any]] = collections.defaultdict(lambda: [0, 0, 0.0, ""])
    while time.process_time() - start < seconds:
        T = drawn.choice([*LENGTHS, *([4097] if drawn.random() < 0.15 else [])])
        keys, rate, beta = drawn.choice(KEYS), drawn.choice(RATES), drawn.choice(BETAS)
        heads, seed = drawn.choice([1, 2, 3, 4, 8, 16]), drawn.randrange(10**6)
        count = 2 if T > 500 else 4 if heads >= 8 else 8
        given = drawn.random() < 0.5
        call = Call("", B=1, T=T, HQ=1, HK=1, HV=heads, K=128, V=128)
        call = call.of(keys=keys, rate=rate, beta=beta, state=given)
        x = make(range(seed, seed + count), call)
        exact = gradients(x, heads, False)
        single = gradients({n: y.float() for n, y in x.items()}, heads, False)
        lost = (over_bounds(single, exact, heads, given) > 1).any(0)
        length = "1 to 64" if T <= C else "65 to 200" if T <= 200 else "500, 4,097"
        for now in (False, True):
            error = over_bounds(gradients(x, heads, True, now), exact, heads, given)
            for draw in range(count):
                kind = "random keys" if keys == "random" else "keys repeat"
                kind = "beyond float32" if lost[draw] else kind
                states, when = "states" if given else "no states", "now" if now else "before"
                row = table[kind, length, heads, states, when]
                most, n = error[:, draw].max(0)
                row[0] += 1
                row[1] += int(most > 1)
                if most > row[2]:
                    said = f"{T} tokens, {keys}, decay {rate}, beta {beta}"
                    row[2:] = [float(most), f"d{list(exact)[n]} {most:.2g} of its bound: {said}"]
    for (kind, length, heads, states, when), (count, over, _, worst) in sorted(table.items()):
        where = f"{kind}; {length} tokens; {heads} heads; {states}"
        print(f"{where}; {when}: {over} of {count}; {worst}")


def corners(calls: int = 50_000) -> None:
    """Random keys, and heads with keys of their own; calls of heads drawn from them."""
    torch.set_num_threads(1)
    print("tokens, decay, beta, heads drawn from; for calls of 1, 2, .. of them: percent above")
    print("the bound of dg, and the furthest, over its bound")
    for T, rate, beta in itertools.product((16, 65, 128, 520), (0.0, 20.0), ("one", "random")):
        size = max(128, 2**15 // T)
        call = Call("", B=1, T=T, HQ=1, HK=1, HV=1, K=128, V=128, rate=rate, beta=beta, state=False)
        x = make(range(size), call)
        exact, found = (gradients(x, FEW_GATES, rounds)["g"] for rounds in (False, True))
        off, norm = (found - exact).square().sum(1), exact.square().sum(1)
        said = [f"{T}, {rate:g}, {beta}, {size}"]
        gen = torch.Generator().manual_seed(0)
        for heads in (1, 2, 3, 4, 8, 32):
            drawn = torch.randint(size, (calls, heads), generator=gen)
            error = (off[drawn].sum(1) / norm[drawn].sum(1)).sqrt() / HALF["g"]
            said.append(f"{heads}: {100 * (error > 1).double().mean():.2g}, {error.max():.2f}")
        print("; ".join(said), flush=True)


if __name__ == "__main__":
    corners() if sys.argv[1] == "corners" else main(float(sys.argv[1]))
