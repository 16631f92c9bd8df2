"""Putting whole copies of damaged batches in their place.

The batches come from another replica; who that is, is `broker/replicas/repairs.py`'s business. A copy is taken only if
it is what was there: its CRC is right, its offsets fill the damaged range from its first on, and its leader epochs lie
between those of the batches around it, so that a stale replica's records do not get in. While a range is being repaired
it stays refused to readers, until all of it is on the device and the segment has been examined again. A crash in
between leaves damage, which is found again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import ATTRIBUTES_OFFSET, MAGIC, BatchHeader, iter_headers
from tidelog.storage.files.disk import File
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, describe, merged
from tidelog.storage.segments.examination import Findings, examine
from tidelog.storage.segments.reader import position_of, walk
from tidelog.storage.segments.segment import Segment

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk
    from tidelog.storage.segments.leader_epochs import LeaderEpochs
    from tidelog.storage.segments.segments import Segments

logger = logging.getLogger("tidelog.storage")

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of a range whose copy is not as long as what is damaged, which is held until it is whole."""


class DamagedLog(Protocol):
    """What is asked of a log that is repaired: a `PartitionLog`, or the files of a node that is stopped."""

    segments: Segments
    leader_epochs: LeaderEpochs
    failure: str | None
    is_closed: bool

    @property
    def disk(self) -> Disk: ...

    def adopt_findings(self, segment: Segment) -> None: ...


class CopyRefused(Exception):
    """What another replica sent cannot be what was there. `is_gap`: it has nothing there at all."""

    def __init__(self, message: str, *, is_gap: bool = False) -> None:
        super().__init__(message)
        self.is_gap = is_gap


class NoRoom(CopyRefused):
    """The copy has another length than what is damaged, and the segment is appended to. Once it is rolled, there is."""


