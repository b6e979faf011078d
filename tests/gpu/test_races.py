"""Reading racecheck's report: Triton's hand-over is distinguished from a fault."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import races

KERNEL = "src/sluice/backends/hopper/kernels/state_kernel.py"


def report(*sides: tuple[int, int]) -> str:
    parts = [
        f"""========= Error: Potential RAW hazard detected at __shared__ 0x2c808 in block (3,0,0) :
=========     Write Thread (31,0,0) at hopper_state_kernel+0x12a0 in state_kernel.py:{write}
=========     Read Thread (192,0,0) at hopper_state_kernel+0x120 in state_kernel.py:{read}
=========     Current Value : 1
"""
        for write, read in sides
    ]
    n = len(sides)
    total = f"========= RACECHECK SUMMARY: {n} hazards displayed ({n} errors, 0 warnings)"
    return "".join(parts) + total


def lines_of(text: str) -> list[int]:
    lines = (races.ROOT / KERNEL).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.strip().startswith(text)]


def test_the_hand_over_is_told_from_a_fault():
    """Reliability row 1: any other hazard in the report is a fault."""
    first, dispatch = lines_of("@gluon.jit")[0], lines_of("gl.warp_specialize(")[0] - 1
    store = lines_of("mbarrier.init")[0]
    text = report((first, first), (dispatch, first), (store, first))
    handed, between, faults = races.judge(text)
    assert (handed, between, faults) == (2, 1, [])
    # the same hazard between two threads of one group, or in another kernel
    handed, between, faults = races.judge(text.replace("(192,0,0)", "(96,0,0)"))
    assert (handed, between, len(faults)) == (2, 0, 1)
    assert f"state_kernel.py:{store}" in faults[0]
    handed, between, faults = races.judge(text.replace("hopper_state_kernel", "decode_kernel"))
    assert (handed, between, len(faults)) == (2, 0, 1)


def test_a_file_of_nobody_is_a_fault():
    assert not races.dispatching("elsewhere.py", 1)
    assert Path(races.ROOT, KERNEL).is_file()
