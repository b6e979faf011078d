"""Ways to spoil an argument, by what it is: a tensor of floats, an index, an option, a tuple."""

from __future__ import annotations

import inspect
import random
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.contract.require import FLOATS, INTEGERS


class Spoilt(NamedTuple):
    """What was done to which argument."""

    argument: str
    how: str
    value: Any
    exact: bool
    """Whether an error must name this argument, and not one beside it that no longer fits."""


class Thing:
    """An object of no use."""

    def __repr__(self) -> str:
        return "Thing()"


JUNK: tuple[Any, ...] = (
    3, -1, 0, 2.5, "", "vk", "silu", b"x", [1], (), {}, True, float("nan"), float("inf"), 10**30,
    -(2**63), 2**31, 1j, Thing(), torch.float32, torch.tensor(1.0), torch.zeros(0), None,
)  # fmt: skip
DTYPES = (
    *FLOATS, *INTEGERS, torch.int8, torch.uint8, torch.int16, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip


def spoil(dice: random.Random, name: str, right: Any, kind: Any) -> Spoilt:
    """One wrong (or odd) value for an argument. ``kind`` is the signature's annotation."""
    if isinstance(right, Tensor):
        if dice.random() < 0.15:
            how, value = _junk(dice, tensor=False)
            return Spoilt(name, how, value, value is not None)
        return _tensor(dice, name, right)
    if isinstance(right, tuple) and hasattr(right, "_fields") and dice.random() < 0.9:
        return _field(dice, name, right)
    if isinstance(right, tuple) and right and dice.random() < 0.8:
        i = dice.randrange(len(right))
        if isinstance(right[i], Tensor):
            inner = _tensor(dice, name, right[i])
            value = (*right[:i], inner.value, *right[i + 1 :])
            return Spoilt(name, f"[{i}] {inner.how}", value, False)
    how, value = _option(dice, kind)
    return Spoilt(name, how, value, type(value) not in (int, str))


def _junk(dice: random.Random, tensor: bool = True) -> tuple[str, Any]:
    value = dice.choice([x for x in JUNK if tensor or not isinstance(x, Tensor)])
    return f"= {value!r}", value


def _field(dice: random.Random, name: str, right: Any) -> Spoilt:
    """One part of a Checkpoints, a Draft or DraftBuffers."""
    part = dice.choice(right._fields)
    old = getattr(right, part)
    if isinstance(old, Tensor):
        inner = _tensor(dice, name, old)
        return Spoilt(name, f".{part} {inner.how}", right._replace(**{part: inner.value}), False)
    how, value = _junk(dice)
    return Spoilt(name, f".{part} {how}", right._replace(**{part: value}), False)


def _option(dice: random.Random, kind: Any) -> tuple[str, Any]:
    """A value beside those of the annotation, near it or far from it."""
    choices = [x for part in typing.get_args(kind) or () for x in typing.get_args(part) or (part,)]
    words = [x for x in choices if isinstance(x, str)]
    if words and dice.random() < 0.6:
        word = dice.choice(words)
        value = dice.choice((word.upper(), word[:-1], word + " ", f"{word}{word}", word))
        return f"= {value!r}", value
    if dice.random() < 0.3:
        value = dice.choice((-2, -1, 0, 1, 2, 7, 8, 9, 63, 64, 65, 2**31, 2**63, -(2**31)))
        return f"= {value!r}", value
    return _junk(dice)


# --------------------------------------------------------------------------------------- tensors


def _tensor(dice: random.Random, name: str, x: Tensor) -> Spoilt:
    ways = _VALUES if dice.random() < 0.35 else _SHAPES if dice.random() < 0.5 else _OTHERS
    for _ in range(8):
        way = dice.choice(ways)
        value = way(dice, x)
        if value is not None:
            looks = f"{value.dtype} {list(value.shape)} strides {_strides(value)} {value.device}"
            exact = way is _sparse
            return Spoilt(name, f"{way.__name__.strip('_')}: {looks}", value, exact)
    return Spoilt(name, "dtype", x.to(torch.complex64), True)


def _strides(x: Tensor) -> Any:
    return list(x.stride()) if x.layout == torch.strided else x.layout


def _dim(dice: random.Random, x: Tensor) -> int | None:
    return dice.randrange(x.dim()) if x.dim() else None


def _longer(dice: random.Random, x: Tensor) -> Tensor | None:
    d = _dim(dice, x)
    if d is None or x.shape[d] == 0:
        return None
    return torch.cat([x, x.narrow(d, 0, 1)], d)


def _shorter(dice: random.Random, x: Tensor) -> Tensor | None:
    d = _dim(dice, x)
    return None if d is None or x.shape[d] == 0 else x.narrow(d, 0, x.shape[d] - 1)


def _empty(dice: random.Random, x: Tensor) -> Tensor | None:
    d = _dim(dice, x)
    return None if d is None else x.narrow(d, 0, 0)


def _one_more_dimension(dice: random.Random, x: Tensor) -> Tensor:
    return x.unsqueeze(dice.randrange(x.dim() + 1))


def _one_less_dimension(dice: random.Random, x: Tensor) -> Tensor | None:
    return x.flatten(0, 1) if x.dim() > 1 else x.sum(0).to(x.dtype) if x.dim() else None


def _scalar(dice: random.Random, x: Tensor) -> Tensor | None:
    return x.flatten()[0] if x.numel() else None


def _swapped(dice: random.Random, x: Tensor) -> Tensor | None:
    if x.dim() < 2:
        return None
    a, b = dice.sample(range(x.dim()), 2)
    return x.transpose(a, b)


def _every_second(dice: random.Random, x: Tensor) -> Tensor | None:
    """The same values, two apart along one dimension."""
    d = _dim(dice, x)
    if d is None:
        return None
    wide = x.repeat_interleave(2, d)
    return wide[tuple(slice(None, None, 2) if i == d else slice(None) for i in range(x.dim()))]


def _other_order(dice: random.Random, x: Tensor) -> Tensor | None:
    """The same values, another order in memory."""
    if x.dim() < 2:
        return None
    a, b = dice.sample(range(x.dim()), 2)
    return x.transpose(a, b).contiguous().transpose(a, b)


def _expanded(dice: random.Random, x: Tensor) -> Tensor | None:
    """Stride 0: all entries along a dimension are one."""
    d = _dim(dice, x)
    if d is None or x.shape[d] < 2:
        return None
    return x.narrow(d, 0, 1).expand(x.shape)


def _overlapping(dice: random.Random, x: Tensor) -> Tensor | None:
    """Rows that begin inside the row before."""
    if x.dim() < 2 or x.shape[0] < 2 or x.numel() == 0:
        return None
    base = x.contiguous()
    strides = (max(1, base.stride(0) - 1), *base.stride()[1:])
    return base.as_strided(base.shape, strides)


def _gap(dice: random.Random, x: Tensor) -> Tensor | None:
    """Rows with room between them."""
    if x.dim() < 2:
        return None
    wide = torch.cat([x.flatten(1), x.flatten(1)[:, :1]], 1) if x.numel() else None
    return None if wide is None else wide[:, :-1].view(x.shape) if x.dim() == 2 else None


def _dtype(dice: random.Random, x: Tensor) -> Tensor | None:
    dtype = dice.choice(DTYPES)
    return None if dtype == x.dtype else x.to(dtype)


def _meta(dice: random.Random, x: Tensor) -> Tensor:
    return x.to("meta")


def _sparse(dice: random.Random, x: Tensor) -> Tensor | None:
    return x.to_sparse() if x.dim() and x.dtype in (torch.float32, torch.float64) else None


def _parameter(dice: random.Random, x: Tensor) -> Tensor | None:
    return torch.nn.Parameter(x, requires_grad=False) if x.is_floating_point() else None


def _inference(dice: random.Random, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _value(dice: random.Random, x: Tensor) -> Tensor | None:
    """One entry is out of range, out of order, or not a number."""
    if x.numel() == 0:
        return None
    x = x.clone(memory_format=torch.contiguous_format)
    at = dice.randrange(x.numel())
    if x.dtype == torch.bool:
        x.view(-1)[at] = ~x.view(-1)[at]
    elif x.is_floating_point():
        odd = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0, 1e-40)
        x.view(-1)[at] = dice.choice(odd)
    elif not x.is_complex():
        info = torch.iinfo(x.dtype)
        odd = (-1, -2, 0, 1, 2, 5, 64, 1000, info.max, info.min, info.max // 2)
        x.view(-1)[at] = dice.choice(odd)
    return x


def _twice(dice: random.Random, x: Tensor) -> Tensor | None:
    """Two entries are alike."""
    if x.numel() < 2:
        return None
    x = x.clone(memory_format=torch.contiguous_format)
    a, b = dice.sample(range(x.numel()), 2)
    x.view(-1)[a] = x.view(-1)[b]
    return x


def _reversed(dice: random.Random, x: Tensor) -> Tensor | None:
    return x.flip(0) if x.dim() else None


Way = Callable[[random.Random, Tensor], Tensor | None]
_VALUES: tuple[Way, ...] = (_value, _value, _value, _twice, _reversed)
_SHAPES: tuple[Way, ...] = (
    _longer, _shorter, _empty, _one_more_dimension, _one_less_dimension, _scalar, _swapped,
)  # fmt: skip
_OTHERS: tuple[Way, ...] = (
    _dtype, _dtype, _dtype, _every_second, _other_order, _expanded, _overlapping, _gap, _meta,
    _sparse, _parameter, _inference,
)  # fmt: skip


def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function by name, with their annotations."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {n: hints.get(n) for n, p in parameters.items() if p.kind in named and n != "self"}
