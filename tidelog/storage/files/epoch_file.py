"""The file leader-epoch-checkpoint of one log.

A flush and a checkpoint write it on threads of their own, an emptied log on the owner's thread, at one time. Without a
lock one renames the temporary file of the other, and older epochs replace newer ones. The owner renames the log's
directory under the same lock: a later log of the same name may be there, and it must not get the files of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, encode_leader_epochs, replace_file
from tidelog.storage.files.disk import Disk


class EpochFile:
    """Older content never replaces newer, on whatever thread it is written."""

    __slots__ = ("_disk", "_is_synced", "_number", "_written", "directory", "is_over", "lock")

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self.directory = directory
        """The log's. It changes under the lock."""
        self.is_over = False
        """The log was deleted, or is unusable: nothing is written any more."""
        self.lock = threading.Lock()
        """Held during each write, and by the owner while it renames the directory."""
        self._number = self._written = 0  # of the newest content, and of the content that is in the file
        self._is_synced = True

    @property
    def is_behind(self) -> bool:
        """Whether the newest content is not in the file: its writer has not come to it yet, or has failed."""
        return self._number > self._written

    def content(self, epochs: Iterable[tuple[int, int]]) -> EpochContent:
        """The present epochs, for any thread to write. Call it on the owner's thread."""
        self._number += 1
        return EpochContent(self, self._number, encode_leader_epochs(epochs))

    def write(self, content: EpochContent, *, sync: bool) -> None:
        """Write the content, unless newer content is there. With `sync`, what is there is on the device afterwards.

        Raises OSError.
        """
        with self.lock:
            directory = self.directory
            if self.is_over:
                return
            if content.number > self._written:
                replace_file(self._disk, directory, LEADER_EPOCH_FILE, content.data, sync=sync)
                self._written, self._is_synced = content.number, sync
            elif sync and not self._is_synced:
                self._disk.sync_file(f"{directory}/{LEADER_EPOCH_FILE}")
                self._disk.sync_directory(directory)
                self._is_synced = True

    def write_other(self, name: str, data: bytes, *, sync: bool) -> None:
        """Replace another small file of the log, on any thread, unless the log is over. Raises OSError."""
        with self.lock:
            if not self.is_over:
                replace_file(self._disk, self.directory, name, data, sync=sync)


class EpochContent:
    """The epochs of one log at one time, as the bytes of its file."""

    __slots__ = ("_file", "data", "number")

    def __init__(self, file: EpochFile, number: int, data: bytes) -> None:
        self._file = file
        self.number = number
        self.data = data

    def write(self, *, sync: bool = True) -> None:
        """Write it, unless newer content is there. On any thread. Raises OSError."""
        self._file.write(self, sync=sync)


def write_all(contents: Iterable[EpochContent]) -> None:
    """Write and sync the files of several logs. A log whose directory is missing has vanished."""
    for content in contents:
        try:
            content.write()
        except FileNotFoundError:
            pass
