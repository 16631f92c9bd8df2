"""The latest changes of a producer that its remaining batches do not show, so that a truncation can undo them.

A batch of a known producer shows all that it changes. The first batch of a producer, of an epoch or of a transaction,
and a transaction marker replace what was known of the producer. Each of them is kept here with what it replaced.
Invariant: every change at `complete_from` and above is kept.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

Entry = TypeVar("Entry")

CHANGES_MAX: Final = 1_000


class Transitions(Generic[Entry]):
    __slots__ = ("_changes", "complete_from")

    def __init__(self) -> None:
        # The offset of the change, the producer, and its entry before; None if it had none.
        self._changes: deque[tuple[int, int, Entry | None]] = deque()
        self.complete_from = 0

    def clear(self, end_offset: int) -> None:
        """Begin with a state at `end_offset`, of which no earlier changes are known."""
        self._changes.clear()
        self.complete_from = end_offset

    def add(self, offset: int, producer_id: int, before: Entry | None) -> None:
        """`before`: a copy that only this object holds."""
        self._changes.append((offset, producer_id, before))
        if len(self._changes) > CHANGES_MAX:
            self.complete_from = self._changes.popleft()[0] + 1

    def forget_below(self, offset: int) -> None:
        """Replicated changes are undone only by an unclean election; a replay of the log serves that case."""
        changes = self._changes
        while changes and changes[0][0] < offset:
            self.complete_from = changes.popleft()[0] + 1

    def forget_from(self, offset: int) -> None:
        while self._changes and self._changes[-1][0] >= offset:
            self._changes.pop()

    def before(self, offset: int) -> dict[int, Entry | None]:
        """The producers that changed at or above `offset`, each with its entry before."""
        entries = {}
        for changed_at, producer_id, entry in reversed(self._changes):
            if changed_at < offset:
                break
            entries[producer_id] = entry
        return entries
