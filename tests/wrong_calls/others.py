"""Wrong calls of what is no operator: StatePool and its methods, the layer, helpers, commands."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import sluice
from sluice import cli
from sluice.contract.errors import SluiceError
from sluice.layers import QwenShape
from sluice.state_pool import PoolGeometry, StatePool
from tests.wrong_calls.judge import WrongAnswerError
from tests.wrong_calls.spoil import kinds_of, spoil

GEOMETRY = PoolGeometry(
    layers=2, num_v_heads=2, conv_channels=32, head_k_dim=8, head_v_dim=8, conv_dtype=torch.float32
)
SHAPE = QwenShape("small", 32, 1, 2, 1, (0,), head_k_dim=8, head_v_dim=8)
ROWS: tuple[Any, ...] = (
    -1, 0, 1, 4, 5, 99, True, 1.5, "1", None, [], [0, 0], [0, "1"], [[0]], [None], (1, 2), {0, 1},
    torch.tensor([0, 1]), torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0, 1]]),
    torch.tensor(3), torch.zeros(0), torch.tensor([0], device="meta"), range(3), b"\x01", 2**70,
)  # fmt: skip


def _pool() -> StatePool:
    pool = StatePool(GEOMETRY, 6)
    pool.allocate(3)
    pool.conv.normal_(generator=torch.Generator().manual_seed(1))
    pool.recurrent.normal_(generator=torch.Generator().manual_seed(2))
    return pool


def _stale(pool: StatePool) -> Any:
    (slot,) = pool.allocate(1)
    pool.free(slot)
    return slot


def _affordable(value: Any) -> Any:
    """A size that could be right is not so large that memory for it is the question."""
    return 300 if type(value) is int and value > 300 else value


def method(seed: int) -> str:
    """A wrong call of a pool's method: refused and nothing changed, or slots still add up."""
    dice = random.Random(seed)
    pool, other = _pool(), _pool()
    saved = pool.snapshot([0, 1])
    name, right = dice.choice(
        [
            ("allocate", {"n": 2}),
            ("claim", {"slots": [4]}),
            ("free", {"slots": [0]}),
            ("indices", {"slots": [0, 1], "pad_to": 4, "dtype": torch.int32}),
            ("fork", {"slots": [0], "copies": 2}),
            ("snapshot", {"slots": [0, 2], "device": "cpu"}),
            ("restore", {"snapshot": saved, "slots": [0, 1]}),
            ("draft_buffers", {"tokens": 3, "rows": 2, "dtype": torch.float32}),
            ("layer", {"index": 1}),
        ]
    )
    function = getattr(pool, name)
    spoilt = dice.choice(sorted(right))
    if spoilt == "slots":
        value = dice.choice((*ROWS, _stale(pool), other.allocated[0], [0, _stale(pool)]))
    else:
        value = _affordable(
            spoil(dice, spoilt, right[spoilt], kinds_of(function).get(spoilt)).value
        )
    arguments = {**right, spoilt: value}
    before = pool.conv.clone(), pool.recurrent.clone(), list(map(int, pool.allocated))
    what = f"StatePool.{name}({spoilt}={value!r})"
    words = {spoilt, *kinds_of(function), "slot", "slots"}
    if _refused(what, lambda: function(**arguments), words):
        same = torch.equal(pool.conv, before[0]) and torch.equal(pool.recurrent, before[1])
        if not same or list(map(int, pool.allocated)) != before[2]:
            raise WrongAnswerError(f"{what}: was refused, and changed the pool")
        return "refused"
    rows = list(map(int, pool.allocated))
    if (
        pool.available + len(rows) != 6
        or len(set(rows)) < len(rows)
        or not set(rows) <= {*range(6)}
    ):
        raise WrongAnswerError(f"{what}: {pool.available} free and {rows} allocated, of 6")
    kept = [r for r in before[2] if name not in ("restore",)]
    if not torch.equal(pool.recurrent[:, kept], before[1][:, kept]):
        raise WrongAnswerError(f"{what}: changed rows of others")
    return "right"


def made(seed: int) -> str:
    """A wrong call of a constructor or a helper."""
    dice = random.Random(seed)
    name, function, right = dice.choice(_makers())
    spoilt = dice.choice(sorted(right))
    value = _affordable(spoil(dice, spoilt, right[spoilt], kinds_of(function).get(spoilt)).value)
    what = f"{name}({spoilt}={value!r})"
    words = {spoilt, *kinds_of(function), "geometry", "expected"}
    done = _refused(what, lambda: function(**{**right, spoilt: value}), words)
    return "refused" if done else "served"


def _use(name: Any) -> None:
    with sluice.use_backend(name):
        pass


def _layer(**given: Any) -> Any:
    layer = sluice.GatedDeltaNet(SHAPE).requires_grad_(False)
    conv_state, state = layer.zero_states(2)
    return layer(**{"conv_state": conv_state, "state": state, **given})


_layer.__annotations__ = {}


