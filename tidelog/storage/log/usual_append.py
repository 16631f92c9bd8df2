"""Appends one batch in the usual form: from a client, from a coordinator of this node, or from a leader.

Each is one function, because it runs for every produce. What they do not cover is left to the general way of
`PartitionLog`: other forms, several batches, a new segment, a new leader epoch. They accept only batches that
the general way accepts, with the same effect on the log (tests/properties/test_usual_appends.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidelog.protocol.batches.control_batches import ControlRecordType, read_usual_marker
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_LOW_OFFSET,
    ATTRIBUTES_OFFSET,
    CONTROL_FLAG,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    TRANSACTIONAL_FLAG,
    stamp_head,
)
from tidelog.storage.log.failed_append import NOT_TAKEN_BACK, FailingLog, take_back
from tidelog.storage.producers.producer_state import EndMarker
from tidelog.storage.segments.append import IN_TRANSACTION, NO_APPEND_TIME, PLAIN, AppendInfo, admit_own, admit_usual

if TYPE_CHECKING:
    from tidelog.storage.log.flush import Durability
    from tidelog.storage.producers.producer_state import SentBatch
    from tidelog.storage.producers.verification import TransactionAppend
    from tidelog.storage.segments.append_rules import AppendRules
    from tidelog.storage.segments.leader_epochs import LeaderEpochs
    from tidelog.storage.segments.log_config import LogConfig

_as_tuple = tuple.__new__
_unpack = HEADER.unpack_from


class Log(FailingLog, Protocol):
    """The part of `PartitionLog` that an append uses."""

    config: LogConfig
    durability: Durability
    flush_at: int
    leader_epochs: LeaderEpochs
    rules: AppendRules
    segment_bytes: int

    def repeated(self, batch: SentBatch) -> AppendInfo: ...
    def accept_marker(self, marker: EndMarker | None) -> None: ...


def append_usual(
    log: Log, batch: memoryview, leader_epoch: int, now_ms: int, from_client: bool,
    transaction: TransactionAppend | None,
) -> AppendInfo | None:  # fmt: skip
    """`PartitionLog.append_as_leader`. None, without a change, for a batch in another form or state of the log."""
    if from_client:
        usual = admit_usual(batch, now_ms, log.rules, PLAIN if transaction is None else IN_TRANSACTION)
    elif transaction is not None:
        return _append_marker(log, batch, leader_epoch, now_ms, transaction)
    else:
        usual = admit_own(batch, log.rules)
    if usual is None:
        return None
    last_delta, max_timestamp, producer_id, producer_epoch, base_sequence = usual
    size, first_offset = len(batch), log.log_end_offset
    last_offset = first_offset + last_delta
    segment = log.segments.active
    if (
        segment.size_bytes + size > log.segment_bytes
        or max_timestamp > segment.roll_above_timestamp
        or now_ms > segment.roll_above_now
        or last_offset > segment.max_offset
        or segment.is_full
        or leader_epoch != log.leader_epochs.latest
        or log.failure is not None
    ):
        return None
    producers = log.producers
    if producer_id >= 0:
        if log.lacks_producers:
            return None
        is_transactional = transaction is not None and batch[ATTRIBUTES_LOW_OFFSET] & TRANSACTIONAL_FLAG != 0
        if transaction is not None and is_transactional:
            repeated = producers.check_transactional(
                producer_id, producer_epoch, base_sequence, last_delta, True, now_ms, transaction.verification,
                log.config.verifies_transactions,
            )  # fmt: skip
        else:
            repeated = producers.check(producer_id, producer_epoch, base_sequence, last_delta, False, True, now_ms)
        if repeated is not None:
            return log.repeated(repeated)
    stamp_head(batch, 0, first_offset, size - LOG_OVERHEAD, leader_epoch)
    position = segment.size_bytes
    try:
        segment.append_one(batch, first_offset, last_offset, max_timestamp)
        if producer_id >= 0:
            producers.accept(
                producer_id, producer_epoch, base_sequence, first_offset, last_offset, max_timestamp, is_transactional
            )
        log_end_offset = producers.end_offset = log.log_end_offset = last_offset + 1
    except (OSError, MemoryError) as error:
        log.failure = NOT_TAKEN_BACK
        take_back(log, segment, position, error)
    if log_end_offset >= log.flush_at:
        log.durability.note_append(first_offset, log_end_offset)
    return _as_tuple(AppendInfo, (first_offset, last_offset, NO_APPEND_TIME, log.log_start_offset, False, batch))


def _append_marker(
    log: Log, batch: memoryview, leader_epoch: int, now_ms: int, transaction: TransactionAppend
) -> AppendInfo | None:
    """`append_usual` for the marker of a transaction, as this node encodes it."""
    usual = read_usual_marker(batch)
    if usual is None or log.rules.stamps_append_time:
        return None
    (
        _, length, _, magic, crc, attributes, last_delta, timestamp, max_timestamp, producer_id, producer_epoch, _,
        count,
    ) = _unpack(batch)  # fmt: skip
    size, offset = len(batch), log.log_end_offset
    segment = log.segments.active
    if (
        length + LOG_OVERHEAD != size
        or magic != MAGIC
        or attributes != TRANSACTIONAL_FLAG | CONTROL_FLAG
        or last_delta
        or count != 1
        or producer_id < 0
        or segment.size_bytes + size > log.segment_bytes
        or max_timestamp > segment.roll_above_timestamp
        or now_ms > segment.roll_above_now
        or offset > segment.max_offset
        or segment.is_full
        or leader_epoch != log.leader_epochs.latest
        or log.failure is not None
        or crc32c(batch[ATTRIBUTES_OFFSET:]) != crc
    ):
        return None
    kind, coordinator_epoch = usual
    is_abort = kind == ControlRecordType.ABORT
    marker = EndMarker(producer_id, producer_epoch, coordinator_epoch, is_abort, offset, timestamp)
    producers = log.producers
    producers.check_marker(marker, transaction.transaction_version)
    stamp_head(batch, 0, offset, size - LOG_OVERHEAD, leader_epoch)
    position = segment.size_bytes
    try:
        segment.append_one(batch, offset, offset, max_timestamp)
        log.accept_marker(marker)
        log_end_offset = producers.end_offset = log.log_end_offset = offset + 1
    except (OSError, MemoryError) as error:
        log.failure = NOT_TAKEN_BACK
        take_back(log, segment, position, error)
    if log_end_offset >= log.flush_at:
        log.durability.note_append(offset, log_end_offset)
    return _as_tuple(AppendInfo, (offset, offset, NO_APPEND_TIME, log.log_start_offset, False, batch))


def append_usual_as_follower(log: Log, batch: memoryview, now_ms: int, epoch_max: int) -> AppendInfo | None:
    """`PartitionLog.append_as_follower` for one whole batch at the log end, in the epoch of the batch before it."""
    size = len(batch)
    if size < HEADER_SIZE:
        return None
    (
        base_offset, length, leader_epoch, magic, crc, attributes, last_delta, _, max_timestamp, producer_id,
        producer_epoch, base_sequence, _,
    ) = _unpack(batch)  # fmt: skip
    last_offset = base_offset + last_delta
    segment = log.segments.active
    if (
        length + LOG_OVERHEAD != size
        or magic != MAGIC
        or base_offset != log.log_end_offset
        or attributes & CONTROL_FLAG
        or last_delta < 0
        or leader_epoch != log.leader_epochs.latest
        or leader_epoch > epoch_max
        or segment.size_bytes + size > log.segment_bytes
        or max_timestamp > segment.roll_above_timestamp
        or now_ms > segment.roll_above_now
        or last_offset > segment.max_offset
        or segment.is_full
        or log.failure is not None
        or crc32c(batch[ATTRIBUTES_OFFSET:]) != crc
    ):
        return None
    position, producers = segment.size_bytes, log.producers
    try:
        segment.append_one(batch, base_offset, last_offset, max_timestamp)
        if producer_id >= 0:
            is_transactional = attributes & TRANSACTIONAL_FLAG != 0
            producers.accept(
                producer_id, producer_epoch, base_sequence, base_offset, last_offset, max_timestamp, is_transactional
            )
        log_end_offset = producers.end_offset = log.log_end_offset = last_offset + 1
    except (OSError, MemoryError) as error:
        log.failure = NOT_TAKEN_BACK
        take_back(log, segment, position, error)
    if log_end_offset >= log.flush_at:
        log.durability.note_append(base_offset, log_end_offset)
    return _as_tuple(AppendInfo, (base_offset, last_offset, NO_APPEND_TIME, log.log_start_offset, False, None))
