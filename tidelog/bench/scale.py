"""Many partitions on few brokers: the times of creation, failover, return and start, and the nodes' memory.

Every step ends when it can be seen from outside: all partitions are led, by the brokers that are up, and each took a
record with acks=all. A cluster is measured with few partitions first and with many on fresh nodes after that, so that
the growth of each figure shows too. The CPU of a step is that of all nodes together.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tidelog.bench import frames
from tidelog.bench.clusters import RunningCluster
from tidelog.bench.compare import FAILURES, MAKERS
from tidelog.bench.figures import one_line_with_type
from tidelog.bench.metadata import ClusterState, ask, await_state
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scenarios.base import CpuMeter
from tidelog.bench.topics import NewTopic, create

PARTITIONS_PER_TOPIC = 100
# Kafka takes at most 10,000 changes in one request.
_TOPICS_PER_REQUEST = 10
TIMEOUT_S = 300.0
_RETRY_S = 0.1
VALUE = b"v" * 100


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of rest around the steps. The tests take shorter ones than a measurement needs."""

    settle_s: float = 3.0
    idle_s: float = 5.0
    # Both brokers look after every log once, soon after a start.
    first_upkeep_s: float = 20.0


FULL_WAITS = Waits()


@dataclass(slots=True)
class ScaleResult:
    """Figures by name, in the order taken: seconds, CPU seconds, MiB or ms/s, as the name says."""

    figures: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def run(
    name: str,
    brokers: int,
    partitions: int,
    progress: Callable[[str], None] = lambda _: None,
    waits: Waits = FULL_WAITS,
    result: ScaleResult | None = None,
) -> ScaleResult:
    """All steps on a fresh cluster of the named broker; a step that fails ends the run and is its failure.

    The figures go into `result` as they come, so that the caller has them after an interrupt.
    """
    result = ScaleResult() if result is None else result
    with fresh_nodes(name, brokers, result) as running:
        _ClusterSteps(
            running, partitions, result, lambda step: progress(f"{name}, {partitions:,}: {step}"), waits
        ).run()
    return result


@contextmanager
def fresh_nodes(name: str, brokers: int, result: ScaleResult) -> Iterator[RunningCluster]:
    """New nodes in a directory of their own. What fails inside the block ends it, and is the failure of `result`."""
    with tempfile.TemporaryDirectory(prefix="tidelog-scale-") as scratch:
        try:
            # Deleted files wait for nothing here: Kafka's own defaults.
            with RunningCluster(MAKERS[name](Path(scratch), brokers, {}), TIMEOUT_S) as running:
                yield running
        except FAILURES as error:
            result.failure = one_line_with_type(error)


