"""Whether kernels can be compiled here, and by what. Triton is asked only if it must be."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys

from sluice import settings
from sluice.backends.triton import shipped

OLDEST = (3, 5)  # tuples carried by a loop, None as a pointer


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    triton = sys.modules.get("triton")
    if triton is not None and hasattr(triton, "knobs"):
        return bool(triton.knobs.runtime.interpret)
    return settings.triton_interprets() and importlib.util.find_spec("triton") is not None


@functools.cache
def version() -> str | None:
    """The version of the Triton that is installed; None without one."""
    triton = sys.modules.get("triton")
    if triton is None:
        try:
            return importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:  # other names: pytorch-triton-rocm, ...
            try:
                import triton
            except Exception:  # a broken install raises anything; ``unable`` says what
                return None
    found: str = triton.__version__
    return found


def release(text: str) -> tuple[int, int]:
    """(3, 6) of "3.6.0"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def unable() -> str | None:
    """Why nothing can be compiled here; None if Triton can compile."""
    found = version()
    if found is None and not _is_there():
        return "the package triton is not installed"
    if found is not None and release(found) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, found {found}"
    try:
        from sluice.backends.triton import triton_private
    except Exception as error:
        return f"the package triton cannot be imported: {error!r}"
    return None if interpreted() else triton_private.missing()


def _is_there() -> bool:
    """Whether there is a Triton, which may be broken."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def made_by() -> tuple[int, int] | None:
    """The release of Triton whose code runs here: of the kernels that come compiled, if any."""
    kernels = shipped.installed()
    found = version() if kernels is None else kernels.triton
    return None if found is None else release(found)
