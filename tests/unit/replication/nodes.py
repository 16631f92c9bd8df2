"""A controller over a real directory, for tests of the shell and of the handlers above it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tidelog.protocol.errors import KafkaError
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.image import EndpointImage, MetadataDelta, MetadataImage
from tidelog.replication.controller.registration import BrokerRegistration
from tidelog.replication.controller.state import ControllerSettings, ControllerState, CreatedTopic, NewTopic
from tidelog.replication.quorum.single import QuorumOfOne
from tidelog.storage.disk import OsDisk
from tidelog.storage.flush import FlushTask
from tidelog.storage.log_config import LogConfig
from tidelog.storage.log_directory import LogDirectory


class Node:
    """A controller over a real directory; `syncs` counts, `gate` holds them up."""

    def __init__(
        self,
        path: Path,
        *,
        node_id: int = 1,
        snapshot_bytes_min: int = 1 << 30,
        settings: ControllerSettings | None = None,
        syncing: bool = True,
    ) -> None:
        self.syncing = syncing  # False: nothing reaches the device, for tests of something else
        disk = OsDisk()
        self.directory = LogDirectory.open(disk, str(path), node_id=node_id, cluster_id=None)
        log = self.directory.open_metadata_log(LogConfig(max_message_bytes=1 << 23), 0)
        self.quorum = QuorumOfOne(disk, str(path), log, node_id, self.directory.directory_id)
        self.told: list[tuple[MetadataImage, MetadataDelta]] = []
        self.syncs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: OSError | None = None
        self.now_ms = 1_700_000_000_000
        self.node_id = node_id
        self.controller = Controller(
            self.quorum,
            ControllerState(settings or ControllerSettings(), random.Random(node_id)),
            run_in_executor=self._run,
            clock_ms=lambda: self.now_ms,
            on_image=lambda image, delta: self.told.append((image, delta)),
            snapshot_bytes_min=snapshot_bytes_min,
        )

    async def _run(self, work: Callable[[], None]) -> None:
        self.syncs += 1
        await self.gate.wait()
        if self.failure is not None:
            task: FlushTask = cast(Any, work).__self__
            task.error = self.failure  # as its `run` keeps it for `finish_flush`
            return
        if self.syncing:
            await asyncio.get_running_loop().run_in_executor(None, work)

    async def start(self, *, unclean: bool = False) -> MetadataImage:
        self.controller.load()
        registration = BrokerRegistration(
            self.node_id,
            random.randbytes(16),
            [EndpointImage("PLAINTEXT", "localhost", 9092)],
            log_dirs=[self.directory.directory_id],
        )
        await self.controller.activate(registration, new_leader_epochs=unclean)
        return self.controller.image

    async def stop(self) -> None:
        await self.controller.close()
        self.directory.close()

    async def create(self, *names: str) -> dict[str, CreatedTopic | KafkaError]:
        return await self.controller.create_topics([NewTopic(name, 1, 1) for name in names])
