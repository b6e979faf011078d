"""``sluice bench``: the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sluice import command_options
from sluice.contract.errors import SluiceError

DESCRIPTION = """\
Measure this library beside whatever peers are installed, on a CPU or a GPU. Every output is checked
against the float64 oracle before it is timed; a peer that fails shows its error, never a time.
"""
EXAMPLES = """\
examples:
  sluice bench --quick
  sluice bench decode --batch 1,8,64 --peers onnxruntime
  sluice bench prefill --model qwen3.5-27b --tp 2 --lengths 8192,4x2048 \\
      --peers fla,flashqla,flashinfer
  sluice bench --json new.json --html new.html
  sluice bench --compare old.json new.json --threshold 5

lengths: 8192 (one prompt), 4x2048 (four), 2048+2x512+16x1 (a mix), or a name:
  short, long, longest, many, swarm, ragged, continue
"""
BROKEN = ("wrong", "error")
EAGER_SECONDS = 0.12  # of eager calls on a GPU, per row and provider
QUICK_SECONDS = 80.0  # no workload starts later, so that a busy machine takes two minutes, not four


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the commands of ``sluice``."""
    parser = commands.add_parser(
        "bench",
        help="time every operator beside every peer; tables, JSON, a page",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OPERATOR", help="prefill, decode, ... (default: all)")
    add("--quick", action="store_true", help="a few sizes, short rounds: under two minutes")

    _add_workloads(parser.add_argument_group("what to run"))
    _add_conditions(parser.add_argument_group("how"))
    _add_reports(parser.add_argument_group("reports"))
    parser.set_defaults(command=command)


def _add_workloads(what: Any) -> None:
    what.add_argument("--model", metavar="NAME[,..]", help="shapes of these Qwen models")
    what.add_argument("--tp", metavar="N[,..]", help="as one of N ranks holds them (1)")
    what.add_argument("--lengths", metavar="L[,..]", help="lengths of prompts, see below")
    what.add_argument("--batch", metavar="N[,..]", help="sequences that take one token each")
    what.add_argument("--peers", metavar="NAME[,..]", help="only these; 'none' for sluice alone")
    what.add_argument(
        "--backends",
        metavar="NAME[,..]",
        help="also time these backends of sluice; or 'separate', 'invariant'",
    )
    what.add_argument("--state-dtype", metavar="T[,..]", help="float32, bfloat16 or float16")


def _add_conditions(how: Any) -> None:
    how.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU where there is one)")
    how.add_argument("--dtype", help="of the inputs: float32 on a CPU, bfloat16 on a GPU")
    how.add_argument("--threads", type=int, metavar="N", help="on a CPU (default: all cores)")
    how.add_argument("--rounds", type=int, metavar="N", help="how often each provider is timed (5)")
    how.add_argument("--seconds", type=float, metavar="S", help="how long to time each row")
    how.add_argument("--time-limit", type=float, metavar="S", help="skip what is left after S")
    how.add_argument("--timeout", type=float, metavar="S", help="for one check or compile (300)")
    how.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="each provider in a process of its own (default: on a GPU)",
    )
    how.add_argument("--no-first-call", action="store_true", help="do not measure cold starts")
    how.add_argument(
        "--peer-path",
        action="append",
        default=[],
        metavar="NAME=DIR[:DIR]",
        help="where one peer is found, if not installed",
    )
    how.add_argument("--note", default="", help="a remark to keep with the results")


def _add_reports(out: Any) -> None:
    out.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    out.add_argument("--csv", type=Path, metavar="FILE", help="one line per row")
    out.add_argument("--html", type=Path, metavar="FILE", help="one page with plots")
    out.add_argument("--show", type=Path, metavar="JSON", help="no run: reports of these results")
    out.add_argument("--list", action="store_true", help="no run: the workloads and providers")
    out.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="no run: what got slower; exit status 1 beyond the threshold, 2 if a run was busy or "
        "no row is in both",
    )
    out.add_argument(
        "--threshold", type=float, default=5.0, metavar="PERCENT", help="of --compare (%(default)s)"
    )
    out.add_argument(
        "--update-docs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="no run: write tables of results (.json) into documents (.md), see docs/benchmarks.md",
    )
    out.add_argument(
        "--check-docs", nargs="+", type=Path, metavar="FILE", help="as above, but only check"
    )


