"""Which closed connection was the last one of a broker's heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from tidelog.broker.cluster.heartbeats import HeartbeatConnections
from tidelog.broker.network.request import Peer


class Connection:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def close(self) -> None:
        for callback in self.callbacks:
            callback()


class Heartbeats:
    def __init__(self) -> None:
        self.lost: list[tuple[int, int]] = []
        self.connections = HeartbeatConnections(lambda *broker: self.lost.append(broker))

    def beat(self, connection: Connection, broker_id: int, broker_epoch: int) -> None:
        self.connections.on_heartbeat(cast(Peer, connection), broker_id, broker_epoch)


@pytest.fixture
def heartbeats() -> Heartbeats:
    return Heartbeats()


class CountedId(int):
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedId.comparisons += 1
        return int.__eq__(self, cast(int, other))

    __hash__ = int.__hash__


def test_the_last_of_several_connections_ends_the_broker(heartbeats: Heartbeats) -> None:
    first, second = Connection(), Connection()
    for connection in (first, second, first, second):
        heartbeats.beat(connection, 1, 7)
    first.close()
    assert not heartbeats.lost
    second.close()
    assert heartbeats.lost == [(1, 7)]


def test_a_connection_counts_for_the_last_epoch_that_it_named(heartbeats: Heartbeats) -> None:
    first, second, third = Connection(), Connection(), Connection()
    heartbeats.beat(first, 1, 7)
    heartbeats.beat(second, 1, 7)
    heartbeats.beat(first, 1, 8)
    second.close()
    assert heartbeats.lost == [(1, 7)]  # the first one is of another epoch now
    heartbeats.beat(third, 1, 7)
    first.close()
    third.close()
    assert heartbeats.lost == [(1, 7), (1, 8), (1, 7)]
    assert len(first.callbacks) == 1


def test_a_close_does_not_compare_with_every_other_connection(heartbeats: Heartbeats) -> None:
    connections = [Connection() for _ in range(300)]
    for number, connection in enumerate(connections):
        heartbeats.beat(connection, CountedId(number), 1)
    CountedId.comparisons = 0
    for connection in connections:
        connection.close()
    assert len(heartbeats.lost) == 300
    assert CountedId.comparisons < 10 * 300
