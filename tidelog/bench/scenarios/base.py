"""What every scenario shares: the server it measures, metrics with their targets, topics that come and go.

A scenario has a name, warms a server once, and measures it once per round, returning one figure per metric. It creates
its own topic with the same settings on either broker and deletes it, so that no round reads what another wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tidelog.bench.frames import fetch, read_fetch_answer
from tidelog.bench.processes import ServerProcess
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.usage import cpu_ns

TOPIC_SETTINGS = {"retention.ms": "-1"}
MEGABYTE, GIGABYTE = 1_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a scenario. `at_most` is our own target; `ratio_at_most` is for ours divided by Kafka's.

    A metric with neither is shown and not judged.
    """

    name: str
    unit: str
    at_most: float | None = None
    ratio_at_most: float | None = None


@dataclass(slots=True)
class Contestant:
    """A broker under measure: one running node, and how to make a fresh one for start and idle."""

    name: str
    server: ServerProcess
    fresh: Callable[[Path], ServerProcess]
    scratch: Path
    topics_made: int = field(default=0)


class Scenario:
    """One file's measurement with its parameters; subclasses fill in `metrics`, `warm` and `measure`."""

    metrics: tuple[Metric, ...] = ()
    needs: ClassVar[str] = "a running node"

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title

    def warm(self, contestant: Contestant, scale: float) -> None:
        """Run enough of the same work that a JIT compiler has done its part."""

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        """One round; `scale` below 1 makes it shorter. Keys are the names of `metrics`."""
        raise NotImplementedError


class CpuMeter:
    """CPU the server used inside the `with` block, in nanoseconds."""

    def __init__(self, server: ServerProcess) -> None:
        self._pid = server.pid
        self.used_ns = 0

    def __enter__(self) -> CpuMeter:
        self._before_ns = cpu_ns(self._pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.used_ns = cpu_ns(self._pid) - self._before_ns


def admin_client(contestant: Contestant) -> Any:
    """confluent-kafka's admin client, silent: a node that stops between scenarios is no news."""
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": contestant.server.bootstrap, "log_level": 0})


@contextmanager
def topic(contestant: Contestant, partitions: int) -> Iterator[str]:
    """A topic of this many partitions, led and empty, deleted at the end."""
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    contestant.topics_made += 1
    name = f"bench-{contestant.topics_made:04d}"
    admin = admin_client(contestant)
    admin.create_topics([NewTopic(name, partitions, 1, config=TOPIC_SETTINGS)])[name].result(30)
    await_leaders(contestant.server.port, name, partitions)
    try:
        yield name
    finally:
        admin.delete_topics([name])[name].result(30)


def await_leaders(port: int, name: str, partitions: int, timeout_s: float = 30.0) -> None:
    """Until every partition answers a Fetch: creation is answered before the leaders are made."""
    deadline = time.monotonic() + timeout_s
    with RawConnection(port) as connection:
        for index in range(partitions):
            while True:
                connection.send(fetch(name, {index: 0}, index, max_wait_ms=0))
                error_code = read_fetch_answer(connection.receive()).error_code
                if error_code == 0:
                    break
                if time.monotonic() > deadline:
                    raise BenchError(f"{name}-{index} has no leader after {timeout_s} s: error code {error_code}")
                time.sleep(0.02)
