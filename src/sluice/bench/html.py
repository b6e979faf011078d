"""The report as one self-contained page, with data, style and script inside.

``page/charts.js`` draws the charts, ``page/rows.js`` sorts and filters the table, which is complete
without a script, as are the conditions.
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
        summary=escape(_summary(results)),
        banner=_banner(results),
        css=_asset("page.css"),
        table=_table(results),
        footer="\n".join(f"<p>{escape(line)}</p>" for line in table.footer(results)),
        data=_embedded(results),
        script=_asset("charts.js") + _asset("rows.js"),
    )


def _asset(name: str) -> str:
    return (resources.files("sluice.bench") / "page" / name).read_text(encoding="utf-8")


def _embedded(results: Results) -> str:
    """JSON for a script element: without "<"."""
    text = json.dumps(results.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _summary(results: Results) -> str:
    """What this page shows, in words."""
    peers = [p["title"] for p in results.providers if p.get("peer") and not p["missing"]]
    others = f" beside {', '.join(peers)}" if peers else ""
    timed = sum(row.ok for row in results.rows)
    return (
        f"Every operator of sluice{others}: {len(results.workloads)} workloads, {timed} times. "
        "A time is shown only if the output agreed with the float64 oracle."
    )


def _banner(results: Results) -> str:
    """A warning above everything else, if the times are not reliable."""
    share = results.machine.get("others") or 0.0
    if share <= table.BUSY:
        return ""
    text = f"The machine was busy: other programs took {share:.0%} of the cores."
    return (
        f'<p class="banner" role="alert"><strong>{text}</strong> These times compare with '
        "nothing, not even with each other.</p>"
    )


def _conditions(results: Results) -> str:
    m, run = results.machine, results.run
    parts = [f"{m['threads']} threads"] if m["device"] == "cpu" else []
    parts += [f"torch {m['versions'].get('torch')}", str(run.get("date", ""))[:10]]
    if run.get("commit"):
        parts.append(f"commit {run['commit']}")
    if run.get("note"):
        parts.append(run["note"])
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
        body += [_row(row, workload, ours, (label, n == 0), names) for n, row in enumerate(ordered)]
        if refused:
            first = (label, not ordered)
            body.append(_refusals(refused, first, workload["op"], len(names) - 1))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _row(
    row: Row,
    workload: dict[str, Any],
    ours: Row | None,
    label: tuple[str, bool],
    names: tuple[str, ...],
) -> str:
    kinds = ["first"] if label[1] else []
    kinds += ["own"] if row.provider == "sluice" else []
    name = escape(f"{row.provider} ({row.detail})" if row.detail else row.provider)
    if row.converted:
        notes = escape("; ".join(row.converted))
        name += f'<details><summary>converted</summary><span class="soft">{notes}</span></details>'
    if not row.ok or row.median_s is None:
        kinds.append("bad")
        reason = escape(f"{row.status}: {row.reason}" if row.reason else row.status)
        cells = f'<td class="what">{label[0]}</td><td class="who">{name}</td>'
        cells += f'<td colspan="{len(names) - 2}">{reason}</td>'
        return f'<tr{_data(row, workload)} class="{" ".join(kinds)}">{cells}</tr>'
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
    error = "" if row.error is None else f"{row.error:.0e}"
    compared = f'<span class="{kind}">{escape(compared)}</span>' if compared else ""
    shown = [*map(escape, values), compared, error, escape(row.method + few)]
    cells = "".join(
        f'<td{_class(name)} data-name="{escape(name)}">{text}</td>'
        for name, text in zip(names[2:], shown, strict=True)
    )
    start = f'<tr{_data(row, workload, ours)} class="{" ".join(kinds)}">'
    return f'{start}<td class="what">{label[0]}</td><td class="who">{name}</td>{cells}</tr>'


def _data(row: Row, workload: dict[str, Any], ours: Row | None = None) -> str:
    """What the table is filtered and sorted by."""
    found = {"op": workload["op"], "provider": row.provider}
    if row.ok and row.median_s is not None:
        numbers = {"us": row.median_s, "share": row.share, "distance": row.error}
        if ours is not None and ours.median_s and row.provider != "sluice":
            numbers["ratio"] = row.median_s / ours.median_s
        found |= {name: f"{x:.6g}" for name, x in numbers.items() if x is not None}
    return "".join(f' data-{name}="{escape(value)}"' for name, value in found.items())


def _refusals(rows: list[Row], label: tuple[str, bool], op: str, width: int) -> str:
    """The providers that refused, in one line."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.provider)
    text = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
    start = f'<tr data-op="{op}"' + (' class="first">' if label[1] else ">")
    shown = f'<td colspan="{width}" class="soft">{escape(text)}</td></tr>'
    return f'{start}<td class="what">{label[0]}</td>{shown}'


def _class(name: str) -> str:
    return ' class="n"' if name in table.RIGHT else ""
