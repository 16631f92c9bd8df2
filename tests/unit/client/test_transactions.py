"""The transactional producer against a fake coordinator: what it sends, and what each refusal leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode, refuse_produce, then
from tests.unit.client.transacting import (
    cluster_of,
    finalize,
    handled,
    limited,
    no_coordinator,
    refuse_end,
    refuse_init,
    refuse_partitions,
    story,
    transactional,
)
from tidelog.client import (
    ProducerFenced,
    TransactionAbortable,
    TransactionAborted,
    TransactionFatal,
    TransactionTimeout,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.producing import transactions
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.client.producing.transactions import Transactions
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.produce import ProduceRequest

both_versions = pytest.mark.parametrize("version", [1, 2])
SHORT = {"max_block_ms": 300}


async def run(sending: Any, *values: bytes, partition: int = 0) -> None:
    async with sending.transaction():
        for value in values:
            await sending.send("t", value, partition=partition)


async def test_version_2_sends_records_and_the_end_and_nothing_else():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await run(sending, b"1")
        await run(sending, b"2")
        assert story(cluster) == ["init", "produce", "commit", "produce", "commit"]
        assert min(cluster.versions_of(ProduceRequest)) >= 12
        assert cluster.versions_of(EndTxnRequest) == {5}
        assert [request.producer_epoch for request in cluster.sent(EndTxnRequest)] == [0, 1]
        assert cluster.transactions.committed == [b"1", b"2"]


async def test_version_1_adds_each_partition_before_its_first_record():
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        async with sending.transaction():
            for value in (b"1", b"2"):
                await sending.send_and_wait("t", value, partition=0)
            await sending.send("t", b"3", partition=1)
        await run(sending, b"4")
        assert story(cluster) == (
            ["init", "partitions", "produce", "produce", "partitions", "produce", "commit"]
            + ["partitions", "produce", "commit"]
        )
        assert cluster.versions_of(ProduceRequest) == {11}
        assert cluster.versions_of(EndTxnRequest) == {4}
        assert cluster.versions_of(AddPartitionsToTxnRequest) == {3}
        assert cluster.transactions.committed == [b"1", b"2", b"3", b"4"]


async def test_the_finalized_feature_decides_not_the_versions_of_the_apis():
    async with cluster_of(2) as cluster:
        cluster.finalized_features = {}  # all APIs are there, as on a cluster that was not upgraded yet
        async with transactional(cluster) as sending:
            await run(sending, b"1")
        assert "partitions" in story(cluster)


@both_versions
async def test_an_exception_aborts(version):
    async with cluster_of(version) as cluster, transactional(cluster, linger_ms=80_000) as sending:
        futures = []

        async def work() -> None:
            async with sending.transaction():
                futures.append(await sending.send("t", b"sent", partition=0))
                await sending.flush()
                futures.append(await sending.send("t", b"unsent", partition=0))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()
        sent, unsent = futures
        assert sent.result().offset == 0
        with pytest.raises(TransactionAborted, match="before it was sent"):
            unsent.result()
        await run(sending, b"next")
        assert cluster.transactions.ends == ["abort", "commit"]
        assert (cluster.transactions.committed, cluster.transactions.aborted) == ([b"next"], [b"sent"])


@both_versions
async def test_a_cancellation_aborts(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        began = asyncio.Event()

        async def work() -> None:
            async with sending.transaction():
                await sending.send_and_wait("t", b"1", partition=0)
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cluster.transactions.ends == ["abort"]


@pytest.mark.parametrize("is_in_commit", [False, True])
@both_versions
async def test_a_cancelled_block_ends_soon_while_its_abort_gets_no_answer(version, is_in_commit):
    """A timeout of a second around a block took `max_block_ms` while a broker hung."""
    async with cluster_of(version) as cluster, transactional(cluster, max_block_ms=600_000) as sending:
        began = asyncio.Event()

        async def work() -> None:
            async with sending.transaction():
                await sending.send_and_wait("t", b"1", partition=0)
                if is_in_commit:
                    cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 100_000)
                    await sending.send("t", b"2", partition=0)
                began.set()
                if not is_in_commit:
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await began.wait()
        cluster.script(FindCoordinatorRequest, *[no_coordinator] * 100_000)
        cluster.script(EndTxnRequest, *[refuse_end(ErrorCode.NOT_COORDINATOR)] * 100_000)
        await asyncio.sleep(0.01)
        task.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
            assert cluster.transactions.ends == []
        finally:
            cluster.scripts.clear()
        await run(sending, b"next")  # waits for the abort
        assert cluster.transactions.ends == ["abort", "commit"]
        assert cluster.transactions.committed == [b"next"]


@both_versions
async def test_a_block_that_fails_waits_for_its_abort_as_long_as_it_takes(version, monkeypatch):
    monkeypatch.setattr(transactions, "INTERRUPTED_ABORT_S", 0.0)
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, *[refuse_end(ErrorCode.NOT_COORDINATOR)] * 3)

        async def work() -> None:
            async with sending.transaction():
                await sending.send_and_wait("t", b"1", partition=0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()
        assert cluster.transactions.ends == ["abort"]


@both_versions
async def test_a_cancellation_of_the_commit_before_it_is_sent_aborts(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 20)
        task = asyncio.create_task(run(sending, b"1"))
        await until(lambda: len(cluster.sent(ProduceRequest)) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await run(sending, b"2")
        assert cluster.transactions.ends == ["abort", "commit"]
        assert cluster.transactions.committed == [b"2"]


@both_versions
async def test_a_transaction_without_records_costs_no_request(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        async with sending.transaction():
            pass
        with pytest.raises(ZeroDivisionError):
            async with sending.transaction():
                raise ZeroDivisionError
        assert story(cluster) == ["init"]


async def test_calls_out_of_order_are_refused():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        with pytest.raises(RuntimeError, match="needs an open transaction"):
            await sending.send("t", b"1")
        with pytest.raises(RuntimeError, match="no transaction to commit"):
            await sending.commit_transaction()
        with pytest.raises(RuntimeError, match="no transaction to abort"):
            await sending.abort_transaction()
        async with sending.transaction():
            with pytest.raises(RuntimeError, match="do not nest"):
                await sending.begin_transaction()
        async with sending.transaction():
            await sending.send("t", b"dropped", partition=0)
            await sending.abort_transaction()  # the end of the block has nothing left to do
        assert "commit" not in story(cluster)
    async with FakeCluster(t=1) as cluster, transactional(cluster, transactional_id=None) as plain:
        with pytest.raises(RuntimeError, match="set transactional_id"):
            await plain.begin_transaction()


@pytest.mark.parametrize(
    "options", [{"acks": "1"}, {"enable_idempotence": False}, {"retries": 0}, {"transactional_id": ""}]
)
async def test_options_that_exclude_transactions_are_refused(options):
    with pytest.raises(ConfigError, match="transactional_id"):
        transactional(FakeCluster(), bootstrap_servers="127.0.0.1:1", **options)


@both_versions
async def test_what_is_still_ending_is_waited_for(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        wait = ErrorCode.CONCURRENT_TRANSACTIONS
        cluster.script(InitProducerIdRequest, refuse_init(wait))
        cluster.script(AddPartitionsToTxnRequest, refuse_partitions(wait))
        cluster.script(ProduceRequest, refuse_produce(wait))
        cluster.script(EndTxnRequest, refuse_end(wait), refuse_end(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        await run(sending, b"1")
        assert cluster.transactions.committed == [b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("refused", [InitProducerIdRequest, ProduceRequest, EndTxnRequest])
async def test_what_does_not_end_for_long_is_asked_for_after_the_backoff(refused: Any) -> None:
    """As while a partition of the previous transaction has no leader: each producer asked fifty times a second."""
    wait = ErrorCode.CONCURRENT_TRANSACTIONS
    refusals = {InitProducerIdRequest: refuse_init, ProduceRequest: refuse_produce, EndTxnRequest: refuse_end}
    waits: dict[str, Any] = {"retry_backoff_ms": 100, "retry_backoff_max_ms": 1000}
    async with cluster_of(2) as cluster, transactional(cluster, **waits) as sending:
        cluster.script(refused, *[refusals[refused](wait)] * 10_000)
        running = asyncio.create_task(run(sending, b"1"))
        await asyncio.sleep(1.5)
        assert len(cluster.sent(refused)) <= 16, "ten soon, the others after 100 ms, 200 ms and so on"
        cluster.scripts.clear()
        async with asyncio.timeout(PATIENCE_S):
            await running
        assert cluster.transactions.committed == [b"1"]


@both_versions
async def test_a_refused_end_is_sent_again_after_the_backoff(version):
    times_s: list[float] = []

    def refuse(request: Any, node: Any) -> Any:
        times_s.append(asyncio.get_running_loop().time())
        return EndTxnResponse(error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    def end(request: Any, node: Any) -> Any:
        times_s.append(asyncio.get_running_loop().time())
        return handled(request, node)

    waits = {"retry_backoff_ms": 200, "retry_backoff_max_ms": 200}
    async with cluster_of(version) as cluster, transactional(cluster, **waits) as sending:
        cluster.script(EndTxnRequest, refuse, refuse, end)
        await run(sending, b"1")
        assert len(times_s) == 3
        assert min(after - before for before, after in pairwise(times_s)) > 0.1


@both_versions
async def test_the_end_does_not_wait_for_another_answer_on_its_connection(version):
    async with cluster_of(version, t=1) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        cluster.script(MetadataRequest, lambda request, node: SILENCE)
        node_id = cluster.coordinator
        links: Any = sending._cluster
        [connection] = [link.connection for link in links._links.values() if link.connection is not None]
        assert connection.node_id == node_id
        unanswered = connection.send(MetadataRequest(topics=[]), MetadataResponse, 9, 60_000)
        await asyncio.wait_for(sending.commit_transaction(), PATIENCE_S)
        assert not unanswered.done()
        unanswered.cancel()
        assert cluster.transactions.committed == [b"1"]


async def test_a_fault_of_the_client_at_the_end_of_a_transaction_ends_the_producer(monkeypatch, caplog):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        monkeypatch.setattr(TransactionManager, "handle_ended", lambda self, *arguments: 1 // 0)
        with pytest.raises(TransactionFatal, match="fault of the client: ZeroDivisionError"):
            await run(sending, b"1")
        assert "end by a fault of the client" in caplog.text


@both_versions
async def test_a_moved_coordinator_is_looked_up_again(version):
    async with cluster_of(version, nodes=2, t=1) as cluster, transactional(cluster) as sending:
        await run(sending, b"1")
        cluster.coordinator = 2
        cluster.script(EndTxnRequest, refuse_end(ErrorCode.NOT_COORDINATOR))
        await run(sending, b"2")
        assert [node for node, _, request in cluster.requests if isinstance(request, EndTxnRequest)][-2:] == [1, 2]


@both_versions
@pytest.mark.parametrize("code", [ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH])
async def test_a_fenced_producer_is_at_its_end(version, code):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, refuse_end(code))
        with pytest.raises(ProducerFenced, match="'tx': another producer with this id"):
            await run(sending, b"1")
        for call in (sending.begin_transaction, sending.init_transactions):
            with pytest.raises(ProducerFenced):
                await call()
        with pytest.raises(ProducerFenced):
            await sending.send("t", b"2")
        assert story(cluster)[-1] == "commit"


@both_versions
async def test_a_zombie_is_fenced_by_its_successor(version):
    async with cluster_of(version) as cluster, transactional(cluster) as zombie, transactional(cluster) as successor:
        await zombie.begin_transaction()
        await zombie.send_and_wait("t", b"zombie", partition=0)
        await run(successor, b"successor")
        with pytest.raises(ProducerFenced):
            await zombie.commit_transaction()
        assert cluster.transactions.committed == [b"successor"]


@both_versions
async def test_an_old_epoch_at_a_leader_is_abortable_and_the_coordinator_decides(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.INVALID_PRODUCER_EPOCH))
        with pytest.raises(TransactionAbortable):
            await run(sending, b"1")
        await run(sending, b"2")
        assert cluster.transactions.committed == [b"2"]


@both_versions
@pytest.mark.parametrize(
    "code", [ErrorCode.INVALID_RECORD, ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.INVALID_TXN_STATE]
)
async def test_a_refused_record_makes_the_transaction_abortable(version, code):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(ProduceRequest, refuse_produce(code))
        with pytest.raises(TransactionAbortable, match=f"not delivered: {code.name}") as caught:
            await run(sending, b"1")
        assert caught.value.code is code
        await run(sending, b"2")
        assert cluster.transactions.ends[-1:] == ["commit"]
        assert cluster.transactions.committed == [b"2"]
        # The sequence of the partition is not known, so the next transaction has another epoch.
        ends = cluster.sent(EndTxnRequest)
        assert ends[-1].producer_epoch == ends[0].producer_epoch + 1
        assert story(cluster).count("init") == (2 if version == 1 else 1)


async def test_after_an_abortable_error_the_program_must_abort():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.INVALID_RECORD))
        await sending.begin_transaction()
        with pytest.raises(KafkaError):
            await sending.send_and_wait("t", b"1")
        for _ in range(2):
            with pytest.raises(TransactionAbortable):
                await sending.commit_transaction()
        with pytest.raises(TransactionAbortable):
            await sending.send("t", b"2")
        with pytest.raises(RuntimeError, match="open already"):
            await sending.begin_transaction()
        await sending.abort_transaction()
        await run(sending, b"3")
        assert "commit" not in story(cluster)[: story(cluster).index("abort")]


async def test_a_record_that_cannot_be_sent_makes_the_transaction_abortable():
    async with cluster_of(2) as cluster, transactional(cluster, max_request_size=2_000) as sending:
        await sending.begin_transaction()
        with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
            await sending.send("t", bytes(3_000))
        with pytest.raises(TransactionAbortable, match="MESSAGE_TOO_LARGE"):
            await sending.commit_transaction()
        await sending.abort_transaction()
        assert cluster.transactions.ends == []


@both_versions
async def test_a_record_that_expires_unsettled_makes_the_transaction_abortable(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        await run(sending, b"0")
        cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 10)

        async def one_that_expires() -> None:
            async with sending.transaction():
                with limited(sending, request_timeout_ms=100, delivery_timeout_ms=150):
                    await asyncio.wait([await sending.send("t", b"1", partition=0)])

        with pytest.raises(TransactionAbortable):
            await one_that_expires()
        cluster.scripts.clear()
        await run(sending, b"2")
        assert [each for each in story(cluster) if each in ("commit", "abort")] == ["commit", "abort", "commit"]
        assert cluster.transactions.committed == [b"0", b"2"]


@pytest.mark.parametrize("answer", [DROP, SILENCE])
async def test_version_1_begins_anew_after_an_end_without_an_answer(answer):
    """KAFKA-17754: the first EndTxn may arrive late and end the next transaction, which has the same epoch."""
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, then(lambda request, node: None, answer))  # it is still under way
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        with limited(sending, request_timeout_ms=200):
            await sending.commit_transaction()
        delayed = cluster.sent(EndTxnRequest)[0]
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"2", partition=0)
        assert story(cluster)[-4:] == ["commit", "init", "partitions", "produce"]
        refusal: Any = cluster.transactions.handle(delayed)
        assert refusal.error_code == ErrorCode.PRODUCER_FENCED
        await sending.abort_transaction()
        assert cluster.transactions.committed == [b"1"]


async def test_version_2_needs_nothing_new_after_an_end_without_an_answer():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, then(handled, DROP))
        await run(sending, b"1")
        await run(sending, b"2")
        assert story(cluster) == ["init", "produce", "commit", "commit", "produce", "commit"]
        assert cluster.transactions.committed == [b"1", b"2"]


async def test_version_1_aborts_what_a_lost_addition_of_partitions_may_have_opened():
    async with cluster_of(1) as cluster, transactional(cluster) as sending:
        cluster.script(
            AddPartitionsToTxnRequest,
            then(lambda request, node: None, DROP),
            refuse_partitions(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        )
        cluster.script(EndTxnRequest, refuse_end(ErrorCode.INVALID_TXN_STATE))  # it did not arrive
        with pytest.raises(TransactionAbortable, match="TOPIC_AUTHORIZATION_FAILED"):
            await run(sending, b"1")
        await run(sending, b"2")
        assert story(cluster)[-5:] == ["abort", "init", "partitions", "produce", "commit"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
async def test_a_changed_version_is_followed_between_transactions_under_a_new_epoch(before, after):
    async with cluster_of(before) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        finalize(cluster, after)
        assert sending._cluster is not None
        sending._cluster._finalized_features = dict(cluster.finalized_features)  # as after a new connection
        cluster.finalized_features["transaction.version"] = before  # a broker goes by the versions of the requests
        await sending.commit_transaction()
        assert cluster.versions_of(EndTxnRequest) == {5 if before == 2 else 4}
        cluster.finalized_features["transaction.version"] = after
        await run(sending, b"2")
        assert cluster.transactions.committed == [b"1", b"2"]
        assert story(cluster).count("init") == 2
        assert cluster.versions_of(EndTxnRequest) == {4, 5}


@both_versions
async def test_a_forgotten_producer_id_is_replaced_without_an_end(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, refuse_end(ErrorCode.INVALID_PRODUCER_ID_MAPPING))
        with pytest.raises(TransactionAbortable, match="INVALID_PRODUCER_ID_MAPPING"):
            await run(sending, b"1")
        await run(sending, b"2")
        assert story(cluster).count("abort") == 0
        assert story(cluster).count("init") == 2


@both_versions
@pytest.mark.parametrize(
    "code",
    [ErrorCode.GROUP_AUTHORIZATION_FAILED, ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.UNKNOWN_MEMBER_ID],
)
async def test_a_code_that_is_not_one_of_an_end_ends_the_producer(version: int, code: ErrorCode) -> None:
    """The transaction may be committed: it was called abortable, and its records were sent a second time."""

    def commit(request: EndTxnRequest, node: FakeNode) -> EndTxnResponse:
        handled(request, node)
        return EndTxnResponse(error_code=code)

    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(EndTxnRequest, commit)
        with pytest.raises(TransactionFatal, match=code.name):
            await run(sending, b"1")
        assert cluster.transactions.committed == [b"1"]
        with pytest.raises(TransactionFatal):
            await sending.begin_transaction()


@both_versions
async def test_a_broker_too_old_to_bump_epochs_ends_the_producer_where_it_must(version):
    async with cluster_of(version) as cluster:
        cluster.versions[22] = (0, 2)
        async with transactional(cluster) as sending:
            await run(sending, b"1")
            cluster.script(EndTxnRequest, refuse_end(ErrorCode.UNKNOWN_PRODUCER_ID))
            with pytest.raises(TransactionAbortable):
                await run(sending, b"2")
            with pytest.raises(TransactionFatal, match="InitProducerId up to version 2, version 3 is needed"):
                await sending.begin_transaction()


# -- time


@both_versions
async def test_without_a_coordinator_a_call_ends_in_time_and_names_the_cause(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(FindCoordinatorRequest, *[no_coordinator] * 1000)
        with limited(sending, **SHORT), pytest.raises(TransactionTimeout) as caught:
            await sending.init_transactions()
        assert "init_transactions of transactional id 'tx' did not end within max_block_ms=300" in str(caught.value)
        assert "COORDINATOR_NOT_AVAILABLE" in str(caught.value)
        cluster.scripts.clear()
        await run(sending, b"1")


@pytest.mark.parametrize("call", ["init_transactions", "begin_transaction", "transaction"])
async def test_the_first_call_of_a_transaction_has_one_limit_for_the_start_and_itself(call, monkeypatch):
    """It could take `max_block_ms` twice."""
    start, wait, deadlines = Cluster.start, Transactions._wait_until, list[float | None]()

    async def start_late(cluster: Cluster) -> None:
        await asyncio.sleep(0.2)
        await start(cluster)

    async def note_deadline(self: Transactions, condition: Any, name: str, deadline: float | None = None) -> None:
        deadlines.append(deadline)
        await wait(self, condition, name, deadline)

    monkeypatch.setattr(Cluster, "start", start_late)
    monkeypatch.setattr(Transactions, "_wait_until", note_deadline)
    async with cluster_of(2) as cluster:
        sending = transactional(cluster)
        began_s = asyncio.get_running_loop().time()
        if call == "transaction":
            await sending.transaction().__aenter__()
        else:
            await getattr(sending, call)()
        (deadline,) = deadlines
        assert deadline is not None
        assert deadline < began_s + 0.1 + sending.config.max_block_ms / 1000
        await sending.close()


@both_versions
async def test_a_bad_id_is_told_at_once(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        cluster.script(InitProducerIdRequest, refuse_init(ErrorCode.INVALID_REQUEST))
        with pytest.raises(TransactionFatal, match="'tx': no producer id: InitProducerId was refused with INVALID_REQ"):
            await sending.init_transactions()


@both_versions
async def test_a_commit_that_times_out_may_be_repeated(version):
    async with cluster_of(version) as cluster, transactional(cluster, request_timeout_ms=1_000) as sending:
        cluster.script(EndTxnRequest, then(handled, SILENCE))
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        with limited(sending, **SHORT), pytest.raises(TransactionTimeout, match="commit_transaction"):
            await sending.commit_transaction()
        with pytest.raises(RuntimeError, match="repeat commit_transaction"):
            await sending.abort_transaction()
        await sending.commit_transaction()
        await run(sending, b"2")
        assert cluster.transactions.committed == [b"1", b"2"]


@both_versions
async def test_a_block_whose_records_do_not_arrive_in_time_is_aborted(version):
    async with cluster_of(version) as cluster, transactional(cluster, **SHORT) as sending:
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 1000)
        with pytest.raises(TransactionAbortable, match="records are not delivered yet; it is aborted"):
            await run(sending, b"1")
        cluster.scripts.clear()
        await run(sending, b"2")
        assert cluster.transactions.committed == [b"2"]


@both_versions
async def test_an_abort_overtakes_a_commit_that_has_no_coordinator_yet(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        cluster.script(EndTxnRequest, refuse_end(ErrorCode.NOT_COORDINATOR))
        released = asyncio.Event()

        async def late(request: Any, node: Any) -> Any:
            await released.wait()
            return node.on_find_coordinator(request)

        cluster.script(FindCoordinatorRequest, late)
        commit = asyncio.create_task(sending.commit_transaction())
        await until(lambda: len(cluster.sent(FindCoordinatorRequest)) == 2)
        assert sending._manager is not None
        sending._manager._end_txn_was_sent = False  # as when the lookup had come before the first attempt
        abort = asyncio.create_task(sending.abort_transaction())
        await asyncio.sleep(0)
        released.set()
        await abort
        with pytest.raises(TransactionAborted):
            await commit
        assert cluster.transactions.ends == ["abort"]


@both_versions
async def test_close_aborts_an_open_transaction(version):
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        await sending.close()
        assert cluster.transactions.ends == ["abort"]


@both_versions
async def test_close_waits_once_for_a_broker_that_does_not_answer(version):
    """After the wait for the abort it waited for the delivery of the records, in all for delivery_timeout_ms."""
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        await run(sending, b"0")
        cluster.script(ProduceRequest, lambda request, node: SILENCE)
        await sending.begin_transaction()
        future = await sending.send("t", b"1", partition=0)
        await until(lambda: len(cluster.sent(ProduceRequest)) == 2)
        with limited(sending, **SHORT):
            await asyncio.wait_for(sending.close(), PATIENCE_S / 2)
        assert isinstance(future.exception(), KafkaError)


@both_versions
async def test_close_lets_a_commit_end_that_was_called(version):
    async with cluster_of(version) as cluster:
        sending = transactional(cluster)
        released = asyncio.Event()

        async def late(request: Any, node: Any) -> Any:
            await released.wait()
            return node.on_produce(request)

        cluster.script(ProduceRequest, late)
        await sending.begin_transaction()
        await sending.send("t", b"1", partition=0)
        commit = asyncio.create_task(sending.commit_transaction())
        await until(lambda: cluster.sent(ProduceRequest))
        closing = asyncio.create_task(sending.close())
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(commit, closing)
        assert cluster.transactions.committed == [b"1"]


@both_versions
async def test_a_transaction_larger_than_the_memory_is_committed_whole(version):
    async with cluster_of(version) as cluster, transactional(cluster, buffer_memory=20_000) as sending:
        values = [b"%05d" % number * 200 for number in range(200)]
        await run(sending, *values)
        assert cluster.transactions.committed == values


async def test_a_record_that_waited_for_room_does_not_slip_into_the_next_transaction():
    async with cluster_of(2) as cluster, transactional(cluster, buffer_memory=1_500) as sending:
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 1000)
        await sending.begin_transaction()
        await sending.send("t", bytes(1_000), partition=0)
        waiting = asyncio.create_task(sending.send("t", b"late" * 200, partition=0))
        await asyncio.sleep(0.02)
        cluster.scripts.clear()
        await sending.abort_transaction()
        await run(sending, b"next")
        with pytest.raises((RuntimeError, TransactionAborted)):
            await waiting
        assert cluster.transactions.committed == [b"next"]


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "send": lambda sending, topic: sending.send(topic, b"waits"),
    "send_many": lambda sending, topic: sending.send_many(topic, [b"waits"]),
    "send_batch": lambda sending, topic: sending.send_batch(topic, [b"waits"], partition=0),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_record_without_a_topic_does_not_fail_a_later_transaction(call):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.auto_create_partitions = 0
        await sending.begin_transaction()
        with limited(sending, max_block_ms=200):
            waiting = asyncio.create_task(CALLS[call](sending, "missing"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await sending.abort_transaction()
        async with sending.transaction():
            with pytest.raises(KafkaError) as refusal:
                await waiting
            assert refusal.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            await sending.send("t", b"next", partition=0)
        assert cluster.transactions.committed == [b"next"]


@pytest.mark.parametrize("call", CALLS)
async def test_a_record_without_a_topic_fails_its_own_transaction(call):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.auto_create_partitions = 0
        await sending.begin_transaction()
        with limited(sending, max_block_ms=200), pytest.raises(KafkaError):
            await CALLS[call](sending, "missing")
        with pytest.raises(TransactionAbortable, match="was not sent"):
            await sending.commit_transaction()
        assert cluster.transactions.committed == []


@pytest.mark.parametrize("call", CALLS)
async def test_a_record_of_no_transaction_does_not_wait_for_the_next_one(call):
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        cluster.auto_create_partitions = 0
        await sending.init_transactions()
        with pytest.raises(RuntimeError, match="needs an open transaction"):
            await CALLS[call](sending, "missing")


async def test_in_another_cluster_that_has_no_coordinators_yet_a_transaction_fails_at_once():
    """Its leaders answered NOT_ENOUGH_REPLICAS for the whole delivery timeout: no coordinator was looked up there."""
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        cluster.cluster_id = "other"
        cluster.transactions.by_id.clear()
        before = len(cluster.sent(FindCoordinatorRequest))

        def verified(request: Any, node: FakeNode) -> Any:
            has_coordinators = len(cluster.sent(FindCoordinatorRequest)) > before + 1
            code = ErrorCode.INVALID_PRODUCER_ID_MAPPING if has_coordinators else ErrorCode.NOT_ENOUGH_REPLICAS
            return refuse_produce(code)(request, node)

        cluster.script(ProduceRequest, *[verified] * 100_000)
        cluster.script(FindCoordinatorRequest, no_coordinator)
        assert sending._cluster is not None
        assert await sending._cluster.wait_for_metadata(PATIENCE_S * 1000)
        with pytest.raises(KafkaError) as caught:
            await asyncio.wait_for(sending.send_and_wait("t", b"2", partition=0), PATIENCE_S)
        assert caught.value.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        cluster.scripts.clear()
        await sending.abort_transaction()
        await run(sending, b"3")
        assert cluster.transactions.committed == [b"3"]


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
async def test_after_a_begin_that_was_given_up_the_transaction_before_is_not_taken_for_the_next_one(
    end: str, is_over: bool
) -> None:
    """The program got the outcome of the transaction before, and took records for committed that it had not sent; or
    it aborted that one.
    """
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        manager, gate = sending._manager, asyncio.Event()
        assert manager is not None

        async def answer_later(request: Any, node: FakeNode) -> Any:
            await gate.wait()
            return handled(request, node)

        cluster.script(EndTxnRequest, answer_later)
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        committing = asyncio.create_task(sending.commit_transaction())
        await until(lambda: cluster.sent(EndTxnRequest))
        beginning = asyncio.create_task(sending.begin_transaction())
        await asyncio.sleep(0.01)
        for task in (committing, beginning):
            task.cancel()
        await asyncio.wait([committing, beginning])
        if is_over:
            gate.set()
            await until(lambda: manager.ended_number == 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="begin_transaction did not end"):
                await getattr(sending, end)()
        gate.set()
        await run(sending, b"2")
        with pytest.raises(RuntimeError, match="there is no transaction"):
            await getattr(sending, end)()
        assert cluster.transactions.committed == [b"1", b"2"]


async def test_an_open_transaction_can_be_ended_after_a_begin_that_it_refused() -> None:
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        with pytest.raises(RuntimeError, match="open already"):
            await sending.begin_transaction()
        await sending.send("t", b"1", partition=0)
        gate = asyncio.Event()

        async def answer_later(request: Any, node: FakeNode) -> Any:
            await gate.wait()
            return handled(request, node)

        cluster.script(EndTxnRequest, answer_later)
        committing = asyncio.create_task(sending.commit_transaction())
        await until(lambda: cluster.sent(EndTxnRequest))
        committing.cancel()
        await asyncio.wait([committing])
        gate.set()
        await sending.commit_transaction()
        assert cluster.transactions.committed == [b"1"]
