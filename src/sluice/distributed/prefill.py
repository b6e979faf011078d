"""Prefill of sequences that lie on several ranks (context parallel), and the same on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.contract import values
from sluice.contract.errors import ContractError, SluiceError
from sluice.contract.names import BackendName, HeadLayout, StateLayout
from sluice.distributed import gradients
from sluice.distributed.deliver import Deliver, check_deliver, delivered
from sluice.distributed.ranks import Ranks
from sluice.distributed.rows import PoolRows, Slots
from sluice.distributed.scan import Exchanging, joined
from sluice.distributed.share import Share
from sluice.distributed.split import Split
from sluice.distributed.transition import Call, join
from sluice.doctor import explain
from sluice.settings import validating

OP = "distributed.prefill"


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    ranks: Ranks,
    split: Split,
    scale: float | None = None,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    state: Tensor | None = None,
    slots: Slots | None = None,
    write_slots: Slots | None = None,
    has_state: Sequence[bool] | Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    layout: HeadLayout = "bthd",
    deliver: Deliver = "end",
    exchange: Exchanging = "auto",
    batch_invariant: bool = False,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`sluice.prefill` over tokens that are divided over ranks.

    Every rank of ``ranks`` calls it with its own tokens and the same ``split``. One exchange of
    exact transitions joins the parts; ``ranks.costs()["prefill.transitions"]`` has its cost.

    Without ``state``, o has gradients if an input requires one: the backward pass makes one more
    exchange of the same size.

    Args:
        q: [B, T, HQ, K], this rank's tokens; packed [T, HQ, K] or [1, T, HQ, K] where ``split`` has
            ``cu_seqlens``. k, v, g, beta and the options up to ``neg_eigval`` as in
            :func:`sluice.prefill`, all four rules, decay per head or per key.
        ranks: the processes that take part. split: which tokens each of them holds.
        state: [P, HV, V, K] or [P, HV, K, V], this rank's pool, or None. The rank where a sequence
            begins reads its initial state; the ranks named by ``deliver`` write its final state. No
            other row is touched. None: zeros at first, and a new [N, HV, V, K] is returned.
        slots: [N], for all N sequences of all ranks: their rows in this rank's pool; row i by
            default. ``write_slots`` and ``has_state`` likewise; ``pad_slot`` as in ``prefill``.
            Lists, or tensors, which are read on the host.
        deliver: "end" (each final state on the rank where its sequence ends), "all", or one rank.
        exchange: "gather" (one all-gather), "scan" (log R steps of one message each), or "auto":
            "gather" on up to 8 ranks.
        layout: "bthd" or "bhtd". batch_invariant, backend: for every operator call inside.

    Returns:
        o for this rank's tokens, as :func:`sluice.prefill` shapes it; and ``state``.

    Raises:
        ContractError: an argument does not keep the contract.
        RankError: another rank is gone, refused its arguments, or has different ones. No state is
            written.
    """
    with ranks.agreement(OP) as facts:
        call = _canonical(q, k, v, g, beta, A_log, dt_bias, layout)
        call.options.update(
            scale=scale,
            normalize_qk=normalize_qk,
            neg_eigval=neg_eigval,
            batch_invariant=batch_invariant,
            backend=backend,
        )
        _check_share(call, split, ranks, deliver, exchange)
        pool = _pool(call, split, state, slots, write_slots, has_state, pad_slot, state_layout)
        if call.v.device.type == "cpu" or validating():
            _check_values(call, split, ranks.rank, pool.rows)
        facts.update(_facts(call, split, pool.rows), deliver=deliver, exchange=exchange)
        training = gradients.wanted(*call[:7], state)
        facts["gradients"] = training
        if training and state is not None:
            raise SluiceError(f"{gradients.NO_STATE.format(OP)}; train without state")
        share = Share(call, split, ranks.rank, pool.rows)
        message = None if training else share.begin()
    if message is None:
        return _trained(ranks, share, pool, exchange, deliver, q, layout)
    X = joined(ranks, split, message, share.V, call.delta, exchange, share.meanwhile)
    o, finals = share.finish(X)
    like = message[0, :, : share.V]
    finals = delivered(ranks, "prefill.states", split, finals, like, share.n, deliver)
    for sequence, X in finals.items():
        pool.rows.write(sequence, X)
    return _restored(o, q, layout), pool.state


