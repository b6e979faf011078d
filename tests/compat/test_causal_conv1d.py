"""causal-conv1d's functions: exact, in place where upstream is, and nothing ignored."""

from __future__ import annotations

import pytest
import torch

from sluice.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from sluice.contract.errors import ContractError
from sluice.testing import oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within

D = 6


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_within(a, b, FLOAT32_CPU, name="y or state")


def exact(x, weight, bias=None, **options):
    y, state = oracle.conv(x.mT, weight, bias, **options)[:2]
    return y.mT, state


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("W", [2, 3, 4, 5])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_fn(W, activation, channel_last):
    x, weight, bias = drawn(2, D, 11), drawn(D, W), drawn(D)
    x = x.mT.contiguous().mT if channel_last else x
    options = {"activation": "silu" if activation else None}
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    close([y], exact(x, weight, bias, **options)[:1])
    assert y.stride() == x.stride() or W == 5
    states = drawn(2, D, W - 1)
    out, before = torch.full((2, D, W - 1), float("nan")), states.clone()
    y, final = causal_conv1d_fn(
        x, weight, bias, None, states, True, final_states_out=out, activation=activation
    )
    close([y, final], exact(x, weight, bias, state=states, **options))
    assert final is out
    assert torch.equal(states, before)
    y, final = causal_conv1d_fn(x, weight, bias, None, states, True, activation=activation)
    close([y, final], exact(x, weight, bias, state=states, **options))


def test_fn_keeps_packed_sequences_apart():
    x, weight = drawn(2, D, 9), drawn(D, 4)
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [7, 7, 2, 2, 2, 2, 2, -1, -1]])
    y = causal_conv1d_fn(x, weight, seq_idx=numbers, activation="silu")
    for row, a, b in ((0, 0, 4), (0, 4, 9), (1, 0, 2), (1, 2, 7)):
        part = x[row : row + 1, :, a:b]
        close([y[row : row + 1, :, a:b]], exact(part, weight)[:1])
    assert not y[1, :, 7:].any()


@pytest.mark.parametrize("W", [2, 4, 5])
def test_fn_gives_initial_states_to_the_first_sequence_of_each_row(W):
    x, weight, states = drawn(3, D, 9), drawn(D, W), drawn(3, D, W - 1)
    numbers = torch.tensor([[0] * 2 + [1] * 7, [5] * 9, [-1] * 3 + [4] * 6])
    y = causal_conv1d_fn(x, weight, seq_idx=numbers, initial_states=states)
    options = {"activation": None}
    for row, a, b, state in ((0, 0, 2, 0), (0, 2, 9, None), (1, 0, 9, 1), (2, 3, 9, None)):
        part = x[row : row + 1, :, a:b]
        given = torch.zeros(1, D, W - 1) if state is None else states[state : state + 1]
        close([y[row : row + 1, :, a:b]], exact(part, weight, state=given, **options)[:1])
    assert not y[2, :, :3].any()
    wanted = states.clone().requires_grad_()
    causal_conv1d_fn(x, weight, seq_idx=numbers, initial_states=wanted).sum().backward()
    reached = wanted.grad.abs().sum((1, 2)) > 0
    assert reached.tolist() == [True, True, False]
    empty = causal_conv1d_fn(x[..., :0], weight, seq_idx=numbers[:, :0], initial_states=states)
    assert empty.shape == (3, D, 0)
    with pytest.raises(ContractError, match="causal_conv1d_fn: initial_states: expected shape"):
        causal_conv1d_fn(x, weight, seq_idx=numbers, initial_states=states[:2])


@pytest.mark.parametrize("L", [3, 4, 9])
@pytest.mark.parametrize("T", [None, 1, 5])
def test_update(T, L):
    x = drawn(3, D) if T is None else drawn(3, D, T)
    weight, bias, state = drawn(D, 4), drawn(D), drawn(3, D, L)
    line = x.unsqueeze(-1) if T is None else x
    expected = exact(line, weight, bias, state=state)
    y = causal_conv1d_update(x, state, weight, bias, "silu")
    assert y.shape == x.shape
    close([y.view(line.shape), state], expected)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_update_of_slots_leaves_the_others_and_padding_alone(T, ring):
    x, weight, pool = drawn(4, D, T), drawn(D, 4), drawn(9, D, 6)
    slots = torch.tensor([7, -1, 0, 3], dtype=torch.int32)
    at = torch.tensor([0, 5, 2, 1029], dtype=torch.int32)
    live, before = [0, 2, 3], pool.clone()
    if ring:  # unrolled: the oldest column comes first
        rolled = torch.stack([before[s].roll(-int(at[i] % 6), -1) for i, s in enumerate(slots)])
    else:
        rolled = before[slots.long()]
    y_exact, after = exact(x, weight, state=rolled, activation=None)
    y = causal_conv1d_update(
        x, pool, weight, cache_seqlens=at if ring else None, conv_state_indices=slots
    )
    close([y[live]], [y_exact[live]])
    assert not y[1].any()
    for i in live:
        columns = after[i].roll(int((at[i] + T) % 6), -1) if ring else after[i]
        close([pool[slots[i]]], [columns])
    others = [i for i in range(9) if i not in (7, 0, 3)]
    assert_same_bits(pool[others], before[others], "other slots")


def test_states_of_packed_sequences():
    x, borders = drawn(9, D), torch.tensor([0, 2, 2, 9])
    found = causal_conv1d_varlen_states(x, borders, 4)
    expected = torch.zeros(3, D, 4)
    expected[0, :, 2:] = x[:2].T
    expected[2] = x[5:].T
    assert_same_bits(found, expected, "states")


def test_what_is_not_served_is_refused_by_name():
    x, weight, numbers = drawn(1, D, 9), drawn(D, 4), torch.zeros(1, 9)
    for options in (
        {"activation": "gelu"},
        {"final_states_out": torch.zeros(1, D, 3)},
        {"return_final_states": True, "seq_idx": numbers},
        {"seq_idx": numbers[:, 1:]},
    ):
        with pytest.raises(ContractError, match=f"causal_conv1d_fn: {next(iter(options))}"):
            causal_conv1d_fn(x, weight, **options)
    with pytest.raises(ContractError, match="causal_conv1d_update: activation"):
        causal_conv1d_update(x, torch.zeros(1, D, 3), weight, activation="gelu")
    with pytest.raises(ContractError, match="state"):
        causal_conv1d_update(x, torch.zeros(1, D, 2), weight)
