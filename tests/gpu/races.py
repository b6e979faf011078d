"""Read the report of compute-sanitizer's racecheck, without the hazards it cannot judge.

    compute-sanitizer --tool racecheck --racecheck-report hazard --show-backtrace no \
        --print-limit 1000000 python -m tests.gpu.every_kernel | python -m tests.gpu.races

``gl.warp_specialize`` passes its arguments to the other warps through shared memory, between two
barriers of the whole program. racecheck reports these reads and writes if the program used a
barrier before, even in a kernel without other shared memory (docs/kernels/prefill.md). Both sides
lie on the kernel's first line or at ``gl.warp_specialize``.

In the Hopper prefill, mbarriers order the warpgroups: a group stores, meets at its own barrier, and
one of its threads arrives. Depending on timing, racecheck reports these stores and reads too, also
in a kernel that does nothing else (``tests/gpu/race_probe.py``). So hazards between two groups of
that kernel are counted separately. ``tests/gpu/test_hopper.py`` checks that each arrival comes
after its group's barrier. Any other hazard is a fault.
"""
# ruff: noqa: T201

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAZARD = re.compile(r"(RAW|WAR|WAW) hazard detected")
SIDE = re.compile(r"(?:Write|Read) Thread \((\d+),.* at (\w+)\+\S+ in (\S+\.py):(\d+)")
GROUP = 128  # threads of a warpgroup
SPECIALIZED = "hopper_state_kernel"
TOTAL = re.compile(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors")


def dispatching(file: str, line: int) -> bool:
    """Whether racecheck attributes Triton's hand-over to this line of a kernel's file."""
    found = list((ROOT / "src/sluice/backends").rglob(Path(file).name))
    if not found:
        return False
    lines = [text.strip() for text in found[0].read_text().splitlines()[line - 1 : line + 1]]
    if len(lines) < 2:
        return False
    here, behind = lines
    # the number of the last barrier's line is that of the ``if`` around the dispatch
    return here.startswith(("@gluon.jit", "def ")) or behind.startswith("gl.warp_specialize(")


def judge(report: str) -> tuple[int, int, list[str]]:
    """How many hazards are the hand-over's, how many lie between warpgroups that mbarriers order,
    and a line for each other one."""
    handed, between, faults = 0, 0, []
    for part in re.split(r"(?==+ Error:)", report):
        if not HAZARD.search(part):
            continue
        sides = SIDE.findall(part)
        groups = {int(thread) // GROUP for thread, *_ in sides}
        if len(sides) == 2 and all(dispatching(file, int(line)) for _, _, file, line in sides):
            handed += 1
        elif len(groups) == 2 and {kernel for _, kernel, *_ in sides} == {SPECIALIZED}:
            between += 1
        else:
            faults.append(" ".join(part.split()[:40]))
    return handed, between, faults


def main() -> int:
    report = sys.stdin.read()
    handed, between, faults = judge(report)
    total = TOTAL.search(report)
    print(
        f"{handed} reports of Triton's hand-over, {between} between groups of warps that mbarriers "
        f"order, {len(faults)} other hazards"
    )
    for fault in faults:
        print(fault)
    if (
        total is None
        or int(total[1]) != handed + between + len(faults)
        or int(total[1]) != int(total[2])
    ):
        print("the report is not whole", total and total[0])
        return 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
