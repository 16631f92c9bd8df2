"""Repairs of a compacted log from replicas whose cleaners have removed records of the damaged range."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.repairing import RepairedReplica
from tests.unit.broker.test_repair_parts import scrub_all
from tests.unit.storage.batches import NOW, Logs, QuickDisk
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_damage import copy_of
from tests.unit.storage.test_prefix_copy import GONE, damage, deletes_a, fetch, replicas
from tidelog.broker.replicas import repair_queue, whole_copies
from tidelog.broker.replicas.hosting import _set_config
from tidelog.broker.replicas.repairs import Repairs
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.cleaner.filter import CleanedBatch
from tidelog.storage.cleaner.keys import PlainKeyTable
from tidelog.storage.log import gap_scan
from tidelog.storage.log.compaction import Compaction, find_cleanable, write_batches
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import DamagedRange
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex, TransactionIndex


class Cluster(RepairedReplica):
    """Broker 1 has the only copy of a tombstone that is left, which is damaged."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.cleaned = replicas(tmp_path, deletes_a)
        self.copies: dict[int, Any] = {2: self.cleaned.log}
        self.in_sync = {2, 3}
        self.fetches: list[int] = []
        self.fault: Callable[[int], object] = lambda offset: None
        super().__init__(self.here.log, lambda: list(self.copies))
        self.repairs.in_sync = lambda partition: self.in_sync

    def use(self, here: Logs, other: Logs) -> None:
        self.here, self.cleaned = here, other
        self.partition.log = here.log
        self.copies = {2: other.log}

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        self.fetches.append(source)
        self.fault(offset)
        return fetch(self.copies[source], offset)

    def high_watermark_of(self, source: int) -> int:
        return int(self.copies[source].log_end_offset)

    async def repair(self) -> bool:
        return bool(await self.repairs._repair(self.partition))

    def table(self) -> set[tuple[bytes | None, bytes | None]]:
        return {(key, value) for _, key, value in contents(self.here.log)}


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_PATIENCE_S", 0.0)


PASSING = ("it is not in sync", "another one does not answer")
WITHOUT_A = {(b"b", b"1"), (b"c", b"1"), (b"z", b"1")}


