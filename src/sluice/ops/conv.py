"""The convolution before the recurrence: ``causal_conv1d`` and ``conv_qkv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice import calls
from sluice.calls import Canonical, Operator
from sluice.contract import checks, values
from sluice.contract.backward import ConvBackwardSpec, ConvQkvBackwardSpec
from sluice.contract.errors import ContractError
from sluice.contract.names import BackendName, ChannelLayout, ConvActivation
from sluice.contract.spec import ConvQkvSpec, ConvSpec
from sluice.ops.canonical import Tokens, backward_of, conv_taps
from sluice.ops.checkpoints import Checkpoints, parts
from sluice.torch_ops import Functional, register, register_functional


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    state: Tensor | None = None,
    initial_state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    freeze: bool = False,
    window_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    layout: ChannelLayout = "btd",
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over tokens, continued from a window of earlier inputs.

    ::

        y_t = act(bias + sum_w weight[:, w] x_(t - W + 1 + w))                       (C5)

    Args:
        x: [B, T, D] float32, bfloat16 or float16, any strides; packed as [T, D] or [1, T, D].
        weight: [D, W] or [D, 1, W], W from 2 to 4, any float dtype.
        bias: [D], or None.
        activation: "silu" (default), or None.
        state: [P, D, L], L >= W - 1, any strides and float dtype: the last L raw inputs, oldest
            first, rolled in place. None starts from zeros and returns a fresh [N, D, W - 1].
        initial_state: the functional form: [N, D, L], which is read and never written; the final
            windows are a new tensor of its dtype. In place of ``state``, its slots,
            ``checkpoints`` and ``out``.
        slots: as in :func:`prefill`; so are ``write_slots``, ``has_state``, ``pad_slot``,
            ``cu_seqlens``, ``cu_seqlens_cpu``, ``checkpoints`` and ``backend``.
        freeze: read the window but leave it as it is, for draft tokens (:func:`verify`).
        window_start: [N] int32 or int64: the state is left-aligned. A sequence's window are the
            W - 1 columns from here on; from column 0 on, the call writes the window without its
            oldest column, then x. If n >= 1 of these tokens count, the next call's
            ``window_start`` is n - 1. Needs L >= W - 2 + T, and no checkpoints.
        layout: "btd", or "bdt" for [B, D, T] tensors (packed [D, T]).
        out: buffer for y, in the layout of x.

    Returns:
        y, with the shape and dtype of x, and ``state``. Padded rows are zeros. Without ``state``
        and ``out`` both have gradients, if an input requires one.

    >>> import torch, sluice
    >>> x = torch.arange(6.0).view(1, 6, 1)
    >>> y, window = sluice.causal_conv1d(x, torch.ones(1, 3), activation=None)
    >>> y.flatten().tolist(), window.flatten().tolist()
    ([0.0, 1.0, 3.0, 6.0, 9.0, 12.0], [4.0, 5.0])
    """
    kept, positions, every = parts("causal_conv1d", checkpoints)
    if state is None:
        _needs_state(
            "causal_conv1d", slots, write_slots, has_state, checkpoints, freeze, window_start
        )
    tensors = [
        x, weight, bias, state, slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu, kept,
        positions, window_start, out,
    ]  # fmt: skip
    options = (activation, pad_slot, freeze, every)
    if initial_state is not None:
        tensors[_STATE] = _initial("causal_conv1d", x, initial_state, state, out, cu_seqlens)
    if initial_state is not None or (state is None and out is None):
        if calls.wants_gradient(x, weight, bias, initial_state):
            return _differentiable(tensors, options, layout, backend)
        if initial_state is not None:
            tensors[_STATE] = initial_state.clone(memory_format=torch.contiguous_format)
    made = calls.call(CAUSAL_CONV1D, tensors, options, layout, backend)
    y, window = made[-1], made[_STATE]
    if calls.wants_gradient(x, weight, bias, state):
        y = calls.without_gradient("causal_conv1d", y, x, weight, bias, state)
        window = calls.without_gradient("causal_conv1d", window, x, weight, bias, state)
    return y, window


