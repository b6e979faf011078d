"""FlashInfer's decode step around the recurrence (0.7.2): gates, convolution, delta rule."""

from __future__ import annotations

from torch import Tensor

from sluice import ops
from sluice.compat import common
from sluice.compat.common import need


def gdn_fused_decode_step(
    hidden_states: Tensor,
    w_ba: Tensor,
    mixed_qkv: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    conv_state: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    ssm_state: Tensor,
    state_indices: Tensor,
    use_qk_l2norm: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flashinfer.gdn_fused_decode_step``: o [B, 1, HV, V], and both pools, updated in place.

    ``hidden_states`` [B, hidden] times ``w_ba`` [hidden, 2 HV] gives the raw gates (b, a);
    ``mixed_qkv`` [B, D] holds the channels [Q | K | V] before the convolution. ``conv_state``
    [P, D, W - 1] and ``ssm_state`` [P, HV, V, K] are addressed by ``state_indices`` [B]; negative
    ones are padding. A scale of None or 0.0 means the default, as upstream. Three kernels: a
    product, ``conv_qkv`` and ``decode``.
    """
    op = "gdn_fused_decode_step"
    common.tensors(op, hidden_states=hidden_states, w_ba=w_ba, mixed_qkv=mixed_qkv)
    common.tensors(op, ssm_state=ssm_state, out=out)
    need(ssm_state.dim() == 4, op, "ssm_state", "[P, HV, V, K]", f"shape {list(ssm_state.shape)}")
    need(mixed_qkv.dim() == 2, op, "mixed_qkv", "[B, D]", f"shape {list(mixed_qkv.shape)}")
    _, HV, V, K = ssm_state.shape
    D = mixed_qkv.shape[1]
    HK = (D - HV * V) // (2 * K)
    ok = HK > 0 and 2 * HK * K + HV * V == D
    need(ok, op, "mixed_qkv", f"2·HK·{K} + {HV}·{V} channels", f"{D} channels")
    size = [hidden_states.shape[-1], 2 * HV]
    need(list(w_ba.shape) == size, op, "w_ba", f"shape {size}", f"shape {list(w_ba.shape)}")
    if out is not None:  # before anything is written
        shape, got = [len(mixed_qkv), 1, HV, V], f"{out.dtype} of shape {list(out.shape)}"
        ok = list(out.shape) == shape and out.dtype == mixed_qkv.dtype
        need(ok, op, "out", f"{mixed_qkv.dtype} of shape {shape}", got)
    b, a = (hidden_states @ w_ba).unsqueeze(1).split(HV, dim=2)
    q, k, v, g, beta = ops.conv_qkv(
        mixed_qkv.unsqueeze(1),
        conv_weight,
        conv_bias,
        num_k_heads=HK,
        num_v_heads=HV,
        head_k_dim=K,
        head_v_dim=V,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        normalize_qk=use_qk_l2norm,
        state=conv_state,
        slots=state_indices,
    )
    o, _ = ops.decode(
        q, k, v, g, beta, scale=scale or None, state=ssm_state, slots=state_indices, out=out
    )
    return o, conv_state, ssm_state
