"""Which partition a record goes to: murmur2 of the key as in Java, and an even, sticky spread without a key.

Pure: no clock, no I/O, randomness handed in. Invariant: the same key and partition count give the partition that every
Kafka client of the Java family gives (`org.apache.kafka.common.utils.Utils.murmur2`, `BuiltInPartitioner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import unpack_from
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF
_REMEMBERED_KEYS = 4096

CustomPartitioner = Callable[[str, bytes | None, bytes | None, int], int]
"""A custom partitioner: (topic, key, value, partition count) -> partition."""


def murmur2(data: bytes) -> int:
    """MurmurHash2 of `data` with Kafka's seed, as an unsigned 32-bit number."""
    length = len(data)
    words = length >> 2
    result = _SEED ^ length
    for word in unpack_from(f"<{words}I", data):
        word = word * _MULTIPLIER & _MASK
        word ^= word >> 24
        result = (result * _MULTIPLIER & _MASK) ^ (word * _MULTIPLIER & _MASK)
    rest = length & 3
    if rest:
        result ^= int.from_bytes(data[words * 4 :], "little")
        result = result * _MULTIPLIER & _MASK
    result ^= result >> 13
    result = result * _MULTIPLIER & _MASK
    return result ^ (result >> 15)


@lru_cache(_REMEMBERED_KEYS)
def positive_hash(key: bytes) -> int:
    """The hash with its sign bit cleared, as Java's `Utils.toPositive`; the latest keys are remembered."""
    return murmur2(key) & 0x7FFFFFFF


class Spread(Protocol):
    """How records without a key are spread over a topic's partitions."""

    def choose(self, available: Sequence[int]) -> int:
        """The partition for the next record, among those that have a leader (never empty)."""

    def sent(self, size_bytes: int) -> None:
        """So many bytes went to the partition chosen last."""


class StickySpread:
    """Stay on one partition until it was given `stick_bytes`, then go to the next of a shuffled round (KIP-794).

    A shuffled round instead of independent draws: over n switches each of n partitions is visited once, so that few
    large batches are spread evenly too.
    """

    __slots__ = ("_available", "_current", "_given_bytes", "_rng", "_round", "_stick_bytes")

    def __init__(self, rng: Random, stick_bytes: int) -> None:
        self._rng = rng
        self._stick_bytes = stick_bytes
        self._available: Sequence[int] = ()
        self._round: list[int] = []
        self._current = -1
        self._given_bytes = 0

    def choose(self, available: Sequence[int]) -> int:
        if available is self._available and self._given_bytes < self._stick_bytes:
            return self._current
        if available is not self._available:
            self._available = available
            self._round.clear()
        if not self._round:
            self._round = list(available)
            self._rng.shuffle(self._round)
            if len(self._round) > 1 and self._round[-1] == self._current:
                self._round.reverse()
        self._current = self._round.pop()
        self._given_bytes = 0
        return self._current

    def sent(self, size_bytes: int) -> None:
        self._given_bytes += size_bytes


class RoundRobinSpread:
    """One record per partition in turn, as Java's `RoundRobinPartitioner`."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def choose(self, available: Sequence[int]) -> int:
        chosen = available[self._next % len(available)]
        self._next += 1
        return chosen

    def sent(self, size_bytes: int) -> None:
        """Sizes do not matter to a round robin."""
