"""Assembles one node: the only module that knows all parts, and passes each part what it needs of the others.

A node has two halves: `metadata_side` on every node, `broker_side` with the broker role. Start order: bind the ports,
so that a busy port is detected before a file is changed; open the directories, join the quorum, recover the logs,
register, take the roles, accept connections, become unfenced. Stop order is the reverse. The clean-shutdown marker is
written after all acknowledged records are on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tidelog.broker.apis.api_tables import BROKER_APIS, CONTROLLER_APIS, FORWARDED
from tidelog.broker.apis.dispatch import KEYS_OF_NODES, Dispatcher
from tidelog.broker.apis.services import Services, missing
from tidelog.broker.broker_side import BrokerSide
from tidelog.broker.cluster.controller_channel import ControllerChannel
from tidelog.broker.cluster.lifecycle import RegistrationRefused
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.unserved import check_served, keys_without_effect
from tidelog.broker.config.validation import check_values
from tidelog.broker.metadata_side import MetadataSide
from tidelog.broker.network.channel import Channels
from tidelog.broker.network.counters import RequestCounters
from tidelog.broker.network.server import Server
from tidelog.broker.network.server_limits import LIMIT_KEYS, server_limits
from tidelog.broker.node_ports import NodePorts, os_ports
from tidelog.broker.replicas.log_directories import LogDirectories
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.broker.scheduling.inspections import Inspections
from tidelog.protocol.addresses import address_text
from tidelog.protocol.errors import ConfigError
from tidelog.storage.files.disk import is_exhaustion
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import Listener, NodeConfig
    from tidelog.broker.metrics.side import MetricsSide
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage

logger = logging.getLogger("tidelog.node")

# New objects until the garbage collector looks for cycles. Requests make none, but one of 8 KB makes 10,000 objects:
# by Python's own bound of 700, ten such requests have the collector walk all metadata since the start, 0.5 s for 10,000
# partitions.
YOUNG_OBJECTS_MAX = 20_000


async def run_node(config: NodeConfig, on_ready: Callable[[str], None]) -> None:
    """Run a node in a process of its own until cancelled. `on_ready` receives the line with its addresses.

    Raises ConfigError, ForeignDirectory or OSError if the node cannot start. Their texts are written for the user.
    """
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    node = Node(config, os_ports())
    try:
        on_ready(await node.start())
        # These objects live as long as the node: the garbage collector must not traverse them again and again, nor now,
        # when clients wait. There is no garbage among them to collect before.
        gc.freeze()
        await node.failed()
    finally:
        await _run_to_end(node.stop())


async def _run_to_end(stop: Coroutine[Any, Any, None]) -> None:
    """Run `stop` to its end despite a cancellation. A node that stops by itself may be cancelled meanwhile. It still
    closes its logs, and the caller still raises the error that stopped it.
    """
    stopping = asyncio.get_running_loop().create_task(stop, name="stop")
    while not stopping.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([stopping])
    stopping.result()


class Node:
    """A broker, a controller, or both in one process, on the running event loop."""

    def __init__(self, config: NodeConfig, ports: NodePorts) -> None:
        self.config = config
        self.settings = DynamicConfig(config)
        self._ports = ports = ports.with_threads_of(config.log_dirs if config.is_broker else ())
        self._loop = asyncio.get_running_loop()
        self._sockets: list[tuple[str, socket.socket]] = []
        self._bound_ports: dict[str, int] = {}
        self._metrics_socket: socket.socket | None = None
        self._directories = LogDirectories(config, ports.disk, self._loop, self._on_failure, ports.executor)
        self._channels: Channels | None = None
        self._channel: ControllerChannel
        self._controller_dispatcher: Dispatcher
        self._metadata: MetadataSide | None = None
        self._broker: BrokerSide | None = None
        self._services: Services | None = None
        self._dispatchers: list[Dispatcher] = []
        self._controller_server: Server | None = None
        self._broker_server: Server | None = None
        self._metrics: MetricsSide | None = None
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._is_ready = False

    # ------------------------------------------------------------------------------------------------------------ start

    async def start(self) -> str:
        """Start the node. Returns the line with its addresses. After a failure call `stop`, which undoes the start."""
        starting = self._loop.create_task(self._start(), name="start")
        either: list[asyncio.Future[Any]] = [starting, self._failure]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        if self._failure.done():
            if not starting.cancelled():
                starting.exception()  # a consequence of the failure: mark it as retrieved
            self._failure.result()
        return starting.result()

    async def _start(self) -> str:
        check_served(self.config)
        check_values(self.settings)
        idle = keys_without_effect(self.config)
        if idle:
            logger.warning("these configuration keys have no effect: %s", ", ".join(idle))
        for listener in self.config.listeners:
            self._sockets.append((listener.name, self._ports.bind(listener.host, listener.port)))
        self._bound_ports = {name: sock.getsockname()[1] for name, sock in self._sockets}
        if self.config["metrics.port"] is not None:
            host, port = self.config.text("metrics.host"), self.config.integer("metrics.port")
            self._metrics_socket = self._ports.bind(host, port)
        self._directories.open(self._ports.boot_id)
        self._assemble()
        if self._broker is None:
            # Without them, damage at the end of the metadata log would count as a tail torn by a loss of power.
            self._directories.write_incarnations(-1, self._ports.boot_id)
        if self._metrics_socket is not None:
            await self._serve_metrics(self._metrics_socket)
        if self._controller_server is not None:
            await self._controller_server.listen(self._sockets_of(controller=True))
        assert self._metadata is not None
        await self._metadata.start(self._channel)
        if self._broker is not None:
            await self._start_broker(self._broker)
        self._is_ready = True
        return self._ready_line()

    async def _serve_metrics(self, sock: socket.socket) -> None:
        """Serve the metrics. From here on they show the progress of the start."""
        from tidelog.broker.metrics.side import MetricsSide
        from tidelog.broker.metrics.sources import Sources

        assert self._metadata is not None
        assert self._services is not None
        servers = {"broker": self._broker_server, "controller": self._controller_server}
        sources = Sources(
            config=self.config,
            cluster_id=self._services.cluster_id,
            metadata=self._metadata,
            broker=self._broker,
            servers={role: server for role, server in servers.items() if server is not None},
            dispatchers=self._dispatchers,
            requests=self._services.requests,
        )
        self._metrics = MetricsSide(sources, self._ports, self._loop)
        await self._metrics.start(sock)

    async def _start_broker(self, broker: BrokerSide) -> None:
        assert self._broker_server is not None
        try:
            await broker.start()
        except RegistrationRefused as error:
            raise ConfigError(str(error)) from None
        await self._broker_server.listen(self._sockets_of(controller=False))
        await broker.lifecycle.become_ready()

    def _sockets_of(self, *, controller: bool) -> list[tuple[str, socket.socket]]:
        names = self.config.controller_listener_names
        return [(name, sock) for name, sock in self._sockets if (name in names) == controller]

    def _assemble(self) -> None:
        config, ports, loop = self.config, self._ports, self._loop
        bound_ports = self._bound_ports
        channels = self._channels = Channels(loop, f"tidelog-{config.node_id}", ports.resolver)
        metadata = self._metadata = MetadataSide(
            config, ports, loop, self._directories.metadata, bound_ports, channels, self._on_image, self._on_leader,
            self._on_metadata_failure,
        )  # fmt: skip
        channel = self._channel = ControllerChannel(
            is_local=metadata.leads,
            local=self._call_own_controller,
            leader=metadata.leader_endpoint,
            exchange=channels.exchange,
            loop=loop,
            rng=ports.rng,
            published=metadata.tracker.wait_for,
        )
        scheduler = FairScheduler(loop.call_soon, ports.stopwatch)
        if config.is_broker:
            self._broker = BrokerSide(
                self.settings, ports, loop, self._directories, bound_ports, channels, metadata, channel, scheduler,
                self._on_failure,
            )  # fmt: skip
        broker: Any = self._broker
        if metadata.controller is not None:
            metadata.controller.pause = scheduler.pause
        inspections = Inspections(loop, ports.inspector, scheduler)
        services = self._services = Services(
            config=config,
            settings=self.settings,
            node_id=config.node_id,
            cluster_id=self._directories.cluster_id,
            clock_ms=ports.clock_ms,
            image=lambda: metadata.tracker.image,
            # No API of a node without the broker role uses these.
            partitions=broker.partitions if broker else missing("partitions"),
            directories=self._directories,
            moves=broker.moves if broker else missing("moves"),
            groups=broker.groups if broker else missing("groups"),
            producer_ids=broker.producer_ids if broker else missing("producer ids"),
            transactions=broker.transactions if broker else missing("transactions"),
            markers=broker.markers if broker else missing("markers"),
            verifier=broker.verifier if broker else missing("verifier"),
            controller=metadata.controller,
            controller_channel=channel,
            raft=metadata.raft,
            rng=ports.rng,
            broker_epoch=lambda: broker.lifecycle.epoch if broker else -1,
            requests=RequestCounters(ports.stopwatch or loop.time),
            scheduler=scheduler,
            inspections=inspections,
            **({"lost_brokers": broker.lost_brokers} if broker else {}),
        )
        callbacks = broker.partitions.callbacks if broker else DeferredCallbacks(loop)
        limits = server_limits(self.settings, ports.files_max)
        if config.is_controller:
            dispatcher = self._controller_dispatcher = Dispatcher(services, CONTROLLER_APIS, FORWARDED)
            services.embedded = dispatcher.embedded
            self._dispatchers.append(dispatcher)
            self._controller_server = Server(limits, dispatcher.dispatch_cold, loop.time, callbacks, scheduler)
            self._controller_server.keys_of_nodes = KEYS_OF_NODES
        if config.is_broker:
            dispatcher = Dispatcher(services, BROKER_APIS, FORWARDED)
            self._dispatchers.append(dispatcher)
            own = [listener for listener in config.listeners if listener.name not in config.controller_listener_names]
            protected = config.inter_broker_listener if len(own) > 1 else None
            self._broker_server = Server(
                limits, dispatcher.dispatch, loop.time, callbacks, scheduler, protected, dispatcher.dispatch_pipelined
            )
        self._watch_limits()

    def _watch_limits(self) -> None:
        for server in (self._controller_server, self._broker_server):
            if self._broker is not None and server is not None:
                server.on_file_shortage = self._broker.close_files
        self.settings.subscribe(LIMIT_KEYS, self._limit_servers)

    def _limit_servers(self) -> None:
        try:
            limits = server_limits(self.settings, self._ports.files_max)
        except ConfigError as error:
            logger.error("the limits on connections do not change: %s", error)
            return
        for server in (self._controller_server, self._broker_server):
            if server is not None:
                server.reconfigure(limits)

    async def _call_own_controller(self, request: Any, version: int) -> Any:
        return await self._controller_dispatcher.call(request, version)

    def addresses(self) -> dict[str, str]:
        """Listener name -> advertised host:port, with the bound ports. Only for a started node."""
        config = self.config
        bound_ports = self._bound_ports
        listeners: list[Listener] = (
            config.advertised_listeners(bound_ports)
            if config.is_broker
            else [one._replace(port=one.port or bound_ports[one.name]) for one in config.listeners]
        )
        return {each.name: address_text(each.host, each.port) for each in listeners}

    def _ready_line(self) -> str:
        config = self.config
        addresses = ",".join(f"{name}://{address}" for name, address in self.addresses().items())
        data = ",".join(directory.path for directory in self._directories)
        cluster_id = self._directories.cluster_id
        return f"tidelog {__version__} node {config.node_id} ready: {addresses} (cluster {cluster_id}, data {data})"

    # ---------------------------------------------------------------------------------------------------------- notices

    def _on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.settings.on_image(image, delta)
        if self._metrics is not None:
            self._metrics.on_image(image, delta)
        if self._broker is not None:
            self._broker.on_image(image, delta)

    def _on_leader(self, leader_id: int, epoch: int) -> None:
        if self._broker is not None:
            self._broker.on_leader()

    def _on_failure(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _on_metadata_failure(self, error: Exception) -> None:
        if isinstance(error, OSError) and not is_exhaustion(error):
            # The directory has failed, and with it the logs of topics in it.
            self._directories.failed(self._directories.metadata, error)
        else:
            self._on_failure(error)

    async def failed(self) -> None:
        """Wait until an error stops this node, and raise it."""
        await asyncio.shield(self._failure)  # the cancellation of a caller is no failure of the node

    # ------------------------------------------------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Undo `start`, or the part of it that was done. All appended records are on disk afterwards."""
        if self._broker is not None and not self._failure.done():
            await self._leave(self._broker)
        creation = self._services.topic_creation if self._services is not None else None
        inspections = self._services.inspections if self._services is not None else None
        parts: tuple[Any, ...] = (
            self._broker_server, *reversed(self._dispatchers), inspections, creation, self._broker,
            self._controller_server, self._metadata, self._channels, self._metrics,
        )  # fmt: skip
        for part in parts:
            if part is not None:
                await self._close(part)
        ports = self._ports
        for executor in (ports.executor, *ports.of_directories.values(), ports.inspector, ports.quorum):
            if executor is not None:
                executor.shutdown(wait=True)
        if ports.resolver is not None:  # no connection waits for a name now
            ports.resolver.shutdown(wait=False, cancel_futures=True)
        epoch = self._broker.lifecycle.epoch if self._broker is not None else -1
        is_clean = self._directories.close(epoch)
        for _, sock in self._sockets:
            sock.close()
        if self._metrics_socket is not None:
            self._metrics_socket.close()
        if self._is_ready:
            self._is_ready = False
            how = "everything is on disk" if is_clean else "not cleanly: the next start scans its logs"
            logger.info("node %d has stopped, %s", self.config.node_id, how)

    async def _leave(self, broker: BrokerSide) -> None:
        """Let the controller move the leaderships to other brokers first, if there are any."""
        assert self._metadata is not None
        others = [one for one in self._metadata.image.brokers.values() if one.node_id != self.config.node_id]
        if self.config.flag("controlled.shutdown.enable") and any(not other.fenced for other in others):
            await broker.lifecycle.shut_down()

    async def _close(self, part: Any) -> None:
        """Close one part. Its failure must not prevent that the other parts are closed, above all the logs."""
        try:
            closing = part.close()
            if closing is not None:
                await closing
        except Exception as error:
            expected = isinstance(error, OSError)
            logger.error("%s did not close cleanly: %s", type(part).__name__, error, exc_info=not expected)
