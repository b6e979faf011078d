"""The report in a terminal: a table per operator, missing providers, and the conditions."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any, TextIO

from sluice.bench.results import (
    FEWEST,
    Results,
    Row,
    by_workload,
    microseconds,
    rank_note,
    rate,
    raw_note,
)
from sluice.neighbours import BUSY

HEAD = ("workload", "provider", "µs", "p10-p90", "rate", "of floor", "sluice is", "error", "how")
EAGER = ("host µs", "eager µs")  # after the times, where eager calls were timed
RIGHT = ("µs", "p10-p90", *EAGER, "rate", "of floor", "error")
EAGER_NOTE = (
    "µs is the time of a replayed graph, without the host; an eager call returns after host µs; "
    "eager µs is the wall time per call of eager calls in a row, until every result is there"
)
ABOVE_FLOOR = (
    "of floor: the time of a plain copy or product of that size, measured here, over the row's; "
    "above 100% a kernel beats that copy, for instance because part of its data is in a cache"
)
SYMBOLS = {"refused": "-", "wrong": "WRONG", "error": "ERROR", "skipped": "skipped"}


def head(results: Results) -> tuple[str, ...]:
    """The names of the columns."""
    return (*HEAD[:4], *(EAGER if results.has_eager else ()), *HEAD[4:])


def lines(results: Results) -> dict[str, list[tuple[str, ...]]]:
    """For each operator and model, rows of cells; the first row of a workload names it."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for workload, rows in by_workload(results):
        heads = "/".join(map(str, workload["heads"]))
        types = workload["dtype"]
        if workload["state_dtype"] != types:
            types += f", {workload['state_dtype']} state"
        types += raw_note(workload)
        where = f"{workload['model']}{rank_note(workload)}"
        title = f"{workload['op']}, {where} (heads {heads}, {types})"
        ours = next((r for r in rows if r.provider == "sluice" and r.ok), None)
        served = [r for r in rows if r.status not in ("refused", "skipped")]
        if not served:
            continue
        cells = tables.setdefault(title, [])
        shown = sorted(served, key=lambda r: (not r.ok, r.median_s or 0.0))
        for n, row in enumerate(shown):
            first = workload["size"] if n == 0 else ""
            cells.append((first, *_cells(row, workload, ours, results.has_eager)))
    return tables


def _cells(
    row: Row, workload: dict[str, Any], ours: Row | None, with_eager: bool
) -> tuple[str, ...]:
    name = f"{row.provider} ({row.detail})" if row.detail else row.provider
    if not row.ok or row.median_s is None:
        blank = [""] * (7 if with_eager else 5)
        return name, SYMBOLS.get(row.status, row.status), *blank, row.reason
    share = "-" if row.share is None else f"{row.share:.0%}"
    error = "-" if row.error is None else f"{row.error:.0e}"
    few = f", {row.samples} samples" if row.samples < FEWEST else ""
    spread = f"{microseconds(row.p10_s)}-{microseconds(row.p90_s)}"
    times = (microseconds(row.median_s), spread, *(eager(row) if with_eager else ()))
    work = rate(workload, row.median_s)
    return name, *times, work, share, ratio(row, ours), error, row.method + few


def eager(row: Row) -> tuple[str, str]:
    """Microseconds of an eager call: of the host, and by the wall clock."""
    host, wall = (None if x is None else x.median_s for x in (row.host, row.eager))
    return microseconds(host), microseconds(wall)


def ratio(row: Row, ours: Row | None) -> str:
    """How much faster sluice is than this row: "2.10x faster", "1.25x slower"."""
    if ours is None or row is ours or not row.median_s or not ours.median_s:
        return ""
    return times_faster(row.median_s, ours.median_s)


