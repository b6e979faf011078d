"""Real processes over gloo, 2 and 4 ranks: every check of checks_*.py in one group of each size.

One group runs all checks and reports each failure, so torch is imported once, not once per check.
"""

from __future__ import annotations

import time
import traceback

import pytest

from tests.distributed import checks_context, checks_heads
from tests.distributed.processes import on_ranks, values

CHECKS = {"context": checks_context.CHECKS, "heads": checks_heads.CHECKS}


def run_checks(rank, size, group):
    """Failures by name, and seconds."""
    failures, seconds = {}, {}
    for check in CHECKS[group]:
        start = time.perf_counter()
        try:
            check(rank, size)
        except Exception:
            failures[check.__name__] = traceback.format_exc()
        seconds[check.__name__] = round(time.perf_counter() - start, 2)
        if failures:
            break  # ranks may be out of step, so later checks would mean nothing
    return failures, seconds


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("group", CHECKS)
def test_checks_on_ranks(group, size, tmp_path):
    results = values(on_ranks(run_checks, size, tmp_path, size, group))
    failed = [
        f"rank {rank}: {text}" for rank, (all_, _) in enumerate(results) for text in all_.values()
    ]
    # last, the ranks that only report another rank's failure
    failed.sort(key=lambda text: "RankError" in text)
    assert not failed, "\n".join(failed)
    assert results[0][1].keys() == {check.__name__ for check in CHECKS[group]}
