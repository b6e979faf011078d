"""The convolution over sequences that lie on several ranks: ranks exchange their last inputs.

A token needs only the last L raw inputs before it. So one exchange of L columns per rank, before
anything is computed, lets every rank run its tokens in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import ContractError, SluiceError
from sluice.contract.names import OperatorName
from sluice.distributed import gradients
from sluice.distributed.deliver import Deliver, check_deliver, delivered
from sluice.distributed.ranks import Ranks
from sluice.distributed.rows import PoolRows, Slots
from sluice.distributed.split import Split
from sluice.doctor import explain


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """:func:`sluice.causal_conv1d` over tokens that are divided over ranks.

    Args:
        x: [B, T, D], this rank's tokens, or packed [T, D] or [1, T, D]; weight and bias as always.
        options: ``ranks``, ``split``, ``state`` [P, D, L], ``slots``, ``write_slots``,
            ``has_state``, ``pad_slot`` and ``deliver`` as in :func:`sluice.distributed.prefill`;
            ``activation`` and ``backend`` as in the operator.

    Returns:
        y, with the shape of x; and the state, a new [N, D, W - 1] without ``state``.
    """
    training = _training("causal_conv1d", options, x, weight, bias)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not training):
        tails, own = _exchanged("causal_conv1d", x, weight, bias, options)
    if training:
        where = tails.where()

        def run(windows: Tensor, x: Tensor, weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
            more: dict[str, Any] = {**where, **own}
            y, final = ops.causal_conv1d(x, weight, bias, initial_state=windows, **more)
            tails.windows = final.detach()
            return (y,)

        first = where.pop("state")
        (y,) = gradients.conv(tails.ranks, tails.split, first, tails.n, run, x, weight, bias)
        return y, gradients.refusing("causal_conv1d", tails.deliver(), x, weight, bias)
    y, _ = ops.causal_conv1d(x, weight, bias, **tails.where(), **own)
    return y, tails.deliver()


def conv_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """:func:`sluice.conv_qkv` over tokens that are divided over ranks.

    Args:
        x: [B, T, D], this rank's tokens, or packed [T, D] or [1, T, D]; weight and bias as always.
        options: those of :func:`causal_conv1d` here, and the options of :func:`sluice.conv_qkv`
            for heads, gates and norm; ``a`` and ``b`` are this rank's.

    Returns:
        q, k, v, g, beta of this rank's tokens.
    """
    names = ("a", "b", "A_log", "dt_bias")
    gates = [options.get(name) for name in names]
    training = _training("conv_qkv", options, x, weight, bias, *gates)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not training):
        tails, own = _exchanged("conv_qkv", x, weight, bias, options)
    if training:
        where = tails.where()
        own = {name: value for name, value in own.items() if name not in names}

        def run(
            windows: Tensor, x: Tensor, weight: Tensor, bias: Any, *raw: Any
        ) -> tuple[Tensor, ...]:
            more: dict[str, Any] = {**where, **own, **dict(zip(names, raw, strict=True))}
            made = ops.conv_qkv(x, weight, bias, initial_state=windows, **more)
            return tuple(y for y in made if y is not None)

        first = where.pop("state")
        inputs = (x, weight, bias, *gates)
        found = iter(gradients.conv(tails.ranks, tails.split, first, tails.n, run, *inputs))
        q, k, v = next(found), next(found), next(found)
        g, beta = (None if raw is None else next(found) for raw in gates[:2])
        return q, k, v, g, beta
    made = ops.conv_qkv(x, weight, bias, **tails.where(), **own)
    tails.deliver()
    return made


class Tails:
    """One rank's windows: the one it sends, the ones it receives, and the final ones.

    Only :meth:`deliver` communicates.
    """

    def __init__(
        self,
        op: str,
        x: Tensor,  # as given, packed or not
        W: int,
        ranks: Ranks,
        split: Split,
        state: Tensor | None = None,
        slots: Slots | None = None,
        write_slots: Slots | None = None,
        has_state: Sequence[bool] | Tensor | None = None,
        pad_slot: int = -1,
        deliver: Deliver = "end",
    ) -> None:
        self.ranks, self.split, self.part = ranks, split, split.part(ranks.rank)
        self.x = x.unsqueeze(0) if x.dim() == 2 else x
        B, T, D = self.x.shape
        n = len(split.cu_seqlens) - 1 if split.cu_seqlens is not None else B
        self._check(op, B, T, deliver)
        if state is None:
            state = x.new_zeros(n, D, W - 1)
        fits = state.dim() == 3 and state.shape[1] == D and state.shape[2] >= W - 1
        if not fits or state.device != x.device:
            expected = f"[P, {D}, at least {W - 1}] on {x.device}"
            got = f"{list(state.shape)} on {state.device}"
            raise ContractError(op, "state", expected, got)
        self.state, self.L, self.to = state, state.shape[2], deliver
        self.rows = PoolRows(op, state, n, slots, write_slots, has_state, pad_slot)
        self.n = 1 if split.packed else B
        self.here = self._sequences(range(self.part.first, self.part.last))
        # wide enough for both: neither inputs nor state are rounded on their way to another rank
        dtype = torch.promote_types(x.dtype, state.dtype)
        self.windows = torch.zeros(len(self.here), D, self.L, dtype=dtype, device=x.device)
        begins = self._sequences(self.part.begins)
        self.rows.read(begins, self.windows[len(self.here) - len(begins) :])

    def _check(self, op: str, B: int, T: int, deliver: Deliver) -> None:
        split, part = self.split, self.part
        if split.ranks != self.ranks.size:
            raise ContractError(op, "split", f"parts for {self.ranks.size} ranks", split.ranks)
        check_deliver(op, deliver, self.ranks.size)
        if split.packed and B != 1:
            expected = "one packed row, since split has cu_seqlens"
            raise ContractError(op, "x", expected, f"{B} rows")
        if part.stop - part.start != T:
            expected = f"the {part.stop - part.start} tokens of rank {part.rank} in split"
            raise ContractError(op, "x", expected, f"{T} tokens")

    def _sequences(self, of_part: range) -> range:
        return of_part if self.split.packed else range(len(of_part) * self.n)

    def message(self) -> Tensor:
        """[n, D, L]: the last raw inputs of the outgoing sequence; zeros if there is none."""
        part = self.part
        if not part.outgoing:
            return self.windows.new_zeros(self.n, *self.windows.shape[1:])
        inputs = min(self.L, self.split.held(part.rank, part.last - 1))
        tail = self.x[:, self.x.shape[1] - inputs :].mT.to(self.windows.dtype)
        return torch.cat([self.windows[-self.n :, :, inputs:], tail], dim=2)

    def arrived(self, messages: Tensor) -> None:
        """Make the window of the incoming sequence from ``messages`` [R, n, D, L]."""
        part = self.part
        if not part.incoming:
            return
        window = messages[part.chain[0]]
        for rank in part.chain[1:]:
            inputs = min(self.L, self.split.held(rank, part.first))
            window = torch.cat(
                [window[:, :, inputs:], messages[rank][:, :, self.L - inputs :]], dim=2
            )
        self.windows[: self.n] = window

    def where(self) -> dict[str, Any]:
        """The options by which an operator reads and updates the windows."""
        where: dict[str, Any] = {"state": self.windows}
        if self.split.packed:
            cpu = torch.tensor(self.part.bounds, dtype=torch.int64)
            where |= {"cu_seqlens": cpu.to(self.x.device), "cu_seqlens_cpu": cpu}
        live = [self.rows.live[sequence] for sequence in self.here]
        if not all(live):
            slots = [row if ok else -1 for row, ok in enumerate(live)]
            where["slots"] = torch.tensor(slots, device=self.x.device)
        return where

    def deliver(self) -> Tensor:
        """Send the final windows to the ranks that keep them; returns the pool."""
        ends = self._sequences(self.part.ends)
        finals = {i: self.windows[row] for row, i in enumerate(self.here) if i in ends}
        like = self.windows.new_empty(self.windows.shape[1:])
        finals = delivered(self.ranks, "conv.states", self.split, finals, like, self.n, self.to)
        for sequence, window in finals.items():
            self.rows.write(sequence, window)
        return self.state


def _training(op: str, options: dict[str, Any], *tensors: Tensor | None) -> bool:
    """Whether gradients are wanted; refuses them beside a state."""
    training = gradients.wanted(*tensors)
    if training and options.get("state") is not None:
        name = gradients.NO_STATE.format(f"distributed.{op}")
        raise SluiceError(f"{name}; train without state")
    return training


def _exchanged(
    op: OperatorName, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Tails, dict[str, Any]]:
    """Agree and exchange tails; returns the operator's own options."""
    name = f"distributed.{op}"
    ranks = options.get("ranks")
    if not isinstance(ranks, Ranks):
        raise ContractError(name, "ranks", "Ranks", type(ranks).__name__)
    for refused in ("freeze", "checkpoints", "out", "layout", "cu_seqlens", "cu_seqlens_cpu"):
        if refused in options:
            raise ContractError(name, refused, "none of it here", "one")
    mine = ("ranks", "split", "state", "slots", "write_slots", "has_state", "pad_slot", "deliver")
    own = {key: value for key, value in options.items() if key not in mine}
    given = {key: value for key, value in options.items() if key in mine}
    with ranks.agreement(name) as facts:
        taps = weight[:, 0] if weight.dim() == 3 else weight
        tails = Tails(name, x, taps.shape[-1], **given)
        explain(op, tails.x, weight, bias, **_batched(own, x))
        facts.update(
            rows=tails.x.shape[0],
            channels=tails.x.shape[2],
            columns=f"W={taps.shape[-1]}, L={tails.L}",
            dtype=tails.windows.dtype,
            device=x.device.type,
            split=f"{tails.split.digest} ({tails.split.tokens} tokens)",
            deliver=tails.to,
        )
        message = tails.message()
    if tails.split.crossing:
        tails.arrived(ranks.all_gather("conv.tails", message))
    return tails, own


def _batched(own: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Add a batch dimension to packed gates, to match the x given to ``explain``."""
    if x.dim() == 3:
        return own
    return {k: v.unsqueeze(0) if k in ("a", "b") and v is not None else v for k, v in own.items()}
