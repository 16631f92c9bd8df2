"""The repairs of several partitions: one that takes long holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import until
from tidelog.broker.replicas import repair_queue as module
from tidelog.broker.replicas.repair_queue import REPAIRED_AT_ONCE_MAX, WHOLE_COPIES_MAX
from tidelog.broker.replicas.repairs import Repairs
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable


class Node:
    """`ends[number]`: set when the repair of the partition may end. `begun`: the attempts in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        unused: Any = None
        self.repairs = Repairs(1, unused, unused, unused, unused, asyncio.get_running_loop(), unused)
        self.ends: dict[int, asyncio.Event] = {}
        self.begun: list[int] = []
        self.is_fixed, self.least_s = True, 0.0
        monkeypatch.setattr(self.repairs, "_repair", self.repair)

    def damaged(self, number: int, *, ends: bool) -> Any:
        log: Any = SimpleNamespace(damaged_ranges=lambda: [(object(), SimpleNamespace(first_offset=3))])
        partition: Any = Mock(topic="t", index=number, log=log, offline=False)
        self.ends[number] = asyncio.Event()
        if ends:
            self.ends[number].set()
        self.repairs.report(partition)
        return partition

    async def repair(self, partition: Any) -> bool:
        self.begun.append(partition.index)
        await asyncio.sleep(self.least_s)
        await self.ends[partition.index].wait()
        return self.is_fixed


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    node = Node(monkeypatch)
    yield node
    await node.repairs.close()


async def test_a_repair_that_takes_long_holds_up_no_other(node: Node) -> None:
    """One partition's copy of a whole log took hours, and no other damage on the node was repaired meanwhile."""
    slow = node.damaged(0, ends=False)
    await until(lambda: node.begun == [0])
    others = [node.damaged(number, ends=True) for number in range(1, 6)]
    await until(lambda: not {*others} & {*node.repairs._queue.waiting})
    assert node.begun == [0, 1, 2, 3, 4, 5]
    assert slow in node.repairs._queue.waiting
    node.ends[0].set()
    await until(lambda: node.repairs._task is None)


async def test_only_some_are_repaired_at_once(node: Node) -> None:
    for number in range(REPAIRED_AT_ONCE_MAX + 2):
        node.damaged(number, ends=False)
    await until(lambda: len(node.begun) == REPAIRED_AT_ONCE_MAX)
    await asyncio.sleep(0.05)
    assert node.begun == [*range(REPAIRED_AT_ONCE_MAX)]
    node.ends[0].set()
    await until(lambda: len(node.begun) == REPAIRED_AT_ONCE_MAX + 1)
    await node.repairs.close()
    assert not node.repairs._queue.lanes
    assert len(node.begun) == REPAIRED_AT_ONCE_MAX + 1


