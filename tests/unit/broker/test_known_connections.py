"""Which connections have the places of voters and brokers in the queues of their fetches and heartbeats."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tidelog.broker.cluster.known_connections import CONNECTIONS_MAX, PLACE_MS, KnownConnections
from tidelog.broker.network.request import Peer
from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import (
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
    ReplicaState,
    SnapshotId,
)
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet

DIRECTORIES = {1: b"1" * 16, 2: b"2" * 16}


class Connection:
    def __init__(self, host: str = "10.0.0.1") -> None:
        self.host = host
        self.known_key = -1
        self.is_gone = False


class Controller:
    def __init__(self) -> None:
        self.now = 0.0
        self.places = KnownConnections(self)

    def voters(self) -> VoterSet:
        return VoterSet(Voter(ReplicaKey(each, directory)) for each, directory in DIRECTORIES.items())

    def now_ms(self) -> float:
        return self.now

    def beat(self, connection: Connection, broker_id: int = 1) -> bool:
        """Whether the connection has a place then."""
        self.places.on_heartbeat(cast(Peer, connection), broker_id)
        return connection.known_key == ApiKey.BROKER_HEARTBEAT

    def fetch(
        self, connection: Connection, voter_id: int = 1, directory: bytes = b"", version: int = 18, **data: Any
    ) -> bool:
        """Whether the connection has a place then."""
        named = FetchPartition(replica_directory_id=directory or DIRECTORIES[voter_id])
        request = FetchRequest(topics=[FetchTopic(partitions=[named])])
        if version >= 15:
            request.replica_state = ReplicaState(replica_id=voter_id)
        else:
            request.replica_id = voter_id
        response = FetchResponse(responses=[FetchableTopicResponse(partitions=[PartitionData(**data)])])
        self.places.on_fetch(cast(Peer, connection), request, response, version)
        return connection.known_key == ApiKey.FETCH


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def first(controller: Controller) -> list[Connection]:
    """They have all the places of voter 1."""
    connections = [Connection() for _ in range(CONNECTIONS_MAX)]
    assert all(controller.fetch(each) for each in connections)
    return connections


@pytest.mark.parametrize("version", [12, 14, 15, 18])
def test_those_that_come_later_take_no_place_of_a_voter_that_fetches(
    controller: Controller, first: list[Connection], version: int
) -> None:
    for _ in range(5):
        controller.now += PLACE_MS
        assert all(controller.fetch(each, version=version) for each in first)
        assert not controller.fetch(Connection(), version=version)
    assert controller.fetch(Connection(), 2, version=version)


def test_a_stranger_has_the_places_of_one_voter_only(controller: Controller, first: list[Connection]) -> None:
    assert controller.fetch(first[0], 2)
    assert all(controller.fetch(Connection(), 2) for _ in range(CONNECTIONS_MAX))
    controller.now += PLACE_MS
    controller.fetch(first[0], 2)
    controller.now += 1
    assert controller.fetch(Connection(), 1)  # it fetches as voter 1 no longer
    assert first[0].known_key == -1


@pytest.mark.parametrize(
    "data",
    [
        {"error_code": ErrorCode.FENCED_LEADER_EPOCH},
        {"diverging_epoch": EpochEndOffset(epoch=1, end_offset=1)},
        {"snapshot_id": SnapshotId(epoch=1, end_offset=1)},
    ],
)
def test_a_fetch_that_is_refused_takes_no_place(controller: Controller, data: dict[str, Any]) -> None:
    assert not controller.fetch(Connection(), **data)


def test_a_fetch_that_is_refused_as_a_whole_takes_no_place(controller: Controller) -> None:
    connection = Connection()
    response = FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
    controller.places.on_fetch(cast(Peer, connection), FetchRequest(), response, 18)
    assert connection.known_key == -1


@pytest.mark.parametrize(("voter_id", "directory"), [(3, b"3" * 16), (1, b"another" * 2 + b"!!")])
def test_another_replica_takes_no_place(controller: Controller, voter_id: int, directory: bytes) -> None:
    assert not controller.fetch(Connection(), voter_id, directory)


def test_a_voter_that_connects_again_does_not_race_with_other_hosts(
    controller: Controller, first: list[Connection]
) -> None:
    """Thousands of them fetch in its name until its first fetch is served."""
    first[0].is_gone = True
    controller.now += PLACE_MS
    controller.fetch(first[1])
    assert not controller.fetch(Connection("10.0.0.2"))
    again = Connection()
    assert controller.fetch(again)
    assert first[0].known_key == -1
    again.is_gone = True
    controller.now += PLACE_MS + 1
    assert controller.fetch(Connection("10.0.0.2"))


def test_the_heartbeats_of_a_broker_have_places_of_their_own(controller: Controller, first: list[Connection]) -> None:
    connections = [Connection() for _ in range(CONNECTIONS_MAX)]
    assert all(controller.beat(each) for each in connections)
    assert not controller.beat(Connection())
    assert controller.beat(Connection(), 2)
    assert not controller.beat(first[0], 3)
    assert not controller.fetch(connections[0], 2)
    controller.places.on_heartbeat(None, 4)  # of this process
