"""A draft whose rows have changed is not committed; drafts whose rows have not, always are."""

from __future__ import annotations

import gc

import pytest
import torch

import sluice
from sluice import open_drafts
from sluice.contract.errors import ContractError
from sluice.testing.compare import assert_same_bits
from tests.suite import DEVICE, backends

STALE = r"commit: draft: expected .* as verify read them, got one whose rows {} has written since"
BACKENDS = backends("verify")


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def tokens(rows: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 1, 16, generator=generator).to(DEVICE)
    gate = -torch.rand(rows, 3, 1, generator=generator).to(DEVICE)
    return {"q": x, "k": x.roll(1, -1), "v": x.flip(-1), "g": gate, "beta": gate.exp()}


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(9)).to(DEVICE)


@pytest.fixture(params=["values", "addresses"])
def known(request, monkeypatch):
    """How a write is told to hit a draft: a GPU's values are not read."""
    if request.param == "addresses":
        monkeypatch.setattr(open_drafts, "_by_value", lambda x: False)
    return request.param


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [None, (4, 2)])
def test_a_draft_is_committed_once(backend, pool, known, slots):
    where = {} if slots is None else {"slots": index(*slots)}
    _, draft = sluice.verify(**tokens(), state=pool, backend=backend, **where)
    sluice.commit(draft, index(1, 2), backend=backend)
    after = pool.clone()
    for more in ({}, {"write_slots": index(5, 3)}):
        with pytest.raises(ContractError, match=STALE.format("commit")):
            sluice.commit(draft, index(1, 2), backend=backend, **more)
    assert_same_bits(pool, after, "the pool after a commit that was refused")


def test_a_draft_is_committed_once_without_versions_of_tensors(pool, known):
    with torch.inference_mode():
        slots = index(4, 2)
        _, draft = sluice.verify(**tokens(), state=pool, slots=slots)
        sluice.commit(draft, index(1, 2))
        with pytest.raises(ContractError, match=STALE.format("commit")):
            sluice.commit(draft, index(1, 2))


@pytest.mark.parametrize("writer", ["decode", "prefill", "step", "another draft"])
@pytest.mark.parametrize("slots", [None, (4, 2)])
def test_a_draft_is_stale_once_its_rows_are_written(pool, known, writer, slots):
    where = {} if slots is None else {"slots": index(*slots)}
    _, draft = sluice.verify(**tokens(), state=pool, **where)
    if writer == "step":
        weights = {name: torch.ones(1, device=DEVICE) for name in ("A_log", "dt_bias")}
        weights |= {"conv_weight": torch.ones(48, 4, device=DEVICE)}
        weights |= {"conv_state": torch.zeros(6, 48, 3, device=DEVICE)}
        weights |= {"norm_weight": torch.ones(16, device=DEVICE)}
        ones = torch.ones(2, 64, device=DEVICE), torch.ones(2, 2, device=DEVICE)
        sluice.step(*ones, **weights, state=pool, **where)
    elif writer == "another draft":
        _, other = sluice.verify(**tokens(seed=1), state=pool, **where)
        sluice.commit(other, index(1, 1))
        writer = "commit"
    else:
        getattr(sluice, writer)(**tokens(seed=1), state=pool, **where)
    after = pool.clone()
    with pytest.raises(ContractError, match=STALE.format(writer)):
        sluice.commit(draft, index(1, 2))
    assert_same_bits(pool, after, "the pool after a commit that was refused")


def test_a_commit_of_all_layers_makes_drafts_of_one_stale(known):
    pools = torch.randn(2, 6, 1, 16, 16, device=DEVICE)
    wide = {"device": DEVICE, "dtype": torch.float32}
    buffers = sluice.DraftBuffers(
        torch.zeros(2, 6, 3, 1, 16, **wide),
        torch.zeros(2, 6, 3, 1, 16, **wide),
        torch.zeros(2, 6, 3, 1, **wide),
    )
    slots = index(4, 2)
    drafts = [
        sluice.verify(**tokens(), state=pools[i], slots=slots, buffers=buffers.layer(i))[1]
        for i in range(2)
    ]
    sluice.commit_layers(buffers, index(1, 2), state=pools, slots=slots)
    for draft in drafts:
        with pytest.raises(ContractError, match=STALE.format("commit")):
            sluice.commit(draft, index(1, 2))


def test_rows_written_by_other_numbers_are_noticed_where_values_are_read(pool):
    _, draft = sluice.verify(**tokens(), state=pool, slots=index(4, 2))
    sluice.decode(**tokens(1), state=pool, slots=index(0), write_slots=index(2))
    with pytest.raises(ContractError, match=STALE.format("decode")):
        sluice.commit(draft, index(1, 2))
    sluice.commit(draft, index(1, 2), write_slots=index(4, -1))  # this row is as it was


