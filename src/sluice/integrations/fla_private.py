"""What sluice uses of flash-linear-attention that FLA does not promise. Tried with fla-core 0.6.0.

FLA's registry of backends has a public ``register`` and no way back, so taking a backend out again
needs its dictionaries, and whether the registry is used at all is a private flag. If one of these
names is gone, ``install`` says so before it changes anything. ``tests/integrations/test_fla.py``
fails if one of them is gone.
"""

from __future__ import annotations

import inspect
from typing import Any

from sluice.contract.errors import SluiceError

_NAMES = ("_DISPATCH_DISABLED", "_get_operation_registry", "_function_registries")


def check(backends: Any) -> None:
    """Refuse a release of FLA whose registry this module does not know."""
    missing = [name for name in _NAMES if not hasattr(backends, name)]
    if missing:
        raise SluiceError(f"install: this FLA's registry has no {', '.join(missing)}; 0.6 has")


def switched_off(backends: Any) -> bool:
    """Whether FLA ignores its registry (``FLA_DISABLE_BACKEND_DISPATCH=1``)."""
    return bool(backends._DISPATCH_DISABLED)


def unregister(backends: Any, entry: Any, name: str) -> None:
    """Take a backend out of the registry of an operation (a name) or a function."""
    if isinstance(entry, str):
        registry = backends._get_operation_registry(entry)
    else:
        registry = backends._function_registries[inspect.unwrap(entry)]
    registry._backends.pop(name, None)
