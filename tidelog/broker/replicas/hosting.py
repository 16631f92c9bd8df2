"""The metadata image made real on this node: logs created and deleted, roles taken and given up, configs applied.

It reacts to images that are already committed and decides nothing about who leads. What a start finds on the disks is
`found_logs.py`, which directories can be used `log_directories.py`. Invariant: after `apply`, the partitions hosted are
those the image places here, but for those whose log directory is offline, which are answered with a storage error, and
those put off for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tidelog.broker.replicas.found_logs import FoundLogs
from tidelog.broker.replicas.log_directories import CORDONED
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE
from tidelog.replication.throttle import UNLIMITED, is_throttled
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.log.partition_log import CorruptLog

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.replica_moves import ReplicaMoves
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage, PartitionImage, TopicImage
    from tidelog.replication.fetcher import ReplicaFetchers
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.hosting")

# New logs made in one turn of the loop, each a handful of files.
HOSTED_IN_TURN_MAX = 100
# Until logs that could not be made for want of file descriptors or memory are tried again.
SHORTAGE_PAUSE_S = 1.0
Found = tuple["LogDirectory", "PartitionLog"]
RoleChange = Callable[["Partition", bool], None]


class Hosting:
    """`on_role(partition, leads)` is told of every partition that starts or stops leading here."""

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
        self._has_started = False
        self._hosted_in_turn = 0
        self._put_off_partitions: dict[tuple[bytes, int], None] = {}
        if fetchers is not None:
            partitions.flushes.on_flushed = fetchers.resume
        directories.on_offline.append(self._directory_failed)
        self._image: MetadataImage | None = None
        self._directory_of: dict[Partition, LogDirectory] = {}
        self._found = FoundLogs(directories)
        self._out_of_reach: dict[tuple[str, int], LogDirectory | None] = {}
        """Replicas that cannot be served: in a directory that failed (which one, where that is known), or damaged."""
        self._log_configs: dict[str, LogConfig] = {}
        self._moves: ReplicaMoves | None = None

    # ----------------------------------------------------------------------------------------------------- start, stop

    def load(self, image: MetadataImage) -> None:
        """Open every log there is, recovering those of an unclean stop. Blocking: run before anything is served."""
        self._image = image
        self._found.load(self._log_config, self._clock_ms())

    def missing(self) -> list[str]:
        """Replicas of this node that were in sync, or eligible to lead, and whose logs were not found."""
        assert self._image is not None
        return [
            f"{topic.name}-{index}"
            for topic in self._image.topics_by_id.values()
            for index, placed in topic.partitions.items()
            if (self._node_id in placed.isr or self._node_id in placed.elr)
            and not self._found.has((topic.name, index), topic.topic_id, placed.directory_of(self._node_id))
        ]

    def loaded(self) -> None:
        """The same, back on the loop's thread."""
        self._out_of_reach.update(self._found.damaged)
        for directory, error in self._found.failures:
            self._directories.failed_at_start(directory, error)

    def use(self, moves: ReplicaMoves) -> None:
        """Replicas may move from one directory to another."""
        self._moves = moves
        moves.log_config = self._log_config
        moves.on_promoted = self._moved

    def start(self) -> None:
        """The first image has been applied: set aside what it does not know."""
        self._found.set_rest_aside()
        if self._moves is not None:
            self._moves.resume(self._directory_of)
        self._has_started = True
        self._set_throttle_rates()

    def close(self) -> None:
        self._put_off_partitions.clear()

    # ----------------------------------------------------------------------------------------------------------- image

    def apply(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Follow one committed change."""
        if not self._has_started:
            self._log_configs.clear()
        self._image = image
        if not self._put_off_partitions:
            self._hosted_in_turn = 0
        for topic in delta.deleted_topics.values():
            self._log_configs.pop(topic.name, None)
            for index in topic.partitions:
                self._drop(topic, index)
        if delta.changed_configs:
            self._apply_configs(delta.changed_configs)
        for topic_id, indexes in delta.changed_partitions.items():
            if topic_id in image.topics_by_id:
                self._apply_partitions(image.topics_by_id[topic_id], indexes)
        if delta.changed_brokers:
            self._partitions.deletions.look_at_all()
            if self._fetchers is not None:
                self._fetchers.brokers_changed(delta.changed_brokers)

    def _apply_partitions(self, topic: TopicImage, indexes: Iterable[int]) -> None:
        for index in sorted(indexes):
            placed = topic.partitions.get(index)
            if placed is None or self._node_id not in placed.replicas:
                self._drop(topic, index)
                continue
            partition = self._partitions.find(topic.topic_id, index)
            if partition is None:
                if self._has_started and self._hosted_in_turn >= HOSTED_IN_TURN_MAX:
                    self._put_off(topic, index)
                    continue
                self._hosted_in_turn += 1
                try:
                    partition = self._host(topic, index, placed)
                except OSError as shortage:  # which passes, and says nothing of a directory
                    logger.error("%s-%d cannot be made for now: %s", topic.name, index, shortage)
                    self._put_off(topic, index, SHORTAGE_PAUSE_S)
                    continue
            if partition is not None:
                self._take_role(partition, placed)
                self._tell_directory(partition, placed)

    def _put_off(self, topic: TopicImage, index: int, pause_s: float = 0.0) -> None:
        """To the loop's next turns: thousands of new logs would keep this broker from saying that it lives."""
        if not self._put_off_partitions:
            if pause_s:
                self._loop.call_later(pause_s, self._go_on)
            else:
                self._loop.call_soon(self._go_on)
        self._put_off_partitions[topic.topic_id, index] = None

    def _go_on(self) -> None:
        """By the newest image: what has become of a partition meanwhile is all that counts."""
        self._hosted_in_turn = 0
        assert self._image is not None
        waiting, self._put_off_partitions = self._put_off_partitions, {}
        for topic_id, index in waiting:
            topic = self._image.topics_by_id.get(topic_id)
            if topic is not None:
                self._apply_partitions(topic, (index,))
        self._hosted_in_turn = 0

    def _host(self, topic: TopicImage, index: int, placed: PartitionImage) -> Partition | None:
        key, directory_id = (topic.name, index), placed.directory_of(self._node_id)
        if key in self._out_of_reach:
            self._partitions.add_unavailable(topic.name, index, topic.topic_id)
            return None
        found = None
        try:
            found = self._found.claim(key, topic.topic_id, directory_id)
            self._found.set_others_aside(key, topic.topic_id)
            found = found or self._abandoned_future(topic, index, directory_id)
        except OSError as error:
            if is_exhaustion(error):
                raise
            self._directories.failed_at(error.filename or "", error)
        if found is None:
            if self._directories.may_be_offline(directory_id):
                logger.warning("%s-%d is in a log directory that is offline", topic.name, index)
            else:
                found = self._create(topic, index, directory_id)
        if found is None:
            self._out_of_reach[key] = None
            self._partitions.add_unavailable(topic.name, index, topic.topic_id)
            return None
        config = self._log_config(topic.name)
        if found[1].config is not config:  # it was opened under the settings of an earlier image
            found[1].set_config(config)
        partition = self._partitions.add(topic.name, index, topic.topic_id, found[1])
        self._configure(partition)
        self._directory_of[partition] = found[0]
        return partition

    def _create(self, topic: TopicImage, index: int, wanted: bytes) -> Found | None:
        """A new log in the directory the metadata names, else in the one with the fewest (Kafka's LogManager).

        A cordoned one (KIP-1066) is taken where it is named, or where there is no other.
        A directory that refuses has failed, and the next is tried. OSError where it is no directory's fault.
        """
        preferred = None if self._moves is None else self._moves.preferred.pop((topic.name, index), None)
        homes = self._directories.homes
        cordoned = self._settings.items(CORDONED)

        def order(home: LogDirectory) -> tuple[bool, bool, bool, int]:
            is_cordoned = self._directories.is_cordoned(home.path, cordoned)
            return home.directory_id != wanted, home.path != preferred, is_cordoned, len(home.logs)

        homes.sort(key=order)
        for directory in homes:
            try:
                config = self._log_config(topic.name)
                made = directory.create_log(topic.name, index, topic.topic_id, config, self._clock_ms())
            except OSError as error:
                if is_exhaustion(error):
                    raise
                logger.error("cannot create the log of %s-%d in %s: %s", topic.name, index, directory.path, error)
                self._directories.failed(directory, error)
            except CorruptLog as error:
                logger.error("cannot create the log of %s-%d: %s", topic.name, index, error)
                return None
            else:
                return directory, made
        return None

    def _abandoned_future(self, topic: TopicImage, index: int, directory_id: bytes) -> Found | None:
        """A replica that had moved, as the controller knows, when the process ended before it took over."""
        for directory in self._directories.homes:
            future = directory.futures.get((topic.name, index))
            if future is not None and directory.directory_id == directory_id and future.topic_id == topic.topic_id:
                return directory, directory.promote_future(topic.name, index)
        return None

    def _moved(self, partition: Partition, directory: LogDirectory) -> None:
        """Its log is another one, in this directory; the one it had goes."""
        source, self._directory_of[partition] = self._directory_of[partition], directory
        partition.log.set_config(self._log_config(partition.topic))
        try:
            source.delete_log(partition.topic, partition.index, self._clock_ms())
        except OSError as error:
            self._directories.failed(source, error)
        self._partitions.touch(partition)
        if self._fetchers is not None and not partition.leads:
            self._fetchers.follow(partition)

    def _directory_failed(self, directory: LogDirectory) -> None:
        """Its replicas lead and follow no more; whoever waits for one of them is told."""
        self._found.forget(directory)
        lost = [partition for partition, where in self._directory_of.items() if where is directory]
        for partition in lost:
            self._leave(partition)
            del self._directory_of[partition]
            self._out_of_reach[partition.topic, partition.index] = directory
            self._partitions.remove(partition, ErrorCode.KAFKA_STORAGE_ERROR)
        logger.warning("%d replicas in %s are offline", len(lost), directory.path)

    def _tell_directory(self, partition: Partition, placed: PartitionImage) -> None:
        """With one directory there is nothing to tell: the controller has assigned it already."""
        if self._assignments is not None and len(self._directories.home_paths) > 1:
            moving_to = None if self._moves is None else self._moves.told_directory(partition)
            lies_in = moving_to or self._directory_of[partition].directory_id
            if placed.directory_of(self._node_id) != lies_in:
                self._assignments.lies_in(partition.topic_id, partition.index, lies_in)

    def _take_role(self, partition: Partition, placed: PartitionImage) -> None:
        self._doubt_epochs(partition, placed)
        led = partition.leads
        if placed.leader == self._node_id:
            if self._fetchers is not None:
                self._fetchers.unfollow(partition)
            begins = partition.become_leader(placed)
            self._partitions.role_changed(partition)
            if partition.is_under_min_isr:
                self._partitions.give_up_acks_all(partition)
            if begins:
                self._on_role(partition, True)
            return
        changed = partition.become_follower(placed)
        if changed:
            self._partitions.give_up(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if led and not partition.leads:
            self._on_role(partition, False)
        if changed and self._fetchers is not None:
            self._fetchers.follow(partition)

    def _doubt_epochs(self, partition: Partition, placed: PartitionImage) -> None:
        """A log that was just opened may have taken over the damaged leader epoch of its last batch."""
        try:
            if not partition.offline and partition.log.doubt_epochs_above(placed.leader_epoch):
                self._partitions.on_damage(partition)
        except OSError as error:
            self._partitions.refusal(partition, error)

    def _drop(self, topic: TopicImage, index: int) -> None:
        partition = self._partitions.find(topic.topic_id, index)
        directory: LogDirectory | None
        if partition is not None:
            self._leave(partition)
            self._partitions.remove(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
            directory = self._directory_of.pop(partition)
        elif self._partitions.remove_unavailable(topic.name, index, topic.topic_id):
            directory = self._out_of_reach.pop((topic.name, index), None)
        else:
            return
        if self._moves is not None:
            self._moves.discard(topic.name, index)
        if directory is None or directory.failure is not None:
            return
        try:
            directory.delete_log(topic.name, index, self._clock_ms())
        except OSError as error:
            logger.error("the log of %s-%d cannot be deleted: %s", topic.name, index, error)
            self._directories.failed(directory, error)

    def _leave(self, partition: Partition) -> None:
        if partition.leads:
            self._on_role(partition, False)
        if self._fetchers is not None:
            self._fetchers.unfollow(partition)
        if self._assignments is not None:
            self._assignments.forget(partition.topic_id, partition.index)
        if self._moves is not None:
            self._moves.forget(partition)

    # ---------------------------------------------------------------------------------------------------------- configs

    def _log_config(self, topic: str) -> LogConfig:
        """The topic's settings; one object for all topics that set nothing, as most do."""
        assert self._image is not None
        own = self._image.topic_config(topic)
        key = topic if own else ""
        found = self._log_configs.get(key)
        if found is None:
            found = self._log_configs[key] = self._settings.log_config(own)
        return found

    def _min_insync_replicas(self, topic: str) -> int:
        assert self._image is not None
        own = self._image.topic_config(topic).get("min.insync.replicas")
        if own is None:
            own = self._settings.topic_default("min.insync.replicas")
        return parse_integer(trim(own or "1"))

    def _configure(self, partition: Partition) -> None:
        assert self._image is not None
        partition.min_insync_replicas = self._min_insync_replicas(partition.topic)
        own = self._image.topic_config(partition.topic)
        partition.throttled_as_leader, partition.throttled_as_follower = (
            is_throttled(own.get(f"{side}.replication.throttled.replicas"), partition.index, self._node_id)
            for side in ("leader", "follower")
        )

    def _set_throttle_rates(self) -> None:
        throttles = {"leader": self._partitions.follower_fetches.answers.throttle}
        if self._fetchers is not None:
            throttles["follower"] = self._fetchers.throttle
        for side, throttle in throttles.items():
            name = f"{side}.replication.throttled.rate"
            throttle.bytes_per_s = self._settings.integer(name) if self._settings.is_set(name) else UNLIMITED

    def _apply_configs(self, changed: set[tuple[int, str]]) -> None:
        names = {name for kind, name in changed if kind == TOPIC_RESOURCE}
        every_topic = any((BROKER_RESOURCE, name) in changed for name in ("", str(self._node_id)))
        if every_topic:
            self._log_configs.clear()
        for name in names:
            self._log_configs.pop(name, None)
        for partition in self._partitions.hosted():
            if every_topic or partition.topic in names:
                partition.log.set_config(self._log_config(partition.topic))
                self._configure(partition)
                partition.advance_high_watermark()  # a lower minimum of in-sync replicas lets it go on
        if every_topic:
            self._set_throttle_rates()
