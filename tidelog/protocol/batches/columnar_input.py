"""Reads Arrow columns of records as arrays, without a Python object per record.

Here: column types, nulls, the size of each record, pieces of a bounded size. Not here: the bytes of
record batches (`columnar_encoder.py`) and partitions. pyarrow and numpy are imported on first use.

Invariant: the starts and sizes of a `BytesColumn` lie in its data, also when Arrow's offsets are
damaged. So a compiled loop may copy by them without a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

INPUT_COLUMNS: Final = ("key", "value", "headers", "timestamp", "partition")
IGNORED_COLUMNS: Final = ("topic", "offset", "timestampType")
"""Columns of a decoded table that say where a record was, not what it is."""

PIECE_ROWS: Final = 65_536
HEADER_OVERHEAD_BYTES: Final = 8
"""Counted for each header in a record's size, as for a single record."""
MAX_TIMESTAMP_MS: Final = 2**62
_VIEWS: Final = ("string_view", "binary_view")
"""Polars hands its columns on so. The tests of `pa.types` for them are newer than the oldest pyarrow that is served."""


class BytesColumn(NamedTuple):
    """Row i is `data[starts[i] : starts[i] + sizes[i]]`; a size of -1 is null."""

    data: Any
    starts: Any
    sizes: Any


class Rows(NamedTuple):
    """The records of one piece. All arrays but `data` are int64."""

    keys: BytesColumn
    values: BytesColumn
    timestamps: Any
    """In ms, -1 where a row has none."""
    partitions: Any
    """-1 where the partitioner chooses."""
    header_starts: Any
    """The first index of a row's headers in `header_names` and `header_values`."""
    header_counts: Any
    header_names: BytesColumn
    header_values: BytesColumn
    payload_sizes: Any
    """The bytes of key, value and headers of a row, by which a record is limited."""

    @property
    def row_count(self) -> int:
        return len(self.timestamps)


def check_columns(table: pa.Table | pa.RecordBatch) -> None:
    """Check the names of the columns. Raises TypeError without a table, ValueError for a wrong name."""
    import pyarrow as pa

    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        raise TypeError(f"table must be a pyarrow.Table or a pyarrow.RecordBatch, not {type(table).__name__}")
    names = list(table.schema.names)
    for name in names:
        if name not in INPUT_COLUMNS and name not in IGNORED_COLUMNS:
            raise ValueError(f"no column {name!r}; the columns are {', '.join(INPUT_COLUMNS)}")
        if names.count(name) > 1:
            raise ValueError(f"two columns {name!r}")
    if "key" not in names and "value" not in names:
        raise ValueError("neither a column 'key' nor a column 'value'")


def iter_rows(table: pa.Table | pa.RecordBatch, piece_bytes: int) -> Iterator[Rows]:
    """The rows of a table in pieces of at most PIECE_ROWS and about `piece_bytes`, at least a row each.

    Raises TypeError or ValueError for wrong columns, and ValueError for damaged ones.
    """
    check_columns(table)
    import numpy as np
    import pyarrow as pa

    batches = [table] if isinstance(table, pa.RecordBatch) else table.to_batches(max_chunksize=PIECE_ROWS)
    for batch in batches:
        for start in range(0, batch.num_rows, PIECE_ROWS):
            rows = _rows_of(batch.slice(start, PIECE_ROWS))
            ends = np.cumsum(rows.payload_sizes)
            first = 0
            while first < rows.row_count:
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + piece_bytes, "right")))
                yield rows if last - first == rows.row_count else _slice_of(rows, first, last)
                first = last


def _slice_of(rows: Rows, first: int, last: int) -> Rows:
    def column(whole: BytesColumn) -> BytesColumn:
        return BytesColumn(whole.data, whole.starts[first:last], whole.sizes[first:last])

    return rows._replace(
        keys=column(rows.keys),
        values=column(rows.values),
        timestamps=rows.timestamps[first:last],
        partitions=rows.partitions[first:last],
        header_starts=rows.header_starts[first:last],
        header_counts=rows.header_counts[first:last],
        payload_sizes=rows.payload_sizes[first:last],
    )


