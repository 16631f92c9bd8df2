"""The partitions of the rows of Arrow columns, as `partitioner.py` chooses them for single records.

numpy and numba are imported on first use; without numba numpy hashes the keys, a step for each word
of the longest ones. Pure, as the partitioners are. Invariant: a key gets the partition that a
single record with it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidelog.client.assignment.partitioner import (
    MURMUR2_MULTIPLIER,
    MURMUR2_SEED,
    UnkeyedPartitioner,
    positive_hash,
)
from tidelog.protocol.batches import columnar_encoder
from tidelog.protocol.batches.columnar_input import BytesColumn

RECORD_OVERHEAD_BYTES = 16
"""Counted for each record by the sticky partitioner, besides its key and value."""
_FEW_ROWS = 16


def hash_keys(keys: BytesColumn, count: int, partitions: Any) -> None:
    """Set the partition of each row with a key, of `count` partitions."""
    if columnar_encoder.has_numba():
        from tidelog.client.assignment.key_hash_kernel import hash_partitions

        data = keys.data.view()
        data.flags.writeable = False  # avoids another compilation of the loop for writable data
        hash_partitions(data, keys.starts, keys.sizes, count, partitions)
        return
    import numpy as np

    rows = np.flatnonzero(keys.sizes >= 0)
    partitions[rows] = (_murmur2_of_rows(keys, rows) & 0x7FFFFFFF).astype(np.int64) % count


def _murmur2_of_rows(keys: BytesColumn, rows: Any) -> Any:
    import numpy as np

    data, starts, sizes = keys.data, keys.starts[rows], keys.sizes[rows]
    multiplier = np.uint32(MURMUR2_MULTIPLIER)
    result = np.uint32(MURMUR2_SEED) ^ sizes.astype(np.uint32)
    word_counts = sizes >> 2
    active = np.flatnonzero(word_counts > 0)
    number = 0
    while len(active) > _FEW_ROWS:
        places = starts[active] + number * 4
        word = data[places].astype(np.uint32)
        for byte in (1, 2, 3):
            word |= data[places + byte].astype(np.uint32) << np.uint32(8 * byte)
        word *= multiplier
        word ^= word >> np.uint32(24)
        result[active] = (result[active] * multiplier) ^ (word * multiplier)
        number += 1
        active = active[word_counts[active] > number]
    long_rows = active
    remainders = sizes & 3
    tails = starts + (word_counts << 2)
    for byte in (2, 1, 0):
        with_byte = np.flatnonzero(remainders > byte)
        result[with_byte] ^= data[tails[with_byte] + byte].astype(np.uint32) << np.uint32(8 * byte)
    with_tail = remainders > 0
    result[with_tail] *= multiplier
    result ^= result >> np.uint32(13)
    result *= multiplier
    result ^= result >> np.uint32(15)
    for row in long_rows.tolist():  # a few long keys: a step of numpy for each word would cost more
        start = int(starts[row])
        result[row] = positive_hash(data[start : start + int(sizes[row])].tobytes())
    return result


def spread_unkeyed(
    partitioner: UnkeyedPartitioner,
    available_partitions: Sequence[int],
    sizes: Any,
    rows: Any,
    partitions: Any,
    stick_bytes_min: int = 0,
) -> None:
    """Set the partitions of `rows`, which have no key; `sizes` are their bytes.

    A partition that is chosen gets at least `stick_bytes_min`, unless the rows end: the choice costs
    as much as dozens of rows.
    """
    import numpy as np

    ends = np.cumsum(sizes)
    first = 0
    while first < len(rows):
        partition = partitioner.choose(available_partitions)
        remaining = partitioner.remaining_bytes(stick_bytes_min)
        before = int(ends[first - 1]) if first else 0
        # As for single records: the one that reaches the limit still goes to the partition.
        last = min(len(rows), max(first, int(np.searchsorted(ends, before + remaining, "left"))) + 1)
        partitions[rows[first:last]] = partition
        partitioner.record_sent(int(ends[last - 1]) - before)
        first = last
