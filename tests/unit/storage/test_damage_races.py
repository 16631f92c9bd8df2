"""Damage and repair while the log changes: cut, emptied, cleaned, written to, scrubbed, out of descriptors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk, batch, idempotent, marker, offsets_of, read, records_of
from tests.unit.storage.cleaning import clean
from tests.unit.storage.test_damage import batches_of, copy_of, damage, repair, served
from tidelog.protocol.batches.record_batch import HEADER_SIZE
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.disk import File, OsFile
from tidelog.storage.log.compaction import CleaningFailed
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.repair import CopyRefused
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments import reader as reader_module
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import ColdRead, Examination
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.sparse_index import SparseIndex, offset_index

MakeLogs = Callable[..., Logs]


def scrub(log: PartitionLog) -> None:
    work = Scrub(log, log.segments.active)
    work.run(10**9)
    work.finish()


def damage_of(log: PartitionLog) -> tuple[Segment, DamagedRange]:
    [found] = log.damaged_ranges()
    return found


def test_damage_that_is_not_there_any_more_is_in_the_log_file(logs: MakeLogs, caplog: pytest.LogCaptureFixture) -> None:
    """It disappeared without a line: a device that reads wrong bytes once went unnoticed."""
    made = logs()
    made.append(idempotent(0, count=2), idempotent(2, count=2))
    path = made.folder / made.files("*.log")[0]
    whole = path.read_bytes()
    damage(path, 1, "CRC")
    scrub(made.log)
    assert damage_of(made.log)
    path.write_bytes(whole)
    caplog.clear()
    scrub(made.log)
    assert made.log.damaged_ranges() == []
    assert ["does not find this any more" in each.getMessage() for each in caplog.records] == [True]


@pytest.fixture
def hidden(logs: MakeLogs) -> Logs:
    """After a kill, thirty batches of two records of one producer, of which damage hides [40, 42)."""
    made = logs(segment_bytes=100_000)
    for n in range(30):
        made.append(idempotent(2 * n, count=2))
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 20, "CRC")
    log = made.open(machine_ran_on=True)
    assert log.lacks_producers
    with pytest.raises(KafkaError) as refused:
        log.append_as_leader(idempotent(60), 1, NOW)
    assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    return made


class TestProducersAreKnownAgainWhenTheDamageIsGone:
    def test_cut_off(self, hidden: Logs) -> None:
        hidden.log.truncate_to(30)
        assert hidden.log.append_as_leader(idempotent(28, count=2), 1, NOW).duplicate
        assert hidden.log.append_as_leader(idempotent(30, count=2), 1, NOW).first_offset == 30

    def test_deleted(self, hidden: Logs) -> None:
        hidden.log.delete_records(50)
        assert hidden.log.append_as_leader(idempotent(60, count=2), 1, NOW).first_offset == 60

    def test_emptied(self, hidden: Logs) -> None:
        hidden.log.truncate_fully_and_start_at(100)
        assert hidden.log.append_as_leader(idempotent(0, count=2), 1, NOW).first_offset == 100

    def test_a_gap_of_all_replicas(self, hidden: Logs) -> None:
        hidden.log.accept_gap(*damage_of(hidden.log))
        assert hidden.log.append_as_leader(idempotent(60, count=2), 1, NOW).first_offset == 60


def test_a_cut_does_not_forget_the_producer_whose_batch_is_damaged(logs: MakeLogs) -> None:
    """The log knew it from the append. What is sent again would be appended a second time, or be out of sequence."""
    made = logs()
    made.append(idempotent(0, count=2), idempotent(0, producer_id=8), idempotent(0, producer_id=9))
    copy = copy_of(made)
    damage(made.folder / made.files("*.log")[0], 1, "CRC")
    for _ in range(2):
        made.log.segments.age_trust()
    with pytest.raises(DamagedRecords):
        read(made.log, 2, 1000, 4)
    assert made.log.append_as_leader(idempotent(0, producer_id=8), 0, NOW).first_offset == 2, "it is known"
    made.log.truncate_to(3)
    for producer_id in (8, 7):
        with pytest.raises(KafkaError, match="being repaired"):
            made.log.append_as_leader(idempotent(0, producer_id=producer_id), 0, NOW)
    repair(made.log, copy)
    assert made.log.append_as_leader(idempotent(0, producer_id=8), 0, NOW).first_offset == 2
    assert made.log.append_as_leader(idempotent(1, producer_id=8), 0, NOW).first_offset == 3


def test_a_cut_does_not_refuse_again_what_goes_on_though_no_replica_has_what_is_damaged(hidden: Logs) -> None:
    hidden.log.accept_loss(damage_of(hidden.log)[1])
    hidden.append(idempotent(60))
    hidden.log.truncate_to(60)
    hidden.append(idempotent(60))


def test_a_copy_that_comes_after_a_cut_is_not_written_over_what_was_appended_since(logs: MakeLogs) -> None:
    made = logs(segment_bytes=100_000)
    for n in range(30):
        made.append(idempotent(2 * n, count=2, value=b"old"))
    copy, log = copy_of(made), made.log
    damage(made.folder / made.files("*.log")[0], 20, "CRC")
    scrub(log)
    segment, damaged = damage_of(log)
    work = log.repair_of(segment, damaged)
    log.truncate_to(20)
    for _ in range(20):
        log.append_as_leader(batch(2, value=b"new"), 1, NOW)
    before = Path(segment.path).read_bytes()
    assert work.is_obsolete
    with pytest.raises(CopyRefused, match="has changed"):
        work.accept(memoryview(copy[damaged.first_offset]))
    assert Path(segment.path).read_bytes() == before


def test_a_copy_that_comes_after_the_directory_has_failed_is_not_written(logs: MakeLogs) -> None:
    made = logs()
    made.append(*[batch(2) for _ in range(5)])
    copy, log = copy_of(made), made.log
    damage(made.folder / made.files("*.log")[0], 2, "CRC")
    scrub(log)
    segment, damaged = damage_of(log)
    work = log.repair_of(segment, damaged)
    before = Path(segment.path).read_bytes()
    made.directory.fail("the device is gone")
    with pytest.raises(CopyRefused, match="has changed"):
        work.accept(memoryview(copy[damaged.first_offset]))
    assert Path(segment.path).read_bytes() == before


@pytest.mark.parametrize("ending", ["while it is open", "after a kill"])
def test_a_stale_replica_has_no_copy_of_a_range_in_which_an_epoch_begins(logs: MakeLogs, ending: str) -> None:
    made = logs()
    made.append(*[batch(2, value=b"right") for _ in range(10)], epoch=0)
    made.append(*[batch(2, value=b"right") for _ in range(10)], epoch=3)
    copy = copy_of(made)
    made.log.flush()
    if ending == "after a kill":
        made.directory.write_checkpoints()
        made.kill()
        damage(made.folder / made.files("*.log")[0], 10, "CRC")
        made.open(machine_ran_on=True)
    else:
        damage(made.folder / made.files("*.log")[0], 10, "CRC")
        scrub(made.log)
    log = made.log
    assert list(log.leader_epochs) == [(0, 0), (3, 20)]
    segment, damaged = damage_of(log)
    with pytest.raises(CopyRefused, match="leader epoch 0"):
        log.repair_of(segment, damaged).accept(batch(2, value=b"stale", base_offset=20, leader_epoch=0))
    repair(log, copy)
    assert {record.value for record in records_of(log)} == {b"right"}


def test_a_scrub_does_not_forget_damage_that_was_found_behind_its_back(logs: MakeLogs) -> None:
    made = logs()
    made.append(*[batch(2) for _ in range(10)])
    log = made.log
    early = Scrub(log, log.segments.active)
    early.run(10**9)
    damage(made.folder / made.files("*.log")[0], 4, "CRC")
    scrub(log)
    assert damage_of(log)
    early.finish()
    assert damage_of(log)


def test_aborted_transactions_are_known_while_damage_hides_their_markers_and_after_it(logs: MakeLogs) -> None:
    made = logs()
    made.append(idempotent(0, 2, transactional=True))
    made.append(marker(abort=True), from_client=False)
    made.append(idempotent(2, 2, transactional=True))
    made.append(marker(abort=False), from_client=False)
    aborted = made.log.aborted_transactions(0, 6)
    assert len(aborted) == 1
    copy = copy_of(made)
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 1, "CRC")
    log = made.open(machine_ran_on=True)
    assert log.aborted_transactions(0, 6) == aborted
    repair(log, copy)
    assert log.aborted_transactions(0, 6) == aborted
    log = made.close_and_open()
    assert log.aborted_transactions(0, 6) == aborted


def test_an_index_of_transactions_that_was_made_in_damage_is_made_again_after_its_repair(logs: MakeLogs) -> None:
    made = logs()
    made.append(idempotent(0, 2, transactional=True))
    made.append(marker(abort=True), from_client=False)
    made.append(batch(2))
    aborted = made.log.aborted_transactions(0, 5)
    copy = copy_of(made)
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 1, "CRC")
    (made.folder / made.files("*.txnindex")[0]).unlink()
    log = made.open(machine_ran_on=True)
    assert log.last_stable_offset == 0, "the transaction looks open"
    repair(log, copy)
    assert log.aborted_transactions(0, 5) == aborted
    assert log.last_stable_offset == 5


@pytest.fixture
def compacted(logs: MakeLogs) -> Logs:
    made = logs(segment_bytes=600, cleanup_policy=frozenset({"compact"}))
    for n in range(40):
        made.append(batch(1, key=b"k%d" % n))
    made.log.roll(NOW)
    assert made.log.segment_count > 4
    return made


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("what", ["emptied", "cut", "gone"])
def test_a_cleaning_does_not_take_what_is_missing_for_compacted(compacted: Logs, what: str, is_known: bool) -> None:
    copy = copy_of(compacted)
    compacted.close()
    path = compacted.folder / compacted.files("*.log")[1]
    if what == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if what == "emptied" else path.read_bytes()[: -batches_of(path)[-1][1]])
    log = compacted.open()
    if is_known:
        list(served(log))
        assert log.damaged_ranges()
    with pytest.raises((CleaningFailed, CorruptIndex)):
        clean(log)
    list(served(log))
    repair(log, copy)
    assert offsets_of(records_of(log)) == list(range(40))
    clean(log)
    assert offsets_of(records_of(log)) == list(range(40))


def test_a_reader_of_a_compacted_log_does_not_pass_over_a_segment_that_is_gone(compacted: Logs) -> None:
    compacted.close()
    gone = int(compacted.files("*.log")[1][:20])
    (compacted.folder / compacted.files("*.log")[1]).unlink()
    log = compacted.open()
    assert read(log, 0, 100_000, log.log_end_offset).next_offset == gone
    with pytest.raises(DamagedRecords):
        read(log, gone, 100_000, log.log_end_offset)


class ExhaustedDisk(QuickDisk):
    is_exhausted = False

    def open(self, path: str, *, create: bool = False) -> File:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return super().open(path, create=create)

    def read_file(self, path: str) -> bytes:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return super().read_file(path)


def test_an_append_is_all_or_nothing_though_rows_of_an_index_cannot_reach_their_file(tmp_path: Path) -> None:
    disk = ExhaustedDisk()
    made = Logs(tmp_path / "data", LogConfig(index_interval_bytes=0, segment_bytes=10_000_000), disk)
    made.append(batch(), idempotent(0, transactional=True))
    disk.is_exhausted = True
    for n in range(1500):
        made.append(batch(timestamp=NOW + n))
    made.append(marker(abort=True), from_client=False)
    log = made.log
    assert log.log_end_offset == 1503
    found = log.max_timestamp_offset()
    assert found is not None
    assert found.timestamp == NOW + 1499
    aborted = log.aborted_transactions(0, 1503)
    assert len(aborted) == 1
    disk.is_exhausted = False
    made.append(*[batch(timestamp=NOW + 2000 + n) for n in range(200)])
    index = log.segments.active.offset_index
    assert [offset for offset, _ in index.rows()] == list(range(1, 1703))
    assert len(index.rows_in_memory()) < 600, "they are in the file by now"
    log.roll(NOW)
    log = made.close_and_open()
    assert offsets_of(records_of(log)) == [offset for offset in range(1703) if offset != 1502]  # the marker
    assert log.aborted_transactions(0, 1503) == aborted


def test_a_shortage_during_an_examination_hides_no_whole_batches(tmp_path: Path) -> None:
    """Only the index shows that those between two damaged places are the log's, and it was made anew without them."""
    disk = ExhaustedDisk()
    made = Logs(tmp_path / "data", LogConfig(index_interval_bytes=0, segment_bytes=10_000_000), disk)
    made.append(*[batch(1, value=bytes(500)) for _ in range(60)])
    made.log.roll(NOW)
    made.append(batch())
    log = made.close_and_open()
    path = made.folder / made.files("*.log")[0]
    data, size = bytearray(path.read_bytes()), len(batch(1, value=bytes(500)))
    for number in (5, 50):
        data[number * size : number * size + HEADER_SIZE + 20] = bytes(HEADER_SIZE + 20)
    path.write_bytes(data)
    with pytest.raises(Examination) as cold:
        log.read(5, 1000, log.log_end_offset)
    disk.is_exhausted = True
    cold.value.warm()
    with pytest.raises(OSError, match="Too many open files"):
        log.read(5, 1000, log.log_end_offset)
    disk.is_exhausted = False
    assert list(served(log)) == [each for each in range(61) if each not in (5, 50)]


