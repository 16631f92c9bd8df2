"""The close of a transactional producer whose transaction does not end as it was asked to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import SILENCE, FakeCluster, refuse_produce
from tests.unit.client.transacting import cluster_of, story, transactional
from tidelog.client import TransactionAborted
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.end_txn import EndTxnRequest
from tidelog.protocol.messages.produce import ProduceRequest

both_versions = pytest.mark.parametrize("version", [1, 2])


@both_versions
async def test_close_aborts_a_transaction_whose_commit_fails_meanwhile(version: int) -> None:
    """Else the partition that has a record keeps its readers from all later ones until the transaction's timeout."""
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        released = asyncio.Event()

        async def refuse_late(request: Any, node: Any) -> Any:
            await released.wait()
            return refuse_produce(ErrorCode.MESSAGE_TOO_LARGE)(request, node)

        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=1)
        cluster.script(ProduceRequest, refuse_late)
        await sending.send("t", b"2", partition=0)
        commit = asyncio.create_task(sending.commit_transaction())
        await until(lambda: len(cluster.sent(ProduceRequest)) == 2)
        commit.cancel()  # as a limit of the caller's does
        closing = asyncio.create_task(sending.close())
        await asyncio.sleep(0)
        released.set()
        await asyncio.wait_for(closing, PATIENCE_S)
        assert story(cluster)[-1] == "abort"
        assert cluster.transactions.ends == ["abort"]


@both_versions
async def test_a_close_that_has_no_time_for_the_abort_says_so(version: int, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        cluster.script(EndTxnRequest, lambda request, node: SILENCE)
        await asyncio.wait_for(sending.close(100), PATIENCE_S)
        assert "closed before the end of a transaction of 'tx'" in caplog.text


async def run_block_with_close(cluster: FakeCluster, error: type[Exception] | None) -> None:
    sending = transactional(cluster)
    async with sending.transaction():
        await sending.send_and_wait("t", b"1", partition=0)
        await asyncio.wait_for(sending.close(), PATIENCE_S)
        if error is not None:
            raise error


@both_versions
@pytest.mark.parametrize(("error", "outcome"), [(None, TransactionAborted), (ZeroDivisionError, ZeroDivisionError)])
async def test_a_block_whose_transaction_a_close_has_aborted_raises(error: Any, outcome: Any, version: int) -> None:
    """Its end returned as after a commit, and the records were lost without a word."""
    async with cluster_of(version) as cluster:
        with pytest.raises(outcome):
            await run_block_with_close(cluster, error)
        assert cluster.transactions.ends == ["abort"]


@both_versions
@pytest.mark.parametrize("commits", [False, True])
async def test_a_block_that_has_ended_its_transaction_before_the_close_raises_nothing(
    commits: bool, version: int
) -> None:
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        async with sending.transaction():
            await sending.send_and_wait("t", b"1", partition=0)
            await (sending.commit_transaction() if commits else sending.abort_transaction())
            await asyncio.wait_for(sending.close(), PATIENCE_S)
        assert cluster.transactions.ends == ["commit" if commits else "abort"]
