"""The compiled loop of `column_partitions.py`: murmur2 of every key of a column.

Only numba code. The caller has checked that every key lies in its data.
"""

from __future__ import annotations

from tidelog.client.assignment.partitioner import MURMUR2_MULTIPLIER, MURMUR2_SEED
from tidelog.protocol.batches.columnar_kernel import Array
from tidelog.protocol.batches.compiled import compiled

_MASK = 0xFFFFFFFF


@compiled
def hash_partitions(data: Array, starts: Array, sizes: Array, count: int, out: Array) -> None:
    """The partition of each row with a key, of `count` partitions; rows without a key are left alone."""
    for row in range(len(sizes)):
        size = sizes[row]
        if size < 0:
            continue
        position = starts[row]
        result = MURMUR2_SEED ^ size
        for _ in range(size >> 2):
            word = data[position] | data[position + 1] << 8 | data[position + 2] << 16 | data[position + 3] << 24
            word = word * MURMUR2_MULTIPLIER & _MASK
            word ^= word >> 24
            result = (result * MURMUR2_MULTIPLIER & _MASK) ^ (word * MURMUR2_MULTIPLIER & _MASK)
            position += 4
        remainder = size & 3
        if remainder:
            for index in range(remainder):
                result ^= data[position + index] << (8 * index)
            result = result * MURMUR2_MULTIPLIER & _MASK
        result ^= result >> 13
        result = result * MURMUR2_MULTIPLIER & _MASK
        out[row] = ((result ^ (result >> 15)) & 0x7FFFFFFF) % count