class LongFiles(QuickDisk):
    """It counts what is asked of it."""

    calls = 0

    def size_of(self, path: str) -> int:
        LongFiles.calls += 1
        return super().size_of(path)

    def read_file(self, path: str) -> bytes:
        LongFiles.calls += 1
        return super().read_file(path)


@pytest.fixture
def long_index(tmp_path: Path) -> Logs:
    made = Logs(tmp_path / "data", LogConfig(index_interval_bytes=0, segment_bytes=10_000_000), LongFiles())
    made.append(*[batch(timestamp=NOW + n) for n in range(3000)])
    return made


def test_a_scrub_begins_and_a_cut_ends_without_a_look_at_every_row_of_an_index(long_index: Logs) -> None:
    log = long_index.log
    LongFiles.calls = 0
    work = Scrub(log, log.segments.active)
    assert LongFiles.calls < 10, "others wait meanwhile"
    work.run(10**9)
    assert not work.finish()
    log.truncate_to(1000)
    assert LongFiles.calls < 100
    assert log.segments.active.offset_index.last_key == 999
    assert log.segments.active.time_index.last_value == 999


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_a_scrub_finds_an_index_whose_file_is_cut_or_wrong_in_its_own_thread(long_index: Logs, suffix: str) -> None:
    log = long_index.log
    log.roll(NOW)
    segment = log.segments.first
    path = long_index.folder / long_index.files(f"*.{suffix}")[0]
    whole = path.read_bytes()
    for wrong in (whole[:500], whole[:500] + bytes(20) + whole[520:]):
        work = Scrub(log, segment)
        path.write_bytes(wrong)
        work.run(10**9)
        assert not work.finish()
        assert path.read_bytes() == whole


