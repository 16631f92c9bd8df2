"""Directories and devices in place of a log's files: they are renamed, and the log is what it was."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch, idempotent, marker, offsets_of, records_of
from tidelog.storage.files.disk import OsDisk

MakeLogs = Callable[..., Logs]


def put_directory(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_bytes(b"x")


KINDS = {"a directory": put_directory, "a FIFO": os.mkfifo}
NAMES = [
    "t-0/{}.index", "t-0/{}.timeindex", "t-0/{}.txnindex", "t-0/{}.snapshot",
    "t-0/leader-epoch-checkpoint", "t-0/partition.metadata", "t-0/transaction-index-checksums",
    "t-0/leader-epoch-checkpoint.tmp", "t-0/explained-gaps", "t-0/cleaned-ends", "recovery-point-offset-checkpoint",
    "recovery-point-offset-checkpoint.next.tmp", "log-start-offset-checkpoint", "replication-offset-checkpoint",
    "cleaner-offset-checkpoint", "broker.incarnation", ".kafka_cleanshutdown",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_what_has_the_name_of_a_file_is_renamed_and_the_log_is_what_it_was(
    logs: MakeLogs, kind: str, name: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = logs(segment_bytes=600)
    for number in range(10):
        made.append(idempotent(2 * number, 2, transactional=True))
        made.append(marker(abort=number % 2 == 0), from_client=False)
    made.log.flush()
    made.directory.write_checkpoints()
    segments, end = made.files("*.log"), made.log.log_end_offset
    expected = made.log.aborted_transactions(0, end)
    epochs, records = list(made.log.leader_epochs), offsets_of(records_of(made.log))
    if ending == "stopped":
        made.close()
    else:
        made.kill()
    path = made.path / name.format(segments[1][:20])
    path.unlink(missing_ok=True)
    for _ in range(2):  # the second one finds the name of the first one taken
        KINDS[kind](path)
        log = made.open(machine_ran_on=True)
        assert f"{path} is not a file" in caplog.text
        assert not path.is_dir()
        if log.topic_id is None:
            made.directory.set_topic_id("t", 0, TOPIC_ID)
        assert offsets_of(records_of(log)) == records
        assert (log.log_start_offset, log.log_end_offset, log.damaged_ranges()) == (0, end, [])
        assert log.aborted_transactions(0, end) == expected
        assert (list(log.leader_epochs), log.topic_id) == (epochs, TOPIC_ID)
        made.append(batch(1))
        log.truncate_to(end)
        made.close()
        path.unlink(missing_ok=True)
    kept = sorted(each.name for each in path.parent.glob(f"{path.name}.not-a-file*"))
    assert kept == [f"{path.name}.not-a-file", f"{path.name}.not-a-file-2"]
    made.open()
    assert offsets_of(records_of(made.log)) == records


def test_other_directories_and_links_that_lead_nowhere_stay(logs: MakeLogs) -> None:
    made = logs()
    made.append(batch(2))
    made.close()
    (made.folder / "lost+found").mkdir()
    (made.folder / "leader-epoch-checkpoint").unlink()
    (made.folder / "leader-epoch-checkpoint").symlink_to("nowhere")
    made.open()
    assert (made.folder / "lost+found").is_dir()
    assert not list(made.folder.glob("*.not-a-file*"))


@contextmanager
def other_end_opened(path: Path, flags: int) -> Iterator[None]:
    """In two seconds, so that what waits for it comes to an end."""
    opened: list[Path] = []

    def open_and_close() -> None:
        opened.append(path)
        os.close(os.open(path, flags | os.O_NONBLOCK))

    timer = threading.Timer(2, open_and_close)
    timer.start()
    try:
        yield
        assert not opened, "it waited for the other end"
    finally:
        timer.cancel()
        timer.join(10)


def test_a_fifo_in_place_of_the_owners_file_is_refused(logs: MakeLogs) -> None:
    """The start waited for its other end, and no signal ended the process."""
    made = logs()
    made.close()
    path = made.path / "meta.properties"
    path.unlink()
    os.mkfifo(path)
    with other_end_opened(path, os.O_WRONLY), pytest.raises(OSError, match="is not a file") as refused:
        made.open()
    assert refused.value.filename == str(path)
    assert path.is_fifo()


def test_a_fifo_is_not_written_either(tmp_path: Path) -> None:
    path = tmp_path / "quorum-state.tmp"
    os.mkfifo(path)
    with other_end_opened(path, os.O_RDONLY), pytest.raises(OSError, match=str(path)):
        OsDisk().write_file(str(path), b"x", sync=False)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


@pytest.mark.parametrize("put", [os.mkfifo, put_socket])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_one_log_stays_offline_where_a_segment_is_no_file(
    logs: MakeLogs, put: Callable[[Path], None], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the whole log directory offline, or appends went into a FIFO."""
    made = logs(segment_bytes=600)
    made.append(*[idempotent(2 * number, 2) for number in range(20)])
    made.directory.create_log("other", 0, bytes(15) + b"o", made.config, NOW)
    made.close()
    path = made.folder / made.files("*.log")[which]
    path.unlink()
    monkeypatch.chdir(made.folder)  # the path of a socket has a bound
    put(Path(path.name))
    with pytest.raises(AssertionError, match="is not a file"):
        made.open()
    assert set(made.directory.logs) == {("other", 0)}
    assert made.directory.offline == {("t", 0): f"[Errno 2] is not a file: '{path}'"}
    assert path.exists()
