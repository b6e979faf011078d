"""Python imports this module when it starts: with this folder on PYTHONPATH, Triton is missing."""

import importlib.metadata
import sys

sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it fails
_version = importlib.metadata.version


def version(name: str) -> str:
    """The version of a package other than Triton."""
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return _version(name)


importlib.metadata.version = version
