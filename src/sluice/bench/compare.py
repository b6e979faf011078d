"""Two results side by side: what got slower, beyond the threshold and beyond the noise.

The noise of a row is half the distance between its quartiles, relative to the median. The noise of
a ratio is the square root of the sum of both squares. A row counts as slower or faster only if its
ratio differs from 1 by more than the threshold and by more than the noise. A row that was right and
no longer is counts as worst of all. Only sluice's rows decide the exit status; those of peers show
whether the machine changed. Runs on a busy machine, and runs without a common row, compare with
nothing: status 2.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.bench import table
from sluice.bench.results import Results, Row, microseconds

BROKEN = ("wrong", "error")
ORDER = {"broken": 0, "slower": 1, "faster": 2, "same": 3}


@dataclass
class Change:
    """One row in both results."""

    workload: str
    provider: str
    before: Row
    after: Row
    ratio: float  # time after, over time before
    noise: float
    verdict: str  # broken, slower, faster, same

    @property
    def counts(self) -> bool:
        """Whether this change makes the comparison fail."""
        return self.provider.startswith("sluice") and self.verdict in ("broken", "slower")


def changes(before: Results, after: Results, threshold: float) -> list[Change]:
    """Every row that was timed before and is present after, worst first."""
    found = []
    for old in before.rows:
        new = after.row(old.workload, old.provider)
        if not old.ok or not old.median_s or new is None:
            continue
        if new.status in BROKEN:
            blank = (math.inf, 0.0, "broken")
            found.append(Change(old.workload, old.provider, old, new, *blank))
        elif new.ok and new.median_s:
            ratio = new.median_s / old.median_s
            noise = math.hypot(old.spread or 0.0, new.spread or 0.0)
            found.append(Change(old.workload, old.provider, old, new, ratio, noise, "same"))
            limit = max(threshold, noise)
            if ratio > 1 + limit:
                found[-1].verdict = "slower"
            elif ratio < 1 / (1 + limit):
                found[-1].verdict = "faster"
    return sorted(found, key=lambda c: (ORDER[c.verdict], -abs(math.log(min(c.ratio, 1e9)))))


def drift(found: list[Change]) -> float | None:
    """The median ratio of the peers' rows: the change of the machine between the two runs."""
    ratios = [c.ratio for c in found if not c.provider.startswith("sluice") and c.after.ok]
    return statistics.median(ratios) if ratios else None


def report(before: Results, after: Results, threshold: float) -> tuple[str, bool | None]:
    """The text, and whether no row of sluice got slower; None where nothing can be compared."""
    found = changes(before, after, threshold)
    lines = [*_machines(before, after)]
    shown = [c for c in found if c.verdict != "same"]
    if shown:
        width = max(len(c.workload) for c in shown)
        who = max(len(c.provider) for c in shown)
        for c in shown:
            old, new = microseconds(c.before.median_s), microseconds(c.after.median_s)
            times = f"{old:>9} -> {new:>9} us"
            if c.verdict == "broken":
                times = f"{old:>9} -> {c.after.status}: {c.after.reason}"
                lines.append(f"  broken  {c.workload:<{width}}  {c.provider:<{who}}  {times}")
                continue
            by = f"{abs(c.ratio - 1):.0%}" if c.ratio >= 1 else f"{1 / c.ratio - 1:.0%}"
            text = f"{times}  {by:>5} {c.verdict}, noise {c.noise:.0%}"
            lines.append(f"  {c.verdict:<7} {c.workload:<{width}}  {c.provider:<{who}}  {text}")
    same = sum(c.verdict == "same" for c in found)
    if found:
        lines.append(f"{same} of {len(found)} rows within {threshold:.0%} or their noise")
    else:
        lines.append("no row is in both: nothing was compared")
    if (moved := drift(found)) is not None:
        moved_by = f"peers' rows moved by a factor of {moved:.3f} (median)"
        lines.append(f"{moved_by}: that is the machine, not sluice")
    gone = [r for r in before.rows if r.ok and after.row(r.workload, r.provider) is None]
    if gone:
        lines.append(f"{len(gone)} rows of the old results are not in the new ones")
    busy = _busy(before, after)
    lines += busy
    failed = [c for c in found if c.counts]
    if failed:
        what = f"slower by more than {threshold:.0%} and their noise, or broken"
        lines.append(f"{len(failed)} rows of sluice are {what}")
    return "\n".join(lines), None if busy or not found else not failed


def _machines(before: Results, after: Results) -> list[str]:
    def name(results: Results) -> str:
        m: dict[str, Any] = results.machine
        return f"{m['name']}, {m['threads']} threads, torch {m['versions'].get('torch')}"

    commits = [r.run.get("commit") or "unknown commit" for r in (before, after)]
    lines = [f"{commits[0]} ({before.run.get('date')}) -> {commits[1]} ({after.run.get('date')})"]
    if name(before) != name(after):
        lines.append(f"not the same conditions: {name(before)} -> {name(after)}")
    old, new = before.measured_floors().bandwidth, after.measured_floors().bandwidth
    lines.append(f"copy bandwidth {old / 1e9:,.0f} -> {new / 1e9:,.0f} GB/s")
    return lines


def _busy(before: Results, after: Results) -> list[str]:
    shares = [("old", before.machine.get("others")), ("new", after.machine.get("others"))]
    return [
        f"BUSY: other programs took {share:.0%} of the cores during the {which} run; its times "
        "compare with nothing"
        for which, share in shares
        if (share or 0.0) > table.BUSY
    ]


def command(old: Path, new: Path, threshold: float) -> int:
    """Print the comparison.

    Returns 1 if a row of sluice got slower beyond the threshold, 2 if nothing can be compared.
    """
    text, good = report(Results.load(old), Results.load(new), threshold)
    print(text)
    return 2 if good is None else 0 if good else 1
