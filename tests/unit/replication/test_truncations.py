"""Many followers' logs that are truncated one after the other: what they write, and what a start makes of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.replication.truncations import Truncations
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig

COUNT = 20
COMMITTED, END = 2, 4


class Turns:
    """The part of an event loop that is used: a list of callbacks."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def run(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()


class Followed:
    def __init__(self, log: PartitionLog) -> None:
        self.log = log


def diverged(logs: Logs) -> list[PartitionLog]:
    """Logs whose records are all on the device, the last ones above the high watermark."""
    made = [logs.directory.create_log("d", n, n.to_bytes(16, "big"), logs.config, NOW) for n in range(COUNT)]
    for log in made:
        for _ in range(END):
            log.append_as_leader(batch(), 0, NOW)
        log.flush()
        log.set_high_watermark(COMMITTED)
    logs.directory.write_checkpoints()
    return made


def truncate(log: PartitionLog) -> None:
    log.truncate_to(END - 1)


def truncate_all(logs: list[PartitionLog], how: Callable[[PartitionLog], None] = truncate) -> None:
    loop: Any = Turns()
    truncations = Truncations(loop)
    for log in logs:
        followed: Any = Followed(log)
        truncations.do(followed, partial(how, log))
    loop.run()


def are_truncated(logs: list[PartitionLog]) -> bool:
    return {log.log_end_offset for log in logs} == {END - 1}


def count_writes(
    monkeypatch: pytest.MonkeyPatch, is_full: Callable[[LogDirectory], bool] = lambda directory: False
) -> list[LogDirectory]:
    """The directories of all writes of checkpoints from now on. Those to a full one fail, and are counted, too."""
    written = list[LogDirectory]()
    write = LogDirectory.write_checkpoints

    def counted(directory: LogDirectory) -> None:
        written.append(directory)
        if is_full(directory):
            raise OSError(errno.ENOSPC, "no space left on device")
        write(directory)

    monkeypatch.setattr(LogDirectory, "write_checkpoints", counted)
    return written


def test_they_share_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrote one, which names all logs of the directory: 34 ms and nine syncs with 5,000 of them."""
    written = count_writes(monkeypatch)
    logs = diverged(Logs(tmp_path, LogConfig()))
    written.clear()
    truncate_all(logs)
    assert are_truncated(logs)
    assert len(written) == 2, "that of the first, which could not know of the others, and that of all others"


def test_a_start_finds_no_damage_after_a_loss_of_power_between_them(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    some = diverged(logs)
    truncate_all(some[: COUNT // 2])
    assert are_truncated(some[: COUNT // 2])
    logs.kill()
    logs.open()
    ends = [logs.directory.logs["d", n].log_end_offset for n in range(COUNT)]
    assert ends == [END - 1] * (COUNT // 2) + [END] * (COUNT // 2)
    assert not any(log.damaged_ranges() for log in logs.directory.logs.values())


def test_each_writes_its_own_where_the_one_of_all_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = count_writes(monkeypatch, lambda directory: len(written) == 2)
    logs = diverged(Logs(tmp_path, LogConfig()))
    written.clear()
    truncate_all(logs)
    assert are_truncated(logs)
    assert len(written) == 4, "the first, the failed one, that of the second log alone, and that of the others"


def test_a_full_directory_costs_the_others_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each truncation wrote two in the other directory."""
    healthy, full = Logs(tmp_path / "healthy", LogConfig()), Logs(tmp_path / "full", LogConfig())
    is_full = False
    written = count_writes(monkeypatch, lambda directory: is_full and directory is full.directory)

    def try_to_truncate(log: PartitionLog) -> None:
        with suppress(OSError):
            truncate(log)

    logs = [log for pair in zip(diverged(healthy), diverged(full), strict=True) for log in pair]
    written.clear()
    is_full = True
    truncate_all(logs, try_to_truncate)
    assert are_truncated(logs[::2])
    assert written.count(healthy.directory) == 2
