"""Which connections carry heartbeats of brokers, so that one that closes is heard of at once.

Closing is only a hint: the controller still asks the broker's port. A heartbeat of a newer epoch of the same broker
takes the place of the older; each connection is watched once.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.broker.network.request import Peer


class Heartbeats:
    """`on_lost(broker_id, broker_epoch)` is called on the loop thread when a connection that carried them closes."""

    def __init__(self, on_lost: Callable[[int, int], None]) -> None:
        self._on_lost = on_lost
        self._by_connection: dict[Peer, tuple[int, int]] = {}

    def carried_by(self, connection: Peer | None, broker_id: int, broker_epoch: int) -> None:
        if connection is None:
            return  # a broker in this process ends with it
        watched = connection in self._by_connection
        self._by_connection[connection] = (broker_id, broker_epoch)
        if not watched:
            connection.on_close(lambda: self._closed(connection))

    def _closed(self, connection: Peer) -> None:
        self._on_lost(*self._by_connection.pop(connection))