async def test_the_log_is_the_other_ones_up_to_the_damage(tmp_path: Path) -> None:
    """Before, the range alone was repaired: the record that the tombstone deletes stayed for good."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert cluster.repairs.counters.ranges_repaired == 1


def uncleaned(tmp_path: Path) -> Logs:
    """A copy that no cleaner has touched."""
    whole = Logs(tmp_path / "whole", GONE)
    deletes_a(whole)
    whole.log.roll(NOW)
    for _ in range(3):
        whole.append(keyed(("z", "1")))
        whole.log.roll(NOW)
    return whole


async def test_a_whole_copy_of_the_range_is_taken_where_there_is_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.copies[3] = uncleaned(tmp_path).log
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


def cease_to_be_compacted(*replicas: Logs) -> None:
    for made in replicas:
        made.config = replace(made.config, cleanup_policy=frozenset({"delete"}))
        _set_config(made.log, made.config, made.directory, set())


@pytest.mark.parametrize("has_started", [True, False])
async def test_a_log_that_was_compacted_once_is_the_other_ones_up_to_the_damage(
    tmp_path: Path, has_started: bool
) -> None:
    """The range alone was repaired, without the tombstone: a deleted key was back, for good if compacted again."""
    cluster = Cluster(tmp_path)
    cease_to_be_compacted(cluster.here, cluster.cleaned)
    if has_started:
        cluster.partition.log = cluster.here.close_and_open()
    damage(cluster.here, 1)
    assert await cluster.repair()
    log = cluster.here.log
    for _ in range(2):
        assert (cluster.table(), log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
        scrub_all(log)
        log = cluster.here.close_and_open()


async def test_the_range_alone_is_repaired_where_retention_has_deleted_the_start_of_each_copy(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    now_s = 0.0
    cluster.repairs.whole_copies._now_s = lambda: now_s
    cease_to_be_compacted(cluster.here, cluster.cleaned)
    cluster.cleaned.log.delete_records(1)
    damage(cluster.here, 1)
    assert not await cluster.repair()
    now_s = whole_copies.WHOLE_COPY_WAIT_S
    assert await cluster.repair()
    assert (b"a", b"1") in cluster.table()


async def test_what_follows_after_a_log_has_ceased_to_be_compacted_is_repaired_alone(tmp_path: Path) -> None:
    """No cleaner has removed anything there, also where this log lacks records before, or is damaged again behind."""
    cluster = Cluster(tmp_path)
    clean(cluster.here.log)
    cease_to_be_compacted(cluster.here, cluster.cleaned)
    for made in (cluster.here, cluster.cleaned):
        made.append(keyed(("a", "2")), keyed(("a", None)), keyed(("d", "1")))
    segments = list(cluster.here.log.segments)
    damage(cluster.here, -2, -1)
    assert await cluster.repair()
    assert {(b"a", b"2"), (b"a", None)} <= cluster.table()
    assert list(cluster.here.log.segments) == segments


async def test_the_others_need_not_have_what_is_deleted_of_a_range(tmp_path: Path) -> None:
    """They could not be asked for its first offset, and had no batch with the log start: it was lost for good."""
    cluster = Cluster(tmp_path)
    here, cleaned = Logs(tmp_path / "here", GONE), Logs(tmp_path / "there", GONE)
    for made in (here, cleaned):
        made.append(keyed(("a", "1"), ("a", "2"), ("a", "3")), keyed(("b", "1")))
        made.log.roll(NOW)
        made.append(keyed(("a", "4")))
        made.log.roll(NOW)
    clean(cleaned.log)
    for made in (here, cleaned):
        made.log.delete_records(1)
    cluster.use(here, cleaned)
    damage(here, 0)
    for _ in range(3):
        await cluster.repair()
    assert (cluster.table(), here.log.damaged_ranges(), cluster.refused) == ({(b"a", b"4"), (b"b", b"1")}, [], [])


def test_the_other_damage_of_a_segment_stays_where_the_beginning_of_a_range_is_deleted(tmp_path: Path) -> None:
    made = Logs(tmp_path / "here", GONE)
    made.append(keyed(("a", "1"), ("a", "2"), ("a", "3")), keyed(("b", "1")), keyed(("c", "1")))
    made.log.set_high_watermark(made.log.log_end_offset)
    segment = made.log.segments.first
    first, other = DamagedRange(0, 80, 0, 3, "test"), DamagedRange(160, 240, 4, 5, "test")
    segment.set_damage((first, other))
    assert not Repairs._forget_deleted(made.log, segment, first)
    made.log.delete_records(1)
    assert Repairs._forget_deleted(made.log, segment, first)
    assert segment.damage == (first._replace(first_offset=1), other)


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


@pytest.mark.parametrize("why", ["it has deleted records", "no index"])
async def test_without_a_copy_of_all_the_range_alone_is_repaired(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    if why == "no index":

        def corrupt(*arguments: object) -> None:
            raise CorruptTransactionIndex

        monkeypatch.setattr(TransactionIndex, "content", corrupt)
    else:

        def refuse(offset: int) -> None:
            if offset == 0:
                raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)

        cluster.fault = refuse
    assert not await cluster.repair()
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert {(b"a", b"1"), (b"b", b"1")} <= cluster.table(), "what was not damaged is as it was"
    assert not cluster.refused


def begin(cluster: Cluster, why: str) -> None:
    if why == "it is not in sync":
        cluster.in_sync = set()
    else:
        cluster.copies[3] = None
        cluster.in_sync = {3}

        def go(offset: int) -> None:
            if cluster.fetches[-1] == 3:
                raise PeerUnreachable("it is down")

        cluster.fault = go


@pytest.mark.parametrize("why", PASSING)
async def test_what_passes_brings_no_deleted_key_back(tmp_path: Path, why: str) -> None:
    """A follower that had just started again, and was not in sync yet, gave the range alone, without the tombstone."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    begin(cluster, why)
    for _ in range(3):
        assert not await cluster.repair()
    assert cluster.here.log.damaged_ranges()
    cluster.in_sync, cluster.fault = {2, 3}, lambda offset: None
    cluster.copies.pop(3, None)
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert not cluster.repairs.whole_copies.waits_since_s


@pytest.mark.parametrize("why", PASSING)
async def test_the_last_resort_is_the_whole_copy_of_one_that_is_not_in_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """After the wait the range alone was taken from the same replica, and the deleted key was back."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    begin(cluster, why)
    assert not await cluster.repair()
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])


async def test_a_replica_that_moves_takes_a_whole_copy_and_the_move_begins_again(tmp_path: Path) -> None:
    """The move waited for the repair, and the repair for the move: then for the range alone."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    cluster.here.log.keep_uncleaned()
    replaced: list[object] = []
    cluster.repairs.whole_copies.on_replaced = replaced.append
    cluster.fault = lambda offset: fail(len(cluster.fetches) == 2)
    assert not await cluster.repair()
    assert not replaced, "it was not replaced"
    cluster.fault = lambda offset: None
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])
    assert replaced == [cluster.partition]


