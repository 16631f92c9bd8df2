"""What comes from the device is checked when it is read, in pieces that no other client has to wait long for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, read
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments import reader
from tidelog.storage.segments.damage import DamagedRecords
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
        made.log.age_trust()
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
