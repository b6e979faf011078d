"""Speculative decoding: ``verify``, ``commit``, and drafts of all layers in buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import calls, open_drafts
from sluice.calls import Canonical, Operator
from sluice.contract import checks, values
from sluice.contract.draft_spec import CommitSpec, VerifySpec
from sluice.contract.errors import ContractError
from sluice.contract.names import BackendName, HeadLayout, StateLayout
from sluice.open_drafts import Mark
from sluice.ops.delta import canonical_delta
from sluice.torch_ops import register


class DraftBuffers(NamedTuple):
    """Where ``verify`` keeps drafts by slot, for all layers or, without that dimension, for one.

    k: [layers, S, M, HK, K]; d: [layers, S, M, HV, V]; g: [layers, S, M, HV] ([.., K] for a decay
    per key), None without a decay. All are float32 (float64 for float64 inputs) and contiguous.
    x: [layers, S, M, D] raw inputs of the convolution, in their dtype; None without a convolution.

    >>> import torch, sluice
    >>> buffers = sluice.DraftBuffers(torch.zeros(2, 5, 3, 1, 4), torch.zeros(2, 5, 3, 1, 4))
    >>> buffers.layer(1).k.shape
    torch.Size([5, 3, 1, 4])
    """

    k: Tensor
    d: Tensor
    g: Tensor | None = None
    x: Tensor | None = None

    def layer(self, index: int) -> DraftBuffers:
        """The buffers of one layer, as views: ``buffers`` of :func:`verify`."""
        return DraftBuffers(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class Draft(NamedTuple):
    """What ``verify`` keeps of its draft tokens so that ``commit`` can fold the accepted ones in.

    ``k`` [B, T, HK, K], ``d`` [B, T, HV, V] (the corrections of (C2)) and ``g`` (log decays, or
    None) are float32, and indexed by row, never by pool slot. A backend may keep k's length in k or
    in d: only their product is used. The rest is the call's own: the draft refers to ``state``,
    ``conv_state`` and the index tensors, and does not copy them.

    With ``buffered``, k, d, g and ``conv_inputs`` are the caller's buffers of one layer
    (:class:`DraftBuffers`), indexed by ``draft_slots``.
    """

    k: Tensor
    d: Tensor
    g: Tensor | None
    state: Tensor
    slots: Tensor | None
    write_slots: Tensor | None
    has_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    pad_slot: int
    state_layout: StateLayout
    conv_inputs: Tensor | None
    conv_state: Tensor | None
    draft_slots: Tensor | None = None
    buffered: bool = False
    mark: Mark | None = None
    """What became of its rows since; None where that is not followed (``open_drafts.py``)."""


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    conv_inputs: Tensor | None = None,
    conv_state: Tensor | None = None,
    buffers: DraftBuffers | None = None,
    draft_slots: Tensor | None = None,
    layout: HeadLayout = "bthd",
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> tuple[Tensor, Draft]:
    """Outputs of up to 8 draft tokens per sequence, writing no state.

    The arguments are :func:`decode`'s with write_slots [N], and these:

    Args:
        conv_inputs: [B, T, D] raw inputs of the convolution for the draft tokens (packed as q is);
            it must have been run with ``freeze=True``.
        conv_state: [P, D, L] conv state, addressed by the same slots, which ``commit`` will roll.
        buffers: one layer's buffers for the draft (:class:`DraftBuffers`); by default new tensors,
            indexed by row. ``buffers.x`` is given if and only if ``conv_inputs`` is.
        draft_slots: [N] int32 or int64: the row of ``buffers`` for each sequence; ``slots`` by
            default. Padding: no draft of that row is kept.

    Returns:
        o as ``decode`` would give it, and a :class:`Draft` for :func:`commit`. Rejecting every
        token needs no call.

    >>> import torch, sluice
    >>> pool = torch.randn(2, 1, 4, 4)
    >>> before, x = pool.clone(), torch.randn(2, 3, 1, 4)
    >>> o, draft = sluice.verify(x, x, x, normalize_qk=True, state=pool)
    >>> torch.equal(pool, before)
    True
    >>> _ = sluice.commit(draft, torch.tensor([0, 2]))
    >>> torch.equal(pool[0], before[0]), torch.equal(pool[1], before[1])
    (True, False)
    """
    tensors = [
        q, k, v, g, beta, A_log, dt_bias, state, slots, write_slots, has_state, cu_seqlens,
        cu_seqlens_cpu, None, None, out, *_places("verify", buffers)[:3], conv_inputs, conv_state,
        None if buffers is None else buffers.x, draft_slots,
    ]  # fmt: skip
    buffered = buffers is not None
    options = (scale, normalize_qk, neg_eigval, pad_slot, state_layout, 0, False, buffered)
    made = calls.call(VERIFY, tensors, options, layout, backend)
    if conv_inputs is not None and conv_inputs.dim() == 2:
        conv_inputs = conv_inputs.unsqueeze(0)
    o, kept = made[_OUT], made[_DRAFT : _DRAFT + 3]
    inputs = (q, k, v, g, beta, A_log, dt_bias, state)
    if calls.wants_gradient(*inputs):
        o = calls.without_gradient("verify", o, *inputs)
        kept = [None if x is None else calls.without_gradient("verify", x, *inputs) for x in kept]
    draft_k, draft_d, draft_g = kept
    draft = Draft(
        draft_k, draft_d, draft_g, state, slots, write_slots, has_state, cu_seqlens,
        cu_seqlens_cpu, pad_slot, state_layout, conv_inputs if buffers is None else buffers.x,
        conv_state, draft_slots, buffered, open_drafts.begin(state, slots),
    )  # fmt: skip
    return o, draft


def commit(
    draft: Draft,
    num_accepted: Tensor,
    *,
    write_slots: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Fold the first ``num_accepted`` draft tokens of each row into its state, in place.

    State and conv window are left exactly as decoding only those tokens (in one call) would have
    left them, to the bit; 0 leaves them as they were (copied through, if write slots differ).

    Args:
        draft: from :func:`verify`, before the rows it read change. It may be committed again, with
            other counts, while they have not: to other slots first, to the rows themselves last.
            A draft whose rows have changed is refused, as far as the host can tell.
        num_accepted: [N] int32 or int64, 0 to the row's number of draft tokens.
        write_slots: [N]: where this commit writes; the draft's own by default. Padding: that row
            is left out.

    Returns:
        the state pool the draft refers to.

    >>> import torch, sluice
    >>> pool, x = torch.randn(3, 1, 4, 4), torch.randn(1, 3, 1, 4)
    >>> _, draft = sluice.verify(x, x, x, normalize_qk=True, state=pool, slots=torch.tensor([0]))
    >>> _ = sluice.commit(draft, torch.tensor([1]), write_slots=torch.tensor([2]))  # a prefix
    >>> _ = sluice.commit(draft, torch.tensor([3]))  # then the row itself
    """
    if not isinstance(draft, Draft):
        raise ContractError("commit", "draft", "a Draft from verify", type(draft).__name__)
    if not isinstance(draft.state, Tensor) or not isinstance(draft.buffered, bool):
        raise ContractError("commit", "draft", "a Draft as verify made it", "another state")
    kept = [draft.k, draft.d, draft.g, draft.state, draft.conv_inputs, draft.conv_state]
    bounds: tuple[Tensor | None, Tensor | None] = (draft.cu_seqlens, draft.cu_seqlens_cpu)
    if draft.buffered:  # by slot: one layer of many
        kept = [x.unsqueeze(0) if isinstance(x, Tensor) else x for x in kept]
        bounds = (None, None)
    k, d, g, state, conv_inputs, conv_state = kept
    writes = draft.write_slots if write_slots is None else write_slots
    tensors = [
        k, d, g, num_accepted, state, draft.slots, writes,
        draft.has_state, *bounds, conv_inputs, conv_state, draft.draft_slots,
    ]  # fmt: skip
    options = (draft.pad_slot, draft.state_layout)
    mark = draft.mark
    if mark is not None and not isinstance(mark, Mark):
        raise ContractError("commit", "draft.mark", "verify's own", type(mark).__name__)
    if mark is None:
        calls.call(COMMIT, tensors, options, None, backend)
    else:
        if mark.by is not None:
            n = num_accepted.shape[0] if isinstance(num_accepted, Tensor) else 0
            open_drafts.require_fresh(mark, draft.slots, writes, draft.pad_slot, n)
        with open_drafts.ended(mark, draft.state) if writes is None else _HERE:
            calls.call(COMMIT, tensors, options, None, backend)
    return calls.without_gradient("commit", draft.state, draft.k, draft.state, draft.conv_inputs)


