"""Receive buffers of connections: their sizes, their memory, and the bytes per read.

Invariant: the buffer of a large request grows without a copy, with the received bytes and not with the announced size.
"""

from __future__ import annotations

import mmap

# A connection starts with the smallest buffer and returns to it when idle, because most connections send little. One
# that fills it gets the usual buffer. Beyond the last size a buffer is a map: its pages cost nothing until used.
BUFFER_SMALLEST_BYTES = 1024
BUFFER_USUAL_BYTES = 16 * 1024
BUFFER_ON_HEAP_MAX = 256 * 1024
# The bound of one read of a large request, which blocks the loop. A read of the second size or more counts as work of
# its connection; most of its time goes into new memory pages.
READ_BYTES_MAX = 256 * 1024
READ_LARGE_BYTES = 64 * 1024
# Buffers up to this size, for batches of usual sizes, are filled with as few reads as possible.
READ_UNBOUNDED_BYTES_MAX = 4 * 1024 * 1024
READ_S_PER_BYTE = 0.75e-9


def new_buffer(capacity_bytes: int, wanted_bytes: int = 0) -> bytearray | mmap.mmap:
    """A new buffer. A large one can grow to `wanted_bytes` without a copy."""
    if capacity_bytes <= BUFFER_ON_HEAP_MAX:
        return bytearray(capacity_bytes)
    size_bytes = max(capacity_bytes, 1 << (wanted_bytes - 1).bit_length())
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def read_at_once(capacity_bytes: int, late: bool) -> int:
    """The bound of one read into a buffer above READ_LARGE_BYTES. `late`: this turn of the loop is already long."""
    if late:
        return READ_LARGE_BYTES
    return READ_BYTES_MAX if capacity_bytes > READ_UNBOUNDED_BYTES_MAX else capacity_bytes
