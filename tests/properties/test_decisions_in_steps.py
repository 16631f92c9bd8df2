"""Random requests to the active controller, which decides in steps of one to three elements; others change the metadata
between them, commits lag, clients leave, and the lead is lost and won again.

What a decision in steps appends and answers is what one at once would have, all nodes have the same metadata, and
nothing stays behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from random import Random
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.controller_harness import Broker, Member, Quorum, cluster
from tests.unit.replication.test_isr_alterations import proposal
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from tidelog.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tidelog.protocol.messages.metadata_records import PartitionRecord, RemoveTopicRecord, TopicRecord
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.decisions import isr_alterations, leaders, partition_creation, reassignment, state
from tidelog.replication.controller.decisions.state import NewTopic, Steps, at_once
from tidelog.replication.controller.metadata.image import MetadataImage
from tidelog.replication.controller.metadata.loader import MetadataLoader
from tidelog.replication.controller.metadata.record_codec import decode_record

HISTORIES = 12
STEPS = 80
NAMES = ("a", "b.c", "b_c", "d", "e", "bad name")
BROKERS = (1, 2, 3)

Decide = Callable[[], Steps[Any]]
APPEND, IN_STEPS = Controller._append, Controller.command_in_steps


class Large:
    """A command in steps that is under way."""

    def __init__(self, controller: Controller, decide: Decide) -> None:
        self.controller = controller
        self.decide = decide
        self.seen: list[list[tuple[object, int]]] = []
        self.appended: list[tuple[object, int]] | None = None
        """What a decision at once answers where this one has appended its records."""

    def look(self) -> None:
        try:
            self.seen.append(answers(at_once(self.decide())[1]))
        except KafkaError:
            pass


CURRENT: ContextVar[Large | None] = ContextVar("current", default=None)


def answers(result: Any) -> list[tuple[object, int]]:
    """(what was asked for, error code) of each element."""
    if isinstance(result, dict):
        return [(name, each.code if isinstance(each, KafkaError) else 0) for name, each in result.items()]
    if hasattr(result, "results"):
        return [(each.name, each.error_code) for each in result.results]
    if hasattr(result, "replica_election_results"):
        return [
            ((topic.topic, each.partition_id), each.error_code)
            for topic in result.replica_election_results
            for each in topic.partition_result
        ]
    topics, name = (result.topics, "topic_id") if hasattr(result, "topics") else (result.responses, "name")
    return [
        ((getattr(topic, name), each.partition_index), each.error_code) for topic in topics for each in topic.partitions
    ]


def content(image: MetadataImage) -> tuple[Any, ...]:
    return image.offset, image.brokers, image.topics_by_id, image.configs, image.features, image.next_producer_id


class History:
    def __init__(self, seed: int, quorum: Quorum, member: Member, brokers: dict[int, Broker]) -> None:
        self.choice = Random(seed)
        self.quorum = quorum
        self.members = [member, *(Member(quorum, node_id, snapshot_bytes_min=400) for node_id in (101, 102))]
        self.brokers = brokers
        self.under_way: set[Large] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        self.cancelled: set[asyncio.Task[Any]] = set()
        self.first_ids: list[int] = []
        self.created: dict[bytes, str] = {}
        self.deleted: set[bytes] = set()
        for each in self.members:
            each.controller.pause = self.pause
        quorum.commit()

    async def pause(self) -> None:
        for _ in range(self.choice.randint(1, 4)):
            await asyncio.sleep(0)

    @property
    def controller(self) -> Controller:
        leader = self.quorum.leader
        return next(each for each in self.members if leader is None or each.log is leader).controller

    # -- what is checked at each append and each answer --------------------------------------------------------------

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        history = self

        def append(controller: Controller, records: list[Any]) -> None:
            large = CURRENT.get()
            if large is not None and records and controller.is_active:
                expected, result = at_once(large.decide())
                assert history.plain(controller, records) == history.plain(controller, expected)
                large.appended = answers(result)
            APPEND(controller, records)
            for each in history.under_way:
                each.look()

        async def in_steps(controller: Controller, decide: Decide, timeout_ms: int = 0) -> Any:
            large = Large(controller, decide)
            token = CURRENT.set(large)
            history.under_way.add(large)
            large.look()
            try:
                result = await IN_STEPS(controller, decide, timeout_ms)
            finally:
                CURRENT.reset(token)
                history.under_way.discard(large)
            history.check_answer(large, answers(result))
            return result

        monkeypatch.setattr(Controller, "_append", append)
        monkeypatch.setattr(Controller, "command_in_steps", in_steps)

    def plain(self, controller: Controller, records: list[Any]) -> list[Any]:
        """Without what is random: the ids and replicas of new topics and partitions."""
        names = {each.topic_id: each.name for each in records if isinstance(each, TopicRecord)}
        found: list[Any] = []
        for each in records:
            if isinstance(each, TopicRecord):
                found.append(each.name)
            elif isinstance(each, PartitionRecord):
                is_active = each.isr == controller._state.active(each.replicas)
                name = names.get(each.topic_id, each.topic_id)
                found.append((name, each.partition_id, len(each.replicas), is_active, each.leader == each.isr[0]))
            else:
                found.append(each)
        return found

    def check_answer(self, large: Large, told: list[tuple[object, int]]) -> None:
        if large.appended is not None:
            assert told == large.appended
            return
        for number, each in enumerate(told):  # each was true when it was decided
            assert any(number < len(seen) and seen[number] == each for seen in large.seen), (each, large.seen)

    # -- steps -------------------------------------------------------------------------------------------------------

    def send(self, command: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(command))

    def some_names(self) -> list[str]:
        return self.choice.sample(NAMES, self.choice.randint(1, len(NAMES)))

    def timeout_ms(self) -> int:
        return self.choice.choice((0, 60_000, 60_000, 1))

    def create(self) -> None:
        topics = [
            NewTopic(name, self.choice.randint(1, 6), self.choice.randint(1, 3), configs=[("retention.ms", "1")])
            for name in self.some_names()
        ]
        self.send(self.creation(topics, self.choice.random() < 0.2))

    async def creation(self, topics: list[NewTopic], validate_only: bool) -> None:
        controller = self.controller
        results = await controller.create_topics(topics, validate_only=validate_only, timeout_ms=self.timeout_ms())
        if not validate_only:
            created = [each for each in results.values() if not isinstance(each, KafkaError)]
            self.created |= {each.topic_id: each.name for each in created}

    def delete(self) -> None:
        self.send(self.deletion([self.topic_id(name) for name in self.some_names()]))

    def topic_id(self, name: str) -> bytes:
        topic = self.controller._state.image.topics_by_name.get(name)
        return bytes(16) if topic is None else topic.topic_id

    async def deletion(self, topic_ids: list[bytes]) -> None:
        errors = await self.controller.delete_topics(topic_ids)
        self.deleted |= {topic_id for topic_id, error in errors.items() if error is None}

    def add_partitions(self) -> None:
        topics = [
            CreatePartitionsTopic(name=name, count=self.choice.randint(1, 9), assignments=None)
            for name in self.some_names()
        ]
        self.send(self.controller.create_partitions(CreatePartitionsRequest(topics=topics, timeout_ms=60_000)))

    def elect(self) -> None:
        partitions = [
            TopicPartitions(topic=name, partitions=self.choice.choices(range(5), k=4)) for name in self.some_names()
        ]
        request = ElectLeadersRequest(election_type=self.choice.randint(0, 1), topic_partitions=partitions)
        self.send(self.controller.elect_leaders(request))

    def reassign(self) -> None:
        def one() -> ReassignablePartition:
            replicas = self.choice.sample(BROKERS, self.choice.randint(1, 3)) if self.choice.random() < 0.8 else None
            return ReassignablePartition(partition_index=self.choice.randint(0, 3), replicas=replicas)

        topics = [ReassignableTopic(name=name, partitions=[one() for _ in range(4)]) for name in self.some_names()]
        self.send(
            self.controller.alter_partition_reassignments(
                AlterPartitionReassignmentsRequest(topics=topics, timeout_ms=60_000)
            )
        )

    def configure(self) -> None:
        resources = [
            AlterConfigsResource(
                resource_type=2,
                resource_name=name,
                configs=[AlterableConfig(name="min.insync.replicas", value=self.choice.choice("12"))],
            )
            for name in self.some_names()
        ]
        self.send(self.controller.incremental_alter_configs(IncrementalAlterConfigsRequest(resources=resources)))

    def change_isr(self) -> None:
        """One broker proposes for all topics that it leads."""
        image = self.controller._state.image
        leader = self.choice.choice(BROKERS)
        requests = []
        for name in NAMES:
            partition = image.partition(name, 0)
            if partition is not None and partition.leader == leader:
                isr = {leader, *self.choice.sample(partition.replicas, self.choice.randint(0, 2) % 2)}
                epochs = {broker_id: image.brokers[broker_id].epoch for broker_id in sorted(isr)}
                requests.append(proposal(image, leader, image.brokers[leader].epoch, name, epochs))
        if requests:
            requests[0].topics = [topic for each in requests for topic in each.topics]
            self.send(self.controller.alter_partition(requests[0], 3))

    def allocate(self) -> None:
        self.send(self.allocation())

    async def allocation(self) -> None:
        self.first_ids.append((await self.controller.allocate_producer_ids(self.choice.choice(BROKERS))).first)

    def fence(self) -> None:
        if self.controller.is_active:
            self.controller.fence([self.choice.choice(BROKERS)], "it is a test")

    def unfence(self) -> None:
        self.send(self.choice.choice(list(self.brokers.values())).heartbeat(self.controller))

    def leave(self) -> None:
        """A client's connection is closed, or its request is cancelled by the end of its node."""
        if self.tasks:
            task = self.choice.choice(self.tasks)
            task.cancel()
            self.cancelled.add(task)

    def hold(self) -> None:
        self.quorum.hold = not self.quorum.hold
        self.quorum.appended()

    def move(self) -> None:
        for _ in range(self.choice.randint(1, 2)):
            self.quorum.lead(self.choice.choice(self.members).log)
        for each in self.under_way:
            each.look()

    async def step(self) -> None:
        steps = {
            self.create: 16, self.delete: 4, self.add_partitions: 8, self.elect: 8, self.reassign: 8,
            self.configure: 4, self.change_isr: 4, self.allocate: 2, self.fence: 2, self.unfence: 6, self.leave: 3,
            self.hold: 3 + 6 * self.quorum.hold, self.move: 0.7,
        }  # fmt: skip
        self.choice.choices(list(steps), list(steps.values()))[0]()
        for _ in range(self.choice.randint(0, 6)):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        self.quorum.hold = False
        if self.quorum.leader is None:
            self.quorum.lead(self.members[0].log)
        self.quorum.appended()
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        for task, outcome in zip(self.tasks, outcomes):
            if isinstance(outcome, asyncio.CancelledError):
                assert task in self.cancelled
            elif isinstance(outcome, BaseException) and not isinstance(outcome, KafkaError):
                raise outcome
        self.quorum.commit()

    # -- what must be true at the end --------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.quorum.leader is not None
        loader = MetadataLoader()
        for batch in self.quorum.batches:
            loader.feed(batch.values, batch.last_offset, batch.epoch, batch.timestamp_ms)
        replayed = content(loader.finish(-1)[0])
        for each in self.members:
            assert content(each.tracker.image)[1:] == replayed[1:], each.log.node_id
            for image, _ in each.told:
                for topic in image.topics_by_id.values():
                    assert list(topic.partitions) == list(range(len(topic.partitions)))
                    assert topic.partitions, f"{topic.name} has no partitions"
            controller = each.controller
            assert not controller._pending_commands
            assert not controller._large_under_way
            assert not controller._large_decision.locked()
        assert content(self.controller._state.image)[1:] == replayed[1:]
        self.check_snapshots(replayed)
        records = [decode_record(value) for batch in self.quorum.batches for value in batch.values]
        created = {each.topic_id: each.name for each in records if isinstance(each, TopicRecord)}
        assert self.created.items() <= created.items()
        assert self.deleted <= {each.topic_id for each in records if isinstance(each, RemoveTopicRecord)}
        assert len(set(self.first_ids)) == len(self.first_ids)

    def check_snapshots(self, replayed: tuple[Any, ...]) -> None:
        for member in self.members:
            for identity, values in member.log.snapshots:
                loader = MetadataLoader()
                loader.feed(values, identity.end_offset - 1, identity.epoch, 0)
                for batch in self.quorum.batches:
                    if batch.last_offset >= identity.end_offset:
                        loader.feed(batch.values, batch.last_offset, batch.epoch, batch.timestamp_ms)
                assert content(loader.finish(-1)[0])[1:] == replayed[1:], identity


async def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        at_once_count = Random(seed).randint(1, 3)
        for module in (state, leaders, reassignment, partition_creation, isr_alterations):
            for name in ("ELEMENTS_AT_ONCE", "NEW_PARTITIONS_AT_ONCE", "PROPOSALS_AT_ONCE"):
                if hasattr(module, name):
                    context.setattr(module, name, at_once_count)
        quorum, member, brokers = await cluster(BROKERS, session_timeout_ms=600_000)
        history = History(seed, quorum, member, brokers)
        history.patch(context)
        for _ in range(STEPS):
            await history.step()
        await history.settle()
        history.check()
        for each in history.members:
            await each.controller.close()


@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_what_is_decided_in_steps_is_what_is_decided_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(seed, monkeypatch)


async def on_any_image(self: Controller, decide: Decide) -> Any:
    steps = decide()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await self.pause()


@pytest.mark.slow
async def test_it_finds_decisions_on_an_image_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_decided_in_steps", on_any_image)
    found = 0
    for seed in range(HISTORIES):
        try:
            await run(seed, monkeypatch)
        except Exception:
            found += 1
    assert found >= HISTORIES // 4
