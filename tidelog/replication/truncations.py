"""Truncations of followers' logs: one in each turn of the loop, because each one waits for the device.

A follower that was away for longer than the retention empties all its logs, and after an election many may diverge. If
one turn handled them all, the node would send no heartbeats meanwhile, and the controller would fence it. Invariant: of
each partition at most one truncation waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from tidelog.replication.followed_partition import FollowedPartition
    from tidelog.storage.log.partition_log import PartitionLog


class Truncations:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[FollowedPartition, Callable[[], None]] = {}
        self._is_used = False
        """Whether this turn of the loop has done one."""

    def __contains__(self, followed: object) -> bool:
        return followed in self._waiting

    def do(self, followed: FollowedPartition, truncate: Callable[[], None]) -> None:
        """Call `truncate` now, or in a later turn where this one was used."""
        if self._is_used:
            self._waiting[followed] = truncate
            return
        self._is_used = True
        self._loop.call_soon(self._next)
        truncate()

    def discard(self, followed: FollowedPartition) -> None:
        self._waiting.pop(followed, None)

    def _next(self) -> None:
        self._is_used = False
        if self._waiting:
            followed = next(iter(self._waiting))
            if followed.log.durability.recovery_point > _confirmed_end(followed.log):
                _lower_recovery_points(followed.log, [each.log for each in self._waiting])
            self.do(followed, self._waiting.pop(followed))


def _confirmed_end(log: PartitionLog) -> int:
    return max(log.log_start_offset, log.high_watermark)


def _lower_recovery_points(first: PartitionLog, waiting: Collection[PartitionLog]) -> None:
    """Lower those of all logs in the directory of the first with one checkpoint, below every record that may go.

    A truncation that lowers one writes the checkpoint before, which names all logs of its directory: thousands of such
    truncations would write thousands of checkpoints with thousands of logs each.
    """
    write_checkpoint = first.write_checkpoint
    before = [(log, log.durability.recovery_point) for log in waiting if log.write_checkpoint == write_checkpoint]
    if len(before) == 1:
        return
    for log, recovery_point in before:
        log.durability.recovery_point = min(recovery_point, _confirmed_end(log))
    try:
        write_checkpoint()
    except OSError:  # each truncation writes it again, and reports the error
        for log, recovery_point in before:
            log.durability.recovery_point = recovery_point
