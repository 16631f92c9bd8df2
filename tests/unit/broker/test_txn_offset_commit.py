"""TxnOffsetCommit over the wire; what the group coordinator makes of it is `test_offsets_in_transactions`'s subject."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.patience import until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.transactions import (
    FakeCoordinator,
    commit_offsets,
    marker,
    partition_of,
    txn_offset_commit,
    use,
    write_markers,
)
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)

E = ErrorCode
T0 = ("t", 0)
OFFSETS = ("__consumer_offsets", 0)


@pytest.fixture
async def coordinator(running: RunningNode, wire: Wire) -> FakeCoordinator:
    return await prepared(running, wire)


async def prepared(running: RunningNode, wire: Wire) -> FakeCoordinator:
    await wire.create_topic("t", 3)
    await wire.create_topic("__consumer_offsets")
    broker = running.node._broker
    assert broker is not None
    await until(lambda: not broker.groups.is_loading())
    return use(running, FakeCoordinator())


@pytest.mark.parametrize("version", range(6))
async def test_the_coordinator_is_asked_once_a_transaction(wire: Wire, coordinator: FakeCoordinator, version: int):
    """From version 5 on the offsets take part by this question, before they are asked whether they do (KIP-890)."""
    for offset in (1, 2):
        assert await commit_offsets(wire, {T0: offset}, version=version) == {T0: E.NONE}
    assert coordinator.asked == [("txn", 7, 0, (OFFSETS,), version < 5)]


@pytest.mark.parametrize(
    ("answer", "version", "told"),
    [
        (E.INVALID_TXN_STATE, 3, E.INVALID_TXN_STATE),
        (E.TRANSACTION_ABORTABLE, 3, E.INVALID_TXN_STATE),
        (E.TRANSACTION_ABORTABLE, 4, E.TRANSACTION_ABORTABLE),
        (E.PRODUCER_FENCED, 4, E.INVALID_PRODUCER_EPOCH),
        (E.NETWORK_EXCEPTION, 3, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.NETWORK_EXCEPTION, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.COORDINATOR_LOAD_IN_PROGRESS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.CONCURRENT_TRANSACTIONS, 5, E.CONCURRENT_TRANSACTIONS),
    ],
)
async def test_a_refusal_is_told_as_the_client_understands_it(
    running: RunningNode, wire: Wire, coordinator: FakeCoordinator, answer: ErrorCode, version: int, told: ErrorCode
):
    coordinator.error = answer
    assert await commit_offsets(wire, {T0: 1}, version=version) == {T0: told}
    assert partition_of(running, *OFFSETS).log.log_end_offset == 0


async def test_what_does_not_exist_is_refused_before_anything_is_staged(
    running: RunningNode, wire: Wire, coordinator: FakeCoordinator
):
    answered = await commit_offsets(wire, {("t", 9): 1, ("nowhere", 0): 1})
    assert answered == {("t", 9): E.UNKNOWN_TOPIC_OR_PARTITION, ("nowhere", 0): E.UNKNOWN_TOPIC_OR_PARTITION}
    assert not coordinator.asked
    assert partition_of(running, *OFFSETS).log.log_end_offset == 0
    answered = await commit_offsets(wire, {T0: 1, ("t", 9): 1})
    assert answered == {T0: E.NONE, ("t", 9): E.UNKNOWN_TOPIC_OR_PARTITION}


async def test_a_refusal_leaves_what_does_not_exist_as_it_is(wire: Wire, coordinator: FakeCoordinator):
    coordinator.error = E.INVALID_TXN_STATE
    answered = await commit_offsets(wire, {T0: 1, ("t", 9): 1})
    assert answered == {T0: E.INVALID_TXN_STATE, ("t", 9): E.UNKNOWN_TOPIC_OR_PARTITION}


async def test_an_older_epoch_is_refused_before_the_question(wire: Wire, coordinator: FakeCoordinator):
    await write_markers(wire, marker([OFFSETS], epoch=4))
    assert await commit_offsets(wire, {T0: 1}, epoch=3) == {T0: E.INVALID_PRODUCER_EPOCH}
    assert not coordinator.asked


async def test_a_transaction_that_is_aborted_meanwhile_takes_no_offsets(
    running: RunningNode, wire: Wire, coordinator: FakeCoordinator
):
    coordinator.answer_now = False
    commit = asyncio.create_task(commit_offsets(wire, {T0: 1}))
    await coordinator.wait_until_asked()
    await write_markers(await running.connect(), marker([OFFSETS], is_commit=False))
    coordinator.answer()
    assert await commit == {T0: E.INVALID_TXN_STATE}


@pytest.mark.parametrize("new_position", [-1, 3])
async def test_the_position_of_a_topic_deleted_meanwhile_is_not_that_of_the_new_one(
    running: RunningNode, wire: Wire, coordinator: FakeCoordinator, new_position: int
):
    """Nor does it take the place of one that was committed for the new topic."""
    coordinator.answer_now = False
    commit = asyncio.create_task(commit_offsets(wire, {T0: 7}))
    await coordinator.wait_until_asked()
    other = await running.connect()
    deleted = await other.call(DeleteTopicsRequest(topic_names=["t"], timeout_ms=10_000), 5, DeleteTopicsResponse)
    assert deleted.responses[0].error_code == E.NONE
    await other.create_topic("t", 3)
    if new_position >= 0:
        partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=new_position)
        topic = OffsetCommitRequestTopic(name="t", partitions=[partition])
        stored = await other.call(OffsetCommitRequest(group_id="g", topics=[topic]), 8, OffsetCommitResponse)
        assert stored.topics[0].partitions[0].error_code == E.NONE
    coordinator.answer()
    assert await commit == {T0: E.NONE}
    await write_markers(other, marker([OFFSETS]))
    asked = OffsetFetchRequest(
        group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[0])], require_stable=True
    )
    found = await other.call(asked, 7, OffsetFetchResponse)
    assert [(each.error_code, each.committed_offset) for each in found.topics[0].partitions] == [(E.NONE, new_position)]


async def test_group_and_member_are_checked(wire: Wire, coordinator: FakeCoordinator):
    assert await commit_offsets(wire, {T0: 1}, group="") == {T0: E.INVALID_GROUP_ID}
    assert await commit_offsets(wire, {T0: 1}, generation_id=3, member_id="m") == {T0: E.ILLEGAL_GENERATION}


async def test_without_the_offsets_topic_there_is_no_coordinator(running: RunningNode, wire: Wire):
    await wire.create_topic("t")
    assert await commit_offsets(wire, {T0: 1}) == {T0: E.NOT_COORDINATOR}


async def test_verification_can_be_switched_off(start_node: StartNode):
    running = await start_node(**{"transaction.partition.verification.enable": "false"})
    wire = await running.connect()
    coordinator = await prepared(running, wire)
    assert await commit_offsets(wire, {T0: 1}) == {T0: E.NONE}
    assert not coordinator.asked


@pytest.mark.slow
async def test_very_many_offsets_are_told_apart_in_one_pass(wire: Wire, coordinator: FakeCoordinator):
    """A client may name a partition, or topics that do not exist, as often as it likes. Others wait meanwhile."""
    count = 5_000
    request = txn_offset_commit({T0: 1})
    offsets = [TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=at) for at in range(count)]
    request.topics[0].partitions = offsets
    request.topics += [TxnOffsetCommitRequestTopic(name=f"none-{at}", partitions=offsets[:1]) for at in range(count)]
    began_s = time.process_time()
    answer = await wire.call(request, 5, TxnOffsetCommitResponse)
    assert time.process_time() - began_s < 5, "comparing each with each other takes a minute"
    assert len(answer.topics) == count + 1
    assert {each.error_code for each in answer.topics[0].partitions} == {E.NONE}
