"""Two sides of vLLM's gated delta layer: their distance from each other, and their times.

``gpu_vllm.py`` uses it.
"""
# ruff: noqa: T201

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from vllm_layer import DRAFTS, STARTED, Batch, Row, Side, batch_of, failed, fill, say

from sluice.integrations.vllm import report
from sluice.testing import oracle
from sluice.testing.compare import relative_error

BOUND = 0.02
"""Of the relative distance of two 16-bit computations of one layer."""
ROUNDS, ROUND_MS = 7, 8.0


# ------------------------------------------------------------------------------------------ checks


def check(sides: list[Side], batch: Batch, oracle: bool) -> dict[str, float]:
    """Relative distances; pages of every side are what they were before."""
    before = sides[0].raw.clone()
    rows = batch.table.flatten().long()
    found: dict[str, Any] = {}
    for side in sides:
        with side.context(batch.metadata(side), len(batch.hidden)):
            y = side.layer(batch.hidden)
            pages = side.conv[batch.table[:, 0].long()].clone(), side.state[rows].clone()
            side.raw.copy_(before)
            qkvz, ba = projected(side, batch)
            with side.core_alone(qkvz, ba):
                core = side.layer(batch.hidden).clone()
            side.raw.copy_(before)
        found[side.name] = (y, core, *pages)
    parts = ("layer", "core", "window", "state")
    errors = {}
    ours = found.get("sluice")
    for name, theirs in found.items():
        if ours is not None and name != "sluice":
            for part, a, b in zip(parts, ours, theirs, strict=True):
                errors[f"sluice against {name}, {part}"] = relative_error(a, b)
    if oracle:
        exact = exact_core(sides[0], batch)
        exact = (exact[0], exact[1][batch.table[:, 0].long()], exact[2][rows])
        for name, (_, *got) in found.items():
            for part, a, b in zip(parts[1:], got, exact, strict=True):
                errors[f"{name} against float64, {part}"] = relative_error(a.reshape(b.shape), b)
    del before
    if sides[0].device.type == "cuda":
        torch.cuda.synchronize()
    for what, error in errors.items():
        say(f"    {what}: {error:.2e}{'' if error < BOUND else '  TOO LARGE'}")
    return errors


def projected(side: Side, batch: Batch) -> tuple[Any, Any]:
    return tuple(side.projections[n](batch.hidden)[0] for n in ("in_proj_qkvz", "in_proj_ba"))  # type: ignore[return-value]


def exact_core(side: Side, batch: Batch) -> tuple[Any, Any, Any]:
    """The oracle's core output and both pools, from the pages as they are."""
    layer, row = side.layer, batch.row
    HK, HV, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    qkvz, ba = projected(side, batch)
    heads = {"Hk": HK, "Hv": HV, "K": K, "V": V}
    qkv, z, b, a = oracle.split_projections(qkvz, ba, order="interleaved", **heads)
    first = batch.table[:, 0]
    borders = torch.arange(row.N + 1, device=side.device, dtype=torch.int32) * row.T
    where: dict[str, Any] = {"slots": first, "pad_slot": 0, "cu_seqlens": borders}
    conv, state = side.conv.transpose(1, 2), dict(where)
    if row.kind == "drafts":
        kept = (batch.accepted.long() - 1)[:, None]
        where["window_start"] = batch.accepted - 1
        state |= {"slots": batch.table.gather(1, kept)[:, 0], "write_slots": batch.table}
    else:
        known = torch.tensor(batch.has_state(), device=side.device)
        where["has_state"] = state["has_state"] = known
    tokens, window = oracle.conv_qkv(
        qkv, layer.conv1d.weight.squeeze(1), num_k_heads=HK, num_v_heads=HV, head_k_dim=K,
        head_v_dim=V, a=a, b=b, A_log=layer.A_log, dt_bias=layer.dt_bias, state=conv, **where,
    )  # fmt: skip
    o, after = oracle.delta(*tokens, state=side.state, **state)
    gate = z.reshape(o.shape)
    y = oracle.rms_norm_gated(o, gate, layer.norm.weight, eps=layer.norm.eps)
    return y.flatten(-2), window.transpose(1, 2), after


# ------------------------------------------------------------------------------------------ timing


