"""The exact transition of a piece of a sequence: what its tokens do to any state before them.

Whatever the rule, the state after a piece is affine in the state S before it (per value head, S of
shape [K, V]; docs/distributed.md):

    S_out = M S + S_zero                                                              (X1)

With the delta rule the first pass of the operator makes M and S_zero, by the kernels that split
long sequences inside one GPU. Without it, M is the decay alone, a diagonal, and S_zero is a prefill
from zero. Nothing is approximated.

States are kept as X = S^T [V, K], the "vk" layout, and so are maps: X_zero above M^T [K, K] or the
decay [1, K]. X_out = X M^T + X_zero.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sluice import ops
from sluice.contract.chunk_length import CHUNK
from sluice.ops.transitions import Passes, resume, transitions

SHORTEST = 1024  # tokens of a segment, at least


@functools.lru_cache(maxsize=256)
def borders(bounds: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """``cu_seqlens`` on both sides, copied once: a CUDA graph cannot hold a copy from the host."""
    cpu = torch.tensor(bounds, dtype=torch.int64)
    return {"cu_seqlens": cpu.to(device), "cu_seqlens_cpu": cpu}


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
            rows |= borders(bounds, state.device)
        raw = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        more: dict[str, Any] = {**raw, **rows, **self.options}
        return ops.prefill(*self[:5], state=state, **more)[0]


class Piece:
    """Tokens of a sequence that crosses a border between ranks; of a batch, those of all rows.

    Its prefill has two passes, before and after the state before it is known. A GPU runs segments
    of it side by side in both. ``out``: where outputs go; without it there is no second pass.
    """

    def __init__(self, call: Call, out: Tensor | None = None) -> None:
        self.call, self.out = call, out
        self.tokens, self.segment = call.v.shape[1], segment_tokens(call)

    @property
    def split(self) -> bool:
        """Whether there are several segments."""
        return self.segment < self.tokens

    @functools.cached_property
    def passes(self) -> Passes:
        """The call of both passes."""
        c = self.call
        (B, _, HV, V), K = c.v.shape, c.k.shape[3]
        state = c.v.new_empty(B, HV, V, K, dtype=c.exact)
        return Passes(
            *c[:5], state, self.segment, self.out, A_log=c.A_log, dt_bias=c.dt_bias, **c.options
        )

    @functools.cached_property
    def first(self) -> tuple[Tensor, Tensor | None]:
        """The first pass: the piece's map [B, HV, V + K or 1, K], and what is kept of it."""
        if not self.call.delta:
            return _decay_map(self.call), None
        made, kept = transitions(self.passes)
        return made.mT, kept

    @property
    def map(self) -> Tensor:
        """X_zero above M^T or the decay, of all tokens."""
        return self.first[0]

    def after(self, X: Tensor) -> Tensor:
        """The state after the piece, from the state X [n, HV, V, K] before it, by its map."""
        return after(X.double(), self.map.double(), X.shape[2], self.call.delta).to(X.dtype)

    def run(self, X: Tensor) -> Tensor:
        """The second pass: write the outputs from the state X before the piece; the state after it.

        Without segments it is an ordinary prefill, and the first pass need not have run.
        """
        if not self.split:
            X = X.clone()  # the operator writes the final state into it
            self.call.run(X, out=self.out)
            return X
        kept = self.first[1]
        assert kept is not None
        self.passes.state.copy_(X)
        resume(self.passes, kept)
        return self.passes.state


def segment_tokens(c: Call) -> int:
    """Tokens per segment: as many segments as fill the device, none of them short.

    Where nothing runs segments side by side, or bits must not depend on the cut, there is one.
    """
    B, T, HV = c.v.shape[:3]
    segments = 1
    if c.delta and (c.g is None or c.g.dim() == 3) and not c.options.get("batch_invariant"):
        segments = max(min(processors(c.v.device) // (B * HV), T // SHORTEST), 1)
    return -(-T // (segments * CHUNK)) * CHUNK


def processors(device: torch.device) -> int:
    """SMs of a GPU. A CPU has few cores: its value heads keep them busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _decay_map(c: Call) -> Tensor:
    """Without beta: X_zero by a prefill, and the decay of all tokens, [B, HV, V + 1, K]."""
    (B, _, _, K), (HV, V) = c.q.shape, c.v.shape[2:]
    state = torch.zeros(B, HV, V, K, dtype=c.exact, device=c.v.device)
    c.run(state)
    total = _log_decay(c).sum(1).exp().to(c.exact).expand(B, HV, K)
    return torch.cat([state, total.unsqueeze(2)], dim=2)


def join(messages: Tensor, chain: tuple[int, ...], V: int, delta: bool) -> Tensor:
    """The state after the pieces of the ranks in ``chain``, [n, HV, V, K], by (X1).

    ``messages`` [R, n, HV, V + K or 1, K]; the first rank of the chain has no piece before it. The
    arithmetic is float64: torch's settings for float32 products have no effect, and a long chain
    adds no error.
    """
    X = messages[chain[0]][:, :, :V]
    if len(chain) == 1:
        return X.clone()
    X = X.double()
    for message in messages[chain[0] + 1 : chain[-1] + 1].double():  # without tokens: the identity
        X = after(X, message, V, delta)
    return X.to(messages.dtype)


def after(rows: Tensor, message: Tensor, V: int, delta: bool) -> Tensor:
    """Apply the map of one more piece to states, or to the states and transitions of a map."""
    zero, transition = message[..., :V, :], message[..., V:, :]
    rows = rows @ transition if delta else rows * transition
    rows[..., :V, :] += zero
    return rows


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
