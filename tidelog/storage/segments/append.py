"""Checks batches before an append and stamps them: offsets, leader epoch, log-append time.

Pure: batches and limits go in, checked and stamped batches come out; `partition_log.py` writes them, and
`producer_state.py` checks sequences. The rules are those of Kafka's UnifiedLog.analyzeAndValidateRecords and
LogValidator, with one deliberate difference (docs/decisions/0014): every field of every record is checked only if a
topic's settings need it (compacted topics, a limit on old timestamps, recompression). Otherwise the records are counted
by their lengths. For large compressed batches only the plausibility of the record count for the size is checked.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from tidelog.protocol.batches.compression import (
    LZ4,
    SNAPPY,
    check_lz4_descriptor,
    check_lz4_end,
    check_snappy_framing,
)
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_OFFSET,
    COMPRESSION_MASK,
    CONTROL_FLAG,
    HEADER,
    HEADER_SIZE,
    LENGTH_OFFSET,
    LOG_APPEND_TIME_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    MAGIC_OFFSET,
    MIN_BATCH_LENGTH,
    NO_TIMESTAMP,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    CorruptRecord,
    check_magic,
    read_header,
    stamp,
    stamp_create_time,
    stamp_log_append_time,
)
from tidelog.protocol.batches.record_walk import check_plausible, check_records, first_eight, keyless_record_size
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.segments.append_rules import AppendRules
from tidelog.storage.segments.inspection import (
    BLAMED_MAX,
    decompressed,
    inspect_batch,
    refuse_times,
)
from tidelog.storage.segments.log_config import INT64_MAX

NO_APPEND_TIME: Final = -1
_MAX_COMPRESSION: Final = 4
PLAIN: Final = frozenset(range(_MAX_COMPRESSION + 1))
"""The attributes of a batch without flags, one for each compression."""
IN_TRANSACTION: Final = PLAIN | {TRANSACTIONAL_FLAG | compression for compression in PLAIN}
_FRAME: Final = Struct(">iib")  # batch length, leader epoch, magic
_FIRST_EIGHT_END: Final = HEADER_SIZE + 8
_MIN_MESSAGE_LENGTH: Final = 14  # in the oldest format (LegacyRecord.RECORD_OVERHEAD_V0)
# The records of a compressed batch are counted up to this compressed size and this decompressed size.
WALKED_COMPRESSED_MAX: Final = 2048
WALKED_BYTES_MAX: Final = 64 * 1024

Batch = tuple[int, int, int, int, int, int, int, int, int, int]
"""An admitted batch: position in the buffer, size in bytes, base offset, last offset, maximum timestamp, attributes,
producer id, producer epoch, base sequence, leader epoch. A plain tuple, because one is made for every produce."""


class AppendInfo(NamedTuple):
    """The result of an append. `duplicate`: it repeats a batch, and the offsets are those of the first one.

    `written`: the bytes in the log, valid as long as the buffer of the request; None if nothing was written.
    """

    first_offset: int
    last_offset: int
    log_append_time_ms: int
    log_start_offset: int
    duplicate: bool
    written: bytearray | memoryview | None = None


_unpack = HEADER.unpack_from
_crc32c = crc32c


UsualBatch = tuple[int, int, int, int, int]
"""Last offset delta, maximum timestamp, producer id, producer epoch, base sequence."""


def admit_usual(batch: memoryview, now_ms: int, rules: AppendRules, usual: frozenset[int] = PLAIN) -> UsualBatch | None:
    """The fields that the log needs of a batch in the usual form; None for any other form, which `admit` checks.

    The usual form is one whole batch whose attributes are in `usual`, for a topic that stores batches unchanged. The
    checks are those of `admit` in one pass, because this runs for every produce. It stamps nothing. Raises
    INVALID_RECORD, as `admit` does, if the records differ from the header.
    """
    size = len(batch)
    if size < HEADER_SIZE or not rules.takes_as_sent:
        return None
    (
        base_offset, length, _, magic, crc, attributes, last_delta, _, max_timestamp, producer_id, producer_epoch,
        base_sequence, count,
    ) = _unpack(batch)  # fmt: skip
    if (
        length + LOG_OVERHEAD != size
        or magic != MAGIC
        or base_offset
        or attributes not in usual
        or last_delta + 1 != count
        or count <= 0
        or size > rules.max_message_bytes
        or max_timestamp > now_ms + rules.after_max_ms
        or base_sequence < 0 <= producer_id
        or _crc32c(batch[ATTRIBUTES_OFFSET:]) != crc
    ):
        return None
    if attributes & COMPRESSION_MASK:
        _check_compressed(batch, 0, read_header(batch))
    elif (
        count != 1
        or size < _FIRST_EIGHT_END
        or batch[size - 1]
        or keyless_record_size(first_eight(batch, HEADER_SIZE)[0]) != size - HEADER_SIZE
    ):
        check_records(batch, HEADER_SIZE, size, count)
    return last_delta, max_timestamp, producer_id, producer_epoch, base_sequence


def admit_own(batch: memoryview, rules: AppendRules) -> UsualBatch | None:
    """`admit_usual` for a batch that this node has encoded: its records are not checked again."""
    size = len(batch)
    if size < HEADER_SIZE or rules.stamps_append_time:
        return None
    _, length, _, magic, crc, attributes, last_delta, _, max_timestamp, producer_id, epoch, sequence, count = _unpack(
        batch
    )
    if (
        length + LOG_OVERHEAD != size
        or magic != MAGIC
        or attributes
        or producer_id >= 0
        or last_delta + 1 != count
        or count <= 0
        or size > rules.max_message_bytes
        or _crc32c(batch[ATTRIBUTES_OFFSET:]) != crc
    ):
        return None
    return last_delta, max_timestamp, producer_id, epoch, sequence


def admit(
    batches: memoryview, next_offset: int, leader_epoch: int, now_ms: int, rules: AppendRules, from_client: bool
) -> tuple[bytearray | memoryview, list[Batch]]:
    """Check the batches, and stamp offsets from `next_offset` on and the epoch in place.

    Returns the bytes to write (the given ones unless the topic recompresses) and one tuple per batch. `batches` must be
    writable. Raises KafkaError: CORRUPT_MESSAGE, INVALID_RECORD, INVALID_TIMESTAMP, MESSAGE_TOO_LARGE,
    UNSUPPORTED_COMPRESSION_TYPE; or NeedsInspection. A refused buffer may be stamped in part. The size limit does not
    apply to control batches, because a transaction must be able to end.
    """
    size = len(batches)
    position = 0
    admitted: list[Batch] = []
    while position < size:
        try:
            fields = _unpack(batches, position)
        except StructError:
            batches = _without_fragment(batches, position)
            break
        (
            base_offset, length, _, magic, crc, attributes, last_delta, _, max_timestamp, producer_id, producer_epoch,
            base_sequence, count,
        ) = fields  # fmt: skip
        end = position + length + LOG_OVERHEAD
        if magic != MAGIC or length < MIN_BATCH_LENGTH or end > size:
            batches = _without_fragment(batches, position)
            break
        if from_client and (end < size or base_offset):
            batches, size = _only_batch(batches, base_offset, end), end
        if length + LOG_OVERHEAD > rules.max_message_bytes and (from_client or not attributes & CONTROL_FLAG):
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"a batch of {length + LOG_OVERHEAD} bytes is above max.message.bytes, {rules.max_message_bytes}",
            )
        if _crc32c(batches[position + ATTRIBUTES_OFFSET : end]) != crc:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"the stored CRC {crc} is not that of the batch")
        if last_delta + 1 != count or count <= 0:
            _refuse_count(last_delta, count, from_client)
        if from_client:
            if attributes & CONTROL_FLAG or (producer_id >= 0 and base_sequence < 0):
                _refuse_client_batch(0, attributes, 0, producer_id, base_sequence)
            if attributes & COMPRESSION_MASK > _MAX_COMPRESSION:
                raise KafkaError(
                    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression {attributes & COMPRESSION_MASK} is unknown"
                )
            if rules.looks_inside:
                if batches is not rules.inspected_batch:
                    batches = inspect_batch(batches, BatchHeader._make(fields), now_ms, rules)
                return _admit_rewritten(batches, next_offset, leader_epoch, now_ms, rules)
            if attributes & COMPRESSION_MASK:
                _check_compressed(batches, position, BatchHeader._make(fields))
            else:
                check_records(batches, position + HEADER_SIZE, end, count)
        if from_client and (max_timestamp > now_ms + rules.after_max_ms or attributes & LOG_APPEND_TIME_FLAG):
            attributes = _check_times(batches, position, BatchHeader._make(fields), now_ms, rules)
        if rules.stamps_append_time:
            header = stamp_log_append_time(batches, position, BatchHeader._make(fields), now_ms)
            max_timestamp, attributes = now_ms, header.attributes
        stamp(batches, position, next_offset, leader_epoch)
        last_offset = next_offset + last_delta
        admitted.append(
            (position, length + LOG_OVERHEAD, next_offset, last_offset, max_timestamp, attributes, producer_id,
             producer_epoch, base_sequence, leader_epoch)
        )  # fmt: skip
        next_offset = last_offset + 1
        position = end
    if not admitted:
        raise KafkaError(ErrorCode.INVALID_RECORD, "no record batch at all")
    return batches, admitted


def check_one_batch(batches: memoryview) -> None:
    """Refuse bytes that are not one whole batch of the current format, with the errors of `admit`."""
    size = len(batches)
    if size >= HEADER_SIZE:
        _, length, _, magic, *_ = _unpack(batches)
        end = length + LOG_OVERHEAD
        if magic == MAGIC and length >= MIN_BATCH_LENGTH and end <= size:
            if end < size:
                _without_fragment(batches, end)
            return
    _without_fragment(batches, 0)


class UnexplainedGap(KafkaError):
    """The batches begin above the log end: the leader has lost [first_offset, end_offset), or compacted it away."""

    def __init__(self, first_offset: int, end_offset: int) -> None:
        super().__init__(
            ErrorCode.CORRUPT_MESSAGE, f"offsets {first_offset} to {end_offset} are missing from what the leader sends"
        )
        self.first_offset = first_offset
        self.end_offset = end_offset


def admit_replicated(
    batches: memoryview, next_offset: int, no_gap_from: int = INT64_MAX, epoch_max: int = INT64_MAX
) -> list[Batch]:
    """Check batches fetched from a leader, which have their offsets already. Returns whole batches only.

    A partial last batch, at the end of a fetch, is left out, and so are batches after a gap that reaches above
    `no_gap_from`. Raises CORRUPT_MESSAGE, also for a leader epoch above `epoch_max`, which the CRC does not cover;
    UnexplainedGap if such a gap comes first; OFFSET_OUT_OF_RANGE for a batch below `next_offset` (Kafka's
    UnexpectedAppendOffsetException).
    """
    size = len(batches)
    position = 0
    admitted: list[Batch] = []
    while size - position >= HEADER.size:
        fields = _unpack(batches, position)
        (
            base_offset, length, leader_epoch, magic, crc, attributes, last_delta, _, max_timestamp, producer_id,
            producer_epoch, base_sequence, _,
        ) = fields  # fmt: skip
        if magic != MAGIC or length < MIN_BATCH_LENGTH:
            check_magic(read_header(batches, position))
        end = position + length + LOG_OVERHEAD
        if end > size:
            break
        if _crc32c(batches[position + ATTRIBUTES_OFFSET : end]) != crc:
            raise CorruptRecord(f"the CRC of the batch at offset {base_offset} is wrong")
        if leader_epoch > epoch_max:
            raise CorruptRecord(f"the batch at offset {base_offset} is of leader epoch {leader_epoch}")
        if base_offset < next_offset or last_delta < 0:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"a batch of offset {base_offset}, but the log ends at {next_offset}"
            )
        if base_offset > next_offset and base_offset > no_gap_from:
            if not admitted:
                raise UnexplainedGap(next_offset, base_offset)
            break
        last_offset = base_offset + last_delta
        admitted.append(
            (position, length + LOG_OVERHEAD, base_offset, last_offset, max_timestamp, attributes, producer_id,
             producer_epoch, base_sequence, leader_epoch)
        )  # fmt: skip
        next_offset = last_offset + 1
        position = end
    return admitted


def have_gaps(admitted: list[Batch], next_offset: int) -> bool:
    """Whether offsets are missing before or between the batches, the first of which was expected at `next_offset`."""
    for batch in admitted:
        if batch[2] != next_offset:
            return True
        next_offset = batch[3] + 1
    return False


def check_first_holds(batches: memoryview, offset: int) -> int:
    """The base offset of the first batch, which may be below `offset`.

    Raises CORRUPT_MESSAGE unless the batch is whole and holds `offset`: a leader with a damaged log may send a batch
    with any base offset, even 0.
    """
    header = read_header(batches) if len(batches) >= HEADER.size else None
    if (
        header is None
        or header.magic != MAGIC
        or not MIN_BATCH_LENGTH <= header.batch_length <= len(batches) - LOG_OVERHEAD
        or not 0 <= header.base_offset <= offset <= header.last_offset
        or _crc32c(batches[ATTRIBUTES_OFFSET : header.size_bytes]) != header.crc
    ):
        raise CorruptRecord(f"no whole batch that holds offset {offset}")
    return header.base_offset


def as_batch(position: int, header: BatchHeader) -> Batch:
    return (
        position, header.size_bytes, header.base_offset, header.last_offset, header.max_timestamp, header.attributes,
        header.producer_id, header.producer_epoch, header.base_sequence, header.partition_leader_epoch,
    )  # fmt: skip


def _without_fragment(batches: memoryview, position: int) -> memoryview:
    """The batches without the bytes from `position` on, if these are a partial batch after a whole one.

    Other bytes that are no batch of the current format are refused. As in Kafka (ByteBufferLogInputStream), a partial
    batch ends the batches, and at least one whole batch must precede it.
    """
    left = len(batches) - position
    if left > MAGIC_OFFSET:
        length, _, magic = _FRAME.unpack_from(batches, position + LENGTH_OFFSET)
        if length < _MIN_MESSAGE_LENGTH or not 0 <= magic <= MAGIC:
            raise CorruptRecord(f"a batch of length {length} and magic {magic}")
        if length + LOG_OVERHEAD <= left:
            if position:
                _refuse_client_batch(0, 0, position, -1, 0)
            if magic != MAGIC:
                raise KafkaError(ErrorCode.INVALID_RECORD, f"a message set of magic {magic}, not a record batch")
            raise CorruptRecord(f"a batch of length {length} is shorter than its header")
    if position == 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{left} bytes are no whole record batch")
    return batches[:position]


def _only_batch(batches: memoryview, base_offset: int, end: int) -> memoryview:
    """A client's batch, which ends at `end`. Refuses a whole second one, and a base offset."""
    batch = _without_fragment(batches, end) if end < len(batches) else batches
    if base_offset:
        _refuse_client_batch(base_offset, 0, 0, -1, 0)
    return batch


