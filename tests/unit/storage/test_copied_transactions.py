"""A copy brings back aborted records that a cleaner had removed here. They stay aborted.

Also if the process ends before the log knows it: a start behind the cleaning has noted nothing of their transaction.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.test_repair_parts import scrub_all
from tests.unit.storage.batches import NOW, Logs, QuickDisk, marker
from tests.unit.storage.cleaning import clean
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_damage import copy_of, repair_range
from tests.unit.storage.test_damaged_transactions import committed
from tests.unit.storage.test_prefix_copy import GONE, copy_prefix, damage
from tidelog.storage.files.checkpoints import TRANSACTION_SUMS_FILE, decode_transaction_sums
from tidelog.storage.files.disk import Buffer
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.repair import NoSpace, RangeRepair, RepairCheck
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.log.verification import LogFacts, StoppedLog
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords, united

SEVEN: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
CONFIG = replace(GONE, segment_bytes=1000)


def large(key: str) -> memoryview:
    return keyed((key, "v" * 600))


def replicas(tmp_path: Path, *keys: str) -> tuple[Logs, Logs]:
    """The first was cleaned, and then scanned by a start. The other has the aborted record, behind one of each key.

    The abort is in the third segment.
    """
    made, other = (Logs(tmp_path / name, CONFIG) for name in ("made", "other"))
    for each in (made, other):
        each.append(*(keyed((key, "1")) for key in keys))
        each.append(keyed(("x", "aborted"), base_sequence=0, **SEVEN), large("q"))
        each.log.roll(NOW)
        each.append(large("r"))
        each.log.roll(NOW)
        each.append(marker(abort=True), from_client=False)
        each.append(keyed(("y", "1"), base_sequence=1, **SEVEN))
        each.append(marker(abort=False), large("s"), from_client=False)
        each.log.roll(NOW)
        each.append(large("t"))
    clean(made.log)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert log.aborted_transactions(0, log.log_end_offset) == []
    log.flush()
    made.directory.write_checkpoints()
    return made, other


def begin_repair(made: Logs) -> RangeRepair:
    damage(made, 0)
    ((segment, damaged),) = made.log.damaged_ranges()
    work = made.log.repair_of(segment, damaged)
    work.lacks_below, work.knows_gaps = 0, True  # the cleaner's checkpoint was lost
    return work


def copy_range(work: RangeRepair, other: Logs) -> RepairCheck:
    for _, batch in sorted(copy_of(other).items()):
        if not work.is_complete:
            work.accept(memoryview(batch))
    return work.finish()


def sums_of(made: Logs) -> dict[int, tuple[int, int]]:
    return decode_transaction_sums((made.folder / TRANSACTION_SUMS_FILE).read_bytes())


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("machine_ran_on", [False, True])
def test_they_stay_aborted_where_the_process_ends_during_the_repair(
    tmp_path: Path, is_finished: bool, machine_ran_on: bool
) -> None:
    made, other = replicas(tmp_path)
    check = copy_range(begin_repair(made), other)
    check.run()
    indexes = {name: (made.folder / name).read_bytes() for name in made.files("*.txnindex")}
    if is_finished:
        assert made.log.finish_repair(check)
        assert 0 not in committed(made.log)
        for name in set(made.files("*.txnindex")) - set(indexes):
            (made.folder / name).unlink()  # it was not synced
    made.kill()
    log = made.open(machine_ran_on=machine_ran_on)
    assert log.damaged_ranges() == []
    assert 0 not in committed(log)
    assert [row[:2] for row in log.aborted_transactions(0, log.log_end_offset)] == [(7, 0)]


def test_a_start_trusts_the_indexes_again_after_the_repair(tmp_path: Path) -> None:
    made, other = replicas(tmp_path)
    check = copy_range(begin_repair(made), other)
    assert [size for size, _ in sums_of(made).values()] == [-1, -1, -1]
    check.run()
    assert made.log.finish_repair(check)
    made.log.flush()
    assert [(base, size) for base, (size, _) in sums_of(made).items()] == [(3, 34)]
    made.kill()
    assert 0 not in committed(made.open(machine_ran_on=True))


@pytest.mark.parametrize("way", ["emptied", "zeros"])
def test_a_segment_that_is_damaged_at_the_end_of_the_repair_is_damage(tmp_path: Path, way: str) -> None:
    """It left storage as a CorruptIndex, and what the log knew of producers and transactions was not made anew."""
    made, other = replicas(tmp_path)
    check = copy_range(begin_repair(made), other)
    check.run()
    path = made.folder / made.files("*.log")[0]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(bytes(size if way == "zeros" else 0))
    assert made.log.finish_repair(check)
    assert made.log.damaged_ranges()
    for _ in range(5):
        for segment, damaged in made.log.damaged_ranges():
            repair_range(made.log, segment, damaged, copy_of(other))
    assert made.log.damaged_ranges() == []
    assert [row[:2] for row in made.log.aborted_transactions(0, made.log.log_end_offset)] == [(7, 0)]
    assert 0 not in committed(made.log)


def test_a_flush_that_runs_meanwhile_does_not_write_the_checksums_from_before(tmp_path: Path) -> None:
    made, other = replicas(tmp_path)
    log, work = made.log, begin_repair(made)
    made.append(keyed(("z", "aborted"), base_sequence=2, **SEVEN), marker(abort=True), from_client=False)
    log.roll(NOW)
    task = log.begin_flush()
    assert task.sums is not None
    copy_range(work, other)
    task.run()
    log.finish_flush(task)
    assert {size for size, _ in sums_of(made).values()} == {-1}
    made.kill()
    assert 0 not in committed(made.open(machine_ran_on=True))


def test_no_byte_is_copied_where_there_is_no_space_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = replicas(tmp_path)
    work, write = begin_repair(made), QuickDisk.write_file
    path = made.folder / made.files("*.log")[0]
    before = path.read_bytes()

    def refuse(disk: QuickDisk, path: str, data: Buffer, *, sync: bool) -> None:
        if TRANSACTION_SUMS_FILE in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(disk, path, data, sync=sync)

    monkeypatch.setattr(QuickDisk, "write_file", refuse)
    with pytest.raises(NoSpace):
        copy_range(work, other)
    assert path.read_bytes() == before
    monkeypatch.undo()
    check = copy_range(work, other)
    check.run()
    assert made.log.finish_repair(check)
    assert 0 not in committed(made.log)


def test_the_device_knows_before_the_first_byte_that_the_indexes_are_not_to_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sync a loss of power may keep the copied bytes, and the checksums from before."""
    made, other = replicas(tmp_path)
    work = begin_repair(made)
    write, rename, sync = QuickDisk.write_file, QuickDisk.rename, QuickDisk.sync_directory
    put = RangeRepair._put
    done: list[str] = []

    def note_write(disk: QuickDisk, path: str, data: Buffer, *, sync: bool) -> None:
        if TRANSACTION_SUMS_FILE in path:
            done.append("is synced" if sync else "is not synced")
        write(disk, path, data, sync=sync)

    def note_rename(disk: QuickDisk, source: str, target: str) -> None:
        done.append("is in place")
        rename(disk, source, target)

    def note_directory(disk: QuickDisk, path: str) -> None:
        done.append("has its name")
        sync(disk, path)

    def note_put(repair: RangeRepair, batch: memoryview) -> None:
        done.append("a byte is copied")
        put(repair, batch)

    monkeypatch.setattr(QuickDisk, "write_file", note_write)
    monkeypatch.setattr(QuickDisk, "rename", note_rename)
    monkeypatch.setattr(QuickDisk, "sync_directory", note_directory)
    monkeypatch.setattr(RangeRepair, "_put", note_put)
    work.accept(memoryview(copy_of(other)[0]))
    assert done == ["is synced", "is in place", "has its name", "a byte is copied"]


