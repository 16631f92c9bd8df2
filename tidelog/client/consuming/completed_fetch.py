"""The batches of one partition from one fetch response, decoded into records or Arrow columns in steps.

Pure. Invariants: records come in offset order, from the requested offset on. Records of control
batches and of aborted transactions are left out. A run of batches is decoded only when its first record is
due. `position` is always the offset at which a later fetch continues, and at which either kind of
decoding continues after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.protocol.batches.columnar import decode_columns, in_batch
from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    Buffer,
    check_crc,
    check_magic,
    iter_headers,
    refuse_old_format,
)
from tidelog.protocol.batches.records import iter_data_batches, record_section
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

Deserializer = Callable[[bytes], Any]

RUN_BYTES_MAX: Final = 256 * 1024
"""Small batches are decoded together up to this size, which a processor's cache holds. A larger batch is alone."""
RUN_RECORDS_MAX: Final = 500
"""And up to so many records: they all live at once, and the garbage collector runs for every 700 new objects."""


class CompletedFetch:
    """Record batches of one partition, and the position up to which they are handed out."""

    __slots__ = (
        "_aborted",
        "_ahead",
        "_batch_end",
        "_batches",
        "_buffer",
        "_check_crcs",
        "_checked",
        "_columns",
        "_cursor",
        "_decoder",
        "_error",
        "_error_behind",
        "_headers",
        "_key_deserializer",
        "_pieces",
        "_records",
        "_refused",
        "_traceback",
        "_value_deserializer",
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
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        decoder: RecordDecoder | None = None,
    ) -> None:
        self.partition = partition
        self.start_offset = start_offset
        self.position = start_offset
        self.leader_epoch = -1
        self.size_bytes = len(buffer)
        self.end_offset = start_offset
        """The offset after the last whole batch, skipped batches included."""
        self.end_epoch = -1
        """The leader epoch of that batch."""
        self._headers: list[tuple[int, BatchHeader]] = []
        """Every whole batch: position and header."""
        self._find_end(buffer, high_watermark)
        self._buffer = buffer
        self._check_crcs = check_crcs
        self._decoder = RecordDecoder() if decoder is None else decoder
        self._key_deserializer = key_deserializer
        self._value_deserializer = value_deserializer
        self._aborted = tuple(aborted)
        self._begin_batches()
        self._pieces: Iterator[pa.RecordBatch] | None = None
        """The decoding into columns, which the next `take` ends; None while there is none."""
        self._columns: tuple[str, ...] = ()
        self._records: list[ConsumerRecord] = []
        self._cursor = 0
        self._refused: list[ConsumerRecord] = []
        """The records behind these, from one on that a deserializer has refused."""
        self._batch_end = start_offset
        """The offset after the batch that `_records` come from."""
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None

    def _begin_batches(self) -> None:
        self._batches = iter_data_batches(self._buffer, self._aborted, self._true_headers())
        self._checked: deque[tuple[int, BatchHeader]] = deque()
        """The next batches, which could not be decoded in a run."""
        self._ahead: tuple[int, BatchHeader] | None = None
        """The next batch behind them, if it has been read already."""
        self._error_behind: Exception | None = None
        """The error of the batch behind them."""

    def _true_headers(self) -> Iterable[tuple[int, BatchHeader]]:
        """The headers. The CRCs of the batches that these would hide from the reader are checked on the way."""
        if not self._check_crcs:
            return self._headers
        return _checked_hidden(self.partition, self._buffer, self._headers, {each[0] for each in self._aborted})

    def _find_end(self, buffer: Buffer, high_watermark: int) -> None:
        """Set `end_offset`, `end_epoch` and `_headers`. Raises KafkaError CORRUPT_MESSAGE for a
        misplaced batch.

        The base offset is not covered by the CRC, so its order is checked: batches follow each
        other, and the first batch holds the requested offset or begins below the high watermark. A
        batch with an impossible length ends the scan. Batches before it are handed out, and the
        next fetch returns it again.
        """
        headers = iter_headers(buffer)
        add_header = self._headers.append
        while True:
            try:
                place = next(headers)
            except StopIteration:
                if self.exhausted:
                    refuse_old_format(buffer)
                return
            except KafkaError:
                if self.exhausted:
                    raise
                return
            header = place[1]
            base, end = header.base_offset, self.end_offset
            is_first = end == self.start_offset
            too_late = is_first and high_watermark >= 0 and base > max(high_watermark, end)
            next_offset = base + header[6] + 1  # with the last offset delta
            if next_offset <= end or (not is_first and base < end) or too_late:
                raise self._misplaced_batch(base)
            add_header(place)
            self.end_offset = next_offset
            self.end_epoch = header.partition_leader_epoch

    def _misplaced_batch(self, base_offset: int) -> KafkaError:
        return KafkaError(
            ErrorCode.CORRUPT_MESSAGE,
            f"{self.partition}: a batch says that it begins at offset {base_offset}, in an answer from offset "
            f"{self.start_offset} on",
        )

    @property
    def exhausted(self) -> bool:
        return self.position >= self.end_offset

    @property
    def has_failed(self) -> bool:
        """Whether the next record could not be decoded, as every later `take` will say."""
        return self._error is not None and self._cursor >= len(self._records)

    def take(self, limit: int) -> list[ConsumerRecord]:
        """Return up to `limit` records and move `position` behind them; empty at the end.

        Raises KafkaError CORRUPT_MESSAGE or INVALID_RECORD when the next batch is broken, also in later
        calls. Raises the deserializer's exception when it refuses the next record, which it gets again in each call.
        `position` is at that record then: its caller may pass over it.
        """
        self._pieces = None
        if self._refused and self.has_failed:
            self._error = None  # the schema registry may be back
        records: list[ConsumerRecord] = []
        while len(records) < limit:
            if self._cursor >= len(self._records):
                try:
                    has_records = self._error is None and self._decode_next()
                except Exception as error:
                    self._error, self._traceback = error, error.__traceback__
                    has_records = False
                if self._error is not None and not has_records:
                    if records:
                        break
                    self._move_to_refused()
                    # The stored traceback replaces one that would grow with every poll.
                    raise self._error.with_traceback(self._traceback)
                if not has_records:
                    self.position, self.leader_epoch = self.end_offset, self.end_epoch
                    return records
            end = self._cursor + limit - len(records)
            records += self._records[self._cursor : end]
            self._cursor = min(end, len(self._records))
            self.leader_epoch = records[-1].leader_epoch
            self._move_behind(records[-1].offset, self._batch_end, self._cursor == len(self._records))
        return records

    def _move_behind(self, last_offset: int, batch_end: int, is_last: bool) -> None:
        """Move `position` behind a record.

        A record may claim an offset outside of its batch: a CRC does not prevent that. Then `position` stays in the
        batch, so that the records after it are not passed over.
        """
        limit = batch_end if is_last else batch_end - 1
        self.position = max(self.position, last_offset + 1 if last_offset < batch_end else limit)

    def _move_to_refused(self) -> None:
        """Move `position` over offsets without a record, up to one that a deserializer has refused."""
        if self._refused and self.position < self._refused[0].offset < self._batch_end:
            # The record's own epoch: the one before it may have ended at an offset that is passed over.
            self.position, self.leader_epoch = self._refused[0].offset, self._refused[0].leader_epoch

    def take_columns(self, columns: Sequence[str]) -> pa.RecordBatch | None:
        """Return the next records as a batch of Arrow columns and move `position` behind them; None at
        the end. Its size is limited by `columnar.PIECE_ROWS` and `columnar.PIECE_BYTES`.

        Raises KafkaError as `take`.
        """
        if self._pieces is None or self._columns != tuple(columns):
            self._columns = tuple(columns)
            self._records, self._cursor, self._error = [], 0, None
            self._begin_batches()  # where a later `take` goes on
            self._pieces = self._decode_pieces(self._columns)
        try:
            piece = next(self._pieces, None)
        except BaseException:
            self._pieces = None  # a later call goes on at `position`, where damage raises the same error again
            raise
        if piece is None or self.exhausted:
            # The iterator refers to this object: its memory would wait for the garbage collector.
            self._pieces, self._batches = None, iter(())
            self._buffer, self._headers = b"", []
        if piece is None:
            self.position, self.leader_epoch = self.end_offset, self.end_epoch
        return piece

    def _decode_pieces(self, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """The rest of the batches as pieces, up to a broken batch; then its error."""
        batches: list[tuple[int, BatchHeader]] = []
        damaged: KafkaError | None = None
        view = memoryview(self._buffer)
        try:
            for start, header in iter_data_batches(self._buffer, self._aborted, self._true_headers()):
                if header.last_offset < self.position:
                    continue
                if self._check_crcs and not check_crc(view, start, header):
                    raise _crc_error(self.partition, header)
                batches.append((start, header))
        except KafkaError as error:  # also a malformed marker
            damaged = error
        if batches:
            try:
                end = batches[-1][1].next_offset
                yield from self._pieces_of(end, columns, batches)
            except KafkaError:
                # The records before a malformed batch are handed out first.
                for place in batches:
                    if place[1].next_offset > self.position:
                        yield from self._pieces_of(place[1].next_offset, columns, [place])
        if damaged is not None:
            raise damaged

    def _pieces_of(
        self, end_offset: int, columns: tuple[str, ...], batches: list[tuple[int, BatchHeader]]
    ) -> Iterator[pa.RecordBatch]:
        topic, partition = self.partition
        # The position moves by the offsets, which the caller may not want.
        names = columns if "offset" in columns else (*columns, "offset")
        pieces = decode_columns(
            self._buffer,
            topic=topic,
            partition=partition,
            first_offset=self.position,
            columns=names,
            data_batches=batches,
            max_batch_bytes=self._decoder.max_batch_bytes,
        )
        epochs = iter(batches)
        header: BatchHeader | None = None
        for piece in pieces:
            if not piece.num_rows:
                continue
            last_offset = piece.column(names.index("offset"))[-1].as_py()
            while header is None or header.last_offset < last_offset:
                if (following := next(epochs, None)) is None:
                    break
                header = following[1]
            self._move_behind(last_offset, end_offset, False)
            if header is not None:
                self.leader_epoch = header.partition_leader_epoch
            yield piece if names == columns else piece.select(list(columns))

    def _decode_next(self) -> bool:
        """Decode the next batches that have a record to hand out; False when no such batch follows."""
        if self._refused:
            self._records, self._cursor = self._deserialize(self._refused), 0
            return bool(self._records)
        while run := self._take_run():
            start, header = run[0]
            records: list[ConsumerRecord] | None = None
            if not header.compression:
                records = self._decoder.decode_run(self.partition, self._buffer, run, self.position)
            if records is None:
                self._checked.extend(run[1:])
                records = self._decode_batch(start, header)
            else:
                header = run[-1][1]
            if records:
                self._records = self._deserialize(records)
                self._cursor, self._batch_end = 0, header.next_offset
                return bool(self._records)
        self._records = []
        self._cursor = 0
        self._buffer, self._headers = b"", []
        return False

    def _decode_batch(self, start: int, header: BatchHeader) -> list[ConsumerRecord]:
        try:
            section = record_section(self._buffer, start, header, self._decoder.max_batch_bytes)
            return self._decoder.decode(self.partition, section, header, self.position)
        except KafkaError as error:
            raise in_batch(error, str(self.partition), header) from None

    def _take_run(self) -> list[tuple[int, BatchHeader]]:
        """The next batches, with valid CRCs, that can be decoded together; none at the end.

        Raises KafkaError for a damaged batch or a malformed marker, after the batches before it.
        """
        if self._checked:
            return [self._checked.popleft()]
        if self._error_behind is not None:
            raise self._error_behind
        run: list[tuple[int, BatchHeader]] = []
        count = run_start = 0
        kind = (0, 0)
        buffer, checks_crcs = memoryview(self._buffer), self._check_crcs
        try:
            while (place := self._ahead or next(self._batches, None)) is not None:
                start, header = place
                _, length, epoch, magic, _, attributes, *_, record_count = header
                if not run:
                    kind, run_start = (attributes, epoch), start
                elif (
                    kind != (attributes, epoch)
                    or start + length + LOG_OVERHEAD - run_start > RUN_BYTES_MAX
                    or count + record_count > RUN_RECORDS_MAX
                ):
                    self._ahead = place
                    break
                self._ahead = None
                if checks_crcs and not check_crc(buffer, start, header):
                    raise _crc_error(self.partition, header)
                if magic != MAGIC:
                    check_magic(header)
                run.append(place)
                count += record_count
        except Exception as error:
            if not run:
                raise
            self._error_behind = error
        return run

    def _deserialize(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """Deserialize records up to the first that fails.

        Its exception becomes the error of the next call.
        """
        self._refused = []
        key_deserializer, value_deserializer = self._key_deserializer, self._value_deserializer
        if key_deserializer is None and value_deserializer is None:
            return records
        deserialized: list[ConsumerRecord] = []
        for record in records:
            try:
                if key_deserializer is not None and record.key is not None:
                    record = record._replace(key=key_deserializer(record.key))
                if value_deserializer is not None and record.value is not None:
                    record = record._replace(value=value_deserializer(record.value))
            except Exception as error:
                note = f"at offset {record.offset} of {self.partition}"
                if note not in getattr(error, "__notes__", ()):  # a deserializer may raise the same one again
                    error.add_note(note)
                self._error, self._traceback = error, error.__traceback__
                self._refused = records[len(deserialized) :]
                break
            deserialized.append(record)
        return deserialized


def _checked_hidden(
    partition: TopicPartition, buffer: Buffer, headers: Iterable[tuple[int, BatchHeader]], aborted_ids: set[int]
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield these headers, and check the CRC of each batch whose header hides its records from the reader.

    A header hides records if it marks a control batch or belongs to an aborted transaction. One flipped bit in a header
    may hide a batch that has records for the reader.

    This is a function, not a method: a generator of a method refers to its object, which refers to the generator, and
    only the garbage collector would free that circle.

    Raises:
        KafkaError: CORRUPT_MESSAGE, if the CRC of such a batch is wrong.
    """
    view = memoryview(buffer)
    for place in headers:
        start, header = place
        attributes = header[5]
        is_hidden = attributes & CONTROL_FLAG or (attributes & TRANSACTIONAL_FLAG and header.producer_id in aborted_ids)
        if is_hidden and not check_crc(view, start, header):
            raise _crc_error(partition, header)
        yield place


def _crc_error(partition: TopicPartition, header: BatchHeader) -> KafkaError:
    problem = f"{partition}: the batch at offset {header.base_offset} fails its CRC"
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, problem)
