"""The batches before the last one of each producer, which is all that a snapshot names: found again in the log.

Several may have been under way when this replica stopped; sent again to it, they are to be known as duplicates. The log
is read backwards from the snapshot's offset, headers only, until every producer that wrote lately has its five batches.
Waits for the device. Invariant: only batches of a producer's present epoch are found.
"""

from __future__ import annotations

import logging
from typing import Final

from tidelog.storage.producers.producer_state import BATCHES_RETAINED, ProducerEntry, ProducerState, SentBatch
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.reader import headers, position_of
from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.storage")

# Read at once. A producer whose last batch lies further back than what was read by now is not looked for.
_STRETCH_BYTES: Final = 32 * 1024
# A bound on the work, for producers that have fewer than five batches left in the log.
_HEADERS_MAX: Final = 2000


def recall(producers: ProducerState, segments: list[Segment]) -> None:
    """Complete the entries of a snapshot taken at the state's end offset."""
    search = _Search(producers)
    end_offset = producers.end_offset
    try:
        for segment in reversed(segments):
            if segment.base_offset >= end_offset:
                continue
            if search.is_over:
                break
            search.read(segment, position_of(segment, end_offset, wait=True))
            if segment is not segments[-1]:
                segment.forget_indexes()
    except CorruptIndex as error:
        logger.warning("producer state knows only the latest batches of each: %s", error)
    search.finish()


class _Search:
    """`found`: batches older than the snapshot's, in their order, of each producer that may have some."""

    def __init__(self, producers: ProducerState) -> None:
        self._entries = producers.entries
        self._end_offset = producers.end_offset
        self._found: dict[int, list[SentBatch]] = {}
        # By the offset of their last batch: who has not been passed yet, the earliest first.
        self._passed_by = sorted(
            ((entry.batches[0][2], entry) for entry in producers.entries.values() if entry.batches),
            key=lambda it: it[0],
        )
        self._lacking: dict[int, ProducerEntry] = {}
        self._headers_read = 0

    @property
    def is_over(self) -> bool:
        if not self._headers_read:
            return not self._passed_by
        return not self._lacking or self._headers_read >= _HEADERS_MAX

    def read(self, segment: Segment, end: int) -> None:
        """Read backwards from the position `end`, one stretch after the other."""
        while end > 0 and not self.is_over:
            row = segment.offset_index.floor_value(max(0, end - _STRETCH_BYTES))
            start = row[1] if row is not None else 0
            lowest = self._end_offset
            stretch: dict[int, list[SentBatch]] = {}
            over: set[int] = set()
            for position, header in headers(segment, start):
                if position >= end:
                    break
                self._headers_read += 1
                lowest = min(lowest, header.base_offset)
                entry = self._entries.get(header.producer_id)
                if entry is None or not entry.batches or header.is_control:
                    continue
                if header.producer_epoch != entry.epoch:
                    over.add(header.producer_id)  # nothing of the present epoch lies before it
                elif header.base_offset < entry.batches[0][2]:
                    stretch.setdefault(header.producer_id, []).append(
                        (header.base_sequence, header.last_sequence, header.base_offset, header.last_offset,
                         header.max_timestamp)
                    )  # fmt: skip
            for producer_id, batches in stretch.items():
                self._found[producer_id] = batches + self._found.get(producer_id, [])
            self._note_lacking(lowest, over)
            end = start

    def _note_lacking(self, lowest_offset: int, over: set[int]) -> None:
        """Who wrote in what has been read, and does not have five batches by now."""
        while self._passed_by and self._passed_by[-1][0] >= lowest_offset:
            entry = self._passed_by.pop()[1]
            self._lacking[entry.producer_id] = entry
        for producer_id, entry in list(self._lacking.items()):
            found = self._found.get(producer_id, [])
            first_sequence = (found or entry.batches)[0][0]
            if len(found) + 1 >= BATCHES_RETAINED or first_sequence == 0 or producer_id in over:
                del self._lacking[producer_id]

    def finish(self) -> None:
        for producer_id, batches in self._found.items():
            entry = self._entries[producer_id]
            entry.batches = [*batches, *entry.batches][-BATCHES_RETAINED:]
