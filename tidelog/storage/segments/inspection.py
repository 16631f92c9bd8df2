"""Inspects the records of a produced batch, if a topic's settings need it: checks them, and rewrites the batch.

Pure. A large batch would block the loop. For it `NeedsInspection` is raised before any change, and the caller does the
work in steps; those that release the interpreter lock may run on any thread. `append.py` has the checks that do not
need the records.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

from tidelog.protocol.batches.compression import LZ4, NONE, check_lz4_descriptor, compress
from tidelog.protocol.batches.record_batch import (
    HEADER,
    HEADER_SIZE,
    LOG_APPEND_TIME_FLAG,
    LOG_OVERHEAD,
    NO_TIMESTAMP,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    write_crc,
)
from tidelog.protocol.batches.record_walk import scan_records
from tidelog.protocol.batches.records import decode_section, encode_batch, record_section
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.segments.append_rules import AS_PRODUCED, AppendRules
from tidelog.storage.segments.log_config import INT64_MAX

# The bound for the records of an inspected batch. A larger one gets MESSAGE_TOO_LARGE: Java's producer splits it.
INSPECTED_RECORDS_MAX: Final = 250_000
# The bounds for an inspection in one step, which takes a millisecond. A turn of the loop may have many such batches.
AT_ONCE_RECORDS_MAX: Final = 500
AT_ONCE_BYTES_MAX: Final = 128 * 1024
# The bounds of the compressed bytes of such a batch, which may be a hundred thousand empty blocks, and of its records
# where they are compressed with another codec.
AT_ONCE_COMPRESSED_MAX: Final = 64 * 1024
AT_ONCE_RECOMPRESSED_MAX: Final = 16 * 1024
STEP_RECORDS: Final = 1_000
# The bound for the records named in a refusal. A million bad records would make a response of a hundred megabytes.
BLAMED_MAX: Final = 1000

_RecordSummary = tuple[bool, int]
"""Whether the records' offsets are contiguous, and their largest timestamp."""


class NeedsInspection(Exception):
    """A batch whose inspection takes long. The caller runs `decompress`, all steps of `inspect`, and `rebuild`, and
    then appends `batches`.

    Each of these may raise KafkaError, which refuses the batch. `batches` is a copy.
    """

    def __init__(
        self, batches: memoryview, header: BatchHeader, now_ms: int, rules: AppendRules, refusal: KafkaError | None
    ) -> None:
        super().__init__(f"{header.record_count} records")
        self.batches = memoryview(bytearray(batches))
        self.rules = rules
        self._header = header
        self._now_ms = now_ms
        self._refusal = refusal  # set if the batch is refused anyway, and only its bad records must be named
        self._section = b""
        self._summary = (True, NO_TIMESTAMP)

    def decompress(self) -> None:
        """On any thread."""
        self._section = decompressed(self.batches, 0, self._header, self.rules.inspected_bytes_max)

    def inspect(self) -> Iterator[None]:
        """Inspect the records. Each step takes about a millisecond."""
        self._summary = yield from _inspecting(self._section, self._header, self._now_ms, self.rules)
        if self._refusal is not None:
            raise self._refusal

    def rebuild(self) -> None:
        """On any thread."""
        self.batches = _rebuilt(self.batches, self._section, self._header, self.rules, *self._summary)
        self._section = b""


def inspect_batch(batches: memoryview, header: BatchHeader, now_ms: int, rules: AppendRules) -> memoryview:
    """Check and rewrite the records of a batch. Returns the batch to append. Raises NeedsInspection."""
    if header.compression == LZ4:
        check_lz4_descriptor(batches[HEADER_SIZE:])
    section = _section_at_once(batches, 0, header, now_ms, rules, None)
    return _rebuilt(batches, section, header, rules, *_inspect(section, header, now_ms, rules))


def refuse_times(batches: memoryview, position: int, header: BatchHeader, now_ms: int, rules: AppendRules) -> None:
    """Refuse a batch because of its timestamps, and name the bad records. Raises KafkaError, NeedsInspection."""
    refusal = KafkaError(ErrorCode.INVALID_TIMESTAMP, _outside(header.max_timestamp, now_ms, rules))
    _inspect(_section_at_once(batches, position, header, now_ms, rules, refusal), header, now_ms, rules)
    raise refusal


def decompressed(batches: memoryview, position: int, header: BatchHeader, bytes_max: int) -> bytes:
    """The decompressed records. A failure is INVALID_RECORD, because producers would retry after CORRUPT_MESSAGE."""
    try:
        return record_section(batches, position, header, bytes_max)
    except KafkaError as error:
        if error.code is not ErrorCode.CORRUPT_MESSAGE:
            raise
        raise KafkaError(ErrorCode.INVALID_RECORD, error.message) from None


