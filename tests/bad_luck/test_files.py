"""Saved state and bad luck: killed processes, a full disk, damaged and hostile files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice import state_files
from sluice.state_pool import PoolError, PoolExhaustedError, PoolGeometry, StatePool, StateSnapshot
from tests.bad_luck.luck import die, ended, in_child

pytest.importorskip("safetensors")

GEOMETRY = PoolGeometry(
    layers=2, num_v_heads=2, conv_channels=5, head_k_dim=3, head_v_dim=4, conv_dtype=torch.bfloat16
)


def snapshot(value: float = 1.0, sequences: int = 2) -> StateSnapshot:
    lead = (GEOMETRY.layers, sequences)
    conv = torch.full((*lead, *GEOMETRY.conv_shape), value, dtype=GEOMETRY.conv_dtype)
    return StateSnapshot(GEOMETRY, conv, torch.full((*lead, *GEOMETRY.state_shape), value))


def value_of(path: Path) -> float:
    """What all elements of a saved file are."""
    (found,) = set(StateSnapshot.load(path).recurrent.flatten().tolist())
    return found


# ---- killed while saving -------------------------------------------------------------------------

POINTS = ("begin", "length", "header", "tensor", "sync", "replace", "after")


def killed_at(point: str, path: Path) -> None:
    """Save a newer state, in a process that ends at this point."""
    parts, write_parts = ("length", "header", "tensor"), state_files._parts

    def dying(tensors, about):
        for i, part in enumerate(write_parts(tensors, about)):
            yield part
            if point in parts[i : i + 1]:
                die()

    state_files._parts = dying
    if point == "begin":
        state_files._lock = lambda number: die()
    if point == "sync":
        os.fsync = lambda number: die()
    if point == "replace":
        Path.replace = lambda self, target: die()
    if point == "after":
        replace = Path.replace
        Path.replace = lambda self, target: (replace(self, target), die())
    snapshot(2.0).save(path)


@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_one(point, tmp_path):
    path = tmp_path / "state"
    snapshot(1.0).save(path)
    assert in_child(lambda: killed_at(point, path)) == -signal.SIGKILL
    assert value_of(path) == (2.0 if point == "after" else 1.0)
    assert len(list(tmp_path.iterdir())) == (1 if point == "after" else 2)
    snapshot(3.0).save(path)
    assert value_of(path) == 3.0


def test_a_process_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "state"
    snapshot(0.0).save(path)

    def save_for_ever():
        while True:
            for value in (1.0, 2.0):
                snapshot(value, sequences=50).save(path)

    for wait in (0.01, 0.02, 0.03, 0.05, 0.08):
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever()
            finally:
                os._exit(1)
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        assert value_of(path) in (0.0, 1.0, 2.0)


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path):
    path = tmp_path / "state"
    in_child(lambda: killed_at("header", path))
    (left,) = tmp_path.iterdir()
    snapshot(1.0).save(path)
    assert left.exists()  # it is young: perhaps somebody has only begun
    old = time.time() - 2 * state_files.FORGOTTEN
    os.utime(left, (old, old))
    number = os.open(left, os.O_RDWR)
    assert state_files._lock(number)
    snapshot(1.0).save(path)
    assert left.exists()  # it is being written
    os.close(number)
    snapshot(1.0).save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_that_save_one_file_leave_a_whole_one(tmp_path):
    path = tmp_path / "state"

    def save(value):
        for _ in range(20):
            snapshot(value, sequences=20).save(path)

    pids = []
    for value in (1.0, 2.0):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                save(value)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [ended(pid) for pid in pids] == [0, 0]
    assert value_of(path) in (1.0, 2.0)
    assert list(tmp_path.iterdir()) == [path]


# ---- a disk that is full -------------------------------------------------------------------------


def test_no_room_for_the_file_leaves_the_old_one(tmp_path):
    """A limit on the size of files, which the kernel holds."""
    path = tmp_path / "state"
    snapshot(1.0).save(path)

    def save_without_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        with pytest.raises(PoolError, match=r"got: File too large; a file that was there is as"):
            snapshot(2.0, sequences=50).save(path)

    assert in_child(save_without_room) == 0
    assert value_of(path) == 1.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no program to mount a disk")
    if done.returncode != 0:
        pytest.skip("this user may not mount a small disk; a limit on files stands in for it")
    try:
        path = disk / "state"
        snapshot(1.0).save(path)
        with pytest.raises(PoolError, match="got: No space left on device") as caught:
            snapshot(2.0, sequences=1000).save(path)
        assert caught.value.__cause__.errno == errno.ENOSPC
        assert value_of(path) == 1.0
        assert list(disk.iterdir()) == [path]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- damaged and hostile files -------------------------------------------------------------------


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Reading a tensor fails the test: a file must be refused by its header."""
    monkeypatch.setattr(state_files, "copied", lambda *_: pytest.fail("its state was read"))


