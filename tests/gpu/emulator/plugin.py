"""Existing tests on emulated GPUs:

    pytest -p tests.gpu.emulator.plugin --emulate sm_80 tests/test_contract.py -k triton-

At the end it says which kernels ran, how often, and how many operations of a warp they took.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest

_driver: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", default="sm_80", help="the GPU that is emulated")


def pytest_configure(config: pytest.Config) -> None:
    from tests import suite
    from tests.gpu.emulator import driver

    suite.COMPILED = True
    patch = pytest.MonkeyPatch()
    _driver.append(driver.install(patch, config.getoption("--emulate")))
    config.add_cleanup(patch.undo)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for kernel in _driver[0].kernels.values():
        for i, n in enumerate((1, kernel.launches, kernel.executed)):
            found[kernel.program.name][i] += n
    terminalreporter.write_line("kernel: variants, launches, operations")
    for name, numbers in sorted(found.items()):
        terminalreporter.write_line("  {}: {:,}, {:,}, {:,}".format(name, *numbers))
