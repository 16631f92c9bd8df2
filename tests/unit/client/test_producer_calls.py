"""Calls of the producer that are wrong, cancelled, repeated or made twice: a clear error, and nothing else changes."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_producer import numbered, producer, values
from tests.unit.client.test_transactions import SHORT, both_versions, run
from tests.unit.client.transacting import cluster_of, handled, limited, transactional
from tidelog.client import TransactionAborted, TransactionTimeout
from tidelog.client.producing.sender import Sender
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.end_txn import EndTxnRequest
from tidelog.protocol.messages.produce import ProduceRequest


async def test_headers_may_be_none_or_any_iterable():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        pairs = [("a", b"1"), ("b", None)]
        for headers in (None, pairs, (pair for pair in pairs), zip(("a", "b"), (b"1", None)), dict(pairs).items()):
            await sending.send_and_wait("t", b"v", headers=headers)  # type: ignore[arg-type]
        records = [record for batch in cluster.topics["t"][0].batches for record in iter_records(batch)]
        assert [record.headers for record in records] == [(), *[tuple(pairs)] * 4]


@pytest.mark.parametrize("topic", [["t"], {}, b"t", None, 5])
async def test_a_topic_of_another_type_is_named(topic):
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        with pytest.raises(TypeError, match=f"topic must be a str, not {type(topic).__name__}"):
            await sending.send(topic, b"v")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"headers": [("\ud800", b"")]}, ValueError, "cannot be written as UTF-8"),
        ({"headers": {"a": b"1"}}, TypeError, "pairs of str and bytes or None, not 'a'"),
        ({"partition": "0"}, TypeError, "partition must be a whole number, not '0'"),
        ({"partition": 0.0}, TypeError, "partition must be a whole number, not 0.0"),
    ],
)
async def test_a_refused_record_leaves_nothing_behind(arguments, error, text):
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        for _ in range(2):
            with pytest.raises(error, match=text):
                await sending.send("t", b"v", **arguments)
            await sending.flush()
        assert not cluster.sent(ProduceRequest)
        await sending.send_and_wait("t", b"v")
        assert values(cluster) == [b"v"]


async def test_a_caller_that_waits_for_each_record_costs_one_pass_a_record(monkeypatch: pytest.MonkeyPatch):
    passes = 0
    run_pass = Sender._run_pass

    def counted(sender: Sender) -> None:
        nonlocal passes
        passes += 1
        run_pass(sender)

    monkeypatch.setattr(Sender, "_run_pass", counted)
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=0) as sending:
        await sending.send_and_wait("t", b"first")
        passes = 0
        for number in range(50):
            await sending.send_and_wait("t", b"%d" % number)
        assert passes < 60  # and a few of the timer
        assert values(cluster) == [b"first", *(b"%d" % number for number in range(50))]


async def test_a_record_that_cannot_be_encoded_leaves_no_empty_batch():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"1")
        with pytest.raises(OverflowError):
            # Not refused as an argument, so the encoder meets it.
            await sending.send("t", b"2", timestamp_ms=2**62 - 1, headers=_Unencodable([("a", b"1")]))
        await sending.flush()
        assert len(cluster.sent(ProduceRequest)) == 1


class _Unencodable(list[tuple[str, bytes]]):
    def __len__(self) -> int:
        raise OverflowError

    def __bool__(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["\ud800", "x" * 40_000])
async def test_a_topic_name_that_cannot_be_sent_is_refused_and_the_client_goes_on(name):
    async with FakeCluster(t=1, late=1) as cluster, producer(cluster, max_block_ms=2_000) as sending:
        with pytest.raises(KafkaError, match="the topic name") as caught:
            await sending.send(name, b"1")
        assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
        await sending.send_and_wait("late", b"2")
        assert values(cluster, "late") == [b"2"]


async def test_a_cancelled_send_has_not_sent_its_record():
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=1) as sending:
        await sending.send_and_wait("t", b"first")
        sent = [b"first"]

        async def send_all():
            for value in numbered(100):
                await sending.send("t", value)
                sent.append(value)

        for _ in range(5):
            task = asyncio.create_task(send_all())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await sending.flush()
        assert len(sent) > 20
        assert values(cluster) == sent


async def test_sends_of_many_tasks_keep_the_order_in_which_they_begin():
    """The loop runs between some of the batches of one task, which the others need not wait for."""
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=1) as sending:
        await sending.send_and_wait("t", b"0")
        await asyncio.gather(*(sending.send("t", value) for value in numbered(100)[1:]))
        for value in numbered(120)[100:]:
            await sending.send("t", value)
        begun = [asyncio.create_task(sending.send("t", b"120"))]
        await asyncio.sleep(0)
        await sending.send("t", b"121")
        await asyncio.gather(*begun)
        await sending.flush()
        assert values(cluster) == numbered(122)


async def test_a_close_after_an_interrupted_one_ends(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster)
        future = await sending.send("t", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(sending._appender, "close", interrupt)
            with pytest.raises(KeyboardInterrupt):
                await sending.close()
        async with asyncio.timeout(PATIENCE_S):
            await sending.close()
            with pytest.raises(KafkaError, match="closed"):
                await future


async def test_a_second_close_waits_for_the_first():
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster)
        await sending.start()
        reached, released = asyncio.Event(), asyncio.Event()

        async def late(request, node):
            reached.set()
            await released.wait()
            return node.on_produce(request)

        cluster.script(ProduceRequest, late)
        sent = await sending.send("t", b"1")
        closing = asyncio.create_task(sending.close())
        await reached.wait()
        await sending.close(timeout_ms=10)  # its own limit
        assert not sent.done()
        second = asyncio.create_task(sending.close())
        await asyncio.sleep(0.01)
        assert not second.done()
        released.set()
        await second
        assert sent.result().offset == 0
        await closing


# What became of a transaction whose end was given up


def hold_ends(cluster):
    """Handle EndTxn only after the event that this returns is set."""
    released = asyncio.Event()

    async def late(request, node):
        await released.wait()
        return handled(request, node)

    cluster.script(EndTxnRequest, late)
    return released


@both_versions
@pytest.mark.parametrize("ends_by", ["timeout", "cancellation"])
async def test_the_outcome_of_a_commit_is_told_after_it_has_ended_in_the_background(version, ends_by):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        released = hold_ends(cluster)
        await sending.begin_transaction()
        await sending.send("t", b"1", partition=0)
        if ends_by == "timeout":
            with limited(sending, **SHORT), pytest.raises(TransactionTimeout):
                await sending.commit_transaction()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await sending.commit_transaction()
        released.set()
        await asyncio.sleep(0.05)
        await sending.commit_transaction()
        assert cluster.transactions.committed == [b"1"]
        with pytest.raises(RuntimeError, match="no transaction to commit"):
            await sending.commit_transaction()
        await run(sending, b"2")


@both_versions
async def test_an_abort_that_was_given_up_may_be_repeated_after_it_has_ended(version):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        released = hold_ends(cluster)
        await sending.begin_transaction()
        await sending.send_and_wait("t", b"1", partition=0)
        with limited(sending, **SHORT), pytest.raises(TransactionTimeout):
            await sending.abort_transaction()
        released.set()
        await asyncio.sleep(0.05)
        await sending.abort_transaction()
        with pytest.raises(RuntimeError, match="no transaction to abort"):
            await sending.abort_transaction()


@both_versions
@pytest.mark.parametrize("is_sent", [True, False])
async def test_after_a_cancelled_block_a_commit_tells_the_outcome(version, is_sent):
    async with cluster_of(version) as cluster, transactional(cluster) as sending:
        released = asyncio.Event()

        async def late(request, node):
            await released.wait()
            return handled(request, node) if is_sent else node.on_produce(request)

        cluster.script(EndTxnRequest if is_sent else ProduceRequest, late)
        task = asyncio.create_task(run(sending, b"1"))
        await until(lambda: cluster.sent(EndTxnRequest if is_sent else ProduceRequest))
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, released.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        if is_sent:
            await sending.commit_transaction()
        else:
            with pytest.raises((TransactionAborted, RuntimeError)):
                await sending.commit_transaction()
        assert cluster.transactions.committed == ([b"1"] if is_sent else [])
