"""Applies the metadata image to this node: creates and deletes logs, changes roles, applies
configs.

It follows committed images and elects no leaders. `discovered_logs.py` holds the logs that a start finds
on the disks; `log_directories.py` knows the usable directories. Invariant: after `apply`, this node
hosts the replicas that the image assigns to it. Two kinds are excepted: replicas in an offline log
directory, for which requests get a storage error, and replicas deferred to the loop's next turns. A deferred
role is that of an earlier image, as on a node that has not received the newest one yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from tidelog.broker.replicas.discovered_logs import DiscoveredLogs
from tidelog.broker.replicas.log_deletions import LogDeletions
from tidelog.broker.replicas.log_directories import CORDONED
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.protocol.uuids import MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, METADATA_VERSION, TOPIC_RESOURCE
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION
from tidelog.replication.throttle import UNLIMITED, is_throttled
from tidelog.replication.truncation import compacted_below
from tidelog.storage.files.disk import is_exhaustion, is_full
from tidelog.storage.log.partition_log import CorruptLog

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.replica_moves import ReplicaMoves
    from tidelog.broker.replicas.unclean_leaders import UncleanLeaders
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage, PartitionImage, TopicImage
    from tidelog.replication.fetcher import ReplicaFetchers
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.hosting")

# The bounds of new logs in one turn of the loop. Each log has several files: where processors and disks are busy,
# one takes 25 ms instead of half a millisecond, and a voter that creates a hundred is silent for longer than a session.
# A start counts the logs that it finds, too.
NEW_LOGS_PER_TURN_MAX = 100
NEW_LOGS_S = 0.02
# So many are created however long they take.
FEW_NEW_LOGS = 5
# Changed roles in one turn of the loop, some 3 ms. The death of a broker changes thousands.
ROLES_PER_TURN_MAX = 100
# The time that changed settings take in one turn of the loop. A topic that ceases to be compacted has a file written.
CONFIGS_S = 0.01
# The pause after a shortage of file descriptors or memory.
SHORTAGE_PAUSE_S = 1.0
LogLocation = tuple["LogDirectory", "PartitionLog"]
RoleChange = Callable[["Partition", bool], None]


class Hosting:
    """`on_role(partition, leads)` is called for every partition that starts or stops leading on
    this node.
    """

    def __init__(
        self,
        node_id: int,
        settings: DynamicConfig,
        directories: LogDirectories,
        partitions: Partitions,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        on_role: RoleChange,
        *,
        fetchers: ReplicaFetchers | None = None,
        assignments: DirectoryAssignments | None = None,
        stopwatch: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._node_id = node_id
        self._settings = settings
        self._directories = directories
        self._partitions = partitions
        self._loop = loop
        self._clock_ms = clock_ms
        self._on_role = on_role
        self._fetchers = fetchers
        self._assignments = assignments
        self._has_started = self._is_closed = False
        self._stopwatch = stopwatch
        self.pauses: Callable[[], int] = lambda: 0
        """How often the requests that are served in pieces have paused for others."""
        self._pauses_before = 0
        self._new_logs_in_turn = self._roles_in_turn = 0
        self._turn_began_s = 0.0
        self._deferred_partitions: dict[tuple[bytes, int], None] = {}
        self._after_shortage: asyncio.TimerHandle | None = None
        self._deferred_roles: dict[tuple[bytes, int], None] = {}
        if fetchers is not None:
            partitions.flushes.on_flushed = fetchers.resume
        directories.on_offline.append(self._on_directory_failed)
        self._image: MetadataImage | None = None
        self._directory_of: dict[Partition, LogDirectory] = {}
        self._discovered_logs = DiscoveredLogs(directories)
        self._deletions = LogDeletions(directories, loop, clock_ms, stopwatch)
        self._offline_replicas: dict[tuple[str, int], LogDirectory | None] = {}
        """Replicas that cannot be served: in a failed directory (None if it is unknown), or damaged."""
        self._lost_replicas: set[tuple[bytes, int]] = set()
        """Replicas whose directory is not there any more, and that wait for another leader."""
        self._log_configs: dict[str, LogConfig] = {}
        self._to_configure: dict[Partition, None] = {}
        self._configures_later = False
        self._refusing: set[LogDirectory] = set()
        """Directories that could not be written to since `_to_configure` was last empty."""
        self._moves: ReplicaMoves | None = None
        self._moves_wait = False
        """The moves of some replicas wait: the start had to defer these."""
        self._unclean_leaders: UncleanLeaders | None = None

    # -----------------------------------------------------------------------------------------------------
    # start, stop

    def load(self, image: MetadataImage) -> None:
        """Open all logs, with recovery after an unclean stop. It blocks, so it runs before the node
        serves.
        """
        self._image = image
        self._discovered_logs.load(self._log_config, self._clock_ms())

    def missing_replicas(self) -> list[str]:
        """The replicas of this node in an ISR or ELR without a log on its disks."""
        assert self._image is not None
        return [
            f"{topic.name}-{index}"
            for topic in self._image.topics_by_id.values()
            for index, assignment in topic.partitions.items()
            if (self._node_id in assignment.isr or self._node_id in assignment.elr)
            and not self._discovered_logs.has(
                (topic.name, index), topic.topic_id, assignment.directory_of(self._node_id)
            )
        ]

    def finish_load(self) -> None:
        """Complete `load` on the loop's thread."""
        self._offline_replicas.update(self._discovered_logs.damaged)
        for directory, error in self._discovered_logs.failures:
            self._directories.failed_at_start(directory, error)

    def set_moves(self, moves: ReplicaMoves) -> None:
        """Set the moves of replicas between directories."""
        self._moves = moves
        self._deletions.discard_futures = moves.discard
        moves.log_config = self._log_config
        moves.on_promoted = self._on_promoted

    def set_unclean_leaders(self, unclean_leaders: UncleanLeaders) -> None:
        """Set who delays the roles of leaders that were elected uncleanly."""
        self._unclean_leaders = unclean_leaders
        unclean_leaders.on_done = self._apply_current_role

    async def host_deferred(self) -> None:
        """The first image is applied: host what it has deferred, but for replicas that meet a shortage."""
        for key in list(self._deferred_partitions):
            if self._is_turn_over():
                await asyncio.sleep(0)
                self._begin_turn()
            self._deferred_partitions.pop(key, None)
            self._apply_newest(*key)

    def start(self) -> None:
        """The replicas of the first image are hosted: set aside the logs that it does not assign to this node."""
        self._set_rest_aside()
        self._resume_moves()
        self._has_started = True
        if self._deferred_partitions:
            self._after_shortage = self._loop.call_later(SHORTAGE_PAUSE_S, self._apply_deferred)
        self._set_throttle_rates()

    def _resume_moves(self) -> None:
        self._moves_wait = bool(self._deferred_partitions)
        if self._moves is not None:
            self._moves.resume(self._directory_of, self._deferred_replicas())

    def _set_rest_aside(self) -> None:
        self._discovered_logs.set_rest_aside(self._deferred_replicas(), self._by_name(self._lost_replicas))

    def _deferred_replicas(self) -> set[tuple[str, int]]:
        return self._by_name(self._deferred_partitions)

    def _by_name(self, replicas: Iterable[tuple[bytes, int]]) -> set[tuple[str, int]]:
        assert self._image is not None
        topics = self._image.topics_by_id
        return {(topics[topic_id].name, index) for topic_id, index in replicas if topic_id in topics}

    def close(self) -> None:
        self._is_closed = True
        self._deferred_partitions.clear()
        self._deferred_roles.clear()
        self._to_configure.clear()
        self._deletions.finish_all()

    # -----------------------------------------------------------------------------------------------------------
    # image

    def apply(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Apply one committed image."""
        if not self._has_started:
            self._log_configs.clear()
            self._discovered_logs.set_former_aside(image.topics_by_name, self._has_been_in_sync)
        self._image = image
        self._begin_turn()
        for topic in delta.deleted_topics.values():
            self._log_configs.pop(topic.name, None)
            for index in topic.partitions:
                with _one_of_many(topic, index):
                    self._delete_replica(topic, index)
        if delta.changed_configs:
            self._apply_configs(delta.changed_configs)
        for topic_id, indexes in delta.changed_partitions.items():
            if topic_id in image.topics_by_id:
                self._apply_partitions(image.topics_by_id[topic_id], indexes)
        if delta.changed_configs and self._to_configure:
            self._configure_some()
        if delta.changed_features:
            self._report_all_directories(image)
        if delta.changed_brokers:
            self._partitions.deletions.look_at_all()
            if self._fetchers is not None:
                self._fetchers.brokers_changed(delta.changed_brokers)
        if self._is_closed:
            self._deletions.finish_all()
        else:
            self._deletions.go_on()

    def _apply_partitions(self, topic: TopicImage, indexes: Iterable[int], *, may_defer: bool = True) -> None:
        for index in sorted(indexes):
            with _one_of_many(topic, index):
                self._apply_partition(topic, index, may_defer=may_defer)

    def _apply_partition(self, topic: TopicImage, index: int, *, may_defer: bool) -> None:
        assignment = topic.partitions.get(index)
        if assignment is None or self._node_id not in assignment.replicas:
            self._delete_replica(topic, index)
            return
        partition = self._partitions.find(topic.topic_id, index)
        if may_defer and partition is not None and self._may_defer_role(partition):
            if not self._deferred_roles:
                self._loop.call_soon(self._apply_deferred_roles)
            self._deferred_roles[topic.topic_id, index] = None
            return
        if partition is None:
            if may_defer and self._is_turn_over():
                self._defer(topic, index)
                return
            self._new_logs_in_turn += 1
            try:
                partition = self._host(topic, index, assignment)
            except OSError as error:  # a shortage, which passes, and is no failure of the directory
                logger.error("cannot create %s-%d now: %s", topic.name, index, error)
                self._defer(topic, index, SHORTAGE_PAUSE_S)
                self._partitions.on_shortage()
                return
        if partition is not None:
            self._roles_in_turn += 1
            self._apply_role(partition, assignment)
            self._report_directory(partition, assignment)

    def _may_defer_role(self, partition: Partition) -> bool:
        """Whether its role waits for another turn. A coordinator hears at once that it is elected: deletions of topics
        in a later image, or in the same one, concern it, too.
        """
        return self._has_started and self._roles_in_turn >= ROLES_PER_TURN_MAX and not partition.is_internal

    def _begin_turn(self) -> None:
        if not (self._to_configure or self._deferred_partitions):
            self._refusing.clear()
        self._new_logs_in_turn = self._roles_in_turn = 0
        self._turn_began_s = self._stopwatch()

    def _is_turn_over(self) -> bool:
        """Whether the next new log is to wait for another turn of the loop."""
        count = self._new_logs_in_turn
        if count < FEW_NEW_LOGS:
            return False
        return count >= NEW_LOGS_PER_TURN_MAX or self._stopwatch() - self._turn_began_s >= NEW_LOGS_S

    def _defer(self, topic: TopicImage, index: int, pause_s: float = 0.0) -> None:
        """Defer a new replica to the loop's next turns: thousands of new logs would delay the heartbeats."""
        if self._has_started and not self._deferred_partitions:
            if pause_s:
                self._after_shortage = self._loop.call_later(pause_s, self._apply_deferred)
            else:
                self._loop.call_soon(self._apply_deferred)
        self._deferred_partitions[topic.topic_id, index] = None

    def host_short(self) -> None:
        """Files were closed: host what met a shortage, before the logs in use have opened theirs again."""
        if self._after_shortage is not None:
            self._after_shortage.cancel()
            self._apply_deferred()

    def _apply_deferred(self) -> None:
        """Apply the newest image to as many deferred partitions as one turn may create."""
        if self._is_closed:
            return  # the logs and moves of those that are left stay for the next start
        self._after_shortage = None
        self._begin_turn()
        waiting, self._deferred_partitions = self._deferred_partitions, {}
        for topic_id, index in list(islice(waiting, NEW_LOGS_PER_TURN_MAX)):
            if self._is_turn_over():
                break
            del waiting[topic_id, index]
            self._apply_newest(topic_id, index)
        # Those that met a shortage have a pause before the next turn.
        if waiting and not self._deferred_partitions:
            self._go_on_later(self._apply_deferred)
        waiting.update(self._deferred_partitions)
        self._deferred_partitions = waiting
        if self._discovered_logs.has_rest:
            self._set_rest_aside()  # the start has kept the logs of those that it had to defer
        if self._moves_wait and not waiting:
            self._resume_moves()

    def _apply_deferred_roles(self) -> None:
        """Apply the newest image to as many replicas as one turn may. They do not wait for new logs, which may take
        minutes.
        """
        self._begin_turn()
        for key in list(islice(self._deferred_roles, ROLES_PER_TURN_MAX)):
            del self._deferred_roles[key]
            self._apply_newest(*key)
        if self._deferred_roles:
            self._go_on_later(self._apply_deferred_roles)

    def _go_on_later(self, go_on: Callable[[], None]) -> None:
        """Call it in another turn. If others had to wait since the last turn, they get as much time before."""
        others_waited, self._pauses_before = self.pauses() != self._pauses_before, self.pauses()
        if others_waited:
            self._loop.call_later(self._stopwatch() - self._turn_began_s, go_on)
        else:
            self._loop.call_soon(go_on)

    def _apply_newest(self, topic_id: bytes, index: int) -> None:
        assert self._image is not None
        topic = self._image.topics_by_id.get(topic_id)
        if topic is not None:
            self._apply_partitions(topic, (index,), may_defer=False)

    def _host(self, topic: TopicImage, index: int, assignment: PartitionImage) -> Partition | None:
        key, directory_id = (topic.name, index), assignment.directory_of(self._node_id)
        self._deletions.finish(key)
        if key in self._offline_replicas:
            self._partitions.add_unavailable(topic.name, index, topic.topic_id)
            return None
        is_own = self._has_been_in_sync(topic, index)
        location = self._discovered_logs.claim(key, topic.topic_id, directory_id, takes_nameless=is_own)
        self._discovered_logs.set_others_aside(key, topic.topic_id, keeps_nameless=is_own)
        location = location or self._promote_future(topic, index, directory_id)
        if location is None and self._is_lost(topic, index, assignment):
            if (topic.topic_id, index) not in self._lost_replicas:
                self._lost_replicas.add((topic.topic_id, index))
                self._partitions.add_unavailable(topic.name, index, topic.topic_id)
                what, remedy = "its log directory", "Mount the volume or put the directory into log.dirs again"
                if not self._is_home_gone(directory_id):
                    what, remedy = "the directory of its log", f"Stop the node and put {topic.name}-{index} back"
                logger.error(
                    "%s-%d is offline: %s is gone, and no other replica leads. %s; "
                    "the topic's unclean.leader.election.enable=true gives its records up",
                    topic.name, index, what, remedy,
                )  # fmt: skip
            return None
        if location is None:
            if self._directories.may_be_offline(directory_id):
                logger.warning("%s-%d is in a log directory that is offline", topic.name, index)
            else:
                location = self._create(topic, index, directory_id)
        if location is None:
            self._offline_replicas[key] = None
            self._partitions.add_unavailable(topic.name, index, topic.topic_id)
            return None
        if (topic.topic_id, index) in self._lost_replicas:
            self._lost_replicas.remove((topic.topic_id, index))
            self._partitions.remove_unavailable(topic.name, index, topic.topic_id)
        self._discovered_logs.forget_vanished(key)
        directory, log = location
        config = self._log_config(topic.name)
        if log.config is not config:  # the log was opened with the settings of an earlier image
            _set_config(log, config, directory, self._refusing)
        if self._directories.is_usable(directory) and self._is_former_copy(log, assignment):
            logger.info("%s-%d is added again: its copy begins again", topic.name, index)
            try:
                log.truncate_fully_and_start_at(log.log_start_offset)
            except OSError as error:
                if is_exhaustion(error) and log.failure is None:
                    self._discovered_logs.give_back(key, location)
                    raise
                self._directories.failed(directory, error)
        partition = self._partitions.add(topic.name, index, topic.topic_id, log)
        self._set_throttled(partition)
        self._directory_of[partition] = directory
        return partition

    def is_on_all_replicas(self, log: PartitionLog) -> bool:
        """Whether all replicas of the partition are in sync, and no copy in another log directory is being made. Then
        each of them has what is committed in this log.
        """
        if self._image is None or log.topic_id is None:
            return False
        partition = self._partitions.find(log.topic_id, log.partition)
        topic = self._image.topics_by_id.get(log.topic_id)
        assignment = None if topic is None else topic.partitions.get(log.partition)
        if assignment is None or partition is None or partition.future_log is not None:
            return False
        return set(assignment.replicas) <= set(assignment.isr)

    def _is_former_copy(self, log: PartitionLog, assignment: PartitionImage) -> bool:
        """Whether a reassignment adds this replica, but it has a copy already of a log that is, or was, compacted.

        It may be one from before a reassignment that removed it. From then on the others have not kept tombstones and
        transaction markers for it. The copy stays where it may be needed: fewer than two others are in sync.
        """
        is_added = self._node_id in assignment.adding_replicas
        may_be_elected = self._node_id in (*assignment.isr, *assignment.elr)
        is_needed = may_be_elected or assignment.leader == -1 or len(assignment.isr) < 2
        has_records = log.log_end_offset > log.log_start_offset
        return is_added and not is_needed and has_records and compacted_below(log) > log.log_start_offset

    def _is_lost(self, topic: TopicImage, index: int, assignment: PartitionImage) -> bool:
        """Whether this replica, without a log, must not begin an empty one.

        The directory of its log is gone, or the whole log directory. An empty log would lead, because the replica was
        in sync, and what was acknowledged would be gone. A leader elsewhere has it.
        """
        if assignment.leader not in (self._node_id, -1):
            return False
        if not self._has_been_in_sync(topic, index) or self._allows_unclean_leader(topic.name):
            return False
        directory_id = assignment.directory_of(self._node_id)
        return self._is_home_gone(directory_id) or self._discovered_logs.has_vanished((topic.name, index))

    def _has_been_in_sync(self, topic: TopicImage, index: int) -> bool:
        """Whether this replica is, or was when the last others died, in the ISR.

        Then it had the topic's log. Otherwise the topic may be a new one, and a log without a topic id that of a
        deleted topic of the name; the leader has what it lacks. Kafka sets each log without an id aside.
        """
        assignment = topic.partitions.get(index)
        if assignment is None:
            return False
        return self._node_id in (*assignment.isr, *assignment.elr, *assignment.last_known_elr)

    def _is_home_gone(self, directory_id: bytes) -> bool:
        """Whether a log directory was replaced by an empty one, or is not in `log.dirs` any more."""
        if directory_id in (UNASSIGNED_DIRECTORY, MIGRATING_DIRECTORY) or self._directories.may_be_offline(
            directory_id
        ):
            return False
        return all(home.directory_id != directory_id for home in self._directories.homes)

    def _create(self, topic: TopicImage, index: int, directory_id: bytes) -> LogLocation | None:
        """Create a log in the assigned directory, else in the one with the
        fewest logs (Kafka's LogManager).

        It uses a cordoned directory (KIP-1066) only if it is the assigned one, or if there is no
        other. A directory in which the log cannot be created has failed, and the next one is used.
        Raises OSError for a shortage, which is no failure of the directory.
        """
        preferred = None if self._moves is None else self._moves.preferred.pop((topic.name, index), None)
        homes = self._directories.homes
        cordoned = self._settings.items(CORDONED)

        def order(home: LogDirectory) -> tuple[bool, bool, bool, int]:
            is_cordoned = self._directories.is_cordoned(home.path, cordoned)
            return home.directory_id != directory_id, home.path != preferred, is_cordoned, len(home.logs)

        homes.sort(key=order)
        for directory in homes:
            try:
                config = self._log_config(topic.name)
                log = directory.create_log(topic.name, index, topic.topic_id, config, self._clock_ms())
            except OSError as error:
                if is_exhaustion(error):
                    raise
                logger.error("cannot create the log of %s-%d in %s: %s", topic.name, index, directory.path, error)
                self._directories.failed(directory, error)
            except CorruptLog as error:
                logger.error("cannot create the log of %s-%d: %s", topic.name, index, error)
                return None
            else:
                return directory, log
        return None

    def _promote_future(self, topic: TopicImage, index: int, directory_id: bytes) -> LogLocation | None:
        """Promote a future log in the assigned directory: the process had ended before it completed the move.

        None also after an error of the device: then the directory has failed, and the replica is offline with it.
        Raises OSError for a shortage or a full volume, after which the future log is still there.
        """
        for directory in self._directories.homes:
            future = directory.futures.get((topic.name, index))
            if future is not None and directory.directory_id == directory_id and future.topic_id == topic.topic_id:
                try:
                    return directory, directory.promote_future(topic.name, index)
                except OSError as error:
                    if is_exhaustion(error) or is_full(error):
                        raise
                    self._directories.failed(directory, error)
        return None

    def _on_promoted(self, partition: Partition, directory: LogDirectory) -> None:
        """The partition has a new log, in this directory; delete the old one."""
        source, self._directory_of[partition] = self._directory_of[partition], directory
        _set_config(partition.log, self._log_config(partition.topic), directory, set())
        try:
            source.delete_log(partition.topic, partition.index, self._clock_ms())
        except OSError as error:
            self._directories.failed(source, error)
        self._partitions.reported_values_changed(partition)
        if self._fetchers is not None and not partition.leads:
            self._fetchers.follow(partition)

    def _on_directory_failed(self, directory: LogDirectory) -> None:
        """End the roles of the directory's replicas, and answer their waiting requests with an
        error.
        """
        self._discovered_logs.forget(directory)
        lost_partitions = [partition for partition, home in self._directory_of.items() if home is directory]
        for partition in lost_partitions:
            self._end_role(partition)
            self._report_failed(partition, directory)
            del self._directory_of[partition]
            self._offline_replicas[partition.topic, partition.index] = directory
            self._partitions.remove(partition, ErrorCode.KAFKA_STORAGE_ERROR)
        logger.warning("%d replicas in %s are offline", len(lost_partitions), directory.path)

    def _report_failed(self, partition: Partition, directory: LogDirectory) -> None:
        """Report the failed directory of a replica that the metadata do not name yet. The controller hears of the
        failure, but would not know that this replica is in it, and would leave it the lead.
        """
        topic = None if self._image is None else self._image.topics_by_id.get(partition.topic_id)
        assignment = None if topic is None else topic.partitions.get(partition.index)
        if self._assignments is None or assignment is None:
            return
        if assignment.directory_of(self._node_id) != directory.directory_id:
            self._assignments.report(partition.topic_id, partition.index, directory.directory_id)

    def _report_directory(self, partition: Partition, assignment: PartitionImage) -> None:
        """Report the replica's directory to the controller, unless the metadata have it.

        The controller assigns it itself on a node with one directory. That one may have been another before: its disk
        was replaced, or the others were merged into it. Or the metadata had no place for it, below 3.7-IV2.
        """
        assert self._image is not None
        if 0 < self._image.feature_level(METADATA_VERSION) < DIRECTORIES_VERSION:
            return
        assigned_id = assignment.directory_of(self._node_id)
        if self._assignments is not None:
            target_id = None if self._moves is None else self._moves.assigned_directory_id(partition)
            directory_id = target_id or self._directory_of[partition].directory_id
            if assigned_id != directory_id:
                self._assignments.report(partition.topic_id, partition.index, directory_id)

    def _report_all_directories(self, image: MetadataImage) -> None:
        for partition in self._directory_of:
            topic = image.topics_by_id.get(partition.topic_id)
            assignment = None if topic is None else topic.partitions.get(partition.index)
            if assignment is not None:
                self._report_directory(partition, assignment)

    def _apply_role(self, partition: Partition, assignment: PartitionImage) -> None:
        self._doubt_epochs(partition, assignment)
        partition.min_insync_replicas = self._min_insync_replicas(partition.topic)
        was_leader = partition.leads
        if assignment.leader == self._node_id:
            if self._fetchers is not None:
                self._fetchers.unfollow(partition)
            if self._unclean_leaders is not None and self._unclean_leaders.delays(partition, assignment):
                partition.become_follower(assignment)
                self._partitions.fail_waiting_requests(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
                return
            is_new_leader = partition.become_leader(assignment, self._clock_ms())
            partition.advance_high_watermark()  # the minimum may be lower, and the role here before this turn
            self._partitions.role_changed(partition)
            if partition.is_under_min_isr:
                self._partitions.fail_waiting_acks_all(partition)
            if is_new_leader:
                self._on_role(partition, True)
            return
        if self._unclean_leaders is not None:
            self._unclean_leaders.forget(partition)
        has_changed = partition.become_follower(assignment)
        if assignment.partition_epoch == partition.partition_epoch:
            partition.is_in_isr = self._node_id in assignment.isr
        if has_changed:
            self._partitions.fail_waiting_requests(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if was_leader and not partition.leads:
            self._on_role(partition, False)
        if has_changed and self._fetchers is not None:
            self._fetchers.follow(partition)

    def _apply_current_role(self, partition: Partition) -> None:
        assert self._image is not None
        topic = self._image.topics_by_id.get(partition.topic_id)
        if topic is not None and self._partitions.find(partition.topic_id, partition.index) is partition:
            self._apply_partitions(topic, (partition.index,), may_defer=False)

    def _doubt_epochs(self, partition: Partition, assignment: PartitionImage) -> None:
        """Check the leader epochs of a log that may have read a damaged one from its last batch."""
        try:
            if not partition.offline and partition.log.doubt_epochs_above(assignment.leader_epoch):
                self._partitions.on_damage(partition, None)
        except OSError as error:
            self._partitions.refusal(partition, error)

    def _delete_replica(self, topic: TopicImage, index: int) -> None:
        partition = self._partitions.find(topic.topic_id, index)
        self._lost_replicas.discard((topic.topic_id, index))
        self._discovered_logs.forget_vanished((topic.name, index))
        directory: LogDirectory | None
        if partition is not None:
            self._end_role(partition)
            self._partitions.remove(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
            directory = self._directory_of.pop(partition)
        elif self._partitions.remove_unavailable(topic.name, index, topic.topic_id):
            directory = self._offline_replicas.pop((topic.name, index), None)
        else:
            return
        self._deletions.add((topic.name, index), directory)

    def _end_role(self, partition: Partition) -> None:
        if partition.leads:
            self._on_role(partition, False)
        if self._fetchers is not None:
            self._fetchers.unfollow(partition)
        if self._assignments is not None:
            self._assignments.forget(partition.topic_id, partition.index)
        if self._moves is not None:
            self._moves.forget(partition)
        if self._unclean_leaders is not None:
            self._unclean_leaders.forget(partition)

    # ----------------------------------------------------------------------------------------------------------
    # configs

    def _log_config(self, topic: str) -> LogConfig:
        """The topic's settings; all topics without settings of their own share one object."""
        assert self._image is not None
        topic_config = self._image.topic_config(topic)
        key = topic if topic_config else ""
        log_config = self._log_configs.get(key)
        if log_config is None:
            log_config = self._log_configs[key] = self._settings.log_config(topic_config)
        return log_config

    def _min_insync_replicas(self, topic: str) -> int:
        return parse_integer(self._topic_value(topic, "min.insync.replicas") or "1")

    def _allows_unclean_leader(self, topic: str) -> bool:
        return self._topic_value(topic, "unclean.leader.election.enable").lower() == "true"

    def _topic_value(self, topic: str, key: str) -> str:
        """The value of a topic's key, its default where the topic does not set it; empty without either."""
        assert self._image is not None
        value = self._image.topic_config(topic).get(key)
        if value is None:
            value = self._settings.topic_default(key)
        return trim(value or "")

    def _set_throttled(self, partition: Partition) -> None:
        assert self._image is not None
        topic_config = self._image.topic_config(partition.topic)
        partition.throttled_as_leader, partition.throttled_as_follower = (
            is_throttled(topic_config.get(f"{side}.replication.throttled.replicas"), partition.index, self._node_id)
            for side in ("leader", "follower")
        )

    def _set_throttle_rates(self) -> None:
        throttles = {"leader": self._partitions.follower_fetches.answers.throttle}
        if self._fetchers is not None:
            throttles["follower"] = self._fetchers.throttle
        for side, throttle in throttles.items():
            name = f"{side}.replication.throttled.rate"
            throttle.bytes_per_s = self._settings.integer(name) if self._settings.is_set(name) else UNLIMITED

    def _apply_configs(self, resources: set[tuple[int, str]]) -> None:
        """Raise min.insync.replicas before the roles of the same image: the controller decides on an ISR by the newest,
        and by an earlier one a leader would commit alone. The rest follows the roles (`_configure_some`).
        """
        assert self._image is not None
        names = {name for kind, name in resources if kind == TOPIC_RESOURCE}
        affects_all = any((BROKER_RESOURCE, name) in resources for name in ("", str(self._node_id)))
        if affects_all:
            self._log_configs.clear()
        for name in names:
            self._log_configs.pop(name, None)
        minimums: dict[str | None, int] = {}
        for partition in self._partitions.hosted():
            if affects_all or partition.topic in names:
                self._to_configure[partition] = None
                text = self._image.topic_config(partition.topic).get("min.insync.replicas")
                if text not in minimums:
                    minimums[text] = self._min_insync_replicas(partition.topic)
                partition.min_insync_replicas = max(partition.min_insync_replicas, minimums[text])
        for topic_id, index in list(self._lost_replicas):
            topic = self._image.topics_by_id.get(topic_id)
            if topic is not None and (affects_all or topic.name in names):
                self._apply_partitions(topic, (index,))
        if affects_all:
            self._set_throttle_rates()

    def _configure_some(self) -> None:
        """Apply the newest settings to as many replicas as one turn of the loop may, and to the others later."""
        until_s = self._stopwatch() + CONFIGS_S
        is_first = True
        while self._to_configure and (is_first or self._stopwatch() < until_s):
            is_first = False
            partition, _ = self._to_configure.popitem()
            home = self._directory_of.get(partition)
            if home is None:  # it has gone meanwhile
                continue
            try:
                _set_config(partition.log, self._log_config(partition.topic), home, self._refusing)
            except OSError as error:
                self._directories.failed(home, error)
            self._set_throttled(partition)
            if (partition.topic_id, partition.index) not in self._deferred_roles:
                # A lower one not before the role: another replica may lead since, and this one would commit alone.
                partition.min_insync_replicas = self._min_insync_replicas(partition.topic)
            partition.advance_high_watermark()  # a lower min.insync.replicas may allow it
        if not self._to_configure:
            self._refusing.clear()
        elif not self._configures_later:
            self._configures_later = True
            self._loop.call_soon(self._configure_in_next_turn)

    def _configure_in_next_turn(self) -> None:
        self._configures_later = False
        self._configure_some()


@contextmanager
def _one_of_many(topic: TopicImage, index: int) -> Iterator[None]:
    """An error in one replica, which is a bug here, leaves none of the others undone, and no later image."""
    try:
        yield
    except Exception:
        logger.exception("cannot apply the metadata of %s-%d", topic.name, index)


def _set_config(log: PartitionLog, config: LogConfig, home: LogDirectory, refusing: set[LogDirectory]) -> None:
    """Apply changed settings. What compaction has left out here, or in a log that this one was copied from, is gone for
    good: it must not count as damage where the topic is not compacted any more. A cleaning ends then, as in Kafka.

    A directory that cannot be written to is added to `refusing`, and is not tried while it is there: each try collects
    the offsets of all its logs. Raises OSError if its directory cannot be used.
    """
    ceases = log.config.is_compacted and not config.is_compacted
    if ceases and home in refusing:
        log.unsynced_gaps_below = log.log_end_offset
    elif ceases:
        try:
            home.enter_in_cleaner_checkpoint(log)
            # Not synced, as a topic may have thousands of partitions. Until then the cleaner's checkpoint names it.
            log.explain_gaps(log.log_end_offset, sync=False)
        except OSError as error:
            log.unsynced_gaps_below = log.log_end_offset
            refusing.add(home)
            logger.warning("%s: cannot note that it was compacted: %s", log.directory, error)
    log.set_config(config)
    if log.compaction is not None and not config.is_compacted:
        log.compaction.give_up()
