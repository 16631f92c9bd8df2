"""The connections that carry brokers' heartbeats, so that the controller
notices at once when one closes.

A close is only a hint: the controller then probes the broker's port. A heartbeat of a newer broker
epoch replaces the older one. Each connection has one close callback. Invariant: a close costs the same
however many connections there are, because whatever connects may send heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.broker.network.request import Peer

Broker = tuple[int, int]  # id and epoch


class HeartbeatConnections:
    """`on_lost(broker_id, broker_epoch)` is called on the loop thread when the last connection of a
    broker epoch closes.
    """

    def __init__(self, on_lost: Callable[[int, int], None]) -> None:
        self._on_lost = on_lost
        self._by_connection: dict[Peer, Broker] = {}
        self._counts: dict[Broker, int] = {}

    def on_heartbeat(self, connection: Peer | None, broker_id: int, broker_epoch: int) -> None:
        if connection is None:
            return  # the broker of this process ends with the controller
        broker, earlier = (broker_id, broker_epoch), self._by_connection.get(connection)
        if broker == earlier:
            return
        self._by_connection[connection] = broker
        self._counts[broker] = self._counts.get(broker, 0) + 1
        if earlier is None:
            connection.on_close(lambda: self._on_closed(connection))
        else:
            self._is_last(earlier)

    def _on_closed(self, connection: Peer) -> None:
        broker = self._by_connection.pop(connection)
        if self._is_last(broker):
            self._on_lost(*broker)

    def _is_last(self, broker: Broker) -> bool:
        """Count one connection of this broker less. Returns whether it was the last."""
        count = self._counts[broker] - 1
        if count:
            self._counts[broker] = count
        else:
            del self._counts[broker]
        return not count
