"""The log directories of a node: which are open, which are offline, and what happens when one fails.

Kafka's LogDirFailureChannel, with the reactions of LogManager and ReplicaManager. Any error of a device takes its whole
directory offline until the next start. The node continues with the other directories; it ends if the failed one was the
last or holds the metadata. Invariant: a directory fails once, after the operation that met the error has returned, and
nothing is written to it afterwards. The listeners in `on_offline` update the partitions and the controller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.errors import ConfigError
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.storage.files.disk import is_exhaustion, is_full
from tidelog.storage.files.incarnation import machine_ran_on, remove_incarnation, surviving_epoch, write_incarnation
from tidelog.storage.files.log_names import parse_name
from tidelog.storage.files.meta_properties import DamagedProperties, ForeignDirectory
from tidelog.storage.log.directory import METADATA_TOPIC, LogDirectory
from tidelog.storage.log.loader import Ending

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Executor

    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.storage.files.disk import Disk

CORDONED: Final = "cordoned.log.dirs"

logger = logging.getLogger("tidelog.directories")


class NoDirectoryLeft(OSError):
    """The node cannot continue without the failed directory. The text is written for the user."""


class LogDirectories:
    """Calls `on_fatal` when the node cannot continue, and each of `on_offline`, in order, for a failed directory."""

    def __init__(
        self,
        config: NodeConfig,
        disk: Disk,
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[Exception], None],
        executor: Executor | None = None,
    ) -> None:
        self._config = config
        self._disk = disk
        self._loop = loop
        self._on_fatal = on_fatal
        self._executor = executor
        self.on_offline: list[Callable[[LogDirectory], None]] = []
        self._home_paths = {str(path): _path_as_text(path) for path in config.log_dirs}
        self.online: list[LogDirectory] = []
        """The open directories. The first holds the metadata, and may hold nothing else."""
        self.offline: dict[str, str] = {}
        """Path -> reason, for the directories that could not be opened or have failed."""
        self._boot_id = ""
        self._known_ids: list[bytes] = []
        self._failing: set[LogDirectory] = set()
        self._short: set[LogDirectory] = set()  # what a shortage at the start kept from being opened
        self.missing: list[str] = []
        """In-sync or eligible replicas of this node whose logs are missing."""

    def __iter__(self) -> Iterator[LogDirectory]:
        """The usable directories."""
        return iter([directory for directory in self.online if self.is_usable(directory)])

    def is_usable(self, directory: LogDirectory) -> bool:
        return directory.failure is None and directory not in self._failing

    # ------------------------------------------------------------------------------------------------------ start, stop

    def open(self, boot_id: str = "") -> None:
        """Open the directories. Raises ConfigError, ForeignDirectory, DirectoryInUse, OSError.

        `boot_id` shows whether the machine has restarted since the last process.
        A directory that cannot be read or written, or whose meta.properties is damaged, starts offline. It is an error
        if it holds the metadata, or if no other directory is left for topics.
        """
        config, disk = self._config, self._disk
        self._boot_id = boot_id
        metadata_path = str(config.metadata_log_dir)
        self._check_metadata_place(metadata_path)
        if not disk.exists(f"{metadata_path}/meta.properties"):
            if config.is_controller and config.quorum_bootstrap and not config.quorum_voters:
                raise ConfigError(
                    f"{metadata_path} is not formatted, and controller.quorum.bootstrap.servers names no voters: "
                    "`tidelog format --standalone` with the same configuration makes this node the first voter, "
                    "`tidelog format --cluster-id ID` has it join a cluster that runs"
                )
            if not config.is_alone:
                # Otherwise each node would create a cluster of its own.
                raise ConfigError(
                    f"{metadata_path} is not formatted: `tidelog format` gives all nodes the same cluster id"
                )
        cluster_id: str | None = None
        for path in dict.fromkeys((metadata_path, *self._home_paths)):
            try:
                directory = LogDirectory.open(disk, path, node_id=config.node_id, cluster_id=cluster_id)
            except DamagedProperties as error:
                if path == metadata_path:
                    raise
                logger.error("log directory %s is offline: %s", path, error)
                self.offline[path] = str(error)
            except OSError as error:
                problem = _problem(disk, path, error)
                if path == metadata_path:
                    problem = f"the log directory cannot be used: {problem}"
                    raise OSError(error.errno, problem, error.filename or path) from None
                logger.error("log directory %s is offline: %s", path, problem)
                self.offline[path] = problem
            else:
                cluster_id = directory.cluster_id
                twins = [each.path for each in self.online if each.directory_id == directory.directory_id]
                self.online.append(directory)  # before the error, so that it is closed with the others
                if twins:
                    raise ForeignDirectory(f"{path} has the directory.id of {twins[0]}: one is a copy of the other")
                directory.on_loss, directory.has_present = self._disown, self._has_present
                if not directory.was_clean and machine_ran_on(disk, path, boot_id):
                    directory.ending = Ending.KILLED
        self._known_ids = [directory.directory_id for directory in self.homes]
        if config.is_broker and not self.homes:
            reasons = ", ".join(f"{path}: {self.offline[path]}" for path in self._home_paths)
            raise NoDirectoryLeft(f"none of the log directories can be used: {reasons}")

    def _check_metadata_place(self, metadata_path: str) -> None:
        """Refuse to begin a new metadata log beside the old one, or beside logs of topics that only the old one knows.
        A single node would forget all topics, and set their logs aside; a voter would forget what it has acknowledged.
        Raises ConfigError.
        """
        if self._disk.exists(f"{metadata_path}/{METADATA_TOPIC}-0"):
            return
        for path in self._home_paths:
            if self._disk.exists(f"{path}/{METADATA_TOPIC}-0"):
                raise ConfigError(
                    f"{path} has the metadata log of this node, but the configuration places it in {metadata_path}, "
                    f"which has none: set metadata.log.dir={path}"
                )
        if not self._config.is_controller:
            return  # it reads the metadata from the controllers
        # With other voters, an empty directory for the metadata alone is the repair of a disk that is lost.
        for path in [metadata_path, *self._home_paths] if self._config.is_alone else [metadata_path]:
            if self._has_topics(path):
                raise ConfigError(
                    f"{path} has logs of topics, but no directory has the metadata log that knows them: is a directory "
                    "missing in log.dirs, or a volume not mounted? To begin anew without these topics, move them away"
                )

    def _has_present(self, topic: str, partition: int) -> bool:
        """Whether a directory that can be read has the present log of this replica, which counts before a future log.

        Otherwise the start may promote the future log.
        """
        return any(self._disk.exists(f"{directory.path}/{topic}-{partition}") for directory in self)

    def _has_topics(self, path: str) -> bool:
        try:
            entries = self._disk.list_directory(path) if self._disk.exists(path) else []
        except OSError:
            return False  # to open it meets the error again
        names = [parse_name(entry.name) for entry in entries if entry.is_directory]
        return any(name is not None and name[0] != METADATA_TOPIC for name in names)

    def stop_loading(self) -> None:
        """The node stops: do not open the logs that are not open yet. A scan of all may take minutes."""
        for directory in self.online:
            directory.stop_loading()

    def close(self, broker_epoch: int) -> bool:
        """Close the directories and mark clean stops. Whether every directory stopped cleanly: one that is offline did
        not, because what was written there before may be on no device.
        """
        for directory in self._failing:
            directory.fail("it failed at the very end")
        is_whole = True
        has_lost = any(directory.shortened_logs for directory in self.online)
        for directory in self.online:
            try:
                epoch = broker_epoch
                if epoch < 0 and not has_lost:
                    # A start that failed before registration keeps the epoch that the directory vouches for.
                    epoch = directory.clean_broker_epoch
                    if not directory.was_clean:
                        epoch = surviving_epoch(self._disk, directory.path, self._boot_id)
                is_whole = (directory.close(epoch) or directory in self._short) and is_whole
            except OSError as error:
                logger.error("%s did not close cleanly: %s", directory.path, error)
                is_whole = False
        if not is_whole:
            self._disown()
        return is_whole and not self.offline

    # ------------------------------------------------------------------------------------------------------ directories

    @property
    def metadata(self) -> LogDirectory:
        return self.online[0]

    @property
    def cluster_id(self) -> str:
        return self.online[0].cluster_id

    @property
    def home_paths(self) -> dict[str, str]:
        """The configured directories for topics, online or not -> their absolute paths, which requests use."""
        return self._home_paths

    @property
    def homes(self) -> list[LogDirectory]:
        """The usable directories for topics, without one that is only for metadata."""
        return [directory for directory in self if directory.path in self._home_paths]

    async def volume_bytes(self, directory: LogDirectory) -> tuple[int, int]:
        """(size, free bytes) of the directory's file system; -1 if unknown. On a thread: the device may be slow."""
        try:
            return await self._loop.run_in_executor(self._executor, self._disk.volume_bytes, directory.path)
        except OSError as error:
            logger.warning("the size of the volume of %s is unknown: %s", directory.path, error)
            return -1, -1

    @property
    def known_ids(self) -> list[bytes]:
        """The ids for the registration. They include failed ones, so that the controller learns of the failures."""
        return self._known_ids

    def home_at(self, path: str) -> LogDirectory | None:
        """The usable directory with this path."""
        return next((directory for directory in self.homes if directory.path == path), None)

    def is_cordoned(self, path: str, entries: Collection[str]) -> bool:
        """Whether the directory configured as `path` takes no new replicas (KIP-1066). `entries`: the setting."""
        return not {path, self._home_paths[path], "*"}.isdisjoint(entries)

    def may_be_offline(self, directory_id: bytes) -> bool:
        """Whether a replica that the metadata assign to this directory may be in an offline one. So may one from before
        metadata.version 17; a new one has no log yet.
        """
        if directory_id == UNASSIGNED_DIRECTORY:
            return False
        homes = self.homes
        return len(homes) < len(self._home_paths) and all(each.directory_id != directory_id for each in homes)

    # ------------------------------------------------------------------------------------------------------- the epochs

    def clean_epoch(self, boot_id: str) -> int:
        """The epoch of the last process if all its writes are there; otherwise -1 (KIP-966).

        They are there after a clean stop, or if the machine has not restarted, unless a directory is missing or a log
        has lost records. Call it after the logs are opened, because opening detects the losses.
        """
        if self.offline or self.missing:
            return -1
        if any(directory.shortened_logs or directory.offline for directory in self.online):
            return -1
        if all(directory.was_clean for directory in self.online):
            epochs = {directory.clean_broker_epoch for directory in self.online}
        else:
            epochs = {surviving_epoch(self._disk, directory.path, boot_id) for directory in self.online}
        return epochs.pop() if len(epochs) == 1 else -1  # a directory restored from a copy has an older epoch

    def write_incarnations(self, epoch: int, boot_id: str) -> None:
        """Record that this process writes from now on, in this broker epoch; -1 if it is no broker."""
        for directory in self.online:
            try:
                write_incarnation(self._disk, directory.path, epoch, boot_id)
            except OSError as error:
                self.failed(directory, error)

    # ---------------------------------------------------------------------------------------------------------- failing

    def failed_at(self, path: str, error: OSError) -> None:
        """An operation on this file or directory met an error of the device."""
        for directory in list(self.online):
            if path == directory.path or path.startswith(directory.path + "/"):
                self.failed(directory, error)

    def failed(self, directory: LogDirectory, error: OSError) -> None:
        """A whole directory has failed. It goes offline in the loop's next turn, after the running operation."""
        if is_exhaustion(error) or directory in self._failing or directory.failure is not None:
            return
        self._failing.add(directory)
        why = str(error)
        if is_full(error):
            why = f"{why} (`df -h` and `df -i` tell whether bytes, inodes or a quota ran out)"
        logger.error("log directory %s has failed: %s", directory.path, why)
        self._loop.call_soon(self._take_offline, directory, why)

    def failed_at_start(self, directory: LogDirectory, error: OSError) -> None:
        """A directory has failed at the start, before it is used. It goes offline at once, as in Kafka.

        A shortage of descriptors or memory says nothing against the device: what the last process wrote is all there,
        and the next start may say so.
        """
        why = str(error)
        if is_exhaustion(error):
            why = f"{why} (a shortage, not a failure of the device: `ulimit -n` limits open files)"
            self._short.add(directory)
        logger.error("log directory %s cannot be read: %s", directory.path, why)
        self._take_offline(directory, why)

    def _take_offline(self, directory: LogDirectory, why: str) -> None:
        self._failing.add(directory)
        if directory not in self._short:
            self._disown()
        is_metadata = directory is self.metadata
        self.offline[directory.path] = why
        if not is_metadata:
            self.online.remove(directory)
        if is_metadata or not self.homes:
            what = "it holds the metadata" if is_metadata else "it was the last one"
            message = f"this node cannot go on without log directory {directory.path}, {what}: {why}"
            logger.critical(message)
            directory.fail(why)
            self._on_fatal(NoDirectoryLeft(message))
            return
        call_all(self.on_offline, directory)
        directory.fail(why)
        self._failing.discard(directory)

    def _disown(self) -> None:
        """Writes may be lost, so the next process must not claim this one's epoch (KIP-966)."""
        for directory in self.online:
            remove_incarnation(self._disk, directory.path)


def _path_as_text(path: Path) -> str:
    """The whole path as requests have it. The names above it may be any bytes."""
    return os.fsencode(path.absolute()).decode("utf-8", "backslashreplace")


def _problem(disk: Disk, path: str, error: OSError) -> str:
    """The reason why a directory cannot be opened. Names a file that has its path, or that of a parent directory."""
    if not isinstance(error, NotADirectoryError | FileExistsError):
        return error.strerror or str(error)
    if os.path.islink(path) and not disk.exists(path):
        return "it is a link that leads nowhere"
    above = path.rstrip("/")
    while above and not disk.exists(above):
        above = above.rpartition("/")[0]
    return f"{'it' if above == path.rstrip('/') else above} is not a directory"
