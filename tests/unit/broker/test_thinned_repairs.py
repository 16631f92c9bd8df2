"""Repairs of a compacted log from replicas whose cleaners have removed records of the damaged range."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.repairing import RepairedReplica
from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_prefix_copy import GONE, damage, deletes_a, fetch, replicas
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.cleaner.keys import PlainKeyTable
from tidelog.storage.log.compaction import Compaction, find_cleanable
from tidelog.storage.segments import lookup
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex


class Cluster(RepairedReplica):
    """Broker 1 has the only copy of a tombstone that is left, which is damaged."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.cleaned = replicas(tmp_path, deletes_a)
        self.copies: dict[int, Any] = {2: self.cleaned.log}
        self.in_sync = {2, 3}
        self.fetches: list[int] = []
        self.fault: Callable[[int], object] = lambda offset: None
        super().__init__(self.here.log, lambda: list(self.copies))
        self.repairs._in_sync = lambda partition: self.in_sync

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        self.fetches.append(source)
        self.fault(offset)
        return fetch(self.copies[source], offset)

    async def repair(self) -> bool:
        return bool(await self.repairs._repair(self.partition))

    def table(self) -> set[tuple[bytes | None, bytes | None]]:
        return {(key, value) for _, key, value in contents(self.here.log)}


WITHOUT_A = {(b"b", b"1"), (b"c", b"1"), (b"z", b"1")}


async def test_the_log_is_the_other_ones_up_to_the_damage(tmp_path: Path) -> None:
    """Before, the range alone was repaired: the record that the tombstone deletes stayed for good."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert cluster.repairs.counters.ranges_repaired == 1


async def test_a_whole_copy_of_the_range_is_taken_where_there_is_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    whole = Logs(tmp_path / "whole", GONE)
    deletes_a(whole)
    whole.log.roll(NOW)
    for _ in range(3):
        whole.append(keyed(("z", "1")))
        whole.log.roll(NOW)
    cluster.copies[3] = whole.log
    before = len(cluster.here.log.segments)
    damage(cluster.here, 1)
    assert await cluster.repair()
    assert (b"a", None) in cluster.table()
    assert (len(cluster.here.log.segments), cluster.here.log.damaged_ranges()) == (before, [])
    clean(cluster.here.log)
    clean(cluster.here.log)
    assert {(key, value) for _, key, value in contents(cluster.here.log) if key != b"a"} == WITHOUT_A


async def test_a_range_that_was_cleaned_here_is_repaired_alone(tmp_path: Path) -> None:
    """The record that the tombstone deletes is gone: each replica is cleaned at its own time."""
    cluster = Cluster(tmp_path)
    clean(cluster.here.log)
    number = len(cluster.fetches)
    damage(cluster.here, 0)
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert len(cluster.fetches) - number == 1


@pytest.mark.parametrize("when", [1, 2])
async def test_a_replica_that_goes_meanwhile_is_asked_again(tmp_path: Path, when: int) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)

    def go(offset: int) -> None:
        if len(cluster.fetches) == when:
            raise PeerUnreachable("it is gone")

    cluster.fault = go
    assert not await cluster.repair()
    assert cluster.here.log.damaged_ranges()
    assert cluster.here.files("*.cleaned") == []
    assert cluster.here.log.compaction is None
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])


@pytest.mark.parametrize("why", ["it is not in sync", "it has deleted records", "the replica moves", "no index"])
async def test_without_a_copy_of_all_the_range_alone_is_repaired(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    if why == "it is not in sync":
        cluster.in_sync = set()
    elif why == "the replica moves":
        cluster.here.log.keep_uncleaned()
    elif why == "no index":

        def corrupt(*arguments: object) -> None:
            raise CorruptTransactionIndex

        monkeypatch.setattr(lookup, "aborted_between", corrupt)
    else:

        def refuse(offset: int) -> None:
            if offset == 0:
                raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)

        cluster.fault = refuse
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert {(b"a", b"1"), (b"b", b"1")} <= cluster.table(), "what was not damaged is as it was"
    assert not cluster.refused


async def test_a_repair_that_ends_in_the_middle_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)

    async def wait_for_ever(*arguments: object, **options: object) -> bytes:
        if len(cluster.fetches) >= 1:
            await asyncio.sleep(3600)
        return await cluster.fetch(*arguments, **options)  # type: ignore[arg-type]

    cluster.repairs.fetch = wait_for_ever
    task = asyncio.ensure_future(cluster.repair())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cluster.here.log.compaction is None
    assert cluster.here.files("*.cleaned") == []
    assert cluster.here.log.damaged_ranges()


@pytest.mark.parametrize("pieces", range(13, 19))
async def test_a_copy_waits_for_the_end_of_a_cleaning_that_was_given_up(tmp_path: Path, pieces: int) -> None:
    """The cleaning removed the file of the copy by its name, and the copy took that for a failure of the device."""
    cluster = Cluster(tmp_path)
    log = cluster.here.log
    cleaning = Compaction(log, find_cleanable(log, NOW), lambda: PlainKeyTable(1 << 20, 1.0), NOW, piece_bytes=100)
    for _ in range(pieces):
        cleaning.run()
        assert cleaning.advance()
    assert cluster.here.files("*.cleaned")
    damage(cluster.here, 1)

    def end_cleaning(offset: int) -> None:
        if not offset:
            cleaning.run()
            cleaning.advance()

    cluster.fault = end_cleaning
    assert not await cluster.repair()
    assert (cluster.refused, cleaning.is_given_up) == ([], True)
    assert cluster.here.log.damaged_ranges()
    cluster.fault = lambda offset: None
    cleaning.run()
    assert not cleaning.advance()
    assert await cluster.repair()
    assert (cluster.table(), log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert cluster.here.files("*.cleaned") == []


async def test_a_copy_that_a_truncation_ends_begins_again(tmp_path: Path) -> None:
    """The range alone was repaired instead, and the deleted key came back."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)

    def truncate(offset: int) -> None:
        if len(cluster.fetches) == 2:
            cluster.here.log.truncate_to(cluster.here.log.log_end_offset - 1)

    cluster.fault = truncate
    assert not await cluster.repair()
    assert cluster.here.log.damaged_ranges()
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])


async def test_an_unexpected_error_in_a_copy_leaves_the_log_to_the_cleaner(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)

    def fail(offset: int) -> None:
        if len(cluster.fetches) == 2:
            raise ZeroDivisionError

    cluster.fault = fail
    assert not await cluster.repair()
    assert [type(error) for error in cluster.refused] == [ZeroDivisionError]
    assert (cluster.here.log.compaction, cluster.here.log.is_under_cleaning) == (None, False)
    assert cluster.here.files("*.cleaned") == []
    assert await cluster.repair()
    assert cluster.table() == WITHOUT_A


async def test_a_copy_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full volume is no error of the device: the damage stays."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    size_bytes = cluster.here.log.segments[0].size_bytes
    spare_bytes = 1000
    with monkeypatch.context() as patched:
        disk = type(cluster.here.disk)
        patched.setattr(disk, "volume_bytes", lambda self, path: (20 * spare_bytes, spare_bytes + size_bytes - 1))
        assert not await cluster.repair()
    assert cluster.refused == []
    assert cluster.here.log.damaged_ranges()
    assert (cluster.here.log.compaction, cluster.here.files("*.cleaned")) == (None, [])
    assert await cluster.repair()
    assert cluster.table() == WITHOUT_A
