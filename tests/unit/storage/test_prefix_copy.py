"""A replica whose cleaner lags takes another one's copy as a whole where a part of it would bring deleted keys back."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk, marker, read
from tests.unit.storage.cleaning import begin, clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tests.unit.storage.test_damage import copy_of, repair_range
from tests.unit.storage.test_stray_cleanings import Killed, Mortal
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.files.checkpoints import (
    CLEANER_OFFSET_FILE,
    OffsetCheckpoints,
)
from tidelog.storage.files.disk import DirectoryEntry
from tidelog.storage.log import swap
from tidelog.storage.log.compaction import CleaningFailed, Compaction
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.repair import NoSpace, OtherCleaning
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords
from tidelog.storage.segments.reader import ColdRead, headers

GONE = replace(CONFIG, delete_retention_ms=0, verifies_transactions=False)
Appends = Callable[[Logs], None]


def fetch(log: PartitionLog, offset: int) -> bytes:
    while True:
        try:
            return b"".join(bytes(region) for region in log.read(offset, 500, log.log_end_offset).regions)
        except ColdRead as cold:
            cold.warm()


def fetch_all(copy: PrefixCopy, other: PartitionLog) -> None:
    """Until its segments are ready to take their places."""
    while not copy._ready:
        copy.data = fetch(other, copy.wants_from) if copy.wants_from >= 0 else b""
        copy.run()
        assert copy._ready or copy.advance()


def copy_prefix(log: PartitionLog, other: PartitionLog, number: int) -> PrefixCopy:
    copy = PrefixCopy(log, log.segments[number], NOW)
    to_end(copy, other)
    return copy


def to_end(copy: PrefixCopy, other: PartitionLog) -> None:
    while True:
        if copy.wants_from >= 0:
            copy.data = fetch(other, copy.wants_from)
        copy.run()
        if not copy.advance():
            return


def damage(made: Logs, batch: int, segment: int = 0) -> None:
    """Change a byte of a batch's records and find it."""
    path = made.folder / made.files("*.log")[segment]
    data = bytearray(path.read_bytes())
    position = [position for position, _ in iter_headers(bytes(data))][batch]
    data[position + 64] ^= 255
    path.write_bytes(data)
    for each in made.log.segments:
        each.findings = each.examine()
        made.log.adopt_findings(each)
    assert made.log.damaged_ranges()


def replicas(tmp_path: Path, append: Appends, disk: QuickDisk | None = None) -> tuple[Logs, Logs]:
    """The first has never been cleaned; in the other every tombstone and marker that may go has gone."""
    lagging, cleaned = Logs(tmp_path / "lagging", GONE, disk), Logs(tmp_path / "cleaned", GONE)
    for made in (lagging, cleaned):
        append(made)
        made.log.roll(NOW)
    for _ in range(3):
        for made in (lagging, cleaned):
            made.append(keyed(("z", "1")))
            made.log.roll(NOW)
        clean(cleaned.log)
    return lagging, cleaned


def deletes_a(made: Logs) -> None:
    made.append(keyed(("a", "1"), ("c", "1")), keyed(("a", None)), keyed(("b", "1")))


def deletes_a_in_a_batch(made: Logs) -> None:
    made.append(keyed(("a", "1")), keyed(("a", None), ("c", "1")), keyed(("b", "1")))


def deletes_a_last(made: Logs) -> None:
    made.append(keyed(("a", "1")), keyed(("b", "1")))
    made.log.roll(NOW)
    made.append(keyed(("c", "1")), keyed(("a", None)))


