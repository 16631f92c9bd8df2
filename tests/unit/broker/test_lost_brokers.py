"""Clients are not told of a leader that is known to be gone, nor does a broker vanish from their lists at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis.cluster import metadata
from tidelog.broker.cluster import lost_brokers
from tidelog.broker.cluster.lost_brokers import LostBrokers
from tidelog.broker.cluster.metadata_answers import EncodedAnswer
from tidelog.broker.network.request import Deferred, completed
from tidelog.broker.scheduling.fair_scheduler import QUEUE_S, FairScheduler
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.controller.metadata.image import MetadataDelta
from tidelog.replication.ports import PortState


@pytest.fixture
async def services(tmp_path):
    async with running_services(tmp_path) as services:
        assert services.controller is not None
        await services.controller.create_topics([NewTopic("t", 1, 1)])
        yield services


def ask(services, *names):
    topics = [MetadataRequestTopic(name=name) for name in names] or None
    return metadata.handle(services, context(12), MetadataRequest(topics=topics))


async def test_an_answer_that_would_name_a_lost_leader_waits(services):
    services.lost_brokers.on_connection_lost(1)
    held = [ask(services, "t"), ask(services)]
    assert all(isinstance(answer, Deferred) and answer.response is None for answer in held)
    assert isinstance(ask(services, "another"), MetadataResponse)
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    await until(lambda: all(isinstance(answer.response, MetadataResponse | EncodedAnswer) for answer in held))
    assert isinstance(ask(services, "t"), MetadataResponse)


async def test_it_does_not_wait_for_long(services, monkeypatch):
    monkeypatch.setattr(lost_brokers, "HOLD_MS_MAX", 10)
    services.lost_brokers.on_connection_lost(1)
    held = ask(services, "t")
    await until(lambda: held.response is not None)
    assert held.response.topics[0].partitions[0].leader_id == 1


async def test_a_leader_that_answers_again_is_named_again(services):
    services.lost_brokers.on_connection_lost(1)
    held = ask(services, "t")
    services.lost_brokers.on_connection_made(1)
    assert not services.lost_brokers
    await until(lambda: held.response is not None)


def test_without_a_lost_broker_no_leader_is_looked_at():
    """Very many requests for 10,000 partitions may come back from the same probe, in one turn of the loop."""
    leaders = iter((1, 2, 3))
    assert not LostBrokers().contains_any(leaders)
    assert next(leaders) == 1


@pytest.mark.parametrize("partitions", [1, metadata.AT_ONCE_MAX * 2])
async def test_many_answers_that_wait_for_one_leader_are_not_made_in_one_turn(services, monkeypatch, partitions):
    """300 for 10,000 partitions, when a broker had died, held all others up for 20 s."""
    await services.controller.create_topics([NewTopic("many", partitions, 1)])
    monkeypatch.setattr(services, "scheduler", FairScheduler(asyncio.get_running_loop().call_soon, time.perf_counter))
    made_in, turn = Counter[int](), 0
    known = metadata._View.known

    def slow(self, topic):
        made_in[turn] += 1
        time.sleep(QUEUE_S)
        return known(self, topic)

    monkeypatch.setattr(metadata._View, "known", slow)
    services.lost_brokers.on_connection_lost(1)
    requests = [ask(services, "many") for _ in range(30)]
    answers = [asyncio.ensure_future(one if asyncio.iscoroutine(one) else completed(one)) for one in requests]
    await asyncio.sleep(0.01)
    assert not made_in
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    while not all(answer.done() for answer in answers):
        turn += 1
        await asyncio.sleep(0)
    assert all(len(answer.result().topics[0].partitions) == partitions for answer in answers)
    assert made_in.total() == 30
    assert max(made_in.values()) <= 2


async def test_the_leader_of_very_many_partitions_is_probed_too(services):
    probed = []

    async def probe(broker_id):
        probed.append(broker_id)
        return PortState.ACCEPTS

    await services.controller.create_topics([NewTopic("many", metadata.AT_ONCE_MAX * 2, 1)])
    services.lost_brokers._probe = probe
    services.lost_brokers.on_connection_made(1)
    answer = await ask(services, "many")
    assert len(answer.topics[0].partitions) == metadata.AT_ONCE_MAX * 2
    assert probed == [1]


async def listed(services):
    """The brokers of an answer without topics, where nothing is made up for those that are missing."""
    response = metadata.handle(services, context(12), MetadataRequest(topics=[]))
    if isinstance(response, Deferred):
        response = await asyncio.wait_for(completed(response), PATIENCE_S)
    assert isinstance(response, MetadataResponse)
    return [one.node_id for one in response.brokers]


async def test_a_broker_that_has_only_registered_is_not_listed(services):
    await services.controller.broker_heartbeat(_fence(services))
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    assert await listed(services) == []


@pytest.mark.parametrize("names", [("t",), (), ("another",)], ids=["one topic", "all topics", "a missing topic"])
async def test_an_answer_with_topics_never_lists_no_broker(services, names):
    """librdkafka would give up every address that it has, and ask nobody any more."""
    await services.controller.broker_heartbeat(_fence(services))
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    assert services.image().brokers[1].fenced
    response = encoded(ask(services, *names), 12)
    assert len(response.topics) == 1
    assert [one.node_id for one in response.brokers] == [1]
    assert all(partition.leader_id == -1 for topic in response.topics for partition in topic.partitions)


async def test_a_broker_fenced_a_moment_ago_is_still_listed(services, monkeypatch):
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    await services.controller.broker_heartbeat(_fence(services))
    assert services.image().brokers[1].fenced
    assert await listed(services) == []
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    assert await listed(services) == [1]
    assert encoded(ask(services), 12).topics[0].partitions[0].leader_id == -1
    monkeypatch.setattr(lost_brokers, "LISTED_MS", -1)
    assert await listed(services) == []


async def test_a_fenced_broker_that_hangs_is_not_listed(services):
    """Nor is one that only we can reach. A client that asked it would be told that it leads."""
    services.lost_brokers.on_connection_made(1)
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    await services.controller.broker_heartbeat(_fence(services))
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    assert await listed(services) == []
    services.lost_brokers.on_connection_lost(1)
    assert await listed(services) == [1], "its link broke, if only later than the news came"


def _fence(services):
    return BrokerHeartbeatRequest(
        broker_id=1,
        broker_epoch=services.image().brokers[1].epoch,
        current_metadata_offset=services.image().offset,
        want_fence=True,
    )


async def test_only_so_many_wait(monkeypatch):
    monkeypatch.setattr(lost_brokers, "WAITING_MAX", 1)
    brokers = LostBrokers()
    brokers.on_connection_lost(1)
    called: list[int] = []
    for number in range(3):
        brokers.when_resolved(partial(called.append, number))
    assert called == [1, 2]
    brokers.close()
    assert called == [1, 2, 0]


class Port:
    """What the host of broker 1 says to a connection; `gate` holds the answer up."""

    def __init__(self, services) -> None:
        self.state = PortState.ACCEPTS
        self.tried = 0
        self.gate = asyncio.Event()
        self.gate.set()
        services.lost_brokers = LostBrokers(self.probe)

    async def probe(self, broker_id: int) -> PortState:
        assert broker_id == 1
        self.tried += 1
        await self.gate.wait()
        return self.state


async def test_a_leader_that_refuses_is_not_named_though_its_link_seems_to_stand(services):
    """A dying process closes its connections one by one: a client may hear of it before this node does."""
    port = Port(services)
    port.state = PortState.REFUSES
    services.lost_brokers.on_connection_made(1)
    held = [ask(services, "t"), ask(services, "t")]
    await until(lambda: services.lost_brokers)
    assert port.tried == 1
    assert all(answer.response is None for answer in held)
    services.lost_brokers.on_image(services.image(), MetadataDelta(changed_brokers={1}))
    await until(lambda: all(isinstance(answer.response, MetadataResponse) for answer in held))
    assert isinstance(ask(services, "t"), MetadataResponse)
    assert port.tried == 1, "the link is gone: nothing is tried until it stands again"


async def test_a_leader_that_accepts_is_named_and_not_tried_again_at_once(services, monkeypatch):
    monkeypatch.setattr(lost_brokers, "ANSWERED_MS", 600_000)  # longer than the test stands still on a loaded machine
    port = Port(services)
    services.lost_brokers.on_connection_made(1)
    held = ask(services, "t")
    await until(lambda: held.response is not None)
    assert held.response.topics[0].partitions[0].leader_id == 1
    assert isinstance(ask(services, "t"), MetadataResponse)
    assert port.tried == 1


async def test_what_became_of_a_leader_while_it_was_tried_is_told_at_once(services):
    port = Port(services)
    port.state = PortState.REFUSES
    port.gate.clear()
    services.lost_brokers.on_connection_made(1)
    held = ask(services, "t")
    await asyncio.sleep(0)
    assert services.controller is not None
    services.controller.fence([1], "it is gone")
    await until(lambda: services.image().brokers[1].fenced)
    port.gate.set()
    await until(lambda: held.response is not None)
    assert held.response.topics[0].partitions[0].leader_id == -1


async def test_a_leader_that_does_not_answer_is_named_after_a_moment(services):
    port = Port(services)
    port.state = PortState.UNKNOWN
    services.lost_brokers.on_connection_made(1)
    held = ask(services, "t")
    await until(lambda: held.response is not None)
    assert held.response.topics[0].partitions[0].leader_id == 1


async def test_without_a_link_nothing_is_tried(services):
    port = Port(services)
    assert isinstance(ask(services, "t"), MetadataResponse)
    services.lost_brokers.on_connection_made(1)
    assert isinstance(ask(services), EncodedAnswer), "all topics: no client that looks for one leader"
    assert isinstance(ask(services, "another"), MetadataResponse)
    assert port.tried == 0
