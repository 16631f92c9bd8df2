"""Whole data planes of several nodes in one process: logs on simulated disks, links that deliver when the test says so.

No controller: the test is it. `Replicas.elect` changes the one partition's image and shows it to the nodes named.
Time stands still until `run_for`; everything happens in the order in which it was asked for.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tidelog.broker.apis.records import fetch, list_offsets, produce
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.network.counters import RequestCounters
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.replicas.hosting import Hosting
from tidelog.broker.replicas.log_directories import LogDirectories
from tidelog.broker.replicas.partitions import Partitions
from tidelog.broker.replicas.replica_moves import ReplicaMoves
from tidelog.broker.replicas.upkeep import Upkeep
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import Record
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.replication.controller.metadata.image import (
    BrokerImage,
    EndpointImage,
    MetadataDelta,
    MetadataImage,
    PartitionImage,
    TopicImage,
)
from tidelog.replication.fetcher import ReplicaFetchers
from tidelog.replication.fetcher_settings import FetcherSettings
from tidelog.replication.isr import Proposal
from tidelog.replication.partition import Partition, ReplicaPorts
from tidelog.replication.ports import Endpoint, Link, OnResponse
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending

TOPIC_ID = b"T" * 16
LIST_OFFSETS = 2


class Done:
    """As much of a future as a call on an executor needs."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Done], None]] = []
        self.add_done_callback = self.callbacks.append
        self.value: Any = None
        self.error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def exception(self) -> Exception | None:
        return self.error

    def cancelled(self) -> bool:
        return False


class Assignments:
    """The directories that a node has reported, and who waits for the answer."""

    def __init__(self) -> None:
        self.reported: dict[tuple[bytes, int], tuple[bytes, Callable[[], None] | None]] = {}

    def report(
        self, topic_id: bytes, index: int, directory_id: bytes, on_accepted: Callable[[], None] | None = None
    ) -> None:
        before, waiting = self.reported.get((topic_id, index), (b"", None))
        self.reported[topic_id, index] = directory_id, on_accepted or (waiting if before == directory_id else None)

    def forget(self, topic_id: bytes, index: int) -> None:
        self.reported.pop((topic_id, index), None)