def _makers() -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
    pool = {"geometry": GEOMETRY, "slots": 3, "state_layout": "vk", "conv_order": "dl"}
    sizes = {"layers": 2, "num_v_heads": 2, "conv_channels": 32, "head_k_dim": 8, "head_v_dim": 8}
    dtypes = {"state_dtype": torch.float32, "conv_dtype": torch.float32}
    conv, state = torch.zeros(2, 3, 32, 3), torch.zeros(2, 3, 2, 8, 8)
    held = {"geometry": GEOMETRY, "conv": conv, "recurrent": state}
    rows = {"slots": torch.tensor([0, 1]), "has_state": torch.tensor([True, False])}
    tokens = torch.zeros(2, 3, 32)
    return [
        ("StatePool", StatePool, {**pool, "reserve_slot_0": False, "device": "cpu"}),
        ("PoolGeometry", PoolGeometry, {**sizes, "conv_columns": 3, **dtypes}),
        (
            "StatePool.for_model",
            StatePool.for_model,
            {"model": "qwen3.5-0.8b", "slots": 1, "tp": 16, "conv_columns": 3, **dtypes},
        ),
        ("from_tensors", StatePool.from_tensors, {"conv": conv, "recurrent": state}),
        ("StateSnapshot", sluice.StateSnapshot, held),
        ("bytes_per_sequence", StatePool.bytes_per_sequence, {"model": "qwen3.5-4b"}),
        (
            "sequences_that_fit",
            StatePool.sequences_that_fit,
            {"memory": "20 GB", "model": "qwen3.5-4b"},
        ),
        ("use_backend", _use, {"name": "reference"}),
        ("doctor", sluice.doctor, {"device": "cpu"}),
        ("explain", sluice.explain, {"op": "decode"}),
        ("accelerate", sluice.accelerate, {"model": None}),
        ("restore", sluice.restore, {"model": None}),
        ("GatedDeltaNet", sluice.GatedDeltaNet, {"shape": SHAPE, "dtype": torch.float32}),
        ("GatedDeltaNet()", _layer, {"hidden_states": tokens, **rows}),
        ("StateSnapshot.load", sluice.StateSnapshot.load, {"path": "/nowhere/file"}),
    ]


def _refused(what: str, call: Callable[[], Any], words: set[str]) -> bool:
    """Whether it was refused, by an error of the library that names an argument."""
    try:
        call()
    except SluiceError as error:
        if not words & set(re.findall(r"\w+", str(error))):
            raise WrongAnswerError(f"{what}: the error names no argument: {error}") from error
        return True
    except OSError as error:  # of a file that is not there
        if error.filename is None and "No such file" not in str(error):
            raise WrongAnswerError(f"{what}: raised {type(error).__name__}: {error}") from error
        return True
    except Exception as error:
        if "required positional argument" in str(error) or "same dtype" in str(error):
            return True  # Python's own words, which name it; a projection's, of the layer
        raise WrongAnswerError(f"{what}: raised {type(error).__name__}: {error}") from error
    return False


# -------------------------------------------------------------------------------------- commands

WORDS = ("", "-1", "0", "x", "1.5", "tpu", "cuda:99", "nan", "1e99", "/nowhere/at/all", "é", "--")


def command(seed: int) -> str:
    """A wrong command line: status 2 and a line that says why, or a helpful page."""
    dice = random.Random(seed)
    parsers = _parsers()
    name = dice.choice(sorted(parsers))
    with tempfile.TemporaryDirectory() as folder:
        argv = [name, *_wrong(dice, parsers[name], folder)]
        out, err = io.StringIO(), io.StringIO()
        what = f"sluice {' '.join(map(repr, argv))}"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _no_work():
                code = cli.main(argv)
        except SystemExit as end:
            code = end.code
        except StartedError:
            return "served"
        except Exception as error:
            raise WrongAnswerError(f"{what}: raised {type(error).__name__}: {error}") from error
    said = err.getvalue().strip()
    if code == 0:
        return "served"
    if code != 2 or not said or "Traceback" in said:
        raise WrongAnswerError(f"{what}: status {code}, said {said[-300:]!r}")
    return "refused"


class StartedError(Exception):
    """A command has found nothing wrong and begins its work, which nobody waits for here."""


@contextlib.contextmanager
def _no_work() -> Iterator[None]:
    def begin(*args: Any, **kwargs: Any) -> None:
        raise StartedError

    works = (("bench.command", "_run"), ("demo", "run"), ("warmup", "run"))
    with contextlib.ExitStack() as stack:
        for module, name in works:
            found = importlib.import_module(f"sluice.{module}")
            stack.enter_context(mock.patch.object(found, name, begin))
        warmup = importlib.import_module("sluice.warmup")
        stack.enter_context(mock.patch.object(warmup, "compile_aside", return_value=[]))
        yield


def _parsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def _wrong(dice: random.Random, parser: argparse.ArgumentParser, folder: str) -> list[str]:
    """Options with a value that none of them takes."""
    kinds = [a for a in parser._actions if a.option_strings and a.nargs != 0]
    way = dice.random()
    if way < 0.1:
        return [f"--{dice.choice(('no-such', 'modle', 'q', 'json-file'))}", "1"]
    if way < 0.2:
        return ["surplus", "words"]
    action = dice.choice(kinds)
    option = action.option_strings[-1]
    if way < 0.25:
        return [option]  # and no value
    if isinstance(action.type, type) and issubclass(action.type, Path):
        return [option, f"{folder}/no/such/place"]
    return [option, dice.choice(WORDS)]
