"""The only reader of environment variables. None of them changes a number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

_validate: ContextVar[bool] = ContextVar(
    "sluice_validate", default=os.environ.get("SLUICE_VALIDATE", "0") not in ("", "0")
)


@contextlib.contextmanager
def validate(enabled: bool = True) -> Iterator[None]:
    """Check values too (slot range, duplicates, ``cu_seqlens``, finite gates), on a GPU as well.

    On a CPU values are always checked. On a GPU each check waits for the device, so there they are
    made only inside this scope (or with ``SLUICE_VALIDATE=1``): for debugging and tests, not for
    serving.

    >>> import sluice
    >>> with sluice.validate():
    ...     pass
    """
    token = _validate.set(enabled)
    try:
        yield
    finally:
        _validate.reset(token)


def validating() -> bool:
    """Whether a ``validate()`` scope (or ``SLUICE_VALIDATE=1``) is active."""
    return _validate.get()
