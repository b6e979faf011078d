"""No request compiles (reliability row 10): the whole of vLLM, as in a new process, and counted.

On a CPU. What batches need on a GPU is counted in tests/gpu/test_warm_engines.py.
"""

from __future__ import annotations

import pytest
import torch

from sluice import calls
from sluice.integrations.vllm import layer
from tests.engines.tiny import NEW_TOKENS
from tests.engines.vllm_engine import NGRAM, engine
from tests.engines.vllm_engine import calls as served

NUMBA = "numba:compile"


class Compiled:
    """What is compiled, or taken from the disk, as it happens.

    It begins when vLLM builds the first layer. Before that nothing may import Numba: vLLM 0.32 on a
    CPU looks through all modules to put its own functions in place of Triton kernels, and stumbles.
    """

    def __init__(self, monkeypatch) -> None:
        self.kernels: list[str] = []
        self.others: list[str] = []
        self.patch, self.begun, build = monkeypatch, False, layer.SluiceGDN.__init__

        def built(*args, **options):
            self.begin()
            build(*args, **options)

        monkeypatch.setattr(layer.SluiceGDN, "__init__", built)

    def begin(self) -> None:
        """No kernel is ready, and no call is remembered."""
        if self.begun:
            return
        self.begun = True
        from numba.core import event

        from sluice.backends import cpu
        from sluice.backends.cpu.kernel import Kernel

        load, told = Kernel._load_or_compile, self.others

        def loaded(kernel):
            self.kernels.append(kernel.name)
            return load(kernel)

        class Listener(event.Listener):
            def on_start(self, event):
                home = event.data["dispatcher"].py_func.__module__
                if home.startswith(("sluice", __name__)):  # vLLM compiles its search for n-grams
                    told.append(home)

            def on_end(self, event):
                """Told once."""

        for kernel in cpu.kernels().values():
            self.patch.setattr(kernel, "_found", None)
        self.patch.setattr(Kernel, "_load_or_compile", loaded)
        self.patch.setattr(layer, "_compiled", set())
        self.listener = Listener()
        event.register(NUMBA, self.listener)
        torch._dynamo.utils.counters.clear()
        calls.forget()

    def end(self) -> None:
        if self.begun:
            from numba.core import event

            event.unregister(NUMBA, self.listener)
            calls.forget()

    def __call__(self) -> tuple[list[str], list[str], int]:
        """Kernels of sluice's, other functions that Numba has compiled, or torch traced."""
        traced = sum(torch._dynamo.utils.counters["frames"].values())
        return list(self.kernels), list(self.others), traced


@pytest.fixture
def compiled(monkeypatch):
    made = Compiled(monkeypatch)
    yield made
    made.end()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True, "max_num_batched_tokens": 40, "max_num_seqs": 16},
        {"speculative_config": NGRAM},
    ],
    ids=("chunks and prefixes", "drafts"),
)
def test_row_10_requests_find_every_kernel_compiled(truth, compiled, options, dtype):
    with engine(truth.folder, dtype=dtype, **options) as e:
        ready = compiled()
        assert {"conv_qkv", "prefill"} <= set(ready[0])
        for prompts in (truth.prompts[:1], truth.prompts, truth.prompts):
            e.tokens(prompts, NEW_TOKENS)
        assert served()["prefill"] > 0
        assert any("drafts" in kind for kind in served()) == ("speculative_config" in options)
        assert compiled() == ready


def test_what_is_compiled_by_a_request_is_counted(truth, compiled, monkeypatch):
    monkeypatch.setattr(layer.SluiceGDN, "_sluice_warm", lambda self, device: None)
    with engine(truth.folder) as e:
        assert compiled()[0] == []
        e.tokens(truth.prompts[:1], 2)
        assert {"conv_qkv", "prefill"} <= set(compiled()[0])
    import numba

    before = compiled()
    numba.njit(lambda x: x + 1)(1)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    after = compiled()
    assert len(after[1]) > len(before[1])
    assert after[2] > before[2]
