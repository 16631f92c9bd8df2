"""The metadata image made real on this node: logs created and deleted, roles taken and given up, configs applied.

Also the periodic upkeep of the logs (retention, checkpoints). It reacts to images that are already committed and
decides nothing about who leads. Invariant: after `apply`, the partitions hosted are those the image places here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.throttle import UNLIMITED, is_throttled
from tidelog.storage.log import CorruptLog

if TYPE_CHECKING:
    from tidelog.broker.config import NodeConfig
    from tidelog.broker.directory_assignments import DirectoryAssignments
    from tidelog.broker.partitions import Partitions
    from tidelog.replication.controller.image import MetadataDelta, MetadataImage, PartitionImage, TopicImage
    from tidelog.replication.fetcher import ReplicaFetchers
    from tidelog.replication.partition import Partition
    from tidelog.storage.checkpoints import CheckpointTask
    from tidelog.storage.log import PartitionLog
    from tidelog.storage.log_config import LogConfig
    from tidelog.storage.log_directory import LogDirectory

log = logging.getLogger("tidelog.hosting")

TOPIC_RESOURCE = 2
# New logs made in one turn of the loop, each a handful of files.
HOSTED_IN_TURN_MAX = 100
RoleChange = Callable[["Partition", bool], None]
RunInExecutor = Callable[[Callable[[], None]], "asyncio.Future[None]"]


class Hosting:
    """`on_role(partition, leads)` is told of every partition that starts or stops leading here."""

    def __init__(
        self,
        node_id: int,
        config: NodeConfig,
        directories: Sequence[LogDirectory],
        partitions: Partitions,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        on_role: RoleChange,
        run_in_executor: RunInExecutor,
        *,
        fetchers: ReplicaFetchers | None = None,
        assignments: DirectoryAssignments | None = None,
    ) -> None:
        self._node_id = node_id
        self._config = config
        self._directories = list(directories)
        paths = set(map(str, config.log_dirs))
        # Not the one for metadata alone, where there is one.
        self._homes = [directory for directory in directories if directory.path in paths]
        self._partitions = partitions
        self._loop = loop
        self._clock_ms = clock_ms
        self._on_role = on_role
        self._run_in_executor = run_in_executor
        self._fetchers = fetchers
        self._assignments = assignments
        self._has_started = False
        self._hosted_in_turn = 0
        self._put_off_partitions: dict[tuple[bytes, int], None] = {}
        if fetchers is not None:
            partitions.on_flushed = fetchers.resume
        self._checkpointing: set[LogDirectory] = set()
        self._image: MetadataImage | None = None
        self._directory_of: dict[Partition, LogDirectory] = {}
        self._loaded: dict[tuple[str, int], tuple[LogDirectory, PartitionLog]] = {}
        self._unopened: dict[tuple[str, int], LogDirectory] = {}
        self._log_configs: dict[str, LogConfig] = {}
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    # ----------------------------------------------------------------------------------------------------- start, stop

    def load(self, image: MetadataImage) -> None:
        """Open every log there is, recovering those of an unclean stop. Blocking: run before anything is served."""
        self._image = image
        now_ms = self._clock_ms()
        for directory in self._directories:
            for key, found in directory.load(self._log_config, now_ms).items():
                if found.flush_due:
                    # What a kill left behind was readable before it: sync it now, or it waits for the next append.
                    found.flush()
                self._loaded[key] = (directory, found)
            self._unopened.update(dict.fromkeys(directory.offline, directory))

    def start(self) -> None:
        """The first image has been applied: set aside what it does not know, and keep the logs up from now on."""
        for (topic_name, index), (directory, _) in self._loaded.items():
            # Its topic was deleted, or it was moved away, while this node was not there to see it.
            try:
                where = directory.set_aside(topic_name, index)
            except OSError as error:
                log.error("%s-%d cannot be set aside: %s", topic_name, index, error)
            else:
                log.warning("the metadata does not place %s-%d here: it is kept as %s", topic_name, index, where)
        self._loaded.clear()
        self._has_started = True
        self._set_throttle_rates()
        self._every(self._config.integer("replica.high.watermark.checkpoint.interval.ms"), self._checkpoint)
        self._every(self._config.integer("log.retention.check.interval.ms"), self._look_after)
        self._every(self._config.integer("replica.lag.time.max.ms") // 2, self._check_isrs)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._put_off_partitions.clear()

    # ----------------------------------------------------------------------------------------------------------- image

    def apply(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Follow one committed change."""
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
        if delta.changed_brokers and self._fetchers is not None:
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
                partition = self._host(topic, index, placed)
            if partition is not None:
                self._take_role(partition, placed)
                self._tell_directory(partition, placed)

    def _put_off(self, topic: TopicImage, index: int) -> None:
        """To the loop's next turns: thousands of new logs would keep this broker from saying that it lives."""
        if not self._put_off_partitions:
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
        now_ms = self._clock_ms()
        if (topic.name, index) in self._unopened:
            self._partitions.add_unavailable(topic.name, index, topic.topic_id)
            return None
        loaded = self._loaded.pop((topic.name, index), None)
        if loaded is not None and loaded[1].topic_id is None:
            loaded[0].set_topic_id(topic.name, index, topic.topic_id)  # a loss of power took the file, not the records
        if loaded is not None and loaded[1].topic_id not in (topic.topic_id, bytes(16)):
            # A topic of that name was deleted and made again while this node was away.
            loaded[0].delete_log(topic.name, index, now_ms)
            loaded = None
        if loaded is not None:
            directory, found = loaded
        else:
            directory = self._choose_directory(placed)
            try:
                found = directory.create_log(topic.name, index, topic.topic_id, self._log_config(topic.name), now_ms)
            except (OSError, CorruptLog) as error:
                log.error("cannot create the log of %s-%d: %s", topic.name, index, error)
                self._partitions.add_unavailable(topic.name, index, topic.topic_id)
                return None
        partition = self._partitions.add(topic.name, index, topic.topic_id, found)
        self._configure(partition)
        self._directory_of[partition] = directory
        return partition

    def _choose_directory(self, placed: PartitionImage) -> LogDirectory:
        """The directory the metadata names, else the one with the fewest logs (Kafka's LogManager)."""
        wanted = placed.directory_of(self._node_id)
        for directory in self._homes:
            if directory.directory_id == wanted:
                return directory
        if len(self._homes) == 1:
            return self._homes[0]
        return min(self._homes, key=lambda directory: len(directory.logs))

    def _tell_directory(self, partition: Partition, placed: PartitionImage) -> None:
        """With one directory there is nothing to tell: the controller has assigned it already."""
        if self._assignments is not None and len(self._homes) > 1:
            lies_in = self._directory_of[partition].directory_id
            if placed.directory_of(self._node_id) != lies_in:
                self._assignments.lies_in(partition.topic_id, partition.index, lies_in)

    def _take_role(self, partition: Partition, placed: PartitionImage) -> None:
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

    def _drop(self, topic: TopicImage, index: int) -> None:
        partition = self._partitions.find(topic.topic_id, index)
        directory: LogDirectory | None
        if partition is not None:
            if partition.leads:
                self._on_role(partition, False)
            if self._fetchers is not None:
                self._fetchers.unfollow(partition)
            if self._assignments is not None:
                self._assignments.forget(topic.topic_id, index)
            self._partitions.remove(partition)
            directory = self._directory_of.pop(partition)
        elif self._partitions.remove_unavailable(topic.name, index, topic.topic_id):
            directory = self._unopened.pop((topic.name, index), None)
        else:
            return
        try:
            if directory is not None:
                directory.delete_log(topic.name, index, self._clock_ms())
        except OSError as error:
            log.error("the log of %s-%d cannot be deleted: %s", topic.name, index, error)

    # ---------------------------------------------------------------------------------------------------------- configs

    def _log_config(self, topic: str) -> LogConfig:
        """The topic's settings; one object for all topics that set nothing, as most do."""
        assert self._image is not None
        own = self._image.topic_config(topic)
        key = topic if own else ""
        found = self._log_configs.get(key)
        if found is None:
            found = self._config.log_config(own, self._image.broker_config_layers(self._node_id))
            self._log_configs[key] = found
        return found

    def _min_insync_replicas(self, topic: str) -> int:
        assert self._image is not None
        own = self._image.topic_config(topic).get("min.insync.replicas")
        if own is None:
            own = self._config.topic_default("min.insync.replicas", self._image.broker_config_layers(self._node_id))
        return int(own or 1)

    def _configure(self, partition: Partition) -> None:
        assert self._image is not None
        partition.min_insync_replicas = self._min_insync_replicas(partition.topic)
        own = self._image.topic_config(partition.topic)
        partition.throttled_as_leader, partition.throttled_as_follower = (
            is_throttled(own.get(f"{side}.replication.throttled.replicas"), partition.index, self._node_id)
            for side in ("leader", "follower")
        )

    def _set_throttle_rates(self) -> None:
        assert self._image is not None
        layers = self._image.broker_config_layers(self._node_id)
        throttles = {"leader": self._partitions.follower_fetches.answers.throttle}
        if self._fetchers is not None:
            throttles["follower"] = self._fetchers.throttle
        for side, throttle in throttles.items():
            name = f"{side}.replication.throttled.rate"
            set_to = next((layer[name] for layer in layers if name in layer), None)
            throttle.bytes_per_s = UNLIMITED if set_to is None else int(set_to)

    def _apply_configs(self, changed: set[tuple[int, str]]) -> None:
        names = {name for kind, name in changed if kind == TOPIC_RESOURCE}
        every_topic = any(kind != TOPIC_RESOURCE for kind, _ in changed)
        if every_topic:
            self._log_configs.clear()
        for name in names:
            self._log_configs.pop(name, None)
        for partition in self._partitions.hosted():
            if every_topic or partition.topic in names:
                partition.log.set_config(self._log_config(partition.topic))
                self._configure(partition)
        if every_topic:
            self._set_throttle_rates()

    # ----------------------------------------------------------------------------------------------------------- upkeep

    def _every(self, interval_ms: int, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers[work] = self._loop.call_later(interval_ms / 1000, run)
            try:
                work()
            except OSError as error:
                log.error("upkeep of the logs failed: %s", error)

        self._timers[work] = self._loop.call_later(interval_ms / 1000, run)

    def _checkpoint(self) -> None:
        """On a thread, but for the start and the end of it: the device may take its time."""
        for directory in self._directories:
            if directory not in self._checkpointing:
                self._checkpointing.add(directory)
                task = directory.begin_checkpoints()
                written = self._run_in_executor(task.run)
                written.add_done_callback(partial(self._checkpointed, directory, task))

    def _checkpointed(self, directory: LogDirectory, task: CheckpointTask, written: asyncio.Future[None]) -> None:
        self._checkpointing.discard(directory)
        try:
            directory.finish_checkpoints(task)
        except OSError as error:
            log.error("the checkpoints of %s could not be written: %s", directory.path, error)

    def _check_isrs(self) -> None:
        for partition in self._partitions.hosted():
            partition.check_isr()
            self._partitions.look_for_followers(partition)

    def _look_after(self) -> None:
        """Retention, flushes by time and what else the logs want done from time to time."""
        now_ms = self._clock_ms()
        hosted = list(self._partitions.hosted())
        log_starts = [partition.log.log_start_offset for partition in hosted]
        for directory in self._directories:
            directory.maintain(now_ms)
        for partition, log_start_offset in zip(hosted, log_starts):
            if partition.log.log_start_offset != log_start_offset:
                self._partitions.touch(partition)
            if partition.log.flush_due:
                self._partitions.flush(partition)
