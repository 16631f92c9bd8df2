"""The Disk port and OsDisk: the only module that touches files.

Other modules use paths, positions and bytes, and never a descriptor. A simulated disk implements the same port in
tests/simulation/. Invariant: a descriptor is closed only when no thread can be using it (see `pin`), so a descriptor
that the system reuses is never synced or written by mistake.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

Buffer = bytes | bytearray | memoryview

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_NOWAIT_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 0)
_WRITE_LOCK_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_READ_LOCK_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCK_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
_WARM_STEP_BYTES = 512 * 1024
_COPY_STEP_BYTES = 4 * 1024 * 1024
_PROBED_FILES = 8
"""A truncation has two open at once."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MOUNTS_OF = ("/sys/fs/ext4", "/sys/fs/xfs")
"""Linux has a directory here for each volume while it is mounted, wherever that is; each has a new inode."""
_SYNCFS_REPORTS_SINCE = 5, 8
"""Before this Linux, syncfs succeeds whatever could not be written."""
_SYNCFS_IS_FSYNC = frozenset({0xEF53, 0x58465342, 0x9123683E})
"""ext2 to ext4, XFS and Btrfs, by statfs. Elsewhere syncfs may do less than an fsync of each file.

FUSE, 9p and SMB do not have their servers sync, and an overlay reports no failure of the file system below it.
"""
_STATFS_BYTES = 256


def is_exhaustion(error: BaseException) -> bool:
    """Whether the process or machine is short of descriptors or memory. It is no disk error and passes.

    A failed sync never counts as a shortage.
    """
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


def is_full(error: BaseException) -> bool:
    """Whether the volume, a quota or a limit has no space for the bytes."""
    return isinstance(error, OSError) and error.errno in _FULL


def probe_descriptors(disk: Disk, directory: str) -> None:
    """Raises OSError unless a few files can be opened now. Call it before a change, so that this does not fail halfway.

    One is not enough: the change has a segment open while it writes an index or a checkpoint, and threads open others.
    """
    name = next((each.name for each in disk.list_directory(directory) if each.name.endswith(".log")), None)
    files: list[File] = []
    try:
        while name is not None and len(files) < _PROBED_FILES:
            files.append(disk.open(f"{directory}/{name}"))
    except FileNotFoundError:  # removed meanwhile, which says nothing of descriptors
        pass
    finally:
        for file in files:
            file.close()


def _sync(sync: Callable[[int], None], descriptor: int) -> None:
    """Sync. A failure for want of resources becomes EIO, because data may be lost and the system may report it once."""
    try:
        sync(descriptor)
    except OSError as error:
        if is_exhaustion(error):
            raise OSError(errno.EIO, f"sync failed: {error.strerror}") from error
        raise


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Give an OSError of a descriptor the path, as one of `open` has it: it is what a user is told."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class DirectoryInUse(Exception):
    """Another process, or another part of this one, holds the lock of a log directory."""


class DirectoryEntry(NamedTuple):
    name: str
    is_directory: bool
    is_special: bool = False
    """A FIFO, a socket or a device: reading it may wait for ever."""


class FileMap(Protocol):
    """A read-only view of a file's first `size_bytes` bytes. Slices of `view` may outlive the map."""

    view: memoryview
    size_bytes: int

    def close(self) -> bool:
        """Close the map. False if slices of it are still in use; then it stays mapped until they are gone."""
        ...


