"""Stand-ins for GPU peers: their names and signatures, computed by sluice's reference.

They show, on any machine, that a provider passes the right tensors in the right layout. Whether the
libraries themselves are right is checked where they run, before every timing.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

import sluice


def install(monkeypatch, **modules):
    """Put modules of these names (dots written as "__") and their functions into place."""
    for written, functions in modules.items():
        parts = written.split("__")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            if n < len(parts) and name in sys.modules:
                continue
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        for function in functions:
            setattr(sys.modules[name], function.__name__.split("_as_")[-1], function)


def _raw(use, A_log, dt_bias):
    return {"A_log": A_log, "dt_bias": dt_bias} if use else {}


# -------------------------------------------------------------------------------------------- fla


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    raw = _raw(kwargs.get("use_gate_in_kernel"), kwargs.get("A_log"), kwargs.get("dt_bias"))
    assert bool(raw) == use_beta_sigmoid_in_kernel
    state = None if initial_state is None else initial_state.clone()  # None: to train
    return sluice.prefill(
        q, k, v, g, beta, normalize_qk=use_qk_l2norm_in_kernel, state=state,
        state_layout="vk" if state_v_first else "kv", cu_seqlens=cu_seqlens, **raw,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None,
):  # fmt: skip
    raw = _raw(use_gate_in_kernel, A_log, dt_bias)
    return sluice.prefill(
        q, k, v, g, beta, normalize_qk=use_qk_l2norm_in_kernel, state=initial_state.clone(),
        state_layout="vk" if state_v_first else "kv", **raw,
    )  # fmt: skip


def causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
    activation=None, backend="triton", cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    assert initial_state.shape[-1] == weight.shape[1]
    return sluice.causal_conv1d(
        x, weight, activation=activation, state=initial_state.clone(), cu_seqlens=cu_seqlens
    )


def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    y, _ = sluice.causal_conv1d(x[:, None], weight, activation=activation, state=cache)
    return y[:, 0], cache


def rms_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6,
):  # fmt: skip
    return sluice.rms_norm_gated(x, g, weight, eps=eps, activation=activation)


def l2norm(x, eps=1e-6, output_dtype=None):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    rate = -A_log.float().exp()
    return (rate * torch.nn.functional.softplus(g.float() + dt_bias)).to(output_dtype)


def fla(monkeypatch):
    install(
        monkeypatch,
        fla__ops__gated_delta_rule__gate=(fused_gdn_gate,),
        fla__ops__gated_delta_rule=(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        fla__modules__causal_conv1d=(causal_conv1d, causal_conv1d_update),
        fla__modules__norm__fused_norm_gate=(rms_norm_gated,),
        fla__modules__norm__l2norm=(l2norm,),
        fla__backends=(),
    )


# --------------------------------------------------------------------------------------- the others


def qla_as_chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False, state_v_first=False,
    auto_cp=True, enable_fwd_cp_cache=True,
):  # fmt: skip
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert cu_seqlens is None or q.shape[0] == v.shape[0] == g.shape[0] == 1
    return chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )  # fmt: skip


def flashinfer_as_chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_indices=None, max_seqlen=None,
):  # fmt: skip
    assert all(x.is_contiguous() and x.ndim == 3 for x in (q, k, v))
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (g, beta))
    assert type(max_seqlen) is int
    assert -(-len(q) // (len(cu_seqlens) - 1)) <= max_seqlen <= len(q)
    assert output_state is initial_state
    o, _ = sluice.prefill(
        q, k, v, g.log(), beta, state=initial_state, slots=state_indices, cu_seqlens=cu_seqlens
    )
    output.copy_(o)
    return output, output_state


def gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,
    initial_state=None, initial_state_indices=None, output_state_indices=None,
    intermediate_states_buffer=None, disable_state_update=False, backend="auto",
):  # fmt: skip
    assert state is None
    assert q.shape[1] > 1 or (intermediate_states_buffer is None and not disable_state_update)
    if intermediate_states_buffer is not None:
        assert intermediate_states_buffer.dtype == initial_state.dtype
    work = initial_state.clone() if disable_state_update else initial_state
    for t in range(q.shape[1]):
        now = [x[:, t : t + 1] for x in (q, k, v, a, b)]
        o, _ = sluice.decode(
            *now, A_log=A_log, dt_bias=dt_bias, normalize_qk=use_qk_l2norm, state=work,
            slots=initial_state_indices,
        )  # fmt: skip
        output[:, t : t + 1] = o
        if intermediate_states_buffer is not None:
            intermediate_states_buffer[:, t] = work[initial_state_indices.long()]
    return output, initial_state


def causal_conv1d_as_causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    y, _ = sluice.causal_conv1d(
        x[:, None], weight, activation=activation, state=conv_state, slots=conv_state_indices
    )
    return y[:, 0]


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
    final_states_out=None, activation=None,
):  # fmt: skip
    assert x.stride(1) == initial_states.stride(1) == 1
    state = initial_states.clone()
    return sluice.causal_conv1d(x, weight, activation=activation, state=state, layout="bdt")


def others(monkeypatch):
    install(
        monkeypatch,
        flash_qla=(qla_as_chunk_gated_delta_rule,),
        flashinfer__gdn_prefill=(flashinfer_as_chunk_gated_delta_rule,),
        flashinfer__gdn_decode=(gated_delta_rule_decode_pretranspose,),
        causal_conv1d=(causal_conv1d_as_causal_conv1d_update, causal_conv1d_fn),
    )


# ---------------------------------------------------------------------------------------- workers


class Spy:
    """A worker that records requests and answers at once."""

    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options
        self.asked, self.closed, self.restarts, self.caches = [], False, 0, "shared"

    def send(self, method, *arguments):
        self.asked.append((method, *arguments[:1]))

    def receive(self, timeout):
        return 0.5, False

    def restart(self, graphs):
        self.restarts += 1

    def close(self):
        self.closed = True
