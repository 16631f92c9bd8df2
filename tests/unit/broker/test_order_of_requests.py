"""Requests of one connection at once: the answers are those that Kafka gives, which serves one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.test_connection import Owner, connect, feed, framed
from tests.unit.broker.test_node import fetch, fetched, hold_flushes, produce
from tests.unit.storage.batches import batch
from tidelog.broker.apis.records.produce import _InSteps
from tidelog.broker.apis.records.produce_waits import ParkedOne, ParkedProduce
from tidelog.broker.network.order_of_requests import BEHIND, DELAYED, EXCLUSIVE
from tidelog.broker.network.request import Deferred
from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from tidelog.protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse
from tidelog.protocol.messages.produce import ProduceResponse

LATEST = -1


async def answered(wire: Wire, *requests: tuple[Any, int, Any], gate: Any) -> list[Any]:
    """The answers to (request, version, response class), all sent before anything is synced."""
    gate.clear()
    for request, version, _ in requests:
        wire.send(request, version)
    await wire.writer.drain()
    await asyncio.sleep(0.05)
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        return [await wire.receive(response, version) for _, version, response in requests]


@pytest.fixture
async def syncing(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> tuple[RunningNode, Wire, Any]:
    """A node that commits what is synced, a connection to it with a topic `t`, and an event for syncs to wait for."""
    running = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await running.connect()
    await wire.create_topic("t")
    gate = hold_flushes(monkeypatch)
    gate.set()
    return running, wire, gate


async def test_what_reads_up_to_the_high_watermark_is_served_after_a_produce_before_it(
    syncing: tuple[RunningNode, Wire, Any],
) -> None:
    running, wire, gate = syncing
    write = (produce("t", bytes(batch())), 9, ProduceResponse)
    ends = ListOffsetsRequest(
        replica_id=-1,
        topics=[ListOffsetsTopic(name="t", partitions=[ListOffsetsPartition(partition_index=0, timestamp=LATEST)])],
    )
    deletes = DeleteRecordsRequest(
        topics=[DeleteRecordsTopic(name="t", partitions=[DeleteRecordsPartition(partition_index=0, offset=LATEST)])],
        timeout_ms=60_000,
    )
    _, listed = await answered(wire, write, (ends, 7, ListOffsetsResponse), gate=gate)
    assert listed.topics[0].partitions[0].offset == 1
    _, read = await answered(wire, write, (fetch("t", 1), 11, FetchResponse), gate=gate)
    assert len(fetched(read)) == 1
    _, deleted = await answered(wire, write, (deletes, 2, DeleteRecordsResponse), gate=gate)
    assert deleted.topics[0].partitions[0].low_watermark == 3
    # A Produce does not wait for the one before it.
    gate.clear()
    for _ in range(3):
        wire.send(*write[:2])
    broker: Any = running.node._broker
    await until(lambda: broker.partitions.find("t", 0).log.log_end_offset == 6)
    gate.set()


async def coordinated(wire: Wire, key_type: int) -> None:
    request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=["g"])
    await until_async(wire, request, 6, FindCoordinatorResponse, lambda answer: answer.coordinators[0].error_code)


async def until_async(wire: Wire, request: Any, version: int, response: Any, code: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while code(answer := await wire.call(request, version, response)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


async def test_what_reads_a_group_is_served_after_a_commit_before_it(syncing: tuple[RunningNode, Wire, Any]) -> None:
    running, wire, gate = syncing
    await coordinated(wire, 0)
    commit = OffsetCommitRequest(
        group_id="g",
        topics=[
            OffsetCommitRequestTopic(
                name="t", partitions=[OffsetCommitRequestPartition(partition_index=0, committed_offset=7)]
            )
        ],
    )
    read = OffsetFetchRequest(group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[0])])
    commits, reads = (commit, 8, OffsetCommitResponse), (read, 7, OffsetFetchResponse)
    first = lambda answer: answer.topics[0].partitions[0].error_code  # noqa: E731
    await until_async(wire, commit, 8, OffsetCommitResponse, first)
    deletes = (DeleteGroupsRequest(groups_names=["g"]), 2, DeleteGroupsResponse)
    _, deleted, again, after = await answered(wire, commits, deletes, deletes, reads, gate=gate)
    assert deleted.results[0].error_code == 0
    assert again.results[0].error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert after.topics[0].partitions[0].committed_offset == -1
    _, found = await answered(wire, commits, reads, gate=gate)
    assert found.topics[0].partitions[0].committed_offset == 7
    # Heartbeats are not delayed by a commit: they keep a member in its group.
    heartbeat = (HeartbeatRequest(group_id="g", member_id="m"), 3, HeartbeatResponse)
    services: Any = running.node._services
    counters = services.requests.of("Heartbeat", range(5))
    gate.clear()
    wire.send(commit, 8)
    wire.send(*heartbeat[:2])
    await until(lambda: sum(counters.versions.values()) == 1)
    gate.set()


async def test_a_transaction_is_changed_by_one_request_of_a_connection_after_the_other(
    syncing: tuple[RunningNode, Wire, Any],
) -> None:
    _, wire, gate = syncing
    await coordinated(wire, 1)
    begun = await until_async(
        wire, InitProducerIdRequest(transactional_id="g", transaction_timeout_ms=60_000), 4, InitProducerIdResponse,
        lambda answer: answer.error_code,
    )  # fmt: skip
    identity = {"producer_id": begun.producer_id, "producer_epoch": begun.producer_epoch}
    adds = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id="g",
        v3_and_below_producer_id=begun.producer_id,
        v3_and_below_producer_epoch=begun.producer_epoch,
        v3_and_below_topics=[AddPartitionsToTxnTopic(name="t", partitions=[0])],
    )
    ends = EndTxnRequest(transactional_id="g", committed=True, **identity)
    _, ended = await answered(wire, (adds, 3, AddPartitionsToTxnResponse), (ends, 3, EndTxnResponse), gate=gate)
    assert ended.error_code == 0


@pytest.mark.parametrize("waiting", [ParkedOne, ParkedProduce, _InSteps])
def test_what_reads_up_to_the_high_watermark_waits_for_each_kind_of_produce(waiting: type[Deferred]) -> None:
    assert {ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.DELETE_RECORDS} == set(waiting.delays) <= DELAYED


def test_what_changes_groups_and_transactions_delays_what_reads_them() -> None:
    """As Kafka, whose requests of a connection all wait for those before them."""
    groups = {
        ApiKey.OFFSET_FETCH, ApiKey.DESCRIBE_GROUPS, ApiKey.LIST_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
    }  # fmt: skip
    assert groups <= DELAYED
    for changing in (ApiKey.OFFSET_COMMIT, ApiKey.LEAVE_GROUP):
        assert set(BEHIND[changing]) == groups
    assert set(BEHIND[ApiKey.WRITE_TXN_MARKERS]) == {ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.DELETE_RECORDS}
    of_transactions = {
        ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.END_TXN,
    }  # fmt: skip
    assert of_transactions | {ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE} == EXCLUSIVE


def request_of(key: int, name: bytes) -> bytes:
    return key.to_bytes(2, "big") + name.ljust(8, b"-")


class Parking(Owner):
    """Parks every request that is named in `delays`."""

    def __init__(self, delays: dict[bytes, frozenset[int]]) -> None:
        super().__init__()
        self.delays = delays
        self.waiting: dict[bytes, Deferred] = {}

    def dispatch(self, frame: memoryview, connection: Any) -> Any:
        data = bytes(frame)
        self.frames.append(data)
        if data not in self.delays:
            return data[2:]
        delays = self.delays[data]

        class Delaying(Deferred):
            __slots__ = ()

        Delaying.delays = delays
        self.waiting[data] = Delaying()
        return self.waiting[data]


@pytest.mark.parametrize("cut", [0, 5, 7, 13])
def test_a_delayed_request_and_those_behind_it_are_served_when_the_last_that_delays_it_is_answered(cut: int) -> None:
    delays = frozenset((ApiKey.LIST_OFFSETS,))
    waits, write, other = request_of(1, b"wait"), request_of(0, b"first"), request_of(0, b"second")
    reads, last = request_of(2, b"reads"), request_of(0, b"last")
    owner = Parking({waits: frozenset(), write: delays, other: delays})
    connection, transport = connect(owner)
    data = framed(waits, write, other, reads, last)
    at = len(framed(waits, write, other)) + cut
    feed(connection, transport, data[:at])
    if transport.reading:
        feed(connection, transport, data[at:])
        rest = b""
    else:
        rest = data[at:]  # its head is there, and says that it waits
    assert owner.frames == [waits, write, other]
    assert not transport.reading
    owner.waiting[other].complete(b"<2>")
    assert owner.frames == [waits, write, other]
    owner.waiting[write].complete(b"<1>")
    if rest:
        assert transport.reading
        feed(connection, transport, rest)
    assert owner.frames == [waits, write, other, reads, last]
    assert transport.reading
    assert transport.written == b""
    owner.waiting[waits].complete(b"<0>")
    assert transport.written == b"<0><1><2>" + reads[2:] + last[2:]
