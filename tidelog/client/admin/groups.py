"""Admin calls about consumer groups: lists, descriptions, offsets, lag, and changes to them.

Each group's coordinator answers for the group; lists come from all brokers. Invariant: one result
for each requested group or partition, None for a change that succeeded, because the error of one
does not concern the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tidelog.client.admin.base import WAIT_SHARE, error_of, in_one_limit, raise_on_error
from tidelog.client.admin.coordinators import GROUP, CoordinatorAdmin
from tidelog.client.arguments import as_flag, as_known_names, as_offsets, as_partitions, as_text, as_texts
from tidelog.client.assignment.protocol import PROTOCOL_TYPE, by_topic, decode_assignment, decode_subscription
from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.groups.model import (
    DEAD,
    GROUP_STATES,
    GROUP_TYPES,
    GroupDescription,
    GroupListing,
    GroupMember,
    PartitionLag,
)
from tidelog.client.model import (
    LATEST_TIMESTAMP,
    Node,
    OffsetAndMetadata,
    PartitionErrors,
    TopicPartition,
)
from tidelog.client.network.connection import Connection
from tidelog.client.network.offsets import list_offsets
from tidelog.client.network.record_times import first_record_times
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages import consumer_group_describe
from tidelog.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
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

_FIRST_VERSION_WITH_STATES, _FIRST_VERSION_WITH_TYPES = 4, 5


class GroupAdmin(CoordinatorAdmin):
    """The consumer group calls of `Admin`."""

    # -- groups

    async def list_groups(self, *, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[GroupListing]:
        """All groups of the cluster, or those in one of the states and of one of the types; sorted
        by id.

        States and types are Kafka's, such as "Stable" and "classic", in any letter case; ValueError for others. Raises
        KafkaError, such as UNSUPPORTED_VERSION for brokers that are too old to filter; BrokerErrors, with the groups of
        the other brokers, where some have failed.
        """
        request = ListGroupsRequest(
            states_filter=as_known_names("states", states, GROUP_STATES),
            types_filter=as_known_names("types", types, GROUP_TYPES),
        )

        async def call(connection: Connection, node_id: int) -> ListGroupsResponse:
            for names, version in (
                (request.states_filter, _FIRST_VERSION_WITH_STATES),
                (request.types_filter, _FIRST_VERSION_WITH_TYPES),
            ):
                if names and not connection.supports(ListGroupsRequest, version):
                    raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"broker {node_id} cannot choose among groups")
            response = await connection.call(request, ListGroupsResponse, self._config.request_timeout_ms)
            raise_on_error(response.error_code, None, f"groups of broker {node_id}")
            return response

        def listings_in(responses: Mapping[int, ListGroupsResponse]) -> list[GroupListing]:
            listings = {
                group.group_id: GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
                for response in responses.values()
                for group in response.groups
            }
            return [listings[group_id] for group_id in sorted(listings)]

        return await self._ask_every_broker(call, listings_in)

    @in_one_limit
    async def describe_groups(self, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        """State, protocol and members by group id, of the classic protocol and of KIP-848. Raises the KafkaError of
        the first failed group.

        GROUP_ID_NOT_FOUND means that there is no such group of consumers.
        """
        results = await self._call_coordinators(
            GROUP,
            as_texts("group_ids", group_ids),
            lambda groups: DescribeGroupsRequest(groups=groups),
            DescribeGroupsResponse,
            lambda response: {group.group_id: (group.error_code, group) for group in response.groups},
        )
        described: dict[str, tuple[Node | None, int, DescribedGroup]] = {}
        for group_id, result in results.items():
            if isinstance(result, KafkaError):
                raise result
            described[group_id] = result
        # Brokers before 4.0 report a missing group as Dead.
        codes = {
            group_id: ErrorCode.GROUP_ID_NOT_FOUND if not code and group.group_state == DEAD else code
            for group_id, (_, code, group) in described.items()
        }
        missing = [group_id for group_id, code in codes.items() if code == ErrorCode.GROUP_ID_NOT_FOUND]
        descriptions = await self._describe_consumer_groups(missing) if missing else {}
        for group_id, (node, _, group) in described.items():
            if group_id not in descriptions:
                raise_on_error(codes[group_id], group.error_message, f"group {group_id!r}")
                descriptions[group_id] = _to_description(group, node)
        return {group_id: descriptions[group_id] for group_id in results}

    async def _describe_consumer_groups(self, group_ids: list[str]) -> dict[str, GroupDescription]:
        """Those of these groups that have the protocol of KIP-848."""
        results = await self._call_coordinators(
            GROUP,
            group_ids,
            lambda groups: ConsumerGroupDescribeRequest(group_ids=groups),
            ConsumerGroupDescribeResponse,
            lambda response: {group.group_id: (group.error_code, group) for group in response.groups},
        )
        descriptions: dict[str, GroupDescription] = {}
        for group_id, result in results.items():
            if isinstance(result, KafkaError):
                if result.code is not ErrorCode.UNSUPPORTED_VERSION:
                    raise result
                continue  # a broker that does not know the protocol
            node, code, group = result
            if code not in (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION):
                raise_on_error(code, group.error_message, f"group {group_id!r}")
                descriptions[group_id] = _to_description_of_consumer_group(group, node)
        return descriptions

    async def delete_groups(self, group_ids: Iterable[str]) -> dict[str, KafkaError | None]:
        """Delete groups without members and their committed offsets.

        The result of a deleted group is None. Raises KafkaError where no coordinator answers in time.
        """
        results = await self._call_coordinators(
            GROUP,
            as_texts("group_ids", group_ids),
            lambda groups: DeleteGroupsRequest(groups_names=groups),
            DeleteGroupsResponse,
            lambda response: {result.group_id: (result.error_code, None) for result in response.results},
        )
        return {
            group_id: result if isinstance(result, KafkaError) else error_of(result[1], None, f"group {group_id!r}")
            for group_id, result in results.items()
        }

    @in_one_limit
    async def remove_group_members(
        self, group_id: str, instance_ids: Iterable[str] | None = None, *, reason: str = "removed by an administrator"
    ) -> dict[str, KafkaError | None]:
        """Remove static members from a group by their instance ids; without instance ids all
        members.

        The result of a removed member is None. Dynamic members are keyed by member id; a live
        dynamic member joins again. A static member does not: while its process runs, it gets
        UNKNOWN_MEMBER_ID.
        """
        group_id, reason = as_text("group_id", group_id), as_text("reason", reason)
        if instance_ids is None:
            members = (await self.describe_groups([group_id]))[group_id].members
            identities = [MemberIdentity(member_id=member.member_id) for member in members]
            for identity, member in zip(identities, members):
                identity.group_instance_id = member.instance_id
        else:
            identities = [
                MemberIdentity(group_instance_id=instance_id) for instance_id in as_texts("instance_ids", instance_ids)
            ]
        if not identities:
            return {}
        for identity in identities:
            identity.reason = reason
        coordinator = Coordinator(await self._connected_cluster(), group_id)
        request = LeaveGroupRequest(group_id=group_id, members=identities)

        async def attempt() -> LeaveGroupResponse:
            response = await coordinator.call(request, LeaveGroupResponse)
            coordinator.handle_error(ErrorCode.of(response.error_code))
            raise_on_error(response.error_code, None, f"group {group_id!r}")
            return response

        return {
            member.group_instance_id or member.member_id: error_of(
                member.error_code, None, f"member {member.group_instance_id or member.member_id}"
            )
            for member in (await self._retry(attempt)).members
        }

    # -- offsets

    @in_one_limit
    async def list_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, *, require_stable: bool = False
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The committed offsets of a group, of all partitions or of these.

        Omits partitions without one.
        """
        group_id, require_stable = as_text("group_id", group_id), as_flag("require_stable", require_stable)
        checked = None if partitions is None else as_partitions("partitions", partitions)
        coordinator = Coordinator(await self._connected_cluster(), group_id)
        timeout_ms = self._config.default_api_timeout_ms
        return await coordinator.committed(checked, timeout_ms, require_stable=require_stable)

    async def list_consumer_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """`list_group_offsets` under its name in Java and other clients."""
        return await self.list_group_offsets(group_id, partitions)

    @in_one_limit
    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata | int]
    ) -> None:
        """Commit offsets for a group that has no members.

        Raises KafkaError: UNKNOWN_MEMBER_ID while the group has members,
        UNKNOWN_TOPIC_OR_PARTITION. Other partitions may be committed.
        """
        group_id, to_commit = as_text("group_id", group_id), as_offsets("offsets", offsets)
        coordinator = Coordinator(await self._connected_cluster(), group_id)
        await coordinator.commit(to_commit, GroupIdentity(), self._config.default_api_timeout_ms)

    @in_one_limit
    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, KafkaError | None]:
        """Delete committed offsets of a group, for topics to which no member subscribes.

        The result of a deleted offset is None. Raises KafkaError for the whole group, such as
        GROUP_ID_NOT_FOUND or NON_EMPTY_GROUP.
        """
        group_id, targets = as_text("group_id", group_id), as_partitions("partitions", partitions)
        request = OffsetDeleteRequest(
            group_id=group_id,
            topics=[
                OffsetDeleteRequestTopic(
                    name=topic, partitions=[OffsetDeleteRequestPartition(partition_index=number) for number in numbers]
                )
                for topic, numbers in by_topic(dict.fromkeys(targets)).items()
            ],
        )
        coordinator = Coordinator(await self._connected_cluster(), group_id)

        async def attempt() -> OffsetDeleteResponse:
            response = await coordinator.call(request, OffsetDeleteResponse)
            coordinator.handle_error(ErrorCode.of(response.error_code))
            raise_on_error(response.error_code, None, f"offsets of group {group_id!r}")
            return response

        response = await self._retry(attempt)
        codes = {
            TopicPartition(topic.name, result.partition_index): result.error_code
            for topic in response.topics
            for result in topic.partitions
        }
        missing_result_code = int(ErrorCode.UNKNOWN_SERVER_ERROR)
        return {
            partition: error_of(codes.get(partition, missing_result_code), None, str(partition))
            for partition in targets
        }

    @in_one_limit
    async def group_lag(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None, *, times: bool = False
    ) -> dict[TopicPartition, PartitionLag]:
        """The lag of a group in all partitions with a committed offset, or in these; sorted.

        With `times` it also returns the timestamp of the first unread record, which costs a fetch
        of one batch per lagging partition. Omits partitions of deleted topics. Raises KafkaError;
        PartitionErrors, with the end offsets of the other partitions (None: no leader), where leaders
        have not answered.
        """
        as_flag("times", times)
        targets = None if partitions is None else as_partitions("partitions", partitions)
        committed = await self.list_group_offsets(group_id)
        leader_states = await self._leader_states(committed if targets is None else targets)
        cluster, timeout_ms = await self._connected_cluster(), self._config.default_api_timeout_ms
        led_partitions = {partition: LATEST_TIMESTAMP for partition, has_leader in leader_states.items() if has_leader}
        try:
            ends = await list_offsets(cluster, led_partitions, timeout_ms=WAIT_SHARE * timeout_ms)
        except PartitionErrors as error:
            answers = {each: error.answers.get(each) for each in leader_states if each not in error.errors}
            raise PartitionErrors(error.code, error.message, answers, error.errors) from None
        lags: dict[TopicPartition, PartitionLag] = {}
        for partition in sorted(leader_states):
            offset, end = committed.get(partition), ends.get(partition)
            lags[partition] = PartitionLag(offset and offset.offset, end and end.offset)
        if times:
            lagging = {
                partition: lag.committed for partition, lag in lags.items() if lag.committed is not None and lag.lag
            }
            for partition, since_ms in (await first_record_times(cluster, lagging, timeout_ms)).items():
                lags[partition] = replace(lags[partition], unread_since_ms=since_ms)
        return lags

    async def _leader_states(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, bool]:
        """Whether each existing partition has a leader.

        Omits partitions of deleted topics, which a group may keep.
        """
        grouped = by_topic(partitions)

        async def attempt() -> dict[TopicPartition, bool]:
            response = await (await self._connected_cluster()).fetch_metadata(sorted(grouped))
            return {
                TopicPartition(topic.name, partition.partition_index): partition.leader_id >= 0
                for topic in response.topics
                if topic.name is not None
                for partition in topic.partitions
                if partition.partition_index in grouped.get(topic.name, ())
            }

        return await self._retry(attempt) if grouped else {}


