"""The conditions of a run: machine, threads, versions, clocks, commit. No user names or paths."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import sluice

PACKAGES = ("torch", "triton", "numba", "transformers", "onnxruntime", "onnx")
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"


def conditions(device: torch.device, threads: int) -> dict[str, Any]:
    """What a reader needs to compare one number with another."""
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu(),
        "cores": cores(),
        "threads": threads,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
    }
    found["name"] = found["cpu"]
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        found |= {
            "name": p.name,
            "sm": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "gpu_memory_gib": round(p.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _smi("driver_version"),
            "clocks": clocks(),
        }
    return found


def clocks() -> dict[str, str] | None:
    """Current GPU clocks, temperature and power; None without nvidia-smi."""
    text = _smi(CLOCKS)
    if text is None:
        return None
    return dict(zip(CLOCKS.split(","), (x.strip() for x in text.split(",")), strict=False))


def commit() -> str | None:
    """The commit of the sources in use, "+" if they differ from it; None outside a checkout."""
    folder = Path(sluice.__file__).parent
    head = _run("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _run("git", "-C", str(folder), "status", "--porcelain", "--", str(folder))
    return head + ("+" if changed else "")


def cores() -> int:
    """Cores this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _smi(query: str) -> str | None:
    found = _run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _run(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
