"""A consumer's side of the consumer group protocol (KIP-848): from the assignment it has to the one it should have.

A step runs inside `poll`, as in `rebalance`. Invariants: before partitions are given up, their positions
are committed and the listener has returned; only then does the coordinator hear of it, so that no other
member has them earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidelog.client.consuming.rebalance import Rebalancer
from tidelog.client.groups.consumer_member import IdPartition, TopicSelection
from tidelog.client.groups.consumer_membership import ConsumerMembership
from tidelog.client.groups.coordinator import GroupIdentity
from tidelog.client.groups.leave_limit import LeaveLimit
from tidelog.client.groups.membership import GroupMembership
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError


class Reconciler(Rebalancer):
    """Runs the reconciliations and the commits of one consumer."""

    def _new_membership(self, on_update: Callable[[], None]) -> GroupMembership:
        self._consumer_membership = ConsumerMembership(self._cluster, self._config, self.coordinator, on_update)
        self._subscribed_topics: TopicSelection | None = None
        self._waits_for_metadata = False
        """An assigned topic has an id that the metadata does not have yet."""
        self._owned_since: dict[TopicPartition, int] = {}
        """The member's epoch in which each assigned partition came."""
        self._is_losing = False
        """The listener is being called for lost partitions."""
        self.coordinator.fetching_identity = lambda: self._identity
        self.coordinator.latest_identity = self._latest_identity
        self.coordinator.on_member_error = self._consumer_membership.handle_group_error
        return self._consumer_membership

    @property
    def _identity(self) -> GroupIdentity:
        return GroupIdentity() if self._is_losing else super()._identity

    async def _lose_all(self) -> None:
        self._is_losing = True  # the member has joined again: a commit of what it has lost would be accepted
        try:
            await super()._lose_all()
        finally:
            self._is_losing = False

    def _is_step_due(self) -> bool:
        membership = self._consumer_membership
        return (
            membership.needs_join
            or membership.is_lost
            or membership.fatal_error is not None
            or self._listener_problem is not None
            or self._topics() != self._subscribed_topics
            or (membership.target is not None and (not self._waits_for_metadata or membership.metadata_changed))
        )

    def _topics(self) -> TopicSelection:
        pattern = self._subscription.pattern
        if pattern is not None:
            assert isinstance(pattern, str)
            return TopicSelection(regex=pattern)
        return TopicSelection(tuple(sorted(self._subscription.topics)))

    async def _step_group(self) -> None:
        membership = self._consumer_membership
        await self._raise_fatal_error()
        if membership.is_lost:
            await self._lose_all()
        topics = self._topics()
        if membership.needs_join or topics != self._subscribed_topics:
            self._subscribed_topics = topics
            membership.subscribe(topics)
        target = membership.target
        if target is not None:
            await self._reconcile(target)
        self._raise_listener_problem()

    async def _reconcile(self, target: frozenset[IdPartition]) -> None:
        membership = self._consumer_membership
        membership.metadata_changed = False
        partitions = self._resolve(target)
        self._waits_for_metadata = len(partitions) < len(target)
        if self._waits_for_metadata:
            self._cluster.request_refresh()
        assigned = list(self._subscription.assigned)
        kept = {partition: None for partition in assigned if partition in partitions}
        if len(kept) < len(assigned):
            if self._config.auto_commit:
                await self._commit_in_step()
            await self._notify("revoked", [partition for partition in assigned if partition not in partitions])
            self._set_assigned(kept)
        if not membership.may_own_partitions():
            return  # lost meanwhile: the next step gives up the rest
        self._set_assigned(partitions)
        epoch = membership.identity.generation
        self._owned_since = {
            partition: self._owned_since.get(partition, epoch) if partition in kept else epoch
            for partition in partitions
        }
        if self._subscription.pattern is not None:
            self._subscription.set_topics({partition.topic for partition in partitions})
        added = [partition for partition in partitions if partition not in kept]
        if added or not self._waits_for_metadata:
            await self._notify("assigned", added)
        if membership.may_own_partitions():
            membership.acknowledge(list(partitions.values()), target)

    def _resolve(self, target: Iterable[IdPartition]) -> dict[TopicPartition, IdPartition]:
        """The partitions of the target whose topic the metadata knows."""
        names = {topic.topic_id: name for name, topic in self._cluster.metadata.topics.items()}
        return {
            TopicPartition(names[topic_id], partition): (topic_id, partition)
            for topic_id, partition in sorted(target)
            if topic_id in names
        }

    def _latest_identity(self, identity: GroupIdentity, partitions: Iterable[TopicPartition]) -> GroupIdentity:
        """The identity for another attempt of a commit: the member's epoch may have moved meanwhile.

        Raises KafkaError(ILLEGAL_GENERATION) when the partitions were given up meanwhile, also if they have come back,
        because the commit could overwrite that of their next owner.
        """
        latest = self._identity
        if latest.member_id != identity.member_id or latest.generation <= identity.generation:
            return identity
        assigned = self._subscription.assigned
        if not all(each in assigned and self._owned_since[each] <= identity.generation for each in partitions):
            raise KafkaError(ErrorCode.ILLEGAL_GENERATION, "partitions were revoked before they were committed")
        return latest

    async def leave(self, reason: str, limit: LeaveLimit) -> None:
        await super().leave(reason, limit)
        self._subscribed_topics = None
