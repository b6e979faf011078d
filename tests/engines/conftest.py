"""Tests with real engines: ``make test-engines`` makes an environment that has them.

Without an engine its files are not collected, so ``make test`` needs none.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.engines import tiny

collect_ignore_glob = [
    f"test_{name}*.py" for name in ("vllm", "sglang") if importlib.util.find_spec(name) is None
]


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """In place of the other tests' fixture: an engine may read memory it has not written."""
    return


@pytest.fixture(scope="session")
def truth(tmp_path_factory) -> tiny.Truth:
    """Prompts, and what stock transformers in float32 answers them."""
    return tiny.known_answers(str(tmp_path_factory.mktemp("model")), seed=0)
