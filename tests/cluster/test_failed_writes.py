"""A real volume whose device refuses writes for a moment: no clean stop says that they are there.

Needs to mount volumes, so it is skipped where nobody may (containers without CAP_SYS_ADMIN, users).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.cluster.test_full_disk import run
from tests.patience import PATIENCE_S
from tests.unit.storage.batches import NOW, TOPIC_ID, batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.segments.log_config import LogConfig

pytestmark = pytest.mark.slow

LOGS = LogDirectory.sync_at_once_from + 8
BATCHES = 400
SYNC_FILE_RANGE_WRITE = 2
RefuseWrites = Callable[[], None]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """The directory of an ext4 volume `volume`, on a file in `room`, which can be filled."""
    room, volume = tmp_path / "room", tmp_path / "volume"
    image = room / "image"
    with ExitStack() as stack:
        for path in (room, volume):
            path.mkdir()
        run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(room))
        stack.callback(run, "umount", "-l", str(room))
        run("truncate", "-s", "128M", str(image))
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=8", str(image))
        run("mount", "-o", "loop,commit=60", str(image), str(volume))
        stack.callback(run, "umount", "-l", str(volume))
        yield tmp_path


def opened(path: Path) -> LogDirectory:
    directory = LogDirectory.open(OsDisk(), str(path), node_id=1, cluster_id=None)
    directory.load(lambda topic: LogConfig(), NOW)
    return directory


def lose_what_was_written(device: Path, directories: list[LogDirectory]) -> None:
    """The device has no room while the kernel writes the logs back, and has some again."""
    filling = device / "room" / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(65536)):
            pass
    library = ctypes.CDLL(None)
    for directory in directories:
        for log in directory.logs.values():
            for _ in range(BATCHES):
                log.append_as_leader(batch(), 1, NOW)
            descriptor = os.open(log.segments.active.path, os.O_RDONLY)
            library.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)
            os.close(descriptor)
    time.sleep(2)  # it reports to the kernel that it cannot
    filling.unlink()


def test_a_failed_write_of_which_another_has_heard_lets_no_directory_stop_cleanly(device: Path):
    """syncfs tells each descriptor of it that was open, and one that was opened later: here that of the other one."""
    directories = [opened(device / "volume" / name) for name in ("one", "two")]
    for directory in directories:
        for partition in range(LOGS):
            log = directory.create_log("t", partition, TOPIC_ID, LogConfig(), NOW)
            log.append_as_leader(batch(), 1, NOW)
            log.flush()
    os.sync()
    lose_what_was_written(device, directories)
    heard = subprocess.run(["sync", "-f", str(device / "volume")], check=False, timeout=PATIENCE_S)
    assert heard.returncode, "the device has refused nothing"
    assert [directory.close() for directory in directories] == [False, False]
