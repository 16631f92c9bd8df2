"""Offsets that are committed with a transaction: requests of both versions, refusals, and what a lost answer means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import until
from tests.unit.client.fake_broker import SILENCE, then
from tests.unit.client.transacting import (
    cluster_of,
    finalize,
    handled,
    limited,
    refuse_group,
    refuse_offsets,
    story,
    transactional,
)
from tidelog.client import (
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    ProducerFenced,
    TopicPartition,
    TransactionAbortable,
    TransactionFatal,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

both_versions = pytest.mark.parametrize("version", [1, 2])
T0 = TopicPartition("t", 0)
MEMBER = ConsumerGroupMetadata("g", 7, "member-1", "instance-1")


async def run(sending: Any, offset: int = 5, group: Any = MEMBER) -> None:
    async with sending.transaction():
        await sending.send_offsets_to_transaction({T0: OffsetAndMetadata(offset, "note", 3)}, group)


async def test_version_1_adds_the_group_once_and_names_the_member():
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        async with sending.transaction():
            await sending.send_offsets_to_transaction({T0: 5}, MEMBER)
            await sending.send_offsets_to_transaction({TopicPartition("t", 1): 6}, MEMBER)
        assert story(cluster) == ["init", "offsets", "commit-offsets", "commit-offsets", "commit"]
        assert cluster.versions_of(TxnOffsetCommitRequest) == {4}
        request = cluster.sent(TxnOffsetCommitRequest)[0]
        assert (request.generation_id, request.member_id, request.group_instance_id) == (7, "member-1", "instance-1")
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 5, ("g", "t", 1): 6}


async def test_version_2_leaves_the_addition_to_the_group_coordinator():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await run(sending)
        assert story(cluster) == ["init", "commit-offsets", "commit"]
        assert cluster.versions_of(TxnOffsetCommitRequest) == {5}
        [topic] = cluster.sent(TxnOffsetCommitRequest)[0].topics
        [row] = topic.partitions
        assert (row.committed_offset, row.committed_metadata, row.committed_leader_epoch) == (5, "note", 3)


async def test_the_group_is_given_by_its_id_or_by_what_knows_its_metadata():
    class Knows:
        def group_metadata(self) -> ConsumerGroupMetadata:
            return MEMBER

    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await run(sending, 1, "other")
        await run(sending, 2, Knows())
        assert cluster.transactions.committed_offsets == {("other", "t", 0): 1, ("g", "t", 0): 2}
        async with sending.transaction():
            await sending.send_offsets_to_transaction({}, MEMBER)
            with pytest.raises(TypeError, match="must be a consumer"):
                await sending.send_offsets_to_transaction({T0: 1}, 17)
        with pytest.raises(RuntimeError, match="open transaction"):
            await sending.send_offsets_to_transaction({T0: 1}, MEMBER)


class Lost:
    """A consumer that has lost its membership: it has not polled for too long, for example."""

    def group_metadata(self) -> ConsumerGroupMetadata:
        raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, "the consumer is not a member of its group now")


async def test_a_consumer_that_is_no_member_makes_the_transaction_abortable():
    """The call raised the consumer's error, and a commit after it left the offsets out."""
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_offsets_to_transaction({}, Lost())
        for call in (lambda: sending.send_offsets_to_transaction({T0: 5}, Lost()), sending.commit_transaction):
            with pytest.raises(
                TransactionAbortable, match="cannot be committed: the consumer is not a member"
            ) as caught:
                await call()
            assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
        await sending.abort_transaction()
        await run(sending, 6)
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 6}
        with pytest.raises(RuntimeError, match="open transaction"):
            await sending.send_offsets_to_transaction({T0: 1}, Lost())


@both_versions
async def test_offsets_of_an_aborted_transaction_are_not_committed(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_offsets_to_transaction({T0: 5}, MEMBER)
        await sending.abort_transaction()
        await run(sending, 6)
        assert cluster.transactions.ends == ["abort", "commit"]
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 6}


@both_versions
@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTION_ABORTABLE,
    ],
)
async def test_a_member_that_may_no_longer_commit_makes_the_transaction_abortable(version, code):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, refuse_offsets(code))
        with pytest.raises(TransactionAbortable, match=code.name):
            await run(sending)
        await run(sending, 6)
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 6}


@both_versions
async def test_errors_that_pass_are_waited_out(version):
    async with cluster_of(version, nodes=2, t=1) as cluster, transactional(cluster) as sending:
        codes = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        cluster.script(TxnOffsetCommitRequest, *map(refuse_offsets, codes))
        cluster.script(AddOffsetsToTxnRequest, refuse_group(ErrorCode.CONCURRENT_TRANSACTIONS))
        await run(sending)
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 5}


