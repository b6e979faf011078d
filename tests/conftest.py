"""What every test shares: fixed hypothesis settings, and memory that is never clean by luck."""

from __future__ import annotations

import contextlib
import logging

import pytest

from sluice.testing.inputs import nan_empty

with contextlib.suppress(ModuleNotFoundError):  # a GPU machine may do without; no GPU test needs it
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
    """Reliability row 24: every torch.empty holds NaN, so that a dropped store shows."""
    with nan_empty():
        yield


class _Deaf(list):
    """Handlers of a logger that takes none."""

    def append(self, handler: object) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def _no_trace_records():
    """pytest listens to every logger, so torch describes all it traces: 4/5 of an export's time."""
    logger = logging.getLogger("torch.__trace")
    kept, logger.handlers = logger.handlers, _Deaf()
    yield
    logger.handlers = kept
