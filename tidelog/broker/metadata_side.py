"""The half of a node that keeps the cluster's metadata: its replica of the log, the image, the controller if it is one.

Every node has it, whatever its roles. It knows no topics' records; what a broker makes of an image is `broker_side`'s.
Put together by `node.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.broker.metadata_wiring import (
    controller_endpoints,
    controller_settings,
    metadata_log_config,
    quorum_settings,
    quorum_wait,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.decisions.activation import ControllerIdentity
from tidelog.replication.controller.metadata.image import METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import CONTROLLERS_VERSION
from tidelog.replication.controller.metadata.tracker import MetadataTracker
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.driver import RaftNode
from tidelog.replication.quorum.files.metadata_log import log_start_in
from tidelog.replication.quorum.files.records_lost import note_loss_of
from tidelog.storage.log.loader import Ending

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.network.channel import Channels
    from tidelog.broker.node_ports import NodePorts
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
    from tidelog.storage.log.directory import LogDirectory

logger = logging.getLogger("tidelog.metadata")

T = TypeVar("T")

_CURRENT_POLL_S = 0.002
_LOOK_S = 2.0
_LOOKS_BETWEEN_NOTICES = 5  # a node without a leader says so after 4 s, then every 10 s


class MetadataSide:
    """`raft`, `tracker` and, on a controller, `controller`; `on_image` and `on_leader` as the tracker calls them."""

    def __init__(
        self,
        config: NodeConfig,
        ports: NodePorts,
        loop: asyncio.AbstractEventLoop,
        home: LogDirectory,
        bound_ports: Mapping[str, int],
        channels: Channels,
        on_image: Callable[[MetadataImage, MetadataDelta], None],
        on_leader: Callable[[int, int], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._executor = ports.quorum
        self._node_id = config.node_id
        self._notice_leader, self._notice_image = on_leader, on_image
        self._channel: ControllerChannel | None = None
        self._registering: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._bootstrap = [Endpoint(*server) for server in config.quorum_bootstrap]
        self._identity = ControllerIdentity(ports.rng.randbytes(16), controller_endpoints(config, bound_ports))
        self.tracker = MetadataTracker(
            on_image=self._on_image,
            on_leader=self._on_leader,
            on_failure=on_failure,
            loop=loop,
            run_in_executor=self.run_in_executor,
            clock_ms=ports.clock_ms,
            snapshot_bytes_min=config.integer("metadata.log.max.record.bytes.between.snapshots"),
            snapshot_interval_ms=config.integer("metadata.log.max.snapshot.interval.ms"),
        )
        self.raft = self.tracker.raft = RaftNode(
            node_id=config.node_id,
            directory_id=home.directory_id,
            cluster_id=home.cluster_id,
            disk=ports.disk,
            root=home.path,
            log=home.open_metadata_log(
                metadata_log_config(config), ports.clock_ms(), log_start_in, note_loss_of(ports.disk, home)
            ),
            settings=quorum_settings(config, bound_ports),
            can_vote=config.is_controller,
            loop=loop,
            exchange=channels.exchange,
            run_in_executor=self.run_in_executor,
            clock_ms=ports.clock_ms,
            rng=ports.rng,
            listener=self.tracker,
            keeps_writes=home.ending is not Ending.POWER_LOSS,
        )
        self.raft.registered_brokers = lambda: self.tracker.image.brokers
        self.controller: Controller | None = None
        if config.is_controller:
            self.controller = Controller(
                node_id=config.node_id,
                raft=self.raft,
                tracker=self.tracker,
                settings=controller_settings(
                    config, home.cluster_id, self.raft.voter_ids, lambda: self.raft.kraft_version
                ),
                identity=self._identity,
                loop=loop,
                clock_ms=ports.clock_ms,
                rng=ports.rng,
                probe=channels.probe,
                bootstrap_values=self.raft.bootstrap_values,
            )

    def run_in_executor(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(self._executor, work)

    @property
    def image(self) -> MetadataImage:
        return self.tracker.image

    def leads(self) -> bool:
        """Whether this node's controller is the active one."""
        return self.controller is not None and self.controller.is_active

    def leader_endpoint(self) -> Endpoint | None:
        return self.raft.leader_endpoint()

    async def start(self, channel: ControllerChannel) -> None:
        """Join the quorum. `channel`: to the active controller, which every other one tells of itself (KIP-919)."""
        self._channel = channel
        await self.raft.start()
        self._watching = self._loop.create_task(self._report_waiting(), name="watch quorum")

    async def _report_waiting(self) -> None:
        """Say for whom this node waits, from the second look on that finds no leader, and every so often."""
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            looks = looks + 1 if self.raft.leader_id < 0 else 0
            if looks % _LOOKS_BETWEEN_NOTICES == 2:
                voters, can_vote = self.raft.voters(), self.controller is not None
                logger.warning("%s", quorum_wait(voters, self._bootstrap, self._node_id, can_vote))
                for problem in (self.raft.misfit, self.raft.loss):
                    if problem:
                        logger.error("%s", problem)

    async def wait_until_current(self) -> None:
        """Until the image holds what the active controller says is committed."""
        while not 0 <= self.raft.leader_high_watermark <= self.tracker.offset + 1:  # noqa: ASYNC110
            await asyncio.sleep(_CURRENT_POLL_S)

    def _on_leader(self, leader_id: int, epoch: int) -> None:
        if leader_id not in (-1, self._node_id):
            self._begin_registration()
        if self._channel is not None:
            self._channel.on_leader_changed()
        self._notice_leader(leader_id, epoch)

    def _on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Register when metadata.version has risen to the level that has registrations of controllers."""
        if delta.changed_features and self._is_unregistered(image):
            self._begin_registration()
        self._notice_image(image, delta)

    def _is_unregistered(self, image: MetadataImage) -> bool:
        level = image.feature_level(METADATA_VERSION)
        return level >= CONTROLLERS_VERSION and self._node_id not in image.controllers

    def _begin_registration(self) -> None:
        if self.controller is not None and self._channel is not None and self._registering is None:
            self._registering = self._loop.create_task(self._register(), name="register controller")

    async def _register(self) -> None:
        assert self._channel is not None
        try:
            response = await self._channel.call(self._identity.registration(self._node_id), 0)
            while response.error_code == ErrorCode.UNSUPPORTED_VERSION and self._is_unregistered(self.image):
                await asyncio.sleep(_CURRENT_POLL_S)  # metadata.version has risen meanwhile
                response = await self._channel.call(self._identity.registration(self._node_id), 0)
            if response.error_code == ErrorCode.UNSUPPORTED_VERSION:
                logger.debug("metadata.version is below %d: no controller is registered", CONTROLLERS_VERSION)
            elif response.error_code:
                logger.warning(
                    "the active controller refuses the registration of this controller: %s",
                    ErrorCode.of(response.error_code).name,
                )
        except KafkaError as error:
            logger.info("this controller is not registered with the active one yet: %s", error)
        finally:
            self._registering = None

    async def close(self) -> None:
        """The log itself is its directory's to close."""
        for task in (self._registering, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        parts: tuple[Any, ...] = (self.controller, self.raft, self.tracker)
        for part in parts:
            if part is not None:
                await part.close()
