"""The results of a run as data: rows, their workloads and providers, and the conditions.

They are stored as JSON, and every report is made from it. Times are in seconds, sizes in bytes, and
errors are relative.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sluice.bench.floors import Floors
from sluice.contract.errors import SluiceError
from sluice.testing.workload import ABOUT, NAMED, Workload, parse_size

SCHEMA = 1
FEWEST = 20  # a row with fewer samples says how many it has


@dataclass
class Times:
    """Seconds per call: median, 10th and 90th percentile, and of how many samples."""

    median_s: float
    p10_s: float
    p90_s: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        ordered = sorted(samples)
        ends = percentile(ordered, 0.1), percentile(ordered, 0.9)
        return cls(statistics.median(ordered), *ends, len(ordered))


@dataclass
class Row:
    """One provider on one workload. Only a row whose status is "ok" has times.

    Status: ok, refused, wrong, error, missing, or skipped (the time ran out).

    ``median_s`` and its percentiles are of replayed graphs on a GPU, and of calls on a CPU. Eager
    calls on a GPU have two more times: ``host``, until a call returns, and ``eager``, wall time per
    call (``timing_eager.py``). Results of a CPU have neither, nor do those of earlier versions.
    """

    workload: str
    provider: str
    status: str
    reason: str = ""
    detail: str = ""
    median_s: float | None = None
    p10_s: float | None = None
    p25_s: float | None = None
    p75_s: float | None = None
    p90_s: float | None = None
    samples: int = 0
    method: str = ""
    sets: int = 0
    converted: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    floor_s: float | None = None
    bound: str = ""
    check_s: float | None = None  # from inputs to ready for timing: compiling, checking
    host: Times | None = None
    eager: Times | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def error(self) -> float | None:
        """The largest of its relative errors."""
        return max(self.errors.values()) if self.errors else None

    @property
    def share(self) -> float | None:
        """The floor over the time: 1.0 is as fast as the machine copies or multiplies."""
        return self.floor_s / self.median_s if self.median_s and self.floor_s else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles, relative to the median."""
        if not self.median_s or self.p25_s is None or self.p75_s is None:
            return None
        return (self.p75_s - self.p25_s) / 2 / self.median_s

    def set_samples(self, samples: list[float]) -> None:
        """Median, quartiles, 10th and 90th percentile; never the best of n."""
        ordered = sorted(samples)
        self.samples = len(ordered)
        self.median_s = statistics.median(ordered)
        self.p10_s, self.p90_s = percentile(ordered, 0.1), percentile(ordered, 0.9)
        self.p25_s, self.p75_s = percentile(ordered, 0.25), percentile(ordered, 0.75)


@dataclass
class Results:
    """All of one run."""

    machine: dict[str, Any]
    workloads: list[dict[str, Any]]
    providers: list[dict[str, Any]]
    rows: list[Row]
    floors: dict[str, Any]
    first_calls: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]

    def row(self, workload: str, provider: str) -> Row | None:
        rows = (r for r in self.rows if (r.workload, r.provider) == (workload, provider))
        return next(rows, None)

    def provider(self, name: str) -> dict[str, Any]:
        return next(p for p in self.providers if p["name"] == name)

    @property
    def has_eager(self) -> bool:
        """Whether eager calls were timed."""
        return any(row.eager for row in self.rows)

    def measured_floors(self) -> Floors:
        return Floors.from_json(self.floors)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain |= {"share": row.share, "error": row.error}
        return data

    def save(self, path: Path) -> None:
        write(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file; refuses, with a reason, a file that holds no results."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise SluiceError(f"{path}: not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise SluiceError(f"{path}: expected results of schema {SCHEMA}, got {found}")
        names = set(Row.__dataclass_fields__)
        rows = [Row(**{k: v for k, v in row.items() if k in names}) for row in data.pop("rows")]
        for row in rows:
            row.host, row.eager = (Times(**x) if x else None for x in (row.host, row.eager))
        return cls(rows=rows, **{k: v for k, v in data.items() if k in cls.__dataclass_fields__})

    def to_csv(self) -> str:
        """One line per row, with its workload and derived figures."""
        known = {w["name"]: w for w in self.workloads}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*COLUMNS, *DERIVED])
        for row in self.rows:
            w = known[row.workload]
            heads = f"{w['heads'][0]}/{w['heads'][1]}"
            plain = [row.workload, w["op"], w["model"], w["tp"], heads, w["size"], w["dtype"]]
            plain += [w["state_dtype"], row.provider, row.detail, row.status, row.reason]
            times = [_us(row.median_s), _us(row.p10_s), _us(row.p90_s), row.samples, row.method]
            times += [_us(x.median_s if x else None) for x in (row.host, row.eager)]
            rates: list[Any] = [None, None]
            if row.median_s:
                rates = [w["bytes"] / row.median_s / 1e9, w["flops"] / row.median_s / 1e9]
            figures = [*(None if x is None else f"{x:.6g}" for x in rates), _us(row.floor_s)]
            figures += [row.bound, _number(row.share), _number(row.error)]
            writer.writerow([*plain, *times, *figures, "; ".join(row.converted)])
        return out.getvalue()


