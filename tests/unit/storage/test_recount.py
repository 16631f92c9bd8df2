"""What damage has hidden is read on a thread, before the repair takes effect. Meanwhile the log changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker
from tests.unit.storage.test_copied_transactions import begin_repair, copy_range, replicas
from tests.unit.storage.test_damage import copy_of, damage
from tests.unit.storage.test_damaged_transactions import committed
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log import partition_log, recount
from tidelog.storage.log.compaction import find_cleanable
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.recount import Recount
from tidelog.storage.log.repair import RepairCheck
from tidelog.storage.segments.damage import CorruptIndex, DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.transaction_index import AbortedTransaction

MakeLogs = Callable[..., Logs]
COUNT = 30
DAMAGED = 10
SECOND = 2 * COUNT


def send(made: Logs, sequence: int, **kw: int) -> int:
    return made.append(idempotent(sequence, transactional=True, **kw), from_client=False)[0].first_offset


def end(made: Logs, *, abort: bool, producer_id: int = 7) -> int:
    return made.append(marker(abort=abort, producer_id=producer_id), from_client=False)[0].first_offset


class Hidden:
    """After a kill, a log of two segments. Producer 7 aborts a transaction in each; the first record of the first one
    is damaged, and its copy is on the device. With `is_longer` the segment is written anew, with a longer batch.
    """

    def __init__(self, made: Logs, *, is_cut: bool = False) -> None:
        self.made = made
        for n in range(DAMAGED):
            send(made, n, producer_id=8)
        self.first = send(made, 0)
        end(made, abort=False, producer_id=8)
        while made.log.log_end_offset < COUNT:
            made.append(batch(1))
        self.rows = [AbortedTransaction(7, self.first, end(made, abort=True), COUNT + 1)]
        made.log.roll(NOW)
        self.second = send(made, 1)
        while made.log.log_end_offset < SECOND:
            made.append(batch(1))
        self.rows.append(AbortedTransaction(7, self.second, end(made, abort=True), SECOND + 1))
        send(made, 2)
        self.expected, copy = set(committed(made.log)), copy_of(made)
        made.kill()
        path = made.folder / made.files("*.log")[0]
        damage(path, self.first, "CRC")
        if is_cut:  # the copy does not fit, so that the file is written anew
            data, position = path.read_bytes(), self.first * len(copy[self.first])
            path.write_bytes(data[: position + 20] + data[position + 30 :])
        log = made.open(machine_ran_on=True)
        [(segment, damaged)] = log.damaged_ranges()
        work = log.repair_of(segment, damaged)
        for offset in sorted(copy):
            if damaged.holds(offset):
                work.accept(memoryview(copy[offset]))
        self.check: RepairCheck = work.finish()
        self.check.run()
        assert self.check.is_written_anew == is_cut

    @property
    def log(self) -> PartitionLog:
        return self.made.log

    def assert_whole(self, rows: list[AbortedTransaction] | None = None) -> None:
        for _ in range(2):
            assert not self.log.damaged_ranges()
            assert not self.log.lacks_producers
            assert self.log.aborted_transactions(0, self.log.log_end_offset) == (rows or self.rows)
            assert not any(each.transaction_index.lacks_rows for each in self.log.segments)
            assert self.first not in committed(self.log)
            self.made.close_and_open()


@pytest.fixture(params=[False, True])
def hidden(logs: MakeLogs, request: pytest.FixtureRequest) -> Hidden:
    return Hidden(logs(segment_bytes=100_000), is_cut=request.param)


@pytest.fixture
def loop_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often the owner's thread has read all that was hidden."""
    reads: list[Any] = []
    read = recount.read_hidden

    def counted(*given: Any) -> bool:
        reads.append(given)
        return read(*given)

    monkeypatch.setattr(partition_log, "read_hidden", counted)
    return reads


def run(log: PartitionLog, check: RepairCheck) -> tuple[Recount, int]:
    """The recount and how many runs it took."""
    work, runs = Recount(log, check), 0
    while work.goes_on():
        work.run()
        runs += 1
    return work, runs


def test_until_it_is_read_what_was_aborted_is_not_read(hidden: Hidden, loop_reads: list[Any]) -> None:
    log = hidden.log
    work, runs = run(log, hidden.check)
    assert runs == 1
    assert log.damaged_ranges()
    for offset in (0, hidden.first - 1):  # of the producer whose transaction is open before the damage, too
        with pytest.raises(DamagedRecords):
            stable_bound(log, offset)
    with pytest.raises(DamagedRecords):
        log.read(hidden.first, 1000, log.log_end_offset)
    assert hidden.first not in committed(log)
    with pytest.raises(KafkaError) as refused:
        log.append_as_leader(idempotent(3, transactional=True), 0, NOW)
    assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    with pytest.raises(CorruptIndex):
        find_cleanable(log, NOW)
    assert log.finish_repair(hidden.check, work)
    assert not loop_reads
    assert set(committed(log)) == hidden.expected
    assert log.producers.expected_sequence(7, 0) == 3
    find_cleanable(log, NOW)
    hidden.assert_whole()


