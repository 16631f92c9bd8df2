"""A file of a log that is removed or cut while the log is open: no operation takes that for an error of the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, offsets_of, read, records_of
from tests.unit.storage.cleaning import clean
from tests.unit.storage.test_damage import batches_of, copy_of, repair_range
from tidelog.storage.log.compaction import CleaningFailed
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.scrub import Scrub, check_small_files
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, DamagedRecords

MakeLogs = Callable[..., Logs]


def search(log: PartitionLog) -> None:
    for n in range(0, 60, 20):
        with suppress(DamagedRecords):
            log.offset_for_timestamp(NOW + n)
    with suppress(DamagedRecords):
        log.max_timestamp_offset()


def scrub(log: PartitionLog) -> None:
    for _ in check_small_files(log):
        pass
    for segment in list(log.segments):
        if segment.size_bytes:
            work = Scrub(log, segment)
            work.run(10**9)
            work.finish()


def append(log: PartitionLog) -> None:
    for n in range(10):
        log.append_as_leader(batch(2, key=b"x", value=b"z" * 100, timestamp=NOW + 100 + n), 0, NOW)


def cut(log: PartitionLog) -> None:
    with suppress(DamagedRecords):
        log.truncate_to(31)


def compact(log: PartitionLog) -> None:
    with suppress(CleaningFailed, CorruptIndex):
        clean(log, NOW + 10**9)


OPERATIONS: dict[str, Callable[[PartitionLog], object]] = {
    "search": search, "scrub": scrub, "append": append, "cut": cut, "compact": compact,
    "retention": lambda log: log.maintain(NOW + 10**12), "close": lambda log: log.close(),
}  # fmt: skip


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("pattern", ["*.log", "*.timeindex", "*.txnindex"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_log_stays_in_use(logs: MakeLogs, pattern: str, operation: str, is_cut: bool) -> None:
    made = logs(segment_bytes=2500, index_interval_bytes=100, cleanup_policy=frozenset({"compact", "delete"}))
    for n in range(25):
        made.append(batch(2, key=b"k%d" % (n % 7), value=b"v" * 50, timestamp=NOW + n))
    made.append(idempotent(0, 2, key=b"q", transactional=True))
    made.append(marker(abort=True), from_client=False)
    made.append(batch(2, key=b"q"))
    made.log.flush()
    made.directory.write_checkpoints()
    log = made.log
    search(log)
    log.segments.release()
    for name in made.files(pattern):
        path = made.folder / name
        if is_cut:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 14 * 7])
        else:
            path.unlink()
    OPERATIONS[operation](log)
    if operation == "close":
        return
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            offset = max(offset + 1, read(log, offset, 1000, log.log_end_offset).next_offset)
        except DamagedRecords:
            offset += 1
    append(log)
    log.close()
    assert log.is_closed


def test_retention_does_not_fail_where_a_damaged_segment_is_gone(logs: MakeLogs) -> None:
    """The age of such a segment is that of its file."""
    made = logs(segment_bytes=1000, retention_ms=1000)
    for n in range(20):
        made.append(batch(2, value=b"v" * 50, timestamp=NOW + n))
    path = made.folder / made.files("*.log")[0]
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes(2))
    scrub(made.log)
    assert made.log.damaged_ranges()
    path.unlink()
    made.log.maintain(NOW + 10**9)
    assert made.log.log_start_offset == 0


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_search_by_time_does_not_pass_over_a_segment_that_is_gone(logs: MakeLogs, is_cut: bool) -> None:
    """The segment before it has all that its time index names, and is older: a reader began behind the gap."""
    made = logs(segment_bytes=1000, index_interval_bytes=500)
    for n in range(30):
        made.append(batch(2, value=b"v" * 50, timestamp=NOW + 10 * n))
    _, second, third, *_ = (int(name.split(".")[0]) for name in made.files("*.log"))
    made.close()
    path = made.folder / made.files("*.log")[0 if is_cut else 1]
    if is_cut:
        os.truncate(path, batches_of(path)[-1][0])
    else:
        path.unlink()
    log = made.open()
    first_lost, end_lost = (second - 2, second) if is_cut else (second, third)
    for offset in (first_lost, end_lost - 2):
        with pytest.raises(DamagedRecords) as caught:
            log.offset_for_timestamp(NOW + 5 * offset)
        assert caught.value.damage.holds(offset)
    found = log.offset_for_timestamp(NOW + 10)
    assert found is not None
    assert found.offset == 2


@pytest.mark.parametrize("count", [0, 3])
def test_what_is_appended_after_the_file_of_the_active_segment_was_removed_is_there_after_a_start(
    logs: MakeLogs, count: int
) -> None:
    """The file that was open took all that was appended until the next roll, and no start had it."""
    made = logs()
    made.append(batch(2, key=b"a", value=b"before"))
    made.log.roll(NOW)
    made.append(*(batch(1, key=b"a", value=b"removed") for _ in range(count)))
    copy = copy_of(made)
    assert made.log.segments.active.file.size_bytes() == made.log.segments.active.size_bytes
    (made.folder / f"{2:020d}.log").unlink()
    made.log.maintain(NOW + 1)
    made.append(*(batch(1, key=b"a", value=b"after") for _ in range(3)))
    made.log.maintain(NOW + 2)
    log, end = made.log, 5 + count
    if count:
        with pytest.raises(DamagedRecords):
            read(log, 2, 100, end)
        assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(2, 5)]
        repair_range(log, *log.damaged_ranges()[0], copy)
    for _ in range(2):
        assert offsets_of(records_of(made.log)) == list(range(end))
        made.close_and_open()
    assert not made.log.damaged_ranges()


@pytest.mark.parametrize("content", [b"1\n999\n", b"", None])
@pytest.mark.parametrize("is_scrubbed", [True, False])
@pytest.mark.parametrize("is_at_end", [True, False])
def test_a_note_of_gaps_that_is_damaged_while_the_log_is_open_is_written_again(
    logs: MakeLogs, is_at_end: bool, is_scrubbed: bool, content: bytes | None
) -> None:
    """By the scrubber, before a kill, and at a clean stop. No other replica may be left to explain the gaps again."""
    made = logs(segment_bytes=200)
    log = made.log
    made.append(batch(2))
    if is_at_end:
        log.roll(NOW, 7)
        log.segments.first.set_damage((DamagedRange(log.size_bytes, log.size_bytes, 2, 7, "is missing"),))
        log.segments.first.next_offset = log.log_end_offset = log.producers.end_offset = 7
        log.accept_gap(log.segments.first, log.segments.first.damage[0])
    else:
        log.explain_gaps(300)
    for base_offset in (7, 8) if is_at_end else (7, 9, 150, 299):
        log.append_as_follower(batch(1, base_offset=base_offset, leader_epoch=0), NOW)
    expected = offsets_of(records_of(log))
    log.set_high_watermark(log.log_end_offset)
    log.flush()
    note = made.folder / "explained-gaps"
    kept = note.read_bytes()
    note.unlink() if content is None else note.write_bytes(content)
    if is_scrubbed:
        scrub(log)
        assert note.read_bytes() == kept
        made.kill()
    else:
        made.close()
    log = made.open(machine_ran_on=True)
    scrub(log)
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == expected


def test_an_index_that_is_removed_while_it_is_read_is_made_anew(logs: MakeLogs) -> None:
    """The read raised an error of the device, which took the log directory offline."""
    made = logs(index_interval_bytes=0)
    for number in range(20):
        made.append(batch(timestamp=NOW + number))
    made.log.roll(NOW)
    log = made.close_and_open()
    assert read(log, 10, 100, log.log_end_offset).regions
    (made.folder / made.files("*.index")[0]).unlink()
    log.segments.first.hints.clear()
    assert read(log, 15, 100, log.log_end_offset).regions
    assert log.damaged_ranges() == []
