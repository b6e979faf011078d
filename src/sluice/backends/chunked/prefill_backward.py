"""The chunked backward in plain torch, for every device: docs/kernels/backward.md.

Everything is a batched product over chunks and heads, except two walks over the chunks of a
sequence: the states before each chunk, computed again, and the gradients of the states after each
chunk, from the last. Both walks take two products per chunk.

    kin = e^γ K, qin = e^γ Q, kout = e^(γ_C − γ) K;  KKg, QKg as in the forward     (G1)
    A   = (I + strictLower(KKg) diag(beta))⁻¹,  U = A V,  W = A kin                  (G2)
    E   = U − W S,  D = beta E,  S <- e^γ_C S + koutᵀ D                              (G3)
    dD  = QKgᵀ dO + kout dS,  dS <- e^γ_C dS + qinᵀ dO − Wᵀ (beta dD)                (G4)
    dV  = Aᵀ (beta dD),  dbeta = Σ (dD − strictLower(KKg)ᵀ dV) ∘ E                   (G5)

Nothing is divided by beta, and only differences of γ are exponentiated: they are never positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.backends.chunked.prefill import CHUNKS
from sluice.backends.reference.backward import Gradients, Inputs, inputs, store

MOST_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Workspace of one group of heads, by device."""


def prefill_backward(p: Any, t: Any) -> None:
    """Serve the backward of ``prefill``."""
    t, call = inputs(p, t)
    store(p, t, call.x, chunked_backward(call))


