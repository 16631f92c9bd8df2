"""Encodes rows of Arrow columns to the records of batches, without a Python object per record.

`columnar_input.py` makes the rows; the caller chooses their partitions. The loop is in
`columnar_encoder_kernel.py` (numba). Without numba numpy writes the same bytes, a step for each
field of a batch. A `BatchBuilder` adds the header, as for records that were appended one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tidelog.protocol.batches.columnar_input import BytesColumn, Rows
from tidelog.protocol.batches.record_batch import HEADER_SIZE

_DELTAS_BYTES_MAX = 5 + 10 + 5
"""The largest length of a record and its two deltas."""
_BATCHES_PER_CALL = 8
"""A call encodes partitions up to so many full batches. It costs as much as dozens of rows."""
_BATCH_BYTES_PER_CALL_MIN = 64 * 1024
"""A batch of this size gets a call of its own, which writes it where it stays: a copy of it costs more."""


class EncodedBatch(NamedTuple):
    """A batch of one partition whose header is not written yet."""

    partition: int
    buffer: memoryview
    """HEADER_SIZE free bytes, then the records. No other batch has a part of it: one that waits for its leader must
    keep no memory but its own, and at most a seventh more."""
    record_count: int
    base_timestamp: int
    max_timestamp: int


@cache
def has_numba() -> bool:
    """Whether the compiled loops can be used."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


class ColumnEncoder:
    """Encodes rows to batches of at most `batch_bytes`, uncompressed; a batch of one record may be larger."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes

    def encode(self, rows: Rows, partitions: Any) -> Iterator[EncodedBatch]:
        """The batches of the rows. `partitions` has an int64 for each row.

        Partitions are in rising order, and the rows of a partition keep their order. A large batch is encoded when it
        is asked for: what is done with it before the next one finds it in the processor's cache.
        """
        import numpy as np

        if not rows.row_count:
            return
        order, bounds = _by_partition(partitions)
        sizes = _field_sizes(rows)
        rooms = np.cumsum((sizes + (_DELTAS_BYTES_MAX + HEADER_SIZE))[order])[bounds[1:] - 1]
        if has_numba() and min(self._batch_bytes, int(rooms[-1]) // len(rooms)) >= _BATCH_BYTES_PER_CALL_MIN:
            yield from self._encode_in_place(rows, partitions, order, bounds, sizes)
            return
        encode = _encode_by_kernel if has_numba() else _encode_by_numpy
        first_rows = order[bounds[:-1]]
        first = before = 0
        while first < len(rooms):
            last = max(first + 1, int(np.searchsorted(rooms, before + _BATCHES_PER_CALL * self._batch_bytes, "right")))
            out = _new_memory(int(rooms[last - 1]) - before)
            sections = encode(rows, order, bounds[first : last + 1], sizes, self._batch_bytes, out)
            for group, start, end, count, base, largest in sections.tolist():
                partition = int(partitions[first_rows[first + group]])
                yield EncodedBatch(partition, _copy(out[start:end]), count, base, largest)
            first, before = last, int(rooms[last - 1])

    def _encode_in_place(
        self, rows: Rows, partitions: Any, order: Any, bounds: Any, sizes: Any
    ) -> Iterator[EncodedBatch]:
        """The same batches, each encoded by a call of its own into the memory that it keeps."""
        import numpy as np

        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
            room = int(sizes[order[first:end]].sum()) + (end - first) * _DELTAS_BYTES_MAX
            partition = int(partitions[order[first]])
            while first < end:
                first_record = int(sizes[order[first]]) + _DELTAS_BYTES_MAX
                own = _new_memory(HEADER_SIZE + min(room, max(first_record, self._batch_bytes)))
                place = np.array([first, end], np.int64)
                [section] = _encode_by_kernel(rows, order, place, sizes, self._batch_bytes, own, 1).tolist()
                _, _, size, count, base, largest = section
                # A batch that ends early, before a large record, keeps no memory that it does not use.
                buffer = own[:size].data if size * 8 >= len(own) * 7 else _copy(own[:size])
                yield EncodedBatch(partition, buffer, count, base, largest)
                first += count
                room -= size - HEADER_SIZE


def _copy(encoded: Any) -> memoryview:
    own = _new_memory(len(encoded))
    own[:] = encoded
    return own.data  # type: ignore[no-any-return]


def _new_memory(size_bytes: int) -> Any:
    """Uninitialized bytes of Arrow's pool, which uses memory again: that saves page faults."""
    import numpy as np
    import pyarrow as pa

    return np.frombuffer(pa.allocate_buffer(size_bytes), np.uint8)


def _by_partition(partitions: Any) -> tuple[Any, Any]:
    """The rows sorted by partition, and the places in them at which the partition changes."""
    import numpy as np

    narrow = partitions.astype(np.int16) if partitions.max() < 2**15 else partitions  # sorted by radix
    order = np.argsort(narrow, kind="stable").astype(np.int64, copy=False)
    ordered = partitions[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return order, np.concatenate((np.zeros(1, np.int64), starts, np.array([len(order)], np.int64)))


def _field_sizes(rows: Rows) -> Any:
    import numpy as np

    if has_numba():
        from tidelog.protocol.batches.columnar_encoder_kernel import field_sizes

        sizes = np.empty(rows.row_count, np.int64)
        field_sizes(
            rows.keys.sizes,
            rows.values.sizes,
            rows.header_starts,
            rows.header_counts,
            rows.header_names.sizes,
            rows.header_values.sizes,
            sizes,
        )
        return sizes
    sizes = 1 + _nullable_sizes(rows.keys) + _nullable_sizes(rows.values) + _varint_sizes(rows.header_counts)
    if len(rows.header_names.sizes):
        headers = _nullable_sizes(rows.header_names) + _nullable_sizes(rows.header_values)
        totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(headers)))
        sizes += totals[rows.header_starts + rows.header_counts] - totals[rows.header_starts]
    return sizes


