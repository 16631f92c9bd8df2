"""The offset index rows of all logs are written in steps."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.simulation.simulated_disk import SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.saved_rows import LOGS_AT_ONCE, save_index_rows
from tidelog.storage.segments.log_config import LogConfig


def test_the_rows_of_each_log_that_is_still_there_are_written(caplog: pytest.LogCaptureFixture) -> None:
    """Others run between the steps, and a log that cannot be written to does not keep the rest from it."""
    saved: list[str] = []

    def log(name: str) -> PartitionLog:
        def save() -> None:
            saved.append(name)
            if name == "full":
                raise OSError(errno.ENOSPC, "no space")

        active = SimpleNamespace(save_offset_rows=save)
        return cast("Any", SimpleNamespace(segments=SimpleNamespace(active=active)))

    logs = {("t", number): log("full" if number == 1 else f"{number}") for number in range(2 * LOGS_AT_ONCE + 3)}
    steps = save_index_rows(logs)
    next(steps)
    assert saved == ["0", "full", *map(str, range(2, LOGS_AT_ONCE))]
    logs["t", LOGS_AT_ONCE] = log("another")
    del logs["t", LOGS_AT_ONCE + 1]
    logs["t", len(logs) + 9] = log("new")
    with caplog.at_level(logging.WARNING):
        assert len(list(steps)) == 1
    assert saved[LOGS_AT_ONCE:] == [*map(str, range(LOGS_AT_ONCE + 2, 2 * LOGS_AT_ONCE + 3))]
    assert "the index rows of 1 logs stay in memory: [Errno 28] no space" in caplog.text


def test_rows_that_are_in_the_file_before_a_clean_stop_are_on_the_device_after_it() -> None:
    """The stop had no row to write where the times did not rise. A loss of power took the others, and no start after a
    clean stop scans: every look-up walked all batches."""
    config = LogConfig(index_interval_bytes=200)

    def opened() -> LogDirectory:
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        directory.load(lambda topic: config, NOW)
        return directory

    for seed in range(5):
        disk = SimulatedDisk(Random(seed))
        disk.make_directory("/data")
        directory = opened()
        log = directory.create_log("t", 0, TOPIC_ID, config, NOW)
        log.append_as_leader(batch(timestamp=NOW + 1), 0, NOW)
        for timestamp in (NOW, NOW + 2):  # the second row of times is written with the stop
            for _ in range(50):
                log.append_as_leader(batch(value=b"x" * 100, timestamp=timestamp), 0, NOW)
            directory.close()
            directory = opened()
            log = directory.logs["t", 0]
        for _ in range(50):
            log.append_as_leader(batch(value=b"x" * 100), 0, NOW)
        for _ in save_index_rows(directory.logs):
            pass
        rows = directory.logs["t", 0].segments.active.offset_index.rows()
        directory.close()
        disk.lose_power()
        directory = opened()
        assert directory.ending is Ending.CLEAN
        assert directory.logs["t", 0].segments.active.offset_index.rows() == rows


def test_a_log_without_new_records_is_closed_without_a_flush(tmp_path: Path) -> None:
    config = LogConfig()
    for count in (1, 0, 0):
        directory = LogDirectory.open(OsDisk(), str(tmp_path), node_id=1, cluster_id="c")
        directory.load(lambda topic: config, NOW)
        log = directory.logs.get(("t", 0)) or directory.create_log("t", 0, TOPIC_ID, config, NOW)
        for _ in range(count):
            log.append_as_leader(batch(), 0, NOW)
        task = log.begin_close()
        assert (task is not None) is (count > 0)
        if task is not None:
            task.run()
        log.finish_close(task)
        directory.close()