def command(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or 1 if something got slower or a document is out of date."""
    if args.compare:
        from sluice.bench import compare

        if not 0 <= args.threshold < float("inf"):
            raise SluiceError(f"--threshold: expected at least 0 percent, got {args.threshold:g}")
        return compare.command(*args.compare, threshold=args.threshold / 100)
    if args.update_docs or args.check_docs:
        from sluice.bench import docs

        return docs.command(args.update_docs or args.check_docs, check=bool(args.check_docs))
    for option in ("json", "csv", "html"):
        path = getattr(args, option)
        if path is not None and path.is_dir():
            raise SluiceError(f"--{option}: expected a file, got the directory {path}")
    if args.show:
        from sluice.bench.results import Results

        results = Results.load(args.show)
    else:
        prepared = _prepare(args)
        if prepared is None:
            return 0
        results = _run(*prepared, args.json)
    from sluice.bench import html, table
    from sluice.bench.results import write

    table.show(results)
    if args.json:
        results.save(args.json)
    if args.csv:
        write(args.csv, results.to_csv())
    if args.html:
        write(args.html, html.page(results))
    wrong = [r for r in results.rows if r.provider.startswith("sluice") and r.status in BROKEN]
    for row in wrong:
        print(f"sluice: {row.workload}: {row.status}: {row.reason}", file=sys.stderr)
    return 1 if wrong else 0


def _run(workloads: list[Any], options: Any, path: Path | None) -> Any:
    """Run, and save results as they come, so that a run cut short is not lost."""
    from sluice.bench.run import run
    from sluice.progress import steps

    keep = None if path is None else lambda results: results.save(path)

    extra = 2 + options.ahead
    if options.first_calls and not options.isolate:
        extra += 2 * len(options.providers)
    with steps(len(workloads) + extra) as say:
        return run(workloads, options, say, keep)


def _prepare(args: argparse.Namespace) -> tuple[list[Any], Any] | None:
    """Workloads and options; None after ``--list``."""
    import torch

    from sluice.bench import machine, plan
    from sluice.bench.run import Options

    _check_numbers(args, machine.cores())
    device = command_options.device(args.device)
    dtype = _dtype(args.dtype) or (torch.float32 if device == "cpu" else torch.bfloat16)
    kind = torch.device(device).type
    wanted = plan.Wanted(
        ops=plan.op_names(args.ops),
        presets=tuple(_split(args.model)),
        tps=tuple(_count(x, "--tp") for x in _split(args.tp)),
        lengths=plan.sizes(args.lengths, "--lengths") if args.lengths else (),
        batches=plan.sizes(args.batch, "--batch") if args.batch else (),
        state_dtypes=tuple(filter(None, (_dtype(x) for x in _split(args.state_dtype)))),
    )
    workloads = plan.workloads(f"{kind}-quick" if args.quick else kind, wanted, dtype)
    providers = _providers(args, kind)
    options = Options(
        device=device,
        dtype=dtype,
        providers=providers,
        threads=args.threads or machine.cores(),
        isolate=(kind == "cuda") if args.isolate is None else args.isolate,
        ahead=kind == "cuda",
        first_calls=not args.no_first_call,
        quick=args.quick,
        time_limit=args.time_limit,
        paths=_paths(args.peer_path),
        note=args.note,
    )
    if args.quick:
        options.rounds, options.seconds, options.most_seconds = 4, 0.4, 2.0
        options.first_ops = ("decode",)
        options.time_limit = args.time_limit or QUICK_SECONDS
    if kind == "cuda":
        options.seconds, options.most_seconds = 0.15 if args.quick else 0.2, 2.0
        options.eager_seconds = EAGER_SECONDS
    for name in ("rounds", "seconds", "timeout"):
        if getattr(args, name) is not None:
            setattr(options, name, getattr(args, name))
    if args.list:
        for workload in workloads:
            print(workload.name)
        print("providers:", ", ".join(providers))
        return None
    return workloads, options


def _check_numbers(args: argparse.Namespace, cores: int) -> None:
    """Refuse counts and seconds that no run can have."""
    if args.threads is not None and not 1 <= args.threads <= cores:
        raise SluiceError(f"--threads: expected 1 to {cores} (cores), got {args.threads}")
    if args.rounds is not None and args.rounds < 1:
        raise SluiceError(f"--rounds: expected at least 1, got {args.rounds}")
    for name in ("seconds", "time_limit", "timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            option = name.replace("_", "-")
            raise SluiceError(f"--{option}: expected more than 0 seconds, got {value:g}")


def _providers(args: argparse.Namespace, kind: str) -> tuple[str, ...]:
    from sluice import dispatch
    from sluice.bench import plan
    from sluice.bench.providers import ALIASES, PEERS, STANDING, VARIANTS, provider

    known = (*PEERS, *ALIASES)
    alone = args.peers is not None and args.peers.strip().lower() in ("none", "")
    if args.peers is None:
        peers = [name for name in PEERS if kind in provider(name).devices]
    elif alone:
        peers = []
    else:
        peers = [plan.nearest("peer", name, known, ALIASES) for name in _split(args.peers)]
    order = (*dispatch.ORDER, *VARIANTS)
    backends = [plan.nearest("backend", name, order) for name in _split(args.backends)]
    narrowed = args.quick or args.ops or args.model or args.tp or args.lengths or args.batch
    if kind == "cuda" and not narrowed and not alone:  # the whole surface
        backends += STANDING
    return tuple(dict.fromkeys(("sluice", *(f"sluice:{b}" for b in backends), *peers)))


def _paths(given: list[str]) -> dict[str, list[str]]:
    from sluice.bench import plan
    from sluice.bench.providers import ALIASES, PEERS

    found: dict[str, list[str]] = {}
    for text in given:
        name, sign, folders = text.partition("=")
        if not sign:
            raise SluiceError(f"--peer-path: expected NAME=DIR, got {text!r}")
        known = plan.nearest("peer", name, (*PEERS, *ALIASES), ALIASES)
        for folder in folders.split(":"):
            if not Path(folder).is_dir():
                raise SluiceError(f"--peer-path: expected a directory, got {folder!r}")
        found[known] = [str(Path(x).resolve()) for x in folders.split(":")]
    return found


def _dtype(name: str | None) -> Any:
    from sluice.bench import plan

    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    known = (*plan.STATE_DTYPES, *short)
    return plan.STATE_DTYPES[plan.nearest("dtype", name, known, short)] if name else None


def _split(text: str | None) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()] if text else []


def _count(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise SluiceError(f"{option}: expected a number of at least 1, got {text!r}")
    return int(text)
