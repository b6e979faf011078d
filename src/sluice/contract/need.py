"""The pieces that checks are made of: one that raises, and what several operators share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.problem import StateAddressing
from sluice.contract.tensors import ConvQkvTensors, ConvTensors, DeltaTensors, Rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class Need:
    """Raises ``ContractError`` for one operator, naming argument, expectation and finding."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op, self.device = op, device

    def __call__(self, ok: Any, argument: str, expected: str, got: object) -> None:
        if not ok:
            raise ContractError(self.op, argument, expected, got)

    def tensor(
        self,
        x: Tensor,
        argument: str,
        shape: tuple[Any, ...],
        dtypes: tuple[torch.dtype, ...],
        names: str = "",
    ) -> None:
        """Require shape (None matches any size), one of the dtypes, and the call's device."""
        self(isinstance(x, Tensor), argument, "a tensor", type(x).__name__)
        label = f"shape {list(shape)}{' = ' + names if names else ''}".replace("None", "any")
        same = x.dim() == len(shape) and all(
            want is None or size == want for size, want in zip(x.shape, shape, strict=True)
        )
        self(same, argument, label, f"shape {list(x.shape)}")
        self(x.dtype in dtypes, argument, f"dtype {_names(dtypes)}", x.dtype)
        self(x.device == self.device, argument, f"device {self.device}", f"device {x.device}")

    def innermost(self, x: Tensor, argument: str) -> None:
        """Require the last dimension to have stride 1."""
        ok = x.shape[-1] <= 1 or x.stride(-1) == 1 or x.numel() == 0
        self(ok, argument, "a last dimension of stride 1", f"strides {list(x.stride())}")

    def choice(self, value: object, argument: str, choices: tuple[object, ...]) -> None:
        self(value in choices, argument, f"one of {list(choices)}", repr(value))

    def number(self, value: object, argument: str, least: float = -math.inf) -> float:
        """Require a finite number: a tensor is none, since reading it may wait for a device."""
        expected = "a finite number" + (f" >= {least:g}" if math.isfinite(least) else "")
        ok = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
        self(ok and math.isfinite(value) and value >= least, argument, expected, value)  # type: ignore[arg-type, operator]
        return float(value)  # type: ignore[arg-type]

    def out(self, x: Tensor, argument: str, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
        """Require an output buffer whose elements do not share memory with each other."""
        self.tensor(x, argument, shape, (dtype,))
        overlaps = any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
        self(not overlaps, argument, "a buffer without overlap", f"strides {list(x.stride())}")


def sequences(need: Need, rows: Rows, B: int) -> int:
    """N, from ``cu_seqlens`` when packed and from the batch otherwise."""
    if rows.cu_seqlens is None:
        need(rows.cu_seqlens_cpu is None, "cu_seqlens_cpu", "cu_seqlens beside it", "it alone")
        return B
    need.tensor(rows.cu_seqlens, "cu_seqlens", (None,), INTEGERS, "[N + 1]")
    need(rows.cu_seqlens.shape[0] >= 1, "cu_seqlens", "at least one entry (0)", "an empty tensor")
    need(B == 1, "cu_seqlens", "packed input, B = 1", f"B = {B}")
    if rows.cu_seqlens_cpu is not None:
        host = rows.cu_seqlens_cpu
        need(host.device.type == "cpu", "cu_seqlens_cpu", "a CPU tensor", host.device)
        need(
            host.shape == rows.cu_seqlens.shape and host.dtype in INTEGERS,
            "cu_seqlens_cpu",
            f"integers of shape {list(rows.cu_seqlens.shape)}",
            f"{host.dtype} of shape {list(host.shape)}",
        )
    return rows.cu_seqlens.shape[0] - 1


def state(
    need: Need,
    state: Tensor,
    tail: tuple[int, int, int],
    N: int,
    rows: Rows,
    dtype: torch.dtype,
) -> None:
    """Check a recurrent state pool: shape, dtype, and contiguous rows that do not overlap."""
    dtypes = FLOATS if dtype == torch.float64 else FLOATS[:3]
    need.tensor(state, "state", (None, *tail), dtypes)
    P = state.shape[0]
    dense, span = True, 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:]), strict=True):
        dense = dense and (size == 1 or stride == span)
        span = span * size
    need(dense, "state", "contiguous last three dimensions", f"strides {list(state.stride())}")
    need(P <= 1 or state.stride(0) >= span, "state", f"stride(0) >= {span}", state.stride(0))
    if rows.slots is None:
        need(P >= N, "state", f"at least {N} rows, one a sequence", f"{P} rows")


