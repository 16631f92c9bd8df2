"""The system's files, with directories that refuse what the test says: full, read-only, unreadable, unsyncable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from tidelog.storage.files.disk import Buffer, DirectoryEntry, File, FileMap, Lock, OsDisk

CHANGES = ("write", "sync", "truncate", "create", "rename", "remove")


class FaultyFile:
    def __init__(self, disk: FaultyDisk, file: File, path: str) -> None:
        self._disk, self._file, self._path = disk, file, path
        self.write_at: Callable[[Buffer, int], int] = self._write_at

    def _write_at(self, data: Buffer, position: int) -> int:
        self._disk.meet("write", self._path)
        return self._file.write_at(data, position)

    def read_at(self, size_bytes: int, position: int) -> bytes:
        self._disk.meet("read", self._path)
        return self._file.read_at(size_bytes, position)

    def read_at_nowait(self, size_bytes: int, position: int) -> bytes | None:
        """A page that is not there is never waited for, so this never meets the device."""
        if self._disk.refuses("read", self._path):
            return None
        return self._file.read_at_nowait(size_bytes, position)

    def is_warm(self, size_bytes: int, position: int) -> bool:
        return not self._disk.refuses("read", self._path) and self._file.is_warm(size_bytes, position)

    def size_bytes(self) -> int:
        return self._file.size_bytes()

    def truncate(self, size_bytes: int) -> None:
        self._disk.meet("truncate", self._path)
        self._file.truncate(size_bytes)

    def sync(self) -> None:
        self._disk.meet("sync", self._path)
        self._file.sync()

    def map(self, size_bytes: int) -> FileMap:
        return self._file.map(size_bytes)

    def pin(self) -> None:
        self._file.pin()

    def unpin(self) -> None:
        self._file.unpin()

    def close(self) -> None:
        self._file.close()


class FaultyDisk(OsDisk):
    """`fail(directory, errno.ENOSPC)`: from now on what would change anything below it is refused so."""

    __slots__ = ("faults", "met")

    def __init__(self) -> None:
        self.faults: list[tuple[str, frozenset[str], int]] = []
        self.met: list[tuple[str, str]] = []
        """What was refused, (kind, path)."""

    def fail(self, directory: Any, code: int, *kinds: str) -> None:
        self.faults.append((str(directory), frozenset(kinds or CHANGES), code))

    def refuses(self, kind: str, path: str) -> int:
        for directory, kinds, code in self.faults:
            if kind in kinds and (path == directory or path.startswith(directory + "/")):
                return code
        return 0

    def meet(self, kind: str, path: str) -> None:
        code = self.refuses(kind, path)
        if code:
            self.met.append((kind, path))
            raise OSError(code, os.strerror(code), path)

    def open(self, path: str, *, create: bool = False) -> File:
        if create and not self.exists(path):
            self.meet("create", path)
        self.meet("open", path)
        return FaultyFile(self, super().open(path, create=create), path)

    def read_file(self, path: str) -> bytes:
        self.meet("read", path)
        return super().read_file(path)

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        self.meet("write", path)
        if sync:
            self.meet("sync", path)
        super().write_file(path, data, sync=sync)

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        self.meet("read", path)
        return super().list_directory(path)

    def make_directory(self, path: str) -> None:
        if not self.exists(path):
            self.meet("create", path)
        super().make_directory(path)

    def rename(self, source: str, target: str) -> None:
        self.meet("rename", source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.meet("remove", path)
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self.meet("remove", path)
        super().remove_tree(path)

    def sync_file(self, path: str) -> None:
        self.meet("sync", path)
        super().sync_file(path)

    def sync_directory(self, path: str) -> None:
        self.meet("sync", path)
        super().sync_directory(path)

    def sync_all(self, directories: Sequence[str], since: Lock) -> bool:
        for path in directories:
            self.meet("sync", path)
        return super().sync_all(directories, since)

    def lock(self, path: str) -> Lock:
        if self.refuses("create", path) == errno.EROFS:
            self.meet("create", path)
        return super().lock(path)
