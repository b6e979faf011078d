"""The exact transition of a piece of a sequence, made by the operator itself.

Whatever the rule, the state after a piece is affine in the state S before it, and so is every
output (per value head, S of shape [K, V]; docs/distributed.md):

    S_out = M S + S_zero                                                              (X1)
    o_t   = o_zero_t + S^T u_t                                                        (X2)

With the delta rule, M is the recurrence run on the identity with v = 0, and u_t is the output of
that run. So ``delta_piece`` runs ``prefill`` once with every value head twice: the head itself from
a zero state, and the same head with v = 0 and the identity as its state. Nothing is approximated,
and the operator multiplies the keys as it always does. Without the delta rule, M is the decay
alone, a diagonal, and u_t is the decayed query: ``decay_piece`` needs no second head.

States are kept as X = S^T [V, K], the "vk" layout: X_out = X M^T + X_zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sluice import ops

SPAN = 8192  # tokens corrected at a time; limits the workspace of (X2)
EPS = 1e-6  # of the l2 norm, as in the contract


class Call(NamedTuple):
    """The tensors of one prefill, [B, T, ..], and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    options: dict[str, Any]

    @property
    def delta(self) -> bool:
        return self.beta is not None

    @property
    def width(self) -> int:
        """Rows of a transition below the V rows of a state: K for a matrix, 1 for a diagonal."""
        return self.k.shape[-1] if self.delta else 1

    @property
    def exact(self) -> torch.dtype:
        """The dtype of states between pieces."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    def span(self, start: int, stop: int) -> Call:
        """Some of the tokens, as views."""
        q, k, v = (x[:, start:stop] for x in self[:3])
        g, beta = (None if x is None else x[:, start:stop] for x in self[3:5])
        return Call(q, k, v, g, beta, *self[5:])

    def run(self, state: Tensor, bounds: tuple[int, ...] | None = None, **rows: Any) -> Tensor:
        """``prefill`` from ``state`` [n, HV, V, K], which is updated; the output.

        ``bounds`` are the borders of packed sequences; ``rows`` may hold ``slots`` and ``out``.
        """
        if bounds is not None:
            cpu = torch.tensor(bounds, dtype=torch.int64)
            rows |= {"cu_seqlens": cpu.to(state.device), "cu_seqlens_cpu": cpu}
        raw = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        more: dict[str, Any] = {**raw, **rows, **self.options}
        return ops.prefill(*self[:5], state=state, **more)[0]


class Piece(NamedTuple):
    """A piece run from zero, and how it depends on the state before it."""

    o: Tensor  # [B, T, HO, V]: o_zero
    u: Tensor | None  # [B, T, HO, K]; None if the piece is run again for its outputs
    message: Tensor  # [B, HV, V + K or 1, K]: X_zero, and M^T or the decay


def delta_piece(c: Call) -> Piece:
    """Both (X1) and (X2) by one ``prefill`` with twice the value heads."""
    (B, T, HQ, K), (HV, V) = c.q.shape, c.v.shape[2:]
    wide = max(V, K)

    def twice(x: Tensor | None, dim: int = 2) -> Tensor | None:
        return None if x is None else x.repeat_interleave(2, dim)

    v = c.v.new_zeros(B, T, HV, 2, wide)
    v[:, :, :, 0, :V] = c.v
    q = c.q
    if HQ > HV:  # each state is read by HQ / HV queries
        q = q.unflatten(2, (HV, 1, -1)).expand(B, T, HV, 2, -1, K).flatten(2, 4)
    state = torch.zeros(B, HV, 2, wide, K, dtype=c.exact, device=v.device)
    state[:, :, 1, :K] = torch.eye(K, dtype=c.exact, device=v.device)
    state = state.flatten(1, 2)
    g, beta, A_log, dt_bias = twice(c.g), twice(c.beta), twice(c.A_log, 0), twice(c.dt_bias, 0)
    o = Call(q, c.k, v.flatten(2, 3), g, beta, A_log, dt_bias, c.options).run(state)
    o = o.unflatten(2, (HV, 2, -1))  # [B, T, HV, 2, queries per state, wide]
    zero, one = state.unflatten(1, (HV, 2)).unbind(2)
    message = torch.cat([zero[:, :, :V], one[:, :, :K]], dim=2)
    return Piece(o[:, :, :, 0, :, :V].flatten(2, 3), o[:, :, :, 1, :, :K].flatten(2, 3), message)


def decay_piece(c: Call, outputs: bool) -> Piece:
    """Without beta: the transition is a diagonal, and u is the decayed query."""
    (B, _, HQ, K), (HV, V) = c.q.shape, c.v.shape[2:]
    state = torch.zeros(B, HV, V, K, dtype=c.exact, device=c.v.device)
    o = c.run(state)
    g = _log_decay(c)  # [B, T, HV, 1 or K]
    total = g.sum(1).exp().to(c.exact).expand(B, HV, K)
    u = None
    if outputs:
        q = _query(c)
        q = q.unflatten(2, (HV, -1)) if HQ > HV else q.repeat_interleave(HV // HQ, 2).unsqueeze(3)
        u = (q * g.cumsum(1).exp().unsqueeze(3)).flatten(2, 3).to(c.exact)
    return Piece(o, u, torch.cat([state, total.unsqueeze(2)], dim=2))


def join(messages: Tensor, chain: tuple[int, ...], V: int, delta: bool) -> Tensor:
    """The state after the pieces of the ranks in ``chain``, [n, HV, V, K], by (X1).

    ``messages`` [R, n, HV, V + K or 1, K]; the first rank of the chain has no piece before it. The
    arithmetic is float64: torch's settings for float32 products have no effect, and a long chain
    adds no error.
    """
    first = messages[chain[0]][:, :, :V]
    maps = [messages[rank] for rank in chain[1:]]
    if not maps:
        return first.clone()
    if messages.device.type != "cpu":
        maps = [composed(torch.stack(maps).double(), V, delta)]
    X = first.double()
    for message in maps:
        X = after(X, message.double(), V, delta)
    return X.to(messages.dtype)


def composed(maps: Tensor, V: int, delta: bool) -> Tensor:
    """The composition of n maps [n, ..], in pairs: log n products in sequence instead of n.

    It is twice the work, which a GPU does in parallel; on a CPU n products in sequence are faster.
    """
    while maps.shape[0] > 1:
        even = maps.shape[0] // 2 * 2
        pairs = after(maps[0:even:2], maps[1:even:2], V, delta)
        maps = torch.cat([pairs, maps[even:]])
    return maps[0]


def behind(X: Tensor, message: Tensor, V: int, delta: bool) -> Tensor:
    """(X1) for one piece: the state after it, from the state before it."""
    return after(X.double(), message.double(), V, delta).to(X.dtype)


def after(rows: Tensor, message: Tensor, V: int, delta: bool) -> Tensor:
    """Apply the map of one more piece to states, or to the states and transitions of a map."""
    zero, transition = message[..., :V, :], message[..., V:, :]
    rows = rows @ transition if delta else rows * transition
    rows[..., :V, :] += zero
    return rows


def correct(piece: Piece, X: Tensor, out: Tensor) -> None:
    """(X2): write the outputs of a piece that started from X [n, HV, V, K] into ``out``."""
    assert piece.u is not None
    HV = X.shape[1]
    # torch may be set to tf32 for float32 products, which is less exact than float32
    full = out.dtype in (torch.float32, torch.float64) and out.device.type != "cpu"
    exact = torch.float64 if full else X.dtype
    S = X.to(exact).mT  # [n, HV, K, V]
    for start in range(0, out.shape[1], SPAN):
        at = slice(start, start + SPAN)
        u = piece.u[:, at].to(exact).unflatten(2, (HV, -1)).transpose(1, 2)  # [n, HV, T, G, K]
        more = (u.flatten(2, 3) @ S).unflatten(2, (u.shape[2], -1)).transpose(1, 2).flatten(2, 3)
        out[:, at] = (piece.o[:, at].to(exact) + more).to(out.dtype)


def _log_decay(c: Call) -> Tensor:
    """g in float64 [B, T, HV, 1 or K], computed from raw gates if need be; zeros without g."""
    if c.g is None:
        return c.v.new_zeros(*c.v.shape[:3], 1, dtype=torch.float64)
    g = c.g.to(c.exact)
    if c.A_log is not None:
        rate = c.A_log.to(c.exact).exp()
        x = g if c.dt_bias is None else g + c.dt_bias.to(c.exact)
        g = -(rate if g.dim() == 3 else rate.unsqueeze(-1)) * functional.softplus(x)
    return (g if g.dim() == 4 else g.unsqueeze(-1)).double()


def _query(c: Call) -> Tensor:
    """q as the recurrence reads it: normalised and scaled, in float64."""
    q, scale = c.q.double(), c.options.get("scale")
    if c.options.get("normalize_qk"):
        q = q * (q.square().sum(-1, keepdim=True) + EPS).rsqrt()
    return q * (q.shape[-1] ** -0.5 if scale is None else scale)