def microseconds(run: Callable[[], Any], calls: int) -> float:
    """Of one call, between two events around many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / calls


def in_turns(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of rounds of about 8 ms, the ways in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        microseconds(run, 3)
    calls = {
        n: max(2, min(400, int(ROUND_MS * 1000 / microseconds(f, 3)))) for n, f in ways.items()
    }
    for _ in range(ROUNDS):
        for name, run in ways.items():
            times[name].append(microseconds(run, calls[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def captured(run: Callable[[], Any], calls: int) -> tuple[Any, int]:
    """A graph of several calls, and how many: a replay is then longer than its launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph, calls


def kernel_time(run: Callable[[], Any], calls: int = 5) -> float:
    """Microseconds of all kernels of one call, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    kernels = [e for e in traced.key_averages() if e.device_type == DeviceType.CUDA]
    return sum(kernel.self_device_time_total for kernel in kernels) / calls


def kernel_times(sides: list[Side], batch: Batch) -> dict[str, dict[str, float]]:
    """Of the core. Asked after everything else: a profiler may slow later launches down."""
    with contextlib.ExitStack() as scope:
        runs = {side.name: _caller(side, batch.metadata(side), batch) for side in sides}
        for side in sides:
            scope.enter_context(side.core_alone(*projected(side, batch)))
        found = _each(runs, kernel_time)
    say(f"    device core: {_shown(found)}")
    return {"device core": found}


def measure(sides: list[Side], batch: Batch) -> dict[str, dict[str, float]]:
    """By way of running and part of the layer: the time of each side."""
    found: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as scope:
        kept = [batch.metadata(side) for side in sides]
        runs = {
            side.name: _caller(side, metadata, batch)
            for side, metadata in zip(sides, kept, strict=True)
        }
        for part in ("layer", "core"):
            if part == "core":
                for side in sides:
                    scope.enter_context(side.core_alone(*projected(side, batch)))
            found[f"eager {part}"] = in_turns(runs)
            say(f"    eager {part}: {_shown(found[f'eager {part}'])}")
            may = {n: r for n, r in runs.items() if batch.row.kind != "prefill" or n == "sluice"}
            calls = 2 if batch.row.kind == "prefill" else 10
            graphs = _each(may, lambda run, calls=calls: captured(run, calls))
            replays = {n: g[0].replay for n, g in graphs.items()}
            found[f"graph {part}"] = {n: t / calls for n, t in in_turns(replays).items()}
            say(f"    graph {part}: {_shown(found[f'graph {part}'])}")
            del graphs, replays
            torch.cuda.empty_cache()
    return found


def _caller(side: Side, metadata: Any, batch: Batch) -> Callable[[], Any]:
    """The layer's forward inside vLLM's forward context, which stays the same for many calls."""
    from vllm import forward_context

    with side.context(metadata, len(batch.hidden)):
        inside = forward_context.get_forward_context()
    layer, hidden = side.layer, batch.hidden

    def run() -> Any:
        forward_context._forward_context = inside
        return layer(hidden)

    return run


def _each(runs: dict[str, Any], what: Callable[[Any], Any]) -> dict[str, Any]:
    """``what`` of each side that does not fail."""
    made = {}
    for name, run in runs.items():
        try:
            made[name] = what(run)
        except Exception:
            failed(name)
    return made


def _shown(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {t:.1f} us" for name, t in times.items())


# ------------------------------------------------------------------------------ compiling together


def tune_a_share(share: int, of: int) -> None:
    """Let Triton's tuner compile this share of its configurations and measure none."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **options: Any) -> Any:
        for config in self.configs[share::of]:
            with contextlib.suppress(Exception):  # too large for this GPU: the tuner skips it too
                self.fn.run(*args, **options, **config.all_kwargs())

    Autotuner.run = run


def compile_share(rows: dict[str, Row], share: int, of: int, device: str) -> None:
    """Every n-th row of the plug-in, and a share of what vLLM tunes for prompts."""
    once("sluice", dict(list(rows.items())[share::of]), device)
    tune_a_share(share, of)
    once("vLLM", dict([(n, r) for n, r in rows.items() if r.kind == "prefill"][:1]), device)


def once(name: str, rows: dict[str, Row], device: str) -> None:
    """One call of each row."""
    for title, row in rows.items():
        pages = 1 + row.pages
        try:
            side = Side(name, DRAFTS if row.kind == "drafts" else 0, pages, device)
            fill([side])
            batch = batch_of(row, side, pages)
            with side.context(batch.metadata(side), len(batch.hidden)):
                side.layer(batch.hidden)
            say(f"compiled {title}, {name}")
        except Exception:
            failed(f"{title}, {name}")


