"""Decodes record batches to Arrow columns, without a Python object per record.

The input is whole batches of a Fetch; the output is `pyarrow.RecordBatch`es with the columns of
Spark's Kafka source, in the requested order. The loops are in `columnar_kernel.py` (numba). Without
numba the records go through `records.decode_section`, and the columns are the same. pyarrow, numpy
and numba are imported on first use. Nothing here depends on Spark or the network.

Invariant: memory is bounded for any claims of the batches. One batch decompresses to at most
`max_batch_bytes`. At most PIECE_BYTES and PIECE_ROWS of records become columns at a time. The
compression ratio of a whole chunk does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.record import read_varint
from tidelog.protocol.batches.record_batch import HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader, Buffer, check_magic
from tidelog.protocol.batches.records import (
    MIN_RECORD_BYTES,
    Record,
    decode_section,
    encode_batch,
    iter_data_batches,
    record_section,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

PIECE_BYTES: Final = 16 * 1024 * 1024
"""Decompressed records that become columns at once. An uncompressed chunk of a Fetch is smaller."""
PIECE_ROWS: Final = 200_000
"""The kernel's output takes 76 bytes a row."""
_BUFFER_BYTES_MIN: Final = 256 * 1024
_USUAL_RATIO: Final = 4
"""The buffer for decompressed batches has room for so many times their size."""

_MAX_INT32: Final = 2**31 - 1
_MAX_INT64: Final = 2**63 - 1
_MAX_MILLISECONDS: Final = _MAX_INT64 // 1000
_MAX_BASE_OFFSET: Final = _MAX_INT64 - 2**31


@cache
def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of `columns` (a tuple), with the types of Spark's Kafka source."""
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
    data_batches: Iterable[tuple[int, BatchHeader]] | None = None,
    max_batch_bytes: int = codecs.DEFAULT_MAX_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of `batches` with offsets in [first_offset, end_offset), one row each, in
    pieces.

    Omits control batches, aborted transactions (`aborted`: producer id and first offset of each,
    from the fetch response) and an incomplete last batch. `key`, `value` and `headers` may be null.
    A piece may be empty. Raises KafkaError as `decode_batch`, and MESSAGE_TOO_LARGE when one batch
    decompresses to more than `max_batch_bytes`; the message names the partition and the batch's
    offset. Ignores CRCs. `data_batches` are the places and headers to decode where the caller has
    read them from `batches` already; they replace `aborted`.
    """
    if data_batches is None:
        data_batches = iter_data_batches(batches, aborted)
    selected = [
        (position, header)
        for position, header in data_batches
        if header.last_offset >= first_offset and header.base_offset < end_offset
    ]
    partition_name = f"{topic}-{partition}"
    try:
        for _, header in selected:
            if header[3] != MAGIC:
                check_magic(header)
    except KafkaError as error:
        raise in_batch(error, partition_name, header) from None
    to_columns = _rows_by_kernel if _has_numba() else _rows_by_records
    for data, sections in _pieces(batches, selected, partition_name, max_batch_bytes):
        yield to_columns(data, sections, topic, partition, first_offset, end_offset, tuple(columns))
        del data  # a large batch, which is not to be held while the next one is decompressed


def in_batch(error: KafkaError, partition_name: str, header: BatchHeader) -> KafkaError:
    """The same error with the partition and the batch's offset in its message."""
    return KafkaError(error.code, f"{partition_name}: batch at offset {header.base_offset}: {error.message}")


def load_kernel() -> None:
    """Import and compile what `decode_columns` uses: half a second, longer at the first time on a machine.

    Raises ImportError where pyarrow or numpy is not installed, and what a numba that does not work raises.
    """
    batch = encode_batch([(0, b"k", b"v", (("h", b"v"),))])
    for _ in decode_columns(batch, topic="", partition=0):
        pass
    if _has_numba():
        _kernel_cut(batch, HEADER_SIZE, len(batch), 1, len(batch))


