"""An index row or a batch header with a changed bit, met first by a search by time, by retention or by a truncation.

No index has a checksum. A wrong row must not hide a record from a search, nor delete or cut what is to stay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, offsets_of, records_of
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments import lookup
from tidelog.storage.segments.damage import CorruptIndex, DamagedRecords
from tidelog.storage.segments.reader import ColdRead, Examination

MakeLogs = Callable[..., Logs]
COUNT = 60
RETENTION_MS = 1_000_000
MAX_TIMESTAMP_AT = 35
"""The place of the largest timestamp in a batch's header."""


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Sixty batches of two records in five segments, closed. Record i of batch n has timestamp NOW + 10 n + i."""
    made = logs(segment_bytes=2500, index_interval_bytes=300, retention_ms=RETENTION_MS)
    for n in range(COUNT):
        made.append(batch(2, value=b"%03d" % n * 20, timestamp=NOW + 10 * n))
    assert made.log.segment_count == 5
    made.close()
    return made


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def each_flip(made: Logs, pattern: str) -> list[tuple[Path, int, int]]:
    """Every byte of these files, each with one of its bits."""
    files = [made.folder / name for name in made.files(pattern)]
    return [(path, at, (at * 5 + 1) % 8) for path in files for at in range(path.stat().st_size)]


def scrub(log: PartitionLog) -> None:
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        while not scrub.is_done:
            scrub.run(1 << 20)
        scrub.finish()


@pytest.mark.slow
def test_no_wrong_row_hides_a_record_from_a_search_by_time(made):
    for path, at, bit in each_flip(made, "*index"):
        whole = path.read_bytes()
        flip(path, at, bit)
        log = made.open()
        for n in range(0, COUNT, 4):
            found = log.offset_for_timestamp(NOW + 10 * n)
            assert found is not None, (path.name, at, bit, n)
            assert found.offset == 2 * n, (path.name, at, bit, n)
        largest = log.max_timestamp_offset()
        assert largest is not None, (path.name, at, bit)
        assert largest.offset == 2 * COUNT - 1, (path.name, at, bit)
        made.close()
        path.write_bytes(whole)


@pytest.mark.parametrize("number", [0, -1])
def test_a_row_of_another_segment_gives_a_segment_no_newer_record(made, number):
    path = made.folder / made.files("*.timeindex")[number]
    path.write_bytes(path.read_bytes() + (NOW + 10**6).to_bytes(8, "big") + (5000).to_bytes(4, "big"))
    log = made.open()
    assert log.max_timestamp_offset() == (NOW + 10 * COUNT - 9, 2 * COUNT - 1, 0)
    assert log.segments[number].max_timestamp < NOW + 10 * COUNT


@pytest.mark.slow
def test_no_wrong_row_deletes_a_segment_too_early_or_keeps_it(made, tmp_path):
    is_over = NOW + RETENTION_MS + 10 * 12  # for the first segment, of twelve batches
    for path, at, bit in each_flip(made, "00000000000000000000.timeindex"):
        copytree(made.path, tmp_path / "kept")
        flip(path, at, bit)
        log = made.open()
        log.maintain(NOW + 1000)
        assert log.log_start_offset == 0, (at, bit)
        log.maintain(is_over)
        if log.is_doubtful:  # a broker has it scrubbed then
            scrub(log)
            log.maintain(is_over)
        assert log.log_start_offset == 24, (at, bit)
        made.kill()
        rmtree(made.path)
        (tmp_path / "kept").rename(made.path)


def test_a_time_index_without_rows_does_not_keep_the_last_segment_for_ever(made):
    """The last segment of a log that was closed has its largest timestamp from the file alone."""
    path = made.folder / made.files("*.timeindex")[-1]
    path.write_bytes(b"")
    log = made.open()
    log.maintain(NOW + 10 * COUNT + RETENTION_MS)
    assert log.is_doubtful
    assert log.log_start_offset == 96, "what comes before it is confirmed"
    scrub(log)
    assert log.segments.active.max_timestamp == NOW + 10 * (COUNT - 1) + 1
    log.maintain(NOW + 10 * COUNT + RETENTION_MS)
    assert log.log_start_offset == 2 * COUNT


@pytest.mark.slow
def test_no_wrong_row_has_a_truncation_cut_more_than_it_is_asked_to(made, tmp_path):
    whole = list(range(2 * COUNT))
    for path, at, bit in each_flip(made, "*.index"):
        copytree(made.path, tmp_path / "kept")
        flip(path, at, bit)
        log = made.open()
        end = int(path.name[:20]) + 18
        log.truncate_to(end + 1)  # inside of a batch
        assert log.log_end_offset == end, (path.name, at, bit)
        assert offsets_of(records_of(log)) == whole[:end], (path.name, at, bit)
        made.kill()
        rmtree(made.path)
        (tmp_path / "kept").rename(made.path)


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("at", [2, 5, 7, 26, MAX_TIMESTAMP_AT + 5, MAX_TIMESTAMP_AT + 7])
def test_a_truncation_cuts_no_whole_batch_for_a_damaged_one_before_it(made, at, bit):
    """A base offset, a last offset delta or a largest timestamp is wrong, a batch before the place of the cut."""
    path = made.folder / "00000000000000000000.log"
    positions = [position for position, _ in iter_headers(path.read_bytes())]
    flip(path, positions[-3] + at, bit)
    log = made.open()
    log.truncate_to(23)
    assert log.log_end_offset == 22
    assert all((each.first_offset, each.end_offset) == (18, 20) for _, each in log.damaged_ranges())


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("at", [2, 7, 26, MAX_TIMESTAMP_AT + 5, MAX_TIMESTAMP_AT + 7, 64])
def test_a_search_by_time_passes_over_no_damaged_batch(made, at, bit):
    path = made.folder / "00000000000000000000.log"
    whole = path.read_bytes()
    for number, (position, _) in enumerate(iter_headers(whole)):
        flip(path, position + at, bit)
        log = made.open()
        with pytest.raises(DamagedRecords) as refused:
            log.offset_for_timestamp(NOW + 10 * number + 1)
        assert refused.value.damage.holds(2 * number + 1), number
        with pytest.raises(DamagedRecords):
            log.max_timestamp_offset()
        log.accept_loss(refused.value.damage)
        if number < 8:
            found = log.offset_for_timestamp(NOW + 110)
            assert found is not None
            assert found.offset == 22, "what no replica has does not hide what follows"
        made.kill()
        path.write_bytes(whole)


def test_damage_under_repair_is_not_older_than_what_follows_it(logs):
    """Timestamps need not rise: the damaged record may be the one that is looked for."""
    made = logs(segment_bytes=2500, index_interval_bytes=300)
    for n in range(COUNT):
        made.append(batch(2, value=b"%03d" % n * 20, timestamp=NOW + 10 * n + (5000 if n == 4 else 0)))
    made.close()
    path = made.folder / "00000000000000000000.log"
    positions = [position for position, _ in iter_headers(path.read_bytes())]
    flip(path, positions[4] + 64, 1)
    log = made.open()
    scrub(log)
    with pytest.raises(DamagedRecords):
        log.offset_for_timestamp(NOW + 700)


def test_many_segments_are_confirmed_a_part_at_a_time(made, monkeypatch):
    monkeypatch.setattr(lookup, "_CONFIRMED_AT_ONCE_MAX", 2)
    log = made.open()
    turns = 0
    while True:
        try:
            found = log.offset_for_timestamp(NOW + 590, wait=False)
            break
        except ColdRead as cold:
            cold.warm()
            turns += 1
            assert turns < 20
    assert found is not None
    assert found.offset == 2 * COUNT - 2
    assert turns >= 1
    assert all(segment.max_is_confirmed for segment in log.segments)


def pause_of(log: PartitionLog) -> ColdRead | None:
    """What a search for a time that no record has waits for; None once it has its result."""
    try:
        assert log.offset_for_timestamp(NOW + 2, wait=False) is None
    except ColdRead as cold:
        return cold
    return None


def test_times_in_no_order_are_compared_a_part_at_a_time(logs, monkeypatch):
    """The first batch has the largest timestamp, so that all others are behind it: a clock was ahead, and went back.

    Each search had the whole segment examined on a thread of its own, which held up the node for minutes.
    """
    monkeypatch.setattr(lookup, "_COMPARED_AT_ONCE_MAX", 5)
    made = logs(segment_bytes=2500, index_interval_bytes=300, retention_ms=1000)
    for n in range(COUNT):
        made.append(batch(2, value=b"%03d" % n * 20, timestamp=NOW - 10 * n))
    log = made.close_and_open()
    turns = [0, 0]
    while not all(segment.max_is_confirmed for segment in log.segments):
        for search in (0, 1):
            cold = pause_of(log)
            if cold is not None:
                cold.warm()
                turns[search] += 1
            assert not isinstance(cold, Examination)
            assert turns[search] < COUNT
    assert sum(turns) <= COUNT // 5 + 2 * len(log.segments), "each batch is compared once, for both searches"
    log = made.close_and_open()
    turns = [0]
    while not log.maintain(NOW + 2000):
        turns[0] += 1
        assert turns[0] < COUNT
    assert (log.is_doubtful, log.log_start_offset) == (False, 2 * COUNT)
    assert turns[0] >= 2


def test_a_wrong_time_behind_the_turns_before_is_met(logs, monkeypatch):
    """A bit of the row of the largest timestamp is wrong: a later turn meets the batch that is newer."""
    monkeypatch.setattr(lookup, "_COMPARED_AT_ONCE_MAX", 5)
    made = logs(index_interval_bytes=300)
    for n in range(COUNT):
        made.append(batch(2, value=b"%03d" % n * 20, timestamp=NOW + (100 if n == COUNT - 1 else -10 * n)))
    log = made.close_and_open()
    segment = log.segments.first
    lookup.max_timestamp_of(segment)
    segment.max_timestamp, segment.offset_of_max_timestamp, segment.max_is_confirmed = NOW + 1, 1, False
    segment.filed_max = NOW + 1, 1, segment.size_bytes
    for _ in range(COUNT // 5 - 1):
        assert lookup.confirm_max_timestamp(segment, wait=True) == 5
    for _ in range(2):
        with pytest.raises(CorruptIndex, match="lacks timestamp"):
            lookup.confirm_max_timestamp(segment, wait=True)


def opened_with_lost_time_rows(made):
    """A log of COUNT records, the newest at offset 12, whose time index has only its first row when it is opened."""
    made.append(*[batch(value=b"%03d" % n * 20, timestamp=NOW + 900 * (n == 12)) for n in range(COUNT)])
    made.close()
    path = made.folder / made.files("*.timeindex")[0]
    path.write_bytes(path.read_bytes()[:12])
    return made.open()


def test_lost_rows_of_the_last_segment_hide_no_record_after_an_append(logs):
    """The largest timestamp by what is left of the index was replaced by that of the append, and no batch before this
    one was compared."""
    made = logs(index_interval_bytes=300)
    log = opened_with_lost_time_rows(made)
    made.append(batch(timestamp=NOW + 500))
    assert log.max_timestamp_offset() == (NOW + 900, 12, 0)
    made.append(batch(timestamp=NOW + 600))
    found = log.offset_for_timestamp(NOW + 550)
    assert found is not None
    assert found.offset == 12


@pytest.mark.parametrize("appended", [900, 950])
def test_lost_rows_hide_no_record_of_the_timestamp_that_an_append_has(logs, appended):
    """The records of the file were compared with the largest timestamp of all: none was newer."""
    made = logs(index_interval_bytes=300)
    log = opened_with_lost_time_rows(made)
    made.append(batch(timestamp=NOW + appended))
    assert log.max_timestamp_offset() == (NOW + appended, 12 if appended == 900 else COUNT, 0)
    found = log.offset_for_timestamp(NOW + 900)
    assert found is not None
    assert found.offset == 12


def test_an_append_behind_a_truncation_is_not_compared_with_the_rows_of_the_file(logs):
    made = logs(index_interval_bytes=300)
    made.append(*[batch(value=b"%03d" % n * 20, timestamp=NOW + 900 * (n == 12)) for n in range(COUNT)])
    log = made.close_and_open()
    assert lookup.max_timestamp_of(log.segments.active) == NOW + 900
    log.truncate_to(20)
    made.append(batch(timestamp=NOW + 1000))
    lookup.confirm_max_timestamp(log.segments.active, wait=True)
    assert log.max_timestamp_offset() == (NOW + 1000, 20, 0)


def test_rows_of_appends_during_an_examination_hide_no_record_before_them(logs):
    """Where the index had lost rows, theirs gave older times as the largest so far."""
    made = logs(index_interval_bytes=1500)
    made.append(*[batch(timestamp=NOW + 900 * (n == 12)) for n in range(20)])
    made.close()
    path = made.folder / made.files("*.timeindex")[0]
    path.write_bytes(b"")
    log = made.open()
    with pytest.raises(Examination) as examination:
        log.offset_for_timestamp(NOW + 550, wait=False)
    made.append(*[batch(timestamp=NOW + n) for n in range(500, 540)])
    examination.value.warm()
    found = log.offset_for_timestamp(NOW + 550, wait=False)
    assert found is not None
    assert found.offset == 12
