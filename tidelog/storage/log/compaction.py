"""One cleaning of one log: collects the keys of its dirty part, and rewrites segments without superseded records.

`advance` runs on the owner's thread, `run` on any, never both at once. Each `run` is a bounded piece of work, so that
the owner can throttle, give up, or close between two. `filter.py` decides which records stay, `swap.py` replaces the
old segments by the new one. Invariant: only the swap changes the log, and a truncation or close of the log gives up its
cleaning first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.protocol.batches import compression as codecs
from tidelog.protocol.batches.control_batches import ControlRecordType, control_record_type
from tidelog.protocol.batches.record_batch import HEADER_SIZE, BatchHeader, CorruptRecord, check_crc, read_header
from tidelog.protocol.batches.records import decode_batch, record_section
from tidelog.protocol.errors import KafkaError
from tidelog.storage.cleaner.choice import CleanableRange, CleanerSegment, cleanable_range, first_dirty, groups
from tidelog.storage.cleaner.filter import BatchFilter, CleanedBatch, LastOfProducer, filler
from tidelog.storage.cleaner.keys import KeyTable
from tidelog.storage.cleaner.transactions import CleanedTransactions
from tidelog.storage.files.checkpoints import CLEANED_ENDS_FILE, EXPLAINED_GAPS_FILE
from tidelog.storage.files.disk import Disk, is_exhaustion
from tidelog.storage.log.explained_gaps import is_beyond_index, keep_ends_below, name_early_ends
from tidelog.storage.log.swap import Swap, remove_strays
from tidelog.storage.producers.producer_state import FIRST_SEQUENCE, LAST_OFFSET, ProducerEntry
from tidelog.storage.segments import lookup
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.log_config import INT64_MAX, MAX_POSITION
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import (
    CLEANED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    UNKNOWN,
    Segment,
    file_name,
)
from tidelog.storage.segments.transaction_index import AbortedTransaction, collect_rows

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog


class CleaningFailed(Exception):
    """The log cannot be cleaned, because a batch is damaged. It stays readable as it is."""


@dataclass(slots=True)
class CleaningStats:
    """The counters of one cleaning. Bytes are the sizes of batches."""

    map_bytes_read: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    messages_read: int = 0
    messages_written: int = 0
    keyless: int = 0
    table_utilization: float = 0.0

    @property
    def bytes_moved(self) -> int:
        """All bytes read and written, for the throttle."""
        return self.map_bytes_read + self.bytes_read + self.bytes_written


def has_deleted_damage(log: PartitionLog) -> bool:
    """Whether all known damage is below the log start. A cleaning passes over it."""
    return any(segment.damage for segment in log.segments) and not log.damaged_ranges()


def find_cleanable(log: PartitionLog, now_ms: int) -> CleanableRange:
    """The range of the log that can be cleaned now. Raises OSError, and CorruptIndex, also for known damage."""
    config, segments = log.config, log.segments
    damaged = log.damaged_ranges()
    if damaged:
        raise CorruptIndex(damaged[0][0].path, "is being repaired")
    start = first_dirty(log.cleaned_offset, log.log_start_offset, log.log_end_offset)
    wants_times = config.min_compaction_lag_ms > 0 or config.max_compaction_lag_ms != INT64_MAX
    dirty = segments.from_offset(start)[:-1] if wants_times else []
    base = dirty[0].base_offset if dirty else INT64_MAX
    facts = [
        CleanerSegment(
            segment.base_offset,
            segment.size_bytes,
            *(_times(segment, log.disk) if base <= segment.base_offset < segments.active.base_offset else ()),
        )
        for segment in segments
    ]
    return cleanable_range(facts, start, log.last_stable_offset, config, now_ms)


def _times(segment: Segment, disk: Disk) -> tuple[int, int]:
    """The largest timestamp of the segment, without one when its file was changed, and that of its first batch."""
    if segment.first_batch_timestamp == UNKNOWN:
        was_open = segment.is_open
        for _, header in headers(segment):
            segment.set_first_batch_timestamp(header.max_timestamp)
            break
        if not was_open:
            segment.release()  # a log may have more segments than the process may have files
    newest = lookup.max_timestamp_of(segment)
    return newest if newest >= 0 else disk.modified_ms(segment.path), segment.first_batch_timestamp


class Compaction:
    """The first `run` calls `make_keys`. `piece_bytes`: the bytes of one read, which one `run` handles.

    `removes_until_ms`: tombstones and markers that were to be kept until then or less go; `now_ms` without it.
    """

    def __init__(
        self,
        log: PartitionLog,
        chosen: CleanableRange,
        make_keys: Callable[[], KeyTable],
        now_ms: int,
        *,
        piece_bytes: int,
        removes_until_ms: int | None = None,
    ) -> None:
        assert log.compaction is None, log
        self.log = log
        self.chosen = chosen
        self.stats = CleaningStats()
        self.error: Exception | None = None
        self.is_given_up = False
        self.is_short = False
        """The last `run` met a shortage of file descriptors or memory and must be repeated after a pause."""
        self.retention_waits = False
        """Retention was due meanwhile and must run after the cleaning."""
        self.cleaned_offset = chosen.first_dirty_offset
        """The start of the dirty part after the cleaning."""
        self._disk = log.disk
        self._make_keys = make_keys
        self._piece_bytes = max(piece_bytes, HEADER_SIZE)
        self._written_before = 0
        self._config = log.config
        self._segments = [segment for segment in log.segments if segment.base_offset < chosen.end_offset]
        self._ends = [segment.base_offset for segment in self._segments[1:]] + [chosen.end_offset]
        # All known damage is below the log start, so that no replica repairs it: what is there goes.
        self._damage = {each: each.damage[-1] for each in self._segments if each.damage}
        # The rows at one moment, to be read on the thread: a tenant may abort millions.
        self._transaction_indexes = [segment.transaction_index.content() for segment in log.segments]
        self._aborted: list[AbortedTransaction] = []
        self._filter_at_ms = now_ms
        self._removes_until_ms = now_ms if removes_until_ms is None else removes_until_ms
        synced = log.durability.recovery_point
        self._to_sync = [segment.path for segment in log.segments if segment.next_offset > synced]
        explained = f"{log.directory}/{EXPLAINED_GAPS_FILE}"  # without it a start ends the log before a gap
        self._to_sync += [explained] if log.durability.is_noted(explained) else []
        self._last_of_producers: dict[int, LastOfProducer] = {
            entry.producer_id: _last_committed_of(entry, log.high_watermark) for entry in log.producers.entries.values()
        }
        self._ready: list[tuple[list[Segment], list[Segment]]] = []
        self._swap: Swap | None = None
        self._ends_are_kept = True
        """Every cleaned segment ends where the next one begins."""
        self._unfinished: list[Segment] = []
        self._work = self._whole()
        self._is_done = False
        log.compaction = self
        log.is_under_cleaning = True

    # The owner's side

    def advance(self) -> bool:
        """After each `run`: apply its result. False if there is nothing more to run.

        Raises CleaningFailed if the log cannot be cleaned, OSError if its directory cannot be used.
        """
        if self.is_given_up:
            self._clear_up()
            return False
        try:
            self.is_short = self._swap is not None and self.error is not None and is_exhaustion(self.error)
            if self.is_short:  # the directory stays in use, so the swap must be completed
                self.error = None
                return True
            if self.error is not None:
                raise self.error
            if self._ready:
                self._name_early_ends()
                self._swap, self._ready = Swap(self.log, self._ready), []
            if self._swap is not None:
                self._swap.advance()
                if self._swap.is_done:
                    self._end_swap()
            elif self._is_done:
                self._finish()
                return False
        except (KafkaError, CleaningFailed) as error:
            self.take_back()
            raise CleaningFailed(f"{self.log.directory}: {error}") from error
        except OSError:
            self.abandon()
            raise
        return True

    def _name_early_ends(self) -> None:
        """Before there are batches on both sides of a gap that is too large for an index: a start would miss a segment
        between them (`may_end_early`). Kafka leaves such a gap without an empty segment. Raises OSError.
        """
        new = [segment for _, segments in self._ready for segment in segments if segment.size_bytes]
        early_ends = {(each.base_offset, each.next_offset) for each in new if each.may_end_early}
        if early_ends := {each for each in early_ends if is_beyond_index(*each)}:
            name_early_ends(self.log, early_ends)

    def give_up(self) -> None:
        """End the cleaning before a truncation or close. A started swap is finished, which waits for the device.

        Raises OSError; after a shortage of descriptors the cleaning goes on.
        """
        if self.is_given_up:
            return
        if self._swap is not None and self._swap.has_begun:
            self._swap.finish_now()
            self._end_swap()
        self.is_given_up = True
        self.log.compaction = None

    def _end_swap(self) -> None:
        self._swap, self._unfinished = None, []
        self.log.durability.want_sums(self.log.segments)

    def take_back(self) -> None:
        """End the cleaning because of an error, and leave no file of it. Not during a `run`. Raises OSError."""
        try:
            self.give_up()
        except OSError:
            self.abandon()
            raise
        self._clear_up()

    def abandon(self) -> None:
        """End the cleaning without another file operation: the log is deleted, or its directory has failed."""
        self.is_given_up = True
        self.log.compaction = self._swap = None
        self._unfinished = []
        self.log.is_under_cleaning = False

    def _finish(self) -> None:
        self.log.cleaned_offset = self.cleaned_offset
        self.log.compaction = None
        self.log.is_under_cleaning = False

    def _clear_up(self) -> None:
        """Remove the files of unfinished segments. Not during a `run`."""
        self._work.close()
        self.log.is_under_cleaning = False
        unfinished, self._unfinished = self._unfinished, []
        for segment in unfinished:
            segment.release()
            _remove_cleaned(self._disk, self.log.directory, segment.base_offset)

    # The work, in any thread

    def run(self) -> None:
        """Do the next piece of work. `advance` raises an error."""
        if self.is_given_up:
            return
        try:
            swap = self._swap  # the owner may end the cleaning meanwhile
            if swap is not None:
                swap.sync()
            else:
                next(self._work, None)
        except (OSError, KafkaError, CleaningFailed) as error:
            self.error = error

    def _whole(self) -> Generator[None]:
        self._collect_aborted()
        yield
        keys = self._make_keys()
        yield
        yield from self._note_keys(keys)
        self.cleaned_offset = keys.latest_offset + 1
        cleaned = [segment for segment in self._segments if segment.base_offset < self.cleaned_offset]
        yield from self._sync_log()
        batches = BatchFilter(
            keys,
            CleanedTransactions(self._aborted),
            self._last_of_producers,
            self._filter_at_ms,
            self._config.delete_retention_ms,
            self._removes_until_ms,
            self.chosen.first_dirty_offset,
        )
        for start, stop in self._groups(cleaned):
            yield from self._clean_group(cleaned[start:stop], batches)
        self._note_ends()
        self.stats.messages_read = batches.stats.messages_read
        self.stats.messages_written = batches.stats.messages_kept
        self.stats.keyless = batches.stats.keyless
        self.stats.table_utilization = keys.utilization
        self._is_done = True

    def _collect_aborted(self) -> None:
        end_offset = self.chosen.end_offset
        for data in self._transaction_indexes:
            rows, is_complete = collect_rows(data, 0, end_offset)
            self._aborted += rows
            if is_complete:
                break
        self._transaction_indexes.clear()

    def _groups(self, segments: list[Segment]) -> list[tuple[int, int]]:
        """The groups of the first segments that become one each. Larger indexes would make look-ups as long as logs."""
        facts = [
            CleanerSegment(each.base_offset, each.size_bytes, index_bytes=_index_bytes(self._disk, each))
            for each in segments
        ]
        end_offset = self._ends[len(segments) - 1] if segments else 0
        return groups(facts, end_offset, self._config.segment_bytes, self._config.segment_index_bytes)

    def _sync_log(self) -> Iterator[None]:
        for path in self._to_sync:
            # Without this sync, a loss of power could lose a record, its transaction marker, or its producer's last
            # batch after the superseded records were dropped.
            try:
                self._disk.sync_file(path)
            except FileNotFoundError:
                pass  # an empty segment that was replaced by one with another name
            yield

    def _note_ends(self) -> None:
        """Record for later starts whether a segment that ends too early is damaged.

        The file counts while the checkpoint names no higher offset, so that a cleaning by another broker makes it void.
        """
        if self._ends_are_kept:
            keep_ends_below(self.log, self.cleaned_offset)
        else:
            self.log.durability.files.remove(CLEANED_ENDS_FILE)

    def _note_keys(self, keys: KeyTable) -> Iterator[None]:
        """Fill the table from the dirty part, until it is full."""
        start = self.chosen.first_dirty_offset
        transactions = CleanedTransactions(row for row in self._aborted if row.last_offset >= start)
        keys.latest_offset = start - 1
        for segment, end_offset in zip(self._segments, self._ends):
            if end_offset <= start:
                continue
            for chunk, batches, _ in self._chunks(segment):
                for position, header in batches:
                    if header.last_offset < start:
                        continue
                    if not self._note(keys, chunk, position, header, transactions):
                        return
                    keys.latest_offset = header.last_offset
                self.stats.map_bytes_read += len(chunk)
                yield
            keys.latest_offset = end_offset - 1

    def _note(
        self,
        keys: KeyTable,
        chunk: memoryview,
        position: int,
        header: BatchHeader,
        transactions: CleanedTransactions,
    ) -> bool:
        if header.is_control:
            transactions.on_control(header, _kind(chunk, position, header))
            return True
        if transactions.on_data(header) or not header.record_count:
            return True
        if not check_crc(chunk, position, header):
            raise CorruptRecord(f"the CRC of the batch at offset {header.base_offset} is wrong")
        section = record_section(chunk, position, header, codecs.DEFAULT_MAX_BYTES)
        return keys.note(section, header, self.chosen.first_dirty_offset)

    def _clean_group(self, old: list[Segment], batches: BatchFilter) -> Iterator[None]:
        new = self._begin_segment(old[0].base_offset)
        written, epoch, end_offset = 0, -1, old[-1].next_offset
        batches_end = written_end = new.base_offset
        for segment in old:
            for chunk, positions, _ in self._chunks(segment):
                parts: list[CleanedBatch] = []
                for position, header in positions:
                    left = batches.clean(chunk, position, header)
                    batches_end, epoch = header.next_offset, header.partition_leader_epoch
                    if left is not None:
                        parts.append(left)
                written = write_batches(new, parts, written)
                written_end = parts[-1].last_offset + 1 if parts else written_end
                self.stats.bytes_read += len(chunk)
                self.stats.bytes_written = self._written_before + written
                yield
        for row in batches.newly_indexed:
            new.transaction_index.append(row)
        batches.newly_indexed.clear()
        # Its end must show, which a start that finishes the swap has to know. Kafka's cleaner removes last batches.
        held_end = batches_end if is_beyond_index(new.base_offset, end_offset) else end_offset
        if written_end < held_end:
            epoch = max(epoch, self.log.leader_epochs.epoch_for_offset(held_end - 1))
            written, written_end = write_batches(new, [filler(held_end - 1, epoch)], written), held_end
        self._remove_strays()
        self._seal(new, end_offset, written, written_end)
        self._ready = [(old, [new])]
        yield

    def _seal(self, new: Segment, end_offset: int, written: int, written_end: int) -> None:
        """The new segment is complete, with so many bytes, up to `written_end`. The next one begins at `end_offset`."""
        new.size_bytes = new.warm_from = written
        new.may_have_gaps = True
        new.next_offset = end_offset
        new.may_end_early = written_end != new.next_offset
        if new.may_end_early and not is_beyond_index(new.base_offset, end_offset):
            self._ends_are_kept = False
        with self._files_of_the_log():
            new.seal()
        new.file.sync()
        new.sync_indexes()
        new.synced_bytes = written
        self._written_before += written

    def _remove_strays(self) -> None:
        """Remove what an earlier cleaning has left. The directory is to be synced before the swap."""
        with self._files_of_the_log():
            remove_strays(self._disk, self.log.directory, {each.base_offset for each in self._unfinished})

    def _begin_segment(self, base_offset: int) -> Segment:
        log = self.log
        with self._files_of_the_log():
            _remove_cleaned(self._disk, log.directory, base_offset)
            new = Segment(
                self._disk, log.directory, base_offset, self._config, self._filter_at_ms, jitter_ms=log.jitter_ms,
                suffix=CLEANED_SUFFIX,
            )  # fmt: skip
            self._unfinished.append(new)
            self._disk.write_file(new.path, b"", sync=False)
            new.file.truncate(0)  # it stays open, so that it is found when the name belongs to another log
        new.begin_rebuild()
        new.transaction_index.begin_rebuild()
        return new

    def _chunks(self, segment: Segment) -> Iterator[Chunk]:
        damage = self._damage.get(segment)
        behind = (damage.end_position, damage.end_offset) if damage else (0, -1)
        return chunks(self._disk, segment, segment.size_bytes, segment.next_offset, self._piece_bytes, *behind)

    @contextmanager
    def _files_of_the_log(self) -> Iterator[None]:
        """Make files by name within this block, without a sync. Another log may have the directory's name later."""
        with self.log.durability.files.guarded() as is_there:
            if not is_there:
                raise CleaningFailed(f"{self.log.directory} is gone")
            yield


