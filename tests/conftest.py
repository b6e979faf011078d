"""Shared by all tests: fixed hypothesis settings, and uninitialised memory that holds NaN."""

from __future__ import annotations

import contextlib
import logging

import pytest

from sluice.testing.inputs import nan_empty

with contextlib.suppress(ModuleNotFoundError):  # no GPU test needs it, so a GPU machine may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "sluice",
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("sluice")


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """Reliability row 24: every torch.empty holds NaN, so that a missing store shows."""
    with nan_empty():
        yield


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
