"""The parameter block of a kernel: its layout, and its memory.

A block has 8 bytes per field: the head, addresses of tensors, other integers, floats; then a
counter for each thread. Kernels see it as a record (``struct_view.py``).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import Any

from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.cpu.threads import COUNTER_BYTES


class Fields:
    """The layout of a block.

    Every block has the same head (``HEAD``), which ``launch.py`` and ``threads.py`` use. Kernels
    see a block through the function ``view``.
    """

    HEAD = (
        "tasks"  # how many
        " team threads"  # torch's threads, and those of this call that have a part of the tasks
        " worker"  # the address of the kernel that all threads call
        " parallel identify"  # addresses: of GOMP_parallel, and of what numbers threads
        " counters"  # the address of the counters
        " trusted"  # whether values need no look
        " crowd"  # the address of what is known of busy neighbours
        " clock"  # the address of clock_gettime
        " done_at"  # when the calling thread found no task left
        " alone work"  # how long it took one thread; what the last team's threads took together
    )

    def __init__(self, name: str, addresses: str, ints: str = "", floats: str = "") -> None:
        ints = f"{self.HEAD} {addresses} {ints}"
        names = f"{ints} {floats}".split()
        assert len(set(names)) == len(names)
        self.offset = {field: 8 * i for i, field in enumerate(names)}
        self.addresses = addresses.split()
        self.view = struct_view(name, ints, floats)
        count = len(ints.split())
        self._all = struct.Struct(f"={count}q{len(names) - count}d")

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """A block with these fields set and all others zero, without counters."""
        assert values.keys() <= self.offset.keys(), values.keys() - self.offset.keys()
        packed = [0] * len(self.offset)
        for field, value in values.items():
            packed[self.offset[field] // 8] = value
        return self._all.pack(*packed)

    def again(self, memory: Any, values: Mapping[str, int]) -> bytes:
        """The template of a block that may be in use, with these fields of integers set anew."""
        head = 8 * len(self.HEAD.split())
        template = bytearray(head) + memory[head : self._all.size]
        for field, value in values.items():
            _put(template, self.offset[field], value)
        return bytes(template)

    @functools.cache  # noqa: B019 (layouts live as long as the process)
    def address_struct(self, given: tuple[str, ...]) -> tuple[struct.Struct, int]:
        """A struct of the address fields ``given``, in the layout's order, and where it begins.

        Addresses lie together, so one ``pack_into`` writes them all, and zeros between them.
        """
        kinds = ["q" if name in given else "8x" for name in self.addresses]
        return struct.Struct("@" + "".join(kinds)), self.offset[self.addresses[0]]


class Block:
    """The memory of a block: a template in which only the addresses of tensors are missing."""

    __slots__ = ("__weakref__", "memory", "team", "where")

    def __init__(self, template: bytes, offsets: Mapping[str, int], team: int) -> None:
        room = COUNTER_BYTES * (team + 2)  # one counter more than threads, at a multiple of 64
        self.memory = (ctypes.c_char * (len(template) + room)).from_buffer_copy(
            template + bytes(room)
        )
        self.where, self.team = ctypes.addressof(self.memory), team
        end = self.where + len(template)
        self.put(offsets["counters"], end + -end % COUNTER_BYTES)

    def put(self, offset: int, value: int) -> None:
        """Set a field of integers."""
        _put(self.memory, offset, value)

    def get(self, offset: int) -> int:
        """Read one."""
        value: int = _get(self.memory, offset)[0]
        return value


_put, _get = struct.Struct("=q").pack_into, struct.Struct("=q").unpack_from
