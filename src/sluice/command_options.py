"""Options that several commands have: each is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

from sluice.contract.errors import SluiceError


def device(name: str | None) -> str:
    """The name of a device that is there: by default the GPU where there is one."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        known = torch.device(name)
    except RuntimeError:
        known = None
    if known is None or known.type not in ("cpu", "cuda"):
        raise SluiceError(f"--device: expected cpu, cuda or cuda:1, got {name!r}")
    found = torch.cuda.device_count()
    if known.type == "cuda" and (known.index or 0) >= found:
        there = f"one of cuda:0 to cuda:{found - 1}" if found else "cpu: torch sees no CUDA device"
        raise SluiceError(f"--device: expected {there}, got {name!r}")
    return name


def new_file(option: str, path: Path | None) -> None:
    """Require a place where a file can be written, or none."""
    if path is None:
        return
    if path.is_dir():
        raise SluiceError(f"{option}: expected a file, got the directory {path}")
    if not path.parent.is_dir():
        raise SluiceError(f"{option}: expected a file in a directory that exists, got {path}")
