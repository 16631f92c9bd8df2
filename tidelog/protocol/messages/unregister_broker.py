"""UnregisterBroker, key 64, version 0, flexible: remove the registration of a broker."""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, int16, int32, string


class UnregisterBrokerRequest(Message, key=64, versions="0", flexible="0+"):
    broker_id: int = int32()


class UnregisterBrokerResponse(Message, key=64, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
