"""Reads, for the end of a repair, what damage has hidden: which transactions were aborted, what producers have sent.

All batch headers behind the damage are read: a segment of a gigabyte may have a million of them. So a thread reads
them before the repair takes effect, and the range stays damage until then. Invariants: the thread reads copies of the
segments, with files of their own, and changes nothing; its result counts only if the log still has all that was read.
Otherwise `after_repair` reads all on the owner's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tidelog.storage.log import recovery
from tidelog.storage.log.hidden_transactions import HidingLog, damage_to_repair
from tidelog.storage.producers.producer_snapshots import ProducerSnapshots
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.segments import Segments

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk
    from tidelog.storage.log.repair import RepairCheck
    from tidelog.storage.segments.segment import Segment
    from tidelog.storage.segments.transaction_index import AbortedTransaction

BEHIND_BYTES_MAX: Final = 64 * 1024
"""So much of what was appended meanwhile is read on the owner's thread: at most 900 batches, in 10 ms."""
_ROUNDS_MAX: Final = 20
"""How often the thread reads what was appended while it read. Then the owner's thread reads the rest."""


class RepairedLog(HidingLog, Protocol):
    """The part of `partition_log.PartitionLog` that is used here."""

    disk: Disk
    directory: str
    failure: str | None
    high_watermark: int
    is_closed: bool
    log_end_offset: int
    producers: ProducerState
    segments: Segments
    snapshots: ProducerSnapshots


class _ReadSnapshots(ProducerSnapshots):
    """The snapshots as a thread may use them: what it deletes it only does not read."""

    __slots__ = ()

    def delete(self, offset: int) -> None:
        self._offsets.remove(offset)


def read_hidden(log: RepairedLog, repaired: DamagedRange | None, damage: list[DamagedRange]) -> bool:
    """Read all on the owner's thread. `damage`: what is left. Whether the repaired range has transactions.

    Raises CorruptIndex, OSError.
    """
    has_rows = recovery.rebuild_hidden_rows(log.segments, log.snapshots, repaired, has_damage=bool(damage))
    if damage and repaired is not None:
        log.hidden_ends += recovery.hidden_ends(list(log.segments), log.snapshots, repaired, damage_to_repair(log))
    return has_rows


