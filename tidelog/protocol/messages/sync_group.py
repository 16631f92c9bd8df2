"""SyncGroup, key 14, versions 0-5: the leader sends the assignment, every member receives its part.

Version 3 brings static members, 4 is flexible, 5 names protocol type and protocol.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, byte_string, int16, int32, string


class SyncGroupRequestAssignment(Message):
    member_id: str = string()
    assignment: bytes = byte_string()


class SyncGroupRequest(Message, key=14, versions="0-5", flexible="4+"):
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable="3+", default=None)
    protocol_type: str | None = string("5+", nullable="5+", default=None, ignorable=True)
    protocol_name: str | None = string("5+", nullable="5+", default=None, ignorable=True)
    assignments: list[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment)


class SyncGroupResponse(Message, key=14, versions="0-5", flexible="4+"):
    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
    protocol_type: str | None = string("5+", nullable="5+", default=None, ignorable=True)
    protocol_name: str | None = string("5+", nullable="5+", default=None, ignorable=True)
    assignment: bytes = byte_string()
