"""Values that describe consumer groups: members, assignments, lag.

Plain immutable dataclasses in Kafka's terms, beside those of `model`. Nothing here does network
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.client.model import Node, TopicPartition

STABLE = "Stable"
EMPTY = "Empty"
DEAD = "Dead"
# What Kafka 4.3 names, groups of all types.
GROUP_STATES = (
    "PreparingRebalance", "CompletingRebalance", "Stable", "Dead", "Empty", "Assigning", "Reconciling", "NotReady",
)  # fmt: skip
GROUP_TYPES = ("consumer", "classic", "share", "streams")
DESCRIBED_TYPES = ("consumer", "classic", "")
"""Those that `Admin.describe_groups` describes; an old broker sends no type."""


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group as its coordinator lists it.

    `state` and `type` are empty when an old broker does not send them.
    """

    group_id: str
    protocol_type: str
    state: str = ""
    type: str = ""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group. Consumers also have `topics` and `assignment`.

    `topics` are known while the group is stable. `assignment` may be of the previous generation.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...] = ()
    assignment: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group.

    `protocol` is its assignor, known while it is stable; `coordinator` is the broker that answered.
    """

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]
    coordinator: Node | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition.

    `committed` is None without a committed offset. `log_end_offset` is None without a leader. `lag`
    counts offsets up to the end of the log, None when either is missing. `unread_since_ms` is the
    timestamp of the first unread record, None without an unread record or when it was not
    requested.
    """

    committed: int | None
    log_end_offset: int | None
    unread_since_ms: int | None = None

    @property
    def lag(self) -> int | None:
        if self.committed is None or self.log_end_offset is None:
            return None
        return max(self.log_end_offset - self.committed, 0)
