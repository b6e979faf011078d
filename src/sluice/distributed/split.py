"""How tokens of prompts, packed or not, are divided over ranks: arithmetic only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.contract.chunk_length import CHUNK
from sluice.contract.errors import ContractError


class Part(NamedTuple):
    """What one rank holds: tokens ``start`` to ``stop``, of sequences ``first`` up to ``last``.

    The first sequence may begin on an earlier rank (``incoming``: the number of its tokens here, 0
    if none); the last may continue after this part (``outgoing``). Sequence numbers and token
    positions count over all ranks.
    """

    rank: int
    start: int
    stop: int
    first: int
    last: int
    bounds: tuple[int, ...]  # of the sequences here, relative to start
    incoming: int
    outgoing: bool
    chain: tuple[int, ...]  # earlier ranks that hold the incoming sequence, in order
    through: bool  # no tokens here, but a sequence passes through

    @property
    def begins(self) -> range:
        """Sequences that begin here."""
        return range(self.first + (self.incoming > 0), self.last)

    @property
    def ends(self) -> range:
        """Sequences that end here."""
        return range(self.first, self.last - self.outgoing)


@dataclass(frozen=True)
class Split:
    """Token borders between ranks, and the borders of packed sequences if they are packed.

    Args:
        borders: R + 1 rising positions from 0 to the number of tokens: rank i holds the tokens
            from ``borders[i]`` up to ``borders[i + 1]``. A rank may hold none.
        cu_seqlens: borders of the packed sequences over all ranks, on the host. None: a batch, of
            which every rank holds all rows, each cut at ``borders``.

    >>> split = Split.even(1000, 4)
    >>> split.borders
    (0, 256, 512, 768, 1000)
    >>> packed = Split((0, 6, 12), cu_seqlens=(0, 4, 9, 12))
    >>> packed.part(1)[1:7]  # tokens 6 to 12: the end of sequence 1, and sequence 2
    (6, 12, 1, 3, (0, 3, 6), 3)
    """

    borders: tuple[int, ...]
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "borders", _ints(self.borders))
        _rising("borders", self.borders, 2)
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", _ints(self.cu_seqlens))
            _rising("cu_seqlens", self.cu_seqlens, 1)
            if self.cu_seqlens[-1] > self.tokens:
                expected = f"at most {self.tokens} tokens, the last of borders"
                raise ContractError("Split", "cu_seqlens", expected, self.cu_seqlens[-1])

    @classmethod
    def even(
        cls,
        tokens: int,
        ranks: int,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        *,
        first: float = 1.0,
    ) -> Split:
        """Parts of equal size, to the nearest multiple of 64 tokens.

        ``first``: the size of the first part relative to the others. It needs no transition, so a
        larger first part balances the ranks where transitions are expensive (many heads).

        >>> Split.even(5 * 64, 4, first=2).borders
        (0, 128, 192, 256, 320)
        """
        if ranks < 1 or tokens < 0 or not first > 0:
            got = f"{tokens} tokens, {ranks} ranks, first={first}"
            raise ContractError("Split", "tokens, ranks, first", "0, 1 and a number above 0", got)
        unit = tokens / (ranks - 1 + first)
        inner = [round((r + first) * unit / CHUNK) * CHUNK for r in range(ranks - 1)]
        borders = (0, *(min(b, tokens) for b in inner), tokens)
        return cls(borders, None if cu_seqlens is None else _ints(cu_seqlens))

    @property
    def ranks(self) -> int:
        return len(self.borders) - 1

    @property
    def tokens(self) -> int:
        """Over all ranks, including a padded tail."""
        return self.borders[-1]

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every rank's part."""
        return tuple(self._part(rank) for rank in range(self.ranks))

    def part(self, rank: int) -> Part:
        """What one rank holds."""
        return self.parts[rank]

    @property
    def crossing(self) -> bool:
        """Whether any sequence lies on more than one rank."""
        return any(part.incoming for part in self.parts)

    @property
    def digest(self) -> str:
        """Equal for equal splits."""
        return hashlib.sha256(repr((self.borders, self.cu_seqlens)).encode()).hexdigest()[:16]

    def held(self, rank: int, sequence: int) -> int:
        """How many tokens of a sequence a rank holds."""
        begin, end = self._bounds[sequence : sequence + 2]
        start, stop = self.borders[rank : rank + 2]
        return max(0, min(end, stop) - max(begin, start))

    def end_rank(self, sequence: int) -> int:
        """The rank where a sequence ends, which makes its final state."""
        return next(p.rank for p in self.parts if sequence in p.ends)

    @property
    def _bounds(self) -> tuple[int, ...]:
        """A batch counts as one sequence: all its rows are cut alike."""
        return (0, self.tokens) if self.cu_seqlens is None else self.cu_seqlens

    def _part(self, rank: int) -> Part:
        bounds, (start, stop) = self._bounds, self.borders[rank : rank + 2]
        here = [i for i in range(len(bounds) - 1) if self.held(rank, i) or self._empty(rank, i)]
        first, last = (here[0], here[-1] + 1) if here else (0, 0)
        local = tuple(min(max(b, start), stop) - start for b in bounds[first : last + 1])
        chain: tuple[int, ...] = ()
        if here and bounds[first] < start:
            chain = tuple(r for r in range(rank) if self.held(r, first))
        return Part(
            rank=rank,
            start=start,
            stop=stop,
            first=first,
            last=last,
            bounds=local if here else (0,),
            incoming=self.held(rank, first) if chain else 0,
            outgoing=bool(here) and bounds[last] > stop,
            chain=chain,
            through=start == stop and any(b < start < e for b, e in pairwise(bounds)),
        )

    def _empty(self, rank: int, sequence: int) -> bool:
        """Whether an empty sequence belongs here: with the token after it, or on the last rank."""
        begin, end = self._bounds[sequence : sequence + 2]
        if begin < end:
            return False
        start, stop = self.borders[rank : rank + 2]
        return start <= begin < stop or (begin == self.tokens and rank == self.ranks - 1)


def _ints(values: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    return tuple(int(v) for v in values)


def _rising(name: str, values: tuple[int, ...], least: int) -> None:
    if len(values) < least or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ContractError("Split", name, f"{least} or more rising positions from 0", values)
