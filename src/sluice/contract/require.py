"""The pieces that checks are made of: one that raises, and what several operators share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sluice.contract.errors import ContractError
from sluice.contract.meta import Meta, overlaps

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class Require:
    """Raises ``ContractError`` for one operator, naming argument, expectation and finding."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op, self.device = op, device

    def __call__(self, ok: Any, argument: str, expected: str, got: object) -> None:
        if not ok:
            raise ContractError(self.op, argument, expected, got)

    def tensor(
        self,
        x: Meta,
        argument: str,
        shape: tuple[Any, ...],
        dtypes: tuple[torch.dtype, ...],
        names: str = "",
        like: str = "",
    ) -> None:
        """Require shape (None matches any size), a dtype (that of ``like``), the call's device."""
        same = x.shape == shape or (
            x.dim() == len(shape)
            and all(want is None or size == want for size, want in zip(x.shape, shape, strict=True))
        )
        if not same:
            label = f"shape {list(shape)}{' = ' + names if names else ''}".replace("None", "any")
            self(False, argument, label, f"shape {list(x.shape)}")
        if x.dtype not in dtypes:
            whose = f" = {like}'s" if like else ""
            self(False, argument, f"dtype {_names(dtypes)}{whose}", x.dtype)
        if x.device != self.device:
            self(False, argument, f"device {self.device}", f"device {x.device}")

    def innermost(self, x: Meta, argument: str) -> None:
        """Require the last dimension to have stride 1."""
        if not (x.strides[-1] == 1 or x.shape[-1] <= 1 or x.numel() == 0):
            self(False, argument, "a last dimension of stride 1", f"strides {list(x.strides)}")

    def choice(self, value: object, argument: str, choices: tuple[object, ...]) -> None:
        """Require one of the choices, and its type: a tensor or 0.0 is no choice."""
        if not any(isinstance(value, type(c)) and value == c for c in choices):
            self(False, argument, f"one of {list(choices)}", _shown(value))

    def number(self, value: object, argument: str, least: float = -math.inf) -> None:
        """Require a finite number: a tensor is none, since reading it may wait for a device."""
        ok = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
        if not ok or not math.isfinite(value) or value < least:  # type: ignore[arg-type, operator]
            expected = "a finite number" + (f" >= {least:g}" if math.isfinite(least) else "")
            self(False, argument, expected, _shown(value))

    def out(self, x: Meta, argument: str, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
        """Require an output buffer whose elements do not share memory with each other."""
        self.tensor(x, argument, shape, (dtype,))
        if overlaps(x.shape, x.strides):
            self(False, argument, "a buffer without overlap", f"strides {list(x.strides)}")


def options(op: str, kinds: Mapping[str, str], values: Mapping[str, object]) -> None:
    """Require flags and ints to be what their fields in the spec say: ``kinds``, as written there.

    Numbers and strings are left to the operator's own check, which knows their choices.
    """
    for name, value in values.items():
        if kinds[name] not in _KINDS:
            continue
        expected, types = _KINDS[kinds[name]]
        flag = isinstance(value, bool)
        ok = isinstance(value, types) and (not flag or bool in types)
        ok = ok and (not isinstance(value, int) or -(2**63) <= value < 2**63)
        if not ok or (bool in types and not flag and value not in (0, 1)):
            argument = name.replace("checkpoint_", "checkpoints.")
            raise ContractError(op, argument, expected, _shown(value))


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("True or False", (bool, int, torch.SymBool)),
    "int": ("an int", (int, torch.SymInt)),
}


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def sequences(require: Require, spec: Any, B: int) -> int:
    """N, from ``cu_seqlens`` when packed and from the batch otherwise."""
    bounds, host = spec.cu_seqlens, spec.cu_seqlens_cpu
    if bounds is None:
        require(host is None, "cu_seqlens_cpu", "cu_seqlens beside it", "it alone")
        return B
    require.tensor(bounds, "cu_seqlens", (None,), INTEGERS, "[N + 1]")
    require(bounds.shape[0] >= 1, "cu_seqlens", "at least one entry (0)", "an empty tensor")
    require(B == 1, "cu_seqlens", "packed input, B = 1", f"B = {B}")
    if host is not None:
        require(host.device.type == "cpu", "cu_seqlens_cpu", "a CPU tensor", host.device)
        require(
            host.shape == bounds.shape and host.dtype in INTEGERS,
            "cu_seqlens_cpu",
            f"integers of shape {list(bounds.shape)}",
            f"{host.dtype} of shape {list(host.shape)}",
        )
    size: int = bounds.shape[0] - 1
    return size


