"""The recurrence over sequences: ``prefill`` and ``decode``; ``verify`` is in drafts.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sluice import calls
from sluice.calls import Canonical, Operator
from sluice.contract import checks, values
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.errors import ContractError
from sluice.contract.names import BackendName, HeadLayout, StateLayout
from sluice.contract.spec import DeltaSpec
from sluice.ops.canonical import Tokens, backward_of
from sluice.ops.checkpoints import Checkpoints, parts
from sluice.torch_ops import Functional, register, register_functional


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
    initial_state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    layout: HeadLayout = "bthd",
    batch_invariant: bool = False,
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over sequences of any length.

    Per value head and token, in float32, with S of shape [K, V]::

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q        (C1)-(C4)

    The gates that are given choose the rule: linear without any, gated with ``g``, delta with
    ``beta``, gated delta with both.

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
        initial_state: the functional form: [N, HV, V, K] or [N, HV, K, V], any float dtype and
            strides, which is read and never written; the final state is a new tensor. In place of
            ``state``, its slots, ``checkpoints`` and ``out``.
        slots: [N] int32 or int64: the row of ``state`` each sequence reads. Row i by default. A
            negative slot is a padded row: its output is zeros, nothing of it is read or written.
        write_slots: [N]: the row each sequence writes; ``slots`` by default. Padding: not written.
        has_state: [N] bool: False starts that sequence from zero without reading its row.
        pad_slot: -1 (negative slots are padding) or 0 (slot 0 is reserved for padding too).
        state_layout: "vk" or "kv".
        cu_seqlens: [N + 1] int32 or int64: borders of packed sequences, which may be empty.
            Tokens after the last border get zeros.
        cu_seqlens_cpu: the same values on the host, which lets a GPU call plan without waiting.
        checkpoints: states inside the sequences to keep: ``sluice.Checkpoints``.
        layout: "bthd", or "bhtd" for [B, H, T, D] tensors (the same data through other strides).
        batch_invariant: a sequence's bits do not depend on the sequences beside it.
        out: buffer for o, with o's shape and v's dtype.
        backend: the backend to use, or fail with its reason; chosen by ``dispatch`` by default.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, in the layout of the inputs; and ``state``.
        Without ``state`` and ``out`` both have gradients, if an input requires one
        (docs/training.md).

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
    kept, positions, every = parts("prefill", checkpoints)
    tensors = [
        q, k, v, g, beta, A_log, dt_bias, state, slots, write_slots, has_state, cu_seqlens,
        cu_seqlens_cpu, kept, positions, out, None, None, None,
    ]  # fmt: skip
    options = (scale, normalize_qk, neg_eigval, pad_slot, state_layout, every, batch_invariant)
    if initial_state is not None:
        return _from_initial(tensors, initial_state, options, layout, backend)
    if state is None and out is None and calls.wants_gradient(*tensors[:7]):
        return _differentiable(tensors, options, layout, backend)
    made = calls.call(PREFILL, tensors, options, layout, backend)
    return _results("prefill", made, q, k, v, g, beta, A_log, dt_bias, state)


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
    state_layout: StateLayout = "vk",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    layout: HeadLayout = "bthd",
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over 1 to 8 tokens per sequence, in place.

    The same equations, arguments, padding and errors as :func:`prefill`, without checkpoints; a
    sequence's bits never depend on the rows beside it. The state is rounded to its dtype once, at
    the end of the call; with one write slot for each token, each time it is written.

    Args:
        q: [B, T, HQ, K], T from 1 to 8 (or packed with ``cu_seqlens``, each at most 8 tokens).
        k: [B, T, HK, K].
        v: [B, T, HV, V].
        g: as in ``prefill``; so are all other arguments.
        write_slots: [N] as in ``prefill``, or [N, M], M at least the tokens of a sequence: the
            state after token t goes to slot ``write_slots[i, t]``; the slot that the sequence
            reads may be among them. Padding: that state is not written.

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
    tensors = [
        q, k, v, g, beta, A_log, dt_bias, state, slots, write_slots, has_state, cu_seqlens,
        cu_seqlens_cpu, None, None, out, None, None, None,
    ]  # fmt: skip
    options = (scale, normalize_qk, neg_eigval, pad_slot, state_layout, 0, False)
    made = calls.call(DECODE, tensors, options, layout, backend)
    return _results("decode", made, q, k, v, g, beta, A_log, dt_bias, state)


_STATE = DeltaSpec.TENSORS.index("state")
_OUT = DeltaSpec.TENSORS.index("out")


def _results(op: str, made: list[Any], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """o in the caller's layout, and the state."""
    o, state = made[_OUT], made[_STATE]
    if calls.wants_gradient(*inputs):
        o = calls.without_gradient(op, o, *inputs)
        state = calls.without_gradient(op, state, *inputs)
    return o, state


