"""Shared by all tests: what runs first, fixed hypothesis settings, memory that holds NaN."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from sluice.backends.triton import toolchain
from sluice.testing.inputs import nan_empty
from tests import interpreter

with contextlib.suppress(ModuleNotFoundError):  # no GPU test needs it, so a GPU machine may lack it
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "sluice",
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("sluice")
    # for `make faults`, which asks whether a test fails and not by how small an example
    settings.register_profile(
        "unshrunk", settings.get_profile("sluice"), phases=[Phase.explicit, Phase.generate]
    )

EXAMPLES = Path(__file__).parents[1] / "examples"

if toolchain.interpreted():
    interpreter.hasten()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="every combination, as `make test-long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without what is ``long``. What is ``slow`` comes first, so that workers end together.

    Of one process it comes last: with ``-x``, a quick test that fails spares it.
    """
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    shared = hasattr(config, "workerinput")
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None) == shared)


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """Reliability row 24: every torch.empty holds NaN, so that a missing store shows."""
    with nan_empty():
        yield


@pytest.fixture(scope="module")
def serve():
    """``examples/serve.py``."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("serve")
    sys.path.remove(str(EXAMPLES))
    del sys.modules["serve"], sys.modules["hybrid_model"]


@pytest.fixture
def two_threads():
    """torch has two threads in this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class _Deaf(list):
    """A list of log handlers that ignores new ones."""

    def append(self, handler: object) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def _no_trace_records():
    """pytest listens to every logger, and torch's trace log takes 4/5 of an export's time."""
    logger = logging.getLogger("torch.__trace")
    kept, logger.handlers = logger.handlers, _Deaf()
    yield
    logger.handlers = kept
