"""One question to two brokers: the request goes to both, the answers come back as plain values and must be equal.

What may differ by nature is replaced by a word: ports and cluster ids, ids made at random, the time of the day. What
goes back into later requests (topic ids, member ids, sessions) is kept as one value per broker, `Each`. What differs by
intent is in docs/compatibility.md, and is left out by `Brokers.ignored` or by the tests.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import re
import struct
import time
import uuid
from collections.abc import Callable
from typing import Any

from kio.index import load_response_schema
from kio.serial import entity_reader

from tests.compatibility.odd_batches import Batch, read_batches
from tests.compatibility.wire import Closed, Wire

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Kafka names the class of an exception around some reasons; Tidelog gives the reason alone.
_WRAPPED = re.compile(
    r"Invalid value org\.apache\.kafka\.common\.config\.ConfigException: (.*) "
    r"for configuration Invalid dynamic configuration",
    re.DOTALL,
)
# When two brokers answer out of hash maps, order says nothing: lists of these are compared by name.
_ORDER = (
    "name",
    "topic",
    "topic_id",
    "partition_index",
    "partition",
    "index",
    "member_id",
    "group_id",
    "key",
    "api_key",
)
_RANDOM = {"cluster_id": "CLUSTER", "port": "PORT"}
_CLOCK_MS = 3_600_000
CLOSED = "connection closed"


class Each(tuple[Any, ...]):
    """A value per broker: Kafka's, then Tidelog's."""

    __slots__ = ()

    def of(self, name: str) -> Each:
        """One field of each answer."""
        return Each(getattr(answer, name) for answer in self)


class Brokers:
    """Kafka and Tidelog; connections are made anew for every test (`reconnect`).

    `ignored`: names of fields that are not compared. Why a produce failed is told in words of our own, and Kafka tells
    nothing in most cases.
    """

    def __init__(self, kafka_port: int, tidelog_port: int) -> None:
        self.ports = (kafka_port, tidelog_port)
        self.topic_names: dict[uuid.UUID, str] = {}
        self.ignored: frozenset[str] = frozenset()
        self._wires: list[Wire] = []
        self.reconnect()

    def reconnect(self) -> None:
        self.close()
        self.ignored = frozenset()
        self._wires = [Wire(port, timeout_s=60) for port in self.ports]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._wires = []

    # -- asking ------------------------------------------------------------------------------------------------------

    def get(self, api: str, version: int, **values: Any) -> Each:
        """Both answers as kio read them, or CLOSED."""
        return Each(_answer(wire, api, version, _of(values, number)) for number, wire in enumerate(self._wires))

    def same(self, api: str, version: int, **values: Any) -> Each:
        """The same question to both; fails unless the answers agree. Returns both answers."""
        answers = self.get(api, version, **values)
        self.compare(answers)
        return answers

    def same_frame(self, frame: bytes, key: int | None = None, version: int = 0) -> Each:
        """Raw bytes (after the size) to both; their answers are read as those of API `key`, if any, and compared."""
        answers = self.in_both(lambda wire: _raw(wire, frame, key, version))
        self.compare(answers)
        return answers

    def in_both(self, work: Callable[[Wire], Any]) -> Each:
        return Each(work(wire) for wire in self._wires)

    def compare(self, answers: Each) -> None:
        kafka, tidelog = (self.plain(answer) for answer in answers)
        found = list(differences(kafka, tidelog))
        assert not found, "Kafka / Tidelog:\n" + "\n".join(found)

    # -- what may differ -----------------------------------------------------------------------------------------

    def plain(self, value: Any, name: str = "") -> Any:
        """An answer without what may differ, as dicts, lists and scalars."""
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            ignored = self.ignored
            if fields.get("base_offset") == -1:
                # A produce that failed: Kafka tells the log start for some reasons, Tidelog for none.
                ignored = ignored | {"log_start_offset"}
            return {key: self.plain(found, key) for key, found in fields.items() if key not in ignored}
        if isinstance(value, dict):
            return {key: self.plain(found, key) for key, found in value.items()}
        if isinstance(value, Batch):
            return {key: self.plain(found, key) for key, found in value._asdict().items()}
        if name == "records" and value is not None and not isinstance(value, bytes):
            value = bytes(value)
        if name == "records" and isinstance(value, bytes) and len(value) >= 61:
            return [self.plain(found) for found in read_batches(value)] or value
        if isinstance(value, (tuple, list)):
            return _joined(sorted((self.plain(item) for item in value), key=_place))
        if isinstance(value, uuid.UUID):
            return self.topic_names.get(value, str(value))
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, datetime.datetime):
            value = round(value.timestamp() * 1000)
        return self._scalar(value, name)

    def _scalar(self, value: Any, name: str) -> Any:
        if name in _RANDOM and value not in (None, 0, -1):
            return _RANDOM[name]
        if name == "session_id" and value:
            return "SESSION"
        if isinstance(value, str):
            return _UUID.sub("UUID", _WRAPPED.sub(r"\1", value))
        if isinstance(value, int) and "time" in name and abs(value - time.time() * 1000) < _CLOCK_MS:
            return "NOW"
        return value

    # -- what tests need ---------------------------------------------------------------------------------------------

    def topic(self, name: str, partitions: int = 1, **config: str) -> str:
        """Create a topic in both and wait until it is led."""
        configs = [{"name": key.replace("_", "."), "value": value} for key, value in config.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": configs}
        for wire in self._wires:
            answer = wire.ask("create_topics", 7, topics=[topic], timeout=20_000).topics[0]
            assert int(answer.error_code) == 0, answer
            self.topic_names[answer.topic_id] = f"id of {name}"
            for index in range(partitions):
                _await_leader(wire, name, index)
        return name

    def topic_id(self, name: str) -> Each:
        return self.in_both(lambda wire: wire.ask("metadata", 12, topics=[{"name": name}]).topics[0].topic_id)

    def produce(self, topic: str, records: bytes | Each, *, index: int = 0, version: int = 9, **values: Any) -> Each:
        data = [{"name": topic, "partition_data": [{"index": index, "records": records}]}]
        return self.same("produce", version, **{"acks": -1, "timeout": 10_000, "topic_data": data, **values})


def _await_leader(wire: Wire, name: str, index: int) -> None:
    wanted = [{"name": name, "partitions": [{"partition_index": index, "timestamp": -1}]}]
    for _ in range(500):
        answer = wire.ask("list_offsets", 7, replica_id=-1, topics=wanted).topics[0].partitions[0]
        if int(answer.error_code) == 0:
            return
        time.sleep(0.01)
    raise AssertionError(answer)


def _of(value: Any, number: int) -> Any:
    """This broker's part of every `Each` inside."""
    if isinstance(value, Each):
        return value[number]
    if isinstance(value, dict):
        return {key: _of(found, number) for key, found in value.items()}
    if isinstance(value, list):
        return [_of(found, number) for found in value]
    return value


