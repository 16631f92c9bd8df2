"""Damage that hides where transactions begin or end: a reader of committed records gets these, and no others."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk, batch, idempotent, marker, read
from tests.unit.storage.test_damage import copy_of, damage, repair, repair_range
from tests.unit.storage.test_removed_files import scrub
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.files.disk import File
from tidelog.storage.log import recovery
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.transaction_index import AbortedTransaction, TransactionIndex

MakeLogs = Callable[..., Logs]
ENDINGS = ["after a clean stop", "after a kill"]
CYCLES = 7


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Transactions of two producers, each every second time aborted, over several segments."""
    made = logs(segment_bytes=1100, index_interval_bytes=200)
    sequences = {7: 0, 8: 0}

    def send(producer_id: int) -> None:
        sequence = sequences[producer_id]
        made.append(idempotent(sequence, producer_id=producer_id, transactional=True), from_client=False)
        sequences[producer_id] += 1

    for cycle in range(CYCLES):
        send(7)
        made.append(batch(2, value=b"plain" * 10))
        send(8)
        made.append(batch(1, value=b"plain" * 10))
        made.append(marker(abort=cycle % 2 == 1, producer_id=7), from_client=False)
        send(8)
        made.append(batch(1, value=b"plain" * 10))
        made.append(marker(abort=cycle % 2 == 0, producer_id=8), from_client=False)
    made.log.flush()
    made.directory.write_checkpoints()
    assert made.log.segment_count >= 4
    return made


class Truth:
    """What the whole log says."""

    def __init__(self, made: Logs) -> None:
        log = made.log
        self.end = log.log_end_offset
        self.rows = log.aborted_transactions(0, self.end)
        self.copy = copy_of(made)
        self.committed = set(committed(log))
        assert len(self.rows) == CYCLES
        assert log.last_stable_offset == self.end


def committed(log: PartitionLog) -> list[int]:
    """The offsets of the records that readers of committed records get, from the first one on and from each other."""
    got: list[int] = []
    for offset in range(log.log_start_offset, log.last_stable_offset):
        try:
            result = read(log, offset, 1, stable_bound(log, offset))
        except DamagedRecords:
            continue
        header = next(header for _, header in iter_headers(b"".join(bytes(each) for each in result.regions)))
        if not header.base_offset <= offset <= header.last_offset or header.is_control:
            continue
        rows = log.aborted_transactions(offset, result.next_offset)
        if not (header.is_transactional and any(is_in(row, header.producer_id, offset) for row in rows)):
            got.append(offset)
    return got


def is_readable(log: PartitionLog, offset: int) -> bool:
    try:
        read(log, offset, 1, log.log_end_offset)
    except DamagedRecords:
        return False
    return True


def is_in(row: AbortedTransaction, producer_id: int, offset: int) -> bool:
    return row.producer_id == producer_id and row.first_offset <= offset <= row.last_offset


def check(made: Logs, truth: Truth, ending: str) -> None:
    """A start with the damage, its repair, and one more start."""
    log = made.open(machine_ran_on=ending == "after a kill")
    readable = {offset for offset in range(truth.end) if is_readable(log, offset)}
    bound = min([log.last_stable_offset, *(first_offset for first_offset, _ in log.hidden_ends)])
    got = set(committed(log))
    assert got <= truth.committed, "aborted records are read as committed"
    assert got >= {each for each in truth.committed & readable if each < bound}, "committed records are passed over"
    repair(log, truth.copy)
    for _ in range(2):
        assert made.log.log_end_offset == made.log.last_stable_offset == truth.end
        assert made.log.aborted_transactions(0, truth.end) == truth.rows
        assert set(committed(made.log)) == truth.committed
        made.close_and_open()
    made.kill()


