"""Limits exactly at their border, and limits of a row that are not those of its batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sluice
from sluice.testing.compare import assert_same_bits, assert_within
from tests.suite import backends, each_backend

HV, K, P = 2, 16, 7


def tokens(*lead: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, HV, K, generator=generator)
    return {"q": x, "k": x.clone(), "v": x.clone()}


def pool() -> torch.Tensor:
    return torch.randn(P, HV, K, K, generator=torch.Generator().manual_seed(1))


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("backend", backends("decode"))
@pytest.mark.parametrize("name", ["slots", "write_slots"])
def test_the_slot_behind_the_last_is_refused(backend, name):
    state = pool()
    before, given = state.clone(), {"slots": index(1, 2), name: index(1, P)}
    with pytest.raises(sluice.ContractError, match=rf"{name}\[1\]: expected a slot below 7"):
        sluice.decode(**tokens(2, 1), state=state, backend=backend, **given)
    assert_same_bits(state, before, "state")
    given[name] = index(1, P - 1)
    sluice.decode(**tokens(2, 1), state=state, backend=backend, **given)


@pytest.mark.parametrize("backend", backends("verify"))
def test_accepted_tokens_are_held_to_the_rows_own_length(backend):
    """Of packed drafts, a row's length and not the number of all tokens."""
    state = pool()
    borders, where = index(0, 1, 4), {"slots": index(1, 2), "backend": backend}
    _, draft = sluice.verify(**tokens(4), state=state, cu_seqlens=borders, **where)
    before = state.clone()
    with pytest.raises(sluice.ContractError, match=r"num_accepted\[0\]: expected 0 to 1 tokens"):
        sluice.commit(draft, index(2, 1), backend=backend)
    assert_same_bits(state, before, "state")
    sluice.commit(draft, index(1, 3), backend=backend)


@pytest.mark.parametrize("backend", backends("prefill"))
def test_a_checkpoint_is_held_to_the_rows_own_length(backend):
    state = pool()
    where = {"slots": index(1, 2), "cu_seqlens": index(0, 3, 9), "backend": backend}
    before = state.clone()
    kept = sluice.Checkpoints(torch.tensor([[4], [5]]), positions=torch.tensor([[4], [6]]))
    with pytest.raises(sluice.ContractError, match=r"positions\[0, 0\]: expected 0 to 3 tokens"):
        sluice.prefill(**tokens(9), state=state, checkpoints=kept, **where)
    assert_same_bits(state, before, "state")
    kept = sluice.Checkpoints(torch.tensor([[4], [5]]), positions=torch.tensor([[3], [6]]))
    sluice.prefill(**tokens(9), state=state, checkpoints=kept, **where)


def test_buffers_with_gaps_are_refused():
    whole = torch.zeros(P, 3, HV, 2 * K)
    buffers = sluice.DraftBuffers(whole[..., :K], torch.zeros(P, 3, HV, K))
    with pytest.raises(sluice.ContractError, match=r"buffers\.k: expected contiguous"):
        sluice.verify(**tokens(2, 3), state=pool(), slots=index(1, 2), buffers=buffers)


@pytest.mark.parametrize("backend", backends("prefill"))
def test_a_gate_of_the_last_token_that_is_no_number_is_refused(backend):
    gate = -torch.ones(9, HV)
    gate[2, 1] = float("nan")  # the last of the first sequence; the tail may hold anything
    gate[8] = float("nan")
    where = {"cu_seqlens": index(0, 3, 8), "backend": backend}
    with pytest.raises(sluice.ContractError, match=r"g: expected finite values, got nan at \[0, 2"):
        sluice.prefill(**tokens(9), g=gate, **where)
    gate[2, 1] = -1.0
    sluice.prefill(**tokens(9), g=gate, **where)


@pytest.mark.parametrize("op", ["prefill", "decode", "causal_conv1d", "rms_norm_gated"])
def test_kernels_come_before_plain_torch(op):
    plain = [name for name in backends(op) if name in ("chunked", "reference")]
    assert backends(op)[-len(plain) :] == plain


def test_explain_leaves_gradients_as_they_were():
    for on in (True, False):
        with torch.set_grad_enabled(on):
            sluice.explain("decode", **tokens(2, 3))
            assert torch.is_grad_enabled() is on


def test_a_window_that_a_gradient_goes_through_is_not_written():
    x = torch.randn(2, 5, 8, requires_grad=True)
    window = torch.randn(2, 8, 3)
    before = window.clone()
    y, final = sluice.causal_conv1d(x, torch.ones(8, 4), initial_state=window)
    y.sum().backward()
    assert_same_bits(window, before, "the initial window")
    assert not torch.equal(final, before)


