"""The parts of a node that request handlers may use.

A handler in `broker/apis/` is called as `handle(services, context, request)` and returns the response message, a
`request.Deferred` that is completed later from the loop thread, or (cold APIs only) is a coroutine function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidelog.broker.heartbeats import Heartbeats
from tidelog.broker.producer_ids import ProducerIds
from tidelog.broker.topic_creation import TopicCreation

if TYPE_CHECKING:
    import random

    from tidelog.broker.config import NodeConfig
    from tidelog.broker.coordinators.group.service import GroupCoordinatorService
    from tidelog.broker.partitions import Partitions
    from tidelog.replication.controller.controller import Controller
    from tidelog.replication.controller.image import MetadataImage


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
    controller_channel: Any = None
    raft: Any = None
    producer_ids: ProducerIds = field(init=False)
    topic_creation: TopicCreation = field(init=False)
    heartbeats: Heartbeats = field(init=False)

    def __post_init__(self) -> None:
        self.producer_ids = ProducerIds(lambda: self.controller.allocate_producer_ids(self.node_id))
        self.topic_creation = TopicCreation(self.config, self.controller)
        self.heartbeats = Heartbeats(self._broker_connection_lost)

    def _broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None:
        controller: Any = self.controller
        if controller is not None:
            controller.broker_connection_lost(broker_id, broker_epoch)
