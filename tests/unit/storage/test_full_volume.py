"""A start on a volume without space: what is made from batches waits in memory, and the logs are read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.unit.broker.faulty_disk import FaultyDisk
from tests.unit.storage.batches import NOW, Logs, idempotent, offsets_of, read, records_of
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig

COUNT = 60


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def made(disk: FaultyDisk, tmp_path: Path) -> Logs:
    made = Logs(tmp_path / "data", LogConfig(segment_bytes=2500, index_interval_bytes=300), disk=disk)
    for n in range(COUNT):
        made.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n))
    made.directory.write_checkpoints()
    return made


def lose(made: Logs, what: str) -> None:
    kind, _, which = what.partition(" ")
    if kind != "nothing":
        path = made.folder / made.files(f"*.{kind}")[0 if which == "first" else -1]
        if kind == "log":
            data = bytearray(path.read_bytes())
            data[100] ^= 2
            path.write_bytes(data)
        else:
            path.unlink()


@pytest.mark.parametrize("what", ["nothing", "index first", "index last", "timeindex last", "log first", "log last"])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_log_opens_on_a_full_volume(made: Logs, disk: FaultyDisk, is_clean: bool, what: str) -> None:
    made.close() if is_clean else made.kill()
    lose(made, what)
    disk.fail(made.path, errno.ENOSPC, "write", "create")
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == 2 * COUNT
    damaged = {"log first": {0, 1}, "log last": {96, 97}}.get(what, set())
    assert {offset for offset in range(2 * COUNT) if not is_served(log, offset)} == damaged
    found = log.offset_for_timestamp(NOW + COUNT // 2) if not damaged else None
    assert damaged or (found is not None and found.offset == COUNT - 1)
    disk.faults.clear()
    sequence = 2 * COUNT
    if not damaged:
        assert made.append(idempotent(sequence - 2, count=2, timestamp=NOW))[0].duplicate, "producers are known"
        made.append(idempotent(sequence, count=2, timestamp=NOW))
        assert offsets_of(records_of(made.close_and_open())) == list(range(sequence + 2))


def test_a_log_that_has_lost_its_end_opens_on_a_full_volume(made: Logs, disk: FaultyDisk) -> None:
    """The checkpoint of its high watermark could not be written, and the whole log directory was offline."""
    made.kill()
    path = made.folder / made.files("*.log")[-1]
    path.write_bytes(path.read_bytes()[:-1])
    (made.path / "recovery-point-offset-checkpoint").write_bytes(b"0\n1\nt 0 0\n")
    disk.fail(made.path, errno.ENOSPC, "write", "create")
    log = made.open()
    end = log.log_end_offset
    assert end == 2 * COUNT - 2
    disk.faults.clear()
    made.append(idempotent(end, count=2, timestamp=NOW))
    assert offsets_of(records_of(made.close_and_open())) == list(range(end + 2))


def is_served(log: PartitionLog, offset: int) -> bool:
    try:
        return read(log, offset, 100, log.log_end_offset).size_bytes > 0
    except DamagedRecords:
        return False