@pytest.mark.parametrize(
    ("append", "place"), [(deletes_a, (1, 0)), (deletes_a_in_a_batch, (1, 0)), (deletes_a_last, (1, 1))]
)
def test_a_deleted_key_does_not_come_back(tmp_path: Path, append: Appends, place: tuple[int, int]) -> None:
    """The only copy of the tombstone that is left is the damaged one, and the record that it deletes is whole here."""
    lagging, cleaned = replicas(tmp_path, append)
    damage(lagging, *place)
    log = lagging.log
    ((segment, damaged),) = log.damaged_ranges()
    work = log.repair_of(segment, damaged)
    work.lacks_below = log.cleaned_offset
    with pytest.raises(OtherCleaning):  # noqa: PT012
        for offset in sorted(copy_of(cleaned)):
            if offset >= damaged.first_offset:
                work.accept(memoryview(copy_of(cleaned)[offset]))
    copy_prefix(log, cleaned.log, place[1])
    assert log.damaged_ranges() == []
    expected = {(key, value) for _, key, value in contents(cleaned.log)}
    assert {(key, value) for _, key, value in contents(log)} == expected == {(b"b", b"1"), (b"c", b"1"), (b"z", b"1")}
    log = lagging.close_and_open()
    assert not [each for each in log.segments if each.examine().damage]
    clean(log)
    assert {(key, value) for _, key, value in contents(log)} == expected
    assert lagging.files("*.cleaned") == lagging.files("*.swap") == []


@pytest.mark.parametrize("is_whole_segment", [False, True])
def test_a_read_before_damage_of_a_cleaned_log_says_so(tmp_path: Path, is_whole_segment: bool) -> None:
    """The answer was empty, again and again: the cleaner had removed all between the offset and the damage."""
    made = Logs(tmp_path, GONE)
    made.append(keyed(("a", "1")), keyed(("b", "1")), *([] if is_whole_segment else [keyed(("c", "1"))]))
    made.log.roll(NOW)
    made.append(keyed(("a", "2")))
    made.log.roll(NOW)
    clean(made.log)
    segment = made.log.segments.first
    _, header = next(headers(segment))
    assert header.base_offset == 1
    segment.set_damage((DamagedRange(0, header.size_bytes, 1, 2, "its leader epoch is another one"),))
    with pytest.raises(DamagedRecords):
        read(made.log, 0, 1000, made.log.log_end_offset)


