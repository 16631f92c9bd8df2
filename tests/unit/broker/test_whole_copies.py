"""Copies of whole logs: what they do not mix, and what they do not hold up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.test_thinned_repairs import WITHOUT_A, Cluster, ahead, lose_headers, newest_values, uncleaned
from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_damage import copy_of
from tests.unit.storage.test_prefix_copy import GONE, damage
from tidelog.broker.replicas import repair_queue, whole_copies
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, decode_leader_epochs
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.segments.append import UnexplainedGap


def has_a(log: Any) -> bool:
    return any(key == b"a" and value is not None for _, key, value in contents(log))


@pytest.mark.parametrize("is_cleaned_first", [True, False])
@pytest.mark.parametrize("change", ["a start", "a reassignment away and back", "an unclean election"])
@pytest.mark.parametrize("number", [2, 4])
async def test_a_copy_begins_again_where_the_other_replica_has_another_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, change: str, is_cleaned_first: bool
) -> None:
    """It came back without its directory, and was filled again from another one. The record of a deleted key was in one
    part of the copy, and its tombstone gone from the other."""
    monkeypatch.setattr(whole_copies, "COPY_PAUSE_S", 0.0)
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    before = newest_values(cluster.here.log)
    lose_headers(cluster.here)
    logs = [cleaned_further(tmp_path).log, cluster.cleaned.log]
    first, second = logs if is_cleaned_first else reversed(logs)
    cluster.brokers[2] = SimpleNamespace(incarnation_id=b"first")
    replicas = [2]
    cluster.repairs.others = lambda partition: replicas
    high_watermarks = [second.log_end_offset]
    copied = 0

    def go(offset: int) -> None:
        nonlocal copied
        if cluster.here.log.compaction is None:
            return
        copied += 1
        if copied == 1:
            cluster.copies[2] = first
        elif copied > number + 1:
            replicas[:] = [2]
        elif copied == number + 1:
            cluster.copies[2] = second
            if change == "a start":
                cluster.brokers[2] = SimpleNamespace(incarnation_id=b"second")
            elif change == "an unclean election":
                high_watermarks[:] = [second.log_end_offset - 1, 0]
            else:
                replicas.clear()
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)

    cluster.fault = go
    cluster.high_watermark_of = lambda source: high_watermarks[-1]  # type: ignore[method-assign]
    await cluster.repair()
    assert cluster.here.log.damaged_ranges()
    replicas[:], high_watermarks[:] = [2], [second.log_end_offset]
    assert await cluster.repair()
    assert cluster.here.log.damaged_ranges() == []
    assert newest_values(cluster.here.log) == before


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


@pytest.mark.parametrize("number", range(2, 8))
async def test_the_other_replica_may_be_cleaned_during_the_copy(tmp_path: Path, number: int) -> None:
    """The record of a deleted key was in what had been copied before, and the tombstone gone from the rest."""
    cluster = Cluster(tmp_path)
    ahead(cluster, 3)
    before = newest_values(cluster.here.log)
    lose_headers(cluster.here)
    copied = 0

    def clean_other(offset: int) -> None:
        nonlocal copied
        if cluster.here.log.compaction is None:
            return
        copied += 1
        if copied != number:
            return
        for _ in range(3):
            cluster.cleaned.append(keyed(("z", "1")))
            cluster.cleaned.log.roll(NOW)
            clean(cluster.cleaned.log)
        cluster.cleaned.append(keyed(("z", "1")))

    cluster.fault = clean_other
    assert await cluster.repair()
    assert (cluster.here.log.damaged_ranges(), cluster.refused) == ([], [])
    assert newest_values(cluster.here.log) == before
    assert not has_a(cluster.cleaned.log) or copied < number


@pytest.mark.parametrize("how", ["it sends damaged bytes", "it has found damage late", "its log start has moved"])
async def test_a_copy_that_was_not_whole_in_the_end_is_tried_again(tmp_path: Path, how: str) -> None:
    """The range alone was repaired at once, also where the copy had taken longer than the wait."""
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    fetch, now_s, failures = cluster.fetch, 0.0, 0
    cluster.repairs.whole_copies._now_s = lambda: now_s

    async def fail(partition: object, source: int, offset: int, **options: Any) -> bytes:
        nonlocal now_s, failures
        data = await fetch(partition, source, offset, **options)
        copy: Any = cluster.here.log.compaction
        if failures or copy is None or not copy.data:
            return data
        failures, now_s = 1, 2 * whole_copies.WHOLE_COPY_WAIT_S
        if how == "it sends damaged bytes":
            return data[:64] + bytes([data[64] ^ 1]) + data[65:]
        code = ErrorCode.KAFKA_STORAGE_ERROR if how == "it has found damage late" else ErrorCode.OFFSET_OUT_OF_RANGE
        raise KafkaError(code)

    cluster.fetch = cluster.repairs.fetch = fail  # type: ignore[method-assign]
    assert not await cluster.repair()
    assert failures
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges()) == (WITHOUT_A, [])


async def test_a_log_that_was_cut_while_its_gaps_were_looked_for_is_replaced_up_to_its_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    damage(cluster.here, 1)
    find_gaps = cluster.repairs.find_gaps

    async def find_before_the_cut(log: Any, repair: Any) -> int:
        await find_gaps(log, repair)
        return int(log.log_end_offset) + 10

    cluster.repairs.find_gaps = find_before_the_cut
    cluster.here.log.roll(NOW)
    assert not cluster.here.log.segments.active.size_bytes
    assert await cluster.repair()
    assert (cluster.table(), cluster.here.log.damaged_ranges(), cluster.refused) == (WITHOUT_A, [], [])


def over_two_epochs(path: Path) -> Logs:
    """Leader epoch 1 begins behind the tombstone of k."""
    made = Logs(path, GONE)
    made.append(keyed(("k", "1"), ("c", "1")), keyed(("x", "1")), keyed(("k", None)))
    made.log.assign_epoch(1)
    made.append(keyed(("x", "2")), keyed(("e", "1")), epoch=1)
    made.log.roll(NOW)
    return made


async def test_a_replica_that_was_copied_from_a_cleaned_one_has_other_starts_of_leader_epochs(tmp_path: Path) -> None:
    """Another replica's copy was refused for its epochs, and the range alone was repaired: a deleted key was back."""
    cluster = Cluster(tmp_path)
    leader, other, here = over_two_epochs(tmp_path / "l"), over_two_epochs(tmp_path / "o"), Logs(tmp_path / "h", GONE)
    for _ in range(3):
        for made in (leader, other):
            made.append(keyed(("z", "1")), epoch=1)
            made.log.roll(NOW)
        clean(leader.log)
    for _, batch in sorted(copy_of(leader).items()):
        here.log.append_as_follower(memoryview(bytearray(batch)), NOW)
        if len(here.log.segments) < 3:
            here.log.roll(NOW)
    here.log.set_high_watermark(here.log.log_end_offset)
    assert [*here.log.leader_epochs] == [(0, 0), (1, 2)]
    here.log.flush()
    cluster.use(here, other)
    before = newest_values(here.log)
    lose_headers(here)
    assert await cluster.repair()
    filed = decode_leader_epochs((here.folder / LEADER_EPOCH_FILE).read_bytes())
    assert [*filed] == [(0, 0), (1, 4)], "else whole batches may count as damaged after a kill"
    for log in (here.log, here.close_and_open()):
        for segment in log.segments:
            segment.findings = segment.examine()
            log.adopt_findings(segment)
        assert (newest_values(log), log.damaged_ranges()) == (before, [])
        assert [*log.leader_epochs] == [(0, 0), (1, 4)]


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("appended", ["nothing", "less", "more"])
async def test_a_replica_that_has_not_truncated_after_an_unclean_election_does_not_give_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool, appended: str
) -> None:
    """Its cleaner had removed a record because of a later one, which the election took from this log."""
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    cluster = Cluster(tmp_path)
    here, other = (Logs(tmp_path / name, GONE) for name in ("elected", "other"))
    for made in (here, other):
        made.append(keyed(("k", "1"), ("c", "1")), keyed(("d", None)), keyed(("b", "1")))
        made.log.roll(NOW)
        made.append(keyed(("z", "1")))
        made.log.roll(NOW)
    other.append(keyed(("k", "2")))
    other.log.roll(NOW)
    for _ in range(3):
        other.append(keyed(("z", "1")))
        other.log.roll(NOW)
        clean(other.log)

    def append(count: int) -> None:
        for _ in range(count):
            here.log.append_as_leader(memoryview(bytearray(keyed(("z", "1")))), 1, NOW)
        here.log.set_high_watermark(here.log.log_end_offset)
        cluster.partition.high_watermark = here.log.high_watermark

    missing = other.log.log_end_offset - here.log.log_end_offset
    append({"nothing": 0, "less": missing - 1, "more": missing + 1}[appended])
    cluster.use(here, other)
    cluster.partition.leads = leads
    cluster.in_sync = set()
    damage(here, 1)
    await cluster.repair()
    await cluster.repair()
    if not leads and appended != "more":  # its leader may still send the same
        assert here.log.damaged_ranges()
        append(missing)
        await cluster.repair()
    assert here.log.damaged_ranges() == []
    assert (b"k", b"1") in cluster.table()


