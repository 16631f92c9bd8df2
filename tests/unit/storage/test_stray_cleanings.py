"""Files of a cleaning that ended early: they never undo a later swap, and none gets into another log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, QuickDisk, batch
from tests.unit.storage.cleaning import begin, contents
from tests.unit.storage.test_threads import Gate, stopped
from tidelog.storage.files.disk import Buffer, File
from tidelog.storage.log.compaction import Compaction
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.swap import Swap
from tidelog.storage.segments.log_config import LogConfig

CONFIG = LogConfig(
    segment_bytes=1500, index_interval_bytes=300, cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0,
    file_delete_delay_ms=0,
)  # fmt: skip
KEYS = 7
RECORDS = 60
OPERATIONS_MAX = 400
KINDS = (".log", ".index", ".timeindex", ".txnindex")


class Killed(BaseException):
    pass


class Mortal(QuickDisk):
    """The process ends before the operation of number `ends_at`."""

    def __init__(self, ends_at: int) -> None:
        super().__init__()
        self.ends_at = ends_at
        self.is_counting = False
        self.unsynced: list[tuple[str, str]] = []
        """The renames since the last sync of a directory."""

    def _count(self) -> None:
        self.ends_at -= self.is_counting
        if self.ends_at < 0:
            raise Killed

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)
        self.unsynced.append((source, target))

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        self._count()
        super().write_file(path, data, sync=sync)

    def sync_directory(self, path: str) -> None:
        self._count()
        super().sync_directory(path)
        self.unsynced.clear()

    def open(self, path: str, *, create: bool = False) -> File:
        self._count()
        return super().open(path, create=create)


def made(path: Path, disk: QuickDisk | None = None) -> Logs:
    logs = Logs(path, CONFIG, disk)
    for n in range(RECORDS):
        logs.append(batch(1, key=b"k%d" % (n % KEYS), value=b"%03d" % n * 20, timestamp=NOW + n))
    logs.log.flush()
    logs.directory.write_checkpoints()
    return logs


def newest(log: PartitionLog) -> dict[bytes | None, bytes | None]:
    return {key: value for _, key, value in contents(log)}


def leave_stray(folder: Path, base_offset: int) -> None:
    for kind in KINDS:
        (folder / f"{base_offset:020d}{kind}.cleaned").write_bytes(b"")


def base_of(swap: Swap) -> int:
    return swap._replaced[0][1][0].base_offset


def to_end(compaction: Compaction) -> None:
    while True:
        compaction.run()
        if not compaction.advance():
            return


@pytest.mark.slow
@pytest.mark.parametrize("kills_start", [False, True])
def test_a_stray_takes_no_record_wherever_the_cleaning_is_killed(tmp_path: Path, kills_start: bool):
    """A start took a stray below a committed swap for a part of it, and removed the swap: the only copy."""
    finished = 0
    for ends_at in range(OPERATIONS_MAX):
        disk = Mortal(OPERATIONS_MAX * 100)
        logs = made(tmp_path / f"data{ends_at}", disk)
        expected = newest(logs.log)
        for base_offset in (1, logs.log.segments[1].base_offset + 1):
            leave_stray(logs.folder, base_offset)
        disk.ends_at, disk.is_counting = ends_at, True
        compaction = begin(logs.log)
        try:
            to_end(compaction)
            finished += 1
        except Killed:
            pass
        logs.kill()
        if kills_start:
            disk.ends_at = 2
            with pytest.raises(Killed):
                logs.open(machine_ran_on=True)
            logs.kill()
        disk.is_counting, disk.ends_at = False, 1
        assert newest(logs.open(machine_ran_on=True)) == expected, ends_at
        assert not logs.files("*.cleaned")
        assert not logs.files("*.swap")
        logs.close()
        if finished > 1:
            return
    pytest.fail(f"the cleaning takes more than {OPERATIONS_MAX} operations")


@pytest.mark.parametrize("stray", ["at its base", "at the first base", "between"])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_start_finishes_a_committed_swap_with_a_stray(tmp_path: Path, steps: int, group: int, stray: str):
    """As an earlier version left it: the stray is there, and what the swap replaces is gone."""
    logs = made(tmp_path / "data")
    expected = newest(logs.log)
    compaction = begin(logs.log)
    while (swap := compaction._swap) is None or swap._next < steps or (base_of(swap) > 0) < group:
        compaction.run()
        assert compaction.advance()
    base_offset = base_of(swap)
    leave_stray(
        logs.folder, {"at its base": base_offset, "at the first base": 0, "between": max(0, base_offset - 1)}[stray]
    )
    logs.kill()
    assert newest(logs.open(machine_ran_on=True)) == expected
    assert not logs.files("*.cleaned")
    assert not logs.files("*.swap")


@pytest.mark.parametrize("renamed", [1, 2])
def test_a_start_undoes_what_kafka_has_not_committed_of_a_split(tmp_path: Path, renamed: int):
    """Kafka splits a segment in several, and renames the last of them first."""
    logs = made(tmp_path / "data")
    before = contents(logs.log)
    whole = logs.folder / f"{0:020d}.log"
    data = whole.read_bytes()
    size = len(data) // logs.log.segments[1].base_offset
    logs.kill()
    for number, base_offset in enumerate((0, 3, 6)):
        suffix = ".swap" if number >= 3 - renamed else ".cleaned"
        (logs.folder / f"{base_offset:020d}.log{suffix}").write_bytes(
            data[base_offset * size : (base_offset + 3) * size]
        )
    assert contents(logs.open(machine_ran_on=True)) == before
    assert not logs.files("*.cleaned")
    assert not logs.files("*.swap")
    assert not (logs.folder / f"{3:020d}.log").exists()


class CleaningGate(Gate):
    """Holds the cleaning's thread before it makes a `.cleaned` file of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        is_held = threading.current_thread() is not self.owner and path.endswith(f"{self.kind}.cleaned")
        if is_held and self.stops_before:
            self._stop()
        super().write_file(path, data, sync=sync)
        if is_held and not self.stops_before:
            self._stop()


