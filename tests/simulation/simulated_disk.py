"""A disk in memory that behaves like a bad one: what was not synced may be lost, in part, in any order.

It implements storage's Disk port. Every file has what is in the page cache and what is on the device; every directory
likewise has entries that a power loss may take back. `lose_power` leaves, by the rng, all, nothing, a prefix with its
last write torn, or an arbitrary subset of the pages and directory entries that were not synced; `end_process` loses
only what was in the process. `fail_after` makes the n-th operation that changes anything the last one.
`break_directory` makes all below a path refuse; what a sync that failed was to save goes with the process.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random

from tidelog.storage.files.disk import Buffer, DirectoryEntry, DirectoryInUse, Disk, File, FileMap, Lock

PAGE_BYTES = 128
NEVER = 1 << 60


class PowerLoss(BaseException):
    """The machine stops here. No handler of the code under test may catch it."""


_inode_numbers = count()


class Inode:
    """One file. `pending`: the changes since the last sync, in order, (position, bytes) or (size, None) for a cut."""

    __slots__ = ("data", "durable", "modified_ms", "number", "pending")

    def __init__(self) -> None:
        self.modified_ms = 0
        self.number = next(_inode_numbers)
        self.data = bytearray()
        self.durable = b""
        self.pending: list[tuple[int, bytes | None]] = []

    def write(self, data: bytes, position: int) -> None:
        content = self.data
        if position > len(content):
            content.extend(bytes(position - len(content)))
        content[position : position + len(data)] = data
        self.pending.append((position, data))

    def cut(self, size_bytes: int) -> None:
        if size_bytes < len(self.data):
            del self.data[size_bytes:]
        else:
            self.data.extend(bytes(size_bytes - len(self.data)))
        self.pending.append((size_bytes, None))

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.pending.clear()

    def settle(self) -> None:
        self.data = bytearray(self.durable)
        self.pending.clear()

    def lose(self, rng: Random) -> None:
        """Decide what of the pending changes had reached the device."""
        if not self.pending:
            return
        content = bytearray(self.durable)
        fate = rng.randrange(4)
        if fate == 1:
            content = self.data
        elif fate == 2:
            whole = rng.randint(0, len(self.pending))
            for position, data in self.pending[:whole]:
                _apply(content, position, data)
            if whole < len(self.pending):
                position, data = self.pending[whole]
                _apply(content, position, data and data[: rng.randint(0, len(data))])
        elif fate == 3:
            for position, data in self.pending:
                for start, page in _pages(position, data):
                    if rng.random() < 0.5:
                        _apply(content, start, page)
        self.durable = bytes(content)
        self.settle()


def _pages(position: int, data: bytes | None) -> list[tuple[int, bytes | None]]:
    if data is None:
        return [(position, None)]
    pages: list[tuple[int, bytes | None]] = []
    end, start = position + len(data), position
    while start < end:
        stop = min(end, (start // PAGE_BYTES + 1) * PAGE_BYTES)
        pages.append((start, data[start - position : stop - position]))
        start = stop
    return pages


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    if data is None:
        if position < len(content):
            del content[position:]
        else:
            content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


Entries = dict[str, "Inode | Directory"]
Change = tuple[str, str, "Inode | Directory | None"]


class Directory:
    """`pending`: (name that goes or "", name that comes or "", what it names), in order."""

    __slots__ = ("durable", "entries", "number", "pending")

    def __init__(self) -> None:
        self.number = next(_inode_numbers)
        self.entries: Entries = {}
        self.durable: Entries = {}
        self.pending: list[Change] = []

    def copied(self) -> Directory:
        copy = Directory()
        for name, node in self.entries.items():
            if isinstance(node, Inode):
                file = Inode()
                file.write(bytes(node.data), 0)
                copy.change("", name, file)
            else:
                copy.change("", name, node.copied())
        copy.sync_everything()
        return copy

    def change(self, gone: str, come: str, node: Inode | Directory | None) -> None:
        _change(self.entries, gone, come, node)
        self.pending.append((gone, come, node))

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def sync_everything(self) -> None:
        self.sync()
        for node in self.entries.values():
            if isinstance(node, Directory):
                node.sync_everything()
            else:
                node.sync()

    def lose(self, rng: Random) -> None:
        if self.pending:
            fate = rng.randrange(4)
            if fate == 0:
                kept = []
            elif fate == 1:
                kept = self.pending
            elif fate == 2:
                kept = self.pending[: rng.randint(0, len(self.pending))]
            else:
                kept = [change for change in self.pending if rng.random() < 0.5]
            for change in kept:
                _change(self.durable, *change)
            self.entries = dict(self.durable)
            self.pending = []
        for node in self.entries.values():
            node.lose(rng)
        self.durable = dict(self.entries)


def _change(entries: Entries, gone: str, come: str, node: Inode | Directory | None) -> None:
    if gone:
        entries.pop(gone, None)
    if come and node is not None:
        entries[come] = node


class SimulatedMap:
    def __init__(self, content: bytes) -> None:
        self.view = memoryview(content)
        self.size_bytes = len(content)

    def close(self) -> bool:
        return True


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, inode: Inode, path: str) -> None:
        self._disk, self._inode, self._path = disk, inode, path
        self._pins = 0
        self._closing = False
        self._is_open = True
        self.write_at: Callable[[Buffer, int], int] = self._write_at

    def _write_at(self, data: Buffer, position: int) -> int:
        assert not self._closing, f"write to a closed file: {self._path}"
        self._disk.operation("write", self._path)
        content = bytes(data)
        shorter = self._disk.short_write(len(content))
        self._inode.write(content[:shorter], position)
        self._inode.modified_ms = self._disk.clock_ms()
        return shorter

    def read_at(self, size_bytes: int, position: int) -> bytes:
        assert self._is_open, f"read from a closed file: {self._path}"
        self._disk.require_power()
        self._disk.meet("read", self._path)
        return bytes(self._inode.data[position : position + size_bytes])

    def read_at_nowait(self, size_bytes: int, position: int) -> bytes | None:
        return self.read_at(size_bytes, position)

    def is_warm(self, size_bytes: int, position: int) -> bool:
        return True

    def size_bytes(self) -> int:
        return len(self._inode.data)

    def truncate(self, size_bytes: int) -> None:
        assert self._is_open, self._path
        self._disk.operation("truncate", self._path)
        self._inode.cut(size_bytes)
        self._inode.modified_ms = self._disk.clock_ms()

    def sync(self) -> None:
        assert self._is_open, f"sync of a closed file: {self._path}"
        self._disk.operation("sync", self._path, self._inode)
        self._inode.sync()

    def map(self, size_bytes: int) -> FileMap:
        if size_bytes > len(self._inode.data):  # as that of the system
            raise ValueError(f"a map of {size_bytes} bytes reaches beyond the end of {self._path}")
        return SimulatedMap(bytes(self._inode.data[:size_bytes]))

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1
        if self._closing and not self._pins:
            self._is_open = False

    def close(self) -> None:
        self._closing = True
        self._is_open = self._pins > 0


class SimulatedLock:
    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk, self._path = disk, path

    def release(self) -> None:
        self._disk.locks.discard(self._path)


class SimulatedDisk:
    """Paths are absolute; the parent of what is created must be there."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._root = Directory()
        self._is_off = False
        self.locks: set[str] = set()
        self.operations = 0
        self.fail_at = NEVER
        self.full = False
        """Whether writes fail with ENOSPC, perhaps after a part was written."""
        self.sync_fails = False
        self.broken: dict[str, tuple[int, frozenset[str]]] = {}
        """Directories that refuse what changes them, or "read": path -> (errno, kinds of operations)."""
        self.is_watched = False
        """Whether it is not the process that reads now, but who checks it."""
        self._unsynced: list[Inode] = []
        self.mounts = 1
        """How often the volume was mounted while the machine ran on."""
        self.clock_ms: Callable[[], int] = lambda: 0

    # Faults

    def break_directory(self, path: str, code: int, *kinds: str) -> None:
        """Until it is taken out of `broken`, over any number of processes. Without kinds, whatever changes it."""
        self.broken[path] = (code, frozenset(kinds or ("write", "truncate", "sync", "create", "rename", "remove")))

    def meet(self, kind: str, path: str, inode: Inode | None = None) -> None:
        for broken, (code, kinds) in self.broken.items():
            if kind in kinds and not self.is_watched and (path == broken or path.startswith(broken + "/")):
                if kind == "sync" and inode is not None:
                    self._unsynced.append(inode)
                raise OSError(code, f"simulated failure to {kind}", path)

    def fail_after(self, operations: int) -> None:
        """Lose power at that many changing operations from now."""
        self.fail_at = self.operations + operations

    def operation(self, kind: str, path: str = "", inode: Inode | None = None) -> None:
        self.require_power()
        self.operations += 1
        if self.operations >= self.fail_at:
            self._is_off = True
            raise PowerLoss
        if kind == "sync" and self.sync_fails:
            raise OSError(errno.EIO, "simulated failure of a sync")
        if self.broken:
            self.meet(kind, path, inode)

    @property
    def is_off(self) -> bool:
        """Struck by `fail_after`, until the next process."""
        return self._is_off

    @contextmanager
    def powered(self) -> Iterator[None]:
        """A test reads what a struck process has left."""
        was_off, self._is_off = self._is_off, False
        try:
            yield
        finally:
            self._is_off = was_off

    def require_power(self) -> None:
        if self._is_off:
            raise PowerLoss

    def short_write(self, size_bytes: int) -> int:
        if not self.full:
            return size_bytes
        written = self._rng.randint(0, size_bytes - 1)
        if not written or self._rng.random() < 0.5:
            raise OSError(errno.ENOSPC, "simulated full disk")
        return written

    def lose_power(self) -> None:
        """Everything not synced is lost in part; then the machine is on again."""
        self._root.lose(self._rng)
        self.end_process()

    def end_process(self) -> None:
        """Only the process is gone: the page cache stays, locks do not."""
        self._is_off = False
        self.fail_at = NEVER
        self.full = self.sync_fails = False
        self.locks.clear()
        for inode in self._unsynced:
            inode.lose(self._rng)
        self._unsynced.clear()

    def sync_everything(self) -> None:
        """As if everything so far had happened long ago."""
        self._root.sync_everything()

    # The port

    def open(self, path: str, *, create: bool = False) -> File:
        self.require_power()
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self.operation("create", path)
            node = Inode()
            parent.change("", name, node)
        assert isinstance(node, Inode), path
        return SimulatedFile(self, node, path)

    def read_file(self, path: str) -> bytes:
        self.meet("read", path)
        return bytes(self._inode(path).data)

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        self.operation("write", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            node = Inode()
            parent.change("", name, node)
        assert isinstance(node, Inode), path
        node.modified_ms = self.clock_ms()
        if node.data:
            node.cut(0)
        if data:
            self.operation("write", path)
            shorter = self.short_write(len(data))
            node.write(bytes(data)[:shorter], 0)
            if shorter < len(data):
                raise OSError(errno.ENOSPC, "simulated full disk")
        if sync:
            self.operation("sync", path, node)
            node.sync()

    def copy_prefix(self, source: str, target: str, size_bytes: int) -> None:
        data = bytes(self._inode(source).data[:size_bytes])
        self.write_file(target, data, sync=True)

    def exists(self, path: str) -> bool:
        self.require_power()
        try:
            parent, name = self._parent(path)
        except FileNotFoundError:
            return False
        return not name or name in parent.entries

    def size_of(self, path: str) -> int:
        return len(self._inode(path).data)

    def modified_ms(self, path: str) -> int:
        return self._inode(path).modified_ms

    def changed_ms(self, path: str) -> int:
        return self.modified_ms(path)

    def is_backdated(self, path: str) -> bool:
        return False

    def identity(self, path: str) -> str:
        return str(self._inode(path).number)

    def mount_of(self, path: str) -> str:
        return str(self.mounts)

    def copy_back(self, backup: SimulatedDisk) -> None:
        """All files are replaced by copies of those of `backup`."""
        self._root = backup._root.copied()

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        self.meet("read", path)
        entries = self._directory(path).entries
        return [DirectoryEntry(name, isinstance(node, Directory)) for name, node in entries.items()]

    def make_directory(self, path: str) -> None:
        directory, name = self._parent(path)
        node = directory.entries.get(name)
        if node is None:
            self.operation("create", path)
            node = Directory()
            directory.change("", name, node)
        assert isinstance(node, Directory), path

    def rename(self, source: str, target: str) -> None:
        self.operation("rename", source)
        parent, name = self._parent(source)
        other, target_name = self._parent(target)
        assert parent is other, "a rename across directories"
        node = parent.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        parent.change(name, target_name, node)

    def remove(self, path: str) -> None:
        try:
            parent, name = self._parent(path)
        except FileNotFoundError:
            return
        if name in parent.entries:
            self.operation("remove", path)
            parent.change(name, "", None)

    def remove_tree(self, path: str) -> None:
        self._directory(path)
        self.remove(path)

    def sync_file(self, path: str) -> None:
        self.operation("sync", path, self._inode(path))
        self._inode(path).sync()

    def sync_directory(self, path: str) -> None:
        self.operation("sync", path)
        self._directory(path).sync()

    def sync_all(self, directories: Sequence[str], since: Lock) -> bool:
        if self._rng.random() < 0.5:
            return False
        self.operation("sync", directories[0])
        self._root.sync_everything()
        return True

    def lock(self, path: str) -> Lock:
        if path in self.locks:
            raise DirectoryInUse(path)
        self.open(path, create=True)
        self.locks.add(path)
        return SimulatedLock(self, path)

    def random_bytes(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    def volume_bytes(self, path: str) -> tuple[int, int]:
        return 1 << 40, 1 << 39

    # Finding

    def _directory(self, path: str) -> Directory:
        self.require_power()
        directory = self._root
        for name in path.strip("/").split("/"):
            if name:
                node = directory.entries.get(name)
                if not isinstance(node, Directory):
                    raise FileNotFoundError(errno.ENOENT, "no such directory", path)
                directory = node
        return directory

    def _parent(self, path: str) -> tuple[Directory, str]:
        folder, _, name = path.rpartition("/")
        return self._directory(folder), name

    def _inode(self, path: str) -> Inode:
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if not isinstance(node, Inode):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return node


def _is_a_disk(disk: SimulatedDisk) -> Disk:
    return disk
