"""ConsumerGroupDescribe, key 69, versions 0-1 (KIP-848): groups of the consumer protocol with their members.

Version 1 says of each member whether it speaks the classic or the consumer protocol (KIP-1099).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int8, int16, int32, string, struct, uuid


class ConsumerGroupDescribeRequest(Message, key=69, versions="0-1", flexible="0+"):
    group_ids: list[str] = array(string)
    include_authorized_operations: bool = boolean()


class TopicPartitions(Message):
    topic_id: bytes = uuid()
    topic_name: str = string()
    partitions: list[int] = array(int32)


class Assignment(Message):
    topic_partitions: list[TopicPartitions] = array(TopicPartitions)


class Member(Message):
    member_id: str = string()
    instance_id: str | None = string(nullable="0+", default=None)
    rack_id: str | None = string(nullable="0+", default=None)
    member_epoch: int = int32()
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: list[str] = array(string)
    subscribed_topic_regex: str | None = string(nullable="0+", default=None)
    assignment: Assignment = struct(Assignment)
    target_assignment: Assignment = struct(Assignment)
    member_type: int = int8("1+", default=-1, ignorable=True)


class DescribedGroup(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    assignor_name: str = string()
    members: list[Member] = array(Member)
    authorized_operations: int = int32(default=-2147483648)


class ConsumerGroupDescribeResponse(Message, key=69, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    groups: list[DescribedGroup] = array(DescribedGroup)
