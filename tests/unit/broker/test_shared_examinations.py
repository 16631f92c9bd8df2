"""Many readers meet the same damage at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_flushes import errors_of, produce_to
from tidelog.storage.segments.reader import ColdRead, Examination


async def test_reads_that_meet_the_same_damage_share_an_examination(
    start_node: Any, make_batch: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read the whole segment: with twenty consumers a gigabyte was read twenty times, on all threads."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 1)
    wire.send(produce_to([0], make_batch(b"a")), 9)
    assert await errors_of(wire) == [0]
    partitions = node.node._broker.partitions
    segment = partitions.find("t", 0).log.segments.active
    goes_on, examined, ended = threading.Event(), list[int](), list[int]()

    def warm(examination: Examination) -> None:
        assert goes_on.wait(PATIENCE_S)
        examined.append(segment.generation)

    monkeypatch.setattr(Examination, "warm", warm)
    for number in range(5):
        partitions.run_cold(Examination(segment), partial(ended.append, number))
    segment.generation += 1
    partitions.run_cold(Examination(segment), partial(ended.append, 5))
    goes_on.set()
    await until(lambda: len(ended) == 6)
    assert len(examined) == 2
    assert sorted(ended) == list(range(6))
    partitions.run_cold(Examination(segment), partial(ended.append, 6))
    await until(lambda: len(ended) == 7)
    assert len(examined) == 3
    loaded = list[ColdRead]()
    monkeypatch.setattr(ColdRead, "warm", lambda read: loaded.append(read))
    reads = [ColdRead(segment, position, 1) for position in (0, 9)]
    for number in range(2):
        for read in reads:
            partitions.run_cold(read, partial(ended.append, 7))
        await until(lambda: len(ended) == 9 + 2 * number)  # noqa: B023
    assert sorted(map(id, loaded)) == sorted(map(id, 2 * reads)), "other reads are of different bytes"
