"""Reads the last five batches of each producer from the log, because a snapshot has only the last one.

Several batches may have been in flight when this replica stopped. If a client sends them again, they must be recognized
as duplicates. The headers are read backwards from the snapshot's offset, until every recently active producer has its
five batches. Waits for the device. Invariant: only batches of a producer's present epoch are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tidelog.storage.producers.producer_state import (
    BATCHES_RETAINED,
    FIRST_OFFSET,
    FIRST_SEQUENCE,
    ProducerEntry,
    ProducerState,
    SentBatch,
)
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.reader import headers, position_of
from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.storage")

# Bytes read at once. A producer whose last batch lies further back is not completed.
_STRETCH_BYTES: Final = 32 * 1024
# A bound on the work, for producers that have fewer than five batches left in the log.
_HEADERS_MAX: Final = 2000


def recall(producers: ProducerState, segments: list[Segment], examine: Callable[[Segment], None]) -> None:
    """Complete the entries of a snapshot taken at the state's end offset.

    `examine` is called with a segment that lacks batches or has a wrong index: it finds the damage, and mends the
    index. The search goes on before the damage.
    """
    search = _Search(producers)
    for segment in reversed(segments):
        if segment.base_offset >= search.begin_offset:
            continue
        if search.is_over:
            break
        try:
            search.read(segment)
        except CorruptIndex as error:
            logger.warning("examining %s: %s", segment.path, error)
            examine(segment)
            search.read(segment)
        if segment is not segments[-1]:
            segment.forget_indexes()
    search.finish()


class _Search:
    """The backward search. `_found`: for each producer its batches before that in the snapshot, in order."""

    def __init__(self, producers: ProducerState) -> None:
        self._entries = producers.entries
        self.begin_offset = producers.end_offset
        """Where the part begins that was read so far."""
        self._found: dict[int, list[SentBatch]] = {}
        # Producers whose last batch the search has not reached, by its offset, the earliest first.
        self._passed_by = sorted(
            ((entry.batches[0][FIRST_OFFSET], entry) for entry in producers.entries.values() if entry.batches),
            key=lambda pair: pair[0],
        )
        self._lacking: dict[int, ProducerEntry] = {}
        self._headers_read = 0

    @property
    def is_over(self) -> bool:
        if not self._headers_read:
            return not self._passed_by
        return not self._lacking or self._headers_read >= _HEADERS_MAX

    def read(self, segment: Segment) -> None:
        """Read backwards from what was read so far, in pieces. Raises CorruptIndex, and may be repeated then."""
        end = position_of(segment, self.begin_offset, wait=True)
        while end > 0 and not self.is_over:
            row = segment.offset_index.floor_value(max(0, end - _STRETCH_BYTES))
            start = row[1] if row is not None else 0
            lowest = self.begin_offset
            stretch: dict[int, list[SentBatch]] = {}
            over: set[int] = set()
            headers_read = 0
            for position, header in headers(segment, start):
                if position >= end:
                    break
                headers_read += 1
                lowest = min(lowest, header.base_offset)
                entry = self._entries.get(header.producer_id)
                if entry is None or not entry.batches or header.is_control:
                    continue
                if header.producer_epoch != entry.epoch:
                    over.add(header.producer_id)  # earlier batches are of older epochs too
                elif header.base_offset < entry.batches[0][FIRST_OFFSET]:
                    stretch.setdefault(header.producer_id, []).append(
                        (header.base_sequence, header.last_sequence, header.base_offset, header.last_offset,
                         header.max_timestamp)
                    )  # fmt: skip
            for producer_id, batches in stretch.items():
                self._found[producer_id] = batches + self._found.get(producer_id, [])
            self._headers_read += headers_read
            self._note_lacking(lowest, over)
            self.begin_offset, end = lowest, start

    def _note_lacking(self, lowest_offset: int, over: set[int]) -> None:
        """Update the producers that wrote in the part read so far and do not have five batches yet."""
        while self._passed_by and self._passed_by[-1][0] >= lowest_offset:
            entry = self._passed_by.pop()[1]
            self._lacking[entry.producer_id] = entry
        for producer_id, entry in list(self._lacking.items()):
            batches = self._found.get(producer_id, [])
            first_sequence = (batches or entry.batches)[0][FIRST_SEQUENCE]
            if len(batches) + 1 >= BATCHES_RETAINED or first_sequence == 0 or producer_id in over:
                del self._lacking[producer_id]

    def finish(self) -> None:
        for producer_id, batches in self._found.items():
            entry = self._entries[producer_id]
            entry.batches = [*batches, *entry.batches][-BATCHES_RETAINED:]
