"""UpdateRaftVoter, key 82, version 0, flexible: a voter's addresses and kraft.version range
(KIP-853).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string, struct, uint16, uuid


class Listener(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()


class KRaftVersionFeature(Message):
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class UpdateRaftVoterRequest(Message, key=82, versions="0", flexible="0+"):
    cluster_id: str | None = string(nullable="0+")
    current_leader_epoch: int = int32()
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()
    listeners: list[Listener] = array(Listener)
    k_raft_version_feature: KRaftVersionFeature = struct(KRaftVersionFeature)


class CurrentLeader(Message):
    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)
    host: str = string()
    port: int = int32()


class UpdateRaftVoterResponse(Message, key=82, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    current_leader: CurrentLeader = struct(CurrentLeader, tag=0)
