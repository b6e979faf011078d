"""Tables in documents, generated from committed results, so that no number is typed by hand.

A document has a pair of comments, and the text between them is replaced:

    <!-- bench: h200 decode peers=fla,flashinfer -->
    <!-- /bench -->

The first word is the name of a results file without ``.json``. Operators follow, in the order of
the rows; without any, all operators are shown. ``/`` and ``:`` narrow an operator:

    prefill/raw                     prefill that computes its gates itself
    decode/bfloat16                 with a state of that dtype (default: any)
    decode/float32:N=1,N=64         these sizes only

Options for all operators: ``peers=`` (which columns), ``models=`` and ``sizes=`` (which rows).
``times=eager`` shows the times of eager calls, with those of replayed graphs beside them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.bench.results import Results, Row, microseconds, notes, rate, write
from sluice.bench.table import eager, ratio, times_faster
from sluice.contract.errors import SluiceError

BLOCK = re.compile(r"(<!-- bench: ([^\n]*?) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)
OPTIONS = ("peers", "models", "sizes", "times")
EAGER = ["eager"]  # the only value of times=
EAGER_TIMES = ("host", "eager", "graph")  # the columns of each provider


@dataclass
class Operator:
    """One word of a comment: an operator, and its narrower kinds and sizes."""

    op: str
    kinds: frozenset[str] = frozenset()  # a variant, a dtype of the state
    sizes: tuple[str, ...] = ()

    def takes(self, workload: dict[str, Any]) -> bool:
        """Whether a workload matches. A variant must be asked for; a state dtype need not be."""
        variant = {workload.get("variant")} - {"", None}
        known = variant | {workload["state_dtype"]}
        return (
            workload["op"] == self.op
            and variant <= self.kinds <= known
            and (not self.sizes or workload["size"] in self.sizes)
        )


@dataclass
class Selection:
    """The selection made by one pair of comments."""

    results: str
    ops: list[Operator] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether the selection takes every row of its operators."""
        return not self.options and not any(op.sizes for op in self.ops)

    @property
    def eager(self) -> bool:
        return "times" in self.options

    def choose(self, workloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The matching workloads, in the written order of the operators."""
        found = [w for w in workloads if self._matches(w)]
        if not self.ops:
            return found
        named = [w for op in self.ops for w in found if op.takes(w)]
        return list({w["name"]: w for w in named}.values())

    def _matches(self, workload: dict[str, Any]) -> bool:
        models, sizes = self.options.get("models"), self.options.get("sizes")
        ranked = f"{workload['model']}/tp{workload['tp']}"
        return (not models or ranked in models or workload["model"] in models) and (
            not sizes or workload["size"] in sizes
        )


def parse(text: str) -> Selection:
    """The words of an opening comment."""
    words = text.split()
    if not words:
        raise SluiceError("bench comment: expected the name of a results file")
    found = Selection(words[0])
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if not sign or ":" in name:
            found.ops.append(_operator(word))
        elif name in OPTIONS:
            found.options[name] = value.split(",")
        else:
            expected = ", ".join(f"{x}=" for x in OPTIONS)
            raise SluiceError(f"bench comment {text!r}: expected {expected}, got {name}=")
    if found.options.get("times", EAGER) != EAGER:
        raise SluiceError(f"bench comment {text!r}: expected times=eager")
    return found


def _operator(word: str) -> Operator:
    """Parse one word.

    >>> _operator("decode/bfloat16:N=1,N=64").sizes
    ('N=1', 'N=64')
    """
    name, _, sizes = word.partition(":")
    op, *kinds = name.split("/")
    return Operator(op, frozenset(kinds), tuple(sizes.split(",")) if sizes else ())


def table(results: Results, selection: Selection) -> str:
    """A Markdown table with a row per workload and a column per provider."""
    chosen = selection.choose(results.workloads)
    if not chosen:
        raise SluiceError(f"bench comment: nothing in {selection.results} matches")
    wanted = selection.options.get("peers")
    rows = [row for w in chosen for row in results.of(w["name"])]
    timed = {row.provider for row in rows if row.ok or row.status == "wrong"}
    names = [p["name"] for p in results.providers if p["name"] in timed]
    peers = [n for n in names if n != "sluice" and (wanted is None or n in wanted)]
    if selection.eager and not any(row.eager for row in rows):
        return f"Not measured yet: `{selection.results}.json` has no times of eager calls.\n"
    titles = {p["name"]: p["title"] for p in results.providers}
    if selection.eager:
        shown = ["sluice", *(titles[n] for n in peers)]
        head = ["", "heads", *(f"{title} {time}, µs" for title in shown for time in EAGER_TIMES)]
    else:
        head = ["", "heads", "sluice, µs", "rate, of floor", *(f"{titles[n]}, µs" for n in peers)]
    lines = [_line(head), _line(["---"] * len(head))]
    left = [w for w in chosen if all(r.status == "skipped" for r in results.of(w["name"]))]
    for workload in chosen:
        if workload in left:
            continue
        ours = results.row(workload["name"], "sluice")
        cells = [_label(workload), "/".join(map(str, workload["heads"]))]
        others = [results.row(workload["name"], name) for name in peers]
        if selection.eager:
            cells += [cell for row in (ours, *others) for cell in _eager(row, ours)]
        else:
            cells += [*_own(ours, workload), *(_peer(row, ours) for row in others)]
        lines.append(_line(cells))
    m, run = results.machine, results.run
    known = [p for p in results.providers if p["name"] in peers and p["peer"] and p["version"]]
    others = [f"{p['title']} {p['version']}" for p in known if p["name"] != "torch"]
    where = ", ".join([m["name"], f"torch {m['versions'].get('torch')}", *others])
    threads = f", {m['threads']} threads" if m["device"] == "cpu" else ""
    commit = f", commit {run['commit']}" if run.get("commit") else ""
    date = str(run.get("date", ""))[:10]
    lines += ["", f"{where}{threads}; {date}{commit}. Medians; in brackets how sluice compares."]
    if left and selection.whole:  # the table was meant to be complete
        lines[-1] += f" Of {len(chosen)} workloads {len(left)} were not run: the time was spent."
    return "\n".join(lines) + "\n"


def _label(workload: dict[str, Any]) -> str:
    return f"`{workload['op']}` {workload['size']}, {workload['model']}{notes(workload)}"


def _own(row: Row | None, workload: dict[str, Any]) -> list[str]:
    if row is None or not row.ok or not row.median_s:
        return ["not served" if row is None or row.status == "refused" else row.status, ""]
    share = "" if row.share is None else f", {row.share:.0%}"
    return [microseconds(row.median_s), rate(workload, row.median_s) + share]


def _peer(row: Row | None, ours: Row | None) -> str:
    if row is None or row.status in ("refused", "skipped"):
        return "-"
    if not row.ok:
        return row.status
    compared = ratio(row, ours if ours is not None and ours.ok else None)
    return microseconds(row.median_s) + (f" ({compared})" if compared else "")


def _eager(row: Row | None, ours: Row | None) -> list[str]:
    """An eager call: time of the host, wall time with its ratio, and time of a replayed graph."""
    if row is None or not row.ok or row.eager is None:
        return [_peer(row, None) if row is None or not row.ok else "-", "", ""]
    host, wall = eager(row)
    if ours is not None and ours is not row and ours.ok and ours.eager is not None:
        wall += f" ({times_faster(row.eager.median_s, ours.eager.median_s)})"
    note = "" if row.method == "graph" else f" ({row.method})"
    return [host, wall, microseconds(row.median_s) + note]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rewrite(text: str, results: dict[str, Results]) -> tuple[str, list[str]]:
    """A document with new tables, and the names of results that it asks for but were not given."""
    absent: list[str] = []

    def fill(found: re.Match[str]) -> str:
        selection = parse(found[2])
        if selection.results not in results:
            absent.append(selection.results)
            return found[0]
        return f"{found[1]}\n{table(results[selection.results], selection)}\n{found[4]}"

    return BLOCK.sub(fill, text), absent


def command(files: Sequence[Path], check: bool) -> int:
    """Write the tables of the documents among ``files``; with ``check``, only compare them."""
    results = {path.stem: Results.load(path) for path in files if path.suffix == ".json"}
    documents = [path for path in files if path.suffix == ".md"]
    if not results or not documents:
        raise SluiceError("bench: expected results (.json) and documents (.md)")
    stale = []
    for path in documents:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}") from None
        new, absent = rewrite(text, results)
        for name in dict.fromkeys(absent):
            print(f"{path}: asks for {name}.json, which was not given: left as it is")
        if new != text:
            stale.append(path)
            if not check:
                write(path, new)
        print(f"{path}: {'up to date' if new == text else 'out of date' if check else 'written'}")
    return 1 if check and stale else 0
