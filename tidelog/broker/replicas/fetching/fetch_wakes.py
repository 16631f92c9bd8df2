"""Notifies waiting fetches that their partition has changed: few at once, many over the next turns of the loop.

A waiting fetch costs its client about 64 bytes, and tens of thousands of them may wait for one partition. An append
must not try all of them before its own answer. Beyond AT_ONCE_MAX they are notified in *rounds*: every turn of the
loop notifies the next ones. A change during a round starts another round after it. Fetches that were tried in vain,
because their `min_bytes` was not there, are *patient*: they have rounds of their own, so that they hold up no consumer
that takes any record, and none is tried before its partition holds the bytes that it needs. Followers' fetches are
never notified here. Invariant: after a change every registered entry that its session still has is notified at least
once, unless its need is not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from tidelog.broker.replicas.fetching.fetch_sessions import UNKNOWN, Need, SessionPartition
from tidelog.broker.scheduling.callbacks import call_all

if TYPE_CHECKING:
    from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
    from tidelog.storage.segments.segment import Segment

# So many fetches are notified at once, those that are already to be tried included. A try takes 3 us or more.
AT_ONCE_MAX = 100
# The fetches of each kind, patient and others, that one turn of the loop notifies beyond them; and the patient ones
# whose need it compares.
NOTIFIED_PER_TURN = 50
COMPARED_PER_TURN = 1000

Changed = Callable[[], None]


def _no_segment() -> None:
    pass


class WaitingFetches:
    """The entries of one partition that wait for its changes: `fetches`, and those `patient`, with their needs."""

    __slots__ = ("_active_segment", "fetches", "least_need", "patient")

    def __init__(self, active_segment: Callable[[], Segment | None]) -> None:
        self._active_segment = active_segment
        self.fetches: dict[SessionPartition, None] = {}
        self.patient: dict[SessionPartition, Need] = {}
        self.least_need: Need | None = None
        """The least of those patient that no round has yet to look at; None if there are none."""

    def watch(self, entry: SessionPartition) -> None:
        self.fetches[entry] = None

    def mark_idle(self) -> None:
        """Sessions of which no fetch waits take the change at once. Their next fetch reads and watches what they have
        marked, so further changes need not look at them.
        """
        for entry in [each for each in self.fetches if not each.session.waiters]:
            entry.changed()
            del self.fetches[entry]
            entry.watched = None

    def unwatch(self, entry: SessionPartition) -> None:
        if self.fetches.pop(entry, entry) is entry:
            self.patient.pop(entry, None)

    def tried_in_vain(self, entry: SessionPartition, need: Need) -> None:
        if self.fetches.pop(entry, entry) is None or entry in self.patient:
            self.patient[entry] = need
            self.note(need)

    def note(self, need: Need) -> None:
        least = self.least_need
        if least is None:
            self.least_need = need
        elif least.segment is not need.segment:
            self.least_need = UNKNOWN
        elif need.size_bytes < least.size_bytes:
            self.least_need = need

    def all_try_again(self) -> None:
        """The partition has changed in another way than by an append."""
        self.fetches.update(dict.fromkeys(self.patient))
        self.patient.clear()
        self.least_need = None

    def is_reached(self, need: Need) -> bool:
        segment = self._active_segment()
        return segment is None or need.segment is not segment or segment.size_bytes >= need.size_bytes

    def leave(self) -> None:
        """The partition is gone. Its log must not wait for the garbage collector."""
        self._active_segment = _no_segment


def _is_watched(entry: SessionPartition) -> bool:
    """Whether its session still has it: it may have been closed or forgotten since its round began."""
    return entry.session.partitions.get(entry.key) is entry


class _Rounds:
    """The rounds under way over one kind of entries; partitions take turns."""

    __slots__ = ("_again", "_under_way")

    def __init__(self) -> None:
        self._under_way: dict[WaitingFetches, Iterator[SessionPartition]] = {}
        self._again: set[WaitingFetches] = set()

    def __contains__(self, waiting: WaitingFetches) -> bool:
        return waiting in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, waiting: WaitingFetches, entries: Iterable[SessionPartition]) -> None:
        self._under_way[waiting] = iter(entries)

    def repeat(self, waiting: WaitingFetches) -> None:
        """Begin another round after the one under way."""
        self._again.add(waiting)

    def next_changed(self) -> list[Changed]:
        """The callbacks of the next entries. Each call begins with another partition."""
        notified: list[Changed] = []
        left = self.looked_at_max
        while left > 0 and self._under_way and len(notified) < NOTIFIED_PER_TURN:
            waiting = next(iter(self._under_way))
            rest = self._under_way.pop(waiting)
            count = min(left, NOTIFIED_PER_TURN)
            entries = list(islice(rest, count))
            notified += self.due(waiting, [each for each in entries if _is_watched(each)])
            left -= max(len(entries), 1)
            if len(entries) == count:
                self._under_way[waiting] = rest
            elif waiting in self._again:
                self._again.discard(waiting)
                if self.is_needed(waiting):
                    self.begin(waiting, self.entries(waiting))
        return notified

    looked_at_max = NOTIFIED_PER_TURN

    def entries(self, waiting: WaitingFetches) -> list[SessionPartition]:
        """Those to notify."""
        waiting.mark_idle()
        return list(waiting.fetches)

    def due(self, waiting: WaitingFetches, entries: Iterable[SessionPartition]) -> list[Changed]:
        """The callbacks of those of `entries` that are to be tried."""
        return [each.changed for each in entries]

    def is_needed(self, waiting: WaitingFetches) -> bool:
        return bool(waiting.fetches)


class _PatientRounds(_Rounds):
    """Those over patient entries. A round begins when the least need is reached, and notifies where the need is."""

    __slots__ = ()
    looked_at_max = COMPARED_PER_TURN

    def entries(self, waiting: WaitingFetches) -> list[SessionPartition]:
        waiting.least_need = None
        return list(waiting.patient)

    def due(self, waiting: WaitingFetches, entries: Iterable[SessionPartition]) -> list[Changed]:
        reached = []
        for entry in entries:
            need = waiting.patient.get(entry, UNKNOWN)
            if waiting.is_reached(need):
                reached.append(entry.changed)
            else:
                waiting.note(need)
        return reached

    def is_needed(self, waiting: WaitingFetches) -> bool:
        return waiting.least_need is not None and waiting.is_reached(waiting.least_need)


class FetchWakes:
    """The rounds of one node."""

    def __init__(self, call_soon: Callable[[Changed], object], callbacks: DeferredCallbacks) -> None:
        self._call_soon = call_soon
        self._callbacks = callbacks
        self._first = _Rounds()
        self._patient = _PatientRounds()
        self._is_armed = False

    def appended(self, waiting: WaitingFetches) -> None:
        """Readers can read more of a partition. Its fetches are tried soon, or their sessions note that it has news."""
        self._changed(waiting, self._first)
        if waiting.patient and (waiting in self._patient or self._patient.is_needed(waiting)):
            self._changed(waiting, self._patient)

    def changed(self, waiting: WaitingFetches) -> None:
        """Anything else has changed: the leader, the log start, or whether the partition is here."""
        waiting.all_try_again()
        self._changed(waiting, self._first)

    def _changed(self, waiting: WaitingFetches, rounds: _Rounds) -> None:
        if waiting in rounds:
            rounds.repeat(waiting)
            return
        entries = rounds.entries(waiting)
        if len(entries) + len(self._callbacks.waiting) <= AT_ONCE_MAX:
            call_all(rounds.due(waiting, entries))
        elif entries:
            rounds.begin(waiting, entries)
            if not self._is_armed:
                self._is_armed = True
                self._call_soon(self._turn)

    def _turn(self) -> None:
        callbacks = self._callbacks
        callbacks.collecting = True
        try:
            for rounds in (self._first, self._patient):
                call_all(rounds.next_changed())
        finally:
            callbacks.collecting = False
            if callbacks.waiting:
                callbacks.run()
            self._is_armed = bool(self._first or self._patient)
            if self._is_armed:
                self._call_soon(self._turn)
