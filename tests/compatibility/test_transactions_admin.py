"""`tidelog transactions` and the admin calls behind it, on an open transaction of real brokers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from tests.compatibility.conftest import SERVERS, create_topic, start
from tests.compatibility.test_client_transactions import OPTIONS
from tests.patience import PATIENCE_S
from tidelog import Admin, KafkaError, Producer, ProducerFenced, TopicPartition
from tidelog.cli.main import main
from tidelog.client import sync
from tidelog.testing.processes import ServerProcess

Cli = Callable[..., tuple[int, str, str]]
_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=SERVERS)
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(request.param, tmp_path_factory.mktemp(request.param), **OPTIONS) as started:
        yield started


@pytest.fixture
def cli(node: ServerProcess, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command against the node: (exit code, standard output, standard error)."""
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", address(node))

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(["transactions", *words])
        return (status, *capfd.readouterr())

    return run


def address(node: ServerProcess) -> str:
    return f"127.0.0.1:{node.port}"


@pytest.fixture
async def admin(node: ServerProcess) -> AsyncIterator[Admin]:
    async with Admin(bootstrap_servers=address(node)) as client:
        yield client


class Open:
    """A transaction that is open in partition 0 of a topic, from offset 1 on."""

    def __init__(self, producer: Producer, name: str, topic: str) -> None:
        self.producer, self.name, self.topic = producer, name, topic
        self.partition = TopicPartition(topic, 0)


@pytest.fixture
async def opened(node: ServerProcess) -> AsyncIterator[Open]:
    number = next(_numbers)
    topic = create_topic(node.port, f"open-{os.getpid()}-{number}", 2)
    async with Producer(bootstrap_servers=address(node)) as plain:
        await plain.send_and_wait(topic, b"before", partition=0)
    name = f"open-{os.getpid()}-{number}"
    async with Producer(bootstrap_servers=address(node), transactional_id=name) as producer:
        async with producer.transaction():
            await producer.send(topic, b"before", partition=1)  # so that there is an earlier epoch
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        yield Open(producer, name, topic)


async def test_lists_pass_their_filters(admin: Admin, opened: Open) -> None:
    def names(listings: list[object]) -> set[str]:
        return {getattr(listing, "transactional_id", "") for listing in listings}

    assert opened.name in names([*await admin.list_transactions()])
    assert opened.name in names([*await admin.list_transactions(states=["Ongoing"])])
    assert opened.name not in names([*await admin.list_transactions(states=["CompleteCommit"])])
    assert opened.name not in names([*await admin.list_transactions(min_duration_ms=3_600_000)])
    assert names([*await admin.list_transactions(id_pattern=f"{opened.name[:5]}.*{opened.name[5:]}")]) == {opened.name}
    [listing] = await admin.list_transactions(id_pattern=opened.name)
    assert [listing] == await admin.list_transactions(producer_ids=[listing.producer_id], states=["Ongoing"])
    with pytest.raises(KafkaError, match="no state of a transaction: Nonsense"):
        await admin.list_transactions(states=["Nonsense"])


async def test_a_description_has_the_partitions_and_the_start(admin: Admin, opened: Open) -> None:
    found = (await admin.describe_transactions([opened.name]))[opened.name]
    assert (found.state, found.timeout_ms, found.partitions) == ("Ongoing", 60_000, (opened.partition,))
    assert found.start_time_ms
    await opened.producer.commit_transaction()
    async with asyncio.timeout(PATIENCE_S):
        while found.state != "CompleteCommit":
            found = (await admin.describe_transactions([opened.name]))[opened.name]
    assert (found.start_time_ms, found.partitions) == (None, ()) or not found.partitions
    with pytest.raises(KafkaError, match="TRANSACTIONAL_ID_NOT_FOUND: transactional id 'nobody'"):
        await admin.describe_transactions(["nobody"])


