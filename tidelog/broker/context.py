"""What a request handler is given, and how it may answer later.

A handler in `broker/apis/` is called as `handle(services, context, request)` and returns the response message, a
`Deferred` that is completed later from the loop thread, or (cold APIs only) is a coroutine function. It holds no
socket and knows no connection: order, framing and encoding belong to `dispatch` and `connection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidelog.broker.producer_ids import ProducerIds
from tidelog.broker.topic_creation import TopicCreation

if TYPE_CHECKING:
    import random

    from tidelog.broker.config import NodeConfig
    from tidelog.broker.coordinators.group.service import GroupCoordinatorService
    from tidelog.broker.partitions import Partitions
    from tidelog.replication.controller.controller import Controller
    from tidelog.replication.controller.image import MetadataImage


class RequestContext:
    """Who asks, and in which version: the decoded request header plus the peer's address."""

    __slots__ = ("api_key", "api_version", "client_host", "client_id", "correlation_id", "listener_name")

    def __init__(
        self,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str | None,
        client_host: str,
        listener_name: str,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.listener_name = listener_name


class Deferred:
    """One answer that comes later: completed exactly once, on the loop thread.

    A plain callback rather than an asyncio future: completing it runs the connection's writer at once, so that a
    parked request costs no extra turn of the loop.
    """

    __slots__ = ("_on_complete", "exclusive", "response")

    def __init__(self, exclusive: bool = False) -> None:
        self.exclusive = exclusive  # the connection's next request waits until this one is answered
        self.response: Any = None
        self._on_complete: Callable[[Any], None] | None = None

    def complete(self, response: Any) -> None:
        assert self.response is None, "a request is answered once"
        self.response = response
        if self._on_complete is not None:
            self._on_complete(response)

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Called by dispatch, once; runs the callback at once if the answer is there already."""
        if self.response is not None:
            callback(self.response)
        else:
            self._on_complete = callback


@dataclass(slots=True)
class Services:
    """The parts of a node that handlers may use; put together by `node.py`, the one composition root."""

    config: NodeConfig
    node_id: int
    cluster_id: str
    clock_ms: Callable[[], int]
    image: Callable[[], MetadataImage]
    partitions: Partitions
    controller: Controller
    groups: GroupCoordinatorService
    rng: random.Random
    producer_ids: ProducerIds = field(init=False)
    topic_creation: TopicCreation = field(init=False)

    def __post_init__(self) -> None:
        self.producer_ids = ProducerIds(lambda: self.controller.allocate_producer_ids(self.node_id))
        self.topic_creation = TopicCreation(self.config, self.controller)
