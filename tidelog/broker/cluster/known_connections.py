"""The connections on which voters of the metadata quorum fetch, and brokers send heartbeats: these requests wait in
queues of their own.

Whatever connects may name any node. So a node's places in such a queue belong to the connections on which its
requests were accepted first; all others wait in the common queue. Invariants: at most CONNECTIONS_MAX connections have
places of one node in a queue; another connection takes a place only after PLACE_MS without an answer, or, from the same
host, after the place's connection has closed: a node that connects again must not race with strangers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidelog.broker.network.request import Peer
from tidelog.protocol.api import ApiKey
from tidelog.replication.quorum.raft.voters import ReplicaKey

if TYPE_CHECKING:
    from tidelog.protocol.messages.fetch import FetchRequest, FetchResponse
    from tidelog.replication.quorum.raft.voters import VoterSet

# The second one is for a node that connects again, from wherever, before the first has closed or was silent for long.
CONNECTIONS_MAX = 2
# A voter fetches twice a second, a broker has a session of 9 s. A host that loses its power closes no connection.
PLACE_MS = 30_000.0
_REPLICA_STATE_FROM = 15  # the version of Fetch


class Quorum(Protocol):
    """The interface of `replication.quorum.driver.RaftNode` for the places."""

    def voters(self) -> VoterSet: ...
    def now_ms(self) -> float: ...


class KnownConnections:
    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        # By API and node, with the times of the last answers.
        self._places: dict[tuple[int, int], dict[Peer, float]] = {}

    def on_fetch(self, connection: Peer | None, request: FetchRequest, response: FetchResponse, version: int) -> None:
        """A fetch of the metadata log has its answer."""
        if connection is None or not _is_accepted(response):
            return
        voter_id = request.replica_state.replica_id if version >= _REPLICA_STATE_FROM else request.replica_id
        key = ReplicaKey(voter_id, request.topics[0].partitions[0].replica_directory_id)
        if self._quorum.voters().includes(key):
            self._take(ApiKey.FETCH, voter_id, connection)

    def on_heartbeat(self, connection: Peer | None, broker_id: int) -> None:
        """A heartbeat in the present epoch of a registered broker has its answer."""
        if connection is not None:
            self._take(ApiKey.BROKER_HEARTBEAT, broker_id, connection)

    def _take(self, api_key: int, node_id: int, connection: Peer) -> None:
        places, now_ms = self._places.setdefault((api_key, node_id), {}), self._quorum.now_ms()
        if connection not in places:
            if connection.known_key >= 0:
                return  # it has a place of another node, or in another queue
            for other, answered_ms in list(places.items()):
                if now_ms - answered_ms > PLACE_MS or (other.host == connection.host and other.is_gone):
                    other.known_key = -1
                    del places[other]
            if len(places) >= CONNECTIONS_MAX:
                return
            connection.known_key = api_key
        places[connection] = now_ms


def _is_accepted(response: FetchResponse) -> bool:
    """Whether the fetch was answered, with records or without, and its log is a part of the leader's."""
    if response.error_code or not response.responses:
        return False
    data = response.responses[0].partitions[0]
    return data.error_code == 0 and data.diverging_epoch.epoch < 0 and data.snapshot_id.epoch < 0