def with_replica_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The only other replica is not in sync, and lacks what was appended last."""
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    cluster = Cluster(tmp_path)
    for _ in range(3):
        cluster.here.append(keyed(("y", "1")))
    cluster.partition.leads, cluster.partition.high_watermark = True, cluster.here.log.high_watermark
    cluster.in_sync = set()
    return cluster


async def test_a_replica_that_is_not_in_sync_and_lags_behind_gives_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = with_replica_behind(tmp_path, monkeypatch)
    damage(cluster.here, 1)
    assert await cluster.repair()
    assert cluster.table() == {*WITHOUT_A, (b"y", b"1")}


@pytest.mark.parametrize("change", ["a start", "a truncation"])
async def test_what_the_check_of_a_replica_has_seen_holds_until_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The scan for gaps lies between them, and may be long."""
    cluster = with_replica_behind(tmp_path, monkeypatch)
    cluster.brokers[2] = SimpleNamespace(incarnation_id=b"first")
    damage(cluster.here, 1)
    find_gaps, ask, changes = cluster.repairs.find_gaps, cluster.repairs.ask, 0

    async def start_again(*arguments: Any) -> int:
        cluster.brokers[2] = SimpleNamespace(incarnation_id=b"second")
        return int(await find_gaps(*arguments))

    async def truncated(partition: Any, source: int, offset: int, **options: Any) -> Any:
        nonlocal changes
        answer = await ask(partition, source, offset, **options)
        if options.get("bytes_max") == 1 and offset > 0:
            changes += 1
            answer.records = None
        return answer

    began = []
    monkeypatch.setattr(PrefixCopy, "take_back", lambda copy: began.append(copy))
    if change == "a start":
        cluster.repairs.find_gaps = start_again
        await cluster.repair()
        assert len(began) == 1
    else:
        cluster.repairs.ask = truncated
        await cluster.repair()
        assert changes == 1
    assert cluster.table() != {*WITHOUT_A, (b"y", b"1")}, "not the other replica's copy"


