"""A replica whose cleaner lags takes another one's copy as a whole where a part of it would bring deleted keys back."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, marker
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tests.unit.storage.test_damage import copy_of, repair_range
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.files.checkpoints import CLEANER_OFFSET_FILE, OffsetCheckpoints
from tidelog.storage.log.compaction import CleaningFailed
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.repair import Thinned
from tidelog.storage.segments.reader import ColdRead

GONE = replace(CONFIG, delete_retention_ms=0, verifies_transactions=False)
Appends = Callable[[Logs], None]


def fetch(log: PartitionLog, offset: int) -> bytes:
    while True:
        try:
            return b"".join(bytes(region) for region in log.read(offset, 500, log.log_end_offset).regions)
        except ColdRead as cold:
            cold.warm()


def copy_prefix(log: PartitionLog, other: PartitionLog, number: int) -> PrefixCopy:
    copy = PrefixCopy(log, log.segments[number], NOW)
    while True:
        if copy.wants_from >= 0:
            copy.data = fetch(other, copy.wants_from)
        copy.run()
        if not copy.advance():
            return copy


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


def replicas(tmp_path: Path, append: Appends) -> tuple[Logs, Logs]:
    """The first has never been cleaned; in the other every tombstone and marker that may go has gone."""
    lagging, cleaned = (Logs(tmp_path / name, GONE) for name in ("lagging", "cleaned"))
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
    work.cleaned_offset = log.cleaned_offset
    with pytest.raises(Thinned):  # noqa: PT012
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
    repair_range(copied.log, segment, damaged, copy_of(cleaned), cleaned_offset=copied.log.cleaned_offset)
    assert (copied.log.damaged_ranges(), contents(copied.log), copied.log.cleaned_offset) == ([], before, -1)


@pytest.mark.parametrize(("number", "is_thinned"), [(1, True), (2, False)])
def test_a_marker_that_is_gone_there_is_missed_also_where_this_log_was_cleaned(
    tmp_path: Path, number: int, is_thinned: bool
) -> None:
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
    if is_thinned:
        with pytest.raises(Thinned):
            repair_range(log, segment, damaged, copy_of(cleaned), cleaned_offset=log.cleaned_offset)
        copy_prefix(log, cleaned.log, 0)
    else:
        repair_range(log, segment, damaged, copy_of(cleaned), cleaned_offset=log.cleaned_offset)
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
    PrefixCopy(log, log.segments[0], NOW).take_back()
    assert (log.cleaned_offset, cleaned_up_to.read(CLEANER_OFFSET_FILE)["t", 0]) == (0, 0), "a kill may follow"
    copy_prefix(log, cleaned.log, 0)
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


def test_a_copy_that_cannot_begin_leaves_the_log_to_the_cleaner(tmp_path: Path) -> None:
    lagging, _ = replicas(tmp_path, deletes_a)

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    lagging.log.write_checkpoint = refuse
    with pytest.raises(OSError, match="Too many"):
        PrefixCopy(lagging.log, lagging.log.segments[0], NOW)
    assert lagging.log.compaction is None


@pytest.mark.parametrize("pieces", range(1, 9))
def test_a_truncation_ends_it_and_leaves_whole_segments(tmp_path: Path, pieces: int) -> None:
    lagging, cleaned = replicas(tmp_path, deletes_a_last)
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
    assert {(b"b", b"1"), (b"c", b"1")} <= {(key, value) for _, key, value in contents(log)}
