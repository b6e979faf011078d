"""Where hopper_state_kernel keeps checkpoints, by its own arithmetic, run as Python. No GPU."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.backends.triton import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="Gluon has no interpreter")
C = 64


class Numbers(list):
    """A pointer: ``x + i`` points i further, and loads read it."""

    def __add__(self, i: Any) -> Any:
        return Numbers(self[i:])


class Number(int):
    """An int32 as kernels divide it: towards zero."""

    def to(self, dtype: Any) -> Number:
        return self


for _name in ("add", "sub", "mul", "radd", "rsub", "rmul"):

    def _made(self: Number, other: Any, by: str = f"__{_name}__") -> Number:
        return Number(getattr(int, by)(self, int(other)))

    setattr(Number, f"__{_name}__", _made)
Number.__floordiv__ = lambda x, y: Number(abs(int(x)) // int(y) * (1 if x >= 0 else -1))
Number.__mod__ = lambda x, y: Number(int(x) - int(Number(x) // y) * int(y))

GL = SimpleNamespace(
    load=lambda at: Number(at[0]),
    where=lambda on, x, y: Number(x if on else y),
    minimum=lambda x, y: Number(min(x, y)),
    maximum=lambda x, y: Number(max(x, y)),
    int32=None,
    int64=None,
)


def functions() -> dict[str, Any]:
    """The kernel's functions, on ordinary numbers."""
    module = pytest.importorskip("sluice.backends.hopper.kernels.state_checkpoints")
    made: dict[str, Any] = {"gl": GL, "C": C, "range": lambda *x: map(Number, range(*map(int, x)))}
    for name in ("token_of", "candidates", "next_border", "tail_of", "first_saved"):
        function = getattr(module, name).fn
        made[name] = types.FunctionType(function.__code__, made)
    return made


def saves(before: int, tokens: int, every: int, positions: list[int] | None, M: int) -> Any:
    return SimpleNamespace(
        positions_ptr=None if positions is None else Numbers(positions),
        every=Number(every),
        number=Number(M),
        before=Number(before),
        tokens=Number(tokens),
    )


def kept(of: Any, at: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Walk over the program's chunks as ``run_state`` does: (checkpoint, chunk, tail tokens)."""
    found, chunk = [], 0
    chunks = -(-int(of.tokens) // C)

    def keep(chunk: int) -> None:
        begin, stop = at["candidates"](of, Number(chunk * C), Number(chunk * C + C - 1))
        for j in range(begin, stop):
            token = at["token_of"](of, Number(j))
            if token >= 0 and token // C == chunk:
                found.append((j, chunk, int(token % C)))

    while chunk < chunks:
        keep(chunk)
        run = min(chunks - chunk, at["next_border"](of, Number(chunk)) - chunk)
        assert run >= 1
        chunk += int(run)
    keep(chunk)
    return found


def kept_between_chunks(of: Any, at: dict[str, Any]) -> list[tuple[int, int]]:
    """The same without tails, as ``keep_state`` does: (checkpoint, chunk)."""
    found = []
    saved, border = at["first_saved"](of)
    for chunks in range(1, -(-int(of.tokens) // C) + 1):
        if chunks == border and chunks * C <= of.tokens:
            if saved < of.number:
                found.append((int(saved), chunks))
            saved, border = saved + 1, border + of.every // C
    return found


PLACES = st.integers(0, 700) | st.integers(0, 10).map(lambda chunks: C * chunks)


@given(
    length=st.integers(0, 700),
    segment=st.sampled_from([64, 192, 1 << 30]),
    every=st.integers(1, 300) | st.sampled_from([32, 64, 96, 128, 192]),
    asked=st.lists(PLACES, min_size=1, max_size=5) | st.none(),
)
def test_every_checkpoint_is_kept_once_where_it_belongs(length, segment, every, asked):
    at = functions()
    positions = None if asked is None else [min(p, length) for p in asked]
    M = max(1, length // every) if positions is None else len(positions)
    wanted = positions or [(j + 1) * every for j in range(M) if (j + 1) * every <= length]
    if asked is not None:
        wanted = positions
    found: list[tuple[int, int]] = []
    for first in range(0, max(length, 1), segment):
        tokens = max(0, min(length - first, segment))
        of = saves(first, tokens, every, positions, M)
        here = kept(of, at)
        if positions is None and every % C == 0:
            assert kept_between_chunks(of, at) == [x[:2] for x in here]
        begin, stop = at["candidates"](of, Number(0), Number(tokens))
        tails = [
            (j, int(before), int(count))
            for j in range(begin, stop)
            for before, count in [at["tail_of"](of, Number(j))]
            if count > 0
        ]
        assert tails == sorted(x for x in here if x[2] > 0)
        found += [(j, first + chunk * C + rest) for j, chunk, rest in here]
    assert sorted(found) == list(enumerate(wanted))


def test_the_parallel_half_makes_the_same_tails():
    module = pytest.importorskip("sluice.backends.hopper.kernels.work_units")
    function = module.tail_span.fn
    tail_span = types.FunctionType(function.__code__, {"gl": GL, "C": C})
    bounds, positions = Numbers([0, 100, 100, 300]), [100, 64, 0, 0, 200, 7]
    spans = [
        tail_span(Number(x), bounds, Numbers(positions), None, Number(300), Number(2))
        for x in range(6)
    ]
    assert [tuple(map(int, s)) for s in spans if s[2] > s[1]] == [
        (0, 64, 100), (2, 292, 300), (2, 100, 107),
    ]  # fmt: skip
    dense = tail_span(Number(3), None, None, Number(50), Number(150), Number(3))
    assert tuple(map(int, dense)) == (1, 150, 200)
