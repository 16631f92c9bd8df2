"""Requests to the controller's listener that mean nothing: each is answered, and the controller goes on.

Empty arrays first: where one partition is expected there may be none.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.properties.test_messages_against_kio import MESSAGES, filled
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tidelog.broker.apis import dispatch
from tidelog.broker.apis.api_tables import CONTROLLER_APIS
from tidelog.broker.node import YOUNG_OBJECTS_MAX
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumRequestTopicData,
    DescribeQuorumResponse,
)
from tidelog.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    ReplicaState,
)
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.vote import VoteRequest, VoteResponse
from tidelog.protocol.uuids import METADATA_TOPIC_ID
from tidelog.replication.controller.commands import ControllerCommands
from tidelog.replication.quorum import service

CONTROLLER = {
    "listeners": "PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:0",
    "controller.listener.names": "CONTROLLER",
}
ODD_PER_VERSION = 6
RESPONSES = {
    each.API_KEY: each
    for each in MESSAGES
    if each.__name__.endswith("Response") and each.__module__.startswith("tidelog.protocol.messages")
}


def name_of(api: Any) -> str:
    return str(api.REQUEST.__name__)


@pytest.fixture
async def controller(start_node: StartNode) -> tuple[RunningNode, Wire]:
    running = await start_node(**CONTROLLER)
    running.port = running.node._bound_ports["CONTROLLER"]
    return running, await running.connect()


def emptied(message: Message) -> Message:
    """The same without any element in any array."""
    for name, _ in type(message).FIELDS:
        value = getattr(message, name)
        if isinstance(value, list):
            setattr(message, name, [])
        elif isinstance(value, Message):
            emptied(value)
    return message


def odd_requests(rng: Random, request: type[Message], version: int) -> list[Message]:
    """Nothing at all, empty arrays among odd values, one empty array at a time, and odd values everywhere."""
    found = [request(), emptied(filled(rng, request, version))]
    for name, field in request.FIELDS:
        if field.kind == "array" and version in field.versions:
            one_empty = filled(rng, request, version)
            setattr(one_empty, name, [])
            found.append(one_empty)
            for each in getattr(message := filled(rng, request, version), name) or []:
                if isinstance(each, Message):
                    emptied(each)
            found.append(message)
    return found + [filled(rng, request, version) for _ in range(ODD_PER_VERSION)]


REFUSED: list[tuple[Any, int, Any]] = [
    (CreateTopicsRequest(topics=[CreatableTopic(name="!"), CreatableTopic(name="?")]), 7, CreateTopicsResponse),
    (BrokerHeartbeatRequest(broker_id=7, broker_epoch=7), 1, BrokerHeartbeatResponse),
    (AllocateProducerIdsRequest(broker_id=7, broker_epoch=7), 0, AllocateProducerIdsResponse),
    (
        IncrementalAlterConfigsRequest(resources=[AlterConfigsResource(resource_type=2, resource_name="twice")] * 2),
        1,
        IncrementalAlterConfigsResponse,
    ),
    (
        IncrementalAlterConfigsRequest(
            resources=[
                AlterConfigsResource(
                    resource_type=2, resource_name="t", configs=[AlterableConfig(name="unknown", value="1")]
                )
            ]
        ),
        1,
        IncrementalAlterConfigsResponse,
    ),
]


@pytest.mark.parametrize(("request_", "version", "response"), REFUSED, ids=lambda value: type(value).__name__)
async def test_a_refused_request_leaves_nothing_to_the_garbage_collector(
    controller: tuple[RunningNode, Wire], request_: Any, version: int, response: Any
) -> None:
    """An error in a frame of its own traceback kept the request, the connection, and much of each refused topic."""
    _, wire = controller
    await wire.call(request_, version, response)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await wire.call(request_, version, response)
        assert gc.collect() < 20
    finally:
        gc.enable()


async def test_small_requests_with_many_elements_do_not_have_all_metadata_searched_for_garbage(
    controller: tuple[RunningNode, Wire],
) -> None:
    """Ten requests of 8 KB did: 0.5 s with 10,000 partitions."""
    _, wire = controller
    request = DescribeQuorumRequest(topics=[DescribeQuorumRequestTopicData(topic_name="t") for _ in range(2_000)])
    generations: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        generations.append(about["generation"])

    usual = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    gc.callbacks.append(note)
    try:
        for _ in range(30):
            await wire.call(request, 0, DescribeQuorumResponse)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*usual)
    assert 2 not in generations


def fetch_of_the_log(raft: Any, number: int) -> FetchRequest:
    """Of a replica that has all of it, and waits."""
    asked = FetchPartition(
        partition=0,
        current_leader_epoch=raft.raft.epoch,
        fetch_offset=raft.log.end_offset,
        last_fetched_epoch=raft.raft.epoch,
        replica_directory_id=bytes([number]) * 16,
        partition_max_bytes=1000,
        high_watermark=raft.log.end_offset,
    )
    return FetchRequest(
        max_wait_ms=2**31 - 1,
        max_bytes=1000,
        replica_state=ReplicaState(replica_id=1000 + number, replica_epoch=1),
        topics=[FetchTopic(topic_id=METADATA_TOPIC_ID, partitions=[asked])],
    )


@pytest.mark.slow
async def test_a_fetch_does_not_keep_its_request_while_it_waits(controller: tuple[RunningNode, Wire]) -> None:
    """A thousand may wait, and each of 360 KB held two megabytes."""
    running, _ = controller
    metadata = running.node._metadata
    assert metadata is not None
    dispatcher = running.node._controller_dispatcher
    wires = [await running.connect() for _ in range(10)]
    forgotten = [ForgottenTopic(topic_id=bytes(16), partitions=list(range(1000, 21_000)))]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, wire in enumerate(wires):
            request = fetch_of_the_log(metadata.raft, number)
            request.forgotten_topics_data = forgotten
            wire.send(request, 18)
            await until(lambda: dispatcher.tasks_under_way == number + 1)  # noqa: B023
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4_000_000


async def test_strangers_who_wait_for_metadata_take_no_places_of_others(
    controller: tuple[RunningNode, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took one of the places for requests under way, for as long as it claimed: heartbeats were refused."""
    monkeypatch.setattr(service, "PARKED_MAX", 3)
    running, _ = controller
    metadata = running.node._metadata
    assert metadata is not None
    dispatcher = running.node._controller_dispatcher
    wires = [await running.connect() for _ in range(8)]
    for number, wire in enumerate(wires):
        request = fetch_of_the_log(metadata.raft, number)
        wire.send(request, 18)
        await until(lambda: dispatcher.tasks_under_way)
    for wire in wires[:5]:
        async with asyncio.timeout(PATIENCE_S):
            answer = await wire.receive(FetchResponse, 18)
        assert answer.error_code == 0, answer
    await until(lambda: dispatcher.tasks_under_way <= 3)


