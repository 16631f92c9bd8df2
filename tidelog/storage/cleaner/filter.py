"""Filters one batch at a time for the cleaner: it stays whole, loses records, becomes empty, or is removed.

Pure. Follows the rules of Kafka's Cleaner and MemoryRecords.filterTo (KIP-98 for transactions, KIP-534 for the removal
time of tombstones and markers) and encodes the batch. Invariant: a remaining batch keeps its first and last offset, its
leader epoch, its producer and sequences, and all bytes of its remaining records except the timestamp delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.control_batches import ControlRecordType, control_record_type
from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    DELETE_HORIZON_FLAG,
    HEADER,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    LOG_APPEND_TIME_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    CorruptRecord,
    check_crc,
    check_magic,
    write_crc,
)
from tidelog.protocol.batches.records import decode_section, record_section
from tidelog.storage.cleaner.keys import KeptRecords, KeyTable, Run, largest_timestamp, rebased
from tidelog.storage.cleaner.transactions import CleanedTransactions
from tidelog.storage.segments.log_config import INT64_MAX

if TYPE_CHECKING:
    from tidelog.storage.segments.transaction_index import AbortedTransaction

Buffer = bytes | bytearray | memoryview


class LastOfProducer(NamedTuple):
    """A producer's epoch, and the last offset of its last data batch, -1 if its last batch is a marker."""

    epoch: int
    last_offset: int
    sequence_before: int = NO_SEQUENCE
    """The last sequence of the batch before those that are not committed, where no offset of it is known."""


_FLAGS_OF_EMPTY: Final = LOG_APPEND_TIME_FLAG | TRANSACTIONAL_FLAG | CONTROL_FLAG


@dataclass(slots=True)
class FilterStats:
    messages_read: int = 0
    messages_kept: int = 0
    keyless: int = 0


class CleanedBatch(NamedTuple):
    """`max_timestamp` is the largest of the records, -1 without records."""

    data: Buffer
    last_offset: int
    max_timestamp: int


