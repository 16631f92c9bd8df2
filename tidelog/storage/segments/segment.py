"""One segment: a file of record batches with its two sparse indexes and its index of aborted transactions.

Files are opened when first needed; appending is one write and a few assignments. Finding and handing out batches is
`reader.py`, scanning after a crash `recovery.py`. Invariants: bytes [0, size_bytes) are whole batches of rising
offsets; the recent batches held in memory are contiguous in offset; the file is never cut while somebody may hold a
slice of a map of the cut part (docs/decisions/0003-mmap-reads-and-truncation.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from tidelog.protocol.batches.record_batch import HEADER_SIZE, LEADER_EPOCH_OFFSET, MAGIC, MAGIC_OFFSET
from tidelog.storage.files.disk import Buffer, Disk, File, FileMap
from tidelog.storage.segments.append import Batch
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.examination import Findings, examine
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.retention import roll_limits
from tidelog.storage.segments.sparse_index import (
    OFFSET_ROW_BYTES,
    TIME_ROW_BYTES,
    SparseIndex,
    offset_index,
    time_index,
)
from tidelog.storage.segments.transaction_index import TransactionIndex

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TRANSACTION_INDEX_SUFFIX: Final = ".txnindex"
DELETED_SUFFIX: Final = ".deleted"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
SUFFIXES: Final = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX)

MAX_RELATIVE_OFFSET: Final = 2**31 - 1
UNKNOWN: Final = -2
"""A timestamp that was not looked up yet; -1 is Kafka's "no timestamp"."""

_RECENT_MAX: Final = 128
_RECENT_DROP: Final = 64


def file_name(offset: int, suffix: str) -> str:
    """Kafka's name: the base offset in 20 digits."""
    return f"{offset:020d}{suffix}"


