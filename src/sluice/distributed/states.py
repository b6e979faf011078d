"""State that moves between ranks, and from one number of ranks to another (prefill to decode).

A rank of ``tp`` holds consecutive key heads, their value heads, and the conv channels of its own
heads in three sections. So a share of another division consists of some heads of some shares:
recurrent states by head, conv states by head in each section. Bytes are moved unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.distributed.ranks import RankError, Ranks
from sluice.state_geometry import GeometryError, PoolGeometry, StateSnapshot


class Overlap(NamedTuple):
    """Key heads that one share has and another needs, by their numbers within each share."""

    source: int
    target: int
    have: range
    need: range


def overlaps(heads: int, sources: int, targets: int) -> list[Overlap]:
    """Which key heads of each old share go to each new one, for ``heads`` in all.

    >>> [(o.source, o.target, list(o.have)) for o in overlaps(4, 4, 2)]
    [(0, 0, [0]), (1, 0, [0]), (2, 1, [0]), (3, 1, [0])]
    """
    have, need = heads // sources, heads // targets
    found = []
    for s in range(sources):
        for t in range(targets):
            first, last = max(s * have, t * need), min((s + 1) * have, (t + 1) * need)
            if first < last:
                here, there = first - s * have, first - t * need
                n = last - first
                found.append(Overlap(s, t, range(here, here + n), range(there, there + n)))
    return found


def reshard(shares: Sequence[StateSnapshot], tp: int) -> list[StateSnapshot]:
    """The same sequences' state in ``tp`` shares, bit for bit.

    Args:
        shares: one per rank of the old division, in order; of one geometry and number of sequences.
        tp: the number of new shares, which divides the key heads.

    Raises:
        GeometryError: shares that differ. ContractError: a tp that does not divide the heads.

    >>> geometry = PoolGeometry.for_model("qwen3.5-0.8b", tp=4)
    >>> conv = torch.zeros(18, 1, *geometry.conv_shape, dtype=torch.bfloat16)
    >>> share = StateSnapshot(geometry, conv, torch.zeros(18, 1, *geometry.state_shape))
    >>> [s.geometry.num_v_heads for s in reshard([share] * 4, 2)]
    [8, 8]
    """
    if not shares:
        raise ContractError("reshard", "shares", "at least one", 0)
    first = shares[0]
    for share in shares[1:]:
        first.geometry.require("reshard", share.geometry)
        if len(share) != len(first):
            raise GeometryError(f"reshard: expected {len(first)} sequences, got {len(share)}")
    geometry = first.geometry.resharded(len(shares), tp)
    made = [_empty(geometry, len(first), first.recurrent.device) for _ in range(tp)]
    for o in overlaps(first.geometry.num_k_heads * len(shares), len(shares), tp):
        for part, here in zip(
            _heads(shares[o.source], o.have), _heads(made[o.target], o.need), strict=True
        ):
            here.copy_(part)
    return made


def move(
    snapshot: StateSnapshot | None,
    *,
    ranks: Ranks,
    sources: Sequence[int],
    targets: Sequence[int],
    geometry: PoolGeometry | None = None,
) -> StateSnapshot | None:
    """Send sequences' state from the ranks of one division to those of another, directly.

    Every rank of ``ranks`` calls it. Rank ``sources[i]`` holds share i of ``len(sources)``, rank
    ``targets[j]`` gets share j of ``len(targets)``; each pair with heads in common exchanges one
    message. The two lists may overlap: state that stays on a rank is copied there.

    Args:
        snapshot: on a source, its share (``pool.snapshot(slots)``); None elsewhere.
        ranks: all ranks that take part. Tensors are on the device of their backend.
        sources: rank numbers within ``ranks``. targets: likewise.
        geometry: what a target expects (``pool.geometry``), checked before anything is sent.

    Returns:
        on a target, its share, ready for ``pool.restore``; None elsewhere.

    Raises:
        GeometryError: the sources' geometries differ, or a target expects another. Every rank
            raises it, and nothing is sent. ``tag`` is compared too, so for state that moves it has
            to name the checkpoint, not the rank. RankError: a rank is gone, or refused its
            arguments.

    Example, from four prefill ranks to two decode ranks::

        moved = move(pool.snapshot(mine) if prefilling else None, ranks=ranks,
                     sources=[0, 1, 2, 3], targets=[4, 5], geometry=pool.geometry)
        if moved is not None:
            slots = pool.restore(moved)
    """
    rank, sources, targets = ranks.rank, list(sources), list(targets)
    said = ranks.tell("move", lambda: _say(ranks, snapshot, sources, targets, geometry))
    of, n, device = _settled(said, sources, targets)
    theirs = of.resharded(len(sources), len(targets))
    plan = overlaps(of.num_k_heads * len(sources), len(sources), len(targets))
    made = _empty(theirs, n, device) if rank in targets else None
    to, came, pieces = {}, {}, []
    for o in plan:
        source, target = sources[o.source], targets[o.target]
        if snapshot is not None and source == rank:
            parcel = _pack(snapshot, o.have)
            if target != rank:
                to[target] = parcel
            elif made is not None:
                _unpack(parcel, made, o.need)
        elif made is not None and target == rank:
            size = sum(part.numel() * part.element_size() for part in _heads(made, o.need))
            came[source] = torch.empty(size, dtype=torch.uint8, device=device)
            pieces.append((source, o.need))
    ranks.swap("move.states", to, came)
    for source, need in pieces:
        assert made is not None
        _unpack(came[source], made, need)
    return made


def _say(
    ranks: Ranks,
    snapshot: StateSnapshot | None,
    sources: list[int],
    targets: list[int],
    geometry: PoolGeometry | None,
) -> dict[str, str]:
    """What this rank has and expects, after checking its arguments."""
    for name, chosen in (("sources", sources), ("targets", targets)):
        known = set(chosen) <= set(range(ranks.size))
        if not chosen or len(set(chosen)) < len(chosen) or not known:
            raise ContractError("move", name, f"different ranks below {ranks.size}", chosen)
    if (snapshot is None) == (ranks.rank in sources):
        got = f"{'None' if snapshot is None else 'one'} on rank {ranks.rank}"
        raise ContractError("move", "snapshot", "one on each source, None elsewhere", got)
    said = {"lists": f"from {sources} to {targets}"}
    if snapshot is not None:
        said["has"] = snapshot.geometry.to_json()
        said["sequences"] = str(len(snapshot))
        said["device"] = snapshot.recurrent.device.type
    if geometry is not None and ranks.rank in targets:
        said["expects"] = geometry.to_json()
    return said


def _settled(
    said: list[dict[str, str]], sources: list[int], targets: list[int]
) -> tuple[PoolGeometry, int, torch.device]:
    """The sources' geometry, number of sequences and device; all ranks raise if they differ."""
    for rank, other in enumerate(said):
        if other["lists"] != said[0]["lists"]:
            expected = f"{said[0]['lists']} (rank 0)"
            raise RankError(f"move: expected {expected}, got {other['lists']} (rank {rank})")
    first = said[sources[0]]
    of = PoolGeometry.from_json(first["has"])
    for rank in sources:
        of.require(f"move: rank {rank}", PoolGeometry.from_json(said[rank]["has"]))
        if said[rank]["sequences"] != first["sequences"]:
            expected = f"{first['sequences']} sequences (rank {sources[0]})"
            raise GeometryError(f"move: expected {expected}, got {said[rank]['sequences']}")
    theirs = of.resharded(len(sources), len(targets))
    for rank in targets:
        if "expects" in said[rank]:
            PoolGeometry.from_json(said[rank]["expects"]).require(f"move: rank {rank}", theirs)
    device = torch.device(first["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return of, int(first["sequences"]), device


def _empty(geometry: PoolGeometry, n: int, device: torch.device) -> StateSnapshot:
    g, lead = geometry, (geometry.layers, n)
    return StateSnapshot(
        g,
        torch.empty(*lead, *g.conv_shape, dtype=g.conv_dtype, device=device),
        torch.empty(*lead, *g.state_shape, dtype=g.state_dtype, device=device),
    )


def _heads(snapshot: StateSnapshot, heads: range) -> list[Tensor]:
    """Views of some key heads' state: Q, K and V channels, and the value heads' states."""
    g, (first, last) = snapshot.geometry, (heads.start, heads.stop)
    HK, K, V, r = g.num_k_heads, g.head_k_dim, g.head_v_dim, g.num_v_heads // g.num_k_heads
    Q, K_, V_ = snapshot.conv.split([HK * K, HK * K, HK * r * V], dim=2)
    channels = [x[:, :, first * K : last * K] for x in (Q, K_)]
    channels.append(V_[:, :, first * r * V : last * r * V])
    return [*channels, snapshot.recurrent[:, :, first * r : last * r]]


def _pack(snapshot: StateSnapshot, heads: range) -> Tensor:
    """Some heads' state as bytes, in one message."""
    parts = _heads(snapshot, heads)
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])


def _unpack(parcel: Tensor, snapshot: StateSnapshot, heads: range) -> None:
    parts = _heads(snapshot, heads)
    sizes = [part.numel() * part.element_size() for part in parts]
    for part, taken in zip(parts, parcel.split(sizes), strict=True):
        # a copy: bytes may begin at any address, a view as numbers must be aligned
        part.copy_(taken.clone().view(part.dtype).view(part.shape))
