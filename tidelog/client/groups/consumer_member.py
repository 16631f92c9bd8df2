"""The state machine of a member of the consumer group protocol (KIP-848): which heartbeat is due, and what a response
means.

Pure: it gets `now_ms` and returns requests; `consumer_membership` sends them. The coordinator assigns.
The member revokes what it has to give up, commits, takes what is free, and acknowledges with the
partitions that it owns then. Invariants: a heartbeat names only what has changed, and everything after a
heartbeat without a response. One heartbeat is in flight. The epoch of a member outside of the group is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
LEAVE_TO_RETURN_EPOCH = -2
"""A static member leaves, and another process with its instance id takes its partitions over."""

_FENCED_ERRORS = frozenset((ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID))
_MOVED_ERRORS = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))

IdPartition = tuple[bytes, int]
"""(topic id, partition)."""


class Outcome(Enum):
    """What a response means for the consumer."""

    MEMBER = "a member: there may be another assignment"
    RETRY = "no change: the next heartbeat is due after a backoff"
    FENCED = "the partitions are lost; the member joins again"
    FATAL = "the group refuses this member"


class TopicSelection(NamedTuple):
    """The topics of a subscription: by name, or by a regular expression that the broker evaluates."""

    names: tuple[str, ...] = ()
    regex: str | None = None


class _ReportedState(NamedTuple):
    """What the coordinator knows of this member."""

    topics: TopicSelection
    acknowledgements: int
    """So many assignments were worked on. It waits to hear the owned partitions after each, also if they are the same:
    another assignment may have come and gone meanwhile.
    """


class ConsumerMember:
    """One member. `backoff_ms(failures)` is the wait after so many failures in a row."""

    def __init__(
        self,
        group_id: str,
        member_id: str,
        *,
        rebalance_timeout_ms: int,
        backoff_ms: Callable[[int], float],
        instance_id: str | None = None,
        rack_id: str | None = None,
        server_assignor: str | None = None,
    ) -> None:
        self.group_id = group_id
        self.member_id = member_id
        self.instance_id = instance_id
        self._rack_id = rack_id
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._server_assignor = server_assignor
        self._backoff_ms = backoff_ms
        self.epoch = JOIN_EPOCH
        self.owned: frozenset[IdPartition] = frozenset()
        """The partitions of the last acknowledgement."""
        self.target: frozenset[IdPartition] | None = None
        """The last assignment of the coordinator that is not acknowledged yet; None when there is none."""
        self._acknowledgements = 0
        self._topics: TopicSelection | None = None
        self._known: _ReportedState | None = None
        self._in_flight: _ReportedState | None = None
        self._interval_ms = 0.0
        self._due_ms = 0.0
        self._failures = 0

    @property
    def is_member(self) -> bool:
        return self.epoch > JOIN_EPOCH

    @property
    def has_sent_join(self) -> bool:
        """The coordinator may know this member, even if no response has come."""
        return self.is_member or self._in_flight is not None or self._failures > 0

    # -- what the consumer wants

    def subscribe(self, topics: TopicSelection, now_ms: float) -> None:
        """Read these topics. The first call joins."""
        if topics != self._topics:
            self._topics = topics
            self._due_ms = now_ms

    def acknowledge(self, owned: Iterable[IdPartition], target: frozenset[IdPartition], now_ms: float) -> None:
        """The consumer owns exactly these partitions, after it has worked on `target`."""
        previous, self.owned = self.owned, frozenset(owned)
        if self.owned != previous or self.owned == target:
            self._acknowledgements += 1
            self._due_ms = now_ms
        if self.target == target == self.owned:
            self.target = None

    def heartbeat_now(self, now_ms: float) -> None:
        """Learn soon what the coordinator says, for example after it has refused a commit."""
        self._due_ms = min(self._due_ms, now_ms)

    def leave(self) -> ConsumerGroupHeartbeatRequest | None:
        """The heartbeat that leaves, None outside of the group. The member is outside from now on."""
        request = None
        if self.has_sent_join:
            epoch = LEAVE_EPOCH if self.instance_id is None else LEAVE_TO_RETURN_EPOCH
            request = self._request(epoch)
        self._reset()
        self._topics = None
        return request

    # -- heartbeats

    def ms_until_heartbeat(self, now_ms: float) -> float | None:
        """0 when a heartbeat is due; None while one is in flight and outside of any subscription."""
        if self._topics is None or self._in_flight is not None:
            return None
        return max(0.0, self._due_ms - now_ms)

    def next_heartbeat(self) -> ConsumerGroupHeartbeatRequest:
        """The heartbeat that is due; `handle_response` or `handle_failure` ends it."""
        assert self._topics is not None
        assert self._in_flight is None
        request = self._request(self.epoch)
        known, topics = self._known, self._topics
        if known is None:
            request.rack_id = self._rack_id
            request.rebalance_timeout_ms = self._rebalance_timeout_ms
            request.server_assignor = self._server_assignor
        if known is None or known.topics != topics:
            request.subscribed_topic_names = list(topics.names)
            # An empty expression ends an earlier one: also that of the last process with this instance id, and one that
            # a heartbeat without a response would have ended. The coordinator keeps both as long as this is null.
            if topics.regex is not None or known is None or known.topics.regex is not None:
                request.subscribed_topic_regex = topics.regex or ""
        if known is None or known.acknowledgements != self._acknowledgements:
            request.topic_partitions = _by_topic(self.owned)
        self._in_flight = _ReportedState(topics, self._acknowledgements)
        return request

    def _request(self, epoch: int) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            group_id=self.group_id, member_id=self.member_id, member_epoch=epoch, instance_id=self.instance_id
        )

    def handle_response(self, response: ConsumerGroupHeartbeatResponse, now_ms: float) -> Outcome:
        """Take on a response."""
        sent, self._in_flight = self._in_flight, None
        assert sent is not None
        code = ErrorCode.of(response.error_code)
        if code is ErrorCode.NONE:
            self._failures = 0
            self._known = sent
            self.epoch = response.member_epoch
            self._interval_ms = response.heartbeat_interval_ms
            if response.assignment is not None:
                target = _partitions(response.assignment.topic_partitions)
                # One that is owned is to be acknowledged after another one, which the consumer may be working on.
                self.target = None if target == self.owned and self.target is None else target
            has_news = sent != (self._topics, self._acknowledgements)
            self._due_ms = now_ms if has_news else now_ms + self._interval_ms
            return Outcome.MEMBER
        if code in _FENCED_ERRORS:
            self.fence(now_ms)
            return Outcome.FENCED
        if code in _MOVED_ERRORS or code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            self._wait(now_ms)
            return Outcome.RETRY
        return Outcome.FATAL

    def handle_failure(self, now_ms: float) -> None:
        """The heartbeat got no response, so it is unknown what of it the coordinator knows."""
        self._in_flight = None
        self._known = None
        self._wait(now_ms)

    def _wait(self, now_ms: float) -> None:
        self._failures += 1
        self._due_ms = now_ms + self._backoff_ms(self._failures)

    def fence(self, now_ms: float) -> None:
        """Outside of the group: own nothing, and join again at once."""
        self._reset()
        self._due_ms = now_ms

    def _reset(self) -> None:
        self.epoch = JOIN_EPOCH
        self.owned = frozenset()
        self.target = self._known = self._in_flight = None
        self._failures = 0


def _by_topic(partitions: Iterable[IdPartition]) -> list[TopicPartitions]:
    topics: dict[bytes, TopicPartitions] = {}
    for topic_id, partition in sorted(partitions):
        topics.setdefault(topic_id, TopicPartitions(topic_id=topic_id)).partitions.append(partition)
    return list(topics.values())


def _partitions(topics: Iterable[TopicPartitions]) -> frozenset[IdPartition]:
    return frozenset((topic.topic_id, partition) for topic in topics for partition in topic.partitions)