def conv_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int | None = None,
    head_v_dim: int | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    normalize_qk: bool = True,
    activation: ConvActivation | None = "silu",
    state: Tensor | None = None,
    initial_state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    freeze: bool = False,
    window_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
    backend: BackendName | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Convolution, activation, split into q, k, v, l2 norm and gates, in one kernel.

    ::

        [q | k | v] = split(conv(x));  q, k <- x / sqrt(sum x^2 + 1e-6)
        g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)

    Args:
        x: [B, T, D] with D = 2 HK K + HV V channels in the order [Q all | K all | V all], or packed
            [T, D]. Any strides.
        weight: [D, W] or [D, 1, W]. bias: [D] or None.
        num_k_heads: HK. num_v_heads: HV, a multiple of HK.
        head_k_dim: K. head_v_dim: V. By default K = V = D / (2 HK + HV).
        a: [B, T, HV] raw decay (any strides); g is None without it. Needs ``A_log``.
        b: [B, T, HV] raw write strength; beta is None without it.
        A_log: [HV]. dt_bias: [HV] or None. neg_eigval: double beta.
        normalize_qk: on by default; pass ``normalize_qk=False`` to ``prefill`` afterwards.
        state: conv state, and all its options, as in :func:`causal_conv1d`. None: zeros before the
            first token, and no state is kept.
        freeze: read the window but leave it as it is, for draft tokens: ``x`` is then
            ``conv_inputs`` of :func:`verify`, and ``commit`` rolls the window.
        window_start: [N] where windows start in the state, as in :func:`causal_conv1d`.
        initial_state: the functional form, as in :func:`causal_conv1d`; final windows are not
            returned: they are the last columns of [initial_state | x] (C11).
        out: buffers (q, k, v, g, beta), None for gates that are not made.

    Returns:
        q, k [B, T, HK, K], v [B, T, HV, V] in the dtype of x; g, beta [B, T, HV] float32 or None.

    >>> import torch, sluice
    >>> x, gates = torch.randn(1, 5, 2 * 8 + 2 * 8), torch.zeros(1, 5, 2)
    >>> q, k, v, g, beta = sluice.conv_qkv(
    ...     x, torch.randn(32, 4), num_k_heads=1, num_v_heads=2, a=gates, b=gates,
    ...     A_log=torch.zeros(2))
    >>> q.shape, v.shape, beta[0, 0].tolist()
    (torch.Size([1, 5, 1, 8]), torch.Size([1, 5, 2, 8]), [0.5, 0.5])
    """
    kept, positions, every = parts("conv_qkv", checkpoints)
    if state is None:
        _needs_state("conv_qkv", slots, write_slots, has_state, checkpoints, freeze, window_start)
    buffers: Any = (None,) * 5 if out is None else out
    if not isinstance(buffers, (tuple, list)) or len(buffers) != 5:
        got = (
            f"{len(buffers)} buffers" if isinstance(buffers, (tuple, list)) else type(out).__name__
        )
        raise ContractError("conv_qkv", "out", "(q, k, v, g, beta)", got)
    tensors = [
        x, weight, bias, state, slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu, kept,
        positions, window_start, a, b, A_log, dt_bias, *buffers,
    ]  # fmt: skip
    options = (activation, pad_slot, freeze, every, normalize_qk, neg_eigval)
    form = (num_k_heads, num_v_heads, head_k_dim, head_v_dim, out is not None)
    if initial_state is not None:
        tensors[_STATE] = _initial("conv_qkv", x, initial_state, state, out, cu_seqlens)
    if initial_state is not None or (state is None and out is None):
        if calls.wants_gradient(x, weight, bias, a, b, A_log, dt_bias, initial_state):
            return _differentiable_qkv(tensors, options, form[:4], backend)
        if initial_state is not None:
            tensors[_STATE] = initial_state.clone(memory_format=torch.contiguous_format)
    made = calls.call(CONV_QKV, tensors, options, form, backend)
    q, k, v, g, beta = made[-5:]
    if calls.wants_gradient(x, weight, bias, a, b, A_log, dt_bias, state):
        inputs = (x, weight, bias, a, b, A_log, dt_bias, state)
        q, k, v, g, beta = (
            None if y is None else calls.without_gradient("conv_qkv", y, *inputs)
            for y in (q, k, v, g, beta)
        )
    return q, k, v, g, beta


def _initial(
    op: str, x: Tensor, initial: Any, state: object, out: object, cu_seqlens: Tensor | None
) -> Tensor:
    """The initial windows of the functional form, checked where the operator does not."""
    for given, name in ((state, "state"), (out, "out")):
        if given is not None:
            raise ContractError(op, name, "None beside initial_state", "a tensor")
    for given, name in ((x, "x"), (initial, "initial_state"), (cu_seqlens, "cu_seqlens")):
        if given is None and name == "cu_seqlens":
            continue
        if not isinstance(given, Tensor) or given.layout != torch.strided:
            raise ContractError(op, name, "a dense tensor", type(given).__name__)
    if cu_seqlens is not None and cu_seqlens.dim() != 1:
        got = f"shape {list(cu_seqlens.shape)}"
        raise ContractError(op, "cu_seqlens", "shape [N + 1]", got)
    packed = x.dim() == 2
    N = x.shape[0] if cu_seqlens is None and not packed else None
    N = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else N
    if initial.dim() != 3 or (N is not None and initial.shape[0] != N):
        expected = f"{N} windows [N, D, L], one per sequence"
        raise ContractError(op, "initial_state", expected, f"shape {list(initial.shape)}")
    return initial


def _differentiable(
    tensors: list[Any], options: tuple[Any, ...], layout: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``causal_conv1d`` as autograd follows it."""
    t = ConvSpec.Tensors(*tensors)
    packed = t.x.dim() == 2
    tokens = Tokens("causal_conv1d", t.cu_seqlens, layout, ("btd", "bdt"), packed=packed)
    t = t._replace(x=tokens(t.x, "x", 3), weight=conv_taps("causal_conv1d", t.weight))
    y, window = FUNCTIONAL(t, options, None, backend)
    return tokens.restore(y), window