def end(made: Logs, ending: str, tmp_path: Path) -> Callable[[], None]:
    """End the process. The function that is returned puts the files back as they were then."""
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
    kept = tmp_path / "kept"
    shutil.copytree(made.path, kept)

    def put_back() -> None:
        shutil.rmtree(made.path)
        shutil.copytree(kept, made.path)

    return put_back


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_any_damaged_batch(made: Logs, ending: str, tmp_path: Path) -> None:
    truth = Truth(made)
    put_back = end(made, ending, tmp_path)
    for name in made.files("*.log"):
        for number in range(len(list(iter_headers((made.folder / name).read_bytes())))):
            damage(made.folder / name, number, "CRC")
            check(made, truth, ending)
            put_back()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["{}.log", "{}.*"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_any_missing_segment(made: Logs, ending: str, pattern: str, tmp_path: Path) -> None:
    """Its index of aborted transactions is about records before it, too."""
    truth = Truth(made)
    put_back = end(made, ending, tmp_path)
    names = made.files("*.log")
    for name in names if ending == "after a clean stop" else names[:-1]:  # after a kill, its end is not known
        for path in made.folder.glob(pattern.format(name[:20])):
            path.unlink()
        check(made, truth, ending)
        put_back()


@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_transaction_that_ends_while_damage_hides_the_end_of_the_one_before(made: Logs, is_rolled: bool) -> None:
    """Its producer seems to have one long transaction, and the records of the first one would count as aborted."""
    made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)
    first = made.append(marker(abort=False, producer_id=9), from_client=False)[0].first_offset
    made.append(batch(1))
    made.directory.write_checkpoints()
    copy, rows, expected = copy_of(made), made.log.aborted_transactions(0, first), set(committed(made.log))
    name, number = next(
        (name, number) for name in made.files("*.log")
        for number, (_, header) in enumerate(iter_headers((made.folder / name).read_bytes()))
        if header.base_offset == first
    )  # fmt: skip
    made.kill()
    damage(made.folder / name, number, "CRC")
    log = made.open(machine_ran_on=True)
    if is_rolled:
        log.roll(log.clock_ms)
    second = made.append(idempotent(21, producer_id=9, transactional=True), from_client=False)[0].first_offset
    end = made.append(marker(abort=True, producer_id=9), from_client=False)[0].first_offset
    assert log.last_stable_offset == log.log_end_offset
    assert set(committed(log)) == expected - {first - 1}
    with pytest.raises(DamagedRecords):
        stable_bound(log, first - 1)
    assert stable_bound(log, 0) == first - 1
    repair(log, copy)
    assert set(committed(log)) == expected
    for each in (log, made.close_and_open()):
        assert each.aborted_transactions(0, end + 1) == [*rows, AbortedTransaction(9, second, end, end + 1)]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_transaction_that_is_aborted_while_damage_hides_all_its_records(
    made: Logs, is_rolled: bool, ending: str
) -> None:
    """Once they were repaired, readers of committed records got them."""
    first = made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)[0].first_offset
    made.log.flush()
    made.directory.write_checkpoints()
    copy, rows, expected = copy_of(made), made.log.aborted_transactions(0, first), set(committed(made.log))
    made.close() if ending == "after a clean stop" else made.kill()
    [*_, name] = made.files("*.log")
    damage(made.folder / name, len(list(iter_headers((made.folder / name).read_bytes()))) - 1, "CRC")
    log = made.open(machine_ran_on=ending == "after a kill")
    assert log.log_end_offset == first + 1
    if is_rolled:
        log.roll(log.clock_ms)
    end = made.append(marker(abort=True, producer_id=9), from_client=False)[0].first_offset
    with contextlib.suppress(DamagedRecords):  # a clean stop leaves what the last batch was: its damage is not known
        read(log, first, 1, log.log_end_offset)
    repair(log, copy)
    for each in (log, made.close_and_open()):
        assert each.aborted_transactions(0, end + 1) == [*rows, AbortedTransaction(9, first, end, end + 1)]
        assert set(committed(each)) == expected


