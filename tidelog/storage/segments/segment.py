"""One segment: a file of record batches with its two sparse indexes and its index of aborted transactions.

Files are opened on first use. An append is one write and a few assignments. `reader.py` finds and reads batches,
`recovery.py` scans them after a crash. Invariants: bytes [0, size_bytes) are whole batches with rising offsets; the
batch positions kept in memory are contiguous in offset; the file is never truncated while a slice of a map of the
truncated part may be in use (docs/decisions/0003-mmap-reads-and-truncation.md).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tidelog.protocol.batches.record_batch import HEADER_SIZE, LEADER_EPOCH_OFFSET, MAGIC, MAGIC_OFFSET
from tidelog.storage.files.disk import Buffer, Disk, File, FileMap
from tidelog.storage.segments.append import Batch
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, apart_from, united
from tidelog.storage.segments.examination import Findings, ProvenBatches, examine
from tidelog.storage.segments.log_config import MAX_POSITION, MAX_RELATIVE_OFFSET, LogConfig
from tidelog.storage.segments.retention import roll_limits
from tidelog.storage.segments.sparse_index import (
    OFFSET_ROW_BYTES,
    TIME_ROW_BYTES,
    NamedBatches,
    SparseIndex,
    offset_index,
    time_index,
)
from tidelog.storage.segments.transaction_index import TransactionIndex

logger = logging.getLogger("tidelog.storage")

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TRANSACTION_INDEX_SUFFIX: Final = ".txnindex"
DELETED_SUFFIX: Final = ".deleted"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
SUFFIXES: Final = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX)

UNKNOWN: Final = -2
"""A timestamp that has not been read yet; -1 is Kafka's "no timestamp"."""

_RECENT_MAX: Final = 128
_RECENT_DROP: Final = 64


def file_name(offset: int, suffix: str) -> str:
    """Kafka's name: the base offset in 20 digits."""
    return f"{offset:020d}{suffix}"


