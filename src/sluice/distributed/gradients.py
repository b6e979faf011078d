"""Gradients of sequences that lie on several ranks, and of heads over ranks.

The state after a piece is affine in the state before it (X1), so the gradient of the state before a
piece is affine in that of the state after it, with the same transition:

    dX_before = dX_after M + Z                                                         (X4)

Z is the gradient of the state before the piece that comes from the piece's own outputs. Every rank
computes its Z, and all ranks exchange Z and the transition that the forward pass made. Then each
knows the gradient of the state that it hands on, and uses it in a second backward pass over its own
tokens. Parameters get this rank's part of their gradients: sum them over the ranks, as for data
that is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import SluiceError
from sluice.distributed.ranks import Ranks
from sluice.distributed.split import Split
from sluice.distributed.transition import Call, Piece, borders

NO_STATE = "{}: no gradient is defined through states that are written in place or handed out"


def wanted(*tensors: Any) -> bool:
    """Whether autograd would follow a call with these tensors."""
    given = [x for x in tensors if isinstance(x, Tensor)]
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


class _Run(torch.autograd.Function):
    """A computation with its own graph inside: ``run(*leaves)``, then ``run.backward(*grads)``."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: Tensor | None) -> Any:
        ctx.run = run
        wants = [x is not None and x.requires_grad for x in tensors]
        run.leaves = [
            None if x is None else x.detach().requires_grad_(ok)
            for x, ok in zip(tensors, wants, strict=True)
        ]
        with torch.enable_grad():
            made = run(*run.leaves)
        return tuple(x.detach() for x in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise SluiceError("sluice.distributed has first derivatives only, not create_graph")
        return (None, *ctx.run.backward(*grads))


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, x: Tensor, *inputs: Tensor) -> Tensor:
        ctx.op = op
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SluiceError(NO_STATE.format(ctx.op))


def refusing(op: str, x: Tensor, *inputs: Tensor | None) -> Tensor:
    """``x``, through which a backward pass raises: never a silent zero."""
    refused: Tensor = _Refused.apply(op, x, *[y for y in inputs if y is not None])
    return refused


