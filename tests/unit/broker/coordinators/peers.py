"""Other brokers for the tests of what talks to them: an image of who leads what, and answers as set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidelog.protocol.api import SERVED
from tidelog.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
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
        self.served: dict[int, dict[int, int]] = {}
        """The newest versions of APIs that a broker of another release serves. It closes a connection upon a newer."""
        self.versions: list[tuple[int, int]] = []
        """Of the requests that were answered: broker and version."""

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

    async def exchange(self, endpoint: Endpoint, request: Any, version: int, *, lane: str = "", **_: Any) -> Any:
        served = self.served.get(endpoint.port, {})
        if isinstance(request, ApiVersionsRequest):
            newest = served or {int(key): versions.stop - 1 for key, versions in SERVED.items()}
            keys = [ApiVersion(api_key=key, min_version=0, max_version=version) for key, version in newest.items()]
            return ApiVersionsResponse(api_keys=keys)
        if served and version > served.get(request.API_KEY, -1):
            raise PeerUnreachable("the connection was closed")
        request.encode(version)
        self.versions.append((endpoint.port, version))
        self.sent.append((endpoint.port, request, lane))
        await asyncio.sleep(0)
        if endpoint.port in self.held:
            await self.held[endpoint.port].wait()
        answer = self.answer(endpoint.port, request)
        if answer is None:
            raise PeerUnreachable("cut off")
        return answer
