"""What the handlers of cluster metadata need: a real controller, and stand-ins for what they do not touch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from tests.unit.replication.nodes import Node
from tidelog.broker.apis.api_tables import CONTROLLER_APIS
from tidelog.broker.apis.dispatch import Dispatcher
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.controller_channel import ControllerChannel
from tidelog.broker.cluster.metadata_answers import EncodedAnswer
from tidelog.broker.cluster.producer_ids import ProducerIdManager, controller_blocks
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.metadata_wiring import controller_settings
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.messages.metadata import MetadataResponse


class Coordinators:
    """Every group and every transactional id lives in partition 3."""

    def partition_for(self, group_or_id: str) -> int:
        return 3


@asynccontextmanager
async def running_services(path: Path, options: Mapping[str, str] | None = None) -> AsyncIterator[Services]:
    config = NodeConfig.load(None, {"offsets.topic.num.partitions": "5", **(options or {})})
    node = Node(path, settings=controller_settings(config, "", lambda: [1]), syncing=False)
    settings = DynamicConfig(config)
    node.followers.append(settings.on_image)
    await node.start()
    loop, rng = asyncio.get_running_loop(), random.Random(1)

    async def ask_here(request: Any, version: int) -> Any:
        return await dispatcher.call(request, version)

    channel = ControllerChannel(
        is_local=lambda: True, local=ask_here, leader=lambda: None, exchange=cast(Any, None), loop=loop, rng=rng
    )

    def broker_epoch() -> int:
        return node.controller.image.brokers[1].epoch

    services = Services(
        config=config,
        settings=settings,
        node_id=1,
        cluster_id=node.directory.cluster_id,
        clock_ms=lambda: 0,
        image=lambda: node.controller.image,
        partitions=cast(Any, None),
        controller=node.controller,
        groups=cast(Any, Coordinators()),
        transactions=cast(Any, Coordinators()),
        producer_ids=ProducerIdManager(controller_blocks(channel, 1, broker_epoch)),
        rng=rng,
        controller_channel=channel,
        raft=node.raft,
        broker_epoch=broker_epoch,
    )
    dispatcher = Dispatcher(services, CONTROLLER_APIS)
    yield services
    await node.stop()


def context(version: int, *, listener: str = "PLAINTEXT") -> RequestContext:
    return RequestContext(0, version, 1, "test", "127.0.0.1", listener)


def encoded(response: Any, version: int) -> Any:
    """As a client of that version sees it: what the version cannot carry must not be there."""
    if isinstance(response, EncodedAnswer):
        return MetadataResponse.decode(response.body, version)
    return type(response).decode(response.encode(version), version)


def at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    """What a handler answers that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
