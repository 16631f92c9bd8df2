"""One partition's part of a fetch answer, turned into records a bit at a time.

Pure. Invariants: records come in offset order, none before the offset that was asked for, none of control batches or of
aborted transactions; a batch is decoded when its first record is due, not before; `position` is always the offset from
which a later fetch would go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.batches.record_batch import Buffer, check_crc, iter_headers
from tidelog.protocol.batches.records import decode_batch, iter_data_batches
from tidelog.protocol.errors import ErrorCode, KafkaError

Convert = Callable[[bytes], Any]


class CompletedFetch:
    """Record batches of one partition, and how far they were handed out."""

    __slots__ = (
        "_batches",
        "_buffer",
        "_check_crcs",
        "_cursor",
        "_key_convert",
        "_problem",
        "_records",
        "_trace",
        "_value_convert",
        "end_epoch",
        "end_offset",
        "leader_epoch",
        "partition",
        "position",
        "size_bytes",
        "start_offset",
    )

    def __init__(
        self,
        partition: TopicPartition,
        start_offset: int,
        buffer: Buffer,
        aborted: Iterable[tuple[int, int]] = (),
        *,
        high_watermark: int = -1,
        check_crcs: bool = True,
        key_convert: Convert | None = None,
        value_convert: Convert | None = None,
    ) -> None:
        self.partition = partition
        self.start_offset = start_offset
        self.position = start_offset
        self.leader_epoch = -1
        self.size_bytes = len(buffer)
        self.end_offset = start_offset
        """The offset after the last whole batch, skipped ones included."""
        self.end_epoch = -1
        """The leader epoch of that batch."""
        self._measure(buffer, high_watermark)
        self._buffer = buffer
        self._check_crcs = check_crcs
        self._key_convert = key_convert
        self._value_convert = value_convert
        self._batches = iter_data_batches(buffer, aborted)
        self._records: list[ConsumerRecord] = []
        self._cursor = 0
        self._problem: Exception | None = None
        self._trace: TracebackType | None = None

    def _measure(self, buffer: Buffer, high_watermark: int) -> None:
        """Find the end. Raises KafkaError CORRUPT_MESSAGE when a batch is out of place, for its base offset is outside
        of the CRC: batches follow each other, the first holds the offset asked for or begins below the high watermark.
        Batches before one with an impossible length are handed out; that one is met again by the next fetch.
        """
        headers = iter_headers(buffer)
        while True:
            try:
                _, header = next(headers)
            except StopIteration:
                return
            except KafkaError:
                if self.exhausted:
                    raise
                return
            base, end = header.base_offset, self.end_offset
            is_first = end == self.start_offset
            too_late = is_first and high_watermark >= 0 and base > max(high_watermark, end)
            if header.next_offset <= end or (not is_first and base < end) or too_late:
                raise self._out_of_place(base)
            self.end_offset = header.next_offset
            self.end_epoch = header.partition_leader_epoch

    def _out_of_place(self, base_offset: int) -> KafkaError:
        return KafkaError(
            ErrorCode.CORRUPT_MESSAGE,
            f"{self.partition}: a batch says that it begins at offset {base_offset}, in an answer from offset "
            f"{self.start_offset} on",
        )

    @property
    def exhausted(self) -> bool:
        return self.position >= self.end_offset

    def take(self, limit: int) -> list[ConsumerRecord]:
        """Up to `limit` records, and `position` moves behind them; none when nothing is left.

        Raises KafkaError CORRUPT_MESSAGE or INVALID_RECORD when a broken batch is next, and what a deserializer raised
        when that record is; again every time.
        """
        taken: list[ConsumerRecord] = []
        while len(taken) < limit:
            if self._cursor >= len(self._records):
                try:
                    more = self._problem is None and self._decode_next()
                except Exception as error:
                    self._problem, self._trace = error, error.__traceback__
                    more = False
                if self._problem is not None and not more:
                    if taken:
                        break
                    raise self._problem.with_traceback(self._trace)  # else it grew with every poll
                if not more:
                    self.position, self.leader_epoch = self.end_offset, self.end_epoch
                    return taken
            end = self._cursor + limit - len(taken)
            taken += self._records[self._cursor : end]
            self._cursor = min(end, len(self._records))
            self.leader_epoch = taken[-1].leader_epoch
            self.position = taken[-1].offset + 1
        return taken

    def _decode_next(self) -> bool:
        """Decode the next batch that has a record to hand out; False when there is none."""
        for at, header in self._batches:
            if self._check_crcs and not check_crc(self._buffer, at, header):
                raise KafkaError(
                    ErrorCode.CORRUPT_MESSAGE,
                    f"{self.partition}: the batch at offset {header.base_offset} fails its CRC",
                )
            topic, partition = self.partition
            timestamp_type, epoch, new = header.timestamp_type, header.partition_leader_epoch, tuple.__new__
            records = [
                new(ConsumerRecord, (topic, partition, offset, timestamp, timestamp_type, key, value, headers, epoch))
                for offset, timestamp, key, value, headers in decode_batch(self._buffer, at, header)
                if offset >= self.start_offset
            ]
            if records:
                self._records = self._converted(records)
                self._cursor = 0
                return bool(self._records)
        self._records = []
        self._cursor = 0
        self._buffer = b""
        return False

    def _converted(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """The records up to the first that a deserializer does not take, which is the problem from then on."""
        key_convert, value_convert = self._key_convert, self._value_convert
        if key_convert is None and value_convert is None:
            return records
        converted: list[ConsumerRecord] = []
        for each in records:
            try:
                if key_convert is not None and each.key is not None:
                    each = each._replace(key=key_convert(each.key))
                if value_convert is not None and each.value is not None:
                    each = each._replace(value=value_convert(each.value))
            except Exception as error:
                error.add_note(f"at offset {each.offset} of {self.partition}")
                self._problem, self._trace = error, error.__traceback__
                break
            converted.append(each)
        return converted
