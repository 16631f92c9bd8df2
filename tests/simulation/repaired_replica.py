"""One replica of a partition with a process around its log: the broker's own repairs, scrubs and cleanings, no network.

Each process has a loop of its own, which ends with it. The disk outlives the process. `repaired_history` decides what
happens when, and gives the answers of the other replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import ManualLoop
from tidelog.broker.replicas.repairs import Repairs
from tidelog.protocol.batches.record_batch import CorruptRecord
from tidelog.replication.truncation import truncate_copy
from tidelog.storage.cleaner.keys import BYTES_PER_KEY, PlainKeyTable
from tidelog.storage.log.compaction import CleaningFailed, Compaction, find_cleanable
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.scrub import Scrub, check_small_files
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import ColdRead, ReadResult

TOPIC = "t"
PATH = "/data/logs"
TOPIC_ID = bytes(15) + b"\x07"
TURNS_MAX = 5000
Ask = Callable[[int, int, int, bool], Awaitable[Any]]


class Warnings(logging.Handler):
    """Notes that the range alone was repaired, because no replica gave its log: a deleted key may be back then."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.has_mixed_cleanings = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_mixed_cleanings = self.has_mixed_cleanings or "may be back" in record.getMessage()


class HostedPartition:
    """As much of a `Partition` as the repairs use."""

    topic, index, topic_id, offline = TOPIC, 0, TOPIC_ID, False

    def __init__(self, replica: Replica, log: PartitionLog) -> None:
        self._replica, self.log = replica, log
        self.watch = Mock()

    @property
    def leads(self) -> bool:
        return self._replica.leads

    @property
    def leader_epoch(self) -> int:
        return self._replica.leader_epoch

    @property
    def high_watermark(self) -> int:
        return self.log.high_watermark


