"""flash-linear-attention's functions (0.6.0), served by sluice: with gradients, on CPU and GPU.

Names, argument orders, defaults and return values are upstream's. States are float32
``[N, HV, K, V]`` (``state_v_first``: ``[N, HV, V, K]``). As upstream, a call returns new states and
never writes the caller's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice import gradients, ops
from sluice.compat import common
from sluice.compat import fla_gates as gating
from sluice.compat.common import need
from sluice.compat.fla_conv import causal_conv1d, causal_conv1d_update
from sluice.compat.fla_modules import FusedRMSNormGated, ShortConvolution, rms_norm_gated
from sluice.contract.spec import MAX_DECODE_TOKENS

__all__ = [
    "FusedRMSNormGated",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "rms_norm_gated",
]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``: o [B, T, HV, V], and states or None.

    Further keywords: ``use_gate_in_kernel``, ``A_log``, ``dt_bias``, ``chunk_size`` and the old
    ``transpose_state_layout``. Refused: ``cp_context``, and any keyword upstream does not have.
    """
    op = "chunk_gated_delta_rule"
    common.tensors(op, q=q, k=k, v=v, g=g, beta=beta)
    common.refuse(op, "cp_context", cp_context)
    v_first = common.rename(op, kwargs, "transpose_state_layout", "state_v_first", state_v_first)
    gate = gating.gate_options(op, kwargs)
    size = kwargs.pop("chunk_size", 64)
    need(size in (16, 32, 64), op, "chunk_size", "16, 32 or 64", size)
    common.no_more(op, kwargs)
    need(g.dim() == 3, op, "g", "[B, T, HV]", f"shape {list(g.shape)}")
    _heads(op, q, k, v)
    _chunk_indices(op, chunk_indices, cu_seqlens, size)
    call = gradients.Call(scale, use_qk_l2norm_in_kernel, _layout(v_first), cu_seqlens)
    decay, beta, raw = gating.gates(op, g, beta, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, final = _run(
        op, q, k, v, decay, beta, initial_state, call._replace(cu_seqlens_cpu=cu_seqlens_cpu), raw
    )
    return o, final if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``, here with gradients.

    ``gk`` [B, T, HV, K] is added to ``g``. Refused: ``gv`` (decay per value channel), a ``beta``
    per value channel. ``beta`` is 1 for every value head if it is not given.
    """
    op = "fused_recurrent_gated_delta_rule"
    common.tensors(op, q=q, k=k, v=v, g=g, gk=gk, beta=beta)
    common.refuse(op, "gv", gv, "None: decay per value channel is not served")
    v_first = common.rename(op, kwargs, "transpose_state_layout", "state_v_first", state_v_first)
    common.no_more(op, kwargs)
    _heads(op, q, k, v)
    gate = gating.gate_options(
        op, {"use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias}
    )
    if beta is None:
        logits = not use_beta_sigmoid_in_kernel
        need(logits, op, "beta", "a tensor beside use_beta_sigmoid_in_kernel", None)
        beta = v.new_ones(v.shape[:3])
    need(gate is None or g is not None, op, "g", "the raw decay beside use_gate_in_kernel", None)
    g, beta, raw = gating.gates(op, g, beta, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if gk is not None:
        wide = [*v.shape[:3], k.shape[-1]]
        need(list(gk.shape) == wide, op, "gk", f"shape {wide}", f"shape {list(gk.shape)}")
        if raw:  # gk is a finished log decay: activate g before adding it
            g, beta = gradients.log_decay(g, *gate), gradients.strength(beta, allow_neg_eigval)  # type: ignore[arg-type, misc]
            raw = {}
        g = gk if g is None else gk + g.unsqueeze(-1)
    call = gradients.Call(scale, use_qk_l2norm_in_kernel, _layout(v_first), cu_seqlens)
    o, final = _run(op, q, k, v, g, beta, initial_state, call, raw, recurrent=True)
    return o, final if output_final_state else None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """``fla.ops.kda.chunk_kda``: decay per key channel, g [B, T, HV, K].

    Further keywords: ``A_log`` [HV], ``dt_bias`` [HV K], ``chunk_size``, the old
    ``transpose_state_layout``. ``return_intermediate_states`` adds h [B, NT, HV, K, V] bfloat16,
    the states before each chunk. ``disable_recompute`` changes no result: backward keeps the inputs
    alone and computes states again. Refused: ``cp_context``; ``use_graph`` with gradients.
    """
    op = "chunk_kda"
    common.tensors(op, q=q, k=k, v=v, g=g, beta=beta)
    common.refuse(op, "cp_context", cp_context)
    v_first = common.rename(op, kwargs, "transpose_state_layout", "state_v_first", state_v_first)
    given = {name: kwargs.pop(name, None) for name in ("A_log", "dt_bias")}
    promised = lower_bound if safe_gate and not use_gate_in_kernel else None
    bound = lower_bound if promised is None else None
    gate = gating.kda_gate(op, use_gate_in_kernel, **given, lower_bound=bound)
    size = kwargs.pop("chunk_size", 64)
    need(size in (32, 64), op, "chunk_size", "32 or 64", size)
    common.no_more(op, kwargs)
    _kda_shapes(op, q, k, v, g, beta)
    if safe_gate and use_gate_in_kernel:
        ok = lower_bound is not None and -5 <= lower_bound < 0
        need(ok, op, "lower_bound", "in [-5, 0) beside safe_gate", lower_bound)
    if promised is not None:
        gating.bounded(op, g, promised)
    if initial_state is not None:
        ok = initial_state.dtype == common.wide(v)
        need(ok, op, "initial_state", f"dtype {common.wide(v)}", initial_state.dtype)
    _static_borders(op, use_graph, max_num_seqs, cu_seqlens)
    call = gradients.Call(
        scale, use_qk_l2norm_in_kernel, _layout(v_first), cu_seqlens, cu_seqlens_cpu
    )
    g, beta, raw = gating.kda_gates(op, g, beta, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if return_intermediate_states:
        inference = torch.is_inference_mode_enabled()
        expected = "torch.inference_mode() around the call"
        need(inference, op, "return_intermediate_states", expected, "no inference mode")
        o, final, h = _with_states(op, q, k, v, g, beta, initial_state, call, raw, size)
        return o, final if output_final_state else None, h
    o, final = _run(op, q, k, v, g, beta, initial_state, call, raw, graph=use_graph)
    return o, final if output_final_state else None


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.kda.fused_recurrent_kda``, here with gradients."""
    op = "fused_recurrent_kda"
    common.tensors(op, q=q, k=k, v=v, g=g, beta=beta)
    v_first = common.rename(op, kwargs, "transpose_state_layout", "state_v_first", state_v_first)
    common.no_more(op, kwargs)
    _kda_shapes(op, q, k, v, g, beta)
    gate = gating.kda_gate(op, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    g, beta, raw = gating.kda_gates(op, g, beta, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    call = gradients.Call(scale, use_qk_l2norm_in_kernel, _layout(v_first), cu_seqlens)
    o, final = _run(op, q, k, v, g, beta, initial_state, call, raw, recurrent=True)
    return o, final if output_final_state else None


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    call: gradients.Call,
    raw: dict[str, Any],
    *,
    recurrent: bool = False,
    graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """One call: with gradients if autograd wants them, else the operator alone."""
    common.packed_rows(op, q, state, call.cu_seqlens)
    made = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if q.dtype != made or k.dtype != made or v.dtype != made:  # upstream accepts mixed dtypes
        parts = (q.to(made), k.to(made), v.to(made))
        o, final = _run(
            op,
            *parts,
            g,
            beta,
            state,
            call,
            raw,
            recurrent=recurrent,
            graph=graph,
        )
        return o.to(v.dtype), final
    q, k, v = (common.unit_stride(x) for x in (q, k, v))
    inputs = (q, k, v, g, beta, state, raw.get("A_log"), raw.get("dt_bias"))
    if gradients.wanted(*inputs):
        need(not graph, op, "use_graph", "False with gradients, whose borders are read back", graph)
        if raw:
            assert g is not None
            g = gradients.log_decay(g, raw["A_log"], raw["dt_bias"])
            beta = gradients.strength(beta, raw["neg_eigval"])
        return gradients.delta_rule(q, k, v, g, beta, state, call)
    few = recurrent and call.cu_seqlens is None and 0 < q.shape[1] <= MAX_DECODE_TOKENS
    serve = ops.decode if few else ops.prefill
    return serve(q, k, v, g, beta, state=common.fresh(state, v), **call._asdict(), **raw)


def _with_states(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    call: gradients.Call,
    raw: dict[str, Any],
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, final states, and the states before each chunk of ``size`` tokens, as checkpoints."""
    common.packed_rows(op, q, state, call.cu_seqlens)
    B, T, N = q.shape[0], q.shape[1], call.sequences(q)
    lengths = [T] * N if call.cu_seqlens is None else call.cu_seqlens.diff().tolist()
    counts = [-(-n // size) for n in lengths]
    total = sum(counts)
    tail = (v.shape[2], k.shape[3], v.shape[3])
    tail = tail if call.state_layout == "kv" else (tail[0], tail[2], tail[1])
    pool = v.new_zeros(N + total, *tail, dtype=common.wide(v))
    if state is not None:
        pool[:N] = state
    slots, at, first = [], [], N
    for n in counts:
        blank = max(counts) - n
        slots.append([*range(first, first + n), *[-1] * blank])
        at.append([*(i * size for i in range(n)), *[0] * blank])
        first += n
    places = torch.tensor([slots, at], device=q.device).view(2, N, -1)
    o, _ = ops.prefill(
        q,
        k,
        v,
        g,
        beta,
        state=pool,
        slots=torch.arange(N, device=q.device),
        checkpoints=ops.Checkpoints(places[0], positions=places[1]) if total else None,
        **call._asdict(),
        **raw,
    )
    h = pool[N:].to(torch.bfloat16).view(B, total // B if B else 0, *tail)
    return o, pool[:N].clone(), h


def _heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        need(x.dim() == 4, op, name, "[B, T, heads, width]", f"shape {list(x.shape)}")
    H, HV = q.shape[2], v.shape[2]
    need(k.shape[2] == H, op, "k", f"the {H} heads of q", f"{k.shape[2]} heads")
    need(HV % H == 0, op, "v", f"a multiple of {H} heads", f"{HV} heads")


def _kda_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    _heads(op, q, k, v)
    B, T, HV, K = *q.shape[:2], v.shape[2], q.shape[3]
    for name, x, size in (("g", g, [B, T, HV, K]), ("beta", beta, [B, T, HV])):
        need(list(x.shape) == size, op, name, f"shape {size}", f"shape {list(x.shape)}")


def _chunk_indices(op: str, given: Tensor | None, cu_seqlens: Tensor | None, size: int) -> None:
    """sluice plans chunks itself: given ones must be equal (values are compared on a CPU)."""
    if given is None:
        return
    need(cu_seqlens is not None, op, "chunk_indices", "cu_seqlens beside it", None)
    assert cu_seqlens is not None
    ok = given.dim() == 2 and given.shape[1] == 2
    need(ok, op, "chunk_indices", "shape [chunks, 2]", f"shape {list(given.shape)}")
    if given.device.type == "cpu" and cu_seqlens.device.type == "cpu":
        counts = [-(-n // size) for n in cu_seqlens.diff().tolist()]
        plan = [[i, j] for i, n in enumerate(counts) for j in range(n)]
        expected = f"the chunks of {size} tokens that cu_seqlens has"
        need(given.tolist() == plan, op, "chunk_indices", expected, "others")


def _static_borders(op: str, on: bool, most: int | None, cu_seqlens: Tensor | None) -> None:
    """Check ``use_graph``: a captured graph has a fixed number of sequences."""
    need(on or most is None, op, "max_num_seqs", "use_graph beside it", most)
    if most is not None:
        N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        need(most == N, op, "max_num_seqs", f"the {N} sequences of cu_seqlens", most)


def _layout(v_first: bool) -> str:
    return "vk" if v_first else "kv"
