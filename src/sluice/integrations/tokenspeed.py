"""tokenspeed's kernel registry: sluice's operators behind its four gated delta kernels.

tokenspeed loads ``register`` (entry point ``tokenspeed_kernel.plugins``) when its host calls
``discover_plugins()``. Written against commit f4d8ec6e; the signatures are those of its
``ops/attention/triton/gated_delta_rule.py``, and its registry takes the four kernels. It was not
run inside tokenspeed, which needs a GPU: ``tests/integrations/test_tokenspeed.py`` has a registry
with the same signatures. The convolution and the split into q, k and v after it stay tokenspeed's:
its runtime imports those functions by name, and its registry has no kernel of either.

States are [P, HV, V, K], sluice's ``"vk"``. Negative indices are padding.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.spec import MAX_DECODE_TOKENS

SOLUTION = "sluice"


def register() -> None:
    """Register the kernels. They win over tokenspeed's own, except ``gdn_replay_commit``.

    That one gets addresses of states in place of tensors, which the host has to read: it is
    registered as a reference, and runs where ``solution="sluice"`` asks for it.
    """
    registry = importlib.import_module("tokenspeed_kernel.registry")
    platform = importlib.import_module("tokenspeed_kernel.platform")
    signature = importlib.import_module("tokenspeed_kernel.signature")
    dtypes = {torch.float16, torch.bfloat16}
    common = {
        "solution": SOLUTION,
        "capability": platform.CapabilityRequirement(vendors=frozenset({"nvidia", "amd"})),
        "signatures": signature.format_signatures(("q", "k", "v"), "dense", dtypes),
    }
    both = frozenset({False, True})
    for function, priority, traits in (
        # the states inside a prompt that output_h asks for stay with tokenspeed's kernels
        (
            gdn_chunk_prefill,
            registry.Priority.PLUGIN,
            {"qk_l2norm": both, "output_h": frozenset({False})},
        ),
        (gdn_decode_step, registry.Priority.PLUGIN, None),
        (gdn_decode_mtp, registry.Priority.PLUGIN, None),
        (gdn_replay_commit, registry.Priority.REFERENCE, {"flat_state": frozenset({True})}),
    ):
        name = function.__name__
        registry.register_kernel(
            "attention", name, name=f"sluice_{name}", priority=priority, traits=traits, **common
        )(function)


def gdn_chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    qk_l2norm: bool = False,
    output_final_state: bool = True,
    output_h: bool = False,
) -> Any:
    """Packed prompts [1, T, ..], gates ready; ``initial_state`` [N, HV, V, K] stays as it is."""
    if output_h:
        raise NotImplementedError("output_h: tokenspeed's selection keeps such calls from here")
    result = importlib.import_module("tokenspeed_kernel.ops.attention.gdn_utils")
    state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    out, state = ops.prefill(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        normalize_qk=qk_l2norm,
        state=state,
        cu_seqlens=cu_seqlens,
    )
    return result.GdnChunkPrefillResult(out=out, final_state=state if output_final_state else None)


def gdn_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    output_state_indices: Tensor | None = None,
    use_qk_l2norm: bool = True,
) -> Tensor:
    """One token per row [B, 1, ..]; the state goes to ``output_state_indices``, or where it was."""
    return ops.decode(
        q,
        k,
        v,
        a,
        b,
        scale=scale,
        normalize_qk=use_qk_l2norm,
        A_log=A_log,
        dt_bias=dt_bias,
        state=initial_state,
        slots=initial_state_indices,
        write_slots=output_state_indices,
    )[0]


def gdn_decode_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    disable_state_update: bool = True,
    use_qk_l2norm: bool = True,
    intermediate_states_buffer: Tensor | None = None,
    output_state_indices: Tensor | None = None,
) -> Tensor:
    """T tokens per row [B, T, ..].

    States after each token go to ``intermediate_states_buffer`` [B, T, HV, V, K], or to the slots
    ``output_state_indices`` [B, T]: one launch for each token to a buffer, or for more than 8
    tokens. With neither, the last state goes back to its slot, or nowhere with
    ``disable_state_update``.
    """
    tokens = (q, k, v, a, b)
    options: dict[str, Any] = {
        "scale": scale,
        "normalize_qk": use_qk_l2norm,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    slots = initial_state_indices
    if intermediate_states_buffer is not None:
        return _each_in_a_buffer(
            tokens, options, initial_state, slots, intermediate_states_buffer, disable_state_update
        )
    if output_state_indices is not None and q.shape[1] <= MAX_DECODE_TOKENS:
        where = {"state": initial_state, "slots": slots, "write_slots": output_state_indices}
        return ops.decode(*tokens, **options, **where)[0]
    if output_state_indices is not None:
        read, out = slots, v.new_empty(*q.shape[:2], *v.shape[2:])
        for t in range(q.shape[1]):
            write = torch.where(slots >= 0, output_state_indices[:, t], -1)
            _one(tokens, options, t, out, state=initial_state, slots=read, write_slots=write)
            read = write
        return out
    if disable_state_update and q.shape[1] <= MAX_DECODE_TOKENS:
        return ops.verify(*tokens, **options, state=initial_state, slots=slots)[0]
    run = ops.decode if q.shape[1] <= MAX_DECODE_TOKENS else ops.prefill
    nowhere = torch.full_like(slots, -1) if disable_state_update else None
    return run(*tokens, **options, state=initial_state, slots=slots, write_slots=nowhere)[0]


def _each_in_a_buffer(
    tokens: tuple[Tensor, ...],
    options: dict[str, Any],
    pool: Tensor,
    slots: Tensor,
    buffer: Tensor,
    frozen: bool,
) -> Tensor:
    q, v = tokens[0], tokens[2]
    out = v.new_empty(*q.shape[:2], *v.shape[2:])
    own = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), -1)
    state = pool[slots.clamp(min=0).long()]
    for t in range(q.shape[1]):
        buffer[:, t] = state
        _one(tokens, options, t, out, state=buffer[:, t], slots=own)
        state = buffer[:, t]
    if not frozen:
        run = ops.decode if q.shape[1] <= MAX_DECODE_TOKENS else ops.prefill
        run(*tokens, **options, state=pool, slots=slots)
    return out


def _one(tokens: tuple[Tensor, ...], options: dict[str, Any], t: int, out: Tensor, **where: Any):
    ops.decode(*(x[:, t : t + 1] for x in tokens), **options, **where, out=out[:, t : t + 1])


def gdn_replay_commit(
    payload: Tensor,
    parameters: Tensor,
    *,
    state_addresses: Tensor,
    state_row_strides: Tensor,
    read_indices: Tensor,
    write_indices: Tensor,
    accepted_length: Tensor,
    draft_token_num: int,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    state_dtype: torch.dtype,
) -> None:
    """Fold each row's accepted tokens into its state, layer by layer.

    ``payload`` [L, B T, HK K + HV V + 2 HV] holds k, v, a and b of each token, ``parameters``
    [L, 2, HV] A_log and dt_bias. The host reads addresses and indices, so no graph can be captured.
    """
    HK, HV, K, V, T = num_k_heads, num_v_heads, head_k_dim, head_v_dim, draft_token_num
    B = accepted_length.numel()
    keep = accepted_length.clamp(0, T).to(torch.int64)
    # each row is two sequences: its accepted tokens, and the rest, which is padding
    starts = torch.arange(B, device=keep.device) * T
    borders = torch.stack([starts, starts + keep], dim=1).flatten()
    borders = torch.cat([borders, borders.new_full((1,), B * T)])
    rows = max(int(read_indices.max()), int(write_indices.max())) + 1
    run = ops.decode if T <= MAX_DECODE_TOKENS else ops.prefill
    for layer in range(payload.shape[0]):
        size = (max(rows, 1), HV, V, K)
        state = _at(
            int(state_addresses[layer]),
            size,
            int(state_row_strides[layer]),
            state_dtype,
            payload.device,
        )
        x = payload[layer, : B * T]
        k, v, a, b = x.split([HK * K, HV * V, HV, HV], dim=-1)
        k, v = k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
        run(
            k,  # the outputs are not used
            k,
            v,
            a,
            b,
            normalize_qk=True,
            A_log=parameters[layer, 0],
            dt_bias=parameters[layer, 1],
            state=state,
            slots=_with_rest(read_indices[layer]),
            write_slots=_with_rest(write_indices[layer]),
            cu_seqlens=borders,
        )


def _with_rest(slots: Tensor) -> Tensor:
    return torch.stack([slots, torch.full_like(slots, -1)], dim=1).flatten()


class _Memory:
    """A GPU's memory at an address, as torch takes it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _at(
    address: int, size: tuple[int, ...], stride: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool of states at an address."""
    P, HV, V, K = size
    bytes_ = ((P - 1) * stride + HV * V * K) * dtype.itemsize
    if device.type == "cpu":
        memory = torch.frombuffer(
            (ctypes.c_uint8 * bytes_).from_address(address), dtype=torch.uint8
        )
    else:
        memory = torch.as_tensor(_Memory(address, bytes_), device=device)
    return memory.view(dtype).as_strided(size, (stride, V * K, K, 1))
