"""JoinGroup, key 11, versions 0-9: a member enters the classic group protocol.

Version 1 adds the rebalance timeout, 4 makes new members come twice (MEMBER_ID_REQUIRED), 5 brings
static members, 6 is flexible, 7 names the protocol type, 8 the reason for joining, 9 lets the
coordinator skip the leader's assignment.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, byte_string, int16, int32, string


class JoinGroupRequestProtocol(Message):
    name: str = string()
    metadata: bytes = byte_string()


class JoinGroupRequest(Message, key=11, versions="0-9", flexible="6+"):
    group_id: str = string()
    session_timeout_ms: int = int32()
    rebalance_timeout_ms: int = int32("1+", default=-1, ignorable=True)
    member_id: str = string()
    group_instance_id: str | None = string("5+", nullable="5+", default=None)
    protocol_type: str = string()
    protocols: list[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol)
    reason: str | None = string("8+", nullable="8+", default=None, ignorable=True)


class JoinGroupResponseMember(Message):
    member_id: str = string()
    group_instance_id: str | None = string("5+", nullable="5+", default=None, ignorable=True)
    metadata: bytes = byte_string()


class JoinGroupResponse(Message, key=11, versions="0-9", flexible="6+"):
    throttle_time_ms: int = int32("2+", ignorable=True)
    error_code: int = int16()
    generation_id: int = int32(default=-1)
    protocol_type: str | None = string("7+", nullable="7+", default=None, ignorable=True)
    protocol_name: str | None = string(nullable="7+")
    leader: str = string()
    skip_assignment: bool = boolean("9+")
    member_id: str = string()
    members: list[JoinGroupResponseMember] = array(JoinGroupResponseMember)
