"""What the groups of a node take of its memory, and how much they may take.

Here live the estimate of what members, subscriptions and assignments cost, and the budget that all groups of a node
share; committed offsets have another budget, so that neither takes the other's place. Who is refused for want of memory
is decided in `joins` and `coordinator`. The invariants: the budget's `used_bytes` is the sum of what its groups hold, a
group without members or handed-out ids holds nothing, and a group that was released holds nothing for ever. What is
charged is never less than what CPython takes.

Every member is charged a reserve for its metadata and its assignment, used or not. A member that was let in can thus
always rejoin with, and be assigned, that much, however full the node is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import getsizeof

GROUP_BYTES = 3_000
MEMBER_BYTES = 1_000
HANDED_OUT_ID_BYTES = 700
PROTOCOL_BYTES = 250
TOPIC_BYTES = 100
METADATA_RESERVE_BYTES = 1_000
ASSIGNMENT_RESERVE_BYTES = 1_000
OFFSET_BYTES = 450
TOPIC_OFFSETS_BYTES = 350


class GroupMemoryBudget:
    """Of all groups that one node coordinates."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.used_bytes = 0

    def has_room_for(self, more_bytes: int) -> bool:
        return self.used_bytes + more_bytes <= self._bytes_max


class GroupMemory:
    """The share of one group."""

    __slots__ = ("_budget", "_is_released", "held_bytes")

    def __init__(self, budget: GroupMemoryBudget) -> None:
        self._budget = budget
        self._is_released = False
        self.held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """The group now takes this much."""
        if not self._is_released:
            self._budget.used_bytes += size_bytes - self.held_bytes
            self.held_bytes = size_bytes

    def release(self) -> None:
        """The coordinator has forgotten the group, or the node coordinates it no longer."""
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
    """`names`: its ids, and those of its client."""
    size_bytes = MEMBER_BYTES + sum(getsizeof(name) for name in names if name is not None)
    return size_bytes + protocols_size_bytes(protocols) + assignment_size_bytes(assignment)


def handed_out_id_size_bytes(member_id: str) -> int:
    return HANDED_OUT_ID_BYTES + getsizeof(member_id)


def topics_size_bytes(topics: Iterable[str]) -> int:
    return sum(TOPIC_BYTES + getsizeof(topic) for topic in topics)


def offset_size_bytes(metadata: str) -> int:
    """Of one committed offset, of one partition."""
    return OFFSET_BYTES + getsizeof(metadata) if metadata else OFFSET_BYTES


def topic_offsets_size_bytes(topic: str) -> int:
    """Of a topic for which a group has committed offsets, without these."""
    return TOPIC_OFFSETS_BYTES + getsizeof(topic)


def group_offsets_size_bytes(group_id: str) -> int:
    """Of a group that has committed offsets, without these; it may have no members."""
    return GROUP_BYTES + getsizeof(group_id)
