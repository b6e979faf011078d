"""Right calls of every operator, small and of every form, for ``spoil`` to spoil."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.testing.case import Case

SMALL: dict[str, Any] = {"Hk": 1, "Hv": 2, "K": 8, "V": 8, "index_dtype": torch.int64}
PACKED: dict[str, Any] = {"lengths": (3, 0, 2), "tail": 1}
DENSE: dict[str, Any] = {"batch": 3, "tokens": 2}
ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"moved": True},
    {"padded": (1,)},
    {"new": (0,)},
    {"pad_slot": 0, "padded": (2,)},
    {"state": "none"},
    {"state": "rows"},
)


@dataclass
class Call:
    """A function, and its arguments by name."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    backend: bool = True
    """Whether it is an operator: another backend can say what the result must be."""
    written: tuple[str, ...] = ("state", "conv_state", "out", "buffers", "draft")
    """Arguments that it may write."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Right values of optional arguments that the call does without."""


def call(dice: random.Random, backend: str | None = None) -> Call:
    """A right call of one operator. ``backend`` makes what a call needs before it."""
    op = dice.choice(sorted(MAKERS))
    return MAKERS[op](dice, backend)


def _delta(op: str, dice: random.Random, backend: str | None) -> Call:
    form = dice.choice((PACKED, DENSE))
    rows = dict(dice.choice(ROWS))
    if op == "verify" and rows.get("state") in ("none", "rows"):
        rows = {}
    if op == "verify":
        rows["accepted"] = tuple(form.get("lengths", (2, 2, 2)))
        rows["with_conv"] = dice.random() < 0.5
    options: dict[str, Any] = {
        "raw": dice.random() < 0.5,
        "normalize": dice.random() < 0.5,
        "state_layout": dice.choice(("vk", "kv")),
        "host_lengths": form is PACKED and dice.random() < 0.3,
        "flat": form is PACKED and dice.random() < 0.3,
        "strided": dice.random() < 0.3,
    }
    if op == "prefill" and rows.get("state") != "none" and dice.random() < 0.3:
        options |= dice.choice(({"every": 2}, {"positions": ((1,), (0,), (2,))}))
    case = Case(f"wrong/{op}", op, **SMALL, **form, **rows, **options)
    given = case.inputs(_dtype(dice), "cpu", dice.randrange(1 << 16))
    accepted = given.pop("num_accepted", None)
    if isinstance(given.get("checkpoints"), dict):
        given["checkpoints"] = sluice.Checkpoints(**given["checkpoints"])
    made = Call(op, getattr(sluice, op), given)
    made.extras = _extras(given, case)
    if op != "verify" or accepted is None:
        return made
    made.extras["num_accepted"] = accepted
    return made


def _extras(given: dict[str, Any], case: Case) -> dict[str, Any]:
    v = given["v"]
    heads = max(case.query_heads, case.Hv)
    extras: dict[str, Any] = {
        "scale": 0.5,
        "out": v.new_empty(*v.shape[:-2], heads, case.V),
        "slots": torch.tensor([2, 0, 1]),
        "write_slots": torch.tensor([2, 0, 1]),
        "has_state": torch.tensor([True, False, True]),
    }
    if case.op == "prefill":
        extras["initial_state"] = torch.zeros(3, case.Hv, case.V, case.K)
    return extras


def _commit(dice: random.Random, backend: str | None) -> Call:
    """Of a draft that ``backend`` has verified."""
    verified = _delta("verify", dice, backend)
    accepted = verified.extras.pop("num_accepted")
    _, draft = sluice.verify(**verified.arguments, backend=backend)  # type: ignore[arg-type]
    given = {"draft": draft, "num_accepted": accepted}
    return Call("commit", sluice.commit, given, extras={"write_slots": torch.tensor([2, 0, 1])})


