"""The demo's run: a node or a cluster, one producer, a group of two consumers and Spark, each in a process of its own.

The order hides the slow starts behind the work: Spark's JVM comes up first and warms while the node starts, the two
consumers share out the empty partitions before the first flight is sent, and then read while the rest is still being
produced. Whatever happens, every process started here is ended before `run` returns.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tidelog import Admin, NewTopic, Producer, TopicPartition
from tidelog.bench.demo import chart, report, source
from tidelog.bench.demo.display import Display
from tidelog.bench.demo.events import Child, Stalled
from tidelog.bench.demo.tally import Tallies, from_json
from tidelog.client import RecordMetadata
from tidelog.testing.cluster import EmbeddedCluster, tidelog_node
from tidelog.testing.processes import TidelogProcess

TOPIC = "flights"
PARTITIONS = 6
GROUP = "delays"
MEMBERS = 2
_STALLED_AFTER_S = 60.0
_SETTLE_EVERY = 500


@dataclass(slots=True)
class DemoProcess:
    """A child process and the latest event of each kind from it."""

    child: Child
    latest_events: dict[str, dict[str, Any]] = field(default_factory=dict)
    event_count: int = 0

    async def listen(self, on_event: Callable[[DemoProcess], None]) -> None:
        async for event in self.child.events():
            self.latest_events[event["event"]] = event
            self.event_count += 1
            on_event(self)

    def get(self, event: str, key: str, default: Any) -> Any:
        return self.latest_events.get(event, {}).get(key, default)


async def run(rows: int, out: Path, brokers: int = 1) -> int:
    """The whole demo; returns the exit code. Raises ChildFailed, ServerFailed or Stalled when it cannot finish."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    console = Console(highlight=False)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tidelog-demo-") as directory:
        async with AsyncExitStack() as stack:
            demo = Demo(stack, Path(directory), rows, console, brokers)
            outcome = await demo.run()
    image = out / "arrival-delay-by-carrier.png"
    chart.draw(outcome.spark, source.airlines(), image)
    console.print(report.table(outcome.spark, source.airlines()))
    good = report.print_checks(console, outcome)
    console.print(f"\nChart: {image}")
    seconds = time.monotonic() - start_s
    result = f"Demo {'finished' if good else 'failed'} in {seconds:.1f} s ({report.timings(outcome)})"
    console.print(result, soft_wrap=True)
    return 0 if good else 1


async def _to_its_end(start: Callable[[], float]) -> float:
    """`start` in a thread. A cancellation waits for its end, so that what is stopped then has been started."""
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        raise


