"""What every test shares: fixed hypothesis settings, and memory that is never clean by luck."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from sluice.testing.inputs import nan_empty

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
