"""FindCoordinator, key 10, versions 0-6: the coordinator of a group (0), transaction (1) or share
group (2).

Version 1 adds the key type, 3 is flexible, 4 has many keys per request with a result for each, 5
adds error codes and 6 key types.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int8, int16, int32, string


class FindCoordinatorRequest(Message, key=10, versions="0-6", flexible="3+"):
    key: str = string("0-3")
    key_type: int = int8("1+")
    coordinator_keys: list[str] = array(string, "4+")


class Coordinator(Message):
    key: str = string()
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="4+")


class FindCoordinatorResponse(Message, key=10, versions="0-6", flexible="3+"):
    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16("0-3")
    error_message: str | None = string("1-3", nullable="1-3", ignorable=True)
    node_id: int = int32("0-3")
    host: str = string("0-3")
    port: int = int32("0-3")
    coordinators: list[Coordinator] = array(Coordinator, "4+")