def state(
    require: Require,
    spec: Any,
    tail: tuple[int, int, int],
    N: int,
    dtype: torch.dtype,
    pool: Meta | None = None,
) -> None:
    """Check a recurrent state pool: shape, dtype, and contiguous rows that do not overlap."""
    pool = spec.state if pool is None else pool
    assert pool is not None
    dtypes = FLOATS if dtype == torch.float64 else FLOATS[:3]
    require.tensor(pool, "state", (None, *tail), dtypes)
    P = pool.shape[0]
    dense, span = True, 1
    for size, stride in zip(reversed(pool.shape[1:]), reversed(pool.strides[1:]), strict=True):
        dense = dense and (size == 1 or stride == span)
        span = span * size
    if not dense:
        got = f"strides {list(pool.strides)}"
        require(False, "state", "contiguous last three dimensions", got)
    require(P <= 1 or pool.strides[0] >= span, "state", f"stride(0) >= {span}", pool.strides[0])
    if spec.slots is None:
        require(P >= N, "state", f"at least {N} rows, one per sequence", f"{P} rows")


def conv_state(
    require: Require, spec: Any, name: str, pool: Meta, D: int, least: int, N: int
) -> int:
    """Check a conv state pool [P, D, L] of any strides; return L."""
    require.tensor(pool, name, (None, D, None), FLOATS, "[P, D, L]")
    P, _, L = pool.shape
    require(least <= L, name, f"at least {least} columns", f"{L} columns")
    require(
        not overlaps(pool.shape, pool.strides),
        name,
        "rows without overlap",
        f"strides {list(pool.strides)}",
    )
    if spec.slots is None:
        require(P >= N, name, f"at least {N} rows, one per sequence", f"{P} rows")
    return L


def window(
    require: Require,
    spec: Any,
    x: Meta | None,
    pool: Meta | None,
    dims: tuple[int, int, int],
) -> None:
    """Check ``conv_inputs`` and ``conv_state`` of draft tokens."""
    if x is None and pool is None:
        return
    B, T, N = dims
    together = "a tensor: conv_inputs and conv_state come together"
    require(x is not None, "conv_inputs", together, None)
    require(pool is not None, "conv_state", together, None)
    assert x is not None
    assert pool is not None
    require.tensor(x, "conv_inputs", (B, T, None), FLOATS, "[B, T, D]")
    conv_state(require, spec, "conv_state", pool, x.shape[2], 1, N)
    P = spec.state.shape[0]
    ok = pool.shape[0] >= P or not spec.pooled
    require(ok, "conv_state", f"the {P} slots of state", f"{pool.shape[0]} slots")


def addressing(require: Require, spec: Any, N: int, tokens: int | None = None) -> None:
    """Check the index tensors. ``tokens``: of a row that is not packed."""
    if spec.slots is not None:
        require.tensor(spec.slots, "slots", (N,), INTEGERS, "[N]")
    writes = spec.write_slots
    if writes is not None and spec.op == "decode" and writes.dim() == 2:
        require.tensor(writes, "write_slots", (N, None), INTEGERS, "[N, M], one for each token")
        ok = tokens is None or writes.shape[1] >= tokens
        expected = f"{tokens} columns or more, one for each token"
        require(ok, "write_slots", expected, f"{writes.shape[1]} columns")
    elif writes is not None:
        require.tensor(writes, "write_slots", (N,), INTEGERS, "[N]")
    if spec.has_state is not None:
        require.tensor(spec.has_state, "has_state", (N,), (torch.bool,), "[N]")
    require.choice(spec.pad_slot, "pad_slot", (-1, 0))
    ok = spec.pad_slot == -1 or spec.pooled
    require(ok, "pad_slot", "slots or write_slots beside it", spec.pad_slot)


def checkpoints(require: Require, spec: Any, N: int) -> None:
    """Check the checkpoint tensors."""
    slots, positions = spec.checkpoint_slots, spec.checkpoint_positions
    if slots is None:
        return
    require.tensor(slots, "checkpoints.slots", (N, None), INTEGERS, "[N, M]")
    if positions is None:
        every = spec.checkpoint_every
        require(every >= 1, "checkpoints.every", "at least 1 token", every)
        return
    require.tensor(positions, "checkpoints.positions", tuple(slots.shape), INTEGERS, "slots'")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *most, last = (str(d).removeprefix("torch.") for d in dtypes)
    return f"{', '.join(most)} or {last}" if most else last
