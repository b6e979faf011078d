"""A vLLM engine in this process, started and taken down by a test."""

from __future__ import annotations

import contextlib
import gc
import unittest.mock
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

from sluice.integrations.vllm import report

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}

_started: list[str] = []


class Engine:
    """An LLM that takes and returns token numbers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        """The engine that is stepped by hand."""
        return self.llm.llm_engine

    def layers(self, rank: int = 0) -> list[str]:
        """The gated delta layers that a rank has built."""
        return self.llm.apply_model(_gated_delta_layers)[rank]

    @property
    def block(self) -> int:
        """Tokens of a block, which vLLM makes large enough for a layer's state."""
        return self.core.vllm_config.cache_config.block_size

    def params(self, new: int, **more: Any) -> Any:
        return SamplingParams(
            temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, **more
        )

    def run(self, prompts: Sequence[list[int]], new: int, **more: Any) -> list[Any]:
        """One output for each prompt, all asked at once."""
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        return self.llm.generate(asked, self.params(new, **more), use_tqdm=False)

    def tokens(self, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self.run(prompts, new)]

    def metric(self, name: str) -> float:
        """A counter of vLLM's."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}")


def _gated_delta_layers(model: Any) -> list[str]:
    kinds = [type(m) for name, m in model.named_modules() if name.endswith(".linear_attn")]
    return [f"{kind.__module__}.{kind.__name__}" for kind in kinds]


@contextlib.contextmanager
def engine(folder: str, *, on: bool = True, **options: Any) -> Iterator[Engine]:
    """An engine with the plug-in, or without; options are vLLM's.

    vLLM 0.32 on a CPU replaces its Triton kernels when an engine starts, and fails when a second
    one does so in the same process: then they are replaced already.
    """
    report.calls.clear()
    with contextlib.ExitStack() as undo:
        if _started:
            name = "register_triton_kernel_overrides"
            nothing = unittest.mock.patch.object(type(current_platform), name, return_value=None)
            undo.enter_context(nothing)
        _started.append(folder)
        llm = _start(folder, on, options)
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _start(folder: str, on: bool, options: dict[str, Any]) -> Any:
    return LLM(
        model=folder,
        **{
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 32,
            "block_size": 32,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **options,
        },
        additional_config={"sluice": True} if on else {},
    )


def calls() -> Counter[str]:
    """How many batches of each kind sluice has served for the engine that was started last."""
    return report.calls