def _rows_of(batch: pa.RecordBatch) -> Rows:
    import numpy as np

    count = batch.num_rows
    batch.validate()
    names = batch.schema.names

    def column(name: str, read: Callable[[pa.Array, str], Any]) -> Any:
        return read(batch.column(names.index(name)), name) if name in names else None

    nothing = BytesColumn(np.empty(0, np.uint8), np.zeros(count, np.int64), np.full(count, -1, np.int64))
    keys = column("key", _bytes_column) or nothing
    values = column("value", _bytes_column) or nothing
    timestamps = column("timestamp", _timestamps)
    partitions = column("partition", _partitions)
    headers = column("headers", _headers)
    unset = np.full(count, -1, np.int64)
    payload_sizes = np.maximum(keys.sizes, 0) + np.maximum(values.sizes, 0)
    if headers is None:
        empty = BytesColumn(nothing.data, unset[:0], unset[:0])
        headers = np.zeros(count, np.int64), np.zeros(count, np.int64), empty, empty
    else:
        starts, counts, header_names, header_values = headers
        sizes = HEADER_OVERHEAD_BYTES + header_names.sizes + np.maximum(header_values.sizes, 0)
        totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        payload_sizes = payload_sizes + totals[starts + counts] - totals[starts]
    return Rows(
        keys,
        values,
        unset if timestamps is None else timestamps,
        unset if partitions is None else partitions,
        headers[0],
        headers[1],
        headers[2],
        headers[3],
        payload_sizes,
    )


def _bytes_column(column: pa.Array, name: str) -> BytesColumn:
    """The places of a column's bytes. Text counts as its UTF-8 bytes."""
    import numpy as np
    import pyarrow as pa

    kind = column.type
    count = len(column)
    types = pa.types
    if types.is_null(kind):
        return BytesColumn(np.empty(0, np.uint8), np.zeros(count, np.int64), np.full(count, -1, np.int64))
    if types.is_dictionary(kind):
        return _bytes_column(_without_dictionary(column, name), name)
    if types.is_fixed_size_binary(kind) or str(kind) in _VIEWS:
        return _bytes_column(_cast(column, pa.large_binary(), name), name)
    is_large = types.is_large_binary(kind) or types.is_large_string(kind)
    if not is_large and not types.is_binary(kind) and not types.is_string(kind):
        raise TypeError(f"the column {name!r} must be binary or string, not {kind}")
    _, offsets_buffer, data_buffer = column.buffers()
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    if not count or offsets_buffer is None:
        return BytesColumn(data, np.zeros(count, np.int64), np.zeros(count, np.int64))
    width = np.int64 if is_large else np.int32
    offsets = np.frombuffer(offsets_buffer, width)[column.offset : column.offset + count + 1].astype(np.int64)
    sizes = np.diff(offsets)
    if len(sizes) != count or sizes.min() < 0 or offsets[0] < 0 or offsets[-1] > len(data):
        raise ValueError(f"the column {name!r} is damaged: its offsets do not lie in its data")
    if sizes.max() >= 2**31:
        raise ValueError(f"the column {name!r} has a field of 2 GiB or more")
    if column.null_count:
        sizes[_nulls(column)] = -1
    return BytesColumn(data, offsets[:-1], sizes)


def _without_dictionary(column: pa.Array, name: str) -> pa.Array:
    import pyarrow as pa

    try:
        if str(column.type.value_type) in _VIEWS:  # Polars' categories; Arrow casts no dictionary of views
            return _cast(column.dictionary, pa.large_binary(), name).take(column.indices)
        return _cast(column, column.type.value_type, name)
    except pa.ArrowIndexError as error:
        raise ValueError(f"the column {name!r} is damaged: {error}") from None


