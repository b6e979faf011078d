"""vLLM's own gated delta layer on a GPU: its kernels against the plug-in, on the same pages.

    PYTHONPATH=src python benchmarks/gpu_vllm.py --vllm DIR [--flashinfer DIR[:DIR]]

The layer, its configuration, its metadata builder and its forward context are vLLM's. No model and
no engine is loaded, and none of vLLM's compiled ops is needed: the layer's own kernels are Triton's
and FlashInfer's. ``tools/pack_vllm.py`` makes DIR; without ``--vllm``, an installed vLLM is used.
The shape is Qwen3-Next's: hidden 2,048, 16 key and 32 value heads of 128, bfloat16, float32 states,
one page for both states, padded to an attention page. vLLM runs without torch.compile.

Each row is checked first: outputs and states of each side against each other and against the
float64 oracle. Then both are timed in turns, whole layers and the "core", which is the same
``forward`` with the three projections replaced by their results: everything between them, norm
included. "eager" is the host and the device together; "graph" is a replay of a CUDA graph. vLLM's
layer cannot be captured with a prompt, because it indexes states by a mask; there "device" is the
sum of its kernels' times. ``--device cpu`` runs the checks in miniature in Triton's interpreter:

    TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= PYTHONPATH=src python benchmarks/gpu_vllm.py \
        --vllm DIR --device cpu
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--vllm", help="folder with vLLM's Python files and what they import")
    parser.add_argument("--flashinfer", help="folders with FlashInfer, with colons between them")
    parser.add_argument("--rows", help="some rows, with commas between them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--helpers", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile-limit", type=float, default=70.0, help="seconds of helpers")
    parser.add_argument("--time-limit", type=float, default=140.0, help="no new row after this")
    parser.add_argument("--no-oracle", action="store_true", help="compare the sides alone")
    parser.add_argument("--json", type=Path, help="file for every number")
    parser.add_argument("--share", help="used by the script itself")
    return parser.parse_args()


def start_helpers(args: argparse.Namespace, folder: str) -> list[subprocess.Popen[bytes]]:
    """Processes that compile into Triton's cache what this one will need, each with a log."""
    options = {"--vllm": args.vllm, "--rows": args.rows}
    given = [x for option in options.items() if option[1] for x in option]
    command = [sys.executable, __file__, *given]
    made = []
    for n in range(args.helpers):
        with Path(folder, str(n)).open("wb") as log:
            share = [*command, "--share", f"{n}/{args.helpers}"]
            made.append(subprocess.Popen(share, stdout=log, stderr=subprocess.STDOUT))
    return made


def wait_for(helpers: list[subprocess.Popen[bytes]], folder: str, seconds: float) -> Iterator[str]:
    """What went wrong with them, in words."""
    end = time.perf_counter() + seconds
    for n, helper in enumerate(helpers):
        try:
            code = f"ended with {helper.wait(max(0.1, end - time.perf_counter()))}"
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()
            code = "was still compiling"
        said = Path(folder, str(n)).read_text("utf-8", "replace")
        if code != "ended with 0" or "FAILED" in said:
            yield f"helper {n} {code}; it said: {said[-2500:]}"


def main() -> None:
    """Paths first: vLLM's folder may bring another release of a package that torch imports."""
    args = arguments()
    if args.vllm:
        sys.path.insert(0, args.vllm)
    logs = tempfile.mkdtemp()
    helpers = [] if args.device == "cpu" or args.share else start_helpers(args, logs)

    import torch
    import vllm_compare
    from vllm_layer import load_vllm, rows_of, say, start_one_rank

    load_vllm(args.device)
    start_one_rank()
    from sluice.integrations.vllm import register

    register()
    say("vLLM is ready")
    rows = rows_of(args.device, args.rows)
    with torch.inference_mode():
        if args.share:
            share, of = (int(x) for x in args.share.split("/"))
            vllm_compare.compile_share(rows, share, of, args.device)
            return
        if args.flashinfer:  # its kernels stay in the process that compiles them
            sys.path.extend(args.flashinfer.split(":"))  # after vLLM: it looks what FlashInfer has
            prompts = {n: r for n, r in rows.items() if r.kind == "prefill"}
            vllm_compare.once("vLLM FlashInfer", prompts, args.device)
        for text in wait_for(helpers, logs, args.compile_limit):
            say(text)
        say("compiled")
        results = vllm_compare.run_all(rows, args)
    if args.json:
        from sluice.bench.machine import conditions

        about = conditions(torch.device(args.device), 1)
        args.json.write_text(json.dumps({"conditions": about, "rows": results}, indent=1), "utf-8")
    vllm_compare.table(results)


if __name__ == "__main__":
    main()
