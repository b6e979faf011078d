"""What compute-sanitizer's racecheck found, less Triton's own hand-over between warps.

    compute-sanitizer --tool racecheck --racecheck-report hazard --print-limit 10000 \
        python -m tests.gpu.every_kernel | python -m tests.gpu.races

``gl.warp_specialize`` hands its arguments to the other warps through shared memory, between two
barriers of the whole program. racecheck reports these reads and writes as soon as the program has
used a barrier of its own before, even with no shared memory of ours (docs/kernels/prefill.md).
Both their sides lie on the kernel's first line or at ``gl.warp_specialize``. Any other hazard is a
fault.
"""
# ruff: noqa: T201

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAZARD = re.compile(r"(RAW|WAR|WAW) hazard detected")
SIDE = re.compile(r"(?:Write|Read) Thread .* in (\S+\.py):(\d+)")
TOTAL = re.compile(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors")


def dispatching(file: str, line: int) -> bool:
    """Whether a line of a kernel's file is one that Triton's hand-over is attributed to."""
    found = list((ROOT / "src/sluice/backends").rglob(Path(file).name))
    if not found:
        return False
    here, behind = (text.strip() for text in found[0].read_text().splitlines()[line - 1 : line + 1])
    # the number of the last barrier's line is that of the ``if`` around the dispatch
    return here.startswith(("@gluon.jit", "def ")) or behind.startswith("gl.warp_specialize(")


def judge(report: str) -> tuple[int, list[str]]:
    """How many hazards are the hand-over's, and a line for each that is not."""
    handed, faults = 0, []
    for part in re.split(r"(?==+ Error:)", report):
        if not HAZARD.search(part):
            continue
        sides = [(file, int(line)) for file, line in SIDE.findall(part)]
        if len(sides) == 2 and all(dispatching(*side) for side in sides):
            handed += 1
        else:
            faults.append(" ".join(part.split()[:40]))
    return handed, faults


def main() -> int:
    report = sys.stdin.read()
    handed, faults = judge(report)
    total = TOTAL.search(report)
    print(f"{handed} reports of Triton's hand-over, {len(faults)} other hazards")
    for fault in faults:
        print(fault)
    if total is None or int(total[1]) != handed + len(faults) or int(total[1]) != int(total[2]):
        print("the report is not whole", total and total[0])
        return 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