class BatchFilter:
    """`now_ms`: the start of the cleaning. `last_of_producers`: producer id -> its last batch, for known producers.

    `removes_until_ms`: tombstones and markers that were to be kept until then or less go. A tombstone goes only below
    `clean_below`, where an earlier cleaning has removed what it deletes. With it in one cleaning, a reader that is
    between the two would see the deleted record alone.
    """

    def __init__(
        self,
        keys: KeyTable,
        transactions: CleanedTransactions,
        last_of_producers: Mapping[int, LastOfProducer],
        now_ms: int,
        delete_retention_ms: int,
        removes_until_ms: int,
        clean_below: int,
    ) -> None:
        self._keys = keys
        self._transactions = transactions
        self._last_of_producers = last_of_producers
        self._removes_until_ms = removes_until_ms
        self._clean_below = clean_below
        self._new_horizon_ms = min(now_ms + delete_retention_ms, INT64_MAX)  # 2**63 - 1 ms keep them for ever
        self.stats = FilterStats()
        self.newly_indexed: list[AbortedTransaction] = []
        """Aborted transactions whose marker stays, for the transaction index of the new segment."""

    def clean(self, buffer: Buffer, position: int, header: BatchHeader) -> CleanedBatch | None:
        """The cleaned batch from `position`; None if it is removed. Raises KafkaError for a damaged batch."""
        check_magic(header)
        if not check_crc(buffer, position, header):
            raise CorruptRecord(f"the CRC of the batch at offset {header.base_offset} is wrong")
        if header.is_control:
            return self._clean_control(buffer, position, header)
        self.stats.messages_read += header.record_count
        if self._transactions.on_data(header):
            return self._without_records(header)
        section = record_section(buffer, position, header, codecs.DEFAULT_MAX_BYTES)
        is_over = header.has_delete_horizon and header.base_timestamp <= self._removes_until_ms
        drop_tombstones = is_over and header.last_offset < self._clean_below
        kept = self._keys.keep(section, header, drop_tombstones)
        self.stats.keyless += kept.keyless
        if not kept.records:
            return self._without_records(header)
        self.stats.messages_kept += kept.records
        needs_horizon = kept.has_tombstone and not header.has_delete_horizon
        if kept.records == header.record_count and not needs_horizon:
            return CleanedBatch(_whole(buffer, position, header), header.last_offset, header.max_timestamp)
        return self._rewritten(section, header, kept, needs_horizon)

    def _clean_control(self, buffer: Buffer, position: int, header: BatchHeader) -> CleanedBatch | None:
        section = record_section(buffer, position, header, codecs.DEFAULT_MAX_BYTES)
        records = decode_section(section, header)
        self.stats.messages_read += len(records)
        kind: ControlRecordType | None = control_record_type(records[0].key) if records else None
        may_go, aborted = self._transactions.on_control(header, kind)
        if aborted is not None:
            self.newly_indexed.append(aborted)
        is_over = header.has_delete_horizon and header.base_timestamp <= self._removes_until_ms
        if not records or (may_go and is_over):
            return self._without_records(header)
        self.stats.messages_kept += len(records)
        if may_go and not header.has_delete_horizon:
            everything = KeptRecords([(0, len(section))], len(records), None, False, 0)
            return self._rewritten(section, header, everything, True)
        return CleanedBatch(_whole(buffer, position, header), header.last_offset, header.max_timestamp)

    def _without_records(self, header: BatchHeader) -> CleanedBatch | None:
        """An empty batch if it is the last one of its producer, otherwise None."""
        if header.producer_id >= 0 and self._is_last_of_producer(header):
            return CleanedBatch(_empty(header, header.attributes & _FLAGS_OF_EMPTY), header.last_offset, NO_TIMESTAMP)
        return None

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._last_of_producers.get(header.producer_id)
        if last is None:
            return False
        if last.last_offset < 0:
            return header.is_control and header.producer_epoch == last.epoch
        is_before = header.producer_epoch == last.epoch and header.last_sequence == last.sequence_before >= 0
        return header.last_offset == last.last_offset or (is_before and not header.is_control)

    def _rewritten(self, section: bytes, header: BatchHeader, kept: KeptRecords, with_horizon: bool) -> CleanedBatch:
        attributes, base_timestamp = header.attributes, header.base_timestamp
        if with_horizon:
            attributes |= DELETE_HORIZON_FLAG
            base_timestamp = self._new_horizon_ms
            records = rebased(section, kept.runs, header.base_timestamp, base_timestamp)
        else:
            records = _joined(section, kept.runs)
        if header.compression:
            records = codecs.compress(header.compression, records)
        if header.timestamp_type == LOG_APPEND_TIME or kept.records == header.record_count:
            max_timestamp = header.max_timestamp
        elif kept.max_timestamp is not None:
            max_timestamp = kept.max_timestamp
        else:
            max_timestamp = largest_timestamp(section, kept.runs, header.base_timestamp)
        left = header._replace(
            attributes=attributes,
            base_timestamp=base_timestamp,
            max_timestamp=max_timestamp,
            record_count=kept.records,
        )
        return CleanedBatch(_batch(left, records), header.last_offset, max_timestamp)


def filler(offset: int, leader_epoch: int, first_offset: int = -1) -> CleanedBatch:
    """A batch of no producer without records, at the last offset of a segment whose last batch was removed.

    `first_offset`: it also holds the offsets from there on.
    """
    first_offset = offset if first_offset < 0 else first_offset
    header = BatchHeader(
        first_offset, 0, leader_epoch, MAGIC, 0, 0, offset - first_offset, NO_TIMESTAMP, NO_TIMESTAMP, NO_PRODUCER_ID,
        NO_PRODUCER_EPOCH, NO_SEQUENCE, 0,
    )  # fmt: skip
    return CleanedBatch(_empty(header, 0), offset, NO_TIMESTAMP)


def _whole(buffer: Buffer, position: int, header: BatchHeader) -> memoryview:
    return memoryview(buffer)[position : position + header.size_bytes]


def _joined(section: bytes, runs: list[Run]) -> bytes:
    if len(runs) == 1:
        return section[runs[0][0] : runs[0][1]]
    return b"".join([section[start:end] for start, end in runs])


def _empty(header: BatchHeader, attributes: int) -> bytearray:
    """A batch without records. It keeps its maximum timestamp, which shows when its producer was last active."""
    return _batch(header._replace(attributes=attributes, base_timestamp=NO_TIMESTAMP, record_count=0), b"")


def _batch(header: BatchHeader, records: bytes) -> bytearray:
    batch = bytearray(HEADER_SIZE) + records
    HEADER.pack_into(
        batch, 0, header.base_offset, len(batch) - LOG_OVERHEAD, header.partition_leader_epoch, MAGIC, 0,
        header.attributes, header.last_offset_delta, header.base_timestamp, header.max_timestamp, header.producer_id,
        header.producer_epoch, header.base_sequence, header.record_count,
    )  # fmt: skip
    write_crc(batch, 0, len(batch))
    return batch
