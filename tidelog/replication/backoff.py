"""How long a node waits before it asks another one again: doubling, with jitter. Pure; randomness is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

SHORTAGE_PAUSE_S: Final = 0.25  # until what failed for want of descriptors or memory is tried again


def pause_ms(failures: int, initial_ms: float, max_ms: float, rng: random.Random) -> float:
    """The pause after `failures` failures in a row (from 1): between half and all of `initial_ms` doubled each time."""
    return min(initial_ms * 2.0 ** min(failures - 1, 30), max_ms) * (0.5 + rng.random() / 2)


class Backoff:
    """Pauses that double from `initial_ms` to `max_ms`, each between half and all of itself."""

    __slots__ = ("_failures", "_initial_ms", "_max_ms")

    def __init__(self, initial_ms: int, max_ms: int) -> None:
        self._initial_ms = initial_ms
        self._max_ms = max(initial_ms, max_ms)
        self._failures = 0

    def next_ms(self, rng: random.Random) -> float:
        self._failures += 1
        return pause_ms(self._failures, self._initial_ms, self._max_ms, rng)

    def reset(self) -> None:
        self._failures = 0
