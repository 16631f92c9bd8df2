"""Heartbeat, key 12, versions 0-4: a member reports that it is alive, and gets news of a rebalance.

Version 3 brings static members, 4 is flexible.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, int16, int32, string


class HeartbeatRequest(Message, key=12, versions="0-4", flexible="4+"):
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable="3+", default=None)


class HeartbeatResponse(Message, key=12, versions="0-4", flexible="4+"):
    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