class ProcessLoop(ManualLoop):
    """It ends with the power of its disk."""

    def __init__(self, disk: SimulatedDisk, now_ms: int) -> None:
        super().__init__()
        self.disk, self.now_s = disk, now_ms / 1000
        self.tasks: list[asyncio.Task[Any]] = []

    def create_task(self, work: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        task = super().create_task(work, name=name)
        self.tasks = [each for each in self.tasks if not each.done()]
        self.tasks.append(task)
        return task

    def settle(self) -> None:
        for _ in range(TURNS_MAX):
            if not self._ready or self.disk.is_off:
                return
            self.turn()
        raise Broken("RepairsComeToRest: they go on and on")

    def bury(self) -> None:
        """The process is gone: what it has under way does nothing more."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):
                cast(Any, task.get_coro()).close()


class Replica:
    """`lowest_cut`: to where the log is still to be truncated, because another one leads; None if it is not."""

    log: PartitionLog
    directory: LogDirectory
    repairs: Repairs

    def __init__(self, number: int, rng: Random, ask: Ask, assignment: Callable[[], Any]) -> None:
        self.id = number
        self.rng = rng
        self.disk = SimulatedDisk(rng)
        self.loop = ProcessLoop(self.disk, 0)
        self.leads = False
        self.leader_epoch = 0
        self.lowest_cut: int | None = None
        self.starts = 0
        self.is_up = False
        self.compaction: Compaction | None = None
        self.scrub: Scrub | None = None
        self.refused: list[Exception] = []
        self._ask, self._assignment = ask, assignment

    # ------------------------------------------------------------------------------------------------------ the process

    def start(self, config: LogConfig, now_ms: int, *, machine_ran_on: bool) -> None:
        """Raises PowerLoss where the disk is struck."""
        self.directory = LogDirectory.open(self.disk, PATH, node_id=self.id, cluster_id=None)
        if machine_ran_on and not self.directory.was_clean:
            self.directory.ending = Ending.KILLED
        logs = self.directory.load(lambda topic: config, now_ms)
        if self.directory.offline:
            raise Broken(f"EveryLogOpens: replica {self.id}: {self.directory.offline}")
        found = logs.get((TOPIC, 0))
        if found is None:
            if self.starts:
                raise Broken(f"EveryLogOpens: replica {self.id} has lost its log")
            found = self.directory.create_log(TOPIC, 0, TOPIC_ID, config, now_ms)
            found.flush()
        self.log = found
        self.starts += 1
        self.loop = loop = ProcessLoop(self.disk, now_ms)
        partition: Any = HostedPartition(self, found)
        self.partition = partition
        partitions: Any = SimpleNamespace(
            find=lambda topic, index: partition,
            refusal=lambda partition, error: self.refused.append(error),
            reported_values_changed=lambda partition: None,
        )
        unused: Any = None
        repairs: Any = Repairs(
            self.id, partitions, unused, unused, unused, cast(asyncio.AbstractEventLoop, loop), loop.run_awaited
        )
        repairs._damaged_leaders = Mock(may_resign=lambda partition, damage: False)
        repairs.assignment_of = lambda partition: self._assignment()
        repairs.process_of = lambda partition, source: self._assignment().processes[source]
        repairs.ask = self._ask_another
        self.repairs = repairs
        self.is_up = True

    async def _ask_another(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> Any:
        return await self._ask(source, offset, bytes_max, up_to_log_end)

    def bury(self) -> None:
        """The process is gone: what it has under way does nothing more."""
        self.disk._is_off = True
        self.is_up = False
        self.compaction = self.scrub = None
        self.loop.bury()

    def close(self) -> None:
        """A clean stop."""
        self.end_cleaning()
        if self.scrub is not None:
            self.scrub.abandon()
            self.scrub = None
        closing = self.loop.create_task(self.repairs.close())
        for _ in range(TURNS_MAX):
            if closing.done():
                break
            self.loop.turn()
            self.require_power()
        else:
            raise Broken(f"RepairsEnd: replica {self.id}")
        self.directory.close()
        self.is_up = False

    def require_power(self) -> None:
        """What runs on the loop has its losses of power there."""
        if self.disk.is_off:
            raise PowerLoss

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if not self.loop.turn():
                break
            self.require_power()
        self.require_power()
        self.require_no_refusal()

    def pass_time(self, duration_ms: int) -> None:
        self.loop.run_for(duration_ms)
        self.run(TURNS_MAX)

    def require_no_refusal(self) -> None:
        for error in self.refused:
            raise Broken(f"NoAttemptFails: replica {self.id}: {error!r}") from error

    # ----------------------------------------------------------------------------------------------- what a node does

    def read(self, offset: int, max_bytes: int, bound: int) -> tuple[bytes, ReadResult]:
        """Raises KafkaError, DamagedRecords."""
        while True:
            try:
                result = self.log.read(offset, max_bytes, bound)
                return b"".join(bytes(each) for each in result.regions), result
            except ColdRead as cold:
                cold.warm()

    def committed_bound(self, offset: int) -> int:
        """As `Partition.read` for a reader of committed records."""
        log = self.log
        return stable_bound(log, offset) if log.hidden_ends else log.last_stable_offset

    def look_at_damage(self) -> None:
        if self.log.damaged_ranges():
            self.repairs.look_at(cast(Any, self.partition))

    def clean_a_little(self, now_ms: int, removes_until_ms: int) -> None:
        """Raises CleaningFailed, CorruptIndex."""
        log = self.log
        if self.compaction is None:
            if not log.may_be_cleaned or log.compaction is not None or log.failure is not None:
                return
            chosen = find_cleanable(log, now_ms)
            if not chosen.cleanable_bytes:
                return
            memory_bytes = BYTES_PER_KEY * self.rng.choice((2, 10, 1000))
            self.compaction = Compaction(
                log, chosen, lambda: PlainKeyTable(memory_bytes, 1.0), now_ms,
                piece_bytes=self.rng.choice((61, 200, 10_000)), removes_until_ms=removes_until_ms,
            )  # fmt: skip
            log.is_under_cleaning = True
        for _ in range(self.rng.choice((1, 2, 5, 20, 1000))):
            if not self._goes_on():
                return

    def _goes_on(self) -> bool:
        compaction = self.compaction
        assert compaction is not None
        try:
            compaction.run()
            if compaction.advance():
                return True
        except CleaningFailed:
            self.compaction, self.log.is_under_cleaning = None, False
            raise
        self.compaction, self.log.is_under_cleaning = None, False
        self.directory.write_checkpoints()
        return False

    def end_cleaning(self) -> None:
        """One that was given up ends with its piece, in the next call."""
        if self.compaction is not None:
            self.compaction.give_up()
            with suppress(CleaningFailed):
                self._goes_on()
            self.compaction, self.log.is_under_cleaning = None, False

    def scrub_a_little(self) -> None:
        log = self.log
        if self.scrub is None:
            segments = [each for each in log.segments if each.size_bytes or each is not log.segments.active]
            if not segments:
                return
            self.scrub = Scrub(log, self.rng.choice(segments))
        self.scrub.run(self.rng.choice((1, 5000, 1 << 20)))
        if self.scrub.is_done:
            scrub, self.scrub = self.scrub, None
            if scrub.finish():
                self.look_at_damage()

    def scrub_all(self) -> None:
        log = self.log
        if self.scrub is not None:
            self.scrub.abandon()
            self.scrub = None
        log.segments.release(keep_active=True)
        for _ in check_small_files(log):
            pass
        for segment in list(log.segments):
            if not (segment.size_bytes or segment is not log.segments.active):
                continue
            scrub = Scrub(log, segment)
            while not scrub.is_done:
                scrub.run(1 << 20)
            scrub.finish()
        self.look_at_damage()

    def take(self, data: bytes, now_ms: int) -> None:
        """As a follower takes an answer of its leader, which may begin in a batch."""
        log, base_offset = self.log, int.from_bytes(data[:8], "big")
        if base_offset < log.log_end_offset != log.log_start_offset:
            if base_offset >= max(log.high_watermark, log.log_start_offset):
                log.truncate_to(base_offset)
                return
            raise CorruptRecord(f"a batch of offset {base_offset}, which is committed here: {log}")
        if base_offset < log.log_end_offset:
            log.truncate_fully_and_start_at(base_offset)
        log.append_as_follower(memoryview(bytearray(data)), now_ms, epoch_max=self.leader_epoch)

    def truncate_if_due(self) -> None:
        """Raises DamagedRecords."""
        if self.lowest_cut is not None and self.lowest_cut < self.log.log_end_offset:
            truncate_copy(self.log, self.lowest_cut)
        self.lowest_cut = None