async def test_what_holds_back_readers_is_named(admin: Admin, opened: Open) -> None:
    [blocked] = await admin.blocked_partitions([opened.partition, TopicPartition(opened.topic, 1)])
    assert (blocked.partition, blocked.last_stable_offset, blocked.high_watermark) == (opened.partition, 1, 2)
    assert blocked.blocker.is_expected
    assert blocked.blocker.description is not None
    assert blocked.blocker.description.transactional_id == opened.name
    assert blocked.blocker.producer.transaction_start_offset == 1
    assert await admin.find_hanging_transactions([opened.partition], max_transaction_timeout_ms=0) == []
    await opened.producer.commit_transaction()
    async with asyncio.timeout(PATIENCE_S):
        while await admin.blocked_partitions([opened.partition]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_abort_marker_frees_the_readers_of_one_partition(admin: Admin, opened: Open) -> None:
    [transaction] = await admin.open_transactions([opened.partition])
    producer = transaction.producer
    with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH: transaction of producer"):
        await admin.abort_transaction(opened.partition, producer.producer_id, producer.producer_epoch - 1, 0)
    await admin.abort_transaction(
        opened.partition, producer.producer_id, producer.producer_epoch, producer.coordinator_epoch
    )
    assert await admin.open_transactions([opened.partition]) == []


async def test_a_fenced_producer_cannot_commit(admin: Admin, opened: Open) -> None:
    [listing] = await admin.list_transactions(id_pattern=opened.name)
    fenced = await admin.fence_producers([opened.name])
    result = fenced[opened.name]
    assert isinstance(result, tuple)
    assert result[0] == listing.producer_id
    with pytest.raises(ProducerFenced):
        await opened.producer.commit_transaction()


async def test_the_command_line_shows_and_ends_an_open_transaction(cli: Cli, opened: Open, node: ServerProcess) -> None:
    async def run(*words: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(cli, *words)

    header, row = ((line.split()) for line in (await run("list", "--include", opened.name))[1].splitlines())
    assert " ".join(header) == "TRANSACTIONAL ID COORDINATOR PRODUCER STATE"
    assert (row[0], row[3]) == (opened.name, "Ongoing")
    [found] = json.loads((await run("describe", opened.name, "--json"))[1])
    assert (found["state"], found["partitions"]) == ("Ongoing", [f"{opened.topic}-0"])
    [blocked] = json.loads((await run("blocking", opened.topic, "--json"))[1])
    assert (blocked["transactional_id"], blocked["last_stable_offset"], blocked["log_end_offset"]) == (
        opened.name,
        1,
        2,
    )
    lines = (await run("blocking", opened.topic, "-p", "0"))[1].splitlines()
    assert lines[0].startswith("TOPIC")
    assert opened.name in lines[1]
    assert json.loads((await run("find-hanging", opened.topic, "--max-transaction-timeout", "0", "--json"))[1]) == []
    status, _, error = await run("abort", opened.topic, "0", "--start-offset", "77")
    assert (status, error) == (1, f"tidelog: no open transaction of {opened.topic}-0 starts at offset 77\n")
    aborted = json.loads((await run("abort", opened.topic, "0", "--start-offset", "1", "--json"))[1])
    assert aborted == {"topic": opened.topic, "partition": 0, "start_offset": 1, "outcome": "aborted"}
    assert json.loads((await run("blocking", opened.topic, "--json"))[1]) == []
    fenced = json.loads((await run("terminate", opened.name, "--json"))[1])
    assert (fenced["transactional_id"], fenced["next_epoch"] > 0) == (opened.name, True)
    assert "TRANSACTIONAL_ID_NOT_FOUND" in (await run("terminate", "nobody"))[2]
    assert "--partition needs a topic" in (await run("blocking", "-p", "0"))[2]
    with pytest.raises(ProducerFenced):
        await opened.producer.commit_transaction()


async def test_the_blocking_admin_has_the_same(opened: Open, node: ServerProcess) -> None:
    def work() -> None:
        with sync.Admin(bootstrap_servers=address(node)) as admin:
            [listing] = admin.list_transactions(id_pattern=opened.name)
            assert admin.describe_transactions([opened.name])[opened.name].producer_id == listing.producer_id
            [blocked] = admin.blocked_partitions([opened.partition])
            [transaction] = admin.open_transactions([opened.partition])
            assert blocked.blocker == transaction
            assert admin.find_hanging_transactions([opened.partition]) == []
            producer = transaction.producer
            admin.abort_transaction(opened.partition, producer.producer_id, producer.producer_epoch, 0)
            assert isinstance(admin.fence_producers([opened.name])[opened.name], tuple)

    await asyncio.to_thread(work)