class Segment:
    """`next_offset` is the offset after the last batch, `base_offset` while there is none."""

    __slots__ = (
        "_disk", "_file", "_loose_maps", "_map", "_max_offset_rows", "_max_time_rows", "_offset_index", "_time_index",
        "aged_to", "base_offset", "bytes_since_index_row", "created_ms", "damage", "directory", "findings",
        "first_batch_timestamp", "generation", "hints", "index_interval_bytes", "is_full", "is_verified_of_old",
        "jitter_ms", "max_offset", "max_timestamp", "may_end_early", "may_have_gaps", "next_offset",
        "offset_of_max_timestamp", "path", "proven", "recent_offsets", "recent_positions", "roll_above_now",
        "roll_above_timestamp", "segment_ms", "size_bytes", "suffix", "synced_bytes", "transaction_index", "unread",
        "verified_from", "verified_to", "warm_from", "write_at",
    )  # fmt: skip

    write_at: Callable[[Buffer, int], int]

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
        self.offset_of_max_timestamp = base_offset
        self.first_batch_timestamp = UNKNOWN if size_bytes else -1
        self.segment_ms, self.jitter_ms = config.segment_ms, jitter_ms
        self.roll_above_timestamp, self.roll_above_now = roll_limits(-1, created_ms, config.segment_ms, jitter_ms)
        self.is_full = False
        self.bytes_since_index_row = 0
        self.recent_offsets = array("q")
        self.recent_positions = array("q")
        self.hints: dict[int, int] = {}
        self.warm_from = size_bytes
        """From here on this process has appended: the bytes are in memory, and checked on their way in."""
        self.may_have_gaps = config.is_compacted
        """Offsets may be missing between batches, as compaction leaves them."""
        self.may_end_early = False
        """It was cleaned: its last records may be gone, so that the next segment begins later than this one ends."""
        self.damage: tuple[DamagedRange, ...] = ()
        """What cannot be read, in the order of offsets; `next_offset` counts it."""
        self.proven: tuple[tuple[int, int], ...] = ()
        """Ranges of offsets whose batches another replica has sent, kept while there is damage: their epochs are right,
        whatever is beside them and the epoch file say."""
        self.verified_from = self.verified_to = 0
        """Batches read from the device and found whole since the start."""
        self.aged_to = 0
        self.is_verified_of_old = False
        self.generation = 0
        """Changes when bytes that were there are cut or replaced, and when other damage is known."""
        self.findings: Findings | None = None
        """What an examination on a thread has found, until `adopt` takes it over."""
        self.unread: OSError | None = None
        """Why bytes could not be brought into memory, until somebody who asked for some is told (`reader.ColdRead`)."""
        self._file: File | None = None
        self._map: FileMap | None = None
        self._loose_maps: list[FileMap] = []
        self.write_at = self._open_and_write

    @classmethod
    def create(
        cls, disk: Disk, directory: str, base_offset: int, config: LogConfig, now_ms: int, jitter_ms: int
    ) -> Segment:
        """A new, empty segment: its .log; the indexes get their files with their first rows."""
        segment = cls(disk, directory, base_offset, config, now_ms, jitter_ms=jitter_ms)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
            disk.remove(segment.path_of(suffix))
        disk.write_file(segment.path, b"", sync=False)
        segment._offset_index = offset_index(disk, segment.path_of(INDEX_SUFFIX), base_offset)
        segment._time_index = time_index(disk, segment.path_of(TIME_INDEX_SUFFIX), base_offset)
        if config.preallocate:
            segment.file.truncate(config.segment_bytes)
        return segment

    def __repr__(self) -> str:
        return f"Segment({self.path}, next_offset={self.next_offset}, size_bytes={self.size_bytes})"

    @property
    def stem(self) -> str:
        """What the paths of all its files begin with, whatever they are called now."""
        return self._name("", "")

    def path_of(self, kind: str) -> str:
        """Where its file of this kind is now: while it replaces others, or was replaced, under another name."""
        return self.path if kind == LOG_SUFFIX else self._name(kind, self.suffix)

    def _name(self, kind: str, suffix: str) -> str:
        return f"{self.directory}/{file_name(self.base_offset, kind)}{suffix}"

    # Appending

    def append(self, data: Buffer, batches: Sequence[Batch]) -> None:
        """Write the batches with one write and index them. OSError leaves the segment as it was, to its knowledge."""
        position = self.size_bytes
        size = len(data)
        if self.file.size_bytes() < position:
            # Something else has cut the file. Behind this write there will be zeros where batches were.
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
        """The same for one batch, without a loop and its tuple: this runs for every produce."""
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
        if not self.is_full:
            offsets.append(last_offset, position)
            if self.max_timestamp > times.last_key:
                times.append(self.max_timestamp, self.offset_of_max_timestamp)
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
        """After a failed write: nothing of it may stay behind the end. OSError when even that fails."""
        if self._file is not None:  # else it could not be opened, and nothing was written
            self._file.truncate(self.size_bytes)
            self._file.sync()

    def forget_recent(self) -> None:
        self.recent_offsets = array("q")
        self.recent_positions = array("q")

    # Files

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path)
        return self._file

    def view(self, end: int) -> memoryview:
        """A map of the file that reaches at least to `end`."""
        if self._map is None or self._map.size_bytes < end:
            if self._map is not None:
                self._loose_maps = [loose for loose in (*self._loose_maps, self._map) if not loose.close()]
            self._map = None
            try:
                self._map = self.file.map(self.size_bytes)
            except ValueError as error:
                raise CorruptIndex(self.path, f"is shorter than {self.size_bytes} bytes") from error
        elif self.file.size_bytes() < end:  # to touch the map behind the end of the file would end the process
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
        """True when nobody holds a slice of any map of this file."""
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

    def load_indexes(self) -> None:
        """Open both indexes and check that they can belong to this segment; raises CorruptIndex."""
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
        # A single row of zeros is a record of timestamp 0; two can only be a file that was never written.
        zeros = times.count > 1 and times.last_key == 0
        if times.count and (zeros or times.last_key < 0 or times.last_value < self.base_offset or not self.size_bytes):
            raise CorruptIndex(times.path, f"ends in {times.last_key}, {times.last_value}")
        self._offset_index, self._time_index = offsets, times
        self.note_fullness()
        if self.max_timestamp == UNKNOWN:
            self.max_timestamp = times.last_key
            self.offset_of_max_timestamp = times.last_value if times.count else self.base_offset

    def check_indexes_end_below(self, end_offset: int) -> None:
        """Raises CorruptIndex when a row speaks of an offset that the segment does not have."""
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
        """Nothing of the indexes stays in memory until they are needed again; they must be in their files."""
        self.release()
        self._offset_index = self._time_index = None

    def begin_rebuild(self) -> None:
        """Empty indexes, to be filled by a scan with `note_scanned` and brought to their files by `seal`."""
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
        self.bytes_since_index_row = 0
        self.hints.clear()
        self.forget_recent()

    def end_rebuild(self) -> bool:
        """Go on with the indexes in memory, as those of a new segment, for which there are no files yet.

        False if that is too much: then `seal` is to bring them there.
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
        if self.bytes_since_index_row > self.index_interval_bytes:
            self._index(last_offset, position)
        if not position:
            self.set_first_batch_timestamp(max_timestamp)
        self.bytes_since_index_row += size_bytes

    # Damage

    def is_trusted(self, start: int, end: int) -> bool:
        """Whether these bytes were checked since they were last read from the device."""
        if start >= self.warm_from:
            return True
        verified_to = self.verified_to
        return self.verified_from <= start < verified_to and (end <= verified_to or verified_to >= self.warm_from)

    def trust(self, start: int, end: int) -> None:
        """The whole batches in these bytes were checked. One stretch is remembered, as readers go forward."""
        self.is_verified_of_old = False
        if self.verified_from <= start <= self.verified_to:
            self.verified_to = max(self.verified_to, end)
        elif start < self.verified_from <= end:
            self.verified_from, self.verified_to = start, max(self.verified_to, end)
        else:
            self.verified_from, self.verified_to = start, end

    def distrust(self) -> None:
        """Bytes are about to come from the device, or have lain there for long: check them when they are read next."""
        self.verified_from = self.verified_to = 0
        self.warm_from = self.size_bytes
        self.forget_recent()
        self.hints.clear()

    def is_older(self, damage: DamagedRange, timestamp: int) -> bool:
        """Whether the time index says that what is damaged, and all before it, is older than `timestamp`."""
        row = self.time_index.floor(timestamp - 1)
        return row is not None and row[1] >= damage.end_offset

    def age_trust(self) -> None:
        """What was neither appended nor checked since the last call but one is to be checked again."""
        if self.warm_from < self.aged_to:
            self.warm_from = self.aged_to
        self.aged_to = self.size_bytes
        if self.is_verified_of_old:
            self.verified_from = self.verified_to = 0
        self.is_verified_of_old = self.verified_to > 0
        if self.warm_from == self.size_bytes and not self.verified_to:
            self.forget_recent()

    def epoch_at(self, position: int) -> int:
        """The leader epoch of the batch there; -1 where there is none that can be read."""
        data = self.file.read_at(HEADER_SIZE, position)
        if len(data) < HEADER_SIZE or data[MAGIC_OFFSET] != MAGIC:
            return -1
        return int.from_bytes(data[LEADER_EPOCH_OFFSET : LEADER_EPOCH_OFFSET + 4], "big", signed=True)

    def examine(self, end_offset: int | None = None, epoch_max: int = -1) -> Findings:
        """Look at every batch, waiting for the device; changes nothing. Raises OSError."""
        findings = examine(
            self.file, self.size_bytes, self.base_offset, self.next_offset if end_offset is None else end_offset,
            self.index_interval_bytes, may_have_gaps=self.may_have_gaps, may_end_early=self.may_end_early,
            epoch_max=epoch_max, proven=self.proven,
        )  # fmt: skip
        findings.generation = self.generation
        return findings

    def adopt(self, findings: Findings) -> None:
        """Take over what an examination found: the damage, and indexes made anew from the whole batches.

        Batches appended since it began keep the rows they have. Raises OSError.
        """
        assert findings.tail is None, findings.tail
        later_offsets, later_times = self._rows_behind(findings)
        is_last = findings.size_bytes >= self.size_bytes
        since, newest, offset_of_newest = self.bytes_since_index_row, self.max_timestamp, self.offset_of_max_timestamp
        self.begin_rebuild()
        offsets, times = self.offset_index, self.time_index
        for row in chain(findings.offset_rows, later_offsets):
            offsets.append(*row)
        for row in findings.time_rows:
            times.append(*row)
        for row in later_times:
            if row[0] > times.last_key:
                times.append(*row)
        self.max_timestamp, self.offset_of_max_timestamp = findings.max_timestamp, findings.offset_of_max_timestamp
        self.bytes_since_index_row = findings.bytes_since_index_row if is_last else since
        if newest > self.max_timestamp and not is_last:
            self.max_timestamp, self.offset_of_max_timestamp = newest, offset_of_newest
        self.set_damage(findings.damage)
        self.verified_from, self.verified_to = 0, findings.size_bytes
        self.note_fullness()

    def set_damage(self, damage: tuple[DamagedRange, ...]) -> None:
        """What was found before by an examination that still runs does not count any more."""
        if damage != self.damage:
            self.damage = damage
            self.generation += 1

    def end_at(self, position: int) -> None:
        """A repair has written up to `position`, behind which there is nothing of a segment that is not appended to."""
        if self.file.size_bytes() > position:
            self.cut(position)
        self._drop_maps()
        self.size_bytes = self.warm_from = position
        self.hints.clear()

    def replace_file(self, path: str) -> None:
        """Put a file that is on the device in the place of the .log; whoever reads the old one may go on."""
        self.release()
        self._disk.rename(path, self.path)
        self._disk.sync_directory(self.directory)
        self._loose_maps = []
        self.generation += 1
        self.size_bytes = self.warm_from = self._disk.size_of(self.path)
        self.hints.clear()
        self.forget_recent()

    def _rows_behind(self, findings: Findings) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Index rows of batches that lie behind what was examined. Those are still in memory."""
        if self._offset_index is None or self._time_index is None or findings.size_bytes >= self.size_bytes:
            return [], []
        offsets = [row for row in self._offset_index.rows_in_memory() if row[1] >= findings.size_bytes]
        times = [row for row in self._time_index.rows_in_memory() if row[1] >= findings.end_offset]
        return offsets, times

    # Ending

    def seal(self) -> bool:
        """No append follows: bring the indexes to their files, with the time index's last row (LogSegment.close).

        True when that changed a file.
        """
        if self._offset_index is None or self._time_index is None:
            return False
        if not self.size_bytes and not self._offset_index.is_rebuilt:
            return False
        times = self._time_index
        if self.max_timestamp > times.last_key:
            times.append(self.max_timestamp, self.offset_of_max_timestamp)
        changed = [index.write_rows() for index in (times, self._offset_index)]
        return self.transaction_index.settle() or any(changed)

    def sync_indexes(self) -> None:
        for path in self.paths()[1:]:
            self._disk.sync_file(path)
        self._disk.sync_directory(self.directory)

    def trim(self) -> None:
        """Cut what was preallocated behind the end."""
        if self._disk.size_of(self.path) > self.size_bytes:
            self.file.truncate(self.size_bytes)
            self.synced_bytes = -1

    def cut(self, position: int) -> None:
        """Cut the file at `position`, durably. Slices of the cut part that somebody still holds stay readable."""
        if self._drop_maps():
            self.file.truncate(position)
            self.file.sync()
        else:
            self.release()
            temporary = self.path + ".tmp"
            self._disk.copy_prefix(self.path, temporary, position)
            self._disk.rename(temporary, self.path)
            self._disk.sync_directory(self.directory)
            self._loose_maps = []  # maps of the file that was replaced
        self.size_bytes = position
        self.synced_bytes = position
        self.warm_from = min(self.warm_from, position)
        self.verified_to = min(self.verified_to, position)
        self.proven = ()
        self.generation += 1
        self.hints.clear()
        self.forget_recent()

    def paths(self) -> list[str]:
        """The files it has."""
        present = SUFFIXES if self.transaction_index.exists else SUFFIXES[:3]
        return [self.path_of(suffix) for suffix in present]

    def moved_to(self, directory: str) -> None:
        """The directory was renamed: names are other ones, open files and maps the same."""
        self.directory = directory
        self.path = f"{directory}/{self.path.rpartition('/')[2]}"
        for index in (self._offset_index, self._time_index, self.transaction_index):
            if index is not None:
                index.path = f"{directory}/{index.path.rpartition('/')[2]}"

    def mark_deleted(self) -> list[str]:
        """Rename the files so that no start takes them for a segment; returns the new paths."""
        self.release()
        self.rename_indexes(DELETED_SUFFIX)
        if self._disk.exists(self.path):
            self.rename_log(DELETED_SUFFIX)  # last: without it the others are known to be orphans
        return self.paths()

    def rename_log(self, suffix: str) -> None:
        """Give the .log another end to its name."""
        path = self._name(LOG_SUFFIX, suffix)
        self._disk.rename(self.path, path)
        self.path = path

    def rename_indexes(self, suffix: str) -> None:
        """The same for the other files, those that exist."""
        for kind in (TRANSACTION_INDEX_SUFFIX, TIME_INDEX_SUFFIX, INDEX_SUFFIX):
            if self._disk.exists(self.path_of(kind)):
                self._disk.rename(self.path_of(kind), self._name(kind, suffix))
        self.suffix = suffix
        for index, kind in ((self._offset_index, INDEX_SUFFIX), (self._time_index, TIME_INDEX_SUFFIX)):
            if index is not None:
                index.path = self.path_of(kind)
        self.transaction_index.path = self.path_of(TRANSACTION_INDEX_SUFFIX)
