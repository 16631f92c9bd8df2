"""A pass of the scrubber reaches every log, whatever happens in one, and the loop serves others in between."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.patience import PATIENCE_S
from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.broker.config.definitions import BROKER
from tidelog.broker.replicas.scrubber import Scrubber
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.log_config import LogConfig


class Snapshots:
    """Of producers; `error` is what reading them raises."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.reads = 0

    @property
    def offsets(self) -> list[int]:
        return [0]

    def read(self, offset: int) -> list[Any]:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return []


class Partitions:
    """Empty logs, each with one snapshot of its producers."""

    def __init__(self, errors: list[Exception | None]) -> None:
        self.refused: list[tuple[str, Exception]] = []
        self.by_name = {}
        for number, error in enumerate(errors):
            log = SimpleNamespace(snapshots=Snapshots(error), segments=[], failure=None, gaps_explained_below=0)
            name = f"t{number}"
            self.by_name[name] = SimpleNamespace(topic=name, index=0, log=log, offline=False)

    def hosted(self) -> Iterator[Any]:
        return iter(self.by_name.values())

    def find(self, topic: str, index: int) -> Any:
        return self.by_name[topic]

    def refusal(self, partition: Any, error: Exception) -> None:
        self.refused.append((partition.topic, error))

    @property
    def reads(self) -> list[int]:
        return [partition.log.snapshots.reads for partition in self.by_name.values()]


def started(partitions: Partitions) -> Scrubber:
    values = {"log.scrub.interval.ms": 1, "log.scrub.bytes.per.second": 1 << 20}
    assert values.keys() <= BROKER.keys()
    config = SimpleNamespace(integer=values.__getitem__)
    repairs = SimpleNamespace(look_at=lambda partition: None)

    def run(work: Callable[[], None]) -> Any:
        raise AssertionError("there is no segment to read")

    scrubber = Scrubber(cast(Any, config), cast(Any, partitions), cast(Any, repairs), asyncio.get_running_loop(), run)
    scrubber.start()
    return scrubber


async def passed(scrubber: Scrubber, count: int) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while scrubber.counters.passes < count:
        assert loop.time() < deadline, "no further pass"
        await asyncio.sleep(0.001)


async def test_a_snapshot_that_the_device_does_not_give_ends_no_pass() -> None:
    error = OSError(errno.EIO, "input/output error")
    partitions = Partitions([error, None])
    scrubber = started(partitions)
    try:
        await passed(scrubber, 2)
        assert partitions.refused[0] == ("t0", error), "its directory has failed"
        assert min(partitions.reads) >= 2, "every log is looked at again in the next pass"
    finally:
        await scrubber.close()


async def test_others_are_served_between_two_logs() -> None:
    partitions = Partitions([None] * 50)
    scrubber = started(partitions)
    try:
        seen = set()
        while scrubber.counters.passes < 1:
            seen.add(sum(partitions.reads))
            await asyncio.sleep(0)
        assert len(seen) > 25, "the loop turns while the logs without records are gone through"
    finally:
        await scrubber.close()


async def test_a_segment_that_was_removed_while_it_is_open_is_damage_once_the_cleaner_misses_it(tmp_path: Path) -> None:
    """The scrub at once read the open file, and the log was not cleaned until another scrub found the damage."""
    made = Logs(tmp_path, LogConfig(segment_bytes=1000))
    for _ in range(40):
        made.append(batch(2, value=b"v" * 50))
    log, looked_at = made.log, list[Any]()
    first = log.segments.first
    whole = Scrub(log, first)
    whole.run(10**9)
    assert not whole.finish()
    made.disk.remove(first.path)
    partition: Any = SimpleNamespace(topic="t", index=0, log=log, offline=False)
    partitions: Any = SimpleNamespace(hosted=lambda: [partition], find=lambda topic, index: partition)
    config: Any = SimpleNamespace(integer=lambda key: 1 << 30)
    repairs: Any = SimpleNamespace(look_at=looked_at.append)

    async def run(work: Callable[[], None]) -> None:
        work()

    scrubber = Scrubber(config, partitions, repairs, asyncio.get_running_loop(), run)
    scrubber.look_soon(log)
    urgent: Any = scrubber._urgent
    async with asyncio.timeout(PATIENCE_S):
        assert await urgent
    assert looked_at == [partition]
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(0, first.next_offset)]
    log.maintain(NOW)
    made.close()
