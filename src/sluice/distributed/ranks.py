"""Ranks: the processes of a group, their agreement before an exchange, and what exchanges cost.

A collective with different shapes on two ranks does not fail cleanly: gloo aborts the process, and
NCCL waits for ever. So every operation here first exchanges one short text on the host
(``agreement``) that says what each rank is about to do. All ranks raise the same error if the texts
differ or one rank refused its arguments. This exchange uses a gloo group of its own, with a
timeout: a rank that died becomes an error on the others, and no rank waits for a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sluice.contract.errors import ContractError, SluiceError

Group = dist.ProcessGroup | DeviceMesh | None

# torch 2.13 renamed it
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TEXT = 2048  # bytes of an agreement, whatever its text


class RankError(SluiceError, RuntimeError):
    """Another rank is gone, refused its arguments, or made a different call."""


@dataclass(frozen=True)
class Exchange:
    """One exchange between ranks, as this rank saw it.

    ``sent`` and ``received`` are bytes to and from other ranks. Reading ``seconds`` waits for the
    device if the exchange ran on one.
    """

    name: str
    sent: int
    received: int
    _from: Any = field(repr=False)
    _to: Any = field(repr=False)

    @property
    def seconds(self) -> float:
        """From the call to the arrival of the last message, including the wait for slower ranks."""
        if isinstance(self._from, float):
            return float(self._to - self._from)
        self._to.synchronize()
        return float(self._from.elapsed_time(self._to)) / 1e3


class Cost(NamedTuple):
    """The total cost of all exchanges of one name."""

    calls: int
    sent: int
    received: int
    seconds: float


class Ranks:
    """The ranks that share a computation.

    Creating one is collective: every rank of ``group`` does it, in the same order. Its gloo group
    is created once per set of ranks and timeout. After the loss of a rank it stays unusable:
    destroy the process group, and start again with the ranks that are left.

    Args:
        group: a process group, a one-dimensional ``DeviceMesh`` (``mesh["cp"]``), or None for all
            ranks. CPU tensors travel over the gloo group, others over ``group`` itself.
        timeout: seconds after which a rank that does not answer is an error. On a GPU it limits
            the agreement before each exchange; NCCL's own timeout limits the exchange itself.
        history: how many exchanges :meth:`costs` remembers.

    Raises:
        ContractError: a mesh of more than one dimension.
        RankError: another rank did not answer within the timeout.
    """

    def __init__(self, group: Group = None, *, timeout: float = 60.0, history: int = 256) -> None:
        if not dist.is_initialized():
            expected = "torch.distributed.init_process_group before it"
            raise ContractError("Ranks", "group", expected, "no process group")
        if not timeout > 0:
            raise ContractError("Ranks", "timeout", "a positive number of seconds", timeout)
        self.group = group_of(group, "Ranks")
        self.timeout = timeout
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.exchanges: deque[Exchange] = deque(maxlen=history)
        self._calls = 0
        with self._answered("Ranks"):
            self._host = _host_group(self.group, timeout)

    def __deepcopy__(self, memo: object) -> Ranks:
        """A copy of a divided layer keeps the same ranks."""
        return self

    # ---- agreement ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def agreement(self, op: str) -> Iterator[dict[str, Any]]:
        """Make sure that all ranks are about to do ``op`` with equal facts; else all of them raise.

        Put the facts into the mapping and check arguments inside the block. An error in the block
        is raised on this rank, and the other ranks report it as this rank's refusal.
        """
        facts: dict[str, Any] = {}
        try:
            yield facts
        except Exception as error:
            self._refuse(op, error)
            raise
        self.agree(op, facts)

    def agree(self, op: str, facts: Mapping[str, Any]) -> None:
        """Raise :class:`RankError` on every rank if any rank has different facts."""
        said = self.tell(op, lambda: {name: str(value) for name, value in facts.items()})
        differ = [
            f"{name}: expected {said[0].get(name)} (rank 0), got {other.get(name)} (rank {rank})"
            for rank, other in enumerate(said)
            for name in sorted(said[0].keys() | other.keys())
            if said[0].get(name) != other.get(name)
        ]
        if differ:
            raise RankError(f"{op}: expected the same on every rank; {'; '.join(differ[:4])}")

    def tell(self, op: str, say: Callable[[], Mapping[str, str]]) -> list[dict[str, str]]:
        """The texts of all ranks, in order of rank: one all-gather on the host.

        An error in ``say`` is raised here, and the other ranks report it as this rank's refusal.
        The text includes the number of the call, so ranks that are out of step notice.
        """
        try:
            mine = dict(say())
        except Exception as error:
            self._refuse(op, error)
            raise
        return self._told(op, mine)

    def _refuse(self, op: str, error: Exception) -> None:
        with contextlib.suppress(RankError):
            self._told(op, {"refusal": f"{type(error).__name__}: {error}"[: TEXT // 4]})

    def _told(self, op: str, mine: dict[str, str]) -> list[dict[str, str]]:
        self._calls += 1
        text = _text({"call": f"{op}, number {self._calls}", **mine})
        every = torch.zeros(self.size * TEXT, dtype=torch.uint8)
        sent = TEXT * (self.size - 1)
        with self._timed("agreement", sent, sent, text), self._answered(op):
            _all_gather(every, text, group=self._host)
        said = [_said(row) for row in every.view(self.size, TEXT)]
        refused = [f"rank {r}: {s['refusal']}" for r, s in enumerate(said) if "refusal" in s]
        if refused:
            got = "; ".join(refused)
            raise RankError(f"{op}: expected all ranks to go on, got refusals: {got}")
        calls = [s.pop("call") for s in said]
        if len(set(calls)) > 1:
            raise RankError(f"{op}: expected ranks in the same call, got {calls}")
        return said

    # ---- exchanges ------------------------------------------------------------------------------

    def all_gather(
        self, name: str, x: Tensor, meanwhile: Callable[[], None] = lambda: None
    ) -> Tensor:
        """``x`` of every rank, [R, ..]; shape and dtype are the same on all.

        ``meanwhile`` is run while messages travel, and counts as a part of the exchange.
        """
        x = x.contiguous()
        every = x.new_empty(self.size, *x.shape)
        sent = x.nbytes * (self.size - 1)
        with self._timed(name, sent, sent, x):
            with self._answered(name):
                work = _all_gather(every.view(-1), x.view(-1), group=self._for(x), async_op=True)
            meanwhile()
            with self._answered(name):
                work.wait()
        return every

    def all_reduce(self, name: str, x: Tensor) -> Tensor:
        """The sum of ``x`` over ranks, in place."""
        sent = math.ceil(2 * x.nbytes * (self.size - 1) / self.size)
        with self._timed(name, sent, sent, x), self._answered(name):
            dist.all_reduce(x, group=self._for(x))
        return x

    def swap(self, name: str, to: Mapping[int, Tensor], came: Mapping[int, Tensor]) -> None:
        """Send ``to[rank]`` to each rank, and receive ``came[rank]`` from each.

        Buffers are contiguous. Neither mapping contains this rank.
        """
        if not to and not came:
            return
        like = next(iter([*to.values(), *came.values()]))
        group = self._for(like)

        def op(kind: Any, x: Tensor, rank: int) -> dist.P2POp:
            return dist.P2POp(kind, x, dist.get_global_rank(group, rank), group)

        ops = [op(dist.isend, x, rank) for rank, x in sorted(to.items())]
        ops += [op(dist.irecv, x, rank) for rank, x in sorted(came.items())]
        sent, received = (sum(x.nbytes for x in m.values()) for m in (to, came))
        with self._timed(name, sent, received, like), self._answered(name):
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    # ---- what it cost ---------------------------------------------------------------------------

    def costs(self) -> dict[str, Cost]:
        """Calls, bytes and seconds of the remembered exchanges, by name."""
        costs: dict[str, Cost] = {}
        for e in self.exchanges:
            c = costs.get(e.name, Cost(0, 0, 0, 0.0))
            costs[e.name] = Cost(
                c.calls + 1, c.sent + e.sent, c.received + e.received, c.seconds + e.seconds
            )
        return costs

    # ---- inside ---------------------------------------------------------------------------------

    def _for(self, x: Tensor) -> dist.ProcessGroup:
        return self._host if x.device.type == "cpu" else self.group

    @contextlib.contextmanager
    def _timed(self, name: str, sent: int, received: int, x: Tensor) -> Iterator[None]:
        if x.device.type != "cuda":
            start = time.perf_counter()
            yield
            self.exchanges.append(Exchange(name, sent, received, start, time.perf_counter()))
        elif torch.cuda.is_current_stream_capturing():
            yield  # no timing during graph capture
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self.exchanges.append(Exchange(name, sent, received, begin, end))

    @contextlib.contextmanager
    def _answered(self, op: str) -> Iterator[None]:
        """Turn a collective's error into a RankError that names the operation."""
        try:
            yield
        except RuntimeError as error:
            expected = f"an answer of all {self.size} ranks within {self.timeout:g} s"
            text = str(error).splitlines()[0].split(" This is typically")[0][:400]
            raise RankError(f"{op}: rank {self.rank}: expected {expected}, got: {text}") from error


