"""Which damaged partitions are repaired next, and which of them wait. `repairs.py` runs the attempts.

A pure decider: the caller says what time it is. The partition that has been due longest is the next one. Several are
repaired at once, because the copy of a whole log takes hours; only some of these may copy whole logs, so that the
others go on. One that wants to copy a whole log takes no turn until one of these copies ends.
Invariant: never two attempts of one partition at once, each with a lane that no other attempt under way has.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

PAUSE_S_MIN: Final = 0.05
REPAIRED_AT_ONCE_MAX: Final = 4
"""The partitions that are repaired at once, of which each may have a copy in memory."""
WHOLE_COPIES_MAX: Final = 2
"""How many of them may copy another replica's whole log, so that these do not hold up the others."""
_LANES: Final = tuple(f"repair-{number}" for number in range(REPAIRED_AT_ONCE_MAX))


@dataclass(slots=True)
class Attempts:
    """The time of a partition's next repair attempt, and the pause after it."""

    due_s: float
    pause_s: float


class RepairQueue:
    def __init__(self) -> None:
        self.waiting: dict[Partition, Attempts] = {}
        """The damaged partitions, also those under way."""
        self.lanes: dict[Partition, str] = {}
        """A connection for each attempt under way: a fetch without an answer in time closes it, and a whole copy begins
        again.
        """
        self.want_whole_copies: set[Partition] = set()
        """The partitions that wait for the end of one of others: each attempt would fetch and scan all again."""
        self.whole_copies = 0
        self._begun: dict[Partition, Attempts] = {}

    def hurry(self, partition: Partition, now_s: float) -> None:
        """Its next attempt is due now: it is reported, or what it waits for has changed."""
        self.want_whole_copies.discard(partition)
        before = self.waiting.get(partition)
        # One that is due already keeps its turn: otherwise a broker that comes and goes takes it from the last ones.
        is_due = before is not None and before.due_s < now_s and partition not in self.lanes
        self.waiting[partition] = Attempts(before.due_s if before is not None and is_due else now_s, PAUSE_S_MIN)

    def hurry_until(self, partition: Partition, due_s: float) -> bool:
        """Its next attempt is due at `due_s` at the latest, for another reason than a whole copy. Whether that may be
        sooner than before.
        """
        attempts = self.waiting.get(partition)
        if attempts is None:
            return False
        may_be_sooner = attempts.due_s > due_s or partition in self.want_whole_copies
        self.want_whole_copies.discard(partition)
        attempts.due_s = min(attempts.due_s, due_s)
        return may_be_sooner

    def begin_due(self, now_s: float) -> list[Partition]:
        """The partitions whose attempts begin now, the one that is due longest first."""
        free = REPAIRED_AT_ONCE_MAX - len(self.lanes)
        begun = [each for each in nsmallest(free, self._ready(), key=self._due_s) if self._due_s(each) <= now_s]
        for partition in begun:
            self.want_whole_copies.discard(partition)
            self.lanes[partition] = next(each for each in _LANES if each not in self.lanes.values())
            self._begun[partition] = self.waiting[partition]
        return begun

    def next_due_s(self) -> float | None:
        """When the next attempt may begin; None if an attempt under way must end first, or none waits."""
        if len(self.lanes) >= REPAIRED_AT_ONCE_MAX:
            return None
        return min(map(self._due_s, self._ready()), default=None)

    def end(self, partition: Partition) -> None:
        """The attempt is over. One that was hurried meanwhile waits for no copy: another replica may help now."""
        if self.waiting.get(partition) is not self._begun[partition]:
            self.want_whole_copies.discard(partition)
        del self.lanes[partition], self._begun[partition]

    def plan_next(
        self, partition: Partition, now_s: float, *, is_done: bool, has_changed: bool, pause_s_max: float
    ) -> None:
        """Before the end of an attempt: when the next one is due, ever later where nothing changes."""
        attempts = self._begun[partition]
        if self.waiting.get(partition) is not attempts:
            return  # it was reported again meanwhile
        if is_done:
            del self.waiting[partition]
            return
        if has_changed:
            attempts.pause_s = PAUSE_S_MIN
        attempts.due_s = now_s + attempts.pause_s
        attempts.pause_s = min(2 * attempts.pause_s, pause_s_max)

    def begin_whole_copy(self, partition: Partition) -> bool:
        """Whether the partition may copy another replica's whole log now. If not, it waits for the end of a copy."""
        if self.whole_copies >= WHOLE_COPIES_MAX:
            self.want_whole_copies.add(partition)
            return False
        self.whole_copies += 1
        return True

    def end_whole_copy(self) -> None:
        self.whole_copies -= 1

    def _ready(self) -> list[Partition]:
        held = self.want_whole_copies if self.whole_copies >= WHOLE_COPIES_MAX else ()
        return [each for each in self.waiting if each not in self.lanes and each not in held]

    def _due_s(self, partition: Partition) -> float:
        return self.waiting[partition].due_s
