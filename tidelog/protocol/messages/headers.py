"""Request and response headers, chosen by `api.request_header_version` and
`api.response_header_version`.

A request's client id keeps its two-byte length in the flexible version too (the broker must be able
to read the header of an ApiVersions request newer than itself). Version 0 of the request header
went with ControlledShutdown.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, int16, int32, string


class RequestHeader(Message, in_place=True, versions="1-2", flexible="2+"):
    request_api_key: int = int16()
    request_api_version: int = int16()
    correlation_id: int = int32()
    client_id: str | None = string(nullable="1+", compact=False)


class ResponseHeader(Message, in_place=True, versions="0-1", flexible="1+"):
    correlation_id: int = int32()
