"""Automatic creation of topics: unknown names in Metadata requests, and the coordinators' topics.

Invariant: one creation per name is under way at a time, and the number of creations is bounded. The
topics of one request are created together. An internal topic gets Kafka's settings
(AutoTopicCreationManager).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from tidelog.replication.controller.decisions.state import NewTopic

if TYPE_CHECKING:
    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.broker.config.node_config import NodeConfig

logger = logging.getLogger("tidelog.topics")

CREATIONS_MAX = 100
# The log line of a creation has at most this many names.
LOGGED_NAMES_MAX = 20
# A node that stops waits at most so long for the controller's answers.
FAREWELL_S = 1.0


class TopicCreator:
    def __init__(self, config: NodeConfig, controller: ControllerChannel) -> None:
        self._config = config
        self._controller = controller
        self._tasks: dict[str, asyncio.Task[dict[str, KafkaError | None]]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Start to create these topics. Skip names that are being created, and names beyond the
        bound.
        """
        room = CREATIONS_MAX - len(self._tasks)
        new_names = [name for name in dict.fromkeys(names) if name not in self._tasks][: max(0, room)]
        if new_names:
            description = new_names[0] if len(new_names) == 1 else f"{len(new_names)} topics"
            task = asyncio.get_running_loop().create_task(self._create(new_names), name=f"create {description}")
            self._tasks |= dict.fromkeys(new_names, task)

    async def ensure(self, name: str) -> None:
        """Create one topic and wait for it. Raises the KafkaError of the attempt."""
        self.start([name])
        task = self._tasks.get(name)
        error = (await asyncio.shield(task))[name] if task is not None else None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Wait for the creations under way, and end those that take long: without a controller a creation tries for
        half a minute, and the node waits for it to stop. The caller must not start more.
        """
        tasks = list(dict.fromkeys(self._tasks.values()))
        if tasks:
            await asyncio.wait(tasks, timeout=FAREWELL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _create(self, names: list[str]) -> dict[str, KafkaError | None]:
        errors: dict[str, KafkaError | None]
        try:
            errors = await self._controller.create_topics([self._topic(name) for name in names])
        except KafkaError as refusal:
            errors = dict.fromkeys(names, refusal)
        finally:
            for name in names:
                del self._tasks[name]
        created = [name for name in names if errors[name] is None]
        if created:
            logger.info(
                "created these topics automatically: %s",
                ", ".join(created[:LOGGED_NAMES_MAX])
                + ("" if len(created) <= LOGGED_NAMES_MAX else f" and {len(created) - LOGGED_NAMES_MAX} more"),
            )
        for name, error in errors.items():
            if error is not None and error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                errors[name] = None  # another broker created it at the same moment
        for name in [name for name in names if errors[name] is not None][:LOGGED_NAMES_MAX]:
            logger.warning("could not create topic %s automatically: %s", name, errors[name])
        return errors

    def _topic(self, name: str) -> NewTopic:
        config = self._config
        if name == OFFSETS_TOPIC:
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
        if name == TRANSACTIONS_TOPIC:
            return NewTopic(
                name,
                config.integer("transaction.state.log.num.partitions"),
                config.integer("transaction.state.log.replication.factor"),
                configs=(
                    ("cleanup.policy", "compact"),
                    ("compression.type", "uncompressed"),
                    ("min.insync.replicas", str(config.integer("transaction.state.log.min.isr"))),
                    ("segment.bytes", str(config.integer("transaction.state.log.segment.bytes"))),
                    ("unclean.leader.election.enable", "false"),
                ),
            )
        # What this broker's configuration does not set, the controller's does, which may be another node.
        keys = ("num.partitions", "default.replication.factor")
        partition_count, replication_factor = (config.integer(key) if config.is_set(key) else -1 for key in keys)
        return NewTopic(name, partition_count, replication_factor)
