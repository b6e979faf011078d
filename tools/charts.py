"""The chart of the README and the docs, from committed results: ``python tools/charts.py``.

One bar per row: how many times faster sluice is than the fastest other library that computes the
same on the same machine, in the same run. Rows where it is slower are in the chart like all others.
A second form is for narrow screens, with the words above each bar.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "img"
GPU, CPU = "Qwen3.5-35B-A3B", "Qwen3.5-4B"
CHOSEN: dict[str, tuple[str, ...]] = {
    "gpu": (
        f"prefill/{GPU}/tp1/8192",
        f"prefill/{GPU}/tp1/8x1024",
        f"layer/{GPU}/tp1/8192",
        f"conv_qkv/{GPU}/tp1/8192",
        f"decode/{GPU}/tp1/N=1",
        f"decode/{GPU}/tp1/N=64",
        f"decode/{GPU}/tp1/N=64/bfloat16-state",
        f"verify/{GPU}/tp1/N=64",
        f"step/{GPU}/tp1/N=1",
        f"step/{GPU}/tp1/N=64",
    ),
    "cpu": (
        f"prefill/{CPU}/tp1/2048",
        f"layer/{CPU}/tp1/512",
        f"conv_qkv/{CPU}/tp1/2048",
        f"decode/{CPU}/tp1/N=1",
        f"decode/{CPU}/tp1/N=8",
        f"step/{CPU}/tp1/N=1",
        "first call: decode",
    ),
}
WORDS = {
    "prefill": "prefill",
    "layer": "whole layer, prompt",
    "conv_qkv": "convolution, norms, gates",
    "decode": "decode",
    "verify": "verify + commit",
    "step": "whole layer, one token",
}
COLOURS = {
    "light": dict(text="#1f2328", quiet="#59636e", line="#d1d9e0", win="#2f6fde", loss="#c4501b"),
    "dark": dict(text="#e6edf3", quiet="#9198a1", line="#3d444d", win="#6ea8ff", loss="#ff9a66"),
}
TOP = 58


class Form(NamedTuple):
    """Sizes of a chart: of all, before and after the bars, of a row and of a bar in it."""

    width: int
    left: int
    right: int
    row: int
    bar: int


FORMS = {"": Form(860, 275, 215, 22, 15), "-narrow": Form(400, 14, 14, 44, 7)}
LEAST, MOST = math.log2(1 / 8), math.log2(16)


class Bar(NamedTuple):
    """One row: what, how many times faster, and the two times."""

    label: str
    times: float
    detail: str


class Group(NamedTuple):
    """The rows of one run: the machine and the shape, then versions and date."""

    machine: str
    run: str
    bars: list[Bar]


def bars(results: dict[str, Any], chosen: tuple[str, ...]) -> list[Bar]:
    """The rows of one machine."""
    titles = {p["name"]: p["title"] for p in results["providers"]}
    peers = {p["name"] for p in results["providers"] if p["peer"]}
    found = []
    for name in chosen:
        if name.startswith("first call"):
            op = name.split(": ")[1]
            calls = {x["provider"]: x for x in results["first_calls"] if x["op"] == op}
            seconds = {p: x["import_s"] + x["call_s"] for p, x in calls.items()}
            label = f"first {op} of a process, compiling"
        else:
            rows = [r for r in results["rows"] if r["workload"] == name and r["status"] == "ok"]
            seconds = {r["provider"]: r["median_s"] for r in rows}
            label = _label(next(w for w in results["workloads"] if w["name"] == name))
        best = min((p for p in seconds if p in peers), key=lambda p: seconds[p])
        ours, theirs = seconds["sluice"], seconds[best]
        detail = f"{_time(ours)}, {titles[best]} {_time(theirs)}"
        found.append(Bar(label, theirs / ours, detail))
    return found


def _label(workload: dict[str, Any]) -> str:
    size = workload["label"].replace("N=", "batch ").split(" · ")[0]
    size = f"{int(size):,} tokens" if size.isdigit() else size.replace("x", " x ")
    state = ", bf16 state" if workload["state_dtype"] == "bfloat16" else ""
    return f"{WORDS[workload['op']]}, {size}{state}"


def _times(times: float) -> str:
    """A ratio: with three digits near 1, as a fraction far below it."""
    if times < 0.1:
        return f"1/{1 / times:,.0f} "
    return f"{times:.3f}x" if 0.99 < times < 1.01 else f"{times:.3g}x"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            number = seconds * factor
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    raise AssertionError


def draw(groups: list[Group], theme: str, form: str = "") -> str:
    """The chart as SVG."""
    colour, size = COLOURS[theme], FORMS[form]
    scale = (size.width - size.left - size.right) / (MOST - LEAST)

    def x(times: float) -> float:
        return size.left + (min(max(math.log2(times), LEAST), MOST) - LEAST) * scale

    rows = sum(len(group.bars) for group in groups)
    height = TOP + rows * size.row + len(groups) * 48 + 12
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size.width} {height}" role="img" '
        f'aria-label="How many times faster sluice is than the fastest other library">',
        f"<style>text{{font:12px system-ui,sans-serif;fill:{colour['text']}}}"
        f".q{{fill:{colour['quiet']};font-size:11px}}.h{{font-weight:600}}.e{{text-anchor:end}}"
        ".m{text-anchor:middle}</style>",
        f'<text x="{size.left}" y="16" class="h">times faster than the fastest other library'
        "</text>",
        f'<text x="{x(1 / 4) - 18:.1f}" y="44" class="q e">slower</text>',
    ]
    for times in (1 / 4, 1 / 2, 1, 2, 4, 8, 16):
        at, name = x(times), f"{times:g}" if times >= 1 else f"1/{1 / times:g}"
        width = 1.5 if times == 1 else 0.6
        out.append(f'<text x="{at:.1f}" y="44" class="q m">{name}</text>')
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="50" y2="{height - 8}" '
            f'stroke="{colour["line"]}" stroke-width="{width}"/>'
        )
    y = TOP
    for group in groups:
        y += 38
        left = min(size.left, 12)
        out.append(f'<text x="{left}" y="{y - 20}" class="h">{group.machine}</text>')
        out.append(f'<text x="{left}" y="{y - 6}" class="q">{group.run}</text>')
        for bar in group.bars:
            one, end = x(1.0), x(bar.times)
            kind = "win" if bar.times >= 1 else "loss"
            out.append(
                f'<rect x="{min(one, end):.1f}" y="{y + size.row - size.bar - 4}" '
                f'width="{max(abs(end - one), 1.5):.1f}" '
                f'height="{size.bar}" rx="2" fill="{colour[kind]}"/>'
            )
            words = _above if form else _beside
            out += words(bar, size, y, max(one, end))
            y += size.row
        y += 10
    return "\n".join([*out, "</svg>", ""])


def _beside(bar: Bar, size: Form, y: int, end: float) -> list[str]:
    """The words of a row before and after its bar."""
    return [
        f'<text x="{size.left - 8}" y="{y + 14}" class="e">{bar.label}</text>',
        f'<text x="{end + 5:.1f}" y="{y + 14}"><tspan class="h">{_times(bar.times)}</tspan>'
        f'<tspan class="q" dx="6">{bar.detail}</tspan></text>',
    ]


def _above(bar: Bar, size: Form, y: int, _: float) -> list[str]:
    """The words of a row in two lines above its bar."""
    right = size.width - size.right
    return [
        f'<text x="{size.left}" y="{y + 15}">{bar.label}</text>',
        f'<text x="{right}" y="{y + 15}" class="h e">{_times(bar.times)}</text>',
        f'<text x="{size.left}" y="{y + 29}" class="q">{bar.detail}</text>',
    ]


def _run(results: dict[str, Any]) -> str:
    """With what a run was made, and when."""
    machine, versions = results["machine"], results["machine"]["versions"]
    torch = versions["torch"].split("+")[0]  # without its build
    gpu = f"Triton {versions['triton']}, CUDA {machine['cuda']}" if "cuda" in machine else ""
    kernels = gpu or f"Numba {versions['numba']}"
    return f"torch {torch}, {kernels}, {results['run']['date'][:10]}"


def charts() -> dict[Path, str]:
    """Every file this program writes, and its text."""
    groups = []
    for name, chosen in CHOSEN.items():
        results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        machine = results["machine"]
        threads = f", {machine['threads']} cores" if name == "cpu" else ", CUDA graphs"
        kind = "bfloat16" if name == "gpu" else "float32"
        shape = GPU if name == "gpu" else CPU
        found = bars(results, chosen)
        groups.append(Group(f"{machine['name']}{threads}, {kind}, {shape}", _run(results), found))
    return {
        IMAGES / f"overview{form}-{theme}.svg": draw(groups, theme, form)
        for theme in COLOURS
        for form in FORMS
    }


def main() -> None:
    for path, text in charts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