def fail(fails: bool) -> None:
    if fails:
        raise PeerUnreachable("it is gone")


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


@pytest.mark.parametrize("pieces", range(14, 20))
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


def ahead(cluster: Cluster, deletes: int, *, keeps_tombstone: bool = False) -> None:
    """Here all segments are cleaned. Broker 2 has everything, and no cleaner."""
    config = replace(GONE, delete_retention_ms=10**9) if keeps_tombstone else GONE
    cluster.here, cluster.cleaned = (Logs(cluster.here.path.parent / name, config) for name in ("ahead", "behind"))
    for number in range(4):
        for made in (cluster.here, cluster.cleaned):
            pairs = [keyed(("a", "1"), ("b", "1")), keyed(("b", "2"))] if not number else []
            pairs.append(keyed((f"{number}", "x" * 900)))  # none is merged with the next one
            made.append(*pairs, *([keyed(("a", None))] if number == deletes else []))
            made.log.roll(NOW)
    for made in (cluster.here, cluster.cleaned):
        made.append(keyed(("z", "1")))
    for _ in range(1 if keeps_tombstone else 2):
        clean(cluster.here.log)
        for made in (cluster.here, cluster.cleaned):
            made.append(keyed(("z", "1")))
            made.log.roll(NOW)
            made.append(keyed(("z", "1")))
    cluster.use(cluster.here, cluster.cleaned)


def cleaned_twice(log: PartitionLog) -> set[tuple[bytes | None, bytes | None]]:
    """What is left when every tombstone has been compared and removed."""
    for number in range(3):
        log.append_as_leader(memoryview(bytearray(keyed(("z", "1")))), 0, NOW)
        log.roll(NOW)
        log.set_high_watermark(log.log_end_offset)
        clean(log, NOW + 10**10 * number)
    return {(key, value) for _, key, value in contents(log)}


@pytest.mark.parametrize("keeps_tombstone", [False, True])
@pytest.mark.parametrize("deletes", range(4))
async def test_what_the_cleaner_here_has_removed_does_not_come_back(
    tmp_path: Path, deletes: int, keeps_tombstone: bool
) -> None:
    """The copy was not cleaned so far. The tombstone is gone here, or was compared, and goes later."""
    cluster = Cluster(tmp_path)
    ahead(cluster, deletes, keeps_tombstone=keeps_tombstone)
    before = {(key, value) for key, value in cluster.table() if value is not None}
    lose_headers(cluster.here)
    assert await cluster.repair()
    log = cluster.here.log
    assert (log.damaged_ranges(), cluster.refused) == ([], [])
    values = newest_values(log)
    assert values == newest_values(cluster.cleaned.log) == dict(before)
    assert cleaned_twice(log) == before


def newest_values(log: PartitionLog) -> dict[bytes | None, bytes]:
    newest = {key: value for _, key, value in contents(log)}
    return {key: value for key, value in newest.items() if value is not None}


def lose_headers(made: Logs) -> None:
    """The first segment's bytes are zeros, so that nothing tells what was there."""
    path = made.folder / made.files("*.log")[0]
    path.write_bytes(bytes(path.stat().st_size))
    for segment in made.log.segments:
        segment.findings = segment.examine()
        made.log.adopt_findings(segment)
    assert made.log.damaged_ranges()


def copied_with_gaps(cleaned: Logs, path: Path, segments: int) -> Logs:
    """A replica that was added after the cleaning: its active segment has gaps, too."""
    copied = Logs(path, replace(GONE, segment_bytes=100_000))
    for _, batch in sorted(copy_of(cleaned).items()):
        copied.log.append_as_follower(memoryview(bytearray(batch)), NOW)
        if len(copied.log.segments) < segments:
            copied.log.roll(NOW)
    copied.log.set_high_watermark(copied.log.log_end_offset)
    return copied


