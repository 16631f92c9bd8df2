"""A coordinator whose log is damaged waits until it is repaired, and fails only if no replica has a whole copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.broker.coordinators.group_ports import GroupPorts
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords
from tidelog.storage.segments.log_config import LogConfig


class DamagedLog:
    """Ends at offset 10; reading it fails as long as it is damaged."""

    log_start_offset, log_end_offset = 0, 10

    def __init__(self) -> None:
        self.is_damaged = True

    def can_retry(self, error: Exception) -> bool:
        return False

    def read(self, offset: int, size_bytes: int, end: int) -> Any:
        if self.is_damaged:
            raise DamagedRecords("t-0/0.log", DamagedRange(0, 100, 0, 10, "the CRC is wrong"))
        return SimpleNamespace(size_bytes=4, regions=[b"read"], next_offset=10)


class OneLeader:
    """What of `Partitions` is needed: says what `code` is for damage, and counts how often it was told."""

    def __init__(self, code: ErrorCode) -> None:
        self.code, self.reports = code, 0
        self.replica = SimpleNamespace(log=DamagedLog())

    def leader(self, topic: str, partition: int) -> Any:
        return self.replica

    def refusal(self, partition: Any, error: Exception) -> KafkaError:
        assert isinstance(error, DamagedRecords)
        self.reports += 1
        return KafkaError(self.code)


async def test_a_coordinator_waits_for_the_repair_of_its_log() -> None:
    partitions = OneLeader(ErrorCode.KAFKA_STORAGE_ERROR)
    ports = GroupPorts("__consumer_offsets", partitions, asyncio.get_running_loop(), lambda: 0)  # type: ignore[arg-type]
    chunks = ports.read_log(0)
    assert not next(chunks)
    assert partitions.reports == 1
    partitions.replica.log.is_damaged = False
    while not (chunk := next(chunks)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert bytes(chunk) == b"read"
    assert list(chunks) == []


async def test_a_coordinator_fails_when_no_replica_has_what_is_damaged() -> None:
    partitions = OneLeader(ErrorCode.CORRUPT_MESSAGE)
    ports = GroupPorts("__consumer_offsets", partitions, asyncio.get_running_loop(), lambda: 0)  # type: ignore[arg-type]
    with pytest.raises(KafkaError, match="CORRUPT_MESSAGE"):
        next(ports.read_log(0))


async def test_a_coordinator_does_not_load_a_record_that_changed_after_it_was_checked(
    tmp_path: Path,
) -> None:
    made = Logs(tmp_path / "data", LogConfig())
    made.append(*[batch(1, value=b"committed") for _ in range(3)])
    path = made.folder / made.files("*.log")[0]
    path.write_bytes(path.read_bytes().replace(b"committed", b"forgotten", 2)[: path.stat().st_size])
    partitions = OneLeader(ErrorCode.CORRUPT_MESSAGE)
    partitions.replica.log = made.log

    def run_cold(cold: Any, on_done: Callable[[], None]) -> None:
        cold.warm()
        on_done()

    partitions.run_cold = run_cold  # type: ignore[attr-defined]
    ports = GroupPorts("__consumer_offsets", partitions, asyncio.get_running_loop(), lambda: 0)  # type: ignore[arg-type]
    with pytest.raises(KafkaError, match="CORRUPT_MESSAGE"):
        list(ports.read_log(0))
    assert [each.first_offset for _, each in made.log.damaged_ranges()] == [0]


async def test_a_coordinator_loads_a_log_that_ends_behind_a_gap(tmp_path: Path) -> None:
    """Nothing was to be read in the gap: the coordinator failed, and no later start loaded it."""
    made = Logs(tmp_path / "data", LogConfig(cleanup_policy=frozenset({"compact"})))
    made.append(batch(1, key=b"k"))
    made.log.roll(NOW)
    far = 2**31 + 5
    made.log.append_as_follower(batch(1, key=b"k", base_offset=far, leader_epoch=0), NOW)
    made.log.truncate_to(far)
    assert made.log.log_end_offset == far
    assert made.log.read(1, 100, far).next_offset == far
    partitions = OneLeader(ErrorCode.CORRUPT_MESSAGE)
    partitions.replica.log = made.log
    ports = GroupPorts("__consumer_offsets", partitions, asyncio.get_running_loop(), lambda: 0)  # type: ignore[arg-type]
    assert b"".join(ports.read_log(0)) == (made.folder / made.files("*.log")[0]).read_bytes()


async def test_work_on_a_thread_gives_its_result_or_its_error() -> None:
    partitions: Any = OneLeader(ErrorCode.NONE)
    ports = GroupPorts("__consumer_offsets", partitions, asyncio.get_running_loop(), lambda: 0)
    begins = threading.Event()

    def work() -> bytes:
        assert begins.wait(10)
        return b"section"

    async def outcome(result: Callable[[], bytes | None]) -> bytes:
        while (section := result()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return section

    result = ports.on_thread(work)
    assert result() is None
    begins.set()
    assert await outcome(result) == b"section"

    def fail() -> bytes:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE)

    with pytest.raises(KafkaError, match="CORRUPT_MESSAGE"):
        await outcome(ports.on_thread(fail))
