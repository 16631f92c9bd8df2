"""Pure: merges what the replicas have behind a gap in the leader's log, so that one round of requests explains many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidelog.protocol.batches.record_batch import check_crc, iter_headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidelog.protocol.batches.record_batch import BatchHeader


@dataclass(frozen=True, slots=True)
class GapCopy:
    """The committed records of one replica from the first offset of a gap on.

    `base_offset`: of the first one, at most the end of the gap. Without `data` the replica lacks the whole gap, and
    what it has behind is not known.
    """

    is_in_sync: bool
    base_offset: int
    data: bytes


@dataclass(slots=True)
class _Cursor:
    copy: GapCopy
    batches: Iterator[tuple[int, BatchHeader]] = field(init=False)
    position: int = 0
    header: BatchHeader | None = None

    def __post_init__(self) -> None:
        self.batches = iter_headers(self.copy.data)

    def skip_to(self, offset: int) -> int:
        """The base offset of the first batch that ends behind `offset`; -1 at the end of the copy."""
        while self.header is None or self.header.next_offset <= offset:
            following = next(self.batches, None)
            if following is None:
                return -1
            self.position, self.header = following
        return self.header.base_offset

    def is_sound(self) -> bool:
        return self.header is not None and check_crc(self.copy.data, self.position, self.header)


def merge(
    copies: Sequence[GapCopy], first_offset: int, end_offset: int, *, is_empty: bool = False
) -> tuple[bytes, int]:
    """The records from `first_offset` on that a replica in sync has, as far as each copy reaches.

    Returns also the offset below which all replicas in sync have gaps; -1 without one. `end_offset` is the end of the
    leader's gap. With `is_empty` the first batch may begin before `first_offset`, as a log may start inside a batch.

    The whole answer would be refused if it had a batch that only a replica outside the ISR has, that overlaps another,
    or that is damaged in all copies. So the records end before such a batch.
    """
    cursors = [_Cursor(copy) for copy in copies if copy.data]
    reaches_behind_gap = all(copy.data for copy in copies)
    pieces: list[bytes] = []
    offset, gaps_below = first_offset, -1
    while cursors:
        base_offsets = [cursor.skip_to(offset) for cursor in cursors]
        base_offset = min(base_offsets)
        if base_offset < (0 if is_empty and not pieces else offset):  # a copy has ended, or batches overlap
            break
        sound = (each for each, begin in zip(cursors, base_offsets) if begin == base_offset and each.is_sound())
        nearest = next(sound, None)
        header = None if nearest is None else nearest.header
        if nearest is None or header is None or not nearest.copy.is_in_sync:
            break
        if header.next_offset > end_offset and not reaches_behind_gap:
            break
        if base_offset > offset:
            gaps_below = base_offset
        pieces.append(nearest.copy.data[nearest.position : nearest.position + header.size_bytes])
        offset = header.next_offset
    return b"".join(pieces), gaps_below