class RangeRepair:
    """Of one damaged range. `accept` what other replicas have, from `next_offset` on, then run `finish`'s task."""

    def __init__(
        self, log: DamagedLog, segment: Segment, damage: DamagedRange, *, may_rewrite: bool | None = None
    ) -> None:
        """`may_rewrite`: whether the segment may change its length; by default, whether it is not appended to."""
        self.log = log
        self.segment = segment
        self.damage = damage
        self.next_offset = damage.first_offset
        self._position = damage.position
        self._may_rewrite = segment is not log.segments.active if may_rewrite is None else may_rewrite
        # Behind the last batch of a segment that is never appended to again there is room for any length.
        self._is_at_end = self._may_rewrite and damage.end_position >= segment.size_bytes
        self._ends_early = False  # the other replica's cleaner took the last records of the range
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._generation = segment.generation
        self._has_written = False
        epochs = log.leader_epochs
        first_offset, end_offset = damage.first_offset, damage.end_offset
        # An epoch that begins in the range is known from before the damage: then the epoch of every batch is known.
        self._knows_epochs = any(first_offset <= start < end_offset for _, start in epochs)
        self._epoch = epochs.epoch_for_offset(damage.first_offset - 1) if damage.first_offset else -1
        self._epoch_max = epochs.epoch_for_offset(damage.end_offset)
        following = self._epoch_behind()
        if 0 <= following != self._epoch_max:  # the epoch file is wrong here, or that batch is
            self._knows_epochs = False
            self._epoch = min(self._epoch, following)
            self._epoch_max = max(self._epoch_max, following)

    def _epoch_behind(self) -> int:
        """The leader epoch that the batch behind the damage has, -1 where there is none, or none is readable."""
        if self.damage.end_position < self.segment.size_bytes:
            return self.segment.epoch_at(self.damage.end_position)
        segments = self.log.segments
        return -1 if self.segment is segments.active else segments.epoch_behind(self.segment)

    @property
    def is_complete(self) -> bool:
        return self.next_offset >= self.damage.end_offset

    @property
    def is_obsolete(self) -> bool:
        """The log has been cut or closed, its segment deleted or cleaned, or other damage found, since it began."""
        log, segment = self.log, self.segment
        return (
            segment.generation != self._generation
            or log.failure is not None
            or log.is_closed
            or self.damage not in segment.damage
            or all(one is not segment for one in log.segments)
        )

    def accept(self, data: memoryview) -> None:
        """Whole batches of another replica, from the one that holds `next_offset` on.

        What lies behind the range is left alone. Raises CopyRefused, OSError; what came before is kept.
        """
        if self.is_obsolete:
            raise CopyRefused("the log has changed since it was asked for")
        end_offset = self.damage.end_offset
        for position, header in iter_headers(data):
            if header.base_offset >= end_offset:
                if not self.segment.may_have_gaps and self.next_offset < end_offset:
                    is_gap = self.next_offset == self.damage.first_offset
                    raise CopyRefused(f"it lacks offsets {self.next_offset} to {end_offset}, too", is_gap=is_gap)
                self._ends_early = self.next_offset < end_offset
                self.next_offset = end_offset
                break
            end = position + header.size_bytes
            if header.magic != MAGIC or crc32c(data[position + ATTRIBUTES_OFFSET : end]) != header.crc:
                raise CopyRefused(f"its batch of offset {header.base_offset} is damaged, too")
            if self._widen(header):
                raise CopyRefused(
                    f"its batch of offsets {header.base_offset} to {header.next_offset} reaches beyond "
                    f"{self.damage.first_offset} to {end_offset}: all of it is to be repaired"
                )
            is_next = header.base_offset == self.next_offset or (
                self.segment.may_have_gaps and header.base_offset > self.next_offset
            )
            if not is_next or header.last_offset_delta < 0 or header.next_offset > end_offset:
                raise CopyRefused(
                    f"its batch of offsets {header.base_offset} to {header.next_offset} does not fit "
                    f"{self.next_offset} to {end_offset}"
                )
            if not self._is_of_known_epoch(header) and not self._is_here(data[position:end]):
                raise CopyRefused(
                    f"its batch of offset {header.base_offset} is of leader epoch {header.partition_leader_epoch}"
                )
            self._put(data[position:end])
            self._epoch, self.next_offset = header.partition_leader_epoch, header.next_offset
            if self.next_offset == end_offset:
                break

    def _is_of_known_epoch(self, header: BatchHeader) -> bool:
        epoch = header.partition_leader_epoch
        if self._knows_epochs and epoch != self.log.leader_epochs.epoch_for_offset(header.base_offset) >= 0:
            return False
        return epoch >= self._epoch and (self._epoch_max < 0 or epoch <= self._epoch_max)

    def _is_here(self, batch: memoryview) -> bool:
        """Whether these very bytes lie where they belong: then the epoch file is wrong that puts them in doubt."""
        if self._held is not None or self._position + len(batch) > self.damage.end_position:
            return False
        return self.segment.file.read_at(len(batch), self._position) == batch

    def _widen(self, header: BatchHeader) -> bool:
        """Whether the other replica's batch reaches beyond the range; then what it overlaps here is damaged, too.

        The range ends at bytes that were taken for a batch, behind others that were destroyed: they were its payload.
        """
        segment, damage = self.segment, self.damage
        first_offset, end_offset = header.base_offset, header.next_offset
        overlaps = first_offset < damage.end_offset and end_offset > damage.first_offset
        reaches_beyond = first_offset < damage.first_offset or end_offset > damage.end_offset
        is_within = segment.base_offset <= first_offset and end_offset <= segment.next_offset
        if not (overlaps and reaches_beyond and is_within and self._is_of_known_epoch(header)):
            return False
        wide = DamagedRange(
            damage.position, damage.end_position, min(first_offset, damage.first_offset),
            max(end_offset, damage.end_offset), f"another replica has one batch of {first_offset} to {end_offset}",
        )  # fmt: skip
        pieces = list(segment.damage)
        try:
            start = damage.position
            if first_offset < damage.first_offset:
                start = position_of(segment, first_offset, wait=True)
            for at, base_offset, last_offset, end in walk(segment, start, wait=True):
                if base_offset >= wide.end_offset:
                    break
                pieces.append(DamagedRange(at, end, base_offset, last_offset + 1, ""))
        except CorruptIndex:
            return False  # an examination is due first
        for piece in pieces:
            if piece.first_offset < wide.end_offset and piece.end_offset > wide.first_offset:
                wide = wide._replace(
                    position=min(wide.position, piece.position),
                    end_position=max(wide.end_position, piece.end_position),
                    first_offset=min(wide.first_offset, piece.first_offset),
                    end_offset=max(wide.end_offset, piece.end_offset),
                )
        kept = [each for each in segment.damage if not wide.first_offset <= each.first_offset < wide.end_offset]
        logger.error("%s: %s", segment.path, describe(wide))
        segment.set_damage(merged([*kept, wide]))
        return True

    def _put(self, batch: memoryview) -> None:
        if self._held is None and (self._is_at_end or self._position + len(batch) <= self.damage.end_position):
            if not self._has_written:
                self._has_written = True
                self.segment.generation += 1  # an examination that runs may see half of a copy
                self._generation = self.segment.generation
            _write(self.segment.file, batch, self._position)
            self._position += len(batch)
            return
        if self._held is None:
            if not self._may_rewrite:
                raise NoRoom(f"it is longer than the {self.damage.end_position - self.damage.position} bytes")
            start = self.damage.position
            self._held = [self.segment.file.read_at(self._position - start, start)]
            self._held_bytes = self._position - start
        self._held.append(bytes(batch))
        self._held_bytes += len(batch)
        if self._held_bytes > HELD_BYTES_MAX:
            raise CopyRefused(f"more than {HELD_BYTES_MAX} bytes cannot be put in the place of fewer")

    def finish_part(self) -> RepairCheck | None:
        """No replica has the rest: what there is to be done to make use of what came, if that is in its place."""
        if not self._has_written or self._held is not None or self._is_at_end or self.is_obsolete:
            return None
        return RepairCheck(self.log, self.segment, self.damage, None, self.next_offset)

    def finish(self) -> RepairCheck:
        """All of it has come: what is left to be done on a thread, and then by `log.finish_repair`. Raises OSError."""
        assert self.is_complete
        segment, damage = self.segment, self.damage
        if self._held is None and not self._is_at_end and self._position < damage.end_position:
            if not self._may_rewrite:
                raise NoRoom(f"it is shorter than the {damage.end_position - damage.position} bytes")
            length = self._position - damage.position
            self._held = [segment.file.read_at(length, damage.position)]
        if self._held is None and self._is_at_end:
            segment.end_at(self._position)
        if self._is_at_end and self._ends_early:
            segment.may_end_early = True
        copy = None if self._held is None else b"".join(self._held)
        return RepairCheck(self.log, segment, damage, copy, damage.end_offset)


