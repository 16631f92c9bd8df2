"""The handlers of what the quorum and the controller are asked: what is passed on, what is refused here, and how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.broker.metadata_services import encoded
from tidelog.broker.apis import api_tables
from tidelog.broker.apis.cluster import broker_heartbeat, describe_cluster, envelope
from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.topics import create_partitions
from tidelog.broker.cluster.heartbeats import HeartbeatConnections
from tidelog.broker.cluster.known_connections import KnownConnections
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.api import CONTROLLER_SERVED, SERVED
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from tidelog.protocol.messages.describe_cluster import DescribeClusterRequest
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.replication.controller.metadata.image import ControllerImage, EndpointImage, MetadataImage

NOT_CONTROLLER = KafkaError(ErrorCode.NOT_CONTROLLER)

# Handlers that do no more than ask: everything served that is neither in its own test nor of a single broker.
OWN_TESTS = {18, 19, 20, 32, 33, 37, 44, 58, 60}
THIN = [module for module in api_tables.CONTROLLER_APIS if module.REQUEST.API_KEY not in OWN_TESTS]


class Asked:
    """Stands for quorum and controller: notes what it is asked, and answers with `answer`."""

    def __init__(self, answer: Any = None, active: bool = True) -> None:
        self.is_active = active
        self.leader_id = 3
        self.requests: list[Any] = []
        self.lost: list[tuple[int, int]] = []
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        async def command(request: Any, version: int | None = None) -> Any:
            self.requests.append(request)
            return self._answer

        return command

    def now_ms(self) -> float:
        return 0.0

    def broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None:
        self.lost.append((broker_id, broker_epoch))


class Connection:
    host = "127.0.0.1"
    listener_name = "CONTROLLER"
    known_key = -1

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def close(self) -> None:
        for callback in self.callbacks:
            callback()

    def on_close(self, callback: Any) -> None:
        self.callbacks.append(callback)


def services_of(asked: Asked | None, image: MetadataImage | None = None) -> Any:
    return SimpleNamespace(
        raft=asked,
        controller=asked,
        node_id=1,
        cluster_id="cluster",
        image=lambda: image,
        config=SimpleNamespace(controller_listener_names=frozenset({"CONTROLLER"})),
        heartbeats=HeartbeatConnections(lambda *broker: asked.broker_connection_lost(*broker) if asked else None),
        known_connections=KnownConnections(cast(Any, asked)),
    )


def context(version: int, listener: str = "CONTROLLER", connection: Any = None) -> RequestContext:
    return RequestContext(0, version, 1, "test", "127.0.0.1", listener, connection)


def every(modules: Any) -> Any:
    pairs = [(module, version) for module in modules for version in module.REQUEST.VERSIONS]
    names = [f"{module.REQUEST.__name__.removesuffix('Request')}-{version}" for module, version in pairs]
    return pytest.mark.parametrize(("module", "version"), pairs, ids=names)


def errors_in(message: Message) -> set[int]:
    found: set[int] = set()
    for name, _ in type(message).FIELDS:
        value = getattr(message, name)
        if name == "error_code":
            found.add(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Message):
                found |= errors_in(each)
    return found


# ------------------------------------------------------------------------------------------------------------ tables


def test_every_listener_advertises_what_it_has_handlers_for() -> None:
    hot = {0, 1}  # Produce and Fetch of records are wired into dispatch
    assert {module.REQUEST.API_KEY for module in api_tables.BROKER_APIS} | hot == set(SERVED)
    assert {module.REQUEST.API_KEY for module in api_tables.CONTROLLER_APIS} == set(CONTROLLER_SERVED)
    assert len(api_tables.BROKER_APIS) == len(set(api_tables.BROKER_APIS))
    assert len(api_tables.CONTROLLER_APIS) == len(set(api_tables.CONTROLLER_APIS))
    assert set(SERVED) & set(CONTROLLER_SERVED) >= api_tables.FORWARDED


# ----------------------------------------------------------------------------------------------------- asking, refusing


@every(THIN)
async def test_what_is_asked_is_answered_as_it_is(module: Any, version: int) -> None:
    asked = Asked(answer=object())
    request = module.REQUEST()
    assert await module.handle(services_of(asked), context(version), request) is asked._answer
    assert asked.requests == [request]


@every(module for module in THIN if getattr(module, "role", controller) is controller)
@pytest.mark.parametrize("asked", [None, Asked(active=False)], ids=["none here", "not active"])
async def test_a_controller_that_is_not_active_is_not_asked(module: Any, version: int, asked: Asked | None) -> None:
    with pytest.raises(KafkaError) as caught:
        await module.handle(services_of(asked), context(version), module.REQUEST())
    assert caught.value.code is ErrorCode.NOT_CONTROLLER


@every(module for module in api_tables.CONTROLLER_APIS if module.REQUEST.API_KEY != 18)
def test_a_refusal_says_why(module: Any, version: int) -> None:
    request = encoded(naming_something(module.REQUEST, version), version)
    answer = encoded(module.refuse(request, NOT_CONTROLLER, version), version)
    assert errors_in(answer) - {0} == {ErrorCode.NOT_CONTROLLER}


def naming_something(message: type[Message], version: int) -> Any:
    """One entry in every list, so that answers per entry have one to tell the error in."""
    values: dict[str, Any] = {}
    for name, field in message.FIELDS:
        if field.kind == "array" and version in field.versions:
            element = field.element
            entry = {"int32": 0, "string": "a", "uuid": bytes(16)}
            values[name] = [naming_something(element, version) if isinstance(element, type) else entry[element]]
    return message(**values)


def test_fetch_refuses_each_partition_for_clients_that_look_there() -> None:
    request = FetchRequest(topics=[FetchTopic(topic="t", partitions=[FetchPartition(partition=4)])])
    fetch = next(api for api in api_tables.CONTROLLER_APIS if api.REQUEST is FetchRequest)
    old = encoded(fetch.refuse(request, NOT_CONTROLLER, 12), 12)
    assert [(each.partition_index, each.error_code) for each in old.responses[0].partitions] == [(4, 41)]
    assert fetch.refuse(request, NOT_CONTROLLER, 13).responses == []


# --------------------------------------------------------------------------------------------------------- heartbeats


async def beat(services: Any, connection: Connection, broker_id: int, broker_epoch: int) -> Any:
    request = BrokerHeartbeatRequest(broker_id=broker_id, broker_epoch=broker_epoch)
    return await broker_heartbeat.handle(services, context(1, connection=connection), request)


async def test_the_end_of_a_connection_with_heartbeats_is_told_once_for_the_last_epoch() -> None:
    asked = Asked(BrokerHeartbeatResponse())
    services, connection, other = services_of(asked), Connection(), Connection()
    for epoch in (7, 7, 9):
        await beat(services, connection, 1, epoch)
    await beat(services, other, 2, 8)
    assert asked.lost == []
    connection.close()
    assert asked.lost == [(1, 9)]
    other.close()
    assert asked.lost == [(1, 9), (2, 8)]


async def test_heartbeats_to_a_controller_that_is_not_active_are_not_remembered() -> None:
    asked, connection = Asked(active=False), Connection()
    with pytest.raises(KafkaError):
        await beat(services_of(asked), connection, 1, 7)
    connection.close()
    assert asked.lost == []


# --------------------------------------------------------------------------------------------------- create partitions


async def test_a_topic_named_twice_gets_no_partitions() -> None:
    asked = Asked(CreatePartitionsResponse(results=[CreatePartitionsTopicResult(name="once")]))
    topics = [CreatePartitionsTopic(name=name, count=3) for name in ("twice", "once", "twice")]
    request = CreatePartitionsRequest(topics=topics, timeout_ms=7, validate_only=True)
    answer = await create_partitions.handle(services_of(asked), context(3), request)
    assert [(each.name, each.error_code) for each in answer.results] == [("twice", 42), ("once", 0)]
    assert asked.requests == [CreatePartitionsRequest(topics=[topics[1]], timeout_ms=7, validate_only=True)]


# ---------------------------------------------------------------------------------------------------- describe cluster


def image_of_controllers() -> MetadataImage:
    image = MetadataImage()
    for node_id, listener in ((3, "CONTROLLER"), (2, "CONTROLLER"), (4, "OTHER")):
        endpoint = EndpointImage(listener, f"host-{node_id}", 9090 + node_id, 0)
        image.controllers[node_id] = ControllerImage(node_id, bytes(16), {listener: endpoint})
    return image


@pytest.mark.parametrize(("leader_id", "told"), [(3, 3), (4, -1), (-1, -1)])
def test_the_controllers_listener_describes_controllers(leader_id: int, told: int) -> None:
    asked = Asked()
    asked.leader_id = leader_id
    request = DescribeClusterRequest(endpoint_type=2)
    services = services_of(asked, image_of_controllers())
    answer = encoded(describe_cluster.handle(services, context(1), request), 1)
    assert [(each.broker_id, each.host, each.port) for each in answer.brokers] == [
        (2, "host-2", 9092),
        (3, "host-3", 9093),
    ]
    assert (answer.controller_id, answer.endpoint_type) == (told, 2)


@pytest.mark.parametrize(("version", "code"), [(0, 42), (1, 114), (2, 114)])
def test_the_controllers_listener_does_not_describe_brokers(version: int, code: int) -> None:
    request = DescribeClusterRequest()
    with pytest.raises(KafkaError) as caught:
        describe_cluster.handle(services_of(Asked(), image_of_controllers()), context(version), request)
    assert encoded(describe_cluster.refuse(request, caught.value, version), version).error_code == code


def test_envelopes_are_only_for_the_active_controller() -> None:
    assert envelope.refuse(envelope.REQUEST(), NOT_CONTROLLER, 0).error_code == ErrorCode.NOT_CONTROLLER
