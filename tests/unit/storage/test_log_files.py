"""The file of leader epochs is written by flushes and checkpoints on threads of their own, at one time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, decode_leader_epochs
from tidelog.storage.files.disk import Buffer, OsDisk
from tidelog.storage.files.log_files import LogFiles, write_epochs
from tidelog.storage.segments.log_config import LogConfig


class SlowDisk(OsDisk):
    """The first file of epochs that is written waits for `go_on`, between its writing and its renaming."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written, self.go_on = threading.Event(), threading.Event()

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        super().write_file(path, data, sync=sync)
        if LEADER_EPOCH_FILE in path and not self.is_written.is_set():
            self.is_written.set()
            assert self.go_on.wait(PATIENCE_S)


def entries(home: Path) -> list[tuple[int, int]]:
    return decode_leader_epochs((home / LEADER_EPOCH_FILE).read_bytes())


def start(work: Callable[[], None], failures: list[Exception]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("newer_is_slow", [False, True])
def test_two_threads_write_it_at_one_time(tmp_path: Path, newer_is_slow: bool):
    """A flush renamed what a checkpoint had written; the checkpoint found no file, and took the directory offline."""
    disk = SlowDisk()
    files = LogFiles(disk, str(tmp_path))
    older, newer = files.epochs([(0, 0)]), files.epochs([(0, 0), (1, 7)])
    slow, quick = (newer, older) if newer_is_slow else (older, newer)
    failures: list[Exception] = []
    threads = [start(slow.write, failures)]
    assert disk.is_written.wait(PATIENCE_S)
    threads.append(start(quick.write, failures))
    threads[1].join(0.05)  # without a lock it is done by now
    disk.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert entries(tmp_path) == [(0, 0), (1, 7)]
    assert [path.name for path in tmp_path.iterdir()] == [LEADER_EPOCH_FILE]


def test_older_epochs_never_replace_newer_ones(tmp_path: Path):
    files = LogFiles(OsDisk(), str(tmp_path))
    older, newer = files.epochs([(0, 0)]), files.epochs([(0, 0), (1, 7)])
    newer.write()
    older.write()
    assert entries(tmp_path) == [(0, 0), (1, 7)]


def test_older_epochs_are_durable_when_newer_ones_were_not_synced(tmp_path: Path):
    synced: list[str] = []

    class Watched(OsDisk):
        def sync_file(self, path: str) -> None:
            synced.append(Path(path).name)

        def sync_directory(self, path: str) -> None:
            synced.append("its directory")

    files = LogFiles(Watched(), str(tmp_path))
    older, newer = files.epochs([(0, 0)]), files.epochs([(0, 0), (1, 7)])
    newer.prepare()
    newer.put_in_place()
    assert synced == []
    older.write()
    assert synced == [LEADER_EPOCH_FILE, "its directory"]
    older.write()
    assert len(synced) == 2, "once is enough"


def test_prepared_epochs_replace_no_newer_ones_and_no_file_of_another_thread(tmp_path: Path):
    files = LogFiles(OsDisk(), str(tmp_path))
    older, newer, newest = files.epochs([(0, 0)]), files.epochs([(0, 0), (1, 7)]), files.epochs([(2, 9)])
    newer.prepare()
    older.write()
    with pytest.raises(FileNotFoundError):  # then each file is synced alone
        newer.put_in_place()
    newer.write()
    assert entries(tmp_path) == [(0, 0), (1, 7)]
    newest.write()
    newer.prepare()
    newer.put_in_place()
    assert entries(tmp_path) == [(2, 9)]
    assert [path.name for path in tmp_path.iterdir()] == [LEADER_EPOCH_FILE]


def test_a_log_whose_directory_vanished_is_passed_over(tmp_path: Path):
    gone, files = LogFiles(OsDisk(), str(tmp_path / "gone")), LogFiles(OsDisk(), str(tmp_path))
    write_epochs([gone.epochs([(0, 0)]), files.epochs([(3, 0)])])
    assert entries(tmp_path) == [(3, 0)]


@pytest.mark.parametrize("flush_is_slow", [False, True])
def test_a_flush_and_a_checkpoint_of_one_log_at_one_time(tmp_path: Path, flush_is_slow: bool):
    """Retention moves the log start while a new leader begins an epoch: under load that ended nodes."""
    disk = SlowDisk()
    disk.is_written.set()
    made = Logs(tmp_path / "data", LogConfig(segment_bytes=1000), disk)
    for number in range(30):
        made.append(batch(value=bytes(30), timestamp=NOW + number), epoch=number // 12)
    made.log.flush()
    made.directory.write_checkpoints()
    made.append(batch(value=bytes(30), timestamp=NOW + 30), epoch=7)
    made.log.set_high_watermark(31)
    made.log.delete_records(20)
    flush, checkpoint = made.log.begin_flush(), made.directory.begin_checkpoints()
    slow, quick = (flush, checkpoint) if flush_is_slow else (checkpoint, flush)
    disk.is_written.clear()
    threads = [threading.Thread(target=slow.run)]
    threads[0].start()
    assert disk.is_written.wait(PATIENCE_S)
    threads.append(threading.Thread(target=quick.run))
    threads[1].start()
    threads[1].join(0.05)  # without a lock it is done by now
    disk.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (flush.error, checkpoint.error) == (None, None)
    assert entries(made.folder) == list(made.log.leader_epochs)