# ------------------------------------------------------------------------------------------- table


def table(results: dict[str, Any]) -> None:
    """One line for each row and each side of vLLM's."""
    ways = ("eager core", "eager layer", "graph core", "graph layer", "device core")
    print(f"\n{'microseconds':<32}" + "".join(f"{w:>26}" for w in ways) + f"{'core error':>20}")
    print(f"{'':<32}" + f"{'vLLM':>10}{'sluice':>9}{'x':>7}" * len(ways) + f"{'vLLM, sluice':>20}")
    for name, found in results.items():
        times, errors = found.get("times", {}), found.get("errors", {})
        for side in found.get("sides", []):
            line = f"{name + ', ' + side:<32}"
            for way in ways:
                a, b = (times.get(way, {}).get(n) for n in (side, "sluice"))
                line += f"{a:10.1f}" if a else f"{'-':>10}"
                line += f"{b:9.1f}" if b else f"{'-':>9}"
                line += f"{a / b:7.2f}" if a and b else f"{'-':>7}"
            both = (errors.get(f"{n} against float64, core") for n in (side, "sluice"))
            line += "  " + ", ".join("-" if e is None else f"{e:.1e}" for e in both)
            worst = max((e for w, e in errors.items() if w.startswith("sluice")), default=0.0)
            print(line + ("" if worst < BOUND else f"  DISAGREES {worst:.1e}"))
        if not found.get("sides"):
            print(f"{name:<32}  failed: see above")


# ---------------------------------------------------------------------------------------- all rows


def sides_of(drafts: int, pages: int, args: Any) -> list[Side]:
    names = ["vLLM", "sluice"]
    if args.flashinfer and not drafts:
        names.insert(1, "vLLM FlashInfer")
    made = _each({n: n for n in names}, lambda n: Side(n, drafts, pages, args.device))
    fill(list(made.values()))
    return list(made.values())


Later = list[tuple[dict[str, Any], list[Side], Batch]]


def one_row(name: str, row: Row, sides: list[Side], args: Any, later: Later) -> dict[str, Any]:
    say(name)
    if row.kind != "prefill":
        sides = [s for s in sides if s.name != "vLLM FlashInfer"]
    batch = batch_of(row, sides[0], len(sides[0].conv))
    able = []
    for side in sides:
        try:
            with side.context(batch.metadata(side), len(batch.hidden)):
                side.layer(batch.hidden)
            able.append(side)
        except Exception:
            failed(f"{name}, {side.name}")
    say(f"    ran: {', '.join(s.name for s in able)}")
    if not able:
        return {}
    for side in able[1:]:
        side.raw.copy_(able[0].raw)
    found: dict[str, Any] = {"sides": [s.name for s in able if s.name != "sluice"]}
    report.calls.clear()
    try:
        found["errors"] = check(able, batch, not args.no_oracle)
    except Exception:
        failed(f"{name}, check")
    found["served"] = dict(report.calls)
    say(f"    the plug-in served: {found['served']}")
    if args.device == "cuda":
        try:
            found["times"] = measure(able, batch)
            if row.kind == "prefill":
                later.append((found["times"], able, batch))
        except Exception:
            failed(f"{name}, times")
    return found


def run_all(asked: dict[str, Row], args: Any) -> dict[str, Any]:
    """Check and time each row; ``args`` are the script's."""
    results: dict[str, Any] = {}
    later: Later = []
    for drafts in (0, DRAFTS):
        rows = {n: r for n, r in asked.items() if (r.kind == "drafts") == bool(drafts)}
        if not rows:
            continue
        results |= {name: {} for name in rows}
        pages = 1 + max(r.pages for r in rows.values())
        try:
            sides = sides_of(drafts, pages, args)
        except Exception:
            failed("layers")
            continue
        say(f"layers and {pages} pages of {sides[0].raw.numel() // pages} bytes for each side")
        for name, row in rows.items():
            if time.perf_counter() - STARTED > args.time_limit:
                say(f"no time for {name}")
                continue
            try:
                results[name] = one_row(name, row, sides, args, later)
            except Exception:
                failed(name)
    for times, sides, batch in later:
        if time.perf_counter() - STARTED < args.time_limit + 15:
            try:
                times |= kernel_times(sides, batch)
            except Exception:
                failed(f"the profiler, {batch.row}")
    return results
