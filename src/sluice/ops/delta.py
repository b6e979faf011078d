"""The recurrence over sequences: ``prefill``, ``decode``, ``verify`` and ``commit``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice import library
from sluice.contract import checks
from sluice.contract.errors import ContractError
from sluice.contract.options import CommitOptions, DeltaOptions
from sluice.contract.tensors import CommitTensors, DeltaTensors, Rows
from sluice.ops.canonical import Tokens, tensor
from sluice.ops.checkpoints import Checkpoints, parts


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    layout: str = "bthd",
    batch_invariant: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over sequences of any length.

    Per value head and token, in float32, with S of shape [K, V]::

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q        (C1)-(C4)

    Which gates are given chooses the rule: none: linear; ``g``: gated; ``beta``: delta; both: gated
    delta.

    Args:
        q: [B, T, HQ, K] float32, bfloat16 or float16; packed sequences as [T, HQ, K] or
            [1, T, HQ, K]. Strided views are taken as they are; only the last stride must be 1.
        k: [B, T, HK, K], the dtype of q. Value head h uses key head ``h // (HV / HK)``.
        v: [B, T, HV, V], the dtype of q.
        g: [B, T, HV] natural log of the decay, per head, or [B, T, HV, K], per key dimension; the
            raw ``a`` when ``A_log`` is given. Any float dtype.
        beta: [B, T, HV] write strength; the raw logit ``b`` when ``A_log`` is given.
        scale: factor on q after its norm; ``K ** -0.5`` by default.
        normalize_qk: divide q and k by ``sqrt(sum of squares + 1e-6)`` first; off by default.
        A_log: [HV]; given, gates are raw: ``g = -exp(A_log) softplus(a + dt_bias)`` and
            ``beta = sigmoid(b)``, both in float32.
        dt_bias: [HV] ([HV, K] with per-key decay); none by default. Needs ``A_log``.
        neg_eigval: double beta, so that the transition may have negative eigenvalues. Needs raw
            gates.
        state: [P, HV, V, K] ("vk") or [P, HV, K, V] ("kv"), float32, bfloat16 or float16, updated
            in place. The last three dimensions are contiguous; ``stride(0)`` may be larger.
            None starts every sequence from zero and returns a fresh float32 state.
        slots: [N] int32 or int64: the row of ``state`` each sequence reads. Row i by default. A
            negative slot is a padded row: its output is zeros, nothing of it is read or written.
        write_slots: [N]: the row each sequence writes; ``slots`` by default. Padding: not written.
        has_state: [N] bool: False starts that sequence from zero without reading its row.
        pad_slot: -1 (negative slots are padding) or 0 (slot 0 is reserved for padding too).
        state_layout: "vk" or "kv".
        cu_seqlens: [N + 1] int32 or int64: borders of packed sequences, which may be empty.
            Tokens behind the last border get zeros.
        cu_seqlens_cpu: the same values on the host, which lets a GPU call plan without waiting.
        checkpoints: states inside the sequences to keep: ``sluice.Checkpoints``.
        layout: "bthd", or "bhtd" for [B, H, T, D] tensors (the same data through other strides).
        batch_invariant: a sequence's bits do not depend on the sequences beside it.
        out: buffer for o, with o's shape and v's dtype.
        backend: the backend to use, or fail with its reason; chosen by ``dispatch`` by default.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, in the layout of the inputs; and ``state``.

    Raises:
        ContractError: an argument does not keep the contract.
        BackendError: the backend that was asked for refuses the call.

    >>> import torch, sluice
    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 3, 1, 2), dim=-1)
    >>> v = torch.ones(1, 3, 2, 2)
    >>> o, state = sluice.prefill(q, k, v, torch.zeros(1, 3, 2), torch.ones(1, 3, 2), scale=1.0)
    >>> o.shape, state.shape
    (torch.Size([1, 3, 2, 2]), torch.Size([1, 2, 2, 2]))
    >>> torch.allclose(o, v)  # beta = 1: the state answers the key with the value just written
    True
    """
    rows = Rows(slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu)
    options = DeltaOptions(scale, normalize_qk, neg_eigval, pad_slot, state_layout)
    gates = (g, beta, A_log, dt_bias)
    call = _Call("prefill", q, k, v, gates, state, rows, options, layout, out)
    call.keep(checkpoints, batch_invariant)
    call.run(backend)
    return call.outputs()


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    layout: str = "bthd",
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over 1 to 8 tokens a sequence, in place.

    The same equations, arguments, padding and errors as :func:`prefill`, without checkpoints; a
    sequence's bits never depend on the rows beside it. The state is rounded to its dtype once, at
    the end of the call.

    Args:
        q: [B, T, HQ, K], T from 1 to 8 (or packed with ``cu_seqlens``, each at most 8 tokens).
        k: [B, T, HK, K].
        v: [B, T, HV, V].
        g: as in ``prefill``; so are all other arguments.

    Returns:
        o [B, T, max(HQ, HV), V] and ``state``, updated in place.

    >>> import torch, sluice
    >>> pool = torch.zeros(4, 2, 8, 8)  # 4 slots, 2 heads, vk
    >>> x = torch.randn(3, 1, 2, 8)
    >>> slots = torch.tensor([2, -1, 0])  # the second row is padding
    >>> o, _ = sluice.decode(x, x, x, normalize_qk=True, state=pool, slots=slots)
    >>> bool((o[1] == 0).all()), bool((pool[[1, 3]] == 0).all())
    (True, True)
    """
    rows = Rows(slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu)
    options = DeltaOptions(scale, normalize_qk, neg_eigval, pad_slot, state_layout)
    gates = (g, beta, A_log, dt_bias)
    call = _Call("decode", q, k, v, gates, state, rows, options, layout, out)
    call.run(backend)
    return call.outputs()


@dataclass(frozen=True)
class Draft:
    """What ``verify`` keeps of its draft tokens so that ``commit`` can fold the accepted ones in.

    ``k`` [B, T, HK, K], ``d`` [B, T, HV, V] (the corrections of (C2); a backend may keep k's
    length in either, only their product is used) and ``g`` (log
    decays, or None), all float32, are indexed by row, never by pool slot. The rest is the call's
    own: the draft refers to ``state``, ``conv_state`` and the index tensors, it does not copy them.
    """

    k: Tensor
    d: Tensor
    g: Tensor | None
    state: Tensor
    rows: Rows
    pad_slot: int
    state_layout: str
    conv_inputs: Tensor | None
    conv_state: Tensor | None


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
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    conv_inputs: Tensor | None = None,
    conv_state: Tensor | None = None,
    layout: str = "bthd",
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Draft]:
    """Outputs of up to 8 draft tokens a sequence, writing no state.

    The arguments are :func:`decode`'s, and two more for the convolution before it, which must have
    been run with ``freeze=True``:

    Args:
        conv_inputs: [B, T, D] raw inputs of the convolution for the draft tokens (packed as q is).
        conv_state: [P, D, L] conv state, addressed by the same slots, which ``commit`` will roll.

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
    rows = Rows(slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu)
    options = DeltaOptions(scale, normalize_qk, neg_eigval, pad_slot, state_layout)
    gates = (g, beta, A_log, dt_bias)
    tensor("verify", state, "state")
    call = _Call("verify", q, k, v, gates, state, rows, options, layout, out)
    window = None
    if conv_inputs is not None:
        window = call.tokens(conv_inputs, "conv_inputs", 3, layout="btd")
    checks.window("verify", window, conv_state, call.t)
    kept = call.draft()
    call.run(backend)
    draft_k, draft_d, draft_g = (
        None if x is None else library.without_gradient("verify", x, *call.inputs) for x in kept
    )
    assert draft_k is not None
    assert draft_d is not None
    draft = Draft(
        draft_k, draft_d, draft_g, call.state, rows, pad_slot, state_layout, window, conv_state
    )
    return call.outputs()[0], draft


