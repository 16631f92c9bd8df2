"""Tells after a start since when producers are idle, because no file has the times at which they wrote.

Invariant: no producer counts as idle from a time before its last write.
"""

from __future__ import annotations

from tidelog.storage.files.disk import Disk
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.segments import Segments


def note_idle_producers(producers: ProducerState, segments: Segments, disk: Disk, now_ms: int) -> None:
    """A producer has not written since the last change of the file that has its last batch. Raises OSError.

    Where that batch is deleted, the first file counts, which was changed later.
    """
    changed_ms: dict[int, int] = {}
    for entry in producers.entries.values():
        index = max(0, segments.floor_index(entry.last_offset))
        if index not in changed_ms:
            try:
                changed_ms[index] = min(disk.modified_ms(segments[index].path), now_ms)
            except FileNotFoundError:
                changed_ms[index] = now_ms
        entry.note_idle(changed_ms[index])
