"""Splits the records of batches into columns of Python objects, with the compiled loop of `columnar_kernel.py`.

The caller builds its records from the columns, which costs half of `records.decode_fields`. Needs numba; numpy and
numba are imported on first use. Invariant: the columns are the fields that `decode_fields` returns (a property test).
For anything unusual (malformed records, offsets of several batches that do not rise) the answer is None, and
`decode_fields` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add
from typing import Any, Final, NamedTuple

from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.protocol.batches.records import MAX_BASE_OFFSET, MIN_RECORD_BYTES, decode_headers

FEWEST_RECORDS: Final = 32
"""For fewer, the call of the compiled loop costs more than it saves."""

_MAX_INT64: Final = 2**63 - 1


class RecordColumns(NamedTuple):
    """The fields of records in order. `offsets` has their number; the others may have no end."""

    offsets: list[int]
    timestamps: Iterable[int]
    keys: Iterable[bytes | None]
    values: Iterable[bytes | None]
    headers: Iterable[tuple[tuple[str, bytes | None], ...]]


def load() -> None:
    """Import and compile the loop: a third of a second, longer at the first time on a machine. Raises ImportError."""
    import numpy as np

    from tidelog.protocol.batches.columnar_kernel import PLACE_FIELDS, scan

    data = np.frombuffer(b"", np.uint8)
    offsets, types, places = np.empty(0, np.int64), np.empty(0, np.int32), np.empty((PLACE_FIELDS, 0), np.int64)
    scan(data, np.empty((0, 7), np.int64), 0, _MAX_INT64, offsets, offsets, types, places)


def split_records(data: bytes, header: BatchHeader, first_offset: int) -> RecordColumns | None:
    """The columns of a decompressed record section, from `first_offset` on; None if `decode_fields` must look at it."""
    return split_sections(data, [(0, len(data), header)], first_offset)


def split_sections(
    data: bytes, sections: Sequence[tuple[int, int, BatchHeader]], first_offset: int
) -> RecordColumns | None:
    """The columns of several batches, from `first_offset` on: start and end in `data` of their decompressed records.

    None if `decode_fields` must look at them: a record is malformed, or, of several batches, the offsets do not rise
    or a record lies behind the end of its batch.
    """
    import numpy as np

    from tidelog.protocol.batches.columnar_kernel import PLACE_FIELDS, scan

    capacity = 0
    table, last_offsets = [], []
    for start, end, header in sections:
        base_offset, _, _, _, _, attributes, last_delta, base_timestamp, max_timestamp, _, _, _, count = header
        size = end - start if end <= len(data) else -1
        if not 0 <= count * MIN_RECORD_BYTES <= size or abs(base_offset) > MAX_BASE_OFFSET:
            return None
        capacity += count
        table.append((start, end, count, base_offset, base_timestamp, max_timestamp, attributes >> 3 & 1))
        last_offsets.append(base_offset + last_delta)
    offsets = np.empty(capacity, np.int64)
    timestamps = np.empty(capacity, np.int64)
    types = np.empty(capacity, np.int32)
    places = np.empty((PLACE_FIELDS, capacity), np.int64)
    array = np.frombuffer(data, np.uint8)
    sections_table = np.array(table, np.int64)
    rows = scan(array, sections_table, first_offset, _MAX_INT64, offsets, timestamps, types, places)
    if rows < capacity:
        if rows < 0:
            return None
        offsets, timestamps, places = offsets[:rows], timestamps[:rows], places[:, :rows]
    if len(sections) > 1:
        if not (offsets[1:] > offsets[:-1]).all():
            return None
        batch_of_record = np.searchsorted(sections_table[:, 1], places[5])  # by the ends of the bytes
        if (offsets > np.array(last_offsets, np.int64)[batch_of_record]).any():
            return None
    key_starts, key_sizes, value_starts, value_sizes, header_starts, ends, header_counts = places.tolist()
    headers: Any = repeat(())
    if any(header_counts):
        headers = [
            decode_headers(data, start, end, number)[0] if number else ()
            for start, end, number in zip(header_starts, ends, header_counts, strict=True)
        ]
    return RecordColumns(
        offsets.tolist(),
        timestamps.tolist(),
        _slices(data, key_starts, key_sizes),
        _slices(data, value_starts, value_sizes),
        headers,
    )


def _slices(data: bytes, starts: list[int], sizes: list[int]) -> Iterable[bytes | None]:
    """`data[start : start + size]` of each; None where the size is -1."""
    null_count = sizes.count(-1)
    if null_count == len(sizes):
        return repeat(None)
    slices: list[bytes | None] = [data[start:end] for start, end in zip(starts, map(add, starts, sizes), strict=True)]
    if null_count:
        return [None if size < 0 else piece for piece, size in zip(slices, sizes, strict=True)]
    return slices
