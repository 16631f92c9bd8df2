"""Other brokers for the tests of what talks to them: an image of who leads what, and answers as set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidelog.replication.controller.metadata.image import MetadataImage, PartitionImage, TopicImage
from tidelog.replication.ports import Endpoint, PeerUnreachable

OWN_ID = 1


class Cluster:
    """`leaders`: partition -> broker, -1 for none. `answer(broker_id, request)` is what a broker answers."""

    def __init__(self, leaders: dict[tuple[str, int], int]) -> None:
        self.image = MetadataImage()
        for (topic, index), leader in leaders.items():
            self.lead(topic, index, leader)
        self.answer: Callable[[int, Any], Any] = lambda broker_id, request: None
        self.sent: list[tuple[int, Any, str]] = []
        self.unknown_brokers: set[int] = set()
        self.held: dict[int, asyncio.Event] = {}

    def lead(self, topic: str, index: int, leader: int) -> None:
        found = self.image.topics_by_name.setdefault(topic, TopicImage(topic, topic.encode().ljust(16)))
        found.partitions[index] = PartitionImage((leader,), (leader,), leader)

    def delete(self, topic: str) -> None:
        del self.image.topics_by_name[topic]

    def endpoint_of(self, broker_id: int) -> Endpoint | None:
        return None if broker_id in self.unknown_brokers else Endpoint("broker", broker_id)

    def hold(self, broker_id: int) -> asyncio.Event:
        """Its answers wait until the event is set."""
        event = self.held[broker_id] = asyncio.Event()
        return event

    async def exchange(self, endpoint: Endpoint, request: Any, version: int, *, timeout_ms: int, lane: str = "") -> Any:
        self.sent.append((endpoint.port, request, lane))
        await asyncio.sleep(0)
        if endpoint.port in self.held:
            await self.held[endpoint.port].wait()
        answer = self.answer(endpoint.port, request)
        if answer is None:
            raise PeerUnreachable("cut off")
        return answer