def times_faster(theirs: float, ours: float) -> str:
    """How our time compares with theirs; with three digits where two would be zeros.

    >>> times_faster(2.1, 1.0), times_faster(1.0, 1.25), times_faster(1.0, 1.003)
    ('2.10x faster', '1.25x slower', '1.003x slower')
    """
    times, word = (theirs / ours, "faster") if theirs >= ours else (ours / theirs, "slower")
    return f"{times:.{3 if times < 1.005 else 2}f}x {word}"


def footer(results: Results) -> list[str]:
    """Conditions, floors, first calls, conversions, and missing providers."""
    m, run, measured = results.machine, results.run, results.measured_floors()
    rates = ", ".join(f"{v / 1e12:.3g} TFLOP/s {k}" for k, v in measured.matrix.items())
    out = [
        f"{m['name']}; {m['threads']} of {m['cores']} cores used by each; "
        + ", ".join(f"{k} {v}" for k, v in m["versions"].items()),
        f"floors, measured now: copy {measured.bandwidth / 1e9:,.0f} GB/s, product {rates}",
        f"medians of {run['rounds']} rounds in turn, inputs out of the cache, each checked against "
        f"the float64 oracle first; processes: {run['processes']}; {run['seconds']:.0f} s",
    ]
    if any((row.share or 0.0) > 1 for row in results.rows):
        out.append(ABOVE_FLOOR)
    if results.has_eager:
        out.append(EAGER_NOTE)
    if (m.get("others") or 0.0) > BUSY:
        out.append(f"BUSY: other programs took {m['others']:.0%} of the cores meanwhile; times of")
        out[-1] += " this run compare with nothing, not even with each other"
    if clocks := m.get("clocks"):
        after = m.get("clocks_after") or {}
        pair = f"{clocks.get('clocks.sm')} before, {after.get('clocks.sm')} after"
        out.append(f"SM clock {pair} (maximum {clocks.get('clocks.max.sm')}), not pinned")
    for provider in results.providers:
        notes = sorted(
            {x for r in results.rows if r.provider == provider["name"] for x in r.converted}
        )
        if notes:
            out.append(f"not timed for {provider['name']}: {'; '.join(notes)}")
    for first in results.first_calls:
        imported = f"{first['import_s']:.1f} s to import, " if first["import_s"] else ""
        call = f"{first['call_s']:.2f} s for the first {first['op']}"
        out.append(f"first call, fresh process, {first['provider']}: {imported}{call}")
    skipped = dict.fromkeys(r.workload for r in results.rows if r.status == "skipped")
    if skipped:
        why = next(r.reason for r in results.rows if r.status == "skipped")
        out.append(f"not run, {why}: {', '.join(skipped)}")
    for provider in results.providers:
        if provider["missing"]:
            how = f" ({provider['install']})" if provider.get("install") else ""
            out.append(f"missing: {provider['name']}: {provider['missing']}{how}")
    return out


def show(results: Results, file: TextIO | None = None) -> None:
    """Print the report: a rich table if rich is installed, else aligned columns."""
    file = file or sys.stdout
    try:
        from rich.console import Console
        from rich.table import Table
    except Exception:  # not installed; or broken, which raises anything
        for title, rows in lines(results).items():
            print(f"\n{title}", file=file)
            print(_plain([head(results), *rows]), file=file)
    else:
        console = Console(file=file, width=None if file.isatty() else 150)
        for title, rows in lines(results).items():
            table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
            for name in head(results):
                side = "right" if name in RIGHT else "left"
                table.add_column(name, justify=side, overflow="fold")
            for key, group in groupby(rows, key=_counter()):
                for row in group:
                    table.add_row(*row, style="bold" if row[1].startswith("sluice") else "")
                table.add_section()
                del key
            console.print()
            console.print(table)
    print(file=file)
    for line in footer(results):
        print(line, file=file)


def _counter() -> Any:
    """A grouping key that changes at each row that names a workload."""
    count = 0

    def key(row: tuple[str, ...]) -> int:
        nonlocal count
        count += bool(row[0])
        return count

    return key


def _plain(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
