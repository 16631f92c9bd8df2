"""The logs that a start finds in the log directories, until each is claimed by the metadata or set aside.

A replica may be found twice: its directory was out of reach for a while and the replica was made anew in another, or
the process ended while it was moved. The one where the metadata places it counts. Invariant: what the metadata does
not claim is kept under another name, never deleted, and never served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.log.partition_log import CorruptLog

if TYPE_CHECKING:
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.hosting")

Key = tuple[str, int]
Found = tuple["LogDirectory", "PartitionLog"]


class FoundLogs:
    def __init__(self, directories: LogDirectories) -> None:
        self._directories = directories
        self._found: dict[Key, list[Found]] = {}
        self.damaged: dict[Key, LogDirectory] = {}
        """Replicas whose logs cannot be opened though their directory can be read."""
        self.failures: list[tuple[LogDirectory, OSError]] = []
        """Directories that could not be read whole: they are to be taken offline."""

    def load(self, config_for: Callable[[str], LogConfig], now_ms: int) -> None:
        """Open every log, recovering those of an unclean stop. Blocking: on a thread, before anything is served."""
        for directory in self._directories:
            try:
                for key, found in directory.load(config_for, now_ms).items():
                    if found.flush_due:
                        # What a kill left behind was readable before it: sync it now, or it waits for the next append.
                        found.flush()
                    self._found.setdefault(key, []).append((directory, found))
            except (OSError, CorruptLog) as error:
                cause = error if isinstance(error, OSError) else OSError(str(error))
                self.failures.append((directory, cause))
            self.damaged.update(dict.fromkeys(directory.offline, directory))

    def has(self, key: Key, topic_id: bytes, directory_id: bytes) -> bool:
        """Whether a log of this replica was found. One that does not say of which topic counts if it is alone.

        One that was on its way to another directory counts if the metadata places the replica there already: before
        that it may lack anything.
        """
        candidates = self._found.get(key, [])
        ids = [found.topic_id for _, found in candidates]
        return topic_id in ids or bytes(16) in ids or ids == [None] or self._has_moved(key, topic_id, directory_id)

    def _has_moved(self, key: Key, topic_id: bytes, directory_id: bytes) -> bool:
        homes = [directory for directory in self._directories if directory.directory_id == directory_id]
        futures = (home.futures.get(key) for home in homes)
        return any(future is not None and future.topic_id == topic_id for future in futures)

    def forget(self, directory: LogDirectory) -> None:
        """It has failed meanwhile."""
        for key, found in list(self._found.items()):
            self._found[key] = [each for each in found if each[0] is not directory]

    def claim(self, key: Key, topic_id: bytes, directory_id: bytes) -> Found | None:
        """The log of this replica, which the metadata places in this directory, or in one that it does not know.

        Raises OSError for want of something that says nothing of the directory.
        """
        candidates = self._found.get(key, [])
        for directory, found in candidates:
            if found.topic_id is None and len(candidates) == 1:
                try:
                    directory.set_topic_id(*key, topic_id)  # a loss of power took the file, not the records
                except OSError as error:
                    if is_exhaustion(error):
                        raise
                    self._directories.failed(directory, error)
        own = [each for each in candidates if each[1].topic_id in (topic_id, bytes(16))]
        if not own:
            return None
        claimed = next((each for each in own if each[0].directory_id == directory_id), own[0])
        candidates.remove(claimed)
        return claimed

    def set_others_aside(self, key: Key, topic_id: bytes) -> None:
        """Logs that say they are of another topic: it was deleted and made again while this node was away, or the file
        that says so is damaged. They are kept, as what no topic claims."""
        for each in list(self._found.get(key, [])):
            directory, found = each
            if found.topic_id not in (topic_id, bytes(16), None):
                self._set_aside(directory, key)
                self._found[key].remove(each)

    def set_rest_aside(self) -> None:
        """Topics deleted, or replicas moved away, while this node was not there to see it."""
        for key, found in self._found.items():
            for directory, _ in found:
                if self._directories.is_usable(directory):
                    self._set_aside(directory, key)
        self._found.clear()

    def _set_aside(self, directory: LogDirectory, key: Key) -> None:
        try:
            where = directory.set_aside(*key)
        except OSError as error:
            self._directories.failed(directory, error)
        else:
            logger.warning("the metadata does not place %s-%d here: it is kept as %s", *key, where)
