"""The log directories of a node: which are open, which are offline, and what happens when one fails.

Kafka's LogDirFailureChannel with what LogManager and ReplicaManager make of it. An error of the device, wherever it is
met, takes its whole directory offline for good; the node goes on with the others, and ends when none is left or the
metadata is in it. Invariant: a directory fails once, never in the middle of what met the error, and nothing is written
to it any more. What its partitions and the controller make of it is the listeners' business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final

from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.errors import ConfigError
from tidelog.protocol.uuids import MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.files.incarnation import machine_ran_on, remove_incarnation, surviving_epoch, write_incarnation
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Executor

    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.storage.files.disk import Disk

CORDONED: Final = "cordoned.log.dirs"

logger = logging.getLogger("tidelog.directories")


class NoDirectoryLeft(OSError):
    """The node cannot go on without the directory that has failed; the text is fit to be shown."""


class LogDirectories:
    """`on_fatal` is told when the node cannot go on; `on_offline` are told of each directory that failed, in order."""

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
        self._home_paths = {str(path): str(path.absolute()) for path in config.log_dirs}
        self.online: list[LogDirectory] = []
        """Every open one; first that of the metadata, which may be for metadata alone."""
        self.offline: dict[str, str] = {}
        """Path -> why, of those that could not be opened or have failed."""
        self._boot_id = ""
        self._known_ids: list[bytes] = []
        self._failing: set[LogDirectory] = set()
        self.missing: list[str] = []
        """Replicas that should be here, and were in sync, and are not."""

    def __iter__(self) -> Iterator[LogDirectory]:
        """Those that can be used."""
        return iter([directory for directory in self.online if self.is_usable(directory)])

    def is_usable(self, directory: LogDirectory) -> bool:
        return directory.failure is None and directory not in self._failing

    # ------------------------------------------------------------------------------------------------------ start, stop

    def open(self, boot_id: str = "") -> None:
        """Open what can be opened. Raises ConfigError, ForeignDirectory, DirectoryInUse, OSError.

        `boot_id` tells whether the machine has run on since the last process.
        A directory that cannot be read or written is offline from the start, unless the metadata is in it, or no other
        is left for topics.
        """
        config, disk = self._config, self._disk
        self._boot_id = boot_id
        metadata_path = str(config.metadata_log_dir)
        if not disk.exists(f"{metadata_path}/meta.properties"):
            if config.is_controller and config.quorum_bootstrap and not config.quorum_voters:
                raise ConfigError(
                    f"{metadata_path} is not formatted, and controller.quorum.bootstrap.servers names no voters: "
                    "`tidelog format --standalone` with the same configuration makes this node the first voter, "
                    "`tidelog format --cluster-id ID` has it join a cluster that runs"
                )
            if not config.is_alone:
                # Each would invent a cluster of its own.
                raise ConfigError(
                    f"{metadata_path} is not formatted: `tidelog format` gives all nodes the same cluster id"
                )
        cluster_id: str | None = None
        for path in dict.fromkeys((metadata_path, *self._home_paths)):
            try:
                directory = LogDirectory.open(disk, path, node_id=config.node_id, cluster_id=cluster_id)
            except OSError as error:
                problem = _problem(disk, path, error)
                if path == metadata_path:
                    problem = f"the log directory cannot be used: {problem}"
                    raise OSError(error.errno, problem, error.filename or path) from None
                logger.error("log directory %s is offline: %s", path, problem)
                self.offline[path] = problem
            else:
                cluster_id = directory.cluster_id
                self.online.append(directory)
                directory.on_loss = self._disown
                if not directory.was_clean and machine_ran_on(disk, path, boot_id):
                    directory.ending = Ending.KILLED
        self._known_ids = [directory.directory_id for directory in self.homes]
        if config.is_broker and not self.homes:
            reasons = ", ".join(f"{path}: {self.offline[path]}" for path in self._home_paths)
            raise NoDirectoryLeft(f"none of the log directories can be used: {reasons}")

    def close(self, broker_epoch: int) -> bool:
        """Leave a clean end where there is one; whether each directory has one."""
        for directory in self._failing:
            directory.fail("it failed at the very end")
        is_whole = True
        has_lost = any(directory.lost for directory in self.online)
        for directory in self.online:
            try:
                epoch = broker_epoch
                if epoch < 0 and not has_lost:
                    # A start that came to nothing changes nothing: what spoke for an epoch still speaks for it.
                    epoch = directory.clean_broker_epoch
                    if not directory.was_clean:
                        epoch = surviving_epoch(self._disk, directory.path, self._boot_id)
                is_whole = directory.close(epoch) and is_whole
            except OSError as error:
                logger.error("%s did not close cleanly: %s", directory.path, error)
                is_whole = False
        if not is_whole:
            self._disown()
        return is_whole

    # ---------------------------------------------------------------------------------------------------- what there is

    @property
    def metadata(self) -> LogDirectory:
        return self.online[0]

    @property
    def cluster_id(self) -> str:
        return self.online[0].cluster_id

    @property
    def home_paths(self) -> dict[str, str]:
        """Where topics may be, online or not, and the absolute path of each, which is what others call it."""
        return self._home_paths

    @property
    def homes(self) -> list[LogDirectory]:
        """The usable ones that take topics: not the one for metadata alone, where there is one."""
        return [directory for directory in self if directory.path in self._home_paths]

    async def volume_bytes(self, directory: LogDirectory) -> tuple[int, int]:
        """(size, room left) of the file system it is on; -1 where that cannot be told. The device may take its time."""
        try:
            return await self._loop.run_in_executor(self._executor, self._disk.volume_bytes, directory.path)
        except OSError as error:
            logger.warning("the size of the volume of %s is unknown: %s", directory.path, error)
            return -1, -1

    @property
    def known_ids(self) -> list[bytes]:
        """Those a registration names: also of homes that have failed since, so that the controller hears what went."""
        return self._known_ids

    def home_at(self, path: str) -> LogDirectory | None:
        """The usable one with that path."""
        return next((directory for directory in self.homes if directory.path == path), None)

    def is_cordoned(self, path: str, entries: Collection[str]) -> bool:
        """Whether the home configured as `path` wants no new replicas (KIP-1066). `entries`: what is set."""
        return not {path, self._home_paths[path], "*"}.isdisjoint(entries)

    def may_be_offline(self, directory_id: bytes) -> bool:
        """Whether a replica that the metadata places in this directory may be in one that is out of reach."""
        if directory_id in (UNASSIGNED_DIRECTORY, MIGRATING_DIRECTORY):
            return False
        homes = self.homes
        return len(homes) < len(self._home_paths) and all(each.directory_id != directory_id for each in homes)

    # ------------------------------------------------------------------------------------------------------- the epochs

    def clean_epoch(self, boot_id: str) -> int:
        """The epoch of the last process if all that it wrote is there: it stopped cleanly, or the machine ran on.

        Else -1 (KIP-966), and always where a directory is missing, or a log has lost something. Ask when the logs are
        open: opening them is what finds that.
        """
        if self.offline or self.missing:
            return -1
        if any(directory.lost or directory.offline for directory in self.online):
            return -1
        if all(directory.was_clean for directory in self.online):
            epochs = {directory.clean_broker_epoch for directory in self.online}
        else:
            epochs = {surviving_epoch(self._disk, directory.path, boot_id) for directory in self.online}
        return epochs.pop() if len(epochs) == 1 else -1  # one that was copied back is of an older epoch

    def write_incarnations(self, epoch: int, boot_id: str) -> None:
        """This process writes from now on, in this broker epoch; -1 where it is no broker."""
        for directory in self.online:
            try:
                write_incarnation(self._disk, directory.path, epoch, boot_id)
            except OSError as error:
                self.failed(directory, error)

    # ---------------------------------------------------------------------------------------------------------- failing

    def failed_at(self, path: str, error: OSError) -> None:
        """An error of the device was met with this file or directory."""
        for directory in list(self.online):
            if path == directory.path or path.startswith(directory.path + "/"):
                self.failed(directory, error)

    def failed(self, directory: LogDirectory, error: OSError) -> None:
        """The same for a whole directory. It goes offline as soon as what is under way has returned."""
        if is_exhaustion(error) or directory in self._failing or directory.failure is not None:
            return
        self._failing.add(directory)
        logger.error("log directory %s has failed: %s", directory.path, error)
        self._loop.call_soon(self._take_offline, directory, str(error))

    def failed_at_start(self, directory: LogDirectory, error: OSError) -> None:
        """The same before anybody uses it."""
        logger.error("log directory %s cannot be read: %s", directory.path, error)
        self._take_offline(directory, str(error))

    def _take_offline(self, directory: LogDirectory, why: str) -> None:
        self._failing.add(directory)
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
        """What was written may be lost: the next process must not speak for this one's epoch."""
        for directory in self.online:
            remove_incarnation(self._disk, directory.path)


def _problem(disk: Disk, path: str, error: OSError) -> str:
    """Why a directory cannot be opened; names the file that is in its place, or in that of one above it."""
    if not isinstance(error, NotADirectoryError | FileExistsError):
        return error.strerror or str(error)
    above = path.rstrip("/")
    while above and not disk.exists(above):
        above = above.rpartition("/")[0]
    return f"{'it' if above == path.rstrip('/') else above} is not a directory"
