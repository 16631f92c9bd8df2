"""Replaces damaged batches by copies from another replica.

`broker/replicas/repairs.py` chooses the replica. A copy is accepted only if it equals the lost batches: its CRCs are
right, its offsets fill the damaged range, or the start or the end of it, and its leader epochs lie between those of
the neighbouring batches, so records of a stale replica are refused. Reads of the range fail until the copy is on the
device and the segment has been examined again. A crash before that leaves damage, which the next start detects.
Invariant: a repair that the log has outrun (truncated, deleted, moved, closed) changes nothing and raises nothing.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_OFFSET,
    HEADER_SIZE,
    MAGIC,
    BatchHeader,
    check_crc,
    iter_headers,
)
from tidelog.storage.files.checkpoints import CLEANED_ENDS_FILE
from tidelog.storage.files.disk import Disk, File, is_full
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, describe, merged
from tidelog.storage.segments.examination import Findings, ProvenBatches, examine
from tidelog.storage.segments.log_config import MAX_POSITION
from tidelog.storage.segments.reader import header_at, headers, position_of, walk
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.sparse_index import MovedBatches

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk
    from tidelog.storage.segments.leader_epochs import LeaderEpochs
    from tidelog.storage.segments.segments import Segments

logger = logging.getLogger("tidelog.storage")

HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bound of a copy in memory. A copy of another length than the damaged range is kept there until it is complete."""


PLACE_OF_THE_REST: Final = bytes(HEADER_SIZE - 1)
"""Stands where records of a compacted log are still missing beside a copied part. Without bytes the rest of the range
would be a gap, as a cleaner leaves it, and nothing would look for its records any more. It is shorter than any batch.
"""
_COPY_STEP_BYTES: Final = 1024 * 1024
_SPARE_BYTES: Final = 64 * 1024 * 1024
_SPARE_PARTS: Final = 20
"""Segments are written anew only where that leaves this much of the volume, or the volume's 20th part, for appends."""


class DamagedLog(Protocol):
    """The log interface for repairs: a `PartitionLog`, or the files of a stopped node."""

    segments: Segments
    leader_epochs: LeaderEpochs
    failure: str | None
    is_closed: bool

    @property
    def disk(self) -> Disk: ...

    def adopt_findings(self, segment: Segment) -> None: ...

    def distrust_transactions(self, offset: int) -> None:
        """Transactions may come back with a copy from `offset` on: say so to a later start. Raises OSError."""


class CopyRefused(Exception):
    """The batches from another replica cannot be the lost ones. `is_gap`: the replica has no batches there.

    `is_of_other_epoch`: they are of another leader epoch than the epoch file says.
    """

    def __init__(self, message: str, *, is_gap: bool = False, is_of_other_epoch: bool = False) -> None:
        super().__init__(message)
        self.is_gap = is_gap
        self.is_of_other_epoch = is_of_other_epoch


class EpochBegins(CopyRefused):
    """The copy begins a leader epoch, of which the epoch file says nothing: is the batch before it the right one?"""


class OtherCleaning(CopyRefused):
    """The other replica's cleaner has, or may have, removed other records of the range than this one's.

    A tombstone may be missing in its copy, or a marker, or here behind the range. `prefix_copy.py` takes all that the
    other replica has, up to the end of what is missing here.
    """


class GapsUnknown(CopyRefused):
    """The copy has all records of the range. Are any missing here behind it (`gap_scan.py`)?"""


class NoRoom(CopyRefused):
    """The copy has another length than the damaged range, and the segment is active. It must be rolled first."""


class SegmentFull(CopyRefused):
    """The segment cannot hold the rest of the range, which needs a segment of its own (`damage_behind.py`).

    `first_offset`: where the rest begins. Between the copied part and the rest the other replica has no batches.
    """

    def __init__(self, message: str, first_offset: int) -> None:
        super().__init__(message)
        self.first_offset = first_offset


