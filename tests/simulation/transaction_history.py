"""A history of a cluster whose clients use transactions; what they saw is judged by `tests/transactions/checker.py`.

The clients are our own, with the plans that real clients have in `tests/transactions`. When all is healed every
transaction must end, and every partition is read from its beginning, committed records alone and all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from typing import Any

from tests.simulation.cluster import Layout
from tests.simulation.cluster_clients import OPTIONS, Client
from tests.simulation.cluster_faults import Fault
from tests.simulation.cluster_history import HEALED_S, TOPICS, ClusterHistory
from tests.simulation.world import Broken
from tests.transactions.checker import check
from tests.transactions.history import Chain, History, Isolation, Record
from tests.transactions.own_client import OwnClient
from tests.transactions.performing import ClientError, Performer, drive
from tests.transactions.topics import ClientSettings, Topics
from tests.transactions.workload import ChainPlan, Plan, Shape, chain_plans, isolation_of, plans
from tidelog.client.consuming.consumer import Consumer
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import KafkaError

CONFIG = {
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.cleaner.enable": "false",
}
LAYOUTS = (((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2, 3, 4)), ((1,), (1, 2, 3)), ((4,), (1, 2, 3)))
GROUP = "chain"
TRANSACTION_TIMEOUT_MS = 4_000
SHAPE = Shape(partitions=TOPICS["t"], inputs=TOPICS["u"], operations=1_000, steps_max=4)
WHERE = Topics("t", "u", SHAPE)


class TransactionalClient(Client):
    """Performs plans until told to stop."""

    def __init__(
        self, history: TransactionHistory, name: str, settings: ClientSettings, seed: int, number: int
    ) -> None:
        super().__init__(history.cluster, history.knowledge)
        self.settings = settings
        rng = Random(seed)
        self.plans: Iterable[Plan | ChainPlan]
        if settings.group is None:
            self.plans = plans(rng, SHAPE, number)
        else:
            self.plans = chain_plans(rng, SHAPE, number)
        self.performer = Performer(history.recorded, name, lambda: self.world.now, settings.isolation)
        self.failed = 0

    @property
    def acknowledged(self) -> int:
        own = [each for each in self.performer.history.operations if each.client == self.performer.name]
        return sum(send.acknowledged_at is not None for each in own for send in each.sends())

    async def live(self) -> None:
        client = OwnClient(self.settings, OPTIONS)
        for plan in self.plans:
            while not self.stopping:
                performer = self.performer
                performing = performer.perform(plan) if isinstance(plan, Plan) else performer.perform_chain(plan)
                try:
                    await drive(performing, client)
                    break
                except ClientError:
                    self.failed += 1
                    await asyncio.sleep(0.1)
            else:
                break
            await asyncio.sleep(self.rng.choice((0.0, 0.02, 0.1)))
        if not self.performer.is_open and self.rng.random() < 0.5:
            try:
                await drive(self.performer.open(), client)
            except ClientError:
                self.failed += 1
        await client.close()


class FinalReader(Client):
    """Reads everything there is, twice, and the group's offsets. `ends`: partition -> its end, by isolation."""

    def __init__(self, history: TransactionHistory, ends: dict[Isolation, dict[int, int]]) -> None:
        super().__init__(history.cluster, history.knowledge)
        self.recorded, self.ends = history.recorded, ends

    async def live(self) -> None:
        for isolation, ends in self.ends.items():
            self.recorded.final[isolation] = await self._read(isolation, ends)
        if self.recorded.chain is not None:
            self.recorded.chain.committed = await self._committed()

    async def _read(self, isolation: Isolation, ends: dict[int, int]) -> dict[int, list[Record]]:
        consumer = Consumer(**self.options, isolation_level=isolation.value, auto_offset_reset="none")
        await self.patiently(consumer)
        places = {TopicPartition(*WHERE.place(number)): number for number in ends}
        consumer.assign(list(places))
        for place in places:
            consumer.seek(place, 0)
        found: dict[int, list[Record]] = {number: [] for number in ends}
        while [place for place, number in places.items() if await consumer.position(place) < ends[number]]:
            for place, records in (await consumer.poll(timeout_ms=200)).items():
                number = places[place]
                found[number] += [Record(number, each.offset, int(each.value or b"-1")) for each in records]
        await consumer.close()
        return found

    async def _committed(self) -> dict[int, int]:
        consumer = Consumer(**self.options, group_id=GROUP, isolation_level="read_committed")
        await self.patiently(consumer)
        places = [TopicPartition(*WHERE.place(number)) for number in SHAPE.input_numbers]
        while True:
            try:
                committed = await consumer.committed(*places)
                break
            except KafkaError:
                await asyncio.sleep(0.1)
        await consumer.close()
        return {
            WHERE.number(place.topic, place.partition): 0 if each is None else each.offset
            for place, each in committed.items()
        }


