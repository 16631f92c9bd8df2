"""A cluster to be directed step by step: the named cases are told here as they are in Kafka's documents.

`do` runs one coroutine of a client to its end and gives back its result; between two steps time stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.simulation.cluster import DATA, Cluster, Layout, SimulatedNode
from tests.simulation.cluster_clients import OPTIONS
from tests.simulation.cluster_invariants import STEP_INVARIANTS, Knowledge, check_step, contents
from tests.simulation.simulated_client import simulated_client
from tests.simulation.world import World, without_collector
from tidelog.client.admin.client import Admin
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.producing.producer import Producer
from tidelog.protocol.errors import ErrorCode, KafkaError

TOPIC = "t"


class Stage:
    """`brokers` beside one controller, n9, that nothing ever happens to; topic t with one partition on all of them."""

    def __init__(
        self,
        brokers: tuple[int, ...] = (1, 2, 3),
        config: Mapping[str, str] | None = None,
        log_dirs: tuple[str, ...] = (DATA,),
    ) -> None:
        self.world = World(1)
        settings = {"min.insync.replicas": "1", "auto.leader.rebalance.enable": "false", **(config or {})}
        self.cluster = Cluster(self.world, Layout((9,), brokers, settings, log_dirs=log_dirs))
        self.knowledge = Knowledge()
        self.invariants = [kind(self.cluster, self.knowledge) for kind in STEP_INVARIANTS]
        self.world.on_step = self._check
        self.client = self.cluster.client()
        self._producers: dict[str, Producer] = {}
        self.client.start(_for_ever)
        self.brokers = brokers

    def _check(self, loop: Any) -> None:
        node = self.cluster.by_loop.get(loop)
        if node is not None and node.node is not None:
            check_step(node, self.invariants)

    def node(self, node_id: int) -> SimulatedNode:
        return self.cluster.nodes[node_id]

    def replica(self, node_id: int) -> Any:
        return self.node(node_id).replica(TOPIC, 0)

    @property
    def isr(self) -> list[int]:
        return sorted(self.cluster.placed(TOPIC).isr)

    @property
    def leader(self) -> int:
        return int(self.cluster.placed(TOPIC).leader)

    def values(self, node_id: int) -> list[bytes]:
        return list(contents(self.replica(node_id).log).values())

    # Acting

    def up(self, replicas: tuple[int, ...] = (1, 2, 3), **configs: str) -> None:
        """Everything runs, and t exists with its first replica leading."""
        self.cluster.start()
        self.cluster.wait("all nodes are up", 30, self.cluster.is_up)
        named = {name.replace("_", "."): value for name, value in configs.items()}

        async def create(admin: Admin) -> None:
            await admin.create_topics([NewTopic(TOPIC, replica_assignments={0: list(replicas)}, configs=named)])

        self.admin(create)
        self.until("all replicas are there", lambda: self.cluster.all_in_sync())

    def do(self, work: Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
        """Raises what it raises."""
        outcome: list[tuple[Any, BaseException | None]] = []
        loop = self.client.loop
        assert loop is not None

        async def run() -> None:
            try:
                outcome.append((await work(), None))
            except Exception as error:
                outcome.append((None, error))

        loop.call_soon(lambda: loop.create_task(run()))
        self.cluster.wait("the client is answered", seconds, lambda: bool(outcome))
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def admin(self, work: Callable[[Admin], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with Admin(**OPTIONS, bootstrap_servers=self.cluster.layout.bootstrap) as admin:
                return await work(admin)

        return self.do(run)

    def send(self, value: bytes, acks: str = "all", timeout_ms: int = 20_000) -> int:
        """The offset it was given. Raises KafkaError, the broker's own refusal included: nothing is sent twice."""

        async def run() -> int:
            options = {**OPTIONS, "request_timeout_ms": timeout_ms}
            producer = Producer(
                **options,
                bootstrap_servers=self.cluster.layout.bootstrap,
                acks=acks,
                linger_ms=0,
                retries=0,
                enable_idempotence=False,
                delivery_timeout_ms=timeout_ms + 1,
            )
            try:
                sent = await producer.send_and_wait(TOPIC, value, partition=0)
            finally:
                await producer.close(0)
            return int(sent.offset)

        return int(self.do(run))

    def refused(self, value: bytes = b"refused") -> ErrorCode:
        """The error of an acks=all produce, NONE if it was taken."""
        try:
            self.send(value, timeout_ms=3_000)
        except KafkaError as error:
            return error.code
        return ErrorCode.NONE

    def elect(self, election: str = "preferred") -> Any:
        async def work(admin: Admin) -> Any:
            return await admin.elect_leaders(
                [TopicPartition(TOPIC, 0)], **({} if election == "preferred" else {"unclean": True})
            )

        return self.admin(work)

    def pause(self, node_id: int) -> None:
        loop = self.node(node_id).host.loop
        assert loop is not None
        loop.pause()

    def resume(self, node_id: int) -> None:
        loop = self.node(node_id).host.loop
        assert loop is not None
        loop.resume()

    def until(self, what: str, done: Callable[[], bool], seconds: float = 30) -> None:
        self.cluster.wait(what, seconds, done)

    def wait(self, seconds: float) -> None:
        self.world.run_for(seconds)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@contextmanager
def stage(brokers: tuple[int, ...] = (1, 2, 3), log_dirs: tuple[str, ...] = (DATA,), **config: str) -> Iterator[Stage]:
    """Config keys with underscores for dots."""
    with without_collector(), simulated_client():
        directed = Stage(brokers, {name.replace("_", "."): value for name, value in config.items()}, log_dirs)
        try:
            yield directed
        finally:
            directed.world.on_step = None
            directed.world.end()