# One gloo group per set of ranks and timeout, as long as the process group lives. It is never
# destroyed: torch would give a new group the name, and the stale addresses, of the old one.
_hosts: weakref.WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _host_group(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    made = _hosts.setdefault(dist.group.WORLD, {})
    key = (*dist.get_process_group_ranks(group), timeout)
    if key not in made:
        found: Any = dist.new_group(
            list(key[:-1]),
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=True,
        )
        made[key] = found
    return made[key]


def group_of(group: Group, op: str) -> dist.ProcessGroup:
    """The process group of ``group``, which may be a mesh of one dimension."""
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("..",)
            expected = f"a mesh of one dimension, such as mesh[{names[0]!r}]"
            raise ContractError(op, "mesh", expected, f"{group.ndim} dimensions")
        return group.get_group()
    return group


def _text(said: Mapping[str, str]) -> Tensor:
    text = json.dumps(said).encode()
    if len(text) > TEXT:  # facts are only compared, so a hash will do
        text = json.dumps({k: _short(v) for k, v in said.items()}).encode()
    return torch.frombuffer(bytearray(text.ljust(TEXT)), dtype=torch.uint8)


def _short(value: str) -> str:
    return value if len(value) <= 80 else hashlib.sha256(value.encode()).hexdigest()[:16]


def _said(row: Tensor) -> dict[str, str]:
    said: dict[str, str] = json.loads(ctypes.string_at(row.data_ptr(), TEXT))
    return said