def test_a_thread_changes_nothing(hidden: Hidden) -> None:
    def state() -> object:
        files = {path.name: path.read_bytes() for path in hidden.made.folder.iterdir()}
        indexes = [(each.transaction_index.rows, each.transaction_index.lacks_rows) for each in log.segments]
        return files, indexes, log.snapshots.offsets, sorted(log.producers.entries), log.damaged_ranges()

    log = hidden.log
    before = state()
    run(log, hidden.check)
    assert state() == before
    hidden.made.kill()
    hidden.made.open(machine_ran_on=True)
    assert set(committed(hidden.log)) <= hidden.expected


@pytest.mark.parametrize("behind_bytes_max", [0, 10**6])
@pytest.mark.parametrize("rolls", [False, True])
def test_what_is_appended_meanwhile_counts(
    hidden: Hidden, rolls: bool, behind_bytes_max: int, monkeypatch: pytest.MonkeyPatch, loop_reads: list[Any]
) -> None:
    monkeypatch.setattr(recount, "BEHIND_BYTES_MAX", behind_bytes_max)
    log, made = hidden.log, hidden.made
    work = Recount(log, hidden.check)
    assert work.goes_on()
    work.run()
    open_since = log.log_end_offset - 1
    if rolls:
        log.roll(NOW)
    last = end(made, abort=True)
    rows = [*hidden.rows, AbortedTransaction(7, open_since, last, last + 1)]
    if rolls:
        log.roll(NOW)
    first = send(made, 3)
    made.append(batch(1))
    assert work.goes_on() == (not behind_bytes_max)
    if not behind_bytes_max:
        work.run()
        assert not work.goes_on()
    last = end(made, abort=True)
    rows.append(AbortedTransaction(7, first, last, last + 1))
    assert log.finish_repair(hidden.check, work)
    assert not loop_reads
    assert log.producers.end_offset == log.log_end_offset
    assert log.append_as_leader(idempotent(3, transactional=True), 0, NOW, from_client=False)
    assert log.producers.expected_sequence(7, 0) == 4
    hidden.assert_whole(rows)


@pytest.mark.parametrize("behind_bytes_max", [0, 10**6])
def test_what_is_appended_to_an_empty_segment_counts_once(
    hidden: Hidden, behind_bytes_max: int, monkeypatch: pytest.MonkeyPatch, loop_reads: list[Any]
) -> None:
    """As behind the roll that lets a repair rewrite the segment before."""
    monkeypatch.setattr(recount, "BEHIND_BYTES_MAX", behind_bytes_max)
    log = hidden.log
    log.roll(NOW)
    work = Recount(log, hidden.check)
    assert work.goes_on()
    work.run()
    send(hidden.made, 3)
    while work.goes_on():
        work.run()
    assert log.finish_repair(hidden.check, work)
    assert not loop_reads
    assert [each[:3] for each in log.producers.entries[7].batches] == [
        (0, 0, hidden.first), (1, 1, hidden.second), (2, 2, SECOND + 1), (3, 3, SECOND + 2)
    ]  # fmt: skip
    hidden.assert_whole()


def cut(hidden: Hidden) -> None:
    hidden.log.truncate_to(SECOND)


def cut_and_fill(hidden: Hidden) -> None:
    hidden.log.truncate_to(SECOND)
    for sequence in range(20):
        send(hidden.made, sequence, producer_id=9)


def cut_to_the_first_segment(hidden: Hidden) -> None:
    hidden.log.truncate_to(COUNT + 1)


def empty(hidden: Hidden) -> None:
    hidden.log.truncate_fully_and_start_at(1000)


def delete(hidden: Hidden) -> None:
    hidden.log.delete_records(COUNT + 1)
    hidden.log.segments.condemn_first(1)


def delete_the_damage(hidden: Hidden) -> None:
    hidden.log.delete_records(hidden.first + 1)


def lose_more(hidden: Hidden) -> None:
    segment = hidden.log.segments[1]
    damage(hidden.made.folder / hidden.made.files("*.log")[1], 3, "CRC")
    segment.findings = segment.examine()
    hidden.log.adopt_findings(segment)


def give_up(hidden: Hidden) -> None:
    [(_, damaged)] = hidden.log.damaged_ranges()
    hidden.log.accept_loss(damaged)


def close(hidden: Hidden) -> None:
    hidden.made.close()


def move(hidden: Hidden) -> None:
    """As a deletion does it."""
    directory = f"{hidden.log.directory}-moved"
    Path(hidden.log.directory).rename(directory)
    hidden.log.moved_to(directory)


