"""What every test shares: fixed hypothesis settings, and memory that is never clean by luck."""

from __future__ import annotations

import contextlib

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