@both_versions
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.PRODUCER_FENCED, ProducerFenced),
        (ErrorCode.INVALID_PRODUCER_EPOCH, ProducerFenced),
        (ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, TransactionFatal),
        (ErrorCode.INVALID_TXN_STATE, TransactionFatal),
    ],
)
async def test_errors_of_the_producer_are_fatal(version, code, error):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, refuse_offsets(code))
        with pytest.raises(error):
            await run(sending)
        with pytest.raises(error):
            await run(sending)


@both_versions
async def test_offsets_whose_fate_is_not_known_are_never_committed_by_accident(version):
    options = {"max_block_ms": 300, "request_timeout_ms": 1_000}
    async with cluster_of(version) as cluster, transactional(cluster, **options) as sending:
        await sending.begin_transaction()
        cluster.script(TxnOffsetCommitRequest, then(handled, SILENCE))
        with pytest.raises(TransactionAbortable, match="send_offsets_to_transaction"):
            await sending.send_offsets_to_transaction({T0: 5}, MEMBER)
        with pytest.raises(TransactionAbortable, match="may be committed or not: send_offsets_to_transaction of"):
            await sending.commit_transaction()
        assert "commit" not in story(cluster)


@both_versions
async def test_a_cancelled_commit_of_offsets_makes_the_transaction_abortable(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        cluster.script(TxnOffsetCommitRequest, *[refuse_offsets(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)] * 1000)
        task = asyncio.create_task(sending.send_offsets_to_transaction({T0: 5}, MEMBER))
        await until(lambda: len(cluster.sent(TxnOffsetCommitRequest)) > 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TransactionAbortable, match="or not: the call was cancelled"):
            await sending.commit_transaction()
        cluster.scripts.clear()
        await sending.abort_transaction()
        assert cluster.transactions.committed_offsets == {}


async def test_a_broker_too_old_for_members_is_not_sent_a_commit_that_cannot_be_fenced():
    async with cluster_of(1) as cluster:
        cluster.versions[28] = (0, 2)
        async with transactional(cluster) as sending:
            await run(sending, 4, "g")  # no member, nothing to fence
            with pytest.raises(TransactionFatal, match="TxnOffsetCommit up to version 2, version 3 is needed"):
                await run(sending)
            assert len(cluster.sent(TxnOffsetCommitRequest)) == 1


async def test_a_version_1_group_commit_without_an_answer_leads_to_a_new_epoch():
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        cluster.script(TxnOffsetCommitRequest, then(lambda request, node: None, SILENCE))
        async with sending.transaction():
            with limited(sending, request_timeout_ms=200):
                await sending.send_offsets_to_transaction({T0: 5}, MEMBER)
        await run(sending, 6)
        assert story(cluster).count("init") == 2
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        finalize(cluster, 1)
        await run(sending)
        await run(sending, 6)
        assert story(cluster).count("init") == 1


@pytest.mark.parametrize(
    ("offset", "error"), [("5", TypeError), (None, TypeError), (-1, ValueError), (2**63, ValueError)]
)
async def test_a_wrong_offset_is_named_and_the_producer_goes_on(offset, error):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        with pytest.raises(error, match="t-0: "):
            async with sending.transaction():
                await sending.send_offsets_to_transaction({T0: offset}, MEMBER)
        await run(sending)
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 5}


@pytest.mark.parametrize(
    ("offset", "group", "error"),
    [
        (OffsetAndMetadata(1, 5), "g", TypeError),  # type: ignore[arg-type]
        (OffsetAndMetadata(1, b"note"), "g", TypeError),  # type: ignore[arg-type]
        (OffsetAndMetadata(1, "\ud800"), "g", ValueError),
        (OffsetAndMetadata(1, "", None), "g", TypeError),  # type: ignore[arg-type]
        (OffsetAndMetadata(1, "", 2**31), "g", ValueError),
        (OffsetAndMetadata(1, "", -2), "g", ValueError),
        (1, "\ud800", ValueError),
        (1, ConsumerGroupMetadata(5), TypeError),  # type: ignore[arg-type]
        (1, ConsumerGroupMetadata("g", 2**31, "m"), ValueError),
        (1, ConsumerGroupMetadata("g", None, "m"), TypeError),  # type: ignore[arg-type]
        (1, ConsumerGroupMetadata("g", 1, None), TypeError),  # type: ignore[arg-type]
        (1, ConsumerGroupMetadata("g", 1, "m", "\ud800"), ValueError),
    ],
)
async def test_what_no_request_can_carry_is_refused_and_the_producer_goes_on(offset, group, error):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        with pytest.raises(error):
            await sending.send_offsets_to_transaction({T0: offset}, group)
        await sending.send_offsets_to_transaction({T0: OffsetAndMetadata(6, None)}, MEMBER)  # type: ignore[arg-type]
        await sending.commit_transaction()
        assert cluster.transactions.committed_offsets == {("g", "t", 0): 6}
