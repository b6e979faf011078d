"""A rank that dies, hangs or disagrees soon becomes an error on the others, not a hang or a crash.

Without the agreement before it, a collective of unequal sizes would make gloo abort the process.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sluice.contract.errors import ContractError
from sluice.distributed import (
    RankError,
    Ranks,
    Split,
    causal_conv1d,
    move,
    parallelize,
    prefill,
)
from sluice.layers import GatedDeltaNet, QwenShape
from tests.distributed.processes import on_ranks, values

TIMEOUT = 4.0
SOON = TIMEOUT + 6.0  # a machine may be busy


def arguments(rank, split, **change):
    part = split.part(rank)
    T = part.stop - part.start
    gen = torch.Generator().manual_seed(rank)
    args = {
        "q": torch.randn(T, 2, 8, generator=gen),
        "k": torch.randn(T, 2, 8, generator=gen) / 8,
        "v": torch.randn(T, 2, 8, generator=gen),
        "g": -torch.rand(T, 2, generator=gen),
        "beta": torch.rand(T, 2, generator=gen),
    }
    return {**args, **change}


def small_layer():
    torch.manual_seed(0)
    shape = QwenShape("s", 8, 4, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
    return GatedDeltaNet(shape).requires_grad_(False)


# ---- ranks that are lost ------------------------------------------------------------------------


def lose_a_rank(rank, size, how):
    """Lose the last rank; returns what the others raise, and after how long."""
    ranks = Ranks(timeout=TIMEOUT)
    split = Split.even(64 * size, size, (0, 64 * size))
    layer = parallelize(small_layer(), None, ranks=ranks) if "layer" in how else None
    dist.barrier()  # all have connected, so all notice a loss
    lost = rank == size - 1
    if lost and how in ("before", "before layer"):
        os._exit(7)
    if lost and how == "between":  # after all agreed, before the exchange
        ranks.all_gather = lambda *_: os._exit(7)
    if lost and how == "asleep":
        time.sleep(60)
    start = time.perf_counter()

    def call():
        if layer is not None:
            return layer(torch.randn(1, 5, 8))
        return prefill(**arguments(rank, split), ranks=ranks, split=split, deliver="all")

    with pytest.raises(RankError) as caught:
        call()
    return str(caught.value), time.perf_counter() - start


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["before", "between", "asleep", "before layer"])
def test_a_lost_rank_is_an_error_on_the_others(how, size, tmp_path):
    outcomes = on_ranks(lose_a_rank, size, tmp_path, size, how, limit=60, lost=size - 1)
    assert outcomes[-1] is None
    for rank, (message, seconds) in enumerate(values(outcomes[:-1])):
        assert seconds < SOON, message
        assert f"rank {rank}: expected an answer of all {size} ranks within 4 s" in message
        assert message.startswith(("distributed.prefill", "prefill.", "heads"))


# ---- ranks that disagree ------------------------------------------------------------------------


def disagree(rank, size):
    """One rank at a time gets other arguments; all must raise and stay in step."""
    ranks = Ranks(timeout=20)
    split = Split.even(64 * size, size, (0, 64 * size))
    other = Split((0, *(60 + 64 * r for r in range(size - 1)), 64 * size), (0, 64 * size))
    odd = rank == size - 1
    half = {name: x.bfloat16() for name, x in arguments(rank, split).items() if name in "qkv"}
    wide = {"v": torch.zeros(64, 2, 16)}
    where = f"(rank {size - 1})"

    def expect(change, *texts):
        mine = arguments(rank, change.get("split", split))
        with pytest.raises(RankError) as caught:
            prefill(**{**mine, "ranks": ranks, "split": split, **change})
        for text in (*texts, where):
            assert text in str(caught.value), f"{text!r} not in {caught.value}"

    def unless_odd(change):
        return change if odd else {}

    expect(unless_odd(half), "dtype: expected torch.float32 (rank 0), got torch.bfloat16")
    expect(unless_odd(wide), "widths: expected K=8, V=8 (rank 0), got K=8, V=16")
    expect(unless_odd({"split": other}), "split: expected")
    expect(unless_odd({"deliver": 0}), "deliver: expected end (rank 0), got 0")
    expect(unless_odd({"exchange": "scan"}), "exchange: expected auto (rank 0), got scan")
    expect(unless_odd({"beta": None}), "beta: expected True (rank 0), got False")
    expect(unless_odd({"scale": 2.0}), "options: expected")
    out_of_step(rank, size, ranks, split)
    return "in step"


def out_of_step(rank, size, ranks, split):
    """One rank runs the convolution where the others run the recurrence."""

    def call():
        if rank == size - 1:
            x = torch.zeros(64, 4)
            return causal_conv1d(x, torch.zeros(4, 4), ranks=ranks, split=split)
        return prefill(**arguments(rank, split), ranks=ranks, split=split)

    with pytest.raises(RankError, match="in the same call"):
        call()


def refuse(rank, size):
    """Bad arguments on one rank: its own error there, the same words on the others."""
    ranks = Ranks(timeout=20)
    split = Split.even(64 * size, size, (0, 64 * size))
    odd = rank == size - 1
    nan = torch.full((64, 2), float("nan"))
    cases = (
        ({"v": torch.zeros(64, 3, 8)}, "prefill: v: expected"),
        ({"v": torch.zeros(63, 2, 8)}, "prefill: v: expected"),
        ({"slots": [0]}, "distributed.prefill: slots: expected state beside it"),
        ({"g": nan}, "prefill: g"),  # found by the operator, after the metadata checks
        ({"deliver": size}, "deliver: expected"),
        ({"deliver": "first"}, "deliver: expected"),
        ({"exchange": "mail"}, "exchange: expected"),
        ({"split": Split((0, 64))}, f"split: expected parts for {size} ranks, got 1"),
    )
    for change, text in cases:
        change = change if odd else {}
        with pytest.raises(ContractError if odd else RankError) as caught:
            prefill(**{**arguments(rank, split), "ranks": ranks, "split": split, **change})
        assert text in str(caught.value), str(caught.value)
        if not odd:
            assert f"refusals: rank {size - 1}: ContractError" in str(caught.value)
    with pytest.raises(ContractError if odd else RankError, match="snapshot"):
        # no rank has a state to send, and only the last one is a source
        move(None, ranks=ranks, sources=[size - 1], targets=[0])
    prefill(**arguments(rank, split), ranks=ranks, split=split)
    return "in step"


def divide_wrongly(rank, size):
    """Layers that differ, and hidden states that differ."""
    ranks = Ranks(timeout=20)
    odd = rank == size - 1
    layer = small_layer()
    with pytest.raises(RankError, match=r"dtypes: expected .*float32.* got .*bfloat16"):
        parallelize(small_layer().bfloat16() if odd else small_layer(), None, ranks=ranks)
    with pytest.raises(ContractError if odd else RankError, match="GatedDeltaNet"):
        parallelize(nn.Linear(2, 2) if odd else layer, None, ranks=ranks)
    assert layer.shape.num_k_heads == 4, "a refused layer stays as it was"
    parallelize(layer, None, ranks=ranks)
    with pytest.raises(
        RankError, match=r"output: expected \[1, 5, 8\] \(rank 0\), got \[1, 6, 8\]"
    ):
        layer(torch.zeros(1, 6 if odd else 5, 8))
    with pytest.raises(ContractError, match="not yet divided"):
        parallelize(layer, None, ranks=ranks)
    layer(torch.zeros(1, 5, 8))
    return "in step"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", [disagree, refuse, divide_wrongly])
def test_all_ranks_raise_and_stay_in_step(function, size, tmp_path):
    assert values(on_ranks(function, size, tmp_path, size, limit=60)) == ["in step"] * size


def cannot_divide(rank, size):
    ranks = Ranks(timeout=20)
    with pytest.raises(ContractError, match="a divisor of 3 key heads"):
        parallelize(GatedDeltaNet(QwenShape("s", 8, 3, 3, 1, (0,), 8, 8)), None, ranks=ranks)
    return "in step"


def test_what_cannot_be_divided_is_refused(tmp_path):
    values(on_ranks(cannot_divide, 2, tmp_path, 2, limit=60))


def test_without_a_process_group_ranks_are_refused():
    with pytest.raises(ContractError, match="init_process_group"):
        Ranks()
