"""What comes from the device is checked when it is read, in pieces that no other client has to wait long for."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, read
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import ATTRIBUTES_OFFSET, iter_headers
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments import reader
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import read_from

MakeLogs = Callable[..., Logs]
COUNT = 3 * reader._CHECKED_BATCHES_MAX + 7


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Many batches of one record, which lie on the device for long."""
    made = logs()
    for number in range(COUNT):
        made.append(batch(timestamp=NOW + number))
    for _ in range(2):
        made.log.segments.age_trust()
    return made


def counts_of_reads(log: PartitionLog) -> list[int]:
    """How many batches each answer has, until the log was read to its end."""
    offset, counts = 0, []
    while offset < log.log_end_offset:
        result = read(log, offset, 10**9, log.log_end_offset)
        found = [header for region in result.regions for _, header in iter_headers(region)]
        assert [header.base_offset for header in found] == list(range(offset, result.next_offset))
        assert result.size_bytes == sum(header.size_bytes for header in found)
        counts.append(len(found))
        offset = result.next_offset
    return counts


def test_so_many_batches_are_checked_at_once_and_the_rest_with_the_next_read(made: Logs) -> None:
    at_once = reader._CHECKED_BATCHES_MAX
    assert counts_of_reads(made.log) == [at_once, at_once, at_once, 7]
    assert counts_of_reads(made.log) == [COUNT], "what was checked is read in one piece"


def test_a_read_goes_no_further_than_what_was_checked(made: Logs) -> None:
    segment = made.log.segments.active
    result = read_from(made.log.segments, 0, 10**9, made.log.log_end_offset, True)
    assert result.next_offset == reader._CHECKED_BATCHES_MAX
    assert segment.is_trusted(0, result.size_bytes)
    assert not segment.is_trusted(0, result.size_bytes + 1)


def test_damage_behind_what_is_checked_at_once_is_found(made: Logs) -> None:
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    number = reader._CHECKED_BATCHES_MAX + 5
    position, header = list(iter_headers(bytes(data)))[number]
    data[position + header.size_bytes - 2] ^= 4
    path.write_bytes(data)
    log, offset = made.log, read(made.log, 0, 10**9, made.log.log_end_offset).next_offset
    assert offset == reader._CHECKED_BATCHES_MAX
    offset = read(log, offset, 10**9, log.log_end_offset).next_offset
    assert offset == number, "all in front of it is served, and nothing of it"
    with pytest.raises(DamagedRecords):
        read(log, offset, 10**9, log.log_end_offset)


SMALL, LARGE = 100, 9000


@pytest.fixture(params=[SMALL, LARGE], ids=["read", "mapped"])
def young(logs: MakeLogs, request: pytest.FixtureRequest) -> Logs:
    """Twenty batches that this process has just appended; large ones are handed out as slices of a map."""
    made = logs()
    for number in range(20):
        made.append(batch(timestamp=NOW + number, value=b"v" * request.param), epoch=5)
    return made


def positions_of(made: Logs) -> list[int]:
    return [position for position, _ in iter_headers((made.folder / made.files("*.log")[0]).read_bytes())]


def served_from(log: PartitionLog, offset: int) -> list[int]:
    """The offsets of one answer, every batch of it whole."""
    result = read(log, offset, 10**9, log.log_end_offset)
    found = []
    for region in result.regions:
        for position, header in iter_headers(region):
            assert crc32c(region[position + ATTRIBUTES_OFFSET : position + header.size_bytes]) == header.crc
            found.append(header.base_offset)
    return found


@pytest.mark.parametrize("kept_bytes", [0, 1, 70, -5])
def test_a_file_that_was_cut_and_then_appended_to_has_no_zeros_for_a_reader(young: Logs, kept_bytes: int) -> None:
    log, path, position = young.log, young.folder / young.files("*.log")[0], positions_of(young)
    os.truncate(path, position[10] + kept_bytes if kept_bytes >= 0 else position[11] + kept_bytes)
    young.append(batch(timestamp=NOW + 20), epoch=5)
    assert path.stat().st_size > position[19], "the bytes in between read as zeros"
    with pytest.raises(DamagedRecords):
        read(log, 15, 10**9, log.log_end_offset)
    for offset in range(10, 20):
        with pytest.raises(DamagedRecords):
            read(log, offset, 10**9, log.log_end_offset)
    assert served_from(log, 20) == [20]
    assert served_from(log, 0) == list(range(10))


def test_a_batch_that_was_cut_and_then_appended_to_is_not_believed_for_its_header(young: Logs) -> None:
    """Every header is whole: the zeros are in the records of the last batch alone."""
    log, path, position = young.log, young.folder / young.files("*.log")[0], positions_of(young)
    os.truncate(path, position[19] + 70)
    young.append(batch(timestamp=NOW + 20), epoch=5)
    with pytest.raises(DamagedRecords):
        read(log, 19, 10**9, log.log_end_offset)
    assert served_from(log, 0) == list(range(19))
    assert served_from(log, 20) == [20]


@pytest.mark.parametrize("is_young", [True, False])
@pytest.mark.parametrize("bound", [7, 8])
def test_a_bound_within_a_batch_is_no_damage(logs: MakeLogs, bound: int, is_young: bool) -> None:
    made = logs()
    for number in range(10):
        made.append(batch(3, timestamp=NOW + number))
    for _ in range(0 if is_young else 2):
        made.log.segments.age_trust()
    result = made.log.read(0, 10**9, bound)
    assert [header.base_offset for region in result.regions for _, header in iter_headers(region)] == [0, 3]


