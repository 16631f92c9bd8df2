"""A partition's log at work: appending, reading, rolling, flushing, shortening."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import (
    NOW,
    TOPIC_ID,
    Logs,
    QuickDisk,
    batch,
    idempotent,
    marker,
    offsets_of,
    read,
    records_of,
)
from tests.unit.storage.cleaning import clean
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.partition_log import ColdRead, CorruptLog, PartitionLog
from tidelog.storage.log.verification import LogFacts, StoppedLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig

MakeLogs = Callable[..., Logs]


def refused(action: Callable[[], object]) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        action()
    return caught.value.code


class TestAppending:
    def test_offsets_follow_each_other(self, logs: MakeLogs):
        made = logs()
        infos = made.append(batch(3), batch(1), batch(2))
        assert [(info.first_offset, info.last_offset) for info in infos] == [(0, 2), (3, 3), (4, 5)]
        assert infos[0].log_append_time_ms == -1
        assert infos[0].log_start_offset == 0
        assert offsets_of(records_of(made.log)) == list(range(6))

    def test_a_repeated_batch_is_not_written_again(self, logs: MakeLogs):
        made = logs()
        made.append(batch(5), idempotent(0, 3), idempotent(3, 2))
        size = made.log.size_bytes
        [info] = made.append(idempotent(0, 3))
        assert (info.duplicate, info.first_offset, info.last_offset) == (True, 5, 7)
        assert (made.log.log_end_offset, made.log.size_bytes) == (10, size)

    def test_a_gap_in_the_sequence_is_refused_and_leaves_nothing(self, logs: MakeLogs):
        made = logs()
        made.append(idempotent(0))
        code = refused(lambda: made.append(idempotent(2)))
        assert code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert (made.folder / "00000000000000000000.log").stat().st_size == made.log.size_bytes
        made.append(idempotent(1))

    def test_log_append_time_is_answered(self, logs: MakeLogs):
        made = logs(message_timestamp_type="LogAppendTime")
        [info] = made.append(batch(2, timestamp=5), now_ms=NOW + 77)
        assert info.log_append_time_ms == NOW + 77
        assert {record.timestamp for record in records_of(made.log)} == {NOW + 77}

    def test_batches_of_the_node_go_in_with_one_write(self, logs: MakeLogs):
        made = logs()
        many = memoryview(bytearray(b"".join(bytes(batch(n)) for n in (1, 2, 3))))
        [info] = made.append(many, from_client=False)
        assert (info.first_offset, info.last_offset) == (0, 5)
        assert offsets_of(records_of(made.log)) == list(range(6))

    def test_a_follower_takes_offsets_and_epochs_as_they_are(self, logs: MakeLogs):
        made = logs(cleanup_policy=frozenset({"compact"}))
        fetched = bytearray()
        for data in (batch(2, base_offset=0, leader_epoch=3), batch(1, base_offset=7, leader_epoch=4)):
            fetched += data
        info = made.log.append_as_follower(memoryview(fetched), NOW)
        assert info is not None
        assert (info.first_offset, info.last_offset, made.log.log_end_offset) == (0, 7, 8)
        assert list(made.log.leader_epochs) == [(3, 0), (4, 2)]
        assert offsets_of(records_of(made.log)) == [0, 1, 7]
        assert offsets_of(records_of(made.log, 1)) == [0, 1, 7]
        assert made.log.append_as_follower(memoryview(bytearray(20)), NOW) is None

    def test_an_epoch_is_known_only_once_a_record_of_it_is_there(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        """Whoever claimed the epoch of a record that it does not have would win elections with it."""
        made = logs(segment_bytes=200)
        fetched = [batch(1, value=b"x" * 100, base_offset=n, leader_epoch=3 + n) for n in range(3)]
        create = QuickDisk.write_file

        def refuse(disk: QuickDisk, path: str, *rest: Any, **options: Any) -> None:
            if path.endswith("2.log"):
                raise OSError(errno.EMFILE, "too many")
            create(disk, path, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(QuickDisk, "write_file", refuse)
            with pytest.raises(OSError, match="too many"):
                made.log.append_as_follower(memoryview(bytearray(b"".join(fetched))), NOW)
        assert made.log.log_end_offset == 2
        assert list(made.log.leader_epochs) == [(3, 0), (4, 1)]
        made.log.append_as_follower(memoryview(bytearray(fetched[2])), NOW)
        assert list(made.log.leader_epochs) == [(3, 0), (4, 1), (5, 2)]

    def test_a_batch_that_fits_no_segment_is_refused(self, logs: MakeLogs):
        made = logs(segment_bytes=200)
        assert refused(lambda: made.append(batch(1, value=b"x" * 300))) == ErrorCode.RECORD_LIST_TOO_LARGE
        made.append(batch())

    @pytest.mark.parametrize("preallocate", [False, True])
    def test_a_follower_copies_a_batch_from_before_a_lower_segment_bytes(self, logs: MakeLogs, preallocate: bool):
        """Its leader has it, so without it no replica could be made whole."""
        made = logs(segment_bytes=200, preallocate=preallocate)
        large = {0: False, 1: True, 2: False, 3: True, 4: True}
        fetched = [
            batch(1, value=b"x" * (300 if is_large else 10), base_offset=offset, leader_epoch=3)
            for offset, is_large in large.items()
        ]
        made.log.append_as_follower(memoryview(bytearray(b"".join(fetched[:2]))), NOW)
        for data in fetched[2:]:
            made.log.append_as_follower(memoryview(bytearray(data)), NOW)
        assert made.log.log_end_offset == 5
        assert offsets_of(records_of(made.log)) == list(large)
        assert made.files("*.log") == [f"{n:020d}.log" for n in large]
        made.kill_and_open()
        assert offsets_of(records_of(made.log)) == list(large)


class TestRolling:
    def test_by_size(self, logs: MakeLogs):
        made = logs(segment_bytes=300)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(5)))
        assert made.files("*.log") == [f"{n:020d}.log" for n in (0, 1, 2, 3, 4)][:1] + [
            f"{n:020d}.log" for n in (1, 2, 3, 4)
        ]
        assert offsets_of(records_of(made.log)) == list(range(5))

    def test_by_the_time_of_the_records(self, logs: MakeLogs):
        made = logs(segment_ms=1000)
        made.append(batch(1, timestamp=NOW), batch(1, timestamp=NOW + 1000), batch(1, timestamp=NOW + 1001))
        assert made.files("*.log") == ["00000000000000000000.log", "00000000000000000002.log"]

    def test_by_age_where_records_have_no_time(self, logs: MakeLogs):
        made = logs(segment_ms=1000)
        made.append(batch(1, timestamp=-1), batch(1, timestamp=-1), now_ms=NOW + 1000)
        assert made.log.segment_count == 1
        made.append(batch(1, timestamp=-1), now_ms=NOW + 1001)
        assert made.log.segment_count == 2

    def test_by_a_full_index(self, logs: MakeLogs):
        made = logs(segment_index_bytes=32, index_interval_bytes=0)
        made.append(*(batch() for _ in range(10)))
        assert made.log.segment_count > 2
        made.close()
        assert all(path.stat().st_size <= 32 + 12 for path in made.folder.glob("*index"))

    def test_by_offsets_that_the_index_cannot_hold(self, logs: MakeLogs):
        made = logs(cleanup_policy=frozenset({"compact"}))
        made.append(batch(key=b"k"))
        far = 2**31 + 5
        made.log.append_as_follower(batch(1, base_offset=far, leader_epoch=0), NOW)
        assert made.files("*.log") == ["00000000000000000000.log", f"{1:020d}.log", f"{far:020d}.log"]
        assert offsets_of(records_of(made.log)) == [0, far]
        assert offsets_of(records_of(made.close_and_open())) == [0, far]
        assert not made.log.damaged_ranges()

    def test_by_offsets_that_the_index_cannot_hold_where_the_active_segment_is_empty(self, logs: MakeLogs):
        """A reader at an offset in the gap was refused."""
        made = logs(cleanup_policy=frozenset({"compact"}))
        made.append(batch(key=b"k"))
        made.log.roll(NOW)
        far = 2**31 + 5
        made.log.append_as_follower(batch(1, base_offset=far, leader_epoch=0), NOW)
        for _ in range(2):
            assert offsets_of(records_of(made.log)) == [0, far]
            assert read(made.log, 1, 100, far + 1).next_offset == far + 1
            assert not made.log.damaged_ranges()
            made.close_and_open()

    @pytest.mark.parametrize("is_opened_again", [False, True])
    def test_a_segment_before_offsets_that_its_index_cannot_hold_is_cleaned(
        self, logs: MakeLogs, is_opened_again: bool
    ):
        """What was to fill its end did not fit: the cleaner ended, or readers were refused."""
        made = logs(cleanup_policy=frozenset({"compact"}), index_interval_bytes=0)
        made.append(batch(key=b"0"), batch(key=b"1"))
        far = 2**31 + 5
        for offset in range(far, far + 3):
            made.log.append_as_follower(batch(1, base_offset=offset, leader_epoch=0, key=b"k"), NOW)
        made.log.set_high_watermark(made.log.log_end_offset)
        if is_opened_again:
            made.close_and_open()
        made.log.roll(NOW)
        clean(made.log)
        for _ in range(2):
            assert offsets_of(records_of(made.log)) == [0, 1, far + 2]
            for segment in made.log.segments:
                assert not segment.examine().damage
            made.close_and_open()
        made.close()
        facts = LogFacts(is_clean=True, is_compacted=True, cleaned_offset=far)
        assert not list(StoppedLog(made.disk, str(made.folder), facts).verify())

    def test_between_two_batches_that_are_too_far_apart_and_come_together(self, logs: MakeLogs):
        """They went into one segment, and each later roll raised struct.error."""
        made = logs(cleanup_policy=frozenset({"compact"}))
        far = 2**31 + 5
        fetched = b"".join(batch(1, base_offset=offset, leader_epoch=0) for offset in (0, far))
        made.log.append_as_follower(memoryview(bytearray(fetched)), NOW)
        assert made.files("*.log") == ["00000000000000000000.log", f"{1:020d}.log", f"{far:020d}.log"]
        made.log.roll(NOW)
        assert offsets_of(records_of(made.log)) == [0, far]

    @pytest.mark.parametrize("ending", ["none", "clean stop", "kill"])
    def test_an_empty_log_begins_where_it_began_also_before_a_first_batch_beyond_its_index(
        self, logs: MakeLogs, ending: str
    ):
        """Its segment moved to the batch: a start missed the records before it, or the log began there after a kill."""
        made = logs(cleanup_policy=frozenset({"compact"}))
        far = 2**31 + 5
        made.log.append_as_follower(batch(1, base_offset=far, leader_epoch=0), NOW)
        assert made.files("*.log") == ["00000000000000000000.log", f"{far:020d}.log"]
        for _ in range(3):
            assert (made.log.log_start_offset, made.log.log_end_offset) == (0, far + 1)
            assert offsets_of(records_of(made.log)) == [far]
            assert not made.log.damaged_ranges()
            if ending != "none":
                (made.close if ending == "clean stop" else made.kill)()
                made.open(machine_ran_on=True)
        made.log.truncate_to(5)
        made.append(batch(key=b"k"))
        assert offsets_of(records_of(made.close_and_open())) == [0]
        assert not made.log.damaged_ranges()

    def test_what_was_flushed_behind_offsets_that_the_index_cannot_hold_stays_after_a_loss_of_power(
        self, logs: MakeLogs
    ):
        """Before the next checkpoint of the recovery point the log was cut before the gap."""
        made = logs(cleanup_policy=frozenset({"compact"}))
        made.append(batch(key=b"k"))
        far = 2**31 + 5
        made.log.append_as_follower(batch(1, base_offset=far, leader_epoch=0), NOW)
        made.log.flush()
        assert offsets_of(records_of(made.kill_and_open())) == [0, far]

    def test_a_snapshot_of_the_producers_is_left_at_the_roll(self, logs: MakeLogs):
        made = logs(segment_bytes=300)
        made.append(*(idempotent(n, value=b"x" * 100) for n in range(3)))
        assert made.files("*.snapshot") == ["00000000000000000001.snapshot", "00000000000000000002.snapshot"]

    def test_a_preallocated_file_is_trimmed(self, logs: MakeLogs):
        made = logs(preallocate=True, segment_bytes=1000)
        made.append(batch(1, value=b"x" * 600))
        assert (made.folder / "00000000000000000000.log").stat().st_size == 1000
        made.append(batch(1, value=b"x" * 600))
        assert (made.folder / "00000000000000000000.log").stat().st_size < 700
        made.close()
        assert (made.folder / "00000000000000000001.log").stat().st_size < 700
        assert offsets_of(records_of(made.open())) == [0, 1]

    @pytest.mark.parametrize("is_closed", [False, True])
    def test_a_file_that_was_preallocated_is_trimmed_after_the_setting_has_changed(
        self, logs: MakeLogs, is_closed: bool
    ) -> None:
        """The zeros stayed at the end of the closed segment, and counted as damage."""
        made = logs(preallocate=True, segment_bytes=1000)
        made.append(batch(1, value=b"x" * 600))
        made.log.set_config(replace(made.config, preallocate=False))
        if is_closed:
            made.close()
        else:
            made.append(batch(1, value=b"x" * 600))
        assert (made.folder / "00000000000000000000.log").stat().st_size < 700


class TestReading:
    @pytest.fixture
    def filled(self, logs: MakeLogs) -> Logs:
        made = logs(segment_bytes=20_000, index_interval_bytes=500)
        made.append(*(batch(1 + n % 4, value=bytes([n]) * (n * 7 % 900)) for n in range(200)))
        return made

    @pytest.mark.parametrize("max_bytes", [0, 1, 200, 1000, 5000, 10**6])
    def test_reading_on_gives_every_record_once(self, filled: Logs, max_bytes: int):
        assert offsets_of(records_of(filled.log, max_bytes)) == list(range(filled.log.log_end_offset))
        filled.close_and_open()
        assert offsets_of(records_of(filled.log, max_bytes)) == list(range(filled.log.log_end_offset))

    def test_a_read_inside_a_batch_gives_the_whole_batch(self, filled: Logs):
        for offset in range(0, filled.log.log_end_offset, 7):
            result = filled.log.read(offset, 1, filled.log.log_end_offset)
            [(_, header)] = list(iter_headers(result.regions[0]))
            assert header.base_offset <= offset <= header.last_offset
            assert result.next_offset == header.next_offset

    def test_answers_are_whole_batches_within_the_limit(self, filled: Logs):
        for offset in range(0, filled.log.log_end_offset, 11):
            result = filled.log.read(offset, 3000, filled.log.log_end_offset)
            sizes = [header.size_bytes for _, header in iter_headers(result.regions[0])]
            assert sum(sizes) == result.size_bytes
            assert result.size_bytes <= 3000 or len(sizes) == 1

    def test_without_a_first_batch_at_any_price_the_answer_may_be_empty(self, filled: Logs):
        result = filled.log.read(5, 10, filled.log.log_end_offset, min_one_batch=False)
        assert (result.regions, result.size_bytes, result.next_offset) == ([], 0, 5)

    def test_nothing_at_or_above_the_bound_is_given(self, filled: Logs):
        end = filled.log.log_end_offset
        for upper in range(1, end, 13):
            offset = max(0, upper - 9)
            result = filled.log.read(offset, 10**6, upper)
            found = [record.offset for region in result.regions for record in iter_records(region)]
            assert all(o < upper for o in found)
            assert filled.log.read(upper, 10**6, upper).regions == []

    def test_offsets_outside_the_log_are_refused(self, filled: Logs):
        end = filled.log.log_end_offset
        assert filled.log.read(end, 100, end).regions == []
        assert refused(lambda: filled.log.read(end + 1, 100, end)) == ErrorCode.OFFSET_OUT_OF_RANGE
        assert refused(lambda: filled.log.read(-1, 100, end)) == ErrorCode.OFFSET_OUT_OF_RANGE
        filled.log.delete_records(10)
        assert refused(lambda: filled.log.read(9, 100, end)) == ErrorCode.OFFSET_OUT_OF_RANGE

    def test_large_answers_are_slices_of_a_map(self, logs: MakeLogs):
        made = logs()
        made.append(*(batch(1, value=b"x" * 50_000) for _ in range(4)))
        [region] = made.log.read(0, 10**6, 4).regions
        assert isinstance(region, memoryview)
        assert region.readonly
        assert [record.offset for record in iter_records(region)] == [0, 1, 2, 3]
        [small] = made.log.read(0, 60_000, 4).regions
        assert isinstance(small, bytes)

    def test_a_slice_outlives_growth_and_truncation(self, logs: MakeLogs):
        made = logs()
        made.append(*(batch(1, value=bytes([n]) * 50_000) for n in range(4)))
        [region] = made.log.read(0, 10**6, 4).regions
        before = bytes(region)
        made.append(batch(1, value=b"y" * 90_000))
        [grown] = made.log.read(0, 10**6, 5).regions
        made.log.truncate_to(1)
        made.append(batch(1, value=b"z" * 90_000))
        assert bytes(region) == before
        assert bytes(grown)[: len(before)] == before
        values = [record.value[:1] for record in records_of(made.log) if record.value]
        assert values == [b"\0", b"z"]

    def test_a_file_is_cut_in_place_when_nobody_holds_a_slice(self, logs: MakeLogs):
        made = logs()
        made.append(*(batch(1, value=b"x" * 50_000) for _ in range(4)))
        path = made.folder / "00000000000000000000.log"
        inode = path.stat().st_ino
        region = made.log.read(0, 10**6, 4).regions[0]
        del region
        made.log.truncate_to(2)
        assert path.stat().st_ino == inode
        region = made.log.read(0, 10**6, 2).regions[0]
        made.log.truncate_to(1)
        assert path.stat().st_ino != inode
        assert len(region) > 100_000

    def test_a_cold_range_says_so_until_it_was_warmed(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        made = logs()
        made.append(*(batch(1, value=b"x" * 50_000) for _ in range(4)))
        log = made.close_and_open()
        file = type(log.segments.active.file)
        monkeypatch.setattr(file, "read_at_nowait", lambda self, size, position: None)
        for max_bytes in (100, 10**6):
            with pytest.raises(ColdRead) as caught:
                log.read(2, max_bytes, 4)
            caught.value.warm()
        monkeypatch.undo()
        assert log.read(2, 10**6, 4).next_offset == 4

    def test_what_could_not_be_warmed_is_told_to_one_who_asks_and_then_tried_again(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
    ):
        made = logs()
        made.append(*(batch(1, value=b"x" * 50_000) for _ in range(4)))
        log = made.close_and_open()
        file = type(log.segments.active.file)
        monkeypatch.setattr(file, "read_at_nowait", lambda self, size, position: None)
        with pytest.raises(ColdRead) as caught:
            log.read(2, 100, 4)
        with monkeypatch.context() as patch:

            def refuse(*arguments: Any) -> bytes:
                raise OSError(errno.ENOMEM, "no memory")

            patch.setattr(file, "read_at", refuse)
            caught.value.warm()
        with pytest.raises(OSError, match="no memory"):
            log.read(2, 100, 4)
        with pytest.raises(ColdRead):
            log.read(2, 100, 4)

    def test_what_was_just_written_is_never_cold(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        made = logs()
        made.append(batch(3))
        monkeypatch.setattr(type(made.log.segments.active.file), "read_at_nowait", lambda self, size, position: None)
        assert made.log.read(0, 100, 3).next_offset == 3

    def test_damaged_records_are_refused_and_those_around_them_served(self, filled: Logs):
        whole = {record.offset: record for record in records_of(filled.log)}
        filled.close_and_open()
        path = filled.folder / "00000000000000000000.log"
        data = bytearray(path.read_bytes())
        data[3000:9000] = bytes(6000)
        path.write_bytes(data)
        with pytest.raises(DamagedRecords) as caught:
            records_of(filled.log, 1000)
        damage = caught.value.damage
        assert 0 < damage.first_offset < damage.end_offset < filled.log.log_end_offset
        for offset in range(filled.log.log_end_offset):
            if damage.holds(offset):
                with pytest.raises(DamagedRecords):
                    read(filled.log, offset, 1, filled.log.log_end_offset)
            else:
                [region] = read(filled.log, offset, 1, filled.log.log_end_offset).regions
                assert {record.offset: record for record in iter_records(region)}[offset] == whole[offset]


class TestTimestamps:
    @pytest.fixture
    def filled(self, logs: MakeLogs) -> Logs:
        made = logs(segment_bytes=1000, index_interval_bytes=100)
        for number in range(40):
            made.append(batch(2, timestamp=NOW + 100 * (number + (3 if number % 5 == 0 else 0))), epoch=number // 20)
        return made

    def expected(self, log: PartitionLog, timestamp: int) -> tuple[int, int] | None:
        retained = (record for record in records_of(log) if record.offset >= log.log_start_offset)
        return next(((record.timestamp, record.offset) for record in retained if record.timestamp >= timestamp), None)

    def test_the_first_record_not_older_is_found(self, filled: Logs):
        for timestamp in range(NOW - 100, NOW + 4500, 37):
            found = filled.log.offset_for_timestamp(timestamp)
            assert (found and found[:2]) == self.expected(filled.log, timestamp)
        found = filled.log.offset_for_timestamp(NOW + 3000)
        assert found is not None
        assert found.leader_epoch == 1

    def test_also_below_a_moved_log_start_and_after_a_restart(self, filled: Logs):
        filled.log.delete_records(21)
        for log in (filled.log, filled.close_and_open(), filled.kill_and_open()):
            assert log.offset_for_timestamp(0) == (*self.expected(log, 0), 0)  # type: ignore[misc]
            found = log.offset_for_timestamp(NOW + 1234)
            assert (found and found[:2]) == self.expected(log, NOW + 1234)

    def test_the_largest_timestamp(self, filled: Logs, logs: MakeLogs):
        found = filled.log.max_timestamp_offset()
        newest = max(records_of(filled.log), key=lambda record: (record.timestamp, -record.offset))
        assert found is not None
        assert found[:2] == (newest.timestamp, newest.offset)

    @pytest.mark.parametrize(("end", "expected"), [(4, (9, 2)), (3, (9, 2)), (2, (7, 1)), (1, (5, 0)), (0, None)])
    def test_the_largest_timestamp_after_a_truncation(self, logs: MakeLogs, end: int, expected: tuple[int, int] | None):
        made = logs()
        made.append(*(batch(1, timestamp=timestamp) for timestamp in (5, 7, 9, 8, 9)))
        made.log.truncate_to(end)
        found = made.log.max_timestamp_offset()
        assert (found and found[:2]) == expected
        made.append(batch(1, timestamp=6))
        found = made.close_and_open().max_timestamp_offset()
        assert (found and found[:2]) == (expected if expected and expected[0] > 6 else (6, end))

    def test_an_empty_log_has_none(self, logs: MakeLogs):
        made = logs()
        assert made.log.max_timestamp_offset() is None
        assert made.log.offset_for_timestamp(0) is None

    def test_of_records_without_a_time_the_first_is_the_newest(self, logs: MakeLogs):
        made = logs()
        made.append(batch(1, timestamp=-1), batch(1, timestamp=-1))
        assert made.log.max_timestamp_offset() == (-1, 0, 0)

    def test_all_records_of_a_log_append_time_batch_are_of_its_time(self, logs: MakeLogs):
        made = logs(message_timestamp_type="LogAppendTime")
        made.append(batch(3), batch(3))
        found = made.log.max_timestamp_offset()
        assert found is not None
        assert found.offset in (0, 3)  # both may be of the same millisecond


class TestFlushing:
    def test_one_flush_answers_many_appends(self, logs: MakeLogs):
        made = logs(flush_messages=1)
        made.append(batch(2))
        assert (made.log.committable_offset, made.log.flush_due) == (0, True)
        task = made.log.begin_flush()
        assert not made.log.flush_due
        made.append(batch(2), batch(1))
        task.run()
        made.log.finish_flush(task)
        assert (made.log.committable_offset, made.log.flush_due) == (2, True)
        made.log.flush()
        assert (made.log.committable_offset, made.log.flush_due) == (5, False)

    def test_only_what_crosses_the_limit_waits(self, logs: MakeLogs):
        made = logs(flush_messages=4)
        made.append(batch(3))
        assert (made.log.committable_offset, made.log.flush_due) == (3, False)
        made.append(batch(2))
        assert (made.log.committable_offset, made.log.flush_due) == (3, True)
        made.append(batch(1))
        assert made.log.committable_offset == 3
        made.log.flush()
        assert (made.log.committable_offset, made.log.flush_due) == (6, False)

    def test_of_two_offsets_from_which_it_waits_the_first_counts(self, logs: MakeLogs):
        made = logs(flush_messages=4)
        made.append(batch(3), batch(2))
        for offset, committable in ((4, 3), (1, 1), (2, 1)):
            made.log.durability.block_from(offset)
            assert made.log.committable_offset == committable
        made.log.flush()
        assert made.log.committable_offset == 5

    def test_what_follows_a_truncation_during_a_flush_waits_for_the_next_one(self, logs: MakeLogs):
        made = logs(flush_messages=1)
        made.append(batch(1), batch(2))
        task = made.log.begin_flush()
        task.run()
        made.log.truncate_to(1)
        made.append(batch(2))
        made.log.finish_flush(task)
        assert (made.log.committable_offset, made.log.flush_due) == (1, True)
        task = made.log.begin_flush()
        assert [segment for segment, _ in task.segments] == [made.log.segments.active]
        task.run()
        made.log.finish_flush(task)
        assert made.log.committable_offset == 3

    def test_the_checkpoint_waits_for_the_indexes_of_sealed_segments(self, logs: MakeLogs):
        made = logs()
        made.append(batch(3))
        made.log.flush()
        for _ in range(2):
            made.log.roll(NOW)
            made.append(batch(2))
            assert made.log.durability.checkpointable == 2
        task = made.log.begin_flush()
        assert made.log.durability.checkpointable == 2
        task.run()
        made.log.finish_flush(task)
        assert made.log.durability.checkpointable == 7

    def test_a_truncation_takes_what_waits_with_it(self, logs: MakeLogs):
        made = logs(flush_messages=4)
        made.append(batch(3), batch(2), batch(2))
        made.log.truncate_to(5)
        assert (made.log.committable_offset, made.log.flush_due) == (3, True)
        made.log.truncate_to(3)
        assert (made.log.committable_offset, made.log.flush_due) == (3, False)

    def test_the_checkpoint_waits_for_the_indexes_of_a_segment_that_a_truncation_opens_again(self, logs: MakeLogs):
        made = logs()
        made.append(batch(2), batch(2))
        made.log.roll(NOW)
        made.append(batch(2))
        made.log.flush()
        made.log.truncate_to(2)
        assert made.log.durability.checkpointable == 1
        made.log.flush()
        assert made.log.durability.checkpointable == 2

    def test_a_segment_that_is_sealed_during_a_flush_is_for_the_next_one(self, logs: MakeLogs):
        made = logs(preallocate=True)
        made.append(batch(2))
        task = made.log.begin_flush()
        made.log.roll(NOW)
        task.run()
        made.log.finish_flush(task)
        assert made.log.flush_due
        assert made.log.durability.checkpointable == 1
        task = made.log.begin_flush()
        assert made.log.segments.first in [segment for segment, _ in task.segments]
        task.run()
        made.log.finish_flush(task)
        assert (made.log.flush_due, made.log.durability.checkpointable) == (False, 2)

    def test_the_checkpoint_waits_for_the_flush_after_one_that_lacked_descriptors(self, logs: MakeLogs):
        made = logs()
        made.append(batch(2))
        made.log.roll(NOW)
        made.append(batch(2))
        task = made.log.begin_flush()
        task.error = OSError(errno.EMFILE, "too many")
        with pytest.raises(OSError, match="too many"):
            made.log.finish_flush(task)
        made.append(batch(1))
        assert (made.log.flush_due, made.log.durability.checkpointable) == (True, 0)
        made.log.durability.recovery_point = 5
        assert made.log.durability.checkpointable == 1
        made.log.flush()
        assert made.log.durability.checkpointable == 5

    def test_without_a_policy_nothing_waits(self, logs: MakeLogs):
        made = logs()
        made.append(batch(100))
        assert (made.log.committable_offset, made.log.flush_due) == (100, False)

    def test_the_first_record_waits_for_the_topic_id(self, logs: MakeLogs):
        made = logs()
        other = made.directory.create_log("u", 0, TOPIC_ID, made.config, NOW)
        assert not other.flush_due
        other.append_as_leader(batch(2), 0, NOW)
        assert (other.committable_offset, other.flush_due) == (0, True)
        task = other.begin_flush()
        assert f"{other.directory}/partition.metadata" in task.paths
        other.append_as_leader(batch(1), 0, NOW)
        task.run()
        other.finish_flush(task)
        assert (other.committable_offset, other.flush_due) == (3, False)

    def test_an_id_that_is_written_during_a_flush_is_waited_for(self, logs: MakeLogs):
        made = logs()
        made.log.topic_id = None
        task = made.log.begin_flush()
        made.directory.set_topic_id("t", 0, TOPIC_ID)
        task.run()
        made.log.finish_flush(task)
        made.append(batch(1))
        assert (made.log.committable_offset, made.log.flush_due) == (0, True)
        made.log.flush()
        assert (made.log.committable_offset, made.log.flush_due) == (1, False)

    @pytest.mark.parametrize("is_checkpointed", [False, True])
    def test_after_a_kill_a_log_without_a_recovery_point_is_new_again(self, logs: MakeLogs, is_checkpointed: bool):
        made = logs()
        made.append(batch(2))
        made.log.flush()
        if is_checkpointed:
            made.directory.write_checkpoints()
        log = made.kill_and_open()
        assert not log.flush_due
        made.append(batch(1))
        assert (log.committable_offset, log.flush_due) == ((3, False) if is_checkpointed else (2, True))

    @pytest.mark.parametrize("is_written_before", [False, True])
    def test_a_flush_under_way_leaves_no_epochs_of_what_is_truncated(self, logs: MakeLogs, is_written_before: bool):
        made = logs(flush_messages=1)
        made.log.assign_epoch(3)
        made.append(batch(1), epoch=3)
        task = made.log.begin_flush()
        if is_written_before:
            task.run()
        made.log.truncate_to(0)
        if not is_written_before:
            task.run()
        assert (made.folder / "leader-epoch-checkpoint").read_bytes() == b"0\n0\n"
        made.log.finish_flush(task)

    def test_a_roll_wants_a_flush_that_nobody_waits_for(self, logs: MakeLogs):
        made = logs(segment_bytes=200)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(2)))
        assert (made.log.committable_offset, made.log.flush_due) == (2, True)
        made.log.flush()
        assert not made.log.flush_due

    def test_time_makes_a_flush_due(self, logs: MakeLogs):
        made = logs(flush_ms=1000)
        made.append(batch())
        made.log.maintain(NOW + 999)
        assert not made.log.flush_due
        made.log.maintain(NOW + 1000)
        assert made.log.flush_due

    @pytest.mark.parametrize("free", range(12))
    def test_a_cut_with_few_descriptors_is_whole_or_may_be_tried_again(self, logs: MakeLogs, free: int):
        """With one that was free it failed halfway, and the replica stayed offline until the next start."""
        made = logs(segment_bytes=200)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(3)))
        made.log.segments.release()
        held: list[int] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 50, hard))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(held.pop())
            with suppress(OSError):
                made.log.truncate_to(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in held:
                os.close(each)
        assert made.log.failure is None
        made.log.truncate_to(1)
        assert offsets_of(records_of(made.log)) == [0]
        assert made.log.log_end_offset == 1

    @pytest.mark.parametrize("offset", [0, 2])
    def test_a_cut_for_which_there_are_no_descriptors_may_be_tried_again_if_nothing_was_cut(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, offset: int
    ):
        made = logs(segment_bytes=200)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(3)))
        if not offset:
            made.log.set_high_watermark(1)
            made.log.delete_records(1)
            made.log.segments.condemn_first(1)

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EMFILE, "too many")

        for port, may_be_tried_again in (("list_directory", True), ("sync_directory", False)):
            with monkeypatch.context() as patch:
                patch.setattr(QuickDisk, port, refuse)
                with pytest.raises(OSError, match="too many") as caught:
                    made.log.truncate_to(offset)
            assert made.log.can_retry(caught.value) is may_be_tried_again
            if may_be_tried_again:
                assert made.log.log_end_offset == 3
                assert offsets_of(records_of(made.log, made.log.log_start_offset)) == list(
                    range(1 if not offset else 0, 3)
                )
        with pytest.raises(CorruptLog, match="in part"):
            made.append(batch())

    @pytest.mark.parametrize(("port", "may_be_tried_again"), [("list_directory", True), ("sync_directory", False)])
    def test_an_empty_segment_that_cannot_be_replaced_for_want_of_descriptors(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, port: str, may_be_tried_again: bool
    ):
        """Offsets that are too far from the base of the only segment, which is empty, want another one."""
        made = logs(cleanup_policy=frozenset({"compact"}))
        far = batch(1)
        far[:8] = (3_000_000_000).to_bytes(8, "big")

        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EMFILE, "too many")

        made.directory.enter_in_cleaner_checkpoint(made.log)  # as before any gap; this syncs a directory, too
        with monkeypatch.context() as patch:
            patch.setattr(QuickDisk, port, refuse)
            with pytest.raises(OSError, match="too many") as caught:
                made.log.append_as_follower(far, NOW)
        assert made.log.can_retry(caught.value) is may_be_tried_again
        if may_be_tried_again:
            made.log.append_as_follower(far, NOW)
            assert made.log.log_end_offset == 3_000_000_001

    def test_a_device_that_cannot_sync_takes_the_log_offline(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        made = logs(flush_messages=1)
        made.append(batch())

        def fail(self: object) -> None:
            raise OSError(5, "no")

        monkeypatch.setattr(type(made.log.segments.active.file), "sync", fail)
        with pytest.raises(OSError, match="no"):
            made.log.flush()
        assert made.log.committable_offset == 0
        with pytest.raises(CorruptLog):
            made.append(batch())
        made.close()
        assert not (made.path / ".kafka_cleanshutdown").exists()

    @pytest.mark.parametrize("port", ["sync_file", "sync_directory", "write_file"])
    def test_a_flush_for_want_of_descriptors_is_done_again(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, port: str
    ):
        made = logs(flush_messages=1, segment_bytes=200)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(3)))
        made.log.assign_epoch(7)
        real: Any = {name: getattr(QuickDisk, name) for name in ("sync_file", "sync_directory", "write_file")}
        synced: list[str] = []

        def watched(name: str) -> Any:
            def work(disk: QuickDisk, path: str, *arguments: Any, **options: Any) -> None:
                synced.append(path)
                real[name](disk, path, *arguments, **options)

            return work

        for name in real:
            monkeypatch.setattr(QuickDisk, name, watched(name))
        task = made.log.begin_flush()
        with monkeypatch.context() as patch:

            def refuse(*arguments: Any, **options: Any) -> None:
                raise OSError(errno.EMFILE, "too many")

            patch.setattr(QuickDisk, port, refuse)
            task.run()
        with pytest.raises(OSError, match="too many"):
            made.log.finish_flush(task)
        durability = made.log.durability
        assert (made.log.committable_offset, durability.recovery_point, durability.checkpointable) == (0, 0, 0)
        assert made.log.flush_due
        assert all(each.synced_bytes < each.size_bytes for each in made.log.segments)
        synced.clear()
        made.log.flush()
        assert (made.log.committable_offset, durability.recovery_point, durability.checkpointable) == (3, 3, 3)
        wanted = {*task.paths, *task.directories, f"{made.log.directory}/leader-epoch-checkpoint.tmp"}
        assert wanted <= set(synced)
        made.append(batch())

    def test_files_stay_open_while_a_flush_needs_them(self, logs: MakeLogs):
        made = logs(flush_messages=1, segment_bytes=200)
        made.append(batch(1, value=b"x" * 100))
        task = made.log.begin_flush()
        made.append(batch(1, value=b"x" * 100))
        made.log.segments.release()
        task.run()
        made.log.finish_flush(task)
        assert made.log.committable_offset == 1

    def test_deleting_a_log_does_not_disturb_its_flush(self, logs: MakeLogs):
        made = logs(flush_messages=1)
        made.append(batch())
        task = made.log.begin_flush()
        made.directory.delete_log("t", 0, NOW)
        task.run()
        made.log.finish_flush(task)


class TestFullDisk:
    def test_a_refused_write_leaves_the_log_as_it_was(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        made = logs()
        made.append(batch(2))
        segment = made.log.segments.active
        write_at = segment.write_at

        def half(data: memoryview, position: int) -> int:
            if position == segment.size_bytes:
                return write_at(data[:10], position)
            raise OSError(28, "No space left on device")

        segment.write_at = half  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left"):
            made.append(batch(3))
        assert (made.folder / "00000000000000000000.log").stat().st_size == segment.size_bytes
        segment.write_at = write_at
        [info] = made.append(batch(1))
        assert info.first_offset == 2
        assert offsets_of(records_of(made.log)) == [0, 1, 2]


class TestShortening:
    @pytest.fixture
    def filled(self, logs: MakeLogs) -> Logs:
        made = logs(segment_bytes=700, index_interval_bytes=100, file_delete_delay_ms=50)
        made.append(*(idempotent(2 * n, 2, value=b"x" * 50) for n in range(20)), epoch=1)
        return made

    @pytest.mark.parametrize("offset", [0, 1, 2, 10, 21, 38, 39])
    def test_truncation_cuts_the_batch_that_holds_the_offset(self, filled: Logs, offset: int):
        log = filled.log
        log.truncate_to(offset)
        kept = offset // 2 * 2
        assert (log.log_end_offset, log.high_watermark) == (kept, kept)
        assert offsets_of(records_of(log)) == list(range(kept))
        assert log.producers.entries[7].last_sequence == kept - 1 if kept else 7 not in log.producers.entries
        [info] = filled.append(idempotent(kept, 2), epoch=2)
        assert info.first_offset == kept
        assert list(log.leader_epochs) == ([(1, 0), (2, kept)] if kept else [(2, 0)])
        for opened in (filled.close_and_open(), filled.kill_and_open()):
            assert offsets_of(records_of(opened)) == list(range(kept + 2))

    def test_truncation_beyond_the_end_does_nothing(self, filled: Logs):
        filled.log.truncate_to(40)
        filled.log.truncate_to(99)
        assert filled.log.log_end_offset == 40

    def test_a_log_can_be_emptied_to_start_elsewhere(self, filled: Logs):
        filled.log.truncate_fully_and_start_at(1000)
        log = filled.log
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (1000, 1000, 1000)
        assert not log.producers.entries
        [info] = filled.append(idempotent(5), epoch=3)
        assert info.first_offset == 1000
        assert offsets_of(records_of(filled.kill_and_open())) == [1000]

    def test_delete_records_moves_the_log_start(self, filled: Logs):
        log = filled.log
        assert log.delete_records(15) == 15
        assert log.delete_records(3) == 15
        assert refused(lambda: log.delete_records(41)) == ErrorCode.OFFSET_OUT_OF_RANGE
        assert offsets_of(records_of(log))[:2] == [14, 15]
        assert list(log.leader_epochs) == [(1, 15)]
        filled.directory.maintain(NOW)
        assert log.segments.first.base_offset <= 14
        assert filled.close_and_open().log_start_offset == 15
        assert log.log_start_offset == 15
        assert filled.log.delete_records(-1) == 40

    def test_deleted_segments_are_renamed_and_go_after_the_delay(self, filled: Logs):
        count = filled.log.segment_count
        filled.log.delete_records(25)
        filled.log.maintain(NOW)
        assert filled.log.segment_count < count
        assert not filled.files("*.deleted")  # first the log start is checkpointed
        filled.directory.maintain(NOW)
        assert filled.files("*.log.deleted")
        filled.directory.maintain(NOW + 49)
        assert filled.files("*.deleted")
        filled.directory.maintain(NOW + 50)
        assert not filled.files("*.deleted")
        assert filled.files("*.snapshot")[0] >= filled.files("*.log")[0]

    def test_retention_by_age_rolls_and_empties(self, filled: Logs):
        filled.log.set_config(LogConfig(retention_ms=1000, segment_bytes=700))
        filled.directory.maintain(NOW + 500)
        assert filled.log.log_start_offset == 0
        filled.directory.maintain(NOW + 5000)
        assert (filled.log.log_start_offset, filled.log.log_end_offset) == (40, 40)
        assert filled.files("*.log") == ["00000000000000000040.log"]
        [info] = filled.append(idempotent(40), epoch=1)
        assert info.first_offset == 40

    def test_retention_by_size(self, filled: Logs):
        filled.log.set_config(LogConfig(retention_bytes=1500, segment_bytes=700))
        filled.directory.maintain(NOW)
        assert 1500 <= filled.log.size_bytes < 1500 + 700

    def test_retention_stops_at_the_high_watermark(self, filled: Logs):
        filled.log.set_config(LogConfig(retention_ms=0, segment_bytes=700))
        filled.log.high_watermark = 9
        filled.directory.maintain(NOW + 5000)
        assert filled.log.log_start_offset <= 9


class TestTransactions:
    def test_the_stable_offset_and_the_aborted(self, logs: MakeLogs):
        made = logs()
        made.append(batch(2), idempotent(0, 2, transactional=True), idempotent(0, 1, producer_id=8, transactional=True))
        assert made.log.last_stable_offset == 2
        made.append(marker(abort=True), from_client=False)
        assert made.log.last_stable_offset == 4
        made.append(marker(abort=False, producer_id=8), from_client=False)
        assert made.log.last_stable_offset == made.log.log_end_offset == 7
        for log in (made.log, made.close_and_open(), made.kill_and_open()):
            assert log.aborted_transactions(0, 7) == [(7, 2, 5, 4)]
            assert log.aborted_transactions(6, 7) == []

    def test_a_marker_is_stable_when_it_is_replicated(self, logs: MakeLogs):
        made = logs()
        made.append(idempotent(0, 2, transactional=True))
        made.log.append_as_leader(marker(abort=False), 0, NOW, from_client=False)
        assert (made.log.high_watermark, made.log.last_stable_offset) == (2, 0)
        made.log.set_high_watermark(3)
        assert made.log.last_stable_offset == 3

    def test_a_cut_leaves_what_is_replicated_stable(self, logs: MakeLogs):
        """The high watermark need not move again: this replica may lead next, and get no record for long."""
        made = logs()
        made.append(idempotent(0, 2, transactional=True))
        made.append(marker(abort=False), from_client=False)
        made.log.append_as_leader(idempotent(2, transactional=True), 0, NOW)
        made.log.append_as_leader(marker(abort=True), 0, NOW, from_client=False)
        made.log.append_as_leader(batch(1), 0, NOW)
        made.log.truncate_to(5)
        assert (made.log.high_watermark, made.log.last_stable_offset) == (3, 3), "the second end is not replicated"
        made.log.truncate_to(3)
        assert (made.log.high_watermark, made.log.last_stable_offset) == (3, 3)
        made.log.append_as_leader(batch(1), 0, NOW)
        made.log.set_high_watermark(4)
        assert made.log.last_stable_offset == 4

    def test_markers_and_data_in_one_fetch_keep_their_order(self, logs: MakeLogs):
        made = logs()
        parts = [
            idempotent(0, 1, base_offset=0, transactional=True),
            marker(abort=True),
            idempotent(1, 1, base_offset=2, transactional=True),
        ]
        data = bytearray()
        for number, part in enumerate(parts):
            part[0:8] = number.to_bytes(8, "big")
            data += part
        made.log.append_as_follower(memoryview(data), NOW)
        made.log.set_high_watermark(3)
        assert made.log.last_stable_offset == 2
        assert made.log.aborted_transactions(0, 3) == [(7, 0, 1, 2)]


def test_epochs_end_where_the_next_began(logs: MakeLogs):
    made = logs()
    made.append(batch(3), epoch=2)
    made.append(batch(2), epoch=5)
    assert made.log.end_offset_for_epoch(2) == (2, 3)
    assert made.log.end_offset_for_epoch(4) == (2, 3)
    assert made.log.end_offset_for_epoch(5) == (5, 5)
    assert made.log.end_offset_for_epoch(6) == (-1, -1)


def test_idle_files_are_given_back(logs: MakeLogs):
    made = logs(segment_bytes=200)
    made.append(*(batch(1, value=b"x" * 100) for _ in range(5)))
    records_of(made.log)
    held = len(list(Path("/proc/self/fd").iterdir()))
    made.log.maintain(NOW)
    made.log.maintain(NOW)
    assert len(list(Path("/proc/self/fd").iterdir())) < held
    made.append(batch())
    assert offsets_of(records_of(made.log)) == list(range(6))
