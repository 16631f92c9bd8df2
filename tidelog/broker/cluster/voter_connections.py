"""The connections on which the voters of the metadata quorum fetch: these fetches wait in a queue of their own.

Whatever connects may name a voter's id. So a voter's places in that queue belong to the connections on which its
fetches were answered first; all others wait in the common queue. Invariants: at most VOTER_CONNECTIONS_MAX connections
have places of one voter; another connection takes a place only after PLACE_MS without an answer, or, from the same
host, after the place's connection has closed: a voter that connects again must not race with strangers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidelog.broker.network.request import Peer
from tidelog.replication.quorum.raft.voters import ReplicaKey

if TYPE_CHECKING:
    from tidelog.protocol.messages.fetch import FetchRequest, FetchResponse
    from tidelog.replication.quorum.raft.voters import VoterSet

# The second one is for a voter that connects again, from wherever, before the first has closed or was silent for long.
VOTER_CONNECTIONS_MAX = 2
# A voter fetches twice a second. A host that loses its power closes no connection.
PLACE_MS = 10_000.0
_REPLICA_STATE_FROM = 15  # the version of Fetch


class Quorum(Protocol):
    """The interface of `replication.quorum.driver.RaftNode` for the places."""

    def voters(self) -> VoterSet: ...
    def now_ms(self) -> float: ...


class VoterConnections:
    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self._places: dict[int, dict[Peer, float]] = {}  # by voter, with the times of the last answers

    def on_fetch(self, connection: Peer | None, request: FetchRequest, response: FetchResponse, version: int) -> None:
        """A fetch of the metadata log has its answer."""
        if connection is None or not _is_accepted(response):
            return
        voter_id = request.replica_state.replica_id if version >= _REPLICA_STATE_FROM else request.replica_id
        key = ReplicaKey(voter_id, request.topics[0].partitions[0].replica_directory_id)
        if self._quorum.voters().includes(key):
            self._take(self._places.setdefault(voter_id, {}), connection, self._quorum.now_ms())

    def _take(self, places: dict[Peer, float], connection: Peer, now_ms: float) -> None:
        if connection not in places:
            if connection.is_of_voter:
                return  # it has a place of another voter
            for other, answered_ms in list(places.items()):
                if now_ms - answered_ms > PLACE_MS or (other.host == connection.host and other.is_gone):
                    other.is_of_voter = False
                    del places[other]
            if len(places) >= VOTER_CONNECTIONS_MAX:
                return
            connection.is_of_voter = True
        places[connection] = now_ms


def _is_accepted(response: FetchResponse) -> bool:
    """Whether the fetch was answered, with records or without, and its log is a part of the leader's."""
    if response.error_code or not response.responses:
        return False
    data = response.responses[0].partitions[0]
    return data.error_code == 0 and data.diverging_epoch.epoch < 0 and data.snapshot_id.epoch < 0