def is_decompressed_at_once(header: BatchHeader) -> bool:
    """Whether the batch is small enough for a decompression on the loop's thread, to a bound of the caller."""
    return header.compression == NONE or header.size_bytes - HEADER_SIZE <= AT_ONCE_COMPRESSED_MAX


def _section_at_once(
    batches: memoryview,
    position: int,
    header: BatchHeader,
    now_ms: int,
    rules: AppendRules,
    refusal: KafkaError | None,
) -> bytes:
    """The decompressed records of a batch that is small enough for one step. Raises NeedsInspection otherwise."""
    if header.record_count > INSPECTED_RECORDS_MAX:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE, f"{header.record_count} records at once, above {INSPECTED_RECORDS_MAX}"
        )
    if header.record_count <= AT_ONCE_RECORDS_MAX and is_decompressed_at_once(header):
        recompresses = refusal is None and rules.codec not in (AS_PRODUCED, NONE, header.compression)
        try:
            section = decompressed(batches, position, header, AT_ONCE_BYTES_MAX)
            if not recompresses or len(section) <= AT_ONCE_RECOMPRESSED_MAX:
                return section
        except KafkaError as error:
            if error.code is not ErrorCode.MESSAGE_TOO_LARGE:
                raise
    raise NeedsInspection(batches[position : position + header.size_bytes], header, now_ms, rules, refusal)


def _inspect(section: bytes, header: BatchHeader, now_ms: int, rules: AppendRules) -> _RecordSummary:
    """Run all steps of `_inspecting` at once."""
    steps = _inspecting(section, header, now_ms, rules)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            summary: _RecordSummary = done.value
            return summary


def _inspecting(
    section: bytes, header: BatchHeader, now_ms: int, rules: AppendRules
) -> Generator[None, None, _RecordSummary]:
    """Refuse the batch if a record lacks a required key or has a bad timestamp, and name these records."""
    oldest, newest = now_ms - rules.before_max_ms, now_ms + rules.after_max_ms
    checks_times = not rules.stamps_append_time
    code = ErrorCode.INVALID_RECORD
    blamed: list[tuple[int, str]] = []
    consecutive, largest = True, NO_TIMESTAMP
    for index, (offset_delta, time_delta, has_key) in enumerate(scan_records(section, header.record_count)):
        if index % STEP_RECORDS == STEP_RECORDS - 1:
            yield
        if offset_delta != index:
            consecutive = False
        timestamp = header.base_timestamp + time_delta
        if timestamp > largest:
            largest = timestamp
        if not -INT64_MAX <= timestamp <= INT64_MAX:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"timestamp {timestamp} needs more than 64 bits")
        if rules.checks_keys and not has_key:
            reason = "a compacted topic takes no record without a key"
        elif checks_times and timestamp != NO_TIMESTAMP and not oldest <= timestamp <= newest:
            reason = _outside(timestamp, now_ms, rules)
            code = ErrorCode.INVALID_TIMESTAMP
        else:
            continue
        if len(blamed) < BLAMED_MAX:
            blamed.append((index, reason))
    if blamed:
        raise KafkaError(code, "One or more records have been rejected", tuple(blamed))
    return consecutive, largest


def _rebuilt(
    batches: memoryview, section: bytes, header: BatchHeader, rules: AppendRules, consecutive: bool, largest: int
) -> memoryview:
    """The batch to append: unchanged, or with another codec or other record offsets."""
    codec = header.compression if rules.codec == AS_PRODUCED else rules.codec
    # As in Kafka, compressed records with gaps in their offsets get new offsets; uncompressed ones are kept.
    if codec == header.compression and (consecutive or not codec):
        return batches
    if consecutive:
        rebuilt = _under_another_codec(section, header._replace(max_timestamp=largest), codec, rules.level)
    else:
        rebuilt = encode_batch(
            decode_section(section, header),
            compression=codec,
            level=rules.level,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            transactional=bool(header.attributes & TRANSACTIONAL_FLAG),
        )
    if len(rebuilt) > rules.max_message_bytes:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"a batch of {len(rebuilt)} bytes, recompressed, is above max.message.bytes, {rules.max_message_bytes}",
        )
    return memoryview(rebuilt)


def _under_another_codec(section: bytes, header: BatchHeader, codec: int, level: int | None) -> bytearray:
    """Compress the unchanged record section with another codec: encoding each record would triple the cost."""
    batch = bytearray(HEADER_SIZE) + compress(codec, section, level)
    attributes = header.attributes & (TRANSACTIONAL_FLAG | LOG_APPEND_TIME_FLAG) | codec
    HEADER.pack_into(batch, 0, *header._replace(batch_length=len(batch) - LOG_OVERHEAD, attributes=attributes))
    write_crc(batch, 0, len(batch))
    return batch


def _outside(timestamp: int, now_ms: int, rules: AppendRules) -> str:
    return f"timestamp {timestamp} is outside {now_ms - rules.before_max_ms} .. {now_ms + rules.after_max_ms}"
