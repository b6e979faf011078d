"""The whole of SGLang with the plug-in gives the tokens of stock transformers, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import tiny
from tests.engines.tiny import NEW_TOKENS, known_answers

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # conv windows are bfloat16 else, in any model
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # else an error takes a minute
}
BLOCK = 64
"""The buffer holds states after a multiple of so many tokens."""


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
def test_prompts_in_chunks_and_prefixes_that_are_found(tmp_path, monkeypatch, strategy):
    """Reliability row 35. 64 prompts, eight at once; prompts that begin alike; texts that go on
    from those and their answers. Without the buffer SGLang keeps states where a request stops.
    """
    truth = known_answers(str(tmp_path), seed=0)
    _name_the_interval(tmp_path / "config.json")
    heads, tails = tiny.prompts([BLOCK + 10], each=3, seed=2), tiny.prompts([1, 33], each=2, seed=3)
    alike = [head + tail for tail in tails for head in heads]
    alike_wanted, _ = tiny.greedy(truth.model, alike, NEW_TOKENS)
    more = tiny.prompts([1, 5, 40], each=4, seed=4)
    on = [a + b + c for a, b, c in zip(alike, alike_wanted, more, strict=True)]
    on_wanted, _ = tiny.greedy(truth.model, on, NEW_TOKENS)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    options = {"chunked_prefill_size": 128, "max_running_requests": 8}
    options["mamba_radix_cache_strategy"] = strategy
    answered = _run(tmp_path, truth.folder, options, [truth.prompts, alike, on])
    for found, wanted in zip(answered, [truth.tokens, alike_wanted, on_wanted], strict=True):
        assert [tokens for tokens, _ in found] == wanted
    cached = [[n for _, n in found] for found in answered]
    assert any(n >= BLOCK for n in cached[1]) == (strategy == "extra_buffer")
    assert all(n >= BLOCK for n in cached[2]), cached[2]


def _name_the_interval(config: Path) -> None:
    """As published models do: SGLang reads it, and transformers does not write it any more."""
    interval = {"full_attention_interval": tiny.CONFIG["full_attention_interval"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **interval}))


def _run(folder: Path, model: str, options: dict, rounds: list) -> list:
    file = folder / "asked.json"
    asked = {"folder": model, "options": options, "rounds": rounds, "new": NEW_TOKENS}
    file.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.engines.sglang_engine", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sluice: serves decode and extend of gated delta layers" in done.stderr + done.stdout
    return json.loads(file.read_text())