class Demo:
    """One run of the demo: its processes and their latest events."""

    def __init__(self, stack: AsyncExitStack, directory: Path, rows: int, console: Console, brokers: int = 1) -> None:
        self._stack = stack
        self._directory = directory
        self._rows = rows
        self._brokers = brokers
        self._display = Display(console, rows, MEMBERS)
        self._listeners: list[asyncio.Task[None]] = []
        self._acknowledged: Counter[int] = Counter()
        self._tallies: Tallies = {}

    async def run(self) -> report.Outcome:
        self._stack.enter_context(self._display)
        node = self._nodes()
        spark = await self._start_process(
            "Spark job", "spark", [node.bootstrap_servers, TOPIC, str(self._directory / "spark")]
        )
        self._stack.callback(node.stop)
        ready_s = await _to_its_end(node.start)
        replicas = min(3, self._brokers)
        self._display.ready(node.bootstrap_servers, ready_s, f"topic {TOPIC} with {PARTITIONS} partitions", replicas)
        async with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
            await admin.create_topics([NewTopic(TOPIC, PARTITIONS, replicas)])
        members = [
            await self._start_process(f"consumer {number}", "consume", [node.bootstrap_servers, TOPIC, GROUP])
            for number in range(1, MEMBERS + 1)
        ]
        await self._until(lambda: self._shared_out(members), "the group to share out the partitions")

        start_s = time.monotonic()
        await self._produce(node.bootstrap_servers)
        produced_s = time.monotonic() - start_s
        await self._until(lambda: self._consumed(members) >= self._rows, "the group to read everything")
        consumed_s = time.monotonic() - start_s
        for member in members:
            member.child.tell("stop")
        await self._until(lambda: all("done" in member.latest_events for member in members), "the consumers to leave")
        ends, committed = await self._offsets(node.bootstrap_servers)

        await self._until(lambda: "session" in spark.latest_events, "Spark to start")
        spark.child.tell("read")
        await self._until(lambda: "done" in spark.latest_events, "Spark to read the topic")
        return report.Outcome(
            rows=self._rows,
            source=self._tallies,
            members=[member.latest_events["done"] for member in members],
            ends=ends,
            committed=committed,
            spark=from_json(spark.latest_events["done"]["tallies"]),
            seconds={
                "node ready": ready_s,
                "produce": produced_s,
                "produce and consume": consumed_s,
                "Spark start": spark.latest_events["session"]["seconds"],
                "Spark read": spark.latest_events["done"]["seconds"],
            },
        )

    def _nodes(self) -> TidelogProcess | EmbeddedCluster:
        """What is to run: one node, or a cluster."""
        if self._brokers == 1:
            return TidelogProcess(self._directory / "node")
        return EmbeddedCluster(self._brokers, self._directory, make_node=tidelog_node)

    @staticmethod
    async def _offsets(bootstrap: str) -> tuple[dict[int, int], dict[int, int]]:
        """Where each partition ends, and where the group has committed to."""
        partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        async with Admin(bootstrap_servers=bootstrap) as admin:
            ends = await admin.list_offsets(dict.fromkeys(partitions, "latest"))
            committed = await admin.list_consumer_group_offsets(GROUP)
        return (
            {partition.partition: end.offset for partition, end in ends.items() if end is not None},
            {partition.partition: position.offset for partition, position in committed.items()},
        )

    async def _start_process(self, name: str, module: str, arguments: list[str]) -> DemoProcess:
        child = await Child.start(name, f"tidelog.bench.demo.{module}", arguments, self._directory)
        self._stack.push_async_callback(child.end)
        process = DemoProcess(child)
        task = asyncio.create_task(process.listen(self._show))
        self._stack.callback(task.cancel)
        self._listeners.append(task)
        return process

    def _show(self, process: DemoProcess) -> None:
        if process.child.name == "Spark job":
            self._display.spark(process.latest_events)
            return
        number = int(process.child.name.split()[-1])
        partitions = process.get("assigned", "partitions", [])
        self._display.consumer(number, partitions, process.get("progress", "records", 0), self._share_of(partitions))

    def _share_of(self, partitions: list[int]) -> int:
        """How many of all flights these partitions will hold, judged by those acknowledged so far; exact at the end."""
        acknowledged = self._acknowledged.total()
        here = sum(self._acknowledged[partition] for partition in partitions)
        return round(self._rows * here / acknowledged) if acknowledged else 0

    @staticmethod
    def _shared_out(members: list[DemoProcess]) -> bool:
        assignments = [member.get("assigned", "partitions", []) for member in members]
        return all(assignments) and sorted(itertools.chain(*assignments)) == list(range(PARTITIONS))

    @staticmethod
    def _consumed(members: list[DemoProcess]) -> int:
        return sum(member.get("progress", "records", 0) for member in members)

    async def _produce(self, bootstrap: str) -> None:
        # By key, since records of one key are acknowledged in order: looking at the first of each is enough.
        pending: defaultdict[bytes, deque[asyncio.Future[RecordMetadata]]] = defaultdict(deque)
        async with Producer(
            bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, compression_type="lz4", linger_ms=5
        ) as producer:
            for number, flight in enumerate(source.read_flights(self._rows, self._tallies)):
                pending[flight.key].append(await producer.send(TOPIC, flight.value, flight.key))
                if number % _SETTLE_EVERY == 0:
                    await asyncio.sleep(0)
                    self._settle(pending.values())
            await producer.flush()
        self._settle(pending.values())
        assert not any(pending.values()), "flush returned before everything was acknowledged"

    def _settle(self, queues: Iterable[deque[asyncio.Future[RecordMetadata]]]) -> None:
        for queue in queues:
            while queue and queue[0].done():
                self._acknowledged[queue.popleft().result().partition] += 1
        self._display.produced(self._acknowledged.total())

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition that the children's events make true; fails with them, or when they fall silent."""
        event_count, since = -1, time.monotonic()
        while not condition():
            for task in self._listeners:
                if task.done():
                    task.result()
            now = time.monotonic()
            if (events := self._display.changes) != event_count:
                event_count, since = events, now
            if now - since > _STALLED_AFTER_S:
                raise Stalled(f"waited {_STALLED_AFTER_S:.0f} s for {what}")
            await asyncio.sleep(0.02)
