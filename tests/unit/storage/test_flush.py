"""What a flush syncs, and what waits for the next one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.segments.log_config import LogConfig

MakeLogs = Callable[..., Logs]


def test_a_flush_syncs_the_segments_that_retention_has_taken_out(tmp_path: Path) -> None:
    """Until the log start behind them is checkpointed, a start after a loss of power would end the log in one."""
    made = Logs(tmp_path / "data", LogConfig(retention_bytes=1))
    for number in range(2):
        made.append(batch(timestamp=NOW + number))
        made.log.roll(NOW)
    made.append(batch(timestamp=NOW + 2))
    list(made.directory.maintained(NOW, []))
    condemned = list(made.log.segments.condemned)
    assert [segment.base_offset for segment in condemned] == [0, 1]
    task = made.log.begin_flush()
    assert [segment.base_offset for segment, _ in task.segments] == [0, 1, 2]
    task.run()
    made.log.finish_flush(task)


def test_an_emptied_log_waits_for_nothing(logs: MakeLogs) -> None:
    made = logs(flush_messages=4)
    made.append(batch(3), batch(2))
    assert (made.log.committable_offset, made.log.flush_due) == (3, True)
    made.log.truncate_fully_and_start_at(20)
    assert (made.log.committable_offset, made.log.flush_due, made.log.durability.recovery_point) == (20, False, 20)


def test_a_topic_id_that_is_written_during_a_flush_waits_for_the_next_one(logs: MakeLogs) -> None:
    made = logs()
    durability = made.log.durability
    durability.is_new = True
    task = made.log.begin_flush()
    durability.note_path(f"{made.log.directory}/partition.metadata")
    task.run()
    made.log.finish_flush(task)
    assert durability.is_new
    made.log.flush()
    assert not durability.is_new


def test_checksums_that_change_during_a_flush_are_wanted_after_it(logs: MakeLogs) -> None:
    made = logs()
    made.append(batch(2))
    durability = made.log.durability
    task = made.log.begin_flush()
    durability.lacks_sums = durability.is_wanted = True  # a cleaning has ended
    task.run()
    made.log.finish_flush(task)
    assert (durability.is_wanted, made.log.flush_due) == (True, True)
    made.log.flush()
    assert (durability.is_wanted, made.log.flush_due) == (False, False)


def test_the_checkpoint_waits_for_the_flush_after_one_that_could_not_begin(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = logs()
    made.append(batch(2))
    made.log.roll(NOW)
    made.append(batch(2))
    made.log.durability.recovery_point = 4
    assert made.log.durability.checkpointable == 1

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as patch:
        patch.setattr(FlushTask, "add_segment", fail)
        with pytest.raises(OSError, match="too many"):
            made.log.begin_flush()
    task = made.log.begin_flush()
    assert [segment.base_offset for segment, _ in task.segments] == [0, 2]
    assert made.log.durability.checkpointable == 1
    task.run()
    made.log.finish_flush(task)
    assert made.log.durability.checkpointable == 4
