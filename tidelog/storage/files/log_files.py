"""The files of one log that threads make by name: those that several replace, and those of a cleaning.

A flush and a checkpoint write the epochs on threads of their own, an emptied log on the owner's thread, at one time.
Without a lock one renames the temporary file of the other, and older epochs replace newer ones. The owner renames the
log's directory under the same lock: a later log of the same name may be there, and it must not get the files of this
one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, encode_leader_epochs, replace_file
from tidelog.storage.files.disk import Disk


class LogFiles:
    """Older epochs never replace newer ones, and no file is written for a log that is gone."""

    __slots__ = ("_disk", "_is_synced", "_newest", "_written", "directory", "is_over", "lock")

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self.directory = directory
        """The log's. It changes under the lock."""
        self.is_over = False
        """The log was deleted, or is unusable: nothing is written any more."""
        self.lock = threading.Lock()
        """Held during each write, and by the owner while it renames the directory."""
        self._newest = self._written = 0  # numbers: of the newest epochs, and of those in the file
        self._is_synced = True  # what is in the file of the epochs

    @property
    def epochs_are_behind(self) -> bool:
        """Whether the newest epochs are not in the file: their writer has not come to it yet, or has failed."""
        return self._newest > self._written

    def epochs(self, epochs: Iterable[tuple[int, int]]) -> EpochContent:
        """The present epochs, for any thread to write. Call it on the owner's thread."""
        self._newest += 1
        return EpochContent(self, self._newest, encode_leader_epochs(epochs))

    def write_epochs(self, content: EpochContent) -> None:
        """Write the epochs, unless newer ones are there. What is there is on the device afterwards. Raises OSError."""
        with self.lock:
            directory = self.directory
            if self.is_over:
                return
            if content.number > self._written:
                replace_file(self._disk, directory, LEADER_EPOCH_FILE, content.data)
                self._written, self._is_synced = content.number, True
            elif not self._is_synced:
                self._disk.sync_file(f"{directory}/{LEADER_EPOCH_FILE}")
                self._disk.sync_directory(directory)
                self._is_synced = True

    def prepare_epochs(self, content: EpochContent) -> None:
        """Write the epochs to the temporary file, unless newer ones are there. Nothing is synced. Raises OSError."""
        with self.lock:
            if not self.is_over and content.number > self._written:
                self._disk.write_file(f"{self.directory}/{LEADER_EPOCH_FILE}.tmp", content.data, sync=False)

    def put_epochs_in_place(self, content: EpochContent) -> None:
        """Rename the temporary file, unless newer epochs are there. Raises OSError, also where another thread has used
        the temporary file meanwhile.
        """
        with self.lock:
            if not self.is_over and content.number > self._written:
                path = f"{self.directory}/{LEADER_EPOCH_FILE}"
                self._disk.rename(f"{path}.tmp", path)
                self._written, self._is_synced = content.number, False

    def prepare(self, name: str, data: bytes) -> None:
        """`prepare_epochs` for another file."""
        with self.lock:
            if not self.is_over:
                self._disk.write_file(f"{self.directory}/{name}.tmp", data, sync=False)

    def put_in_place(self, name: str) -> None:
        with self.lock:
            if not self.is_over:
                self._disk.rename(f"{self.directory}/{name}.tmp", f"{self.directory}/{name}")

    @contextmanager
    def guarded(self) -> Iterator[bool]:
        """Make files within this block, on any thread, without a sync. False if the log is gone: then make none."""
        with self.lock:
            yield not self.is_over

    def replace(self, name: str, content: Callable[[], bytes], *, sync: bool) -> None:
        """Replace another file, on any thread, by its content at that time. Raises OSError."""
        with self.lock:
            if not self.is_over:
                replace_file(self._disk, self.directory, name, content(), sync=sync)

    def remove(self, name: str) -> None:
        """Remove a file if it is there, on any thread. Raises OSError."""
        with self.lock:
            if not self.is_over:
                self._disk.remove(f"{self.directory}/{name}")


class EpochContent:
    """The epochs of one log at one time, as the bytes of its file."""

    __slots__ = ("_files", "data", "number")

    def __init__(self, files: LogFiles, number: int, data: bytes) -> None:
        self._files = files
        self.number = number
        self.data = data

    def write(self) -> None:
        """Write them, unless newer ones are there. On any thread. Raises OSError."""
        self._files.write_epochs(self)

    def prepare(self) -> None:
        self._files.prepare_epochs(self)

    def put_in_place(self) -> None:
        self._files.put_epochs_in_place(self)


def write_epochs(contents: Iterable[EpochContent]) -> None:
    """Write and sync the epochs of several logs. A log whose directory is missing has vanished."""
    for content in contents:
        try:
            content.write()
        except FileNotFoundError:
            pass
