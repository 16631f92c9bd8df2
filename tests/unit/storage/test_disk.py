"""The operating system's disk: what the port promises of it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidelog.storage.files import disk as disk_module
from tidelog.storage.files.disk import DirectoryEntry, DirectoryInUse, OsDisk, OsFile, OsLock, is_exhaustion

EXT4 = 0xEF53


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    return str(tmp_path / "file")


def test_reading_and_writing_by_position(path: str):
    file = OsDisk().open(path)
    assert file.read_at(4, 10) == bytes([10, 11, 12, 13])
    assert file.read_at(100, 16380) == bytes([252, 253, 254, 255])
    assert file.read_at_nowait(4, 10) == bytes([10, 11, 12, 13])
    assert file.read_at_nowait(100, 16380) == bytes([252, 253, 254, 255])
    assert file.is_warm(16384, 0)
    assert file.write_at(memoryview(b"abc"), 16384) == 3
    assert file.size_bytes() == 16387
    file.truncate(10)
    assert file.size_bytes() == 10
    file.sync()
    file.close()
    file.close()
    with pytest.raises(AssertionError):
        file.write_at(b"x", 0)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO, errno.ENOSPC])
def test_no_failed_sync_is_mere_exhaustion(path: str, monkeypatch: pytest.MonkeyPatch, code: int):
    def sync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    disk = OsDisk()
    file = disk.open(path)
    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "fsync", sync)
    for work in (
        file.sync,
        lambda: disk.sync_file(path),
        lambda: disk.write_file(path, b"x", sync=True),
        lambda: disk.copy_prefix(path, f"{path}.copy", 1),
    ):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            work()
        assert not is_exhaustion(caught.value)
    file.close()


def test_a_failed_sync_names_its_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def sync(descriptor: int) -> None:
        raise OSError(errno.EIO, "refused")

    disk = OsDisk()
    file = disk.open(path, create=True)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "fdatasync", sync)
    for call, name in ((file.sync, path), (lambda: disk.sync_directory(str(tmp_path)), str(tmp_path))):
        with pytest.raises(OSError, match="refused") as caught:
            call()
        assert caught.value.filename == name
    file.close()


def test_a_full_volume_is_told_with_the_file_that_did_not_fit(path: str, tmp_path: Path):
    full = str(tmp_path / "full")
    os.symlink("/dev/full", full)
    disk = OsDisk()
    for work in (lambda: disk.write_file(full, b"x", sync=True), lambda: disk.copy_prefix(path, full, 1)):
        with pytest.raises(OSError, match="No space left on device") as caught:
            work()
        assert caught.value.filename == full
        assert full in str(caught.value)


def test_a_kernel_that_cannot_tell_is_asked_once(path: str, monkeypatch: pytest.MonkeyPatch):
    def preadv(*arguments: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(disk_module, "_NOWAIT", 8)
    monkeypatch.setattr(os, "preadv", preadv)
    file = OsDisk().open(path)
    assert file.read_at_nowait(3, 0) == b"\0\1\2"
    assert disk_module._NOWAIT == 0
    file.close()


def test_a_read_that_would_wait_says_so(path: str, monkeypatch: pytest.MonkeyPatch):
    def preadv(*arguments: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(disk_module, "_NOWAIT", 8)
    monkeypatch.setattr(os, "preadv", preadv)
    file = OsDisk().open(path)
    assert file.read_at_nowait(3, 0) is None
    assert not file.is_warm(3, 0)
    file.close()


def test_a_map_knows_whether_slices_of_it_are_held(path: str):
    file = OsDisk().open(path)
    mapped = file.map(1000)
    part = mapped.view[10:20]
    assert not mapped.close()
    assert bytes(part) == bytes(range(10, 20))
    part.release()
    assert mapped.close()
    assert mapped.close()
    file.close()


def test_a_pinned_file_is_closed_later(path: str):
    file = OsDisk().open(path)
    file.pin()
    file.pin()
    file.close()
    file.sync()
    file.unpin()
    file.sync()
    file.unpin()
    with pytest.raises((OSError, ValueError)):
        file.sync()


def test_a_file_that_is_dropped_closes_its_descriptor_once(path: str):
    file = OsFile(path, os.O_RDWR)
    descriptor = file._descriptor
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)
    closed = OsDisk().open(path)
    closed.close()
    other = os.open(path, os.O_RDONLY)  # takes the number that is free again
    del closed
    os.fstat(other)
    os.close(other)


def test_a_lock_that_is_dropped_is_released(tmp_path: Path):
    lock = OsDisk().lock(f"{tmp_path}/.lock")
    with pytest.raises(DirectoryInUse):
        OsDisk().lock(f"{tmp_path}/.lock")
    del lock
    OsDisk().lock(f"{tmp_path}/.lock").release()


def test_names_and_directories(tmp_path: Path):
    disk, root = OsDisk(), str(tmp_path)
    with pytest.raises(FileNotFoundError):
        disk.make_directory(f"{root}/a/b")
    for path in ("a", "a/b", "a/b"):
        disk.make_directory(f"{root}/{path}")
    disk.write_file(f"{root}/a/one", b"1", sync=True)
    assert sorted(disk.list_directory(f"{root}/a")) == [DirectoryEntry("b", True), DirectoryEntry("one", False)]
    disk.rename(f"{root}/a/one", f"{root}/a/two")
    assert (disk.exists(f"{root}/a/one"), disk.size_of(f"{root}/a/two")) == (False, 1)
    assert disk.modified_ms(f"{root}/a/two") > 1_600_000_000_000
    disk.copy_prefix(f"{root}/a/two", f"{root}/a/three", 1)
    assert disk.read_file(f"{root}/a/three") == b"1"
    with pytest.raises(OSError):
        disk.copy_prefix(f"{root}/a/two", f"{root}/a/three", 2)
    disk.sync_file(f"{root}/a/two")
    disk.sync_directory(root)
    disk.remove(f"{root}/a/two")
    disk.remove(f"{root}/a/two")
    disk.remove_tree(f"{root}/a")
    assert not disk.exists(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/missing")
    assert len(disk.random_bytes(5)) == 5


class Libc:
    """A C library that knows one file system, and every descriptor that it was asked to sync."""

    def __init__(self, kind: int) -> None:
        self.kind, self.synced = kind, list[int]()

    def syncfs(self, descriptor: int) -> int:
        self.synced.append(descriptor)
        return 0

    def fstatfs(self, descriptor: int, status: Any) -> int:
        status[:4] = self.kind.to_bytes(4, sys.byteorder)
        return 0


@pytest.fixture
def file_system(monkeypatch: pytest.MonkeyPatch) -> Libc:
    libc = Libc(EXT4)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: libc)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname="Linux", release="5.8.0-63-generic"))
    return libc


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[OsLock]:
    lock = OsDisk().lock(str(tmp_path / ".lock"))
    assert isinstance(lock, OsLock)
    yield lock
    lock.release()


class TestSyncOfAll:
    def test_it_hears_of_each_failure_since_the_directory_was_locked(
        self, tmp_path: Path, lock: OsLock, file_system: Libc
    ):
        """A descriptor of the end hears only of those of which nobody else has: the logs would be closed cleanly."""
        assert OsDisk().sync_all([str(tmp_path)], lock)
        assert file_system.synced == [lock.descriptor]

    @pytest.mark.parametrize("kind", [0x65735546, 0x01021997, 0x794C7630], ids=["FUSE", "9p", "overlay"])
    def test_a_file_system_that_syncs_less_has_each_file_synced(
        self, tmp_path: Path, lock: OsLock, kind: int, file_system: Libc
    ):
        file_system.kind = kind
        assert not OsDisk().sync_all([str(tmp_path)], lock)

    @pytest.mark.parametrize("release", ["5.4.0-216-generic", "4.18.0-553.el8.x86_64", "unknown"])
    def test_a_linux_that_tells_of_no_failure_has_each_file_synced(
        self, tmp_path: Path, lock: OsLock, release: str, file_system: Libc, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname="Linux", release=release))
        assert not OsDisk().sync_all([str(tmp_path)], lock)

    def test_a_log_that_is_a_link_to_another_volume_has_each_file_synced(
        self, tmp_path: Path, lock: OsLock, file_system: Libc
    ):
        (tmp_path / "t-0").symlink_to("/proc")
        assert not OsDisk().sync_all([str(tmp_path), str(tmp_path / "t-0")], lock)
        assert file_system.synced == []

    def test_a_missing_directory_is_an_error(self, tmp_path: Path, lock: OsLock, file_system: Libc):
        with pytest.raises(FileNotFoundError):
            OsDisk().sync_all([str(tmp_path / "missing")], lock)

    def test_the_system_itself(self, tmp_path: Path, lock: OsLock):
        assert OsDisk().sync_all([str(tmp_path)], lock) in (True, False)


@pytest.mark.parametrize("is_lock", [False, True])
def test_a_close_that_fails_is_not_repeated(path: str, monkeypatch: pytest.MonkeyPatch, is_lock: bool) -> None:
    """The system frees the number before it reports the failure: a second close took the next file of that number."""
    file = OsLock(os.open(path, os.O_RDWR)) if is_lock else OsFile(path, os.O_RDWR)
    opened, closed = file._descriptor, list[int]()

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        if len(closed) == 1:
            raise OSError(errno.EIO, "a delayed write has failed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(OSError, match="delayed write"):
            file.release() if isinstance(file, OsLock) else file.close()
        del file
        gc.collect()
    os.close(opened)
    assert closed == [opened]
