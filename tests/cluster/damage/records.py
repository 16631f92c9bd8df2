"""Records that say where they belong: producer and readers agree on every byte without asking each other.

The value of record `number` of a partition is computed from the seed of the case, so a reader knows a wrong byte when
it sees one. Timestamps rise by a fixed step, so that `segment.ms` decides how many records a segment holds.
"""

from __future__ import annotations

import hashlib
import struct
import time

TIMESTAMP_STEP_MS = 4
HEAD = struct.Struct(">qiq")
ACK = struct.Struct(">iqq")
"""One line of the file of acknowledgements, and of the file of what was read: partition, number, offset."""


def base_timestamp_ms() -> int:
    """Young enough for retention, old enough that no record lies in the future."""
    return int(time.time() * 1000) - 6 * 3_600_000


def value_of(seed: int, partition: int, number: int) -> bytes:
    head = HEAD.pack(seed, partition, number)
    digest = hashlib.shake_128(head)
    size_bytes = 30 + digest.digest(2)[0] + digest.digest(2)[1]
    noise = digest.digest(size_bytes // 2)
    return head + noise + b"tidelog " * (size_bytes // 16)


def number_of(seed: int, partition: int, value: bytes | None) -> int | None:
    """Which record this is; None when it is none of this partition, or not byte for byte as it was sent."""
    if value is None or len(value) < HEAD.size:
        return None
    found_seed, found_partition, number = HEAD.unpack_from(value)
    if (found_seed, found_partition) != (seed, partition) or value != value_of(seed, partition, number):
        return None
    return int(number)
