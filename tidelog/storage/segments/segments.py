"""The segments of one log in offset order: look-up, addition, and deletion in crash-safe steps.

Deletion at the front: the segments leave this list, then the log directory checkpoints the log start offset, then their
files are renamed, in any order, and after file.delete.delay.ms removed. Deletion at the end: the renames reach the
device one by one, newest first. So a power loss at any point leaves a log without a gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tidelog.storage.files.disk import Disk
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex


class Segments:
    __slots__ = (
        "_bases",
        "_disk",
        "_list",
        "active",
        "condemned",
        "directory",
        "distrusted",
        "doomed",
        "found_by_time",
        "leader_epochs",
        "sums_are_stale",
    )

    active: Segment

    def __init__(self, disk: Disk, directory: str, segments: Iterable[Segment] = ()) -> None:
        self._disk = disk
        self.directory = directory
        self._list = sorted(segments, key=lambda segment: segment.base_offset)
        self._bases = [segment.base_offset for segment in self._list]
        if self._list:
            self.active = self._list[-1]
        self.condemned: list[Segment] = []
        """Segments that are out of the log, with files that are not renamed yet."""
        self.doomed: list[tuple[int, str]] = []
        """(time of the removal, path) of renamed files."""
        self.leader_epochs = LeaderEpochs()
        """The leader epochs of the log, which owns this object."""
        self.sums_are_stale = True
        """`transaction_sums` may have changed since the owner last compared it with its file."""
        self.distrusted: set[int] = set()
        """Transactions may come back with copies from these offsets on. The indexes behind may lack those aborted."""
        self.found_by_time: dict[tuple[str | int, ...], Any] = {}
        """Results of `lookup`'s searches in large batches, which run on threads."""

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._list)

    def __getitem__(self, index: int) -> Segment:
        return self._list[index]

    @property
    def first(self) -> Segment:
        return self._list[0]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._list)

    def add(self, segment: Segment) -> None:
        """Append a segment at the end."""
        assert not self._bases or segment.base_offset > self._bases[-1], (self._bases[-1:], segment)
        self.sums_are_stale = True
        self._list.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def moved_to(self, directory: str) -> None:
        """The directory was renamed."""
        self.directory = directory
        for segment in (*self._list, *self.condemned):
            segment.moved_to(directory)
        self.doomed = [(at_ms, f"{directory}/{path.rpartition('/')[2]}") for at_ms, path in self.doomed]

    def floor_index(self, offset: int) -> int:
        """The index of the last segment whose base offset is not above `offset`; -1 if all are above."""
        return bisect_right(self._bases, offset) - 1

    def from_offset(self, offset: int) -> list[Segment]:
        """The segment that holds `offset`, and all after it."""
        return self._list[max(0, self.floor_index(offset)) :]

    def distrust_from(self, offset: int) -> None:
        """Check all bytes from `offset` on at their next read, even recently checked ones."""
        for segment in self.from_offset(offset):
            segment.distrust()

    def age_trust(self) -> None:
        """Called periodically: bytes neither appended nor checked since the call before the last one are checked at
        their next read."""
        for segment in self._list:
            segment.age_trust()

    def with_batches_behind(self, segment: Segment) -> Segment | None:
        """The next segment with batches: an empty one may hold a gap."""
        start = self.floor_index(segment.base_offset) + 1
        return next((each for each in islice(self._list, start, None) if each.size_bytes), None)

    def epoch_behind(self, segment: Segment) -> int:
        """The leader epoch of the first batch after a segment; -1 if it is unreadable, or if none is there. Behind the
        active segment the log's latest epoch.
        """
        if segment is self.active:
            return self.leader_epochs.latest
        following = self.with_batches_behind(segment)
        return -1 if following is None else following.epoch_at(0)

    def base_offsets(self) -> list[int]:
        return list(self._bases)

    def transaction_sums(self, *, with_active: bool) -> dict[int, tuple[int, int]]:
        """Base offset -> (size, CRC-32C) of the rows of each index of aborted transactions that has rows.

        Size -1 where rows may be missing: a start makes the index anew.
        """
        segments = self._list if with_active else self._list[:-1]
        distrusted_from = min(self.distrusted, default=INT64_MAX)
        sums: dict[int, tuple[int, int]] = {}
        for segment in segments:
            try:
                checksum = (-1, 0) if segment.next_offset > distrusted_from else segment.transaction_index.checksum
            except CorruptTransactionIndex:
                checksum = -1, 0
            if checksum[0]:
                sums[segment.base_offset] = checksum
        return sums

    def condemn_first(self, count: int) -> None:
        """Take the first `count` segments out of the log. `rename_condemned` renames their files later."""
        assert count < len(self._list)
        self.sums_are_stale = True
        self.condemned.extend(self._list[:count])
        del self._list[:count], self._bases[:count]

    def condemn_below(self, offset: int) -> bool:
        """`condemn_first` for the segments before the one that holds `offset`. Whether there are any."""
        count = self.floor_index(offset)
        if count <= 0:
            return False
        self.condemn_first(count)
        return True

    def rename_condemned(self, checkpointed_log_start: int, remove_at_ms: int, count: int) -> list[Segment]:
        """Rename the files of `count` condemned segments that lie wholly below the checkpointed log start: these."""
        gone = [segment for segment in self.condemned if segment.next_offset <= checkpointed_log_start][:count]
        bases = {segment.base_offset for segment in gone}
        self.condemned = [segment for segment in self.condemned if segment.base_offset not in bases]
        for segment in gone:
            self.doomed.extend((remove_at_ms, path) for path in segment.mark_deleted())
        return gone

    def begin_earlier(self, base_offset: int) -> None:
        """Give the first segment, whose file was lost, a lower base offset. Raises OSError."""
        self.sums_are_stale = True
        self.first.begin_earlier(base_offset)
        self._bases[0] = base_offset

    def insert(self, segment: Segment) -> None:
        """Add a segment between two others."""
        at = self.floor_index(segment.base_offset) + 1
        assert 0 < at < len(self._list), (self._bases, segment)
        self.sums_are_stale = True
        self._list.insert(at, segment)
        self._bases.insert(at, segment.base_offset)

    def replace(self, old: list[Segment], new: list[Segment]) -> None:
        """Replace neighbouring segments by those made from them. The caller handles their files."""
        at = bisect_left(self._bases, old[0].base_offset)
        assert self._list[at : at + len(old)] == old, (self._bases, old)
        assert new[0].base_offset == old[0].base_offset, (new, old)
        self.sums_are_stale = True
        self._list[at : at + len(old)] = new
        self._bases[at : at + len(old)] = [each.base_offset for each in new]

    def drop_last(self, count: int, remove_at_ms: int) -> list[Segment]:
        """Take the last `count` segments out, newest first and durably, so that the rest is always a prefix."""
        self.sums_are_stale = True
        gone = [self._list.pop() for _ in range(count)]
        del self._bases[len(self._list) :]
        for segment in gone:
            self.doomed.extend((remove_at_ms, path) for path in segment.mark_deleted())
            self._disk.sync_directory(self.directory)
        if self._list:
            self.active = self._list[-1]
        return gone

    def take_doomed(self, now_ms: int) -> list[str]:
        """The paths of the files that are due for removal. The caller removes them, on any thread."""
        due = [path for remove_at_ms, path in self.doomed if remove_at_ms <= now_ms]
        if due:
            self.doomed = [item for item in self.doomed if item[0] > now_ms]
        return due

    def remove_doomed(self, now_ms: int) -> None:
        for path in self.take_doomed(now_ms):
            self._disk.remove(path)

    def abandon(self) -> None:
        """The log is deleted or unusable: close its files, and make none anew."""
        for segment in (*self._list, *self.condemned):
            segment.is_abandoned = True
        self.release()

    def release(self, *, keep_active: bool = False) -> None:
        """Close descriptors and maps. A later use opens them again."""
        for segment in self._list:
            if not (keep_active and segment is self.active):
                segment.release()
