"""Offsets by time where a batch holds much to look at: beside whoever else is served, and not without end."""

from __future__ import annotations

import gzip
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import join
from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.protocol.batches.record_batch import HEADER, HEADER_SIZE, LOG_OVERHEAD, BatchHeader, read_header, write_crc
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments import lookup
from tidelog.storage.segments.damage import DamagedRange
from tidelog.storage.segments.inspection import AT_ONCE_COMPRESSED_MAX, INSPECTED_RECORDS_MAX
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.lookup import (
    HEADERS_AT_ONCE_MAX,
    RECORDS_AT_ONCE_MAX,
    UNTRUE_HEADERS_MAX,
    LookupPause,
    LookupProgress,
    SlowLookup,
    TimestampOffset,
)
from tidelog.storage.segments.reader import ColdRead
from tidelog.storage.segments.segment import Segment

Ask = Callable[[], TimestampOffset | None]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "logs", LogConfig(message_timestamp_after_max_ms=INT64_MAX))


def untrue(data: memoryview, max_timestamp: int, count: int | None = None) -> memoryview:
    """The batch with a header that says so, whatever its records are."""
    header = read_header(data)
    count = header.record_count if count is None else count
    header = header._replace(max_timestamp=max_timestamp, record_count=count, last_offset_delta=count - 1)
    changed = bytearray(HEADER.pack(*BatchHeader._make(header))) + data[HEADER_SIZE:]
    write_crc(changed, 0, len(changed))
    return memoryview(changed)


def asked(ask: Ask) -> tuple[TimestampOffset | None, int]:
    """The answer of somebody who does not wait, and how often a thread had to look for it."""
    for times in range(200):
        try:
            return ask(), times
        except SlowLookup as slow:
            slow.warm()
    raise AssertionError("there is no end of it")