def _commit_layers(dice: random.Random, backend: str | None) -> Call:
    gen = torch.Generator().manual_seed(dice.randrange(1 << 16))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    layers, S, M = 2, 4, 3
    buffers = sluice.DraftBuffers(
        normal(layers, S, M, 1, 8) * 0.3,
        normal(layers, S, M, 2, 8),
        -normal(layers, S, M, 2).abs(),
        normal(layers, S, M, 32),
    )
    given = {
        "buffers": buffers,
        "num_accepted": torch.tensor([1, 3]),
        "state": normal(layers, S, 2, 8, 8),
        "conv_state": normal(layers, S, 32, 3),
        "slots": torch.tensor([2, 0]),
    }
    extras = {"draft_slots": torch.tensor([2, 0]), "has_state": torch.tensor([True, False])}
    return Call("commit_layers", sluice.commit_layers, given, extras=extras)


def _conv(op: str, dice: random.Random, backend: str | None) -> Call:
    form = dice.choice((PACKED, DENSE))
    rows = dict(dice.choice(ROWS))
    options: dict[str, Any] = {
        "bias": dice.random() < 0.5,
        "activation": dice.choice(("silu", None)),
        "conv_order": dice.choice(("dl", "ld")),
        "freeze": dice.random() < 0.2 and not rows.get("moved") and rows.get("state") != "none",
        "raw": op == "conv_qkv",
    }
    if op == "causal_conv1d" and form is DENSE:
        options["layout"] = dice.choice(("btd", "bdt"))
    if not options["freeze"] and rows.get("state") != "none" and dice.random() < 0.3:
        options |= dice.choice(({"every": 2}, {"positions": ((1,), (0,), (2,))}))
    case = Case(f"wrong/{op}", op, **SMALL, **form, **rows, **options)
    given = case.inputs(_dtype(dice), "cpu", dice.randrange(1 << 16))
    if isinstance(given.get("checkpoints"), dict):
        given["checkpoints"] = sluice.Checkpoints(**given["checkpoints"])
    extras: dict[str, Any] = {
        "slots": torch.tensor([2, 0, 1]),
        "write_slots": torch.tensor([2, 0, 1]),
        "window_start": torch.tensor([0, 0, 0]),
        "initial_state": torch.zeros(3, case.channels, 3),
    }
    if op == "causal_conv1d":
        extras["out"] = torch.empty_like(given["x"])
    return Call(op, getattr(sluice, op), given, extras=extras)


def _norm(dice: random.Random, backend: str | None) -> Call:
    given = Case("wrong/norm", "rms_norm_gated", **SMALL, **DENSE).inputs(_dtype(dice))
    extras = {"out": torch.empty_like(given["x"]), "eps": 1e-5}
    return Call("rms_norm_gated", sluice.rms_norm_gated, given, extras=extras)


def _step(dice: random.Random, backend: str | None) -> Call:
    rows = dict(dice.choice(ROWS[:5]))
    options = {"order": dice.choice(("split", "interleaved")), "raw": True}
    options["pairs"] = options["order"] == "split" and dice.random() < 0.5
    case = Case("wrong/step", "step", **SMALL, **DENSE, **rows, **options)
    given = case.inputs(_dtype(dice), "cpu", dice.randrange(1 << 16))
    first = given["qkvz"] if isinstance(given["qkvz"], Tensor) else given["qkvz"][0]
    extras = {
        "out": first.new_empty(*first.shape[:-1], case.Hv * case.V),
        "slots": torch.tensor([2, 0, 1]),
        "has_state": torch.tensor([True, False, True]),
        "scale": 1.0,
    }
    return Call("step", sluice.step, given, extras=extras)


def _dtype(dice: random.Random) -> torch.dtype:
    return dice.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))


MAKERS: dict[str, Callable[[random.Random, str | None], Call]] = {
    "prefill": lambda dice, backend: _delta("prefill", dice, backend),
    "decode": lambda dice, backend: _delta("decode", dice, backend),
    "verify": lambda dice, backend: _delta("verify", dice, backend),
    "causal_conv1d": lambda dice, backend: _conv("causal_conv1d", dice, backend),
    "conv_qkv": lambda dice, backend: _conv("conv_qkv", dice, backend),
    "commit": _commit,
    "commit_layers": _commit_layers,
    "rms_norm_gated": _norm,
    "step": _step,
}
