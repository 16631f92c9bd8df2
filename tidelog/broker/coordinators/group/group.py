"""The state of one classic group in memory: members, parked requests, supported protocols, the
leader.

`rebalance` decides when to rebalance, `joins` which members may join. The state of a join phase
(rejoined members, parked requests) is lost with the node, as in Kafka. Durable state is in the log,
up to `persisted_generation`, which only replay sets. Invariants: a parked join or sync belongs to a
member; the leader is a member; static instances map one to one to members; every change of the
group's size is charged to its `memory`. Source: Kafka's `ClassicGroup` and `ClassicGroupMember`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from struct import Struct, error
from sys import getsizeof, maxsize

from tidelog.broker.coordinators.group.memory import (
    GROUP_BYTES,
    GroupMemory,
    GroupMemoryBudget,
    assignment_size_bytes,
    member_size_bytes,
    pending_id_size_bytes,
    protocols_size_bytes,
    topics_size_bytes,
)
from tidelog.broker.coordinators.group.states import CAN_REBALANCE, GroupEvent, GroupState, next_state
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.group_records import GroupMetadataValue

CONSUMER_PROTOCOL_TYPE = "consumer"
SUBSCRIBED_TOPICS_MAX = 200_000
"""Topics that the members of a group name, equal subscriptions counted once. They are read in one turn of the loop."""
LARGE_GROUP_BYTES = 1024 * 1024
"""Some 340 members with metadata of up to 1 KB, as `memory` counts them."""

_INT16 = Struct(">h")
_INT32 = Struct(">i")


class Member:
    """`protocols` maps the name of a protocol to the member's metadata for it, in the member's
    order of preference.
    """

    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_new",
        "member_id",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
    )

    def __init__(
        self,
        member_id: str,
        *,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocols: dict[str, bytes],
        assignment: bytes = b"",
    ) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.session_timeout_ms = session_timeout_ms
        self.protocols = protocols
        self.assignment = assignment
        self.is_new = False  # waits for its first join to complete

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def size_bytes(self) -> int:
        names = (self.member_id, self.instance_id, self.client_id, self.client_host)
        return member_size_bytes(names, self.protocols, self.assignment)

    def vote(self, candidates: frozenset[str]) -> str:
        """The candidate that the member prefers."""
        return next(name for name in self.protocols if name in candidates)


class Group:
    """`awaiting_join` and `awaiting_sync` map a member to the token of its parked request."""

    def __init__(self, group_id: str, wall_ms: int, memory: GroupMemory | None = None) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.previous_state = GroupState.DEAD
        self.state_since_ms = wall_ms  # -1: unknown, the record is old
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader: str | None = None
        self.subscribed_topics: frozenset[str] | None = None
        self.members: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}
        self.pending_members: dict[str, None] = {}  # ids sent with MEMBER_ID_REQUIRED, without a join yet
        self.pending_sync: dict[str, None] = {}  # members of this generation without a SyncGroup
        self.awaiting_join: dict[str, int] = {}
        self.awaiting_sync: dict[str, int] = {}
        self.new_member_added = False
        self.initial_delay: tuple[int, int] | None = None  # (this delay, the rest of the rebalance timeout), ms
        self.assignment_in_flight: int | None = None  # the generation whose assignment is being stored
        self.writes_in_flight = 0
        self.is_being_deleted = False  # a part of its offsets is; joins and commits have to wait
        self.persisted_generation: int | None = None
        self.is_recorded = False  # the log has a record that restores the group or one of its offsets
        self._supporter_counts: dict[str, int] = {}  # protocol name -> number of members that support it
        self.memory = memory or GroupMemory(GroupMemoryBudget(maxsize))
        self._members_bytes = 0
        self._topics_bytes = 0
        self._in_flight_bytes = 0  # growth by the assignment that is being stored

    # -- state -------------------------------------------------------------------------------------------------------

    def move(self, event: GroupEvent, wall_ms: int) -> None:
        self.previous_state, self.state = self.state, next_state(self.state, event)
        self.state_since_ms = wall_ms

    @property
    def can_rebalance(self) -> bool:
        return self.state in CAN_REBALANCE

    @property
    def in_initial_rebalance(self) -> bool:
        return self.state is GroupState.PREPARING_REBALANCE and self.previous_state is GroupState.EMPTY

    @property
    def all_members_joined(self) -> bool:
        return len(self.awaiting_join) == len(self.members) and not self.pending_members

    @property
    def is_vacant(self) -> bool:
        """Whether the group is empty, without pending member ids, writes in flight and a deletion under way."""
        is_at_rest = not self.writes_in_flight and not self.is_being_deleted
        return self.state is GroupState.EMPTY and not self.pending_members and is_at_rest

    @property
    def is_unused(self) -> bool:
        """Whether the group never had a generation or a record; its removal changes no response."""
        return self.is_vacant and not self.is_recorded and self.generation == 0

    @property
    def rebalance_timeout_ms(self) -> int:
        return max(
            (member.rebalance_timeout_ms for member in self.members.values() if member.rebalance_timeout_ms > 0),
            default=0,
        )

    # -- members -----------------------------------------------------------------------------------------------------

    def add(self, member: Member, protocol_type: str) -> None:
        if not self.members:
            self.protocol_type = protocol_type
        assert member.member_id not in self.members
        assert protocol_type == self.protocol_type
        if member.instance_id is not None:
            assert member.instance_id not in self.static_members
            self.static_members[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id
        self.members[member.member_id] = member
        self._remove_pending_member(member.member_id)
        self._count(member, 1)

    def add_pending_member(self, member_id: str) -> None:
        """Register an id that is sent with MEMBER_ID_REQUIRED."""
        self.pending_members[member_id] = None
        self._members_bytes += pending_id_size_bytes(member_id)
        self._charge()

    def _remove_pending_member(self, member_id: str) -> None:
        if member_id in self.pending_members:
            del self.pending_members[member_id]
            self._members_bytes -= pending_id_size_bytes(member_id)
            self._charge()

    def remove(self, member_id: str) -> tuple[int | None, int | None]:
        """Remove a member or a pending member id; returns the tokens of its parked join and sync
        for an answer.
        """
        member = self.members.pop(member_id, None)
        if member is not None:
            self._count(member, -1)
            if member.instance_id is not None:
                self.static_members.pop(member.instance_id, None)
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        self._remove_pending_member(member_id)
        self.pending_sync.pop(member_id, None)
        return self.awaiting_join.pop(member_id, None), self.awaiting_sync.pop(member_id, None)

    def update(
        self, member: Member, protocols: dict[str, bytes], rebalance_timeout_ms: int, session_timeout_ms: int
    ) -> None:
        self._count(member, -1)
        member.protocols = protocols
        self._count(member, 1)
        member.rebalance_timeout_ms = rebalance_timeout_ms
        member.session_timeout_ms = session_timeout_ms

    def replace_static(self, instance_id: str, new_member_id: str) -> Member:
        """Give the static member a new member id; it keeps its assignment, and its role as leader."""
        old_member_id = self.static_members[instance_id]
        member = self.members.pop(old_member_id)
        self._members_bytes += getsizeof(new_member_id) - getsizeof(old_member_id)
        member.member_id = new_member_id
        member.is_new = False  # as in Kafka: its session does not end while its join waits
        self.members[new_member_id] = member
        self._charge()
        self.static_members[instance_id] = new_member_id
        if self.leader == old_member_id:
            self.leader = new_member_id
        if old_member_id in self.pending_sync:
            del self.pending_sync[old_member_id]
            self.pending_sync[new_member_id] = None
        return member

    def elect_joined_leader(self) -> bool:
        """Make a rejoined member the leader, the present one if possible; False if no member has
        rejoined.
        """
        if self.leader is None:
            return False
        if self.leader not in self.awaiting_join:
            self.leader = next(iter(self.awaiting_join), self.leader)
        return self.leader in self.awaiting_join

    def check_member(self, member_id: str, instance_id: str | None) -> ErrorCode:
        """NONE, UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID when another member id holds the instance
        (KIP-345).

        Deviation: Kafka fences a sender without a member id, too. A consumer of librdkafka drops its id when its
        session times out and sends heartbeats until its program polls. FENCED_INSTANCE_ID ends it for good.
        """
        if instance_id is not None and member_id:
            holder_id = self.static_members.get(instance_id)
            if holder_id is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if holder_id != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    # -- protocols ---------------------------------------------------------------------------------------------------

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a member with these protocols may join.

        An empty group accepts any protocol; otherwise all members must support one of them.
        """
        if not self.members:
            return bool(protocol_type) and any(True for _ in names)
        member_count = len(self.members)
        return protocol_type == self.protocol_type and any(
            self._supporter_counts.get(name) == member_count for name in names
        )

    def select_protocol(self) -> str:
        """The protocol with the most votes among those that all members support; in a tie the first
        voted for.
        """
        candidates = frozenset(name for name, count in self._supporter_counts.items() if count == len(self.members))
        votes: dict[str, int] = {}
        for member in self.members.values():
            name = member.vote(candidates)
            votes[name] = votes.get(name, 0) + 1
        return max(votes, key=votes.__getitem__)

    def start_generation(self, wall_ms: int) -> None:
        """Begin the next generation, with the members that remain after the join phase."""
        self.generation += 1
        self.pending_sync.clear()
        self._end_assignment()
        if self.members:
            self.protocol_name = self.select_protocol()
            self.move(GroupEvent.JOINED, wall_ms)
        else:
            self.protocol_name = None
            self.move(GroupEvent.EMPTIED, wall_ms)
        self._subscribe()

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether a member subscribes to the topic; True for a consumer group with unreadable subscriptions, or with
        too many topics.
        """
        if self.subscribed_topics is None:
            return self.protocol_type == CONSUMER_PROTOCOL_TYPE
        return topic in self.subscribed_topics

    def _count(self, member: Member, by: int) -> None:
        for name in member.protocols:
            count = self._supporter_counts.get(name, 0) + by
            if count:
                self._supporter_counts[name] = count
            else:
                self._supporter_counts.pop(name, None)
        self._members_bytes += by * member.size_bytes
        self._charge()

    def _subscribe(self) -> None:
        self._topics_bytes = 0
        self._charge()
        topics = self._subscriptions()
        size_bytes = topics_size_bytes(topics or ())
        if size_bytes and not self.memory.has_room_for(size_bytes):
            topics, size_bytes = None, 0  # None: every topic counts as subscribed, and keeps its offsets
        self.subscribed_topics = topics
        self._topics_bytes = size_bytes
        self._charge()

    def _subscriptions(self) -> frozenset[str] | None:
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        if self.members and self.protocol_name is None:
            return None
        name = self.protocol_name or ""
        topics: set[str] = set()
        room = SUBSCRIBED_TOPICS_MAX
        for subscription in {member.protocols.get(name, b"") for member in self.members.values()}:
            member_topics = topics_of_subscription(subscription, room)
            if member_topics is None:
                return None
            room -= len(member_topics)
            topics.update(member_topics)
        return frozenset(topics)

    # -- durable state -----------------------------------------------------------------------------------------------

    def restore(self, value: GroupMetadataValue) -> Iterator[Member]:
        """Take over the state of the record: Stable with its members, or Empty. Yields each restored member; the
        group is ready at the end.

        Parked requests were lost with the node that held them.
        """
        assert not self.awaiting_join
        assert not self.awaiting_sync
        self.state = GroupState.STABLE if value.members else GroupState.EMPTY
        self.state_since_ms = value.current_state_timestamp
        self.generation = value.generation
        self.protocol_type = value.protocol_type or None
        self.protocol_name = value.protocol
        self.leader = value.leader
        assert not self.members
        for metadata in value.members:
            if metadata.member_id in self.members or metadata.group_instance_id in self.static_members:
                continue  # no coordinator writes duplicates, but a foreign log must not fail the load
            rebalance_timeout_ms = metadata.rebalance_timeout
            member = Member(
                metadata.member_id,
                instance_id=metadata.group_instance_id,
                client_id=metadata.client_id,
                client_host=metadata.client_host,
                rebalance_timeout_ms=metadata.session_timeout if rebalance_timeout_ms == -1 else rebalance_timeout_ms,
                session_timeout_ms=metadata.session_timeout,
                protocols={value.protocol or "": metadata.subscription},
                assignment=metadata.assignment,
            )
            self.add(member, value.protocol_type)
            yield member
        self._subscribe()

    def adopt_assignment(self, value: GroupMetadataValue) -> None:
        """Take over the committed assignment of this generation."""
        assert value.generation == self.generation
        assignments = {metadata.member_id: metadata.assignment for metadata in value.members}
        self._assign(assignments)
        self._end_assignment()
        self.move(GroupEvent.ASSIGNED, value.current_state_timestamp)

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def is_large(self) -> bool:
        """Whether the response to the leader, with the metadata of all members, may be too large to be made again for
        each request of a few bytes.
        """
        return self.memory.held_bytes > LARGE_GROUP_BYTES

    def growth_by_join(self, instance_id: str | None, candidate: Member) -> int:
        """The growth in bytes if `candidate` joins; an existing member is replaced."""
        present_member = self.members.get(self.static_members.get(instance_id or "", candidate.member_id))
        if present_member is not None:
            return protocols_size_bytes(candidate.protocols) - protocols_size_bytes(present_member.protocols)
        if candidate.member_id in self.pending_members:
            return candidate.size_bytes - pending_id_size_bytes(candidate.member_id)
        return candidate.size_bytes + (self._base_bytes if not self.memory.held_bytes else 0)

    def growth_by_assignment(self, assignments: Mapping[str, bytes]) -> int:
        return sum(
            assignment_size_bytes(assignments.get(member.member_id, b"")) - assignment_size_bytes(member.assignment)
            for member in self.members.values()
        )

    def begin_assignment(self, assignments: Mapping[str, bytes]) -> None:
        """Charge for this generation's assignment, from before its append to the log."""
        self.assignment_in_flight = self.generation
        self._in_flight_bytes = max(self.growth_by_assignment(assignments), 0)
        self._charge()

    def drop_assignment(self) -> None:
        """End this generation without an assignment."""
        self._assign({})
        self._end_assignment()

    def _assign(self, assignments: Mapping[str, bytes]) -> None:
        self._members_bytes += self.growth_by_assignment(assignments)
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")

    def _end_assignment(self) -> None:
        self.assignment_in_flight = None
        self._in_flight_bytes = 0
        self._charge()

    @property
    def _base_bytes(self) -> int:
        return GROUP_BYTES + getsizeof(self.group_id)

    def _charge(self) -> None:
        size_bytes = self._members_bytes + self._topics_bytes + self._in_flight_bytes
        self.memory.hold(size_bytes + self._base_bytes if self.members or self.pending_members else 0)


def topics_of_subscription(metadata: bytes, count_max: int = maxsize) -> list[str] | None:
    """The topics of a consumer protocol subscription of any version (int16 version, int32 count,
    strings ...).

    None if the bytes are something else, or there are more than `count_max`.
    """
    try:
        (version,) = _INT16.unpack_from(metadata)
        (count,) = _INT32.unpack_from(metadata, 2)
        position = 6
        topics: list[str] = []
        if version < 0 or count < 0 or count > min((len(metadata) - position) // 2, count_max):
            return None
        for _ in range(count):
            (size,) = _INT16.unpack_from(metadata, position)
            position += 2
            if size < 0 or position + size > len(metadata):
                return None
            topics.append(metadata[position : position + size].decode())
            position += size
        return topics
    except (error, UnicodeDecodeError):
        return None