def test_a_read_without_room_for_the_whole_batches_before_damage_is_empty(tmp_path: Path) -> None:
    """It raised the damage behind them. In a fetch of several partitions the next one has the room that is left."""
    made = Logs(tmp_path, GONE)
    made.append(*(keyed((key, "1")) for key in "abc"))
    sizes = [header.size_bytes for _, header in headers(made.log.segments.first)]
    made.log.roll(NOW)
    made.log.segments.first.set_damage((DamagedRange(sum(sizes[:2]), sum(sizes), 2, 3, "the CRC is wrong"),))
    for offset in range(2):
        assert made.log.read(offset, sizes[0] - 1, 3, min_one_batch=False) == ([], 0, offset)
        assert read(made.log, offset, sizes[0], 3).next_offset == offset + 1
    with pytest.raises(DamagedRecords):
        made.log.read(2, sizes[0] - 1, 3, min_one_batch=False)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_is_whole_in_the_other_copy_is_repaired_alone(tmp_path: Path, number: int) -> None:
    """Also where this log has the same gaps: it was copied from a cleaned one."""
    _, cleaned = replicas(tmp_path, deletes_a)
    copied = Logs(tmp_path / "copied", GONE)
    for offset, batch in sorted(copy_of(cleaned).items()):
        copied.log.append_as_follower(memoryview(bytearray(batch)), NOW)
        if offset == 3:
            copied.log.roll(NOW)
    before = contents(copied.log)
    damage(copied, number % 2, segment=number // 2)
    ((segment, damaged),) = copied.log.damaged_ranges()
    repair_range(copied.log, segment, damaged, copy_of(cleaned), lacks_below=copied.log.cleaned_offset)
    assert (copied.log.damaged_ranges(), contents(copied.log), copied.log.cleaned_offset) == ([], before, -1)


@pytest.mark.parametrize("number", [1, 2])
def test_a_marker_that_is_gone_there_is_missed_also_where_this_log_was_cleaned(tmp_path: Path, number: int) -> None:
    """Without it the next cleaning took the producer's later records for aborted ones, and removed them."""
    lagging, cleaned = (Logs(tmp_path / name, GONE) for name in ("lagging", "cleaned"))
    for made in (lagging, cleaned):
        made.append(keyed(("a", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        made.append(marker(abort=True), from_client=False)
        made.append(keyed(("b", "1")), keyed(("c", "1")))
        made.log.roll(NOW)
    clean(lagging.log)
    for made in (lagging, cleaned):
        made.append(keyed(("d", "1"), producer_id=7, producer_epoch=0, base_sequence=1, transactional=True))
        made.append(marker(abort=False), from_client=False)
        made.append(keyed(("b", "2")))
        made.log.roll(NOW)
    for _ in range(3):
        cleaned.append(keyed(("z", "1")))
        cleaned.log.roll(NOW)
        clean(cleaned.log)
    damage(lagging, number)
    log = lagging.log
    ((segment, damaged),) = log.damaged_ranges()
    assert damaged.end_offset <= log.cleaned_offset
    with pytest.raises(OtherCleaning):
        repair_range(log, segment, damaged, copy_of(cleaned), lacks_below=log.cleaned_offset)
    copy_prefix(log, cleaned.log, 0)
    assert log.damaged_ranges() == []
    for _ in range(3):
        log.append_as_leader(memoryview(bytearray(keyed(("z", "1")))), 0, NOW)
        log.roll(NOW)
        log.set_high_watermark(log.log_end_offset)
        clean(log)
    expected = {(b"b", b"2"), (b"c", b"1"), (b"d", b"1"), (b"z", b"1")}
    assert {(key, value) for _, key, value in contents(log)} == expected


def test_a_transaction_ends_here_as_it_does_there(tmp_path: Path) -> None:
    """The damaged marker is gone from the other copy, with the aborted records: here they were committed, or open."""

    def abort(made: Logs) -> None:
        made.append(keyed(("a", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        made.append(marker(abort=True), from_client=False)
        made.append(keyed(("b", "1"), producer_id=7, producer_epoch=0, base_sequence=1))

    lagging, cleaned = replicas(tmp_path, abort)
    damage(lagging, 1)
    copy_prefix(lagging.log, cleaned.log, 0)
    log = lagging.log
    assert log.damaged_ranges() == []
    log.set_high_watermark(log.log_end_offset)
    assert log.last_stable_offset == log.log_end_offset
    assert b"aborted" not in {value for _, _, value in contents(log)}


def test_a_transaction_that_was_aborted_while_damage_hid_its_records_is_known_behind_the_copy(tmp_path: Path) -> None:
    """The marker is in a segment behind it."""
    made, other = (Logs(tmp_path / name, GONE) for name in ("made", "other"))
    for each in (made, other):
        each.append(keyed(("a", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    data[64] ^= 255
    path.write_bytes(data)
    log = made.open(machine_ran_on=True)
    assert (log.lacks_producers, log.segment_count) == (True, 2)
    for each in (made, other):
        each.append(marker(abort=True), from_client=False)
    copy_prefix(log, other.log, 0)
    assert log.damaged_ranges() == []
    rows = log.aborted_transactions(0, log.log_end_offset)
    assert [(row.producer_id, row.first_offset, row.last_offset) for row in rows] == [(7, 0, 1)]


def test_the_other_copy_may_be_less_clean(tmp_path: Path) -> None:
    """What this cleaner had removed is here again, with what makes it go: the log is compared anew from its start."""
    lagging, cleaned = (Logs(tmp_path / name, GONE) for name in ("lagging", "cleaned"))
    for made in (lagging, cleaned):
        made.append(keyed(("a", "1")))
        made.append(keyed(("x", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        made.append(marker(abort=True), from_client=False)
        made.append(keyed(("a", None)), keyed(("b", "1")))
        made.log.roll(NOW)
        made.append(keyed(("z", "1")))
        made.log.roll(NOW)
    for _ in range(3):
        lagging.append(keyed(("y", "1")))
        lagging.log.roll(NOW)
        cleaned.append(keyed(("y", "1")))
        clean(lagging.log)
    assert lagging.log.cleaned_offset > 0
    lagging.directory.write_checkpoints()
    cleaned_up_to = OffsetCheckpoints(lagging.disk, lagging.directory.path)
    assert cleaned_up_to.read(CLEANER_OFFSET_FILE)["t", 0] > 0
    log = lagging.log
    copy = PrefixCopy(log, log.segments[0], NOW)
    while not lagging.files("*.swap"):
        assert log.cleaned_offset > 0, "it may be given up"
        copy.data = fetch(cleaned.log, copy.wants_from) if copy.wants_from >= 0 else b""
        copy.run()
        assert copy.advance()
    assert (log.cleaned_offset, cleaned_up_to.read(CLEANER_OFFSET_FILE)["t", 0]) == (0, 0), "a kill may follow"
    while copy.advance():
        copy.run()
    assert log.cleaned_offset == 0
    rows = log.aborted_transactions(0, log.log_end_offset)
    assert [(row.producer_id, row.first_offset) for row in rows] == [(7, 1)]
    log.set_high_watermark(log.log_end_offset)
    log.roll(NOW)
    for _ in range(3):
        log.append_as_leader(memoryview(bytearray(keyed(("w", "1")))), 0, NOW)
        log.roll(NOW)
        log.set_high_watermark(log.log_end_offset)
        clean(log)
    assert {(key, value) for _, key, value in contents(log) if key in (b"a", b"b", b"x")} == {(b"b", b"1")}


@pytest.mark.parametrize("turns", range(7))
def test_the_leader_epochs_of_a_copy_are_filed_before_it_takes_its_place(tmp_path: Path, turns: int) -> None:
    """By the file from before, a start after a kill takes whole batches for damaged."""

    def append(made: Logs) -> None:
        made.append(keyed(("k", "1"), ("c", "1")), keyed(("k", None)))
        made.log.assign_epoch(1)
        made.append(keyed(("x", "2")), keyed(("e", "1")), epoch=1)
        made.log.roll(NOW)

    leader, other, here = (Logs(tmp_path / name, GONE) for name in ("leader", "other", "here"))
    for made in (leader, other):
        append(made)
        for _ in range(3):
            made.append(keyed(("z", "1")), epoch=1)
            made.log.roll(NOW)
    for _ in range(3):
        clean(leader.log)
    for _, batch in sorted(copy_of(leader).items()):
        here.log.append_as_follower(memoryview(bytearray(batch)), NOW)
        here.log.roll(NOW)
    here.log.set_high_watermark(here.log.log_end_offset)
    here.log.flush()
    here.directory.write_checkpoints()
    before = [*here.log.leader_epochs]
    damage(here, 0)
    damaged = here.log.damaged_ranges()[0][1]
    copy = PrefixCopy(here.log, here.log.segments[2], NOW)
    fetch_all(copy, other.log)
    for _ in range(turns):
        copy.advance()
        copy.run()
    here.kill()
    log = here.open(machine_ran_on=True)
    examine_all(log)
    assert {each for _, each in log.damaged_ranges()} <= {damaged}
    assert ([*log.leader_epochs] == [*other.log.leader_epochs] != before) if turns else [*log.leader_epochs] == before


def test_a_lost_segment_is_missed_also_by_a_start_after_a_kill_before_its_copy_takes_its_place(tmp_path: Path) -> None:
    """Beside the cleaner's checkpoint, and without `cleaned-ends`, it counted as cleaned: its records were gone."""
    made, other = (Logs(tmp_path / name, replace(GONE, segment_bytes=1000)) for name in ("made", "other"))
    for each in (made, other):
        for key in "abc":
            each.append(keyed((key, "v" * 600)), keyed(("x", key)))
            each.log.roll(NOW)
    clean(made.log)
    made.log.flush()
    made.directory.write_checkpoints()
    assert made.log.cleaned_offset > made.log.segments[1].base_offset
    made.close()
    (made.folder / made.files("*.log")[1]).unlink()
    log = made.open()
    examine_all(log)
    assert log.damaged_ranges()
    copy = PrefixCopy(log, log.segments[0], NOW)
    fetch_all(copy, other.log)
    made.kill()
    log = made.open(machine_ran_on=True)
    examine_all(log)
    assert log.damaged_ranges()


def examine_all(log: PartitionLog) -> None:
    for each in log.segments:
        each.findings = each.examine()
        log.adopt_findings(each)


def aborted_in(log: PartitionLog) -> list[tuple[int, int, int]]:
    """(producer id, first offset, last offset) of each aborted transaction that the log knows."""
    rows = log.aborted_transactions(0, log.log_end_offset)
    return [(row.producer_id, row.first_offset, row.last_offset) for row in rows]


@pytest.mark.parametrize(("is_in_copy", "is_range_alone"), [(True, False), (False, False), (False, True)])
def test_a_transaction_whose_records_are_here_again_stays_aborted(
    tmp_path: Path, is_in_copy: bool, is_range_alone: bool
) -> None:
    """A start behind the cleaning has noted nothing of it. Its marker is in the copy, or behind it."""
    seven: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    made, other = (Logs(tmp_path / name, replace(GONE, segment_bytes=1000)) for name in ("made", "other"))
    for each in (made, other):
        each.append(keyed(("x", "aborted"), base_sequence=0, **seven), keyed(("q", "v" * 600)))
        each.log.roll(NOW)
        each.append(keyed(("r", "v" * 600)))
        if is_in_copy:
            each.append(marker(abort=True), from_client=False)
            each.log.roll(NOW)
        else:
            each.log.roll(NOW)
            each.append(marker(abort=True), from_client=False)
        each.append(keyed(("y", "1"), base_sequence=1, **seven))
        each.append(marker(abort=False), keyed(("s", "v" * 600)), from_client=False)
    clean(made.log)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert log.aborted_transactions(0, log.log_end_offset) == []
    damage(made, 0)
    if is_range_alone:
        ((segment, damaged),) = log.damaged_ranges()
        repair_range(log, segment, damaged, copy_of(other), lacks_below=0)  # the cleaner's checkpoint was lost
    else:
        copy_prefix(log, other.log, 1 if is_in_copy else 0)

    assert aborted_in(log) == [(7, 0, 3)]
    made.close()
    for name in made.files("*.txnindex"):
        (made.folder / name).write_bytes(b"")
    log = made.open()
    assert aborted_in(log) == [(7, 0, 3)], "a start that scans does not know it"


@pytest.mark.parametrize("is_lost_for_good", [False, True])
@pytest.mark.parametrize("left", [bytes(671), b""])
def test_a_transaction_that_is_here_again_stays_aborted_over_damage_behind(
    tmp_path: Path, left: bytes, is_lost_for_good: bool
) -> None:
    """Between the copy and the marker there is another damaged segment, which may hide another end of it."""
    seven: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    made, other = (Logs(tmp_path / name, replace(GONE, segment_bytes=1000)) for name in ("made", "other"))
    for each in (made, other):
        each.append(keyed(("x", "aborted"), base_sequence=0, **seven), keyed(("q", "v" * 600)))
        for key in "rt":
            each.log.roll(NOW)
            each.append(keyed((key, "v" * 600)))
        each.append(marker(abort=True), from_client=False)
        each.append(keyed(("y", "1"), base_sequence=1, **seven))
        each.append(marker(abort=False), from_client=False)
    clean(made.log)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert log.aborted_transactions(0, log.log_end_offset) == []
    (made.folder / made.files("*.log")[1]).write_bytes(left)
    damage(made, 0)
    copy_prefix(log, other.log, 0)
    ((segment, damaged),) = log.damaged_ranges()
    assert damaged.first_offset == 2
    assert stable_bound(log, 2) == log.log_end_offset
    with pytest.raises(DamagedRecords):
        stable_bound(log, 0)

    if is_lost_for_good:
        log.accept_loss(damaged)
        assert stable_bound(log, 0) == log.log_end_offset
    else:
        repair_range(log, segment, damaged, copy_of(other))
    assert aborted_in(log) == [(7, 0, 4)]
    made.close()
    log = made.open()
    assert aborted_in(log) == [(7, 0, 4)]


@pytest.mark.parametrize("fault", ["crc", "epoch", "nothing", "too far"])
def test_a_copy_that_cannot_be_ours_changes_nothing(tmp_path: Path, fault: str) -> None:
    lagging, cleaned = replicas(tmp_path, deletes_a)
    before = contents(lagging.log)
    copy = PrefixCopy(lagging.log, lagging.log.segments[0], NOW)
    with pytest.raises(CleaningFailed):  # noqa: PT012
        for _ in range(100):
            if copy.wants_from >= 0:
                data = bytearray(fetch(cleaned.log, copy.wants_from))
                if fault == "crc":
                    data[62] ^= 1
                elif fault == "epoch":
                    data[15] ^= 1
                elif fault == "too far":
                    data[26] ^= 7
                copy.data = b"" if fault == "nothing" else bytes(data)
            copy.run()
            copy.advance()
    assert contents(lagging.log) == before
    assert lagging.files("*.cleaned") == []
    assert lagging.log.compaction is None


def test_a_copy_that_cannot_take_its_place_leaves_the_log_to_the_cleaner(tmp_path: Path) -> None:
    lagging, cleaned = replicas(tmp_path, deletes_a)
    before = contents(lagging.log)

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    lagging.log.write_checkpoint = refuse
    copy = PrefixCopy(lagging.log, lagging.log.segments[0], NOW)
    with pytest.raises(OSError, match="Too many"):
        to_end(copy, cleaned.log)
    copy.take_back()
    assert (lagging.log.compaction, lagging.files("*.cleaned"), contents(lagging.log)) == (None, [], before)


def test_a_copy_for_which_the_volume_has_no_space_in_the_end_leaves_the_log_in_use(tmp_path: Path) -> None:
    """It took the log directory offline, although a full volume is no error of the device."""
    lagging, cleaned = replicas(tmp_path, deletes_a)
    before = contents(lagging.log)

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write, lagging.log.write_checkpoint = lagging.log.write_checkpoint, refuse
    with pytest.raises(NoSpace):
        copy_prefix(lagging.log, cleaned.log, 0)
    assert (lagging.log.compaction, lagging.files("*.cleaned"), contents(lagging.log)) == (None, [], before)
    lagging.log.write_checkpoint = write
    copy_prefix(lagging.log, cleaned.log, 0)
    assert contents(lagging.log) != before


def test_a_copy_forgets_the_transactions_that_have_ended(tmp_path: Path) -> None:
    def end_transactions(made: Logs) -> None:
        for number in range(8):
            made.append(
                keyed((f"{number}", "1"), producer_id=7, producer_epoch=0, base_sequence=number, transactional=True)
            )
            made.append(marker(abort=number % 2 == 1), from_client=False)

    lagging, _ = replicas(tmp_path, end_transactions)
    other = Logs(tmp_path / "other", GONE)
    end_transactions(other)
    copy = copy_prefix(lagging.log, other.log, 0)
    assert len(copy._producers.unreplicated) <= 1
    rows = lagging.log.aborted_transactions(0, lagging.log.log_end_offset)
    assert [(row.first_offset, row.last_offset) for row in rows] == [(2, 3), (6, 7), (10, 11), (14, 15)]


def in_segments(made: Logs) -> None:
    """Of each segment the cleaner removes something, and none is merged with the next one."""
    for number in range(3):
        made.append(keyed(("a", "1"), (f"{number}", "x" * 900)))
        made.append(keyed(("a", None)))
        made.log.roll(NOW)


def of_either(lagging: Logs, cleaned: Logs, number: int) -> tuple[list[Any], list[Any]]:
    """The contents before the copy of the segments up to this one, and after it."""
    end_offset = lagging.log.segments[number + 1].base_offset
    old, new = contents(lagging.log), contents(cleaned.log)
    return old, [each for each in new if each[0] < end_offset] + [each for each in old if each[0] >= end_offset]


@pytest.mark.parametrize("pieces", range(1, 20))
def test_a_truncation_that_ends_it_leaves_no_mixture_of_two_cleanings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(swap, "PIECE_SEGMENTS", 1)
    lagging, cleaned = replicas(tmp_path, in_segments)
    old, new = of_either(lagging, cleaned, 1)
    copy = PrefixCopy(lagging.log, lagging.log.segments[1], NOW)
    for _ in range(pieces):
        if copy.wants_from >= 0:
            copy.data = fetch(cleaned.log, copy.wants_from)
        copy.run()
        if not copy.advance():
            break
    lagging.log.truncate_to(lagging.log.log_end_offset - 1)
    copy.run()
    assert not copy.advance()
    assert lagging.files("*.cleaned") == lagging.files("*.swap") == []
    log = lagging.close_and_open()
    assert not [each for each in log.segments if each.examine().damage]
    assert contents(log) in (old[:-1], new[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 16])
@pytest.mark.parametrize("kept", ["all", "the last renames are lost", "the first renames are lost"])
def test_a_kill_leaves_no_mixture_of_two_cleanings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str, piece: int
) -> None:
    """Each rename of one copy is the last one. Of those that were not synced a loss of power keeps any."""
    monkeypatch.setattr(swap, "PIECE_SEGMENTS", piece)
    results: set[bool] = set()
    for ends_at in range(1, 200):
        disk = Mortal(10**6)
        lagging, cleaned = replicas(tmp_path / f"{ends_at}", in_segments, disk)
        old, new = of_either(lagging, cleaned, 1)
        copy = PrefixCopy(lagging.log, lagging.log.segments[1], NOW)
        fetch_all(copy, cleaned.log)
        disk.ends_at, disk.is_counting, disk.unsynced = ends_at, True, []
        try:
            while copy.advance():
                copy.run()
            is_done = True
        except Killed:
            is_done = False
        lagging.kill()
        if kept != "all":
            lose_half(disk.unsynced, keep_first=kept == "the last renames are lost")
        disk.is_counting, disk.ends_at = False, 1
        found = contents(lagging.open(machine_ran_on=True))
        assert found in (old, new), ends_at
        assert lagging.files("*.cleaned") == lagging.files("*.swap") == []
        results.add(found == new)
        lagging.close()
        if is_done:
            assert results == {True, False}
            return
    pytest.fail("the copy has more than 200 operations")


def lose_half(renames: list[tuple[str, str]], *, keep_first: bool) -> None:
    half = len(renames) // 2
    for source, target in reversed(renames[half:] if keep_first else renames[:half]):
        if Path(target).exists() and not Path(source).exists():
            Path(target).rename(source)


class Counting(QuickDisk):
    """Counts the changes of names, and the listings of directories."""

    def __init__(self) -> None:
        super().__init__()
        self.names = self.listings = self.syncs = 0

    def rename(self, source: str, target: str) -> None:
        self.names += 1
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.names += 1
        super().remove(path)

    def sync_directory(self, path: str) -> None:
        self.syncs += 1
        super().sync_directory(path)

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        self.listings += 1
        return super().list_directory(path)


def names_in_each_turn(disk: Counting, compaction: Compaction, other: PartitionLog) -> list[int]:
    turns = []
    while True:
        if isinstance(compaction, PrefixCopy) and compaction.wants_from >= 0:
            compaction.data = fetch(other, compaction.wants_from)
        compaction.run()
        before = disk.names
        has_more = compaction.advance()
        turns.append(disk.names - before)
        if not has_more:
            return turns


NAMES_PER_TURN_MAX = 16 * 5
"""Of each segment: the log, three indexes, and a snapshot."""


def test_a_copy_of_many_segments_holds_up_no_other_log(tmp_path: Path) -> None:
    """The renames of a thousand took a third of a second of the loop, and each kept a descriptor until then."""
    disk = Counting()
    lagging, cleaned = (Logs(tmp_path / name, GONE, disk) for name in ("lagging", "cleaned"))
    for made in (lagging, cleaned):
        for number in range(40):
            made.append(keyed((f"{number}", "x" * 900)))
            made.log.roll(NOW)
    copy = PrefixCopy(lagging.log, lagging.log.segments[39], NOW)
    held, listings = len(list(Path("/proc/self/fd").iterdir())), disk.listings
    while not copy._ready:
        copy.data = fetch(cleaned.log, copy.wants_from) if copy.wants_from >= 0 else b""
        copy.run()
        assert copy._ready or copy.advance()
    assert len(copy._ready) == 40
    assert len(list(Path("/proc/self/fd").iterdir())) <= held + 2
    assert disk.listings <= listings + 2
    assert max(names_in_each_turn(disk, copy, cleaned.log)) <= NAMES_PER_TURN_MAX
    assert (lagging.log.segment_count, contents(lagging.log)) == (41, contents(cleaned.log))


def test_a_cleaning_of_many_small_segments_holds_up_no_other_log(tmp_path: Path) -> None:
    disk = Counting()
    made = Logs(tmp_path, replace(GONE, segment_bytes=100_000), disk)
    for _ in range(60):
        made.append(keyed(("a", "1")))
        made.log.roll(NOW)
    compaction = begin(made.log)
    assert max(names_in_each_turn(disk, compaction, made.log)) <= NAMES_PER_TURN_MAX
    assert made.log.segment_count == 2
    assert made.files("*.snapshot") == [f"{60:020d}.snapshot"]
    assert [key for _, key, _ in contents(made.close_and_open())] == [b"a"]


def test_a_truncation_that_finishes_a_swap_waits_for_the_device_once_per_step(tmp_path: Path) -> None:
    """Of a thousand segments it waited two hundred times, on the loop."""
    disk = Counting()
    made = Logs(tmp_path, replace(GONE, segment_bytes=100_000), disk)
    for _ in range(60):
        made.append(keyed(("a", "1")))
        made.log.roll(NOW)
    compaction = begin(made.log)
    while compaction._swap is None:
        compaction.run()
        compaction.advance()
    before = disk.syncs
    compaction.give_up()
    assert disk.syncs <= before + 4
    assert (made.log.segment_count, made.files("*.swap")) == (2, [])


@pytest.mark.parametrize("epochs", [(0, 2), (1, 0), (2, 2)])
def test_a_copy_of_leader_epochs_that_cannot_be_there_is_refused(tmp_path: Path, epochs: tuple[int, int]) -> None:
    """They would contradict each other, or what follows here."""
    here, other = Logs(tmp_path / "here", GONE), Logs(tmp_path / "other", GONE)
    for made, batches in ((here, (0, 1)), (other, epochs)):
        for epoch in batches:
            made.append(keyed(("a", "1")), epoch=epoch)
            made.log.roll(NOW)
    here.append(keyed(("z", "1")), epoch=1)
    here.log.roll(NOW)
    before = [*here.log.leader_epochs], contents(here.log)
    with pytest.raises(CleaningFailed):
        copy_prefix(here.log, other.log, 1)
    assert ([*here.log.leader_epochs], contents(here.log)) == before
