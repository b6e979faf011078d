"""Compiled kernels on disk that are foreign, forbidden, half written or written twice at once."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from sluice.backends.cpu import kernel_cache, numba_private
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.memory import write_int
from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.triton import shipped
from tests.bad_luck.luck import die, ended, in_child

place = struct_view("place", "address")


def fortune(block):
    write_int(place(block).address, 7)


def run() -> int:
    value = torch.zeros(1, dtype=torch.int64)
    block = torch.tensor([value.data_ptr()])
    Kernel("fortune", fortune).function(block.data_ptr())
    return int(value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba_private, "cache_folder", lambda: str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """Names of what was compiled and not loaded."""
    names, whole = [], numba_private.lower

    def counting(function, signature):
        names.append(function.__name__)
        return whole(function, signature)

    monkeypatch.setattr(numba_private, "lower", counting)
    return names


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def as_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file to somebody else, or take its owner for somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        me, real = os.geteuid(), os.fstat
        parts = list(range(10))

        def foreign(number):
            found = real(number)
            changed = [me + 1 if i == 4 else found[i] for i in parts]
            return os.stat_result(changed)

        monkeypatch.setattr(os, "fstat", foreign)


def test_kernels_and_their_folder_are_the_users_alone(folder, compiled):
    before = os.umask(0)
    try:
        assert run() == 7
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


def test_a_kernel_of_another_user_is_not_loaded(folder, compiled, monkeypatch):
    run()
    as_another_user(only_file(folder), monkeypatch)
    with pytest.warns(RuntimeWarning, match="is not this user's alone: the CPU kernel 'fortune'"):
        assert run() == 7
    assert compiled == ["fortune", "fortune"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_kernel_that_others_may_write_is_not_loaded(mode, folder, compiled):
    run()
    only_file(folder).chmod(mode)
    with pytest.warns(RuntimeWarning, match="is not this user's alone"):
        assert run() == 7
    assert compiled == ["fortune", "fortune"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 7  # the new one took its place
    assert len(compiled) == 2


def test_a_pipe_in_place_of_a_kernel_is_not_waited_for(folder, compiled):
    run()
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(RuntimeWarning, match="is not this user's alone"):
        assert run() == 7


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_takes_no_file_costs_a_warning(number, folder, compiled, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.warns(RuntimeWarning, match=f"cannot be kept .*{os.strerror(number)}"):
        assert run() == 7
    assert not list(folder.iterdir())


def test_a_folder_that_is_read_only_is_read(folder, compiled, monkeypatch):
    run()
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: pytest.fail("it is written"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 7
    assert compiled == ["fortune"]


def test_a_disk_that_fills_while_a_kernel_is_written_leaves_no_file(folder, compiled, monkeypatch):
    def full(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert run() == 7
    assert not list(folder.iterdir())


def test_a_process_killed_as_it_writes_a_kernel_leaves_none_that_is_loaded(folder, compiled):
    def killed():
        Path.replace = lambda self, target: die()
        run()

    assert in_child(killed) < 0
    left = only_file(folder)
    assert left.name.startswith(".")
    assert run() == 7
    assert compiled == ["fortune"]
    old = time.time() - 2 * kernel_cache.FORGOTTEN
    os.utime(left, (old, old))
    kernel_cache.keep([folder], "fortune", "another version", b"code")
    assert not left.exists()


def test_two_processes_that_compile_at_once_both_get_a_kernel(folder):
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if run() == 7 else 2
            finally:
                os._exit(status)
        pids.append(pid)
    assert [ended(pid) for pid in pids] == [0, 0]
    assert only_file(folder).suffix == ".kernel"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 7


# ---- kernels that come compiled, for a GPU -------------------------------------------------------

WHOLE: dict[str, Any] = {
    "format": shipped.FORMAT,
    "triton": "3.6.0",
    "sources": "0",
    "parameters": {"decode_kernel": [["x", False, False, False]]},
    "targets": {
        "sm_90a": {
            "status": "run",
            "kernels": {
                "key": {
                    "sha256": "0" * 64,
                    "name": "decode_kernel",
                    "num_warps": 4,
                    "shared": 0,
                    "boxes": [],
                }
            },
        }
    },
}


def manifest(folder: Path, **told: Any) -> Path:
    (folder / shipped.MANIFEST).write_text(json.dumps({**WHOLE, **told}))
    return folder


@pytest.mark.parametrize(
    "told",
    [
        {"targets": []},
        {"targets": {"sm_90a": {}}},
        {"targets": {"sm_90a": {"kernels": []}}},
        {"targets": {"sm_90a": {"kernels": {}}}},
        {"parameters": None},
        {"parameters": {"decode_kernel": 3}},
        {"parameters": {"decode_kernel": [["x"]]}},
        {"triton": "new"},
        {"triton": None},
    ],
)
def test_a_damaged_manifest_is_refused_as_a_whole(told, tmp_path):
    assert shipped.Shipped(manifest(tmp_path)).serves("key", "sm_90a")
    with pytest.raises(ValueError, match="is damaged"):
        shipped.Shipped(manifest(tmp_path, **told))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '"text"', "{", "[" * 100_000, "{}", '{"format": 1}', "\0"]
)
def test_a_manifest_that_is_none_costs_the_shipped_kernels_only(text, tmp_path, monkeypatch):
    (tmp_path / shipped.MANIFEST).write_text(text)
    monkeypatch.setattr(shipped.settings, "kernels_directory", lambda: str(tmp_path))
    shipped.forget()
    try:
        assert shipped.installed() is None
        assert "cannot be read" in shipped.unused()
    finally:
        monkeypatch.undo()
        shipped.forget()


@pytest.mark.parametrize(
    "change",
    [
        {},  # there is no such file
        {"sha256": None},
        {"sha256": "../../../../etc/passwd"},
        {"name": "x", "num_warps": "many"},
        {"boxes": [[1]]},
    ],
)
def test_an_entry_that_names_no_good_file_is_an_error_that_says_so(change, tmp_path):
    kernels = json.loads(json.dumps(WHOLE["targets"]))
    entry = kernels["sm_90a"]["kernels"]["key"]
    entry |= change
    if change and "sha256" not in change:
        import hashlib

        code = b"machine code"
        entry["sha256"] = hashlib.sha256(code).hexdigest()
        (tmp_path / "sm_90a").mkdir()
        (tmp_path / "sm_90a" / f"{entry['sha256'][:32]}.cubin").write_bytes(code)
    found = shipped.Shipped(manifest(tmp_path, targets=kernels))
    with pytest.raises(shipped.DamagedKernelError, match="install sluice-gdn-kernels again"):
        found.code("key", "sm_90a")
