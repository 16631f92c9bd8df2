"""The choice of a record's partition: murmur2 of the key, or a sticky spread without a key.

Pure: no clock, no I/O, `rng` is an argument. Invariant: the same key and partition count give the
same partition as in the Java client (`org.apache.kafka.common.utils.Utils.murmur2`,
`BuiltInPartitioner`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import unpack_from
from typing import TYPE_CHECKING, Protocol

from tidelog.protocol.errors import counted

if TYPE_CHECKING:
    from random import Random

MURMUR2_SEED = 0x9747B28C
MURMUR2_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF
_CACHED_KEYS = 4096

CustomPartitioner = Callable[[str, bytes | None, bytes | None, int], int]
"""A custom partitioner: (topic, key, value, partition count) -> partition."""


def choose_custom(
    partitioner: CustomPartitioner, topic: str, key: bytes | None, value: bytes | None, count: int
) -> int:
    """The partition that a custom partitioner chooses. Raises ValueError for what is no partition of the topic."""
    chosen = partitioner(topic, key, value, count)
    try:
        partition = operator.index(chosen)
    except TypeError:  # a float, for example
        partition = -1
    if not 0 <= partition < count:
        raise ValueError(f"the partitioner chose {chosen!r} of the {counted(count, 'partition')} of {topic}")
    return partition


def murmur2(data: bytes) -> int:
    """MurmurHash2 of `data` with Kafka's seed, as an unsigned 32-bit number."""
    length = len(data)
    words = length >> 2
    result = MURMUR2_SEED ^ length
    for word in unpack_from(f"<{words}I", data):
        word = word * MURMUR2_MULTIPLIER & _MASK
        word ^= word >> 24
        result = (result * MURMUR2_MULTIPLIER & _MASK) ^ (word * MURMUR2_MULTIPLIER & _MASK)
    remainder = length & 3
    if remainder:
        result ^= int.from_bytes(data[words * 4 :], "little")
        result = result * MURMUR2_MULTIPLIER & _MASK
    result ^= result >> 13
    result = result * MURMUR2_MULTIPLIER & _MASK
    return result ^ (result >> 15)


@lru_cache(_CACHED_KEYS)
def positive_hash(key: bytes) -> int:
    """The hash with its sign bit cleared, as Java's `Utils.toPositive`.

    The latest keys are cached.
    """
    return murmur2(key) & 0x7FFFFFFF


class UnkeyedPartitioner(Protocol):
    """Spreads records without a key over a topic's partitions."""

    def choose_for(self, size_bytes: int, available_partitions: Sequence[int]) -> int:
        """`choose` and `record_sent` in one call."""

    def choose(self, available_partitions: Sequence[int]) -> int:
        """The partition of the next record, among those with a leader (never empty)."""

    def remaining_bytes(self, stick_bytes_min: int = 0) -> int:
        """The bytes after which `choose` leaves the last chosen partition.

        A caller that writes larger batches asks for more with `stick_bytes_min`.
        """

    def record_sent(self, size_bytes: int) -> None:
        """Note the size of a record that went to the last chosen partition."""


class StickyPartitioner:
    """Stays on one partition for `stick_bytes`, then goes to the next of a shuffled round
    (KIP-794).

    A shuffled round visits each of n partitions once in n switches, where independent draws would
    not. So a few large batches are spread evenly too. `loads_of` gives the batches that wait for each
    partition, None for one that is to be avoided. Where loads differ, the next partition is
    drawn instead: each with the weight of the batches by which it is below the largest load, plus
    one (Java's `BuiltInPartitioner`).
    """

    __slots__ = (
        "_available_partitions",
        "_current",
        "_loads_of",
        "_rng",
        "_sent_bytes",
        "_shuffled_round",
        "_stick_bytes",
    )

    def __init__(
        self,
        rng: Random,
        stick_bytes: int,
        loads_of: Callable[[Sequence[int]], Sequence[int | None]] | None = None,
    ) -> None:
        self._loads_of = loads_of
        self._rng = rng
        self._stick_bytes = stick_bytes
        self._available_partitions: Sequence[int] = ()
        self._shuffled_round: list[int] = []
        self._current = -1
        self._sent_bytes = 0

    def choose_for(self, size_bytes: int, available_partitions: Sequence[int]) -> int:
        sent_bytes = self._sent_bytes
        if available_partitions is self._available_partitions and sent_bytes < self._stick_bytes:
            self._sent_bytes = sent_bytes + size_bytes
            return self._current
        partition = self.choose(available_partitions)
        self._sent_bytes += size_bytes
        return partition

    def choose(self, available_partitions: Sequence[int]) -> int:
        if available_partitions is self._available_partitions and self._sent_bytes < self._stick_bytes:
            return self._current
        if available_partitions is not self._available_partitions:
            self._available_partitions = available_partitions
            self._shuffled_round.clear()
        self._sent_bytes = 0
        partition = self._draw(available_partitions)
        if partition is not None:
            self._current = partition
            return partition
        if not self._shuffled_round:
            self._shuffled_round = list(available_partitions)
            self._rng.shuffle(self._shuffled_round)
            if len(self._shuffled_round) > 1 and self._shuffled_round[-1] == self._current:
                self._shuffled_round.reverse()
        self._current = self._shuffled_round.pop()
        return self._current

    def _draw(self, available_partitions: Sequence[int]) -> int | None:
        """A partition by its load; None where all are equal, or all are to be avoided."""
        if self._loads_of is None or len(available_partitions) < 2:
            return None
        loads = self._loads_of(available_partitions)
        if loads.count(loads[0]) == len(loads):
            return None
        largest = max(load for load in loads if load is not None)
        weights = [0 if load is None else largest + 1 - load for load in loads]
        return self._rng.choices(available_partitions, weights)[0]

    def remaining_bytes(self, stick_bytes_min: int = 0) -> int:
        return max(self._stick_bytes, stick_bytes_min) - self._sent_bytes

    def record_sent(self, size_bytes: int) -> None:
        self._sent_bytes += size_bytes


class RoundRobinPartitioner:
    """One record per partition in rotation, as Java's `RoundRobinPartitioner`."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def choose_for(self, size_bytes: int, available_partitions: Sequence[int]) -> int:
        return self.choose(available_partitions)

    def choose(self, available_partitions: Sequence[int]) -> int:
        partition = available_partitions[self._next % len(available_partitions)]
        self._next += 1
        return partition

    def remaining_bytes(self, stick_bytes_min: int = 0) -> int:
        return 0

    def record_sent(self, size_bytes: int) -> None:
        """Does nothing: a round robin ignores sizes."""
