"""Work on a thread that is stopped where it hurts, while the owner's thread goes on with the same files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, QuickDisk, batch, offsets_of, records_of
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, decode_leader_epochs
from tidelog.storage.files.disk import Buffer, DirectoryInUse, File
from tidelog.storage.segments.log_config import LogConfig

CONFIG = LogConfig(segment_bytes=1000, file_delete_delay_ms=0)


class Gate(QuickDisk):
    """Holds a thread before or after it writes the temporary file of epochs. The owner's thread passes."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = threading.current_thread()
        self.stops_before = True
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        is_held = threading.current_thread() is not self.owner and LEADER_EPOCH_FILE in path
        if is_held and self.stops_before:
            self._stop()
        super().write_file(path, data, sync=sync)
        if is_held and not self.stops_before:
            self._stop()

    def _stop(self) -> None:
        self.is_there.set()
        assert self.go_on.wait(PATIENCE_S)


@contextmanager
def stopped(disk: Gate, run: Callable[[], None]) -> Iterator[None]:
    """Within the block `run` stands still on a thread. It goes on by itself if the block waits for it."""
    thread = threading.Thread(target=run)
    thread.start()
    assert disk.is_there.wait(PATIENCE_S)
    timer = threading.Timer(0.2, disk.go_on.set)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        disk.go_on.set()
        thread.join(PATIENCE_S)
        timer.join(PATIENCE_S)
    assert not thread.is_alive()


def made(tmp_path: Path, disk: Gate, count: int = 30) -> Logs:
    logs = Logs(tmp_path / "data", CONFIG, disk)
    for number in range(count):
        logs.append(batch(value=bytes(30), timestamp=NOW + number), epoch=number // 12)
    return logs


def entries(folder: Path) -> list[tuple[int, int]]:
    return decode_leader_epochs((folder / LEADER_EPOCH_FILE).read_bytes())


class OpeningGate(Gate):
    """Holds the thread before it opens the first .log."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, path: str, *, create: bool = False) -> File:
        if threading.current_thread() is not self.owner:
            self.opened.append(path)
            if not self.is_there.is_set():
                self._stop()
        return super().open(path, create=create)


def test_a_directory_that_fails_while_a_thread_opens_it_is_locked_until_the_thread_has_ended(tmp_path: Path):
    """Another process could lock it, and write, while the thread still recovered its logs."""
    logs = made(tmp_path, Gate())
    for partition in range(1, 4):
        logs.directory.create_log("t", partition, TOPIC_ID, CONFIG, NOW).flush()
    logs.kill()
    logs.disk = disk = OpeningGate()
    directory = logs._open()
    errors: list[OSError] = []

    def load() -> None:
        try:
            directory.load(lambda topic: CONFIG, NOW)
        except OSError as error:
            errors.append(error)

    with stopped(disk, load):
        directory.fail("the device is gone")
        with pytest.raises(DirectoryInUse):
            logs._open()
    assert len(errors) == 1
    assert len({path.split("/")[-2] for path in disk.opened}) == 1, "it goes on to no other log"
    assert not directory.logs
    logs._open().fail("it is free")


@pytest.mark.parametrize("stops_before", [True, False])
@pytest.mark.parametrize("work", ["flush", "checkpoint"])
def test_work_on_a_deleted_log_leaves_its_successor_alone(tmp_path: Path, work: str, stops_before: bool):
    """The topic is deleted and created again, while a thread writes the epochs of the first log."""
    disk = Gate()
    disk.stops_before = stops_before
    logs = made(tmp_path, disk)
    logs.log.delete_records(13)
    task = logs.log.begin_flush() if work == "flush" else logs.directory.begin_checkpoints()
    with stopped(disk, task.run):
        logs.directory.delete_log("t", 0, NOW)
        logs.log = logs.directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        logs.log.assign_epoch(0)
        logs.append(batch(value=b"new"))
        logs.log.flush()
    assert task.error is None or work == "flush"
    assert entries(logs.folder) == [(0, 0)]
    assert not list(logs.folder.glob("*.tmp"))
    logs.close_and_open()
    assert list(logs.log.leader_epochs) == [(0, 0)]


def test_segments_go_only_after_the_epochs_of_the_new_start_are_there(tmp_path: Path):
    """A checkpoint that has not come to the epochs yet has taken note of the start; retention then wrote none."""
    disk = Gate()
    logs = made(tmp_path, disk)
    logs.log.flush()
    logs.directory.write_checkpoints()
    logs.log.delete_records(20)
    task = logs.directory.begin_checkpoints()
    with stopped(disk, task.run):
        logs.directory.maintain(NOW)
        first = logs.log.segments.first.base_offset
        filed = entries(logs.folder)
    assert first > 0, "retention removes segments"
    assert filed[0][1] == 20
    assert entries(logs.folder)[0][1] == 20


@pytest.mark.parametrize("stops_before", [True, False])
def test_the_epochs_of_a_log_that_moves_are_written_where_it_is(tmp_path: Path, stops_before: bool):
    """Its future log takes the place of the present one while a checkpoint is on its way to the epochs."""
    disk = Gate()
    disk.stops_before = stops_before
    logs = made(tmp_path, disk, 0)
    logs.directory.create_future("f", 0, TOPIC_ID, CONFIG, NOW)
    future = logs.directory.futures["f", 0]
    for number in range(30):
        future.append_as_leader(batch(value=bytes(30), timestamp=NOW + number), number // 12, NOW)
    future.flush()
    logs.directory.write_checkpoints()
    future.set_high_watermark(30)
    future.delete_records(20)
    task = logs.directory.begin_checkpoints()
    with stopped(disk, task.run):
        log = logs.directory.promote_future("f", 0)
    logs.directory.finish_checkpoints(task)
    assert log is future
    assert entries(tmp_path / "data" / "f-0")[0][1] == 20
    assert not list((tmp_path / "data" / "f-0").glob("*.tmp"))
    logs.kill()
    logs.directory = logs._open()
    opened = logs.directory.load(lambda topic: CONFIG, NOW)["f", 0]
    assert opened.log_start_offset == 20
    assert offsets_of(records_of(opened)) == list(range(20, 30))
