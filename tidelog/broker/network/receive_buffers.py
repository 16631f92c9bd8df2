"""How large the buffer is that a connection receives in, what it is made of, and how much is read at once.

Invariant: a buffer that a large request fills grows without being copied, by what has arrived, not by what is claimed.
"""

from __future__ import annotations

import mmap

# As it begins, and again when the connection was idle: most connections of many say little. What fills it gets the
# usual one; beyond the last size it is a map, whose pages cost nothing until bytes arrive in them.
BUFFER_SMALLEST_BYTES = 1024
BUFFER_USUAL_BYTES = 16 * 1024
BUFFER_ON_HEAP_MAX = 256 * 1024
# Of a large request, with one system call: nobody else is served meanwhile. What is read in a piece of the second size
# or more took its time, most of it that of the memory, which is new.
READ_BYTES_MAX = 256 * 1024
READ_LARGE_BYTES = 64 * 1024
# Batches of the usual sizes come with as few calls as they can.
READ_UNBOUNDED_BYTES_MAX = 4 * 1024 * 1024
READ_S_PER_BYTE = 0.75e-9


def new_buffer(capacity_bytes: int, wanted_bytes: int = 0) -> bytearray | mmap.mmap:
    """One that could grow to `wanted_bytes` without being copied, if it is large."""
    if capacity_bytes <= BUFFER_ON_HEAP_MAX:
        return bytearray(capacity_bytes)
    size_bytes = max(capacity_bytes, 1 << (wanted_bytes - 1).bit_length())
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def read_at_once(capacity_bytes: int, late: bool) -> int:
    """How much a buffer above READ_LARGE_BYTES takes with one system call; `late`: the turn of the loop is long."""
    if late:
        return READ_LARGE_BYTES
    return READ_BYTES_MAX if capacity_bytes > READ_UNBOUNDED_BYTES_MAX else capacity_bytes
