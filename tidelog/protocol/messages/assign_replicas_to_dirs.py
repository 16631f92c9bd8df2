"""AssignReplicasToDirs, key 73, version 0, flexible: the log directories of a broker's replicas
(KIP-858).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, int64, uuid


class AssignReplicasToDirsRequestPartitionData(Message):
    partition_index: int = int32()


class AssignReplicasToDirsRequestTopicData(Message):
    topic_id: bytes = uuid()
    partitions: list[AssignReplicasToDirsRequestPartitionData] = array(AssignReplicasToDirsRequestPartitionData)


class AssignReplicasToDirsRequestDirectoryData(Message):
    id: bytes = uuid()
    topics: list[AssignReplicasToDirsRequestTopicData] = array(AssignReplicasToDirsRequestTopicData)


class AssignReplicasToDirsRequest(Message, key=73, versions="0", flexible="0+"):
    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    directories: list[AssignReplicasToDirsRequestDirectoryData] = array(AssignReplicasToDirsRequestDirectoryData)


class AssignReplicasToDirsResponsePartitionData(Message):
    partition_index: int = int32()
    error_code: int = int16()


class AssignReplicasToDirsResponseTopicData(Message):
    topic_id: bytes = uuid()
    partitions: list[AssignReplicasToDirsResponsePartitionData] = array(AssignReplicasToDirsResponsePartitionData)


class AssignReplicasToDirsResponseDirectoryData(Message):
    id: bytes = uuid()
    topics: list[AssignReplicasToDirsResponseTopicData] = array(AssignReplicasToDirsResponseTopicData)


class AssignReplicasToDirsResponse(Message, key=73, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    directories: list[AssignReplicasToDirsResponseDirectoryData] = array(AssignReplicasToDirsResponseDirectoryData)