def _answer(wire: Wire, api: str, version: int, values: dict[str, Any]) -> Any:
    try:
        return wire.ask(api, version, **values)
    except (Closed, ConnectionError):
        return CLOSED


def _raw(wire: Wire, frame: bytes, key: int | None, version: int) -> Any:
    try:
        wire.send_frame(frame)
        answer = wire.receive_frame()
    except (Closed, ConnectionError):
        return CLOSED
    if key is None:
        return answer.hex()
    schema: Any = load_response_schema(key, version)
    header, size = entity_reader(schema.__header_schema__)(answer, 0)
    body, read = entity_reader(schema)(answer, size)
    return {"header": header, "body": body, "behind": answer[size + read :].hex()}


def _place(item: Any) -> Any:
    if isinstance(item, dict):
        return [str(item.get(name)).rjust(12) for name in _ORDER]
    return [str(item).rjust(12)]


def _joined(items: list[Any]) -> list[Any]:
    """Entries of one topic as one: how many there are for it says nothing either."""
    joined: list[Any] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, dict) and isinstance(last, dict) and isinstance(item.get("partitions"), list):
            rest = {key: found for key, found in item.items() if key != "partitions"}
            if rest == {key: found for key, found in last.items() if key != "partitions"}:
                last["partitions"] = sorted(last["partitions"] + item["partitions"], key=_place)
                continue
        joined.append(item)
    return joined


def differences(kafka: Any, tidelog: Any, path: str = "answer") -> list[str]:
    """One line for every place where two plain values differ."""
    if isinstance(kafka, dict) and isinstance(tidelog, dict):
        return [
            line
            for key in kafka.keys() | tidelog.keys()
            for line in differences(kafka.get(key), tidelog.get(key), f"{path}.{key}")
        ]
    if isinstance(kafka, list) and isinstance(tidelog, list) and len(kafka) == len(tidelog):
        return [
            line for number, pair in enumerate(zip(kafka, tidelog)) for line in differences(*pair, f"{path}[{number}]")
        ]
    return [] if kafka == tidelog else [f"{path}: {kafka!r} / {tidelog!r}"]


def header(key: int, version: int, flexible: bool, client_id: bytes | None = b"c", tags: bytes = b"\0") -> bytes:
    """A request header written by hand; `tags` are its tagged fields, count included, if `flexible`."""
    name = struct.pack(">h", -1) if client_id is None else struct.pack(">h", len(client_id)) + client_id
    return struct.pack(">hhi", key, version, 77) + name + (tags if flexible else b"")
