"""Examines every batch of a segment: which batches are whole, and which bytes before other whole batches are damaged.

Kafka ends a log at the first batch that fails its check. Here the examination continues at the next whole batch, so
that damage in the middle costs only the damaged records. A batch is whole if its CRC is right, and if the fields that
the CRC does not cover (base offset, length, epoch, magic) agree with its neighbours. It may run on any thread: it reads
one file and changes nothing.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_OFFSET,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    MAGIC_OFFSET,
    MIN_BATCH_LENGTH,
    BatchHeader,
)
from tidelog.protocol.batches.record_walk import records_end
from tidelog.storage.files.disk import File
from tidelog.storage.segments.damage import DamagedRange, merged
from tidelog.storage.segments.leader_epochs import EpochBatches
from tidelog.storage.segments.log_config import MAX_POSITION, MAX_RELATIVE_OFFSET

_OLD_MESSAGE: Final = Struct(">qiIb")  # offset, size of what follows, CRC-32 of what follows it, format
_OLD_MESSAGE_CRC_END: Final = 16
_CHUNK_BYTES: Final = 1024 * 1024
_MAGIC_BYTE: Final = bytes([MAGIC])
_EPOCH_EDGES_MAX: Final = 1000
_SEARCHED_CRC_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bound of the candidates in a search for the next whole batch. Records may hold bytes that look like batches: beyond
it, only what the offset index names is a candidate.
"""
_EMBEDDED_BYTES_MAX: Final = 8 * 1024 * 1024
"""A longer series of batches is not the payload of one batch, because max.message.bytes is 1 MiB by default."""
UNKNOWN_END: Final = -1

ReadAt = Callable[[int, int], bytes]
"""(size in bytes, position) -> bytes, fewer at the end of the file."""


BatchFacts = tuple[int, int, int, int, int]
"""Position and end position of a batch, its first offset and the offset after it, its leader epoch."""


class WholeBatch(NamedTuple):
    position: int
    header: BatchHeader
    data: memoryview


class ProvenBatches(NamedTuple):
    """Batches of [first_offset, end_offset) that another replica has confirmed, all of one leader epoch."""

    first_offset: int
    end_offset: int
    leader_epoch: int


def proven_epoch(offset: int, proven: Sequence[ProvenBatches]) -> int | None:
    """The confirmed leader epoch of the batch at this offset, by the latest confirmation."""
    for each in reversed(proven):
        if each.first_offset <= offset < each.end_offset:
            return each.leader_epoch
    return None


def is_crc_right(data: memoryview, header: BatchHeader) -> bool:
    """`data`: the whole batch."""
    return crc32c(data[ATTRIBUTES_OFFSET:]) == header.crc


class _Window:
    """A part of the file in memory, which moves forward with the reads."""

    def __init__(self, read_at: ReadAt, size_bytes: int) -> None:
        self._read_at = read_at
        self.size_bytes = size_bytes
        self._chunk = memoryview(b"")
        self._start = 0

    def view(self, position: int, size_bytes: int) -> memoryview:
        """The bytes from `position`, at least `size_bytes` of them unless the file ends before."""
        at = position - self._start
        if at < 0 or at + size_bytes > len(self._chunk):
            window_bytes = min(max(_CHUNK_BYTES, size_bytes), self.size_bytes - position)
            self._chunk, self._start, at = memoryview(self._read_at(window_bytes, position)), position, 0
        return self._chunk[at:]

    def header(self, position: int) -> BatchHeader | None:
        """The header at `position`, if it is plausible and the batch ends within the file; otherwise None.

        Attributes say nothing: unused bits are stored as a client sends them, and the CRC covers them.
        """
        if position + HEADER_SIZE > self.size_bytes:
            return None
        try:
            header = BatchHeader._make(HEADER.unpack_from(self.view(position, HEADER_SIZE)))
        except StructError:
            return None
        if (
            header.magic != MAGIC
            or header.batch_length < MIN_BATCH_LENGTH
            or position + header.size_bytes > self.size_bytes
            or header.last_offset_delta < 0
            or header.base_offset < 0
            or not 0 <= header.record_count <= header.last_offset_delta + 1
        ):
            return None
        return header

    def whole(self, position: int) -> WholeBatch | None:
        """The batch at `position`, if its CRC is right; otherwise None."""
        header = self.header(position)
        if header is None:
            return None
        data = self.view(position, header.size_bytes)[: header.size_bytes]
        if len(data) < header.size_bytes or not is_crc_right(data, header):
            return None
        return WholeBatch(position, header, data)

    def records_end(self, position: int) -> int:
        """The end of the uncompressed records that begin at `position`; `position` if there are none."""
        left, end = self.size_bytes - position, 0
        for size_bytes in (_CHUNK_BYTES, _EMBEDDED_BYTES_MAX):
            if left > 0:
                end, is_cut = records_end(self.view(position, min(size_bytes, left)), left)
                if not is_cut:
                    break
        return position + end