CONVOLUTIONS = each_backend("causal_conv1d", "conv_qkv")
HEADS = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 24}
D = 2 * 16 + 2 * 24


def convolve(op: str, backend: str, x: torch.Tensor, **options: Any) -> None:
    heads = HEADS if op == "conv_qkv" else {}
    getattr(sluice, op)(x, torch.ones(D, 4), **heads, **options, backend=backend)


def inputs(*lead: int) -> torch.Tensor:
    return torch.randn(*lead, D, generator=torch.Generator().manual_seed(1))


def windows(slots: int) -> torch.Tensor:
    return torch.randn(slots, D, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 17])
def test_a_window_kept_early_in_a_long_sequence_holds_no_other_sequence(op, backend, position):
    """Shorter than the window, as long as it, and longer."""
    x, state = inputs(60), windows(6)
    first, column = state.clone(), torch.full((2, 1), position)
    kept = sluice.Checkpoints(torch.tensor([[4], [5]]), positions=column)
    where = {"slots": index(1, 2), "cu_seqlens": index(0, 25, 60), "checkpoints": kept}
    convolve(op, backend, x, state=state, **where)
    for slot, start, own in ((4, 0, 1), (5, 25, 2)):
        stream = torch.cat([first[own], x[start : start + position].T], 1)
        assert_same_bits(state[slot], stream[:, -3:], f"slot {slot}")


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
def test_a_checkpoint_that_a_short_sequence_does_not_reach_is_not_written(op, backend):
    x, state = inputs(43), windows(8)
    before = state.clone()
    kept = sluice.Checkpoints(torch.tensor([[4, 5], [6, 7]]), every=16)
    where = {"slots": index(1, 2), "cu_seqlens": index(0, 3, 43), "checkpoints": kept}
    convolve(op, backend, x, state=state, **where)
    assert_same_bits(state[[4, 5]], before[[4, 5]], "slots that were not reached")
    assert_same_bits(state[6], x[16:19].T.contiguous(), "the window after 16 tokens")
    assert_same_bits(state[7], x[32:35].T.contiguous(), "the window after 32 tokens")


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_windows_are_kept_as_often_as_asked(op, backend, every):
    """More often than a window is long, too."""
    x, state = inputs(1, 9), windows(12)
    first, slots = state[1].clone(), torch.arange(2, 2 + 9 // every)
    kept = sluice.Checkpoints(slots[None], every=every)
    convolve(op, backend, x, state=state, slots=index(1), checkpoints=kept)
    for number, slot in enumerate(slots.tolist(), 1):
        stream = torch.cat([first, x[0, : number * every].T], 1)
        assert_same_bits(state[slot], stream[:, -3:].contiguous(), f"slot {slot}")


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
def test_an_early_window_of_a_new_sequence_begins_with_zeros(op, backend):
    """Whatever its slot held before."""
    x, state = inputs(2, 9), windows(6)
    state[1] = float("nan")
    first, slots = state[2].clone(), index(1, 2)
    kept = sluice.Checkpoints(torch.tensor([[4], [5]]), positions=torch.full((2, 1), 2))
    known = torch.tensor([False, True])
    convolve(op, backend, x, state=state, slots=slots, has_state=known, checkpoints=kept)
    for slot, row, old in ((4, 0, torch.zeros(D, 3)), (5, 1, first)):
        stream = torch.cat([old, x[row, :2].T], 1)
        assert_same_bits(state[slot], stream[:, -3:].contiguous(), f"slot {slot}")


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
@pytest.mark.parametrize("lengths", [(0, 0, 0, 3), (1, 0, 2), (3, 0, 0, 0), (0, 9, 1, 0)], ids=str)
@pytest.mark.parametrize("W", [2, 3, 4])
def test_a_window_is_read_before_it_is_rolled(op, backend, lengths, W):
    """By every token that needs it, though the sequences are much shorter on average."""
    total, N = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(total, D, generator=generator)
    weight = torch.randn(D, W, generator=generator)
    state = torch.randn(N, D, W - 1, generator=generator)
    want, after, start = [], [], 0
    for n, length in enumerate(lengths):
        stream = torch.cat([state[n], x[start : start + length].T], 1)
        if length:
            want.append(torch.nn.functional.conv1d(stream, weight[:, None], groups=D).T)
        after.append(stream[:, length:])
        start += length
    borders = torch.tensor([0, *lengths]).cumsum(0)
    where = {"state": state, "slots": torch.arange(N), "cu_seqlens": borders, "activation": None}
    if op == "causal_conv1d":
        got, _ = sluice.causal_conv1d(x, weight, backend=backend, **where)
    else:
        plain = {**HEADS, "normalize_qk": False}
        parts = sluice.conv_qkv(x, weight, **plain, **where, backend=backend)[:3]
        got = torch.cat([part.flatten(1) for part in parts], 1)
    assert_within(got, torch.cat(want), 1e-5, name=op)
    assert_same_bits(state, torch.stack(after), "windows")


@pytest.mark.parametrize(("op", "backend"), CONVOLUTIONS)
def test_a_row_keeps_its_own_windows_and_a_padded_one_none(op, backend):
    x, state = inputs(3, 40), windows(16)
    before = state.clone()
    slots = torch.tensor([[4, 5, -1, 6], [7, 8, 9, 10], [11, -1, 12, 13]])
    positions = torch.tensor([[40, 2, 9, 33], [40, 2, 9, 33], [3, 16, 17, 1]])
    kept = sluice.Checkpoints(slots, positions=positions)
    convolve(op, backend, x, state=state, slots=index(1, -1, 3), checkpoints=kept)
    for row, own in ((0, 1), (2, 3)):
        for slot, position in zip(slots[row].tolist(), positions[row].tolist(), strict=True):
            if slot > 0:
                stream = torch.cat([before[own], x[row, :position].T], 1)
                assert_same_bits(state[slot], stream[:, -3:].contiguous(), f"slot {slot}")
    others = [0, 2, 7, 8, 9, 10, 14, 15]
    assert_same_bits(state[others], before[others], "slots of nobody, and of a padded row")


def test_an_initial_state_without_gradients_is_not_written():
    first = torch.randn(2, HV, K, K, generator=torch.Generator().manual_seed(2))
    before = first.clone()
    _, final = sluice.prefill(**tokens(2, 5), initial_state=first)
    assert_same_bits(first, before, "the initial state")
    assert final.data_ptr() != first.data_ptr()


@pytest.mark.parametrize(("layout", "tail"), [("vk", (5, K)), ("kv", (K, 5))])
def test_a_new_state_has_the_layout_that_is_asked_for(layout, tail):
    given = tokens(2, 3) | {"v": torch.ones(2, 3, HV, 5)}
    assert sluice.prefill(**given, state_layout=layout)[1].shape == (2, HV, *tail)


@pytest.mark.parametrize("backend", backends("decode"))
def test_one_token_with_room_for_drafts_goes_to_its_first_slot(backend):
    state = pool()
    want, before = state.clone(), state.clone()
    sluice.decode(**tokens(2, 1), state=want, slots=index(1, 2), backend=backend)
    each = torch.tensor([[3, 4], [5, 6]])
    where = {"slots": index(1, 2), "write_slots": each, "backend": backend}
    sluice.decode(**tokens(2, 1), state=state, **where)
    assert_same_bits(state[[3, 5]], want[[1, 2]], "states after the token")
    assert_same_bits(state[[0, 1, 2, 4, 6]], before[[0, 1, 2, 4, 6]], "other slots")


@pytest.mark.parametrize("backend", backends("verify"))
def test_packed_drafts_in_buffers_are_committed_one_layer_at_a_time(backend):
    state, want = pool(), pool()
    buffers = sluice.DraftBuffers(torch.zeros(P, 3, HV, K), torch.zeros(P, 3, HV, K))
    where = {"slots": index(1, 2), "cu_seqlens": index(0, 1, 4), "backend": backend}
    for pools, kept in ((want, None), (state, buffers)):
        _, draft = sluice.verify(**tokens(4), state=pools, buffers=kept, **where)
        sluice.commit(draft, index(1, 2), backend=backend)
    assert_same_bits(state, want, "states")


@pytest.mark.parametrize("backend", backends("rms_norm_gated"))
@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (2, 1, 0, 3, 4)])
def test_a_norm_takes_leading_dimensions_in_any_order(order, backend):
    """More of them than kernels count, which cannot be seen as fewer."""
    x, z = torch.randn(2, 2, 3, 4, 2, 32, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 1.5, 32)
    want = sluice.rms_norm_gated(x, z, weight, backend=backend).permute(order)
    got = sluice.rms_norm_gated(x.permute(order), z.permute(order), weight, backend=backend)
    assert_same_bits(got.contiguous(), want.contiguous(), "y")
    dense = z.permute(order).contiguous()
    got = sluice.rms_norm_gated(x.permute(order), dense, weight, backend=backend)
    assert_same_bits(got.contiguous(), want.contiguous(), "y, beside a dense z")
