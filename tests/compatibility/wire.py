"""A connection that speaks Kafka through kio, so that what it reads is checked by codecs that are not ours.

Requests are given as plain values (`ask("metadata", 12, topics=[{"name": "t"}])`); fields left out take Kafka's
default, or zero. Answers are kio's dataclasses.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import socket
import struct
import types
import typing
from typing import Any

from kio.index import load_entity_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType


class Closed(Exception):
    """The server closed the connection."""


class Wire:
    """One blocking connection; requests may be pipelined with `send` and their answers taken with `receive`."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._correlation_id = 0
        self._sent: list[tuple[int, type]] = []

    def ask(self, api: str, version: int, **values: Any) -> Any:
        """Send one request and return the answer to it."""
        self.send(api, version, **values)
        return self.receive()

    def send(self, api: str, version: int, *, answered: bool = True, **values: Any) -> int:
        """Send a request and return its correlation id; `answered=False` when no answer is to come (acks=0)."""
        request = entity(load_entity_schema(api, version, EntityType.request), values)
        self._correlation_id += 1
        header = request.__header_schema__
        frame = io.BytesIO()
        entity_writer(header)(
            frame,
            header(
                request_api_key=request.__api_key__,
                request_api_version=version,
                correlation_id=self._correlation_id,
                client_id="tidelog-wire-test",
            ),
        )
        entity_writer(type(request))(frame, request)
        self.send_frame(frame.getvalue())
        if answered:
            self._sent.append((self._correlation_id, load_response_schema(request.__api_key__, version)))
        return self._correlation_id

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def receive(self) -> Any:
        """The answer to the oldest request that waits for one; it must carry that request's correlation id."""
        correlation_id, response = self._sent.pop(0)
        frame = self.receive_frame()
        header = response.__header_schema__  # type: ignore[attr-defined]
        read_header, size = entity_reader(header)(frame, 0)
        assert read_header.correlation_id == correlation_id, "answers must come in the order of the requests"
        answer: Any
        answer, read = entity_reader(response)(frame, size)
        assert size + read == len(frame), f"{len(frame) - size - read} bytes behind the answer"
        return answer

    def receive_frame(self) -> bytes:
        size = struct.unpack(">i", self._read(4))[0]
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self.socket.recv(size - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                raise Closed
            data += part
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def entity(cls: Any, values: dict[str, Any]) -> Any:
    """A kio dataclass from plain values: dicts become nested entities, lists tuples, integers durations in ms."""
    hints = typing.get_type_hints(cls)
    arguments = {}
    for one in dataclasses.fields(cls):
        if one.name in values:
            arguments[one.name] = _convert(hints[one.name], values[one.name])
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            arguments[one.name] = _zero(hints[one.name])
    unknown = values.keys() - {one.name for one in dataclasses.fields(cls)}
    assert not unknown, f"{cls.__name__} has no {unknown}"
    return cls(**arguments)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    kind = _options(hint)[0]
    if typing.get_origin(kind) is tuple:
        return tuple(_convert(typing.get_args(kind)[0], item) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return entity(kind, value)
    if isinstance(kind, type) and "Timedelta" in kind.__name__:
        return datetime.timedelta(milliseconds=value)
    return value


def _zero(hint: Any) -> Any:
    options = _options(hint)
    if type(None) in options:
        return None
    kind = options[0]
    if typing.get_origin(kind) is tuple:
        return ()
    if "Timedelta" in kind.__name__:
        return datetime.timedelta(seconds=10)
    for base, zero in ((bool, False), (int, 0), (str, ""), (bytes, b"")):
        if issubclass(kind, base):
            return zero
    raise AssertionError(f"no zero for {hint}")