def forged(path: Path, change: Any, body: bytes | None = None) -> Path:
    """A saved file whose header is changed."""
    snapshot().save(path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    rest = content[8 + size :] if body is None else body
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    return path


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "state"
    snapshot().save(path)
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, 500, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(PoolError, match=r"load: .*expected a state snapshot"):
            StateSnapshot.load(path)
    path.write_bytes(content + b"more")
    with pytest.raises(PoolError, match=r"load: .*expected a state snapshot"):
        StateSnapshot.load(path)


@pytest.mark.parametrize("size", [2**60, 2**63, 2**64 - 1, 2**31])
def test_a_header_of_impossible_length_is_refused(size, tmp_path, nothing_is_read):
    path = tmp_path / "state"
    path.write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(PoolError, match="expected a state snapshot"):
        StateSnapshot.load(path)


def _claim(name: str, shape: list[int]) -> Any:
    def change(header):
        header[name]["shape"] = shape

    return change


def _bytes_claimed(header):
    header["recurrent"] |= {"shape": [2, 2**59, 2, 4, 3], "data_offsets": [0, 2**59 * 192]}


def _layers(header):
    geometry = json.loads(header["__metadata__"]["geometry"]) | {"layers": 2**60}
    header["__metadata__"]["geometry"] = json.dumps(geometry, sort_keys=True)


def _layers_and_digest(header):
    _layers(header)
    made = PoolGeometry.from_json(header["__metadata__"]["geometry"])
    header["__metadata__"]["digest"] = made.digest


def _other_dtype(header):
    header["conv"]["dtype"] = "F16"


def _integers(header):
    header["conv"]["dtype"] = "I16"


def _deep(header):
    header["__metadata__"]["geometry"] = "[" * 100_000


def _tag_of_lists(header):
    geometry = json.loads(header["__metadata__"]["geometry"]) | {"tag": [[]]}
    header["__metadata__"]["geometry"] = json.dumps(geometry)


def _longest_number(header):
    header["__metadata__"]["geometry"] = '{"layers": ' + "9" * 10_000 + "}"


@pytest.mark.parametrize(
    "change",
    [
        _claim("recurrent", [2**60]),
        _claim("recurrent", [2, 2, 2, 4, 3, 1]),
        _claim("conv", [2, 1, 5, 6]),
        _claim("conv", [2, 2, 15, 1]),
        _claim("conv", []),
        _claim("recurrent", [2, 1, 4, 4, 3]),
        _bytes_claimed,
        _layers,
        _layers_and_digest,
        _other_dtype,
        _integers,
        _deep,
        _tag_of_lists,
        _longest_number,
        lambda header: header.pop("conv"),
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].pop("geometry"),
    ],
)
def test_sizes_are_refused_by_the_header_before_anything_is_read(change, tmp_path, nothing_is_read):
    path = forged(tmp_path / "state", change)
    pool = StatePool(GEOMETRY, 4)
    for load in (StateSnapshot.load, pool.load):
        with pytest.raises(PoolError):
            load(path)
    assert pool.available == 4


def test_a_file_of_too_many_sequences_is_refused_before_it_is_read(tmp_path, nothing_is_read):
    path = tmp_path / "state"
    snapshot(sequences=5).save(path)
    pool = StatePool(GEOMETRY, 4)
    with pytest.raises(PoolExhaustedError, match="expected 5 free slots, got 4"):
        pool.load(path)
    mine = pool.allocate(2)
    with pytest.raises(ValueError, match="slots: expected 5 slots"):
        pool.load(path, mine)
    assert pool.allocated == mine


class Marker:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_its_code_does_not_run(tmp_path):
    mark, path = tmp_path / "it ran", tmp_path / "state"
    torch.save({"conv": Marker(mark)}, path)
    for content in (path.read_bytes(), pickle.dumps(Marker(mark))):
        path.write_bytes(content)
        with pytest.raises(PoolError, match="expected a state snapshot"):
            StateSnapshot.load(path)
    assert not mark.exists()


def test_a_pipe_or_a_device_is_refused_and_never_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(PoolError, match="got a device or a pipe"):
            StateSnapshot.load(path)
    with pytest.raises(PoolError, match="which is a device or a pipe"):
        snapshot().save(pipe)  # a device would be replaced by a file
    assert pipe.is_fifo()


def test_a_snapshot_stays_as_it_is_when_its_file_changes(tmp_path):
    path = tmp_path / "state"
    snapshot(1.0, sequences=200).save(path)
    loaded = StateSnapshot.load(path)
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    assert loaded.recurrent.eq(1).all()
    assert loaded.conv.eq(1).all()
    os.truncate(path, 10)
    assert loaded.recurrent.eq(1).all()


def test_a_saved_file_is_its_users_alone(tmp_path):
    path = tmp_path / "state"
    before = os.umask(0)
    try:
        snapshot().save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_programs_read_a_saved_file(tmp_path):
    """It is in the safetensors format, whoever writes it."""
    from safetensors.torch import load_file

    path = tmp_path / "state"
    for sequences in (3, 0):
        made = snapshot(2.5, sequences)
        made.save(path)
        found = load_file(path)
        assert torch.equal(found["conv"], made.conv)
        assert torch.equal(found["recurrent"], made.recurrent)
        again = StateSnapshot.load(path)
        assert torch.equal(again.conv, made.conv)
        assert torch.equal(again.recurrent, made.recurrent)
