"""The choice of a record's partition: murmur2 of the key, or a sticky spread without a key.

Pure: no clock, no I/O, `rng` is an argument. Invariant: the same key and partition count give the
same partition as in the Java client (`org.apache.kafka.common.utils.Utils.murmur2`,
`BuiltInPartitioner`).
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
_CACHED_KEYS = 4096

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
    remainder = length & 3
    if remainder:
        result ^= int.from_bytes(data[words * 4 :], "little")
        result = result * _MULTIPLIER & _MASK
    result ^= result >> 13
    result = result * _MULTIPLIER & _MASK
    return result ^ (result >> 15)


@lru_cache(_CACHED_KEYS)
def positive_hash(key: bytes) -> int:
    """The hash with its sign bit cleared, as Java's `Utils.toPositive`.

    The latest keys are cached.
    """
    return murmur2(key) & 0x7FFFFFFF


class UnkeyedPartitioner(Protocol):
    """Spreads records without a key over a topic's partitions."""

    def choose(self, available_partitions: Sequence[int]) -> int:
        """The partition of the next record, among those with a leader (never empty)."""

    def record_sent(self, size_bytes: int) -> None:
        """Note the size of a record that went to the last chosen partition."""


class StickyPartitioner:
    """Stays on one partition for `stick_bytes`, then goes to the next of a shuffled round
    (KIP-794).

    A shuffled round visits each of n partitions once in n switches, where independent draws would
    not. So a few large batches are spread evenly too.
    """

    __slots__ = ("_available_partitions", "_current", "_rng", "_sent_bytes", "_shuffled_round", "_stick_bytes")

    def __init__(self, rng: Random, stick_bytes: int) -> None:
        self._rng = rng
        self._stick_bytes = stick_bytes
        self._available_partitions: Sequence[int] = ()
        self._shuffled_round: list[int] = []
        self._current = -1
        self._sent_bytes = 0

    def choose(self, available_partitions: Sequence[int]) -> int:
        if available_partitions is self._available_partitions and self._sent_bytes < self._stick_bytes:
            return self._current
        if available_partitions is not self._available_partitions:
            self._available_partitions = available_partitions
            self._shuffled_round.clear()
        if not self._shuffled_round:
            self._shuffled_round = list(available_partitions)
            self._rng.shuffle(self._shuffled_round)
            if len(self._shuffled_round) > 1 and self._shuffled_round[-1] == self._current:
                self._shuffled_round.reverse()
        self._current = self._shuffled_round.pop()
        self._sent_bytes = 0
        return self._current

    def record_sent(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes


class RoundRobinPartitioner:
    """One record per partition in rotation, as Java's `RoundRobinPartitioner`."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def choose(self, available_partitions: Sequence[int]) -> int:
        partition = available_partitions[self._next % len(available_partitions)]
        self._next += 1
        return partition

    def record_sent(self, size_bytes: int) -> None:
        """Does nothing: a round robin ignores sizes."""
