"""The report as one self-contained page, with data, style and script inside.

``page/charts.js`` draws the charts; the table and the conditions need no script.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from sluice.bench import table
from sluice.bench.results import FEWEST, Results, Row, by_workload, microseconds, notes, rate


def page(results: Results) -> str:
    """The whole page."""
    m = results.machine
    return Template(_asset("page.html")).substitute(
        title=escape(f"sluice bench, {m['name']}"),
        heading=escape(f"sluice bench on {m['name']}"),
        conditions=escape(_conditions(results)),
        css=_asset("page.css"),
        table=_table(results),
        footer="\n".join(f"<p>{escape(line)}</p>" for line in table.footer(results)),
        data=_embedded(results),
        script=_asset("charts.js"),
    )


def _asset(name: str) -> str:
    return (resources.files("sluice.bench") / "page" / name).read_text(encoding="utf-8")


def _embedded(results: Results) -> str:
    """JSON for a script element: without "<"."""
    text = json.dumps(results.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _conditions(results: Results) -> str:
    m, run = results.machine, results.run
    timed = sum(row.ok for row in results.rows)
    parts = [f"{timed} rows timed over {len(results.workloads)} workloads"]
    if m["device"] == "cpu":
        parts.append(f"{m['threads']} threads")
    parts += [f"torch {m['versions'].get('torch')}", str(run.get("date", ""))[:10]]
    if run.get("commit"):
        parts.append(f"commit {run['commit']}")
    if run.get("note"):
        parts.append(run["note"])
    if (m.get("others") or 0.0) > table.BUSY:
        parts.append(f"a busy machine: others took {m['others']:.0%} of the cores")
    return " · ".join(parts)


def _table(results: Results) -> str:
    names = table.head(results)
    head = "".join(f"<th{_class(name)}>{escape(name)}</th>" for name in names)
    body = []
    for workload, rows in by_workload(results):
        ours = next((r for r in rows if r.provider == "sluice" and r.ok), None)
        if all(r.status == "skipped" for r in rows):
            continue
        served = [r for r in rows if r.status != "refused"]
        # leave out variants of sluice that refuse: they add nothing
        refused = [r for r in rows if r.status == "refused" and ":" not in r.provider]
        ordered = sorted(served, key=lambda r: (not r.ok, r.median_s or 0.0))
        name = f"{workload['op']} {workload['size']}"
        heads = "/".join(map(str, workload["heads"]))
        where = f"{workload['model']}, {heads}, {workload['dtype']}{notes(workload)}"
        label = f'{escape(name)}<br><span class="soft">{escape(where)}</span>'
        for n, row in enumerate(ordered):
            body.append(_row(row, workload, ours, label if n == 0 else "", names))
        if refused:
            label = label if not ordered else ""
            body.append(_refusals(refused, label, workload["op"], len(names) - 1))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _row(
    row: Row, workload: dict[str, Any], ours: Row | None, label: str, names: tuple[str, ...]
) -> str:
    kinds = ["first"] if label else []
    kinds += ["own"] if row.provider == "sluice" else []
    name = escape(f"{row.provider} ({row.detail})" if row.detail else row.provider)
    if row.converted:
        notes = escape("; ".join(row.converted))
        name += f'<details><summary>converted</summary><span class="soft">{notes}</span></details>'
    if not row.ok or row.median_s is None:
        kinds.append("bad")
        reason = escape(f"{row.status}: {row.reason}" if row.reason else row.status)
        cells = f'<td>{label}</td><td>{name}</td><td colspan="{len(names) - 2}">{reason}</td>'
        return f'<tr data-op="{workload["op"]}" class="{" ".join(kinds)}">{cells}</tr>'
    compared = table.ratio(row, ours)
    kind = "faster" if "faster" in compared else "slower"
    few = f", {row.samples} samples" if row.samples < FEWEST else ""
    values = (
        microseconds(row.median_s),
        f"{microseconds(row.p10_s)}-{microseconds(row.p90_s)}",
        *(table.eager(row) if table.EAGER[0] in names else ()),
        rate(workload, row.median_s),
        "" if row.share is None else f"{row.share:.0%}",
    )
    cells = "".join(f'<td class="n">{escape(x)}</td>' for x in values)
    error = "" if row.error is None else f"{row.error:.0e}"
    cells += f'<td><span class="{kind}">{escape(compared)}</span></td><td class="n">{error}</td>'
    cells += f"<td>{escape(row.method + few)}</td>"
    start = f'<tr data-op="{workload["op"]}" class="{" ".join(kinds)}">'
    return f"{start}<td>{label}</td><td>{name}</td>{cells}</tr>"


def _refusals(rows: list[Row], label: str, op: str, width: int) -> str:
    """The providers that refused, in one line."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.provider)
    text = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
    start = f'<tr data-op="{op}"' + (' class="first">' if label else ">")
    return f'{start}<td>{label}</td><td colspan="{width}" class="soft">{escape(text)}</td></tr>'


def _class(name: str) -> str:
    return ' class="n"' if name in table.RIGHT else ""