def chunked_backward(call: Inputs) -> Gradients:
    """Gradients of all tokens and initial states, some heads at a time."""
    x = call.x
    C = CHUNKS["none" if x.g is None else "head" if x.g.dim() == 3 else "key"]
    (HV, V), (HK, K), HQ = x.v.shape[2:], x.k.shape[2:], x.q.shape[2]
    made = [None if y is None else y.new_zeros(y.shape) for y in x]
    dS = call.dfinal.clone()
    grid = _Grid.of(call, C)
    if grid.chunks == 0:
        return Gradients(*made, dS)
    each = _bytes_of_head(grid.chunks, C, K, V, x) * (HV // HK)
    most = MOST_BYTES.get(x.v.device.type, MOST_BYTES["cuda"])
    groups = max(1, min(HK, most // each))
    for first in range(0, HK, groups):
        heads = _Heads(first, min(first + groups, HK), HK, HV, HQ)
        _some_heads(call, grid, heads, made, dS)
    return Gradients(*made, dS)


class _Grid(NamedTuple):
    """Chunks of all sequences in a row: which token each place holds, and where tokens are."""

    C: int
    first: list[int]  # of each sequence: its first chunk
    counts: list[int]  # and how many it has
    states: list[int]  # and its state
    places: Tensor | None  # [chunks C]: the token in [B T] of each place, B T for none
    tokens: Tensor | None  # [B T]: the place of each token
    chunks: int

    @classmethod
    def of(cls, call: Inputs, C: int) -> _Grid:
        B, T = call.x.v.shape[:2]
        if len(call.spans) == 1 and call.spans[0][0] == slice(None):
            starts, lengths, states = [b * T for b in range(B)], [T] * B, list(range(B))
        else:
            starts = [start for _, start, _ in call.spans]
            lengths = [stop - start for _, start, stop in call.spans]
            states = [one.start for one, _, _ in call.spans]
        kept = [i for i, n in enumerate(lengths) if n > 0]
        starts, lengths, states = ([y[i] for i in kept] for y in (starts, lengths, states))
        counts = [-(-n // C) for n in lengths]
        first = [sum(counts[:i]) for i in range(len(counts))]
        total, device = sum(counts), call.x.v.device
        if all(n % C == 0 for n in lengths):  # tokens lie as chunks do
            return cls(C, first, counts, states, None, None, total)
        places = torch.full((total * C,), B * T, dtype=torch.int64)
        for start, n, at in zip(starts, lengths, first, strict=True):
            places[at * C : at * C + n] = torch.arange(start, start + n)
        tokens = torch.empty(B * T + 1, dtype=torch.int64)
        tokens[places] = torch.arange(total * C)
        return cls(C, first, counts, states, places.to(device), tokens[:-1].to(device), total)

    def spread(self, y: Tensor) -> Tensor:
        """[B, T, H, D] -> [H, chunks, C, D]; places without a token are zeros."""
        y = y.flatten(0, 1)
        if self.places is not None:
            y = torch.cat([y, y.new_zeros(1, *y.shape[1:])]).index_select(0, self.places)
        return y.unflatten(0, (self.chunks, self.C)).permute(2, 0, 1, 3).contiguous()

    def gather(self, y: Tensor) -> Tensor:
        """[H, chunks, C, D] -> [B T, H, D]."""
        y = y.permute(1, 2, 0, 3).flatten(0, 1)
        return y if self.tokens is None else y.index_select(0, self.tokens)

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Which states take part in each step of a walk, and which chunks they meet."""
        if len(set(self.counts)) == 1:
            n, total = self.counts[0], len(self.states)
            ids: Any = slice(0, total) if self.states == [*range(total)] else self.states
            yield from ((ids, slice(j, None, n)) for j in range(n))
            return
        for j in range(max(self.counts)):
            active = [i for i, n in enumerate(self.counts) if n > j]
            yield [self.states[i] for i in active], [self.first[i] + j for i in active]


class _Heads:
    """Some key heads, and the value and query heads that belong to them."""

    def __init__(self, first: int, stop: int, HK: int, HV: int, HQ: int) -> None:
        r = HV // HK
        self.k, self.v = slice(first, stop), slice(first * r, stop * r)
        self.r, self.HV = r, HV
        self.G = max(HQ // HV, 1)  # query heads per state
        # value heads that share a query head; heads of a group may share one with another group
        self.shared = max(HV // HQ, 1)
        self.q = (
            slice(self.v.start // self.shared, -(-self.v.stop // self.shared))
            if self.G == 1
            else slice(self.v.start * self.G, self.v.stop * self.G)
        )

    def read(self, q: Tensor) -> Tensor:
        """Query heads [.., q, D] of these value heads: [.., HV of these, G, D]."""
        if self.G > 1:
            return q[:, :, self.q].unflatten(2, (-1, self.G))
        index = [h // self.shared for h in range(self.v.start, self.v.stop)]
        return q[:, :, index].unsqueeze(3)


def _some_heads(call: Inputs, grid: _Grid, heads: _Heads, made: list[Any], dS: Tensor) -> None:
    x, C = call.x, grid.C
    k = grid.spread(x.k[:, :, heads.k]).repeat_interleave(heads.r, dim=0)
    v = grid.spread(x.v[:, :, heads.v])
    q_all = heads.read(x.q)
    qs = [grid.spread(y) for y in q_all.unbind(3)]
    out = call.do.unflatten(2, (heads.HV, heads.G))[:, :, heads.v]
    dos = [grid.spread(y) for y in out.unbind(3)]
    beta = None if x.beta is None else grid.spread(x.beta[:, :, heads.v].unsqueeze(-1))
    g = None
    if x.g is not None:
        g = x.g[:, :, heads.v]
        g = grid.spread(g if g.dim() == 4 else g.unsqueeze(-1))
    chunk = _Chunks(k, v, g, beta, C)
    S, E, D = chunk.states(grid, call.S[:, heads.v])
    parts = chunk.backward(grid, qs, dos, S, E, D, dS, heads.v)
    dq, dk, dv, dg, dbeta = parts
    dq = torch.stack([grid.gather(y) for y in dq], dim=2).flatten(1, 2)  # [B T, HV G, K]
    if heads.G == 1 and heads.shared > 1:
        index = [h // heads.shared for h in range(heads.v.start, heads.v.stop)]
        for i, h in enumerate(index):
            made[0].flatten(0, 1)[:, h] += dq[:, i]
    else:
        made[0].flatten(0, 1)[:, heads.q] = dq
    made[1].flatten(0, 1)[:, heads.k] = grid.gather(dk).unflatten(1, (-1, heads.r)).sum(2)
    made[2].flatten(0, 1)[:, heads.v] = grid.gather(dv)
    if dg is not None:
        by_head = made[3].dim() == 3
        made[3].flatten(0, 1)[:, heads.v] = (
            grid.gather(dg).squeeze(-1) if by_head else grid.gather(dg)
        )
    if dbeta is not None:
        made[4].flatten(0, 1)[:, heads.v] = grid.gather(dbeta).squeeze(-1)


class _Chunks:
    """All chunks of some value heads, [H, chunks, C, ..]."""

    def __init__(self, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, C: int) -> None:
        self.k, self.v, self.beta = k, v, beta
        low = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
        self.lower, self.strict = low, low.tril(-1)
        self.by_key = g is not None and g.shape[-1] > 1
        if g is None:
            self.gamma = None
            self.fade: Any = low.to(k.dtype)
            self.first: Any = 1.0
            self.last: Any = 1.0
            self.all: Any = 1.0
        else:
            # float64: a difference of long sums must keep the digits of a short one
            gamma = g.double().cumsum(2)
            self.gamma = gamma
            difference = gamma.unsqueeze(3) - gamma.unsqueeze(2)  # [H, M, C, C, 1 or K]
            fade = difference.masked_fill_(~low.unsqueeze(-1), float("-inf")).to(k.dtype).exp_()
            self.fade = fade if self.by_key else fade.squeeze(-1)
            self.first = gamma.to(k.dtype).exp()
            self.last = (gamma[:, :, -1:] - gamma).to(k.dtype).exp()
            self.all = gamma[:, :, -1].unsqueeze(-1).to(k.dtype).exp()  # [H, M, 1 or K, 1]
        self.kin, self.kout = self.first * k, self.last * k
        if beta is not None:
            self.kk = self.pairs(k).masked_fill_(~self.strict, 0)
            lower = self.kk * beta.mT
            one = torch.eye(C, dtype=k.dtype, device=k.device)
            self.A = torch.linalg.solve_triangular(lower, one, upper=False, unitriangular=True)

    def pairs(self, y: Tensor) -> Tensor:
        """[.., C, C]: y_i · k_j with the decay from j to i; 0 above the diagonal."""
        if self.by_key:
            return ((y.unsqueeze(3) * self.k.unsqueeze(2)) * self.fade).sum(-1)
        return (y @ self.k.mT) * self.fade

    def states(self, grid: _Grid, S: Tensor) -> tuple[Tensor, Any, Tensor]:
        """(G3): the states before each chunk [H, M, K, V], E and D [H, M, C, V]."""
        H, M = self.v.shape[:2]
        S = S.transpose(0, 1).clone()  # [H, N, K, V]
        kept = self.v.new_empty(H, M, *S.shape[2:])
        E, D = None, self.v
        if self.beta is not None:
            E = self.A @ self.v
            D = torch.empty_like(E)
            self.W = self.A @ self.kin
        kout, decay = self.kout, self.all
        for ids, at in grid.steps():
            one = S[:, ids]
            kept[:, at] = one
            if self.beta is not None:
                e = E[:, at] - self.W[:, at] @ one
                E[:, at] = e
                D[:, at] = self.beta[:, at] * e
            fade = decay if isinstance(decay, float) else decay[:, at]
            S[:, ids] = fade * one + kout[:, at].mT @ D[:, at]
        return kept, E, D

    def backward(
        self,
        grid: _Grid,
        qs: list[Tensor],
        dos: list[Tensor],
        S: Tensor,
        E: Any,
        D: Tensor,
        dS_all: Tensor,
        heads: slice,
    ) -> tuple[list[Tensor], Tensor, Tensor, Any, Any]:
        """(G4), (G5), and the rest of the gradients.

        ``dS_all`` [N, HV, ..] holds the gradients of final states, and then those of initial ones.
        """
        first, k = self.first, self.k
        qk = [self.pairs(q) for q in qs]
        dD = sum(y.mT @ do for y, do in zip(qk, dos, strict=True))
        came = sum((first * q).mT @ do for q, do in zip(qs, dos, strict=True))
        dS = self._walk_back(grid, dD, came, dS_all, heads)
        dV, dbeta = dD, None
        if self.beta is not None:
            dV = self.A.mT @ (self.beta * dD)
            dbeta = ((dD - self.kk.mT @ dV) * E).sum(-1, keepdim=True)
        # readers: what each token reads of the state before its chunk, and of tokens in it
        pairs, inter = 0.0, 0.0
        written = self.last * (D @ dS.mT)  # k as what is written to the state after the chunk
        kept = k * written
        dk = written
        if self.beta is not None:
            read = -first * (dV @ S.mT)
            H = (dV @ D.mT).neg_().masked_fill_(~self.strict, 0)
            dk_read, dk_write = self._products(H, k, k)
            dk = dk + read + dk_read + dk_write
            inter = k * read
            if self.by_key:
                inter = inter + k * dk_read - k * dk_write
            else:
                pairs = H * self.kk
        dqs = []
        for q, do, products in zip(qs, dos, qk, strict=True):
            N = (do @ D.mT).masked_fill_(~self.strict, 0)
            same = (do * D).sum(-1, keepdim=True)  # the diagonal: no decay lies between
            dq = first * (do @ S.mT)
            inter = inter + q * dq
            near, far = self._products(N, k, q)
            if self.by_key:
                inter = inter + q * near - k * far
            else:
                pairs = pairs + N * products
            dqs.append(dq + near + same * k)
            dk = dk + far + same * q
        return dqs, dk, dV, self._gates(pairs, inter, kept, S, dS), dbeta

    def _products(self, by: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of pairs y_i · k_j whose gradient is ``by``: the gradients of y_i and of k_j."""
        if self.by_key:
            weight = by.unsqueeze(-1) * self.fade
            return (weight * k.unsqueeze(2)).sum(3), (weight * y.unsqueeze(3)).sum(2)
        weight = by * self.fade
        return weight @ k, weight.mT @ y

    def _walk_back(
        self, grid: _Grid, dD: Tensor, came: Tensor, dS_all: Tensor, heads: slice
    ) -> Tensor:
        """(G4): dD completed in place; the gradients of the states after each chunk."""
        dS = dS_all[:, heads].transpose(0, 1).clone()
        kept = torch.empty_like(came)
        for ids, at in reversed(list(grid.steps())):
            one = dS[:, ids]
            kept[:, at] = one
            fade = self.all if isinstance(self.all, float) else self.all[:, at]
            more = dD[:, at] + self.kout[:, at] @ one
            dD[:, at] = more
            one = fade * one + came[:, at]
            if self.beta is not None:
                one = one - self.W[:, at].mT @ (self.beta[:, at] * more)
            dS[:, ids] = one
        dS_all[:, heads] = dS.transpose(0, 1)
        return kept

    def _gates(self, pairs: Any, inter: Any, kept: Tensor, S: Tensor, dS: Tensor) -> Tensor | None:
        """dg [H, M, C, 1 or K], summed in float64: what stands on both sides cancels exactly."""
        if self.gamma is None:
            return None
        whole = (S * dS).sum(-1).unsqueeze(2) * self.all.mT  # [H, M, 1, K]
        d = inter.double() - kept.double()
        end = kept.double().sum(2, keepdim=True) + whole.double()
        if not self.by_key:
            pairs = pairs.double()
            d = d.sum(-1, keepdim=True) + pairs.sum(-1, keepdim=True) - pairs.sum(-2).unsqueeze(-1)
            end = end.sum(-1, keepdim=True)
        return (d.flip(2).cumsum(2).flip(2) + end).to(S.dtype)


def _bytes_of_head(M: int, C: int, K: int, V: int, x: Any) -> int:
    """The workspace of one value head."""
    square = C * C * (K if x.g is not None and x.g.dim() == 4 else 1)
    size: int = x.v.element_size()
    return size * M * (10 * C * (K + V) + 3 * K * V + 6 * square)
