"""DeleteTopics, key 20, versions 1-6: by name, and from version 6 by name or id.

Version 4 is flexible, 5 returns an error message.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int16, int32, string, uuid


class DeleteTopicState(Message):
    name: str | None = string(nullable="6+", default=None)
    topic_id: bytes = uuid()


class DeleteTopicsRequest(Message, key=20, versions="1-6", flexible="4+"):
    topics: list[DeleteTopicState] = array(DeleteTopicState, "6+")
    topic_names: list[str] = array(string, "1-5", ignorable=True)
    timeout_ms: int = int32()


class DeletableTopicResult(Message):
    name: str | None = string(nullable="6+")
    topic_id: bytes = uuid("6+", ignorable=True)
    error_code: int = int16()
    error_message: str | None = string("5+", nullable="5+", default=None, ignorable=True)


class DeleteTopicsResponse(Message, key=20, versions="1-6", flexible="4+"):
    throttle_time_ms: int = int32()
    responses: list[DeletableTopicResult] = array(DeletableTopicResult)
