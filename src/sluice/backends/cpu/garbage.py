"""A pause of Python's search for garbage.

torch leaves some hundred thousand objects in a process. Importing Numba and compiling make so many
more that Python looks through all of them, for a tenth of a second each time, and finds next to
nothing.
"""

from __future__ import annotations

import gc


class no_search_for_garbage:  # noqa: N801 (used as a function)
    """In this scope Python does not look for garbage; afterwards as it did before.

    What was made meanwhile then counts as old: it is looked through when everything is.
    """

    def __enter__(self) -> None:
        self.searching = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.searching:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
