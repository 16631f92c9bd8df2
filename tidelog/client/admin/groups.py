"""What an administrator asks of consumer groups: which there are, who is in them, what they have read; and changes it.

Each group's coordinator answers for it; lists come from all brokers. Invariant: one answer per group or partition that
was asked about, None for success where something was to be done, since what is refused for one says nothing of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tidelog.client.admin.base import AdminBase, check, refusal
from tidelog.client.assignment.protocol import PROTOCOL_TYPE, by_topic, decode_assignment, decode_subscription
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.model import DEAD, GroupDescription, GroupListing, GroupMember, PartitionLag
from tidelog.client.model import LATEST_TIMESTAMP, Node, OffsetAndMetadata, TopicPartition, as_names, as_partition
from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.client.network.offsets import list_offsets
from tidelog.client.network.record_times import first_record_times
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from tidelog.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
)

Response = TypeVar("Response", bound=Message)
Row = TypeVar("Row")

_STATES_FROM, _TYPES_FROM = 4, 5
_FINDS_AT_ONCE = 50


class GroupAdmin(AdminBase):
    """The part of `Admin` that is about consumer groups."""

    # -- groups

    async def list_groups(self, *, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[GroupListing]:
        """All groups of the cluster, or those in one of the states and of one of the types; sorted by id.

        Raises KafkaError when a broker cannot answer, UNSUPPORTED_VERSION where it is too old to choose.
        """
        request = ListGroupsRequest(states_filter=as_names(states), types_filter=as_names(types))
        found: dict[int, ListGroupsResponse] = {}

        async def ask(cluster: Cluster, node_id: int) -> None:
            connection = await cluster.connection(node_id)
            for wanted, since in ((request.states_filter, _STATES_FROM), (request.types_filter, _TYPES_FROM)):
                if wanted and not connection.supports(ListGroupsRequest, since):
                    raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"broker {node_id} cannot choose among groups")
            response = await connection.call(request, ListGroupsResponse, self._config.request_timeout_ms)
            check(response.error_code, None, f"groups of broker {node_id}")
            found[node_id] = response

        async def attempt() -> None:
            cluster = await self._reach()
            brokers = [each.node_id for each in (await cluster.fetch_metadata([])).brokers]
            if any(each not in cluster.metadata.nodes for each in brokers):
                await cluster.wait_for_metadata(self._config.request_timeout_ms)
            await _all(ask(cluster, each) for each in brokers if each not in found)

        await self._until(attempt)
        listed = {
            each.group_id: GroupListing(each.group_id, each.protocol_type, each.group_state, each.group_type)
            for response in found.values()
            for each in response.groups
        }
        return [listed[group_id] for group_id in sorted(listed)]

    async def describe_groups(self, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        """State, protocol and members by group id. Raises the KafkaError of the first that cannot be described,
        GROUP_ID_NOT_FOUND for one that does not exist.
        """
        answers = await self._ask_coordinators(
            as_names(group_ids),
            lambda groups: DescribeGroupsRequest(groups=groups),
            DescribeGroupsResponse,
            lambda response: {each.group_id: (each.error_code, each) for each in response.groups},
        )
        described: dict[str, GroupDescription] = {}
        for group_id, (node, code, answer) in answers.items():
            if not code and answer.group_state == DEAD:
                code = ErrorCode.GROUP_ID_NOT_FOUND  # what brokers before 4.0 mean by it
            check(code, answer.error_message, f"group {group_id!r}")
            described[group_id] = _described(answer, node)
        return described

    async def delete_groups(self, group_ids: Iterable[str]) -> dict[str, KafkaError | None]:
        """Delete groups without members, with all that they have committed. None: deleted."""
        answers = await self._ask_coordinators(
            as_names(group_ids),
            lambda groups: DeleteGroupsRequest(groups_names=groups),
            DeleteGroupsResponse,
            lambda response: {each.group_id: (each.error_code, None) for each in response.results},
        )
        return {group_id: refusal(code, None, f"group {group_id!r}") for group_id, (_, code, _) in answers.items()}

    async def remove_group_members(
        self, group_id: str, instance_ids: Iterable[str] | None = None, *, reason: str = "removed by an administrator"
    ) -> dict[str, KafkaError | None]:
        """Take static members out of a group by their instance ids, without these all members; None: removed.

        A dynamic member is told by its member id, and joins again if it is alive. A static one does not, while its
        process still runs it is refused with UNKNOWN_MEMBER_ID.
        """
        if instance_ids is None:
            members = (await self.describe_groups([group_id]))[group_id].members
            identities = [MemberIdentity(member_id=each.member_id) for each in members]
            for identity, member in zip(identities, members):
                identity.group_instance_id = member.instance_id
        else:
            identities = [MemberIdentity(group_instance_id=each) for each in as_names(instance_ids)]
        if not identities:
            return {}
        for identity in identities:
            identity.reason = reason
        coordinator = Coordinator(await self._reach(), group_id)
        request = LeaveGroupRequest(group_id=group_id, members=identities)

        async def attempt() -> LeaveGroupResponse:
            response = await coordinator.call(request, LeaveGroupResponse)
            coordinator.handle_error(ErrorCode.of(response.error_code))
            check(response.error_code, None, f"group {group_id!r}")
            return response

        return {
            each.group_instance_id or each.member_id: refusal(
                each.error_code, None, f"member {each.group_instance_id or each.member_id}"
            )
            for each in (await self._until(attempt)).members
        }

    async def _ask_coordinators(
        self,
        group_ids: list[str],
        request_for: Callable[[list[str]], Message],
        response_class: type[Response],
        rows: Callable[[Response], Mapping[str, tuple[int, Row]]],
    ) -> dict[str, tuple[Node | None, int, Row]]:
        """For each group who answered, its error code and its row; one request to each coordinator.

        What may pass, such as a coordinator that moved, is asked again.
        """
        answers: dict[str, tuple[Node | None, int, Row]] = {}
        wanted = list(dict.fromkeys(group_ids))

        async def ask(cluster: Cluster, node_id: int, groups: list[str]) -> None:
            response = await cluster.call(node_id, request_for(groups), response_class, purpose=COORDINATOR)
            problem: KafkaError | None = None
            for group_id, (code, row) in rows(response).items():
                error = refusal(code, None, f"group {group_id!r}")
                if error is not None and error.retriable:
                    problem = error
                else:
                    answers[group_id] = (cluster.metadata.nodes.get(node_id), code, row)
            if problem is not None:
                raise problem

        async def attempt() -> None:
            cluster = await self._reach()
            missing = [group_id for group_id in wanted if group_id not in answers]
            by_node: dict[int, list[str]] = {}
            for start in range(0, len(missing), _FINDS_AT_ONCE):
                some = missing[start : start + _FINDS_AT_ONCE]
                nodes = await asyncio.gather(*(cluster.find_coordinator(group_id) for group_id in some))
                for group_id, node_id in zip(some, nodes):
                    by_node.setdefault(node_id, []).append(group_id)
            await _all(ask(cluster, node_id, groups) for node_id, groups in by_node.items())

        await self._until(attempt)
        return {group_id: answers[group_id] for group_id in wanted}

    # -- offsets

    async def list_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, *, require_stable: bool = False
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a group has committed, everywhere or for these partitions; those without an offset are left out."""
        coordinator = Coordinator(await self._reach(), group_id)
        wanted = None if partitions is None else [as_partition(each) for each in partitions]
        timeout_ms = self._config.default_api_timeout_ms
        return await coordinator.committed(wanted, timeout_ms, require_stable=require_stable)

    async def list_consumer_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """`list_group_offsets` by the name that Java and other clients know it by."""
        return await self.list_group_offsets(group_id, partitions)

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata | int]
    ) -> None:
        """Commit for a group that has no members at present.

        Raises KafkaError: UNKNOWN_MEMBER_ID while it has some, UNKNOWN_TOPIC_OR_PARTITION; others may be committed.
        """
        coordinator = Coordinator(await self._reach(), group_id)
        wanted = {
            as_partition(partition): offset if isinstance(offset, OffsetAndMetadata) else OffsetAndMetadata(offset)
            for partition, offset in offsets.items()
        }
        await coordinator.commit(wanted, GroupIdentity(), self._config.default_api_timeout_ms)

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, KafkaError | None]:
        """Forget what a group has committed for partitions of topics that none of its members subscribes to.

        None: forgotten. Raises KafkaError for the whole, such as GROUP_ID_NOT_FOUND or NON_EMPTY_GROUP.
        """
        wanted = [as_partition(each) for each in partitions]
        request = OffsetDeleteRequest(
            group_id=group_id,
            topics=[
                OffsetDeleteRequestTopic(
                    name=topic, partitions=[OffsetDeleteRequestPartition(partition_index=number) for number in numbers]
                )
                for topic, numbers in by_topic(dict.fromkeys(wanted)).items()
            ],
        )
        coordinator = Coordinator(await self._reach(), group_id)

        async def attempt() -> OffsetDeleteResponse:
            response = await coordinator.call(request, OffsetDeleteResponse)
            coordinator.handle_error(ErrorCode.of(response.error_code))
            check(response.error_code, None, f"offsets of group {group_id!r}")
            return response

        response = await self._until(attempt)
        told = {
            TopicPartition(topic.name, each.partition_index): each.error_code
            for topic in response.topics
            for each in topic.partitions
        }
        unsaid = int(ErrorCode.UNKNOWN_SERVER_ERROR)
        return {partition: refusal(told.get(partition, unsaid), None, str(partition)) for partition in wanted}

    async def group_lag(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, *, times: bool = False
    ) -> dict[TopicPartition, PartitionLag]:
        """How far a group is behind, wherever it has committed or in these partitions; sorted.

        With `times` also since when: the first record it has not read is looked at, which costs a fetch of a batch per
        partition that lags. Partitions of deleted topics are left out.
        """
        committed = await self.list_group_offsets(group_id)
        wanted = committed if partitions is None else [as_partition(each) for each in partitions]
        existing = await self._existing(wanted)
        cluster, timeout_ms = await self._reach(), self._config.default_api_timeout_ms
        led = {partition: LATEST_TIMESTAMP for partition, is_led in existing.items() if is_led}
        ends = await list_offsets(cluster, led, timeout_ms=timeout_ms)
        lags: dict[TopicPartition, PartitionLag] = {}
        for partition in sorted(existing):
            offset, end = committed.get(partition), ends.get(partition)
            lags[partition] = PartitionLag(offset and offset.offset, end and end.offset)
        if times:
            behind = {
                partition: each.committed for partition, each in lags.items() if each.committed is not None and each.lag
            }
            for partition, since_ms in (await first_record_times(cluster, behind, timeout_ms)).items():
                lags[partition] = replace(lags[partition], unread_since_ms=since_ms)
        return lags

    async def _existing(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bool]:
        """Those that there are, and whether each has a leader: a group may remember topics that are gone."""
        grouped = by_topic(partitions)

        async def attempt() -> dict[TopicPartition, bool]:
            response = await (await self._reach()).fetch_metadata(sorted(grouped))
            return {
                TopicPartition(topic.name, each.partition_index): each.leader_id >= 0
                for topic in response.topics
                if topic.name is not None
                for each in topic.partitions
                if each.partition_index in grouped[topic.name]
            }

        return await self._until(attempt) if grouped else {}


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for every one of them, then raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _described(answer: DescribedGroup, node: Node | None) -> GroupDescription:
    readable = answer.protocol_type == PROTOCOL_TYPE
    return GroupDescription(
        answer.group_id,
        answer.group_state,
        answer.protocol_type,
        answer.protocol_data,
        tuple(_member(each, readable) for each in answer.members),
        node,
    )


def _member(told: DescribedGroupMember, readable: bool) -> GroupMember:
    topics: tuple[str, ...] = ()
    assignment: tuple[TopicPartition, ...] = ()
    if readable:
        try:
            if told.member_metadata:
                topics = decode_subscription(told.member_metadata).topics
            assignment = decode_assignment(told.member_assignment)
        except MalformedMessage:
            pass  # a client's own; what it means is between the members
    return GroupMember(
        told.member_id, told.group_instance_id, told.client_id, told.client_host, topics, tuple(sorted(assignment))
    )
