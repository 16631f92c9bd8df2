"""Commits of very many offsets are made in pieces: what may happen between these, and that each is one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.coordinators.fakes import World, context
from tests.unit.broker.transactions import PID, FakeCoordinator, txn_offset_commit, use
from tidelog.broker.coordinators.group import service
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.large_commits import commit_pieces
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitResponse

E = ErrorCode
COUNT = 3 * PIECE_ELEMENTS_MAX + 10
PARTITIONS = 2


def commit_request(offset: int, count: int = COUNT, *, topic: str = "t", **fields: Any) -> OffsetCommitRequest:
    """Of the same few partitions again and again. The offset counts."""
    partitions = [
        OffsetCommitRequestPartition(
            partition_index=index % PARTITIONS, committed_offset=offset, committed_metadata="m"
        )
        for index in range(count)
    ]
    return OffsetCommitRequest(
        group_id="g", topics=[OffsetCommitRequestTopic(name=topic, partitions=partitions)], **fields
    )


def errors_of(response: OffsetCommitResponse | TxnOffsetCommitResponse) -> list[int]:
    return [each.error_code for topic in response.topics for each in topic.partitions]


# -- the coordinator alone ---------------------------------------------------------------------------------------------


class Pauses:
    def __init__(self, act: Callable[[], object] = lambda: None, at: int = 2) -> None:
        self.count = 0
        self._act, self._at = act, at

    async def __call__(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._act()


def run(steps: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(steps, PATIENCE_S)

    return asyncio.run(limited())


def commit_in_pieces(world: World, request: Any, pauses: Pauses, version: int = 9) -> Any:
    """The reply."""
    prepared = run(world.service.prepare_commit(context(8, version), request, {}, pauses))
    return world.ask(lambda: world.service.commit_offsets(context(8, version), request, prepared))


@pytest.mark.parametrize("compression", [0, 1])
@pytest.mark.parametrize("retention_ms", [-1, 60_000])
def test_a_commit_in_pieces_is_the_same_as_one_at_once(compression: int, retention_ms: int) -> None:
    worlds = [World(GroupCoordinatorConfig(offsets_topic_compression_codec=compression)) for _ in range(2)]
    request = commit_request(5, retention_time_ms=retention_ms)
    request.topics[0].partitions[7].committed_metadata = "m" * 5000
    pauses = Pauses()
    in_pieces = commit_in_pieces(worlds[0], request, pauses)
    at_once = worlds[1].ask(lambda: worlds[1].service.commit_offsets(context(8, 9), request))
    assert pauses.count > COUNT // PIECE_ELEMENTS_MAX
    assert in_pieces.response == at_once.response
    assert errors_of(at_once.response).count(E.OFFSET_METADATA_TOO_LARGE) == 1
    assert worlds[0].ports.logs == worlds[1].ports.logs
    assert [read_header(batch).record_count for batch in worlds[0].ports.logs[0]] == [COUNT - 1]


def test_pieces_have_all_partitions_in_their_order() -> None:
    request = commit_request(1, 1200)
    request.topics[1:] = [OffsetCommitRequestTopic(name=f"t{n}", partitions=[*request.topics[0].partitions[:3]])
                          for n in range(300)]  # fmt: skip
    pieces = list(commit_pieces(request))
    assert max(sum(len(topic.partitions) for topic in piece.topics) for piece in pieces) == PIECE_ELEMENTS_MAX
    every = [(topic.name, each) for topic in request.topics for each in topic.partitions]
    assert [(topic.name, each) for piece in pieces for topic in piece.topics for each in topic.partitions] == every


def member_leaves(world: World, members: list[str]) -> None:
    world.leave("g", *members)


def member_joins(world: World, members: list[str]) -> None:
    world.join("g", version=3)


def partition_moves(world: World, members: list[str]) -> None:
    world.service.on_partition_resigned(0)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("act", "error"),
    [
        (member_leaves, E.UNKNOWN_MEMBER_ID),
        (member_joins, E.NONE),  # while the group prepares its rebalance, its members may commit
        (partition_moves, E.NOT_COORDINATOR),
    ],
)
def test_the_group_changes_between_two_pieces(
    act: Callable[[World, list[str]], None], error: ErrorCode, at: int
) -> None:
    world = World()
    members = world.stable()
    request = commit_request(5, generation_id_or_member_epoch=1, member_id=members[0])
    reply = commit_in_pieces(world, request, Pauses(lambda: act(world, members), at))
    if error is E.NONE:
        assert set(errors_of(reply.response)) == {0}
        assert world.committed() == 5
        return
    assert reply.error == error
    if error is not E.NOT_COORDINATOR:
        assert world.committed() == -1


def test_a_commit_that_is_refused_already_has_no_pieces() -> None:
    world = World()
    world.stable()
    pauses = Pauses()
    with pytest.raises(KafkaError) as caught:
        commit_in_pieces(world, commit_request(5, generation_id_or_member_epoch=1, member_id="other"), pauses)
    assert (caught.value.code, pauses.count) == (E.UNKNOWN_MEMBER_ID, 0)


def test_a_commit_above_the_largest_batch_is_refused_before_its_last_piece() -> None:
    world = World()
    world.ports.max_message_bytes = 10_000
    pauses = Pauses()
    with pytest.raises(KafkaError) as caught:
        commit_in_pieces(world, commit_request(5), pauses)
    assert (caught.value.code, pauses.count) == (E.UNKNOWN_SERVER_ERROR, 1)
    assert world.committed() == -1


# -- a node ------------------------------------------------------------------------------------------------------------


class Gate:
    """Between two pieces, until `open`."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    async def pause(self) -> None:
        self.is_reached.set()
        await asyncio.wait_for(self._opened.wait(), PATIENCE_S)


