"""A controller over a real directory and a quorum of one, for tests of the shells and of the handlers above."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.unit.replication.controller_harness import Broker
from tidelog.protocol.errors import KafkaError
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.decisions.activation import ControllerIdentity
from tidelog.replication.controller.decisions.state import ControllerSettings, CreatedTopic, NewTopic
from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.tracker import MetadataTracker
from tidelog.replication.ports import PortState
from tidelog.replication.quorum.driver import RaftNode
from tidelog.replication.quorum.files.metadata_log import log_start_in
from tidelog.replication.quorum.raft.metadata_retention import KAFKA_RETENTION, MetadataRetention
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.segments.log_config import LogConfig

_incarnations = itertools.count(1)
"""A process that starts again is another incarnation than the one before it."""


class Node:
    """`syncs` counts, `gate` holds them up, `failure` is what they end in; `broker` is the one that joins."""

    def __init__(
        self,
        path: Path,
        *,
        node_id: int = 1,
        snapshot_bytes_min: int = 1 << 30,
        settings: ControllerSettings | None = None,
        syncing: bool = True,
        retention: MetadataRetention = KAFKA_RETENTION,
    ) -> None:
        self.syncing = syncing  # False: nothing of the log reaches the device, for tests of something else
        loop = asyncio.get_running_loop()
        disk = OsDisk()
        self.directory = LogDirectory.open(disk, str(path), node_id=node_id, cluster_id=None)
        self.told: list[tuple[MetadataImage, MetadataDelta]] = []
        self.followers: list[Callable[[MetadataImage, MetadataDelta], None]] = []  # told as well
        self.syncs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: OSError | None = None
        self.now_ms = 1_700_000_000_000
        self.node_id = node_id
        self.tracker = MetadataTracker(
            on_image=self._tell,
            loop=loop,
            run_in_executor=self._run,
            clock_ms=lambda: self.now_ms,
            snapshot_bytes_min=snapshot_bytes_min,
        )
        self.raft = self.tracker.raft = RaftNode(
            node_id=node_id,
            directory_id=self.directory.directory_id,
            cluster_id=self.directory.cluster_id,
            disk=disk,
            root=str(path),
            log=self.directory.open_metadata_log(
                LogConfig(max_message_bytes=1 << 23, retention_ms=-1), 0, log_start_in
            ),
            settings=QuorumSettings(retention=retention),
            can_vote=True,
            loop=loop,
            exchange=self._exchange,
            run_in_executor=self._run,
            clock_ms=lambda: self.now_ms,
            rng=random.Random(node_id),
            listener=self.tracker,
        )
        self.controller = Controller(
            node_id=node_id,
            raft=self.raft,
            tracker=self.tracker,
            settings=settings or ControllerSettings(),
            identity=ControllerIdentity(random.randbytes(16)),
            loop=loop,
            clock_ms=lambda: self.now_ms,
            rng=random.Random(node_id),
            probe=self._probe,
            bootstrap_values=self.raft.bootstrap_values,
        )
        self.broker = Broker(node_id, incarnation=next(_incarnations) % 256)

    def _tell(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.told.append((image, delta))
        for follower in self.followers:
            follower(image, delta)

    async def _exchange(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("a quorum of one talks to nobody")

    async def _probe(self, endpoint: Any) -> PortState:
        return PortState.ACCEPTS

    async def _run(self, work: Callable[[], Any]) -> Any:
        task = getattr(work, "__self__", None)
        if not isinstance(task, FlushTask):
            return work()
        self.syncs += 1
        await self.gate.wait()
        if self.failure is not None:
            task.error = self.failure  # as its `run` keeps it for `finish_flush`
        elif self.syncing:
            await asyncio.get_running_loop().run_in_executor(None, work)

    async def start(self, *, previous_epoch: int | None = None) -> MetadataImage:
        """Active, its broker unfenced. `previous_epoch`: the broker's before a clean stop; -1 for an unclean one."""
        await self.raft.start()
        async with asyncio.timeout(PATIENCE_S):
            while not self.controller.is_active:  # noqa: ASYNC110
                await asyncio.sleep(0)
        if previous_epoch is None:
            known = self.controller.image.brokers.get(self.node_id)
            previous_epoch = -1 if known is None else known.epoch
        directories = [self.directory.directory_id]
        request = self.broker.registration(
            previous_epoch=previous_epoch, cluster_id=self.directory.cluster_id, log_dirs=directories
        )
        self.broker.epoch = (await self.controller.register_broker(request)).broker_epoch
        await self.broker.heartbeat(self.controller)
        return self.controller.image

    async def stop(self) -> None:
        await self.controller.close()
        await self.raft.close()
        await self.tracker.close()
        self.directory.close()

    async def create(self, *names: str) -> dict[str, CreatedTopic | KafkaError]:
        return await self.controller.create_topics([NewTopic(name, 1, 1) for name in names])
