"""Topics created because somebody asked for them: unknown names in Metadata, the group coordinator's topic.

One creation per name is under way at a time, and not more than a bounded number of them. Which settings an internal
topic gets is Kafka's (AutoTopicCreationManager).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import KafkaError
from tidelog.replication.controller.state import NewTopic

if TYPE_CHECKING:
    from tidelog.broker.config import NodeConfig
    from tidelog.broker.controller_channel import ControllerChannel

log = logging.getLogger("tidelog.topics")

GROUP_TOPIC = "__consumer_offsets"
CREATIONS_MAX = 10_000


class TopicCreation:
    def __init__(self, config: NodeConfig, controller: ControllerChannel) -> None:
        self._config = config
        self._controller = controller
        self._under_way: dict[str, asyncio.Task[KafkaError | None]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Create these topics, soon. Names already under way, or beyond the bound, are left for a later request."""
        for name in names:
            if name not in self._under_way and len(self._under_way) < CREATIONS_MAX:
                task = asyncio.get_running_loop().create_task(self._create(name), name=f"create topic {name}")
                self._under_way[name] = task

    async def ensure(self, name: str) -> None:
        """Create one topic and wait until it is there. Raises the KafkaError of the attempt."""
        self.start([name])
        task = self._under_way.get(name)
        error = await asyncio.shield(task) if task is not None else None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Wait for what is under way; nothing may be started any more."""
        await asyncio.gather(*self._under_way.values())

    async def _create(self, name: str) -> KafkaError | None:
        error: KafkaError | None = None
        try:
            error = (await self._controller.create_topics([self._topic(name)]))[name]
        except KafkaError as refused:
            error = refused
        finally:
            del self._under_way[name]
        if error is None:
            log.info("created topic %s on demand", name)
        else:
            log.warning("could not create topic %s on demand: %s", name, error)
        return error

    def _topic(self, name: str) -> NewTopic:
        config = self._config
        if name == GROUP_TOPIC:
            return NewTopic(
                name,
                config.integer("offsets.topic.num.partitions"),
                config.integer("offsets.topic.replication.factor"),
                configs=(
                    ("cleanup.policy", "compact"),
                    ("compression.type", "producer"),
                    ("segment.bytes", str(config.integer("offsets.topic.segment.bytes"))),
                ),
            )
        return NewTopic(name)
