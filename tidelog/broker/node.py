"""One node, put together: the only place that knows every part, and that hands each what it needs of the others.

Start order: bind the ports (a busy one is known before a file is touched), open the directories, replay the metadata,
recover the logs, take the roles, accept. Stop order is the reverse; what was acknowledged is on its way to the disk
before the clean-shutdown marker is written.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidelog import __version__
from tidelog.broker.apis import (
    api_versions,
    create_topics,
    delete_topics,
    describe_cluster,
    describe_configs,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    list_offsets,
    metadata,
    offset_commit,
    offset_fetch,
    offset_for_leader_epoch,
    sync_group,
)
from tidelog.broker.config import ConfigError
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.service import TOPIC as OFFSETS_TOPIC
from tidelog.broker.coordinators.group.service import GroupCoordinatorService
from tidelog.broker.dispatch import Dispatcher
from tidelog.broker.group_ports import GroupPorts
from tidelog.broker.hosting import Hosting
from tidelog.broker.metadata_wiring import broker_registration, controller_settings, metadata_log_config
from tidelog.broker.node_ports import NodePorts, os_ports
from tidelog.broker.partitions import Partitions
from tidelog.broker.server import Server, ServerLimits
from tidelog.broker.services import Services
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.registration import BrokerRegistration
from tidelog.replication.controller.state import ControllerState
from tidelog.replication.quorum.single import QuorumOfOne
from tidelog.storage.log_directory import LogDirectory

if TYPE_CHECKING:
    from tidelog.broker.config import Listener, NodeConfig
    from tidelog.replication.controller.image import MetadataDelta, MetadataImage
    from tidelog.replication.partition import Partition

log = logging.getLogger("tidelog.node")

# Every API behind the compiled messages; Produce and Fetch are wired into dispatch.
SERVED_APIS = (
    api_versions,
    create_topics,
    delete_topics,
    describe_cluster,
    describe_configs,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    list_offsets,
    metadata,
    offset_commit,
    offset_fetch,
    offset_for_leader_epoch,
    sync_group,
)

RECEIVE_BYTES_MAX = 1 << 30


async def run_node(config: NodeConfig, on_ready: Callable[[str], None]) -> None:
    """Run a node until cancelled. `on_ready` is given the line that says where it can be reached.

    Raises ConfigError, ForeignDirectory or OSError, each with a text fit to be shown, when it cannot start.
    """
    node = Node(config, os_ports())
    try:
        on_ready(await node.start())
        # What is here now stays: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        await asyncio.get_running_loop().create_future()
    finally:
        await node.stop()


class Node:
    """A broker and its controller in one process, on the running event loop."""

    def __init__(self, config: NodeConfig, ports: NodePorts) -> None:
        self.config = config
        self._ports = ports
        self._loop = asyncio.get_running_loop()
        self._executor = ports.executor
        self._rng = ports.rng
        self._sockets: list[tuple[str, socket.socket]] = []
        self._directories: list[LogDirectory] = []
        self._hosting: Hosting | None = None
        self._controller: Controller | None = None
        self._partitions: Partitions | None = None
        self._groups: GroupCoordinatorService | None = None
        self._dispatcher: Dispatcher | None = None
        self._services: Services | None = None
        self._server: Server | None = None

    # ------------------------------------------------------------------------------------------------------------ start

    async def start(self) -> str:
        """Come up; returns the line that says where. On failure call `stop`, which undoes what was done."""
        config = self.config
        self._check_served()
        for listener in self._served_listeners():
            self._sockets.append((listener.name, self._ports.bind(listener.host, listener.port)))
        self._open_directories()
        controller = self._controller = self._make_controller()
        partitions = self._partitions = self._make_partitions(controller)
        hosting = self._hosting = Hosting(
            config.node_id, config, self._directories, partitions, self._loop, self._ports.clock_ms, self._on_role,
            lambda work: self._loop.run_in_executor(self._executor, work),
        )  # fmt: skip
        groups = self._groups = self._make_groups(partitions, controller)
        hosting.load(controller.load())
        unclean = not all(directory.was_clean for directory in self._directories)
        await controller.activate(self._registration(), new_leader_epochs=unclean)
        hosting.start()
        services = self._services = Services(
            config=config,
            node_id=config.node_id,
            cluster_id=self._directories[0].cluster_id,
            clock_ms=self._ports.clock_ms,
            image=lambda: controller.image,
            partitions=partitions,
            controller=controller,
            groups=groups,
            rng=self._rng,
        )
        self._dispatcher = Dispatcher(services, SERVED_APIS)
        self._server = Server(self._limits(), self._dispatcher.dispatch, self._loop.time)
        await self._server.listen(self._sockets)
        return self._ready_line()

    def _check_served(self) -> None:
        if not self.config.is_alone:
            raise ConfigError("clusters are not served yet: process.roles must be broker,controller with one voter")
        for listener in self.config.listeners:
            if listener.security_protocol != "PLAINTEXT":
                raise ConfigError(f"listener {listener.name}: {listener.security_protocol} is not served yet")

    def _served_listeners(self) -> list[Listener]:
        """All but the controller's: a controller that is alone has nobody to talk to."""
        names = self.config.items("controller.listener.names")
        return [listener for listener in self.config.listeners if listener.name not in names]

    def _open_directories(self) -> None:
        config, disk = self.config, self._ports.disk
        paths = [config.metadata_log_dir, *config.log_dirs]
        cluster_id: str | None = None
        for path in dict.fromkeys(map(str, paths)):
            directory = LogDirectory.open(disk, path, node_id=config.node_id, cluster_id=cluster_id)
            cluster_id = directory.cluster_id
            self._directories.append(directory)

    def _make_controller(self) -> Controller:
        config = self.config
        home = self._directories[0]
        metadata_log = home.open_metadata_log(metadata_log_config(config), self._ports.clock_ms())
        quorum = QuorumOfOne(self._ports.disk, home.path, metadata_log, config.node_id, home.directory_id)

        async def run_in_executor(work: Callable[[], None]) -> None:
            await self._loop.run_in_executor(self._executor, work)

        return Controller(
            quorum,
            ControllerState(controller_settings(config), self._rng),
            run_in_executor=run_in_executor,
            clock_ms=self._ports.clock_ms,
            on_image=self._on_image,
            snapshot_bytes_min=config.integer("metadata.log.max.record.bytes.between.snapshots"),
        )

    def _make_partitions(self, controller: Controller) -> Partitions:
        def known(topic: str | bytes, index: int) -> bool:
            image = controller.image
            found = image.topics_by_id.get(topic) if isinstance(topic, bytes) else image.topics_by_name.get(topic)
            return found is not None and index in found.partitions

        return Partitions(
            self._loop,
            self._executor,
            self._ports.clock_ms,
            self._rng,
            known,
            fetch_session_slots_max=self.config.integer("max.incremental.fetch.session.cache.slots"),
            fetch_bytes_max=self.config.integer("fetch.max.bytes"),
        )

    def _make_groups(self, partitions: Partitions, controller: Controller) -> GroupCoordinatorService:
        def partition_count() -> int:
            topic = controller.image.topics_by_name.get(OFFSETS_TOPIC)
            return len(topic.partitions) if topic else self.config.integer("offsets.topic.num.partitions")

        ports = GroupPorts(OFFSETS_TOPIC, partitions, self._loop, self._ports.clock_ms)
        settings = GroupCoordinatorConfig.from_node(self.config.integer)
        return GroupCoordinatorService(settings, ports, self._rng, partition_count)

    def _registration(self) -> BrokerRegistration:
        homes = set(map(str, self.config.log_dirs))
        directory_ids = [directory.directory_id for directory in self._directories if directory.path in homes]
        return broker_registration(self.config, self._rng.randbytes(16), self._bound_ports(), directory_ids)

    def _bound_ports(self) -> dict[str, int]:
        return {name: sock.getsockname()[1] for name, sock in self._sockets}

    def _advertised(self) -> list[Listener]:
        return self.config.advertised_listeners(self._bound_ports())

    def _limits(self) -> ServerLimits:
        return ServerLimits(
            frame_bytes_max=self.config.integer("socket.request.max.bytes"),
            connections_max=self.config.integer("max.connections"),
            idle_ms_max=self.config.integer("connections.max.idle.ms"),
            receive_bytes_max=RECEIVE_BYTES_MAX,
        )

    def _ready_line(self) -> str:
        addresses = ",".join(
            f"{each.name}://{f'[{each.host}]' if ':' in each.host else each.host}:{each.port}"
            for each in self._advertised()
        )
        data = ",".join(directory.path for directory in self._directories)
        cluster_id = self._directories[0].cluster_id
        return (
            f"tidelog {__version__} node {self.config.node_id} ready: {addresses} (cluster {cluster_id}, data {data})"
        )

    # ---------------------------------------------------------------------------------------------------------- notices

    def _on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        assert self._hosting is not None
        assert self._groups is not None
        self._hosting.apply(image, delta)
        if delta.deleted_topics:
            self._groups.on_topics_deleted([(topic.name, topic.topic_id) for topic in delta.deleted_topics.values()])

    def _on_role(self, partition: Partition, leads: bool) -> None:
        if partition.topic == OFFSETS_TOPIC:
            assert self._groups is not None
            if leads:
                self._groups.on_partition_elected(partition.index, partition.leader_epoch)
            else:
                self._groups.on_partition_resigned(partition.index)

    # ------------------------------------------------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Undo `start`, however far it came. Everything appended is on disk when this returns."""
        creation = self._services.topic_creation if self._services is not None else None
        parts: tuple[Any, ...] = (
            self._server, self._dispatcher, self._groups, creation, self._controller, self._hosting, self._partitions
        )  # fmt: skip
        for part in parts:
            if part is not None:
                await self._close(part)
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        for directory in self._directories:
            await self._close(directory)
        for _, sock in self._sockets:
            sock.close()

    async def _close(self, part: Any) -> None:
        """What goes wrong with one part must not keep the others, the logs above all, from being closed."""
        try:
            closing = part.close()
            if closing is not None:
                await closing
        except Exception as error:
            expected = isinstance(error, OSError)
            log.error("%s did not close cleanly: %s", type(part).__name__, error, exc_info=not expected)