class ManualLoop:
    """As much of an event loop as the data plane uses, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.device_waits = False
        self.waiting: list[Callable[[], None]] = []
        """What would run on the executor, if the device did not make it wait."""
        self.settles_in: Callable[[], int] = lambda: 10_000
        """After so many turns it is at rest. A history may go on earlier."""
        self._ready: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Any]] = []
        self._count = 0

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., None], *args: Any, context: Any = None) -> None:
        self._ready.append((callback, args))

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now_s + delay_s, callback, *args)

    def call_at(self, when_s: float, callback: Callable[..., None], *args: Any, context: Any = None) -> Any:
        self._count += 1
        handle = SimpleNamespace(cancelled=False, callback=callback, args=args)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        heapq.heappush(self._timers, (when_s, self._count, handle))
        return handle

    def run_in_executor(self, executor: Any, work: Callable[[], Any]) -> Any:
        future = Done()

        def run() -> None:
            try:
                future.value = work()
            except Exception as error:
                future.error = error
            for callback in future.callbacks:
                callback(future)

        if self.device_waits:
            self.waiting.append(run)
        else:
            self.call_soon(run)
        return future

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, work: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        return asyncio.Task(work, loop=cast(Any, self), name=name)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), PowerLoss):
            logging.getLogger("tidelog.loop").error("%s", context)

    def run_awaited(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """`run_in_executor` for a task that awaits it."""
        future = self.create_future()

        def run() -> None:
            try:
                future.set_result(work())
            except (Exception, PowerLoss) as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    def turn(self) -> bool:
        """Run what is ready now, but not what that makes ready; False when there was nothing."""
        outer = asyncio._get_running_loop()  # that of a fixture, perhaps
        asyncio._set_running_loop(cast(Any, self))
        try:
            for _ in range(len(self._ready)):
                callback, args = self._ready.popleft()
                with suppress(PowerLoss):  # of one node; the others go on
                    callback(*args)
        finally:
            asyncio._set_running_loop(outer)
        return bool(self._ready)

    def settle(self) -> None:
        turns = self.settles_in()
        for _ in range(turns):
            if not self._ready:
                return
            self.turn()
        assert turns < 10_000, "it never comes to rest"

    def run_for(self, duration_ms: float) -> None:
        end_s = self.now_s + duration_ms / 1000
        self.settle()
        while self._timers and self._timers[0][0] <= end_s:
            when_s, _, handle = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, when_s)
            if not handle.cancelled:
                with suppress(PowerLoss):
                    handle.callback(*handle.args)
            self.settle()
        self.now_s = end_s


class FakeLink:
    """To a node of the same process: requests and answers are delivered by the loop, in order."""

    def __init__(self, cluster: Replicas, source: int, target: int) -> None:
        self._cluster, self._source, self._target = cluster, source, target
        self._open: deque[OnResponse] = deque()
        self._arrived: list[Any] = []
        self.refused = False
        self.reason = "the process has ended"
        self.arrived_bytes = 0
        self.closed = False
        self.served: list[Deferred] = []

    def request(self, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        self._open.append(on_response)
        self._cluster.loop.call_soon(self._deliver, api_key, version, bytearray(body))

    def _deliver(self, api_key: int, version: int, body: bytearray) -> None:
        if self.closed:
            return
        node = self._cluster.nodes.get(self._target)
        if node is None or node.disk.is_off or (self._source, self._target) in self._cluster.cut:
            if node is None:
                self._break()
            return
        self._cluster.requests.append((self._source, self._target, api_key))
        answer = node.serve(api_key, version, memoryview(body))
        place: list[Any] = [None]
        self._arrived.append(place)

        def done(frames: Any) -> None:
            place[0] = frames if isinstance(frames, bytes | bytearray) else b"".join(frames)
            self._cluster.loop.call_soon(self._answer)

        if isinstance(answer, Deferred):
            self.served.append(answer)
            answer.on_complete(done)
        else:
            done(answer)

    def _answer(self) -> None:
        if (self._source, self._target) in self._cluster.cut:
            return
        while self._arrived and self._arrived[0][0] is not None and not self.closed:
            frame = self._arrived.pop(0)[0]
            callback = self._open.popleft()
            callback(memoryview(bytearray(frame))[9:])

    def _break(self) -> None:
        self.closed = True
        while self._open:
            self._open.popleft()(None)

    def close(self) -> None:
        self.closed = True
        for deferred in self.served:
            if deferred.response is None and deferred.on_abandon is not None:
                deferred.on_abandon()
        self._cluster.loop.call_soon(self._break)


class ReplicaNode:
    """One node's data plane around a disk that outlives it."""

    def __init__(self, cluster: Replicas, node_id: int, disk: SimulatedDisk, *, killed: bool = False) -> None:
        self.id = node_id
        self.cluster = cluster
        self.disk = disk
        loop = cast(asyncio.AbstractEventLoop, cluster.loop)
        self.rng = random.Random(node_id)
        config = NodeConfig.load(None, {"node.id": str(node_id), "log.dirs": "/data", **cluster.options})
        self.homes = [
            LogDirectory.open(disk, str(path), node_id=node_id, cluster_id="C" * 22) for path in config.log_dirs
        ]
        self.directory = self.homes[0]
        for home in self.homes if killed else ():
            if not home.was_clean:
                home.ending = Ending.KILLED
        self.proposals: list[tuple[Partition, Proposal]] = []
        self.partitions = Partitions(
            loop, lambda _: None, self.clock_ms, self.rng, lambda topic, index: topic in ("t", TOPIC_ID) and index == 0,
            fetch_session_slots_max=100, fetch_bytes_max=1 << 20,
            replica=ReplicaPorts(
                now_ms=lambda: loop.time() * 1000,
                broker=lambda broker_id: cluster.image.brokers.get(broker_id),
                broker_epoch=lambda: cluster.broker_epochs[node_id],
                propose=lambda partition, proposal: self.proposals.append((partition, proposal)),
                lag_ms_max=config.integer("replica.lag.time.max.ms"),
            ),
            tells_followers_high_watermark=config.has_follower_reads,
        )  # fmt: skip
        self.fetchers = ReplicaFetchers(
            node_id=node_id,
            broker_epoch=lambda: cluster.broker_epochs[node_id],
            connect=self._connect,
            endpoint_of=lambda broker_id: Endpoint("node", broker_id),
            loop=loop,
            rng=self.rng,
            clock_ms=self.clock_ms,
            settings=FetcherSettings(),
            on_failed=self.partitions.failed,
            on_appended=self.partitions.flushes.flush_if_due,
        )
        self.broken: list[Exception] = []
        self.directories = LogDirectories(config, disk, loop, self.broken.append)
        self.directories.online += self.homes
        self.partitions.on_disk_failure = self.directories.failed_at
        self.settings = DynamicConfig(config)
        self.assignments = Assignments() if len(self.homes) > 1 else None
        self.hosting = Hosting(
            node_id, self.settings, self.directories, self.partitions, loop, self.clock_ms,
            lambda partition, leads: None, fetchers=self.fetchers, assignments=cast(Any, self.assignments),
        )  # fmt: skip
        self.moves: ReplicaMoves | None = None
        if self.assignments is not None:
            self.moves = ReplicaMoves(
                self.settings, self.directories, self.partitions, cast(Any, self.assignments), loop, self.clock_ms,
                cluster.loop.run_awaited,
            )  # fmt: skip
            self.hosting.set_moves(self.moves)
        self.upkeep = Upkeep(
            config, self.directories, self.partitions, loop, self.clock_ms,
            lambda work: loop.run_in_executor(None, work), disk,
        )  # fmt: skip
        self.services: Any = SimpleNamespace(
            partitions=self.partitions, clock_ms=self.clock_ms, image=lambda: cluster.image, node_id=node_id,
            config=config, rng=self.rng, requests=RequestCounters(), scheduler=FairScheduler(loop.call_soon),
        )  # fmt: skip
        self.hosting.load(cluster.image)

    def end_moves(self) -> None:
        """The task of the moves ends, before its process or as the first thing of a clean stop."""
        task = None if self.moves is None else self.moves._task
        if task is None:
            return
        task.cancel()
        while not task.done():
            assert self.cluster.loop.turn() or task.done(), "it waits for something else"
        if not task.cancelled():
            task.exception()

    def clock_ms(self) -> int:
        return int(self.cluster.loop.now_s * 1000)

    def _connect(self, endpoint: Endpoint) -> Link:
        link = FakeLink(self.cluster, self.id, endpoint.port)
        self.cluster.links.append(link)
        return link

    def show(self) -> None:
        """What the metadata says now."""
        delta = MetadataDelta(changed_partitions={TOPIC_ID: {0}}, changed_brokers=set(self.cluster.image.brokers))
        with suppress(PowerLoss):
            self.hosting.apply(self.cluster.image, delta)

    def serve(self, api_key: int, version: int, body: memoryview) -> Any:
        peer: Any = SimpleNamespace(host="test", listener_name="PLAINTEXT", close=lambda: None, send_much=lambda: None)
        if api_key == fetch.API_KEY:
            return fetch.serve(self.services, body, version, 1, peer)[0]
        if api_key == produce.API_KEY:
            return produce.serve(self.services, body, 0, version, 1, peer)
        assert api_key == LIST_OFFSETS
        context = RequestContext(api_key, version, 1, None, "test", "PLAINTEXT")
        answer: Any = list_offsets.handle(self.services, context, ListOffsetsRequest.decode(body, version))
        return b"\0" * 9 + answer.encode(version)

    def path_of(self, directory_id: bytes) -> str:
        return next(home.path for home in self.homes if home.directory_id == directory_id)

    @property
    def hosts(self) -> bool:
        return self.partitions.find(TOPIC_ID, 0) is not None

    @property
    def partition(self) -> Partition:
        found = self.partitions.find(TOPIC_ID, 0)
        assert found is not None
        return found

    @property
    def log(self) -> Any:
        return self.partition.log

    @property
    def marks(self) -> tuple[int, int]:
        """(high watermark, log end offset)"""
        return self.log.high_watermark, self.log.log_end_offset

    def values(self) -> list[bytes]:
        found = self.log
        data = b"".join(map(bytes, found.read(found.log_start_offset, 1 << 20, found.log_end_offset).regions))
        return [record.value for record in iter_records(data) if record.value is not None]

    def produce(self, *values: bytes, acks: int = -1, timeout_ms: int = 1000, **sequence: Any) -> Sent:
        """`sequence`: producer_id, producer_epoch and base_sequence of an idempotent producer."""
        now_ms = self.clock_ms()
        records = [self.cluster.record_of(number, now_ms, value) for number, value in enumerate(values)]
        batch = bytes(encode_batch(records, **sequence))
        request = ProduceRequest(
            acks=acks,
            timeout_ms=timeout_ms,
            topic_data=[TopicProduceData(name="t", partition_data=[PartitionProduceData(index=0, records=batch)])],
        )
        return Sent(self.serve(produce.API_KEY, 10, memoryview(bytearray(request.encode(10)))), 10)

    def fetch(self, offset: int, *, rack: str = "", version: int = 18, wait_ms: int = 0) -> PartitionData:
        """As a consumer; what it is told of the partition."""
        request = FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            topics=[
                FetchTopic(
                    topic="t",
                    topic_id=TOPIC_ID,
                    partitions=[FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)],
                )
            ],
            rack_id=rack,
        )
        answer = self.serve(fetch.API_KEY, version, memoryview(request.encode(version)))
        frame = b"".join(answer) if isinstance(answer, list) else answer
        self.fetched = FetchResponse.decode(frame[9 if version >= 12 else 8 :], version)
        return self.fetched.responses[0].partitions[0]

    def latest(self, replica_id: int = -1) -> tuple[int, int]:
        """ListOffsets: (error, offset)"""
        asked = ListOffsetsPartition(partition_index=0, timestamp=-1)
        request = ListOffsetsRequest(replica_id=replica_id, topics=[ListOffsetsTopic(name="t", partitions=[asked])])
        answer = self.serve(LIST_OFFSETS, 7, memoryview(request.encode(7)))
        told = ListOffsetsResponse.decode(answer[9:], 7).topics[0].partitions[0]
        return told.error_code, told.offset

    def checkpoint(self) -> None:
        for home in self.homes:
            home.write_checkpoints()


