"""Random work on real threads in one log directory, then a kill and a new start: a hunt for races.

Flushes, checkpoints, scrubs, cleanings and removals run on threads, as in a node, and are slow now and then. The
owner's thread appends, reads, cuts, deletes and makes logs anew meanwhile. TIDELOG_THREAD_SEEDS=1000 does that many. A
seed gives the same steps again, and not the same turns of the threads.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.doses import seeds
from tests.patience import PATIENCE_S
from tests.unit.storage.batches import NOW, TOPIC_ID, QuickDisk, batch, records_of
from tests.unit.storage.cleaning import begin
from tidelog.storage.files.disk import Buffer
from tidelog.storage.log.compaction import Compaction
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.segment import CLEANED_SUFFIX

STEPS = 1500
THREADS = 8
TASKS_MAX = 12
PARTITIONS = 4
KEYS = 9
SLOW_S_MAX = 0.004
PLAIN = LogConfig(segment_bytes=2000, file_delete_delay_ms=0, retention_bytes=20_000)
COMPACTED = LogConfig(
    segment_bytes=2000, file_delete_delay_ms=0, cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0
)

Records = list[tuple[int, bytes, bytes]]
"""(offset, key, value)."""


class Broken(Exception):
    """A law does not hold."""


def topic_of(partition: int) -> str:
    return "compacted" if partition % 2 else "plain"


def config_of(topic: str) -> LogConfig:
    return COMPACTED if topic == "compacted" else PLAIN


class SlowDisk(QuickDisk):
    """Its threads sleep now and then before or after they make or rename a file; the owner does not."""

    __slots__ = ("owner", "rng")

    def __init__(self, seed: int) -> None:
        self.owner = threading.current_thread()
        self.rng = Random(seed)

    def _rest(self, path: str) -> None:
        is_rare = path.endswith(CLEANED_SUFFIX)
        if threading.current_thread() is not self.owner and (is_rare or self.rng.random() < 0.5):
            time.sleep(self.rng.random() * (2 * SLOW_S_MAX if is_rare else SLOW_S_MAX))

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        self._rest(path)
        super().write_file(path, data, sync=sync)
        self._rest(path)

    def rename(self, source: str, target: str) -> None:
        self._rest(source)
        super().rename(source, target)


class ThreadHistory:
    def __init__(self, path: Path, seed: int) -> None:
        self.rng = Random(seed)
        self.disk = SlowDisk(seed)
        self.path = path
        self.now_ms = NOW
        self.steps: list[str] = []
        self.epochs = [0] * PARTITIONS
        self.appended: list[Records] = [[] for _ in range(PARTITIONS)]
        self.pool = ThreadPoolExecutor(THREADS)
        self.running: list[tuple[Future[None], Callable[[], object]]] = []
        self.cleaned: dict[str, Compaction] = {}
        """Directory -> the cleaning that began there. The next one waits for its end, even if that log is gone."""
        self.checkpoints = self.removals = 0
        self.directory = LogDirectory.open(self.disk, str(path), node_id=1, cluster_id="c")
        self.directory.load(config_of, NOW)
        for partition in range(PARTITIONS):
            self.create(partition)
        self.actions = (
            (self.append, 30), (self.begin_epoch, 4), (self.flush, 12), (self.checkpoint, 5), (self.clean, 12),
            (self.delete_records, 3), (self.recreate, 4), (self.truncate, 2), (self.scrub, 4), (self.maintain, 5),
            (self.read, 4), (self.move, 2),
        )  # fmt: skip

    def run(self) -> None:
        actions, weights = zip(*self.actions)
        try:
            for action in self.rng.choices(actions, weights, k=STEPS):
                self.steps.append(action.__name__)
                self.now_ms += 1
                self.settle()
                self.wait_for(TASKS_MAX - 1)
                action(self.rng.randrange(PARTITIONS))
            self.wait_for(0)
            for log in self.directory.logs.values():
                self.nothing_is_left_behind((".cleaned", ".swap", ".tmp"), log.directory)
            self.start_after_a_kill()
        except Exception as error:
            error.add_note(f"after: {'; '.join(self.steps[-30:])}")
            raise
        finally:
            self.pool.shutdown()
            if self.directory.failure is None:
                self.directory.fail("it is over")

    def start(self, work: Callable[[], object], finish: Callable[[], object]) -> None:
        self.running.append((self.pool.submit(lambda: (work(), None)[1]), finish))

    def wait_for(self, count: int) -> None:
        """Wait until no more tasks than these are left."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.running) > count:
            if time.monotonic() > deadline_s:
                raise Broken(f"EveryTaskEnds: {len(self.running)} have not")
            time.sleep(0.001)
            self.settle()

    def settle(self) -> None:
        done = [each for each in self.running if each[0].done()]
        self.running = [each for each in self.running if not each[0].done() and each not in done]
        for future, finish in done:
            future.result()
            finish()

    def log(self, partition: int) -> PartitionLog:
        return self.directory.logs[topic_of(partition), partition]

    # What the owner does

    def create(self, partition: int) -> None:
        log = self.directory.create_log(
            topic_of(partition), partition, TOPIC_ID, config_of(topic_of(partition)), self.now_ms
        )
        log.assign_epoch(self.epochs[partition])
        self.appended[partition] = []

    def append(self, partition: int, log: PartitionLog | None = None) -> None:
        log = log or self.log(partition)
        for _ in range(self.rng.randint(1, 15)):
            key, value = b"%d" % self.rng.randrange(KEYS), self.rng.randbytes(40)
            data = batch(key=key, value=value, timestamp=self.now_ms)
            info = log.append_as_leader(data, self.epochs[partition], self.now_ms)
            self.appended[partition].append((info.first_offset, key, value))
        log.set_high_watermark(log.log_end_offset)

    def begin_epoch(self, partition: int) -> None:
        self.epochs[partition] += 1
        self.log(partition).assign_epoch(self.epochs[partition])

    def delete_records(self, partition: int) -> None:
        log = self.log(partition)
        if not log.config.is_compacted:
            log.delete_records(self.rng.randint(log.log_start_offset, log.log_end_offset))

    def recreate(self, partition: int) -> None:
        """Most likely during a cleaning, which lasts longest."""
        cleaned = [each for each in range(PARTITIONS) if self.log(each).directory in self.cleaned]
        partition = self.rng.choice([*cleaned, partition])
        self.directory.delete_log(topic_of(partition), partition, self.now_ms)
        self.epochs[partition] += 1
        self.create(partition)

    def truncate(self, partition: int) -> None:
        log = self.log(partition)
        offset = self.rng.randint(max(log.log_start_offset, log.log_end_offset - 20), log.log_end_offset)
        log.truncate_to(offset)
        self.appended[partition] = [each for each in self.appended[partition] if each[0] < log.log_end_offset]
        self.epochs[partition] += 1

    def read(self, partition: int) -> None:
        self.holds(partition, self.log(partition))

    def move(self, partition: int) -> None:
        """A log goes, as to another directory, and a future log comes back; or one is begun and given up."""
        topic = topic_of(partition)
        if topic != "plain":
            return
        if self.rng.random() < 0.5:
            self.directory.create_future(topic, partition, TOPIC_ID, PLAIN, self.now_ms)
            self.directory.futures[topic, partition].assign_epoch(self.epochs[partition])
            self.directory.discard_future(topic, partition, self.now_ms)
            return
        self.directory.delete_log(topic, partition, self.now_ms)
        self.directory.create_future(topic, partition, TOPIC_ID, PLAIN, self.now_ms)
        future = self.directory.futures[topic, partition]
        future.assign_epoch(self.epochs[partition])
        self.appended[partition] = []
        self.append(partition, future)
        self.directory.promote_future(topic, partition)

    # What runs on threads

    def flush(self, partition: int) -> None:
        log = self.log(partition)
        if not log.durability.is_running:
            task = log.begin_flush()
            self.start(task.run, lambda: log.finish_flush(task))

    def checkpoint(self, partition: int) -> None:
        if self.checkpoints:
            return
        self.checkpoints += 1
        task = self.directory.begin_checkpoints()

        def finish() -> None:
            self.checkpoints -= 1
            self.directory.finish_checkpoints(task)

        self.start(task.run, finish)

    def maintain(self, partition: int) -> None:
        if self.removals:
            return
        self.removals += 1
        doomed: list[str] = []
        list(self.directory.maintained(self.now_ms, doomed))

        def remove() -> None:
            for path in doomed:
                self.disk.remove_tree(path) if Path(path).is_dir() else self.disk.remove(path)

        def finish() -> None:
            self.removals -= 1

        self.start(remove, finish)

    def scrub(self, partition: int) -> None:
        log = self.log(partition)
        scrub = Scrub(log, self.rng.choice(list(log.segments)))

        def finish() -> None:
            if log.failure is not None:
                scrub.abandon()
            elif scrub.finish():
                raise Broken(f"NoDamage: a scrub finds {scrub.segment.damage}")

        self.start(lambda: scrub.run(1 << 30), finish)

    def clean(self, partition: int) -> None:
        log = self.log(partition)
        if not log.config.is_compacted or log.directory in self.cleaned or len(log.segments) < 2:
            return
        directory, compaction = log.directory, begin(log, self.now_ms)
        self.cleaned[directory] = compaction

        def finish() -> None:
            if compaction.advance():
                self.start(compaction.run, finish)
            else:
                del self.cleaned[directory]
                self.nothing_is_left_behind((".cleaned", ".swap"), directory)

        self.start(compaction.run, finish)

    # The laws

    def holds(self, partition: int, log: PartitionLog) -> None:
        """Every record is there that was appended, or for compaction the newest of its key, and no other."""
        appended = {each[0]: each for each in self.appended[partition]}
        found = [(record.offset, record.key, record.value) for record in records_of(log)]
        strange = [each for each in found if appended.get(each[0]) != each]
        if strange:
            raise Broken(f"NothingIsInvented: {log} has {strange[0]}, not {appended.get(strange[0][0])}")
        wanted = [each for each in self.appended[partition] if each[0] >= log.log_start_offset]
        if log.config.is_compacted:
            wanted = list({key: (offset, key, value) for offset, key, value in wanted}.values())
        present = {each[0] for each in found}
        lost = [each for each in wanted if each[0] not in present]
        if lost:
            raise Broken(f"NothingIsLost: {log} lacks {lost[0]}")

    def nothing_is_left_behind(self, suffixes: tuple[str, ...], directory: str) -> None:
        left = [path.name for path in Path(directory).iterdir() if path.suffix in suffixes]
        if left:
            raise Broken(f"NothingIsLeftBehind: {directory} has {left}")

    def start_after_a_kill(self) -> None:
        before = {key: (log.log_end_offset, list(log.leader_epochs)) for key, log in self.directory.logs.items()}
        starts = {key: log.log_start_offset for key, log in self.directory.logs.items()}
        self.directory._lock.release()
        self.directory = LogDirectory.open(self.disk, str(self.path), node_id=1, cluster_id="c")
        self.directory.ending = Ending.KILLED
        logs = self.directory.load(config_of, self.now_ms)
        if self.directory.offline or logs.keys() != before.keys():
            raise Broken(f"EveryLogOpens: {self.directory.offline}, {list(logs)}")
        for (_, partition), log in logs.items():
            log.set_high_watermark(log.log_end_offset)
            end_offset, epochs = before[topic_of(partition), partition]
            if log.log_end_offset != end_offset:
                raise Broken(f"NothingIsLost: {log} ended at {end_offset}")
            if log.log_start_offset > starts[topic_of(partition), partition]:
                raise Broken(f"TheStartDoesNotRun: {log} began at {starts['t', partition]}")
            # A cleaning may have removed the first records of an epoch. The log start may have gone back.
            strange = {each for each in log.leader_epochs if each[1] > starts[topic_of(partition), partition]}
            strange -= set(epochs)
            if strange and not log.config.is_compacted:
                raise Broken(f"TheEpochsAreItsOwn: {log} has {strange}, not {epochs}")
            if log.damaged_ranges():
                raise Broken(f"NoDamage: {log} has {log.damaged_ranges()}")
            self.holds(partition, log)


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    sys.setswitchinterval(interval_s)


def run_all(path: Path, chosen: range) -> None:
    for seed in chosen:
        ThreadHistory(path / str(seed), seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", seeds("TIDELOG_THREAD_SEEDS", chunk=1, fast=2, full=4))
def test_threads_and_the_owner_leave_every_record(tmp_path: Path, chosen: range):
    run_all(tmp_path, chosen)