def test_a_checkpoint_into_a_drafts_row_is_noticed(pool):
    _, draft = sluice.verify(**tokens(), state=pool, slots=index(4, 2))
    kept = sluice.Checkpoints(index(2).unsqueeze(1), every=2)
    sluice.prefill(**tokens(1), state=pool, slots=index(0), checkpoints=kept)
    with pytest.raises(ContractError, match=STALE.format("prefill")):
        sluice.commit(draft, index(1, 2))


def test_what_writes_other_rows_leaves_a_draft_alone(pool, known):
    want = pool.clone()
    mine, others = index(4, 2), index(0, 1)
    sluice.decode(**tokens(seed=3), state=want, slots=others)
    _, draft = sluice.verify(**tokens(), state=want, slots=mine)
    sluice.commit(draft, index(1, 2))
    _, draft = sluice.verify(**tokens(), state=pool, slots=mine)
    sluice.decode(**tokens(seed=3), state=pool, slots=others)
    sluice.decode(**tokens(seed=4), state=pool, slots=mine, write_slots=index(3, 5))
    sluice.decode(**tokens(seed=4), state=pool.clone(), slots=mine)
    sluice.commit(draft, index(1, 2))
    assert_same_bits(pool[[0, 1, 2, 4]], want[[0, 1, 2, 4]], "rows of the draft and of others")


def test_slots_that_are_filled_anew_are_other_rows(pool, known):
    slots = index(4, 2)
    _, draft = sluice.verify(**tokens(), state=pool, slots=slots)
    slots.copy_(index(0, 1))
    sluice.decode(**tokens(), state=pool, slots=slots)
    slots.copy_(index(4, 2))
    sluice.commit(draft, index(1, 2))


def test_prefixes_are_committed_before_the_row_itself(pool, known):
    _, draft = sluice.verify(**tokens(), state=pool, slots=index(4, 2))
    for counts, to in (((1, 1), (0, 1)), ((2, 0), (3, -1)), ((2, 2), (3, 5))):
        sluice.commit(draft, index(*counts), write_slots=index(*to))
    sluice.commit(draft, index(3, 3))


def test_a_draft_with_write_slots_of_its_own_leaves_its_rows_alone(pool, known):
    _, draft = sluice.verify(**tokens(), state=pool, slots=index(4, 2), write_slots=index(0, 1))
    sluice.commit(draft, index(1, 2))
    once = pool.clone()
    sluice.commit(draft, index(1, 2))
    assert_same_bits(pool, once, "the same commit again")


def test_a_commit_that_is_refused_leaves_the_draft_fresh(pool, known):
    _, draft = sluice.verify(**tokens(), state=pool)
    with pytest.raises(ContractError, match="num_accepted"):
        sluice.commit(draft, index(1, 9))
    with pytest.raises(ContractError, match="num_accepted"):
        sluice.commit(draft, index(1))
    sluice.commit(draft, index(1, 2))


def test_drafts_that_are_dropped_are_forgotten(pool, monkeypatch):
    monkeypatch.setattr(open_drafts, "MOST_OPEN", 4)
    monkeypatch.setattr(open_drafts, "opened", {})
    for _ in range(8):
        sluice.verify(**tokens(), state=pool)
    gc.collect()
    assert len(open_drafts.opened) == 1
    assert len(open_drafts.opened[pool.data_ptr()]) == 1
    pools = [pool.clone() for _ in range(9)]
    for each in pools:
        sluice.verify(**tokens(), state=each)
        gc.collect()
    assert len(open_drafts.opened) <= 5
    _, draft = sluice.verify(**tokens(), state=pool)
    sluice.commit(draft, index(1, 1))
    assert pool.data_ptr() not in open_drafts.opened


def test_a_draft_made_in_a_graph_is_committed_again_and_again(pool, monkeypatch):
    """Its replays do not pass Python, so nothing is known of the rows."""
    monkeypatch.setattr(open_drafts, "_capturing", lambda x: True)
    _, draft = sluice.verify(**tokens(), state=pool)
    assert draft.mark is None
    monkeypatch.setattr(open_drafts, "_capturing", lambda x: False)
    _, draft = sluice.verify(**tokens(), state=pool)
    monkeypatch.setattr(open_drafts, "_capturing", lambda x: True)
    sluice.decode(**tokens(), state=pool)
    sluice.commit(draft, index(1, 1))  # captured, not run
    monkeypatch.setattr(open_drafts, "_capturing", lambda x: False)
    sluice.commit(draft, index(1, 1))
