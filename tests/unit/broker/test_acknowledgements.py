"""Thousands of produces that wait for one offset are answered in several turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import hold_flushes, produce, produced
from tidelog.broker.apis.records.produce_waits import ParkedOne
from tidelog.broker.scheduling import acknowledgements
from tidelog.broker.scheduling.acknowledgements import Acknowledgements
from tidelog.protocol.messages.produce import ProduceResponse

MakeBatch = Callable[..., bytes]


def _note(called: list[tuple[str, int]], name: str, number: int, error: Exception | None) -> None:
    called.append((name, number))


def test_each_is_called_once_in_order_and_those_of_several_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acknowledgements, "CALLED_AT_ONCE_MAX", 3)
    turns: list[Callable[[], None]] = []
    called: list[tuple[str, int]] = []
    settle = Acknowledgements(turns.append).settle
    for name, count in (("a", 10), ("b", 6), ("c", 3)):
        settle([partial(_note, called, name, number) for number in range(count)], None)
    assert called == [(name, number) for name in "abc" for number in range(3)], "the first ones do not wait for others"
    while turns:
        assert len(turns) == 1
        before = len(called)
        turns.pop()()
        assert len(called) <= before + 3
    assert called[9:] == [
        *[("a", number) for number in range(3, 6)], *[("b", number) for number in range(3, 6)],
        *[("a", number) for number in range(6, 10)],
    ]  # fmt: skip


@pytest.mark.parametrize("acks", [1, -1])
async def test_many_produces_that_wait_for_the_device_are_not_answered_in_one_turn(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t")
    monkeypatch.setattr(acknowledgements, "CALLED_AT_ONCE_MAX", 10)
    gate = hold_flushes(monkeypatch)
    settled: list[ParkedOne] = []
    settle = ParkedOne._settled

    def counted(one: ParkedOne, error: Exception | None) -> None:
        settled.append(one)
        settle(one, error)

    monkeypatch.setattr(ParkedOne, "_settled", counted)
    batch = make_batch(b"a")
    count = 100
    for _ in range(count):
        wire.send(produce("t", batch, acks=acks, timeout_ms=600_000), 9)
    watch = node.node._broker.partitions.leader("t", 0).watch
    await until(lambda: len(watch.produces.waiting) + len(watch.syncs.waiting) == count)
    turns: list[int] = []
    loop = asyncio.get_running_loop()

    def turn(before: int) -> None:
        turns.append(len(settled) - before)
        if len(settled) < count:
            loop.call_soon(turn, len(settled))

    loop.call_soon(turn, 0)
    gate.set()
    for number in range(count):
        answer = await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)
        assert produced(answer) == [(0, number)]
    assert max(turns) <= 2 * acknowledgements.CALLED_AT_ONCE_MAX, "the first ones, and one turn"
