"""Rows of two rising columns, in memory and in a file."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.storage.files.disk import OsDisk
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.sparse_index import SparseIndex, offset_index, time_index

BASE = 5_000_000_000


@pytest.fixture
def index(tmp_path: Path) -> SparseIndex:
    return offset_index(OsDisk(), str(tmp_path / "index"), BASE)


def fill(index: SparseIndex, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        index.append(BASE + 10 * number, 100 * number)


def test_an_offset_row_is_two_big_endian_int32(index: SparseIndex, tmp_path: Path):
    fill(index, 2)
    assert not (tmp_path / "index").exists()
    assert index.write_rows() == 2
    assert (tmp_path / "index").read_bytes() == struct.pack(">iiii", 10, 100, 20, 200)
    assert index.write_rows() == 0


def test_a_time_row_is_a_timestamp_and_a_relative_offset(tmp_path: Path):
    index = time_index(OsDisk(), str(tmp_path / "index"), BASE)
    index.append(1_700_000_000_000, BASE + 7)
    index.write_rows()
    assert (tmp_path / "index").read_bytes() == struct.pack(">qi", 1_700_000_000_000, 7)


@pytest.mark.parametrize("base", [0, BASE])
def test_the_columns_of_an_examination_become_an_index_and_its_file(base: int, tmp_path: Path):
    rows = [(base + 10 * n, 4_000 * n) for n in range(1, 1501)]
    index = offset_index(OsDisk(), str(tmp_path / "index"), base)
    times = time_index(OsDisk(), str(tmp_path / "times"), base)
    for each in (index, times):
        each.begin_rebuild()
    index.fill(array("q", [key for key, _ in rows]), array("q", [value for _, value in rows]))
    times.fill(array("q", range(1_700_000_000_000, 1_700_000_001_500)), array("q", [key for key, _ in rows]))
    index.append(base + 15_010, 2**31 - 1)
    assert index.rows() == [*rows, (base + 15_010, 2**31 - 1)]
    assert (times.last_key, times.last_value, times.count) == (1_700_000_001_499, base + 15_000, 1500)
    assert (index.write_rows(), times.write_rows()) == (1501, 1500)
    packed = b"".join(struct.pack(">ii", 10 * n, 4_000 * n) for n in range(1, 1501))
    assert (tmp_path / "index").read_bytes() == packed + struct.pack(">ii", 15_010, 2**31 - 1)
    packed = b"".join(struct.pack(">qi", 1_700_000_000_000 + n, 10 * n + 10) for n in range(1500))
    assert (tmp_path / "times").read_bytes() == packed
    assert index.rows() == [*rows, (base + 15_010, 2**31 - 1)]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 511, 512, 513, 1500])
def test_floors_are_found_in_memory_and_in_the_file(index: SparseIndex, count: int):
    fill(index, count)
    assert index.count == count
    assert index.floor(BASE + 9) is None
    assert index.floor_value(99) is None
    for number in {1, count // 2 or 1, count - 1 or 1, count}:
        row = (BASE + 10 * number, 100 * number)
        assert index.floor(BASE + 10 * number) == row
        assert index.floor(BASE + 10 * number + 9) == row
        assert index.floor_value(100 * number + 99) == row
    assert index.floor(BASE + 10**6) == (BASE + 10 * count, 100 * count)
    assert index.rows() == [(BASE + 10 * n, 100 * n) for n in range(1, count + 1)]


def test_an_index_opened_from_its_file_goes_on(index: SparseIndex, tmp_path: Path):
    fill(index, 700)
    index.write_rows()
    index.release()
    again = offset_index(OsDisk(), index.path, BASE, 700)
    assert (again.last_key, again.last_value) == (BASE + 7000, 70000)
    fill(again, 5, 701)
    assert again.floor(BASE + 7025) == (BASE + 7020, 70200)
    assert again.floor(BASE + 15) == (BASE + 10, 100)
    again.write_rows()
    assert (tmp_path / "index").stat().st_size == 705 * 8


@pytest.mark.parametrize("keep", [0, 1, 300, 448, 500, 513, 599, 600, 700])
def test_truncation_keeps_the_first_rows(index: SparseIndex, keep: int, tmp_path: Path):
    fill(index, 600)
    _ = index.row(0)  # a map of the file is there
    index.truncate(keep)
    left = min(keep, 600)
    assert index.rows() == [(BASE + 10 * n, 100 * n) for n in range(1, left + 1)]
    assert index.last_value == (100 * left if left else -1)
    fill(index, 3, left + 1)
    index.write_rows()
    assert (tmp_path / "index").stat().st_size == (left + 3) * 8
    assert len(index.rows()) == left + 3


def test_a_rebuilt_index_leaves_a_right_file_alone(index: SparseIndex, tmp_path: Path):
    fill(index, 5)
    index.write_rows()
    before = (tmp_path / "index").stat().st_mtime_ns
    index.begin_rebuild()
    fill(index, 5)
    assert index.write_rows() == 0
    assert (tmp_path / "index").stat().st_mtime_ns == before
    index.begin_rebuild()
    fill(index, 4)
    assert index.write_rows()
    assert (tmp_path / "index").stat().st_size == 32
    index.begin_rebuild()
    (tmp_path / "index").unlink()
    assert index.write_rows()
    assert (tmp_path / "index").read_bytes() == b""


@pytest.mark.parametrize("saved_at", [1, 64, 511, 512, 600])
def test_saved_rows_are_in_the_file_and_stay_in_memory(index: SparseIndex, saved_at: int, tmp_path: Path):
    path = tmp_path / "index"
    fill(index, saved_at)
    index.save_rows()
    assert path.stat().st_size == saved_at * 8
    assert len(index.rows_in_memory()) >= min(saved_at, 64)
    fill(index, 3, saved_at + 1)
    index.save_rows()
    assert path.stat().st_size == (saved_at + 3) * 8
    index.truncate(saved_at)
    assert path.stat().st_size == saved_at * 8
    fill(index, 1000, saved_at + 1)
    assert len(index.rows_in_memory()) < 600, "what is in the file takes no memory"
    assert index.rows() == [(BASE + 10 * n, 100 * n) for n in range(1, saved_at + 1001)]


def test_an_index_whose_rows_are_saved_again_and_again_keeps_few_in_memory(index: SparseIndex):
    for number in range(1, 2001):
        fill(index, 1, number)
        if not number % 10:
            index.save_rows()
        assert len(index.rows_in_memory()) < 600
    assert index.rows() == [(BASE + 10 * n, 100 * n) for n in range(1, 2001)]


def test_the_rows_of_a_segment_are_not_saved_while_its_index_is_empty_or_rebuilt(index: SparseIndex, tmp_path: Path):
    """A rebuild removes no rows from the device, and an empty log needs no file."""
    path, segment = tmp_path / "index", cast("Any", SimpleNamespace(_offset_index=index))
    Segment.save_offset_rows(segment)
    assert not path.exists()
    fill(index, 9)
    Segment.save_offset_rows(segment)
    saved = path.read_bytes()
    assert len(saved) == 9 * 8
    index.begin_rebuild()
    fill(index, 4)
    Segment.save_offset_rows(segment)
    assert path.read_bytes() == saved
    index.write_rows()
    assert path.read_bytes() == saved[: 4 * 8]