def _trained(
    ranks: Ranks,
    share: Share,
    pool: _Pool,
    exchange: Exchanging,
    deliver: Deliver,
    q: Tensor,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """:func:`prefill` with gradients, from zero."""
    call, split = share.call, share.split

    def join_messages(message: Tensor) -> Tensor | None:
        return joined(ranks, split, message, share.V, call.delta, exchange)

    o, finals = gradients.prefill(call, split, ranks, join_messages)
    shape = (share.HV, share.V, share.K)
    like = torch.zeros(shape, dtype=call.exact, device=call.v.device)
    finals = delivered(ranks, "prefill.states", split, finals, like, share.n, deliver)
    for sequence, X in finals.items():
        pool.rows.write(sequence, X)
    return _restored(o, q, layout), gradients.refusing(OP, pool.state, *call[:7])


def prefill_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    split: Split,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor | None = None,
    slots: Slots | None = None,
    write_slots: Slots | None = None,
    has_state: Sequence[bool] | Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    layout: HeadLayout = "bthd",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`prefill` with the shares of all ranks run on this device, one after the other.

    The arithmetic is that of R ranks, without communication, for checks and timings. The arguments
    hold all tokens; ``options`` are ``scale``, ``normalize_qk``, ``neg_eigval``,
    ``batch_invariant`` and ``backend``.

    >>> import torch, sluice
    >>> from sluice.distributed import Split, prefill_segments
    >>> x = torch.randn(1, 200, 2, 8)
    >>> gates = torch.rand(1, 200, 2)
    >>> o, state = prefill_segments(x, x, x, -gates, gates, split=Split.even(200, 3),
    ...                             normalize_qk=True)
    >>> whole, _ = sluice.prefill(x, x, x, -gates, gates, normalize_qk=True)
    >>> torch.allclose(o, whole, atol=1e-5)
    True
    """
    call = _canonical(q, k, v, g, beta, A_log, dt_bias, layout)
    if gradients.wanted(*call[:7], state):
        raise SluiceError("prefill_segments: no gradient is defined; call it under torch.no_grad()")
    call.options.update(options)
    pool = _pool(call, split, state, slots, write_slots, has_state, pad_slot, state_layout)
    shares = [
        Share(call.span(part.start, part.stop), split, part.rank, pool.rows) for part in split.parts
    ]
    messages = torch.stack([share.begin() for share in shares])
    done = []
    for share in shares:
        share.meanwhile()
        chain = share.part.chain
        done.append(share.finish(join(messages, chain, share.V, call.delta) if chain else None))
    for _, finals in done:
        for sequence, X in finals.items():
            pool.rows.write(sequence, X)
    return _restored(torch.cat([o for o, _ in done], dim=1), q, layout), pool.state


class _Pool(NamedTuple):
    """The given or new pool, and its rows in the "vk" layout."""

    state: Tensor
    rows: PoolRows


def _canonical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    layout: str,
) -> Call:
    """[B, T, ..] views of the call's tensors."""
    if layout not in ("bthd", "bhtd"):
        raise ContractError(OP, "layout", "'bthd' or 'bhtd'", repr(layout))
    if not isinstance(q, Tensor):
        raise ContractError(OP, "q", "a tensor", type(q).__name__)
    packed = q.dim() == 3

    def view(x: Tensor | None) -> Any:
        if x is None:
            return None
        x = x.unsqueeze(0) if packed else x
        return x.transpose(1, 2) if layout == "bhtd" else x

    call = Call(view(q), view(k), view(v), view(g), view(beta), A_log, dt_bias, {})
    if call.q.dim() != 4:
        raise ContractError(OP, "q", "4 dimensions, or 3 packed", f"shape {list(q.shape)}")
    return call


def _restored(o: Tensor, q: Tensor, layout: str) -> Tensor:
    o = o.transpose(1, 2) if layout == "bhtd" else o
    return o.squeeze(0) if q.dim() == 3 else o


def _check_share(call: Call, split: Split, ranks: Ranks, deliver: Deliver, exchange: str) -> None:
    """Check what the operator does not: the rank's share of the split."""
    if split.ranks != ranks.size:
        raise ContractError(OP, "split", f"parts for {ranks.size} ranks", split.ranks)
    check_deliver(OP, deliver, ranks.size)
    if exchange not in ("auto", "gather", "scan"):
        raise ContractError(OP, "exchange", "'auto', 'gather' or 'scan'", repr(exchange))
    part = split.part(ranks.rank)
    if call.q.shape[1] != part.stop - part.start:
        expected = f"the {part.stop - part.start} tokens of rank {ranks.rank} in split"
        raise ContractError(OP, "q", expected, f"{call.q.shape[1]} tokens")


def _check_values(call: Call, split: Split, rank: int, rows: PoolRows) -> None:
    """Check gates as the operator would, which may run too late for other ranks to hear of it."""
    part = split.part(rank)
    here = range(part.first, part.last) if split.packed else range(len(rows.live))
    for i, sequence in enumerate(here):
        at = (0, slice(*part.bounds[i : i + 2])) if split.packed else (i, slice(None))
        for name, x in (("g", call.g), ("beta", call.beta)):
            if x is not None and rows.live[sequence]:
                values.finite("prefill", x[at], name)
    for name, x in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
        values.finite("prefill", x, name)


def _pool(
    call: Call,
    split: Split,
    state: Tensor | None,
    slots: Slots | None,
    write_slots: Slots | None,
    has_state: Sequence[bool] | Tensor | None,
    pad_slot: int,
    state_layout: StateLayout,
) -> _Pool:
    """Check the call as the operator would; return its pool, or make one."""
    if split.packed and call.q.shape[0] != 1:
        expected = "one packed row, since split has cu_seqlens"
        raise ContractError(OP, "q", expected, f"{call.q.shape[0]} rows")
    n = len(split.cu_seqlens) - 1 if split.cu_seqlens is not None else call.q.shape[0]
    explained: dict[str, Any] = {"state_layout": state_layout, "A_log": call.A_log}
    if state is not None:
        rows = torch.zeros(call.q.shape[0], dtype=torch.int64, device=call.q.device)
        explained |= {"state": state, "slots": rows}
    explain("prefill", *call[:5], dt_bias=call.dt_bias, **explained, **call.options)
    if state is None:
        for given, name in (
            (slots, "slots"),
            (write_slots, "write_slots"),
            (has_state, "has_state"),
        ):
            if given is not None:
                raise ContractError(OP, name, "state beside it", "state=None")
        tail = (call.v.shape[3], call.q.shape[3])
        tail = tail if state_layout == "vk" else tail[::-1]
        state = call.v.new_zeros(n, call.v.shape[2], *tail, dtype=call.exact)
    vk = state if state_layout == "vk" else state.mT
    return _Pool(state, PoolRows(OP, vk, n, slots, write_slots, has_state, pad_slot))


def _facts(call: Call, split: Split, rows: PoolRows) -> dict[str, Any]:
    """The facts that must be the same on every rank."""
    (B, _, HQ, K), (HV, V) = call.q.shape, call.v.shape[2:]
    return {
        "rows": B,
        "heads": f"{HQ} query, {call.k.shape[2]} key, {HV} value",
        "widths": f"K={K}, V={V}",
        "dtype": call.v.dtype,
        "device": call.v.device.type,
        "g": "none" if call.g is None else "per head" if call.g.dim() == 3 else "per key",
        "beta": call.delta,
        "raw gates": call.A_log is not None,
        "options": [call.options[name] for name in ("scale", "normalize_qk", "neg_eigval")],
        "split": f"{split.digest} ({split.tokens} tokens)",
        "padded sequences": rows.live.count(False),
    }
