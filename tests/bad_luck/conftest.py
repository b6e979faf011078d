"""Shared by the tests of bad luck."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice import calls
from tests.gpu import fake_driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    """A driver of CUDA that keeps what it is given and launches nothing."""
    pytest.importorskip("triton")
    from sluice.backends import triton

    if triton.interpreted():
        pytest.skip("nothing is launched by the driver there")
    yield fake_driver.install(monkeypatch)
    calls.forget()
