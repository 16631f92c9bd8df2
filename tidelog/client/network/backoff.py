"""The wait before a retry: exponential with jitter, as Kafka's `ExponentialBackoff` (KIP-580).

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

_JITTER = 0.2
_MAX_EXPONENT = 30


class ExponentialBackoff:
    """Waits from `initial_ms`, doubled up to `max_ms`, each with up to 20 % jitter so that clients
    spread out.
    """

    __slots__ = ("_initial_ms", "_max_ms", "_rng")

    def __init__(self, initial_ms: float, max_ms: float, rng: Random) -> None:
        self._initial_ms = min(initial_ms, max_ms)
        self._max_ms = max_ms
        self._rng = rng

    def wait_ms(self, failures: int) -> float:
        """The wait after this number of consecutive failures (1 is the first)."""
        exponent = min(max(failures - 1, 0), _MAX_EXPONENT)
        delay_ms = min(self._initial_ms * (1 << exponent), self._max_ms)
        return delay_ms * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
