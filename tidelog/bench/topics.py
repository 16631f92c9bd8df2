"""Creates and deletes topics by hand, without a client library: CreateTopics v2, CreatePartitions v1, DeleteTopics v1.

Any broker takes them and hands them to the controller.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.bench.metadata import Reader, frame
from tidelog.bench.raw import BenchError, RawConnection

_CREATE, _DELETE, _EXTEND = (19, 2), (20, 1), (37, 1)
# Kafka writes at most 10,000 metadata records for a request, and one of them is the topic's.
_PARTITIONS_AT_ONCE_MAX = 5_000
_PATIENCE_S = 60.0
# Where there is no active controller for the moment.
_RETRIABLE = frozenset({5, 7, 13, 41})
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to be; `settings` by Kafka's names."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str] = field(default_factory=dict)


def create(port: int, topics: Sequence[NewTopic]) -> None:
    """Create them all in one request, larger topics in several; BenchError when one is refused."""
    end = struct.pack(">i?", int(_PATIENCE_S * 1000), False)
    _ask(port, _CREATE, struct.pack(">i", len(topics)) + b"".join(map(_described, topics)) + end, "create")
    for topic in topics:
        for smaller in range(_PARTITIONS_AT_ONCE_MAX, topic.partitions, _PARTITIONS_AT_ONCE_MAX):
            larger = min(smaller + _PARTITIONS_AT_ONCE_MAX, topic.partitions)
            body = struct.pack(">i", 1) + _string(topic.name) + struct.pack(">ii", larger, -1)
            _ask(port, _EXTEND, body + end, "extend")


def delete(port: int, names: Sequence[str]) -> None:
    """Delete them all in one request; BenchError when one is refused."""
    body = struct.pack(">i", len(names)) + b"".join(map(_string, names))
    _ask(port, _DELETE, body + struct.pack(">i", int(_PATIENCE_S * 1000)), "delete")


def _ask(port: int, api: tuple[int, int], body: bytes, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with RawConnection(port, 2 * _PATIENCE_S) as connection:
            connection.send(frame(*api, body))
            errors = dict(_errors(connection.receive(), with_message=what != "delete"))
        refused = {name: error_code for name, error_code in errors.items() if error_code}
        if not refused:
            return
        if not set(refused.values()) <= _RETRIABLE or len(refused) < len(errors) or time.monotonic() > deadline:
            raise BenchError(f"could not {what}: error codes {refused}")
        time.sleep(_RETRY_S)


def _errors(answer: memoryview | bytes, *, with_message: bool) -> Iterable[tuple[str, int]]:
    """Each topic's name and error code."""
    reader = Reader(answer, 4 + 4 + 4)
    for _ in range(reader.int32()):
        yield reader.string() or "", reader.int16()
        if with_message:
            reader.string()


def _described(topic: NewTopic) -> bytes:
    settings = b"".join(_string(key) + _string(value) for key, value in topic.settings.items())
    partitions = min(topic.partitions, _PARTITIONS_AT_ONCE_MAX)
    numbers = struct.pack(">ihii", partitions, topic.replicas, 0, len(topic.settings))
    return _string(topic.name) + numbers + settings


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text.encode())) + text.encode()
