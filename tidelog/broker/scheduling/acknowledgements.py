"""Calls the callbacks of many requests over several turns of the loop.

Tens of thousands of produces may wait for one offset, as for that of a follower that stands still, and each answer
takes 7 us. Invariant: each callback is called exactly once, and those of one call in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from tidelog.broker.scheduling.callbacks import call_all
from tidelog.broker.scheduling.purgatory import Settled

# So many of one call are called at once, and so many of all others in each turn of the loop.
CALLED_AT_ONCE_MAX = 200
# Partitions of the produces that wait for several. Each takes about 800 bytes. Beyond it the next request of the
# connection of such a produce waits, too.
WAITING_MAX = 250_000


class Acknowledgements:
    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._later: deque[tuple[Iterator[Settled], Exception | None]] = deque()
        self.waiting_count = 0
        """The partitions of the produces that wait for several."""

    def has_room(self, count: int) -> bool:
        """Whether a produce that waits for so many partitions may be one of many of its connection."""
        return self.waiting_count + count <= WAITING_MAX

    def settle(self, callbacks: list[Settled], error: Exception | None) -> None:
        """Call them with `error`: the first ones at once, the others in the next turns."""
        call_all(callbacks[:CALLED_AT_ONCE_MAX], error)
        if len(callbacks) > CALLED_AT_ONCE_MAX:
            if not self._later:
                self._call_soon(self._turn)
            self._later.append((iter(callbacks[CALLED_AT_ONCE_MAX:]), error))

    def _turn(self) -> None:
        """Call the next ones of one call. Those of several take turns."""
        callbacks, error = self._later.popleft()
        called = list(islice(callbacks, CALLED_AT_ONCE_MAX))
        if len(called) == CALLED_AT_ONCE_MAX:
            self._later.append((callbacks, error))
        if self._later:
            self._call_soon(self._turn)
        call_all(called, error)
