"""A few bytes may ask for all that a node knows of something: the answer has a bound, others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, Wire, served_meanwhile
from tidelog.broker.apis import dispatch
from tidelog.broker.apis.cluster import metadata
from tidelog.broker.apis.dispatch import Dispatcher
from tidelog.broker.apis.records import describe_producers
from tidelog.broker.network.accepting import has_ended
from tidelog.broker.network.counters import RequestCounters
from tidelog.broker.network.request import Deferred
from tidelog.broker.scheduling import fair_scheduler, large_answers
from tidelog.broker.scheduling.fair_scheduler import COSTLY_WAITS, LARGE_ANSWERS_MAX, FairScheduler
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersRequestTopicRequest,
    DescribeProducersResponse,
)
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchResponse
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData

PARTITIONS = 20
TOPIC = 2
GROUPS = [f"g{number}" for number in range(12)]


async def commit(wire: Wire, count: int = len(GROUPS)) -> None:
    """PARTITIONS offsets of each group."""
    await wire.create_topic("t", PARTITIONS)
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    partitions = [
        OffsetCommitRequestPartition(partition_index=index, committed_offset=5) for index in range(PARTITIONS)
    ]
    for number in range(count):
        topics = [OffsetCommitRequestTopic(name="t", partitions=partitions)]
        request = OffsetCommitRequest(group_id=f"g{number}", topics=topics)
        answer = await wire.call(request, 8, OffsetCommitResponse)
        assert {each.error_code for each in answer.topics[0].partitions} == {0}


def all_offsets() -> OffsetFetchRequest:
    return OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=name, topics=None) for name in GROUPS])


async def test_what_an_answer_has_no_room_for_is_asked_for_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await commit(wire)
    monkeypatch.setattr(large_answers, "ANSWER_ELEMENTS_MAX", 5 * PARTITIONS)
    asked = all_offsets()
    rounds = 0
    while asked.groups:
        answer = await wire.call(asked, 9, OffsetFetchResponse)
        assert [each.group_id for each in answer.groups] == [each.group_id for each in asked.groups]
        whole = [each for each in answer.groups if not each.error_code]
        assert 0 < len(whole) <= 5
        assert all(len(each.topics[0].partitions) == PARTITIONS for each in whole)
        left = answer.groups[len(whole) :]
        assert {each.error_code for each in left} <= {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
        asked.groups = asked.groups[len(whole) :]
        rounds += 1
    assert rounds == 3


async def test_the_first_is_answered_whatever_its_size(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await commit(wire, 1)
    monkeypatch.setattr(large_answers, "ANSWER_ELEMENTS_MAX", 1)
    answer = await wire.call(all_offsets(), 9, OffsetFetchResponse)
    assert [each.error_code for each in answer.groups] == [0, *[ErrorCode.COORDINATOR_LOAD_IN_PROGRESS] * 11]
    assert len(answer.groups[0].topics[0].partitions) == PARTITIONS


async def test_others_are_served_while_few_bytes_ask_for_much(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit(wire)
    monkeypatch.setattr(large_answers, "PIECE_ELEMENTS_MAX", 10)
    assert await served_meanwhile(running, wire, all_offsets(), 9, OffsetFetchResponse) >= len(GROUPS) // 2


@pytest.mark.slow
async def test_groups_are_listed_in_pieces(running: RunningNode, wire: Wire) -> None:
    await wire.create_topic("t")
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    topics = [OffsetCommitRequestTopic(name="t", partitions=[OffsetCommitRequestPartition(committed_offset=1)])]
    names = [f"group-{number}" for number in range(3 * PIECE_ELEMENTS_MAX)]
    for name in names:
        wire.send(OffsetCommitRequest(group_id=name, topics=topics), 8)
    for _ in names:
        await wire.receive(OffsetCommitResponse, 8)
    assert await served_meanwhile(running, wire, ListGroupsRequest(), 5, ListGroupsResponse) >= 3
    answer = await wire.call(ListGroupsRequest(), 5, ListGroupsResponse)
    assert sorted(each.group_id for each in answer.groups) == sorted(names)
    assert (await wire.call(ListGroupsRequest(states_filter=["Stable"]), 5, ListGroupsResponse)).groups == []


async def test_the_producers_of_many_partitions(
    wire: Wire, make_batch: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", 4)
    for index in range(4):
        for producer_id in range(10):
            batch = make_batch(b"a", producer_id=producer_id, producer_epoch=0, base_sequence=0)
            data = TopicProduceData(name="t", partition_data=[PartitionProduceData(index=index, records=batch)])
            await wire.call(ProduceRequest(acks=1, timeout_ms=1000, topic_data=[data]), 9, ProduceResponse)
    monkeypatch.setattr(large_answers, "ANSWER_ELEMENTS_MAX", 15)
    monkeypatch.setattr(large_answers, "PIECE_ELEMENTS_MAX", 5)
    topic = DescribeProducersRequestTopicRequest(name="t", partition_indexes=[0, 1, 2, 3])
    answer = await wire.call(DescribeProducersRequest(topics=[topic]), 0, DescribeProducersResponse)
    found = [(len(each.active_producers), each.error_code) for each in answer.topics[0].partitions]
    assert found == [(10, 0), (10, 0), *[(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 2]
    missing = DescribeProducersRequestTopicRequest(name="missing", partition_indexes=list(range(20)))
    answer = await wire.call(DescribeProducersRequest(topics=[missing]), 0, DescribeProducersResponse)
    unknown = [each.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION for each in answer.topics[0].partitions]
    assert unknown == [True] * 15 + [False] * 5, "errors count too"


async def test_others_are_served_between_the_producers_of_one_partition(
    running: RunningNode, wire: Wire, make_batch: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a second for the 50,000 that a partition may have."""
    await wire.create_topic("t")
    for producer_id in range(40):
        batch = make_batch(b"a", producer_id=producer_id, producer_epoch=0, base_sequence=0)
        data = TopicProduceData(name="t", partition_data=[PartitionProduceData(index=0, records=batch)])
        await wire.call(ProduceRequest(acks=1, timeout_ms=1000, topic_data=[data]), 9, ProduceResponse)
    for module in (large_answers, describe_producers):
        monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", 2)
    request = DescribeProducersRequest(topics=[DescribeProducersRequestTopicRequest(name="t", partition_indexes=[0])])
    answer = await wire.call(request, 0, DescribeProducersResponse)
    assert [each.producer_id for each in answer.topics[0].partitions[0].active_producers] == [*range(40)]
    assert await served_meanwhile(running, wire, request, 0, DescribeProducersResponse) >= 10


