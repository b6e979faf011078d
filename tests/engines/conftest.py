"""Tests with real engines: ``make test-engines`` makes an environment that has them.

Without an engine its files are not collected, so ``make test`` needs none.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

from tests.engines import tiny

collect_ignore_glob = [
    f"test_{name}*.py" for name in ("vllm", "sglang") if importlib.util.find_spec(name) is None
]


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """In place of the other tests' fixture: an engine may read memory it has not written."""
    return


class Truth(NamedTuple):
    """A model on disk, prompts, and what stock transformers in float32 answers them."""

    folder: str
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]  # of the first token, all of the vocabulary


@pytest.fixture(scope="session")
def truth(tmp_path_factory) -> Truth:
    """64 prompts of 1 to 100 tokens; some repeat themselves, so that n-grams find drafts."""
    torch.set_num_threads(1)
    folder = str(tmp_path_factory.mktemp("model"))
    made = tiny.model()
    tiny.save(made, folder)
    lengths = [1, 2, 3, 5, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100]
    prompts = tiny.prompts(lengths, each=4) + [p * 3 for p in tiny.prompts([7, 25], 4, seed=1)]
    tokens, logprobs = tiny.greedy(made, prompts, tiny.NEW_TOKENS)
    return Truth(folder, made, prompts, tokens, logprobs)
