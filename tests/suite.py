"""The backends that a machine can run, and how a test calls one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sluice
from sluice import dispatch
from sluice.testing.case import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = DEVICE == "cuda"
"""Whether GPU kernels run as they are compiled: on a GPU, or in the emulator, which sets this."""


def backends(op: str) -> list[str]:
    """The backends that have ``op`` and can run on this machine."""
    names = ("verify", "commit") if op == "verify" else (op,)
    return [
        name
        for name in dispatch.ORDER
        if dispatch.unavailable(name) is None
        and all(needed in dispatch.served(name) for needed in names)
        and DEVICE in dispatch.devices(name)
    ]


def each_backend(*ops: str) -> list[Any]:
    """(op, backend) pairs for ``parametrize``."""
    return [pytest.param(op, b, id=f"{op}-{b}") for op in ops for b in backends(op)]


def run_or_skip(case: Case, inputs: dict[str, Any], backend: str) -> dict[str, torch.Tensor]:
    """Run a case; a backend's refusal is a skip with its reason, a contract error is not."""
    try:
        return case.run(sluice, inputs, backend=backend)
    except sluice.BackendError as refusal:
        pytest.skip(str(refusal))
