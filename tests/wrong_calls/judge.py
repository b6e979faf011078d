"""What may follow a wrong call: an error that names the argument, or a right result."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.contract.errors import BackendError, ContractError, SluiceError
from sluice.testing import compare
from sluice.testing.case import whole_storage
from tests.wrong_calls.right import Call, call
from tests.wrong_calls.spoil import Spoilt, kinds_of, spoil


class WrongAnswerError(AssertionError):
    """A wrong call had an answer that is not allowed."""


def operator(seed: int) -> str:
    """One wrong call of an operator: what came of it, in a word."""
    made, spoilt = _prepare(seed, None)
    before = _memory(made.arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = made.function(**made.arguments)
        except SluiceError as error:
            _unchanged(made, before, ())
            _named(made, spoilt, error)
            return "refused"
        except Exception as error:
            if any(f"for argument '{s.argument}'" in str(error) for s in spoilt):
                return "refused"  # by torch, which traces a call without data, and names it
            raise WrongAnswerError(
                f"{_text(made, spoilt)}\n  raised {type(error).__name__}: {str(error)[:200]}"
            ) from error
        _unchanged(made, before, made.written)
        return _same_as_reference(seed, made, spoilt, result)


def _prepare(seed: int, backend: str | None) -> tuple[Call, list[Spoilt]]:
    """The same call each time: its tensors are made anew."""
    dice = random.Random(seed)
    made = call(dice, backend)
    kinds = kinds_of(made.function)
    spoilt = []
    for name in dice.sample(sorted(kinds), 1 if dice.random() < 0.85 else 2):
        right = made.arguments.get(name)
        if right is None and name in made.extras:
            right = made.extras[name]
            if dice.random() < 0.3:  # right by itself; beside the others, perhaps not
                made.arguments[name] = right
                spoilt.append(Spoilt(name, "given", right, False))
                continue
        found = spoil(dice, name, right, kinds[name])
        made.arguments[name] = found.value
        spoilt.append(found)
    return made, spoilt


def _text(made: Call, spoilt: list[Spoilt]) -> str:
    done = "; ".join(f"{s.argument} {s.how}" for s in spoilt)
    rest = ", ".join(f"{n}={_short(x)}" for n, x in made.arguments.items())
    return f"{made.name}: {done}\n  with {rest}"


def _short(x: Any) -> str:
    if isinstance(x, Tensor):
        values = (
            f" {x.tolist()}"
            if x.dtype in (torch.int32, torch.int64) and x.numel() < 9 and x.device.type == "cpu"
            else ""
        )
        return f"{str(x.dtype)[6:]}{list(x.shape)}{values}"
    if isinstance(x, tuple):
        return f"({', '.join(map(_short, x))})"
    return repr(x)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.device.type != "meta" and x.layout == torch.strided else []
    return [y for part in x for y in _tensors(part)] if isinstance(x, tuple) else []


def _memory(arguments: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """Every tensor of a call, and its whole storage as it is now."""
    found = []
    for name, value in arguments.items():
        for x in _tensors(value):
            found.append((name, x, _bytes(x).clone()))
    return found


def _bytes(x: Tensor) -> Tensor:
    return whole_storage(x.detach()).view(torch.uint8)


def _unchanged(made: Call, before: list[tuple[str, Tensor, Tensor]], free: tuple[str, ...]) -> None:
    for name, x, bits in before:
        if name not in free and not torch.equal(_bytes(x), bits):
            raise WrongAnswerError(
                f"{made.name}: {name} was changed; given {made.arguments.keys()}"
            )


def _named(made: Call, spoilt: list[Spoilt], error: SluiceError) -> None:
    """The error must name the argument; where two no longer fit together, one of the call's."""
    text = str(error)
    if isinstance(error, BackendError) and not isinstance(error, ContractError):
        return  # every backend says for itself why it does not serve the call
    allowed = {s.argument for s in spoilt}
    for value in made.arguments.values():
        if hasattr(value, "_fields"):
            allowed |= {*value._fields} if not isinstance(value, str) else set()
    if not all(s.exact for s in spoilt):
        allowed |= set(kinds_of(made.function))
    words = set(re.findall(r"\w+", text.partition(": expected")[0].partition(":")[2]))
    words |= {word for word in re.findall(r"\w+", text) if len(word) > 3}
    words |= set(re.findall(r"(\w+)=", text))
    if not words & _aliases(allowed):
        raise WrongAnswerError(f"{_text(made, spoilt)}\n  the error does not name it: {text}")


def _aliases(names: set[str]) -> set[str]:
    more = {"qkvz": {"qkv", "z"}, "ba": {"b", "a"}, "draft": {"state", "conv_state", "conv_inputs"}}
    return names | {y for x in names for y in more.get(x, set())}


def _same_as_reference(seed: int, made: Call, spoilt: list[Spoilt], result: Any) -> str:
    """A call that was served must have the result of the plainest backend."""
    if "backend" in made.arguments or any(x.device.type == "meta" for x in _all(result)):
        return "served"
    if not all(_sound(x) for s in spoilt for x in _tensors(s.value)):
        return "served"  # nothing is promised of numbers that are none, or overflow
    again, _ = _prepare(seed, "reference")
    try:
        want = again.function(**again.arguments, backend="reference")
    except BackendError:
        return "served"
    except Exception as error:
        if "inference tensor" in str(error):  # torch's own rule, for a backend in plain torch
            return "served"
        raise WrongAnswerError(
            f"{_text(made, spoilt)}\n  served, but the reference: {type(error).__name__}: {error}"
        ) from error
    pairs = list(zip(_all(result), _all(want), strict=True))
    for name in made.written:
        if name in made.arguments and name != "buffers":
            kept = zip(_tensors(made.arguments[name]), _tensors(again.arguments[name]), strict=True)
            pairs += [] if name == "draft" else list(kept)
    for got, exact in pairs:
        _agree(made, spoilt, got, exact)
    return "right"


def _sound(x: Tensor) -> bool:
    return not x.is_floating_point() or bool((x.detach().float().abs() <= 1e6).all())


def _all(x: Any) -> list[Tensor]:
    """Tensors of a result; of a draft, those that are promised."""
    if isinstance(x, sluice.Draft):
        return []
    if isinstance(x, Tensor):
        return [x]
    return [y for part in x for y in _all(part)] if isinstance(x, tuple) else []


def _agree(made: Call, spoilt: list[Spoilt], got: Tensor, exact: Tensor) -> None:
    """Both are within the contract's error of the truth; what is not finite is so in both."""
    a, b = got.detach().double(), exact.detach().double()
    ok = a.shape == b.shape and got.dtype == exact.dtype
    finite = a.isfinite() & b.isfinite() if ok else a
    ok = ok and bool((a.isfinite() == b.isfinite()).all())
    if ok:
        a, b = (torch.where(finite, x, 0.0) for x in (a, b))
        dtype = min((got.dtype, *_dtypes(made)), key=lambda d: d.itemsize)
        limit = 2 * (compare.tolerance(dtype, got.dtype))
        size, error = b.norm().item(), (a - b).norm().item()
        ok = error <= limit * size + 1e-30 or error == 0.0
    if not ok:
        raise WrongAnswerError(f"{_text(made, spoilt)}\n  another result than the reference's")


def _dtypes(made: Call) -> list[torch.dtype]:
    found = [x.dtype for value in made.arguments.values() for x in _tensors(value)]
    return [d for d in found if d.is_floating_point and d.itemsize > 1] or [torch.float32]
