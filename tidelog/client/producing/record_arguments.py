"""The arguments of records: serializers and checks, before a record has a place in the producer's memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidelog.client.arguments import INT32_MAX, as_int, as_list, shown
from tidelog.client.config import ProducerConfig, Serializer
from tidelog.client.model import ProducerRecord
from tidelog.client.producing.accumulator import Headers
from tidelog.protocol.batches.compression import CODECS
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError

MAX_TIMESTAMP_MS = 2**62
_PIECE_RECORDS_MAX = 256
_PIECE_BYTES_MAX = 64 * 1024


def as_producer_record(record: Any) -> ProducerRecord:
    if record.__class__ is ProducerRecord:
        return record
    if record.__class__ is not tuple:
        return ProducerRecord(record)
    if len(record) != 2:
        raise TypeError(f"a record must be a value, (key, value) or a ProducerRecord, not a tuple of {len(record)}")
    return ProducerRecord(record[1], record[0])


def fixed_headers(headers: Any) -> tuple[Any, ...] | None:
    """The headers in a tuple, if each is a plain tuple, whose parts the sender cannot change."""
    if headers.__class__ is not list and headers.__class__ is not tuple:
        return None
    for header in headers:
        if header.__class__ is not tuple:
            return None
    return tuple(headers)


def as_records(records: Any) -> Iterable[Any]:
    """Many records, and not a single one, whose parts would count as records."""
    if not isinstance(records, (str, bytes, bytearray, memoryview, Mapping, ProducerRecord)):
        try:
            iter(records)
        except TypeError:
            pass
        else:
            return records  # type: ignore[no-any-return]
    raise TypeError(f"records must be a list or another iterable of records, not {shown(records)}")


class RefusedRecord:
    """In place of a record that cannot be sent."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class RecordPieces:
    """Reads an iterator of records a piece at a time, so that one of any length costs no more memory than a piece.

    `copy` is called for each record before the next one is read: the iterator may change it then. Where it raises, this
    record and those behind it in its piece are refused ones. An interrupt is raised at once, as from the iterator.
    """

    def __init__(self, records: Iterable[Any], copy: Callable[[Any], Any]) -> None:
        self._records = iter(records)
        self._copy = copy
        self._error: Exception | None = None

    def next_piece(self) -> list[Any]:
        """The next records; none at the end. Raises what the iterator raises, after the records before it."""
        if self._error is not None:
            raise self._error
        piece: list[Any] = []
        size_bytes = 0
        refused: RefusedRecord | None = None
        try:
            for each in self._records:
                try:
                    record = self._copy(each) if refused is None else refused
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # the caller raises it at this record
                    record = refused = RefusedRecord(error)
                piece.append(record)
                size_bytes += _value_bytes(record)
                if len(piece) >= _PIECE_RECORDS_MAX or size_bytes >= _PIECE_BYTES_MAX:
                    break
        except Exception as error:
            if not piece:
                raise
            self._error = error
        return piece


def _value_bytes(record: Any) -> int:
    """The size of a record's value where that is known before its serializer."""
    value = record[1] if record.__class__ is tuple and len(record) == 2 else getattr(record, "value", record)
    return len(value) if value.__class__ is bytes else 0


def serialized(config: ProducerConfig, value: Any, key: Any) -> tuple[Any, Any]:
    """Value and key after the serializers of a producer."""
    if config.value_serializer is not None:
        value = _serialized("value_serializer", config.value_serializer, value)
    if config.key_serializer is not None:
        key = _serialized("key_serializer", config.key_serializer, key)
    return value, key


def _serialized(name: str, serializer: Serializer, value: Any) -> Any:
    output: Any = serializer(value)
    if output is None or isinstance(output, (bytes, bytearray, memoryview)):
        return output
    raise TypeError(f"{name} must return bytes or None, not {type(output).__name__}")


def as_bytes(name: str, value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{name} must be bytes or None, not {type(value).__name__}; set {name}_serializer to convert")


def as_timestamp(value: Any) -> int:
    """Milliseconds since 1970."""
    return as_int("timestamp_ms", value, 0, MAX_TIMESTAMP_MS - 1)


def as_partition_number(value: Any) -> int:
    """A partition's number. A negative one is for the topic to refuse, as any other that it has not."""
    return as_int("partition", value, -INT32_MAX)


def checked_headers(headers: Any) -> Headers:
    """The headers as a sequence. Raises TypeError, and ValueError for a name that has no UTF-8 form."""
    checked = headers if isinstance(headers, (list, tuple)) else as_list("headers", headers, "pairs")
    for header in checked:
        is_pair = isinstance(header, (tuple, list)) and len(header) == 2
        if not is_pair or not isinstance(header[0], str) or not (header[1] is None or isinstance(header[1], bytes)):
            raise TypeError(f"headers must be pairs of str and bytes or None, not {shown(header)}")
        try:
            header[0].encode()
        except UnicodeEncodeError:
            raise ValueError(f"the header name {header[0]!r} cannot be written as UTF-8") from None
    return checked


def build_batch(config: ProducerConfig, records: Iterable[Any], now_ms: int, *, is_transactional: bool) -> BatchBuilder:
    """One batch of all records. Those without a timestamp get `now_ms`.

    Raises KafkaError(MESSAGE_TOO_LARGE) above `max_request_size`, ValueError without records, and
    what a wrong record raises.
    """
    builder = BatchBuilder(
        config.max_request_size,
        CODECS[config.compression_type],
        config.compression_level,
        transactional=is_transactional,
    )
    for record in as_records(records):
        _append_to_batch(config, builder, as_producer_record(record), now_ms)
    if not builder.record_count:
        raise ValueError("a batch needs at least one record")
    return builder


def _append_to_batch(config: ProducerConfig, builder: BatchBuilder, record: ProducerRecord, now_ms: int) -> None:
    value, key, headers, partition, timestamp_ms = record
    if partition is not None:
        raise ValueError("a record of send_batch() has no partition of its own")
    value, key = serialized(config, value, key)
    headers = checked_headers(headers) if headers else ()
    if timestamp_ms is None:
        timestamp_ms = now_ms
    elif timestamp_ms.__class__ is not int or not 0 <= timestamp_ms < MAX_TIMESTAMP_MS:
        timestamp_ms = as_timestamp(timestamp_ms)
    key = None if key is None else as_bytes("key", key)
    value = None if value is None else as_bytes("value", value)
    limit = config.max_request_size
    if not builder.append(timestamp_ms, key, value, headers) or builder.size_bytes > limit:
        raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"the batch is larger than max_request_size ({limit} bytes)")