@pytest.mark.parametrize("stops_before", [True, False])
@pytest.mark.parametrize("kind", [".log", ".index", ".timeindex"])
def test_a_cleaning_on_a_thread_makes_no_file_in_a_later_log(tmp_path: Path, kind: str, stops_before: bool):
    disk = CleaningGate(kind)
    disk.stops_before = stops_before
    logs = made(tmp_path / "data", disk)
    compaction = begin(logs.log)

    def work() -> None:
        while not compaction.is_given_up and not disk.go_on.is_set():
            compaction.run()

    with stopped(disk, work):
        logs.directory.delete_log("t", 0, NOW)
        logs.log = logs.directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        logs.log.assign_epoch(0)
        logs.append(batch(key=b"new"))
    assert not compaction.advance()
    assert not logs.files("*.cleaned")
    assert [key for _, key, _ in contents(logs.log)] == [b"new"]


def test_a_piece_that_begins_after_its_log_has_gone_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was handed to a thread before, and the thread comes to it late."""
    logs = made(tmp_path / "data")
    compaction = begin(logs.log)
    logs.directory.delete_log("t", 0, NOW)
    logs.log = logs.directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
    compaction.is_given_up = False  # as the thread has seen it
    for _ in range(50):
        compaction.run()
    assert not logs.files("*.cleaned")


def test_a_cleaning_that_meets_a_bug_is_taken_back(logs: Callable[..., Logs]):
    made = logs(segment_bytes=1500, cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0)
    for n in range(RECORDS):
        made.append(batch(1, key=b"k%d" % (n % KEYS), value=b"%03d" % n * 20, timestamp=NOW + n))
    compaction = begin(made.log)
    while not made.files("*.cleaned"):
        compaction.run()
        assert compaction.advance()
    compaction.take_back()
    assert not made.files("*.cleaned")
    assert made.log.compaction is None


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, KEYS])
def test_a_start_finishes_a_swap_of_which_a_power_loss_kept_any_renames(tmp_path: Path, keys: int):
    """Without its later segments, the first that the swap replaces is no copy of what was cleaned."""
    number = 0
    while True:
        logs = Logs(tmp_path / f"data{number}", CONFIG)
        for cleaning in range(2):
            for n in range(RECORDS):
                key = b"rare %d %d" % (cleaning, n) if n % 10 == 3 else b"k%d" % (n % keys)
                logs.append(batch(1, key=key, value=b"%03d" % n * 20, timestamp=NOW + n))
            logs.log.flush()
            logs.directory.write_checkpoints()
            compaction = begin(logs.log)
            if not cleaning:
                to_end(compaction)
        expected = newest(logs.log)
        while (swap := compaction._swap) is None or not swap.has_begun:
            compaction.run()
            assert compaction.advance()
        old = [f"{segment.base_offset:020d}.log" for segment in swap._replaced[0][0]]
        logs.kill()
        for at, name in enumerate(old):
            if number >> at & 1:
                (logs.folder / name).rename(logs.folder / f"{name}.deleted")
        assert newest(logs.open(machine_ran_on=False)) == expected, (number, old)
        assert not logs.files("*.swap")
        logs.close()
        number += 1
        if number >= 1 << len(old):
            assert len(old) > 1
            return
