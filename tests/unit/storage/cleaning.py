"""Cleaning a log in one line, and what is in it afterwards."""

from __future__ import annotations

from tests.unit.storage.batches import NOW, records_of
from tidelog.storage.cleaner.keys import PlainKeyTable
from tidelog.storage.log.compaction import Compaction, find_cleanable
from tidelog.storage.log.partition_log import PartitionLog

MEGABYTE = 1024 * 1024


def begin(
    log: PartitionLog,
    now_ms: int = NOW,
    *,
    memory_bytes: int = MEGABYTE,
    load_factor: float = 0.9,
    piece_bytes: int = 300,
) -> Compaction:
    chosen = find_cleanable(log, now_ms)
    return Compaction(log, chosen, lambda: PlainKeyTable(memory_bytes, load_factor), now_ms, piece_bytes=piece_bytes)


def clean(
    log: PartitionLog,
    now_ms: int = NOW,
    *,
    memory_bytes: int = MEGABYTE,
    load_factor: float = 0.9,
    piece_bytes: int = 300,
) -> Compaction:
    """A whole cleaning, from choosing to the last rename."""
    compaction = begin(log, now_ms, memory_bytes=memory_bytes, load_factor=load_factor, piece_bytes=piece_bytes)
    while True:
        compaction.run()
        if not compaction.advance():
            return compaction


def contents(log: PartitionLog) -> list[tuple[int, bytes | None, bytes | None]]:
    """(offset, key, value) of every record."""
    return [(record.offset, record.key, record.value) for record in records_of(log)]
