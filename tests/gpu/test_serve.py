"""``examples/serve.py`` as on a GPU: compiled kernels in the emulator, graphs by recordings.

A recorded graph holds the launches, with the parameters that the driver was given.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")

import transformers

from sluice import calls, torch_private
from sluice.backends import cuda_driver, hopper
from sluice.backends import triton as portable
from sluice.integrations.transformers import plain_torch
from tests import recorded
from tests.gpu.emulator import driver, machine

pytestmark = [
    pytest.mark.long,  # tests/test_serve.py runs the engine and its graphs on a CPU
    pytest.mark.skipif(machine.missing() is not None, reason=str(machine.missing())),
    pytest.mark.skipif(portable.interpreted(), reason="kernels are not compiled there"),
]
NEW, CONTEXT = 8, 96
PREFILL = {torch.float16: "hopper_state_kernel", torch.float32: "prefill_state_kernel"}
LAUNCH = machine.Kernel.launch


def launched(kernel, grid, threads, shared, places, ranges, seed=0):
    """Stands in for ``Kernel.launch``: a graph copies the parameters when it is captured."""
    sizes = [size for _, size in kernel.program.parameters]
    kept = [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)]

    def work():
        copies = [ctypes.create_string_buffer(x, len(x)) for x in kept]
        LAUNCH(kernel, grid, threads, shared, list(map(ctypes.addressof, copies)), ranges, seed)

    recorded.launch(work)


@pytest.fixture
def gpu(monkeypatch):
    """An emulated Hopper GPU with graphs; calls take the way that they take there."""
    made = driver.install(monkeypatch, "sm_90")

    def load(*code):
        assert not recorded.capturing(), "nothing may be compiled or loaded during a capture"
        return made.load(*code)

    monkeypatch.setattr(cuda_driver, "load", load)
    monkeypatch.setattr(machine.Kernel, "launch", launched)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", recorded.RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recorded.recording)
    monkeypatch.setattr(torch_private, "dispatch_modes", lambda: 0)  # no call is traced
    for backend in (hopper, portable):  # the host does not look at values
        monkeypatch.setattr(backend, "CHECKS_VALUES", True, raising=False)
    yield made
    calls.forget()


def make_model(serve, dtype):
    """serve.py's small one; in 16 bits, one with heads of 128, which Hopper's kernels serve."""
    if dtype == torch.float32:
        return serve.load(None, "cpu")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    model.model.layers[0].linear_attn.A_log.fill_(-3.0)  # gates that remember
    return model.to(dtype)


def exact_tokens(serve, model, prompts):
    """Tokens of float64; the best one leads by more than the roundings of 16 bits."""
    kept = model.lm_head.weight.dtype
    tokens = serve.one_by_one(model.double(), prompts, NEW)
    for prompt, new in zip(prompts, tokens, strict=True):
        with plain_torch(model), torch.no_grad():
            logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.T
        assert float(((best - second) / logits.std(-1)).min()) > 0.01
    model.to(kept)
    return tokens


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("dtype", PREFILL, ids=str)
def test_the_engine_gives_the_tokens_of_one_by_one_generation(serve, gpu, dtype, speculate):
    model = make_model(serve, dtype)
    prompts = [*serve.make_prompts(model, 3, 64), [5, 6, 7, 8] * 9, [3, 9], [4]]
    exact = exact_tokens(serve, model, prompts)
    engine = serve.Engine(model, 12, CONTEXT, speculate, graphs=True)
    assert serve.serve(engine, prompts, NEW) == exact
    assert serve.serve(engine, prompts, NEW) == exact  # from cached prefixes
    assert engine.counts["prompt tokens from the cache"] >= 3 * serve.BLOCK
    assert sum(graph.graph.replays for graph in engine.graphs.values()) >= NEW
    names = {kernel.program.name for kernel in gpu.kernels.values()}
    assert {PREFILL[dtype], "step_kernel", "conv_qkv_kernel", "rms_norm_gated_kernel"} <= names
    assert ("commit_kernel" in names) == (speculate > 0)


def test_a_replay_without_its_launches_is_noticed(serve, gpu, monkeypatch):
    """The comparison can fail: graphs that keep torch's operations alone give other tokens."""
    model = make_model(serve, torch.float16)
    exact = exact_tokens(serve, model, [[5, 6, 7, 8] * 3])
    monkeypatch.setattr(recorded, "launch", lambda work: work())
    engine = serve.Engine(model, 2, CONTEXT, graphs=True)
    assert serve.serve(engine, [[5, 6, 7, 8] * 3], NEW) != exact