class TransactionHistory(ClusterHistory):
    def __init__(self, seed: int, faults: list[Fault] | None = None, **options: Any) -> None:
        self._chance = rng = Random(seed * 7907 + 11)
        controllers, brokers = rng.choice(LAYOUTS)
        syncs = rng.random() < 0.5
        config = {**CONFIG, **({"log.flush.interval.messages": "1"} if syncs else {})}
        layout = Layout(controllers, brokers, config)
        if rng.random() < 0.15:
            options.setdefault("weights", {})  # also without any fault
        self.recorded = History()
        super().__init__(seed, faults, **{"layout": layout, "syncs": syncs, **options})

    def _start_clients(self) -> None:
        rng = self._chance
        plain, chained = rng.choice((2, 3)), rng.choice((0, 1, 2))
        clients = [self._client(number, None) for number in range(plain)]
        clients += [self._client(number, GROUP) for number in range(plain, plain + chained)]
        if chained:
            self.recorded.chain = Chain(frozenset(SHAPE.input_numbers))
        self.producers = clients  # type: ignore[assignment]
        for client in clients:
            client.start()

    def _client(self, number: int, group: str | None) -> TransactionalClient:
        rng = self._chance
        isolation = isolation_of(rng) if group is None else Isolation.READ_COMMITTED
        timeout_s = rng.choice((1.0, 3.0, 10.0))
        name = f"{group or 'plain'}-{number}"
        settings = ClientSettings(
            self.cluster.layout.bootstrap, WHERE, name, isolation, group, timeout_s, TRANSACTION_TIMEOUT_MS
        )
        return TransactionalClient(self, name, settings, rng.getrandbits(64), number)

    def _at_rest(self) -> None:
        self._within(HEALED_S, "TransactionsEnd", self._are_stable)
        ends = {
            isolation: {number: self._end(number)[isolation is Isolation.READ_UNCOMMITTED] for number in SHAPE.numbers}
            for isolation in Isolation
        }
        self.recorded.ends = {number: self._end(number) for number in SHAPE.numbers}
        reader = FinalReader(self, ends)
        reader.start()
        self._within(HEALED_S, "EverythingIsRead", lambda: reader.done)
        anomalies = check(self.recorded)
        if anomalies:
            broken = Broken("; ".join(map(str, anomalies[:5])))
            broken.add_note(str(self.recorded))
            raise broken
        self._within(HEALED_S, "ClusterHeals", self._is_quiet)

    def _is_quiet(self) -> bool:
        """Every node has the same metadata: leaders may have changed while everything was read."""
        return len({node.metadata_offset for node in self.cluster.running()}) == 1

    def _end(self, number: int) -> tuple[int, int]:
        """Last stable offset and high watermark, as the leader has them."""
        leader = self.cluster.leader_of(*WHERE.place(number))
        replica = None if leader is None else leader.replica(*WHERE.place(number))
        if replica is None:
            return -1, 0
        return replica.log.last_stable_offset, replica.high_watermark

    def _are_stable(self) -> bool:
        return all(stable == high for stable, high in map(self._end, SHAPE.numbers))
