"""The layer that vLLM builds in place of its own when sluice is switched on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.integrations import engine_calls
from sluice.integrations.vllm import batch, private, report, serve, switch, warm
from sluice.layers.qwen import QwenShape
from sluice.model_calls import ModelCall

_Base: Any = private.base()
_core, _encoded = private.op(), private.name_encoder()
_plans: dict[Any, list[ModelCall]] = {}
_compiled: set[Any] = set()


class SluiceGDN(_Base):
    """vLLM's gated delta layer: its parameters, projections and pages; sluice's operators.

    A layer that sluice does not serve becomes vLLM's own when it is built.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        engine = private.config()
        reason = switch.why_not(engine, config) if switch.asked(engine) else ""
        if reason is None and private.platform() == "cpu" and (new := private.new_fields()):
            reason = f"metadata that this release does not know ({', '.join(new)})"
        if reason is not None:
            _become_vllm(self)
            _Base.__init__(self, config, *args, **options)
            if reason:
                report.warn_once(f"vLLM's own layers run: {reason}")
            return
        super().__init__(config, *args, **options)
        self.sluice_engine = engine
        self.sluice_shape = _shape(self)
        self.sluice_invariant = private.batch_invariant()
        try:
            self._sluice_plan()
        except Exception as refusal:  # a shape or dtype that no operator takes
            _become_vllm(self)
            private.choose_forward(self)
            report.warn_once(f"vLLM's own layers run: {refusal}")

    def forward_cuda(self, hidden_states: Tensor) -> Tensor:
        """Input projections, everything between (opaque to vLLM's graphs), output projection."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        out = torch.empty(  # the op writes all of it
            (hidden_states.size(0), self.num_v_heads // self.tp_size, self.head_v_dim),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        _core(qkvz, ba, out, layer_name=_encoded(self.prefix))
        y: Tensor
        y, _ = self.out_proj(out.flatten(-2))
        return y

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """The same on a CPU."""
        return self.forward_cuda(hidden_states)

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
    ) -> None:
        """vLLM's op comes back to the layer here."""
        metadata = private.metadata(self.prefix)
        if metadata is None:
            core_attn_out.zero_()
            self._warmup_prefill_kernels(mixed_qkvz, 0)
            return
        n = metadata.num_actual_tokens
        if n < core_attn_out.shape[0]:  # tokens that fill a graph up
            core_attn_out[n:].zero_()
        b_and_a: Any = ba
        if getattr(self, "disable_tp_for_ba_proj", False):  # all ranks' columns: take this rank's
            b_and_a = self.split_ba(ba)
        found = batch.kept(metadata)
        if found is None:
            if new := private.unknown_fields(metadata):
                self._sluice_stock(metadata, mixed_qkvz, b_and_a, core_attn_out, new)
                return
            found = batch.read(metadata)
        if found.length:
            kind = serve.run(ops, self._sluice_layer(), found, mixed_qkvz, b_and_a, core_attn_out)
            report.calls[kind] += 1

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """The same in a release without the packed op: ``a`` is empty, ``b`` holds both gates."""
        if a.numel() == 0:
            self._forward_core_fused_norm_packed(mixed_qkv, b, core_attn_out)
        else:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)

    def _sluice_stock(
        self, metadata: Any, qkvz: Tensor, ba: Any, out: Tensor, new: list[str]
    ) -> None:
        """vLLM's own kernels, on the same pages, for a batch with something unknown."""
        report.warn_once(f"vLLM's own kernels serve batches with {', '.join(new)}")
        n = metadata.num_actual_tokens
        layer = self._sluice_layer()
        qkv, z, b, a = serve.split(layer.shape, qkvz, ba)
        o = torch.zeros_like(out)
        super()._forward_core(qkv, b.contiguous(), a.contiguous(), o)
        serve.norm(ops, layer, o[:n], z[:n], out[:n])
        report.calls["vLLM's own"] += 1

    def _warmup_prefill_kernels(self, *unused: Any) -> None:
        """vLLM calls this before it takes requests."""
        self._sluice_warm(private.device(self))

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """vLLM hands over the pages; on a CPU this may be the last moment before a request."""
        super().bind_kv_cache(kv_cache)
        self._sluice_warm(private.device(self))

    def get_attn_backend(self) -> type:
        """vLLM asks here whether batch-invariant mode is possible."""
        if not self.sluice_invariant:
            found: type = super().get_attn_backend()
            return found
        return private.invariant_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Pages as vLLM wants them, and states inside prompts where it offers to keep them."""
        spec = super().get_kv_cache_spec(vllm_config)
        return private.with_checkpoints(spec, vllm_config) if _aligned(vllm_config) else spec

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """vLLM asks after which tokens of a prompt a state can be kept: after any."""
        if _aligned(self.sluice_engine) and not private.new_fields():
            return 1
        found: int | None = super().get_prefill_checkpoint_alignment()
        return found

    def _sluice_layer(self) -> serve.Layer:
        """With the pages that vLLM has bound; made anew where these or a weight have moved."""
        conv, state = private.pages(self)
        place = private.weight_places(self)
        known = self.__dict__.get("sluice_known")
        if known is None or known[0] is not conv or known[1] is not state or known[2] != place:
            known = conv, state, place, self._sluice_on(conv, state)
            self.__dict__["sluice_known"] = known
        found: serve.Layer = known[3]
        return found

    def _sluice_on(self, conv: Tensor, state: Tensor) -> serve.Layer:
        """Weights and pages, as operators take them."""
        return serve.Layer(
            self.sluice_shape,
            private.conv_weight(self),
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            conv if private.conv_dim_first() else conv.transpose(1, 2),
            state,
            self.sluice_invariant,
        )

    def _sluice_plan(self) -> tuple[Any, list[ModelCall]]:
        """Which calls this layer will make; layers of one kind share the list."""
        spec = self.get_kv_cache_spec(self.sluice_engine)
        dtype = self.sluice_engine.model_config.dtype
        pages = (spec.shapes, spec.dtypes, spec.page_size_bytes)
        kept = private.has_checkpoints(spec)
        drafts = self.num_spec or 0
        key = (self.sluice_shape, pages, dtype, drafts, kept, self.sluice_invariant)
        if key not in _plans:
            layer = self._sluice_on(*private.imagined_pages(spec))
            cuda = private.platform() == "cuda"
            _plans[key] = warm.plan(layer, dtype, drafts, kept, cuda)
            engine_calls.check(_plans[key], torch.device(private.platform()))
        return key, _plans[key]

    def _sluice_warm(self, device: torch.device) -> None:
        key, calls = self._sluice_plan()
        if key in _compiled:
            return
        _compiled.add(key)
        served = engine_calls.served(calls, device)
        found = engine_calls.served_by(served)
        drafts = f"; up to {self.num_spec} draft tokens" if self.num_spec else ""
        spec = self.get_kv_cache_spec(self.sluice_engine)
        kept = "; states inside prompts" if private.has_checkpoints(spec) else ""
        alike = "; batch-invariant" if self.sluice_invariant else ""
        text = f"serves the gated delta layers: {found}{drafts}{kept}{alike}"
        if engine_calls.slowly(served):
            report.warn_once(f"{text}. {engine_calls.SLOWLY}")
        else:
            report.say_once(text)


def _become_vllm(layer: Any) -> None:
    object.__setattr__(layer, "__class__", _Base)


def _aligned(engine: Any) -> bool:
    return getattr(engine.cache_config, "mamba_cache_mode", "none") == "align"


def _shape(layer: Any) -> QwenShape:
    """What one rank holds."""
    return QwenShape(
        "vllm",
        layer.hidden_size,
        layer.num_k_heads // layer.tp_size,
        layer.num_v_heads // layer.tp_size,
        1,
        (0,),
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        conv_width=layer.conv_kernel_size,
        order="interleaved" if layer.gqa_interleaved_layout else "split",
        gate_activation="sigmoid" if layer.norm.activation == "sigmoid" else "silu",
        norm_eps=layer.layer_norm_epsilon,
    )
