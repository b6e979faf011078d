"""A vLLM engine in this process, started and taken down by a test."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from sluice.integrations.vllm import report

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


class Engine:
    """An LLM that takes and returns token numbers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        """The engine that is stepped by hand."""
        return self.llm.llm_engine

    def layers(self) -> list[Any]:
        """The gated delta layers it has built."""
        return self.llm.apply_model(_gated_delta_layers)[0]

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
    """An engine with the plug-in, or without; options are vLLM's."""
    report.calls.clear()
    llm = LLM(
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
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def calls() -> Counter[str]:
    """How many batches of each kind sluice has served for the engine that was started last."""
    return report.calls
