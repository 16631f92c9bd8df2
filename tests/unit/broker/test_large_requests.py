"""Requests for very many partitions or resources: others are served between the pieces, and the answer is the same."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, Wire, served_meanwhile
from tests.unit.broker.largest_requests import largest_requests
from tidelog.broker.apis import config_changes, dispatch
from tidelog.broker.apis.api_tables import BROKER_APIS, CONTROLLER_APIS
from tidelog.broker.apis.cluster import alter_replica_log_dirs, elect_leaders
from tidelog.broker.apis.records import delete_records, fetch, list_offsets, offset_for_leader_epoch, produce
from tidelog.broker.apis.topics import create_topics
from tidelog.broker.apis.transactions import add_partitions_to_txn
from tidelog.broker.scheduling import fair_scheduler, large_answers
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages import alter_configs, incremental_alter_configs
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from tidelog.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopic,
)
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.headers import RequestHeader
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.replication.controller.commands import ControllerCommands

PARTITIONS = 10
NEVER_MS = 600_000
NOW_MS = 1_700_000_000_000


def names(count: int) -> list[str]:
    return [f"none-{number}" for number in range(count)]


def produced(topics: dict[str, list[bytes | None]], acks: int = -1) -> ProduceRequest:
    return ProduceRequest(
        acks=acks,
        timeout_ms=60_000,
        topic_data=[
            TopicProduceData(
                name=name,
                partition_data=[PartitionProduceData(index=at, records=each) for at, each in enumerate(batches)],
            )
            for name, batches in topics.items()
        ],
    )


def fetched(
    topics: dict[str, int], *, wait_ms: int = 0, session: tuple[int, int] = (0, -1), offset: int = 0
) -> FetchRequest:
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=50 << 20,
        session_id=session[0],
        session_epoch=session[1],
        topics=[
            FetchTopic(
                topic=name,
                partitions=[
                    FetchPartition(partition=at, fetch_offset=offset, partition_max_bytes=1 << 20)
                    for at in range(count)
                ],
            )
            for name, count in topics.items()
        ],
    )


def listed(topics: dict[str, list[int]]) -> ListOffsetsRequest:
    return ListOffsetsRequest(
        replica_id=-1,
        topics=[
            ListOffsetsTopic(
                name=name, partitions=[ListOffsetsPartition(partition_index=at, timestamp=-1) for at in indexes]
            )
            for name, indexes in topics.items()
        ],
    )


def altered(messages: ModuleType, resources: list[str], configs: int = 1) -> Any:
    names_of_configs = [f"retention.ms{number or ''}" for number in range(configs)]
    if messages is alter_configs:
        config: Any = alter_configs.AlterableConfig
        request: Any = alter_configs.AlterConfigsRequest
    else:
        config = incremental_alter_configs.AlterableConfig
        request = incremental_alter_configs.IncrementalAlterConfigsRequest
    return request(
        resources=[
            messages.AlterConfigsResource(
                resource_type=2,
                resource_name=name,
                configs=[config(name=key, value="1000") for key in names_of_configs],
            )
            for name in resources
        ]
    )


ALTER = (alter_configs, alter_configs.AlterConfigsResponse, 1)
INCREMENT = (incremental_alter_configs, incremental_alter_configs.IncrementalAlterConfigsResponse, 0)


def large_requests() -> list[tuple[Any, int, Any]]:
    many = names(9_500)
    return [
        (produced({name: [b""] for name in many}), 9, ProduceResponse),
        (fetched(dict.fromkeys(many, 1)), 12, FetchResponse),
        (fetched(dict.fromkeys(many, 1), session=(0, 0)), 12, FetchResponse),
        (listed({name: [0] for name in many}), 7, ListOffsetsResponse),
        *((altered(messages, many), version, response) for messages, response, version in (ALTER, INCREMENT)),
    ]


@pytest.mark.slow
async def test_others_are_served_between_the_pieces(running: RunningNode, wire: Wire) -> None:
    """Each took 0.2 to 0.5 s of the loop, in which nobody else was served."""
    for request, version, response in large_requests():
        served = await served_meanwhile(running, wire, request, version, response)
        assert served >= 8, type(request).__name__


def of_partitions(topics: dict[str, list[int]]) -> list[tuple[Any, int, Any]]:
    """Requests for some partitions twice, and for others that there are not."""
    adds = [
        AddPartitionsToTxnTransaction(
            transactional_id=f"id-{number}",
            producer_id=number,
            verify_only=number % 2 == 0,
            topics=[AddPartitionsToTxnTopic(name=name, partitions=indexes) for name, indexes in topics.items()],
        )
        for number in range(3)
    ]
    return [
        (
            OffsetForLeaderEpochRequest(
                replica_id=-1,
                topics=[
                    OffsetForLeaderTopic(
                        topic=name,
                        partitions=[
                            OffsetForLeaderPartition(partition=index, current_leader_epoch=-1, leader_epoch=0)
                            for index in indexes
                        ],
                    )
                    for name, indexes in topics.items()
                ],
            ),
            4,
            OffsetForLeaderEpochResponse,
        ),
        (
            DeleteRecordsRequest(
                timeout_ms=NEVER_MS,
                topics=[
                    DeleteRecordsTopic(
                        name=name,
                        partitions=[
                            DeleteRecordsPartition(partition_index=index, offset=number % 3 * 50)
                            for number, index in enumerate(indexes)
                        ],
                    )
                    for name, indexes in topics.items()
                ],
            ),
            2,
            DeleteRecordsResponse,
        ),
        (
            AlterReplicaLogDirsRequest(
                dirs=[
                    AlterReplicaLogDir(
                        path=path,
                        topics=[
                            AlterReplicaLogDirTopic(name=name, partitions=indexes) for name, indexes in topics.items()
                        ],
                    )
                    for path in ("/none", "relative")
                ]
            ),
            2,
            AlterReplicaLogDirsResponse,
        ),
        (AddPartitionsToTxnRequest(transactions=adds), 5, AddPartitionsToTxnResponse),
        (
            AddPartitionsToTxnRequest(v3_and_below_transactional_id="id", v3_and_below_topics=adds[0].topics),
            3,
            AddPartitionsToTxnResponse,
        ),
    ]


def make_pieces_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        fetch, produce, list_offsets, config_changes, offset_for_leader_epoch, delete_records, alter_replica_log_dirs,
        add_partitions_to_txn, large_answers,
    ):  # fmt: skip
        monkeypatch.setattr(module, "PIECE_ELEMENTS_MAX", 3)
    monkeypatch.setattr(add_partitions_to_txn, "TRANSACTION_ELEMENTS", 500)
    for module in (produce, dispatch):
        monkeypatch.setattr(module, "WHOLE_BYTES_MAX", 0)


async def test_the_answer_is_the_same_as_in_one_go(
    wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", PARTITIONS, compression_type="gzip")
    await wire.create_topic("u", PARTITIONS)
    batches: list[bytes | None] = [make_batch(b"%d" % number) for number in range(PARTITIONS)]
    batches[4], batches[7] = None, b"damaged" * 20
    writes = [produced({"t": batches, "none": [b""], "u": batches}, acks=acks) for acks in (-1, 1, 5)]
    reads: list[tuple[Any, int, Any]] = [
        (fetched({"t": PARTITIONS, "none": 1, "u": PARTITIONS}), 12, FetchResponse),
        (listed({"t": [*range(PARTITIONS), 2], "none": [0], "u": list(range(PARTITIONS))}), 7, ListOffsetsResponse),
        *(
            (altered(messages, ["t", "none", "u", "x", "u", "y", "t"]), version, response)
            for messages, response, version in (ALTER, INCREMENT)
        ),
        *of_partitions({"t": [*range(PARTITIONS), 2], "none": [0], "u": list(range(PARTITIONS + 2))}),
    ]

    async def answers() -> list[Any]:
        written = [await wire.call(request, 9, ProduceResponse) for request in writes]
        for answer in written:
            for topic in answer.responses:
                for partition in topic.partition_responses:
                    partition.base_offset = min(partition.base_offset, 0)
        return written + [await wire.call(request, version, response) for request, version, response in reads]

    whole = await answers()
    assert {each.error_code for each in whole[0].responses[0].partition_responses} > {ErrorCode.NONE}
    with monkeypatch.context() as context:
        make_pieces_small(context)
        in_pieces = await answers()
    assert in_pieces[:3] == whole[:3]
    again = [await wire.call(request, version, response) for request, version, response in reads]
    assert in_pieces[3:] == again


@pytest.mark.parametrize("session", [(0, -1), (0, 0)])
@pytest.mark.parametrize("is_answered_at_once", [False, True])
async def test_what_comes_to_a_partition_that_was_read_already_is_told(
    running: RunningNode, wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch, session: tuple[int, int],
    is_answered_at_once: bool,
) -> None:  # fmt: skip
    """An append between two pieces of one attempt wakes the fetch if it waits, and is in the next answer if not."""
    make_pieces_small(monkeypatch)
    await wire.create_topic("t", PARTITIONS)
    assert running.node._broker is not None
    partitions = running.node._broker.partitions
    pause = fetch._Fetch._pause
    batches = [make_batch(b"late")]

    def append_and_pause(self: Any) -> None:
        if self._unfinished.answered and batches:
            partitions.append(partitions.leader("t", 0), memoryview(bytearray(batches.pop())), NOW_MS, 1)
        pause(self)

    monkeypatch.setattr(fetch._Fetch, "_pause", append_and_pause)
    partitions.leader("t", 0).log.flush()  # its first record would wait for it
    if is_answered_at_once:
        await produce_one(wire, PARTITIONS - 1, make_batch(b"early"))
    answer = await call_patiently(wire, fetched({"t": PARTITIONS}, wait_ms=NEVER_MS, session=session))
    if not is_answered_at_once:
        assert told(answer) == [0]
    elif session[1] == 0:
        assert told(answer) == [PARTITIONS - 1]
        unread = fetched({}, wait_ms=NEVER_MS, session=(answer.session_id, 1))
        assert sorted(told(await call_patiently(wire, unread))) == [0, PARTITIONS - 1]


async def call_patiently(wire: Wire, request: FetchRequest) -> FetchResponse:
    answer: FetchResponse = await asyncio.wait_for(wire.call(request, 12, FetchResponse), PATIENCE_S)
    assert not answer.error_code
    return answer


def told(answer: FetchResponse) -> list[int]:
    return [each.partition_index for topic in answer.responses for each in topic.partitions if each.records]


async def produce_one(wire: Wire, index: int, records: bytes) -> None:
    request = produced({"t": [records]})
    request.topic_data[0].partition_data[0].index = index
    answer = await wire.call(request, 9, ProduceResponse)
    assert not answer.responses[0].partition_responses[0].error_code


@pytest.mark.parametrize(("messages", "response", "version"), [ALTER, INCREMENT])
async def test_too_many_configs_of_one_resource_are_refused(
    wire: Wire, messages: ModuleType, response: Any, version: int
) -> None:
    """Names of brokers' configs may be anybody's, so that nothing else bounds them."""
    await wire.create_topic("t")
    request = altered(messages, ["t"], configs=config_changes.CONFIGS_MAX + 1)
    request.resources[0].resource_type, request.resources[0].resource_name = 4, ""
    answer = await wire.call(request, version, response)
    assert answer.responses[0].error_code == ErrorCode.INVALID_REQUEST
    assert "1000" in answer.responses[0].error_message


async def test_too_many_features_are_refused(wire: Wire) -> None:
    """A level of 0 of a feature that is not known would be written for each."""
    updates = [FeatureUpdateKey(feature=name, max_version_level=0, upgrade_type=2) for name in names(1001)]
    request = UpdateFeaturesRequest(timeout_ms=10_000, feature_updates=updates)
    answer = await wire.call(request, 1, UpdateFeaturesResponse)
    assert answer.error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 2])
async def test_too_many_elections_are_refused(wire: Wire, version: int) -> None:
    """A refusal of 400,000, which fit a request, took half a second of the loop."""
    most = elect_leaders.ELECTIONS_MAX
    partitions = [TopicPartitions(topic=name, partitions=list(range(most - 10))) for name in "tu"]
    request = ElectLeadersRequest(topic_partitions=partitions, timeout_ms=60_000)
    answer = await wire.call(request, version, ElectLeadersResponse)
    assert answer.error_code == (ErrorCode.POLICY_VIOLATION if version else 0)
    assert [len(topic.partition_result) for topic in answer.replica_election_results] == [most - 10, 10]
    assert answer.replica_election_results[0].partition_result[0].error_code == ErrorCode.POLICY_VIOLATION


async def test_of_one_connection_one_large_fetch_waits_at_a_time(
    running: RunningNode, wire: Wire, make_batch: Any
) -> None:
    """A thousand of them held hundreds of MB, and a second of the loop when their waits ended."""
    count = fetch.WAITING_PARTITIONS_MAX + 1
    await wire.create_topic("t", count)
    other = await running.connect()
    assert running.node._broker is not None
    waits = running.node._broker.partitions.deadlines._deadlines
    for partitions, waiting in ((count, 1), (count - 1, 4)):
        wire = await running.connect()
        for _ in range(3):
            wire.send(fetched({"t": partitions}, wait_ms=NEVER_MS), 12)
        await until(lambda: len(waits) >= waiting)  # noqa: B023
        for _ in range(3):
            await other.call(MetadataRequest(topics=[]), 9, MetadataResponse)
        assert len(waits) == waiting
        if partitions == count:
            first = wire
    await produce_one(other, 0, make_batch(b"x"))
    for each in (first, wire):
        for _ in range(3):
            assert told(await asyncio.wait_for(each.receive(FetchResponse, 12), PATIENCE_S)) == [0]


async def test_waits_that_end_in_the_same_moment_do_not_take_one_long_turn_of_the_loop(
    running: RunningNode, wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer's or a client's request, small as it was, waited for the answers to all of them."""
    count = fetch.PARTITIONS_IN_TURN + 1
    await wire.create_topic("t", count)
    assert running.node._broker is not None
    waits = running.node._broker.partitions.deadlines._deadlines
    others = [await running.connect() for _ in range(20)]
    for each in others:
        each.send(fetched({"t": count}, wait_ms=NEVER_MS), 12)
    await until(lambda: len(waits) == len(others))
    turn, tried = [0], []

    async def count_turns() -> None:
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    attempt = fetch._Fetch._attempt

    def attempt_slowly(self: Any) -> Any:
        tried.append(turn[0])
        time.sleep(0.002)
        return attempt(self)

    monkeypatch.setattr(fetch._Fetch, "_attempt", attempt_slowly)
    turns = asyncio.create_task(count_turns())
    await produce_one(wire, 0, make_batch(b"x"))
    for each in others:
        assert told(await asyncio.wait_for(each.receive(FetchResponse, 12), PATIENCE_S)) == [0]
    turns.cancel()
    assert len(tried) == len(others)
    assert max(map(tried.count, tried)) <= 3


