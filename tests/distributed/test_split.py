"""Split: which tokens each rank holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.contract.errors import ContractError
from sluice.distributed import Split


@st.composite
def splits(draw):
    lengths = draw(st.lists(st.integers(0, 9), max_size=8))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    total = bounds[-1] + draw(st.integers(0, 5))
    inner = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    return Split((0, *inner, total), bounds)


@given(splits())
def test_every_sequence_begins_once_and_ends_once(split):
    n = len(split.cu_seqlens) - 1
    begins = [i for part in split.parts for i in part.begins]
    ends = [i for part in split.parts for i in part.ends]
    assert begins == list(range(n))
    assert ends == list(range(n))


@given(splits())
def test_the_pieces_of_a_sequence_are_the_sequence(split):
    for i, (begin, end) in enumerate(zip(split.cu_seqlens, split.cu_seqlens[1:], strict=False)):
        found = []
        for part in split.parts:
            if part.first <= i < part.last:
                at = i - part.first
                start, stop = part.bounds[at : at + 2]
                found += range(part.start + start, part.start + stop)
        assert found == list(range(begin, end))


@given(splits())
def test_a_chain_is_who_holds_the_incoming_sequence_before(split):
    for part in split.parts:
        if part.incoming:
            assert part.incoming == split.held(part.rank, part.first) > 0
            held = [r for r in range(part.rank) if split.held(r, part.first)]
            assert list(part.chain) == held != []
            assert all(split.part(r).outgoing for r in held)
        else:
            assert part.chain == ()


@given(splits())
def test_through_is_where_a_sequence_has_tokens_on_both_sides_and_none_here(split):
    for part in split.parts:
        around = [
            i
            for i in range(len(split.cu_seqlens) - 1)
            if any(split.held(r, i) for r in range(part.rank))
            and any(split.held(r, i) for r in range(part.rank + 1, split.ranks))
        ]
        assert part.through == bool(around and not split.held(part.rank, around[0]))


@given(splits())
def test_a_part_both_incoming_and_outgoing_is_one_piece(split):
    """What decides whether a rank runs its tokens once or as a transition."""
    for part in split.parts:
        if part.incoming and part.outgoing and part.last - part.first == 1:
            assert part.bounds == (0, part.stop - part.start)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("tokens", [0, 1, 64, 1000, 131072])
def test_even_parts_are_aligned_and_even(tokens, ranks):
    split = Split.even(tokens, ranks)
    sizes = [part.stop - part.start for part in split.parts]
    assert sum(sizes) == tokens
    assert all(border % 64 == 0 for border in split.borders[:-1] if border != tokens)
    assert max(sizes) - min(sizes) < 2 * 64


def test_a_larger_first_part():
    split = Split.even(9 * 6400, 8, first=2.0)
    sizes = [part.stop - part.start for part in split.parts]
    assert sizes == [12800, *[6400] * 7]


def test_the_digest_tells_splits_apart():
    splits = [
        Split((0, 4, 8)),
        Split((0, 5, 8)),
        Split((0, 4, 8), (0, 8)),
        Split((0, 4, 8), (0, 7)),
    ]
    assert len({split.digest for split in splits}) == len(splits)
    assert Split(torch.tensor([0, 4, 8])).digest == splits[0].digest


@pytest.mark.parametrize(
    ("borders", "cu_seqlens", "named"),
    [
        ((0,), None, "borders"),
        ((1, 4), None, "borders"),
        ((0, 4, 3), None, "borders"),
        ((0, 4), (0, 5), "cu_seqlens"),
        ((0, 4), (0, 3, 2), "cu_seqlens"),
        ((0, 4), (1, 3), "cu_seqlens"),
    ],
)
def test_impossible_splits_are_refused_by_name(borders, cu_seqlens, named):
    with pytest.raises(ContractError, match=named):
        Split(borders, cu_seqlens)
