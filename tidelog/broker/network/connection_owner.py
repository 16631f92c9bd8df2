"""What a connection asks of the server that accepted it: limits, order, and where its frames go.

`server.py` implements it; tests put their own in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

    from tidelog.broker.network.connection import KafkaConnection
    from tidelog.broker.network.request import Answer
    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler


class ConnectionOwner(Protocol):
    frame_bytes_max: int
    wakes: DeferredCallbacks
    turns: FairScheduler

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Answer: ...
    def connected(self, connection: KafkaConnection) -> bool: ...
    def disconnected(self, connection: KafkaConnection) -> None: ...
    def reserve_buffer(self, extra_bytes: int) -> bool: ...
    def not_read(self, connection: KafkaConnection) -> None: ...
    def widen(self, sock: socket.socket) -> None: ...
    def warn(self, kind: str, text: str) -> None: ...