class Steps:
    """What the steps with one node and those with several have in common."""

    def __init__(
        self,
        running: RunningCluster,
        partitions: int,
        result: ScaleResult,
        progress: Callable[[str], None],
        waits: Waits,
    ) -> None:
        self._cluster, self._result, self._progress, self._waits = running.cluster, result, progress, waits
        self._nodes = list(running.cluster.nodes.values())
        self._replicas = min(3, len(self._nodes))
        self._partitions = partitions
        self._topics = [f"many-{number:04d}" for number in range(-(-partitions // PARTITIONS_PER_TOPIC))]

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        self._progress(step)
        began = time.monotonic()
        with CpuMeter(self._nodes) as meter:
            yield
        self._result.figures[f"{step}, s"] = time.monotonic() - began
        self._result.figures[f"{step}, CPU s"] = meter.used_ns / 1e9

    def _idle(self, when: str, settle_s: float | None = None) -> None:
        self._progress(f"idle, {when}")
        time.sleep(self._waits.settle_s if settle_s is None else settle_s)
        began = time.monotonic()
        with CpuMeter(self._nodes) as meter:
            time.sleep(self._waits.idle_s)
        elapsed_s = time.monotonic() - began
        self._result.figures[f"{when}: memory of a node, MiB"] = self._memory_mib()
        self._result.figures[f"{when}: idle CPU of a node, ms/s"] = meter.used_ns / 1e6 / elapsed_s / len(self._nodes)

    def _memory_mib(self) -> float:
        return sum(node.usage().rss_mib for node in self._nodes) / len(self._nodes)

    def _create(self) -> None:
        left = self._partitions
        new = []
        for name in self._topics:
            new.append(NewTopic(name, min(PARTITIONS_PER_TOPIC, left), self._replicas))
            left -= PARTITIONS_PER_TOPIC
        for first in range(0, len(new), _TOPICS_PER_REQUEST):
            create(self._nodes[0].port, new[first : first + _TOPICS_PER_REQUEST])

    def _await_led(self, port: int, in_sync: int, without: int | None = None) -> None:
        """Until every partition has a leader that is there, and so many replicas in sync."""

        def led(state: ClusterState) -> bool:
            partitions = [one for topic in self._topics for one in state.topics.get(topic, {}).values()]
            return len(partitions) == self._partitions and all(
                one.leader in state.ports and one.leader != without and len(one.in_sync) >= in_sync
                for one in partitions
            )

        await_state(port, None, led, TIMEOUT_S, f"{self._partitions:,} partitions led, {in_sync} in sync")


class _ClusterSteps(Steps):
    """The life of one cluster with many partitions."""

    def run(self) -> None:
        self._idle("empty")
        with self._timed("create"):
            self._create()
            self._await_led(self._nodes[0].port, self._replicas)
        with self._timed("first records"):
            self._write(self._nodes[0].port, lambda _: True)
        self._idle("full")
        self._lose_one()
        self._start_again()

    def _lose_one(self) -> None:
        """SIGKILL to the last broker; then it comes back."""
        victim, survivor = self._nodes[-1], self._nodes[0]
        state = ask(survivor.port)
        gone = next(node for node, port in state.ports.items() if port == victim.port)
        orphans = {
            (topic, index) for topic in self._topics for index, one in state.topics[topic].items() if one.leader == gone
        }
        self._result.figures["leaderships of the lost broker"] = len(orphans)
        self._progress(f"failover of {len(orphans):,}")
        began = time.monotonic()
        victim.kill()
        self._await_led(survivor.port, 1, without=gone)
        self._result.figures["failover, s"] = time.monotonic() - began
        self._write(survivor.port, orphans.__contains__)
        self._result.figures["failover and a record in each, s"] = time.monotonic() - began
        self._progress("return of the lost broker")
        began = time.monotonic()
        victim.start(TIMEOUT_S)
        self._result.figures["return, answering, s"] = time.monotonic() - began
        self._await_led(survivor.port, self._replicas)
        self._result.figures["return, in sync, s"] = time.monotonic() - began

    def _start_again(self) -> None:
        """The whole cluster, in order, and back until every replica of every partition is in sync."""
        self._progress("stop")
        began = time.monotonic()
        self._cluster.stop()
        self._result.figures["stop, s"] = time.monotonic() - began
        self._progress("start")
        began = time.monotonic()
        self._cluster.start(TIMEOUT_S)
        self._result.figures["start, answering, s"] = time.monotonic() - began
        self._await_led(self._nodes[0].port, self._replicas)
        self._result.figures["start, in sync, s"] = time.monotonic() - began
        self._result.figures["start, CPU s"] = sum(node.usage().cpu_s for node in self._nodes)
        self._result.figures["started: memory of a node, MiB"] = self._memory_mib()

    def _write(self, port: int, includes: Callable[[tuple[str, int]], bool]) -> None:
        """A record with acks=all to each wanted partition; again where the leader does not know yet that it is one."""
        deadline = time.monotonic() + TIMEOUT_S
        pending = self._requests(ask(port), includes)
        while pending:
            refused = []
            for leader_port, plans in _by_port(pending).items():
                with RawConnection(leader_port, TIMEOUT_S) as connection:
                    for plan in plans:
                        connection.send(frames.produce(plan, 1))
                        if any(plan.errors(connection.receive())):
                            refused.append((plan.topic, set(plan.batches)))
            if refused and time.monotonic() > deadline:
                raise BenchError(f"{len(refused)} requests refused: the first for {refused[0]}")
            if refused:
                time.sleep(_RETRY_S)
            left = {(topic, index) for topic, indexes in refused for index in indexes}
            pending = self._requests(ask(port), left.__contains__) if left else []

    def _requests(
        self, state: ClusterState, includes: Callable[[tuple[str, int]], bool]
    ) -> list[tuple[int, frames.ProducePlan]]:
        """One request per topic and leader, with the leader's port."""
        batch = frames.record_batch([VALUE], int(time.time() * 1000))
        requests = []
        for topic in self._topics:
            led: dict[int, list[int]] = {}
            for index, one in state.topics[topic].items():
                if includes((topic, index)) and one.leader in state.ports:
                    led.setdefault(state.ports[one.leader], []).append(index)
            requests += [(port, frames.ProducePlan(topic, dict.fromkeys(some, batch))) for port, some in led.items()]
        return requests


def _by_port(requests: Sequence[tuple[int, frames.ProducePlan]]) -> Mapping[int, list[frames.ProducePlan]]:
    plans: dict[int, list[frames.ProducePlan]] = {}
    for port, plan in requests:
        plans.setdefault(port, []).append(plan)
    return plans
