"""The checks of the kill test see every kind of damage they are there for."""

from __future__ import annotations

import bisect
from pathlib import Path

import pytest

from tests.cluster.checking import (
    Scanned,
    Sent,
    check_offset_lookup,
    check_partition,
    check_producer_epochs,
    check_time_lookup,
)
from tidelog.protocol.batches.records import encode_batch

TIMES = [1000, 1010, 1005, 1030, 1020, 1040]


def intact() -> tuple[Sent, list[Scanned]]:
    sent = Sent(list(TIMES), {number: number for number in range(len(TIMES))})
    return sent, [Scanned(number, time_ms, number) for number, time_ms in enumerate(TIMES)]


def test_an_intact_log_passes() -> None:
    check_partition(*intact())


def test_a_lost_record() -> None:
    sent, scan = intact()
    with pytest.raises(AssertionError, match="record 5, acknowledged at 5, is lost"):
        check_partition(sent, scan[:-1])


def test_a_hole() -> None:
    sent, scan = intact()
    with pytest.raises(AssertionError, match="offset 2 is followed by 4"):
        check_partition(sent, scan[:3] + scan[4:])


def test_a_duplicate() -> None:
    sent, scan = intact()
    with pytest.raises(AssertionError, match=r"twice in the log: \[5\]"):
        check_partition(sent, [*scan, Scanned(6, TIMES[5], 5)])


def test_a_record_at_another_offset_than_acknowledged() -> None:
    sent, scan = intact()
    scan[1], scan[2] = Scanned(1, TIMES[2], 2), Scanned(2, TIMES[1], 1)
    with pytest.raises(AssertionError, match="record 2 is at 1, where 1 was acknowledged"):
        check_partition(sent, scan)


def test_records_out_of_order() -> None:
    sent, scan = intact()
    sent.acknowledged.clear()
    scan[1], scan[2] = Scanned(1, TIMES[2], 2), Scanned(2, TIMES[1], 1)
    with pytest.raises(AssertionError, match="record 1 comes behind 2"):
        check_partition(sent, scan, all_acknowledged=False)


def test_a_changed_timestamp() -> None:
    sent, scan = intact()
    scan[3] = Scanned(3, 7, 3)
    with pytest.raises(AssertionError, match="record 3 has time 7, not 1030"):
        check_partition(sent, scan)


def test_a_record_never_acknowledged() -> None:
    sent, scan = intact()
    del sent.acknowledged[4]
    with pytest.raises(AssertionError, match=r"never acknowledged: \[4\]"):
        check_partition(sent, scan)


def test_a_time_index_that_is_off_by_one() -> None:
    _, scan = intact()

    def right(target_ms: int) -> tuple[int, int] | None:
        return next(((r.timestamp_ms, r.offset) for r in scan if r.timestamp_ms >= target_ms), None)

    def wrong(target_ms: int) -> tuple[int, int] | None:
        position = bisect.bisect_right(sorted(TIMES), target_ms)
        return (scan[position].timestamp_ms, scan[position].offset) if position < len(scan) else None

    check_time_lookup(scan, range(990, 1050), right)
    with pytest.raises(AssertionError, match="looked up"):
        check_time_lookup(scan, range(990, 1050), wrong)


def test_an_offset_index_that_points_past_the_batch() -> None:
    check_offset_lookup([0, 4, 9], lambda offset: (offset - offset % 5, offset - offset % 5 + 4))
    with pytest.raises(AssertionError, match="a fetch at 4 begins with the batch 5-9"):
        check_offset_lookup([4], lambda offset: (5, 9))


def test_a_raised_epoch_is_seen(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    made = [
        encode_batch([(0, None, b"v", ())], base_offset=n, producer_id=7, producer_epoch=n == 2, base_sequence=n % 2)
        for n in range(3)
    ]
    file = tmp_path / "t-0" / "00000000000000000000.log"
    file.write_bytes(b"".join(made[:2]) + bytes(1000))
    assert check_producer_epochs(tmp_path, ["t"]) == 2
    file.write_bytes(b"".join(made))
    with pytest.raises(AssertionError, match="from offset 2 on"):
        check_producer_epochs(tmp_path, ["t"])