class Segment:
    """`next_offset` is the offset after the last batch, or `base_offset` in an empty segment."""

    __slots__ = (
        "_disk", "_file", "_loose_maps", "_map", "_max_offset_rows", "_max_time_rows", "_offset_index", "_time_index",
        "aged_to", "base_offset", "bytes_since_index_row", "confirmation", "created_ms", "damage", "directory",
        "filed_max", "filled", "findings", "first_batch_timestamp", "generation", "hints", "index_interval_bytes",
        "is_abandoned", "is_full", "is_preallocated", "is_verified_of_old", "jitter_ms", "max_is_confirmed",
        "max_offset", "max_timestamp", "may_end_early", "may_have_gaps", "next_offset", "offset_of_max_timestamp",
        "path", "proven", "recent_offsets", "recent_positions", "roll_above_now", "roll_above_timestamp", "segment_ms",
        "size_bytes", "suffix", "synced_bytes", "transaction_index", "unread", "verified_from", "verified_to",
        "warm_from", "write_at",
    )  # fmt: skip

    write_at: Callable[[Buffer, int], int]
    confirmation: tuple[tuple[int, int, int], int, int, bool] | None
    """How far the comparison of the largest timestamp has come: the basis, position, end offset, and if it is there."""
    filed_max: tuple[int, int, int]
    """The largest timestamp in the time index's file, its offset, and the size of the batches that the file covers."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        base_offset: int,
        config: LogConfig,
        created_ms: int,
        *,
        size_bytes: int = 0,
        has_transaction_index: bool = False,
        jitter_ms: int = 0,
        suffix: str = "",
    ) -> None:
        self._disk = disk
        self.directory = directory
        self.base_offset = base_offset
        self.suffix = suffix
        self.created_ms = created_ms
        self.path = f"{directory}/{file_name(base_offset, LOG_SUFFIX)}{suffix}"
        self.size_bytes = size_bytes
        self.synced_bytes = 0
        self.next_offset = base_offset
        self.max_offset = base_offset + MAX_RELATIVE_OFFSET
        self.index_interval_bytes = config.index_interval_bytes
        self._max_offset_rows = config.segment_index_bytes // OFFSET_ROW_BYTES
        self._max_time_rows = config.segment_index_bytes // TIME_ROW_BYTES - 1
        self._offset_index: SparseIndex | None = None
        self._time_index: SparseIndex | None = None
        self.transaction_index = TransactionIndex(
            disk, self.path_of(TRANSACTION_INDEX_SUFFIX), exists=has_transaction_index
        )
        self.max_timestamp = UNKNOWN if size_bytes else -1
        self.offset_of_max_timestamp, self.filed_max = base_offset, (-1, base_offset, 0)
        self.max_is_confirmed = not size_bytes
        """The largest timestamp comes from the batches. One from the time index's file may be wrong (`lookup.py`)."""
        self.first_batch_timestamp = UNKNOWN if size_bytes else -1
        self.segment_ms, self.jitter_ms = config.segment_ms, jitter_ms
        self.roll_above_timestamp, self.roll_above_now = roll_limits(-1, created_ms, config.segment_ms, jitter_ms)
        self.is_full = self.is_preallocated = self.is_abandoned = False
        """The log does not use the segment any more; another log may have its path."""
        self.bytes_since_index_row = 0
        self.recent_offsets = array("q")
        self.recent_positions = array("q")
        self.hints: dict[int, int] = {}
        self.warm_from = size_bytes
        """This process has appended the bytes from here on: they are in memory, and were checked before the append."""
        self.may_have_gaps = config.is_compacted
        """Offsets may be missing between batches, after compaction."""
        self.may_end_early = False
        """Cleaning may have removed the last records, so the next segment may begin later than this one ends."""
        self.damage: tuple[DamagedRange, ...] = ()
        """The damaged ranges in the order of offsets. `next_offset` includes them."""
        self.filled: tuple[DamagedRange, ...] = ()
        """Ranges that repairs write. They are damage until a repair takes effect: the log has not replayed them."""
        self.proven: tuple[ProvenBatches, ...] = ()
        """Offset ranges with batches from another replica, kept while the segment has damage. Their leader epochs are
        right, even if neighbouring batches or the epoch file disagree."""
        self.verified_from = self.verified_to = 0
        """The range of batches that were read from the device and checked since the start."""
        self.aged_to, self.is_verified_of_old, self.confirmation = 0, False, None
        self.generation = 0
        """Changes when bytes are truncated or replaced, and when the known damage changes."""
        self.findings: Findings | None = None
        """The result of an examination on a thread, until `adopt` applies it."""
        self.unread: OSError | None = None
        """The error of a background read (`reader.ColdRead`), until the next read raises it."""
        self._file: File | None = None
        self._map: FileMap | None = None
        self._loose_maps: list[FileMap] = []
        self.write_at = self._open_and_write

    @classmethod
    def create(
        cls, disk: Disk, directory: str, base_offset: int, config: LogConfig, now_ms: int, jitter_ms: int
    ) -> Segment:
        """Create an empty segment with its .log file. The index files are created with their first rows."""
        segment = cls(disk, directory, base_offset, config, now_ms, jitter_ms=jitter_ms)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
            disk.remove(segment.path_of(suffix))
        disk.write_file(segment.path, b"", sync=False)
        segment._offset_index = offset_index(disk, segment.path_of(INDEX_SUFFIX), base_offset)
        segment._time_index = time_index(disk, segment.path_of(TIME_INDEX_SUFFIX), base_offset)
        if config.preallocate:
            segment.file.truncate(config.segment_bytes)
            segment.is_preallocated = True
        return segment

    def __repr__(self) -> str:
        return f"Segment({self.path}, next_offset={self.next_offset}, size_bytes={self.size_bytes})"

    @property
    def stem(self) -> str:
        """The common beginning of the paths of its files, which renames do not change."""
        return self._name("", "")

    def path_of(self, kind: str) -> str:
        """The present path of its file of this kind. During and after a swap it has another suffix."""
        return self.path if kind == LOG_SUFFIX else self._name(kind, self.suffix)

    def _name(self, kind: str, suffix: str) -> str:
        return f"{self.directory}/{file_name(self.base_offset, kind)}{suffix}"

    # Appending

    def append(self, data: Buffer, batches: Sequence[Batch]) -> None:
        """Write the batches with one write and index them. After an OSError the state in memory is unchanged."""
        position = self.size_bytes
        size = len(data)
        if self.file.size_bytes() < position:
            # Another process has truncated the file. After this write it will have zeros in place of the lost batches.
            self.distrust()
        written = self.write_at(data, position)
        if written != size:
            self._write_rest(memoryview(data), position, written)
        for _, batch_size, base_offset, last_offset, max_timestamp, _, _, _, _, _ in batches:
            if max_timestamp > self.max_timestamp:
                self.max_timestamp = max_timestamp
                self.offset_of_max_timestamp = last_offset
            if self.bytes_since_index_row > self.index_interval_bytes:
                self._index(last_offset, position)
            elif not position:
                self.set_first_batch_timestamp(max_timestamp)
            self.bytes_since_index_row += batch_size
            recent = self.recent_offsets
            if base_offset != self.next_offset:
                self.forget_recent()
                recent = self.recent_offsets
            recent.append(base_offset)
            self.recent_positions.append(position)
            if len(recent) > _RECENT_MAX:
                del recent[:_RECENT_DROP], self.recent_positions[:_RECENT_DROP]
            self.next_offset = last_offset + 1
            position += batch_size
        self.size_bytes = position

    def append_one(self, batch: Buffer, base_offset: int, last_offset: int, max_timestamp: int) -> None:
        """`append` for one batch, without the loop and the tuple, because this runs for every produce."""
        position = self.size_bytes
        size = len(batch)
        if (self._file or self.file).size_bytes() < position:
            self.distrust()  # as above
        written = self.write_at(batch, position)
        if written != size:
            self._write_rest(memoryview(batch), position, written)
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.offset_of_max_timestamp = last_offset
        if self.bytes_since_index_row > self.index_interval_bytes:
            self._index(last_offset, position)
        elif not position:
            self.set_first_batch_timestamp(max_timestamp)
        self.bytes_since_index_row += size
        if base_offset != self.next_offset:
            self.forget_recent()
        recent = self.recent_offsets
        recent.append(base_offset)
        self.recent_positions.append(position)
        if len(recent) > _RECENT_MAX:
            del recent[:_RECENT_DROP], self.recent_positions[:_RECENT_DROP]
        self.next_offset = last_offset + 1
        self.size_bytes = position + size

    def _index(self, last_offset: int, position: int) -> None:
        offsets, times = self._offset_index, self._time_index
        assert offsets is not None
        assert times is not None
        # Also behind a full index: a look-up walks the batches without rows on the loop. A log rolls before it appends.
        offsets.append(last_offset, position)
        if self.max_timestamp > times.last_key:
            times.append(self.max_timestamp, self.offset_of_max_timestamp)
        if not self.is_full:
            self.is_full = offsets.count >= self._max_offset_rows or times.count >= self._max_time_rows
        self.bytes_since_index_row = 0

    def set_first_batch_timestamp(self, timestamp: int) -> None:
        self.first_batch_timestamp = timestamp
        self.roll_above_timestamp, self.roll_above_now = roll_limits(
            timestamp, self.created_ms, self.segment_ms, self.jitter_ms
        )

    def set_roll_age(self, segment_ms: int, jitter_ms: int) -> None:
        self.segment_ms, self.jitter_ms = segment_ms, jitter_ms
        self.roll_above_timestamp, self.roll_above_now = roll_limits(
            self.first_batch_timestamp, self.created_ms, segment_ms, jitter_ms
        )

    def _open_and_write(self, data: Buffer, position: int) -> int:
        self.load_indexes()
        self.write_at = self.file.write_at
        return self.write_at(data, position)

    def _write_rest(self, data: memoryview, position: int, written: int) -> None:
        while written < len(data):
            count = self.write_at(data[written:], position + written)
            if not count:
                raise OSError(5, "a write made no progress", self.path)
            written += count

    def take_back_write(self) -> None:
        """Truncate the bytes of a failed write. Raises OSError if that fails too."""
        if self._file is not None:  # otherwise the file could not be opened, and nothing was written
            self._file.truncate(self.size_bytes)
            self._file.sync()

    def forget_recent(self) -> None:
        self.recent_offsets = array("q")
        self.recent_positions = array("q")

    # Files

    @property
    def is_backdated(self) -> bool:
        """Whether Kafka's cleaner has made it, as `Disk.is_backdated` says. Raises OSError."""
        return self._disk.is_backdated(self.path)

    @property
    def is_open(self) -> bool:
        """Whether it holds a descriptor of its .log."""
        return self._file is not None

    @property
    def file(self) -> File:
        if self._file is None:
            try:
                self._file = self._disk.open(self.path)
            except FileNotFoundError:
                if self.is_abandoned or not self.path.endswith(LOG_SUFFIX):
                    raise
                logger.error("%s is missing: an empty file takes its place, to be repaired", self.path)
                self._file = self._disk.open(self.path, create=True)  # fails where the whole directory is missing
                self._disk.sync_directory(self.directory)  # or a loss of power takes the repaired file again
        return self._file

    def view(self, end: int) -> memoryview:
        """A map of the file that reaches at least to `end`."""
        if self._map is None or self._map.size_bytes < end:
            if self._map is not None:
                self._loose_maps = [loose for loose in (*self._loose_maps, self._map) if not loose.close()]
            self._map = None
            # Where the file was cut, what is before the damage at its end can be read.
            size_bytes = max(end, min(self.size_bytes, self.file.size_bytes()))
            try:
                self._map = self.file.map(size_bytes)
            except ValueError as error:
                raise CorruptIndex(self.path, f"is shorter than {size_bytes} bytes") from error
        elif self.file.size_bytes() < end:  # access to the map past the end of the file would kill the process
            self._drop_maps()
            raise CorruptIndex(self.path, f"is shorter than {end} bytes")
        return self._map.view

    def release(self) -> None:
        """Give back the descriptor and the maps; they come again when needed."""
        self._drop_maps()
        if self._file is not None:
            self._file.close()
            self._file = None
            self.write_at = self._open_and_write
        for index in (self._offset_index, self._time_index):
            if index is not None:
                index.release()

    def _drop_maps(self) -> bool:
        """Close the maps of this file. True if no slice of one is still in use."""
        if self._map is not None:
            self._loose_maps.append(self._map)
            self._map = None
        self._loose_maps = [loose for loose in self._loose_maps if not loose.close()]
        return not self._loose_maps

    # Indexes

    @property
    def offset_index(self) -> SparseIndex:
        if self._offset_index is None:
            self.load_indexes()
        assert self._offset_index is not None
        return self._offset_index

    @property
    def time_index(self) -> SparseIndex:
        if self._time_index is None:
            self.load_indexes()
        assert self._time_index is not None
        return self._time_index

    def named_batches(self) -> NamedBatches:
        """The batches that the offset index names, for an examination on any thread."""
        index = self._offset_index
        in_memory = () if index is None else index.copy_of_rows_in_memory()
        return NamedBatches(self._disk, self.path_of(INDEX_SUFFIX), self.base_offset, in_memory)

    def load_indexes(self) -> None:
        """Open both indexes and check that they fit this segment. Raises CorruptIndex."""
        if self._offset_index is not None and self._time_index is not None:
            return
        counts = []
        for suffix, row_bytes in ((INDEX_SUFFIX, OFFSET_ROW_BYTES), (TIME_INDEX_SUFFIX, TIME_ROW_BYTES)):
            path = self.path_of(suffix)
            try:
                size = self._disk.size_of(path)
            except FileNotFoundError:
                if self.size_bytes:
                    raise CorruptIndex(path, "is missing") from None
                size = 0
            if size % row_bytes:
                raise CorruptIndex(path, f"has {size} bytes, no multiple of {row_bytes}")
            counts.append(size // row_bytes)
        offsets = offset_index(self._disk, self.path_of(INDEX_SUFFIX), self.base_offset, counts[0])
        times = time_index(self._disk, self.path_of(TIME_INDEX_SUFFIX), self.base_offset, counts[1])
        if offsets.count and not (offsets.last_key > self.base_offset and 0 < offsets.last_value < self.size_bytes):
            raise CorruptIndex(offsets.path, f"ends in {offsets.last_key}, {offsets.last_value}")
        # One row of zeros is a record with timestamp 0. Two rows of zeros are a file that was not written.
        zeros = times.count > 1 and times.last_key == 0
        if times.count and (zeros or times.last_key < 0 or times.last_value < self.base_offset or not self.size_bytes):
            raise CorruptIndex(times.path, f"ends in {times.last_key}, {times.last_value}")
        self._offset_index, self._time_index = offsets, times
        self.note_fullness()
        if self.max_timestamp == UNKNOWN:
            self.max_timestamp = times.last_key
            self.offset_of_max_timestamp = times.last_value if times.count else self.base_offset
            self.filed_max = self.max_timestamp, self.offset_of_max_timestamp, self.size_bytes

    def check_indexes_end_below(self, end_offset: int) -> None:
        """Raises CorruptIndex if an index ends in an offset that the segment does not have."""
        for index, offset in (
            (self.offset_index, self.offset_index.last_key),
            (self.time_index, self.time_index.last_value),
        ):
            if index.count and offset >= end_offset:
                raise CorruptIndex(index.path, f"ends in offset {offset}, the segment before {end_offset}")

    def note_fullness(self) -> None:
        assert self._offset_index is not None
        assert self._time_index is not None
        self.is_full = (
            self._offset_index.count >= self._max_offset_rows or self._time_index.count >= self._max_time_rows
        )

    def forget_indexes(self) -> None:
        """Free the memory of the indexes until their next use. What was rebuilt and could not be written stays."""
        self.release()
        if not any(index is not None and index.is_rebuilt for index in (self._offset_index, self._time_index)):
            self._offset_index = self._time_index = None

    def begin_rebuild(self) -> None:
        """Start with empty indexes. A scan fills them with `note_scanned`, and `seal` writes them to their files."""
        for index in (self._offset_index, self._time_index):
            if index is not None:
                index.release()
        self._offset_index = offset_index(self._disk, self.path_of(INDEX_SUFFIX), self.base_offset)
        self._time_index = time_index(self._disk, self.path_of(TIME_INDEX_SUFFIX), self.base_offset)
        self._offset_index.begin_rebuild()
        self._time_index.begin_rebuild()
        self.is_full = False
        self.max_timestamp = -1
        self.offset_of_max_timestamp = self.base_offset
        self.max_is_confirmed = True
        self.bytes_since_index_row = 0
        self.hints.clear()
        self.forget_recent()

    def end_rebuild(self) -> bool:
        """Keep the rebuilt indexes in memory without files, as in a new segment.

        False if they have rows: then `seal` must write them to their files.
        """
        indexes = (self._offset_index, self._time_index)
        if self.transaction_index.exists or any(index is None or index.count for index in indexes):
            return False
        for index in indexes:
            assert index is not None
            index.is_rebuilt = False
        self.transaction_index.settle()
        return True

    def note_scanned(self, position: int, size_bytes: int, last_offset: int, max_timestamp: int) -> None:
        """Index a batch that a scan found in the file."""
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.offset_of_max_timestamp = last_offset
        if self.bytes_since_index_row > self.index_interval_bytes and position <= MAX_POSITION:
            self._index(last_offset, position)
        if not position:
            self.set_first_batch_timestamp(max_timestamp)
        self.bytes_since_index_row += size_bytes

    def note_scanned_damage(self, damage: DamagedRange) -> None:
        """The first batch behind the damage has an index row, as in `Findings.note`."""
        self.next_offset = damage.end_offset
        self.bytes_since_index_row = self.index_interval_bytes + 1

    # Damage

    def is_trusted(self, start: int, end: int) -> bool:
        """Whether these bytes were checked since the last read from the device."""
        if start >= self.warm_from:
            return True
        verified_to = self.verified_to
        return self.verified_from <= start < verified_to and (end <= verified_to or verified_to >= self.warm_from)

    def trust(self, start: int, end: int) -> None:
        """Note that the batches in these bytes were checked. Only one range is kept, because readers go forward."""
        self.is_verified_of_old = False
        if self.verified_from <= start <= self.verified_to:
            self.verified_to = max(self.verified_to, end)
        elif start < self.verified_from <= end:
            self.verified_from, self.verified_to = start, max(self.verified_to, end)
        else:
            self.verified_from, self.verified_to = start, end

    def distrust(self) -> None:
        """Check all bytes at their next read, because they come from the device or were checked long ago."""
        self.verified_from = self.verified_to = 0
        self.warm_from = self.size_bytes
        self.forget_recent()
        self.hints.clear()

    def is_older(self, damage: DamagedRange, timestamp: int) -> bool:
        """Whether the damaged records and all before them are older than `timestamp`, by the time index."""
        row = self.time_index.floor(timestamp - 1)
        return row is not None and row[1] >= damage.end_offset

    def age_trust(self) -> None:
        """Distrust the bytes that were neither appended nor checked since the call before the last one."""
        if self.warm_from < self.aged_to:
            self.warm_from = self.aged_to
        self.aged_to = self.size_bytes
        if self.is_verified_of_old:
            self.verified_from = self.verified_to = 0
        self.is_verified_of_old = self.verified_to > 0
        if self.warm_from == self.size_bytes and not self.verified_to:
            self.forget_recent()

    def epoch_at(self, position: int) -> int:
        """The leader epoch of the batch at `position`; -1 if no batch is readable there."""
        data = self.file.read_at(HEADER_SIZE, position)
        if len(data) < HEADER_SIZE or data[MAGIC_OFFSET] != MAGIC:
            return -1
        return int.from_bytes(data[LEADER_EPOCH_OFFSET : LEADER_EPOCH_OFFSET + 4], "big", signed=True)

    def examine(self, end_offset: int | None = None, epoch_max: int = -1) -> Findings:
        """Examine every batch without a change. Waits for the device. Raises OSError."""
        findings = examine(
            self.file, self.size_bytes, self.base_offset, self.next_offset if end_offset is None else end_offset,
            self.index_interval_bytes, may_have_gaps=self.may_have_gaps, may_end_early=self.may_end_early,
            epoch_max=epoch_max, proven=self.proven, named=self.named_batches(),
        )  # fmt: skip
        findings.generation = self.generation
        return findings

    def adopt(self, findings: Findings) -> None:
        """Apply the result of an examination: the damage, and indexes rebuilt from the undamaged batches.

        Batches appended since it began keep their index rows. Raises OSError.
        """
        assert findings.tail is None, findings.tail
        later_offsets, later_times = self._rows_behind(findings)
        is_last = findings.size_bytes >= self.size_bytes
        since, newest, offset_of_newest = self.bytes_since_index_row, self.max_timestamp, self.offset_of_max_timestamp
        was_confirmed = self.max_is_confirmed
        self.begin_rebuild()
        offsets, times = self.offset_index, self.time_index
        offsets.fill(*findings.offset_rows.columns())
        times.fill(*findings.time_rows.columns())
        for row in later_offsets:
            if row[0] > offsets.last_key and row[1] > offsets.last_value:  # they may be from a damaged file
                offsets.append(*row)
        for row in later_times:
            if row[0] > max(times.last_key, findings.max_timestamp):  # by an index with lost rows, it may be lower
                times.append(*row)
        self.max_timestamp, self.offset_of_max_timestamp = findings.max_timestamp, findings.offset_of_max_timestamp
        self.bytes_since_index_row = findings.bytes_since_index_row if is_last else since
        if newest > self.max_timestamp and not is_last:
            if was_confirmed:
                self.max_timestamp, self.offset_of_max_timestamp = newest, offset_of_newest
            self.max_is_confirmed = was_confirmed  # a wrong one kept appends from noting theirs
        self.set_damage(self.with_filled(findings.damage))
        self.verified_from, self.verified_to = 0, findings.size_bytes
        self.note_fullness()

    def with_filled(self, found: tuple[DamagedRange, ...]) -> tuple[DamagedRange, ...]:
        """`found`, the damage by an examination, with the known damage that repairs fill."""
        kept = [
            each for each in self.damage
            if any(each.first_offset < one.end_offset and one.first_offset < each.end_offset for one in self.filled)
        ]  # fmt: skip
        return united([*kept, *found]) if kept else found

    def begin_to_fill(self, damage: DamagedRange) -> None:
        """A repair writes the range. A running examination may see half of a copy."""
        self.generation += 1
        self.filled = (*(each for each in self.filled if each != damage), damage)

    def end_filling(self, damage: DamagedRange, *, is_written_anew: bool) -> None:
        """The repair of the range takes effect. In another file, those of others are not where they were."""
        self.filled = () if is_written_anew else tuple(apart_from(self.filled, [damage]))

    def set_damage(self, damage: tuple[DamagedRange, ...]) -> None:
        """Set the known damage. A change makes the results of running examinations obsolete."""
        if damage != self.damage:
            self.damage = damage
            self.generation += 1

    def begin_earlier(self, base_offset: int) -> None:
        """Give the segment a lower base offset. It has no bytes, because its file was lost. Raises OSError."""
        assert not self.size_bytes, self
        assert base_offset < self.base_offset, (self, base_offset)
        lost_path = self.path
        self.release()
        self.base_offset = self.offset_of_max_timestamp = base_offset
        self.max_offset = base_offset + MAX_RELATIVE_OFFSET
        self.path = self._name(LOG_SUFFIX, self.suffix)
        self._offset_index = self._time_index = None
        for suffix in SUFFIXES[1:]:
            self._disk.remove(self.path_of(suffix))
        self.transaction_index = TransactionIndex(self._disk, self.path_of(TRANSACTION_INDEX_SUFFIX), exists=False)
        self.transaction_index.lacks_rows = True
        self._disk.write_file(self.path, b"", sync=False)
        self._disk.remove(lost_path)
        self._disk.sync_directory(self.directory)

    def end_at(self, position: int) -> None:
        """End the segment at `position`, up to which a repair has written. The segment is not appended to."""
        if self.file.size_bytes() > position:
            self.cut(position)
        self._drop_maps()
        self.size_bytes = self.warm_from = position
        self.hints.clear()

    def replace_file(self, path: str) -> None:
        """Replace the .log by a synced file. Slices of maps of the old file stay readable."""
        self.release()
        self._disk.rename(path, self.path)
        self._disk.sync_directory(self.directory)
        self._loose_maps = []
        self.generation += 1
        self.size_bytes = self.warm_from = self._disk.size_of(self.path)
        self.hints.clear()
        self.forget_recent()

    def _rows_behind(self, findings: Findings) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The index rows of batches after the examined ones. Raises OSError."""
        if self._offset_index is None or self._time_index is None or findings.size_bytes >= self.size_bytes:
            return [], []
        return (
            self._offset_index.rows_from_value(findings.size_bytes),
            self._time_index.rows_from_value(findings.end_offset),
        )

    # Ending

    def seal(self) -> bool:
        """Write the indexes to their files, with the time index's last row (LogSegment.close). No append follows.

        True if a file may not be on the device as it is: rows are also written before.
        """
        if self._offset_index is None or self._time_index is None:
            return False
        if not self.size_bytes and not self._offset_index.is_rebuilt:
            return False
        times = self._time_index
        if self.max_timestamp > times.last_key:
            times.append(self.max_timestamp, self.offset_of_max_timestamp)
        times.write_rows()
        self._offset_index.write_rows()
        is_unsynced = times.has_unsynced_rows or self._offset_index.has_unsynced_rows
        return self.transaction_index.settle() or is_unsynced

    def save_offset_rows(self) -> None:
        """Write the newest rows of the offset index to its file, without a sync. Raises OSError."""
        index = self._offset_index
        if index is not None and index.count and not index.is_rebuilt:
            index.save_rows()

    def sync_indexes(self) -> None:
        for path in self.paths()[1:]:
            self._disk.sync_file(path)
        self._disk.sync_directory(self.directory)
        for index in (self._offset_index, self._time_index):
            if index is not None:
                index.has_unsynced_rows = False

    def trim(self) -> None:
        """Truncate the preallocated bytes after the end."""
        if self.file.size_bytes() > self.size_bytes:
            self.file.truncate(self.size_bytes)
            self.synced_bytes = -1
            if not self.size_bytes:  # it holds a gap: after a kill no flush syncs it
                self.file.sync()
        self.is_preallocated = False

    def trim_unless(self, preallocate: bool) -> None:
        """Nothing tells the zeros from lost records after a kill, if the settings have changed. A shortage leaves them
        until the segment is closed.
        """
        if self.is_preallocated and not preallocate:
            with suppress(OSError):
                self.trim()

    def truncate(self, position: int, end_offset: int) -> None:
        """Cut file and indexes at `position`, where the batches before `end_offset` end."""
        self.offset_index.truncate(self.offset_index.count_below(end_offset, 0))
        self.time_index.truncate(self.time_index.count_below(end_offset, 1))
        self.transaction_index.truncate_to(end_offset)
        self.cut(position)
        self.next_offset = end_offset
        self.bytes_since_index_row = 0
        self.note_fullness()
        if position == 0:
            self.set_first_batch_timestamp(-1)

    def cut(self, position: int) -> None:
        """Truncate the file to `position`, durably. Slices of maps that are still in use stay readable."""
        if self._drop_maps():
            self.file.truncate(position)
            self.file.sync()
        else:
            self.release()
            temporary = self.path + ".tmp"
            self._disk.copy_prefix(self.path, temporary, position)
            self._disk.rename(temporary, self.path)
            self._disk.sync_directory(self.directory)
            self._loose_maps = []  # these are maps of the replaced file
        self.size_bytes = position
        self.synced_bytes = position
        newest, offset, filed_bytes = self.filed_max
        self.filed_max = newest, offset, min(filed_bytes, position)  # what is appended next is not by the file
        self.warm_from = min(self.warm_from, position)
        self.verified_to = min(self.verified_to, position)
        self.proven = ()
        self.generation += 1
        self.hints.clear()
        self.forget_recent()

    def paths(self) -> list[str]:
        """The paths of its files."""
        present = SUFFIXES if self.transaction_index.exists else SUFFIXES[:3]
        return [self.path_of(suffix) for suffix in present]

    def moved_to(self, directory: str) -> None:
        """The directory was renamed. Paths change; open files and maps stay."""
        self.directory = directory
        self.path = f"{directory}/{self.path.rpartition('/')[2]}"
        for index in (self._offset_index, self._time_index, self.transaction_index):
            if index is not None:
                index.path = f"{directory}/{index.path.rpartition('/')[2]}"

    def mark_deleted(self) -> list[str]:
        """Rename the files so that no start opens them as a segment. Returns the new paths."""
        self.release()
        self.rename_indexes(DELETED_SUFFIX)
        if self._disk.exists(self.path):
            self.rename_log(DELETED_SUFFIX)  # last: indexes without a .log are recognized as orphans
        return self.paths()

    def rename_log(self, suffix: str) -> None:
        """Rename the .log to another suffix."""
        path = self._name(LOG_SUFFIX, suffix)
        self._disk.rename(self.path, path)
        self.path = path

    def rename_indexes(self, suffix: str) -> None:
        """Rename the existing index files to another suffix."""
        for kind in (TRANSACTION_INDEX_SUFFIX, TIME_INDEX_SUFFIX, INDEX_SUFFIX):
            if self._disk.exists(self.path_of(kind)):
                self._disk.rename(self.path_of(kind), self._name(kind, suffix))
        self.suffix = suffix
        for index, kind in ((self._offset_index, INDEX_SUFFIX), (self._time_index, TIME_INDEX_SUFFIX)):
            if index is not None:
                index.path = self.path_of(kind)
        self.transaction_index.path = self.path_of(TRANSACTION_INDEX_SUFFIX)