@pytest.mark.parametrize("ended", ["before", "while it is damaged", "after its repair"])
@pytest.mark.parametrize("left_offset", [2, 67])
@pytest.mark.parametrize("is_lost", [True, False])
def test_what_was_aborted_is_not_read_once_it_is_repaired_though_other_damage_is_left(
    made: Logs, is_lost: bool, left_offset: int, ended: str
) -> None:
    """The damage that was left may be one without a copy. Until its end, readers of committed records got these."""
    first = made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)[0].first_offset
    if ended == "before":
        made.append(marker(abort=True, producer_id=9), from_client=False)
    while made.log.log_end_offset <= left_offset:
        made.append(batch(1))
    made.log.flush()
    made.directory.write_checkpoints()
    copy = copy_of(made)
    made.kill()
    for offset in (first, left_offset):
        damage(*_place_of(made, offset), "CRC")
    log = made.open(machine_ran_on=True)
    if ended == "while it is damaged":
        made.append(marker(abort=True, producer_id=9), from_client=False)
    scrub(log)
    ranges = {each.first_offset <= first < each.end_offset: (segment, each) for segment, each in log.damaged_ranges()}
    assert set(ranges) == {True, False}
    repair_range(log, *ranges[True], copy)
    if ended == "after its repair":
        made.append(marker(abort=True, producer_id=9), from_client=False)
    for each in (log, made.close_and_open()):
        assert is_readable(each, first)
        assert first not in committed(each)
        if is_lost:
            each.accept_loss(ranges[False][1])
            assert first not in committed(each)


def begin_transaction(made: Logs) -> int:
    """The offset of a transaction's first record. It is on the device, and the transaction is open."""
    first = made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)[0].first_offset
    made.append(batch(2))
    made.log.flush()
    made.directory.write_checkpoints()
    return first


def abort(made: Logs) -> None:
    made.append(marker(abort=True, producer_id=9), from_client=False)


def accept_loss(made: Logs, lost: DamagedRange, *, is_aborted: bool, is_rolled: bool) -> None:
    made.log.accept_loss(lost)
    if is_aborted:
        abort(made)
    if is_rolled:
        made.log.roll(NOW)
        made.append(batch(1))


def assert_aborted(made: Logs, first: int) -> None:
    """Now and after a start, the record can be read, and not as a committed one."""
    for is_started in (False, True):
        log = made.close_and_open() if is_started else made.log
        assert not log.damaged_ranges()
        assert is_readable(log, first)
        assert first not in committed(log)


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("ended", ["while it counts as lost", "after its repair"])
def test_what_was_aborted_is_not_read_once_a_range_that_counted_as_lost_is_repaired(
    made: Logs, ended: str, is_rolled: bool
) -> None:
    """A replica comes back that has it. The producers were known without the range, as far as a log without it knows
    them: readers of committed records got the aborted ones.
    """
    first = begin_transaction(made)
    copy = copy_of(made)
    made.kill()
    damage(*_place_of(made, first), "CRC")
    log = made.open(machine_ran_on=True)
    scrub(log)
    ((segment, each),) = log.damaged_ranges()
    accept_loss(made, each, is_aborted=ended == "while it counts as lost", is_rolled=is_rolled)
    repair_range(log, segment, each, copy)
    if ended == "after its repair":
        abort(made)
    assert_aborted(made, first)


def _place_of(made: Logs, offset: int) -> tuple[Path, int]:
    """The file with the batch of the offset, and the batch's number in it."""
    return next(
        (made.folder / name, number) for name in made.files("*.log")
        for number, (_, header) in enumerate(iter_headers((made.folder / name).read_bytes()))
        if header.base_offset <= offset <= header.last_offset
    )  # fmt: skip


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_repaired_record_of_a_transaction_whose_end_is_damaged_is_not_passed_over(made: Logs, is_lost: bool) -> None:
    """Its producer's next transaction was aborted, and seemed to have begun with that record."""
    first = made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)[0].first_offset
    made.append(batch(1))  # between two ranges
    end = made.append(marker(abort=False, producer_id=9), from_client=False)[0].first_offset
    made.append(idempotent(21, producer_id=9, transactional=True), from_client=False)
    made.append(marker(abort=True, producer_id=9), from_client=False)
    made.append(batch(1))
    made.directory.write_checkpoints()
    copy, expected, rows = copy_of(made), set(committed(made.log)), made.log.aborted_transactions(0, 1000)
    assert first in expected
    made.kill()
    plain = made.log.log_end_offset - 1
    for offset in (first, end, plain) if is_lost else (first, end):
        damage(*_place_of(made, offset), "CRC")
    log = made.open(machine_ran_on=True)
    ranges = log.damaged_ranges()
    assert len(ranges) == 2 + is_lost
    repair_range(log, *ranges[0], copy)
    with pytest.raises(DamagedRecords):
        stable_bound(log, first)
    if is_lost:
        log.accept_loss(ranges[2][1])
    repair_range(log, *ranges[1], copy)
    assert set(committed(log)) == (expected - {plain} if is_lost else expected)
    assert log.aborted_transactions(0, 1000) == rows


