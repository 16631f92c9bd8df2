"""AddRaftVoter, key 80, versions 0-1, flexible from the first: one more voter in the metadata
quorum (KIP-853).

Version 1 chooses whether to wait until the new set of voters is committed.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int16, int32, string, uint16, uuid


class Listener(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()


class AddRaftVoterRequest(Message, key=80, versions="0-1", flexible="0+"):
    cluster_id: str | None = string(nullable="0+")
    timeout_ms: int = int32()
    voter_id: int = int32()
    voter_directory_id: bytes = uuid()
    listeners: list[Listener] = array(Listener)
    ack_when_committed: bool = boolean("1+", default=True)


class AddRaftVoterResponse(Message, key=80, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
