"""Asks another voter for its epoch and records, whatever its role: for repairs without a leader, or that need every
voter.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tidelog.protocol.errors import KafkaError
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import wire
from tidelog.replication.quorum.raft.messages import FetchAnswer, FetchAsk
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.voters import ReplicaKey

logger = logging.getLogger("tidelog.quorum")


class AskingNode(Protocol):
    """The interface of `driver.RaftNode` for the requests."""

    raft: Raft
    settings: QuorumSettings
    exchange: Exchange


async def fetch_from_voter(
    node: AskingNode, cluster_id: str, endpoint: Endpoint, bytes_max: int, purpose: str, *, offset: int | None = None
) -> FetchAnswer | None:
    """The voter's answer with its records from `offset` on, without one from this log's end on: at most those of one of
    its segments. None if it does not answer; then `purpose` is logged.
    """
    raft, settings = node.raft, node.settings
    replica = ReplicaKey(wire.REPAIR_REPLICA_ID, raft.own.directory_id)
    offset = raft.log.end_offset if offset is None else offset
    ask = FetchAsk(replica, raft.epoch, offset, raft.log.last_epoch, -1, 0)
    request = wire.request_of(ask, cluster_id, settings.own_endpoints, bytes_max)
    try:
        response = await node.exchange(
            endpoint, request, wire.VERSIONS[FetchAsk], timeout_ms=settings.request_timeout_ms, lane="raft-repair"
        )
        answer = wire.answer_of(ask, response)
    except (PeerUnreachable, KafkaError) as error:
        logger.info("%s does not help with %s: %s", endpoint, purpose, error)
        return None
    assert isinstance(answer, FetchAnswer)
    return answer
