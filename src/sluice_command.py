"""The program ``sluice``: outside the package, so that an interrupt while it is imported is caught.

Importing the package imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run ``sluice.cli``; returns its exit status, 130 after an interrupt.

    141 where nobody reads the output any more, as in ``sluice doctor | head -1``.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        if handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _end)
        from sluice.cli import main as command

        signal.signal(signal.SIGINT, handler)
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("sluice: interrupted\n")
        return 130
    except BrokenPipeError:
        # what is still buffered goes nowhere, or Python would complain when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _end(*_: Any) -> None:
    """End at once: a module that is being imported may catch an exception, and stay half made."""
    sys.stderr.write("sluice: interrupted\n")
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