Chunk = tuple[memoryview, list[tuple[int, BatchHeader]], int]
"""Whole batches of a segment: their bytes, position in these and header of each, end position in the file."""


def chunks(
    disk: Disk, segment: Segment, size: int, end_offset: int, piece_bytes: int, position: int = 0, offset: int = -1
) -> Iterator[Chunk]:
    """The first `size` bytes of the segment, which reach up to `end_offset`, in pieces of about `piece_bytes`.

    `position`, `offset`: where they begin, by default at the segment's start.

    For any thread. Raises KafkaError for a damaged segment, OSError.
    """
    try:
        file = disk.open(_log_path(segment))
    except FileNotFoundError as error:  # it says nothing against the device; the next use of the segment repairs it
        raise CorruptRecord(f"{segment.path} is missing") from error
    try:
        want, offset = piece_bytes, max(offset, segment.base_offset)
        while position < size:
            size_bytes = min(want, size - position)
            data = memoryview(file.read_at(size_bytes, position))
            if len(data) < size_bytes:
                raise CorruptRecord(f"{segment.path} is shorter than {size} bytes")
            batches, end, offset = _batches_in(data, offset)
            if offset > end_offset:
                raise CorruptRecord(f"a batch beyond the end of {segment.path}, {end_offset}")
            if not batches:
                want = _size_of_first(data, size - position, segment.path)
                continue
            position += end
            yield data[:end], batches, position
            want = piece_bytes
        if offset != end_offset and not segment.may_end_early:
            raise CorruptRecord(f"{segment.path} ends at offset {offset}, not {end_offset}")
    finally:
        file.close()