def test_the_repair_of_another_range_says_nothing_for_the_indexes_behind_a_copy_that_was_left(tmp_path: Path) -> None:
    made, other = replicas(tmp_path)
    log = made.log
    damage(made, 0)
    damage(made, 0, segment=1)
    (first, first_damage), (second, second_damage) = log.damaged_ranges()
    work = log.repair_of(first, first_damage)
    work.lacks_below, work.knows_gaps = 0, True
    while not work.is_complete:
        work.accept(memoryview(copy_of(other)[work.next_offset]))
    repair_range(log, second, second_damage, copy_of(other), lacks_below=0)
    assert [damaged for _, damaged in log.damaged_ranges()] == [first_damage]
    made.append(large("u"))
    log.roll(NOW)
    log.flush()
    made.kill()
    log = made.open(machine_ran_on=True)
    assert log.damaged_ranges() == []
    assert 0 not in committed(log)


def test_they_stay_aborted_where_the_topic_is_not_compacted_any_more(tmp_path: Path) -> None:
    """No cleaner was in the segment with the abort, but the one before had lost the records of the transaction."""
    made, other = replicas(tmp_path)
    made.config = replace(CONFIG, cleanup_policy=frozenset({"delete"}))
    made.log.set_config(made.config)
    made.log.explain_gaps(made.log.cleaned_offset)
    made.kill()
    log = made.open(machine_ran_on=True)
    damage(made, 0)
    for segment in list(log.segments)[1:]:
        segment.may_have_gaps = False
    ((segment, damaged),) = log.damaged_ranges()
    assert segment.may_have_gaps
    repair_range(log, segment, damaged, copy_of(other), lacks_below=0)
    assert 0 not in committed(log)