def _nulls(column: pa.Array) -> Any:
    return column.is_null().to_numpy(zero_copy_only=False)


def _cast(column: pa.Array, kind: pa.DataType, name: str, *, safe: bool = True) -> pa.Array:
    import pyarrow as pa

    try:
        return column.cast(kind, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise TypeError(f"the column {name!r} of type {column.type} is not {kind}: {error}") from None


def _int64_values(column: pa.Array) -> Any:
    """The values of an int64 column, -1 where it is null."""
    return column.fill_null(-1).to_numpy(zero_copy_only=False)


def _timestamps(column: pa.Array, name: str) -> Any:
    """Milliseconds since 1970: of any timestamp type, or whole numbers."""
    import numpy as np
    import pyarrow as pa

    per_unit = 1
    if pa.types.is_timestamp(column.type):
        if column.type.unit == "s":
            per_unit = 1000  # below: the cast that lets microseconds be cut lets seconds overflow
        else:
            column = _cast(column, pa.timestamp("ms", column.type.tz), name, safe=False)
    elif not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise TypeError(f"the column {name!r} must be a timestamp or whole milliseconds, not {column.type}")
    column = _cast(column, pa.int64(), name)
    values = _int64_values(column)
    is_wrong = (values < 0) | (values > (MAX_TIMESTAMP_MS - 1) // per_unit)
    if column.null_count:
        is_wrong &= ~_nulls(column)
    if is_wrong.any():
        wrong = int(values[is_wrong][0]) * per_unit
        raise ValueError(f"a timestamp must be a whole number of milliseconds since 1970, not {wrong}")
    return values if per_unit == 1 else np.where(values < 0, -1, values * per_unit)


def _partitions(column: pa.Array, name: str) -> Any:
    import pyarrow as pa

    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise TypeError(f"the column {name!r} must be whole numbers, not {column.type}")
    column = _cast(column, pa.int64(), name)
    values = _int64_values(column)
    if column.null_count:
        is_negative = (values < 0) & ~_nulls(column)
    else:
        is_negative = values < 0
    if is_negative.any():
        raise ValueError(f"a partition must not be negative, not {int(values[is_negative][0])}")
    return values


def _headers(column: pa.Array, name: str) -> tuple[Any, Any, BytesColumn, BytesColumn] | None:
    """First index and count of each row's headers, then the names and values of all headers."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    if types.is_null(column.type):
        return None
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if not is_list or not types.is_struct(kind.value_type) or {f.name for f in kind.value_type} != {"key", "value"}:
        raise TypeError(f"the column {name!r} must be a list of structs of 'key' and 'value', not {kind}")
    if len(column):
        _check_list_offsets(column, name)
    counts = _cast(pc.list_value_length(column).fill_null(0), pa.int64(), name).to_numpy(zero_copy_only=False)
    pairs = column.flatten()
    fields = dict(zip((field.name for field in pairs.type), pairs.flatten()))
    for each in fields.values():
        each.validate(full=True)
    names = _bytes_column(fields["key"], "headers.key")
    if len(names.sizes) and names.sizes.min() < 0:
        raise ValueError("a header's key must not be null")
    values = _bytes_column(fields["value"], "headers.value")
    starts = np.cumsum(counts) - counts
    return starts, counts, names, values


def _check_list_offsets(column: pa.Array, name: str) -> None:
    """Check the offsets of a piece of a list column. Arrow's full validation of the column itself would look at the
    headers of the whole table for each piece.
    """
    import numpy as np
    import pyarrow as pa

    width = np.int64 if pa.types.is_large_list(column.type) else np.int32
    offsets: Any = np.frombuffer(column.buffers()[1], width)[column.offset : column.offset + len(column) + 1]
    if offsets[0] < 0 or offsets[-1] > len(column.values) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"the column {name!r} is damaged: its offsets do not lie in its data")
