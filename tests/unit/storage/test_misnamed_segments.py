"""Segment files under the name of another offset: their right names come back at a start, and no record is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, records_of
from tests.unit.storage.test_damage import damage

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