class NoSpace(OSError):
    """The volume has no space for the copy. The damage stays, and the log can be used as before."""


def is_present(log: DamagedLog, segment: Segment, damage: DamagedRange) -> bool:
    """Whether the log is in use and has the segment with this damage."""
    is_in_use = log.failure is None and not log.is_closed
    return is_in_use and damage in segment.damage and any(one is segment for one in log.segments)


class RangeRepair:
    """The repair of one damaged range: `accept` batches from `next_offset` on, then run the task from `finish`."""

    def __init__(
        self,
        log: DamagedLog,
        segment: Segment,
        damage: DamagedRange,
        *,
        may_rewrite: bool | None = None,
        from_offset: int | None = None,
    ) -> None:
        """`may_rewrite`: whether the segment may change its length. By default, whether it is not the active one.

        `from_offset`: the repair is of the end of the range only, from the batch that begins with this offset on. The
        copy is inserted after the damaged bytes.
        """
        self.log = log
        self.segment = segment
        self.damage = damage
        self.next_offset = damage.first_offset if from_offset is None else from_offset
        self._from_offset = self.next_offset
        self._proven: list[ProvenBatches] = []
        self._has_markers = self._distrusts = False
        self._is_end_part = from_offset is not None
        self.move_end: Callable[[DamagedRange, int], bool] | None = None
        """`damaged_end.move_damaged_end` of this log, set if the other replica sends only committed records."""
        self.is_committed = False
        """A replica in sync sends these batches as committed: then the epoch file, which has no checksum, is wrong."""
        self.compares_before = False
        """`accept` raises EpochBegins, once. Its caller passes what a replica in sync has to `compare_before`."""
        self.lacks_below: int | None = None
        """Of a compacted log, where all records are from there on. Then `accept` raises OtherCleaning for a copy that
        lacks records, or has some that may have been removed here, unless it is what was here byte for byte."""
        self.knows_gaps = False
        """`lacks_below` is right. Otherwise it may be too low, and `accept` raises GapsUnknown where that matters."""
        self._position = damage.position
        self._may_rewrite = segment is not log.segments.active if may_rewrite is None else may_rewrite
        # After the last batch of a closed segment there is room for any length.
        self._is_at_end = self._may_rewrite and damage.end_position >= segment.size_bytes
        self._ends_early = False  # the other replica's cleaner took the last records of the range
        self._held_batches: list[bytes] | None = [] if self._is_end_part else None
        self._held_bytes = 0
        self._generation = segment.generation
        self._has_written = False
        epochs = log.leader_epochs
        first_offset, end_offset = damage.first_offset, damage.end_offset
        # If the epoch file has an epoch that begins in the range, it has the epoch of every batch in the range.
        self._knows_epochs = any(first_offset <= start < end_offset for _, start in epochs)
        self._epoch = epochs.epoch_for_offset(damage.first_offset - 1) if damage.first_offset else -1
        self._epoch_max = epochs.epoch_for_offset(damage.end_offset)
        following, following_offset = self._epoch_behind()
        self._has_batch_behind = following >= 0
        if 0 <= following != epochs.epoch_for_offset(following_offset):  # the epoch file or this batch is wrong
            self._knows_epochs = False
            self._epoch = min(self._epoch, following)
            self._epoch_max = max(self._epoch_max, following)

    def _epoch_behind(self) -> tuple[int, int]:
        """The leader epoch of the batch after the damage, -1 if there is none or it is unreadable, and its offset."""
        if self.damage.end_position < self.segment.size_bytes:
            return self.segment.epoch_at(self.damage.end_position), self.damage.end_offset
        following = self.log.segments.with_batches_behind(self.segment)
        return (-1, -1) if following is None else (following.epoch_at(0), following.base_offset)

    @property
    def is_complete(self) -> bool:
        return self.next_offset >= self.damage.end_offset

    @property
    def is_obsolete(self) -> bool:
        """Since the start the log was truncated or closed, its segment deleted or cleaned, or other damage detected."""
        return self.segment.generation != self._generation or not is_present(self.log, self.segment, self.damage)

    def accept(self, data: memoryview) -> None:
        """Accept whole batches of another replica, from the one that holds `next_offset` on.

        Batches after the range are ignored. Raises CopyRefused, NoSpace, OSError; batches accepted before are kept.
        """
        if self.is_obsolete:
            raise CopyRefused("the log has changed since it was asked for")
        if self._is_at_end:  # the file grows: a lost one may need 2 GiB
            require_space(self.log.disk, self.segment, len(data))
        end_offset = self.damage.end_offset
        fills = self.lacks_below is not None and self._fills(data)
        for position, header in iter_headers(data):
            if header.base_offset >= end_offset:
                if not self.segment.may_have_gaps and self.next_offset < end_offset:
                    is_gap = self.next_offset == self.damage.first_offset
                    raise CopyRefused(f"it lacks offsets {self.next_offset} to {end_offset}, too", is_gap=is_gap)
                self._ends_early = self.next_offset < end_offset
                if self._ends_early and self.lacks_below is not None and not self._is_filled:
                    raise OtherCleaning(f"its cleaner has removed offsets {self.next_offset} to {end_offset}")
                self.next_offset = end_offset
                self._compare_behind(header, data[position : position + header.size_bytes])
                break
            end = position + header.size_bytes
            if header.magic != MAGIC or crc32c(data[position + ATTRIBUTES_OFFSET : end]) != header.crc:
                raise CopyRefused(f"its batch of offset {header.base_offset} is damaged, too")
            if not self.is_committed and self._contradicts_whole(header):
                raise CopyRefused(
                    f"its batch of offset {header.base_offset} is another one than the whole one here",
                    is_of_other_epoch=True,
                )
            if self._begin_earlier(header) or self._widen(header) or self._move_end(header):
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
                    f"{self.next_offset} to {end_offset}",
                    is_gap=not self.segment.may_have_gaps
                    and header.base_offset > self.next_offset == self.damage.first_offset,
                )
            if not self._is_of_known_epoch(header) and not self._is_here(data[position:end]):
                raise CopyRefused(
                    f"its batch of offset {header.base_offset} is of leader epoch {header.partition_leader_epoch}",
                    is_of_other_epoch=True,
                )
            if self.compares_before and self._begins_epoch(header):
                raise EpochBegins(f"leader epoch {header.partition_leader_epoch} begins at {header.base_offset}")
            if self.lacks_below is not None and not fills and not self._has_header(header):
                self._require_same_records(header, self.lacks_below)
            self._require_in_index(header)
            if header.is_transactional and self.segment.may_have_gaps:
                self._distrust_transactions()
            self._put(data[position:end])
            self._has_markers = self._has_markers or header.is_control
            self._epoch, self.next_offset = header.partition_leader_epoch, header.next_offset
            self._note_proven(header)

    def _require_same_records(self, header: BatchHeader, lacks_below: int) -> None:
        """Raises OtherCleaning, GapsUnknown for a batch that cannot be compared with the damaged bytes."""
        if header.base_offset > self.next_offset or header.record_count <= header.last_offset_delta:
            raise OtherCleaning(f"its cleaner has removed records from offset {self.next_offset} on")
        if self.damage.first_offset < lacks_below:
            raise OtherCleaning(f"the cleaner here may have removed records from offset {self.next_offset} on")
        if not self.knows_gaps:
            raise GapsUnknown("records may be missing here behind the range")

    def _fills(self, data: memoryview) -> bool:
        """Whether the rest of the copy is in `data`, and has the length of the damaged bytes that are left.

        Two cleanings hardly ever leave the same length of other records.
        """
        size_bytes, next_offset = 0, self.next_offset
        for _, header in iter_headers(data):
            if header.base_offset >= self.damage.end_offset:
                next_offset = self.damage.end_offset
                break
            size_bytes, next_offset = size_bytes + header.size_bytes, header.next_offset
        left = self.damage.end_position - self._position
        return self._held_batches is None and next_offset == self.damage.end_offset and 0 < left == size_bytes

    @property
    def _is_filled(self) -> bool:
        """Whether the batches so far have the length of the damaged bytes: there was nothing else."""
        return self._held_batches is None and self.damage.position < self.damage.end_position == self._position

    def _has_header(self, header: BatchHeader) -> bool:
        """Whether the damaged batch at this place has the same header, with the CRC of all its records."""
        if self._held_batches is not None or self._position + header.size_bytes > self.damage.end_position:
            return False
        return header_at(self.segment.file, self._position) == header

    def _contradicts_whole(self, header: BatchHeader) -> bool:
        """Whether the batch here is whole and another one. It counts as damaged because its epoch contradicts the epoch
        file, which may be wrong: then a replica outside the ISR may have an older leader's batch that fits the file.
        """
        own = header_at(self.segment.file, self._position)
        if self._held_batches is not None or own is None:
            return False
        # Two logs that have a batch of one offset and epoch have the same one.
        is_same = own.crc == header.crc or own.partition_leader_epoch == header.partition_leader_epoch
        is_within = HEADER_SIZE <= own.size_bytes <= self.damage.end_position - self._position
        if is_same or not is_within or (own.base_offset, own.magic) != (self.next_offset, MAGIC):
            return False
        if own.next_offset < header.next_offset <= self.damage.end_offset:
            return False  # the one here was payload of it (`_widen`)
        return check_crc(self.segment.file.read_at(own.size_bytes, self._position), 0, own)

    def _begins_epoch(self, header: BatchHeader) -> bool:
        is_first = header.base_offset == self.damage.first_offset and not self._is_end_part
        is_filed = (header.partition_leader_epoch, header.base_offset) in self.log.leader_epochs
        return is_first and not is_filed and 0 <= self._epoch < header.partition_leader_epoch

    def compare_before(self, data: memoryview) -> None:
        """`data`: what a replica in sync has committed at the offset before the range; empty if it has nothing there.

        A batch of a later leader epoch than here: the one here was cut from the log once, and is in an old copy of a
        file. It is damage, to be repaired as well. Raises OSError.
        """
        self.compares_before = False
        offset, segments = self.damage.first_offset - 1, self.log.segments
        header = next((header for _, header in iter_headers(data)), None)
        if header is None or not header.base_offset <= offset <= header.last_offset or header.magic != MAGIC:
            return
        if crc32c(data[ATTRIBUTES_OFFSET : header.size_bytes]) != header.crc:
            return
        segment = segments[max(0, segments.floor_index(offset))]
        try:
            position, own = next(headers(segment, position_of(segment, offset, wait=True)))
        except (CorruptIndex, StopIteration):
            return  # it needs an examination first, or is damaged, too
        if own.base_offset <= offset <= own.last_offset and own.partition_leader_epoch < header.partition_leader_epoch:
            reason = f"another replica has leader epoch {header.partition_leader_epoch} there"
            old = DamagedRange(position, position + own.size_bytes, own.base_offset, own.next_offset, reason)
            logger.error("%s: %s", segment.path, describe(old))
            segment.set_damage(merged([*segment.damage, old]))

    def _compare_behind(self, header: BatchHeader, batch: memoryview) -> None:
        """Compare the batch behind the range with the other replica's. Raises CopyRefused if they differ.

        No CRC covers its base offset, and before it there was only damage: a wrong offset gives a record in the place
        of another, and hides that one. Logs with a batch of the same offset and leader epoch have the same batch there.
        """
        segment, damage = self.segment, self.damage
        own = header_at(segment.file, damage.end_position)
        if damage.end_position >= segment.size_bytes or own is None or segment.may_have_gaps:
            return
        is_same = (own.crc, own.size_bytes) == (header.crc, header.size_bytes)
        has_place = (own.base_offset, own.partition_leader_epoch) == (header.base_offset, header.partition_leader_epoch)
        if is_same or not has_place or crc32c(batch[ATTRIBUTES_OFFSET:]) != header.crc:
            return
        wide = damage._replace(end_position=damage.end_position + own.size_bytes, end_offset=own.next_offset)
        kept = [each for each in segment.damage if each != damage]
        segment.set_damage(merged([*kept, wide._replace(reason="another replica has another batch behind it")]))
        raise CopyRefused(f"its batch of offset {header.base_offset} is another one than here: that is to be repaired")

    def _note_proven(self, header: BatchHeader) -> None:
        proven = ProvenBatches(header.base_offset, header.next_offset, header.partition_leader_epoch)
        if self._proven and self._proven[-1].leader_epoch == proven.leader_epoch:
            proven = proven._replace(first_offset=self._proven.pop().first_offset)
        self._proven.append(proven)

    def _is_of_known_epoch(self, header: BatchHeader) -> bool:
        epoch = header.partition_leader_epoch
        if (
            self._knows_epochs
            and not self.is_committed
            and epoch != self.log.leader_epochs.epoch_for_offset(header.base_offset) >= 0
        ):
            return False
        is_bounded = self._epoch_max >= 0 and (self._has_batch_behind or not self.is_committed)
        return epoch >= self._epoch and (not is_bounded or epoch <= self._epoch_max)

    def _is_here(self, batch: memoryview) -> bool:
        """Whether the same bytes are in the file at this place: then the epoch file is wrong, not the batch."""
        if self._held_batches is not None or self._position + len(batch) > self.damage.end_position:
            return False
        return self.segment.file.read_at(len(batch), self._position) == batch

    def _begin_earlier(self, header: BatchHeader) -> bool:
        """Whether the first segment, whose file is lost, now begins where the other replica's batch does.

        The lost file has the name of the log start, which may lie inside of a batch (DeleteRecords).
        """
        segment, damage, segments = self.segment, self.damage, self.log.segments
        is_lost = segment is segments.first and segment is not segments.active and not segment.size_bytes
        begins_inside = header.base_offset < damage.first_offset == segment.base_offset < header.next_offset
        if not (is_lost and begins_inside and self._is_of_known_epoch(header)):
            return False
        segments.begin_earlier(header.base_offset)
        earlier = damage._replace(first_offset=header.base_offset)
        logger.error("%s: %s", segment.path, describe(earlier))
        segment.set_damage(tuple(earlier if each == damage else each for each in segment.damage))
        return True

    def _widen(self, header: BatchHeader) -> bool:
        """Whether the other replica's batch reaches beyond the range: then the batches it overlaps are damaged too.

        In this case the range ended at bytes that looked like a batch but were the payload of the destroyed batch.
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
            return False  # the segment needs an examination first
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

    def _move_end(self, header: BatchHeader) -> bool:
        """Whether the log end has moved to the end of the other replica's batch, which reaches beyond this last range.

        The batch must be committed, because an uncommitted one may still be replaced by another batch.
        """
        is_next = header.base_offset == self.next_offset or (
            self.segment.may_have_gaps and header.base_offset > self.next_offset
        )
        is_last = is_next and header.base_offset < self.damage.end_offset < header.next_offset
        if self.move_end is None or not (is_last and self._is_of_known_epoch(header)):
            return False
        return self.move_end(self.damage, header.next_offset)

    def _require_in_index(self, header: BatchHeader) -> None:
        """Raises CopyRefused for a batch behind a gap that is too large for an index: its segment is lost."""
        if header.last_offset <= self.segment.max_offset:
            return
        if not self._may_rewrite:
            raise NoRoom(f"the index of the active segment cannot hold offset {header.base_offset}")
        if not self._is_at_end or self._held_batches is not None:
            raise CopyRefused(f"the index of the segment cannot hold offset {header.base_offset}")
        raise SegmentFull(f"its index cannot hold offset {header.base_offset}", header.base_offset)

    def _distrust_transactions(self) -> None:
        """Before the first byte is there: this process may end before the indexes behind the copy have its rows.

        A cleaner may have removed the copied records here, and a start that scanned the log after that did not know
        their transactions: those that were aborted have no row.
        """
        if not self._distrusts:
            try:
                self.log.distrust_transactions(self.damage.first_offset)
            except OSError as error:
                raise _no_space(error) from error
            self._distrusts = True

    def _put(self, batch: memoryview) -> None:
        end = self._position + len(batch)
        is_held = self._held_batches is not None
        if self._is_at_end and not is_held and end > max(MAX_POSITION, self.damage.end_position):
            # What lies within a segment has no other place.
            raise SegmentFull(f"it ends at {self._position}", self.next_offset)
        if self._held_batches is None and (self._is_at_end or end <= self.damage.end_position):
            if not self._has_written:
                self._has_written = True
                self.segment.begin_to_fill(self.damage)
                self._generation = self.segment.generation
            try:
                if self._is_at_end and self.segment.may_end_early:  # a kill must not leave the rest without bytes
                    batch = memoryview(b"".join((batch, PLACE_OF_THE_REST)))
                _write(self.segment.file, batch, self._position)
            except OSError as error:
                raise _no_space(error) from error
            self._position = end
            return
        if not self._may_rewrite:
            raise NoRoom(f"it does not fit the {self.damage.end_position - self.damage.position} bytes")
        if self._held_batches is None:
            start = self.damage.position
            self._held_batches = [self.segment.file.read_at(self._position - start, start)]
            self._held_bytes = self._position - start
        self._held_batches.append(bytes(batch))
        self._held_bytes += len(batch)
        if self._held_bytes > HELD_BYTES_MAX:
            raise CopyRefused(f"more than {HELD_BYTES_MAX} bytes cannot be put in the place of fewer")

    def finish_part(self, *, goes_on_behind: bool = False) -> RepairCheck | None:
        """No replica has the rest: the task that keeps the accepted batches; None without any. Raises NoRoom.

        `goes_on_behind`: the rest gets a segment of its own (`damage_behind.py`).
        """
        if self._is_end_part or self.next_offset == self.damage.first_offset or self.is_obsolete:
            return None
        copied = self.damage.first_offset, self.next_offset
        if self._held_batches is not None:  # inserted before the damaged bytes
            start, copy = self.damage.position, b"".join(self._held_batches)
            return RepairCheck(
                self.log, self.segment, self.damage, copied, self._proven, copy, start, start,
                has_markers=self._has_markers,
            )  # fmt: skip
        is_left = self._is_at_end and self.segment.may_end_early  # PLACE_OF_THE_REST is behind the copy
        end = self._position + (len(PLACE_OF_THE_REST) if is_left else 0)
        if end > self.segment.size_bytes:
            self.segment.end_at(end)
        if goes_on_behind or not self._leaves_gap():
            return RepairCheck(self.log, self.segment, self.damage, copied, self._proven, has_markers=self._has_markers)
        if not self._may_rewrite:
            raise NoRoom(f"it fills the {self.damage.end_position - self.damage.position} bytes, and more is missing")
        return RepairCheck(
            self.log, self.segment, self.damage, copied, self._proven, PLACE_OF_THE_REST, self._position,
            self._position, has_markers=self._has_markers,
        )  # fmt: skip

    def _leaves_gap(self) -> bool:
        """Whether the batches so far have left no bytes of the range, so that its rest would look like a gap."""
        return not self._is_at_end and self.segment.may_have_gaps and self._position >= self.damage.end_position

    def finish(self) -> RepairCheck:
        """The copy is complete: the task to run on a thread, and then pass to `log.finish_repair`. Raises OSError."""
        assert self.is_complete
        segment, damage = self.segment, self.damage
        start, end = damage.position, damage.end_position
        if self._is_end_part:
            start = end = min(end, segment.file.size_bytes())
        if self._held_batches is None and not self._is_at_end and self._position < damage.end_position:
            if not self._may_rewrite:
                raise NoRoom(f"it is shorter than the {damage.end_position - damage.position} bytes")
            length = self._position - damage.position
            self._held_batches = [segment.file.read_at(length, damage.position)]
        if self._held_batches is None and self._is_at_end:
            segment.end_at(self._position)
        if self._is_at_end and self._ends_early:
            segment.may_end_early = True
        copy = None if self._held_batches is None else b"".join(self._held_batches)
        copied = self._from_offset, damage.end_offset
        return RepairCheck(
            self.log, segment, damage, copied, self._proven, copy, start, end, has_markers=self._has_markers,
            begins_at=damage.position, is_end_part=self._from_offset > damage.first_offset,
        )  # fmt: skip


class RepairCheck:
    """A task for any thread: `run` syncs the repair to the device and examines the whole segment again.

    `copied`: the offsets of the copied batches; `proven`: the same with their leader epochs. `copy`: None if they are
    in the file already; otherwise the file is written anew with the copy in place of the bytes [start, end).
    """

    def __init__(
        self,
        log: DamagedLog,
        segment: Segment,
        damage: DamagedRange,
        copied: tuple[int, int],
        proven: Sequence[ProvenBatches],
        copy: bytes | None = None,
        start: int = 0,
        end: int = 0,
        *,
        has_markers: bool = False,
        begins_at: int | None = None,
        is_end_part: bool = False,
    ) -> None:
        """`begins_at`: where the damaged bytes begin that lie before an inserted copy.

        `is_end_part`: records of the range are still missing before the copy.
        """
        self.log = log
        self.has_markers = has_markers
        """The copy ends transactions: the segment's index of those that were aborted may lack them."""
        self.segment = segment
        self.size_bytes = segment.size_bytes
        self.findings: Findings | None = None
        self.error: OSError | None = None
        self.temporary = "" if copy is None else f"{segment.path}.repair.tmp"
        self.is_written_anew = False
        self.damage = damage
        kept = [each for each in segment.proven if each.first_offset < copied[0] or each.end_offset > copied[1]]
        self.copied = copied
        self.proven = (*kept, *proven)
        self._copy = copy
        self._start, self._end = start, end
        self._begins_at = start if begins_at is None else begins_at
        self._is_insertion = start == end
        self._is_end_part = is_end_part
        self._end_offset = segment.next_offset
        self.generation = segment.generation
        self._epoch_max = log.segments.epoch_behind(segment)
        self._named = segment.named_batches()
        self._file = segment.file
        self._file.pin()

    @property
    def is_insertion(self) -> bool:
        """Whether the copy of a part is inserted before or after the damaged bytes."""
        return self.is_written_anew and self._is_insertion

    @property
    def has_helped(self) -> bool:
        """Whether the copied batches were found in the new file. Otherwise each attempt would make it longer."""
        assert self.findings is not None
        first_offset, end_offset = self.copied
        return not any(
            each.first_offset < end_offset and each.end_offset > first_offset for each in self.findings.damage
        )

    def run(self) -> None:
        """Sync and examine. `log.finish_repair` raises an error."""
        try:
            if self._copy is None:
                self._file.sync()
            elif self._file.size_bytes() >= self._start:
                self._write_anew(self._copy)
                if self.is_insertion and self._begins_at < self._start and not self.has_helped:
                    # What is left of a batch may pass for one that reaches into the copy behind it.
                    self._start = self._begins_at
                    self._write_anew(self._copy)
                return
            self._examine(self._file, self.size_bytes, self._named)  # the file may also have become shorter than it was
        except OSError as error:
            self.error = error

    def _write_anew(self, copy: bytes) -> None:
        """Write the temporary file. The present one is read by its descriptor, because its name may have changed."""
        disk = self.log.disk
        require_space(disk, self.segment, self.size_bytes + len(copy))
        disk.write_file(self.temporary, b"", sync=False)
        file = disk.open(self.temporary)
        try:
            position = self._copy_bytes(file, 0, 0, self._start)
            if self._is_end_part and self.segment.may_have_gaps and position <= self._begins_at:
                position = _write(file, memoryview(PLACE_OF_THE_REST), position)
            position = _write(file, memoryview(copy), position)
            named = MovedBatches(self._named, self._start, self._end, position)
            position = self._copy_bytes(file, position, self._end, self.size_bytes)
            file.sync()
            self._examine(file, position, named)
            self.is_written_anew = True
        finally:
            file.close()

    def _copy_bytes(self, file: File, position: int, source: int, source_end: int) -> int:
        """Copy a part of the segment's file to `position`. The position after it."""
        while source < source_end:
            data = self._file.read_at(min(_COPY_STEP_BYTES, source_end - source), source)
            if not data:
                break
            require_space(self.log.disk, self.segment, len(data))  # several repairs may have seen the same free bytes
            position = _write(file, memoryview(data), position)
            source += len(data)
        return position

    def _examine(self, file: File, size_bytes: int, named: Container[tuple[int, int]]) -> None:
        segment = self.segment
        self.findings = examine(
            file, size_bytes, segment.base_offset, self._end_offset, segment.index_interval_bytes,
            may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early, epoch_max=self._epoch_max,
            proven=self.proven, named=named,
        )  # fmt: skip

    def unpin(self) -> None:
        self._file.unpin()


