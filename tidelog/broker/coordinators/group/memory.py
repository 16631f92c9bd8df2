"""The memory of a node's groups: an estimate of its size, and a budget that bounds it.

All groups of a node share one budget. Committed offsets have a budget of their own, so that
neither kind starves the other. `joins` and `coordinator` refuse requests that exceed a budget.
Invariants: the budget's `used_bytes` is the sum of `held_bytes` of its groups; a group without
members or pending member ids holds nothing; a released group holds nothing for ever; the charge
is at least the memory that CPython uses.

Every member is charged a minimum for its metadata and for its assignment. A member of a full node
can therefore always rejoin with metadata of that size, and get an assignment of that size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import getsizeof

GROUP_BYTES = 3_000
MEMBER_BYTES = 1_000
PENDING_ID_BYTES = 700
PROTOCOL_BYTES = 250
TOPIC_BYTES = 100
METADATA_RESERVE_BYTES = 1_000
ASSIGNMENT_RESERVE_BYTES = 1_000
OFFSET_BYTES = 450
TOPIC_OFFSETS_BYTES = 350
PENDING_OFFSET_BYTES = 450  # beyond that of the offset itself


class GroupMemoryBudget:
    """The budget of all groups that one node coordinates."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.used_bytes = 0

    def has_room_for(self, more_bytes: int) -> bool:
        return self.used_bytes + more_bytes <= self._bytes_max

    @property
    def is_nearly_full(self) -> bool:
        return not self.has_room_for(self._bytes_max // 8)


class GroupMemory:
    """The share of one group."""

    __slots__ = ("_budget", "_is_released", "held_bytes")

    def __init__(self, budget: GroupMemoryBudget) -> None:
        self._budget = budget
        self._is_released = False
        self.held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Charge the budget `size_bytes` in place of the present charge."""
        if not self._is_released:
            self._budget.used_bytes += size_bytes - self.held_bytes
            self.held_bytes = size_bytes

    def release(self) -> None:
        """End the charge: the group is deleted, or another node coordinates it."""
        self.hold(0)
        self._is_released = True

    def has_room_for(self, more_bytes: int) -> bool:
        return self._budget.has_room_for(more_bytes)


def protocols_size_bytes(protocols: Mapping[str, bytes]) -> int:
    size_bytes = sum(getsizeof(name) + len(metadata) for name, metadata in protocols.items())
    return max(size_bytes + len(protocols) * PROTOCOL_BYTES, METADATA_RESERVE_BYTES)


def assignment_size_bytes(assignment: bytes) -> int:
    return max(len(assignment), ASSIGNMENT_RESERVE_BYTES)


def member_size_bytes(names: Iterable[str | None], protocols: Mapping[str, bytes], assignment: bytes) -> int:
    """`names`: the member's ids, its client's id and host."""
    size_bytes = MEMBER_BYTES + sum(getsizeof(name) for name in names if name is not None)
    return size_bytes + protocols_size_bytes(protocols) + assignment_size_bytes(assignment)


def pending_id_size_bytes(member_id: str) -> int:
    return PENDING_ID_BYTES + getsizeof(member_id)


def topics_size_bytes(topics: Iterable[str]) -> int:
    return sum(TOPIC_BYTES + getsizeof(topic) for topic in topics)


def offset_size_bytes(metadata: str) -> int:
    """The size of one committed offset."""
    return OFFSET_BYTES + getsizeof(metadata) if metadata else OFFSET_BYTES


def pending_offset_size_bytes(metadata: str) -> int:
    """The size of one offset of an open transaction."""
    return offset_size_bytes(metadata) + PENDING_OFFSET_BYTES


def topic_offsets_size_bytes(topic: str) -> int:
    """The size of a topic's entry in a group's offsets, without the offsets."""
    return TOPIC_OFFSETS_BYTES + getsizeof(topic)


def group_offsets_size_bytes(group_id: str) -> int:
    """The size of a group's entry in the offset store, without the offsets; the group may have no
    members.
    """
    return GROUP_BYTES + getsizeof(group_id)
