"""How much of the machine other programs use while something is timed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

BUSY = 0.1
"""The share of the cores, used by others, above which times are not reliable."""


class Neighbours:
    """How much of the cores other programs use from now on; None where this is unknown."""

    def __init__(self) -> None:
        self.begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """(seconds all cores were busy, seconds of this process, now)."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
            user, nice, system, _, _, irq, soft = map(float, fields[:7])
            busy = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
            return busy, time.process_time(), time.monotonic()
        return None

    def share(self) -> float | None:
        """Between 0 and 1, of all cores of the machine."""
        now = self._read()
        if now is None or self.begin is None:
            return None
        busy, own, wall = (a - b for a, b in zip(now, self.begin, strict=True))
        whole = wall * (os.cpu_count() or 1)
        return round(min(1.0, max(0.0, (busy - own) / whole)), 3) if whole > 0 else None