def _refuse_count(last_delta: int, count: int, from_client: bool) -> None:
    # The node's own batches may have gaps after compaction, but their offsets never decrease.
    if from_client or last_delta < 0 or count < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"{count} records in a batch of {last_delta + 1} offsets")


def _refuse_client_batch(base_offset: int, attributes: int, position: int, producer_id: int, sequence: int) -> None:
    if base_offset:
        reason = f"the base offset must be 0, it is {base_offset}"
    elif attributes & CONTROL_FLAG:
        reason = "clients may not write control records"
    elif position:
        reason = "only one record batch per partition"
    else:
        reason = f"sequence {sequence} of producer {producer_id}"
    raise KafkaError(ErrorCode.INVALID_RECORD, reason)


def _check_times(batches: memoryview, position: int, header: BatchHeader, now_ms: int, rules: AppendRules) -> int:
    """The attributes of an accepted batch that has a future timestamp or claims LogAppendTime.

    For a topic with CreateTime, Kafka accepts the claim and changes the batch to CreateTime
    (LogValidator.validateTimestamp).
    """
    if rules.stamps_append_time or header.max_timestamp == NO_TIMESTAMP:
        if header.attributes & LOG_APPEND_TIME_FLAG:
            reason = "a producer may not set LogAppendTime"
            blamed = tuple((index, reason) for index in range(min(header.record_count, BLAMED_MAX)))
            raise KafkaError(ErrorCode.INVALID_TIMESTAMP, reason, blamed)
        return header.attributes
    if header.max_timestamp > now_ms + rules.after_max_ms:
        refuse_times(batches, position, header, now_ms, rules)
    return stamp_create_time(batches, position, header).attributes


