"""`batches()` of both consumers, and assignors of the application."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST, T0, T1, consumer, fill
from tidelog import Assignor, ConfigError, MemberSubscription, TopicPartition
from tidelog.client import sync
from tidelog.client.assignment.assignors import checked_assignment


async def test_batches_are_polls_that_are_never_empty() -> None:
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t") as reading:
        found: list[int] = []
        fill(cluster, "t", 0, 5)

        async def fill_later() -> None:
            await asyncio.sleep(0.1)
            fill(cluster, "t", 1, 5)

        later = asyncio.create_task(fill_later())
        async with asyncio.timeout(PATIENCE_S):
            async for batch in reading.batches(max_records=3):
                assert batch
                assert 0 < sum(map(len, batch.values())) <= 3
                found += [record.offset for records in batch.values() for record in records]
                if len(found) == 10:
                    break
        await later
        assert sorted(found) == sorted([*range(5), *range(5)])


async def test_a_batch_that_is_handed_out_is_committed_by_commit() -> None:
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 9)
        async with consumer(cluster, "t", group_id="g", enable_auto_commit=False) as reading:
            async with asyncio.timeout(PATIENCE_S):
                async for batch in reading.batches(max_records=4):
                    await reading.commit()
                    (committed,) = (await reading.committed(T0)).values()
                    assert committed is not None
                    assert committed.offset == batch[T0][-1].offset + 1
                    if committed.offset == 9:
                        break


async def test_closing_from_another_task_ends_the_iteration() -> None:
    async with FakeCluster(t=1) as cluster:
        reading = consumer(cluster, "t")

        async def iterate() -> list[Any]:
            return [batch async for batch in reading.batches()]

        task = asyncio.create_task(iterate())
        await asyncio.sleep(0.05)
        await reading.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await task == []
        with pytest.raises(RuntimeError, match="closed"):
            reading.batches()


def test_the_blocking_twin_iterates_and_ends_with_close() -> None:
    with served(t=2) as cluster:
        fill(cluster, "t", 0, 5)
        reading = sync.Consumer("t", **{"bootstrap_servers": cluster.bootstrap, **FAST})
        closing = threading.Timer(0.1, reading.close)
        found: list[int] = []
        for batch in reading.batches(max_records=2):
            assert sum(map(len, batch.values())) <= 2
            found += [record.offset for record in batch[T0]]
            if len(found) == 5:
                closing.start()
        join(closing)
        assert found == list(range(5))
        with pytest.raises(RuntimeError, match="closed"):
            reading.batches()


class AllToOne(Assignor):
    """Gives everything to the member whose user data says so."""

    name = "all-to-one"
    cooperative = False

    def __init__(self, wants_all: bool = False, problem: Exception | None = None) -> None:
        self.wants_all, self.problem = wants_all, problem
        self.calls: list[dict[str, int]] = []

    def user_data(self, owned: Sequence[TopicPartition], generation: int) -> bytes | None:
        return b"all" if self.wants_all else None

    def assign(
        self, partition_counts: Mapping[str, int], members: Mapping[str, MemberSubscription]
    ) -> dict[str, list[TopicPartition]]:
        if self.problem is not None:
            raise self.problem
        self.calls.append(dict(partition_counts))
        (chosen,) = [member for member, subscription in members.items() if subscription.user_data == b"all"] or [
            min(members)
        ]
        return {chosen: [TopicPartition(topic, each) for topic, n in partition_counts.items() for each in range(n)]}


async def test_an_assignor_of_the_application_decides() -> None:
    async with FakeCluster(t=2) as cluster:
        options = {"group_id": "g", "partition_assignment_strategy": AllToOne()}
        greedy = {"group_id": "g", "partition_assignment_strategy": [AllToOne(wants_all=True), "range"]}
        async with consumer(cluster, "t", **options) as first, asyncio.timeout(PATIENCE_S):
            while first.assignment() != {T0, T1}:
                await first.poll(10)
            async with consumer(cluster, "t", **greedy) as second:
                while (first.assignment(), second.assignment()) != (set(), {T0, T1}):
                    await asyncio.gather(first.poll(10), second.poll(10))


async def test_what_an_assignor_raises_the_poll_raises() -> None:
    async with FakeCluster(t=1) as cluster:
        assignor = AllToOne(problem=ZeroDivisionError("no members with a weight"))
        async with consumer(cluster, "t", group_id="g", partition_assignment_strategy=[assignor]) as reading:
            with pytest.raises(ZeroDivisionError, match="weight"):
                await asyncio.wait_for(anext(reading), PATIENCE_S)
            assignor.problem = None
            async with asyncio.timeout(PATIENCE_S):
                while not reading.assignment():
                    await reading.poll(50)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ([object()], "has no name"),
        ([AllToOne(), AllToOne()], "two assignors of one name"),
        (["range", "RangeAssignor"], "two assignors of one name"),
        ([type("Half", (), {"name": "half", "cooperative": False})()], r"no method assign\(\)"),
        ([], "is empty"),
    ],
)
def test_a_strategy_that_is_none_is_named(strategy: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        sync.Consumer("t", group_id="g", partition_assignment_strategy=strategy)


def test_an_assignment_is_checked_before_it_is_sent() -> None:
    members = {"a": MemberSubscription(("t",)), "b": MemberSubscription(("t",))}
    assert checked_assignment("x", {"a": [("t", 0)]}, members) == {"a": [T0], "b": []}  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'c', which is not a member"):
        checked_assignment("x", {"c": [T0]}, members)
    with pytest.raises(ValueError, match="t-0 to 'a' and 'b'"):
        checked_assignment("x", {"a": [T0], "b": [T0]}, members)


async def test_other_tasks_run_between_polls_that_return_buffered_records() -> None:
    """A consumer that was far behind held its event loop until all that had arrived was returned."""
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 60)
        async with consumer(cluster, "t") as reading:
            assert await reading.poll(PATIENCE_S * 1000, max_records=1)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            beside = asyncio.create_task(other())
            for _ in range(50):
                time.sleep(0.004)  # noqa: ASYNC251 - as a program that handles the records
                assert await reading.poll(max_records=1)
            beside.cancel()
            assert turns >= 5


@pytest.mark.parametrize("work_s", [0.004, 0.03])
async def test_polls_with_a_time_limit_of_zero_around_them_return_buffered_records(work_s: float) -> None:
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 60)
        async with consumer(cluster, "t") as reading:
            assert await reading.poll(PATIENCE_S * 1000, max_records=1)
            found = 0
            for _ in range(20):
                time.sleep(work_s)  # noqa: ASYNC251 - as a program that handles the records
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        found += bool(await reading.poll(0, max_records=1))
                await asyncio.sleep(0)
            assert found >= 5
