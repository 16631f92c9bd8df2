"""Leader epochs that are damaged: those in the batches, which no CRC covers, and those of the epoch file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from struct import pack_into

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, offsets_of, records_of
from tests.unit.storage.test_damage import batches_of, copy_of, damage, repair, repair_range, served
from tidelog.protocol.batches.record_batch import stamp
from tidelog.storage.files.disk import OsFile
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.repair import CopyRefused
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.reader import ColdRead, Examination

MakeLogs = Callable[..., Logs]
EPOCHS = [(0, 0), (2, 12), (5, 20), (6, 26)]
COUNT = 30


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Thirty batches of a record each, about ten in a segment."""
    made = logs(segment_bytes=1000)
    for number in range(COUNT):
        epoch = next(epoch for epoch, start in reversed(EPOCHS) if start <= number)
        made.append(batch(value=b"%03d" % number * 10, timestamp=NOW + number), epoch=epoch)
    made.directory.write_checkpoints()
    assert made.log.segment_count == 3
    return made


def scrub(log: PartitionLog) -> None:
    for segment in list(log.segments):
        work = Scrub(log, segment)
        work.run(10**9)
        work.finish()


def repair_all(log: PartitionLog, copy: dict[int, bytes]) -> None:
    """Until nothing is found any more."""
    for _ in range(4):
        scrub(log)
        if not log.damaged_ranges():
            return
        repair(log, copy)
    raise AssertionError(f"repaired again and again: {log.damaged_ranges()}")


def set_epoch(made: Logs, offset: int, epoch: int) -> None:
    name = next(name for name in reversed(made.files("*.log")) if int(name[:20]) <= offset)
    path = made.folder / name
    data = bytearray(path.read_bytes())
    position, _ = batches_of(path)[offset - int(name[:20])]
    pack_into(">i", data, position + 12, epoch)
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [-1, 0, 1, 2, 3, 5, 6, 7])
def test_an_epoch_of_a_batch_that_is_wrong_is_found_and_repaired_wherever_it_is(made: Logs, epoch: int) -> None:
    copy = copy_of(made)
    whole = {path: path.read_bytes() for path in made.folder.glob("*.log")}
    for offset in range(COUNT):
        set_epoch(made, offset, epoch)
        repair_all(made.log, copy)
        assert {path: path.read_bytes() for path in whole} == whole, offset
        assert list(made.log.leader_epochs) == EPOCHS, offset


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [-1, 0, 1, 2, 3, 5, 6, 7])
def test_a_wrong_epoch_of_a_batch_is_found_by_the_scan_after_a_kill(made: Logs, epoch: int) -> None:
    """The scan took it for right, and the epoch file was written anew from it."""
    copy = copy_of(made)
    made.log.flush()
    whole = {path: path.read_bytes() for path in made.folder.glob("*.log")}
    for offset in range(COUNT - 1):  # what is behind the last whole batch may be torn
        made.kill()
        (made.path / "recovery-point-offset-checkpoint").write_bytes(b"0\n1\nt 0 0\n")
        set_epoch(made, offset, epoch)
        log = made.open(machine_ran_on=True)
        assert not made.directory.shortened_logs
        assert list(log.leader_epochs) == EPOCHS, offset
        is_right = LeaderEpochs(EPOCHS).epoch_for_offset(offset) == epoch
        assert set(range(COUNT)) - set(served(log)) == (set() if is_right else {offset})
        repair_all(log, copy)
        assert {path: path.read_bytes() for path in whole} == whole, offset
        assert list(log.leader_epochs) == EPOCHS, offset


