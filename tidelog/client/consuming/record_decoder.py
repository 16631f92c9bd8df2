"""Decodes fetched batches to consumer records: in Python, and in bulk with a compiled loop where numba is installed.

The loop takes a third of a second and 120 MB to load, so a consumer loads it only after it has read many records that
came together. Pure, except that `load_kernel` imports modules. Invariant: both ways make the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.batches import record_columns
from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.batches.record_batch import HEADER_SIZE, LOG_OVERHEAD, BatchHeader, Buffer
from tidelog.protocol.batches.record_columns import FEWEST_RECORDS, RecordColumns, split_records, split_sections
from tidelog.protocol.batches.records import decode_fields

RECORDS_BEFORE_KERNEL: Final = 50_000
"""A consumer that has read so many in long runs reads in bulk."""


class RecordDecoder:
    """The decoder of one consumer."""

    __slots__ = ("_bulk_records", "_has_kernel", "max_batch_bytes")

    def __init__(self, max_batch_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_batch_bytes = max_batch_bytes
        """A batch that decompresses to more is an error."""
        self._bulk_records = 0
        """Records of runs that are long enough for the compiled loop."""
        self._has_kernel = False

    @property
    def is_kernel_due(self) -> bool:
        """Whether `load_kernel` would pay off now."""
        return self._bulk_records >= RECORDS_BEFORE_KERNEL and not self._has_kernel

    def load_kernel(self) -> None:
        """Load the compiled loop, in a thread other than the event loop's, and use it from now on. Raises ImportError
        where numba is not installed, and what a numba that does not work raises.
        """
        record_columns.load()
        self._has_kernel = True

    def decode_run(
        self, partition: TopicPartition, buffer: Buffer, run: Sequence[tuple[int, BatchHeader]], first_offset: int
    ) -> list[ConsumerRecord] | None:
        """The records from `first_offset` on of a run: whole uncompressed batches of one leader epoch and timestamp
        type, by their places in `buffer`, in offset order. None if `decode` must look at each of them.
        """
        counts = [header[12] for _, header in run]
        if sum(counts) < FEWEST_RECORDS:
            return None
        if not self._has_kernel:
            self._bulk_records += sum([count for count in counts if count < FEWEST_RECORDS])  # `decode` adds the others
            return None
        first, (last, header) = run[0][0], run[-1]
        data = bytes(memoryview(buffer)[first : last + header.size_bytes])
        sections = []
        for start, each in run:
            start -= first
            sections.append((start + HEADER_SIZE, start + each[1] + LOG_OVERHEAD, each))
        return _records_of(partition, header, split_sections(data, sections, first_offset))

    def decode(
        self, partition: TopicPartition, section: bytes, header: BatchHeader, first_offset: int
    ) -> list[ConsumerRecord]:
        """The records of a decompressed section from `first_offset` on. Raises KafkaError as `decode_fields`."""
        if header.record_count >= FEWEST_RECORDS:
            self._bulk_records += header.record_count
            if self._has_kernel:
                records = _records_of(partition, header, split_records(section, header, first_offset))
                if records is not None:
                    return records
        topic, number = partition
        timestamp_type, epoch, new = header.timestamp_type, header.partition_leader_epoch, tuple.__new__
        return [
            new(ConsumerRecord, (topic, number, offset, timestamp, timestamp_type, key, value, record_headers, epoch))
            for offset, timestamp, key, value, record_headers in decode_fields(section, header)
            if offset >= first_offset
        ]


def _records_of(
    partition: TopicPartition, header: BatchHeader, columns: RecordColumns | None
) -> list[ConsumerRecord] | None:
    if columns is None:
        return None
    topic, number = partition
    offsets, timestamps, keys, values, headers = columns
    before = repeat(topic), repeat(number), offsets, timestamps, repeat(header.timestamp_type)
    fields = zip(*before, keys, values, headers, repeat(header.partition_leader_epoch))
    return list(map(tuple.__new__, repeat(ConsumerRecord), fields))
