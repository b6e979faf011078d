"""Other libraries' functions under their own names, argument orders and return shapes.

- ``sluice.compat.fla``: flash-linear-attention 0.6.0
- ``sluice.compat.causal_conv1d``: causal-conv1d 1.7
- ``sluice.compat.flashinfer``: FlashInfer 0.7.2

States keep upstream's layout, and are updated in place where upstream does so. Every option is
honoured, or refused by an error that names it; docs/compat.md lists them. None of the libraries is
imported. All functions run on CPU and GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.compat import causal_conv1d as causal_conv1d
    from sluice.compat import fla as fla
    from sluice.compat import flashinfer as flashinfer
else:

    def __getattr__(name: str) -> Any:
        """A library's functions, imported when they are first asked for."""
        if name in ("causal_conv1d", "fla", "flashinfer"):
            return importlib.import_module(f"sluice.compat.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