def _write(file: File, data: memoryview, position: int) -> int:
    """Write all bytes. Returns the position after them."""
    while len(data):
        written = file.write_at(data, position)
        if not written:
            raise OSError(5, "a write made no progress")
        data, position = data[written:], position + written
    return position


def require_space(disk: Disk, segment: Segment, size_bytes: int) -> None:
    """Raises NoSpace if so many bytes beside the segment would leave too little of the volume for appends."""
    total, free = disk.volume_bytes(segment.directory)
    needed = size_bytes + min(_SPARE_BYTES, total // _SPARE_PARTS)
    if free < needed:
        raise NoSpace(errno.ENOSPC, f"{needed} bytes are needed to repair it, {free} are free", segment.path)


def _no_space(error: OSError) -> OSError:
    return NoSpace(error.errno, error.strerror, error.filename) if is_full(error) else error


def finish_repair(check: RepairCheck) -> bool:
    """Apply the result of the check, on the owner's thread. False if the log has changed meanwhile.

    Raises NoSpace, or OSError if the device has failed.
    """
    check.unpin()
    log, segment = check.log, check.segment
    is_current = (
        log.failure is None
        and not log.is_closed
        and segment.generation == check.generation
        and any(one is segment for one in log.segments)
    )
    if not is_current or check.error is not None or check.findings is None:
        if check.temporary and log.failure is None and not log.is_closed:
            log.disk.remove(check.temporary)
        if is_current and check.error is not None:
            raise _no_space(check.error) from check.error
        return False
    if check.is_insertion and not check.has_helped:
        log.disk.remove(check.temporary)
        return False
    if check.is_written_anew:
        segment.replace_file(check.temporary)
    if segment.may_end_early:  # perhaps another replica's cleaner has removed the last batch
        log.disk.remove(f"{segment.directory}/{CLEANED_ENDS_FILE}")
    segment.proven = check.proven
    if check.has_markers:
        segment.transaction_index.lacks_rows = True
    check.findings.generation = segment.generation
    segment.end_filling(check.damage, is_written_anew=check.is_written_anew)
    segment.findings = check.findings
    log.adopt_findings(segment)
    return True
