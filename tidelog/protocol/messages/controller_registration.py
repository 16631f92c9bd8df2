"""ControllerRegistration, key 70, version 0, flexible: a controller's addresses and features
(KIP-919).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int16, int32, string, uint16, uuid


class Listener(Message):
    name: str = string()
    host: str = string()
    port: int = uint16()
    security_protocol: int = int16()


class Feature(Message):
    name: str = string()
    min_supported_version: int = int16()
    max_supported_version: int = int16()


class ControllerRegistrationRequest(Message, key=70, versions="0", flexible="0+"):
    controller_id: int = int32()
    incarnation_id: bytes = uuid()
    zk_migration_ready: bool = boolean()
    listeners: list[Listener] = array(Listener)
    features: list[Feature] = array(Feature)


class ControllerRegistrationResponse(Message, key=70, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