async def test_a_copy_that_was_made_of_a_cleaned_log_lacks_what_that_one_lacks(tmp_path: Path) -> None:
    """No cleaner has run here. The tombstone was gone when this replica was added, and is in no segment."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 2)
    cleaned = cluster.here
    copied = copied_with_gaps(cleaned, tmp_path / "copied", 3)
    before = newest_values(copied.log)
    cluster.use(copied, cluster.cleaned)
    lose_headers(copied)
    assert await cluster.repair()
    assert (copied.log.damaged_ranges(), cluster.refused) == ([], [])
    assert newest_values(copied.log) == before
    assert cleaned_twice(copied.log) == {*before.items()}


async def test_a_range_behind_which_nothing_is_missing_is_repaired_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    here, other = (Logs(tmp_path / name, GONE) for name in ("here", "other"))
    for made in (here, other):
        made.append(keyed(("a", "1")), keyed(("a", "2")))
        made.log.roll(NOW)
        made.append(keyed(("a", None)), keyed(("b", "1")))
    here.close()
    path = here.folder / here.files("*.log")[0]
    path.write_bytes(path.read_bytes()[:70])
    here.open()
    cluster.use(here, other)
    for segment in here.log.segments:
        segment.findings = segment.examine()
        here.log.adopt_findings(segment)
    files = here.files("*.log")
    assert await cluster.repair()
    assert (here.log.damaged_ranges(), here.files("*.deleted"), here.files("*.log")) == ([], [], files)
    assert contents(here.log) == contents(other.log)


@pytest.mark.parametrize("fetches", range(2, 8))
async def test_a_copy_that_ends_in_the_middle_leaves_no_mixture_of_two_cleanings(tmp_path: Path, fetches: int) -> None:
    """Its first segments took their place. Then a third replica's copy of the range, as it was here, ended the repair,
    and nothing removed the deleted key again."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    before = contents(cluster.here.log)
    whole = Logs(tmp_path / "whole", GONE)
    for _, batch in sorted(copy_of(cluster.here).items()):
        whole.log.append_as_follower(memoryview(bytearray(batch)), NOW)
    whole.log.set_high_watermark(whole.log.log_end_offset)
    lose_headers(cluster.here)

    def go(offset: int) -> None:
        if len(cluster.fetches) >= fetches:
            raise PeerUnreachable("it is gone")

    cluster.fault = go
    if await cluster.repair():
        assert newest_values(cluster.here.log) == newest_values(cluster.cleaned.log)
        return
    assert (cluster.here.files("*.cleaned"), cluster.here.log.compaction) == ([], None)
    cluster.fault = lambda offset: None
    cluster.copies = {3: whole.log}
    assert await cluster.repair()
    assert contents(cluster.here.log) == before


async def test_a_full_volume_is_waited_for_before_the_active_segment_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its indexes were written first, and the log directory went offline because of a repair."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 2)
    copied = copied_with_gaps(cluster.here, tmp_path / "copied", 1)
    cluster.use(copied, cluster.cleaned)
    damage(copied, 0)
    before = len(copied.log.segments)
    with monkeypatch.context() as patched:
        patched.setattr(QuickDisk, "volume_bytes", lambda disk, path: (1 << 40, 0))
        patched.setattr(QuickDisk, "write_file", no_space)
        assert not await cluster.repair()
    assert (len(copied.log.segments), cluster.refused) == (before, [])
    assert await cluster.repair()
    assert newest_values(copied.log) == newest_values(cluster.cleaned.log)


def no_space(disk: QuickDisk, path: str, data: bytes, *, sync: bool) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", path)


@pytest.mark.parametrize("fails_at", range(1, 8))
async def test_a_volume_that_is_full_in_the_middle_of_a_copy_is_waited_for(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may be larger than what is here. The damage stays, and the log directory in use."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    lose_headers(cluster.here)
    before = [each.base_offset for each in cluster.here.log.segments]
    with monkeypatch.context() as patched:
        patched.setattr("tidelog.storage.log.prefix_copy.write_batches", filled(fill_after=fails_at))
        is_done = await cluster.repair()
    log = cluster.here.log
    if not is_done:
        assert [each.base_offset for each in log.segments] == before
        assert log.damaged_ranges()
        assert (log.compaction, log.is_under_cleaning, cluster.here.files("*.cleaned")) == (None, False, [])
    assert cluster.refused == []
    assert await cluster.repair()
    assert newest_values(log) == newest_values(cluster.cleaned.log)


def filled(fill_after: int) -> Callable[..., int]:
    left = fill_after

    def write(segment: Segment, parts: list[CleanedBatch], position: int) -> int:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device", segment.path)
        return write_batches(segment, parts, position)

    return write


async def test_two_replicas_that_are_damaged_in_different_places_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record has a whole copy, but none of the logs is whole. So the range alone is repaired after a while."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 1)
    before = newest_values(cluster.here.log)
    lose_headers(cluster.here)
    damaged = cluster.cleaned.log.segments[2].base_offset

    def refuse(offset: int) -> None:
        if offset >= damaged:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)

    cluster.fault = refuse
    for _ in range(3):
        assert not await cluster.repair()
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    assert await cluster.repair()
    assert (cluster.here.log.damaged_ranges(), cluster.refused) == ([], [])
    assert newest_values(cluster.here.log).items() >= before.items()
    assert not cluster.repairs.whole_copies.waits_since_s


