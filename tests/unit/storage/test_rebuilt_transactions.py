"""Indexes of aborted transactions are rebuilt from the batches: each batch is read once, and only for wrong indexes."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker
from tests.unit.storage.test_damage import copy_of, damage, repair
from tests.unit.storage.test_removed_files import scrub
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.storage.files.checkpoints import TRANSACTION_SUMS_FILE
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.verification import LogFacts, StoppedLog
from tidelog.storage.producers.producer_state import EndMarker, ProducerState
from tidelog.storage.segments.transaction_index import AbortedTransaction, TransactionIndex

MakeLogs = Callable[..., Logs]
SEGMENTS = 12


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Segments of a batch, which is aborted, and of the first batch of a transaction that is committed in the next."""
    made = logs()
    for number in range(SEGMENTS):
        made.append(idempotent(3 * number, producer_id=9, transactional=True), from_client=False)
        made.append(marker(abort=True, producer_id=9), from_client=False)
        made.append(idempotent(number, producer_id=8, transactional=True), from_client=False)
        made.log.roll(NOW)
        made.append(marker(abort=False, producer_id=8), from_client=False)
    made.log.flush()
    made.directory.write_checkpoints()
    return made


def count_replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the batch of each offset is replayed from now on."""
    counts: Counter[int] = Counter()
    replay = ProducerState.replay

    def counted(state: ProducerState, header: BatchHeader, marker: EndMarker | None) -> object:
        counts[header.base_offset] += 1
        return replay(state, header, marker)

    monkeypatch.setattr(ProducerState, "replay", counted)
    return counts


def spoil(log: PartitionLog) -> list[int]:
    """Damage all index files, as of a log that has not read them yet. The base offsets of their segments."""
    damaged = []
    for segment in log.segments:
        index = segment.transaction_index
        if index.exists:
            Path(index.path).write_bytes(b"\1" * 34)
            segment.transaction_index = TransactionIndex(OsDisk(), index.path, exists=True)
            damaged.append(segment.base_offset)
    return damaged


def rows_of(log: PartitionLog) -> list[AbortedTransaction]:
    return log.aborted_transactions(0, log.log_end_offset)


def test_without_snapshots_a_repair_reads_no_batch_for_each_segment_behind_it(
    made: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 segments of 1,000 batches held the loop for six seconds."""
    copy, rows = copy_of(made), rows_of(made.log)
    made.kill()
    for name in made.files("*.snapshot") + made.files("*.txnindex"):
        (made.folder / name).unlink()
    (made.folder.parent / "recovery-point-offset-checkpoint").unlink()
    damage(made.folder / made.files("*.log")[0], 0, "CRC")
    log = made.open(machine_ran_on=True)
    assert log.snapshots.offsets == []
    assert sum(segment.transaction_index.lacks_rows for segment in log.segments) == SEGMENTS + 1
    counts = count_replayed(monkeypatch)
    repair(log, copy)
    assert max(counts.values()) <= 2  # for the rows, and for the producers
    assert rows_of(log) == rows
    assert len(rows) == SEGMENTS


