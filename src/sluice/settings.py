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


def kernels_directory() -> str | None:
    """SLUICE_KERNELS: the directory of compiled kernels to use instead of the installed package.

    Empty: use none. None where it is not set. Compiled or not, kernels give the same numbers.
    """
    return os.environ.get("SLUICE_KERNELS")


def triton_interprets() -> bool:
    """Whether TRITON_INTERPRET asks Triton to run kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def triton_settings() -> list[str]:
    """The variables that are set and change what Triton compiles or launches."""
    names = ["DEBUG", "INSTRUMENTATION_MODE", "KERNEL_OVERRIDE", "KERNEL_DUMP", "ALWAYS_COMPILE"]
    names += ["ENABLE_ASAN"]
    return [f"TRITON_{name}" for name in names if os.environ.get(f"TRITON_{name}", "0") != "0"]