class Examiner:
    """The examination of one segment file of `size_bytes`, whose first record has `base_offset`.

    `end_offset`: the offset after its last record, UNKNOWN_END if unknown. `may_have_gaps`: whether offsets may be
    missing between batches after compaction; `may_end_early`: also after the last batch. `epoch_max`: the leader epoch
    of the batch after the segment, -1 if unknown. `proven`: the batches that another replica has confirmed: if the
    epoch of a neighbour disagrees, the neighbour is damaged. `filed_epoch`: offset -> leader epoch by the epoch file,
    -1 if unknown. `named`: the (last offset, position) of batches that the offset index names.
    """

    def __init__(
        self, read_at: ReadAt, size_bytes: int, base_offset: int, *, end_offset: int = UNKNOWN_END,
        may_have_gaps: bool = False, may_end_early: bool = False, epoch_max: int = -1,
        proven: Sequence[ProvenBatches] = (), filed_epoch: Callable[[int], int] = lambda offset: -1,
        named: Container[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self._window = _Window(read_at, size_bytes)
        self._size_bytes = size_bytes
        self._end_offset = end_offset
        offset_max = base_offset + MAX_RELATIVE_OFFSET
        self._offset_max = min(end_offset - 1, offset_max) if end_offset >= 0 else offset_max
        self._may_have_gaps = may_have_gaps or may_end_early
        self._may_end_early = may_end_early
        self._epoch_max = epoch_max
        self._proven = proven
        self._filed_epoch = filed_epoch
        self._named = named
        self._expected = base_offset
        # Every stored batch has an epoch. A start below 0 would accept a damaged epoch of -1.
        self._epoch = 0
        self._search_from = 0

    def run(self) -> Iterator[WholeBatch | DamagedRange]:
        """Every whole batch and every damaged range, in order. A last range with an unknown end is the tail."""
        position = 0
        while position < self._size_bytes:
            batch = self._window.whole(position)
            reason = self._defect(position) if batch is None else self._mismatch(batch)
            overlap = "" if batch is None or reason else self._overlap(batch)
            reason = reason or overlap
            if batch is None or reason:
                following = self._resume_behind_both(batch) if batch and overlap else self._resume(position, batch)
                if following is None:
                    yield DamagedRange(position, self._size_bytes, self._expected, self._end_offset, reason)
                    return
                yield DamagedRange(position, following.position, self._expected, following.header.base_offset, reason)
                batch = following
            yield batch
            self._expected = batch.header.next_offset
            self._epoch = max(self._epoch, batch.header.partition_leader_epoch)
            position = batch.position + batch.header.size_bytes
        if self._expected < self._end_offset and not self._may_end_early:
            size = self._size_bytes
            yield DamagedRange(size, size, self._expected, self._end_offset, "the file ends too early")

    def _defect(self, position: int) -> str:
        """Why there is no whole batch at `position`. Kafka 4 still reads messages of formats 0 and 1."""
        view = self._window.view(position, min(_OLD_MESSAGE.size, self._size_bytes - position))
        if len(view) >= _OLD_MESSAGE.size:
            _, size, crc, magic = _OLD_MESSAGE.unpack_from(view)
            end = position + LOG_OVERHEAD + size
            if magic in (0, 1) and 5 < size < _EMBEDDED_BYTES_MAX and end <= self._size_bytes:
                view = self._window.view(position, end - position)[_OLD_MESSAGE_CRC_END : LOG_OVERHEAD + size]
                if zlib.crc32(view) == crc:
                    return f"a message of format {magic}, from before Kafka 0.11, which is not read"
        return "the CRC is wrong, or the header"

    def _mismatch(self, batch: WholeBatch) -> str:
        """The field outside the CRC that disagrees with the neighbours; empty if all agree."""
        header = batch.header
        if header.base_offset < self._expected or header.last_offset > self._offset_max:
            return f"base offset {header.base_offset} where {self._expected} should be"
        if header.base_offset != self._expected and not self._may_have_gaps:
            return f"base offset {header.base_offset} where {self._expected} should be"
        following = self._window.header(batch.position + header.size_bytes)
        confirmed = proven_epoch(header.base_offset, self._proven)
        if confirmed is None:
            reason = self._epoch_mismatch(header, following)
            if reason:
                return reason
        elif confirmed != header.partition_leader_epoch:
            return f"leader epoch {header.partition_leader_epoch}, another replica has {confirmed}"
        return ""

    def _overlap(self, batch: WholeBatch) -> str:
        """Why the base offset of this batch, or that of the next one, is wrong; empty if none is.

        Without a gap before it, this one is right, and the next one is wrong.
        """
        header = batch.header
        if header.base_offset == self._expected:
            return ""
        following = self._window.header(batch.position + header.size_bytes)
        if following is not None and self._expected <= following.base_offset < header.next_offset:
            return f"base offset {header.base_offset} before {following.base_offset}"
        return ""

    def _epoch_mismatch(self, header: BatchHeader, following: BatchHeader | None) -> str:
        """The mismatch of the leader epoch, if any.

        If only two batches disagree, the first counts as wrong unless it is proven, or right by the epoch file.
        """
        epoch = header.partition_leader_epoch
        if epoch < self._epoch:
            return f"leader epoch {epoch} after {self._epoch}"
        if following is None:
            if 0 <= self._epoch <= self._epoch_max < epoch:
                return f"leader epoch {epoch} before {self._epoch_max}"
            return ""
        next_epoch = following.partition_leader_epoch
        if next_epoch >= epoch:
            return ""
        is_proven = proven_epoch(following.base_offset, self._proven) == next_epoch
        is_filed = self._filed_epoch(header.base_offset) == epoch
        is_right = self._epoch > next_epoch or (is_filed and self._filed_epoch(following.base_offset) > next_epoch)
        return f"leader epoch {epoch} before {next_epoch}" if is_proven or not is_right else ""

    def _resume(self, position: int, batch: WholeBatch | None) -> WholeBatch | None:
        """The first whole batch after the damage that begins at `position`; None if there is none."""
        if (
            batch is not None
            and batch.header.base_offset > self._expected
            and self._fits(batch)
            and self._connects(batch, strictly=True)
        ):
            return batch  # the batch is right, but the records before it are missing
        header = self._window.header(position)
        if header is not None:
            candidate = self._window.whole(position + header.size_bytes)
            if candidate is not None and self._fits(candidate) and self._connects(candidate):
                return candidate
        return self._search(position, position + 1 if batch is None else position + batch.header.size_bytes)

    def _resume_behind_both(self, batch: WholeBatch) -> WholeBatch | None:
        """The first whole batch behind two of which one has a wrong base offset: at its offsets readers would get the
        records of others. The second one is right if what follows it begins where it ends.
        """
        following = self._window.whole(batch.position + batch.header.size_bytes)
        if following is None or self._is_confirmed(following):
            return self._resume(batch.position, batch)
        behind = following.position + following.header.size_bytes
        candidate = self._window.whole(behind)
        if candidate is not None and self._fits(candidate) and self._connects(candidate):
            return candidate
        return self._search(following.position, behind)

    def _fits(self, batch: WholeBatch) -> bool:
        """Whether the batch can be the first one after destroyed bytes, or after missing records."""
        header = batch.header
        return (
            header.base_offset >= self._expected
            and header.last_offset <= self._offset_max
            and header.partition_leader_epoch >= self._epoch
            and (header.base_offset > self._expected or self._is_confirmed(batch))
        )

    def _is_confirmed(self, batch: WholeBatch) -> bool:
        """Whether what follows the batch begins where it ends.

        What is destroyed before it had at least one offset. So a batch at the expected one has a wrong base offset,
        which no CRC covers, unless bytes were inserted.
        """
        end, next_offset = batch.position + batch.header.size_bytes, batch.header.next_offset
        if end >= self._size_bytes:
            return next_offset == self._end_offset
        following = self._window.whole(end)
        return following is not None and following.header.base_offset == next_offset

    def _connects(self, batch: WholeBatch, *, strictly: bool = False) -> bool:
        """Whether the next batch continues at the end offset of `batch`. `strictly`: unknown counts as False."""
        end, next_offset = batch.position + batch.header.size_bytes, batch.header.next_offset
        if end >= self._size_bytes:
            return next_offset == self._end_offset or (not strictly and self._end_offset < 0) or self._may_end_early
        following = self._window.whole(end)
        if following is None:
            return not strictly
        base_offset = following.header.base_offset
        return base_offset >= next_offset if self._may_have_gaps else base_offset == next_offset

    def _search(self, damaged: int, position: int) -> WholeBatch | None:
        """The first batch of the log from `position` on, after the destroyed batch at `damaged`.

        Records may contain whole batches as payload. If the records of the destroyed batch are readable, they show its
        end. Otherwise a series of batches counts as the log's if the index names one of them, if it reaches the
        segment's end, or if it is longer than one batch can be. Without such a series the first candidate counts.
        """
        self._search_from = position
        records_start = damaged + HEADER_SIZE
        records_end = self._window.records_end(records_start)
        loose: WholeBatch | None = None
        for candidate in self._candidates():
            at = candidate.position
            if records_start <= at < records_end:
                self._search_from = records_end
                continue
            end, is_of_log = self._follow(candidate)
            if is_of_log or records_start < at == records_end:
                return candidate
            loose = loose or candidate
            self._search_from = end
        return loose

    def _candidates(self) -> Iterator[WholeBatch]:
        """Whole batches that fit, from `_search_from` on, which the caller may move forward meanwhile.

        Every position is checked for the upper half of a base offset and magic 2, before the whole header is checked.
        """
        high = (self._expected >> 32).to_bytes(4, "big")
        pattern = re.compile(b"(?=" + re.escape(high) + b".{12}\x02)", re.DOTALL)
        budget = _SEARCHED_CRC_BYTES_MAX
        position = self._search_from
        while position < self._size_bytes:
            view = self._window.view(position, min(_CHUNK_BYTES, self._size_bytes - position))
            # A copy, because the check of a candidate may move the window.
            data = bytes(view[:_CHUNK_BYTES])
            # Zeros, as behind the records of a preallocated segment, match all of the pattern but the magic byte.
            begin, end = max(data.find(_MAGIC_BYTE) - MAGIC_OFFSET, 0), data.rfind(_MAGIC_BYTE) + 1
            for match in pattern.finditer(data, begin, end):
                at = position + match.start()
                header = self._window.header(at) if at >= self._search_from else None
                if header is None or not self._expected <= header.base_offset <= self._offset_max:
                    continue
                budget -= header.size_bytes
                if budget < 0 and (header.last_offset, at) not in self._named:
                    continue
                candidate = self._window.whole(at)
                if candidate is not None and self._fits(candidate):
                    yield candidate
            if len(data) < _CHUNK_BYTES:
                return
            position = max(position + _CHUNK_BYTES - LOG_OVERHEAD - HEADER_SIZE, self._search_from)

    def _follow(self, batch: WholeBatch) -> tuple[int, bool]:
        """The end of the contiguous batches from `batch` on, and whether they are the log's.

        They are if the index names one of them, if they reach the end of the segment, or if they are longer than a
        batch that could contain them.
        """
        position, expected, epoch = batch.position, batch.header.base_offset, self._epoch
        header: BatchHeader | None = batch.header
        while header is not None:
            is_next = header.base_offset == expected or (self._may_have_gaps and header.base_offset > expected)
            if not is_next or header.partition_leader_epoch < epoch or header.last_offset > self._offset_max:
                return position, False
            if (header.last_offset, position) in self._named:
                return position + header.size_bytes, True
            position, expected = position + header.size_bytes, header.next_offset
            epoch = header.partition_leader_epoch
            if position - batch.position > _EMBEDDED_BYTES_MAX:
                return position, True
            if position >= self._size_bytes:
                is_end = expected == self._end_offset or self._end_offset < 0 or self._may_end_early
                return position, is_end
            header = self._header_on(position, expected)
        return position, False

    def _header_on(self, position: int, expected: int) -> BatchHeader | None:
        """The header of the whole batch at `position`, or of one whose records are damaged.

        The header of the latter is right if it begins at the expected offset and leads to a whole batch that continues.
        """
        batch = self._window.whole(position)
        if batch is not None:
            return batch.header
        header = self._window.header(position)
        if header is None or header.base_offset != expected:
            return None
        following = self._window.whole(position + header.size_bytes)
        return header if following is not None and following.header.base_offset == header.next_offset else None


class IndexRows:
    """Rows of an index in compact form, because a large segment has hundreds of thousands."""

    __slots__ = ("_keys", "_values", "last_key")

    def __init__(self) -> None:
        self._keys = array("q")
        self._values = array("q")
        self.last_key = -1
        """The key of the last row, -1 without rows."""

    def append(self, key: int, value: int) -> None:
        self._keys.append(key)
        self._values.append(value)
        self.last_key = key

    def __len__(self) -> int:
        return len(self._keys)

    def columns(self) -> tuple[array[int], array[int]]:
        """Copies of the keys and the values, for `SparseIndex.fill`."""
        return self._keys[:], self._values[:]


class EpochDoubt(NamedTuple):
    """A batch whose leader epoch contradicts the log's epochs, and the batch after it."""

    damage: DamagedRange
    epoch: int
    known: int
    following: BatchFacts | None


class EpochEdges:
    """The batches of a segment whose leader epoch differs from that of a neighbour, each with both neighbours."""

    __slots__ = ("_before_last", "_edges", "_last")

    def __init__(self) -> None:
        self._edges: list[tuple[BatchFacts | None, BatchFacts, BatchFacts | None]] = []
        self._before_last: BatchFacts | None = None
        self._last: BatchFacts | None = None

    def note(self, following: BatchFacts | None) -> None:
        """The next batch; None behind the last one."""
        before, last = self._before_last, self._last
        if last is not None and len(self._edges) < _EPOCH_EDGES_MAX:
            is_inside = before is not None and following is not None and before[4] == last[4] == following[4]
            if not is_inside:
                self._edges.append((before, last, following))
        self._before_last, self._last = last, following

    def doubts(self, epoch_at: Callable[[int], int]) -> list[EpochDoubt]:
        """The single batches that contradict `epoch_at` (offset -> leader epoch, -1 unknown). Call it once."""
        doubts: list[EpochDoubt] = []
        edges, self._edges = self._edges, []
        for before, batch, following in edges:
            position, end_position, first_offset, end_offset, epoch = batch
            known = epoch_at(first_offset)
            if known < 0 or known == epoch:
                continue
            if all(other is None or epoch_at(other[2]) == other[4] for other in (before, following)):
                reason = f"leader epoch {epoch}, the epoch file says {known}"
                damage = DamagedRange(position, end_position, first_offset, end_offset, reason)
                doubts.append(EpochDoubt(damage, epoch, known, following))
        return doubts


class Findings:
    """The result of an examination: the index rows of the whole batches, and the damage between them."""

    __slots__ = (
        "_end_position", "_epochs", "_last_of_epochs", "bytes_since_index_row", "damage", "end_offset", "epoch_edges",
        "first_timestamp", "generation", "max_timestamp", "offset_of_max_timestamp", "offset_rows", "size_bytes",
        "tail", "time_rows",
    )  # fmt: skip

    def __init__(self, base_offset: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        """The size of the examined part of the file."""
        self.end_offset = base_offset
        """The offset after the last record, including known damaged ones."""
        self.damage: tuple[DamagedRange, ...] = ()
        self.tail: DamagedRange | None = None
        """The rest of the file after the last whole batch, if its number of records is unknown."""
        self._end_position = 0
        self._epochs: list[tuple[int, int, int]] = []
        self._last_of_epochs: list[int] = []
        self.offset_rows = IndexRows()
        self.time_rows = IndexRows()
        self.max_timestamp = -1
        self.offset_of_max_timestamp = base_offset
        self.first_timestamp = -1
        self.epoch_edges = EpochEdges()
        self.generation = 0
        """`Segment.generation` at the time of the examination."""
        self.bytes_since_index_row = 0

    def note(self, position: int, header: BatchHeader, index_interval_bytes: int) -> None:
        """Add a whole batch, and its index rows as an append would.

        The first batch behind damage also has a row: the next examination knows by it that the batch is the log's.
        """
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp, self.offset_of_max_timestamp = header.max_timestamp, header.last_offset
        is_behind_damage = position != self._end_position
        self._end_position = position + header.size_bytes
        if (is_behind_damage or self.bytes_since_index_row > index_interval_bytes) and position <= MAX_POSITION:
            self.offset_rows.append(header.last_offset, position)
            if self.max_timestamp > self.time_rows.last_key:
                self.time_rows.append(self.max_timestamp, self.offset_of_max_timestamp)
            self.bytes_since_index_row = 0
        if not position:
            self.first_timestamp = header.max_timestamp
        epoch = header.partition_leader_epoch
        if not self._epochs or epoch > self._epochs[-1][0]:
            self._epochs.append((epoch, self.end_offset, header.base_offset))
            self._last_of_epochs.append(header.base_offset)
        elif epoch == self._epochs[-1][0]:
            self._last_of_epochs[-1] = header.base_offset
        self.epoch_edges.note((position, position + header.size_bytes, header.base_offset, header.next_offset, epoch))
        self.bytes_since_index_row += header.size_bytes
        self.end_offset = header.next_offset

    @property
    def epochs(self) -> list[EpochBatches]:
        """The batches of each leader epoch in this segment."""
        return [EpochBatches(*each, last) for each, last in zip(self._epochs, self._last_of_epochs)]

    def close(self, damage: list[DamagedRange], present_bytes: int, end_offset: int) -> None:
        """End the examination: `damage` lies between the batches, and the file had `present_bytes`.

        `end_offset`: the offset after the last record, UNKNOWN_END if unknown.
        """
        self.epoch_edges.note(None)
        if present_bytes < self.size_bytes and end_offset >= 0:
            if damage and damage[-1].end_position == present_bytes:
                damage[-1] = damage[-1]._replace(end_position=self.size_bytes)
            else:  # after compaction the missing offsets are unknown
                damage.append(
                    DamagedRange(present_bytes, self.size_bytes, self.end_offset, end_offset, "the file is cut")
                )
        self.damage = merged(damage)
        if end_offset >= 0:
            self.end_offset = end_offset


def doubt_epochs(findings: Findings, epoch_at: Callable[[int], int], proven: Sequence[ProvenBatches]) -> None:
    """Mark single batches as damaged if their epoch contradicts `epoch_at`, the log's epochs (-1: unknown).

    Neither has a checksum, so another replica's copy decides: if it confirms the batch, the batch is `proven`, and the
    log's epochs are corrected. If several neighbouring batches disagree, the log's epochs are wrong.
    """
    doubts = findings.epoch_edges.doubts(epoch_at)
    doubtful = [doubt.damage for doubt in doubts if proven_epoch(doubt.damage.first_offset, proven) != doubt.epoch]
    if doubtful:
        findings.damage = merged([*doubtful, *findings.damage])


def examine(
    file: File, size_bytes: int, base_offset: int, end_offset: int, index_interval_bytes: int, *,
    may_have_gaps: bool, may_end_early: bool, epoch_max: int = -1, proven: Sequence[ProvenBatches] = (),
    named: Container[tuple[int, int]] = (), note: Callable[[WholeBatch | DamagedRange], None] = lambda each: None,
) -> Findings:  # fmt: skip
    """Examine the first `size_bytes` of a segment's file, or all if it is shorter. Raises OSError.

    `note` is called with each whole batch and each damaged range, in order.
    """
    findings = Findings(base_offset, size_bytes)
    damage: list[DamagedRange] = []
    present = min(size_bytes, file.size_bytes())
    examiner = Examiner(
        file.read_at, present, base_offset, end_offset=end_offset, may_have_gaps=may_have_gaps,
        may_end_early=may_end_early, epoch_max=epoch_max, proven=proven, named=named,
    )  # fmt: skip
    for each in examiner.run():
        note(each)
        if isinstance(each, WholeBatch):
            findings.note(each.position, each.header, index_interval_bytes)
        elif each.end_offset < 0:
            findings.tail = each
        else:
            damage.append(each)
            findings.end_offset = each.end_offset
    findings.close(damage, present, end_offset)
    return findings
