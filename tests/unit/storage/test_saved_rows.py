"""The offset index rows of all logs are written in steps."""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.saved_rows import LOGS_AT_ONCE, save_index_rows


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
