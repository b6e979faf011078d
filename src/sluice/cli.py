"""The commands: ``sluice demo``, ``bench``, ``doctor``, ``warmup``, ``export``, ``--version``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sluice
from sluice import command_options, progress
from sluice.bench.command import add_parser as add_bench
from sluice.contract.errors import SluiceError
from sluice.layers.qwen import QwenShape, from_config

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, or 1 if outputs disagree, or 2 if it cannot be done."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # with the usage of the command that was asked for
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int = args.command(args)
    except SluiceError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sluice: interrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice", description="Gated-delta-network operators: try, time and inspect them."
    )
    parser.add_argument("--version", action="version", version=f"sluice {sluice.__version__}")
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_demo, _add_doctor, _add_warmup, _add_export, add_bench):
        add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="a Qwen3.5-shaped model, stock transformers and sluice side by side",
        description="Run one hybrid model with transformers' own layers and with sluice's, check "
        "that the outputs agree, then time both. Exit status 1 if they do not agree.",
    )
    which = "a Qwen model, for its gated delta heads, or a checkpoint directory (%(default)s)"
    demo.add_argument("--model", default="Qwen3.5-4B", metavar="NAME|PATH", help=which)
    for name, kind, default, text in (
        ("--batch", _count, 8, "prompts at once (%(default)s)"),
        ("--prompt-length", _count, 256, "tokens of each prompt (%(default)s)"),
        ("--tokens", _count, 32, "tokens to decode (%(default)s)"),
        ("--layers", _layers, 4, "layers, unless --model is a checkpoint (%(default)s)"),
        ("--rounds", _count, 3, "timed runs of each (%(default)s)"),
    ):
        demo.add_argument(name, type=kind, default=default, metavar="N", help=text)
    demo.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (%(default)s)")
    demo.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, else bfloat16")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    demo.set_defaults(command=_demo)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="this machine, and which backend serves each operator of each Qwen model",
        description="Print the machine, the versions, and which backend serves each operator.",
    )
    doctor.add_argument("--device", help="cpu or cuda (default: the GPU where there is one)")
    doctor.set_defaults(command=_doctor)


def _add_warmup(commands: Any) -> None:
    warmup = commands.add_parser(
        "warmup",
        help="compile everything a model needs, so that no request has to wait",
        description="Run every operator once in each form that a model's layers call it in.",
    )
    which = "a Qwen model, or a checkpoint directory (%(default)s)"
    warmup.add_argument("--model", default="Qwen3.5-4B", metavar="NAME|PATH", help=which)
    warmup.add_argument("--tp", type=_count, default=1, metavar="N", help="tensor-parallel ranks")
    warmup.add_argument("--device", help="cpu or cuda (default: the GPU where there is one)")
    warmup.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    warmup.add_argument("--gate-dtype", choices=DTYPES, help="of A_log and dt_bias (as --dtype)")
    warmup.add_argument("--state-dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    warmup.add_argument("--state-layout", choices=("vk", "kv"), default="vk", help="(%(default)s)")
    warmup.add_argument(
        "--slots-dtype", choices=("int64", "int32"), default="int64", help="(int64)"
    )
    tokens = "also for T tokens per row: one and its drafts, as engines keep them (none)"
    warmup.add_argument("--drafts", type=_count, default=0, metavar="T", help=tokens)
    warmup.add_argument("--checkpoints", action="store_true", help="also what prefix caching needs")
    warmup.set_defaults(command=_warmup)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="a checkpoint as an ONNX file, checked against PyTorch",
        description="Write a causal language model as one ONNX graph for prefill and decode. "
        "The file is removed if ONNX Runtime computes other results from it than PyTorch.",
    )
    export.add_argument("--model", type=Path, required=True, metavar="PATH", help="a checkpoint")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="model.onnx")
    export.add_argument(
        "--target",
        choices=("ort", "onnx"),
        default="ort",
        help="ort: ONNX Runtime's own operators; onnx: standard ones only (%(default)s)",
    )
    kinds = ("float32", "float16")
    export.add_argument("--dtype", choices=kinds, default="float32", help="(%(default)s)")
    export.add_argument(
        "--external-data", action="store_true", help="weights in FILE.data (above 2 GB always)"
    )
    export.set_defaults(command=_export)


def _demo(args: argparse.Namespace) -> int:
    import torch

    from sluice import demo

    command_options.device(args.device)
    command_options.new_file("--json", args.json)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    options = demo.Options(
        model=args.model,
        batch=args.batch,
        prompt_length=args.prompt_length,
        tokens=args.tokens,
        rounds=args.rounds,
        layers=args.layers,
        device=args.device,
        dtype=getattr(torch, dtype),
    )
    result = demo.run(options, progress.steps)
    print(f"{result.model}, {dtype}, on {result.machine['device']}", end="")
    print(f" ({result.machine['threads']} threads)" if args.device == "cpu" else "")
    for note in result.notes:
        print(f"  {note}")
    served = ", ".join(f"{op} {backend}" for op, backend in result.backends.items())
    print(f"  served by: {served}\n")
    print(result.agreement())
    if result.agree:
        print(f"\n{result.table()}\n")
        versions = f"transformers {result.machine['transformers']}, torch {result.machine['torch']}"
        print(f"Medians of {args.rounds} interleaved rounds; {versions}.")
        if result.busy:
            took = f"other programs took {result.others:.0%} of the cores"
            print(f"BUSY: {took}; times are not reliable.")
    numbers, agree = result.to_json(), result.agree
    if agree and args.device == "cpu" and args.dtype is None:
        half = demo.run(replace(options, dtype=torch.bfloat16, rounds=1), progress.steps)
        print(half.line())
        numbers["bfloat16"], agree = half.to_json(), half.agree
    if args.json is not None:
        _write(args.json, json.dumps(numbers, indent=2) + "\n")
    return 0 if agree else 1


def _doctor(args: argparse.Namespace) -> int:
    print(sluice.doctor(command_options.device(args.device)))
    from sluice.integrations import engines

    if found := list(engines.describe()):
        print("\nEngines with a plug-in", *found, sep="\n")
    return 0


def _warmup(args: argparse.Namespace) -> int:
    import torch

    from sluice.model_calls import Kinds, ModelCall
    from sluice.warmup import compile_aside, forms, run

    begin = time.perf_counter()
    model = _shape(args.model, args.tp)
    dtypes = (args.dtype, args.gate_dtype or args.dtype, args.state_dtype, args.slots_dtype)
    dtype, gates, state, slots = (getattr(torch, name) for name in dtypes)
    kinds = Kinds(dtype, gates, state, args.state_layout, slots)

    def make() -> tuple[list[ModelCall], torch.device]:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        more = (args.drafts, args.checkpoints)
        return list(forms(model, args.tp, device, kinds, *more)), device

    others = [] if args.device == "cpu" else compile_aside(make)
    command_options.device(args.device)
    todo, device = make()
    others = others if device.type == "cuda" else []  # without a GPU they have ended already
    with progress.counted() as show:
        served = run(todo, device, show, others)
    backends = sorted({backend for _, backend in served})
    seconds = time.perf_counter() - begin
    print(
        f"the kernels of {len(served)} calls are ready after {seconds:.1f} s: {', '.join(backends)}"
    )
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from sluice import demo
    from sluice.integrations.onnx.export import STEPS, export, need

    need("transformers", "onnx", "onnxscript", "onnxruntime")
    if not (args.model / "config.json").is_file():
        raise SluiceError(f"--model: expected a directory with config.json, got {args.model}")
    command_options.new_file("--out", args.out)
    begin = time.perf_counter()
    with progress.steps(1 + STEPS) as step:
        step("loading the model")
        model, _, notes = demo.load(
            demo.Options(model=str(args.model), dtype=getattr(torch, args.dtype))
        )
        made = export(
            model,
            args.out,
            target=args.target,
            external_data=args.external_data,
            progress=step,
        )
    seconds, size = time.perf_counter() - begin, made.bytes / 2**20
    weights = f" and {args.out.name}.data" if made.external_data else ""
    print(f"{notes[0]}: {args.out}{weights}, {size:.1f} MiB of {args.dtype} weights")
    print(f"  {len(made.inputs) - 1} states, each an input past.* and an output present.*")
    print(f"  checked: largest relative error against PyTorch {made.error:.1e}, {seconds:.0f} s")
    return 0


def _shape(model: str, tp: int) -> QwenShape | str:
    """The shape of a checkpoint directory, one rank's; a name stays a name."""
    config = Path(model) / "config.json"
    if not config.is_file():
        if Path(model).is_dir():
            raise SluiceError(f"--model: expected a directory with config.json, got {model}")
        return model
    try:
        return from_config(json.loads(config.read_text())).shard(tp)
    except (ValueError, OSError) as error:
        raise SluiceError(f"--model: cannot read {config}: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SluiceError(f"--json: cannot write {path}: {error.strerror}") from error


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _layers(text: str) -> int:
    if not text.isdigit() or int(text) < 4:
        expected = "at least 4 layers, the fourth of which has full attention"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
