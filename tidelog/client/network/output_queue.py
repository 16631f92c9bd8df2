"""The bytes that one connection has to send: pieces in order, not copied on their way to the socket.

`transport.write` copies what the socket does not take at once, and takes one piece a system call.
Invariants: bytes leave in the order of `write`. While the transport holds bytes, every piece waits
here, so the socket is written to directly only when no earlier bytes wait in the transport. A piece
must not change before it is sent.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from itertools import islice

Buffer = bytes | bytearray | memoryview

_writev = getattr(os, "writev", None)  # not on Windows
_PIECES_PER_CALL = 512
"""Below the least IOV_MAX of the platforms."""
_WAITING_PART_BYTES = 4096
"""What the transport gets, and copies, to wait for a socket that is full."""
_PART_BYTES = 256 * 1024
"""What the transport gets where nothing is written to the socket directly."""
_LARGE_BYTES = 16 * 1024


class OutputQueue:
    """The output of one connection. The protocol passes `pause_writing` and `resume_writing` on."""

    def __init__(self, transport: asyncio.Transport) -> None:
        # The transport pauses the protocol as soon as the socket does not take everything.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        socket = transport.get_extra_info("socket")
        # Without a socket of plain bytes (TLS, a simulated network) everything goes through the transport.
        is_plain = socket is not None and transport.get_extra_info("ssl_object") is None
        self.descriptor: int = socket.fileno() if is_plain and _writev is not None else -1
        """That of a socket of plain bytes, -1 otherwise."""
        self._part_bytes = _PART_BYTES if self.descriptor < 0 else _WAITING_PART_BYTES
        self._pieces: deque[memoryview] = deque()
        self._is_paused = False
        self.size_bytes = 0
        """The bytes that wait here."""

    @property
    def is_closing(self) -> bool:
        """Whether the descriptor may belong to another connection by now."""
        return self._transport.is_closing()

    def write(self, pieces: list[Buffer]) -> None:
        """Send the pieces, or keep them until the socket takes them."""
        if len(pieces) == 1 and not self._is_paused and len(pieces[0]) < _LARGE_BYTES:
            self._transport.write(pieces[0])
            return
        for piece in pieces:
            if piece:  # an empty one, as behind the records of an old version, would never be written
                self._pieces.append(memoryview(piece))
                self.size_bytes += len(piece)
        self._flush()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._flush()

    def drop(self) -> None:
        """Forget what is not sent."""
        self._pieces.clear()
        self.size_bytes = 0

    def pass_to_transport(self) -> None:
        """Give all bytes to the transport, which sends them before it closes."""
        for piece in self._pieces:
            self._transport.write(piece)
        self.drop()

    def _flush(self) -> None:
        while self._pieces and not self._is_paused:
            if self.is_closing:
                self.drop()
                return
            self._write_directly()
            if self._pieces:
                part = self._pieces[0][: self._part_bytes]
                self._remove(len(part))
                self._transport.write(part)  # pauses until the socket takes more, or reports its error

    def _write_directly(self) -> None:
        """Write to the socket what it takes now."""
        if _writev is None or self.descriptor < 0:
            return
        while self._pieces:
            try:
                written: int = _writev(self.descriptor, list(islice(self._pieces, _PIECES_PER_CALL)))
            except OSError:  # also when it takes nothing now
                return
            self._remove(written)

    def _remove(self, size_bytes: int) -> None:
        self.size_bytes -= size_bytes
        while size_bytes:
            piece = self._pieces[0]
            if len(piece) > size_bytes:
                self._pieces[0] = piece[size_bytes:]
                return
            size_bytes -= len(piece)
            self._pieces.popleft()