class Recount:
    """Made when the check of a repair has run. While `goes_on`, its owner calls `run` on a thread; then, in one turn,
    it passes the recount to `log.finish_repair`, or makes another one if this is not current any more.
    """

    def __init__(self, log: RepairedLog, check: RepairCheck) -> None:
        self._log, self._check = log, check
        self._repaired = check.damage
        self._directory = log.directory
        self._segments: list[Segment] = []
        self._generations: list[int] = []
        self._read_bytes = 0
        """How far the last segment was read."""
        self._read = self._copies_from(0)
        """Copies of the segments, for the thread."""
        self._behind: list[Segment] = []
        """Those that have grown since, or are new."""
        findings, segment = check.findings, check.segment
        self._has_failed = findings is None or segment not in self._segments or segment.generation != check.generation
        if findings is not None and not self._has_failed:
            copy = self._read[self._segments.index(segment)]
            copy.damage = findings.damage
            if check.is_written_anew:
                copy.path, copy.size_bytes = check.temporary, findings.size_bytes
        self._left = [each for copy in self._read for each in copy.damage if each.end_offset > log.log_start_offset]
        self._to_repair = [
            (copy, each) for copy in self._read for each in copy.damage
            if each.end_offset > log.log_start_offset and each.first_offset not in log.accepted_losses
        ]  # fmt: skip
        self._copy = Segments(log.disk, log.directory, self._read)
        self._copy.distrusted = set(log.segments.distrusted)
        self._snapshots = _ReadSnapshots(log.disk, log.directory, log.snapshots.offsets)
        self._former_snapshots = set(log.snapshots.offsets)
        self._lacks_producers, self._log_start_offset = log.lacks_producers, log.log_start_offset
        self._high_watermark = log.high_watermark
        self._producers = ProducerState()
        self._origin = -1
        """The offset of the snapshot, or the begin of the log, from which on the producers were read; -1: nowhere."""
        self._rows: list[AbortedTransaction] = []
        """Of transactions that were aborted behind what was read first."""
        self._hidden_ends: tuple[tuple[int, int], ...] = ()
        self._rounds = 0

    # On the owner's thread

    def goes_on(self) -> bool:
        """Whether `run` is to be called on a thread, again where much was appended meanwhile."""
        if self._has_failed or not self.is_current() or self._rounds > _ROUNDS_MAX:
            return False
        if self._rounds:
            if self._origin < 0 or self._bytes_behind <= BEHIND_BYTES_MAX:
                return False
            self._behind = self._copies_from(len(self._segments) - 1)
        self._rounds += 1
        return True

    def is_current(self, *, is_repaired: bool = False) -> bool:
        """Whether the log still has all that was read. `is_repaired`: the repair has taken effect."""
        log, count = self._log, len(self._segments)
        present = list(log.segments)[:count]
        if log.failure is not None or log.is_closed or log.directory != self._directory:
            return False
        if len(present) < count or any(one is not each for one, each in zip(present, self._segments)):
            return False
        repaired = self._check.segment if is_repaired else None
        return all(
            each.generation == generation or each is repaired for each, generation in zip(present, self._generations)
        )

    def apply(self) -> bool:
        """Give the log what was read. The repair has just taken effect. False if it is not what the log has now."""
        log = self._log
        if self._has_failed or not self._rounds or not self.is_current(is_repaired=True):
            return False
        left, to_repair = ([each for _, each in ranges] for ranges in (log.damaged_ranges(), damage_to_repair(log)))
        if left != self._left or to_repair != [each for _, each in self._to_repair]:
            return False
        if log.lacks_producers and not self._lacks_producers:
            return False  # the end of an accepted loss
        try:
            if self._origin >= 0:
                self._follow(list(log.segments)[len(self._segments) - 1 :])
        except CorruptIndex:
            return False
        self._apply_rows()
        if deleted := self._former_snapshots.difference(self._snapshots.offsets):
            for offset in deleted:
                log.snapshots.delete_where(offset, offset + 1)
            log.snapshots.delete_where(self._read[-1].next_offset + 1, INT64_MAX)
        log.segments.distrusted = self._copy.distrusted
        log.hidden_ends += self._hidden_ends
        if self._origin >= 0 and log.lacks_producers:
            log.producers.take_over(self._producers)
            log.producers.on_high_watermark(log.high_watermark)
            log.lacks_producers = any(each.end_offset > self._origin for _, each in damage_to_repair(log))
            log.passes_damage = any(each.end_offset > self._origin for each in self._left)
        return True

    def _apply_rows(self) -> None:
        log, count, end_offset = self._log, len(self._read), self._read[-1].next_offset
        for number, segment in enumerate(log.segments):
            index = segment.transaction_index
            is_read = number < count and self._read[number].transaction_index.is_rebuilt
            has_grown = number >= count - 1 and self._origin >= 0 and index.lacks_rows
            if not is_read and not has_grown:
                continue
            known = self._read[number].transaction_index if is_read else index
            rows = [row for row in known.rows_or_none() if is_read or row.last_offset < end_offset]
            rows += [row for row in self._rows if segment.base_offset <= row.last_offset < segment.next_offset]
            recovery.set_rows(segment, rows, list(log.segments))
            log.segments.sums_are_stale = True

    @property
    def _bytes_behind(self) -> int:
        return sum(each.size_bytes for each in list(self._log.segments)[len(self._segments) - 1 :]) - self._read_bytes

    def _copies_from(self, number: int) -> list[Segment]:
        segments, active = list(self._log.segments), self._log.segments.active
        self._segments, self._generations = segments, [each.generation for each in segments]
        self._read_bytes = active.size_bytes
        repaired = self._check.segment
        return [
            each.apart(is_active=each is active, has_indexes=each is not active and each is not repaired)
            for each in segments[number:]
        ]

    # On a thread

    def run(self) -> None:
        """Read what was not read yet."""
        try:
            if self._rounds == 1:
                self._read_all()
            else:
                self._follow(self._behind)
        except (CorruptIndex, OSError):
            self._has_failed = True  # the owner's thread reads it, and knows what to do
        finally:
            for each in (*self._read, *self._behind):
                each.release()

    def _read_all(self) -> None:
        repaired, segments = self._repaired, self._read
        has_rows = recovery.rebuild_hidden_rows(self._copy, self._snapshots, repaired, has_damage=bool(self._left))
        if self._left:
            self._hidden_ends = recovery.hidden_ends(segments, self._snapshots, repaired, self._to_repair)
        reloads = self._lacks_producers and (has_rows or not self._to_repair)
        if reloads or segments[-1].transaction_index.is_rebuilt:
            end_offset = segments[-1].next_offset
            entries, self._origin = self._snapshots.load_latest(self._log_start_offset, end_offset)
            self._producers.load(entries, self._origin)
            recovery.replay(self._producers, segments, end_offset)
            self._producers.on_high_watermark(self._high_watermark)

    def _follow(self, segments: list[Segment]) -> None:
        for segment in segments:
            if segment.next_offset > self._producers.end_offset:
                recovery.replay_segment(self._producers, segment, segment.next_offset, aborted_here=self._rows)
                self._producers.end_offset = segment.next_offset
        self._producers.on_high_watermark(self._high_watermark)
