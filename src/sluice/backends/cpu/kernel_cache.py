"""Compiled kernels on disk: one file for each, read only if its hash fits.

LLVM ends the process when it is given damaged machine code. So a file holds a hash of what follows
it and of what it was made from, and a file that does not fit is compiled anew. So is one that
another user owns or may write, because a hash says nothing about intent. A folder that cannot be
read or written costs a warning and the time to compile, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

MAGIC = b"sluice kernel 1\n"
DIGEST_BYTES = 32
KEPT = 8
"""Files of one kernel that a folder keeps: of other versions and processors."""
FORGOTTEN = 3600.0
"""Seconds after which a file that was never completed is removed."""

_warned: set[str] = set()


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()


def file_name(name: str, key: str) -> str:
    """The file of a kernel made from what ``key`` says."""
    return f"sluice-{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.kernel"


def holds(folders: Sequence[Path], name: str, key: str) -> bool:
    """Whether there is a file of a kernel, damaged or not."""
    return any((folder / file_name(name, key)).is_file() for folder in folders)


def find(folders: Sequence[Path], name: str, key: str) -> bytes | None:
    """What ``keep`` wrote, or None: there is no such file, or it is damaged."""
    for folder in folders:
        path = folder / file_name(name, key)
        try:
            found = _read(path)
        except OSError:
            continue
        if found is None:
            _warn(f"{path} is not this user's alone: the CPU kernel {name!r} is compiled anew")
            continue
        start = len(MAGIC) + DIGEST_BYTES
        payload = found[start:]
        if found[:start] == MAGIC + _digest(key, payload):
            return payload
        _warn(f"{path} is damaged: the CPU kernel {name!r} is compiled anew")
    return None


def _read(path: Path) -> bytes | None:
    """A file's content; None if another user could have written it.

    Who owns these sources may write their cache, too: that one's code runs here anyway.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for ever
    with os.fdopen(number, "rb") as file:
        about = os.fstat(number)
        trusted = (os.geteuid(), 0, Path(__file__).stat().st_uid)
        others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if about.st_uid not in trusted or others or not stat.S_ISREG(about.st_mode):
            return None
        return file.read()


def keep(folders: Sequence[Path], name: str, key: str, payload: bytes) -> None:
    """Write a kernel into the first folder that takes it."""
    errors = []
    for folder in folders:
        try:
            _write(folder, file_name(name, key), MAGIC + _digest(key, payload) + payload)
        except OSError as error:
            errors.append(f"{folder}: {error.strerror or error}")
        else:
            _forget_old(folder, name)
            return
    where = "; ".join(errors)
    _warn(
        f"compiled CPU kernels cannot be kept ({where}), so every process compiles them; "
        "NUMBA_CACHE_DIR may name another folder"
    )


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file at once, for this user alone: nobody sees a part of it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, path = tempfile.mkstemp(dir=folder, prefix=f".{name}")
    temporary = Path(path)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        temporary.replace(folder / name)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _forget_old(folder: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        files = sorted(folder.glob(f"sluice-{name}-*.kernel"), key=lambda x: -x.stat().st_mtime)
        for path in files[KEPT:]:
            path.unlink()
        for path in folder.glob(f".sluice-{name}-*"):  # of a process that was killed as it wrote
            if time.time() - path.stat().st_mtime > FORGOTTEN:
                path.unlink()


def _warn(text: str) -> None:
    """Say something once."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"sluice: {text}", RuntimeWarning, stacklevel=2)