class File(Protocol):
    """An open file, read and written by position."""

    write_at: Callable[[Buffer, int], int]  # (data, position) -> bytes written, perhaps fewer than given

    def read_at(self, size_bytes: int, position: int) -> bytes:
        """At most `size_bytes` bytes; fewer only at the end of the file."""
        ...

    def read_at_nowait(self, size_bytes: int, position: int) -> bytes | None:
        """`read_at`, or None if it would wait for the device."""
        ...

    def is_warm(self, size_bytes: int, position: int) -> bool:
        """Whether the range can be read without a wait for the device, as far as cheap probes show."""
        ...

    def size_bytes(self) -> int: ...

    def truncate(self, size_bytes: int) -> None: ...

    def sync(self) -> None:
        """Sync the data and the metadata needed to read it. May be called on any thread while the file is pinned."""
        ...

    def map(self, size_bytes: int) -> FileMap: ...

    def pin(self) -> None:
        """Keep the file open until `unpin`, even after `close`. Both are called on the owner's thread."""
        ...

    def unpin(self) -> None: ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    """The file system operations that storage uses. Errors are the system's OSErrors."""

    def open(self, path: str, *, create: bool = False) -> File: ...

    def read_file(self, path: str) -> bytes: ...

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        """Replace the content, not atomically. With `sync` it is synced before the return."""
        ...

    def copy_prefix(self, source: str, target: str, size_bytes: int) -> None:
        """Write the first `size_bytes` of `source` to a new file `target` and sync it."""
        ...

    def exists(self, path: str) -> bool: ...

    def size_of(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int: ...

    def changed_ms(self, path: str) -> int:
        """When content, name, links, owner or times of a file changed last. No program can set it."""
        ...

    def is_backdated(self, path: str) -> bool:
        """Whether a program has set the modification time of a file, in milliseconds: Kafka's cleaner gives a segment
        that of those that it was made from. False where the system has no finer times, and for whole seconds, which
        archives keep.
        """
        ...

    def identity(self, path: str) -> str:
        """What a file keeps when it is renamed, and a copy of it does not have while the file is there."""
        ...

    def mount_of(self, path: str) -> str:
        """Another text each time the volume of `path` is mounted; a bind mount, as containers have, is none.

        An empty text if the system does not tell.
        """
        ...

    def list_directory(self, path: str) -> list[DirectoryEntry]: ...

    def make_directory(self, path: str) -> None:
        """Create a directory. Its parent must exist, so that a vanished log directory is not created again.

        No error if the directory exists.
        """
        ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file. No error if it does not exist."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def sync_file(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Sync the creations, renames and removals in the directory."""
        ...

    def sync_all(self, directories: Sequence[str], since: Lock) -> bool:
        """Sync the whole file system in which the directories lie.

        Raises OSError also for a write that failed earlier, if the lock `since` was held by then. False if that is not
        as good as a sync of each file in them: the caller syncs these.
        """
        ...

    def lock(self, path: str) -> Lock:
        """Take the lock file at `path` or raise DirectoryInUse."""
        ...

    def random_bytes(self, count: int) -> bytes: ...

    def volume_bytes(self, path: str) -> tuple[int, int]:
        """(size, bytes available to this process) of the file system of the path."""
        ...


class OsFileMap:
    __slots__ = ("_mmap", "size_bytes", "view")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._mmap = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self._mmap)
        self.size_bytes = size_bytes

    def close(self) -> bool:
        self.view.release()
        try:
            self._mmap.close()
        except BufferError:
            return False
        return True