async def test_the_wait_for_a_replica_that_is_damaged_too_begins_anew_after_another_answer(tmp_path: Path) -> None:
    """It may have been away for an hour, and its damage may be a new one, which a third replica repairs soon."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 1)
    lose_headers(cluster.here)
    damaged = cluster.cleaned.log.segments[2].base_offset
    answer: Exception = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)

    def refuse(offset: int) -> None:
        if offset >= damaged:
            raise answer

    cluster.fault = refuse
    assert not await cluster.repair()
    (partition,) = cluster.repairs.whole_copies.waits_since_s
    cluster.repairs.whole_copies.waits_since_s[partition] -= 3600.0
    answer = PeerUnreachable("it is down")
    assert not await cluster.repair()
    answer = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
    assert not await cluster.repair()
    assert cluster.here.log.damaged_ranges()


async def test_a_turn_that_comes_late_is_no_wait_for_the_other_replica(tmp_path: Path) -> None:
    """While other partitions took all copies of whole logs, the wait for one that is damaged, too, ended."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)

    def refuse(offset: int) -> None:
        if offset == 0:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)

    cluster.fault = refuse
    assert not await cluster.repair()
    cluster.repairs._queue.whole_copies = repair_queue.WHOLE_COPIES_MAX
    cluster.repairs.whole_copies.waits_since_s[cluster.partition] -= 3600.0
    assert not await cluster.repair()
    cluster.repairs._queue.whole_copies = 0
    assert not await cluster.repair()
    cluster.fault = lambda offset: None
    assert await cluster.repair()
    assert cluster.table() == WITHOUT_A


@pytest.mark.parametrize("error", [PeerUnreachable("no answer"), KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)])
async def test_a_copy_that_is_under_way_waits_for_the_next_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """After each fetch without an answer in time it began again, and the copy of a large log never came to its end."""
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_PATIENCE_S", 60.0)
    monkeypatch.setattr(whole_copies, "COPY_PAUSE_S", 0.0)
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    lose_headers(cluster.here)
    offsets: list[int] = []

    def fail_each_second(offset: int) -> None:
        offsets.append(offset)
        if offset > 0 and len(offsets) % 2:
            raise error

    cluster.fault = fail_each_second
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert offsets.count(0) == 3, "the range, then the copy, whose start comes last"
    assert len(offsets) > 6


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


async def test_a_node_that_stops_waits_for_no_scan_of_a_whole_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of a log of 100 GB took minutes, and a stop waited for its end."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    lose_headers(cluster.here)
    reads = 0

    def read(*arguments: Any) -> Iterator[Any]:
        nonlocal reads
        for number in range(1000):
            if number == 3:
                cluster.repairs._is_closed = True
            reads += 1
            yield b"", [], 0

    monkeypatch.setattr(gap_scan, "chunks", read)
    await cluster.repair()
    assert reads <= 4 * len(cluster.here.log.segments)


async def test_a_segment_of_which_the_other_replica_has_nothing_is_passed_over(tmp_path: Path) -> None:
    """Nothing was left in it. A reader of an offset after its first one was refused for ever, without any damage."""
    here, other = (Logs(tmp_path / name, replace(GONE, segment_bytes=1 << 20)) for name in ("here", "other"))
    for made in (here, other):
        made.append(keyed(("a", "1")))
        made.log.roll(NOW)
        made.append(keyed(("b", "1"), ("c", "1"), ("d", "1")))
        made.log.roll(NOW)
        made.append(keyed(("b", "2"), ("c", "2"), ("d", "2")))
    path = here.folder / here.files("*.log")[1]
    path.write_bytes(bytes(path.stat().st_size))
    here.log.explain_gaps(here.log.log_end_offset)
    here.config = replace(here.config, cleanup_policy=frozenset({"delete"}))
    here.log.set_config(here.config)
    scrub_all(here.log)
    ((segment, damaged),) = here.log.damaged_ranges()
    work = here.log.repair_of(segment, damaged)
    work.accept(memoryview(fetch(other.log, 4)))
    check = work.finish()
    check.run()
    assert here.log.finish_repair(check)
    for log in (here.log, here.close_and_open()):
        assert (log.damaged_ranges(), log.segments[1].size_bytes) == ([], 0)
        for offset in range(1, 7):
            assert fetch(log, offset) == fetch(other.log, 4)