def test_a_cut_during_an_examination_leaves_no_whole_records_unread(logs: MakeLogs) -> None:
    """What it had found was out of date, and was not adopted: the records counted as damaged, without another look."""
    made = logs(index_interval_bytes=1)
    made.append(*[batch(value=b"v" * 100) for _ in range(200)])
    index = made.log.segments.active.offset_index
    index.write_rows()
    path = Path(index.path)
    data = bytearray(path.read_bytes())
    data[20 * 8 + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(Examination) as examination:
        made.log.read(21, 10_000, 200)
    made.log.truncate_to(190)
    examination.value.warm()
    assert read(made.log, 21, 10_000, 190).next_offset > 22
    assert offsets_of(records_of(made.log)) == list(range(190))
    assert not made.log.damaged_ranges()


@pytest.mark.parametrize("count", [0, 1, 40, 64, 600, 1000])
def test_rows_below_a_bound_are_counted_in_memory_and_in_the_file(tmp_path: Path, count: int) -> None:
    index = offset_index(QuickDisk(), str(tmp_path / "index"), 7)
    for number in range(1, count + 1):
        index.append(7 + 10 * number, 100 * number)
    for below in (0, 1, 30, 63, 64, 65, 536, 599, 999, 1000):
        assert index.count_below(7 + 10 * below, 0) == min(count, max(0, below - 1))
        assert index.count_below(100 * below + 1, 1) == min(count, below)


def test_a_last_batch_behind_damage_with_the_base_offset_of_another_is_found_by_what_the_copy_has_behind(
    logs: MakeLogs,
) -> None:
    """Nothing else says where it belongs: it was served in the place of another record, which was passed over."""
    made = logs()
    for number in range(10):
        made.append(batch(value=b"%d" % number * 40))
    copy = copy_of(made)
    made.kill()
    path = made.folder / f"{0:020d}.log"
    damage(path, 7, "zeros")
    data = bytearray(path.read_bytes())
    size = len(data) // 10
    data[8 * size : 9 * size] = bytes(size)
    data[9 * size : 9 * size + 8] = (8).to_bytes(8, "big")
    path.write_bytes(data)
    log = made.open(machine_ran_on=True)
    assert (log.log_end_offset, [each[2:4] for _, each in log.damaged_ranges()]) == (9, [(7, 8)])
    log.roll(NOW)
    [(segment, damaged)] = log.damaged_ranges()
    with pytest.raises(CopyRefused):
        log.repair_of(segment, damaged).accept(memoryview(b"".join(copy[offset] for offset in (7, 8, 9))))
    [(segment, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (7, 9)
    repair(log, copy)
    assert not log.damaged_ranges()
    assert [record.value for record in records_of(log)] == [b"%d" % number * 40 for number in range(9)]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_appended_while_a_segment_is_examined_keeps_all_index_rows(logs: MakeLogs, is_damaged: bool) -> None:
    """Only the newest rows are in memory, and the others were lost: a read of what they are about held up the loop for
    seconds. Rows of a file that is damaged meanwhile are not taken."""
    made = logs(index_interval_bytes=1)
    made.append(*[batch(timestamp=NOW + n) for n in range(20)])
    log, segment = made.log, made.log.segments.active
    damage(made.folder / made.files("*.log")[0], 5, "CRC")
    work = Scrub(log, segment)
    made.append(*[batch(timestamp=NOW + n) for n in range(20, 2000)])
    times = segment.time_index.rows()
    before = segment.offset_index.rows()
    if is_damaged:
        path = Path(segment.offset_index.path)
        path.write_bytes(path.read_bytes()[:8000])
    work.run(10**9)
    assert work.finish()
    after = segment.offset_index.rows()
    is_whole = [row for row in after if row != (6, 438)] == [row for row in before if row[0] not in (5, 6)]
    assert is_whole is not is_damaged
    assert (set(after) <= set(before), after[-64:]) == (True, before[-64:])
    assert segment.time_index.rows()[-1500:] == times[-1500:]
    assert [read(log, n, 100, 2000).next_offset > n for n in (4, 6, 900, 1999)] == [True] * 4


def test_the_index_rows_of_an_examination_are_taken_over_whole(logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 of them, one by one, held up the loop for 0.35 s."""
    made = logs(index_interval_bytes=1)
    made.append(*[batch(timestamp=NOW + n) for n in range(20)])
    log, segment = made.log, made.log.segments.active
    rows = [index.rows() for index in (segment.offset_index, segment.time_index)]
    work = Scrub(log, segment)
    damage(made.folder / made.files("*.log")[0], 19, "CRC")
    work.run(10**9)
    monkeypatch.setattr(SparseIndex, "append", lambda *_: pytest.fail("a row alone"))
    assert work.finish()
    assert [each[2:4] for _, each in log.damaged_ranges()] == [(19, 20)]
    assert [index.rows() for index in (segment.offset_index, segment.time_index)] == [each[:-1] for each in rows]


@pytest.mark.parametrize("is_examined", [False, True])
def test_a_lack_of_memory_on_the_thread_is_the_error_of_the_next_read(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, is_examined: bool
) -> None:
    """It was lost: each read had the whole segment examined again, without a pause, as long as clients asked."""
    made = logs()
    made.append(*[batch() for _ in range(20)])
    log, segment = made.log, made.log.segments.active
    log.set_high_watermark(20)
    damage(made.folder / made.files("*.log")[0], 5, "CRC")
    segment.distrust()

    def exhausted(*arguments: object, **named: object) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        if is_examined:
            patch.setattr(reader_module, "examine", exhausted)
            with pytest.raises(ColdRead) as cold:
                log.read(5, 100, 20)
            cold.value.warm()
        else:
            patch.setattr(OsFile, "read_at", exhausted)
            ColdRead(segment, 0, 100).warm()
            assert segment.unread is not None
            return
        with pytest.raises(OSError, match="no memory") as raised:
            log.read(5, 100, 20)
        assert log.can_retry(raised.value)
    with pytest.raises(ColdRead) as cold:
        log.read(5, 100, 20)
    cold.value.warm()
    with pytest.raises(DamagedRecords):
        log.read(5, 100, 20)


@pytest.mark.parametrize("later", [5, 100])
def test_a_wrong_largest_time_ends_with_an_examination_during_which_records_are_appended(
    logs: MakeLogs, later: int
) -> None:
    """It counted as that of what was appended meanwhile. No batch has it: the newest record was not found, and the
    segment was kept for ever."""
    made = logs(index_interval_bytes=100)
    made.append(*[batch(timestamp=NOW + n) for n in range(20)])
    made.close()
    path = made.folder / made.files("*.timeindex")[0]
    data = bytearray(path.read_bytes())
    data[-10] ^= 0x40
    path.write_bytes(data)
    log = made.open()
    with pytest.raises(Examination) as examination:
        log.max_timestamp_offset(wait=False)
    made.append(batch(timestamp=NOW + later), batch(timestamp=NOW + 4))
    examination.value.warm()
    newest = (NOW + 100, 20) if later == 100 else (NOW + 19, 19)
    assert log.max_timestamp_offset(wait=False) == (*newest, 0)
    log.roll(NOW + 100)
    assert log.segments.first.time_index.rows()[-1] == newest