async def test_configs_asked_for_again_have_a_bound_of_their_own(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for once is described, however much it is."""
    for name in ("t", "u"):
        await wire.create_topic(name)
    monkeypatch.setattr(large_answers, "ANSWER_ELEMENTS_MAX", 1)
    resources = [DescribeConfigsResource(resource_type=TOPIC, resource_name=name) for name in ("t", "u", "t")]
    resources[2].configuration_keys = ["retention.ms"]
    answer = await wire.call(DescribeConfigsRequest(resources=resources), 4, DescribeConfigsResponse)
    assert [each.error_code for each in answer.results] == [0, 0, ErrorCode.INVALID_REQUEST]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4000, 400])
async def test_large_requests_under_way_have_a_bound(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """Each takes twenty times its bytes once it is decoded: the others wait as they came. Small ones do not."""
    await wire.call(FindCoordinatorRequest(coordinator_keys=["any"]), 6, FindCoordinatorResponse)
    size_bytes = 11 * groups
    monkeypatch.setattr(fair_scheduler, "REQUEST_BYTES_MAX", 2 * size_bytes)
    monkeypatch.setattr(large_answers, "PIECE_ELEMENTS_MAX", 50)
    large = DescribeGroupsRequest(groups=[f"group-{number}" for number in range(groups)])
    scheduler = running.node._dispatchers[-1]._scheduler
    wires = [await running.connect() for _ in range(12)]
    for each in wires:
        each.send(large, 5)
        await each.writer.drain()
    await wire.call(DescribeGroupsRequest(groups=["few"]), 5, DescribeGroupsResponse)
    for each in wires:
        each.send(large, 5)
    answers = [asyncio.create_task(each.receive(DescribeGroupsResponse, 5)) for each in wires]
    gone = wires.pop()
    answers.pop().cancel()
    gone.writer.close()
    most = waiting = 0
    while not all(each.done() for each in answers):
        few = await wire.call(DescribeGroupsRequest(groups=["few"]), 5, DescribeGroupsResponse)
        assert few.groups[0].error_code == 0
        most = max(most, scheduler._request_bytes)
        waiting = max(waiting, len(scheduler._waiting_for_room))
    answers += [asyncio.create_task(each.receive(DescribeGroupsResponse, 5)) for each in wires]
    async with asyncio.timeout(PATIENCE_S):
        for answer in answers:
            assert {group.error_code for group in (await answer).groups} == {0}
    assert size_bytes < most < 4 * size_bytes
    assert waiting >= 6
    assert scheduler._request_bytes == len(scheduler._waiting_for_room) == 0


async def test_no_answer_is_begun_for_a_client_that_is_gone_before_its_turn() -> None:
    """Each of 1,500 took 3 ms after they had closed, and others waited for 22 s behind them."""

    class Gone:
        is_gone = True

    begun = False
    with pytest.raises(KafkaError, match="disconnected"):
        async with AnswerInPieces(FairScheduler(asyncio.get_running_loop().call_soon), Gone()):
            begun = True
    assert not begun


async def test_the_work_for_a_client_that_is_gone_ends(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads from its connection meanwhile, which would tell."""
    await wire.create_topic("t")
    monkeypatch.setattr(large_answers, "PIECE_ELEMENTS_MAX", 1)
    names = [f"none-{number}" for number in range(20_000)]
    resources = [DescribeConfigsResource(resource_type=TOPIC, resource_name=name) for name in names]
    dispatcher: Any = running.node._dispatchers[-1]
    gone = await running.connect()
    gone.send(DescribeConfigsRequest(resources=resources), 4)
    await gone.writer.drain()
    served = 0
    async with asyncio.timeout(PATIENCE_S):
        while not dispatcher.tasks_under_way:
            await wire.call(MetadataRequest(topics=[]), 9, MetadataResponse)
        gone.writer.close()
        while dispatcher.tasks_under_way:
            await wire.call(MetadataRequest(topics=[]), 9, MetadataResponse)
            served += 1
    assert served < 5000


async def test_few_answers_are_large_at_a_time() -> None:
    """They take the memory; the others wait with their first piece."""
    scheduler = FairScheduler(asyncio.get_running_loop().call_soon)
    large = most = ended = 0

    async def make(pieces: int) -> None:
        nonlocal large, most, ended
        async with AnswerInPieces(scheduler, None) as answer:
            for number in range(pieces):
                if number == 1:
                    large += 1
                    most = max(most, large)
                await answer.add_elements(PIECE_ELEMENTS_MAX)
            large -= 1
        ended += 1

    tasks = [asyncio.create_task(make(10)) for _ in range(10 * LARGE_ANSWERS_MAX)]
    for _ in range(20):
        await asyncio.sleep(0)
    tasks[-1].cancel()  # one that waits
    tasks[0].cancel()  # one that is large
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert ended == len(tasks) - 2
    assert most <= LARGE_ANSWERS_MAX + 1  # that of the cancelled one is never taken back
    assert scheduler._large_answers == 0


async def test_a_small_answer_waits_for_no_large_one() -> None:
    scheduler = FairScheduler(asyncio.get_running_loop().call_soon)
    large = [AnswerInPieces(scheduler, None) for _ in range(LARGE_ANSWERS_MAX)]
    for answer in large:
        async with asyncio.timeout(PATIENCE_S):
            await answer.__aenter__()
            await answer.add_elements(PIECE_ELEMENTS_MAX)
    async with asyncio.timeout(PATIENCE_S), AnswerInPieces(scheduler, None) as small:
        await small.add_elements(PIECE_ELEMENTS_MAX - 1)


@pytest.mark.parametrize("leaves", [socket.SHUT_WR, None])
def test_a_connection_that_the_other_end_has_closed(leaves: int | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not has_ended(ours)
        theirs.send(b"unread")
        assert not has_ended(ours)
        if leaves is None:
            theirs.close()
        else:
            theirs.shutdown(leaves)
        assert has_ended(ours)
    assert not has_ended(ours)
    assert not has_ended(object())


async def test_a_client_that_is_gone_raises_at_the_end_of_a_piece() -> None:
    class Client:
        is_gone = False

    client = Client()
    async with AnswerInPieces(FairScheduler(asyncio.get_running_loop().call_soon), client) as answer:
        await answer.add_elements(PIECE_ELEMENTS_MAX)
        client.is_gone = True
        await answer.add_elements(PIECE_ELEMENTS_MAX - 1)
        with pytest.raises(KafkaError, match="disconnected"):
            await answer.add_elements(1)


async def test_a_host_takes_no_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,500 connections of one host a third of another one's requests were refused."""
    monkeypatch.setattr(dispatch, "COLD_TASKS_MAX", 8)
    ended = asyncio.Event()

    async def handle(*_: Any) -> MetadataResponse:
        await ended.wait()
        return MetadataResponse()

    api = SimpleNamespace(REQUEST=MetadataRequest, handle=handle, refuse=metadata.refuse)
    scheduler = FairScheduler(asyncio.get_running_loop().call_soon)
    services = SimpleNamespace(requests=RequestCounters(), scheduler=scheduler)
    dispatcher = Dispatcher(cast(Any, services), [cast(Any, api)])
    frame = memoryview(struct.pack(">hhihi", MetadataRequest.API_KEY, 1, 7, -1, -1))
    peers = [
        SimpleNamespace(host=host, listener_name="", produce_topic_at=0)
        for host in ["many"] * 9 + ["few"] * 4 + ["one"] * 2
    ]
    answers = [dispatcher.dispatch(frame, cast(Any, peer)) for peer in peers]
    served = [isinstance(answer, Deferred) and answer.response is None for answer in answers]
    assert served == [True] * 4 + [False] * 5 + [True] * 2 + [False] * 2 + [True, False]
    ended.set()
    await until(lambda: not dispatcher.tasks_under_way)
    assert not dispatcher._tasks_of_host


async def test_the_connection_of_a_request_that_took_long_is_known_by_it() -> None:
    """Its next ones wait with their like."""
    now_s, takes_s = 0.0, 0.0

    def handle(*_: Any) -> MetadataResponse:
        nonlocal now_s
        now_s += takes_s
        return MetadataResponse()

    api = SimpleNamespace(REQUEST=MetadataRequest, handle=handle, refuse=metadata.refuse)
    scheduler = FairScheduler(asyncio.get_running_loop().call_soon)
    services = SimpleNamespace(requests=RequestCounters(lambda: now_s), scheduler=scheduler)
    dispatcher = Dispatcher(cast(Any, services), [cast(Any, api)])
    frame = memoryview(struct.pack(">hhihi", MetadataRequest.API_KEY, 1, 7, -1, -1))
    peer = SimpleNamespace(host="", listener_name="", produce_topic_at=0, costly_waits=0)
    for cost_s, waits in ((0.0001, 0), (0.002, COSTLY_WAITS)):
        takes_s = cost_s
        dispatcher.dispatch(frame, cast(Any, peer))
        assert peer.costly_waits == waits