@pytest.mark.parametrize("deletion", ["before", "after", "of what no replica has", "of one of two that no replica has"])
@pytest.mark.parametrize("hides_end", [True, False])
def test_damage_to_deleted_records_leaves_no_transaction_open(logs: MakeLogs, deletion: str, hides_end: bool) -> None:
    """It is not repaired, so readers of committed records waited until a producer wrote to the leader."""
    made = logs(segment_bytes=100_000)
    made.append(idempotent(0, transactional=True), batch(1), batch(1), from_client=False)
    if hides_end:
        made.append(marker(abort=False), batch(1), from_client=False)
    made.append(batch(4), idempotent(0, producer_id=8, transactional=True), from_client=False)
    end = made.log.log_end_offset
    if not hides_end:
        made.append(idempotent(1, transactional=True), from_client=False)
    made.append(marker(abort=False, producer_id=8), batch(1), batch(1), from_client=False)
    if deletion == "before":
        made.log.delete_records(end - 3)
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 3 if hides_end else 2, "CRC")
    if "one of two" in deletion:
        damage(made.folder / made.files("*.log")[0], 8, "CRC")
    log = made.open(machine_ran_on=True)
    log.set_high_watermark(log.log_end_offset)
    if deletion != "before":
        assert log.last_stable_offset == 0
        for _, each in log.damaged_ranges() if "no replica" in deletion else ():
            log.accept_loss(each)
        assert log.lacks_producers == (deletion == "after")
        assert log.last_stable_offset == 0
        log.delete_records(end - 3)
    assert len(log.damaged_ranges()) == ("one of two" in deletion)
    assert log.last_stable_offset == (log.log_end_offset if hides_end else end)
    assert not log.lacks_producers


@pytest.mark.parametrize("has_copy", [True, False])
def test_retention_of_a_damaged_end_leaves_no_transaction_open(logs: MakeLogs, has_copy: bool) -> None:
    made = logs(segment_bytes=300)
    made.append(idempotent(0, transactional=True), batch(1), marker(abort=False), from_client=False)
    while len(made.files("*.log")) < 3:
        made.append(batch(1))
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 2, "CRC")
    log = made.open(machine_ran_on=True)
    if not has_copy:
        log.accept_loss(log.damaged_ranges()[0][1])
    assert log.last_stable_offset == 0
    log.set_config(LogConfig(segment_bytes=300, retention_bytes=300))
    log.maintain(NOW)
    assert log.damaged_ranges() == []
    assert 0 < log.log_start_offset < log.last_stable_offset == log.log_end_offset
    assert not log.lacks_producers