def conv_state(need: Need, name: str, state: Tensor, D: int, least: int, N: int, rows: Rows) -> int:
    """Check a conv state pool [P, D, L] of any strides; return L."""
    need.tensor(state, name, (None, D, None), FLOATS, "[P, D, L]")
    P, _, L = state.shape
    need(least <= L, name, f"at least {least} columns", f"{L} columns")
    need(not _overlaps(state), name, "rows without overlap", f"strides {list(state.stride())}")
    if rows.slots is None:
        need(P >= N, name, f"at least {N} rows, one a sequence", f"{P} rows")
    return L


def window(
    need: Need,
    x: Tensor | None,
    pool: Tensor | None,
    dims: tuple[int, int, int],
    P: int,
    rows: Rows,
) -> tuple[int, int]:
    """Check ``conv_inputs`` and ``conv_state`` of draft tokens; return D and L, 0 without them."""
    if x is None and pool is None:
        return 0, 0
    B, T, N = dims
    together = "a tensor: conv_inputs and conv_state come together"
    need(x is not None, "conv_inputs", together, None)
    need(pool is not None, "conv_state", together, None)
    assert x is not None
    assert pool is not None
    need.tensor(x, "conv_inputs", (B, T, None), FLOATS, "[B, T, D]")
    L = conv_state(need, "conv_state", pool, x.shape[2], 1, N, rows)
    ok = pool.shape[0] >= P or (rows.slots is None and rows.write_slots is None)
    need(ok, "conv_state", f"the {P} slots of state", f"{pool.shape[0]} slots")
    return x.shape[2], L


def addressing(need: Need, rows: Rows, N: int, P: int, pad_slot: int) -> StateAddressing:
    """Check the index tensors."""
    for x, name in ((rows.slots, "slots"), (rows.write_slots, "write_slots")):
        if x is not None:
            need.tensor(x, name, (N,), INTEGERS, "[N]")
    if rows.has_state is not None:
        need.tensor(rows.has_state, "has_state", (N,), (torch.bool,), "[N]")
    need.choice(pad_slot, "pad_slot", (-1, 0))
    pooled = rows.slots is not None or rows.write_slots is not None
    need(pad_slot == -1 or pooled, "pad_slot", "slots or write_slots beside it", pad_slot)
    return StateAddressing(
        P=P,
        slots=rows.slots is not None,
        write_slots=rows.write_slots is not None,
        has_state=rows.has_state is not None,
        pad_slot=pad_slot,
    )


def checkpoints(
    need: Need, t: DeltaTensors | ConvTensors | ConvQkvTensors, every: int, N: int
) -> str:
    """Check the checkpoint tensors; return their kind."""
    slots, positions = t.checkpoint_slots, t.checkpoint_positions
    if slots is None:
        return "none"
    need.tensor(slots, "checkpoints.slots", (N, None), INTEGERS, "[N, M]")
    if positions is None:
        need(every >= 1, "checkpoints.every", "at least 1 token", every)
        return "every"
    need.tensor(positions, "checkpoints.positions", tuple(slots.shape), INTEGERS, "slots'")
    return "positions"


def _overlaps(x: Tensor) -> bool:
    """Whether two elements may share memory: a stride does not clear what lies inside it."""
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