async def test_the_one_that_waits_longest_is_the_next(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are due again at once take no turn from those behind them."""
    monkeypatch.setattr(module, "PAUSE_S_MIN", 0.01)
    node.is_fixed, node.least_s = False, 0.03
    numbers = [*range(3 * REPAIRED_AT_ONCE_MAX)]
    for number in numbers:
        node.repairs._queue.waiting[node.damaged(number, ends=True)].pause_s = 0.01
    await until(lambda: len(node.begun) >= 2 * len(numbers))
    assert node.begun[: len(numbers)] == numbers


async def test_one_that_waits_keeps_its_turn_while_a_broker_comes_and_goes(node: Node) -> None:
    """Each time, the first ones of the node were tried again before those that had never had a turn."""
    node.is_fixed, node.least_s = False, 0.01
    numbers = [*range(8 * REPAIRED_AT_ONCE_MAX)]
    for number in numbers:
        node.damaged(number, ends=True)
    delta: Any = Mock(changed_brokers={2}, changed_partitions={})
    for _ in range(1000):
        await asyncio.sleep(0.01)
        node.repairs.on_image(delta)
        if len(node.begun) >= 3 * len(numbers):
            break
    assert {*node.begun} == {*numbers}


async def test_a_report_during_a_repair_leads_to_another_one_after_it(node: Node) -> None:
    partition = node.damaged(0, ends=False)
    await until(lambda: node.begun == [0])
    node.repairs._hurry(partition)
    await asyncio.sleep(0.05)
    assert node.begun == [0], "never two at once"
    node.ends[0].set()
    await until(lambda: node.begun == [0, 0])


async def test_the_copies_of_whole_logs_leave_room_for_other_repairs(node: Node) -> None:
    """One beyond them waits, and keeps its damage: the range alone could bring a deleted key back."""
    may_end = asyncio.Event()
    begun: list[int] = []

    async def copy(partition: Any, repair: object, source: int, process: object) -> bool:
        begun.append(partition.index)
        await may_end.wait()
        raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)

    repairs: Any = node.repairs
    repairs.whole_copies._copy, repairs.in_sync = copy, lambda partition: {2}
    repairs.others, repairs.process_of = lambda partition: [2], lambda partition, source: b""
    repair: Any = SimpleNamespace(is_obsolete=True)
    call: Callable[[int], Any] = lambda number: repairs._copy_cleaned(  # noqa: E731
        Mock(topic="t", index=number, log=Mock(is_under_cleaning=False)), repair, [2]
    )
    tasks = [asyncio.ensure_future(call(number)) for number in range(WHOLE_COPIES_MAX)]
    await until(lambda: len(begun) == WHOLE_COPIES_MAX)
    assert await asyncio.wait_for(call(9), 10)
    assert 9 not in begun
    assert len(repairs._queue.want_whole_copies) == 1
    may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert await asyncio.wait_for(call(9), 10)
    assert 9 in begun


async def test_one_that_waits_for_a_whole_copy_takes_no_turn_of_others(node: Node) -> None:
    """Each of its attempts fetched and scanned all again: of a thousand these held up every other repair."""
    node.is_fixed = False
    waits = node.damaged(0, ends=True)
    await until(lambda: node.begun == [0] and not node.repairs._queue.lanes)
    node.repairs._queue.whole_copies = WHOLE_COPIES_MAX
    node.repairs._queue.want_whole_copies.add(waits)
    node.damaged(1, ends=True)
    await until(lambda: node.begun.count(1) >= 4)
    assert node.begun.count(0) == 1
    delta: Any = Mock(changed_brokers={2}, changed_partitions={})
    node.repairs.on_image(delta)
    await until(lambda: node.begun.count(0) == 2)  # perhaps the range alone is right now
    await until(lambda: not node.repairs._queue.lanes)
    node.repairs._queue.want_whole_copies.add(waits)
    node.repairs._queue.whole_copies = 0
    await until(lambda: node.begun.count(0) == 3)


async def test_a_fetch_without_an_answer_closes_no_connection_of_another_repair(node: Node) -> None:
    """A whole copy would begin again from its start each time."""
    repairs: Any = node.repairs
    lanes: list[str] = []

    async def exchange(*arguments: object, lane: str, **options: object) -> Any:
        lanes.append(lane)
        raise PeerUnreachable("no answer in time")

    async def repair(partition: Any) -> bool:
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                await Repairs.fetch(repairs, partition, 2, 0, up_to_log_end=False)
        return bool(await node.repair(partition))

    repairs._exchange, repairs._endpoint_of, repairs._repair = exchange, lambda broker_id: ("", 0), repair
    partitions = [node.damaged(number, ends=False) for number in range(REPAIRED_AT_ONCE_MAX)]
    await until(lambda: len(node.begun) == REPAIRED_AT_ONCE_MAX)
    assert len({*lanes}) == REPAIRED_AT_ONCE_MAX
    for partition in partitions:
        partition.topic_id = b"t" * 16
        node.ends[partition.index].set()
    await until(lambda: node.repairs._task is None)
    node.damaged(9, ends=True)
    await until(lambda: 9 in node.begun)
    assert len({*lanes}) == REPAIRED_AT_ONCE_MAX, "the connections are used again"