def commit(draft: Draft, num_accepted: Tensor, *, backend: str | None = None) -> Tensor:
    """Fold the first ``num_accepted`` draft tokens of each row into its state, in place.

    State and conv window are left exactly as decoding only those tokens (in one call) would have
    left them, to the bit; 0 leaves them as they were (copied through, if write slots differ).

    Args:
        draft: from :func:`verify`. A draft is committed at most once, before its rows change.
        num_accepted: [N] int32 or int64, 0 to the row's number of draft tokens.

    Returns:
        the state pool the draft refers to.
    """
    if not isinstance(draft, Draft):
        raise ContractError("commit", "draft", "a Draft from verify", type(draft).__name__)
    tensors = CommitTensors(
        draft.k,
        draft.d,
        draft.g,
        num_accepted,
        draft.state,
        draft.rows,
        draft.conv_inputs,
        draft.conv_state,
    )
    library.call(
        library.COMMIT, tensors, CommitOptions(draft.pad_slot, draft.state_layout), backend
    )
    wanted = (draft.k, draft.state, draft.conv_inputs)
    return library.without_gradient("commit", draft.state, *wanted)


class _Call:
    """A call of the recurrence: canonical tensors, allocated outputs, and the way back."""

    def __init__(
        self,
        op: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        state: Tensor | None,
        rows: Rows,
        options: DeltaOptions,
        layout: str,
        out: Tensor | None,
    ) -> None:
        self.op, self.inputs, self.options = op, (q, k, v, *gates, state), options
        packed = tensor(op, q, "q").dim() == 3
        self.tokens = Tokens(op, rows, layout, ("bthd", "bhtd"), packed=packed)
        g, beta, A_log, dt_bias = gates
        tokens = self.tokens
        q, k, v = tokens(q, "q", 4), tokens(k, "k", 4), tokens(v, "v", 4)
        g = None if g is None else tokens(g, "g", 3, 4)
        beta = None if beta is None else tokens(beta, "beta", 3)
        if state is None:
            _no_rows(op, rows)
            tail = (
                (v.shape[3], q.shape[3])
                if options.state_layout == "vk"
                else (q.shape[3], v.shape[3])
            )
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            state = q.new_zeros(self.tokens.sequences(q), v.shape[2], *tail, dtype=dtype)
        self.state, self.out = state, out
        if out is None:
            heads = max(q.shape[2], v.shape[2])
            made = v.new_empty(*v.shape[:2], heads, v.shape[3])
        else:
            made = self.tokens(out, "out", 4)
        self.t = DeltaTensors(q, k, v, g, beta, A_log, dt_bias, state, rows, None, None, made)

    def keep(self, checkpoints: Checkpoints | None, batch_invariant: bool) -> None:
        """Options of prefill alone."""
        slots, positions, every = parts(self.op, checkpoints)
        self.t = self.t._replace(checkpoint_slots=slots, checkpoint_positions=positions)
        self.options = self.options._replace(
            checkpoint_every=every, batch_invariant=batch_invariant
        )

    def draft(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Allocate what verify keeps."""
        q, k, v, g = self.t.q, self.t.k, self.t.v, self.t.g
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        kept = (
            k.new_empty(k.shape, dtype=dtype),
            v.new_empty(v.shape, dtype=dtype),
            None if g is None else g.new_empty(g.shape, dtype=dtype),
        )
        self.t = self.t._replace(draft_k=kept[0], draft_d=kept[1], draft_g=kept[2])
        return kept

    def run(self, backend: str | None) -> None:
        library.call(library.OPERATORS[self.op], self.t, self.options, backend)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """o in the caller's layout, and the state."""
        o = self.tokens.restore(self.t.out) if self.out is None else self.out
        if not library.wants_gradient(self.inputs):
            return o, self.state
        return (
            library.without_gradient(self.op, o, *self.inputs),
            library.without_gradient(self.op, self.state, *self.inputs),
        )


def _no_rows(op: str, rows: Rows) -> None:
    for x, name in zip(rows[:3], Rows._fields[:3], strict=True):
        if x is not None:
            raise ContractError(op, name, "state beside it", "state=None")
