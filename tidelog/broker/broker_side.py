"""The half of a node that serves topics: partitions, their replication, the coordinators, the registration.

Only nodes with the broker role have it; `node.py` assembles it. It applies the images that the metadata half publishes.
Invariant: the broker leads, follows and answers nothing before its logs are open and the first image is applied.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidelog.broker.cluster.cluster_view import broker_endpoint
from tidelog.broker.cluster.lifecycle import BrokerLifecycle, LifecycleSettings
from tidelog.broker.cluster.lost_brokers import PROBE_MS_MAX, LostBrokers
from tidelog.broker.cluster.producer_ids import ProducerIdManager, controller_blocks
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.service import GroupCoordinatorService
from tidelog.broker.coordinators.group_ports import GroupPorts
from tidelog.broker.coordinators.marker_writer import MarkerWriter
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.service import TransactionCoordinatorService
from tidelog.broker.coordinators.transaction_markers import TransactionMarkers
from tidelog.broker.coordinators.transaction_verifier import CoordinatorVerifier
from tidelog.broker.metadata_wiring import broker_registration
from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
from tidelog.broker.replicas.hosting import Hosting
from tidelog.broker.replicas.log_cleaner import LogCleaner
from tidelog.broker.replicas.log_directories import CORDONED, NoDirectoryLeft
from tidelog.broker.replicas.partitions import Partitions
from tidelog.broker.replicas.removal_checks import RemovalChecks
from tidelog.broker.replicas.repairs import Repairs
from tidelog.broker.replicas.replica_moves import ReplicaMoves
from tidelog.broker.replicas.scrubber import Scrubber
from tidelog.broker.replicas.unclean_leaders import UncleanLeaders
from tidelog.broker.replicas.upkeep import Upkeep
from tidelog.protocol.addresses import address_text
from tidelog.protocol.errors import ConfigError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from tidelog.protocol.uuids import uuid_to_text
from tidelog.replication.controller.metadata.image import METADATA_VERSION, TRANSACTION_VERSION
from tidelog.replication.controller.metadata.image_delta import everything
from tidelog.replication.controller.metadata.record_codec import CORDONED_VERSION, DIRECTORIES_VERSION
from tidelog.replication.fetcher import ReplicaFetchers
from tidelog.replication.fetcher_settings import FetcherSettings
from tidelog.replication.isr_changes import IsrChanges
from tidelog.replication.partition import ReplicaPorts
from tidelog.replication.ports import Endpoint, PortState
from tidelog.replication.quorum.raft.leading import CHECK_QUORUM_FACTOR
from tidelog.storage.log.loader import Ending

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.network.channel import Channels
    from tidelog.broker.node_ports import NodePorts
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler
    from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.node")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector while logs are opened: traversing their objects took a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class BrokerSide:
    def __init__(
        self,
        settings: DynamicConfig,
        ports: NodePorts,
        loop: asyncio.AbstractEventLoop,
        directories: LogDirectories,
        bound_ports: Mapping[str, int],
        channels: Channels,
        metadata: MetadataSide,
        channel: ControllerChannel,
        scheduler: FairScheduler,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._config = config = settings.static
        self._ports = ports
        self._loop = loop
        self.directories = directories
        self._on_failure = on_failure
        self._bound_ports = bound_ports
        self._metadata = metadata
        self._is_applied = False
        self._inter_broker_listener = config.inter_broker_listener
        self._channels = channels
        self.lost_brokers = LostBrokers(self._probe)
        self._incarnation_id = ports.rng.randbytes(16)
        self.lifecycle = BrokerLifecycle(
            node_id=config.node_id,
            registration=self._registration,
            metadata_offset=lambda: metadata.tracker.offset if self._is_applied else -1,
            channel=channel,
            settings=LifecycleSettings(
                config.integer("broker.heartbeat.interval.ms"),
                session_timeout_ms=config.integer("broker.session.timeout.ms"),
                deposed_controller_ms=CHECK_QUORUM_FACTOR * config.integer("controller.quorum.fetch.timeout.ms"),
                directory_failure_timeout_ms=config.integer("log.dir.failure.timeout.ms"),
            ),
            loop=loop,
            rng=ports.rng,
            on_report_timeout=self._on_directory_report_timeout,
            cordoned=self._cordoned,
            on_registered=self._registered,
        )
        settings.subscribe([CORDONED], self.lifecycle.request_heartbeat)
        self._assignments = DirectoryAssignments(
            broker_id=config.node_id, broker_epoch=self._broker_epoch, call=channel.call, loop=loop, rng=ports.rng
        )
        self._isr_changes = IsrChanges(
            broker_id=config.node_id, broker_epoch=self._broker_epoch, call=channel.call, loop=loop, rng=ports.rng
        )
        self.partitions = self._make_partitions()
        self.fetchers = self._make_fetchers(channels)
        self._hosting = Hosting(
            config.node_id, settings, directories, self.partitions, loop, ports.clock_ms, self._on_role,
            fetchers=self.fetchers, assignments=self._assignments, stopwatch=ports.stopwatch or loop.time,
        )  # fmt: skip
        self._hosting.pauses = lambda: scheduler.pauses
        self.moves = ReplicaMoves(
            settings, directories, self.partitions, self._assignments, loop, ports.clock_ms,
            lambda work: loop.run_in_executor(ports.executor, work),
        )  # fmt: skip
        self._hosting.set_moves(self.moves)
        self.partitions.on_disk_failure = directories.failed_at
        directories.on_offline.append(self._directory_failed)
        self._make_caretakers()
        self.transaction_timeout_ms_max = config.integer("transaction.max.timeout.ms")
        self.groups = self._make_groups()
        self.producer_ids = ProducerIdManager(controller_blocks(channel, config.node_id, self._broker_epoch))
        self._make_transactions()

    def _make_caretakers(self) -> None:
        """Make the background work on logs: repairs, upkeep, the cleaner, the scrubber."""
        config, loop, ports, partitions = self._config, self._loop, self._ports, self.partitions

        def run(work: Callable[[], None]) -> asyncio.Future[None]:
            return loop.run_in_executor(ports.executor, work)

        self.repairs = Repairs(
            config.node_id, partitions, lambda: self._metadata.image, self._endpoint_of, self._channels.exchange, loop,
            run,
        )  # fmt: skip
        partitions.on_damage = self.repairs.report
        self._unclean_leaders = UncleanLeaders(partitions, self.repairs, loop, ports.clock_ms)
        self._hosting.set_unclean_leaders(self._unclean_leaders)
        self._upkeep = Upkeep(config, self.directories, partitions, loop, ports.clock_ms, run, ports.disk)
        partitions.on_shortage = self.close_files = self._upkeep.close_files
        self._upkeep.after_shortage = (partitions.flushes.sync_short, self._hosting.host_short)
        self.cleaner = LogCleaner(
            self.directories,
            self._settings,
            loop,
            ports.clock_ms,
            run,
            self._upkeep,
            self._is_on_all_replicas,
        )
        self.scrubber = Scrubber(config, partitions, self.repairs, loop, run)
        self._removal_checks = RemovalChecks(config.node_id, partitions, self.repairs, self.scrubber, loop)
        self.cleaner.on_uncleanable = self.scrubber.look_soon
        self._upkeep.on_doubt = self.scrubber.look_soon
        self.repairs.on_repaired = self.cleaner.try_again
        self.repairs.whole_copies.on_replaced = self.moves.begin_again

    def _is_on_all_replicas(self, log: PartitionLog) -> bool:
        """`Hosting.is_on_all_replicas`. False while no controller hears of this broker: the metadata may be old then,
        and name replicas in the ISR that have left it.
        """
        return self.lifecycle.is_heard() and self._hosting.is_on_all_replicas(log)

    def _make_fetchers(self, channels: Channels) -> ReplicaFetchers:
        config, ports = self._config, self._ports
        return ReplicaFetchers(
            node_id=config.node_id,
            broker_epoch=self._broker_epoch,
            connect=channels.connect,
            endpoint_of=self._endpoint_of,
            loop=self._loop,
            rng=ports.rng,
            clock_ms=ports.clock_ms,
            settings=FetcherSettings.from_node(config.integer),
            on_failed=self.partitions.failed,
            on_appended=self.partitions.flushes.flush_if_due,
            on_link=self._on_link,
            on_gap=lambda partition, gap: self.repairs.report_gap(partition, gap),
            on_shortage=lambda: self.partitions.on_shortage(),
            on_cold=lambda cold: self.partitions.run_cold(cold, lambda: None),
        )

    def _cordoned(self) -> list[bytes] | None:
        if not self._is_applied or self._metadata.tracker.image.feature_level(METADATA_VERSION) < CORDONED_VERSION:
            return None
        entries, directories = self._settings.items(CORDONED), self.directories
        return [home.directory_id for home in directories.homes if directories.is_cordoned(home.path, entries)]

    def _make_groups(self) -> GroupCoordinatorService:
        return GroupCoordinatorService(
            GroupCoordinatorConfig.from_node(self._config.integer),
            GroupPorts(OFFSETS_TOPIC, self.partitions, self._loop, self._ports.clock_ms, self._ports.inspector),
            self._ports.rng,
            lambda: self._partition_count(OFFSETS_TOPIC, "offsets.topic.num.partitions"),
            self.lifecycle.has_session,
        )

    def _make_transactions(self) -> None:
        """Make the transaction coordinator, the marker writer, and the verifier that asks other coordinators."""
        config, loop, ports = self._config, self._loop, self._ports
        timeout_ms = config.integer("request.timeout.ms")
        self.markers = MarkerWriter(self.partitions, self.groups, ports.clock_ms, timeout_ms)
        self.marker_sender = TransactionMarkers(
            config.node_id, self.markers, lambda: self._metadata.image, self._endpoint_of, self._channels.exchange,
            loop, ports.rng, request_timeout_ms=timeout_ms,
        )  # fmt: skip
        self.transactions = TransactionCoordinatorService(
            TransactionCoordinatorConfig.from_node(config.integer),
            GroupPorts(TRANSACTIONS_TOPIC, self.partitions, loop, ports.clock_ms, ports.inspector),
            self.marker_sender,
            lambda: self._partition_count(TRANSACTIONS_TOPIC, "transaction.state.log.num.partitions"),
            lambda: self._metadata.image.feature_level(TRANSACTION_VERSION),
            self.producer_ids.take,
        )
        self.verifier = CoordinatorVerifier(
            config.node_id, lambda: self.transactions, lambda: self._metadata.image, self._endpoint_of,
            self._channels.exchange, loop, request_timeout_ms=timeout_ms,
            retry_backoff_ms=config.integer("add.partitions.to.txn.retry.backoff.ms"),
            retry_backoff_max_ms=config.integer("add.partitions.to.txn.retry.backoff.max.ms"),
        )  # fmt: skip

    def _make_partitions(self) -> Partitions:
        config, ports, loop = self._config, self._ports, self._loop
        return Partitions(
            loop,
            ports.threads_of,
            ports.clock_ms,
            ports.rng,
            self._is_known,
            fetch_session_slots_max=config.integer("max.incremental.fetch.session.cache.slots"),
            fetch_bytes_max=config.integer("fetch.max.bytes"),
            replica=ReplicaPorts(
                now_ms=lambda: loop.time() * 1000,
                broker=lambda broker_id: self._metadata.image.brokers.get(broker_id),
                broker_epoch=self._broker_epoch,
                propose=self._isr_changes.submit,
                lag_ms_max=config.integer("replica.lag.time.max.ms"),
            ),
            tells_followers_high_watermark=config.has_follower_reads,
            stopwatch=ports.stopwatch or loop.time,
        )

    # ------------------------------------------------------------------------------------------------------------ start

    async def start(self) -> None:
        """Open the logs, register, catch up with the metadata, and take all roles. Raises RegistrationRefused.

        The logs are opened first, because only then the broker knows whether it still has all its acknowledged records.
        """
        await self._metadata.wait_until_current()
        image = self._metadata.image
        problem = self._problem_with_directories()
        if problem:
            raise NoDirectoryLeft(problem)
        with _without_collections():
            began_s = self._loop.time()
            await self._loop.run_in_executor(self._ports.executor, lambda: self._hosting.load(image))
            self._log_recovery(self._loop.time() - began_s)
        self._hosting.finish_load()
        self.directories.missing = self._hosting.missing_replicas()
        epoch = await self.lifecycle.register(self.directories.clean_epoch(self._ports.boot_id))
        await self._metadata.tracker.wait_for(epoch)
        with _without_collections():
            self._is_applied = True
            image = self._metadata.image
            self.on_image(image, everything(image))
            await self._hosting.host_deferred()
        self._hosting.start()
        self._removal_checks.on_image(everything(self._metadata.image))  # they look only at what is hosted
        for partition in self.partitions.hosted():
            self.repairs.look_at(partition)
        self._upkeep.start()
        self.scrubber.start()
        self.cleaner.start()

    def _log_recovery(self, duration_s: float) -> None:
        for directory in self.directories.homes:
            done = directory.recovery
            if not directory.was_clean and done.logs:
                why = "the last process was killed" if directory.ending is Ending.KILLED else "no clean end was left"
                logger.info(
                    "%s: %s: %s bytes in %d of its logs were scanned, %s bytes were cut from their ends",
                    directory.path, why, f"{done.scanned_bytes:,}", done.logs, f"{done.cut_bytes:,}",
                )  # fmt: skip
        count = sum(len(directory.logs) for directory in self.directories.homes)
        if count:
            logger.info("logs opened: %d, in %.2f s", count, duration_s)

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        if not self._is_applied:
            return  # the first applied image will contain all of it
        if self._config.node_id in delta.changed_brokers and self._is_replaced(image):
            return
        self._hosting.apply(image, delta)
        if delta.changed_features or self._config.node_id in delta.changed_brokers:
            self._complete_registration(image)
        self.lost_brokers.on_image(image, delta)
        self.repairs.on_image(delta)
        self._removal_checks.on_image(delta)
        self.marker_sender.on_image()
        if delta.deleted_topics:
            self.groups.on_topics_deleted([(topic.name, topic.topic_id) for topic in delta.deleted_topics.values()])

    def _is_replaced(self, image: MetadataImage) -> bool:
        """Whether another process has registered under this node's id since this one did. Then the node ends: what the
        metadata say of the id is meant for the other, which leads where this one would.
        """
        broker = image.brokers.get(self._config.node_id)
        if broker is None or broker.incarnation_id == self._incarnation_id or broker.epoch <= self.lifecycle.epoch:
            return False
        addresses = ", ".join(address_text(entry.host, entry.port) for entry in broker.endpoints.values())
        why = f"another process has registered as broker {broker.node_id}, at {addresses}: this one ends"
        logger.critical(why)
        self._on_failure(ConfigError(why))
        return True

    def _complete_registration(self, image: MetadataImage) -> None:
        """Register again if a lower metadata.version had no place for the log directories, and the present one has.
        Without them the controller takes no notice of their failures (Kafka's BrokerRegistrationTracker).
        """
        broker = image.brokers.get(self._config.node_id)
        if broker is None or broker.log_dirs or broker.epoch != self.lifecycle.epoch:
            return
        if image.feature_level(METADATA_VERSION) >= DIRECTORIES_VERSION:
            self.lifecycle.register_again()

    def _registered(self, epoch: int) -> None:
        """Let the next process claim this epoch's records after a kill, unless a directory has failed meanwhile."""
        if not self._is_applied or not self.directories.offline:
            self.directories.write_incarnations(epoch, self._ports.boot_id)

    def on_leader(self) -> None:
        """Another controller is active: send it a heartbeat before it suspects this broker."""
        self.lifecycle.request_heartbeat()

    def _registration(self, previous_epoch: int) -> BrokerRegistrationRequest:
        directory_ids = self.directories.known_ids
        return broker_registration(
            self._config,
            self.directories.cluster_id,
            self._incarnation_id,
            self._bound_ports,
            directory_ids,
            previous_epoch,
        )

    def _problem_with_directories(self) -> str:
        """Why this broker cannot work without its offline directories; empty if it can.

        Below 3.7-IV2 the metadata do not say in which directory a replica is: no other would lead in its place, and a
        start would begin it anew. Kafka logs that it does not support several directories there.
        """
        level = self._metadata.image.feature_level(METADATA_VERSION)
        offline = self.directories.offline
        if not offline or not 0 < level < DIRECTORIES_VERSION:
            return ""
        reasons = ", ".join(f"{path}: {why}" for path, why in offline.items())
        return (
            f"a log directory is offline ({reasons}), and a broker goes on without it only from metadata.version "
            f"{DIRECTORIES_VERSION} on; it is {level}"
        )

    def _directory_failed(self, directory: LogDirectory) -> None:
        self.lifecycle.directory_failed(directory.directory_id)
        problem = self._problem_with_directories()
        if problem:
            logger.critical(problem)
            self._on_failure(NoDirectoryLeft(problem))

    def _on_directory_report_timeout(self, directory_id: bytes) -> None:
        """The controller still assigns leaders in a failed directory: stop this broker, so that it elects others."""
        why = f"no controller could be told in time that log directory {uuid_to_text(directory_id)} has failed"
        logger.critical(why)
        self._on_failure(NoDirectoryLeft(why))

    # ---------------------------------------------------------------------------------------------- called by the parts

    def _on_link(self, leader_id: int, is_up: bool) -> None:
        if is_up:
            self.lost_brokers.on_connection_made(leader_id)
        else:
            self.lost_brokers.on_connection_lost(leader_id)

    async def _probe(self, broker_id: int) -> PortState:
        listener = broker_endpoint(self._metadata.image, broker_id, self._inter_broker_listener)
        if listener is None:
            return PortState.UNKNOWN
        return await self._channels.sign_of_life(Endpoint(listener.host, listener.port), PROBE_MS_MAX)

    def _broker_epoch(self) -> int:
        return self.lifecycle.epoch

    def _is_known(self, topic: str | bytes, index: int) -> bool:
        image = self._metadata.image
        topic_image = image.topics_by_id.get(topic) if isinstance(topic, bytes) else image.topics_by_name.get(topic)
        return topic_image is not None and index in topic_image.partitions

    def _endpoint_of(self, broker_id: int) -> Endpoint | None:
        broker = self._metadata.image.brokers.get(broker_id)
        endpoint = None if broker is None else broker.endpoints.get(self._inter_broker_listener)
        return None if endpoint is None else Endpoint(endpoint.host, endpoint.port)

    def _partition_count(self, topic_name: str, default_key: str) -> int:
        topic = self._metadata.image.topics_by_name.get(topic_name)
        return len(topic.partitions) if topic else self._config.integer(default_key)

    def _on_role(self, partition: Partition, leads: bool) -> None:
        coordinators: GroupCoordinatorService | TransactionCoordinatorService
        if partition.topic == OFFSETS_TOPIC:
            coordinators = self.groups
        elif partition.topic == TRANSACTIONS_TOPIC:
            coordinators = self.transactions
        else:
            return
        if leads:
            coordinators.on_partition_elected(partition.index, partition.leader_epoch)
        else:
            coordinators.on_partition_resigned(partition.index)

    # ------------------------------------------------------------------------------------------------------------- stop

    async def close(self) -> None:
        """End all appends and fetches. The appended records are being written to the disk."""
        self.directories.stop_loading()
        self.groups.close()
        self.transactions.close()
        await self.producer_ids.close()
        await self.marker_sender.close()
        await self.verifier.close()
        self.lost_brokers.close()
        self.fetchers.close()
        self._isr_changes.close()
        self._assignments.close()
        await self.lifecycle.close()
        await self._removal_checks.close()
        await self.scrubber.close()
        await self._unclean_leaders.close()
        await self.repairs.close()
        await self.moves.close()
        self._upkeep.close()
        await self.cleaner.close()
        self._hosting.close()
        await self.partitions.close()