async def test_clients_take_no_places_of_nodes(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 large decisions that waited refused the heartbeats of brokers and the fetches of the metadata quorum."""
    monkeypatch.setattr(dispatch, "COLD_TASKS_MAX", 5)
    monkeypatch.setattr(dispatch, "NODES_TASKS_MAX", 6)
    running = await start_node(**CONTROLLER)
    running.port = running.node._bound_ports["CONTROLLER"]
    ended = asyncio.Event()

    async def create_late(*arguments: Any, **options: Any) -> Any:
        await ended.wait()
        return {}

    monkeypatch.setattr(ControllerCommands, "create_topics", create_late)
    wires = [await running.connect() for _ in range(4)]
    for wire in wires:
        wire.send(CreateTopicsRequest(topics=[], timeout_ms=60_000), 7)
    async with asyncio.timeout(PATIENCE_S):
        await wires.pop().receive(CreateTopicsResponse, 7)  # refused: the others take all the places of a host
        assert running.node._controller_dispatcher.tasks_under_way == 3
        wire = await running.connect()
        heartbeat = await wire.call(BrokerHeartbeatRequest(broker_id=99), 1, BrokerHeartbeatResponse)
        vote = await wire.call(VoteRequest(cluster_id="another"), 0, VoteResponse)
    assert heartbeat.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert vote.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    ended.set()
    for wire in wires:
        async with asyncio.timeout(PATIENCE_S):
            await wire.receive(CreateTopicsResponse, 7)


async def test_the_requests_by_which_nodes_live_do_not_wait_for_clients(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live brokers were fenced: their heartbeats waited ten seconds behind clients, in the same queue."""
    running = await start_node(**CONTROLLER)
    waited: list[bool] = []

    def wait(self: FairScheduler, wake: Callable[[], None], *, of_node: bool = False, **options: bool) -> None:
        waited.append(of_node)
        wake()

    monkeypatch.setattr(FairScheduler, "wait", wait)
    services = running.node._services
    assert services is not None
    of_nodes = [(BrokerHeartbeatRequest(), 1, BrokerHeartbeatResponse), (VoteRequest(), 0, VoteResponse)]
    of_all = [(FetchRequest(), 12, FetchResponse), (ApiVersionsRequest(), 0, ApiVersionsResponse)]
    found = []
    for listener, calls in (("CONTROLLER", of_nodes + of_all), ("PLAINTEXT", of_all)):
        running.port = running.node._bound_ports[listener]
        wire = await running.connect()
        for request, version, response in calls:
            waited.clear()
            async with asyncio.timeout(PATIENCE_S):
                while not waited:  # other work may have ended the long turn
                    services.scheduler.is_turn_long = True
                    await wire.call(request, version, response)
            found.append((listener, type(request).__name__, waited[:1]))
    assert found == [
        ("CONTROLLER", "BrokerHeartbeatRequest", [True]),
        ("CONTROLLER", "VoteRequest", [True]),
        ("CONTROLLER", "FetchRequest", [False]),
        ("CONTROLLER", "ApiVersionsRequest", [False]),
        ("PLAINTEXT", "FetchRequest", [False]),
        ("PLAINTEXT", "ApiVersionsRequest", [False]),
    ]


async def test_the_requests_of_voters_and_brokers_do_not_wait_for_those_of_others(
    controller: tuple[RunningNode, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 connections fetched the metadata log: voters waited for four seconds, and the lead moved."""
    running, _ = controller
    metadata, services = running.node._metadata, running.node._services
    assert metadata is not None
    assert services is not None
    waited: list[bool] = []

    def wait(self: FairScheduler, wake: Callable[[], None], *, is_known: bool, **options: bool) -> None:
        waited.append(is_known)
        wake()

    monkeypatch.setattr(FairScheduler, "wait", wait)
    raft = metadata.raft
    own = raft.raft.own

    async def fetch(wire: Wire, replica_id: int, version: int = 18) -> bool:
        asked = FetchPartition(
            partition=0,
            current_leader_epoch=raft.raft.epoch,
            fetch_offset=raft.log.end_offset,
            last_fetched_epoch=raft.raft.epoch,
            replica_directory_id=own.directory_id,
            partition_max_bytes=1000,
        )
        state = ReplicaState(replica_id=replica_id, replica_epoch=-1)
        request = FetchRequest(
            max_bytes=1000,
            **({"replica_state": state} if version >= 15 else {"replica_id": replica_id}),
            topics=[FetchTopic(topic_id=METADATA_TOPIC_ID, partitions=[asked])],
        )
        waited.clear()
        async with asyncio.timeout(PATIENCE_S):
            while not waited:  # other work may have ended the long turn
                services.scheduler.is_turn_long = True
                answer = await wire.call(request, version, FetchResponse)
                assert answer.responses[0].partitions[0].error_code == 0, answer
        return waited[0]

    wires = [await running.connect() for _ in range(4)]
    assert not await fetch(wires[0], own.id + 1)
    assert not await fetch(wires[0], own.id + 1)  # no voter
    assert not await fetch(wires[1], own.id)
    assert await fetch(wires[1], own.id)
    assert not await fetch(wires[2], own.id, 14)
    assert await fetch(wires[2], own.id, 14)
    assert not await fetch(wires[3], own.id)
    assert not await fetch(wires[3], own.id)  # two others have the places

    async def beat(wire: Wire) -> bool:
        request = BrokerHeartbeatRequest(
            broker_id=own.id, broker_epoch=services.broker_epoch(), current_metadata_offset=2**40
        )
        waited.clear()
        async with asyncio.timeout(PATIENCE_S):
            while not waited:
                services.scheduler.is_turn_long = True
                answer = await wire.call(request, 1, BrokerHeartbeatResponse)
                assert answer.error_code == 0, answer
        return waited[0]

    wires = [await running.connect() for _ in range(3)]
    assert [(await beat(wire), await beat(wire)) for wire in wires] == [(False, True), (False, True), (False, False)]


@pytest.mark.parametrize("api", CONTROLLER_APIS, ids=name_of)
async def test_every_api_of_the_controller_answers_what_means_nothing(
    controller: tuple[RunningNode, Wire], api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running, wire = controller
    rng = Random(name_of(api))
    request: Any = api.REQUEST
    response = RESPONSES[request.API_KEY]
    for version in request.VERSIONS:
        for message in odd_requests(rng, request, version):
            try:
                message.encode(version)
            except ValueError:
                continue  # a value that this version cannot carry
            async with asyncio.timeout(PATIENCE_S):
                answer = await wire.call(message, version, response)
            assert isinstance(answer, response), message
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors
    assert not running.node._failure.done()


async def test_the_controller_leads_on_afterwards(controller: tuple[RunningNode, Wire]) -> None:
    running, wire = controller
    rng = Random(1)
    for api in CONTROLLER_APIS:
        version = api.REQUEST.VERSIONS[-1]
        for message in odd_requests(rng, api.REQUEST, version)[:2]:
            async with asyncio.timeout(PATIENCE_S):
                await wire.call(message, version, RESPONSES[api.REQUEST.API_KEY])
    metadata = running.node._metadata
    assert metadata is not None
    await until(metadata.leads)
    # One of them unregisters this very broker, which registers again.
    await until(lambda: any(not broker.fenced for broker in metadata.image.brokers.values()))
    running.port = running.node._bound_ports["PLAINTEXT"]
    client = await running.connect()
    await client.create_topic("still-here")