@pytest.mark.slow
async def test_answers_that_wait_for_the_same_commit_are_made_one_in_a_turn(
    running: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred requests for thousands of topics held up the active controller for half a minute."""
    wires = [await running.connect() for _ in range(10)]
    waiting, made = 0, list[tuple[int, str]]()
    turn = 0
    committed = asyncio.Event()
    create, describe = ControllerCommands.create_topics, create_topics._created
    encode = dispatch._Api.framed_in_steps

    async def create_later(self: Any, *topics: Any, **options: Any) -> Any:
        nonlocal waiting
        result = await create(self, *topics, **options)
        waiting += 1
        await committed.wait()
        return result

    def described(common: Any, topic: Any) -> Any:
        made.append((turn, topic.name.split("-")[0]))
        return describe(common, topic)

    def encoded(self: Any, frame: Any, response: Any, context: Any, request: Any) -> Any:
        for step in encode(self, frame, response, context, request):
            made.append((turn, response.topics[0].name.split("-")[0]))
            yield step

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count_turns)

    monkeypatch.setattr(ControllerCommands, "create_topics", create_later)
    monkeypatch.setattr(create_topics, "_created", described)
    monkeypatch.setattr(dispatch._Api, "framed_in_steps", encoded)
    monkeypatch.setattr(create_topics, "TOPICS_AT_ONCE", 100)
    for number, wire in enumerate(wires):
        topics = [
            CreatableTopic(name=f"{number}-{index}", num_partitions=1, replication_factor=1) for index in range(150)
        ]
        wire.send(CreateTopicsRequest(topics=topics, validate_only=True, timeout_ms=NEVER_MS), 7)
    await until(lambda: waiting == len(wires))
    count_turns()
    committed.set()
    for wire in wires:
        answer = await asyncio.wait_for(wire.receive(CreateTopicsResponse, 7), PATIENCE_S)
        assert [each.error_code for each in answer.topics] == [0] * 150
    in_turns: dict[int, list[str]] = {}
    for at, request in made:
        in_turns.setdefault(at, []).append(request)
    assert all(len(set(requests)) == 1 for requests in in_turns.values()), in_turns
    assert max(map(len, in_turns.values())) <= create_topics.TOPICS_AT_ONCE + 1


def for_the_controller() -> list[tuple[Any, int, Any, Callable[[Any], int]]]:
    many = names(9_500)
    topics = [CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in many[:5000]]
    return [
        (
            CreateTopicsRequest(topics=topics, validate_only=True, timeout_ms=NEVER_MS),
            7,
            CreateTopicsResponse,
            lambda answer: len(answer.topics),
        ),
        (
            DeleteTopicsRequest(topics=[DeleteTopicState(name=name) for name in many], timeout_ms=NEVER_MS),
            6,
            DeleteTopicsResponse,
            lambda answer: len(answer.responses),
        ),
        (
            ElectLeadersRequest(
                topic_partitions=[TopicPartitions(topic="none", partitions=list(range(50_000)))], timeout_ms=NEVER_MS
            ),
            2,
            ElectLeadersResponse,
            lambda answer: len(answer.replica_election_results[0].partition_result),
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
async def test_requests_for_the_controller_wait_undecoded_and_are_answered_in_steps(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, case: int
) -> None:
    """A hundred of them were all decoded, decided on and answered at once: seconds of the loop, and 20 million objects
    for the garbage collector."""
    request, version, response, count = for_the_controller()[case]
    size_bytes = len(request.encode(version))
    monkeypatch.setattr(fair_scheduler, "REQUEST_BYTES_MAX", size_bytes)
    scheduler = running.node._dispatchers[-1]._scheduler
    served = await served_meanwhile(running, wire, request, version, response)
    assert served >= 8
    wires = [await running.connect() for _ in range(4)]
    for each in wires:
        each.send(request, version)
    answers = [asyncio.create_task(each.receive(response, version)) for each in wires]
    most = waiting = 0
    async with asyncio.timeout(PATIENCE_S):
        while not all(each.done() for each in answers):
            await wire.call(MetadataRequest(topics=[]), 9, MetadataResponse)
            most = max(most, scheduler._request_bytes)
            waiting = max(waiting, len(scheduler._waiting_for_room))
    assert size_bytes * dispatch.CONTROLLER_WEIGHT < most < 2 * size_bytes * dispatch.CONTROLLER_WEIGHT
    assert waiting >= 2
    elements = getattr(request, "topics", None) or request.topic_partitions[0].partitions
    assert [count(each.result()) for each in answers] == [len(elements)] * 4


def with_names(count: int) -> DescribeGroupsRequest:
    return DescribeGroupsRequest(groups=[f"{number}-{'x' * 32}" for number in range(count)])


@pytest.mark.slow
async def test_a_large_request_is_decoded_between_those_of_others(running: RunningNode, wire: Wire) -> None:
    """Its decoding was one turn of the loop, 50 ms for 45,000 members."""
    members = [MemberIdentity(member_id=f"member-{number}") for number in range(45_000)]
    request = LeaveGroupRequest(group_id="none", members=members)
    assert await served_meanwhile(running, wire, request, 5, LeaveGroupResponse) > len(request.encode(5)) / 50_000


async def test_answers_leave_in_the_order_of_the_requests_where_a_large_one_is_decoded_in_steps(
    running: RunningNode, wire: Wire
) -> None:
    sent = [wire.send(with_names(3_000), 5), wire.send(MetadataRequest(topics=[]), 9), wire.send(with_names(1), 5)]
    assert len(with_names(3_000).encode(5)) > dispatch.DECODED_AT_ONCE_BYTES_MAX
    first = await wire.receive(DescribeGroupsResponse, 5)
    received = [wire.last_correlation_id]
    await wire.receive(MetadataResponse, 9)
    received.append(wire.last_correlation_id)
    await wire.receive(DescribeGroupsResponse, 5)
    assert [*received, wire.last_correlation_id] == sent
    assert [each.group_id for each in first.groups] == with_names(3_000).groups


async def test_a_large_request_that_cannot_be_decoded_closes_its_connection(
    running: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    wire = await running.connect()
    request = with_names(3_000).encode(5)
    head = RequestHeader(request_api_key=15, request_api_version=5, correlation_id=1, client_id="test").encode(2)
    frame = head + request[:-100]
    wire.writer.write(struct.pack(">i", len(frame)) + frame)
    async with asyncio.timeout(PATIENCE_S):
        assert await wire.reader.read() == b""
    assert "closing connection from 127.0.0.1: DescribeGroupsRequest version 5" in caplog.text
    await until(lambda: running.node._dispatchers[-1].tasks_under_way == 0)
    assert running.node._dispatchers[-1]._scheduler._request_bytes == 0


async def test_a_large_request_is_given_up_when_its_client_is_gone(
    running: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await running.connect()
    dispatcher = running.node._dispatchers[-1]
    scheduler = dispatcher._scheduler
    pauses = asyncio.Event()

    async def stay(*, for_records: bool = False) -> None:
        pauses.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(fair_scheduler.FairScheduler, "pause", lambda self, **known: stay(**known))
    wire.send(with_names(3_000), 5)
    await asyncio.wait_for(pauses.wait(), PATIENCE_S)
    assert (dispatcher.tasks_under_way, scheduler._request_bytes) == (1, len(with_names(3_000).encode(5)) + 15)
    server = running.node._broker_server
    assert server is not None
    for connection in list(server.connections):
        connection.abort()
    await until(lambda: dispatcher.tasks_under_way == 0)
    assert scheduler._request_bytes == 0


@pytest.mark.slow
def test_every_large_request_is_decoded_to_the_same_in_steps() -> None:
    for message in (api.REQUEST for api in (*BROKER_APIS, *CONTROLLER_APIS)):
        for large in largest_requests(message, max(message.VERSIONS), 0.05):
            data = large.request.encode(large.version)
            steps = type(large.request).read_in_steps(data, 0, large.version)
            assert outcome(steps) == (large.request, len(data))


def outcome(steps: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
