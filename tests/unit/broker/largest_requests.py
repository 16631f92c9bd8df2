"""The largest requests that each API decodes, made from the declarations alone: one array of a message is wide.

For tests that ask how long a node is busy with one request. An API and a field that are declared later are in them
without a change here.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

from tidelog.protocol.api import request_header_version
from tidelog.protocol.codec.decoding import REQUEST_BUDGET, element_cost
from tidelog.protocol.codec.fields import Field
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.messages.headers import RequestHeader

TOPIC: Final = "t"
"""The topic that requests name which name the same again and again."""

OTHERS_COST: Final = 500
"""What is left of the budget for the other arrays, of one element each."""

Path = tuple[str, ...]


class Large(NamedTuple):
    request: Message
    version: int
    wide: str
    elements: int
    is_distinct: bool

    def __str__(self) -> str:
        name = type(self.request).__name__.removesuffix("Request")
        return f"{name} v{self.version}, {self.wide} {'distinct' if self.is_distinct else 'alike'}"

    def frame(self) -> bytes:
        return frame_of(self.request, self.version)


def frame_of(request: Message, version: int) -> bytes:
    key = type(request).API_KEY
    assert key is not None
    header = RequestHeader(request_api_key=key, request_api_version=version, correlation_id=1, client_id="large")
    frame = header.encode(request_header_version(key, version)) + request.encode(version)
    return struct.pack(">i", len(frame)) + frame


def largest_requests(
    message: type[Message], version: int, share: float, *, but: Collection[str] = ()
) -> Iterator[Large]:
    """One request for each array of the message, with this share of the elements that a request may have, twice: all
    elements alike, and each another. Tagged fields are left out, and arrays of the names `but`.
    """
    for wide in _arrays(message, version, ()):
        if ".".join(wide) in but:
            continue
        for is_distinct in (False, True):
            maker = _Maker(version, wide, is_distinct, share)
            made = maker.message(message, ())
            yield Large(made, version, ".".join(wide), maker.elements, is_distinct)


def _arrays(message: Any, version: int, path: Path) -> Iterator[Path]:
    for name, field in message.FIELDS:
        if version not in field.versions:
            continue
        if field.kind == "array":
            yield (*path, name)
        if field.kind in ("array", "struct") and isinstance(field.element, type):
            yield from _arrays(field.element, version, (*path, name))


class _Maker:
    def __init__(self, version: int, wide: Path, is_distinct: bool, share: float) -> None:
        self._version = version
        self._wide = wide
        self._is_distinct = is_distinct
        self._budget = int(REQUEST_BUDGET * share)
        self._number = 0
        self.elements = 0

    def message(self, declared: Any, path: Path) -> Any:
        values = {
            name: self._value(field, (*path, name))
            for name, field in declared.FIELDS
            if self._version in field.versions and not field.is_tagged(self._version)
        }
        known = {"timeout_ms": 1000, "max_wait_ms": 1, "session_epoch": -1, "replica_id": -1, "acks": -1}
        return declared(**values | {name: known[name] for name in values if name in known})

    def _value(self, field: Field, path: Path) -> Any:
        if field.kind == "array":
            return self._array(field.element, path)
        if field.kind == "struct":
            return self.message(field.element, path)
        return self._plain(field.kind)

    def _array(self, element: Any, path: Path) -> list[Any]:
        count = 1
        if path == self._wide:
            count = self.elements = (self._budget - OTHERS_COST) // _cost(path[-1], element, self._version)
        return [self._element(element, path) for _ in range(count)]

    def _element(self, element: Any, path: Path) -> Any:
        self._number += 1
        return self.message(element, path) if isinstance(element, type) else self._plain(element)

    def _plain(self, kind: str) -> Any:
        number = self._number if self._is_distinct else 0
        if kind == "string":
            return f"{TOPIC}{number:x}" if self._is_distinct else TOPIC
        if kind == "uuid":
            return number.to_bytes(16, "big")
        if kind in ("bytes", "records"):
            return b""
        if kind in ("int32", "int64"):
            return number
        return {"bool": False, "int8": 2, "int16": 1}.get(kind, 0)


def _cost(name: str, element: Any, version: int) -> int:
    """What an element of an array takes of the decoder's budget, with one element in each array inside it."""
    return element_cost(name, element) + (_inner_cost(element, version) if isinstance(element, type) else 0)


def _inner_cost(declared: Any, version: int) -> int:
    cost = 0
    for name, field in declared.FIELDS:
        if version in field.versions and field.kind == "array":
            cost += _cost(name, field.element, version)
        elif version in field.versions and field.kind == "struct":
            cost += _inner_cost(field.element, version)
    return cost
