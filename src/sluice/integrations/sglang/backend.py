"""SGLang's attention backend for gated delta layers, with sluice's operators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import SluiceError
from sluice.integrations import engine_calls
from sluice.integrations.sglang import NAME, drafts, private, serve
from sluice.model_calls import ModelCall
from sluice.ops import Checkpoints
from sluice.warmup import refused

_Base: Any = private.base()
_compiled: set[Any] = set()


class SluiceGDNAttnBackend(_Base):
    """Decode, extend and draft tokens by sluice; what it does not serve, by SGLang's own kernels.

    Those are: trees of drafts and the like (``private.refuses_drafts``), multi-item scoring,
    ReplaySSM, and pools or shapes that an operator refuses. All of them use the same pools. Who
    serves draft tokens is decided once, since their commit has to fit.
    """

    def __init__(self, model_runner: Any) -> None:
        self.sluice_decode, self.sluice_prefill, self.sluice_verify = private.asked(NAME)
        self.sluice_drafts: drafts.Drafts | str | None = None
        self.sluice_reasons: dict[Any, str | None] = {}
        self.sluice_tracked: tuple[Any, Any, Checkpoints] | None = None
        with private.triton_instead(model_runner, self.sluice_decode, self.sluice_prefill):
            super().__init__(model_runner)
        self.sluice_pad = private.pad_slot(model_runner.req_to_token_pool)
        self.sluice_invariant = private.deterministic()
        for layer in private.layers(model_runner):
            self._sluice_warm_ahead(layer)

    def forward_decode(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        """One token for each request. ``mixed_qkv`` may be the pair (qkvz, ba)."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        found, slots = self._sluice_layer(layer, cache), self.forward_metadata.mamba_cache_indices
        x = mixed_qkv[0] if isinstance(mixed_qkv, tuple) else mixed_qkv
        reason = self._sluice_why_not(layer, found, x, slots) if self.sluice_decode else ""
        if reason is not None:
            self._sluice_say(reason, "decode")
            return super().forward_decode(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        z = None
        if isinstance(mixed_qkv, tuple):
            mixed_qkv, z, b, a = _split(layer, *mixed_qkv)
        self._sluice_warm(found, mixed_qkv, slots)
        out = serve.decode(ops, found, mixed_qkv, b, a, slots[: mixed_qkv.shape[0]])
        self._track_mamba_state_decode(
            forward_batch, cache.conv[0], cache.temporal, slots, layer.layer_id
        )
        out = out.transpose(0, 1)  # [1, N, HV, V]
        return out if z is None else (out, z)

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        """Prompts, whole or in parts, and states for the prefix cache; or draft tokens."""
        if forward_batch.forward_mode.is_target_verify():
            return self._sluice_forward_drafts(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        found, slots = self._sluice_layer(layer, cache), self.forward_metadata.mamba_cache_indices
        reason = self._sluice_why_not(layer, found, mixed_qkv, slots) if self.sluice_prefill else ""
        if self.sluice_prefill and getattr(self, "mis_metadata", None) is not None:
            reason = "multi-item scoring"
        if reason is not None:
            self._sluice_say(reason, "extend")
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        borders = self.forward_metadata.query_start_loc
        n = borders.shape[0] - 1
        prompts = serve.Prompts(
            slots[:n],
            borders,
            forward_batch.extend_prefix_lens[:n] > 0,
            self._sluice_checkpoints(forward_batch, n),
            self.sluice_invariant,
        )
        self._sluice_warm(found, mixed_qkv, prompts.slots)
        given = kwargs.get("linear_attn_output")
        out = serve.extend(
            ops, found, mixed_qkv, b, a, prompts, None if given is None else given.squeeze(0)
        )
        return out.unsqueeze(0)

    def _sluice_forward_drafts(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        """The same number of tokens of each request; the pools stay as they are until a commit."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        found = self._sluice_layer(layer, cache)
        kept = self._sluice_kept(found, mixed_qkv.dtype)
        if isinstance(kept, str):
            self._sluice_say(kept, "draft tokens")
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        spec = forward_batch.spec_info
        if getattr(spec, "ragged_verify_layout", None) is not None:
            raise SluiceError("drafts of different lengths: --linear-attn-verify-backend triton")
        T = spec.draft_token_num
        N = mixed_qkv.shape[0] // T
        slots = self.forward_metadata.mamba_cache_indices[:N]
        self._sluice_warm(found, mixed_qkv, slots)
        place = kept.buffers.layer(private.layer_index(self.req_to_token_pool, layer.layer_id))
        x, b, a = (y.unflatten(0, (N, T)) for y in (mixed_qkv, b, a))
        out = drafts.verify(ops, found, place, x, b, a, slots)
        return out.flatten(0, 1).unsqueeze(0)

    def _sluice_kept(self, layer: serve.Layer, dtype: torch.dtype) -> drafts.Drafts | str:
        """Where drafts are kept and committed from, or why SGLang serves them ("": not asked)."""
        if self.sluice_drafts is None:
            self.sluice_drafts = self._sluice_keep(layer, dtype) if self.sluice_verify else ""
        return self.sluice_drafts

    def _sluice_keep(self, layer: serve.Layer, dtype: torch.dtype) -> drafts.Drafts | str:
        caches = private.pools(self.req_to_token_pool)
        reason = self._sluice_refuses(caches)
        reason = reason or private.refuses_drafts(self, caches, drafts.MOST)
        if reason is not None:
            return reason
        buffers = drafts.buffers_within(caches.intermediate_ssm, layer, dtype)
        if buffers is None:
            return "many more slots than requests"
        made = drafts.Drafts(buffers, caches.temporal, caches.conv[0], self.sluice_pad)
        calls = drafts.plan(layer, made, dtype, torch.int32)
        reason = _untaken(calls, layer.state.device)
        reason = reason or private.commit_with(functools.partial(drafts.commit, ops))
        if reason is not None:
            return reason
        private.keep_drafts(caches, made)
        return made

    def _sluice_checkpoints(self, forward_batch: Any, n: int) -> Any:
        """Where the prefix cache wants states; made once for all layers of a forward pass."""
        if not self.forward_metadata.has_mamba_track_mask:
            return None
        known = self.sluice_tracked
        if known is not None and known[0] is self.forward_metadata and known[1] is forward_batch:
            return known[2]
        lengths = forward_batch.mamba_track_aligned_lens()
        if lengths is None:
            raise SluiceError("SGLang asks for tracked states and does not say where")
        made = serve.checkpoints(
            forward_batch.mamba_track_mask[:n],
            forward_batch.mamba_track_indices[:n],
            lengths[:n],
            self.sluice_pad,
        )
        self.sluice_tracked = self.forward_metadata, forward_batch, made
        return made

    def _sluice_layer(self, layer: Any, cache: Any) -> serve.Layer:
        return serve.Layer(
            (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim),
            layer.conv_weights,
            layer.bias,
            layer.activation,
            layer.A_log,
            layer.dt_bias,
            cache.conv[0],
            cache.temporal,
            self.sluice_pad,
        )

    def _sluice_refuses(self, cache: Any) -> str | None:
        """Why SGLang serves these pools, of one layer or of all; None if sluice does."""
        if getattr(cache, "replayssm_d", None) is not None:
            return "ReplaySSM"
        state = cache.temporal
        V, K = state.shape[-2:]
        inner = state.stride()[-3:] == (V * K, K, 1)
        return None if inner else "recurrent states that are not contiguous"

    def _sluice_why_not(
        self, layer: Any, found: serve.Layer, x: Tensor, slots: Tensor
    ) -> str | None:
        """Why SGLang serves a layer, in words; None if sluice does. Looked into once."""
        known, key = self.sluice_reasons, (layer.layer_id, x.dtype, slots.dtype)
        if key not in known:
            cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
            reason, cuda = self._sluice_refuses(cache), x.device.type == "cuda"
            if reason is None:
                calls = serve.plan(found, x.dtype, slots.dtype, self.sluice_invariant, cuda)
                reason = _untaken(calls, x.device)
            known[key] = reason
        return known[key]

    def _sluice_say(self, reason: str, what: str) -> None:
        if reason:
            private.warn_once(f"SGLang's own kernels serve {what} with {reason}")

    def _sluice_warm_ahead(self, layer: Any) -> None:
        """Compile what a layer of the model needs, if sluice serves it."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        found, x = self._sluice_layer(layer, cache), layer.conv_weights
        slots = torch.empty(0, dtype=torch.int32, device=x.device)  # as SGLang's are
        asked = self.sluice_decode or self.sluice_prefill or self.sluice_verify
        if asked and self._sluice_why_not(layer, found, x, slots) is None:
            self._sluice_warm(found, x, slots)

    def _sluice_warm(self, layer: serve.Layer, x: Tensor, slots: Tensor) -> None:
        """Compile everything, once for each kind of layer. ``x`` and ``slots`` tell dtypes.

        A layer that was not found beforehand is compiled at its first call.
        """
        kept = self._sluice_kept(layer, x.dtype)
        key = (layer.heads, layer.state.dtype, x.dtype, slots.dtype, layer.conv_state.stride())
        key += (isinstance(kept, str),)
        if key in _compiled or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return
        _compiled.add(key)
        cuda = x.device.type == "cuda"
        calls = serve.plan(layer, x.dtype, slots.dtype, self.sluice_invariant, cuda)
        if not isinstance(kept, str):
            calls += drafts.plan(layer, kept, x.dtype, slots.dtype)
        served = engine_calls.served(calls, x.device)
        found = engine_calls.served_by(served)
        alike = "; batch-invariant" if self.sluice_invariant else ""
        text = f"serves {self._sluice_kinds(kept)} of gated delta layers: {found}{alike}"
        if engine_calls.slowly(served):
            private.warn_once(f"{text}. {engine_calls.SLOWLY}")
        else:
            private.say_once(text)

    def _sluice_kinds(self, kept: drafts.Drafts | str) -> str:
        """Which forward passes are served: ``decode, extend and draft tokens``."""
        kinds = {
            "decode": self.sluice_decode,
            "extend": self.sluice_prefill,
            "draft tokens": not isinstance(kept, str),
        }
        *most, last = (kind for kind, served in kinds.items() if served)
        return f"{', '.join(most)} and {last}" if most else last


def _untaken(calls: list[ModelCall], device: torch.device) -> str | None:
    reason = refused(calls, device)
    return None if reason is None else f"what sluice does not take ({reason})"


def _split(layer: Any, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(qkv, z [N, HV, V], b, a) of projections [Q | K | V | z] and [b | a]."""
    D = layer.q_dim + layer.k_dim + layer.v_dim
    qkv, z = qkvz.split([D, layer.v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv, z.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)), b, a
