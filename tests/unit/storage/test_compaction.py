"""A cleaned log keeps the newest record of every key, and everything else about it stays true."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, records_of
from tests.unit.storage.cleaning import begin, clean, contents
from tidelog.protocol.batches.records import Headers, encode_batch, iter_records
from tidelog.storage.cleaner.keys import BYTES_PER_KEY
from tidelog.storage.log.compaction import CleaningFailed, find_cleanable
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.recovery import examine_now
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.log.verification import LogFacts, StoppedLog
from tidelog.storage.segments import transaction_index
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.lookup import UNTRUE_HEADERS_MAX
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.transaction_index import AbortedTransaction

CONFIG = LogConfig(
    segment_bytes=1000, index_interval_bytes=100, message_timestamp_after_max_ms=INT64_MAX,
    cleanup_policy=frozenset({"compact"}),
)  # fmt: skip
HOUR = 3_600_000


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "logs", CONFIG)


def keyed(*pairs: tuple[str, str | None], timestamp: int = NOW, **kw: object) -> memoryview:
    none: Headers = ()
    rows = [(timestamp + i, k.encode(), v.encode() if v is not None else None, none) for i, (k, v) in enumerate(pairs)]
    return memoryview(encode_batch(rows, **kw))  # type: ignore[arg-type]


def roll(log: PartitionLog) -> None:
    log.roll(NOW)


def newest(log: PartitionLog) -> dict[bytes, bytes | None]:
    return {key: value for _, key, value in contents(log) if key is not None}


def batches_in(log: PartitionLog) -> list[tuple[int, int, int]]:
    """(base offset, last offset, leader epoch) of every batch."""
    found = [header for segment in log.segments for _, header in headers(segment)]
    return [(each.base_offset, each.last_offset, each.partition_leader_epoch) for each in found]


class TestKeys:
    def test_only_the_newest_record_of_a_key_stays(self, logs: Logs):
        logs.append(keyed(("a", "1"), ("b", "1"), ("a", "2")), keyed(("b", "2"), ("c", "1")))
        roll(logs.log)
        clean(logs.log)
        assert contents(logs.log) == [(2, b"a", b"2"), (3, b"b", b"2"), (4, b"c", b"1")]
        assert logs.log.cleaned_offset == 5

    def test_a_batch_that_stays_whole_is_copied_byte_by_byte(self, logs: Logs):
        batch = keyed(("a", "1"), ("b", "1"))
        logs.append(batch)
        written = bytes(logs.log.read(0, 1000, 2).regions[0])
        roll(logs.log)
        clean(logs.log)
        assert bytes(logs.log.read(0, 1000, 2).regions[0]) == written

    def test_the_active_segment_is_left_alone(self, logs: Logs):
        logs.append(keyed(("a", "1")))
        roll(logs.log)
        logs.append(keyed(("a", "2")), keyed(("a", "3")))
        clean(logs.log)
        assert [value for _, _, value in contents(logs.log)] == [b"1", b"2", b"3"]

    @pytest.mark.parametrize("codec", range(5))
    def test_batches_of_every_codec(self, logs: Logs, codec: int):
        for number in range(20):
            pairs = [(f"k{n % 7}", f"{number}-{n}" * 3) for n in range(number % 5 + 1)]
            logs.append(keyed(*pairs, compression=codec))
        wanted = newest(logs.log)
        roll(logs.log)
        clean(logs.log)
        assert newest(logs.log) == wanted
        assert len(contents(logs.log)) == len(wanted)
        left = [header for segment in logs.log.segments for _, header in headers(segment)]
        compressions = {header.compression for header in left if header.record_count}
        assert compressions == {codec}

    def test_long_keys_and_empty_ones(self, logs: Logs):
        long = "k" * 200
        logs.append(keyed((long, "1"), ("", "1"), ("k" * 33, "1"), ("k" * 32, "1")), keyed((long, "2"), ("", "2")))
        roll(logs.log)
        clean(logs.log)
        assert [offset for offset, _, _ in contents(logs.log)] == [2, 3, 4, 5]

    def test_small_segments_become_one(self, logs: Logs):
        for number in range(60):
            logs.append(keyed((f"k{number % 10}", "v" * 20)))
        roll(logs.log)
        before = logs.log.segment_count
        clean(logs.log)
        assert len(contents(logs.log)) == 10
        clean_again(logs)
        assert logs.log.segment_count <= 3 < before
        assert len(contents(logs.log)) == 11

    def test_a_log_cleaned_in_several_rounds_because_the_table_is_small(self, logs: Logs):
        for number in range(40):
            logs.append(keyed((f"k{number % 25}", f"{number}")))
        wanted = newest(logs.log)
        roll(logs.log)
        rounds = 0
        while logs.log.cleaned_offset < 40:
            compaction = clean(logs.log, memory_bytes=2000, load_factor=1.0)
            assert compaction.cleaned_offset > compaction.chosen.first_dirty_offset
            assert newest(logs.log) == wanted
            rounds += 1
        assert rounds > 3
        assert len(contents(logs.log)) == 25

    def test_records_without_a_key_go(self, logs: Logs):
        none: Headers = ()
        batch = memoryview(encode_batch([(NOW, None, b"x", none), (NOW, b"k", b"y", none)]))
        logs.append(batch, from_client=False)
        roll(logs.log)
        compaction = clean(logs.log)
        assert contents(logs.log) == [(1, b"k", b"y")]
        assert compaction.stats.keyless == 1


def clean_again(logs: Logs, now_ms: int = NOW) -> None:
    """One more dirty record, so that there is something to clean."""
    logs.append(keyed(("again", "1")))
    roll(logs.log)
    clean(logs.log, now_ms)
    assert logs.log.segments.first.base_offset == 0


class TestTombstones:
    def test_a_tombstone_stays_until_its_time_is_over(self, logs: Logs):
        logs.append(keyed(("a", "1")), keyed(("a", None), ("b", "1")))
        roll(logs.log)
        clean(logs.log)
        assert contents(logs.log) == [(1, b"a", None), (2, b"b", b"1")]
        horizons = [
            header.base_timestamp for _, header in headers(logs.log.segments.first) if header.has_delete_horizon
        ]
        assert horizons == [NOW + CONFIG.delete_retention_ms]
        assert [record.timestamp for record in records_of(logs.log)] == [NOW, NOW + 1]
        clean_again(logs, NOW + CONFIG.delete_retention_ms - 1)
        assert (1, b"a", None) in contents(logs.log)
        assert horizons == [
            header.base_timestamp for _, header in headers(logs.log.segments.first) if header.has_delete_horizon
        ]
        logs.append(keyed(("z", "1")))
        roll(logs.log)
        clean(logs.log, NOW + CONFIG.delete_retention_ms)
        assert b"a" not in newest(logs.log)
        assert (2, b"b", b"1") in contents(logs.log)
        assert {record.timestamp for record in records_of(logs.log) if record.key == b"b"} == {NOW + 1}

    def test_a_tombstone_that_was_superseded_goes_at_once(self, logs: Logs):
        logs.append(keyed(("a", None)), keyed(("a", "2")))
        roll(logs.log)
        clean(logs.log)
        assert contents(logs.log) == [(1, b"a", b"2")]

    def test_a_tombstone_goes_after_the_record_that_it_deletes_and_not_with_it(self, logs: Logs):
        """Its time began when the table had no room for its key. A reader was behind the record when both went."""
        logs.append(keyed(("a", "1")))
        roll(logs.log)
        logs.append(keyed(("b", "1")), keyed(("c", "1")), keyed(("a", None)))
        roll(logs.log)
        clean(logs.log, memory_bytes=2 * BYTES_PER_KEY, load_factor=1.0)
        assert contents(logs.log) == [(0, b"a", b"1"), (1, b"b", b"1"), (2, b"c", b"1"), (3, b"a", None)]
        later = NOW + CONFIG.delete_retention_ms
        clean(logs.log, later)
        assert contents(logs.log) == [(1, b"b", b"1"), (2, b"c", b"1"), (3, b"a", None)]
        clean_again(logs, later)
        assert b"a" not in newest(logs.log)

    @pytest.mark.parametrize("delete_retention_ms", [INT64_MAX, INT64_MAX - NOW + 1])
    def test_tombstones_and_markers_stay_for_ever(self, tmp_path: Path, delete_retention_ms: int):
        """The end of their time did not fit into the batch, and the log was never cleaned any more."""
        logs = Logs(tmp_path / "logs", replace(CONFIG, delete_retention_ms=delete_retention_ms))
        logs.append(keyed(("a", "1"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=True), from_client=False)
        logs.append(keyed(("a", None), ("b", "1"), timestamp=-1), keyed(("b", "2")))
        roll(logs.log)
        for _ in range(3):
            clean_again(logs, INT64_MAX // 2)
        assert controls(logs.log) == [1]
        left = [record for record in records_of(logs.log) if record.key in (b"a", b"b")]
        assert [(each.offset, each.timestamp) for each in left] == [(2, -1), (4, NOW)]


class TestProducersAndTransactions:
    def test_the_last_batch_of_a_producer_stays_as_an_empty_one(self, logs: Logs):
        for sequence in range(3):
            logs.append(keyed(("a", str(sequence)), producer_id=7, producer_epoch=0, base_sequence=sequence))
        logs.append(keyed(("a", "9")))
        roll(logs.log)
        clean(logs.log)
        assert contents(logs.log) == [(3, b"a", b"9")]
        log = logs.kill_and_open()
        assert log.producers.entries[7].last_sequence == 2
        repeated = logs.append(keyed(("a", "2"), producer_id=7, producer_epoch=0, base_sequence=2))[0]
        assert repeated.duplicate
        assert repeated.first_offset == 2

    def test_what_is_left_of_a_batch_keeps_its_offsets_and_leader_epoch(self, logs: Logs):
        """Otherwise a follower that copies it would have another log, and be cut at another offset."""
        sent = [
            (3, keyed(("a", "1"), ("b", "1"), ("c", "1"))),  # "a" is left
            (4, keyed(("b", "1"), ("c", "1"), producer_id=7, producer_epoch=0, base_sequence=0)),  # nothing is left
            (5, keyed(("d", "v" * 600), ("e", "1"))),  # "d" is left
            (6, keyed(("b", "1"))),  # it goes, and ends its segment
            (7, keyed(("b", "2"), ("c", "2"), ("e", "v" * 600))),
        ]
        for epoch, data in sent:
            if epoch == 7:
                roll(logs.log)
            logs.append(data, epoch=epoch)
        before = batches_in(logs.log)
        roll(logs.log)
        clean(logs.log)
        assert [offset for offset, _, _ in contents(logs.log)] == [0, 5, 8, 9, 10]
        assert batches_in(logs.log) == before
        assert list(logs.kill_and_open().leader_epochs) == [(3, 0), (4, 3), (5, 5), (6, 7), (7, 8)]

    def test_aborted_records_go_and_never_come_back(self, logs: Logs):
        logs.append(keyed(("a", "old")))
        logs.append(keyed(("a", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=True), from_client=False)
        logs.append(keyed(("b", "1"), producer_id=8, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=False, producer_id=8), from_client=False)
        roll(logs.log)
        clean(logs.log)
        log = logs.log
        assert contents(log) == [(0, b"a", b"old"), (3, b"b", b"1")]
        assert [row[:3] for row in log.aborted_transactions(0, log.log_end_offset)] == [(7, 1, 2)]
        log = logs.kill_and_open()
        assert contents(log) == [(0, b"a", b"old"), (3, b"b", b"1")]

    def test_the_aborted_transactions_are_collected_on_the_thread(self, logs: Logs, monkeypatch: pytest.MonkeyPatch):
        """A tenant may abort 100,000 between two cleanings: that took 0.2 s of the loop's thread."""
        for sequence in range(3):
            logs.append(idempotent(sequence, key=b"a", transactional=True))
            logs.append(marker(abort=True), from_client=False)
        roll(logs.log)
        built: list[object] = []

        def count(*fields: object) -> AbortedTransaction:
            built.append(fields)
            return AbortedTransaction(*fields)  # type: ignore[arg-type]

        monkeypatch.setattr(transaction_index, "AbortedTransaction", count)
        compaction = begin(logs.log)
        assert not built
        compaction.run()
        assert len(built) == 3

    def test_markers_go_after_their_data_and_their_time(self, logs: Logs):
        logs.append(keyed(("a", "1"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=True), from_client=False)
        logs.append(keyed(("a", "2"), producer_id=7, producer_epoch=1, base_sequence=0, transactional=True))
        logs.append(marker(abort=False, epoch=1), from_client=False)
        logs.append(keyed(("a", "3"), producer_id=7, producer_epoch=1, base_sequence=1, transactional=True))
        logs.append(marker(abort=False, epoch=1), from_client=False)
        roll(logs.log)
        clean(logs.log)
        assert controls(logs.log) == [1, 3, 5]
        clean_again(logs)
        assert controls(logs.log) == [1, 3, 5]  # with a time from now on
        clean_again(logs, NOW + CONFIG.delete_retention_ms)
        assert controls(logs.log) == [5]  # of data that is still there
        assert [row[:2] for row in logs.log.aborted_transactions(0, logs.log.log_end_offset)] == []

    def test_nothing_from_an_open_transaction_on_is_cleaned(self, logs: Logs):
        logs.append(keyed(("a", "1")), keyed(("a", "2")))
        roll(logs.log)
        logs.append(keyed(("b", "1"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(keyed(("b", "2")), keyed(("b", "3")))
        roll(logs.log)
        clean(logs.log)
        assert [value for _, key, value in contents(logs.log) if key == b"a"] == [b"2"]
        assert [value for _, key, value in contents(logs.log) if key == b"b"] == [b"1", b"2", b"3"]

    def test_a_kill_after_a_cleaning_finds_no_damaged_index(self, logs: Logs, caplog: pytest.LogCaptureFixture):
        """Before the next roll, a start took the joined indexes for damaged, and scanned the whole log."""
        for producer_id in (7, 8):
            logs.append(idempotent(0, producer_id=producer_id, transactional=True, key=b"a"))
            logs.append(marker(abort=True, producer_id=producer_id), from_client=False)
            roll(logs.log)
        logs.log.flush()
        logs.directory.write_checkpoints()
        clean(logs.log)
        logs.directory.write_checkpoints()
        rows = logs.log.aborted_transactions(0, logs.log.log_end_offset)
        if logs.log.flush_due:  # as the broker does
            logs.log.flush()
        assert not logs.log.flush_due
        log = logs.kill_and_open()
        assert not [each for each in caplog.messages if "scanning" in each]
        assert log.aborted_transactions(0, log.log_end_offset) == rows

    def test_a_control_batch_that_ends_a_segment_never_leaves_a_hole(self, logs: Logs):
        """A consumer that reads committed records would wait before the missing offset for ever."""
        logs.append(keyed(("a", "1"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=True), from_client=False)
        roll(logs.log)
        logs.append(keyed(("a", "2"), producer_id=8, producer_epoch=0, base_sequence=0, transactional=True))
        logs.append(marker(abort=False, producer_id=8), from_client=False)
        roll(logs.log)
        for round in range(4):
            clean_again(logs, NOW + round * CONFIG.delete_retention_ms)
        log = logs.kill_and_open()
        assert log.last_stable_offset == log.log_end_offset == log.high_watermark
        for segment in list(log.segments)[:-1]:
            assert segment.next_offset == log.segments[log.segments.floor_index(segment.next_offset)].base_offset
            assert [h.next_offset for _, h in headers(segment)][-1:] in ([], [segment.next_offset])
        at = 0
        while at < log.last_stable_offset:
            result = log.read(at, 10_000, log.last_stable_offset)
            assert result.next_offset > at
            at = result.next_offset
        assert at == log.last_stable_offset


def controls(log: PartitionLog) -> list[int]:
    return [h.base_offset for segment in log.segments for _, h in headers(segment) if h.is_control and h.record_count]


class TestWhatIsAround:
    def test_segments_end_where_they_ended_before(self, logs: Logs):
        for number in range(60):
            logs.append(keyed(("k", str(number))))
        roll(logs.log)
        ends = {segment.next_offset for segment in logs.log.segments}
        clean(logs.log)
        for segment in list(logs.log.segments)[:-1]:
            assert list(headers(segment))[-1][1].next_offset == segment.next_offset
            assert segment.next_offset in ends
        assert contents(logs.log) == [(59, b"k", b"59")]
        log = logs.kill_and_open()
        assert contents(log) == [(59, b"k", b"59")]
        assert log.log_end_offset == 60

    def test_reads_from_every_offset_go_on(self, logs: Logs):
        for number in range(200):
            logs.append(keyed((f"k{number % 13}", str(number))))
        roll(logs.log)
        clean(logs.log)
        left = contents(logs.log)
        for offset in range(200):
            found: list[int] = []
            at = offset
            while not found and at < 200:
                result = logs.log.read(at, 10_000, 200)
                found = [r.offset for region in result.regions for r in iter_records(region) if r.offset >= offset]
                assert result.next_offset > at
                at = result.next_offset
            assert found[:1] == [o for o, _, _ in left if o >= offset][:1]

    def test_offsets_by_time(self, logs: Logs):
        for number in range(100):
            logs.append(keyed((f"k{number % 13}", str(number)), timestamp=NOW + number))
        roll(logs.log)
        clean(logs.log)
        left = records_of(logs.log)
        for time in range(NOW, NOW + 101, 7):
            wanted = next(((r.timestamp, r.offset) for r in left if r.timestamp >= time), None)
            found = logs.log.offset_for_timestamp(time)
            assert (found and found[:2]) == wanted
        largest = logs.log.max_timestamp_offset()
        assert largest is not None
        assert largest[:2] == (NOW + 99, 99)

    def test_a_reader_that_holds_a_slice_of_what_is_replaced(self, logs: Logs):
        value = "v" * 90_000
        big = Logs(logs.path.parent / "big", replace(CONFIG, segment_bytes=1_000_000))
        big.append(keyed(("a", value)), keyed(("a", value)), keyed(("b", "1")))
        roll(big.log)
        held = big.log.read(0, 1_000_000, 3).regions
        before = [bytes(region) for region in held]
        clean(big.log)
        big.log.maintain(NOW + HOUR)
        assert [bytes(region) for region in held] == before
        assert [offset for offset, _, _ in contents(big.log)] == [1, 2]
        assert big.files("*.deleted") == []

    def test_reads_at_every_step_of_the_swap(self, logs: Logs):
        for number in range(100):
            logs.append(keyed((f"k{number % 13}", str(number))))
        roll(logs.log)
        wanted = newest(logs.log)
        compaction = begin(logs.log)
        while True:
            compaction.run()
            assert newest(logs.log) == wanted
            logs.log.segments.release()
            assert newest(logs.log) == wanted
            if not compaction.advance():
                break
        assert len(contents(logs.log)) == 13
        assert logs.files("*.swap") == logs.files("*.cleaned") == []

    @pytest.mark.slow
    def test_a_log_that_is_cut_at_any_step(self, tmp_path: Path):
        steps = 0
        while True:
            logs = Logs(tmp_path / str(steps), CONFIG)
            for number in range(60):
                logs.append(keyed((f"k{number % 13}", str(number))))
            roll(logs.log)
            compaction = begin(logs.log)
            finished = False
            for _ in range(steps):
                compaction.run()
                finished = not compaction.advance()
                if finished:
                    break
            logs.log.truncate_to(30)
            logs.append(keyed(("k0", "new")))
            if not finished:
                compaction.run()
                assert not compaction.advance()
                assert logs.log.cleaned_offset == -1
            assert logs.files("*.cleaned") == logs.files("*.swap") == []
            now = newest(logs.log)
            assert now[b"k0"] == b"new"
            log = logs.kill_and_open()
            assert newest(log) == now
            assert log.cleaned_offset <= 30
            logs.kill()
            if finished:
                break
            steps += 1
        assert steps > 5

    def test_a_damaged_batch_stops_the_cleaning_and_nothing_else(self, logs: Logs):
        logs.append(keyed(("a", "1")), keyed(("a", "2")))
        roll(logs.log)
        path = logs.folder / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        data[140 - 1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CleaningFailed, match="CRC"):
            clean(logs.log)
        assert logs.log.compaction is None
        assert logs.files("*.cleaned") == []
        assert logs.log.log_end_offset == 2

    def test_where_cleaning_begins_is_remembered_and_forgotten_with_the_log(self, logs: Logs):
        logs.append(keyed(("a", "1")), keyed(("a", "2")))
        roll(logs.log)
        clean(logs.log)
        logs.directory.write_checkpoints()
        log = logs.kill_and_open()
        assert log.cleaned_offset == 2
        logs.directory.delete_log("t", 0, NOW)
        logs.log = logs.directory.create_log("t", 0, bytes(range(1, 17)), CONFIG, NOW)
        logs.log.assign_epoch(0)
        logs.append(*[keyed(("a", str(n))) for n in range(5)])
        log = logs.kill_and_open()
        assert log.cleaned_offset == -1

    def test_what_is_dirty_and_how_much(self, logs: Logs):
        logs.append(keyed(("a", "1")), keyed(("b", "2")))
        roll(logs.log)
        found = find_cleanable(logs.log, NOW)
        assert (found.first_dirty_offset, found.end_offset, found.dirty_ratio) == (0, 2, 1.0)
        clean(logs.log)
        assert not find_cleanable(logs.log, NOW).cleanable_bytes
        logs.append(keyed(("c", "1")))
        roll(logs.log)
        found = find_cleanable(logs.log, NOW)
        assert found.first_dirty_offset == 2
        assert 0.3 < found.dirty_ratio < 0.4
        lagging = replace(CONFIG, min_compaction_lag_ms=HOUR)
        logs.log.set_config(lagging)
        assert not find_cleanable(logs.log, NOW + HOUR - 1).cleanable_bytes
        assert find_cleanable(logs.log, NOW + HOUR).cleanable_bytes
        logs.log.set_config(replace(CONFIG, max_compaction_lag_ms=HOUR))
        assert find_cleanable(logs.log, NOW + HOUR).delay_ms == 0
        assert find_cleanable(logs.log, NOW + HOUR + 1).delay_ms == 1

    def test_the_lag_of_records_without_a_timestamp_counts_from_the_last_write(self, logs: Logs):
        logs.append(memoryview(encode_batch([(-1, b"a", b"1", ())])))
        roll(logs.log)
        logs.log.set_config(replace(CONFIG, min_compaction_lag_ms=HOUR))
        written_ms = logs.disk.modified_ms(logs.log.segments.first.path)
        assert not find_cleanable(logs.log, written_ms + HOUR - 1).cleanable_bytes
        assert find_cleanable(logs.log, written_ms + HOUR).cleanable_bytes

    def test_a_lag_costs_no_file_that_stays_open(self, logs: Logs):
        for number in range(20):
            logs.append(keyed((str(number), "1")))
            roll(logs.log)
        log = logs.close_and_open()
        log.set_config(replace(CONFIG, max_compaction_lag_ms=HOUR))
        assert find_cleanable(log, NOW + 2 * HOUR).delay_ms == HOUR
        assert not any(segment.is_open for segment in list(log.segments)[:-1])


def _is_indexed(log: PartitionLog, bytes_max: int) -> bool:
    """Whether no look-up walks over more bytes than that, from one row of an index to the next."""
    for segment in log.segments:
        positions = [0, *(position for _, position in segment.offset_index.rows()), segment.size_bytes]
        if any(after - before > bytes_max for before, after in pairwise(positions)):
            return False
    return True


def test_segments_with_full_indexes_do_not_become_one(tmp_path: Path):
    """The rows ended with `segment.index.bytes`: a read behind them walked over all batches, on the loop's thread."""
    config = replace(CONFIG, segment_bytes=1_000_000, segment_index_bytes=80, index_interval_bytes=0)
    logs = Logs(tmp_path / "logs", config)
    for number in range(100):
        logs.append(keyed((str(number), "1")))
    roll(logs.log)
    clean(logs.log)
    assert len(logs.log.segments) == 10  # the last ones have room for each other's rows
    assert _is_indexed(logs.log, 200)


def test_indexes_that_are_made_anew_are_whole_where_the_limit_is_lower_now(tmp_path: Path):
    logs = Logs(tmp_path / "logs", replace(CONFIG, segment_bytes=1_000_000, index_interval_bytes=0))
    for number in range(100):
        logs.append(keyed((str(number), "1")))
    logs.config = replace(logs.config, segment_index_bytes=80)
    log = logs.kill_and_open()
    assert _is_indexed(log, 200)
    assert log.segments.active.is_full
    logs.append(keyed(("a", "1")))
    assert len(log.segments) == 2
    clean(log)
    assert _is_indexed(log, 200)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_producer_is_known_where_its_later_batches_are_cut_after_a_cleaning(logs: Logs, count: int) -> None:
    """The cleaner kept the last batch only, which was not committed. From the log alone the next one was refused."""
    logs.append(idempotent(0, key=b"same"), keyed(("same", "newer")))
    roll(logs.log)
    committed = logs.log.log_end_offset
    for sequence in range(1, count + 1):
        logs.append(idempotent(sequence, key=b"other"))
    logs.log.high_watermark = committed
    clean(logs.log)
    assert [offset for offset, _, _ in contents(logs.log)] == [1, *range(2, 2 + count)]
    logs.log.truncate_to(committed)
    logs.kill()
    for name in logs.files("*.snapshot"):
        (logs.folder / name).unlink()
    log = logs.open()
    assert log.producers.entries[7].last_sequence == 0
    logs.append(idempotent(1, key=b"other"))


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_producer_is_known_where_its_open_transaction_is_cut_after_a_cleaning(tmp_path: Path, count: int) -> None:
    """As many batches as it may have in flight: of those that the log knew, none was committed. Its marker stayed, and
    its next batch was refused."""
    logs = Logs(tmp_path / "data", replace(CONFIG, verifies_transactions=False))
    logs.append(idempotent(0, key=b"same", transactional=True))
    logs.append(marker(abort=False), from_client=False)
    logs.append(keyed(("same", "newer")))
    roll(logs.log)
    committed = logs.log.log_end_offset
    for sequence in range(1, count + 1):
        logs.append(idempotent(sequence, key=b"other", transactional=True))
    logs.log.high_watermark = committed
    clean(logs.log)
    logs.log.truncate_to(committed)
    logs.kill()
    log = logs.open()
    assert log.producers.entries[7].last_sequence == 0
    logs.append(idempotent(1, key=b"other", transactional=True))


def test_batches_of_idempotent_producers_are_known_after_grouping(logs: Logs):
    for sequence in range(30):
        logs.append(idempotent(sequence, key=b"same"))
    roll(logs.log)
    clean(logs.log)
    left = [header for segment in logs.log.segments for _, header in headers(segment)]
    assert [header.last_sequence for header in left if header.producer_id == 7] == [29]


@pytest.mark.parametrize("stamped", [False, True])
def test_a_lookup_by_time_passes_over_the_emptied_batches_of_many_producers(logs: Logs, stamped: bool):
    """Each keeps its largest timestamp, which no record has any more."""
    kind = "LogAppendTime" if stamped else "CreateTime"
    logs.log.set_config(replace(CONFIG, segment_bytes=1 << 20, message_timestamp_type=kind))
    count = UNTRUE_HEADERS_MAX + 2
    for number in range(count):
        logs.append(idempotent(0, key=b"same", timestamp=NOW + number, producer_id=number))
    roll(logs.log)
    clean(logs.log)
    left = [header for segment in logs.log.segments for _, header in headers(segment)]
    assert [header.record_count for header in left] == [0] * (count - 1) + [1]
    newest_ms = left[-1].max_timestamp
    assert logs.log.offset_for_timestamp(NOW, wait=False) == (newest_ms, count - 1, 0)
    assert logs.log.max_timestamp_offset(wait=False) == (newest_ms, count - 1, 0)


@pytest.mark.parametrize("others", ["", "c"])
def test_a_lookup_by_time_finds_a_record_that_a_thinned_batch_of_log_append_time_still_has(logs: Logs, others: str):
    logs.log.set_config(replace(CONFIG, message_timestamp_type="LogAppendTime"))
    old, new = ([("a", at), *((key, at) for key in others)] for at in "12")
    logs.append(keyed(old[0], ("b", "1"), *old[1:]), keyed(*new))
    roll(logs.log)
    clean(logs.log)
    second = 2 + len(others)
    assert [offset for offset, _, _ in contents(logs.log)] == [1, *range(second, second + len(new))]
    assert logs.log.offset_for_timestamp(0) == logs.log.max_timestamp_offset() == (NOW, 1, 0)
    assert logs.log.delete_records(2) == 2
    assert logs.log.offset_for_timestamp(0) == (NOW, second, 0)


def test_for_want_of_file_descriptors_a_swap_waits_and_is_finished(logs: Logs, monkeypatch: pytest.MonkeyPatch):
    logs.append(keyed(("a", "1"), ("b", "1")), keyed(("a", "2")))
    roll(logs.log)
    sync = type(logs.disk).sync_directory
    short = 3

    def refuse(disk: Any, path: str) -> None:
        nonlocal short
        short -= 1
        if short >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        sync(disk, path)

    compaction = begin(logs.log)
    while not logs.files("*.swap"):
        compaction.run()
        assert compaction.advance()
    monkeypatch.setattr(type(logs.disk), "sync_directory", refuse)
    waits = 0
    while True:
        compaction.run()
        if not compaction.advance():
            break
        waits += compaction.is_short
    assert waits == 3
    assert [value for _, _, value in contents(logs.log)] == [b"1", b"2"]
    assert not logs.files("*.swap")


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_the_time_index_of_a_segment_with_an_emptied_batch_is_right(logs: Logs, is_rebuilt: bool):
    """The batch keeps its timestamp, the largest one, which no index names. The rows behind it counted as wrong."""
    logs.append(idempotent(0, key=b"same", timestamp=NOW + 10), batch(key=b"same", timestamp=NOW))
    logs.append(batch(key=b"other", timestamp=NOW + 1))
    roll(logs.log)
    clean(logs.log)
    assert [header.record_count for _, header in headers(logs.log.segments.first)] == [0, 1, 1]
    if is_rebuilt:
        examine_now(logs.log.segments.first)
        logs.log.adopt_findings(logs.log.segments.first)
    scrub = Scrub(logs.log, logs.log.segments.first)
    while not scrub.is_done:
        scrub.run(10**6)
    assert not scrub._index_check.wrong
    scrub.finish()
    logs.close()
    facts = LogFacts(is_clean=True, is_compacted=True, cleaned_offset=logs.log.cleaned_offset)
    assert not list(StoppedLog(logs.disk, str(logs.folder), facts).verify())
