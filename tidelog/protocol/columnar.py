"""Record batches as Arrow columns, without a Python object per record.

In go whole batches as they came from a Fetch; out comes one `pyarrow.RecordBatch` with the columns of Spark's Kafka
source, in the order asked for. The loops are in `columnar_kernel.py` (numba); where numba is missing the records go
through `records.decode_batch`, and the columns are the same. pyarrow, numpy and numba are imported on first use.
Nothing here knows Spark or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tidelog.protocol import compression as codecs
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.record_batch import HEADER_SIZE, BatchHeader, Buffer, CorruptRecord, check_crc, check_magic
from tidelog.protocol.records import MIN_RECORD_BYTES, Record, decode_section, iter_data_batches, record_section

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

_MAX_INT32: Final = 2**31 - 1
_MAX_INT64: Final = 2**63 - 1
_MAX_MILLISECONDS: Final = _MAX_INT64 // 1000


@cache
def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of `columns` (a tuple), with the types that Spark takes for its Kafka source's schema."""
    import pyarrow as pa

    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestampType": pa.int32(),
        "headers": pa.list_(header),
    }
    return pa.schema([pa.field(name, types[name]) for name in columns])


def decode_columns(
    batches: Buffer,
    *,
    topic: str,
    partition: int,
    first_offset: int = 0,
    end_offset: int = _MAX_INT64,
    columns: Sequence[str] = COLUMNS,
    aborted: Iterable[tuple[int, int]] = (),
    check_crcs: bool = False,
    max_decompressed_bytes: int = codecs.DEFAULT_MAX_BYTES,
) -> pa.RecordBatch:
    """The records of concatenated `batches` with offsets in [first_offset, end_offset), one row each.

    Control batches, aborted transactions (`aborted`: producer id and first offset of each, from the fetch response) and
    a torn last batch are left out. `key`, `value` and `headers` may be null. Raises KafkaError as `decode_batch` does,
    also CORRUPT_MESSAGE for a wrong CRC with `check_crcs`, and MESSAGE_TOO_LARGE when all of it decompresses to more
    than `max_decompressed_bytes` or a column passes Arrow's 2 GiB.
    """
    wanted = [
        (position, header)
        for position, header in iter_data_batches(batches, aborted)
        if header.last_offset >= first_offset and header.base_offset < end_offset
    ]
    for position, header in wanted:
        check_magic(header)
        if check_crcs and not check_crc(batches, position, header):
            raise CorruptRecord(f"{topic}-{partition}: wrong CRC in the batch at offset {header.base_offset}")
    rows_of = _rows_by_kernel if _has_numba() else _rows_by_records
    return rows_of(batches, wanted, topic, partition, first_offset, end_offset, tuple(columns), max_decompressed_bytes)


@cache
def _has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


Wanted = list[tuple[int, BatchHeader]]


def _constant_columns(topic: str, partition: int, rows: int) -> dict[str, Callable[[], Any]]:
    import pyarrow as pa

    return {
        "topic": lambda: pa.repeat(pa.scalar(topic, pa.string()), rows),
        "partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), rows),
    }


