"""How long to wait before trying again: exponential with jitter, as Kafka's `ExponentialBackoff` (KIP-580). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

if TYPE_CHECKING:
    from random import Random


_JITTER = 0.2
_LARGEST_EXPONENT = 30


class Backoff:
    """Waits of about `initial_ms` doubling up to `longest_ms`, each off by at most 20 % so that clients spread out."""

    __slots__ = ("_initial_ms", "_longest_ms", "_rng")

    def __init__(self, initial_ms: float, longest_ms: float, rng: Random) -> None:
        self._initial_ms = min(initial_ms, longest_ms)
        self._longest_ms = longest_ms
        self._rng = rng

    def wait_ms(self, failures: int) -> float:
        """The wait after so many failures in a row (1 is the first)."""
        exponent = min(max(failures - 1, 0), _LARGEST_EXPONENT)
        wait = min(self._initial_ms * (1 << exponent), self._longest_ms)
        return wait * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
