"""PushTelemetry, key 72, version 0 (KIP-714): a client's metrics, as OpenTelemetry encodes them."""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, boolean, byte_string, int8, int16, int32, uuid


class PushTelemetryRequest(Message, key=72, versions="0", flexible="0+"):
    client_instance_id: bytes = uuid()
    subscription_id: int = int32()
    terminating: bool = boolean()
    compression_type: int = int8()
    metrics: bytes = byte_string()


class PushTelemetryResponse(Message, key=72, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
