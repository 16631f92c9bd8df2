"""Pauses before retries: they double, with jitter. Pure; randomness is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

SHORTAGE_PAUSE_S: Final = 0.25  # before a retry after a lack of descriptors or memory


def pause_ms(failures: int, initial_ms: float, max_ms: float, rng: random.Random) -> float:
    """The pause after `failures` failures in a row (1 or more): `initial_ms`, doubled for each further failure, at most
    `max_ms`, times a random factor from 0.5 to 1.
    """
    return min(initial_ms * 2.0 ** min(failures - 1, 30), max_ms) * (0.5 + rng.random() / 2)


class Backoff:
    """Pauses that double from `initial_ms` to `max_ms`, each times a random factor from 0.5 to 1."""

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