class RepairCheck:
    """`run` in any thread: bring the repair to the device, and look at the whole segment again.

    `copied_end`: up to which offset of the damaged range there are copies now.
    """

    def __init__(
        self, log: DamagedLog, segment: Segment, damage: DamagedRange, copy: bytes | None, copied_end: int
    ) -> None:
        self.log = log
        self.segment = segment
        self.size_bytes = segment.size_bytes
        self.findings: Findings | None = None
        self.error: OSError | None = None
        self.temporary = "" if copy is None else f"{segment.path}.repair.tmp"
        self.damage = damage
        self.proven = (*segment.proven, (damage.first_offset, copied_end))
        self._copy = copy
        self._end_offset = segment.next_offset
        self.generation = segment.generation
        self._epoch_max = log.segments.epoch_behind(segment)
        self._file = segment.file
        self._file.pin()

    def run(self) -> None:
        """An error is kept for `log.finish_repair`."""
        disk = self.log.disk
        try:
            if self._copy is None:
                self._file.sync()
                self._examine(self._file, self.size_bytes)
                return
            disk.copy_prefix(self.segment.path, self.temporary, self.damage.position)
            file = disk.open(self.temporary, create=True)
            try:
                position = _write(file, memoryview(self._copy), self.damage.position)
                source = self.damage.end_position
                while source < self.size_bytes:
                    data = self._file.read_at(min(1024 * 1024, self.size_bytes - source), source)
                    if not data:
                        break
                    position = _write(file, memoryview(data), position)
                    source += len(data)
                file.sync()
                self._examine(file, position)
            finally:
                file.close()
        except OSError as error:
            self.error = error

    def _examine(self, file: File, size_bytes: int) -> None:
        segment = self.segment
        self.findings = examine(
            file, size_bytes, segment.base_offset, self._end_offset, segment.index_interval_bytes,
            may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early, epoch_max=self._epoch_max,
            proven=self.proven,
        )  # fmt: skip

    def unpin(self) -> None:
        self._file.unpin()


def _write(file: File, data: memoryview, position: int) -> int:
    """Where it ends."""
    while len(data):
        written = file.write_at(data, position)
        if not written:
            raise OSError(5, "a write made no progress")
        data, position = data[written:], position + written
    return position


def finish_repair(check: RepairCheck) -> bool:
    """Take over what the check found, on the owner's thread; False if the log has changed meanwhile. Raises OSError."""
    check.unpin()
    log, segment = check.log, check.segment
    is_current = (
        check.error is None
        and check.findings is not None
        and log.failure is None
        and segment.generation == check.generation
        and any(one is segment for one in log.segments)
    )
    if not is_current:
        if check.temporary:
            log.disk.remove(check.temporary)
        if check.error is not None:
            raise check.error
        return False
    if check.temporary:
        segment.replace_file(check.temporary)
    assert check.findings is not None
    check.findings.generation = segment.generation
    segment.proven = check.proven
    segment.findings = check.findings
    log.adopt_findings(segment)
    return True
