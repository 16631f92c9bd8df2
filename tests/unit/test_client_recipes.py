"""The recipes of docs/client-recipes.md do what the page says, crashes included."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog import (
    Admin,
    Consumer,
    ConsumerGroupMetadata,
    ConsumerRecord,
    NewTopic,
    OffsetAndMetadata,
    Producer,
    TopicPartition,
)
from tidelog.testing.embedded import EmbeddedBroker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client-recipes.md"
RECORDS = 300


@pytest.fixture
def brokers() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def recipe(brokers: str) -> Any:
    """A name that a code block of the page defines."""

    def find(name: str) -> Any:
        (code,) = [
            block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f" {name}(" in block
        ]
        namespace: dict[str, Any] = {"BROKERS": brokers}
        exec(compile(code, f"{PAGE.name}: {name}", "exec"), namespace)  # noqa: S102
        return namespace[name]

    return find


class Crash(Exception):
    pass


class Handler:
    """Notes the records; crashes before some of them, and ends when there are no more."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.crash_before: set[bytes] = set()

    async def __call__(self, record: ConsumerRecord) -> None:
        assert record.value is not None
        if record.value in self.crash_before:
            self.crash_before.remove(record.value)
            raise Crash
        self.seen[record.value] += 1


async def fill(brokers: str) -> None:
    async with Admin(bootstrap_servers=brokers) as admin:
        await admin.create_topics([NewTopic("orders", 4)])
    async with Producer(bootstrap_servers=brokers) as producer:
        for number in range(RECORDS):
            await producer.send("orders", b"%d" % number, partition=number % 4)


async def run(recipe: Any, handler: Handler, is_done: Any) -> None:
    """Run a recipe, again after each crash, until it has committed what `is_done` waits for."""
    while True:
        task = asyncio.create_task(recipe(handler))
        finished = asyncio.create_task(is_done())
        done, _ = await asyncio.wait([task, finished], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert done, f"{sum(handler.seen.values())} records were handled"
        for each in (task, finished):
            each.cancel()
        outcomes = await asyncio.gather(task, finished, return_exceptions=True)
        if finished in done:
            return
        error = outcomes[0]
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, Crash):
            assert isinstance(error, BaseException)
            raise error


def has_committed_all(brokers: str, group: str) -> Any:
    async def wait() -> None:
        async with Admin(bootstrap_servers=brokers) as admin:
            while True:
                lags = await admin.group_lag(group)
                if len(lags) == 4 and all(each.lag == 0 for each in lags.values()):
                    return
                await asyncio.sleep(0.02)

    return wait


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group"),
    [("at_least_once", "billing"), ("partitions_side_by_side", "shipping"), ("at_most_once", "metrics")],
)
async def test_what_a_crash_loses_and_repeats(brokers: str, recipe: Any, name: str, group: str) -> None:
    await fill(brokers)
    handler = Handler()
    handler.crash_before = {b"%d" % number for number in (0, 137, 138, 299)}
    await run(recipe(name), handler, has_committed_all(brokers, group))
    assert not handler.crash_before or name == "at_most_once"
    values = {b"%d" % number for number in range(RECORDS)}
    if name == "at_most_once":
        assert set(handler.seen.values()) == {1}
        assert set(handler.seen) < values
        assert len(handler.seen) >= RECORDS - 4 * 10
    else:
        assert set(handler.seen) == values
        assert max(handler.seen.values()) > 1, "no batch was read again: the crashes came to nothing"


@pytest.mark.slow
async def test_a_weighted_assignor_deals_by_weight(brokers: str, recipe: Any) -> None:
    await fill(brokers)
    consumer = recipe("weighted_consumer")
    light: Consumer
    heavy: Consumer
    async with consumer(1) as light, consumer(3) as heavy, asyncio.timeout(PATIENCE_S):
        while (len(light.assignment()), len(heavy.assignment())) != (1, 3):
            await light.poll(50)
            await heavy.poll(50)


