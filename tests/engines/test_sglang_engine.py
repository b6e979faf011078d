"""The whole of SGLang with the plug-in gives the tokens of stock transformers, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import tiny
from tests.engines.sglang_log import ASKED, READY
from tests.engines.tiny import NEW_TOKENS, known_answers

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # conv windows are bfloat16 else, in any model
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # else an error takes a minute
}
BLOCK = 64
"""The buffer holds states after a multiple of so many tokens."""


@pytest.fixture
def truth(tmp_path) -> tiny.Truth:
    """Its configuration names the interval: published ones do, transformers no longer does."""
    made = known_answers(str(tmp_path), seed=0)
    tiny.add_drafter(made)
    config = tmp_path / "config.json"
    interval = {"full_attention_interval": tiny.CONFIG["full_attention_interval"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **interval}))
    return made


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
def test_prompts_in_chunks_and_prefixes_that_are_found(truth, monkeypatch, strategy):
    """Reliability row 35. 64 prompts, eight at once; prompts that begin alike; texts that go on
    from those and their answers. Without the buffer SGLang keeps states where a chunk stops.
    """
    heads, tails = tiny.prompts([BLOCK + 10], each=3, seed=2), tiny.prompts([1, 33], each=2, seed=3)
    alike = [head + tail for tail in tails for head in heads]
    alike_wanted, _ = tiny.greedy(truth.model, alike, NEW_TOKENS)
    more = tiny.prompts([1, 5, 40], each=4, seed=4)
    on = [a + b + c for a, b, c in zip(alike, alike_wanted, more, strict=True)]
    on_wanted, _ = tiny.greedy(truth.model, on, NEW_TOKENS)
    options = {"chunked_prefill_size": 128, "mamba_radix_cache_strategy": strategy}
    kinds = "decode and extend"
    answers = _run(monkeypatch, truth.folder, kinds, [truth.prompts, alike, on], **options)
    for found, wanted in zip(answers, [truth.tokens, alike_wanted, on_wanted], strict=True):
        assert [answer["tokens"] for answer in found] == wanted
    for found in answers[1:]:
        assert any(answer["cached_tokens"] >= BLOCK for answer in found)


def test_drafts_of_the_models_own_layer(truth, monkeypatch):
    """Reliability rows 34 and 35. Verified without writing a state, committed for all layers; the
    states that the radix cache keeps of some texts are from among the drafts.
    """
    options = {
        "attention_backend": "triton",  # the plain one has no drafts
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": BLOCK,
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    kinds = "decode, extend and draft tokens"
    prompts = tiny.prompts([BLOCK - 6, BLOCK - 4], each=4, seed=9)
    answers, _ = tiny.greedy(truth.model, prompts, NEW_TOKENS)
    tails = tiny.prompts([3, 20], each=4, seed=10)
    on = [a + b + c for a, b, c in zip(prompts, answers, tails, strict=True)]
    on_answers, _ = tiny.greedy(truth.model, on, NEW_TOKENS)
    rounds = _run(monkeypatch, truth.folder, kinds, [truth.prompts[:16], prompts, on], **options)
    for found, wanted in zip(rounds, [truth.tokens[:16], answers, on_answers], strict=True):
        assert [answer["tokens"] for answer in found] == wanted
    assert all(answer["cached_tokens"] >= BLOCK for answer in rounds[2])
    found = rounds[0]
    steps = sum(answer["spec_verify_ct"] for answer in found)
    assert NEW_TOKENS / 4 * len(found) < steps < (NEW_TOKENS - 1) * len(found)


def test_unified_memory(truth, monkeypatch):
    """One buffer for keys, values and the states of all layers, with the radix cache."""
    options = {"enable_unified_memory": True, "attention_backend": "triton"}
    options |= {"chunked_prefill_size": 128}
    (found,) = _run(
        monkeypatch,
        truth.folder,
        "decode and extend",
        [truth.prompts[:24]],
        said="UNIFIED MEMORY POOL ENABLED -- path=Mamba hybrid",
        **options,
    )
    assert [answer["tokens"] for answer in found] == truth.tokens[:24]


def _run(
    monkeypatch, folder: str, kinds: str, rounds: list, said: str = "", **options
) -> list[list[dict]]:
    """What the engine answers to each round of prompts, and what it says of each answer.

    Its log says what is served, and ``said``. No request compiles a kernel (reliability row 10).
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    file = Path(folder) / "asked.json"
    asked = {"folder": folder, "rounds": rounds, "new": NEW_TOKENS}
    file.write_text(json.dumps({**asked, "options": {"max_running_requests": 8, **options}}))
    command = [sys.executable, "-m", "tests.engines.sglang_engine", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log = done.stderr + done.stdout
    assert f"sluice: serves {kinds} of gated delta layers" in log
    assert said in log
    assert "SGLang's own kernels serve" not in log
    start, *requests = done.stderr.split(ASKED)
    assert f"{READY} prefill" in start
    assert len(requests) == len(rounds)
    assert READY not in "".join(requests), "a request has waited for a compiler"
    return json.loads(file.read_text())
