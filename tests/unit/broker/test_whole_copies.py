"""Copies of whole logs: what they do not mix, and what they do not hold up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.test_thinned_repairs import WITHOUT_A, Cluster, ahead, lose_headers
from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_prefix_copy import GONE, damage, deletes_a
from tidelog.broker.replicas import repair_queue, whole_copies
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.segments.append import UnexplainedGap


def has_a(log: Any) -> bool:
    return any(key == b"a" and value is not None for _, key, value in contents(log))


@pytest.mark.parametrize("change", ["a start", "a reassignment away and back"])
async def test_a_copy_begins_again_where_the_other_replica_has_another_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It came back without its directory, and was filled again from one that was cleaned further. The record of a
    deleted key was in the first half of the copy, and its tombstone gone from the second."""
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_PATIENCE_S", 60.0)
    monkeypatch.setattr(whole_copies, "COPY_PAUSE_S", 0.0)
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    lose_headers(cluster.here)
    other = cleaned_further(tmp_path)
    cluster.brokers[2] = SimpleNamespace(incarnation_id=b"first")
    replicas = [2]
    cluster.repairs.others = lambda partition: replicas
    begun = 0

    def go(offset: int) -> None:
        nonlocal begun
        begun += offset == 0
        if begun < 2 or offset == 0:
            return
        if cluster.copies[2] is other.log:
            replicas[:] = [2]
            return
        cluster.copies[2] = other.log
        if change == "a start":
            cluster.brokers[2] = SimpleNamespace(incarnation_id=b"second")
        else:
            replicas.clear()
        raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)

    cluster.fault = go
    await cluster.repair()
    assert cluster.here.log.damaged_ranges()
    replicas[:] = [2]
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert not has_a(cluster.here.log)


def cleaned_further(tmp_path: Path) -> Logs:
    """What `ahead` writes, without the tombstone and what it deletes."""
    other = Logs(tmp_path / "other", GONE)
    for number in range(4):
        pairs = [keyed(("a", "1"), ("b", "1")), keyed(("b", "2"))] if not number else []
        other.append(*pairs, keyed((f"{number}", "x" * 900)), *([keyed(("a", None))] if number == 3 else []))
        other.log.roll(NOW)
    other.append(keyed(("z", "1")))
    for _ in range(3):
        clean(other.log)
        other.append(keyed(("z", "1")))
        other.log.roll(NOW)
        other.append(keyed(("z", "1")))
    assert not has_a(other.log)
    return other


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_copy_whose_swap_is_finished_by_something_else_is_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A move began, and the log stayed without its producers, and uncleanable, until a restart."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    log = cluster.here.log
    repaired: list[Any] = []
    replaced: list[Any] = []
    cluster.repairs.on_repaired = repaired.append
    cluster.repairs.whole_copies.on_replaced = replaced.append
    log.lacks_producers = True
    advance, left = PrefixCopy.advance, turns

    def finish(self: PrefixCopy) -> bool:
        nonlocal left
        has_more = advance(self)
        if self._swap is not None and self._swap.has_begun:
            left -= 1
            if not left:
                log.keep_uncleaned()
        return has_more

    monkeypatch.setattr(PrefixCopy, "advance", finish)
    assert await cluster.repair()
    assert left <= 0
    assert (cluster.table(), log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert (repaired, replaced, log.lacks_producers) == ([log], [cluster.partition], False)
    assert cluster.repairs.counters.ranges_repaired == 1


def damage_two_ranges(cluster: Cluster, tmp_path: Path) -> int:
    """The first one needs a whole copy; broker 3 has all of the second one, and nothing before. Its first offset."""
    damage(cluster.here, 1)
    whole = Logs(tmp_path / "whole", GONE)
    deletes_a(whole)
    whole.log.roll(NOW)
    for _ in range(3):
        whole.append(keyed(("z", "1")))
        whole.log.roll(NOW)
    cluster.copies[3] = whole.log
    damage(cluster.here, 0, 2)
    second = cluster.here.log.damaged_ranges()[1][1].first_offset

    def refuse(offset: int) -> None:
        if cluster.fetches[-1] == 3 and offset < second:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)

    cluster.fault = refuse
    return second


async def test_a_range_without_space_for_its_copy_holds_up_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    second = damage_two_ranges(cluster, tmp_path)
    monkeypatch.setattr(type(cluster.here.disk), "volume_bytes", lambda self, path: (20_000, 1_100))
    assert not await cluster.repair()
    assert cluster.partition in cluster.repairs._without_space
    assert [each.first_offset < second for _, each in cluster.here.log.damaged_ranges()] == [True]
    assert not cluster.refused


async def test_a_range_that_waits_for_a_whole_copy_holds_up_no_other(tmp_path: Path) -> None:
    """The replica that has the other one did not answer once, and the partition was held as a whole."""
    cluster = Cluster(tmp_path)
    second = damage_two_ranges(cluster, tmp_path)
    refuse, downs = cluster.fault, 2
    cluster.repairs._queue.whole_copies = repair_queue.WHOLE_COPIES_MAX

    def go(offset: int) -> None:
        nonlocal downs
        if offset >= second and downs:
            downs -= 1
            raise PeerUnreachable("it is down")
        refuse(offset)

    cluster.fault = go
    cluster.repairs.report(cluster.partition)
    await until(lambda: len(cluster.here.log.damaged_ranges()) == 1)
    await until(lambda: cluster.partition in cluster.repairs._queue.want_whole_copies)
    await cluster.repairs.close()


async def test_one_that_waits_for_a_whole_copy_still_explains_a_gap(tmp_path: Path) -> None:
    """The follower stood still at it until a whole copy of another partition ended."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    repairs: Any = cluster.repairs
    repairs._queue.whole_copies = repair_queue.WHOLE_COPIES_MAX
    repairs.report(cluster.partition)
    await until(lambda: cluster.partition in repairs._queue.want_whole_copies)
    await until(lambda: not repairs._queue.lanes)
    explained = asyncio.Event()

    async def explain(*gap: object) -> None:
        explained.set()

    repairs._explain = explain
    repairs.report_gap(cluster.partition, UnexplainedGap(100, 200))
    await asyncio.wait_for(explained.wait(), 30)
    await repairs.close()