def test_they_stay_aborted_where_a_stopped_node_was_repaired(tmp_path: Path) -> None:
    made, other = replicas(tmp_path)
    damage(made, 0)
    made.close()
    end = made.log.log_end_offset
    facts = LogFacts(is_clean=True, recovery_point=end, high_watermark=end, is_compacted=True, cleaned_offset=0)
    stopped = StoppedLog(made.disk, str(made.folder), facts)
    list(stopped.verify())
    ((segment, damaged),) = stopped.damage()
    work = stopped.repair_of(segment, damaged)
    work.lacks_below, work.knows_gaps = 0, True
    assert stopped.finish_repair(copy_range(work, other))
    assert list(stopped.verify()) == []
    stopped.release()
    log = made.open()
    assert log.damaged_ranges() == []
    assert 0 not in committed(log)


@pytest.mark.parametrize("when", ["the copy", "its check", "the end"])
def test_they_stay_aborted_where_a_scrub_of_the_copied_bytes_ends_before_the_repair(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scrub found no damage, and took the range for whole: the indexes behind it were never made anew."""
    made, other = replicas(tmp_path)
    log, work = made.log, begin_repair(made)
    work.accept(memoryview(copy_of(other)[0]))
    if when == "the copy":
        scrub_all(log)
    while not work.is_complete:
        work.accept(memoryview(copy_of(other)[work.next_offset]))
    check = work.finish()
    if when == "its check":
        scrub_all(log)
    check.run()
    if when == "the end":
        scrub_all(log)
    assert [damaged for _, damaged in log.damaged_ranges()] == [work.damage]
    assert "does not find this any more" not in caplog.text
    assert log.finish_repair(check)
    assert log.damaged_ranges() == []
    assert 0 not in committed(log)
    scrub_all(log)
    assert log.damaged_ranges() == []


def test_a_scrub_that_has_begun_before_a_range_is_filled_says_nothing_of_it(tmp_path: Path) -> None:
    """It may have read half of the copy."""
    made, other = replicas(tmp_path)
    work = begin_repair(made)
    scrub = Scrub(made.log, work.segment)
    generation = work.segment.generation
    work.accept(memoryview(copy_of(other)[0]))
    assert work.segment.generation > generation
    scrub.run(10**9)
    assert not scrub.finish()
    assert [damaged for _, damaged in made.log.damaged_ranges()] == [work.damage]


def test_in_a_segment_that_is_written_anew_nothing_is_filled(tmp_path: Path) -> None:
    """The ranges are not where they were in the file before."""
    segment = replicas(tmp_path)[0].log.segments.first
    ranges = [DamagedRange(at, at + 10, at, at + 2, "test") for at in (0, 20, 40)]
    for each in (*ranges, ranges[1]):
        segment.begin_to_fill(each)
    segment.end_filling(ranges[1], is_written_anew=False)
    assert segment.filled == (ranges[0], ranges[2])
    segment.end_filling(ranges[0], is_written_anew=True)
    assert not segment.filled


def test_damage_that_shares_offsets_is_one_range_up_to_the_last_of_its_ends() -> None:
    first, inside, across = (
        DamagedRange(0, 100, 0, 10, "a"), DamagedRange(20, 50, 2, 5, "b"), DamagedRange(80, 200, 8, 20, "c"),
    )  # fmt: skip
    (both,) = united([inside, first])
    assert both[:4] == (0, 100, 0, 10)
    (both,) = united([across, first, inside])
    assert both[:4] == (0, 200, 0, 20)


def test_a_range_that_a_repair_has_filled_and_left_is_repaired_again(tmp_path: Path) -> None:
    made, other = replicas(tmp_path)
    log = made.log
    begin_repair(made).accept(memoryview(copy_of(other)[0]))
    scrub_all(log)
    ((segment, damaged),) = log.damaged_ranges()
    repair_range(log, segment, damaged, copy_of(other), lacks_below=0)
    assert log.damaged_ranges() == []
    assert 0 not in committed(log)


def test_they_stay_aborted_where_another_range_is_repaired_before_a_repair_goes_on(tmp_path: Path) -> None:
    """The first repair ended without space. The other one took the records that it had copied for whole."""
    made, other = replicas(tmp_path, "o", "p")
    log, copy = made.log, copy_of(other)
    damage(made, 2)
    ((segment, ending),) = log.damaged_ranges()
    work = log.repair_of(segment, ending)
    work.lacks_below, work.knows_gaps = 0, True
    work.accept(memoryview(copy[2]))
    damage(made, 0)
    repair_range(log, *log.damaged_ranges()[0], copy, lacks_below=0)
    scrub_all(log)
    assert log.damaged_ranges() == [(segment, ending)]
    assert 2 not in committed(log)
    repair_range(log, segment, ending, copy, lacks_below=0)
    assert log.damaged_ranges() == []
    assert 2 not in committed(log)
    assert segment.filled == ()


def hide_the_abort(made: Logs) -> Path:
    path = made.folder / made.files("*.log")[2]
    data = bytearray(path.read_bytes())
    data[64] ^= 255
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("loss", ["a byte", "the file"])
def test_what_is_damaged_behind_a_whole_copy_hides_its_transactions_though_nothing_had_read_it(
    tmp_path: Path, loss: str
) -> None:
    made, other = replicas(tmp_path)
    log = made.log
    damage(made, 0)
    path = hide_the_abort(made)
    if loss == "the file":
        log.segments.release()
        path.unlink()
    assert len(log.damaged_ranges()) == 1
    copy_prefix(log, other.log, 0)
    ((segment, damaged),) = log.damaged_ranges()
    assert damaged.first_offset == 3
    with pytest.raises(DamagedRecords):
        stable_bound(log, 0)
    repair_range(log, segment, damaged, copy_of(other), lacks_below=0)
    assert stable_bound(log, 0) == log.log_end_offset
    assert 0 not in committed(log)


def damaged_log(made: Logs) -> None:
    damage(made, 0)
    hide_the_abort(made)
    for each in made.log.segments:
        each.findings = each.examine()
        made.log.adopt_findings(each)


def no_more_damaged_log(made: Logs) -> None:
    damage(made, 0)
    hide_the_abort(made)


@pytest.mark.parametrize("prepare", [damaged_log, no_more_damaged_log])
def test_a_start_after_a_whole_copy_scans_for_the_damage_that_hides_its_transactions(
    tmp_path: Path, prepare: Callable[[Logs], None]
) -> None:
    made, other = replicas(tmp_path)
    prepare(made)
    copy_prefix(made.log, other.log, 0)
    made.kill()
    log = made.open(machine_ran_on=True)
    with pytest.raises(DamagedRecords):
        stable_bound(log, 0)
    ((segment, damaged),) = log.damaged_ranges()
    repair_range(log, segment, damaged, copy_of(other), lacks_below=0)
    assert 0 not in committed(log)