def _differentiable_qkv(
    tensors: list[Any], options: tuple[Any, ...], heads: tuple[Any, ...], backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``conv_qkv`` as autograd follows it."""
    t = ConvQkvSpec.Tensors(*tensors)
    tokens = Tokens("conv_qkv", t.cu_seqlens, "btd", ("btd",), packed=t.x.dim() == 2)
    x = tokens(t.x, "x", 3)
    sizes = [*heads[:2], *_head_dims(x.shape[2], *heads)]
    a, b = tokens(t.a, "a", 3), tokens(t.b, "b", 3)
    t = t._replace(x=x, weight=conv_taps("conv_qkv", t.weight), a=a, b=b)
    made = FUNCTIONAL_QKV(t, options, sizes, backend)
    q, k, v, g, beta = (None if y is None else tokens.restore(y) for y in made)
    return q, k, v, g, beta  # type: ignore[return-value]


def _needs_state(op: str, slots: Any, write_slots: Any, has_state: Any, *given: Any) -> None:
    """Say which argument is of no use without a state."""
    checkpoints, freeze, window_start = given
    for x, name in (
        (slots, "slots"),
        (write_slots, "write_slots"),
        (has_state, "has_state"),
        (checkpoints, "checkpoints"),
        (None if isinstance(freeze, int) and not freeze else freeze, "freeze"),
        (window_start, "window_start"),
    ):
        if x is not None:
            raise ContractError(op, name, "state beside it", "state=None")


_STATE = ConvSpec.TENSORS.index("state")


def _conv_canonical(t: Any, options: tuple[Any, ...], layout: str) -> Canonical:
    """Canonical tensors of ``causal_conv1d``, with the outputs it needs."""
    packed = t.x.dim() == 2
    tokens = Tokens("causal_conv1d", t.cu_seqlens, layout, ("btd", "bdt"), packed=packed)
    x, taps = tokens(t.x, "x", 3), conv_taps("causal_conv1d", t.weight)
    state = t.state
    if state is None:
        state = x.new_zeros(tokens.sequences(x), x.shape[2], max(taps.shape[1] - 1, 0))
    out = x.new_empty(*x.shape) if t.out is None else tokens(t.out, "out", 3)
    canonical = t._replace(x=x, weight=taps, state=state, out=out)
    return Canonical(canonical, tokens.restore, ("out",), ("state",))


def _qkv_canonical(t: Any, options: tuple[Any, ...], form: Any) -> Canonical:
    """Canonical tensors of ``conv_qkv``. ``form``: HK, HV, K, V, and whether buffers are given."""
    op, (*heads, given) = "conv_qkv", form
    tokens = Tokens(op, t.cu_seqlens, "btd", ("btd",), packed=t.x.dim() == 2)
    x = tokens(t.x, "x", 3)
    a, b = tokens(t.a, "a", 3), tokens(t.b, "b", 3)
    HK, HV = heads[:2]
    K, V = _head_dims(x.shape[2], *heads)
    if given:
        q, k, v = _qkv_buffers(tokens, t, (HK, HV, K, V))
        g, beta = tokens(t.g, "out.g", 3), tokens(t.beta, "out.beta", 3)
    else:
        B, T, _ = x.shape
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k = x.new_empty(B, T, HK, K), x.new_empty(B, T, HK, K)
        v = x.new_empty(B, T, HV, V)
        g, beta = (None if y is None else x.new_empty(B, T, HV, dtype=wide) for y in (a, b))
    taps = conv_taps(op, t.weight)
    canonical = t._replace(x=x, weight=taps, a=a, b=b, q=q, k=k, v=v, g=g, beta=beta)
    return Canonical(canonical, tokens.restore, ("q", "k", "v", "g", "beta"))


def _head_dims(D: int, HK: int, HV: int, K: int | None, V: int | None) -> tuple[int, int]:
    """K and V; where one is not given it follows from D, and both are equal if neither is."""
    sizes = ((HK, "num_k_heads"), (HV, "num_v_heads"), (K, "head_k_dim"), (V, "head_v_dim"))
    for value, name in sizes:
        if value is None and name.startswith("head"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 1:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ContractError("conv_qkv", name, "an int of at least 1", got)
    channels = f"2·{HK}·{K or 'K'} + {HV}·{V or 'V'} channels [Q | K | V]"
    if K is None and V is None:
        K = V = D // (2 * HK + HV)
    elif K is None and V is not None:
        K = (D - HV * V) // (2 * HK)
    elif V is None and K is not None:
        V = (D - 2 * HK * K) // HV
    assert K is not None
    assert V is not None
    if K < 1 or V < 1 or D != 2 * HK * K + HV * V:
        raise ContractError("conv_qkv", "x", channels, f"{D} channels")
    return K, V


def _qkv_buffers(tokens: Tokens, t: Any, heads: tuple[int, int, int, int]) -> list[Any]:
    """Canonical q, k and v where the caller brings buffers, which must fit heads and gates."""
    for made, raw, names in ((t.g, t.a, ("out.g", "a")), (t.beta, t.b, ("out.beta", "b"))):
        if made is None and raw is not None:
            raise ContractError("conv_qkv", names[0], f"a buffer, since {names[1]} is given", None)
        if made is not None and raw is None:
            expected = f"None, since {names[1]} is not given"
            raise ContractError("conv_qkv", names[0], expected, f"shape {list(made.shape)}")
    HK, HV, K, V = heads
    views = []
    for name, size in (("q", (HK, K)), ("k", (HK, K)), ("v", (HV, V))):
        if getattr(t, name) is None:
            raise ContractError("conv_qkv", f"out.{name}", "a tensor", "NoneType")
        view = tokens(getattr(t, name), f"out.{name}", 4)
        if tuple(view.shape[2:]) != size:
            expected = f"{size[0]} heads of {size[1]}"
            raise ContractError("conv_qkv", f"out.{name}", expected, f"shape {list(view.shape)}")
        views.append(view)
    return views


_BUFFERS = tuple((name, f"out.{name}") for name in ("q", "k", "v", "g", "beta"))
CAUSAL_CONV1D = Operator(
    "causal_conv1d", ConvSpec, _conv_canonical, checks.conv, values.conv, ("state", "out")
)
CONV_QKV = Operator(
    "conv_qkv",
    ConvQkvSpec,
    _qkv_canonical,
    checks.conv_qkv,
    values.conv,
    ("state", "q", "k", "v", "g", "beta"),
    _BUFFERS,
)
for _op in (CAUSAL_CONV1D, CONV_QKV):
    register(_op)
_INPUTS = ("x", "weight", "bias", "state")
_BORDERS = ("cu_seqlens", "cu_seqlens_cpu")
_GATES = ("a", "b", "A_log", "dt_bias")
FUNCTIONAL = Functional(
    CAUSAL_CONV1D,
    backward_of("causal_conv1d", ConvBackwardSpec, _INPUTS),
    (*_INPUTS, *_BORDERS),
    ("out", "state"),
    ("dy", "dwindow"),
    "btd",
)
FUNCTIONAL_QKV = Functional(
    CONV_QKV,
    backward_of("conv_qkv", ConvQkvBackwardSpec, (*_INPUTS, *_GATES)),
    (*_INPUTS, *_BORDERS, *_GATES),
    ("q", "k", "v", "g", "beta"),
    ("dq", "dk", "dv", "dg", "dbeta"),
    "given",
)
register_functional(FUNCTIONAL)
register_functional(FUNCTIONAL_QKV)
