"""Replaces segments by those made from them, so that a crash leaves either all old or all new ones.

The order is Kafka's (LocalLog.replaceSegments). The directory is synced between the steps, because a loss of power may
keep any part of unsynced renames: the cleaned files are synced under `.cleaned`; all of them become `.swap`, those of
the first new segment last, which commits the swap; the replaced files become `.deleted`; each `.log` gets its normal
name, then the indexes do. A step that renames files of many segments is cut in pieces. A start undoes a swap that was
not committed, of which some files are still `.cleaned`, and finishes any other, unless it is damaged and what it
replaces is still there. As in Kafka, any `.cleaned` at or below a `.swap` counts as a part of it, so no `.cleaned` of
an earlier cleaning may be there when a swap commits. Invariant: renames happen on the owner's thread, which reads the
segments, so a segment always knows the names of its files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final, Protocol

from tidelog.storage.files.disk import Disk
from tidelog.storage.log.explained_gaps import read_explained_gaps
from tidelog.storage.log.flush import Durability
from tidelog.storage.producers.producer_snapshots import ProducerSnapshots
from tidelog.storage.segments.damage import DamagedRange
from tidelog.storage.segments.examination import UNKNOWN_END, Examiner
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.segment import CLEANED_SUFFIX, LOG_SUFFIX, SUFFIXES, SWAP_SUFFIX, Segment
from tidelog.storage.segments.segments import Segments

logger = logging.getLogger("tidelog.storage")

PIECE_SEGMENTS: Final = 16
"""The segments of which one turn of the owner's loop renames the files, which takes some milliseconds."""


Step = Callable[[Sequence[Segment]], None]
EarlyEnds = Set[tuple[int, int]]
"""Of segments that may end before the next one begins: the base offsets of both."""


class SwappedLog(Protocol):
    """The part of `partition_log.PartitionLog` that a swap uses."""

    disk: Disk
    directory: str
    clock_ms: int
    config: LogConfig
    durability: Durability
    segments: Segments
    snapshots: ProducerSnapshots


class Swap:
    """`replaced`: in offset order, old segments and the new ones made from them, which are complete, sealed and synced
    under `.cleaned`. `remove_strays` was called, then the directory was synced.

    The caller alternates `advance` on the owner's thread and `sync` on any thread until `is_done`. After an OSError
    from either the directory cannot be used any more.
    """

    def __init__(self, log: SwappedLog, replaced: Sequence[tuple[list[Segment], list[Segment]]]) -> None:
        self._log = log
        self._replaced = replaced
        old = [segment for segments, _ in replaced for segment in segments]
        new = [segment for _, segments in replaced for segment in segments]
        self._bases = {segment.base_offset for segment in new}
        steps: tuple[tuple[Step, Sequence[Segment]], ...] = (
            (_rename_to_swap, new[1:]),  # a start undoes these while files of the first one are `.cleaned`
            (_rename_to_swap, new[:1]),
            (self._mark_deleted, old),
            (_name_logs, new),
            (self._name_indexes, new),
        )
        self._pieces: list[tuple[Step, Sequence[Segment]]] = []
        self._first_pieces: set[int] = set()
        for step, segments in steps:
            self._first_pieces.add(len(self._pieces))
            self._pieces += [(step, piece) for piece in _pieces(segments)]
        self._next = 0

    @property
    def has_begun(self) -> bool:
        return self._next > 0

    @property
    def is_done(self) -> bool:
        return self._next == len(self._pieces)

    def advance(self) -> None:
        step, segments = self._pieces[self._next]
        step(segments)
        self._next += 1

    def sync(self) -> None:
        """Between two steps; nothing between the pieces of one."""
        if self._next in self._first_pieces:
            self._log.disk.sync_directory(self._log.directory)

    def finish_now(self) -> None:
        """Run the remaining steps now and wait for the device. A `sync` may be running on a thread."""
        while not self.is_done:
            self.sync()
            self.advance()

    def _mark_deleted(self, old: Sequence[Segment]) -> None:
        log = self._log
        if old[0] is self._replaced[0][0][0]:  # all at once, so that no reader meets a mixture of old and new
            for segments, new in self._replaced:
                log.segments.replace(segments, new)
        remove_at_ms = log.clock_ms + log.config.file_delete_delay_ms
        for segment in old:
            log.segments.doomed.extend((remove_at_ms, path) for path in segment.mark_deleted())
            # Snapshots are kept only at the base offsets of segments.
            is_kept = segment.base_offset in self._bases
            log.snapshots.delete_where(segment.base_offset + is_kept, segment.next_offset)

    def _name_indexes(self, new: Sequence[Segment]) -> None:
        for segment in new:
            segment.rename_indexes("")
        self._log.durability.note_directory(self._log.directory)


