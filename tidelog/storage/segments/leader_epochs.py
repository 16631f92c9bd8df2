"""The start offset of each leader epoch, from which a follower's truncation point is derived (KIP-101, KIP-279).

The pure part of Kafka's LeaderEpochFileCache. If `is_dirty` is set, the next flush writes it to
leader-epoch-checkpoint. Invariant: epochs and start offsets both rise strictly from entry to entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tidelog.storage.segments.append import Batch
from tidelog.storage.segments.log_config import INT64_MAX

UNDEFINED_EPOCH: Final = -1
UNDEFINED_OFFSET: Final = -1


class EpochBatches(NamedTuple):
    """Batches of one leader epoch, which follow each other: the base offset of the first and of the last one.

    `earliest`: the end of the batch before. The epoch begins there at the earliest.
    """

    epoch: int
    earliest: int
    first: int
    last: int


class LeaderEpochs:
    """Pairs of (epoch, start offset)."""

    __slots__ = ("_epochs", "_starts", "is_dirty", "latest")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.latest = UNDEFINED_EPOCH
        """The epoch of the last entry, -1 without one. The append path compares with it."""
        self.is_dirty = False
        for epoch, start_offset in entries:
            self.assign(epoch, start_offset)
        self.is_dirty = False

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._epochs, self._starts)

    def __repr__(self) -> str:
        return f"LeaderEpochs({list(self)})"

    @property
    def earliest(self) -> tuple[int, int] | None:
        return (self._epochs[0], self._starts[0]) if self._epochs else None

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Note that `epoch` begins at `start_offset`. True if that changed the entries.

        Entries that would break the order are removed: the next epoch replaces one without records.
        """
        assert epoch >= 0, epoch
        assert start_offset >= 0, start_offset
        epochs, starts = self._epochs, self._starts
        if epochs and epochs[-1] == epoch and start_offset >= starts[-1]:
            return False
        while epochs and (epochs[-1] >= epoch or starts[-1] >= start_offset):
            epochs.pop()
            starts.pop()
        epochs.append(epoch)
        starts.append(start_offset)
        self.latest = epoch
        self.is_dirty = True
        return True

    def assign_appended(self, batches: list[Batch], next_offset: int) -> None:
        """Note the epochs of batches appended at `next_offset`. One without records could win this log an election
        (KIP-101).

        An epoch begins where the log ended before it. Compaction may have removed its first records, and a follower
        with records of another history at their offsets must not keep them. A member of the ISR loses none so: the
        cleaner removes only committed records, so its log does not end among them.
        """
        for _, _, _, last_offset, _, _, _, _, _, epoch in batches:
            if epoch > self.latest:
                self.assign(epoch, next_offset)
            next_offset = last_offset + 1

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, its end offset), or (-1, -1) if unknown.

        The latest epoch ends at the log end. An epoch older than all known ones ends at the start of the first known
        one (LeaderEpochFileCache.endOffsetFor).
        """
        if epoch == UNDEFINED_EPOCH:
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        if epoch == self.latest:
            return epoch, log_end_offset
        higher = bisect_right(self._epochs, epoch)
        if higher == len(self._epochs):
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        entry = self._epochs[higher - 1] if higher else epoch
        return entry, self._starts[higher]

    def epoch_for_offset(self, offset: int) -> int:
        """The epoch of the record at `offset`, -1 if it is before the first entry."""
        index = bisect_right(self._starts, offset) - 1
        return self._epochs[index] if index >= 0 else UNDEFINED_EPOCH

    def truncate_from_end(self, end_offset: int) -> bool:
        """Forget the epochs that begin at `end_offset` or later."""
        starts = self._starts
        if not starts or starts[-1] < end_offset:
            return False
        while starts and starts[-1] >= end_offset:
            starts.pop()
            self._epochs.pop()
        self._changed()
        return True

    def truncate_from_start(self, start_offset: int) -> bool:
        """Forget the epochs that ended at or before `start_offset`. The one that holds it then begins there."""
        starts = self._starts
        last = bisect_right(starts, start_offset) - 1
        if last < 0 or (last == 0 and starts[0] == start_offset):
            return False
        del starts[:last], self._epochs[:last]
        starts[0] = start_offset
        self._changed()
        return True

    def limit_to(self, log_start_offset: int, log_end_offset: int, filed: Sequence[tuple[int, int]]) -> None:
        """Forget the epochs outside of the log. Where all its records were deleted, the last one of `filed` stays.

        The leader compares its log with this epoch. Otherwise a follower goes on at its log start, and lacks what the
        leader of another history has below it.
        """
        is_kept = bool(filed) and 0 < log_start_offset == log_end_offset == filed[-1][1]
        self.truncate_from_end(log_end_offset + 1 if is_kept else log_end_offset)
        self.truncate_from_start(log_start_offset)
        if is_kept and not self._epochs:
            self.assign(*filed[-1])

    def forget_above(self, epoch_max: int, filed: Iterable[tuple[int, int]]) -> int:
        """Forget the epochs above `epoch_max`, which never existed. The start offset of the first of them, -1: none.

        From this offset on, the entries of `filed`, the epochs from the file, replace them.
        """
        if self.latest <= epoch_max:
            return -1
        first_offset = next(start for epoch, start in self if epoch > epoch_max)
        self.truncate_from_end(first_offset)
        for epoch, start in filed:
            if start >= first_offset and self.latest < epoch <= epoch_max:
                self.assign(epoch, start)
        return first_offset

    def correct_by(
        self, batches: Sequence[EpochBatches], first_offset: int, end_offset: int, *, is_cleaned: bool
    ) -> bool:
        """`correct` by these batches. `is_cleaned`: others may be missing between them.

        Then an epoch keeps a start that may be right. Otherwise it begins where the batch before ends: behind its true
        start a follower would keep records of another history.
        """
        if not is_cleaned:
            return self.correct([(each.epoch, each.first) for each in batches], first_offset, end_offset)
        if self._agrees_with(batches, first_offset):
            return False
        starts, seen = dict(self), dict[int, int]()
        for each in batches:
            start = starts.get(each.epoch, UNDEFINED_OFFSET)
            seen.setdefault(each.epoch, start if each.earliest <= start <= each.first else each.earliest)
        return self.correct([*seen.items()], first_offset, end_offset)

    def _agrees_with(self, batches: Sequence[EpochBatches], first_offset: int) -> bool:
        """Whether a log of which a cleaner may have removed all batches of other epochs may have these batches. What
        another epoch follows up to `first_offset` is deleted.
        """
        ends = [*(each.first for each in batches[1:]), first_offset + 1]
        return all(
            self.epoch_for_offset(max(offset, first_offset)) == each.epoch
            for each, end in zip(batches, ends)
            if end > first_offset
            for offset in (each.first, each.last)
        )

    def correct(self, seen: list[tuple[int, int]], first_offset: int, end_offset: int) -> bool:
        """Correct the epochs of the records [first_offset, end_offset) from their batches. True if any was wrong.

        `seen`: (epoch, its first offset) from the batches. The first epoch may have begun before `first_offset`.
        """
        if not seen or first_offset >= end_offset:
            return False
        # Of the epochs that begin at `first_offset` or before it, the last one has the record there.
        at_start = {max(start, first_offset): epoch for epoch, start in seen if epoch >= 0}
        seen = [(epoch, start) for start, epoch in at_start.items()]
        known = list(self)
        before = [entry for entry in known if entry[1] <= first_offset]
        inside = [entry for entry in known if first_offset < entry[1] < end_offset]
        if not seen or (before and before[-1][0] == seen[0][0] and inside == seen[1:]):
            return False
        after = [entry for entry in known if entry[1] >= end_offset]
        epochs, starts = self._epochs, self._starts
        epochs.clear()
        starts.clear()
        for epoch, start in (*(entry for entry in before if entry[0] <= seen[0][0]), *seen, *after):
            if not epochs or (epoch > epochs[-1] and start > starts[-1]):
                epochs.append(epoch)
                starts.append(start)
            elif start == starts[-1] and epoch > epochs[-1]:
                epochs[-1] = epoch
        self._changed()
        return True

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()
        self._changed()

    def _changed(self) -> None:
        self.latest = self._epochs[-1] if self._epochs else UNDEFINED_EPOCH
        self.is_dirty = True


def first_offset_of(epochs: LeaderEpochs, are_readable: bool, log_start_offset: int, orphans: set[int]) -> int:
    """The first offset of a log at its last write, derived from the files beside its segments.

    `log_start_offset` is the checkpoint's. The first epoch begins at the log start and is written before the
    checkpoint. Neither file has a checksum, and Kafka's checkpoint omits most logs, so the higher offset counts.
    Without epochs the lowest of `orphans` counts, the base offsets of indexes whose segment is missing.
    """
    earliest = epochs.earliest
    if earliest is not None:
        return max(earliest[1], log_start_offset)
    if are_readable:
        return INT64_MAX  # the log was emptied or never had a record
    return log_start_offset or min(orphans, default=INT64_MAX)


def confirmed_log_start(
    epochs: LeaderEpochs, are_readable: bool, log_start_offset: int, first_base_offset: int, high_watermark: int
) -> int:
    """The log start offset of the checkpoint, or a lower one if no second file confirms it.

    No checkpoint has a checksum, and a log start that is too high removes records from every replica. The epoch file
    is written before the checkpoint and begins at the log start, so one of them is damaged if it begins lower.
    `first_base_offset` is that of the first segment: where the epoch file is lost, its records count as present.
    """
    earliest = epochs.earliest
    if earliest is not None:
        return min(log_start_offset, earliest[1])
    if are_readable and log_start_offset == high_watermark:
        return log_start_offset  # all records were deleted, and a file without an epoch is right
    return min(log_start_offset, first_base_offset)
