"""Topics created because somebody asked for them: unknown names in Metadata, the group coordinator's topic.

One creation per name is under way at a time, and not more than a bounded number of them; what one request asks for is
created at once. Which settings an internal topic gets is Kafka's (AutoTopicCreationManager).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.decisions.state import NewTopic

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.broker.config.node_config import NodeConfig

logger = logging.getLogger("tidelog.topics")

GROUP_TOPIC = "__consumer_offsets"
CREATIONS_MAX = 100
# So many of them are named in the log.
NAMED_MAX = 20


class TopicCreation:
    def __init__(self, config: NodeConfig, controller: ControllerChannel) -> None:
        self._config = config
        self._controller = controller
        self._under_way: dict[str, asyncio.Task[dict[str, KafkaError | None]]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Create these topics, soon. Names already under way, or beyond the bound, are left for a later request."""
        room = CREATIONS_MAX - len(self._under_way)
        new = [name for name in dict.fromkeys(names) if name not in self._under_way][: max(0, room)]
        if new:
            what = new[0] if len(new) == 1 else f"{len(new)} topics"
            task = asyncio.get_running_loop().create_task(self._create(new), name=f"create {what}")
            self._under_way |= dict.fromkeys(new, task)

    async def ensure(self, name: str) -> None:
        """Create one topic and wait until it is there. Raises the KafkaError of the attempt."""
        self.start([name])
        task = self._under_way.get(name)
        error = (await asyncio.shield(task))[name] if task is not None else None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Wait for what is under way; nothing may be started any more."""
        await asyncio.gather(*dict.fromkeys(self._under_way.values()))

    async def _create(self, names: list[str]) -> dict[str, KafkaError | None]:
        errors: dict[str, KafkaError | None]
        try:
            errors = await self._controller.create_topics([self._topic(name) for name in names])
        except KafkaError as refused:
            errors = dict.fromkeys(names, refused)
        finally:
            for name in names:
                del self._under_way[name]
        created = [name for name in names if errors[name] is None]
        if created:
            logger.info(
                "created on demand: %s",
                ", ".join(created[:NAMED_MAX])
                + ("" if len(created) <= NAMED_MAX else f" and {len(created) - NAMED_MAX} more"),
            )
        for name, error in errors.items():
            if error is not None and error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                errors[name] = None  # another broker was asked for it at the same moment
        for name in [name for name in names if errors[name] is not None][:NAMED_MAX]:
            logger.warning("could not create topic %s on demand: %s", name, errors[name])
        return errors

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
        # This broker's own numbers: the controller, which may be another node, has others for who gives none.
        return NewTopic(name, config.integer("num.partitions"), config.integer("default.replication.factor"))