COLUMNS = (
    "workload", "op", "model", "tp", "heads", "size", "dtype", "state_dtype", "provider", "backend",
    "status", "reason",
)  # fmt: skip
DERIVED = (
    "median_us", "p10_us", "p90_us", "samples", "method", "host_us", "eager_us", "gb_per_s",
    "gflop_per_s", "floor_us", "bound", "share_of_floor", "relative_error", "converted",
)  # fmt: skip


def describe_workload(workload: Workload, dtype: Any) -> dict[str, Any]:
    """A workload as plain data for the results."""
    case = workload.case
    return {
        "name": workload.name,
        "op": workload.op,
        "about": ABOUT[workload.op],
        "model": workload.model,
        "tp": workload.tp,
        "heads": list(workload.heads),
        "widths": [case.K, case.V],
        "size": str(workload.size),
        "variant": workload.variant,
        "label": _short_name(str(workload.size)),
        "axis": workload.size.axis,
        "tokens": workload.size.tokens,
        "sequences": case.N,
        "dtype": str(dtype).split(".")[1],
        "state_dtype": str(case.state_dtype).split(".")[1],
        "bytes": case.bytes(dtype),
        "flops": case.flops(),
        "unit": "flops" if workload.bound == "compute" else "bytes",
    }


def notes(workload: dict[str, Any]) -> str:
    """What distinguishes similar workloads: ", TP 8", ", bfloat16 state", ", raw gates"."""
    state = "" if workload["state_dtype"] == "float32" else f", {workload['state_dtype']} state"
    return rank_note(workload) + state + raw_note(workload)


def rank_note(workload: dict[str, Any]) -> str:
    return f", TP {workload['tp']}" if workload["tp"] > 1 else ""


def raw_note(workload: dict[str, Any]) -> str:
    """The note on raw gates; older results have no variants."""
    return ", raw gates and keys" if workload.get("variant") == "raw" else ""


def _short_name(size: str) -> str:
    """The name of a mix if it has one, else the size itself."""
    names = {str(parse_size(written)): name for name, written in NAMED.items() if "+" in written}
    return names.get(size, size)


def percentile(ordered: list[float], q: float) -> float:
    """A percentile of sorted samples, by linear interpolation."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def write(path: Path, text: str) -> None:
    """Write a report; an error says what the user can do."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SluiceError(f"cannot write {path}: {error.strerror}") from error


def microseconds(seconds: float | None) -> str:
    """Microseconds with three significant digits: 2.87, 36.3, 1,934."""
    if seconds is None:
        return "-"
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= 99.95 else f"{us:.1f}" if us >= 9.995 else f"{us:.2f}"


def rate(workload: dict[str, Any], seconds: float) -> str:
    """TB/s or GB/s for memory-bound work, TFLOP/s or GFLOP/s for compute-bound work."""
    unit, suffix = ("flops", "FLOP/s") if workload["unit"] == "flops" else ("bytes", "B/s")
    value = workload[unit] / seconds
    scale, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    shown = value / scale
    return f"{shown:.2f} {prefix}{suffix}" if shown < 99.95 else f"{shown:,.0f} {prefix}{suffix}"


def by_workload(results: Results) -> Iterable[tuple[dict[str, Any], list[Row]]]:
    """Each workload with its rows, in the order of the run."""
    for workload in results.workloads:
        yield workload, results.of(workload["name"])


def _us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:.4f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