class OsFile:
    __slots__ = ("_closing", "_descriptor", "_path", "_pins", "size_bytes", "write_at")

    size_bytes: Callable[[], int]
    write_at: Callable[[Buffer, int], int]

    def __init__(self, path: str, flags: int) -> None:
        self._descriptor = -1  # for `__del__`, if the next line fails
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        self._path = path
        self._pins = 0
        self._closing = False
        # Both are called for every produce. `lseek` has a fifth of the cost of `fstat`; no call uses the position.
        self.size_bytes = partial(os.lseek, self._descriptor, 0, os.SEEK_END)
        self.write_at = partial(os.pwrite, self._descriptor)

    def read_at(self, size_bytes: int, position: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, position)
        if len(data) == size_bytes or not data:
            return data
        parts = [data]
        missing = size_bytes - len(data)
        while missing:
            data = os.pread(self._descriptor, missing, position + size_bytes - missing)
            if not data:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def read_at_nowait(self, size_bytes: int, position: int) -> bytes | None:
        global _NOWAIT
        if not _NOWAIT:
            return self.read_at(size_bytes, position)
        buffer = bytearray(size_bytes)
        try:
            count = os.preadv(self._descriptor, (buffer,), position, _NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NOWAIT_UNSUPPORTED:
                raise
            _NOWAIT = 0  # not supported by this kernel or file system: use normal reads from now on
            return self.read_at(size_bytes, position)
        if count == size_bytes:
            return bytes(buffer)
        return bytes(memoryview(buffer)[:count]) if position + count >= self.size_bytes() else None

    def is_warm(self, size_bytes: int, position: int) -> bool:
        last = position + size_bytes - 1
        probe = position
        while True:
            if self.read_at_nowait(1, probe) is None:
                return False
            if probe >= last:
                return True
            probe = min(probe + _WARM_STEP_BYTES, last)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def sync(self) -> None:
        with _named(self._path):
            _sync(os.fdatasync, self._descriptor)

    def map(self, size_bytes: int) -> FileMap:
        return OsFileMap(self._descriptor, size_bytes)

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1
        assert self._pins >= 0, self._path
        if self._closing and not self._pins:
            self._close_now()

    def close(self) -> None:
        self.write_at = _write_to_closed
        if self._pins:
            self._closing = True
        elif self._descriptor >= 0:
            self._close_now()

    def _close_now(self) -> None:
        # First, because a close that fails has closed it: another one would close the next file of this number.
        descriptor, self._descriptor = self._descriptor, -1
        self.size_bytes = _size_of_closed
        os.close(descriptor)

    def __del__(self) -> None:
        """A file that an error has left open takes no descriptor for the rest of the process's life."""
        if self._descriptor >= 0:
            self._close_now()


def _size_of_closed() -> NoReturn:
    raise OSError(errno.EBADF, "the size of a closed file")


def _write_to_closed(data: Buffer, position: int) -> NoReturn:
    raise AssertionError("write to a closed file")


class OsLock:
    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        """The descriptor of the lock file, -1 after the release."""
        return self._descriptor

    def release(self) -> None:
        """Unlock: a close alone would leave the lock to a fork of this process, which has the descriptor too."""
        if self._descriptor >= 0:
            if _OFD_SETLK:
                fcntl.fcntl(self._descriptor, _OFD_SETLK, _UNLOCK_WHOLE_FILE)
            else:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    __del__ = _close  # in a fork this must not unlock the directory of its parent


def _sync_file_system(descriptor: int, directories: Sequence[str]) -> bool:
    """`Disk.sync_all` with a descriptor of the file system.

    Linux reports a failed write once to each descriptor that was open then, and to only one that is opened later: the
    failure would be unknown here if another process, or the close of another directory, has synced the file system.
    """
    try:
        import ctypes
    except ImportError:  # Python was built without libffi
        return False
    library = ctypes.CDLL(None, use_errno=True)
    syncfs, statfs = getattr(library, "syncfs", None), getattr(library, "fstatfs", None)
    if syncfs is None or statfs is None or _linux_version() < _SYNCFS_REPORTS_SINCE:
        return False
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    type_bytes = status.raw[: ctypes.sizeof(ctypes.c_long)] if not statfs(descriptor, status) else b""
    if int.from_bytes(type_bytes, sys.byteorder) & 0xFFFFFFFF not in _SYNCFS_IS_FSYNC:
        return False
    device = os.fstat(descriptor).st_dev
    if any(os.stat(directory).st_dev != device for directory in directories):
        return False  # one is a link to another volume
    if syncfs(descriptor):
        code = ctypes.get_errno()
        code = errno.EIO if code in _EXHAUSTED else code
        raise OSError(code, f"syncfs failed: {os.strerror(code)}", directories[0])
    return True


def _linux_version() -> tuple[int, ...]:
    """The first two numbers; () on another system."""
    system = os.uname()
    found = re.match(r"(\d+)\.(\d+)", system.release) if system.sysname == "Linux" else None
    return tuple(map(int, found.groups())) if found else ()


def _open_at_once(path: str, flags: int) -> int:
    """The opening of a FIFO waits for its other end, for ever, and no signal ends the process meanwhile."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _is_special(entry: os.DirEntry[str]) -> bool:
    return not (entry.is_file() or entry.is_dir() or entry.is_symlink())


class OsDisk:
    """The operating system's files. Linux and other POSIX systems."""

    __slots__ = ()

    def open(self, path: str, *, create: bool = False) -> File:
        return OsFile(path, os.O_RDWR | (os.O_CREAT if create else 0))

    def read_file(self, path: str) -> bytes:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a file", path)
            return file.readall()

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        with _named(path), open(path, "wb", buffering=0, opener=_open_at_once) as file:
            view = memoryview(data)
            written = 0
            while written < len(view):
                written += file.write(view[written:])
            if sync:
                _sync(os.fsync, file.fileno())

    def copy_prefix(self, source: str, target: str, size_bytes: int) -> None:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            position = 0
            while position < size_bytes:
                data = os.pread(reader, min(_COPY_STEP_BYTES, size_bytes - position), position)
                if not data:
                    raise OSError(errno.EIO, "file is shorter than it should be", source)
                view = memoryview(data)
                with _named(target):
                    while view:
                        count = os.pwrite(writer, view, position)
                        position += count
                        view = view[count:]
            with _named(target):
                _sync(os.fsync, writer)
        finally:
            os.close(reader)
            os.close(writer)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size_of(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def changed_ms(self, path: str) -> int:
        return os.stat(path).st_ctime_ns // 1_000_000

    def is_backdated(self, path: str) -> bool:
        status = os.stat(path)
        modified_ns = status.st_mtime_ns % 1_000_000_000
        return modified_ns > 0 and not modified_ns % 1_000_000 and status.st_ctime_ns % 1_000_000 > 0

    def identity(self, path: str) -> str:
        status = os.stat(path)
        return f"{status.st_dev}:{status.st_ino}"

    def mount_of(self, path: str) -> str:
        device = os.stat(path).st_dev
        try:
            block_device = os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        except OSError:
            return ""
        for mounts in _MOUNTS_OF:
            try:
                return str(os.stat(f"{mounts}/{os.path.basename(block_device)}").st_ino)
            except OSError:
                continue
        return ""

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        with os.scandir(path) as entries:
            return [DirectoryEntry(entry.name, entry.is_dir(), _is_special(entry)) for entry in entries]

    def make_directory(self, path: str) -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):  # a file, a device or a dangling link
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_file(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _named(path):
                _sync(os.fsync, descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: str) -> None:
        self.sync_file(path)

    def sync_all(self, directories: Sequence[str], since: Lock) -> bool:
        assert isinstance(since, OsLock)
        return _sync_file_system(since.descriptor, directories)

    def lock(self, path: str) -> Lock:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return _locked(descriptor, path, _WRITE_LOCK_WHOLE_FILE, fcntl.LOCK_EX)

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def volume_bytes(self, path: str) -> tuple[int, int]:
        volume = os.statvfs(path)
        return volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize


class ReadOnlyDisk(OsDisk):
    """Files opened only for reading, for tools that inspect the directories of a node.

    Operations that would change a file fail in the system, or here.
    """

    __slots__ = ()

    def open(self, path: str, *, create: bool = False) -> File:
        return OsFile(path, os.O_RDONLY)

    def lock(self, path: str) -> Lock:
        """A shared lock, which conflicts with a node's lock. Without a lock file no node has used the directory."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return OsLock(-1)
        return _locked(descriptor, path, _READ_LOCK_WHOLE_FILE, fcntl.LOCK_SH)

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        raise _read_only(path)

    def copy_prefix(self, source: str, target: str, size_bytes: int) -> None:
        raise _read_only(target)

    def make_directory(self, path: str) -> None:
        raise _read_only(path)

    def rename(self, source: str, target: str) -> None:
        raise _read_only(source)

    def remove(self, path: str) -> None:
        raise _read_only(path)

    def remove_tree(self, path: str) -> None:
        raise _read_only(path)


def _locked(descriptor: int, path: str, record_lock: bytes, file_lock: int) -> OsLock:
    """The lock on the whole file. Raises DirectoryInUse, and closes the descriptor, if another lock conflicts.

    Kafka takes a POSIX record lock, which conflicts with an open-file-description lock. Unlike a record lock, the
    latter also excludes a second broker in this process.
    """
    try:
        if _OFD_SETLK:
            fcntl.fcntl(descriptor, _OFD_SETLK, record_lock)
        else:
            fcntl.flock(descriptor, file_lock | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):
            raise DirectoryInUse(path) from None
        raise
    return OsLock(descriptor)


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), path)