def _last_committed_of(entry: ProducerEntry, high_watermark: int) -> LastOfProducer:
    """A producer's last batch. What is not committed may be cut: if the batch before it was removed, the log would say
    nothing of the producer, and its next batch would be refused.
    """
    offsets = [each[LAST_OFFSET] for each in entry.batches]
    last_offset = max((each for each in offsets if each < high_watermark), default=-1)
    if last_offset >= 0 or not offsets:
        return LastOfProducer(entry.epoch, last_offset)
    before = (entry.batches[0][FIRST_SEQUENCE] - 1) % 2**31  # behind the largest one they begin again
    return LastOfProducer(entry.epoch, offsets[-1], before)


def _index_bytes(disk: Disk, segment: Segment) -> int:
    try:
        return disk.size_of(segment.path_of(INDEX_SUFFIX))
    except FileNotFoundError:  # there was no space for it
        return 0


def _log_path(segment: Segment) -> str:
    """The normal path of a segment's .log, even if a swap or deletion has changed `segment.path` meanwhile."""
    return f"{segment.directory}/{file_name(segment.base_offset, LOG_SUFFIX)}"


def _batches_in(data: memoryview, offset: int) -> tuple[list[tuple[int, BatchHeader]], int, int]:
    """(position and header of every whole batch, their end position, the offset after them).

    Raises CorruptRecord for a batch below `offset`.
    """
    batches = []
    position, size = 0, len(data)
    while size - position >= HEADER_SIZE:
        header = read_header(data, position)
        end = position + header.size_bytes
        if end > size:
            break
        if header.base_offset < offset or header.last_offset_delta < 0:
            raise CorruptRecord(f"a batch of offset {header.base_offset} where {offset} should follow")
        batches.append((position, header))
        position, offset = end, header.next_offset
    return batches, position, offset


