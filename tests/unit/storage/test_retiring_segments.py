"""What retention takes out of a log goes from the disk only when the log start behind it is on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch
from tidelog.storage.files.checkpoints import CheckpointTask
from tidelog.storage.log import directory
from tidelog.storage.segments.log_config import LogConfig

BASES = [0, 1, 2, 3]


def logs_with_expired_segments(path: Path) -> Logs:
    """Segments of a batch each. Retention has taken out the first three of four; their files are there."""
    made = Logs(path, LogConfig(retention_bytes=1, file_delete_delay_ms=0))
    for number in range(3):
        made.append(batch(timestamp=NOW + number))
        made.log.roll(NOW)
    made.append(batch(timestamp=NOW + 3))
    doomed: list[str] = []
    list(made.directory.maintained(NOW, doomed))
    assert doomed == []
    assert made.log.log_start_offset == 3
    assert made.directory.has_condemned
    assert bases(made) == BASES
    return made


def bases(made: Logs) -> list[int]:
    return [int(name[:20]) for name in made.files("*.log")]


def write(made: Logs) -> CheckpointTask:
    task = made.directory.begin_checkpoints()
    task.run()
    return task


def test_their_files_go_when_the_checkpoint_is_synced(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    assert made.directory.finish_checkpoints(task)
    assert bases(made) == BASES, "a loss of power could bring back the log start of before"
    task.sync()
    made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == [3]
    assert not made.directory.has_condemned
    assert made.files("*.snapshot") == [f"{3:020d}.snapshot"]
    doomed = made.directory.take_doomed(NOW)
    assert {Path(path).name for path in doomed} == set(made.files("*.deleted"))
    assert f"{1:020d}.snapshot.deleted" in made.files("*.deleted")
    assert made.kill_and_open().log_start_offset == 3
    assert made.files("*.deleted") == []


def test_a_kill_before_it_costs_nothing(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    write(made)
    log = made.kill_and_open()
    assert log.log_end_offset == 4
    made.directory.maintain(NOW)
    assert (bases(made), log.log_start_offset) == ([3], 3)


def test_a_checkpoint_that_was_overtaken_is_no_leave(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    made.directory.write_checkpoints()
    assert not made.directory.finish_checkpoints(task)
    assert made.directory.has_condemned


def test_one_that_failed_is_none(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    assert made.directory.finish_checkpoints(task)
    task.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == BASES


def test_what_expired_after_it_began_stays(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    made.log.roll(NOW)
    made.append(batch(timestamp=NOW + 4))
    list(made.directory.maintained(NOW, []))
    assert made.directory.finish_checkpoints(task)
    task.sync()
    made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == [3, 4]
    assert made.directory.has_condemned


def test_a_log_that_was_deleted_meanwhile_is_passed_over(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    assert made.directory.finish_checkpoints(task)
    made.directory.delete_log("t", 0, NOW)
    again = made.directory.create_log("t", 0, bytes(15) + b"\x09", LogConfig(), NOW)
    assert again.topic_id != TOPIC_ID
    task.sync()
    made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == [0]


def test_a_log_that_is_emptied_meanwhile_may_begin_at_one_of_them(tmp_path: Path) -> None:
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    made.log.truncate_fully_and_start_at(1)
    assert bases(made) == [1]
    made.append(batch(timestamp=NOW))
    made.directory.finish_checkpoints(task)
    task.sync()
    made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == [1]
    assert made.kill_and_open().log_end_offset == 2


def test_their_files_go_in_steps_until_there_are_newer_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PIECE_SEGMENTS", 1)
    made = logs_with_expired_segments(tmp_path / "data")
    task = write(made)
    assert made.directory.finish_checkpoints(task)
    task.sync()
    steps = made.directory.synced_checkpoint_steps(task, NOW)
    for left in (BASES[1:], BASES[2:]):
        next(steps)
        assert bases(made) == left
    made.directory.write_checkpoints()
    assert list(steps) == []
    assert bases(made) == BASES[2:]
    task = write(made)
    assert made.directory.finish_checkpoints(task)
    task.sync()
    made.directory.finish_synced_checkpoints(task, NOW)
    assert bases(made) == [3]