def commit_layers(
    buffers: DraftBuffers,
    num_accepted: Tensor,
    *,
    state: Tensor,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    draft_slots: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    backend: BackendName | None = None,
) -> Tensor:
    """Fold the accepted draft tokens of every layer into its state, in one call.

    The drafts were written by :func:`verify` with ``buffers.layer(i)``. Each layer is left with
    the bits that :func:`commit` would leave. Rows may come in another order than in ``verify``.

    Args:
        buffers: the drafts of all layers.
        num_accepted: [N] int32 or int64, 0 to the row's number of draft tokens, which the caller
            knows; at most M is checked.
        state: [layers, P, HV, V, K] or [layers, P, HV, K, V], updated in place. The last three
            dimensions are contiguous, the first two may have any strides.
        conv_state: [layers, P, D, L], any strides; given if and only if ``buffers.x`` is.
        slots: [N] the row of the pools each sequence reads, as in :func:`prefill`; so are
            ``write_slots`` [N], ``has_state``, ``pad_slot`` and ``state_layout``.
        draft_slots: [N] the row of ``buffers``; ``slots`` by default. Padding: that row is left
            out.

    Returns:
        ``state``.

    >>> import torch, sluice
    >>> pools, x = torch.randn(2, 4, 1, 4, 4), torch.randn(1, 3, 1, 4)
    >>> buffers = sluice.DraftBuffers(torch.zeros(2, 4, 3, 1, 4), torch.zeros(2, 4, 3, 1, 4))
    >>> slots = torch.tensor([2])
    >>> for i in range(2):
    ...     o, _ = sluice.verify(x, x, x, state=pools[i], slots=slots, buffers=buffers.layer(i))
    >>> after = sluice.commit_layers(buffers, torch.tensor([2]), state=pools, slots=slots)
    >>> after.shape
    torch.Size([2, 4, 1, 4, 4])
    """
    k, d, g, x = _places("commit_layers", buffers)
    if not isinstance(k, Tensor) or k.dim() != 5:
        got = f"shape {list(k.shape)}" if isinstance(k, Tensor) else type(k).__name__
        raise ContractError("commit_layers", "buffers.k", "shape [layers, S, M, HK, K]", got)
    tensors = [
        k, d, g, num_accepted, state, slots, write_slots, has_state, None, None, x, conv_state,
        draft_slots,
    ]  # fmt: skip
    calls.call(COMMIT, tensors, (pad_slot, state_layout), None, backend)
    return calls.without_gradient("commit_layers", state, k, state, x)


