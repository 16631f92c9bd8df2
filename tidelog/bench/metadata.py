"""The cluster as a broker describes it: Metadata v4, encoded by hand like the requests in `frames`.

It has brokers, leaders and in-sync replicas, as one node sees them: each request uses a connection of its own. Nothing
is cached, and no request creates a topic.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidelog.bench.frames import fetch, read_fetch_answer
from tidelog.bench.raw import BenchError, RawConnection

_KEY, _VERSION = 3, 4
_CLIENT_ID = b"tidelog-bench"
_POLL_S = 0.02
_PARTITION = struct.Struct(">hiii")


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Leader (-1: none), replicas in their order, and those in sync."""

    error_code: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`ports` of the brokers by their id; `topics` by name, each partition by its index."""

    ports: Mapping[int, int]
    controller: int
    topics: Mapping[str, Mapping[int, PartitionState]]

    def partitions(self) -> Iterable[PartitionState]:
        for partitions in self.topics.values():
            yield from partitions.values()

    def leader_ports(self, topic: str) -> dict[int, int]:
        """Partition index -> port of its leader."""
        return {index: self.ports[state.leader] for index, state in self.topics[topic].items()}


def request(topics: Sequence[str] | None, correlation_id: int = 0) -> bytes:
    """A whole Metadata v4 frame; None asks for every topic, an empty sequence for none."""
    names = b"".join(struct.pack(">h", len(name.encode())) + name.encode() for name in topics or ())
    body = struct.pack(">i", -1 if topics is None else len(topics)) + names + b"\x00"
    return frame(_KEY, _VERSION, body, correlation_id)


def frame(api_key: int, api_version: int, body: bytes, correlation_id: int = 0) -> bytes:
    """A whole request of a version from before the flexible ones, size field included."""
    header = struct.pack(">hhih", api_key, api_version, correlation_id, len(_CLIENT_ID)) + _CLIENT_ID
    return struct.pack(">i", len(header) + len(body)) + header + body


def read_answer(answer: memoryview | bytes) -> ClusterState:
    """A Metadata v4 answer, size field included."""
    reader = Reader(answer, 4 + 4 + 4)
    ports = {}
    for _ in range(reader.int32()):
        node = reader.int32()
        reader.string()
        ports[node] = reader.int32()
        reader.string()
    reader.string()
    controller = reader.int32()
    topics: dict[str, dict[int, PartitionState]] = {}
    for _ in range(reader.int32()):
        reader.skip(2)
        partitions = topics.setdefault(reader.string() or "", {})
        reader.skip(1)
        for _ in range(reader.int32()):
            index, state = reader.partition()
            partitions[index] = state
    return ClusterState(ports, controller, topics)


def ask(port: int, topics: Sequence[str] | None = None, timeout_s: float = 30.0) -> ClusterState:
    """What the broker on this port knows now."""
    with RawConnection(port, timeout_s) as connection:
        connection.send(request(topics))
        return read_answer(connection.receive())


def await_state(
    port: int, topics: Sequence[str] | None, reached: Callable[[ClusterState], bool], timeout_s: float, what: str
) -> ClusterState:
    """Ask the broker on this port until its answer is `reached`; BenchError, naming `what`, when it never is."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            state = ask(port, topics, max(deadline - time.monotonic(), 1.0))
            if reached(state):
                return state
        except (OSError, BenchError):
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)


def await_brokers(ports: Iterable[int], count: int, timeout_s: float = 60.0) -> None:
    """Until every one of these brokers lists `count` of them."""
    for port in ports:
        await_state(port, (), lambda state: len(state.ports) >= count, timeout_s, f"{count} brokers known on {port}")


def await_leaders(port: int, name: str, partitions: int, replicas: int, timeout_s: float = 60.0) -> ClusterState:
    """Until every partition is led, in sync with all its replicas, and its leader answers a Fetch for it.

    Creation is answered before the leaders are made, and Metadata may tell of a leader before that one knows.
    """

    def whole(state: ClusterState) -> bool:
        by_index = state.topics.get(name, {})
        return len(by_index) == partitions and all(
            one.leader in state.ports and len(one.in_sync) == replicas for one in by_index.values()
        )

    state = await_state(port, (name,), whole, timeout_s, f"{partitions} partitions of {name} led and in sync")
    deadline = time.monotonic() + timeout_s
    for leader_port in sorted(set(state.leader_ports(name).values())):
        with RawConnection(leader_port) as connection:
            for index, its_port in state.leader_ports(name).items():
                while its_port == leader_port:
                    connection.send(fetch(name, {index: 0}, index, max_wait_ms=0))
                    error_code = read_fetch_answer(connection.receive()).error_code
                    if error_code == 0:
                        break
                    if time.monotonic() > deadline:
                        raise BenchError(f"{name}-{index} is not led after {timeout_s:g} s: error code {error_code}")
                    time.sleep(_POLL_S)
    return state


class Reader:
    """Walks over an answer in one of the versions before the flexible ones."""

    def __init__(self, buffer: memoryview | bytes, position: int) -> None:
        self._buffer, self._position = buffer, position

    def skip(self, size_bytes: int) -> None:
        self._position += size_bytes

    def int16(self) -> int:
        self._position += 2
        value: int = struct.unpack_from(">h", self._buffer, self._position - 2)[0]
        return value

    def int32(self) -> int:
        self._position += 4
        value: int = struct.unpack_from(">i", self._buffer, self._position - 4)[0]
        return value

    def string(self) -> str | None:
        length = struct.unpack_from(">h", self._buffer, self._position)[0]
        first = self._position + 2
        self._position = first + max(length, 0)
        return None if length < 0 else bytes(self._buffer[first : self._position]).decode()

    def partition(self) -> tuple[int, PartitionState]:
        error_code, index, leader, count = _PARTITION.unpack_from(self._buffer, self._position)
        first = self._position + _PARTITION.size
        replicas = struct.unpack_from(f">{count}i", self._buffer, first)
        first += 4 * count
        in_sync_count = struct.unpack_from(">i", self._buffer, first)[0]
        in_sync = struct.unpack_from(f">{in_sync_count}i", self._buffer, first + 4)
        self._position = first + 4 + 4 * in_sync_count
        return index, PartitionState(error_code, leader, replicas, in_sync)
