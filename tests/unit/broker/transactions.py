"""Transactions for the tests of a node: requests with everything defaulted, and a coordinator whose answers are set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from tests.unit.broker.conftest import RunningNode, Wire
from tidelog.broker.network.request import Deferred
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from tidelog.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from tidelog.replication.partition import Partition

NOW = int(time.time() * 1000)  # markers have the time of the node: else they would begin a new segment
PID = 7
TopicPartition = tuple[str, int]


class FakeCoordinator:
    """Answers `error` for each partition, when `answer_now` is set at once, else when `answer` is called."""

    def __init__(self, error: ErrorCode = ErrorCode.NONE, *, answer_now: bool = True) -> None:
        self.error = error
        self.errors: list[ErrorCode] = []
        """The answers to the first questions; then `error`."""
        self.answer_now = answer_now
        self.asked: list[tuple[str, int, int, tuple[TopicPartition, ...], bool]] = []
        self._is_asked = asyncio.Event()
        self._open: list[tuple[Deferred, tuple[TopicPartition, ...]]] = []

    def partition_for(self, transactional_id: str) -> int:
        return 0

    def add_partitions(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: Collection[TopicPartition], *,
        verify_only: bool, transaction_version: int,
    ) -> dict[TopicPartition, ErrorCode] | Deferred:  # fmt: skip
        assert transaction_version == (0 if verify_only else 2)
        self.asked.append((transactional_id, producer_id, producer_epoch, tuple(partitions), verify_only))
        self._is_asked.set()
        if self.answer_now:
            return dict.fromkeys(partitions, self.errors.pop(0) if self.errors else self.error)
        deferred = Deferred()
        self._open.append((deferred, tuple(partitions)))
        return deferred

    async def wait_until_asked(self, count: int = 1) -> None:
        while len(self.asked) < count:
            self._is_asked.clear()
            await self._is_asked.wait()

    def answer(self, error: ErrorCode = ErrorCode.NONE) -> None:
        deferred, partitions = self._open.pop(0)
        deferred.complete(dict.fromkeys(partitions, error))


def use(running: RunningNode, coordinator: FakeCoordinator) -> FakeCoordinator:
    """Let the node ask this coordinator, as if it led all of `__transaction_state`."""
    broker: Any = running.node._broker
    broker.verifier._coordinator = lambda: coordinator
    broker.verifier._leader_of = lambda coordinator, transactional_id: broker.verifier._node_id
    return coordinator


def partition_of(running: RunningNode, topic: str = "t", index: int = 0) -> Partition:
    broker: Any = running.node._broker
    found: Partition = broker.partitions.leader(topic, index)
    return found


def transactional(sequence: int = 0, count: int = 1, *, producer_id: int = PID, epoch: int = 0) -> bytes:
    return bytes(
        encode_batch(
            [(NOW, b"k", b"value", ())] * count,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
    )


def produce_request(
    batches: dict[TopicPartition, bytes], *, transactional_id: str | None = "txn", acks: int = -1
) -> ProduceRequest:
    topics: dict[str, list[PartitionProduceData]] = {}
    for (topic, index), records in batches.items():
        topics.setdefault(topic, []).append(PartitionProduceData(index=index, records=records))
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=30_000,
        topic_data=[TopicProduceData(name=name, partition_data=partitions) for name, partitions in topics.items()],
    )


def errors_of(response: ProduceResponse) -> list[ErrorCode]:
    return [ErrorCode(each.error_code) for topic in response.responses for each in topic.partition_responses]


async def produce(
    wire: Wire, batches: dict[TopicPartition, bytes], *, version: int = 11, **options: Any
) -> list[ErrorCode]:
    return errors_of(await wire.call(produce_request(batches, **options), version, ProduceResponse))


def marker(
    partitions: Collection[TopicPartition], *, producer_id: int = PID, epoch: int = 0, is_commit: bool = True,
    coordinator_epoch: int = 0, transaction_version: int = 0,
) -> WritableTxnMarker:  # fmt: skip
    return WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=is_commit,
        topics=[WritableTxnMarkerTopic(name=name, partition_indexes=[index]) for name, index in partitions],
        coordinator_epoch=coordinator_epoch,
        transaction_version=transaction_version,
    )


async def write_markers(
    wire: Wire, *markers: WritableTxnMarker, version: int = 2
) -> dict[tuple[int, str, int], ErrorCode]:
    response = await wire.call(WriteTxnMarkersRequest(markers=list(markers)), version, WriteTxnMarkersResponse)
    return {
        (each.producer_id, topic.name, one.partition_index): ErrorCode(one.error_code)
        for each in response.markers
        for topic in each.topics
        for one in topic.partitions
    }


def txn_offset_commit(
    offsets: dict[TopicPartition, int], *, group: str = "g", producer_id: int = PID, epoch: int = 0, **fields: Any
) -> TxnOffsetCommitRequest:
    topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
    for (topic, index), offset in offsets.items():
        partition = TxnOffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset, committed_metadata=""
        )
        topics.setdefault(topic, []).append(partition)
    return TxnOffsetCommitRequest(
        transactional_id="txn",
        group_id=group,
        producer_id=producer_id,
        producer_epoch=epoch,
        topics=[TxnOffsetCommitRequestTopic(name=name, partitions=partitions) for name, partitions in topics.items()],
        **fields,
    )


async def commit_offsets(
    wire: Wire, offsets: dict[TopicPartition, int], *, version: int = 4, **options: Any
) -> dict[TopicPartition, ErrorCode]:
    request = txn_offset_commit(offsets, **options)
    response = await wire.call(request, version, TxnOffsetCommitResponse)
    return {
        (topic.name, each.partition_index): ErrorCode(each.error_code)
        for topic in response.topics
        for each in topic.partitions
    }