def _size_of_first(data: memoryview, left: int, path: str) -> int:
    """The size of the batch at the start of `data`, which has only a part of it. Raises if the file has no more."""
    size = read_header(data).size_bytes
    if size > left or size <= len(data):
        raise CorruptRecord(f"a batch of {size} bytes where {left} are left in {path}")
    return size


def _kind(chunk: memoryview, position: int, header: BatchHeader) -> ControlRecordType | None:
    records = decode_batch(chunk, position, header)
    return control_record_type(records[0].key) if records else None


def write_batches(segment: Segment, parts: list[CleanedBatch], position: int) -> int:
    """Append the batches to the segment's file and index them. Returns the end position."""
    if not parts:
        return position
    data = memoryview(parts[0].data if len(parts) == 1 else b"".join([part.data for part in parts]))
    at = position
    while data:
        count = segment.file.write_at(data, at)
        if not count:
            raise OSError(5, "a write made no progress", segment.path)
        at += count
        data = data[count:]
    for part in parts:
        if position > MAX_POSITION:
            segment.is_full = True
        segment.note_scanned(position, len(part.data), part.last_offset, part.max_timestamp)
        position += len(part.data)
    return position


def _remove_cleaned(disk: Disk, directory: str, base_offset: int) -> None:
    for kind in SUFFIXES:
        disk.remove(f"{directory}/{file_name(base_offset, kind)}{CLEANED_SUFFIX}")
