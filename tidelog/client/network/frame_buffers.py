"""Memory for large responses, used again when no view of an earlier response is left.

New memory costs as much as the bytes that are read into it: it is cleared, page by page. Invariant: a
buffer is used again only when nothing refers to its bytes, so record batches may remain views of it.
"""

from __future__ import annotations

_SPARE_BUFFERS_MAX = 3
"""Two responses that are not read to the end, and one that arrives."""
_KEPT_BYTES_MAX = 8 * 1024 * 1024
_ROUNDED_TO_BYTES = 256 * 1024
"""So that a buffer fits later responses of about the same size."""


class FrameBuffers:
    """The buffers of one connection."""

    def __init__(self) -> None:
        self._spare_buffers: list[bytearray] = []

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of this size, with any content. It is in use as long as a view of it exists."""
        for buffer in self._spare_buffers:
            if len(buffer) >= size_bytes and _is_free(buffer):
                return memoryview(buffer)[:size_bytes]
        if size_bytes > _KEPT_BYTES_MAX:
            return memoryview(bytearray(size_bytes))
        buffer = bytearray(-(-size_bytes // _ROUNDED_TO_BYTES) * _ROUNDED_TO_BYTES)
        self._spare_buffers.append(buffer)
        if len(self._spare_buffers) > _SPARE_BUFFERS_MAX:
            del self._spare_buffers[0]
        return memoryview(buffer)[:size_bytes]


def _is_free(buffer: bytearray) -> bool:
    """Whether no view of the buffer exists: only then may its size change."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
