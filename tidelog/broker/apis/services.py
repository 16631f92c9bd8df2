"""The parts of a node that request handlers may use.

A handler in `broker/apis/` is called as `handle(services, context, request)` and returns the response message, a
`request.Deferred` that is completed later from the loop thread, or (cold APIs only) is a coroutine function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidelog.broker.cluster.heartbeats import HeartbeatConnections
from tidelog.broker.cluster.known_connections import KnownConnections
from tidelog.broker.cluster.lost_brokers import LostBrokers
from tidelog.broker.cluster.metadata_answers import MetadataAnswers
from tidelog.broker.cluster.topic_creation import TopicCreator
from tidelog.broker.network.counters import RequestCounters
from tidelog.broker.scheduling.fair_scheduler import FairScheduler

if TYPE_CHECKING:
    import random

    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.broker.cluster.producer_ids import ProducerIdManager
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.coordinators.group.service import GroupCoordinatorService
    from tidelog.broker.coordinators.marker_writer import MarkerWriter
    from tidelog.broker.coordinators.transaction.service import TransactionCoordinatorService
    from tidelog.broker.coordinators.transaction_verifier import CoordinatorVerifier
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.replica_moves import ReplicaMoves
    from tidelog.broker.scheduling.inspections import Inspections
    from tidelog.replication.controller.controller import Controller
    from tidelog.replication.controller.metadata.image import MetadataImage
    from tidelog.replication.quorum.driver import RaftNode


class _MissingPart:
    """A placeholder for a part that this node does not have. No API of the node uses the part; a use is a bug and
    raises AssertionError.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AssertionError(f"this node has no {self._name}, and {attribute} of it was asked for")


def missing(name: str) -> Any:
    """A placeholder for a part of `Services` that a node without the part's role lacks."""
    return _MissingPart(name)


@dataclass(slots=True)
class Services:
    """The parts of a node that handlers may use; `node.py`, the only composition root, builds it."""

    config: NodeConfig  # the values at the start of the node, for keys that cannot change at run time
    settings: DynamicConfig  # the values in force now, for keys that can
    node_id: int
    cluster_id: str
    clock_ms: Callable[[], int]
    image: Callable[[], MetadataImage]
    partitions: Partitions
    controller: Controller | None
    groups: GroupCoordinatorService
    rng: random.Random
    controller_channel: ControllerChannel
    raft: RaftNode
    broker_epoch: Callable[[], int]
    # The parts of nodes with the broker role; the APIs of a node with only the controller role do not use them.
    producer_ids: ProducerIdManager = field(default_factory=lambda: missing("producer ids"))
    transactions: TransactionCoordinatorService = field(default_factory=lambda: missing("transactions"))
    directories: LogDirectories = field(default_factory=lambda: missing("directories"))
    moves: ReplicaMoves = field(default_factory=lambda: missing("moves"))
    markers: MarkerWriter = field(default_factory=lambda: missing("markers"))
    verifier: CoordinatorVerifier = field(default_factory=lambda: missing("verifier"))
    lost_brokers: LostBrokers = field(default_factory=LostBrokers)
    metadata_answers: MetadataAnswers = field(default_factory=MetadataAnswers)
    requests: RequestCounters = field(default_factory=RequestCounters)
    inspections: Inspections = field(default_factory=lambda: missing("inspections"))
    scheduler: FairScheduler = field(default_factory=lambda: FairScheduler(asyncio.get_running_loop().call_soon))
    # Answers a request in an envelope.
    embedded: Callable[[bytes, str], Awaitable[bytes]] = field(init=False, repr=False)
    topic_creation: TopicCreator = field(init=False, repr=False)
    heartbeats: HeartbeatConnections = field(init=False, repr=False)
    known_connections: KnownConnections = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.topic_creation = TopicCreator(self.config, self.controller_channel)
        self.heartbeats = HeartbeatConnections(self._broker_connection_lost)
        self.known_connections = KnownConnections(self.raft)

    def quorum_leader_id(self) -> int:
        """The present leader of the metadata quorum, -1 if unknown."""
        return self.raft.leader_id

    def _broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None:
        if self.controller is not None:
            self.controller.broker_connection_lost(broker_id, broker_epoch)
