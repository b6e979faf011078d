"""Kernels on disk: damaged files are compiled anew, and a folder that fails costs a warning."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from sluice.backends.cpu import kernel_cache, numba_private
from sluice.backends.cpu.garbage import no_search_for_garbage
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.memory import write_int
from sluice.backends.cpu.struct_view import struct_view

cell = struct_view("cell", "address")


def answer(block):
    write_int(cell(block).address, 42)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba_private, "cache_folder", lambda: str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """Names of what was compiled and not loaded."""
    names = []
    whole = numba_private.lower

    def counting(function, signature):
        names.append(function.__name__)
        return whole(function, signature)

    monkeypatch.setattr(numba_private, "lower", counting)
    return names


def run() -> int:
    value = torch.zeros(1, dtype=torch.int64)
    block = torch.tensor([value.data_ptr()])
    Kernel("answer", answer).function(block.data_ptr())
    return int(value)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_kernel_is_compiled_once_and_then_loaded(folder, compiled):
    assert run() == run() == 42
    assert compiled == ["answer"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_compiled_anew_with_a_warning(folder, compiled, damage):
    run()
    path = only_file(folder)
    content = bytearray(path.read_bytes())
    for place in (5, 20, len(content) // 2, len(content) - 1):
        broken = bytearray(content)
        broken[place] ^= 0x10
        path.write_bytes({"flip": broken, "cut": content[:place], "empty": b""}[damage])
        kernel_cache._warned.clear()
        with pytest.warns(RuntimeWarning, match="is damaged"):
            assert run() == 42
        assert path.read_bytes() == content or only_file(folder)
    assert len(compiled) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 42
    assert len(compiled) == 5


def test_a_folder_that_cannot_be_written_costs_one_warning(folder, compiled):
    folder.write_text("this is a file, so no folder can be made here")
    with pytest.warns(RuntimeWarning, match="cannot be kept") as caught:
        assert run() == run() == 42
    assert len(caught) == 1
    assert compiled == ["answer", "answer"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_without_room_or_permission_costs_one_warning(folder, compiled, code, monkeypatch):
    """Permissions themselves do not serve here: they do not bind every user that runs tests."""

    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    folder.mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", refuse)
    with pytest.warns(RuntimeWarning, match=os.strerror(code)) as caught:
        assert run() == run() == 42
    assert len(caught) == 1
    assert compiled == ["answer", "answer"]


def test_a_write_that_fails_half_way_leaves_nothing_behind(folder, compiled, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert run() == 42
    assert list(folder.iterdir()) == []


def test_a_folder_that_can_only_be_read_serves_what_it_holds(folder, compiled, monkeypatch):
    assert run() == 42

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 42
    assert compiled == ["answer"]


def test_a_file_that_cannot_be_read_is_compiled_anew(folder, compiled):
    assert run() == 42
    path = only_file(folder)
    path.unlink()
    path.mkdir()  # reading it fails for every user
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert run() == 42
    assert compiled == ["answer", "answer"]


def test_a_file_made_from_something_else_is_not_loaded(folder):
    kernel_cache.keep([folder], "some", "one version", b"code")
    assert kernel_cache.find([folder], "some", "one version") == b"code"
    assert kernel_cache.find([folder], "some", "another version") is None
    moved = folder / kernel_cache.file_name("some", "another version")
    only_file(folder).rename(moved)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert kernel_cache.find([folder], "some", "another version") is None


def test_a_kernel_in_a_later_folder_is_found(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    kernel_cache.keep([second], "some", "key", b"code")
    assert kernel_cache.find([first, second], "some", "key") == b"code"


def test_a_folder_keeps_few_files_of_one_kernel(tmp_path):
    for number in range(kernel_cache.KEPT + 3):
        kernel_cache.keep([tmp_path], "some", f"version {number}", b"code")
    assert len(list(tmp_path.iterdir())) == kernel_cache.KEPT


CALL = """
import torch, sluice
x = torch.ones(2, 64)
print(sluice.rms_norm_gated(x, x, torch.ones(64), backend="cpu").sum().item())
"""


def test_one_wrong_byte_on_disk_does_not_end_the_process(tmp_path):
    def call() -> subprocess.CompletedProcess[str]:
        command = ["env", f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c", CALL]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    first = call()
    assert first.returncode == 0, first.stderr
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)
    second = call()
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert second.stderr.count("RuntimeWarning: sluice") == 2
    third = call()
    assert third.returncode == 0, third.stderr
    assert third.stdout == first.stdout
    assert "damaged" not in third.stderr


def test_the_search_for_garbage_goes_on_as_before():
    """It rests while Numba is imported and kernels are compiled."""
    assert gc.isenabled()
    with no_search_for_garbage():
        assert not gc.isenabled()
        with no_search_for_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="on the way"), no_search_for_garbage():
        raise ValueError("on the way")
    assert gc.isenabled()