CHANGES = [
    cut,
    cut_and_fill,
    cut_to_the_first_segment,
    empty,
    delete,
    lose_more,
    give_up,
    close,
    move,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_before", [False, True])
def test_what_was_read_of_a_log_that_is_changed_meanwhile_has_no_effect(
    tmp_path: Path, change: Callable[[Hidden], None], is_before: bool
) -> None:
    """All is as if nothing had been read on a thread."""
    states: list[Any] = []
    for reads in (True, False):
        hidden = Hidden(Logs(tmp_path / f"{reads}", LogConfig(segment_bytes=100_000, verifies_transactions=False)))
        log, work = hidden.log, None
        if reads:
            work = Recount(log, hidden.check)
            assert work.goes_on()
            if is_before:
                change(hidden)
                work.run()
            else:
                work.run()
                change(hidden)
            while work.goes_on():
                work.run()
        else:
            change(hidden)
        is_done = log.finish_repair(hidden.check, work)
        producers = {key: (each.batches, each.transaction_first_offset) for key, each in log.producers.entries.items()}
        damaged = [each for _, each in log.damaged_ranges()]
        rows = [] if log.is_closed else log.aborted_transactions(log.log_start_offset, log.log_end_offset)
        lacking = [each.transaction_index.lacks_rows for each in log.segments]
        states.append((is_done, producers, damaged, rows, lacking, log.lacks_producers, log.hidden_ends))
    assert states[0] == states[1]


@pytest.mark.parametrize("change", [empty, delete, lose_more, close])
def test_a_log_that_was_changed_before_is_not_read(hidden: Hidden, change: Callable[[Hidden], None]) -> None:
    change(hidden)
    if change is lose_more:
        hidden.check.segment.set_damage(())
    work, runs = run(hidden.log, hidden.check)
    assert runs == 0
    assert not hidden.log.finish_repair(hidden.check, work)


def test_damage_that_is_deleted_meanwhile_hides_nothing(hidden: Hidden) -> None:
    log = hidden.log
    work, _ = run(log, hidden.check)
    delete_the_damage(hidden)
    assert log.finish_repair(hidden.check, work)
    assert not log.lacks_producers
    assert log.producers.expected_sequence(7, 0) == 3
    assert log.aborted_transactions(log.log_start_offset, log.log_end_offset) == hidden.rows


def test_a_second_damaged_range_is_left(logs: MakeLogs, loop_reads: list[Any]) -> None:
    made = logs(segment_bytes=100_000)
    for sequence in range(4):
        send(made, sequence)
        made.append(batch(1))
    last = end(made, abort=True)
    made.log.roll(NOW)
    send(made, 4)
    rows, copy = made.log.aborted_transactions(0, last + 1), copy_of(made)
    made.kill()
    path = made.folder / made.files("*.log")[0]
    for number in (0, 4):
        damage(path, number, "CRC")
    log = made.open(machine_ran_on=True)
    for left in (1, 0):
        segment, damaged = log.damaged_ranges()[0]
        work = log.repair_of(segment, damaged)
        work.accept(memoryview(copy[damaged.first_offset]))
        check = work.finish()
        check.run()
        done, _ = run(log, check)
        assert log.finish_repair(check, done)
        assert len(log.damaged_ranges()) == left
        assert 0 not in committed(log)
        assert log.lacks_producers == bool(left)
    assert not loop_reads
    assert log.aborted_transactions(0, log.log_end_offset) == rows
    assert log.producers.expected_sequence(7, 0) == 5


def test_a_transaction_that_comes_back_with_a_copy_is_read_on_the_thread(tmp_path: Path, loop_reads: list[Any]) -> None:
    made, other = replicas(tmp_path)
    log = made.log
    check = copy_range(begin_repair(made), other)
    check.run()
    snapshots = log.snapshots.offsets
    work, _ = run(log, check)
    assert log.snapshots.offsets == snapshots
    assert log.finish_repair(check, work)
    assert not loop_reads
    assert not log.segments.distrusted
    assert log.snapshots.offsets != snapshots
    assert [row[:2] for row in log.aborted_transactions(0, log.log_end_offset)] == [(7, 0)]
    made.close_and_open()
    assert 0 not in committed(made.log)


def test_damage_that_nothing_has_detected_is_met_on_the_owners_thread(hidden: Hidden, loop_reads: list[Any]) -> None:
    log = hidden.log
    path = hidden.made.folder / hidden.made.files("*.log")[1]
    damage(path, 3, "base offset")
    log.segments.release()
    work, _ = run(log, hidden.check)
    assert log.finish_repair(hidden.check, work)
    assert len(loop_reads) == 1
    assert [each.first_offset for _, each in log.damaged_ranges()] == [COUNT + 1 + 3]
    assert hidden.first not in committed(log)


def test_a_file_that_is_gone_says_nothing_against_the_device(hidden: Hidden) -> None:
    log = hidden.log
    log.segments.release()
    (hidden.made.folder / hidden.made.files("*.log")[1]).unlink()
    work, _ = run(log, hidden.check)
    assert log.finish_repair(hidden.check, work)
    assert log.damaged_ranges()
    assert log.failure is None