@cache
def _has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


class _Section(NamedTuple):
    """Consecutive records of one batch: all of them or a part."""

    start: int
    end: int
    record_count: int
    header: BatchHeader


def _constant_columns(topic: str, partition: int, rows: int) -> dict[str, Callable[[], Any]]:
    import numpy as np
    import pyarrow as pa

    def topics() -> pa.Array:
        name = topic.encode()
        ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(name))
        return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(name * rows)])

    return {"topic": topics, "partition": lambda: _fixed_array(pa.int32(), np.full(rows, partition, np.int32), rows)}


def _assemble(columns: tuple[str, ...], makers: dict[str, Callable[[], Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([makers[name]() for name in columns], schema=arrow_schema(columns))


def _pieces(
    batches: Buffer, selected: list[tuple[int, BatchHeader]], partition_name: str, max_batch_bytes: int
) -> Iterator[tuple[Buffer, list[_Section]]]:
    """Yield pieces: bytes with their sections, of at most PIECE_ROWS and PIECE_BYTES in total.

    A single record may be larger. The bytes of a piece are valid until the next one: uncompressed
    batches stay in place, compressed ones are decompressed into one buffer, which is used again.
    """
    sections: list[_Section] = []
    rows = size = 0
    in_place = all(header.compression == codecs.NONE for _, header in selected)
    data = batches if in_place else _new_buffer(selected)
    section: _Section | None
    try:
        for position, header in selected:
            if in_place:
                end = position + header[1] + LOG_OVERHEAD
                section = _as_section(_Section, (position + HEADER_SIZE, end, header[12], header))
            else:
                section = _decompress_to(data, size, batches, position, header, max_batch_bytes)
                if section is None and sections:
                    yield data, sections
                    sections, rows, size = [], 0, 0
                    section = _decompress_to(data, size, batches, position, header, max_batch_bytes)
            whole = data
            if section is None:  # too large for the buffer, or not valid
                whole = record_section(batches, position, header, max_batch_bytes)
                section = _Section(0, len(whole), header.record_count, header)
            _check_section(section)
            length = section[1] - section[0]
            record_count = section[2]
            if sections and (rows + record_count > PIECE_ROWS or size + length > PIECE_BYTES):
                yield data, sections
                sections, rows = [], 0
                size = 0 if in_place else size  # this batch lies behind them
            if whole is not data or record_count > PIECE_ROWS or length > PIECE_BYTES:
                for part in _parts(whole, section):
                    yield whole, [part]
                size = 0
                continue
            sections.append(section)
            rows += record_count
            size += length
    except KafkaError as error:
        raise in_batch(error, partition_name, header) from None
    if sections:
        yield data, sections


def _new_buffer(selected: list[tuple[int, BatchHeader]]) -> bytearray:
    compressed_bytes = sum(header[1] for _, header in selected)
    return bytearray(min(PIECE_BYTES, max(_BUFFER_BYTES_MIN, _USUAL_RATIO * compressed_bytes)))


def _decompress_to(
    data: Buffer, start: int, batches: Buffer, position: int, header: BatchHeader, max_batch_bytes: int
) -> _Section | None:
    """Decompress a batch to `data[start:]`. None when it has no room there or is not valid."""
    end = position + header[1] + LOG_OVERHEAD
    if end > len(batches):
        return None
    source = memoryview(batches)[position + HEADER_SIZE : end]
    room = memoryview(data)[start : start + max_batch_bytes]
    size = codecs.decompress_into(header.compression, source, room)
    return None if size is None else _Section(start, start + size, header[12], header)


_as_section = tuple.__new__
"""A quarter of the cost of the constructor, which runs for every batch."""


def _check_section(section: _Section) -> None:
    start, end, record_count, header = section
    if not 0 <= record_count * MIN_RECORD_BYTES <= end - start:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{record_count} records in {end - start} bytes")
    if not -_MAX_BASE_OFFSET <= header[0] <= _MAX_BASE_OFFSET:
        raise KafkaError(ErrorCode.INVALID_RECORD, "base offset at the end of 64 bits")


def _parts(data: Buffer, section: _Section) -> Iterator[_Section]:
    """Split a large section into parts of at most PIECE_ROWS records and about PIECE_BYTES."""
    cut = _kernel_cut if _has_numba() else _cut
    start, remaining = section.start, section.record_count
    while remaining:
        count, end = cut(data, start, section.end, min(remaining, PIECE_ROWS), PIECE_BYTES)
        if end < 0:
            raise KafkaError(ErrorCode.INVALID_RECORD, "malformed record")
        remaining -= count
        # The last part extends to the section's end, so that bytes after the last record are
        # detected.
        yield _Section(start, end if remaining else section.end, count, section.header)
        start = end


def _cut(data: Buffer, position: int, end: int, max_records: int, max_bytes: int) -> tuple[int, int]:
    """The number of records within the bounds (at least one) and their end (-1: malformed)."""
    start = position
    count = 0
    while count < max_records:
        try:
            size, fields = read_varint(data, position, 32)
        except (IndexError, KafkaError):
            return 0, -1
        if size < 0 or fields > end or size > end - fields:
            return 0, -1
        if count and fields + size - start > max_bytes:
            break
        position = fields + size
        count += 1
    return count, position


def _kernel_cut(data: Buffer, position: int, end: int, max_records: int, max_bytes: int) -> tuple[int, int]:
    from tidelog.protocol.batches.columnar_kernel import cut

    count, cut_end = cut(_as_array(data), position, end, max_records, max_bytes)
    return int(count), int(cut_end)


def _as_array(data: Buffer) -> Any:
    import numpy as np

    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False  # avoids a second compilation of numba's loops for writable input
    return array


def _rows_by_records(
    data: Buffer,
    sections: list[_Section],
    topic: str,
    partition: int,
    first_offset: int,
    end_offset: int,
    columns: tuple[str, ...],
) -> pa.RecordBatch:
    """The slower fallback without numba: a Python object per record."""
    import pyarrow as pa

    rows: list[Record] = []
    types: list[int] = []
    view = memoryview(data)
    for start, end, count, header in sections:
        try:
            records = decode_section(bytes(view[start:end]), header._replace(record_count=count))
        except KafkaError as error:
            raise in_batch(error, f"{topic}-{partition}", header) from None
        selected_records = [record for record in records if first_offset <= record.offset < end_offset]
        rows += selected_records
        types += [header.timestamp_type] * len(selected_records)
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


def _rows_by_kernel(
    data: Buffer,
    sections: list[_Section],
    topic: str,
    partition: int,
    first_offset: int,
    end_offset: int,
    columns: tuple[str, ...],
) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.batches.columnar_kernel import PLACE_FIELDS, scan, to_microseconds

    array = _as_array(data)
    table = np.array([_to_scan_row(section) for section in sections], np.int64)
    capacity = sum(section[2] for section in sections)
    offsets = np.empty(capacity, np.int64)
    timestamps = np.empty(capacity, np.int64)
    types = np.empty(capacity, np.int32)
    places = np.empty((PLACE_FIELDS, capacity), np.int64)
    rows = scan(array, table, first_offset, end_offset, offsets, timestamps, types, places)
    if rows < 0:
        malformed = KafkaError(ErrorCode.INVALID_RECORD, "malformed record")
        raise in_batch(malformed, f"{topic}-{partition}", sections[-1 - rows].header)
    key_starts, key_sizes, value_starts, value_sizes = (places[field, :rows] for field in range(4))

    def microseconds() -> Any:
        out = np.empty(rows, np.int64)
        to_microseconds(timestamps, _MAX_MILLISECONDS, out)
        return out

    return _assemble(
        columns,
        {
            "key": lambda: _bytes_array(pa.binary(), array, key_starts, key_sizes),
            "value": lambda: _bytes_array(pa.binary(), array, value_starts, value_sizes),
            "offset": lambda: _fixed_array(pa.int64(), offsets, rows),
            "timestamp": lambda: _fixed_array(pa.timestamp("us", tz="UTC"), microseconds(), rows),
            "timestampType": lambda: _fixed_array(pa.int32(), types, rows),
            "headers": lambda: _headers_array(array, places, rows),
            **_constant_columns(topic, partition, rows),
        },
    )


def _to_scan_row(section: _Section) -> tuple[int, ...]:
    """A section as an input row of the kernel's `scan`."""
    start, end, count, header = section
    return start, end, count, header[0], header[7], header[8], header[5] >> 3 & 1


def _fixed_array(arrow_type: pa.DataType, values: Any, rows: int) -> pa.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(arrow_type, rows, [None, pa.py_buffer(values)])


def _ends_of(sizes: Any) -> tuple[Any, int, int]:
    """Arrow's int32 offsets of elements of these sizes, the number of nulls (negative sizes), and the last offset."""
    import numpy as np

    from tidelog.protocol.batches.columnar_kernel import ends_of

    ends = np.empty(len(sizes) + 1, np.int32)
    nulls, size_bytes = ends_of(sizes, _MAX_INT32, ends)
    if size_bytes > _MAX_INT32:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE, f"a column of {size_bytes} bytes is more than Arrow takes at once"
        )
    return ends, nulls, size_bytes


def _validity_of(present: Any) -> pa.Buffer:
    """Arrow's validity bitmap."""
    import numpy as np
    import pyarrow as pa

    return pa.py_buffer(np.packbits(present, bitorder="little"))


def _bytes_array(arrow_type: pa.DataType, data: Any, starts: Any, sizes: Any) -> pa.Array:
    """A binary or string array of `data[start : start + size]`, null where the size is -1."""
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.batches.columnar_kernel import gather

    ends, nulls, size_bytes = _ends_of(sizes)
    if nulls and nulls == len(sizes):
        return pa.nulls(len(sizes), arrow_type)
    # Arrow's pool uses memory again; numpy would get new pages of the system for each column.
    content = pa.allocate_buffer(size_bytes)
    gather(data, starts, ends, np.frombuffer(content, np.uint8))
    validity = _validity_of(sizes >= 0) if nulls else None
    return pa.Array.from_buffers(arrow_type, len(sizes), [validity, pa.py_buffer(ends), content], nulls)


def _headers_array(data: Any, places: Any, rows: int) -> pa.Array:
    """The list of each record's (key, value) pairs, null without headers as in Spark."""
    import numpy as np
    import pyarrow as pa

    from tidelog.protocol.batches.columnar_kernel import scan_headers

    counts = places[6, :rows]
    list_type = arrow_schema().field("headers").type
    ends, _, header_count = _ends_of(counts)
    if not header_count:
        return pa.nulls(rows, list_type)
    header_places = np.empty((4, header_count), np.int64)
    scan_headers(data, places, rows, header_places)
    keys = _text_array(data, header_places[0], header_places[1])
    values = _bytes_array(pa.binary(), data, header_places[2], header_places[3])
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(list_type.value_type))
    nulls = rows - int(np.count_nonzero(counts))
    validity = _validity_of(counts > 0) if nulls else None
    return pa.Array.from_buffers(list_type, rows, [validity, pa.py_buffer(ends)], nulls, children=[pairs])


def _text_array(data: Any, starts: Any, sizes: Any) -> pa.Array:
    import pyarrow as pa

    texts = _bytes_array(pa.binary(), data, starts, sizes)
    if bytes(texts.buffers()[2] or b"").isascii():
        return texts.view(pa.string())
    # Joined bytes can turn broken UTF-8 of adjacent texts into valid UTF-8, so each text is decoded
    # separately.
    return pa.array([text.decode("utf-8", "replace") for text in texts.to_pylist()], pa.string())
