"""LeaveGroup, key 13, versions 0-5: one member, and from version 3 many, leave at once.

Version 4 is flexible, 5 gives a reason.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string


class MemberIdentity(Message):
    member_id: str = string()
    group_instance_id: str | None = string(nullable="3+", default=None)
    reason: str | None = string("5+", nullable="5+", default=None, ignorable=True)


class LeaveGroupRequest(Message, key=13, versions="0-5", flexible="4+"):
    group_id: str = string()
    member_id: str = string("0-2")
    members: list[MemberIdentity] = array(MemberIdentity, "3+")


class MemberResponse(Message):
    member_id: str = string()
    group_instance_id: str | None = string(nullable="3+")
    error_code: int = int16()


class LeaveGroupResponse(Message, key=13, versions="0-5", flexible="4+"):
    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
    members: list[MemberResponse] = array(MemberResponse, "3+")