def _check_compressed(batches: memoryview, position: int, header: BatchHeader) -> None:
    payload_bytes = header.size_bytes - HEADER_SIZE
    check_plausible(header.record_count, payload_bytes, header.compression)
    if header.compression == LZ4:
        payload = batches[position + HEADER_SIZE : position + header.size_bytes]
        check_lz4_descriptor(payload)
        if payload_bytes > WALKED_COMPRESSED_MAX:
            check_lz4_end(payload)
            return
    elif payload_bytes > WALKED_COMPRESSED_MAX:
        if header.compression == SNAPPY:
            check_snappy_framing(batches[position + HEADER_SIZE :])
        return
    try:
        section = decompressed(batches, position, header, WALKED_BYTES_MAX)
    except KafkaError as error:
        if error.code is ErrorCode.MESSAGE_TOO_LARGE:
            return
        raise
    check_records(section, 0, len(section), header.record_count, counted=True)


def _admit_rewritten(
    batches: memoryview, next_offset: int, leader_epoch: int, now_ms: int, rules: AppendRules
) -> tuple[bytearray | memoryview, list[Batch]]:
    header = read_header(batches)
    if header.max_timestamp > now_ms + rules.after_max_ms or header.attributes & LOG_APPEND_TIME_FLAG:
        header = header._replace(attributes=_check_times(batches, 0, header, now_ms, rules))
    if rules.stamps_append_time:
        header = stamp_log_append_time(batches, 0, header, now_ms)
    stamp(batches, 0, next_offset, leader_epoch)
    header = header._replace(base_offset=next_offset, partition_leader_epoch=leader_epoch)
    return batches, [as_batch(0, header)]
