"""A command that was under way when its controller lost the lead is the next controller's, not the client's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.metadata_services import running_services
from tidelog.broker.apis.api_tables import CONTROLLER_APIS, FORWARDED
from tidelog.broker.apis.cluster import envelope
from tidelog.broker.apis.dispatch import Dispatcher
from tidelog.broker.apis.topics import alter_configs, incremental_alter_configs
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.broker.scheduling.host_queue import REQUEST_HOST
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import alter_configs as alter_messages
from tidelog.protocol.messages import incremental_alter_configs as incremental_messages
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.envelope import EnvelopeRequest
from tidelog.replication.controller.metadata.image import TOPIC_RESOURCE

CREATE = CreateTopicsRequest(
    topics=[CreatableTopic(name="t", num_partitions=1, replication_factor=1)], timeout_ms=10_000
)
FRAME = b"\0\x13\0\x07\0\0\0\x2a\xff\xff\0" + CREATE.encode(7)
"""CreateTopics, version 7, correlation id 42, no client id, no tagged fields."""


class Client:
    host = "127.0.0.1"
    listener_name = "PLAINTEXT"


def losing_once(controller: Any, command: str = "create_topics") -> None:
    """What is under way is refused once, as it is when another node begins to lead."""
    carry_out = getattr(controller, command)

    async def lost(*arguments: Any, **options: Any) -> Any:
        setattr(controller, command, carry_out)
        raise KafkaError(ErrorCode.NOT_CONTROLLER, "This node is not the active controller.")

    setattr(controller, command, lost)


async def test_whoever_forwarded_it_is_told_and_not_the_client(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services:
        services.embedded = Dispatcher(services, CONTROLLER_APIS, FORWARDED).embedded
        losing_once(services.controller)
        sent = EnvelopeRequest(request_data=FRAME, request_principal=b"", client_host_address=bytes([127, 0, 0, 1]))
        context = RequestContext(58, 0, 1, "broker", "127.0.0.1", "CONTROLLER")
        with pytest.raises(KafkaError) as refused:
            await envelope.handle(services, context, sent)
        assert refused.value.code == ErrorCode.NOT_CONTROLLER
        answer = await envelope.handle(services, context, sent)
        inner = CreateTopicsResponse.decode(bytes(answer.response_data or b"")[5:], 7)
        assert (answer.error_code, inner.topics[0].error_code) == (0, 0)


async def test_a_request_takes_turns_among_those_of_its_client_s_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited behind all of 1,500 connections from another host, also at the controller that it was forwarded to."""
    hosts: list[str] = []
    begin = FairScheduler.begin

    async def noted(self: FairScheduler) -> None:
        hosts.append(REQUEST_HOST.get())
        await begin(self)

    monkeypatch.setattr(FairScheduler, "begin", noted)
    async with running_services(tmp_path) as services:
        dispatcher = Dispatcher(services, CONTROLLER_APIS, FORWARDED)
        for host in ("10.0.0.8", "10.0.0.9"):
            await asyncio.create_task(dispatcher.embedded(FRAME, host))
        answer = dispatcher.dispatch_cold(memoryview(FRAME), cast(Any, Client()))
        assert isinstance(answer, Deferred)
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.on_complete(told.set_result)
        await asyncio.wait_for(told, PATIENCE_S)
        await dispatcher.close()
    assert hosts == ["10.0.0.8", "10.0.0.9", Client.host]
    assert REQUEST_HOST.get() == ""


@pytest.mark.parametrize(
    ("key", "version", "code"),
    [
        (49, 1, ErrorCode.UNSUPPORTED_VERSION),
        (19, 99, ErrorCode.UNSUPPORTED_VERSION),
        (19, 7, ErrorCode.UNSUPPORTED_VERSION),
        (52, 2, ErrorCode.INVALID_REQUEST),
    ],
    ids=["an API that is not served", "a later version", "not readable", "an API that is not forwarded"],
)
async def test_what_cannot_be_forwarded_is_refused_as_by_kafka(
    tmp_path: Path, key: int, version: int, code: ErrorCode
) -> None:
    async with running_services(tmp_path) as services:
        services.embedded = Dispatcher(services, CONTROLLER_APIS, FORWARDED).embedded
        frame = key.to_bytes(2, "big") + version.to_bytes(2, "big") + FRAME[4:11] + bytes(20)
        sent = EnvelopeRequest(request_data=frame, request_principal=b"", client_host_address=bytes([127, 0, 0, 1]))
        with pytest.raises(KafkaError) as refused:
            await envelope.handle(services, RequestContext(58, 0, 1, "broker", "127.0.0.1", "CONTROLLER"), sent)
        assert refused.value.code == code


async def test_a_node_that_led_itself_asks_the_next_controller(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services:
        dispatcher = Dispatcher(services, CONTROLLER_APIS, FORWARDED)
        services.embedded = dispatcher.embedded
        losing_once(services.controller)
        answer = dispatcher.dispatch_cold(memoryview(FRAME), cast(Any, Client()))
        assert isinstance(answer, Deferred)
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.on_complete(told.set_result)
        frame = bytes(await asyncio.wait_for(told, PATIENCE_S))
        assert (int.from_bytes(frame[:4], "big"), frame[4:9]) == (len(frame) - 4, b"\0\0\0\x2a\0")
        response = CreateTopicsResponse.decode(frame[9:], 7)
        assert [(topic.name, topic.error_code) for topic in response.topics] == [("t", 0)]
        assert "t" in services.image().topics_by_name
        await dispatcher.close()


@pytest.mark.parametrize(
    ("module", "messages", "command"),
    [
        (alter_configs, alter_messages, "alter_configs"),
        (incremental_alter_configs, incremental_messages, "incremental_alter_configs"),
    ],
)
async def test_a_change_of_configs_is_the_next_controllers_too(
    tmp_path: Path, module: Any, messages: Any, command: str
) -> None:
    """The broker checks it first, and sends what is left itself: NOT_CONTROLLER reached clients."""
    async with running_services(tmp_path) as services:
        services.embedded = Dispatcher(services, CONTROLLER_APIS, FORWARDED).embedded
        await services.embedded(FRAME, "127.0.0.1")
        config = messages.AlterableConfig(name="retention.ms", value="86400000")
        resource = messages.AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name="t", configs=[config])
        change = module.REQUEST(resources=[resource])
        for listener in ("", "PLAINTEXT"):
            losing_once(services.controller, command)
            context = RequestContext(change.API_KEY, 1, 1, "client", "127.0.0.1", listener)
            answer = asyncio.ensure_future(module.handle(services, context, change))
            if not listener:  # the broker that forwarded it tries again
                with pytest.raises(KafkaError) as refused:
                    await answer
                assert refused.value.code == ErrorCode.NOT_CONTROLLER
        responses = (await asyncio.wait_for(answer, PATIENCE_S)).responses
        assert [each.error_code for each in responses] == [0]
        assert services.image().topic_config("t") == {"retention.ms": "86400000"}
