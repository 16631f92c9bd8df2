"""The logs found in the log directories at the start, until the metadata claims them or they are set aside.

A replica may have two logs: its directory was offline and the replica was created again in another one, or the process
ended during a move. The log in the directory that the metadata names is used. Invariant: an unclaimed log is kept under
another name; it is neither deleted nor read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.log.partition_log import CorruptLog

if TYPE_CHECKING:
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.replication.controller.metadata.image import TopicImage
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.hosting")

Key = tuple[str, int]
DiscoveredLog = tuple["LogDirectory", "PartitionLog"]


class DiscoveredLogs:
    def __init__(self, directories: LogDirectories) -> None:
        self._directories = directories
        self._logs: dict[Key, list[DiscoveredLog]] = {}
        self.damaged: dict[Key, LogDirectory] = {}
        """Replicas whose logs cannot be opened, in a directory that can be read."""
        self.failures: list[tuple[LogDirectory, OSError]] = []
        """Directories that could not be read completely and must go offline."""

    def load(self, config_for: Callable[[str], LogConfig], now_ms: int) -> None:
        """Open every log, with recovery after an unclean stop. It blocks: it runs on a thread, before any request."""
        for directory in self._directories:
            try:
                for key, log in directory.load(config_for, now_ms).items():
                    if log.flush_due:
                        # Records from before a kill were readable then. Without a sync now they wait for an append.
                        log.flush()
                    self._logs.setdefault(key, []).append((directory, log))
            except (OSError, CorruptLog) as error:
                cause = error if isinstance(error, OSError) else OSError(str(error))
                # Its frames would keep what was read of the log that could not be opened.
                cause.__traceback__ = cause.__context__ = cause.__cause__ = None
                self.failures.append((directory, cause))
            self.damaged.update(dict.fromkeys(directory.offline, directory))

    def has(self, key: Key, topic_id: bytes, directory_id: bytes) -> bool:
        """Whether a log of this replica was found. A log without a topic id counts if it is the only one.

        A future log counts only if the metadata already names its directory: before that it may lack records.
        """
        candidates = self._logs.get(key, [])
        ids = [log.topic_id for _, log in candidates]
        return topic_id in ids or bytes(16) in ids or ids == [None] or self._has_moved(key, topic_id, directory_id)

    def _has_moved(self, key: Key, topic_id: bytes, directory_id: bytes) -> bool:
        homes = [directory for directory in self._directories if directory.directory_id == directory_id]
        futures = (home.futures.get(key) for home in homes)
        return any(future is not None and future.topic_id == topic_id for future in futures)

    def has_vanished(self, key: Key) -> bool:
        """Whether the directory of this replica's log is gone from a log directory that is there."""
        return any(key in directory.vanished for directory in self._directories)

    def forget_vanished(self, key: Key) -> None:
        """The replica has a log again, or is not assigned to this node any more."""
        for directory in self._directories:
            directory.forget_vanished((key,))

    def forget(self, directory: LogDirectory) -> None:
        """The directory has failed: forget its logs."""
        for key, logs in list(self._logs.items()):
            self._logs[key] = [each for each in logs if each[0] is not directory]

    def claim(
        self, key: Key, topic_id: bytes, directory_id: bytes, *, takes_nameless: bool = True
    ) -> DiscoveredLog | None:
        """The log of this replica, preferably in the directory that the metadata names.

        `takes_nameless`: whether a log without a topic id must be that of this topic. Raises OSError for a shortage,
        which is no failure of the directory.
        """
        candidates = self._logs.get(key, [])
        for directory, log in candidates:
            if not self._directories.is_usable(directory):
                continue  # it has just refused another log's, and each try may be slow
            # A loss of power or damage took only the file with the topic id; or it has no checksum yet, as Kafka's.
            is_taken = takes_nameless and log.topic_id is None and len(candidates) == 1
            try:
                if is_taken or (log.topic_id == topic_id and not log.topic_id_has_checksum):
                    directory.set_topic_id(*key, topic_id)
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

    def give_back(self, key: Key, claimed: DiscoveredLog) -> None:
        """A shortage keeps the node from using the log that it has claimed now."""
        self._logs.setdefault(key, []).append(claimed)

    def set_former_aside(
        self, topics: Mapping[str, TopicImage], takes_nameless: Callable[[TopicImage, int], bool]
    ) -> None:
        """Set aside the logs of all topics that were deleted and created again while this node was down.

        Before the first new log is created: a new log under the name of an old one has the checkpoints written and
        synced, once for all that were set aside until then.
        """
        for topic, index in list(self._logs):
            if topic in topics:
                keeps_nameless = takes_nameless(topics[topic], index)
                self.set_others_aside((topic, index), topics[topic].topic_id, keeps_nameless=keeps_nameless)

    def set_others_aside(self, key: Key, topic_id: bytes, *, keeps_nameless: bool = True) -> None:
        """Set aside logs with another topic id, like unclaimed ones; and those without one, unless they are kept.

        The topic was deleted and created again while this node was down, or the file with the topic id is damaged.
        """
        for each in list(self._logs.get(key, [])):
            directory, log = each
            is_other = log.topic_id not in (topic_id, bytes(16)) if log.topic_id is not None else not keeps_nameless
            if is_other:
                self._set_aside(directory, key)
                self._logs[key].remove(each)

    @property
    def has_rest(self) -> bool:
        """Whether `set_rest_aside` has anything to look at."""
        return bool(self._logs) or any(directory.vanished for directory in self._directories)

    def set_rest_aside(self, deferred: Collection[Key], lost: Collection[Key]) -> None:
        """Set aside unclaimed logs: the topic was deleted or the replica was moved away while this node was down.

        Those of `deferred` replicas stay: a shortage has kept the node from claiming them until now. Of the logs that
        have vanished, only those of `lost` and `deferred` replicas matter to this node.
        """
        for directory in self._directories:
            directory.forget_vanished(directory.vanished.difference(deferred, lost))
        for key in [key for key in self._logs if key not in deferred]:
            for directory, _ in self._logs.pop(key):
                self._set_aside(directory, key)

    def _set_aside(self, directory: LogDirectory, key: Key) -> None:
        if not self._directories.is_usable(directory):
            return
        try:
            where = directory.set_aside(*key)
        except OSError as error:
            self._directories.failed(directory, error)
        else:
            logger.warning("the metadata does not assign %s-%d here: keeping it as %s", *key, where)