@pytest.fixture
async def gate(wire: Wire, running: RunningNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Of a node with the topic t and the coordinator's topic."""
    await wire.create_topic("t", PARTITIONS)
    await wire.create_topic("__consumer_offsets")
    await loaded(running)
    gate, pause = Gate(), FairScheduler.pause

    async def at_gate(self: FairScheduler, *, for_records: bool = False) -> None:
        await gate.pause()
        await pause(self, for_records=for_records)

    monkeypatch.setattr(FairScheduler, "pause", at_gate)
    yield gate
    gate.open()


async def loaded(running: RunningNode) -> None:
    broker = running.node._broker
    assert broker is not None
    await until(lambda: not broker.groups.is_loading())


def tasks_under_way(running: RunningNode) -> int:
    return sum(each.tasks_under_way for each in running.node._dispatchers)


async def fetched(wire: Wire) -> set[int]:
    request = OffsetFetchRequest(
        group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=list(range(PARTITIONS)))]
    )
    response = await wire.call(request, 7, OffsetFetchResponse)
    assert response.error_code == 0
    return {each.committed_offset for each in response.topics[0].partitions}


async def test_commits_of_one_connection_keep_their_order(wire: Wire, running: RunningNode, gate: Gate) -> None:
    wire.send(commit_request(1), 8)
    wire.send(commit_request(2, PARTITIONS), 8)
    await asyncio.wait_for(gate.is_reached.wait(), PATIENCE_S)
    other = await running.connect()
    assert set(errors_of(await other.call(commit_request(3, PARTITIONS), 8, OffsetCommitResponse))) == {0}
    assert await fetched(other) == {3}
    gate.open()
    for count in (COUNT, PARTITIONS):
        assert errors_of(await wire.receive(OffsetCommitResponse, 8)) == [0] * count
    assert await fetched(wire) == {2}


async def test_the_client_goes_between_two_pieces(running: RunningNode, gate: Gate) -> None:
    """The node has its request: the offsets are committed, as those of a small one."""
    client = await running.connect()
    client.send(commit_request(1), 8)
    await asyncio.wait_for(gate.is_reached.wait(), PATIENCE_S)
    client.writer.close()
    gate.open()
    other = await running.connect()
    await until(lambda: not tasks_under_way(running))
    assert await fetched(other) == {1}


async def test_the_node_stops_between_two_pieces(
    wire: Wire, running: RunningNode, gate: Gate, start_node: StartNode
) -> None:
    await wire.call(commit_request(1, PARTITIONS), 8, OffsetCommitResponse)
    wire.send(commit_request(2), 8)
    await asyncio.wait_for(gate.is_reached.wait(), PATIENCE_S)
    await asyncio.wait_for(running.stop(), PATIENCE_S)
    gate.open()
    again = await start_node()
    await loaded(again)
    assert await fetched(await again.connect()) == {1}


@pytest.mark.parametrize("is_transactional", [False, True])
async def test_a_topic_is_deleted_between_two_pieces(
    wire: Wire, running: RunningNode, gate: Gate, is_transactional: bool
) -> None:
    """Its offset would stay for a new topic of this name. The client tries again."""
    use(running, FakeCoordinator())
    request: Any = commit_request(1)
    response: Any = OffsetCommitResponse
    if is_transactional:
        request, response = large_txn_commit(), TxnOffsetCommitResponse
    version = 4 if is_transactional else 8
    wire.send(request, version)
    await asyncio.wait_for(gate.is_reached.wait(), PATIENCE_S)
    other = await running.connect()
    deleted = await other.call(DeleteTopicsRequest(topic_names=["t"], timeout_ms=60_000), 5, DeleteTopicsResponse)
    assert deleted.responses[0].error_code == 0
    gate.open()
    answered = await wire.receive(response, version)
    expected = E.COORDINATOR_NOT_AVAILABLE if is_transactional else E.UNKNOWN_TOPIC_OR_PARTITION
    assert set(errors_of(answered)) == {expected}


def large_txn_commit() -> Any:
    request = txn_offset_commit({("t", 0): 1}, producer_id=PID)
    request.topics[0].partitions *= COUNT
    return request


async def test_many_offsets_of_a_transaction(wire: Wire, running: RunningNode, gate: Gate) -> None:
    use(running, FakeCoordinator())
    gate.open()
    answered = await wire.call(large_txn_commit(), 4, TxnOffsetCommitResponse)
    assert errors_of(answered) == [0] * COUNT
    assert await fetched(wire) == {-1}, "before the end of the transaction"


async def test_too_many_offsets_of_transactions_at_once(
    wire: Wire, running: RunningNode, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold much memory, as their requests are counted nowhere else."""
    use(running, FakeCoordinator())
    monkeypatch.setattr(service, "PREPARED_OFFSETS_MAX", COUNT + 1)
    wire.send(large_txn_commit(), 4)
    await asyncio.wait_for(gate.is_reached.wait(), PATIENCE_S)
    other = await running.connect()
    refused = await other.call(large_txn_commit(), 4, TxnOffsetCommitResponse)
    assert set(errors_of(refused)) == {E.COORDINATOR_NOT_AVAILABLE}
    gate.open()
    assert set(errors_of(await wire.receive(TxnOffsetCommitResponse, 4))) == {0}
    assert set(errors_of(await other.call(large_txn_commit(), 4, TxnOffsetCommitResponse))) == {0}