def _places(op: str, buffers: object) -> tuple[Any, Any, Any, Any]:
    """k, d, g and x of buffers, where there are any."""
    if buffers is None and op == "verify":
        return None, None, None, None
    if not isinstance(buffers, DraftBuffers):
        raise ContractError(op, "buffers", "sluice.DraftBuffers(k, d, ...)", type(buffers).__name__)
    return tuple(buffers)  # type: ignore[return-value]


_HERE: AbstractContextManager[None] = nullcontext()
_OUT = VerifySpec.TENSORS.index("out")
_DRAFT = VerifySpec.TENSORS.index("draft_k")
_BUFFERED = VerifySpec.OPTIONS.index("buffered")


def _verify_canonical(t: Any, options: tuple[Any, ...], layout: str) -> Canonical:
    """Canonical tensors of ``verify``: a new draft has the shape of k, v and g."""
    found = canonical_delta("verify", t, options, layout)
    x: Any = found.tensors
    if options[_BUFFERED]:
        return found
    wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    draft = x._replace(
        draft_k=x.k.new_empty(*x.k.shape, dtype=wide),
        draft_d=x.v.new_empty(*x.v.shape, dtype=wide),
        draft_g=None if x.g is None else x.g.new_empty(*x.g.shape, dtype=wide),
    )
    return found._replace(tensors=draft)


def _as_given(t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """A draft is canonical: ``verify`` made it so. Its state is never made anew."""
    if t.state is None:
        raise ContractError("commit", "state", "a tensor", "NoneType")
    return Canonical(t)


VERIFY = Operator(
    "verify",
    VerifySpec,
    _verify_canonical,
    checks.verify,
    values.verify,
    ("out", "draft_k", "draft_d", "draft_g", "draft_x"),
    tuple((f"draft_{x}", f"buffers.{x}") for x in "kdgx"),
)
COMMIT = Operator(
    "commit", CommitSpec, _as_given, checks.commit, values.commit, ("state", "conv_state")
)
for _op in (VERIFY, COMMIT):
    register(_op)
