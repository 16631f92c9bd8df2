"""The values that tell of consumer groups: who is in one, what it reads, how far it is behind.

Plain immutable dataclasses in Kafka's words, beside those of `model`; nothing here talks to anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.client.model import Node, TopicPartition

STABLE = "Stable"
EMPTY = "Empty"
DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group as its coordinator lists it. `state` and `type` are empty from brokers too old to say."""

    group_id: str
    protocol_type: str
    state: str = ""
    type: str = ""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group; of consumers also what it reads. `topics` are known while the group is stable,
    `assignment` may be of the generation before.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...] = ()
    assignment: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group: `protocol` is its assignor, known while it is stable; `coordinator` the broker that answered."""

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]
    coordinator: Node | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a group is behind in one partition. `committed` is None where it has committed nothing there,
    `log_end_offset` where the partition has no leader to say it.

    `lag` counts offsets up to the end of the log, None where either is missing. `unread_since_ms` is when the first
    record it has not read was written, None where there is none or nobody asked.
    """

    committed: int | None
    log_end_offset: int | None
    unread_since_ms: int | None = None

    @property
    def lag(self) -> int | None:
        if self.committed is None or self.log_end_offset is None:
            return None
        return max(self.log_end_offset - self.committed, 0)
