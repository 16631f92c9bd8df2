"""The connections that carry brokers' heartbeats, so that the controller
notices at once when one closes.

A close is only a hint: the controller then probes the broker's port. A heartbeat of a newer broker
epoch replaces the older one. Each connection has one close callback.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.broker.network.request import Peer


class HeartbeatConnections:
    """`on_lost(broker_id, broker_epoch)` is called on the loop thread when the last connection of a
    broker epoch closes.
    """

    def __init__(self, on_lost: Callable[[int, int], None]) -> None:
        self._on_lost = on_lost
        self._by_connection: dict[Peer, tuple[int, int]] = {}

    def on_heartbeat(self, connection: Peer | None, broker_id: int, broker_epoch: int) -> None:
        if connection is None:
            return  # the broker of this process ends with the controller
        is_watched = connection in self._by_connection
        self._by_connection[connection] = (broker_id, broker_epoch)
        if not is_watched:
            connection.on_close(lambda: self._on_closed(connection))

    def _on_closed(self, connection: Peer) -> None:
        broker = self._by_connection.pop(connection)
        if broker not in self._by_connection.values():
            self._on_lost(*broker)
