"""VLLM_BATCH_INVARIANT: a sequence of vLLM's own layer has the same bits alone and beside others.

The layer is built by vLLM's registry with the flag set, its batches come from vLLM's builder of
metadata, and each goes through vLLM's op and its forward context. Projections return what they are
given: on a CPU vLLM has no batch-invariant ones, so it refuses whole engines with the flag.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as home
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention import selector
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from sluice import ops
from sluice.testing.compare import assert_same_bits
from tests.engines.vllm_batches import Batches, Row, engine_config

PAGES, DRAFTS, PREFIX = 32, 3, "model.layers.0.linear_attn"
Tokens = tuple[torch.Tensor, torch.Tensor]


class Given(torch.nn.Module):
    """In place of a projection."""

    def forward(self, x: torch.Tensor):
        return x, None


class Layer(Batches):
    """vLLM's layer with the plug-in and pages of its own."""

    def __init__(self, folder: str, dtype: torch.dtype, drafts: int, interleaved: bool) -> None:
        name = str(dtype).removeprefix("torch.")
        options = {"dtype": name, "additional_config": {"sluice": True}}
        self.config, self.dtype = engine_config(folder, drafts, **options), dtype
        super().__init__(self.config, drafts)
        hf = AutoConfig.from_pretrained(folder)
        with set_current_vllm_config(self.config), set_default_torch_dtype(dtype):
            self.layer = home.QwenGatedDeltaNetAttention(
                hf, self.config, prefix=PREFIX, gqa_interleaved_layout=interleaved
            )
        draw = torch.Generator().manual_seed(0)
        for p in self.layer.parameters():
            p.data.normal_(0, 0.5, generator=draw)
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            setattr(self.layer, name, Given())
        shapes, kinds = self.layer.get_state_shape(), self.layer.get_state_dtype()
        pools = zip(shapes, kinds, strict=True)
        nan = float("nan")
        self.layer.kv_cache = tuple(torch.full((PAGES, *s), nan, dtype=d) for s, d in pools)

    def inputs(self, n: int, seed: int) -> Tokens:
        """What the two projections make of n tokens."""
        draw = torch.Generator().manual_seed(seed)
        sizes = 2 * self.layer.key_dim + 2 * self.layer.value_dim, 2 * self.layer.num_v_heads
        qkvz, ba = (torch.randn(n, size, generator=draw).to(self.dtype) for size in sizes)
        return qkvz, ba

    def run(self, rows: list[Row], inputs: list[Tokens], padded: int = 0) -> list[torch.Tensor]:
        """One batch; outputs of each row."""
        metadata = self.metadata(rows, padded, padded)
        parts = [*inputs, self.inputs(padded, 99)]
        qkvz, ba = (torch.cat(xs) for xs in zip(*parts, strict=True))
        self.layer.in_proj_ba.forward = lambda _: (ba, None)
        context = set_forward_context({PREFIX: metadata}, self.config, num_tokens=len(qkvz))
        with torch.inference_mode(), context:
            out = self.layer(qkvz)
        for row in rows:
            self.end(row)
        return list(out[: sum(row.tokens for row in rows)].split([row.tokens for row in rows]))

    def state(self, name: str) -> list[torch.Tensor]:
        """Both states of a sequence, in all of its slots."""
        return [pool[self.slots[name]] for pool in self.layer.kv_cache]


@pytest.fixture
def flag(monkeypatch, tmp_path):
    """vLLM's flag, and process groups of one rank, which its layers ask for."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    address = f"file://{tmp_path}/rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def start(flag, truth):
    """Start a layer."""

    def made(dtype: torch.dtype, drafts: int = 0, interleaved: bool = True) -> Layer:
        return Layer(truth.folder, dtype, drafts, interleaved)

    return made


class Story:
    """A sequence ``x`` in two layers: beside others, and alone."""

    def __init__(self, together: Layer, alone: Layer, others: tuple[str, ...]) -> None:
        self.together, self.alone, self.seed = together, alone, 0
        for layer, names in ((together, (*others, "x")), (alone, ("x",))):
            for name in names:
                layer.begin(name)

    def step(self, *rows: Row, padded: int = 0) -> None:
        """A batch with a row of ``x``, and that row alone: the same bits."""
        self.seed += 100
        inputs = [self.together.inputs(row.tokens, self.seed + i) for i, row in enumerate(rows)]
        (at,) = (i for i, row in enumerate(rows) if row.name == "x")
        found = self.together.run(list(rows), inputs, padded)[at]
        (want,) = self.alone.run([rows[at]], [inputs[at]])
        assert found.isfinite().all()
        assert_same_bits(found, want, f"outputs of {rows}")
        states = zip(self.together.state("x"), self.alone.state("x"), strict=True)
        for name, (a, b) in zip(("windows", "states"), states, strict=True):
            assert not b.isnan().all()
            assert_same_bits(a, b, f"{name} after {rows}")


@pytest.mark.parametrize("interleaved", [True, False], ids=("interleaved", "split"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_prompts_chunks_and_steps(start, monkeypatch, dtype, interleaved):
    asked, prefill = [], ops.prefill

    def noted(*args, **options):
        asked.append(options["batch_invariant"])
        return prefill(*args, **options)

    monkeypatch.setattr(ops, "prefill", noted)
    story = Story(*(start(dtype, 0, interleaved) for _ in range(2)), others=("a", "b", "c"))
    assert type(story.alone.layer).__name__ == "SluiceGDN"
    story.step(Row("a", 30), Row("x", 64), Row("b", 1))
    story.step(Row("a", 1, 0, 0), Row("x", 37), Row("c", 70))
    assert asked
    assert all(asked)
    story.step(Row("x", 1, 0, 0), Row("c", 9))
    story.step(Row("c", 1, 0, 0), Row("x", 1, 0, 0), Row("a", 1, 0, 0))
    story.step(Row("b", 1, 0, 0), Row("x", 1, 0, 0), Row("a", 3))
    story.step(Row("x", 1, 0, 0), padded=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts(start, dtype):
    story = Story(*(start(dtype, DRAFTS) for _ in range(2)), others=("a", "b"))
    story.step(Row("a", 11), Row("x", 20))
    story.step(Row("a", 3, 1, 2), Row("x", 4, 2, 3))
    story.step(Row("x", 4, 1, 3), Row("b", 13))
    story.step(Row("a", 1, 0, 0), Row("x", 2, 0, 1), padded=2)
    story.step(Row("b", 4, 3, 3), Row("x", 1, 0, 0))


def test_vllm_takes_the_layers_backend_and_not_its_own(start):
    selector._cached_get_mamba_attn_backend.cache_clear()  # of engines without the flag
    layer = start(torch.float32).layer
    backend = layer.get_attn_backend()
    assert backend.supports_batch_invariance()
    assert backend.get_builder_cls() is GDNAttentionMetadataBuilder
    with pytest.raises(RuntimeError, match="batch_invariant"):
        home.QwenGatedDeltaNetAttention.get_attn_backend(layer)
