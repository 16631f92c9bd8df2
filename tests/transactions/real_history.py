"""One history with real clients against a running cluster: a thread for each client; then all is read and judged."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import confluent_kafka
import confluent_kafka.admin

from tests.transactions.checker import Anomaly, check
from tests.transactions.confluent_client import ConfluentClient, final_read
from tests.transactions.history import Chain, History, Isolation
from tests.transactions.java_client import JavaClient
from tests.transactions.own_client import OwnClient
from tests.transactions.performing import ClientError, Performer, drive
from tests.transactions.topics import ClientSettings, Topics
from tests.transactions.workload import ChainPlan, Plan, Shape, chain_plans, isolation_of, plans

confluent: Any = confluent_kafka
admin: Any = confluent_kafka.admin
MakeClient = Callable[[ClientSettings], Any]
MAKERS: dict[str, MakeClient] = {"confluent": ConfluentClient, "java": JavaClient, "tidelog": OwnClient}
STABLE_S = 180.0
"""How long the end of all transactions is waited for; a transaction times out long before."""


class _Worker(threading.Thread):
    """One client and its plans. `trouble`: a mistake of these tests, not of the broker."""

    def __init__(self, name: str, settings: ClientSettings, make: MakeClient, history: History) -> None:
        super().__init__(name=name, daemon=True)
        self._settings, self._make = settings, make
        self.performer = Performer(history, name, time.monotonic, settings.isolation)
        self.plans: Iterable[Plan | ChainPlan] = ()
        self.stopping = threading.Event()
        self.deadline = 0.0
        self.trouble: BaseException | None = None
        self.unopened = 0

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.trouble = error

    async def _main(self) -> None:
        client = self._make(self._settings)
        try:
            await self._work(client)
        finally:
            closing = client.close()
            if closing is not None:
                await closing

    async def _work(self, client: Any) -> None:
        performer = self.performer
        for plan in self.plans:
            while not self.stopping.is_set() and time.monotonic() < self.deadline:
                performing = performer.perform(plan) if isinstance(plan, Plan) else performer.perform_chain(plan)
                try:
                    await drive(performing, client)
                    break
                except ClientError:
                    self.unopened += 1
                    await asyncio.sleep(0.2)
            else:
                break
        if not performer.is_open:
            await self._end_what_is_open(client)

    async def _end_what_is_open(self, client: Any) -> None:
        """Another producer ends the last transaction; else it times out."""
        try:
            await drive(self.performer.open(), client)
        except ClientError:
            self.unopened += 1


class RealHistory:
    def __init__(
        self, bootstrap: str, name: str, seed: int, clients: Sequence[str], *, replicas: int, is_patient: bool
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.bootstrap, self.seed, self.replicas = bootstrap, seed, replicas
        self.shape = Shape(
            partitions=rng.choice((2, 3, 5)), inputs=rng.choice((1, 2)), clients=rng.choice((2, 3, 4)),
            chain_clients=rng.choice((0, 1, 2)), operations=rng.choice((8, 15, 25)) * (3 if is_patient else 1),
        )  # fmt: skip
        self.topics = Topics(name, f"{name}-input", self.shape)
        self.history = History()
        self._is_patient = is_patient
        self._workers = [self._worker(rng, number, clients) for number in range(self.shape.clients)]
        self._chain_workers = [self._chain_worker(rng, number, clients) for number in range(self.shape.chain_clients)]

    def _settings(self, transactional_id: str, isolation: Isolation, group: str | None) -> ClientSettings:
        timeout_s = self.rng.choice((1.5, 4.0, 8.0)) if self._is_patient else 20.0
        return ClientSettings(
            self.bootstrap,
            self.topics,
            transactional_id,
            isolation,
            group,
            timeout_s,
            6_000 if self._is_patient else 20_000,
        )

    def _worker(self, rng: random.Random, number: int, clients: Sequence[str]) -> _Worker:
        kind = rng.choice(clients)
        settings = self._settings(f"client-{number}", isolation_of(rng), None)
        worker = _Worker(f"{kind}-{number}", settings, MAKERS[kind], self.history)
        worker.plans = plans(random.Random(rng.getrandbits(64)), self.shape, number)
        return worker

    def _chain_worker(self, rng: random.Random, number: int, clients: Sequence[str]) -> _Worker:
        kind = rng.choice(clients)
        name = f"{self.topics.topic}-chain"
        settings = self._settings(f"chain-{number}", Isolation.READ_COMMITTED, name)
        worker = _Worker(f"{kind}-chain-{number}", settings, MAKERS[kind], self.history)
        seed = rng.getrandbits(64)
        worker.plans = chain_plans(random.Random(seed), self.shape, self.shape.clients + number)
        return worker

    # Running

    def create_topics(self) -> None:
        client = admin.AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        counts = {self.topics.topic: self.shape.partitions, self.topics.input_topic: self.shape.inputs}
        config = {"min.insync.replicas": str(min(2, self.replicas))}
        wanted = [
            admin.NewTopic(name, count, replication_factor=self.replicas, config=config)
            for name, count in counts.items()
        ]
        for future in client.create_topics(wanted, operation_timeout=30).values():
            future.result(60)
        self._until_listed(client)

    def _until_listed(self, client: Any) -> None:
        """Until every partition is led and answers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self._offsets(client, Isolation.READ_UNCOMMITTED)
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def run(self, work_s: float) -> None:
        """Let the clients work until the plain ones are done, or for that long."""
        everyone = [*self._workers, *self._chain_workers]
        for worker in everyone:
            worker.deadline = time.monotonic() + work_s
            worker.start()
        for worker in self._workers:
            worker.join(work_s + 180)
        for worker in self._chain_workers:
            worker.stopping.set()
        for worker in everyone:
            worker.join(180)
            assert not worker.is_alive(), f"{worker.name} does not end"
            if worker.trouble is not None:
                raise worker.trouble

    def judge(self) -> list[Anomaly]:
        """When everything is mended: wait for the ends of all transactions, read everything, check."""
        client = admin.AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        deadline = time.monotonic() + STABLE_S
        for _ in itertools.count():
            try:
                high = self._offsets(client, Isolation.READ_UNCOMMITTED)
                stable = self._offsets(client, Isolation.READ_COMMITTED)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            if high == stable or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.history.ends = {number: (stable[number], high[number]) for number in self.shape.numbers}
        for isolation, ends in ((Isolation.READ_UNCOMMITTED, high), (Isolation.READ_COMMITTED, stable)):
            self.history.final[isolation] = final_read(self.bootstrap, self.topics, isolation, ends)
        if self._chain_workers:
            self.history.chain = Chain(frozenset(self.shape.input_numbers), self._committed(client))
        return check(self.history)

    def _offsets(self, client: Any, isolation: Isolation) -> dict[int, int]:
        wanted = {
            confluent.TopicPartition(*self.topics.place(number)): admin.OffsetSpec.latest()
            for number in self.shape.numbers
        }
        level = getattr(confluent.IsolationLevel, isolation.name)
        listed = client.list_offsets(wanted, isolation_level=level, request_timeout=10)
        return {self.topics.number(at.topic, at.partition): future.result(15).offset for at, future in listed.items()}

    def _committed(self, client: Any) -> dict[int, int]:
        """The group's offsets, which no open transaction may change any more."""
        places = [confluent.TopicPartition(*self.topics.place(number)) for number in self.shape.input_numbers]
        group = confluent.ConsumerGroupTopicPartitions(f"{self.topics.topic}-chain", places)
        deadline = time.monotonic() + 60
        while True:
            try:
                future = client.list_consumer_group_offsets([group], require_stable=True)[group.group_id]
                return {
                    self.topics.number(at.topic, at.partition): max(at.offset, 0)
                    for at in future.result(15).topic_partitions
                }
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
