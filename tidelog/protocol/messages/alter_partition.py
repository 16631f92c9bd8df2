"""AlterPartition, key 56, versions 2-3, flexible from the first: a leader proposes another ISR to
the controller.

Version 3 adds each member's broker epoch, so that a replica that has restarted meanwhile is refused
(KIP-903).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int8, int16, int32, int64, uuid


class BrokerState(Message):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)


class AlterPartitionRequestPartitionData(Message):
    partition_index: int = int32()
    leader_epoch: int = int32()
    new_isr: list[int] = array(int32, "2")
    new_isr_with_epochs: list[BrokerState] = array(BrokerState, "3+")
    leader_recovery_state: int = int8()
    partition_epoch: int = int32()


class AlterPartitionRequestTopicData(Message):
    topic_id: bytes = uuid()
    partitions: list[AlterPartitionRequestPartitionData] = array(AlterPartitionRequestPartitionData)


class AlterPartitionRequest(Message, key=56, versions="2-3", flexible="2+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    topics: list[AlterPartitionRequestTopicData] = array(AlterPartitionRequestTopicData)


class AlterPartitionResponsePartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()
    leader_id: int = int32()
    leader_epoch: int = int32()
    isr: list[int] = array(int32)
    leader_recovery_state: int = int8()
    partition_epoch: int = int32()


class AlterPartitionResponseTopicData(Message):
    topic_id: bytes = uuid()
    partitions: list[AlterPartitionResponsePartitionData] = array(AlterPartitionResponsePartitionData)


class AlterPartitionResponse(Message, key=56, versions="2-3", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: list[AlterPartitionResponseTopicData] = array(AlterPartitionResponseTopicData)