def test_a_file_that_was_cut_ends_the_answer_before_the_cut(young: Logs) -> None:
    os.truncate(young.folder / young.files("*.log")[0], positions_of(young)[10] + 3)
    with pytest.raises(DamagedRecords):
        read(young.log, 15, 10**9, 20)
    assert served_from(young.log, 3) == list(range(3, 10))


FIELDS = {
    "base offset": (0, 8),
    "length": (8, 4),
    "leader epoch": (12, 4),
    "magic": (16, 1),
    "last offset delta": (23, 4),
    "all of the header": (0, 61),
}


# The delta of one record is 0 already.
@pytest.mark.parametrize(
    ("field", "byte"), [one for one in product(FIELDS, (0x00, 0x01, 0xFF)) if one != ("last offset delta", 0x00)]
)
@pytest.mark.parametrize("first", [0, 8, 10])
def test_the_header_of_a_batch_is_looked_at_however_young_it_is(young: Logs, field: str, byte: int, first: int) -> None:
    """Also where its CRC is not computed again, which nothing else in the answer depends on."""
    path, (at, size_bytes) = young.folder / young.files("*.log")[0], FIELDS[field]
    position = positions_of(young)[10] + at
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(bytes([byte]) * size_bytes)
    assert young.log.segments.active.is_trusted(0, path.stat().st_size)
    if first == 10:
        with pytest.raises(DamagedRecords):
            read(young.log, first, 10**9, 20)
    else:
        assert served_from(young.log, first) == list(range(first, 10))


def test_as_many_headers_are_looked_at_at_once_and_the_rest_with_the_next_read(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LOOKED_AT_MAX", 30)
    made = logs()
    for number in range(70):
        made.append(batch(timestamp=NOW + number))
    assert counts_of_reads(made.log) == [30, 30, 10]


def test_a_repair_does_not_cut_the_file_under_a_slice_that_is_still_sent(logs: MakeLogs) -> None:
    made = logs()
    for number in range(10):
        made.append(batch(timestamp=NOW + number, value=b"v" * LARGE))
    segment, position = made.log.segments.active, positions_of(made)[5]
    [held] = read(made.log, 0, 10**9, 10).regions
    before = bytes(held)
    segment.end_at(position)
    assert bytes(held) == before
    assert (made.folder / made.files("*.log")[0]).stat().st_size == position


def test_the_tail_is_read_in_one_pass_only_while_it_is_trusted(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    logs.append(batch(value=b"first"), batch(value=b"second"))
    segment, end = logs.log.segments.active, logs.log.log_end_offset
    segment.age_trust()
    logs.append(batch(value=b"third"))
    end = logs.log.log_end_offset
    assert logs.log.read_tail(0, 1 << 20, end) is not None
    segment.age_trust()
    assert segment.recent_offsets[0] == 0, "where the batches lie is still known"
    assert logs.log.read_tail(0, 1 << 20, end) is None, "their checksums are due again"
    assert logs.log.read_tail(2, 1 << 20, end) is not None
    logs.close()


@pytest.mark.parametrize("bit", [0, 1, 20, 33, 57])
@pytest.mark.parametrize("max_bytes", [1, 10**9])
def test_a_base_offset_that_is_too_high_for_the_batch_behind_it_is_damage_in_a_compacted_log(
    logs: MakeLogs, max_bytes: int, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that ended with the batch was not compared with the next one: readers passed over the records."""
    monkeypatch.setattr(reader, "_CHECKED_BATCHES_MAX", 5)
    made = logs(cleanup_policy=frozenset({"compact"}))
    for number in range(8):
        made.append(batch(key=b"%d" % number))
    log, path = made.log, made.folder / made.files("*.log")[0]
    for _ in range(2):
        log.segments.age_trust()
    data = bytearray(path.read_bytes())
    position = [position for position, _ in iter_headers(bytes(data))][4]
    data[position + 7 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    offset = 0
    offsets: list[int] = []
    while offset < 8:
        try:
            result = read(log, offset, max_bytes, log.log_end_offset)
        except DamagedRecords as error:
            offset = error.damage.end_offset
            continue
        offsets += [header.base_offset for region in result.regions for _, header in iter_headers(region)]
        offset = result.next_offset
    assert offsets == [0, 1, 2, 3, 5, 6, 7]


def test_a_read_in_a_compacted_log_may_end_where_damage_is_known(
    logs: MakeLogs, caplog: pytest.LogCaptureFixture
) -> None:
    made = logs(cleanup_policy=frozenset({"compact"}))
    for number in range(8):
        made.append(batch(key=b"%d" % number))
    log, path = made.log, made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    data[[position for position, _ in iter_headers(bytes(data))][4] + 7] = 0
    path.write_bytes(data)
    for upper_offset in (8, 4):
        for _ in range(2):
            log.segments.age_trust()
        assert read(log, 0, 10**9, upper_offset).next_offset == 4
    assert [each.first_offset for each in log.segments.active.damage] == [4]
    assert caplog.text.count("examining a segment") == 1
