"""What requests and fetch sessions keep: no more of a request than its answer needs, so that many may wait."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.test_hostile_requests import waiting_count
from tests.unit.replication.replicas import Replicas
from tidelog.broker.replicas.fetching.fetch_sessions import FetchSessions
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, ForgottenTopic
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from tidelog.replication.controller.decisions.topic_names import MAX_LENGTH

COUNT = 10
ELEMENTS = 20_000
_NOT_YET = (
    ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
)  # fmt: skip
HELD_BYTES_MAX = 3_000_000
"""Of COUNT requests that wait, with the receive buffers of their connections. Their elements would take twice as much
or more."""


async def held_bytes(sent: int, send: Any, waiting: Any) -> int:
    """The memory of requests that are sent one after the other and wait."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, sent + 1):
            send()
            await until(lambda: waiting() == number)  # noqa: B023
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


@pytest.mark.slow
@pytest.mark.parametrize("is_session", [False, True])
async def test_a_fetch_does_not_keep_its_request_while_it_waits(
    running: RunningNode, wire: Wire, is_session: bool
) -> None:
    """A connection may have a thousand of them: those of 360 KB held 3.5 GB."""
    await wire.create_topic("t")
    asked = [FetchTopic(topic="t", partitions=[FetchPartition(partition=0, partition_max_bytes=1)])]
    forgotten = [ForgottenTopic(topic="t", partitions=list(range(1000, 1000 + ELEMENTS)))]

    def send() -> None:
        request = FetchRequest(
            max_wait_ms=300_000, min_bytes=1, session_epoch=-1, topics=asked, forgotten_topics_data=forgotten,
            rack_id="r" * 30_000, cluster_id="c" * 30_000,
        )  # fmt: skip
        request.session_id, request.session_epoch = next(sessions)
        wire.send(request, 12)

    sessions = iter([(0, -1)] * COUNT)
    if is_session:  # two of a session may wait
        opened = FetchRequest(max_wait_ms=0, session_epoch=0, topics=asked)
        answers = [await wire.call(opened, 12, FetchResponse) for _ in range(COUNT)]
        sessions = iter([(answer.session_id, 1) for answer in answers])
    assert await held_bytes(COUNT, send, lambda: waiting_count(running)) < HELD_BYTES_MAX


async def joined(start_node: StartNode) -> tuple[Any, list[Wire], list[JoinGroupResponse]]:
    """A node, and the members of a group whose leader has not assigned yet, the leader first."""
    running = await start_node(**{"group.initial.rebalance.delay.ms": "500"})
    wires = [await running.connect() for _ in range(COUNT + 1)]
    find = FindCoordinatorRequest(key="g")
    async with asyncio.timeout(PATIENCE_S):
        while (await wires[0].call(find, 3, FindCoordinatorResponse)).error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while (await wires[0].call(HeartbeatRequest(group_id="g"), 3, HeartbeatResponse)).error_code in _NOT_YET:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(each.call(join(""), 3, JoinGroupResponse) for each in wires))
    assert {(each.error_code, each.leader) for each in answers} == {(0, answers[0].leader)}
    members = sorted(zip(wires, answers, strict=True), key=lambda each: each[1].member_id != each[1].leader)
    return running.node, [each for each, _ in members], [each for _, each in members]


def join(member_id: str, protocols: int = 1) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id="g", session_timeout_ms=60_000, rebalance_timeout_ms=60_000, member_id=member_id,
        protocol_type="consumer", reason="r" * 30_000,
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"%d" % protocols) for _ in range(protocols)],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("api", ["join", "sync"])
async def test_members_of_a_group_do_not_keep_their_requests_while_they_wait(start_node: StartNode, api: str) -> None:
    """They wait for as long as a rebalance takes, also when their clients have disconnected."""
    node, wires, members = await joined(start_node)
    groups = node._services.groups
    others = iter(list(zip(wires, members, strict=True))[1:])
    assignments = [SyncGroupRequestAssignment(member_id="", assignment=b"") for _ in range(ELEMENTS)]

    def send() -> None:
        client, member = next(others)
        if api == "join":
            client.send(join(member.member_id, ELEMENTS // 4), 8)
        else:
            sync = SyncGroupRequest(
                group_id="g", generation_id=member.generation_id, member_id=member.member_id, assignments=assignments
            )
            client.send(sync, 3)

    assert await held_bytes(COUNT, send, lambda: parked_count(groups)) < HELD_BYTES_MAX


def parked_count(groups: Any) -> int:
    count: int = groups._runtime._parked_count
    return count


async def test_of_one_connection_one_large_request_waits_at_a_time(start_node: StartNode) -> None:
    """It keeps its request, as that of an OffsetCommit for thousands of topics that do not exist."""
    node, wires, members = await joined(start_node)
    groups = node._services.groups
    wires[1].send(join(members[1].member_id, 2), 3)
    await until(lambda: parked_count(groups) == 1)
    connections = node._broker_server.connections
    assert not any(each._exclusive for each in connections)
    wires[2].send(join(members[2].member_id, 2000), 3)
    await until(lambda: parked_count(groups) == 2)
    assert sum(each._exclusive for each in connections) == 1


def named(topic: str, session_id: int = 0, epoch: int = 0) -> FetchRequest:
    topics = [FetchTopic(topic=topic, partitions=[FetchPartition(partition=0)])]
    return FetchRequest(session_id=session_id, session_epoch=epoch, topics=topics)


def test_no_session_keeps_names_that_are_too_long_for_a_topic() -> None:
    """Each may have 32 KB: the sessions of a node, which stay when their clients have gone, held 30 GB."""
    known = FetchSessions(10, random.Random(1))
    longest, too_long = "t" * MAX_LENGTH, "t" * (MAX_LENGTH + 1)
    assert known.resolve(named(too_long), False, 0)[0].id == 0
    session, _ = known.resolve(named(longest), False, 0)
    assert session.id
    with pytest.raises(KafkaError) as refusal:
        known.resolve(named(too_long, session.id, 1), False, 0)
    assert refusal.value.code is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(known) == 0
    assert known._partition_count == 0


def test_no_session_of_a_follower_does_either() -> None:
    """Any client can say that it is one."""
    cluster = Replicas(2)
    followers = cluster.nodes[1].partitions.follower_fetches
    real = dict(followers.sessions)

    def ask(request: FetchRequest) -> FetchResponse:
        request.replica_id, request.max_wait_ms = 2, 0
        frames = cluster.nodes[1].serve(1, 12, memoryview(bytearray(request.encode(12))))
        assert isinstance(frames, list)
        return FetchResponse.decode(b"".join(frames)[9:], 12)

    longest, too_long = "t" * MAX_LENGTH, "t" * (MAX_LENGTH + 1)
    answer = ask(named(too_long))
    assert answer.session_id == 0
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    session_id = ask(named(longest)).session_id
    assert session_id
    assert ask(named(too_long, session_id, 1)).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert followers.sessions == real
    assert followers.entry_count == sum(len(each.entries) for each in real.values())