def _assemble(columns: tuple[str, ...], makers: dict[str, Callable[[], Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([makers[name]() for name in columns], schema=arrow_schema(columns))


def _rows_by_records(
    batches: Buffer,
    wanted: Wanted,
    topic: str,
    partition: int,
    first_offset: int,
    end_offset: int,
    columns: tuple[str, ...],
    max_decompressed_bytes: int,
) -> pa.RecordBatch:
    """The fallback without numba: a Python object per record, and its cost."""
    import pyarrow as pa

    rows: list[Record] = []
    types: list[int] = []
    budget = max_decompressed_bytes
    for position, header in wanted:
        section = record_section(batches, position, header, budget)
        if header.compression != codecs.NONE:
            budget -= len(section)
        kept = [record for record in decode_section(section, header) if first_offset <= record.offset < end_offset]
        rows += kept
        types += [header.timestamp_type] * len(kept)
    arrow_type = {field.name: field.type for field in arrow_schema()}

    def microseconds() -> list[int]:
        return [min(max(row.timestamp, -_MAX_MILLISECONDS), _MAX_MILLISECONDS) * 1000 for row in rows]

    def headers() -> list[list[dict[str, Any]] | None]:
        return [[{"key": key, "value": value} for key, value in row.headers] if row.headers else None for row in rows]

    return _assemble(
        columns,
        {
            "key": lambda: pa.array([row.key for row in rows], arrow_type["key"]),
            "value": lambda: pa.array([row.value for row in rows], arrow_type["value"]),
            "offset": lambda: pa.array([row.offset for row in rows], arrow_type["offset"]),
            "timestamp": lambda: pa.array(microseconds(), pa.int64()).view(arrow_type["timestamp"]),
            "timestampType": lambda: pa.array(types, arrow_type["timestampType"]),
            "headers": lambda: pa.array(headers(), arrow_type["headers"]),
            **_constant_columns(topic, partition, len(rows)),
        },
    )


def _sections(batches: Buffer, wanted: Wanted, max_decompressed_bytes: int) -> tuple[Any, Any]:
    """The bytes to scan and, per batch, where its records are in them and what the kernel must know of its header."""
    import numpy as np

    rows: list[tuple[int, ...]] = []
    joined = bytearray()  # grown in place, so that what one batch decompressed to is freed before the next
    budget = max_decompressed_bytes
    in_place = all(header.compression == codecs.NONE for _, header in wanted)
    for position, header in wanted:
        if in_place:
            start, end = position + HEADER_SIZE, position + header.size_bytes
        else:
            start = len(joined)
            joined += record_section(batches, position, header, budget)
            end = len(joined)
            if header.compression != codecs.NONE:
                budget -= end - start
        count = header.record_count
        if not 0 <= count * MIN_RECORD_BYTES <= end - start:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} records in {end - start} bytes")
        base_offset, base_timestamp = header.base_offset, header.base_timestamp
        if abs(base_offset) > _MAX_INT64 - 2**31 or abs(base_timestamp) > _MAX_INT64 - 2**13:
            raise KafkaError(ErrorCode.INVALID_RECORD, "base offset or timestamp at the end of 64 bits")
        rows.append((start, end, count, base_offset, base_timestamp, header.max_timestamp, header.timestamp_type))
    data = np.frombuffer(batches if in_place else joined, np.uint8)
    data.flags.writeable = False  # or numba would compile its loops once more for writable input
    return data, np.array(rows, np.int64)


def _rows_by_kernel(
    batches: Buffer,
    wanted: Wanted,
    topic: str,
    partition: int,
    first_offset: int,
    end_offset: int,
    columns: tuple[str, ...],
    max_decompressed_bytes: int,
) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.columnar_kernel import PLACE_FIELDS, scan

    if not wanted:
        return pa.RecordBatch.from_pylist([], schema=arrow_schema(columns))
    data, sections = _sections(batches, wanted, max_decompressed_bytes)
    capacity = int(sections[:, 2].sum())
    offsets = np.empty(capacity, np.int64)
    timestamps = np.empty(capacity, np.int64)
    types = np.empty(capacity, np.int32)
    places = np.empty((PLACE_FIELDS, capacity), np.int64)
    rows = scan(data, sections, first_offset, end_offset, offsets, timestamps, types, places)
    if rows < 0:
        bad = wanted[-1 - rows][1].base_offset
        raise KafkaError(
            ErrorCode.INVALID_RECORD, f"{topic}-{partition}: malformed record in the batch at offset {bad}"
        )
    key_starts, key_sizes, value_starts, value_sizes = (places[field, :rows] for field in range(4))
    return _assemble(
        columns,
        {
            "key": lambda: _bytes_array(pa.binary(), data, key_starts, key_sizes),
            "value": lambda: _bytes_array(pa.binary(), data, value_starts, value_sizes),
            "offset": lambda: _fixed_array(pa.int64(), offsets, rows),
            "timestamp": lambda: _fixed_array(pa.timestamp("us", tz="UTC"), timestamps, rows),
            "timestampType": lambda: _fixed_array(pa.int32(), types, rows),
            "headers": lambda: _headers_array(data, places, rows),
            **_constant_columns(topic, partition, rows),
        },
    )


def _fixed_array(arrow_type: pa.DataType, values: Any, rows: int) -> pa.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(arrow_type, rows, [None, pa.py_buffer(values)])


def _offsets_of(sizes: Any) -> Any:
    """Arrow's int32 offsets of elements of these sizes, of which negative ones (null) count 0."""
    import numpy as np

    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.maximum(sizes, 0), out=ends[1:])
    if ends[-1] > _MAX_INT32:
        raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"a column of {ends[-1]} bytes is more than Arrow takes at once")
    return ends.astype(np.int32)


def _validity_of(present: Any) -> tuple[pa.Buffer | None, int]:
    """Arrow's validity bitmap (None when nothing is null) and the count of nulls."""
    import numpy as np
    import pyarrow as pa

    nulls = len(present) - int(np.count_nonzero(present))
    return (pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None), nulls


def _bytes_array(arrow_type: pa.DataType, data: Any, starts: Any, sizes: Any) -> pa.Array:
    """A binary or string array of `data[start : start + size]`, null where the size is -1."""
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.columnar_kernel import gather

    ends = _offsets_of(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    gather(data, starts, ends, out)
    validity, nulls = _validity_of(sizes >= 0)
    buffers = [validity, pa.py_buffer(ends), pa.py_buffer(out)]
    return pa.Array.from_buffers(arrow_type, len(sizes), buffers, nulls)


def _headers_array(data: Any, places: Any, rows: int) -> pa.Array:
    """Null for a record without headers, as in Spark's own source, else the list of its (key, value) pairs."""
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.columnar_kernel import scan_headers

    counts = places[6, :rows]
    ends = _offsets_of(counts)
    found = np.empty((4, int(ends[-1])), np.int64)
    scan_headers(data, places, rows, found)
    keys = _text_array(data, found[0], found[1])
    values = _bytes_array(pa.binary(), data, found[2], found[3])
    list_type = arrow_schema().field("headers").type
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(list_type.value_type))
    validity, nulls = _validity_of(counts > 0)
    return pa.Array.from_buffers(list_type, rows, [validity, pa.py_buffer(ends)], nulls, children=[pairs])


def _text_array(data: Any, starts: Any, sizes: Any) -> pa.Array:
    import pyarrow as pa

    texts = _bytes_array(pa.binary(), data, starts, sizes)
    if bytes(texts.buffers()[2] or b"").isascii():
        return texts.view(pa.string())
    # Neighbours could mend each other's broken UTF-8 in the joined bytes, so each is looked at alone.
    return pa.array([text.decode("utf-8", "replace") for text in texts.to_pylist()], pa.string())
