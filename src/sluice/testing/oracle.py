"""Every operator of the library, one token at a time, in float64.

This file is the specification in code. It shares nothing with the library it judges: it imports
only torch, loops over sequences and tokens, and vectorises only over heads. Each function takes
tensors of any float dtype, widens them to float64, rounds nothing, modifies nothing, and returns
new float64 tensors: the outputs, and the whole state pool after the call.

Per value head, with S of shape [K, V]:

    q, k ← x · rsqrt(Σx² + 1e-6)     when normalize_qk
    S    ← exp(g) · S                 decay first
    d    = beta · (v − Sᵀk)           with the decayed state (d = v without beta)
    S    ← S + k dᵀ
    o    = Sᵀ(scale · q)              with the updated state

``rows.py`` says which rows of a pool are read and written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.testing.rows import live_rows, saves, sequences

EXACT = torch.float64
NORM_EPS = 1e-6


# ------------------------------------------------------------------------------- the recurrence


def delta(
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
    checkpoints: Any = None,
    layout: str = "bthd",
    batch_invariant: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``prefill`` and ``decode`` must return: ``(o, state pool after the call)``.

    ``checkpoints`` has ``slots`` and ``every`` or ``positions``, as attributes or as keys.
    ``lengths [N]`` cuts each sequence short, which is how ``verify_commit`` counts accepted tokens.
    ``cu_seqlens_cpu`` and ``batch_invariant`` have no effect on the result.
    """
    flat = v.ndim == 3
    q, k, v, g, beta = (_bthd(x, flat, layout) for x in (q, k, v, g, beta))
    B, T, Hq, K = q.shape
    Hk, (Hv, V) = k.shape[2], v.shape[2:]

    if A_log is not None:
        per_key = g is not None and g.ndim == 4
        g, beta = raw_gates(g, beta, A_log, dt_bias, neg_eigval, per_key=per_key)
    if normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * (K**-0.5 if scale is None else scale)

    # Value head h uses key head h // (Hv / Hk). Query heads that are fewer than value heads are
    # shared in the same way; if they are more, several share a value head's state.
    k = k.repeat_interleave(Hv // Hk, dim=2)
    q = q.repeat_interleave(max(1, Hv // Hq), dim=2)
    readers = q.shape[2] // Hv
    q = q.reshape(B, T, Hv, readers, K)
    if g is not None:
        g = (g if g.ndim == 4 else g[..., None])[..., None]  # [B, T, Hv, 1 or K, 1]
    decay = None if g is None else g.exp()

    spans = sequences(B, T, cu_seqlens, lengths)
    before = None if state is None else _kv(_exact(state), state_layout)
    after = _pool(before, (len(spans), Hv, K, V), v.device)
    o = torch.zeros(B, T, Hv, readers, V, dtype=EXACT, device=v.device)

    for row in live_rows(spans, state, slots, write_slots, has_state, pad_slot):
        S = torch.zeros_like(after[0]) if row.read is None else before[row.read].clone()
        due = saves(checkpoints, row, pad_slot)
        for slot in due.get(0, ()):
            after[slot] = S
        for t in range(row.start, row.end):
            at = (row.batch, t)
            if decay is not None:
                S = decay[at] * S
            d = v[at]  # [Hv, V]
            if beta is not None:
                d = beta[at][:, None] * (d - (k[at][:, None, :] @ S)[:, 0])
            S = S + k[at][:, :, None] * d[:, None, :]
            o[at] = q[at] @ S
            for slot in due.get(t - row.start + 1, ()):
                after[slot] = S
            if row.each and (own := row.each[t - row.start]) is not None:
                after[own] = S
        if row.write is not None:
            after[row.write] = S

    o = o.reshape(B, T, Hv * readers, V)
    return _from_bthd(o, flat, layout), _kv(after, state_layout).contiguous()


def verify_commit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    num_accepted: Tensor,
    conv_inputs: Tensor | None = None,
    conv_state: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What ``verify`` then ``commit(num_accepted)`` must leave: ``(o, state, conv_state)``.

    ``o`` covers every draft token. The states are those of decoding only the accepted ones.
    """
    o, _ = delta(q, k, v, g, beta, **options)
    _, state = delta(q, k, v, g, beta, lengths=num_accepted, **options)
    if conv_state is None or conv_inputs is None:
        return o, state, None
    width_one = conv_inputs.new_zeros(conv_inputs.shape[-1], 1)  # only the window is used
    shared = ("slots", "write_slots", "has_state", "pad_slot", "cu_seqlens")
    rows = {name: options[name] for name in shared if name in options}
    _, conv_state = conv(conv_inputs, width_one, state=conv_state, lengths=num_accepted, **rows)
    return o, state, conv_state


def raw_gates(
    a: Tensor | None,
    b: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    neg_eigval: bool = False,
    *,
    per_key: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """``g = −exp(A_log) · softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, doubled by neg_eigval.

    ``a`` is [.., Hv] with ``dt_bias [Hv]``, or ``per_key`` [.., Hv, K] with ``dt_bias [Hv, K]``.
    """
    g = beta = None
    if a is not None:
        x = _exact(a) if dt_bias is None else _exact(a) + _exact(dt_bias)
        rate = _exact(A_log).exp()
        softplus = torch.logaddexp(x, torch.zeros_like(x))  # exact; F.softplus becomes linear
        g = -(rate[:, None] if per_key else rate) * softplus
    if b is not None:
        beta = _exact(b).sigmoid() * (2.0 if neg_eigval else 1.0)
    return g, beta


def l2_normalize(x: Tensor) -> Tensor:
    """``x · rsqrt(Σx² + 1e-6)`` over the last dimension: a sum, with eps inside the root."""
    x = _exact(x)
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


# ------------------------------------------------------------------------- convolution and norm


def conv(
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
    window_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoints: Any = None,
    layout: str = "btd",
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``causal_conv1d`` must return: ``(y, conv state pool after the call)``.

    y_t = activation(bias + Σ_w weight[:, w] · x_{t − W + 1 + w}), each channel by itself. The
    state [P, D, L] holds the last L raw inputs, oldest first; the newest W − 1 of them precede x_0.
    A call without a state starts from zeros and returns [N, D, W − 1]. ``freeze`` leaves the pool
    as it was. With ``window_start`` the W − 1 columns from there on precede x_0, and the pool gets
    these columns but the oldest, then all of x, from its first column on.
    """
    flat = x.ndim == 2
    x, weight = _exact(x), _exact(weight).flatten(1)  # [D, W], from [D, 1, W] as well
    x = x[None] if flat else x
    x = x.transpose(1, 2) if layout == "bdt" else x
    B, T, D = x.shape
    W = weight.shape[1]
    offset = torch.zeros(D, dtype=EXACT, device=x.device) if bias is None else _exact(bias)

    spans = sequences(B, T, cu_seqlens, lengths)
    before = None if state is None else _exact(state)
    after = _pool(before, (len(spans), D, W - 1), x.device)
    y = torch.zeros_like(x)

    for row in live_rows(spans, state, slots, write_slots, has_state, pad_slot):
        window = torch.zeros_like(after[0]) if row.read is None else before[row.read]
        if window_start is not None:
            begin = 0 if row.read is None else int(window_start[row.index])
            window = window[:, begin : begin + W - 1]
        L = window.shape[1]
        stream = torch.cat([window, x[row.batch, row.start : row.end].T], dim=1)  # [D, L + tokens]
        for t in range(row.end - row.start):
            newest = L + t + 1
            y[row.batch, row.start + t] = offset + (weight * stream[:, newest - W : newest]).sum(1)
        if freeze:
            continue
        for position, saved in saves(checkpoints, row, pad_slot).items():
            for slot in saved:
                after[slot] = stream[:, position : position + L]
        if row.write is not None and window_start is not None:
            kept = stream[:, min(1, row.end - row.start) :]
            after[row.write, :, : kept.shape[1]] = kept
        elif row.write is not None:
            after[row.write] = stream[:, row.end - row.start :]

    y = _activate(y, activation)  # silu(0) = 0: tokens of no sequence stay zero
    y = y.transpose(1, 2) if layout == "bdt" else y
    return (y[0] if flat else y), after


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
    **options: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    """What ``conv_qkv`` must return: ``((q, k, v, g, beta), conv state pool after the call)``.

    The convolution of ``conv``, its channels [Q all | K all | V all] cut into heads, q and k
    normalised, and the gates of ``raw_gates``. Rows of padding are zeros in all five outputs.
    """
    y, state = conv(x, weight, bias, **options)
    K, V = _head_dims(y.shape[-1], num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    q, k, v = y.split([num_k_heads * K, num_k_heads * K, num_v_heads * V], dim=-1)
    q, k = q.unflatten(-1, (num_k_heads, K)), k.unflatten(-1, (num_k_heads, K))
    v = v.unflatten(-1, (num_v_heads, V))
    if normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)

    shape = (1, *v.shape[:1]) if x.ndim == 2 else v.shape[:2]
    live = torch.zeros(shape, dtype=torch.bool, device=x.device)
    chosen = {name: options.get(name) for name in ("state", "slots", "write_slots", "has_state")}
    spans = sequences(*shape, options.get("cu_seqlens"), options.get("lengths"))
    for row in live_rows(spans, *chosen.values(), options.get("pad_slot", -1)):
        live[row.batch, row.start : row.end] = True
    live = live.reshape(v.shape[:-2])
    gates = raw_gates(a, b, A_log, dt_bias, neg_eigval)
    g, beta = (None if gate is None else _where(live, gate) for gate in gates)
    return (q, k, v, g, beta), state


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-6, activation: str = "silu"
) -> Tensor:
    """``weight · x · rsqrt(mean(x²) + eps) · activation(z)`` over the last dimension."""
    x = _exact(x)
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _exact(weight) * normed * _activate(_exact(z), activation)


def step(
    qkvz: Tensor | tuple[Tensor, Tensor],
    ba: Tensor | tuple[Tensor, Tensor],
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    state_layout: str = "vk",
    order: str = "split",
    conv_activation: str | None = "silu",
    gate_activation: str = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    normalize_qk: bool = True,
    neg_eigval: bool = False,
    **rows: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``step`` must leave: ``(y, conv_state, state)``, from the projections to the norm.

    ``rows`` are ``slots``, ``write_slots``, ``has_state`` and ``pad_slot``, and serve both pools.
    """
    Hv = state.shape[1]
    V, K = state.shape[2:] if state_layout == "vk" else (state.shape[3], state.shape[2])
    Hk = (conv_weight.shape[0] - Hv * V) // (2 * K)
    qkv, z, b, a = split_projections(qkvz, ba, order=order, Hk=Hk, Hv=Hv, K=K, V=V)
    one_token = qkv.ndim == 2
    if one_token:
        qkv, z, b, a = (x[:, None] for x in (qkv, z, b, a))
    (q, k, v, g, beta), conv_state = conv_qkv(
        qkv, conv_weight, conv_bias, num_k_heads=Hk, num_v_heads=Hv, head_k_dim=K, head_v_dim=V,
        a=a, b=b, A_log=A_log, dt_bias=dt_bias, neg_eigval=neg_eigval, normalize_qk=normalize_qk,
        activation=conv_activation, state=conv_state, **rows,
    )  # fmt: skip
    o, after = delta(q, k, v, g, beta, scale=scale, state=state, state_layout=state_layout, **rows)
    y = rms_norm_gated(o, z, norm_weight, eps=eps, activation=gate_activation).flatten(-2)
    slots = rows.get("slots")
    if slots is not None:
        y = _where(slots > rows.get("pad_slot", -1), y)
    return (y[:, 0] if one_token else y), conv_state, after


def split_projections(
    qkvz: Tensor | tuple[Tensor, Tensor],
    ba: Tensor | tuple[Tensor, Tensor],
    *,
    order: str,
    Hk: int,
    Hv: int,
    K: int,
    V: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``qkv [.., D]`` in conv order, ``z [.., Hv, V]``, ``b`` and ``a [.., Hv]`` from either order.

    split:        [Q all | K all | V all | z all] and [b all | a all], or the pairs themselves
    interleaved:  for each key head [q | k | r·v | r·z] and [r·b | r·a], where r = Hv / Hk
    """
    r = Hv // Hk
    if not isinstance(qkvz, Tensor):
        qkv, z = qkvz
    elif order == "split":
        qkv, z = qkvz.split([2 * Hk * K + Hv * V, Hv * V], dim=-1)
    else:
        heads = qkvz.unflatten(-1, (Hk, 2 * K + 2 * r * V))
        parts = heads.split([K, K, r * V, r * V], dim=-1)
        q, k, v, z = (x.flatten(-2) for x in parts)
        qkv = torch.cat([q, k, v], dim=-1)
    if not isinstance(ba, Tensor):
        b, a = ba
    elif order == "split":
        b, a = ba.split([Hv, Hv], dim=-1)
    else:
        b, a = (x.flatten(-2) for x in ba.unflatten(-1, (Hk, 2 * r)).split([r, r], dim=-1))
    return qkv, z.unflatten(-1, (Hv, V)), b, a


# ----------------------------------------------------------------------------------- small pieces


def _exact(x: Tensor) -> Tensor:
    return x.detach().to(EXACT)


def _bthd(x: Tensor | None, flat: bool, layout: str) -> Any:
    """Widen, add the batch dimension of a packed input, and bring tokens before heads."""
    if x is None:
        return None
    x = _exact(x)[None] if flat else _exact(x)
    return x.transpose(1, 2) if layout == "bhtd" else x


def _from_bthd(x: Tensor, flat: bool, layout: str) -> Tensor:
    x = x.transpose(1, 2) if layout == "bhtd" else x
    return x[0] if flat else x


def _kv(state: Tensor, state_layout: str) -> Tensor:
    """Swap [.., V, K] and [.., K, V] for "vk"; unchanged for "kv"."""
    return state.transpose(2, 3) if state_layout == "vk" else state


def _pool(before: Tensor | None, fresh: tuple[int, ...], device: torch.device) -> Tensor:
    if before is None:
        return torch.zeros(fresh, dtype=EXACT, device=device)
    return before.clone()


def _activate(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    return x.sigmoid() * (x if activation == "silu" else 1.0)


def _where(live: Tensor, x: Tensor) -> Tensor:
    """``x`` with zeros, even in place of NaN, where ``live`` (its leading dimensions) is false."""
    mask = live.reshape(live.shape + (1,) * (x.ndim - live.ndim))
    return torch.where(mask, x, torch.zeros_like(x))


def _head_dims(D: int, Hk: int, Hv: int, K: int | None, V: int | None) -> tuple[int, int]:
    """K and V from the number of channels; equal unless one of them is given."""
    if K is None and V is None:
        K = D // (2 * Hk + Hv)
    if K is None:
        K = (D - Hv * V) // (2 * Hk)  # type: ignore[operator]
    return K, (D - 2 * Hk * K) // Hv
