"""Several destroyed headers in one segment: each costs its own batch, and the whole batches between them are served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import Logs, batch, offsets_of, records_of
from tests.unit.storage.test_damage import batches_of, copy_of, repair, served
from tests.unit.storage.test_embedded_batches import look, repair_all
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.segments.examination import Examiner, WholeBatch
from tidelog.storage.segments.sparse_index import NamedBatches, offset_index

MakeLogs = Callable[..., Logs]
PER_SEGMENT = 30
VALUE = b"v" * 100


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """A sealed segment with a row of the index for every second batch, and one that is appended to."""
    size_bytes = len(batch(2, value=VALUE))
    made = logs(segment_bytes=PER_SEGMENT * size_bytes, index_interval_bytes=size_bytes + 1)
    made.append(*[batch(2, value=VALUE) for _ in range(PER_SEGMENT + 5)])
    made.directory.write_checkpoints()
    assert made.log.segment_count == 2
    return made


def destroy(made: Logs, numbers: list[int]) -> set[int]:
    """Zeros in place of these batches of the first segment. The offsets of their records."""
    path = made.folder / made.files("*.log")[0]
    data, size_bytes = bytearray(path.read_bytes()), len(batch(2, value=VALUE))
    for number in numbers:
        data[number * size_bytes : (number + 1) * size_bytes] = bytes(size_bytes)
    path.write_bytes(data)
    return {2 * number + more for number in numbers for more in (0, 1)}


ENDINGS = ["while it is open", "after a clean stop", "after a kill"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("numbers", [[3, 8], [0, 4, 9], [3, 7, 8, 14, 20], [5, 26]])
def test_whole_batches_between_two_destroyed_ones_are_served(made: Logs, numbers: list[int], ending: str) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    whole = (made.folder / made.files("*.log")[0]).read_bytes()
    lost = destroy(made, numbers)
    log = look(made, ending)
    assert set(served(log)) == set(range(end)) - lost
    repair(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole
    assert offsets_of(records_of(log)) == list(range(end))


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rebuilt_index_names_a_batch_behind_each_damage(made: Logs, ending: str) -> None:
    """The next examination would otherwise refuse what this one has served."""
    end = made.log.log_end_offset
    lost = destroy(made, [3, 6])  # of the two batches between them, the index names one
    log = look(made, ending)
    assert set(served(log)) == set(range(end)) - lost
    lost |= destroy(made, [5])
    assert set(served(look(made, ending))) == set(range(end)) - lost


def test_whole_batches_are_served_where_a_repair_has_moved_them(made: Logs) -> None:
    """Another replica has the end of a range. The rows of the index are those of the shorter file."""
    copy, end = copy_of(made), made.log.log_end_offset
    lost = destroy(made, [3, 4, 10, 16])
    log = look(made, "while it is open")
    segment, damaged = log.damaged_ranges()[0]
    work = log.repair_of(segment, damaged, from_offset=8)
    work.accept(memoryview(copy[8]))
    check = work.finish()
    check.run()
    assert log.finish_repair(check)
    assert set(served(log)) == set(range(end)) - lost | {8, 9}
    repair_all(log, copy)
    assert offsets_of(records_of(log)) == list(range(end))


@pytest.mark.parametrize("state", ["missing", "zeros", "cut", "garbage in the middle"])
def test_a_damaged_index_confirms_what_is_left_of_it(made: Logs, state: str) -> None:
    made.close()
    lost = destroy(made, [3, 8])
    path = made.folder / made.files("*.index")[0]
    rows = path.read_bytes()
    if state == "missing":
        path.unlink()
    else:
        damaged = {
            "zeros": bytes(len(rows)),
            "cut": rows[:45],
            "garbage in the middle": rows[:8] + b"\xff" * 8 + rows[16:],
        }
        path.write_bytes(damaged[state])
    log = made.open()
    got = set(served(log))
    assert got & lost == set()
    if state in ("cut", "garbage in the middle"):
        assert got == set(range(log.log_end_offset)) - lost


def test_payload_between_two_destroyed_batches_is_not_served(logs: MakeLogs) -> None:
    """No row of the index names it, whatever its offsets are."""
    made = logs(index_interval_bytes=1)
    forged = b"".join(bytes(batch(1, value=b"FORGED", base_offset=at, leader_epoch=0)) for at in (12, 13))
    made.append(*[batch(2) for _ in range(5)], batch(6, value=forged), *[batch(2) for _ in range(6)])
    made.directory.write_checkpoints()
    path = made.folder / made.files("*.log")[0]
    data, places = bytearray(path.read_bytes()), batches_of(path)
    for number in (5, 8):
        data[places[number][0] : places[number][0] + 81] = bytes(81)
    path.write_bytes(data)
    log = look(made, "while it is open")
    assert set(served(log)) == set(range(28)) - set(range(10, 16)) - {20, 21}


def test_named_batches_are_those_of_the_file_and_of_the_memory(made: Logs) -> None:
    index = made.log.segments.active.offset_index
    first = made.log.segments[0]
    rows = first.offset_index.rows()
    assert len(rows) > 5
    assert all(row in first.named_batches() for row in rows)
    assert index.rows_in_memory()
    assert all(row in made.log.segments.active.named_batches() for row in index.rows())
    named = first.named_batches()
    for wrong in ((rows[0][0], rows[1][1]), (rows[0][0] + 1, rows[0][1]), (0, 0), (-1, 5), (1 << 40, 1 << 40)):
        assert wrong not in named
    missing = NamedBatches(OsDisk(), str(made.folder / "none.index"), 0, [(7, 30)])
    assert (7, 30) in missing
    assert (7, 31) not in missing
    assert offset_index(OsDisk(), first.path, 0).rows() == []


def test_without_an_index_the_whole_range_is_damaged(made: Logs) -> None:
    destroy(made, [3, 8])
    segment = made.log.segments[0]
    size, end = segment.size_bytes, segment.next_offset
    found = list(Examiner(segment.file.read_at, size, 0, end_offset=end).run())
    assert len([each for each in found if isinstance(each, WholeBatch)]) == PER_SEGMENT - 6


def test_a_series_goes_on_past_a_batch_whose_records_alone_are_damaged(made: Logs) -> None:
    """Its header begins where it must and leads to the next batch. It needs no index, which a kill may have taken."""
    destroy(made, [3])
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    data[9 * len(batch(2, value=VALUE)) - 3] ^= 8  # in the batch number 8
    path.write_bytes(data)
    segment = made.log.segments[0]
    found = list(Examiner(segment.file.read_at, segment.size_bytes, 0, end_offset=segment.next_offset).run())
    assert len([each for each in found if isinstance(each, WholeBatch)]) == PER_SEGMENT - 2
