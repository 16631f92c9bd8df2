"""Which leader epoch begins at which offset: what a follower's truncation point is found by (KIP-101, KIP-279).

The pure part of Kafka's LeaderEpochFileCache; `partition_log.py` writes it to leader-epoch-checkpoint when
`is_dirty` says so. Invariant: epochs and start offsets both rise strictly from entry to entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

from tidelog.storage.segments.append import Batch
from tidelog.storage.segments.log_config import INT64_MAX

UNDEFINED_EPOCH: Final = -1
UNDEFINED_OFFSET: Final = -1


class LeaderEpochs:
    """Pairs of (epoch, start offset)."""

    __slots__ = ("_epochs", "_starts", "is_dirty", "latest")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.latest = UNDEFINED_EPOCH
        """The epoch of the last entry, -1 without one: what the append path compares with."""
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
        """Note that `epoch` begins at `start_offset`; True when that changed anything.

        Entries that would break the order go: an epoch without records has its start taken over by the next one.
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

    def assign_appended(self, batches: list[Batch]) -> None:
        """Of what is in the log now: an epoch that it had no record of would win an election for it (KIP-101)."""
        for batch in batches:
            if batch[9] > self.latest:
                self.assign(batch[9], batch[2])

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset at which it ended), or (-1, -1) when nothing can be said.

        The latest epoch ends at the log end. An epoch older than all known ones ends where the first known one begins
        (LeaderEpochFileCache.endOffsetFor).
        """
        if epoch == UNDEFINED_EPOCH:
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        if epoch == self.latest:
            return epoch, log_end_offset
        higher = bisect_right(self._epochs, epoch)
        if higher == len(self._epochs):
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        found = self._epochs[higher - 1] if higher else epoch
        return found, self._starts[higher]

    def epoch_for_offset(self, offset: int) -> int:
        """The epoch of the record at `offset`, -1 when it lies before the first entry."""
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
        """Forget the epochs that ended at or before `start_offset`; the one that holds it begins there from now on."""
        starts = self._starts
        last = bisect_right(starts, start_offset) - 1
        if last < 0 or (last == 0 and starts[0] == start_offset):
            return False
        del starts[:last], self._epochs[:last]
        starts[0] = start_offset
        self._changed()
        return True

    def forget_above(self, epoch_max: int, filed: Iterable[tuple[int, int]]) -> int:
        """Forget the epochs above `epoch_max`, which never were; the offset where the first of them began, -1: none.

        What `filed`, the epochs as they were before, say from there on is taken in their place.
        """
        if self.latest <= epoch_max:
            return -1
        first_offset = next(start for epoch, start in self if epoch > epoch_max)
        self.truncate_from_end(first_offset)
        for epoch, start in filed:
            if start >= first_offset and self.latest < epoch <= epoch_max:
                self.assign(epoch, start)
        return first_offset

    def correct(self, seen: list[tuple[int, int]], first_offset: int, end_offset: int) -> bool:
        """Take over the epochs of the records [first_offset, end_offset), as the batches say; True if any was wrong.

        `seen`: (epoch, first offset of it), of which the first may have begun before `first_offset`.
        """
        if not seen or first_offset >= end_offset:
            return False
        seen = [(epoch, max(start, first_offset)) for epoch, start in seen if epoch >= 0]
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
    """Where a log began when it was last written to, by the files around its segments.

    `log_start_offset` is the checkpoint's. The first epoch begins where the log does, and is written down before the
    checkpoint is. Neither has a checksum, and Kafka's checkpoint names few logs: the higher one counts. Without epochs
    there are the indexes whose segment is missing: `orphans`, by their base offsets.
    """
    earliest = epochs.earliest
    if earliest is not None:
        return max(earliest[1], log_start_offset)
    if are_readable:
        return INT64_MAX  # the log was emptied, or never had a record
    return log_start_offset or min(orphans, default=INT64_MAX)