@pytest.mark.parametrize("again", ["maintenance", "a batch"])
@pytest.mark.parametrize("has_copy", [True, False])
def test_a_shortage_while_deleted_damage_is_forgotten_leaves_no_transaction_open(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, has_copy: bool, again: str
) -> None:
    """The log start had moved by then, so that the producers were not read again, or known in part."""
    made = logs(segment_bytes=100_000)
    made.append(idempotent(0, transactional=True), batch(1), marker(abort=False), from_client=False)
    made.append(idempotent(0, producer_id=8), idempotent(1, producer_id=8))
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 2, "CRC")
    log = made.open(machine_ran_on=True)
    log.set_high_watermark(log.log_end_offset)
    if not has_copy:
        log.accept_loss(log.damaged_ranges()[0][1])
    with monkeypatch.context() as patches:
        patches.setattr(recovery, "replay", short_of_descriptors)
        with pytest.raises(OSError, match="Too many"):
            log.delete_records(log.damaged_ranges()[0][1].end_offset)
    if again == "maintenance":
        log.maintain(NOW)
        assert log.last_stable_offset == log.log_end_offset
    made.append(idempotent(2, producer_id=8))
    log.set_high_watermark(log.log_end_offset)
    assert log.last_stable_offset == log.log_end_offset
    assert not log.lacks_producers
    assert not log.passes_damage


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_shortage_while_deleted_damage_is_forgotten_keeps_what_is_known_of_open_transactions(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    """The state was made anew in place: readers of committed records got those of an open transaction meanwhile."""
    made = logs(segment_bytes=100_000)
    made.append(batch(1), batch(1))
    if snapshot:
        made.log.roll(NOW)
    first = made.append(idempotent(0, transactional=True), from_client=False)[0].first_offset
    made.append(batch(1), idempotent(0, producer_id=8), idempotent(1, producer_id=8))
    made.directory.write_checkpoints()
    made.kill()
    damage(made.folder / made.files("*.log")[0], 0, "CRC")
    log = made.open(machine_ran_on=True)
    scrub(log)
    assert log.last_stable_offset == first
    assert log.lacks_producers
    known = producers_of(log)
    with monkeypatch.context() as patches:
        patches.setattr(recovery, "replay", short_of_descriptors)
        with pytest.raises(OSError, match="Too many"):
            log.delete_records(1)
    assert (log.last_stable_offset, producers_of(log)) == (first, known)
    log.maintain(NOW)
    assert not log.lacks_producers
    assert (log.last_stable_offset, producers_of(log)) == (first, known)


@pytest.mark.parametrize("ends", ["never", "before the repair"])
@pytest.mark.parametrize("step", ["rebuild_lacking", "replay", "reload_producers"])
def test_a_shortage_behind_a_repair_shows_no_record_as_committed(
    made: Logs, monkeypatch: pytest.MonkeyPatch, step: str, ends: str
) -> None:
    """The range could be read, and nothing said any more that what it begins is open, or was aborted."""
    first = begin_transaction(made)
    copy, expected = copy_of(made), committed(made.log)
    made.kill()
    damage(*_place_of(made, first), "CRC")
    log = made.open(machine_ran_on=True)
    if ends == "before the repair":
        abort(made)
        made.append(batch(1))
        expected += [first + 1, first + 2, first + 4]
    with monkeypatch.context() as patches:
        patches.setattr(recovery, step, short_of_descriptors)
        with pytest.raises(OSError, match="Too many"):
            repair(log, copy)
        assert log.damaged_ranges() == []
        for _ in range(2):
            assert all(stable_bound(log, each) <= max(first, each) for each in range(first - 1, log.log_end_offset))
            with contextlib.suppress(OSError):
                log.maintain(NOW)
    log.maintain(NOW)
    assert committed(log) == expected
    assert (log.hidden_ends, log.repairs_to_reveal) == ((), ())


def test_a_row_that_a_shortage_kept_from_an_index_is_in_its_file_when_the_segment_is_closed(made: Logs) -> None:
    """The first attempt failed, too, and the second took the file for written."""
    log, disk = made.log, ShortDisk()
    index = log.segments.active.transaction_index
    begin_transaction(made)
    index._disk = disk
    abort(made)
    rows = index.rows
    with pytest.raises(OSError, match="Too many"):
        log.roll(NOW)
    disk.is_short = False
    log.roll(NOW)
    assert TransactionIndex(QuickDisk(), index.path, exists=True).rows == rows


class ShortDisk(QuickDisk):
    __slots__ = ("is_short",)

    def __init__(self) -> None:
        self.is_short = True

    def open(self, path: str, *, create: bool = False) -> File:
        if self.is_short:
            short_of_descriptors()
        return super().open(path, create=create)

    def read_file(self, path: str) -> bytes:
        if self.is_short:
            short_of_descriptors()
        return super().read_file(path)


def producers_of(log: PartitionLog) -> dict[int, list[tuple[int, int, int, int, int]]]:
    """Producer id -> its batches that are known."""
    return {producer_id: list(entry.batches) for producer_id, entry in log.producers.entries.items()}


def short_of_descriptors(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_later_repair_elsewhere_keeps_the_record_of_a_transaction_whose_end_is_damaged(made: Logs) -> None:
    """The repair of a range without transactions may not forget those whose end damage elsewhere hides."""
    plain = made.append(batch(1))[0].first_offset
    made.append(batch(1))  # between two ranges
    first = made.append(idempotent(20, producer_id=9, transactional=True), from_client=False)[0].first_offset
    made.append(batch(1))
    end = made.append(marker(abort=True, producer_id=9), from_client=False)[0].first_offset
    made.append(idempotent(21, producer_id=9, transactional=True), from_client=False)
    made.append(marker(abort=False, producer_id=9), from_client=False)
    made.append(batch(1))
    made.directory.write_checkpoints()
    copy, expected = copy_of(made), set(committed(made.log))
    made.kill()
    for offset in (plain, first, end):
        damage(*_place_of(made, offset), "CRC")
    log = made.open(machine_ran_on=True)
    ranges = log.damaged_ranges()
    for place in (1, 0):
        repair_range(log, *ranges[place], copy)
        with pytest.raises(DamagedRecords):
            stable_bound(log, first)
    repair_range(log, *ranges[2], copy)
    assert set(committed(log)) == expected


def test_the_end_of_a_transaction_needs_no_file_of_an_idle_log(made: Logs):
    """Its marker is in the log when the row is added, so that a file which is gone or damaged must not fail it."""
    log = made.log
    for sequence in (0, 1):
        first = log.log_end_offset
        made.append(idempotent(sequence, producer_id=9, transactional=True), from_client=False)
        if sequence:
            [*_, file] = sorted(made.folder.glob("*.txnindex"))
            assert file.stem == f"{log.segments.active.base_offset:020}"
            file.write_bytes(b"damaged")
        made.append(marker(abort=True, producer_id=9), from_client=False)
        rows = log.aborted_transactions(0, log.log_end_offset)
        assert rows[-1].first_offset == first
        for _ in range(2):  # at the second look the log is idle
            log.maintain(NOW)
    assert len(rows) == CYCLES + 2


@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("is_zeroed", [False, True])
def test_a_damaged_index_gets_its_rows_back_though_damage_that_is_not_detected_hides_a_batch(
    made: Logs, is_control: bool, is_zeroed: bool
) -> None:
    """The scrubber made the index anew from batches that it had not checked: rows were missing for good."""
    log = made.close_and_open()
    copy, expected = copy_of(made), log.aborted_transactions(0, log.log_end_offset)
    index = made.folder / made.files("*.txnindex")[0]
    index.write_bytes(bytes([255]) + index.read_bytes()[1:])
    for path in map(made.folder.joinpath, made.files("*.log")):
        data = bytearray(path.read_bytes())
        for position, header in iter_headers(bytes(data)):
            if header.producer_id == 7 and header.is_control == is_control:
                data[position : position + 61] = bytes(61) if is_zeroed else _of_another_producer(data, position)
        path.write_bytes(data)
    for _ in range(2):
        scrub(log)
    while log.damaged_ranges():
        repair(log, copy)
    assert log.aborted_transactions(0, log.log_end_offset) == expected
    log = made.close_and_open()
    assert log.aborted_transactions(0, log.log_end_offset) == expected


def _of_another_producer(data: bytearray, position: int) -> bytes:
    header = data[position : position + 61]
    header[50] ^= 1
    return bytes(header)


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("ended", ["while it counts as lost", "after a start", "after its repair"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["CRC", "zeros"])
@pytest.mark.parametrize("is_scanned", [True, False])
def test_what_was_aborted_is_not_read_once_a_range_that_counted_as_lost_is_repaired_after_a_start(
    made: Logs, ended: str, is_rolled: bool, ending: str, kind: str, is_scanned: bool
) -> None:
    """The producers and transactions that the node wrote before were known without the range."""
    first = begin_transaction(made)
    copy, log = copy_of(made), made.log
    damage(*_place_of(made, first), kind)
    if is_scanned:
        made.kill()
        log = made.open(machine_ran_on=True)
    else:
        made.append(batch(1))
        made.log.segments.distrust_from(0)
        scrub(log)
        log.truncate_to(log.log_end_offset - 1)
        assert log.lacks_producers
        log.set_high_watermark(log.log_end_offset)
    scrub(log)
    ((_, each),) = log.damaged_ranges()
    accept_loss(made, each, is_aborted=ended == "while it counts as lost", is_rolled=is_rolled)
    log.flush()
    made.directory.write_checkpoints()
    made.close() if ending == "after a clean stop" else made.kill()
    log = made.open(machine_ran_on=True)
    if ended == "after a start":
        abort(made)
    scrub(log)
    repair(log, copy)
    if ended == "after its repair":
        abort(made)
    assert_aborted(made, first)
