"""Decodes fetched batches to consumer records: in Python, and in bulk with a compiled loop where numba is installed.

The loop takes a third of a second and 120 MB to load, so a consumer loads it only after it has read many records in
large batches. Pure, except that `load_kernel` imports modules. Invariant: both ways make the same records.
"""

from __future__ import annotations

from itertools import repeat
from typing import Final

from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.batches import record_columns
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.protocol.batches.record_columns import FEWEST_RECORDS, split_records
from tidelog.protocol.batches.records import decode_fields

RECORDS_BEFORE_KERNEL: Final = 50_000
"""A consumer that has read so many in large batches reads in bulk."""


class RecordDecoder:
    """The decoder of one consumer."""

    __slots__ = ("_bulk_records", "_has_kernel")

    def __init__(self) -> None:
        self._bulk_records = 0
        """Records of large batches."""
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

    def decode(
        self, partition: TopicPartition, section: bytes, header: BatchHeader, first_offset: int
    ) -> list[ConsumerRecord]:
        """The records of a decompressed section from `first_offset` on. Raises KafkaError as `decode_fields`."""
        topic, number = partition
        timestamp_type, epoch, new = header.timestamp_type, header.partition_leader_epoch, tuple.__new__
        if header.record_count >= FEWEST_RECORDS:
            self._bulk_records += header.record_count
            columns = split_records(section, header, first_offset) if self._has_kernel else None
            if columns is not None:
                offsets, timestamps, keys, values, headers = columns
                before = repeat(topic), repeat(number), offsets, timestamps, repeat(timestamp_type)
                return list(map(new, repeat(ConsumerRecord), zip(*before, keys, values, headers, repeat(epoch))))
        return [
            new(ConsumerRecord, (topic, number, offset, timestamp, timestamp_type, key, value, record_headers, epoch))
            for offset, timestamp, key, value, record_headers in decode_fields(section, header)
            if offset >= first_offset
        ]