def _pieces(segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
    return (segments[at : at + PIECE_SEGMENTS] for at in range(0, len(segments), PIECE_SEGMENTS))


def _rename_to_swap(new: Sequence[Segment]) -> None:
    for segment in new:
        segment.rename_log(SWAP_SUFFIX)
        segment.rename_indexes(SWAP_SUFFIX)


def _name_logs(new: Sequence[Segment]) -> None:
    for segment in new:
        segment.rename_log("")


def finish_swaps(disk: Disk, directory: str, names: set[str]) -> None:
    """At a start: undo uncommitted swaps, finish committed ones, and update the file names in `names`."""
    cleaned = [name for name in sorted(names) if name.endswith(CLEANED_SUFFIX)]
    swapped = [name for name in sorted(names) if name.endswith(SWAP_SUFFIX)]
    if not cleaned and not swapped:
        return
    early_ends = read_explained_gaps(disk, directory).early_ends
    undone = _uncommitted(disk, directory, names, cleaned, swapped, early_ends)
    # Removed durably before the .cleaned files, because a .swap without a .cleaned counts as committed.
    _remove(disk, directory, names, undone)
    _remove(disk, directory, names, cleaned)
    committed = [name for name in swapped if name not in undone]
    for name in [name for name in committed if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]:
        if name not in committed:
            continue
        low = _offset_of(name)
        bases = [_offset_of(other) for other in names if other.endswith(LOG_SUFFIX)]
        begins = {*bases, *(_offset_of(other) for other in names if other.endswith(LOG_SUFFIX + SWAP_SUFFIX))}
        end, is_whole = _end_offset(disk, directory, name)
        if is_whole and end not in begins:  # also an empty one, which holds a gap
            end = min((after for base, after in early_ends if base == low and after in begins), default=end)
        if low in bases and not (is_whole and end in begins):
            # What it replaces is still there. A wrong end would remove segments that it does not replace.
            logger.error("%s/%s is damaged: keeping the segments from which it was made", directory, name)
            of_swap = _of_kept(disk, directory, bases, committed, low, early_ends)
            _remove(disk, directory, names, sorted(of_swap, key=lambda each: each == name))
            committed = [each for each in committed if each not in of_swap]
            continue
        if end not in begins:  # the segment behind it is never gone: what is left to remove is not known
            end = low + 1
        logger.info("%s/%s replaces the segments from which it was made", directory, name)
        replaced = [other for other in sorted(names) if _is_of_segment(other) and low <= _offset_of(other) < end]
        _remove(disk, directory, names, replaced)
    logs = [name for name in committed if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    for kind in (logs, [name for name in committed if name not in logs]):
        for name in kind:
            target = name.removesuffix(SWAP_SUFFIX)
            disk.rename(f"{directory}/{name}", f"{directory}/{target}")
            names.discard(name)
            names.add(target)
        if kind:
            disk.sync_directory(directory)


def remove_strays(disk: Disk, directory: str, base_offsets: set[int]) -> None:
    """Remove every `.cleaned` file of a segment that is not at one of these. The caller syncs the directory."""
    for entry in disk.list_directory(directory):
        if entry.name.endswith(CLEANED_SUFFIX) and _offset_of(entry.name) not in base_offsets:
            logger.warning("%s/%s is left of an earlier cleaning, and is removed", directory, entry.name)
            disk.remove(f"{directory}/{entry.name}")


def _uncommitted(
    disk: Disk, directory: str, names: set[str], cleaned: list[str], swapped: list[str], early_ends: EarlyEnds
) -> list[str]:
    """The `.swap` files to undo: a part of their swap is `.cleaned`, and the segments that it replaces are there.

    Without these the swap was committed, whatever is `.cleaned`. A swap may have several new segments, in place of as
    many old ones, or of one that is split: the last that is renamed is the first of them.
    """
    bases = [_offset_of(other) for other in names if other.endswith(LOG_SUFFIX)]
    cleaned_bases = {_offset_of(name) for name in cleaned}
    undone = []
    for low in sorted({_offset_of(name) for name in swapped}):
        is_uncommitted = any(base <= low for base in cleaned_bases)
        if low not in bases:
            is_uncommitted = is_uncommitted and _is_held(disk, directory, bases, low, min(cleaned_bases), early_ends)
        undone += [name for name in swapped if is_uncommitted and _offset_of(name) == low]
    return undone


def _is_held(
    disk: Disk, directory: str, bases: list[int], offset: int, swapped_from: int, early_ends: EarlyEnds
) -> bool:
    """Whether the segment before `offset` has batches from there on, or a gap that `explained-gaps` names.

    If it is one that the swap from this offset on replaces, it may also be damaged before them, or Kafka's cleaner has
    removed them: then it does not end at `offset`.
    """
    before = max((base for base in bases if 0 <= base < offset), default=-1)
    if before < 0:
        return False
    if any(base == before and offset < after for base, after in early_ends):
        return True
    end, is_whole = _end_offset(disk, directory, f"{before:0{_STEM_LENGTH}d}{LOG_SUFFIX}")
    return end > offset or (swapped_from <= before and not (is_whole and end == offset))


def _of_kept(
    disk: Disk, directory: str, bases: list[int], committed: list[str], low: int, early_ends: EarlyEnds
) -> list[str]:
    """The `.swap` files of the new segment at `low`, and of those behind it that the same old ones hold."""
    bound = low + 1
    for base in sorted({_offset_of(name) for name in committed}):
        if base > low and (base in bases or not _is_held(disk, directory, bases, base, low, early_ends)):
            break
        bound = max(bound, base + 1)
    return [name for name in committed if low <= _offset_of(name) < bound]


def _remove(disk: Disk, directory: str, names: set[str], gone: list[str]) -> None:
    for name in gone:
        disk.remove(f"{directory}/{name}")
        names.discard(name)
    if gone:
        disk.sync_directory(directory)


def _end_offset(disk: Disk, directory: str, name: str) -> tuple[int, bool]:
    """The end of the whole batches at the file's start, and whether these are the whole file."""
    base_offset = _offset_of(name)
    file = disk.open(f"{directory}/{name}")
    try:
        size_bytes = file.size_bytes()
        examiner = Examiner(file.read_at, size_bytes, base_offset, end_offset=UNKNOWN_END, may_have_gaps=True)
        end_offset = base_offset + 1
        for each in examiner.run():
            if isinstance(each, DamagedRange):
                return end_offset, False
            end_offset = each.header.next_offset
        return end_offset, True
    finally:
        file.close()


_STEM_LENGTH: Final = 20


def _offset_of(name: str) -> int:
    stem = name.partition(".")[0]
    return int(stem) if len(stem) == _STEM_LENGTH and stem.isdecimal() else -1


def _is_of_segment(name: str) -> bool:
    return _offset_of(name) >= 0 and "." + name.partition(".")[2] in SUFFIXES
