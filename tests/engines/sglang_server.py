"""SGLang's own backend class, pools and metadata on a CPU, and what its layers must compute."""
# ruff: noqa: E402

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.engines.no_torchvision import without_torchvision

without_torchvision()

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_memory_pool import (
    UnifiedHybridReqToTokenPool,
    init_unified_mamba_pools,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_memory, get_parallel
from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as kit

from sluice.integrations import sglang
from sluice.testing import oracle

HK, HV, K, V = 2, 4, 16, 8
D = 2 * HK * K + HV * V


class Drafts(NamedTuple):
    """A server with drafts: T tokens of each request, a state for each of which SGLang keeps."""

    T: int
    state_dtype: torch.dtype = torch.float32
    slots: int = 8
    envelope: bool = False  # pools of all layers interleaved, strided between slots


class Server:
    """A runner of SGLang's with real pools, and the plug-in's backend as the hook builds it."""

    def __init__(
        self,
        requests: int,
        dtype: torch.dtype = torch.float32,
        layers: tuple[int, ...] = (0,),
        drafts: Drafts | None = None,
        W: int = 2,  # the kit's pools are for convolutions of width 2
        unified: bool = False,
        **flags: str | None,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.requests, self.dtype, self.drafts = requests, dtype, drafts
        case = kit.GDNAttentionCase(
            name="sluice",
            backend="torch_native",
            forward_mode=ForwardMode.TARGET_VERIFY if drafts else ForwardMode.EXTEND,
            num_k_heads=HK,
            num_v_heads=HV,
            page_size=1,
            prefix_lens=(0,) * requests,
            extend_lens=(drafts.T if drafts else 1,) * requests,
        )
        self.runner = kit.MockGDNModelRunner(
            case=case,
            model_config=kit.TinyGDNModelConfig(num_heads=HK, head_dim=K, context_len=256),
            dtype=dtype,
            device="cpu",
            max_context_len=256,
            head_dim=K,
            head_k_dim=K,
            head_v_dim=V,
            runner_batch_size=2 * requests,
        )
        given = {"linear_attn_decode_backend": "sluice", "linear_attn_prefill_backend": "sluice"}
        self.flags = contextlib.ExitStack()
        self.flags.enter_context(get_exec().mamba.override(**given | flags))
        if unified:
            alike = dict.fromkeys(("enable_unified_memory", "enable_page_major_kv_layout"), True)
            self.flags.enter_context(get_memory().override(**alike))
            self.runner.req_to_token_pool = self._unified_pool(layers, drafts, W)
        elif drafts:
            self.runner.req_to_token_pool = self._pool(layers, drafts, W)
        self.runner.linear_attn_backends = resolve_linear_attn_backends()
        self.backend = sglang._around(lambda runner, full: _build(runner), self.runner, None)
        self.layers = [self._layer(i, W) for i in layers]
        self.layer = self.layers[0]
        for layer in self.layers:
            self.cache(layer).conv[0].fill_(float("nan"))
            self.cache(layer).temporal.fill_(float("nan"))

    def close(self) -> None:
        """Give SGLang its settings back."""
        self.flags.close()
        self.runner._server_args_override.restore()

    def _states(self, layers: tuple[int, ...], dtype: torch.dtype, W: int) -> Mamba2CacheParams:
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=HV * V,
            n_groups=HK,
            num_heads=HV,
            head_dim=V,
            state_size=K,
            conv_kernel=W,
        )
        kinds = Mamba2StateDType(conv=self.dtype, temporal=dtype)
        return Mamba2CacheParams(shape=shape, layers=list(layers), dtype=kinds)

    def _unified_pool(
        self, layers: tuple[int, ...], drafts: Drafts | None, W: int
    ) -> UnifiedHybridReqToTokenPool:
        """One buffer for the states of these layers and an attention layer's keys and values."""
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
            return init_unified_mamba_pools(
                device="cpu",
                kv_cache_dtype=self.dtype,
                head_num=2,
                head_dim=16,
                page_size=1,
                start_layer=0,
                end_layer=1,
                is_draft_worker=False,
                use_mla_backend=False,
                mamba_layer_ids=list(layers),
                full_attention_layer_ids=[max(layers) + 1],
                mamba2_cache_params=self._states(layers, torch.float32, W),
                model_context_len=256,
                extra_max_context_len=0,
                max_total_num_tokens=512,
                max_mamba_cache_size=8,
                max_num_reqs=2 * self.requests,
                enable_memory_saver=False,
                enable_mamba_extra_buffer=False,
                enable_mamba_extra_buffer_lazy=False,
                speculative_num_draft_tokens=drafts.T if drafts else None,
                disable_overlap_schedule=True,
                need_sort=False,
            ).req_to_token_pool

    def _pool(self, layers: tuple[int, ...], drafts: Drafts, W: int) -> HybridReqToTokenPool:
        return HybridReqToTokenPool(
            size=2 * self.requests,
            mamba_size=drafts.slots,
            mamba_spec_state_size=2 * self.requests,
            max_context_len=256,
            device="cpu",
            enable_memory_saver=False,
            cache_params=self._states(layers, drafts.state_dtype, W),
            mamba_layer_ids=list(layers),
            enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=drafts.T,
            speculative_eagle_topk=1,
            enable_overlap_schedule=False,
            mamba_envelope_layout=drafts.envelope,
        )

    def _layer(self, layer_id: int, W: int) -> kit.RadixLinearAttention:
        return kit.RadixLinearAttention(
            layer_id=layer_id,
            num_q_heads=HK,
            num_k_heads=HK,
            num_v_heads=HV,
            head_q_dim=K,
            head_k_dim=K,
            head_v_dim=V,
            conv_weights=(self.draw(D, W) / 2).to(self.dtype),
            bias=None,
            activation="silu",
            A_log=self.draw(HV),
            dt_bias=self.draw(HV),
        )

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random)

    def inputs(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of n tokens: x, a and b."""
        return tuple(self.draw(n, size).to(self.dtype) for size in (D, HV, HV))

    def cache(self, layer: kit.RadixLinearAttention | None = None):
        layer_id = (layer or self.layer).layer_id
        return self.runner.req_to_token_pool.mamba2_layer_cache(layer_id)

    def exact(self, x: Tensor, a: Tensor, b: Tensor, layer: kit.RadixLinearAttention | None = None):
        """The sequence alone, in float64: outputs [T, HV, V], window and state after it."""
        w = layer or self.layer
        tokens, window = oracle.conv_qkv(
            x[None], w.conv_weights, num_k_heads=HK, num_v_heads=HV, head_k_dim=K, head_v_dim=V,
            a=a[None], b=b[None], A_log=w.A_log, dt_bias=w.dt_bias,
        )  # fmt: skip
        o, state = oracle.delta(*tokens)
        return o[0], window[0], state[0]

    def alone(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.exact(x, a, b)[0]

    def batch(self, mode: ForwardMode, requests: list[int], slots: list[int], before, new):
        """A forward batch of ``new`` tokens each, after ``before``."""
        pool = self.runner.req_to_token_pool
        rows = torch.tensor(requests, dtype=torch.int32)
        pool.req_index_to_mamba_index_mapping[rows] = torch.tensor(slots, dtype=torch.int32)
        lengths = [p + n for p, n in zip(before, new, strict=True)]
        made = ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            out_cache_loc=torch.zeros(sum(new), dtype=torch.int64),
            seq_lens_sum=sum(lengths),
            positions=torch.zeros(sum(new), dtype=torch.int64),
        )
        if mode.is_target_verify():
            made.spec_info = SimpleNamespace(draft_token_num=new[0], ragged_verify_layout=None)
        elif mode.is_extend():
            made.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
            made.extend_prefix_lens_cpu = list(before)
            made.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            made.extend_seq_lens_cpu = list(new)
            starts = torch.tensor([0, *new[:-1]], dtype=torch.int32).cumsum(0)
            made.extend_start_loc = starts.to(torch.int32)
            made.extend_num_tokens = sum(new)
        return made

    def run(self, batch: ForwardBatch, x, a, b, layer: kit.RadixLinearAttention | None = None):
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, x, a, b, layer or self.layer)

    def forward(self, batch: ForwardBatch, x, a, b, layer: kit.RadixLinearAttention):
        """One layer, once the metadata of the batch are there."""
        forward = (
            self.backend.forward_decode
            if batch.forward_mode.is_decode()
            else self.backend.forward_extend
        )
        return forward(layer, batch, x, a, b)

    def commit(
        self,
        steps: Tensor,
        kept: Tensor | None = None,
        kept_steps: Tensor | None = None,
        requests: Tensor | None = None,
    ) -> None:
        """SGLang's own commit, of all layers."""
        full = SimpleNamespace(
            token_to_kv_pool=None,
            req_to_token_pool=self.runner.req_to_token_pool,
            kv_index_translator=None,
            needs_cpu_seq_lens=False,
        )
        both = hybrid.HybridLinearAttnBackend(full, self.backend, [])
        both.update_mamba_state_after_mtp_verify(
            steps, kept, kept_steps, model=None, req_pool_indices=requests
        )


def _build(runner):
    from sglang.srt.layers.attention.linear import gdn_backend

    return gdn_backend.GDNAttnBackend(runner)


def cat(*parts):
    """x, a and b of sequences one after the other."""
    return tuple(torch.cat(xs) for xs in zip(*parts, strict=True))


def part(x, start: int, stop: int):
    """Tokens of x, a and b."""
    return tuple(y[start:stop] for y in x)