class Transform(Handler):
    """Makes an invoice of an order; the broker refuses one invoice at first."""

    def __init__(self) -> None:
        super().__init__()
        self.refused_once = {b"77"}

    async def __call__(self, record: ConsumerRecord) -> bytes:  # type: ignore[override]
        await super().__call__(record)
        assert record.value is not None
        if record.value in self.refused_once:
            self.refused_once.remove(record.value)
            return bytes(2_000)
        return b"invoice " + record.value


@pytest.mark.slow
async def test_every_order_has_one_invoice_whatever_crashes(brokers: str, recipe: Any) -> None:
    await fill(brokers)
    async with Admin(bootstrap_servers=brokers) as admin:
        await admin.create_topics([NewTopic("invoices", 2, configs={"max.message.bytes": "1000"})])
    transform = Transform()
    transform.crash_before = {b"%d" % number for number in (0, 137, 138, 299)}
    await run(recipe("exactly_once"), transform, has_committed_all(brokers, "invoices"))
    assert not transform.crash_before
    assert not transform.refused_once
    assert max(transform.seen.values()) > 1, "no batch was read again: the crashes came to nothing"
    invoices: Counter[bytes | None] = Counter()
    expected = {b"invoice %d" % number for number in range(RECORDS)}
    async with (
        Consumer(
            "invoices", bootstrap_servers=brokers, isolation_level="read_committed", auto_offset_reset="earliest"
        ) as consumer,
        asyncio.timeout(PATIENCE_S),
    ):
        while invoices.keys() < expected:
            for records in (await consumer.poll(100)).values():
                invoices.update(record.value for record in records)
    assert invoices == Counter(expected)


@pytest.mark.slow
async def test_a_crash_with_positions_in_a_transaction_does_not_hold_up_the_next_start(
    brokers: str, recipe: Any
) -> None:
    """Its polls were empty until the transaction's timeout."""
    await fill(brokers)
    crashed = Producer(bootstrap_servers=brokers, transactional_id="billing-1", transaction_timeout_ms=900_000)
    async with crashed:
        await crashed.begin_transaction()
        ends = {TopicPartition("orders", number): OffsetAndMetadata(1) for number in range(4)}
        await crashed.send_offsets_to_transaction(ends, ConsumerGroupMetadata("invoices"))
        await crashed.detach_transaction()  # which leaves it open, as a crash
    transform = Transform()
    await run(recipe("exactly_once"), transform, has_committed_all(brokers, "invoices"))
    assert set(transform.seen) == {b"%d" % number for number in range(RECORDS)}


class Enough(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library"), [("pandas_frames", "pandas"), ("polars_frames", "polars"), ("duckdb_counts", "duckdb")]
)
async def test_tables_go_into_frames_and_queries(brokers: str, recipe: Any, name: str, library: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip(library)
    await fill(brokers)
    values: list[Any] = []

    async def handle(frame: Any) -> None:
        if library == "duckdb":
            if frame == dict.fromkeys(range(4), RECORDS // 4):
                raise Enough
            return
        values.extend(frame["value"].to_list())
        if len(values) == RECORDS:
            raise Enough

    with pytest.raises(Enough):
        await asyncio.wait_for(recipe(name)(handle), PATIENCE_S)
    if library != "duckdb":
        assert sorted(int(value) for value in values) == list(range(RECORDS))


@pytest.mark.slow
async def test_tables_are_copied_to_another_topic(brokers: str, recipe: Any) -> None:
    pytest.importorskip("pyarrow")
    await fill(brokers)
    async with Admin(bootstrap_servers=brokers) as admin:
        await admin.create_topics([NewTopic("copies", num_partitions=3)])
    written: list[Any] = []

    async def handle(ranges: list[Any]) -> None:
        written.extend(ranges)
        if sum(each.record_count for each in written) == RECORDS:
            raise Enough

    with pytest.raises(Enough):
        await asyncio.wait_for(recipe("copied_tables")(handle), PATIENCE_S)
    async with Consumer("copies", bootstrap_servers=brokers, auto_offset_reset="earliest") as consumer:
        values: list[int] = []
        while len(values) < RECORDS:
            values += [int(each.value or b"") for batch in (await consumer.poll(1000)).values() for each in batch]
    assert sorted(values) == list(range(RECORDS))