async def test_a_replica_that_is_not_in_sync_and_is_filled_again_during_the_copy_does_not_give_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unclean election had cut it, and its cleaner then removed a record because of one that is not here."""
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)
    cluster = Cluster(tmp_path)
    here, before, later = (Logs(tmp_path / name, GONE) for name in ("elected", "before", "later"))
    for made in (here, before, later):
        first = {0: [keyed(("c", "1")), keyed(("d", None)), keyed(("b", "1"))], 1: [keyed(("k", "1"), ("e", "1"))]}
        for number in range(4):
            made.append(*first.get(number, []), keyed((f"{number}", "x" * 900)), keyed(("y", None)))
            made.log.roll(NOW)
    later.log.assign_epoch(1)
    later.append(keyed(("k", "2")), epoch=1)
    later.log.roll(NOW)
    for number in range(3):
        for made in (here, before, later):
            made.append(keyed(("z", "1")), epoch=1 if made is later else 0)
            made.log.roll(NOW)
            if made is not here or not number:
                clean(made.log)
    assert (b"k", b"1") not in {(key, value) for _, key, value in contents(later.log)}
    cluster.use(here, before)
    cluster.partition.leads, cluster.partition.high_watermark = True, here.log.high_watermark
    cluster.in_sync = set()
    lose_headers(here)

    def cut(offset: int) -> None:
        copy: Any = here.log.compaction
        if copy is not None and copy._copied:
            cluster.copies[2] = later.log

    cluster.fault = cut
    await cluster.repair()
    assert cluster.copies[2] is later.log
    assert (b"k", b"1") in cluster.table()
    assert here.log.compaction is None
    assert here.files("*.cleaned") == []


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
    cluster.copies[3] = uncleaned(tmp_path).log
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