def test_few_records_are_looked_at_at_once(logs: Logs) -> None:
    for start in range(5):
        logs.log.append_as_leader(batch(RECORDS_AT_ONCE_MAX // 2, timestamp=NOW + 1000 * start), 0, NOW)
    assert asked(lambda: logs.log.offset_for_timestamp(NOW + 3100, wait=False))[1] == 0
    assert asked(lambda: logs.log.max_timestamp_offset(wait=False))[1] == 0


def test_many_are_looked_at_beside_the_others(logs: Logs) -> None:
    log = logs.log
    count = RECORDS_AT_ONCE_MAX + 1
    for start in range(3):
        log.append_as_leader(batch(count, timestamp=NOW + count * start, compression=start), 0, NOW)
    for timestamp in (0, NOW + 1, NOW + count, NOW + 2 * count + 77, NOW + 3 * count):
        found, times = asked(lambda: log.offset_for_timestamp(timestamp, wait=False))  # noqa: B023
        assert found == log.offset_for_timestamp(timestamp)
        assert times == (found is not None)
    assert asked(lambda: log.max_timestamp_offset(wait=False)) == (log.max_timestamp_offset(), 1)


def test_so_is_a_record_that_is_large_once_decompressed(logs: Logs) -> None:
    logs.log.append_as_leader(batch(1, value=bytes(4 << 20), compression=4), 0, NOW)
    assert asked(lambda: logs.log.offset_for_timestamp(NOW, wait=False)) == ((NOW, 0, 0), 1)


def test_so_are_many_compressed_bytes_that_stand_for_few_records(logs: Logs) -> None:
    member = gzip.compress(b"", mtime=0)
    data = batch(1, compression=1)
    padded = bytearray(data) + member * (AT_ONCE_COMPRESSED_MAX // len(member))
    header = read_header(data)
    HEADER.pack_into(padded, 0, *header._replace(batch_length=len(padded) - LOG_OVERHEAD))
    write_crc(padded, 0, len(padded))
    logs.log.append_as_leader(memoryview(padded), 0, NOW)
    assert asked(lambda: logs.log.offset_for_timestamp(NOW, wait=False)) == ((NOW, 0, 0), 1)


def test_a_batch_of_more_than_anybody_sends_is_not_looked_at(logs: Logs) -> None:
    """Ten thousand bytes that stand for fifteen million records would keep a processor busy for ten seconds."""
    data = untrue(batch(2, value=random.Random(1).randbytes(10_000), compression=4), NOW + 5, INSPECTED_RECORDS_MAX + 1)
    logs.log.append_as_leader(data, 0, NOW)
    for ask in (lambda: logs.log.offset_for_timestamp(NOW, wait=False), lambda: logs.log.max_timestamp_offset()):
        with pytest.raises(KafkaError) as refused:
            asked(ask)
        assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


def test_headers_that_are_untrue_do_not_make_it_go_on_for_ever(logs: Logs) -> None:
    log = logs.log
    for _ in range(5):
        log.append_as_leader(untrue(batch(RECORDS_AT_ONCE_MAX + 1, timestamp=NOW), NOW + 10_000), 0, NOW)
    log.append_as_leader(batch(1, timestamp=NOW + 10_000), 0, NOW)
    found, times = asked(lambda: log.offset_for_timestamp(NOW + 9_000, wait=False))
    assert (found, times) == ((NOW + 10_000, 5 * (RECORDS_AT_ONCE_MAX + 1), 0), 5)
    for _ in range(UNTRUE_HEADERS_MAX):
        log.append_as_leader(untrue(batch(1, timestamp=NOW), NOW + 20_000), 0, NOW)
    assert log.offset_for_timestamp(NOW + 15_000) is None
    log.append_as_leader(untrue(batch(1, timestamp=NOW), NOW + 20_000), 0, NOW)
    with pytest.raises(KafkaError) as refused:
        log.offset_for_timestamp(NOW + 15_000)
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_no_search_looks_at_more_than_few_records_at_once(logs: Logs) -> None:
    """A hundred batches whose headers are untrue, of 2,000 records each, held the loop for a quarter of a second."""
    for _ in range(5):
        logs.log.append_as_leader(untrue(batch(RECORDS_AT_ONCE_MAX // 2, timestamp=NOW), NOW + 10_000), 0, NOW)
    assert asked(lambda: logs.log.offset_for_timestamp(NOW + 9_000, wait=False)) == (None, 3)


def test_a_failure_is_told_once_and_tried_again(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.log
    log.append_as_leader(batch(RECORDS_AT_ONCE_MAX + 1), 0, NOW)

    def ask() -> TimestampOffset | None:
        return log.offset_for_timestamp(NOW + 7, wait=False)

    with pytest.raises(SlowLookup) as slow:
        ask()
    with monkeypatch.context() as failing:
        failing.setattr(lookup, "_looking", lambda *_: 1 // 0)
        slow.value.warm()
    with pytest.raises(ZeroDivisionError):
        ask()
    assert asked(ask) == ((NOW + 7, 7, 0), 1)


def test_what_was_found_in_a_batch_is_not_told_of_its_like_in_its_place(logs: Logs) -> None:
    """A leader loses what nobody had copied, and its producer sends it again to the next one."""
    log = logs.log

    def ask() -> TimestampOffset | None:
        return log.offset_for_timestamp(NOW + 7, wait=False)

    for epoch in (1, 2):
        log.truncate_to(0)
        log.append_as_leader(batch(RECORDS_AT_ONCE_MAX + 1), epoch, NOW)
        assert asked(ask) == ((NOW + 7, 7, epoch), 1)


def test_threads_that_tell_at_once_do_not_meet(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.append(batch(RECORDS_AT_ONCE_MAX + 1))
    with pytest.raises(SlowLookup) as slow:
        logs.log.offset_for_timestamp(NOW, wait=False)
    tell, found = slow.value._tell, logs.log.segments.found_by_time
    failures: list[Exception] = []

    def crowd(number: int) -> None:
        try:
            for other in range(4000):
                found[number, other] = None
                tell(None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=crowd, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def older_batches(log: PartitionLog, count: int, epoch: int = 0) -> None:
    for _ in range(count):
        log.append_as_leader(batch(1, timestamp=NOW), epoch, NOW)


def pauses(log: PartitionLog, timestamp: int, progress: LookupProgress) -> tuple[TimestampOffset | None, int]:
    for count in range(100):
        try:
            return log.offset_for_timestamp(timestamp, wait=False, progress=progress), count
        except LookupPause:
            continue
    raise AssertionError("there is no end of it")


def test_a_search_through_many_batches_pauses_and_goes_on(logs: Logs) -> None:
    """50,000 batches of one record, all older than the last, held the loop for a second."""
    log, count = logs.log, 3 * HEADERS_AT_ONCE_MAX
    older_batches(log, count)
    assert pauses(log, NOW + 1, LookupProgress()) == (None, 0)  # the time index knows
    log.append_as_leader(batch(1, timestamp=NOW + 1), 0, NOW)
    assert log.offset_for_timestamp(NOW + 1) == (NOW + 1, count, 0)
    assert log.offset_for_timestamp(NOW + 1, wait=False) == (NOW + 1, count, 0)
    assert pauses(log, NOW + 1, LookupProgress()) == ((NOW + 1, count, 0), 3)
    assert pauses(log, NOW, LookupProgress()) == ((NOW, 0, 0), 0)


def test_a_search_begins_again_where_the_log_is_another(logs: Logs) -> None:
    log, count = logs.log, 2 * HEADERS_AT_ONCE_MAX
    older_batches(log, count)
    log.append_as_leader(batch(1, timestamp=NOW + 5), 0, NOW)
    progress = LookupProgress()
    with pytest.raises(LookupPause):
        log.offset_for_timestamp(NOW + 1, wait=False, progress=progress)
    log.truncate_to(5)
    log.append_as_leader(batch(1, timestamp=NOW + 5), 1, NOW)
    older_batches(log, count, epoch=1)
    assert pauses(log, NOW + 1, progress)[0] == (NOW + 5, 5, 1)


def test_a_search_finds_what_was_repaired_behind_it(logs: Logs) -> None:
    log, count = logs.log, 2 * HEADERS_AT_ONCE_MAX
    older_batches(log, 5)
    position = log.segments.active.size_bytes
    log.append_as_leader(batch(1, timestamp=NOW + 5), 0, NOW)
    end = log.segments.active.size_bytes
    older_batches(log, count)
    log.append_as_leader(batch(1, timestamp=NOW + 5), 0, NOW)
    segment = log.segments.active
    segment.set_damage((DamagedRange(position, end, 5, 6, "of the test"),))
    progress = LookupProgress()
    with pytest.raises(LookupPause):
        log.offset_for_timestamp(NOW + 1, wait=False, progress=progress)
    segment.set_damage(())
    assert pauses(log, NOW + 1, progress)[0] == (NOW + 5, 5, 0)


def test_untrue_headers_are_counted_over_all_turns(logs: Logs) -> None:
    log = logs.log
    for _ in range(UNTRUE_HEADERS_MAX + 1):
        older_batches(log, 9)
        log.append_as_leader(untrue(batch(1, timestamp=NOW), NOW + 1), 0, NOW)
    log.append_as_leader(batch(1, timestamp=NOW + 1), 0, NOW)
    with pytest.raises(KafkaError) as refused:
        pauses(log, NOW + 1, LookupProgress())
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_a_search_through_many_batches_of_several_segments_ends(logs: Logs) -> None:
    """Each announces a newer record, which is below the log start or in none. The first is not begun again."""
    log, count = logs.log, HEADERS_AT_ONCE_MAX + 1
    log.append_as_leader(batch(1, timestamp=NOW + 1), 0, NOW)
    for _ in range(3):
        older_batches(log, count)
        log.append_as_leader(untrue(batch(1, timestamp=NOW), NOW + 1), 0, NOW)
        log.roll(NOW)
    log.append_as_leader(batch(1, timestamp=NOW + 1), 0, NOW)
    log.set_high_watermark(log.log_end_offset)
    log.delete_records(1)
    found = log.offset_for_timestamp(NOW + 1)
    assert found == (NOW + 1, log.log_end_offset - 1, 0)
    assert pauses(log, NOW + 1, LookupProgress()) == (found, 3)


def test_what_a_start_has_not_compared_with_the_time_indexes_is_compared_in_turns(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty segments with 9,000 batches of one time each held the loop for 0.7 s at the first lookup."""
    for _ in range(4):
        older_batches(logs.log, 3)
        logs.log.roll(NOW)
    log = logs.close_and_open()
    monkeypatch.setattr(lookup, "_COMPARED_AT_ONCE_MAX", 5)
    turns = 0
    for _ in range(10):
        try:
            found = log.offset_for_timestamp(NOW + 1, wait=False)
            break
        except ColdRead:
            turns += 1
    assert (found, turns) == (None, 2)


@pytest.mark.parametrize("bound", ["_COMPARED_AT_ONCE_MAX", "_CONFIRMED_AT_ONCE_MAX"])
def test_retention_compares_in_turns_too_and_each_batch_once(
    logs: Logs, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look after a start compared all expired segments of all logs in one turn: 0.3 s for 44 segments."""
    for _ in range(4):
        older_batches(logs.log, 3)
        logs.log.roll(NOW)
    log = logs.close_and_open()
    log.set_high_watermark(log.log_end_offset)
    log.set_config(replace(log.config, retention_ms=1000))
    monkeypatch.setattr(lookup, bound, 5 if bound == "_COMPARED_AT_ONCE_MAX" else 2)
    compared: list[int] = []
    confirm = lookup.confirm_max_timestamp

    def noted(segment: Segment, *, wait: bool) -> int:
        compared.append(confirm(segment, wait=wait))
        return compared[-1]

    monkeypatch.setattr(lookup, "confirm_max_timestamp", noted)
    assert not log.maintain(NOW + 10_000, [])
    assert (log.segments.first.base_offset, sum(compared)) == (6, 6)
    assert log.maintain(NOW + 10_000, [])
    assert (log.segments.first.base_offset, sum(compared)) == (12, 12)


def test_progress_counts_in_the_segment_that_is_there_only(logs: Logs, tmp_path: Path) -> None:
    """The cleaner joins segments: one with a lower base offset takes the place of that one, and is not passed."""
    other = Logs(tmp_path / "other", LogConfig())
    for log in (logs.log, other.log):
        older_batches(log, 1)
    progress = LookupProgress()
    assert progress.segment_in(logs.log.segments) is None
    progress.segment, progress.epoch = logs.log.segments.active, 0
    progress.generation = progress.segment.generation
    assert progress.segment_in(logs.log.segments) is progress.segment
    assert progress.segment_in(other.log.segments) is None