def _from_initial(
    tensors: list[Any], initial: Tensor, options: tuple[Any, ...], layout: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``prefill`` in the functional form."""
    names = DeltaSpec.TENSORS
    alone = ("state", "slots", "write_slots", "has_state", "checkpoint_slots", "out")
    for name in alone:
        if tensors[names.index(name)] is not None:
            raise ContractError("prefill", name, "None beside initial_state", "a tensor")
    bounds = tensors[names.index("cu_seqlens")]
    for given, name in ((tensors[0], "q"), (initial, "initial_state"), (bounds, "cu_seqlens")):
        if given is None and name == "cu_seqlens":
            continue
        if not isinstance(given, Tensor) or given.layout != torch.strided:
            raise ContractError("prefill", name, "a dense tensor", type(given).__name__)
    if bounds is not None and bounds.dim() != 1:
        raise ContractError("prefill", "cu_seqlens", "shape [N + 1]", f"shape {list(bounds.shape)}")
    N = tensors[0].shape[0] if tensors[0].dim() == 4 else 1
    N = N if bounds is None else bounds.shape[0] - 1
    if initial.dim() != 4 or initial.shape[0] != N:
        expected = f"shape [{N}, HV, ..], a state per sequence"
        raise ContractError("prefill", "initial_state", expected, f"shape {list(initial.shape)}")
    if calls.wants_gradient(*tensors[:7], initial):
        tensors[_STATE] = initial
        return _differentiable(tensors, options, layout, backend)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    tensors[_STATE] = initial.to(wide, copy=True).contiguous()
    made = calls.call(PREFILL, tensors, options, layout, backend)
    return made[_OUT], made[_STATE]


def _differentiable(
    tensors: list[Any], options: tuple[Any, ...], layout: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``prefill`` as autograd follows it: views in canonical form, one functional call."""
    t = DeltaSpec.Tensors(*tensors)
    tokens = Tokens("prefill", t.cu_seqlens, layout, ("bthd", "bhtd"), packed=t.q.dim() == 3)
    t = t._replace(
        **{name: tokens(getattr(t, name), name, 4) for name in ("q", "k", "v")},
        g=tokens(t.g, "g", 3, 4),
        beta=tokens(t.beta, "beta", 3),
    )
    o, final = FUNCTIONAL(t, options, None, backend)
    return tokens.restore(o), final


def canonical_delta(op: str, t: Any, options: tuple[Any, ...], layout: str) -> Canonical:
    """Canonical tensors of ``prefill``, ``decode`` and ``verify``, with the outputs they need."""
    packed = t.q.dim() == 3
    tokens = Tokens(op, t.cu_seqlens, layout, ("bthd", "bhtd"), packed=packed)
    q, k, v = tokens(t.q, "q", 4), tokens(t.k, "k", 4), tokens(t.v, "v", 4)
    g, beta = tokens(t.g, "g", 3, 4), tokens(t.beta, "beta", 3)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = t.state
    if state is None:
        if op == "verify":
            raise ContractError(op, "state", "a tensor", "NoneType")
        for name in ("slots", "write_slots", "has_state"):
            if getattr(t, name) is not None:
                raise ContractError(op, name, "state beside it", "state=None")
        if t.checkpoint_slots is not None:
            raise ContractError(op, "checkpoints", "state beside them", "state=None")
        state_layout = options[DeltaSpec.OPTIONS.index("state_layout")]
        widths = (v.shape[3], q.shape[3]) if state_layout == "vk" else (q.shape[3], v.shape[3])
        state = q.new_zeros(tokens.sequences(q), v.shape[2], *widths, dtype=wide)
    heads = max(q.shape[2], v.shape[2])
    out = v.new_empty(*v.shape[:2], heads, v.shape[3])
    if t.out is not None:
        out = tokens(t.out, "out", 4)
    write_slots = t.write_slots
    each = op == "decode" and write_slots is not None and write_slots.dim() == 2
    if each and t.cu_seqlens is None and q.shape[1] == 1 and write_slots.shape[1] > 0:
        write_slots = write_slots.narrow(1, 0, 1).squeeze(1)  # the only token's is the row's
    canonical = t._replace(
        q=q, k=k, v=v, g=g, beta=beta, state=state, out=out, write_slots=write_slots
    )
    if op == "verify":
        inputs = tokens(t.conv_inputs, "conv_inputs", 3, layout="btd")
        canonical = canonical._replace(conv_inputs=inputs)
    return Canonical(canonical, tokens.restore, ("out",), ("state",))


PREFILL = Operator(
    "prefill",
    DeltaSpec,
    functools.partial(canonical_delta, "prefill"),
    checks.delta,
    values.delta,
    ("state", "out"),
)
DECODE = PREFILL._replace(name="decode", canonical=functools.partial(canonical_delta, "decode"))
for _op in (PREFILL, DECODE):
    register(_op)
_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
FUNCTIONAL = Functional(
    PREFILL,
    backward_of("prefill", DeltaBackwardSpec, _INPUTS),
    (*_INPUTS, "cu_seqlens", "cu_seqlens_cpu"),
    ("out", "state"),
    ("do", "dfinal"),
    "bthd",
)
register_functional(FUNCTIONAL)