def _gradients(outputs: Sequence[Any], grads: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The gradient of each leaf; None where none is wanted."""
    pairs = [(y, d) for y, d in zip(outputs, grads, strict=True) if y is not None]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    if not pairs or not wanted:
        found = iter([torch.zeros_like(x) for x in wanted])
    else:
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [d for _, d in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        )
    return [next(found) if x is not None and x.requires_grad else None for x in leaves]


# ------------------------------------------------------------------------------------- prefill


class _Prefill:
    """This rank's tokens of a prefill from zero.

    The tokens of sequences that begin here come first. Those of the incoming sequence, the head,
    wait for its state.
    """

    def __init__(
        self, call: Call, split: Split, ranks: Ranks, joined: Callable[[Tensor], Tensor | None]
    ) -> None:
        self.options, self.split, self.ranks = call.options, split, ranks
        self.part, self.joined = split.part(ranks.rank), joined
        self.leaves: list[Any] = []
        self.finals: dict[int, Tensor] = {}

    def __call__(self, *tensors: Any) -> tuple[Tensor]:
        q, k, v, g, beta, A_log, dt_bias = tensors
        c, part = Call(q, k, v, g, beta, A_log, dt_bias, self.options), self.part
        (B, T, HQ, K), (HV, V) = c.q.shape, c.v.shape[2:]
        self.n, self.delta, self.V = 1 if self.split.packed else B, c.delta, V
        head = part.incoming
        begins = part.begins if self.split.packed else range(len(part.begins) * B)
        message = torch.zeros(self.n, HV, V + c.width, K, dtype=c.exact, device=c.v.device)
        if part.through:
            message[:, :, V:] = torch.eye(K, device=c.v.device) if c.delta else 1.0
        self.rest = self.out = self.head = self.X = None
        os = []
        if begins and head < T:
            bounds = None
            if self.split.packed:
                bounds = tuple(b - head for b in part.bounds[int(head > 0) :])
            self.rest, states = _prefill(c.span(head, T), None, bounds)
            if part.outgoing:
                self.out = states[-self.n :]
                message[:, :, :V] = self.out.detach()
            self._keep(begins, states)
        elif head < T:  # tokens after the last sequence
            self.rest = c.v.new_zeros(B, T - head, max(HQ, HV), V)
        elif begins:
            self._keep(begins, torch.zeros(len(begins), HV, V, K, dtype=c.exact))
        passes_on = head > 0 and part.outgoing and not begins
        if passes_on:
            with torch.no_grad():
                message = Piece(c.span(0, head)).map
        self.transition = message[:, :, V:].clone()
        X = self.joined(message)
        if head:
            assert X is not None
            self.X = X.detach().requires_grad_()
            self.head, state = _prefill(c.span(0, head), self.X, None)
            self.out = state if passes_on else self.out
            heads = range(part.first, part.first + 1) if self.split.packed else range(B)
            self._keep(heads, state)
            os.append(self.head)
        os += [] if self.rest is None else [self.rest]
        return (torch.cat(os, dim=1) if os else c.v.new_zeros(B, 0, max(HQ, HV), V),)

    def _keep(self, sequences: range, states: Tensor) -> None:
        ends = self.part.ends if self.split.packed else range(len(self.part.ends) * self.n)
        for row, sequence in enumerate(sequences):
            if sequence in ends:
                self.finals[sequence] = states[row].detach()

    def backward(self, do: Tensor) -> list[Any]:
        """Gradients of this rank's tokens and its part of those of parameters."""
        part = self.part
        at, later = part.incoming, do[:, part.incoming :].contiguous()
        Z = torch.zeros_like(self.transition[:, :, :1]).expand(-1, -1, self.V, -1)
        if self.head is not None and self.X is not None:
            grads = do[:, :at].contiguous()
            (Z,) = torch.autograd.grad(self.head, self.X, grads, retain_graph=True)
        handed = None
        if self.split.crossing:
            message = torch.cat([Z.to(self.transition.dtype), self.transition], dim=2)
            messages = self.ranks.all_gather("prefill.gradients", message.contiguous())
            handed = self._handed(messages)
        rest = self.rest if self.rest is not None and self.rest.requires_grad else None
        outputs = [self.head, rest, self.out if handed is not None else None]
        return _gradients(outputs, [do[:, :at].contiguous(), later, handed], self.leaves)

    def _handed(self, messages: Tensor) -> Tensor | None:
        """(X4) from the last rank that holds the outgoing sequence to this one, in float64."""
        part = self.part
        if not part.outgoing:
            return None
        number = part.last - 1 if self.split.packed else 0
        later = range(part.rank + 1, self.split.ranks)
        after = [rank for rank in later if self.split.held(rank, number)]
        d = torch.zeros_like(messages[0][:, :, : self.V], dtype=torch.float64)
        for rank in reversed(after):
            Z, M = messages[rank].double().split([self.V, messages.shape[3] - self.V], dim=2)
            d = Z + (d @ M.mT if self.delta else d * M)
        return d.to(messages.dtype)


def _prefill(c: Call, X: Tensor | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """The operator in its functional form."""
    more: dict[str, Any] = {"A_log": c.A_log, "dt_bias": c.dt_bias, **c.options}
    if bounds is not None:
        more |= borders(bounds, c.v.device)
    return ops.prefill(*c[:5], initial_state=X, **more)


def prefill(
    call: Call, split: Split, ranks: Ranks, joined: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor, dict[int, Tensor]]:
    """o of this rank's tokens, with gradients, and the final states of sequences that end here."""
    run = _Prefill(call, split, ranks, joined)
    (o,) = _Run.apply(run, *call[:7])
    return o, run.finals


# --------------------------------------------------------------------------------- convolutions


class _Conv:
    """This rank's tokens of a convolution; windows come from other ranks' inputs."""

    def __init__(
        self, ranks: Ranks, split: Split, windows: Tensor, n: int, function: Callable[..., Any]
    ) -> None:
        self.ranks, self.split, self.n = ranks, split, n
        if not split.packed and windows.shape[0] < n:  # a rank without tokens
            windows = windows.new_zeros(n, *windows.shape[1:])
        self.part, self.windows, self.function = split.part(ranks.rank), windows, function
        self.leaves: list[Any] = []

    def __call__(self, *tensors: Any) -> tuple[Tensor, ...]:
        self.windows = self.windows.detach().requires_grad_()
        self.made = self.function(self.windows, *tensors)
        return self.made

    def backward(self, *grads: Tensor) -> list[Any]:
        """Gradients of inputs and parameters. Those of the last inputs include later ranks'."""
        leaves = [*self.leaves, self.windows]
        *found, dwindow = _gradients(self.made, [d.contiguous() for d in grads], leaves)
        if not self.split.crossing or found[0] is None:
            return found
        part, L = self.part, self.windows.shape[2]
        mine = dwindow[: self.n] if part.incoming else dwindow.new_zeros(self.n, *dwindow.shape[1:])
        every = self.ranks.all_gather("conv.gradients", mine.contiguous())
        dx = found[0].unsqueeze(0) if found[0].dim() == 2 else found[0]
        for other in self.split.parts:
            if part.rank not in other.chain:
                continue
            begin = self.split.cu_seqlens[other.first] if self.split.cu_seqlens is not None else 0
            for column in range(L):
                at = other.start - L + column
                if max(begin, part.start) <= at < part.stop:
                    dx[:, at - part.start] += every[other.rank][:, :, column].to(dx.dtype)
        return found


def conv(
    ranks: Ranks,
    split: Split,
    windows: Tensor,
    n: int,
    function: Callable[..., Any],
    *tensors: Tensor | None,
) -> tuple[Tensor, ...]:
    """``function(windows, *tensors)`` with gradients; ``tensors[0]`` is x, this rank's inputs."""
    run = _Conv(ranks, split, windows, n, function)
    made: tuple[Tensor, ...] = _Run.apply(run, *tensors)
    return made


# ------------------------------------------------------------------------------ heads over ranks


class _Summed(torch.autograd.Function):
    """The sum over ranks forward; every rank has its whole gradient, so backward does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.all_reduce("heads.output", x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Shared(torch.autograd.Function):
    """The same tensor on every rank; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.ranks.all_reduce(ctx.name, grads[0].clone()), None, None


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of ``x`` over ranks, with gradients."""
    y: Tensor = _Summed.apply(x, ranks)
    return y


def shared(x: Tensor, ranks: Ranks, name: str) -> Tensor:
    """``x``, whose gradient is summed over ranks."""
    y: Tensor = _Shared.apply(x, ranks, name)
    return y
