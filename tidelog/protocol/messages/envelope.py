"""Envelope, key 58, version 0, flexible: a whole request, header included, forwarded to the
controller.

`request_data` and `response_data` are frames without their length (KIP-590).
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, byte_string, int16


class EnvelopeRequest(Message, key=58, versions="0", flexible="0+"):
    request_data: bytes = byte_string()
    request_principal: bytes | None = byte_string(nullable="0+")
    client_host_address: bytes = byte_string()


class EnvelopeResponse(Message, key=58, versions="0", flexible="0+"):
    response_data: bytes | None = byte_string(nullable="0+", default=None)
    error_code: int = int16()
