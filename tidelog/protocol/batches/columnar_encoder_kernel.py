"""The compiled loop of `columnar_encoder.py`: writes the records of rows, batch by batch.

Only numba code: it works on arrays. numba does not check bounds. Invariants: `columnar_input.py`
has checked that every field lies in its data, and the caller's `out` has room for the largest
encoding of every row. The bytes are those of `batch_builder.py`; a property test compares the two.
"""

from __future__ import annotations

import numpy as np

from tidelog.protocol.batches.columnar_kernel import Array, copy_bytes
from tidelog.protocol.batches.compiled import compiled
from tidelog.protocol.batches.record_batch import HEADER_SIZE


@compiled
def varint_size(number: int) -> int:
    """The size of a zigzag varint."""
    zigzag = np.uint64((number << 1) ^ (number >> 63))
    size = 1
    while zigzag > np.uint64(0x7F):
        zigzag >>= np.uint64(7)
        size += 1
    return size


@compiled
def _put_varint(out: Array, position: int, number: int) -> int:
    zigzag = np.uint64((number << 1) ^ (number >> 63))
    while zigzag > np.uint64(0x7F):
        out[position] = np.uint8(zigzag & np.uint64(0x7F) | np.uint64(0x80))
        zigzag >>= np.uint64(7)
        position += 1
    out[position] = np.uint8(zigzag)
    return position + 1


@compiled
def _put_bytes(out: Array, position: int, data: Array, start: int, size: int) -> int:
    """A size and the bytes; -1 alone for a null."""
    position = _put_varint(out, position, size)
    if size > 0:
        copy_bytes(out, position, data, start, size)  # type: ignore[call-arg,unused-ignore]
    return position + max(size, 0)


@compiled
def field_sizes(
    key_sizes: Array,
    value_sizes: Array,
    header_starts: Array,
    header_counts: Array,
    name_sizes: Array,
    content_sizes: Array,
    out: Array,
) -> None:
    """The size of each record without its length and its two deltas."""
    for row in range(len(key_sizes)):
        size = 1 + varint_size(key_sizes[row]) + max(key_sizes[row], 0)
        size += varint_size(value_sizes[row]) + max(value_sizes[row], 0) + varint_size(header_counts[row])
        for index in range(header_starts[row], header_starts[row] + header_counts[row]):
            size += varint_size(name_sizes[index]) + name_sizes[index]
            size += varint_size(content_sizes[index]) + max(content_sizes[index], 0)
        out[row] = size


@compiled
def encode(
    order: Array,
    bounds: Array,
    limit: int,
    sizes: Array,
    timestamps: Array,
    keys: tuple[Array, Array, Array],
    values: tuple[Array, Array, Array],
    headers: tuple[Array, Array],
    names: tuple[Array, Array, Array],
    contents: tuple[Array, Array, Array],
    out: Array,
    sections: Array,
) -> int:
    """Write the records of group g, which are the rows `order[bounds[g] : bounds[g + 1]]`, for every g.

    A batch ends before the record that would make it larger than `limit` bytes. HEADER_SIZE bytes
    are left free before its records. A section per batch: group, start and end in `out`, record
    count, base timestamp, largest timestamp. Returns the number of sections; stops when `sections` is full.
    """
    position = 0
    section = -1
    for group in range(len(bounds) - 1):
        count = 0
        start = base_timestamp = 0
        for place in range(bounds[group], bounds[group + 1]):
            row = order[place]
            timestamp = timestamps[row]
            delta = timestamp - base_timestamp
            size = sizes[row] + varint_size(delta) + varint_size(count)
            if count == 0 or position + varint_size(size) + size - start > limit:
                if section + 1 == len(sections):
                    return section + 1
                section += 1
                start, base_timestamp = position, timestamp
                position += HEADER_SIZE
                delta = count = 0
                size = sizes[row] + 2
                sections[section, 0], sections[section, 1] = group, start
                sections[section, 4] = sections[section, 5] = timestamp
            position = _put_varint(out, position, size)
            out[position] = 0
            position = _put_varint(out, position + 1, delta)
            position = _put_varint(out, position, count)
            position = _put_bytes(out, position, keys[0], keys[1][row], keys[2][row])
            position = _put_bytes(out, position, values[0], values[1][row], values[2][row])
            position = _put_varint(out, position, headers[1][row])
            for index in range(headers[0][row], headers[0][row] + headers[1][row]):
                position = _put_bytes(out, position, names[0], names[1][index], names[2][index])
                position = _put_bytes(out, position, contents[0], contents[1][index], contents[2][index])
            count += 1
            sections[section, 2], sections[section, 3] = position, count
            sections[section, 5] = max(sections[section, 5], timestamp)
    return section + 1