def _to_description(group: DescribedGroup, node: Node | None) -> GroupDescription:
    is_consumer_protocol = group.protocol_type == PROTOCOL_TYPE
    return GroupDescription(
        group.group_id,
        group.group_state,
        group.protocol_type,
        group.protocol_data,
        tuple(_to_member(member, is_consumer_protocol) for member in group.members),
        node,
    )


def _to_description_of_consumer_group(
    group: consumer_group_describe.DescribedGroup, node: Node | None
) -> GroupDescription:
    members = tuple(
        GroupMember(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            tuple(sorted(member.subscribed_topic_names)),
            tuple(
                sorted(
                    TopicPartition(topic.topic_name, partition)
                    for topic in member.assignment.topic_partitions
                    for partition in topic.partitions
                )
            ),
        )
        for member in group.members
    )
    return GroupDescription(group.group_id, group.group_state, PROTOCOL_TYPE, group.assignor_name, members, node)


def _to_member(member: DescribedGroupMember, is_consumer_protocol: bool) -> GroupMember:
    topics: tuple[str, ...] = ()
    assignment: tuple[TopicPartition, ...] = ()
    if is_consumer_protocol:
        try:
            if member.member_metadata:
                topics = decode_subscription(member.member_metadata).topics
            assignment = decode_assignment(member.member_assignment)
        except MalformedMessage:
            pass  # a client's own format, which only the members understand
    return GroupMember(
        member.member_id,
        member.group_instance_id,
        member.client_id,
        member.client_host,
        topics,
        tuple(sorted(assignment)),
    )