# -- with numba


def _encode_by_kernel(
    rows: Rows, order: Any, bounds: Any, sizes: Any, limit: int, out: Any, batches_max: int | None = None
) -> Any:
    import numpy as np

    from tidelog.protocol.batches.columnar_encoder_kernel import encode

    sections = np.empty((batches_max or rows.row_count, 6), np.int64)
    count = encode(
        order,
        bounds,
        limit,
        sizes,
        rows.timestamps,
        _read_only(rows.keys),
        _read_only(rows.values),
        (rows.header_starts, rows.header_counts),
        _read_only(rows.header_names),
        _read_only(rows.header_values),
        out,
        sections,
    )
    return sections[:count]


def _read_only(column: BytesColumn) -> tuple[Any, Any, Any]:
    """Avoids another compilation of the loop for data that happens to be writable."""
    data = column.data.view()
    data.flags.writeable = False
    return data, column.starts, column.sizes


# -- without numba


def _varint_sizes(numbers: Any) -> Any:
    import numpy as np

    zigzag = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)
    sizes = np.ones(len(numbers), np.int64)
    for bits in range(7, 64, 7):
        is_longer = zigzag >> np.uint64(bits) > 0
        if not is_longer.any():
            break
        sizes += is_longer
    return sizes


def _nullable_sizes(column: BytesColumn) -> Any:
    import numpy as np

    return _varint_sizes(column.sizes) + np.maximum(column.sizes, 0)


def _put_varints(out: Any, positions: Any, numbers: Any) -> Any:
    """Write a varint at each position. Returns the positions after them."""
    import numpy as np

    zigzag = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)
    positions = positions.copy()
    active = np.arange(len(numbers))
    while len(active):
        is_longer = zigzag[active] > np.uint64(0x7F)
        low = (zigzag[active] & np.uint64(0x7F)).astype(np.uint8)
        out[positions[active]] = low | (is_longer.astype(np.uint8) << np.uint8(7))
        positions[active] += 1
        active = active[is_longer]
        zigzag[active] >>= np.uint64(7)
    return positions


def _put_bytes(out: Any, positions: Any, column: BytesColumn, rows: Any) -> Any:
    """Write the size and the bytes of a column's rows. Returns the positions after them."""
    import numpy as np

    sizes = column.sizes[rows]
    positions = _put_varints(out, positions, sizes)
    lengths = np.maximum(sizes, 0)
    total = int(lengths.sum())
    if total:
        within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        out[np.repeat(positions, lengths) + within] = column.data[np.repeat(column.starts[rows], lengths) + within]
    return positions + lengths


def _encode_by_numpy(rows: Rows, order: Any, bounds: Any, sizes: Any, limit: int, out: Any) -> Any:
    import numpy as np

    sections: list[tuple[int, ...]] = []
    position = 0
    for group, (first, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        members = order[first:end]
        for batch_rows, lengths in _batches_of(members, sizes, rows.timestamps, limit):
            times = rows.timestamps[batch_rows]
            section_end = position + HEADER_SIZE + int(lengths.sum())
            starts = position + HEADER_SIZE + np.cumsum(lengths) - lengths
            _write_records(rows, batch_rows, starts, sizes, out)
            sections.append((group, position, section_end, len(batch_rows), int(times[0]), int(times.max())))
            position = section_end
    return np.array(sections, np.int64)


def _batches_of(members: Any, sizes: Any, timestamps: Any, limit: int) -> Iterator[tuple[Any, Any]]:
    """Cut the rows of a partition into batches: the rows and the length of each record."""
    import numpy as np

    field_ends = np.cumsum(sizes[members])
    first = 0
    while first < len(members):
        before = int(field_ends[first - 1]) if first else 0
        # The fields alone give an upper bound of the rows; then the deltas count too.
        last = max(first + 1, int(np.searchsorted(field_ends, before + limit, "right")))
        candidates = members[first:last]
        deltas = timestamps[candidates] - timestamps[candidates[0]]
        bodies = sizes[candidates] + _varint_sizes(deltas) + _varint_sizes(np.arange(len(candidates)))
        lengths = bodies + _varint_sizes(bodies)
        count = max(1, int(np.searchsorted(np.cumsum(lengths), limit - HEADER_SIZE, "right")))
        yield candidates[:count], lengths[:count]
        first += count


def _write_records(rows: Rows, batch_rows: Any, starts: Any, sizes: Any, out: Any) -> None:
    import numpy as np

    numbers = np.arange(len(batch_rows))
    deltas = rows.timestamps[batch_rows] - rows.timestamps[batch_rows[0]]
    bodies = sizes[batch_rows] + _varint_sizes(deltas) + _varint_sizes(numbers)
    positions = _put_varints(out, starts, bodies)
    out[positions] = 0
    positions = _put_varints(out, positions + 1, deltas)
    positions = _put_varints(out, positions, numbers)
    positions = _put_bytes(out, positions, rows.keys, batch_rows)
    positions = _put_bytes(out, positions, rows.values, batch_rows)
    counts = rows.header_counts[batch_rows]
    positions = _put_varints(out, positions, counts)
    for number in range(int(counts.max())):  # the first header of each row, then the second
        with_header = counts > number
        indexes = rows.header_starts[batch_rows][with_header] + number
        after_name = _put_bytes(out, positions[with_header], rows.header_names, indexes)
        positions[with_header] = _put_bytes(out, after_name, rows.header_values, indexes)
