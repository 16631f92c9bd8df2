"""When the metadata log and its snapshots are read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.replication.quorum.quorum_nodes import until
from tidelog.replication.quorum import metadata_scrubber
from tidelog.replication.quorum.metadata_scrubber import MetadataScrubber
from tidelog.replication.quorum.raft.settings import QuorumSettings


class Segments:
    """Of an empty log."""

    looks = reads = 0

    def age_trust(self) -> None:
        self.looks += 1

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return iter(())


async def test_where_it_is_turned_off_the_snapshots_alone_are_read_once_for_each_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_scrubber, "LOOK_S", 0.001)
    segments, checks = Segments(), list[int]()

    async def run(work: Callable[[], Any]) -> Any:
        return work()

    def check_snapshots() -> bool:
        checks.append(segments.looks)
        return False

    scrubber = MetadataScrubber(
        cast("Any", SimpleNamespace(check_snapshots=check_snapshots)),
        cast("Any", SimpleNamespace(segments=segments)),
        QuorumSettings(scrub_bytes_per_s=0, scrub_interval_ms=1),
        asyncio.get_running_loop(),
        run,
        on_damage=lambda: None,
        on_damaged_snapshots=lambda: None,
        tolerates=lambda error: False,
    )
    scrubber.begin()
    for doubts in (1, 2):
        scrubber.doubt_snapshots()
        await until(lambda: len(checks) >= doubts)  # noqa: B023
        looks = segments.looks
        await until(lambda: segments.looks > looks + 5)  # noqa: B023
        assert len(checks) == doubts
    assert not segments.reads
    await scrubber.close()
