"""Files of state: written whole or not at all, read as data alone.

A file is in the safetensors format: a header of JSON, then bytes. A new one is written beside the
old one, under a name of its own, and takes its place when it is complete and on the disk. So the
old one survives a full disk, and a process that is killed. What a killed process has left is
removed by the next save.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sluice.contract import arguments
from sluice.contract.errors import SluiceError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By the names of the format."""
PARTIAL = ".partial"
FORGOTTEN = 60.0
"""Seconds after which a file that nobody writes any more is taken for a killed process's."""


class PoolError(SluiceError, RuntimeError):
    """A state pool refused a request; nothing was changed."""


class MissingDependencyError(SluiceError, ImportError):
    """This call needs an optional package that is not installed."""


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors, for the user alone (mode 0600), in one step."""
    needed()  # nobody shall save here what cannot be read here
    if path.is_dir() or not path.parent.is_dir():
        got = f"the directory {path}" if path.is_dir() else f"{path}"
        raise PoolError(f"save: expected a file in a directory that exists, got {got}")
    if path.exists() and not path.is_file():
        raise PoolError(f"save: expected a file, got {path}, which is a device or a pipe")
    prefix = f".{path.name[:40]}."
    try:
        _remove_forgotten(path.parent, prefix)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=PARTIAL)
        partial = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                _lock(number)
                for part in _parts(tensors, about):
                    file.write(part)
                file.flush()
                os.fsync(number)
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"save: {path}: expected to write a file, got: {reason}"
        raise PoolError(f"{text}; a file that was there is as it was") from error


def _parts(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> Iterator[Any]:
    """The file in pieces: the length of its header, the header, and every tensor's bytes."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so each is aligned
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name in order:
        x, begin = tensors[name], end
        end += x.numel() * x.element_size()
        header[name] = {
            "dtype": codes[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield _bytes(tensors[name])


def _lock(number: int) -> bool:
    """Mark an open file as being written; False where another process writes it."""
    import fcntl

    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_forgotten(folder: Path, prefix: str) -> None:
    """Remove what processes that were killed have left: old, and not locked."""
    for found in folder.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        with contextlib.suppress(OSError):
            number = os.open(found, os.O_RDWR)
            try:
                old = time.time() - os.fstat(number).st_mtime > FORGOTTEN
                if old and _lock(number):
                    found.unlink()
            finally:
                os.close(number)


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[Any]:
    """A file, opened; nothing of its tensors is read yet. What is wrong with it is a PoolError."""
    arguments.path("load", path)
    safetensors = needed()
    if Path(path).exists() and not Path(path).is_file():
        kind = "a directory" if Path(path).is_dir() else "a device or a pipe"
        raise PoolError(f"load: {path}: expected a state snapshot, got {kind}")
    wrong = (safetensors.SafetensorError, ValueError, LookupError, TypeError, RecursionError)
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except PoolError:
        raise
    except wrong as error:
        raise PoolError(f"load: {path}: expected a state snapshot, got: {error}") from error


def kind(file: Any, name: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Shape and dtype of a tensor by the header. The format's own checks hold them to the file."""
    told = file.get_slice(name)
    return tuple(told.get_shape()), DTYPES.get(told.get_dtype())


def copied(file: Any, name: str) -> torch.Tensor:
    """A tensor in memory of its own: the one that safetensors gives changes with the file."""
    tensor: torch.Tensor = file.get_tensor(name).clone()
    return tensor


def checksum(x: torch.Tensor) -> str:
    """The SHA-256 of a contiguous tensor's bytes."""
    return hashlib.sha256(_bytes(x.cpu())).hexdigest()


def _bytes(x: torch.Tensor) -> Any:
    """The memory of a contiguous CPU tensor, which must outlive it."""
    size = x.numel() * x.element_size()
    return (ctypes.c_ubyte * size).from_address(x.data_ptr())


def needed() -> ModuleType:
    """safetensors, or an error that says why not."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError(
            f"saving and loading state needs safetensors ({error}): pip install 'sluice-gdn[pool]'"
        ) from error
    except Exception as error:  # a broken install raises anything
        raise MissingDependencyError(
            f"saving and loading state needs safetensors, which cannot be imported: {error!r}"
        ) from error
    return safetensors
