"""Odd answers of coordinators: what they leave out, which of several errors counts, and a coordinator that hangs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tests.unit.client.transacting import cluster_of, handled, limited, refuse_end, story, transactional
from tidelog.client import ConsumerGroupMetadata, TopicPartition, TransactionAbortable
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from tidelog.protocol.messages.end_txn import EndTxnRequest
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse

OFFSETS = {TopicPartition("t", 0): 5, TopicPartition("t", 1): 6}
GROUP = ConsumerGroupMetadata("g")


def offset_errors(*codes: ErrorCode) -> Any:
    """Answers so for the first partitions, and leaves out the others."""

    def action(request: TxnOffsetCommitRequest, node: FakeNode) -> TxnOffsetCommitResponse:
        answer: Any = node.cluster.transactions.handle(request)
        for topic in answer.topics:
            del topic.partitions[len(codes) :]
            for each, code in zip(topic.partitions, codes):
                each.error_code = code
        return answer

    return action


async def test_offsets_that_the_answer_leaves_out_are_committed_again() -> None:
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, offset_errors(ErrorCode.NONE))
        async with sending.transaction():
            await sending.send_offsets_to_transaction(OFFSETS, GROUP)
        assert story(cluster) == ["init", "commit-offsets", "commit-offsets", "commit"]


async def test_a_refusal_of_one_offset_counts_before_an_error_of_another_that_passes() -> None:
    wait, refusal = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.OFFSET_METADATA_TOO_LARGE
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, *[offset_errors(wait, refusal)] * 3)
        with pytest.raises(TransactionAbortable) as failure:
            async with sending.transaction():
                await sending.send_offsets_to_transaction(OFFSETS, GROUP)
        assert failure.value.code is refusal
        assert story(cluster) == ["init", "commit-offsets", "abort"]


async def test_partitions_that_the_answer_leaves_out_are_added_again() -> None:
    def leave_out(request: AddPartitionsToTxnRequest, node: FakeNode) -> Any:
        answer: Any = node.cluster.transactions.handle(request)
        del answer.results_by_topic_v3_and_below[:]
        return answer

    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        cluster.script(AddPartitionsToTxnRequest, leave_out)
        async with sending.transaction():
            await sending.send("t", b"1", partition=0)
        assert story(cluster) == ["init", "partitions", "partitions", "produce", "commit"]


async def end_of_a_moved_coordinator(cluster: FakeCluster, sending: Any) -> None:
    await sending.begin_transaction()
    await sending.send_and_wait("t", b"1", partition=0)
    cluster.script(FindCoordinatorRequest, lambda request, node: DROP)
    cluster.script(EndTxnRequest, refuse_end(ErrorCode.NOT_COORDINATOR), refuse_end(ErrorCode.TRANSACTION_ABORTABLE))
    await sending.commit_transaction()


async def test_a_lookup_without_an_answer_leaves_no_doubt_about_the_commit() -> None:
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        with pytest.raises(TransactionAbortable):
            await end_of_a_moved_coordinator(cluster, sending)
        await sending.abort_transaction()
        async with sending.transaction():
            await sending.send("t", b"2", partition=0)
        assert cluster.transactions.committed == [b"2"]


@pytest.mark.parametrize("version", [1, 2])
async def test_a_coordinator_that_hangs_is_looked_up_again(version: int) -> None:
    def hang(request: InitProducerIdRequest, node: FakeNode) -> object:
        node.cluster.coordinator = 2
        return SILENCE

    def elsewhere(request: InitProducerIdRequest, node: FakeNode) -> Any:
        return handled(request, node) if node.node_id == 2 else SILENCE

    async with cluster_of(version, nodes=2) as cluster, transactional(cluster) as sending:
        cluster.script(InitProducerIdRequest, hang, *[elsewhere] * 10)
        with limited(sending, request_timeout_ms=300):
            async with sending.transaction():
                await sending.send("t", b"1", partition=0)
        nodes = [node_id for node_id, _, request in cluster.requests if isinstance(request, InitProducerIdRequest)]
        assert (nodes.count(1), nodes[-1]) == (1, 2)
        assert cluster.transactions.committed == [b"1"]


@pytest.mark.parametrize("version", [1, 2])
async def test_a_group_whose_coordinator_has_moved_is_looked_up_again(version: int) -> None:
    def only_there(request: TxnOffsetCommitRequest, node: FakeNode) -> Any:
        node.cluster.coordinator = 2
        if node.node_id == 2:
            return handled(request, node)
        return offset_errors(ErrorCode.NOT_COORDINATOR, ErrorCode.NOT_COORDINATOR)(request, node)

    async with cluster_of(version, nodes=2) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, *[only_there] * 5)
        async with sending.transaction():
            await sending.send_offsets_to_transaction(OFFSETS, GROUP)
        nodes = [node_id for node_id, _, request in cluster.requests if isinstance(request, TxnOffsetCommitRequest)]
        assert nodes == [1, 2]
