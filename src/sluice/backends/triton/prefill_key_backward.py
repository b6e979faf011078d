"""The backward of prefill with decay per key: workspace and launches of kernels/backward_key_*.py.

Seven launches: what depends on no state, the states forward, their gradients back, pairs of tokens,
key channels, and the sums over heads that share a query or a key; with raw gates one more sums over
chunks. Sequences are not split. Nothing of the forward pass is kept but its inputs. The workspace,
with the size of v as the unit (16-bit inputs, K = V = 128): the states before and after each chunk
8 each, E and Y 2 each, what reads and writes ask 6, P, B, N and H 0.25 each.
"""

from __future__ import annotations

from typing import Any

import torch

from sluice.backends.triton import configs, gpu
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill import units_of
from sluice.contract.backward import DeltaBackwardSpec

_FOLDER = "sluice.backends.triton.kernels."
LOCAL = Kernel(_FOLDER + "backward_key_chunks", "backward_key_local_kernel")
STATES = Kernel(_FOLDER + "backward_key_walks", "backward_key_states_kernel")
WALK = Kernel(_FOLDER + "backward_key_walks", "backward_key_walk_kernel")
PAIRS = Kernel(_FOLDER + "backward_key_gradients", "backward_key_pairs_kernel")
CHANNELS = Kernel(_FOLDER + "backward_key_gradients", "backward_key_channels_kernel")
FOLD = Kernel(_FOLDER + "backward_key_gradients", "backward_key_fold_kernel")
SUMS = Kernel(_FOLDER + "backward_key_gradients", "backward_key_sums_kernel")

C = 16  # tokens per chunk
USUAL = Config(num_warps=4, fp_fusion=True)
PAIRS_BLOCK_V = 16


