"""Batches and logs for the storage tests, in one line each."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidelog.protocol.batches.records import (
    ControlRecordType,
    Record,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
    iter_records,
)
from tidelog.storage.files.disk import Buffer, Disk, File, Lock, OsDisk, OsFile
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import AppendInfo, PartitionLog
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import ColdRead, ReadResult

NOW = 1_700_000_000_000
TOPIC_ID = bytes(range(16))


def batch(
    count: int = 1, *, value: bytes | None = b"value", timestamp: int = NOW, key: bytes | None = None, **kw: Any
) -> memoryview:
    """A writable batch as a client sends it; record i has timestamp `timestamp` + i."""
    return memoryview(encode_batch([(timestamp + i, key, value, ()) for i in range(count)], **kw))


def idempotent(sequence: int, count: int = 1, *, producer_id: int = 7, epoch: int = 0, **kw: Any) -> memoryview:
    return batch(count, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, **kw)


def marker(
    *, abort: bool, producer_id: int = 7, epoch: int = 0, coordinator_epoch: int = 0, timestamp: int = NOW
) -> memoryview:
    kind = ControlRecordType.ABORT if abort else ControlRecordType.COMMIT
    value = encode_end_txn_value(coordinator_epoch)
    return memoryview(
        encode_control_batch(kind, value, timestamp=timestamp, producer_id=producer_id, producer_epoch=epoch)
    )


class QuickFile(OsFile):
    """One whose syncs are not waited for: what they are worth is the simulation's question."""

    __slots__ = ()

    def sync(self) -> None:
        return None


class QuickDisk(OsDisk):
    __slots__ = ()

    def open(self, path: str, *, create: bool = False) -> File:
        return QuickFile(path, os.O_RDWR | (os.O_CREAT if create else 0))

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        super().write_file(path, data, sync=False)

    def sync_file(self, path: str) -> None:
        os.stat(path)  # raises FileNotFoundError, as the system does

    def sync_directory(self, path: str) -> None:
        assert stat.S_ISDIR(os.stat(path).st_mode)

    def sync_all(self, directories: Sequence[str], since: Lock) -> bool:
        return all(Path(each).is_dir() for each in directories)


class Logs:
    """One log directory with one log, `t-0`, that can be closed, killed and opened again."""

    def __init__(self, path: Path, config: LogConfig, disk: Disk | None = None) -> None:
        self.disk = disk or QuickDisk()
        self.path = path
        self.config = config
        self.directory = self._open()
        self.directory.load(lambda topic: config, NOW)
        self.log = self.directory.create_log("t", 0, TOPIC_ID, config, NOW)
        self.log.flush()  # the first record would wait for it
        self.log.assign_epoch(0)

    def _open(self) -> LogDirectory:
        return LogDirectory.open(self.disk, str(self.path), node_id=1, cluster_id="cluster")

    @property
    def folder(self) -> Path:
        return self.path / "t-0"

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))

    def append(
        self, *batches: memoryview, epoch: int = 0, now_ms: int = NOW, from_client: bool = True
    ) -> list[AppendInfo]:
        infos = [self.log.append_as_leader(b, epoch, now_ms, from_client=from_client) for b in batches]
        self.log.set_high_watermark(self.log.log_end_offset)
        return infos

    def close(self) -> None:
        self.directory.close()

    def kill(self) -> None:
        """The process is gone: no flush, no close, only the lock is free."""
        self.directory._lock.release()

    def open(self, now_ms: int = NOW, *, machine_ran_on: bool = False) -> PartitionLog:
        self.directory = self._open()
        if machine_ran_on and not self.directory.was_clean:
            self.directory.ending = Ending.KILLED
        logs = self.directory.load(lambda topic: self.config, now_ms)
        assert not self.directory.offline, self.directory.offline
        self.log = logs["t", 0]
        self.log.set_high_watermark(self.log.log_end_offset)
        return self.log

    def kill_and_open(self) -> PartitionLog:
        self.kill()
        return self.open()

    def close_and_open(self) -> PartitionLog:
        self.close()
        return self.open()


def read(log: PartitionLog, offset: int, max_bytes: int, upper_offset: int) -> ReadResult:
    """As the log is read by a broker: what it wants done on a thread is done, and it is asked again."""
    for _ in range(4):
        try:
            return log.read(offset, max_bytes, upper_offset)
        except ColdRead as cold:
            cold.pin()
            cold.warm()
            cold.unpin()
    raise AssertionError("the same is wanted of a thread again and again")


def records_of(log: PartitionLog, max_bytes: int = 100_000) -> list[Record]:
    """Every record of the log, by as many reads as it takes."""
    records: list[Record] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        result = read(log, offset, max_bytes, log.log_end_offset)
        assert result.next_offset > offset
        assert result.size_bytes == sum(len(region) for region in result.regions)
        for region in result.regions:
            records.extend(iter_records(region))
        offset = result.next_offset
    return records


def offsets_of(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]
