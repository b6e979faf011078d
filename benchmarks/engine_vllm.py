"""Tokens per second of the whole of vLLM on a CPU, with the plug-in and without.

    .venv-engines/bin/python benchmarks/engine_vllm.py [--rounds 2] [--sides off,on] [--keep FILE]

The model has four layers as wide as Qwen3.5-4B's gated delta layers (16 key heads, 32 value heads
of 128), every fourth with full attention, in bfloat16, and with the plug-in in float32 too, which
vLLM's own CPU kernels do not take. Weights are vLLM's dummies: values do not change the time. vLLM
runs without compilation. Each side has processes of its own, in turn; the medians of their runs are
shown. ``--keep`` adds to the runs of an earlier call, so that one call may be short.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PROMPT, NEW, REPEATS = 512, 64, 5
SIDES = {  # plug-in, dtype
    "off": (False, "bfloat16"),
    "on": (True, "bfloat16"),
    "float32": (True, "float32"),
}
SETTINGS = (
    "VLLM_TARGET_DEVICE=cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=WARNING",
    "HF_HUB_OFFLINE=1",
)
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 2048,
    "mamba_ssm_dtype": "float32",
    "torch_dtype": "bfloat16",
}


def measure(folder: str, on: bool, dtype: str) -> dict[str, list[float]]:
    """Seconds of each run: of the prompts' step, and of one decode step on average."""
    from vllm import LLM

    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=8 * PROMPT,
        enable_prefix_caching=False,
        additional_config={"sluice": True} if on else {},
    )
    found: dict[str, list[float]] = {}
    for batch in (1, 8):
        for repeat in range(REPEATS + 1):
            steps = _steps(llm.llm_engine, batch)
            if repeat:  # the first one warms up
                found.setdefault(f"prompt, batch {batch}", []).append(steps[0])
                found.setdefault(f"decode, batch {batch}", []).append(sum(steps[1:]) / NEW)
    return found


def _steps(engine: Any, batch: int) -> list[float]:
    """Seconds of each step of the engine: all prompts, then NEW times one token for each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW + 1, ignore_eos=True, detokenize=False)
    for n in range(batch):
        prompt = [(7 * i + n) % 8000 for i in range(PROMPT)]
        engine.add_request(str(n), {"prompt_token_ids": prompt}, params)
    found = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    if len(found) != NEW + 1:
        sys.exit(f"{len(found)} steps, {NEW + 1} expected")
    return found


def rates(runs: dict[str, list[float]]) -> dict[str, float]:
    """Tokens per second: of prompts, of decode steps, and new tokens of the whole request."""
    made = {}
    for batch in (1, 8):
        prompt, step = (
            statistics.median(runs[f"{x}, batch {batch}"]) for x in ("prompt", "decode")
        )
        made[f"prompt, batch {batch}"] = batch * PROMPT / prompt
        made[f"decode, batch {batch}"] = batch / step
        made[f"both, batch {batch}"] = batch * (NEW + 1) / (prompt + NEW * step)
    return made


def main() -> None:
    """Run both sides in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of all runs so far")
    parser.add_argument("--sides", default=",".join(SIDES), help="which of them to run now")
    parser.add_argument("--side", choices=SIDES, help="used by the script itself")
    parser.add_argument("--folder", help="used by the script itself")
    args = parser.parse_args()
    if args.side:
        print("RESULT " + json.dumps(measure(args.folder, *SIDES[args.side])))
        return
    sides: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    if args.keep and args.keep.exists():
        sides = json.loads(args.keep.read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for _ in range(args.rounds):
            for side in args.sides.split(","):
                for name, seconds in _alone(side, folder).items():
                    sides[side].setdefault(name, []).extend(seconds)
    if args.keep:
        args.keep.write_text(json.dumps(sides))
    if all(sides.values()):
        table(sides)


def _alone(side: str, folder: str) -> dict[str, list[float]]:
    """The runs of one side, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", folder]
    done = subprocess.run(["env", *SETTINGS, *command], capture_output=True, text=True, check=False)
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stdout + done.stderr)
    found: dict[str, list[float]] = json.loads(lines[0][7:])
    return found


def table(sides: dict[str, dict[str, list[float]]]) -> None:
    """Versions, rates, and the seconds they come from."""
    versions = [f"{x} {metadata.version(x)}" for x in ("vllm-cpu", "torch", "numba", "sluice-gdn")]
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    rounds = [len(runs["prompt, batch 1"]) // REPEATS for runs in sides.values()]
    print(f"{', '.join(versions)}, commit {commit}; {_processor()}, {os.cpu_count()} cores")
    off, on, exact = (rates(sides[side]) for side in SIDES)
    print(f"{'tokens per second':<20} {'off':>9} {'on':>9}  on / off  {'float32':>9}")
    for name in off:
        ratio = on[name] / off[name]
        print(f"{name:<20} {off[name]:>9.1f} {on[name]:>9.1f}  {ratio:>8.2f}  {exact[name]:>9.1f}")
    print(f"rounds {rounds}, seconds of each run:", json.dumps(sides))


def _processor() -> str:
    """Its name, where Linux tells it."""
    known = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", known.read_text()) if known.exists() else []
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
