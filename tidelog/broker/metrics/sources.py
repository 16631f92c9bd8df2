"""The parts of a node that a scrape reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.broker.apis.dispatch import Dispatcher
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.network.counters import RequestCounters
    from tidelog.broker.network.server import Server


@dataclass(slots=True)
class Sources:
    """The parts that a scrape reads; `broker` is None on a node without that role, `servers` are by
    role.
    """

    config: NodeConfig
    cluster_id: str
    metadata: MetadataSide
    broker: BrokerSide | None
    servers: dict[str, Server]
    dispatchers: list[Dispatcher]
    requests: RequestCounters
