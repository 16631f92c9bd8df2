"""The compiled loops of `columnar.py`: locate every field, then copy the column bytes.

Only numba code: it works on arrays, without Arrow and without batch headers. numba does not check
bounds. So the invariant of this file: every index is compared with the end of its record before its
use, and no record passes the end of its section. The rules are those of `records.decode_batch`; a
property test compares the two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidelog.protocol.batches.compiled import compiled

Array = np.ndarray[Any, Any]

PLACE_FIELDS: Final = 7
"""The output of `scan` per record: key start and size, value start and size, headers' start, end,
count.
"""


@compiled
def _varint(data: Array, position: int, end: int, max_bits: int) -> tuple[int, int]:
    """A zigzag varint and the next position; position -1 when it passes `end` or `max_bits`."""
    number = np.uint64(0)
    shift = 0
    while True:
        if position >= end or shift >= max_bits:
            return 0, -1
        byte = np.uint64(data[position])
        position += 1
        number |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        if byte < np.uint64(0x80):
            break
        shift += 7
    if max_bits == 32:
        number &= np.uint64(0xFFFFFFFF)
    half: Any = np.int64(number >> np.uint64(1))
    return (~half if number & np.uint64(1) else half), position


@compiled
def _nullable(data: Array, position: int, end: int) -> tuple[int, int, int]:
    """Size (-1 = null) and start of length-prefixed bytes, and the next position; -1 past `end`."""
    size, start = _varint(data, position, end, 32)
    if start < 0 or size > end - start:
        return 0, 0, -1
    if size < 0:
        return -1, start, start
    return size, start, start + size


@compiled
def cut(data: Array, position: int, end: int, max_records: int, max_bytes: int) -> tuple[int, int]:
    """The number of records from `position` on within the bounds (at least one) and their end; -1:
    malformed.
    """
    start = position
    count = 0
    while count < max_records:
        size, fields = _varint(data, position, end, 32)
        if fields < 0 or size < 0 or size > end - fields:
            return 0, -1
        if count > 0 and fields + size - start > max_bytes:
            break
        position = fields + size
        count += 1
    return count, position


@compiled
def scan(
    data: Array,
    sections: Array,
    first_offset: int,
    end_offset: int,
    offsets: Array,
    timestamps: Array,
    timestamp_types: Array,
    places: Array,
) -> int:
    """Scan the records of every section and output those with an offset in [first_offset,
    end_offset).

    A section is one batch's records: start and end in `data`, record count (already bounded by the
    bytes), base offset, base timestamp, append time in ms, timestamp type (1: the append time
    applies to every record). The output per record: its offset, timestamp in ms, timestamp type,
    and in `places` key start and size, value start and size (-1 = null), headers' start, end and
    count. Returns the number of output records, or -1 - i when section i is malformed.
    """
    rows = 0
    for index in range(sections.shape[0]):
        position = sections[index, 0]
        section_end = sections[index, 1]
        base_offset = sections[index, 3]
        base_timestamp = sections[index, 4]
        append_time = sections[index, 5]
        timestamp_type = sections[index, 6]
        malformed = -1 - index
        for _ in range(sections[index, 2]):
            size, position = _varint(data, position, section_end, 32)
            if position < 0 or size < 6 or size > section_end - position:
                return malformed
            end = position + size
            timestamp_delta, position = _varint(data, position + 1, end, 64)
            if position < 0:
                return malformed
            offset_delta, position = _varint(data, position, end, 32)
            if position < 0:
                return malformed
            key_size, key_start, position = _nullable(data, position, end)
            if position >= 0:
                value_size, value_start, position = _nullable(data, position, end)
            if position >= 0:
                header_count, position = _varint(data, position, end, 32)
            if position < 0 or header_count < 0 or header_count > end - position:
                return malformed
            headers_start = position
            for _header in range(header_count):
                header_size, _, position = _nullable(data, position, end)
                if position < 0 or header_size < 0:
                    return malformed
                _, _, position = _nullable(data, position, end)
                if position < 0:
                    return malformed
            if position != end:
                return malformed
            offset = base_offset + offset_delta
            if offset < first_offset or offset >= end_offset:
                continue
            # The sum wraps, as in Java.
            timestamp = append_time if timestamp_type == 1 else base_timestamp + timestamp_delta
            offsets[rows] = offset
            timestamps[rows] = timestamp
            timestamp_types[rows] = timestamp_type
            places[0, rows] = key_start
            places[1, rows] = key_size
            places[2, rows] = value_start
            places[3, rows] = value_size
            places[4, rows] = headers_start
            places[5, rows] = end
            places[6, rows] = header_count
            rows += 1
        if position != section_end:
            return malformed
    return rows


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def copy_bytes(typing_context: Any, out: Any, low: Any, data: Any, start: Any, size: Any) -> Any:
    """memcpy of `size` bytes from `data[start:]` to `out[low:]`, eight times faster than a slice
    assignment.
    """
    signature = types.void(out, types.int64, data, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, low, source, start, size = arguments
        target_bytes = context.make_array(signature.args[0])(context, builder, target).data
        source_bytes = context.make_array(signature.args[2])(context, builder, source).data
        target_at, source_at = builder.gep(target_bytes, [low]), builder.gep(source_bytes, [start])
        cgutils.raw_memcpy(builder, target_at, source_at, size, 1)  # type: ignore[no-untyped-call,unused-ignore]
        return context.get_dummy_value()

    return signature, generate


@compiled
def to_microseconds(milliseconds: Array, limit: int, out: Array) -> None:
    """Microseconds of times in ms, which are cut at `limit` ms on both sides."""
    for row in range(out.shape[0]):
        out[row] = min(max(milliseconds[row], -limit), limit) * 1000


@compiled
def ends_of(sizes: Array, limit: int, ends: Array) -> tuple[int, int]:
    """Write the int32 ends of elements of these sizes behind a 0. A negative size (null) counts as 0.

    Returns the number of nulls and the last end; stops after an end above `limit`, which it returns.
    """
    nulls = end = 0
    ends[0] = 0
    for row in range(sizes.shape[0]):
        size = sizes[row]
        if size < 0:
            nulls += 1
        else:
            end += size
        if end > limit:
            break
        ends[row + 1] = end
    return nulls, end


@compiled
def gather(data: Array, starts: Array, ends: Array, out: Array) -> None:
    """Copy `ends[i + 1] - ends[i]` bytes from `data[starts[i]:]` to `out[ends[i]:]` for every i.

    `out` has `ends[-1]` bytes, `ends` never decreases, and `scan` has validated every source range.
    """
    for index in range(starts.shape[0]):
        low = ends[index]
        copy_bytes(out, low, data, starts[index], ends[index + 1] - low)  # type: ignore[call-arg,unused-ignore]


@compiled
def scan_headers(data: Array, places: Array, rows: int, header_places: Array) -> None:
    """Key start and size, value start and size (-1 = null) of every header of the first `rows`
    records, in order.

    `scan` has validated them, so this function does not check them again.
    """
    index = 0
    for row in range(rows):
        position = places[4, row]
        end = places[5, row]
        for _ in range(places[6, row]):
            header_places[1, index], header_places[0, index], position = _nullable(data, position, end)
            header_places[3, index], header_places[2, index], position = _nullable(data, position, end)
            index += 1
