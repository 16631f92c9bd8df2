"""How many bytes must have come before the system wakes the reader of a socket.

A large response comes in many pieces. A reader that is woken for each runs the event loop a dozen times for 2 MiB; one
that is woken when much of it is there, twice. Invariant: the threshold is at most the bytes that are still expected,
so what is there is always read. Only Linux is known to keep it for poll and epoll; elsewhere nothing is set.
"""

from __future__ import annotations

import asyncio
import socket
import sys

_THRESHOLD_BYTES_MAX = 2 * 1024 * 1024
"""The system grows the socket's buffer to twice the threshold."""


class ReceiveThreshold:
    """The threshold of one connection: a byte, until a large frame is expected."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport.get_extra_info("socket") if sys.platform == "linux" else None
        self._bytes = 1

    def expect(self, remaining_bytes: int) -> None:
        """So many bytes of a frame are still to come; 0 when it is whole."""
        threshold = min(remaining_bytes, _THRESHOLD_BYTES_MAX) or 1
        if threshold < self._bytes or (self._bytes == 1 and threshold > 1):
            self._set(threshold)

    def _set(self, threshold: int) -> None:
        self._bytes = threshold
        if self._socket is not None:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)
            except OSError:
                self._socket = None  # closed