def test_only_damaged_indexes_are_rebuilt(made: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch of committed records read all batches behind the first damaged one."""
    log, rows = made.log, rows_of(made.log)
    whole = [segment.transaction_index for segment in log.segments]
    spoil(log)
    for segment, index in list(zip(log.segments, whole))[1:]:
        segment.transaction_index = index
    counts, log.segments.sums_are_stale = count_replayed(monkeypatch), False
    assert rows_of(log) == rows
    assert 0 < max(counts) < list(log.segments)[1].base_offset
    assert log.segments.sums_are_stale


def test_a_stopped_log_that_kafka_has_continued_has_no_wrong_index(made: Logs) -> None:
    """Kafka writes no checksums: those of the indexes that it had continued, or made, counted as damage."""
    made.close()
    sums = made.folder / TRANSACTION_SUMS_FILE
    of_ours = sums.read_bytes()
    made.open()
    for number in range(2):
        made.append(idempotent(number, producer_id=5, transactional=True), from_client=False)
        made.append(marker(abort=True, producer_id=5), from_client=False)
        made.log.roll(NOW)
    made.close()
    assert sums.read_bytes() != of_ours
    sums.write_bytes(of_ours)
    end = made.log.log_end_offset
    facts = LogFacts(is_clean=True, recovery_point=end, high_watermark=end)
    assert list(StoppedLog(made.disk, str(made.folder), facts).verify()) == []
    continued = max(made.folder.glob("*.txnindex"))
    row = continued.read_bytes()
    of_another_producer = row[:2] + (6).to_bytes(8, "big") + row[10:]
    for wrong in (row[:10] + b"\1" * 8 + row[18:], of_another_producer):
        continued.write_bytes(wrong)
        problems = list(StoppedLog(made.disk, str(made.folder), facts).verify())
        assert [each.file for each in problems] == [str(continued)]


def test_a_snapshot_counts_more_than_what_was_read_across_damage(logs: MakeLogs) -> None:
    """The damage hides the end of a transaction. The next one of its producer is aborted in the segment behind."""
    made = logs()
    made.append(idempotent(0, producer_id=8, transactional=True), from_client=False)
    made.log.roll(NOW)
    [hidden] = made.append(marker(abort=False, producer_id=8), from_client=False)
    made.append(idempotent(0, producer_id=9, transactional=True), from_client=False)
    made.append(marker(abort=True, producer_id=9), from_client=False)
    made.log.roll(NOW)
    made.append(idempotent(1, producer_id=8, transactional=True), from_client=False)
    made.append(marker(abort=True, producer_id=8), from_client=False)
    made.log.roll(NOW)
    made.log.flush()
    made.directory.write_checkpoints()
    rows = rows_of(made.log)
    assert [row.first_offset for row in rows] == [hidden.first_offset + 1, hidden.first_offset + 3]
    made.kill()
    damage(made.folder / made.files("*.log")[1], 0, "CRC")
    log = made.open(machine_ran_on=True)
    scrub(log)
    assert [damaged.first_offset for _, damaged in log.damaged_ranges()] == [hidden.first_offset]
    assert spoil(log) == [1, 4]
    assert [row.first_offset for row in rows_of(log)] == [row.first_offset for row in rows]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_fetch_asks_only_segments_with_aborted_transactions_for_them(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """It asked each later segment: of ten thousand without a transaction, every fetch took 7 ms of CPU. A row
    that is only in memory, as the volume is full, is not missed."""
    made = logs(segment_bytes=180)
    asked = list[str]()
    real_collect, real_write = TransactionIndex.collect, TransactionIndex._write

    def collect(index: TransactionIndex, fetch_offset: int, upper_offset: int) -> tuple[list[AbortedTransaction], bool]:
        asked.append(index.path)
        return real_collect(index, fetch_offset, upper_offset)

    def write(index: TransactionIndex, data: bytes, position: int) -> None:
        if not is_written:
            raise OSError(errno.ENOSPC, "full")
        real_write(index, data, position)

    monkeypatch.setattr(TransactionIndex, "collect", collect)
    monkeypatch.setattr(TransactionIndex, "_write", write)
    made.append(*[batch(value=b"x" * 100) for _ in range(20)])
    made.append(idempotent(0, transactional=True), from_client=False)
    made.append(*[batch(value=b"x" * 100) for _ in range(20)])
    made.append(marker(abort=True), from_client=False)
    made.append(*[batch(value=b"x" * 100) for _ in range(20)])
    for reopen in (lambda: made.log, made.close_and_open, made.kill_and_open):
        log = reopen()
        assert log.segment_count > 60
        asked.clear()
        for from_offset, upper_offset in ((0, 22), (15, 62), (20, 21), (41, 62)):
            assert log.aborted_transactions(from_offset, upper_offset) == [(7, 20, 41, 42)]
        assert len(asked) == 4
        assert log.aborted_transactions(42, 62) == []