class Sent:
    """A produce request and what has become of it."""

    def __init__(self, answer: Any, version: int) -> None:
        self._version = version
        self.frame: bytes | None = None
        if isinstance(answer, Deferred):
            answer.on_complete(self._done)
        else:
            self._done(answer)

    def _done(self, frame: Any) -> None:
        self.frame = bytes(frame)

    @property
    def response(self) -> ProduceResponse:
        assert self.frame is not None
        return ProduceResponse.decode(self.frame[9:], self._version)

    @property
    def code(self) -> int | None:
        """None: not answered yet."""
        if self.frame is None:
            return None
        return self.response.responses[0].partition_responses[0].error_code


class Replicas:
    """Nodes 1..n that hold partition t-0; node 1 leads at first, all in sync."""

    def __init__(self, count: int, *, seed: int = 1, **options: str) -> None:
        self.loop = ManualLoop()
        self.options = {name.replace("_", "."): value for name, value in options.items()}
        self.broker_epochs = dict.fromkeys(range(1, count + 1), 100)
        self.fenced: set[int] = set()
        self.racks: dict[int, str] = {}
        self.cut: set[tuple[int, int]] = set()
        self.links: list[FakeLink] = []
        self.requests: list[tuple[int, int, int]] = []
        ids = tuple(range(1, count + 1))
        self.placed = PartitionImage(replicas=ids, isr=ids, leader=1, leader_epoch=0, partition_epoch=0)
        self.record_of: Callable[[int, int, bytes], Record] = lambda number, now_ms, value: Record(
            number, now_ms, None, value
        )
        """(number in its batch, ms, value) -> what a client sends."""
        self.configs: dict[str, str] = {}
        self.broker_configs: dict[str, str] = {}
        self.image = MetadataImage()
        self._publish()
        self.disks = {each: SimulatedDisk(random.Random(seed * 100 + each)) for each in ids}
        self.nodes: dict[int, ReplicaNode] = {}
        for each in ids:
            self.start(each)
        for node in self.nodes.values():
            if node.moves is None:
                node.hosting.start()
            node.upkeep.start()
        self.loop.settle()

    def flush(self) -> None:
        """Of each log that is new, the first record would wait for the device."""
        for node in self.nodes.values():
            node.log.flush()

    def add_topic(self, topic_id: bytes, name: str, count: int) -> TopicImage:
        """Led by node 1; shown to nobody yet."""
        placed = replace(self.placed, leader=1, leader_epoch=0, partition_epoch=0)
        topic = TopicImage(name, topic_id, dict.fromkeys(range(count), placed))
        self.image = replace(
            self.image,
            topics_by_name={**self.image.topics_by_name, name: topic},
            topics_by_id={**self.image.topics_by_id, topic_id: topic},
        )
        return topic

    def _publish(self) -> None:
        topic = TopicImage("t", TOPIC_ID, {0: self.placed})
        self.image = MetadataImage(
            brokers={
                each: BrokerImage(
                    each,
                    epoch,
                    b"i" * 16,
                    {"PLAINTEXT": EndpointImage("PLAINTEXT", "node", each)},
                    fenced=each in self.fenced,
                    rack=self.racks.get(each),
                )
                for each, epoch in self.broker_epochs.items()
            },
            topics_by_name={"t": topic},
            topics_by_id={TOPIC_ID: topic},
            configs={(2, "t"): self.configs, (4, ""): self.broker_configs},
        )

    def start(self, node_id: int, *, shown: bool = True, killed: bool = False) -> ReplicaNode:
        """`killed`: the machine has run on since the last process ended."""
        node = self.nodes[node_id] = ReplicaNode(self, node_id, self.disks[node_id], killed=killed)
        if shown:
            node.show()
        if node.moves is not None:
            with suppress(PowerLoss):
                node.hosting.start()
        return node

    def stop(self, node_id: int, *, power: bool = False, closed: bool = False) -> bool:
        """Kill the process, or end it cleanly (`closed`); with `power` what its disk had not synced may be lost too.

        False if the disk was struck while it closed.
        """
        self.nodes[node_id].end_moves()
        node = self.nodes.pop(node_id)
        node.fetchers.close()
        node.upkeep.close()
        node.hosting.close()
        is_struck = False
        for home in node.homes if closed else ():
            try:
                home.close()
            except PowerLoss:
                is_struck = True
        if power:
            node.disk.lose_power()
        else:
            node.disk.end_process()
        for link in self.links:
            if link._target == node_id and not link.closed:
                link._break()
        return not is_struck

    def close(self) -> None:
        """End what is under way on the nodes that run: a pending task would complain when it is collected."""
        for node in self.nodes.values():
            node.end_moves()

    def heal(self) -> None:
        """What was cut hung until now; it turns out to be broken."""
        for link in self.links:
            if (link._source, link._target) in self.cut:
                link._break()
        self.cut.clear()

    def elect(self, leader: int, isr: Iterable[int], *, tell: Iterable[int] | None = None) -> None:
        """A leader epoch begins; those told learn of it."""
        placed = self.placed
        self.placed = replace(
            placed, leader=leader, isr=tuple(isr), leader_epoch=placed.leader_epoch + 1,
            partition_epoch=placed.partition_epoch + 1,
        )  # fmt: skip
        self._publish()
        self.tell(tell)

    def place(self, **changes: Any) -> None:
        """The same leader, another ISR or assignment. No node learns of it yet."""
        self.placed = replace(self.placed, partition_epoch=self.placed.partition_epoch + 1, **changes)
        self._publish()

    def alter(self, **changes: Any) -> None:
        """`place`, and all learn of it."""
        self.place(**changes)
        self.tell()

    def configure(self, **configs: str) -> None:
        self.configs = {name.replace("_", "."): value for name, value in configs.items()}
        self._publish()
        for node in self.nodes.values():
            node.hosting.apply(self.image, MetadataDelta(changed_configs={(2, "t")}))

    def set_rates(self, **configs: str) -> None:
        """Dynamic configs of every broker."""
        self.broker_configs = {name.replace("_", "."): value for name, value in configs.items()}
        self._publish()
        for node in self.nodes.values():
            delta = MetadataDelta(changed_configs={(4, "")})
            node.settings.on_image(self.image, delta)
            node.hosting.apply(self.image, delta)

    def agree(self, node_id: int) -> Proposal:
        """The controller does what the leader proposed and answers; the metadata follows."""
        partition, proposal = self.nodes[node_id].proposals.pop()
        isr = tuple(broker_id for broker_id, _ in proposal.isr)
        self.placed = replace(self.placed, isr=isr, partition_epoch=self.placed.partition_epoch + 1)
        self._publish()
        partition.on_proposal_agreed(proposal, self.placed.partition_epoch)
        self.tell()
        return proposal

    def tell(self, node_ids: Iterable[int] | None = None) -> None:
        for each in sorted(self.nodes) if node_ids is None else node_ids:
            self.nodes[each].show()
        self.loop.settle()

    def marks(self) -> dict[int, tuple[int, int]]:
        return {each: node.marks for each, node in sorted(self.nodes.items())}