def launches(p: DeltaBackwardSpec) -> Launches:
    """The kernels of ``prefill_backward`` with decay per key."""
    memory = Binding(p)
    tokens, slots = p.B * p.T, p.B * p.T // C + p.N
    units = units_of(p, C, tail=True)
    wide = p.K > 128
    config = USUAL._replace(num_warps=8) if wide else USUAL  # of tiles with all keys
    BLOCK_K = max(16, configs.power_of_two(p.K))
    columns = max(16, configs.power_of_two(p.V))
    block = min(16 if wide else 32, columns)
    stages = 2 if gpu.shared_memory(p.device) >= 96 << 10 else 1

    def part(wanted: bool, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return memory.scratch(name, *shape, dtype=dtype) if wanted else None

    out, delta = p.do is not None, p.beta is not None
    products = part(out, "ws.p", tokens, p.HO, C)
    b = part(delta, "ws.b", tokens, p.HV, C)
    e = part(delta, "ws.e", tokens, p.HV, p.V)
    y = part(delta, "ws.y", tokens, p.HV, p.V)
    n = part(out, "ws.n", tokens, p.HO, C)
    h = part(delta, "ws.h", tokens, p.HV, C)
    r_q = part(p.normalize_qk, "ws.r_q", tokens, p.HQ)
    r_k = part(p.normalize_qk, "ws.r_k", tokens, p.HK)
    before = part(True, "ws.S", slots, p.HV, p.V, p.K, dtype=p.dtype)
    after = part(True, "ws.dS", slots, p.HV, p.V, p.K, dtype=p.dtype)
    beta32 = part(delta, "ws.beta32", tokens, p.HV)
    # before the walks and in them: e^γ Q, e^γ K, e^(γ_C−γ) K and e^γ_C; after them what they ask
    by_query = part(out, "ws.by_query", tokens, p.HO, p.K)
    by_key = part(True, "ws.by_key", tokens, p.HV, p.K)
    write = part(True, "ws.write", tokens, p.HV, p.K)
    whole = part(True, "ws.whole", slots, p.HV, p.K)
    by_gate = part(p.raw_gates, "ws.by_gate", units, 2, p.HV, p.K)

    sizes = {"cu_seqlens_ptr": memory.dense("cu_seqlens"), "T": p.T, "HV": p.HV, "K": p.K}
    gate = {
        "g_ptr": memory.rows("g"),
        "A_log_ptr": memory.dense("A_log"),
        "dt_bias_ptr": memory.dense("dt_bias"),
        **memory.strides("g", "bth"),
    }
    gates = {
        **gate,
        "beta_ptr": memory["beta"],
        "beta_scale": p.beta_scale,
        **memory.strides("beta", "bth"),
    }
    queries = {"q_ptr": memory["q"], "HQ": p.HQ, **memory.strides("q", "bth")}
    keys = {"k_ptr": memory["k"], "HK": p.HK, **memory.strides("k", "bth")}
    walk = {
        "b_ptr": b,
        "beta32_ptr": beta32,
        "k_in_ptr": by_key,
        "k_out_ptr": write,
        "decay_ptr": whole,
        "V": p.V,
        "BLOCK_K": BLOCK_K,
        "BLOCK_V": block,
        "STAGES": stages,
        "STATE_KV": p.state_layout == "kv",
    }
    if delta:
        row = p.HV * p.V
        d = {"d_ptr": e, "stride_d_b": p.T * row if p.B > 1 else 0}
        d |= {"stride_d_t": row, "stride_d_h": p.V}
    else:
        d = {"d_ptr": memory["v"], **memory.strides("v", "bth", "d")}

    def call(kernel: Kernel, programs: int, config: Config, **arguments: Any) -> KernelCall:
        return kernel_call(kernel, programs, config, p.device, **arguments)

    calls = [
        call(
            LOCAL,
            units * p.HV,
            config,
            **queries,
            **keys,
            **gates,
            **sizes,
            p_ptr=products,
            b_ptr=b,
            beta32_ptr=beta32,
            k_in_ptr=by_key,
            k_out_ptr=write,
            q_in_ptr=by_query,
            decay_ptr=whole,
            r_q_ptr=r_q,
            r_k_ptr=r_k,
            dv_ptr=memory["dv"],
            dg_ptr=memory["dg"],
            dbeta_ptr=memory["dbeta"],
            scale=p.q_scale,
            N=p.N,
            V=p.V,
            BLOCK_K=BLOCK_K,
        ),
        call(
            STATES,
            p.N * p.HV * configs.blocks(p.V, block),
            config,
            **sizes,
            **walk,
            v_ptr=memory["v"],
            e_ptr=e,
            state_ptr=memory.dense("state"),
            S_ptr=before,
            **memory.strides("v", "bth"),
        ),
        call(
            WALK,
            p.N * p.HV * configs.blocks(p.V, block),
            config,
            **sizes,
            **walk,
            do_ptr=memory["do"],
            p_ptr=products,
            y_ptr=y,
            q_in_ptr=by_query,
            dv_ptr=memory["dv"],
            dS_ptr=after,
            dfinal_ptr=memory.dense("dfinal"),
            dstate_ptr=memory["dstate"],
            READERS=p.HO // p.HV,
        ),
        call(
            PAIRS,
            units * p.HV,
            USUAL,
            **gates,
            **sizes,
            **d,
            do_ptr=memory["do"],
            y_ptr=y,
            S_ptr=before,
            dS_ptr=after,
            n_ptr=n,
            h_ptr=h,
            read_q_ptr=by_query,
            read_k_ptr=by_key,
            write_ptr=write,
            whole_ptr=whole,
            dbeta_ptr=memory["dbeta"],
            scale=p.q_scale,
            N=p.N,
            HQ=p.HQ,
            V=p.V,
            BLOCK_K=BLOCK_K,
            BLOCK_V=PAIRS_BLOCK_V,
            STAGES=stages,
        ),
        call(
            CHANNELS,
            units * p.HV * configs.blocks(p.K, 128),
            USUAL._replace(num_warps=max(1, min(BLOCK_K, 128) // 32)),
            **queries,
            **keys,
            **gate,
            **sizes,
            r_q_ptr=r_q,
            r_k_ptr=r_k,
            n_ptr=n,
            h_ptr=h,
            read_q_ptr=by_query,
            read_k_ptr=by_key,
            write_ptr=write,
            whole_ptr=whole,
            dg_ptr=memory["dg"],
            by_gate_ptr=by_gate,
            N=p.N,
            BLOCK_K=min(BLOCK_K, 128),
        ),
        _fold(p, memory, "q", by_query, r_q, p.HQ, p.HO),
        _fold(p, memory, "k", by_key, r_k, p.HK, p.HV),
    ]
    if by_gate is not None:
        calls.append(
            call(
                SUMS,
                p.HV,
                USUAL,
                by_gate_ptr=by_gate,
                dA_log_ptr=memory["dA_log"],
                ddt_bias_ptr=memory["ddt_bias"],
                units=units,
                HV=p.HV,
                K=p.K,
                BLOCK_U=16,
                BLOCK_K=BLOCK_K,
            )
        )
    return Launches(p, memory, calls)


def _fold(
    p: DeltaBackwardSpec,
    memory: Binding,
    name: str,
    parts: Pointer | None,
    lengths: Pointer | None,
    heads: int,
    of: int,
) -> KernelCall:
    """The gradient of q or k, from what each of ``of`` heads made."""
    return kernel_call(
        FOLD,
        configs.blocks(p.B * p.T, C) * heads,
        USUAL,
        p.device,
        parts_ptr=parts,
        x_ptr=memory[name],
        r_ptr=lengths,
        dx_ptr=memory["d" + name],
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        N=p.N,
        T=p.T,
        tokens=p.B * p.T,
        **memory.strides(name, "bth", "x"),
        H=heads,
        SHARED=of // heads,
        K=p.K,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_T=C,
    )
