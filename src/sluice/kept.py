"""A dictionary of bounded size, for what is made once and used by many calls."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Hashable
from typing import Any


class Kept:
    """Values by key, as many as ``most``.

    When it is full, one new value in ``ONE_IN`` is kept, instead of one drawn at random. So if more
    keys than there is room for come in turn, nearly as many are found as fit. If the value that was
    not used for longest made room, none would be found: it is always the one needed next. A key
    that comes often is kept after some calls, and keys that come once push out few of those.
    """

    ONE_IN = 8

    def __init__(self, most: int) -> None:
        self.most = most
        self.made = 0
        """Values that had to be made so far."""
        self._found: dict[Hashable, Any] = {}
        self._keys: list[Hashable] = []
        self._dice = random.Random(0)
        self.get = self._found.get
        self._set_lock()
        os.register_at_fork(after_in_child=self._set_lock)

    def _set_lock(self) -> None:
        """A forked process has its own: another thread of its parent may hold this one."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def keep(self, key: Hashable, value: Any) -> None:
        """Keep a value that was made, or not."""
        with self._lock:
            self.made += 1
            if key in self._found:  # made by two threads at once
                return
            if len(self._keys) < self.most:
                self._keys.append(key)
            elif self._dice.randrange(self.ONE_IN):
                return
            else:
                place = self._dice.randrange(self.most)
                del self._found[self._keys[place]]
                self._keys[place] = key
            self._found[key] = value

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self._keys.clear()
