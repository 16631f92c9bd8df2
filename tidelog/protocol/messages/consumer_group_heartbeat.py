"""ConsumerGroupHeartbeat, key 68, versions 0-1 (KIP-848): a member joins, stays, acknowledges and leaves.

Epoch 0 joins, -1 leaves, -2 leaves for a restart of a static member. Null fields have not changed since
the last heartbeat. Version 1 brings the regular expression, and member ids made by the client (KIP-1082).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string, struct, uuid


class TopicPartitions(Message):
    topic_id: bytes = uuid()
    partitions: list[int] = array(int32)


class ConsumerGroupHeartbeatRequest(Message, key=68, versions="0-1", flexible="0+"):
    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    instance_id: str | None = string(nullable="0+", default=None)
    rack_id: str | None = string(nullable="0+", default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    subscribed_topic_names: list[str] | None = array(string, nullable="0+", default=None)
    subscribed_topic_regex: str | None = string("1+", nullable="1+", default=None)
    server_assignor: str | None = string(nullable="0+", default=None)
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, nullable="0+", default=None)


class Assignment(Message):
    topic_partitions: list[TopicPartitions] = array(TopicPartitions)


class ConsumerGroupHeartbeatResponse(Message, key=68, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    member_id: str | None = string(nullable="0+", default=None)
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    assignment: Assignment | None = struct(Assignment, nullable="0+", default=None)
