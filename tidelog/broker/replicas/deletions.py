"""DeleteRecords requests that wait until every live replica of a partition has deleted the records too.

Kafka's DelayedDeleteRecords. A partition's low watermark moves when a follower's fetch reports a later log start
offset, when a broker dies, and when the replicas change; the code that handles these events calls `look`. Invariant:
each callback is called exactly once, unless it was forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

# Partitions of all requests. One request may name tens of thousands, and a follower may make no progress.
WAITING_MAX = 100_000

Deleted = Callable[[int, ErrorCode], None]
"""Receives the low watermark and NONE, or -1 and the error."""


class Deletions:
    def __init__(self) -> None:
        self._waiting: dict[Partition, dict[Deleted, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait."""
        return self._count >= WAITING_MAX

    def wait(self, partition: Partition, required_offset: int, callback: Deleted) -> None:
        """Call back when the partition's low watermark reaches `required_offset`, or when `give_up` ends the wait."""
        self._waiting.setdefault(partition, {})[callback] = required_offset
        self._count += 1

    def forget(self, partition: Partition, callback: Deleted) -> None:
        waiting = self._waiting.get(partition)
        if waiting is None or waiting.pop(callback, None) is None:
            return
        self._count -= 1
        if not waiting:
            del self._waiting[partition]

    def look(self, partition: Partition) -> None:
        """The low watermark may have moved."""
        waiting = self._waiting.get(partition)
        if waiting is None:
            return
        low_watermark = partition.low_watermark
        done = [callback for callback, required_offset in waiting.items() if low_watermark >= required_offset]
        for callback in done:
            self.forget(partition, callback)
        call_all(done, low_watermark, ErrorCode.NONE)

    def look_at_all(self) -> None:
        """Brokers have joined or left."""
        for partition in list(self._waiting):
            self.look(partition)

    def give_up(self, partition: Partition, code: ErrorCode) -> None:
        """This replica no longer leads, or its log cannot be used."""
        callbacks = self._waiting.pop(partition, {})
        self._count -= len(callbacks)
        call_all(callbacks, -1, code)