def test_a_doubtful_epoch_is_still_there_where_the_scrubber_finds_more(
    made: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    """The log file said that the scrubber did not find it any more."""
    set_epoch(made, 11, 1)
    scrub(made.log)
    path = made.folder / made.files("*.log")[1]
    damage(path, 5, "CRC")
    caplog.clear()
    scrub(made.log)
    assert [each.first_offset for _, each in made.log.damaged_ranges()] == [11, int(path.stem) + 5]
    assert not [each for each in caplog.records if "does not find this any more" in each.getMessage()]


def test_a_last_batch_of_an_epoch_that_the_file_does_not_know_yet_is_believed_after_a_kill(logs: MakeLogs) -> None:
    """With one replica nobody could tell otherwise."""
    made = logs()
    made.append(batch(), epoch=0)
    made.log.flush()
    made.append(batch(), epoch=1)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == [(0, 0), (1, 1)]
    assert offsets_of(records_of(log)) == [0, 1]


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_first_batch_after_a_truncation_is_believed_after_a_kill(
    logs: MakeLogs, count: int, is_rolled: bool
) -> None:
    """The epoch file is from before the truncation. The batch may be acknowledged, and be on this replica alone."""
    made = logs()
    for epoch in (0, 1):
        for _ in range(5):
            made.append(batch(), epoch=epoch)
    made.log.flush()
    made.log.truncate_to(3)
    made.append(batch(count), epoch=2)
    if is_rolled:
        made.log.roll(NOW)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == [(0, 0), (2, 3)]
    assert offsets_of(records_of(log)) == list(range(3 + count))


@pytest.mark.parametrize("machine_ran_on", [True, False])
@pytest.mark.parametrize("is_filed_at_a_stop", [False, True])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_batch_after_a_truncation_is_believed_where_it_is_of_an_older_epoch_than_the_file_says(
    logs: MakeLogs, machine_ran_on: bool, is_filed_at_a_stop: bool, is_last: bool
) -> None:
    """This replica led in epoch 2 and was cut. The next leader had the batch of epoch 1, and it was acknowledged."""
    made = logs()
    for _ in range(3):
        made.append(batch(), epoch=0)
    made.log.assign_epoch(2)
    if is_filed_at_a_stop:  # without a record of epoch 2
        made.close()
        made.open()
    else:
        made.append(batch(), epoch=2)
        made.log.flush()
    made.log.truncate_to(3)
    made.append(batch(), epoch=1)
    if not is_last:  # it is the last one of its segment
        made.log.roll(NOW)
        made.append(batch(), epoch=3)
    made.kill()
    log = made.open(machine_ran_on=machine_ran_on)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == [(0, 0), (1, 3), (3, 4)][: 3 - is_last]
    assert offsets_of(records_of(log)) == [0, 1, 2, 3, 4][: 5 - is_last]


@pytest.mark.parametrize("later", [[], [4], [4, 9]])
def test_the_epochs_of_whole_batches_behind_damage_are_not_those_of_a_file_from_before_a_truncation(
    logs: MakeLogs, later: list[int]
) -> None:
    """The file's later epochs began inside the damage. Whole records behind it were refused."""
    made = logs()
    made.append(batch(), epoch=1)
    made.append(batch(), epoch=6)
    made.append(batch(), epoch=7)
    made.log.flush()
    made.log.truncate_to(1)
    made.append(batch(3), epoch=2)
    for epoch in (3, *later):
        made.append(batch(), epoch=epoch)
    made.kill()
    damage(made.folder / made.files("*.log")[0], 1, "CRC")
    log = made.open(machine_ran_on=True)
    [(_, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (1, 4)
    assert list(served(log)) == [0, *range(4, 5 + len(later))]
    assert list(log.leader_epochs)[-1 - len(later) :] == [(epoch, 4 + n) for n, epoch in enumerate((3, *later))]


@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_an_epoch_file_that_is_wrong_for_one_batch_is_corrected_once_another_replica_has_said_so(
    made: Logs, policy: str
) -> None:
    """In a compacted log only the first batch of each epoch was compared with it, and the last one was repaired again
    and again.
    """
    made.config = replace(made.config, cleanup_policy=frozenset({policy}))
    made.log.set_config(made.config)
    copy = copy_of(made)
    made.close()
    path = made.folder / "leader-epoch-checkpoint"
    for right, wrong in ((b"2 12", b"2 13"), (b"2 12", b"2 11"), (b"5 20", b"4 20"), (b"6 26", b"6 27")):
        path.write_bytes(path.read_bytes().replace(right, wrong))
        log = made.open()
        assert list(log.leader_epochs) != EPOCHS
        repair_all(log, copy)
        made.close()
    assert list(made.open().leader_epochs) == EPOCHS
    assert offsets_of(records_of(made.log)) == list(range(COUNT))


@pytest.mark.parametrize("machine_ran_on", [True, False])
def test_a_repaired_batch_that_begins_an_epoch_is_no_damage_after_the_next_kill(
    logs: MakeLogs, machine_ran_on: bool
) -> None:
    """A flush had written the epochs of the whole batches, and the repair corrected only those in memory."""
    made = logs()
    for epoch in (0, 0, 0, 1, 1, 1):
        made.append(batch(), epoch=epoch)
        if not epoch:
            made.log.flush()
    copy = copy_of(made)
    made.kill()
    damage(made.folder / made.files("*.log")[0], 3, "CRC")
    log = made.open(machine_ran_on=True)
    assert [damaged.first_offset for _, damaged in log.damaged_ranges()] == [3]
    log.flush()
    repair_all(log, copy)
    made.kill()
    log = made.open(machine_ran_on=machine_ran_on)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == [(0, 0), (1, 3)]
    assert offsets_of(records_of(log)) == list(range(6))


def test_another_batch_that_fits_a_wrong_epoch_file_is_taken_as_committed_only(made: Logs) -> None:
    """A replica that is not in sync may have it from an older leader."""
    made.log.leader_epochs.clear()
    for epoch, start in EPOCHS:
        made.log.leader_epochs.assign(epoch, start + (start == 20))
    scrub(made.log)
    [(segment, damaged)] = made.log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (20, 21)
    other = batch(value=b"other" * 6, timestamp=NOW + 20)
    stamp(other, 0, 20, 2)
    work = made.log.repair_of(segment, damaged)
    with pytest.raises(CopyRefused, match="another one") as refused:
        work.accept(other)
    assert refused.value.is_of_other_epoch
    assert not work.is_complete
    work.is_committed = True
    work.accept(other)
    assert work.is_complete


def test_a_batch_that_another_replica_has_the_same_way_is_not_blamed_again(made: Logs) -> None:
    """Two batches disagree, and the first is blamed; with a copy of it the other one must be."""
    copy = copy_of(made)
    set_epoch(made, 13, 0)
    made.log.leader_epochs.clear()  # else it tells
    scrub(made.log)
    [(_, damaged)] = made.log.damaged_ranges()
    assert damaged.first_offset == 12
    repair(made.log, copy)
    [(_, damaged)] = made.log.damaged_ranges()
    assert damaged.first_offset == 13
    repair(made.log, copy)
    assert not made.log.damaged_ranges()


def test_an_epoch_that_changes_while_its_batch_is_repaired_is_damage_again(made: Logs) -> None:
    """It was believed because another replica has the batch, and the epoch file was cut at it."""
    copy = copy_of(made)
    whole = {path: path.read_bytes() for path in made.folder.glob("*.log")}
    number = len(batches_of(made.folder / made.files("*.log")[0]))
    damage(made.folder / made.files("*.log")[1], 0, "CRC")
    scrub(made.log)
    [(segment, damaged)] = made.log.damaged_ranges()
    assert damaged.first_offset == number
    work = made.log.repair_of(segment, damaged)
    work.accept(memoryview(copy[number]))
    check = work.finish()
    set_epoch(made, number, 1)
    check.run()
    assert made.log.finish_repair(check)
    [(_, damaged)] = made.log.damaged_ranges()
    assert damaged.first_offset == number
    repair_all(made.log, copy)
    assert {path: path.read_bytes() for path in whole} == whole
    assert list(made.log.leader_epochs) == EPOCHS


@pytest.mark.parametrize("epoch", [-1, 1, 3])
def test_an_epoch_that_changes_after_its_batch_was_repaired_is_found_beside_damage_that_stays(
    made: Logs, epoch: int
) -> None:
    """While another range of the segment is lost, what was confirmed is remembered."""
    copy = copy_of(made)
    path = made.folder / made.files("*.log")[1]
    first = int(made.files("*.log")[1][:20])
    damage(path, 1, "CRC")
    damage(path, 6, "CRC")
    scrub(made.log)
    lost = {offset: data for offset, data in copy.items() if offset < first + 6}
    (segment, damaged), _ = made.log.damaged_ranges()
    repair_range(made.log, segment, damaged, lost)
    after = path.read_bytes()
    set_epoch(made, first + 1, epoch)
    assert path.read_bytes() != after
    scrub(made.log)
    assert [each.first_offset for _, each in made.log.damaged_ranges()] == [first + 1, first + 6]
    repair_range(made.log, *made.log.damaged_ranges()[0], lost)
    assert path.read_bytes() == after
    assert [each.first_offset for _, each in made.log.damaged_ranges()] == [first + 6]


def test_an_epoch_file_that_contradicts_the_batch_behind_the_damage_refuses_no_copy(made: Logs) -> None:
    """The file speaks of an epoch that only the damaged batch had: as of a start that read that one last."""
    copy = copy_of(made)
    made.close()
    path = made.folder / "leader-epoch-checkpoint"
    path.write_bytes(b"0\n3\n0 0\n2 3\n6 26\n")
    set_epoch(made, 3, 2)
    log = made.open()
    scrub(log)
    [(_, damaged)] = log.damaged_ranges()
    assert damaged.first_offset == 3
    repair_all(log, copy)
    assert list(log.leader_epochs) == EPOCHS


@pytest.mark.parametrize("bit", [0, 40, 60])
def test_a_lost_epoch_file_is_made_anew_beside_a_batch_whose_base_offset_is_damaged(made: Logs, bit: int) -> None:
    """Of a base offset that is too high, the epochs that begin before it were forgotten, and their records refused."""
    made.close()
    (made.folder / "leader-epoch-checkpoint").unlink()
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    data[7 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    log = made.open()
    assert list(served(log)) == list(range(1, COUNT))
    assert list(log.leader_epochs)[-3:] == EPOCHS[1:]


def test_epochs_that_begin_in_a_segment_of_which_nothing_is_readable_are_kept(made: Logs) -> None:
    """They tell a stale copy from a whole one."""
    copy = copy_of(made)
    made.log.flush()
    made.kill()
    first = made.files("*.log")[0]
    path = made.folder / first
    path.write_bytes(bytes(path.stat().st_size))
    middle = made.folder / made.files("*.log")[1]
    middle.write_bytes(bytes(middle.stat().st_size))
    (made.path / "recovery-point-offset-checkpoint").write_bytes(b"0\n1\nt 0 0\n")
    log = made.open(machine_ran_on=True)
    assert list(log.leader_epochs) == EPOCHS
    (segment, damaged), _ = log.damaged_ranges()
    stale = bytearray(copy[0])
    pack_into(">i", stale, 12, 1)
    with pytest.raises(CopyRefused, match="leader epoch 1"):
        log.repair_of(segment, damaged).accept(memoryview(stale))
    repair_all(log, copy)
    assert list(log.leader_epochs) == EPOCHS
    assert offsets_of(records_of(log)) == list(range(COUNT))


def test_epochs_that_begin_in_a_lost_tail_of_known_length_are_kept(made: Logs) -> None:
    copy = copy_of(made)
    made.log.set_high_watermark(COUNT)
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    path = made.folder / made.files("*.log")[-1]
    path.write_bytes(path.read_bytes()[: batches_of(path)[5][0]])  # from offset 25 on, before the last epoch begins
    (made.path / "recovery-point-offset-checkpoint").write_bytes(b"0\n1\nt 0 30\n")
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == COUNT
    assert list(log.leader_epochs) == EPOCHS
    repair_all(log, copy)
    assert offsets_of(records_of(log)) == list(range(COUNT))


def test_an_unreadable_epoch_file_is_not_said_to_know_the_epochs_of_damaged_records(made: Logs) -> None:
    """The first whole batch's epoch was taken for that of all that is damaged before it, whose copies were refused."""
    copy = copy_of(made)
    made.kill()
    for name in made.files("*.log")[:2]:
        path = made.folder / name
        path.write_bytes(bytes(path.stat().st_size))
    (made.folder / "leader-epoch-checkpoint").write_bytes(b"0\nx\n")
    log = made.open(machine_ran_on=True)
    assert log.damaged_ranges()
    repair_all(log, copy)
    assert list(log.leader_epochs) == EPOCHS


def test_retention_by_age_counts_a_damaged_segment_as_old_as_its_file(logs: MakeLogs) -> None:
    """The newest records are those that cannot be read; else they would go instead of being repaired."""
    made = logs(segment_bytes=1000, retention_ms=1000)
    for number in range(COUNT):
        made.append(batch(value=b"%03d" % number * 10, timestamp=NOW + 100 * number))
    made.log.set_high_watermark(COUNT)
    segment = made.log.segments.first
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    position, _ = batches_of(path)[-1]
    data[100 : position + 100] = bytes(position)
    path.write_bytes(data[: segment.size_bytes])
    scrub(made.log)
    assert segment.damage
    assert made.log.disk.modified_ms(segment.path) > NOW
    made.log.maintain(NOW + 100 * segment.next_offset + 500)
    assert made.log.log_start_offset == 0
    made.log.maintain(made.log.disk.modified_ms(segment.path) + 1001)
    assert made.log.log_start_offset > 0


def confirmed_end(log: PartitionLog, epoch: int) -> tuple[int, int]:
    for _ in range(2 * log.segment_count):
        try:
            return log.confirmed_end_of_epoch(epoch)
        except Examination as examination:
            examination.warm()
    raise AssertionError(f"examined again and again: {list(log.leader_epochs)}")


@pytest.mark.parametrize("asked", [0, 1, 2, 4, 5, 6])
@pytest.mark.parametrize(
    "wrong",
    ["6 0", "0 0", "0 0|2 3|5 20|6 26", "0 0|2 25|5 26|6 27", "0 0|5 12|6 26", "1 0|2 12|5 20|6 26", "0 0|6 29"],
)
def test_the_end_of_an_epoch_is_what_the_batches_say(made: Logs, wrong: str, asked: int) -> None:
    """Another replica cuts its log there: of a wrong file that can be read it cut what was committed."""
    made.close()
    rows = wrong.split("|")
    (made.folder / "leader-epoch-checkpoint").write_text("\n".join(["0", str(len(rows)), *rows]) + "\n")
    log = made.open()
    log.assign_epoch(7)
    assert confirmed_end(log, asked) == LeaderEpochs([*EPOCHS, (7, COUNT)]).end_offset_for(asked, COUNT)


def test_a_log_that_would_keep_what_it_has_of_an_epoch_is_compared_where_it_ends(made: Logs) -> None:
    """A wrong epoch file would let it keep records of an older leader."""
    log = made.log
    for reached in (13, 20):
        assert log.confirmed_end_of_epoch(2, reached) == (2, 20)
    log.leader_epochs.clear()
    for epoch, start in EPOCHS:
        log.leader_epochs.assign(epoch, start + 2 * (start == 20))
    assert log.confirmed_end_of_epoch(2, 20) == (2, 22)
    with pytest.raises((Examination, DamagedRecords)):
        log.confirmed_end_of_epoch(2, 21)


@pytest.mark.parametrize("reached", [13, INT64_MAX])
def test_the_batches_that_are_compared_with_the_epochs_are_not_awaited_from_the_device(
    made: Logs, monkeypatch: pytest.MonkeyPatch, reached: int
) -> None:
    """A follower that was away asks for thousands of partitions in one request, on the loop."""
    log = made.close_and_open()
    file, warmed = type(log.segments.active.file), set()
    nowait = file.read_at_nowait

    def read_at_nowait(self: OsFile, size_bytes: int, position: int) -> bytes | None:
        return nowait(self, size_bytes, position) if (self._path, position) in warmed else None

    monkeypatch.setattr(file, "read_at_nowait", read_at_nowait)
    for _ in range(10):
        try:
            assert log.confirmed_end_of_epoch(2, reached) == (2, 20)
            break
        except ColdRead as cold:
            warmed.add((cold.path, cold._position))
    assert 1 <= len(warmed) <= 4


@pytest.mark.parametrize("offset", [11, 12])
def test_the_end_of_an_epoch_whose_batches_are_damaged_is_unknown_until_they_are_repaired_or_lost(
    made: Logs, offset: int
) -> None:
    copy = copy_of(made)
    name = next(name for name in reversed(made.files("*.log")) if int(name[:20]) <= offset)
    damage(made.folder / name, offset - int(name[:20]), "CRC")
    scrub(made.log)
    with pytest.raises(DamagedRecords):
        made.log.confirmed_end_of_epoch(0)
    assert made.log.confirmed_end_of_epoch(2) == (2, 20)
    made.log.accept_loss(*(each for _, each in made.log.damaged_ranges()))
    assert made.log.confirmed_end_of_epoch(0) == (0, 12)
    repair_all(made.log, copy)
    assert made.log.confirmed_end_of_epoch(0) == (0, 12)


def test_no_epoch_begins_inside_of_a_batch(logs: MakeLogs) -> None:
    made = logs()
    for _ in range(4):
        made.append(batch(5), epoch=0)
    made.close()
    (made.folder / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 7\n")
    log = made.open()
    log.assign_epoch(1)
    assert confirmed_end(log, 0) == (0, 20)


@pytest.mark.parametrize("wrong", ["0 0|2 11|5 20|6 26", "0 0|2 13|5 20|6 26"])
def test_an_epoch_file_that_is_wrong_for_a_lost_batch_refuses_no_committed_copy(made: Logs, wrong: str) -> None:
    """The neighbours agree with the file and the copy alike, and both whole replicas were refused for ever."""
    offset = 11 if "2 11" in wrong else 12
    copy = copy_of(made)
    made.close()
    rows = wrong.split("|")
    (made.folder / "leader-epoch-checkpoint").write_text("\n".join(["0", str(len(rows)), *rows]) + "\n")
    name = next(name for name in reversed(made.files("*.log")) if int(name[:20]) <= offset)
    damage(made.folder / name, offset - int(name[:20]), "zeros")
    log = made.open()
    scrub(log)
    [(segment, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (offset, offset + 1)
    work = log.repair_of(segment, damaged)
    if "2 11" in wrong:
        with pytest.raises(CopyRefused) as refused:
            work.accept(memoryview(copy[offset]))
        assert refused.value.is_of_other_epoch
    work.is_committed = True
    work.accept(memoryview(copy[offset]))
    check = work.finish()
    check.run()
    assert log.finish_repair(check)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == EPOCHS


def test_a_lost_end_whose_epochs_the_file_lacks_refuses_no_committed_copy(made: Logs) -> None:
    """The last epoch that was known counted as the highest, and whole copies as others' records."""
    copy = copy_of(made)
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    path = made.folder / made.files("*.log")[-1]
    path.write_bytes(path.read_bytes()[: batches_of(path)[3][0]])  # from offset 23 on, of epoch 5
    (made.path / "recovery-point-offset-checkpoint").write_bytes(b"0\n1\nt 0 30\n")
    (made.folder / "leader-epoch-checkpoint").write_bytes(b"0\n4\n0 0\n2 12\n5 20\n")
    log = made.open(machine_ran_on=True)
    [(segment, damaged)] = log.damaged_ranges()
    assert log.leader_epochs.latest == 5
    work = log.repair_of(segment, damaged)
    with pytest.raises(CopyRefused) as refused:
        work.accept(memoryview(b"".join(copy[offset] for offset in range(damaged.first_offset, COUNT))))
    assert refused.value.is_of_other_epoch
    work.is_committed = True
    work.accept(memoryview(b"".join(copy[offset] for offset in range(work.next_offset, COUNT))))
    check = work.finish()
    check.run()
    assert log.finish_repair(check)
    assert list(log.leader_epochs) == EPOCHS
    assert offsets_of(records_of(log)) == list(range(COUNT))


def test_epochs_that_the_scrubber_corrects_are_filed_at_once(logs: MakeLogs) -> None:
    """After a kill the file from before said that whole batches were damaged."""
    made = logs()
    for epoch in (0, 0, 1, 1):
        made.append(batch(), epoch=epoch)
    made.log.roll(NOW)
    made.append(batch(), epoch=1)
    made.close()
    path = made.folder / "leader-epoch-checkpoint"
    right = path.read_bytes()
    path.write_bytes(b"0\n1\n0 0\n")
    log = made.open()
    scrub(log)
    assert list(log.leader_epochs) == [(0, 0), (1, 2)]
    assert path.read_bytes() == right
