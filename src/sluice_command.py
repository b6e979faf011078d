"""The program ``sluice``: outside the package, so that an interrupt while it is imported is caught.

Importing the package imports torch, which takes seconds.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run ``sluice.cli``; returns its exit status, 130 after an interrupt."""
    try:
        from sluice.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("sluice: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
