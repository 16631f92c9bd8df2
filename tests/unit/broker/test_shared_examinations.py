"""Many readers meet the same damage at once."""

from __future__ import annotations

import asyncio
import errno
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


async def test_an_examination_whose_file_fails_to_close_ends_for_all_who_wait(
    start_node: Any, make_batch: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry stayed: no read of the segment met an end before the node's next start."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 1)
    partitions = node.node._broker.partitions
    segment = partitions.find("t", 0).log.segments.active
    ended, failures = list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    failure = OSError(errno.EIO, "the close fails")

    def unpin(examination: Examination) -> None:
        ColdRead.unpin(examination)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(Examination, "unpin", unpin, raising=False)
        for number in range(2):
            partitions.run_cold(Examination(segment), partial(ended.append, number))
        await until(lambda: len(ended) == 2)
    partitions.run_cold(Examination(segment), partial(ended.append, 2))
    await until(lambda: len(ended) == 3)
    assert failures == [failure]
