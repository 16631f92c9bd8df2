"""Segment files under the name of another offset: their right names come back at a start, and no record is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, records_of
from tests.unit.storage.test_damage import damage
from tidelog.storage.files.checkpoints import TRANSACTION_SUMS_FILE, decode_transaction_sums, encode_transaction_sums

MakeLogs = Callable[..., Logs]
COUNT = 24


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Batches of three records each in several segments."""
    made = logs(segment_bytes=700)
    for number in range(COUNT):
        made.append(batch(3, value=b"%03d" % number * 10, timestamp=NOW + number), epoch=number // 10)
    assert made.log.segment_count >= 4
    made.directory.write_checkpoints()
    return made


def files_of(made: Logs, number: int) -> list[Path]:
    stem = made.files("*.log")[number][:20]
    return [made.folder / name for name in made.files(f"{stem}.*") if name.endswith((".log", "index"))]


def contents(made: Logs) -> dict[str, bytes]:
    return {name: (made.folder / name).read_bytes() for name in made.files("*.log")}


def is_as_before(made: Logs, before: dict[str, bytes], values: list[bytes | None]) -> None:
    log = made.open(machine_ran_on=True)
    assert not log.damaged_ranges()
    assert contents(made) == before
    assert [record.value for record in records_of(log)] == values
    assert not made.directory.shortened_logs


@pytest.mark.parametrize("ending", [Logs.close, Logs.kill])
@pytest.mark.parametrize("with_indexes", [True, False])
@pytest.mark.parametrize("shift", [-4, 1, 30])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_renamed_segment_has_its_name_again(
    made: Logs, number: int, shift: int, with_indexes: bool, ending: Callable[[Logs], None]
) -> None:
    """Two replicas with all records could not repair it: no batch of theirs ends where the name said."""
    before, values = contents(made), [record.value for record in records_of(made.log)]
    ending(made)
    for path in files_of(made, number):
        name = f"{max(0, int(path.name[:20]) + shift):020d}{path.suffix}"
        if (with_indexes or path.suffix == ".log") and not (made.folder / name).exists():
            path.rename(made.folder / name)
    is_as_before(made, before, values)


@pytest.mark.parametrize("shift", [-4, 1, 100])
def test_a_second_copy_of_a_segment_is_put_away(made: Logs, shift: int) -> None:
    before, values = contents(made), [record.value for record in records_of(made.log)]
    made.close()
    path = files_of(made, 1)[-1]
    (made.folder / f"{int(path.name[:20]) + shift:020d}.log").write_bytes(
        (made.folder / f"{path.name[:20]}.log").read_bytes()
    )
    is_as_before(made, before, values)


def test_segments_that_each_have_the_name_of_the_next_have_their_own_again(made: Logs) -> None:
    before, values = contents(made), [record.value for record in records_of(made.log)]
    made.close()
    names = sorted(before)
    for name, following in reversed(list(zip(names, [*names[1:], f"{500:020d}.log"]))):
        (made.folder / name).rename(made.folder / following)
    is_as_before(made, before, values)


def test_a_first_batch_whose_base_offset_is_damaged_makes_no_file_misnamed(made: Logs) -> None:
    made.close()
    names = made.files("*.log")
    damage(made.folder / names[1], 0, "base offset")
    log = made.open()
    assert made.files("*.log") == names
    log.read(int(names[2][:20]), 1, log.log_end_offset)


@pytest.mark.parametrize("ending", [Logs.close, Logs.kill])
@pytest.mark.parametrize(("has_index", "has_sums"), [(True, True), (False, True), (True, False)])
def test_a_renamed_segment_keeps_its_aborted_transactions(
    logs: MakeLogs, has_index: bool, has_sums: bool, ending: Callable[[Logs], None]
) -> None:
    """The node itself misnames the first segment, if its file is lost and only the end of it is repaired.

    As that of a file that is gone, its index was deleted, and readers of committed records got aborted ones.
    """
    made = logs(segment_bytes=700, file_delete_delay_ms=0)
    for number in range(8):
        data = idempotent(3 * number, 3, transactional=True, value=b"%03d" % number * 10)
        made.append(data, epoch=0, from_client=False)
        made.append(marker(abort=True), epoch=0, from_client=False)
    start = made.log.segments[1].base_offset
    made.log.set_high_watermark(made.log.log_end_offset)
    made.log.delete_records(start)
    made.directory.maintain(NOW)
    made.log.flush()
    made.directory.write_checkpoints()
    rows = {
        each for each in made.log.aborted_transactions(start, made.log.log_end_offset) if each.first_offset >= start
    }
    assert made.files("*.log")[0] == f"{start:020d}.log"
    ending(made)
    for path in made.folder.glob(f"{start:020d}.*"):
        path.rename(made.folder / f"{start - 4:020d}{path.suffix}")
    index, sums_path = made.folder / f"{start - 4:020d}.txnindex", made.folder / TRANSACTION_SUMS_FILE
    sums = decode_transaction_sums(sums_path.read_bytes())
    sums[start - 4] = sums.pop(start)
    if not has_index:  # nor has it been made yet after the repair
        index.unlink()
        sums[start - 4] = (-1, 0)
    if has_sums:
        sums_path.write_bytes(encode_transaction_sums(sums))
    else:
        sums_path.unlink()
    log = made.open(machine_ran_on=True)
    assert not log.damaged_ranges()
    assert rows <= set(log.aborted_transactions(start, log.log_end_offset))
