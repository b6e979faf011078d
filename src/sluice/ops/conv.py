"""The convolution before the recurrence: ``causal_conv1d`` and ``conv_qkv``."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice import library
from sluice.contract.errors import ContractError
from sluice.contract.options import ConvOptions
from sluice.contract.tensors import ConvQkvTensors, ConvTensors, Rows
from sluice.ops.canonical import Tokens, conv_taps, tensor
from sluice.ops.checkpoints import Checkpoints, parts


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    freeze: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    layout: str = "btd",
    out: Tensor | None = None,
    backend: str | None = None,
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
        slots: as in :func:`prefill`; so are ``write_slots``, ``has_state``, ``pad_slot``,
            ``cu_seqlens``, ``cu_seqlens_cpu``, ``checkpoints`` and ``backend``.
        freeze: read the window but leave it as it is, for draft tokens (:func:`verify`).
        layout: "btd", or "bdt" for [B, D, T] tensors (packed [D, T]).
        out: buffer for y, in the layout of x.

    Returns:
        y, with the shape and dtype of x, and ``state``. Padded rows are zeros.

    >>> import torch, sluice
    >>> x = torch.arange(6.0).view(1, 6, 1)
    >>> y, window = sluice.causal_conv1d(x, torch.ones(1, 3), activation=None)
    >>> y.flatten().tolist(), window.flatten().tolist()
    ([0.0, 1.0, 3.0, 6.0, 9.0, 12.0], [4.0, 5.0])
    """
    rows = Rows(slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu)
    op = "causal_conv1d"
    packed = tensor(op, x, "x").dim() == 2
    tokens = Tokens(op, rows, layout, ("btd", "bdt"), packed=packed)
    x_, taps = tokens(x, "x", 3), conv_taps(op, weight)
    made = state
    if made is None:
        _needs_state(op, rows, checkpoints, freeze)
        made = x_.new_zeros(tokens.sequences(x_), x_.shape[2], max(taps.shape[1] - 1, 0))
    y = x_.new_empty(x_.shape) if out is None else tokens(out, "out", 3)
    slots_kept, positions, every = parts(op, checkpoints)
    tensors = ConvTensors(x_, taps, bias, made, rows, slots_kept, positions, y)
    options = ConvOptions(activation, pad_slot, freeze, every)
    library.call(library.CAUSAL_CONV1D, tensors, options, backend)
    y = tokens.restore(y) if out is None else out
    inputs = (x, weight, bias, state)
    return library.without_gradient(op, y, *inputs), library.without_gradient(op, made, *inputs)


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
    activation: str | None = "silu",
    state: Tensor | None = None,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    freeze: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
    backend: str | None = None,
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
    op = "conv_qkv"
    rows = Rows(slots, write_slots, has_state, cu_seqlens, cu_seqlens_cpu)
    tokens = Tokens(op, rows, "btd", ("btd",), packed=tensor(op, x, "x").dim() == 2)
    x_ = tokens(x, "x", 3)
    if state is None:
        _needs_state(op, rows, checkpoints, freeze)
    a_, b_ = (None if y is None else tokens(y, name, 3) for y, name in ((a, "a"), (b, "b")))
    dims = _head_dims(x_.shape[2], num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    heads = (num_k_heads, num_v_heads, *dims)
    if out is None:
        buffers = _allocate(x_, heads, a_, b_)
        out = tuple(None if y is None else tokens.restore(y) for y in buffers)  # type: ignore[assignment]
    assert out is not None
    q, k, v, g, beta = _buffers(tokens, out, heads, a_, b_)
    slots_kept, positions, every = parts(op, checkpoints)
    tensors = ConvQkvTensors(
        x_,
        conv_taps(op, weight),
        bias,
        state,
        rows,
        slots_kept,
        positions,
        a_,
        b_,
        A_log,
        dt_bias,
        q,
        k,
        v,
        g,
        beta,
    )
    options = ConvOptions(activation, pad_slot, freeze, every, normalize_qk, neg_eigval)
    library.call(library.CONV_QKV, tensors, options, backend)
    inputs = (x, weight, bias, a, b, A_log, dt_bias, state)
    return tuple(  # type: ignore[return-value]
        None if y is None else library.without_gradient(op, y, *inputs) for y in out
    )


def _allocate(
    x: Tensor, heads: tuple[int, int, int, int], a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Canonical buffers for q, k, v, g and beta."""
    B, T, _ = x.shape
    HK, HV, K, V = heads
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    g, beta = (None if y is None else x.new_empty(B, T, HV, dtype=dtype) for y in (a, b))
    q, k = x.new_empty(B, T, HK, K), x.new_empty(B, T, HK, K)
    return q, k, x.new_empty(B, T, HV, V), g, beta


def _head_dims(D: int, HK: int, HV: int, K: int | None, V: int | None) -> tuple[int, int]:
    """K and V; where one is not given it follows from D, and both are equal if neither is."""
    for value, name in ((HK, "num_k_heads"), (HV, "num_v_heads")):
        if value < 1:
            raise ContractError("conv_qkv", name, "at least 1", value)
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


def _buffers(
    tokens: Tokens,
    out: tuple[Tensor | None, ...],
    heads: tuple[int, int, int, int],
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Canonical views of the output buffers, which must be as the heads and the gates say."""
    if len(out) != 5:
        raise ContractError("conv_qkv", "out", "(q, k, v, g, beta)", f"{len(out)} buffers")
    for made, raw, names in ((out[3], a, ("out.g", "a")), (out[4], b, ("out.beta", "b"))):
        if made is None and raw is not None:
            raise ContractError("conv_qkv", names[0], f"a buffer, since {names[1]} is given", None)
        if made is not None and raw is None:
            expected = f"None, since {names[1]} is not given"
            raise ContractError("conv_qkv", names[0], expected, f"shape {list(made.shape)}")
    HK, HV, K, V = heads
    views = []
    for name, y, size in zip("qkv", out[:3], ((HK, K), (HK, K), (HV, V)), strict=True):
        view = tokens(tensor("conv_qkv", y, f"out.{name}"), f"out.{name}", 4)
        if view.shape[2:] != size:
            expected = f"{size[0]} heads of {size[1]}"
            raise ContractError("conv_qkv", f"out.{name}", expected, f"shape {list(view.shape)}")
        views.append(view)
    g = None if out[3] is None else tokens(out[3], "out.g", 3)
    beta = None if out[4] is None else tokens(out[4], "out.beta", 3)
    return views[0], views[1], views[2], g, beta


def _needs_state(op: str, rows: Rows, checkpoints: Checkpoints | None, freeze: bool) -> None:
    given = (*rows[:3], checkpoints, freeze or None)
    for x, name in zip(given, (*Rows._fields[:3], "checkpoints", "freeze"), strict=True):
        if x is not None:
            raise ContractError(op, name, "state beside it", "state=None")
