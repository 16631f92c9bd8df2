"""The cleaner of a node: the dirtiest log first, no faster than allowed, and nothing that fails stops the rest."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.conftest import StartNode
from tests.unit.storage.batches import NOW, Logs, batch
from tests.unit.storage.cleaning import contents
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.replicas import log_cleaner
from tidelog.broker.replicas.log_cleaner import LogCleaner
from tidelog.storage.cleaner.filter import BatchFilter
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.log.compaction import Compaction, find_cleanable
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

CONFIG = LogConfig(
    segment_bytes=2000, message_timestamp_after_max_ms=INT64_MAX, cleanup_policy=frozenset({"compact"})
)  # fmt: skip


class Directories:
    """As `LogDirectories`, of one; `failures` is what it was told of."""

    def __init__(self, directory: LogDirectory) -> None:
        self.directory = directory
        self.failures: list[OSError] = []

    def __iter__(self) -> Iterator[LogDirectory]:
        return iter([] if self.failures else [self.directory])

    def failed(self, directory: LogDirectory, error: OSError) -> None:
        if not is_exhaustion(error):
            self.failures.append(error)


class Node:
    started: ClassVar[list[Node]] = []

    def __init__(self, path: Path, **settings: str) -> None:
        self.started.append(self)
        self.logs = Logs(path / "logs", CONFIG)
        self.directories = Directories(self.logs.directory)
        explicit = {"log.cleaner.backoff.ms": "1", **{key.replace("_", "."): value for key, value in settings.items()}}
        self.settings = DynamicConfig(NodeConfig(explicit))
        self.written_down = self.looked_after = 0
        self.flushable: list[PartitionLog] = []
        self.is_on_all = True
        self.cleaner: LogCleaner

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def run(work: Callable[[], None]) -> asyncio.Future[None]:
            return loop.run_in_executor(None, work)

        directories: Any = self.directories
        self.cleaner = LogCleaner(directories, self.settings, loop, lambda: NOW, run, self, lambda _: self.is_on_all)
        self.cleaner.start()

    def checkpoint(self) -> None:
        self.written_down += 1

    def look_after(self) -> None:
        self.looked_after += 1
        self.logs.directory.maintain(NOW + 1000)

    def cleaned(self, log: PartitionLog) -> None:
        self.flushable.append(log)

    def fill(self, name: str, count: int, keys: int = 3) -> Any:
        log = self.logs.log
        if name != "t":
            log = self.logs.directory.create_log(name, 0, name.encode().ljust(16, b"."), CONFIG, NOW)
            log.assign_epoch(0)
        for number in range(count):
            log.append_as_leader(batch(key=b"%d" % (number % keys)), 0, NOW)
        log.roll(NOW)
        log.set_high_watermark(log.log_end_offset)
        return log

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def close_files() -> Iterator[None]:
    """The files of every log are closed: the collector may come to them after the next tests."""
    yield
    while Node.started:
        Node.started.pop().logs.directory.fail("is no longer needed")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_every_compacted_log_is_cleaned_once(node: Node) -> None:
    logs = [node.fill("t", 50), node.fill("u", 60), node.fill("v", 3)]
    usual = sys.getswitchinterval()
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 3 and not node.cleaner.running_count)
    await asyncio.sleep(0.02)
    assert [len(contents(log)) for log in logs] == [3, 3, 3]
    totals = node.cleaner.totals
    assert (totals.cleanings, totals.messages_read, totals.messages_written) == (3, 113, 9)
    assert totals.bytes_read > 5 * totals.bytes_written > 0
    assert node.written_down == 1
    assert len(node.flushable) == 3
    assert set(node.flushable) == set(logs)
    assert node.cleaner.dirtiest_percent == 0
    assert sys.getswitchinterval() == usual
    await node.cleaner.close()


async def test_a_log_is_named_on_the_device_before_it_is_cleaned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a start takes its gaps for damage where the topic has ceased to be compacted meanwhile."""
    log, advance = node.fill("u", 50), Compaction.advance

    def named() -> str:
        return (node.logs.path / "cleaner-offset-checkpoint").read_text()

    def look(compaction: Compaction) -> bool:
        seen.append("u 0 0" in named())
        return advance(compaction)

    assert "u" not in named()
    seen: list[bool] = []
    monkeypatch.setattr(Compaction, "advance", look)
    node.start()
    await node.until(lambda: log.cleaned_offset == 50)
    assert all(seen)
    await node.cleaner.close()


async def test_a_look_that_fails_is_followed_by_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed under way for ever, and no log was cleaned any more."""
    bad, good = node.fill("t", 50), node.fill("u", 60)

    def look(log: Any, now_ms: int) -> Any:
        assert log is not bad
        return find_cleanable(log, now_ms)

    def fail(log: Any) -> None:
        raise AssertionError(log)

    monkeypatch.setattr(log_cleaner, "find_cleanable", look)
    node.start()
    node.cleaner.on_uncleanable = fail
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    assert (len(contents(good)), list(node.cleaner.uncleanable)) == (3, [bad])
    await node.cleaner.close()


async def test_many_logs_are_looked_at_in_turns_of_the_loop(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logs were looked at in one turn, and again after each cleaning: 5,000 logs held the loop for a second."""
    logs = [node.fill(f"t{number}", 4) for number in range(30)]
    turns, looked_in = 0, []

    def count_turns() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(count_turns)

    def look(log: Any, now_ms: int) -> Any:
        looked_in.append(turns)
        return find_cleanable(log, now_ms)

    monkeypatch.setattr(log_cleaner, "find_cleanable", look)
    monkeypatch.setattr(log_cleaner, "TURN_S", -1.0, raising=False)
    node.settings._typed["log.cleaner.backoff.ms"] = 60_000
    count_turns()
    node.start()
    node.cleaner._look()
    await node.until(lambda: node.cleaner.totals.cleanings == len(logs) and not node.cleaner.running_count)
    await asyncio.sleep(0.02)
    assert len(looked_in) <= 3 * len(logs)
    assert all(count <= 2 for count in Counter(looked_in).values())
    assert node.written_down == 1
    await node.cleaner.close()


async def test_little_dirt_waits(node: Node) -> None:
    log = node.fill("t", 50, keys=50)
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    for key in (b"1", b"2"):
        log.append_as_leader(batch(key=key), 0, NOW)
    log.roll(NOW)
    log.set_high_watermark(log.log_end_offset)
    await node.until(lambda: node.cleaner.dirtiest_percent > 0)
    assert 0 < node.cleaner.dirtiest_percent < 50
    assert node.cleaner.totals.cleanings == 1
    await node.cleaner.close()


async def test_no_faster_than_allowed(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"log.cleaner.io.max.bytes.per.second": "100000"})
    node.fill("t", 200)
    began = time.monotonic()
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    took = time.monotonic() - began
    moved = 2 * node.cleaner.totals.bytes_read + node.cleaner.totals.bytes_written
    assert took > 0.5 * moved / 100_000
    await node.cleaner.close()


async def test_the_rate_can_be_raised_while_it_waits(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"log.cleaner.io.max.bytes.per.second": "10"})
    node.fill("t", 200)
    node.start()
    await node.until(lambda: bool(node.cleaner._pauses))
    node.settings._typed["log.cleaner.io.max.bytes.per.second"] = 1e12
    node.cleaner._settings_changed()
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    await node.cleaner.close()


@pytest.mark.parametrize(("rate", "is_cleaned"), [("0", False), ("-1", True), ("1e-300", False)])
async def test_odd_rates_are_no_bug_of_a_log(tmp_path: Path, rate: str, is_cleaned: bool) -> None:
    node = Node(tmp_path, **{"log.cleaner.io.max.bytes.per.second": rate})
    node.fill("t", 50)
    node.start()
    await node.until(lambda: bool(node.cleaner.totals.cleanings if is_cleaned else node.cleaner._pauses))
    assert not node.cleaner.uncleanable
    await node.cleaner.close()


async def test_what_is_damaged_is_left_alone_and_the_rest_is_cleaned(node: Node) -> None:
    damaged, sound = node.fill("t", 50), node.fill("u", 50)
    path = node.logs.folder / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 1 and damaged in node.cleaner.uncleanable)
    assert "CRC" in node.cleaner.uncleanable[damaged]
    assert len(contents(sound)) == 3
    node.logs.directory.delete_log("t", 0, NOW)
    await node.until(lambda: not node.cleaner.uncleanable)
    await node.cleaner.close()


@pytest.mark.parametrize("batches", [(0,), (1, 3), (3,)])
async def test_damage_to_deleted_records_keeps_no_log_from_being_cleaned(node: Node, batches: tuple[int, ...]) -> None:
    """It is not repaired, so a log of compact,delete was not cleaned until a restart, and then not for longer."""
    log = node.fill("t", 50)
    path = node.logs.folder / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    size = len(data) // log.segments.first.next_offset
    for number in batches:
        data[size * number + 30] ^= 1
    path.write_bytes(data)
    node.start()
    await node.until(lambda: log in node.cleaner.uncleanable)
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        while not scrub.is_done:
            scrub.run(1 << 20)
        scrub.finish()
    await asyncio.sleep(0.05)
    assert log in node.cleaner.uncleanable
    log.delete_records(4)
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    assert not node.cleaner.uncleanable
    assert [offset for offset, *_ in contents(log)] == [47, 48, 49]
    await node.cleaner.close()
    log.flush()
    node.logs.directory.write_checkpoints()
    node.logs.kill()
    log = node.logs.open(machine_ran_on=True)
    assert not log.damaged_ranges()
    assert (log.log_start_offset, log.log_end_offset) == (4, 50)
    assert [offset for offset, *_ in contents(log)] == [47, 48, 49]


async def test_a_bug_in_one_cleaning_does_not_end_the_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = node.fill("t", 50), node.fill("u", 50)
    work = Compaction._note_keys

    def careless(compaction: Compaction, *arguments: Any) -> Any:
        if compaction.log is broken:
            raise ZeroDivisionError
        return work(compaction, *arguments)

    monkeypatch.setattr(Compaction, "_note_keys", careless)
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 1 and broken in node.cleaner.uncleanable)
    assert len(contents(sound)) == 3
    assert not node.directories.failures
    await node.cleaner.close()


@pytest.mark.parametrize("where", ["find_cleanable", "key_table", "Compaction"])
async def test_a_bug_at_the_choice_of_a_log_does_not_end_the_cleaner(
    node: Node, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended for good: no log of the node was cleaned any more."""
    logs = [node.fill("t", 50), node.fill("u", 60), node.fill("v", 3)]
    usual: Any = getattr(log_cleaner, where)
    calls = itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 0:
            raise ZeroDivisionError
        return usual(*arguments, **options)

    monkeypatch.setattr(log_cleaner, where, fail)
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 2)
    assert sorted(len(contents(log)) for log in logs)[:2] == [3, 3]
    assert (len(node.cleaner.uncleanable), node.directories.failures) == (1, [])
    node.cleaner.uncleanable.clear()
    await node.until(lambda: node.cleaner.totals.cleanings == 3)
    await node.cleaner.close()


async def test_retention_that_fails_after_a_cleaning_does_not_end_the_cleaner(node: Node) -> None:
    node.fill("t", 50)
    node.fill("u", 60)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    def fail() -> None:
        raise ZeroDivisionError

    node.look_after = fail  # type: ignore[method-assign]
    usual = Compaction.advance

    def advance(compaction: Compaction) -> bool:
        compaction.retention_waits = True
        return usual(compaction)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Compaction, "advance", advance)
        node.start()
        await node.until(lambda: node.cleaner.totals.cleanings == 2 and not node.cleaner.running_count)
        await node.cleaner.close()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_log_that_another_replica_replaces_is_not_cleaned_meanwhile(node: Node, is_given_up: bool) -> None:
    node.fill("t", 50)
    other = node.fill("u", 60)
    copy = PrefixCopy(other, other.segments[0], NOW)
    if is_given_up:  # it ends later, and then removes its files
        copy.give_up()
    node.start()
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    await asyncio.sleep(0.02)
    assert node.cleaner.totals.cleanings == 1
    copy.take_back()
    await node.until(lambda: node.cleaner.totals.cleanings == 2)
    await node.cleaner.close()


async def test_closing_ends_also_a_cleaning_that_meets_a_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, **{"log.cleaner.io.max.bytes.per.second": "10"})
    log = node.fill("t", 200)
    node.start()
    await node.until(lambda: bool(node.cleaner._pauses))

    def give_up(compaction: Compaction) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Compaction, "give_up", give_up)
    await asyncio.wait_for(node.cleaner.close(), PATIENCE_S)
    assert (log.compaction, node.cleaner.totals.cleanings) == (None, 0)


async def test_a_bug_in_a_cleaning_leaves_no_file_of_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    log = node.fill("t", 50)

    def cleaned() -> list[str]:
        return [name for name in os.listdir(log.directory) if name.endswith(".cleaned")]

    def careless(*_: Any) -> Any:
        assert cleaned()
        raise ZeroDivisionError

    monkeypatch.setattr(BatchFilter, "clean", careless)
    node.start()
    await node.until(lambda: log in node.cleaner.uncleanable)
    assert "ZeroDivisionError" in node.cleaner.uncleanable[log]
    assert not cleaned()
    await node.cleaner.close()


async def test_a_device_that_refuses_takes_its_directory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.fill("t", 50)

    def refuse(path: str) -> None:
        raise OSError(5, "no")

    monkeypatch.setattr(type(node.logs.disk), "sync_file", lambda disk, path: refuse(path))
    node.start()
    await node.until(lambda: bool(node.directories.failures))
    await node.cleaner.close()
    assert node.cleaner.running_count == 0


async def test_what_broke_off_is_not_begun_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, **{"log.cleaner.backoff.ms": "100"})
    node.fill("t", 50)
    refusals: list[Compaction] = []
    looks_s: list[float] = []
    look = LogCleaner._look

    def watched(cleaner: LogCleaner) -> None:
        looks_s.append(time.monotonic())  # not when the thread begins, which may be later on a busy machine
        look(cleaner)

    def refuse(compaction: Compaction, *_: Any) -> Any:
        refusals.append(compaction)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(LogCleaner, "_look", watched)
    monkeypatch.setattr(Compaction, "_note_keys", refuse)
    node.start()
    await node.until(lambda: len(refusals) >= 3)
    assert all(later - before > 0.09 for before, later in itertools.pairwise(looks_s))
    monkeypatch.undo()
    await node.until(lambda: node.cleaner.totals.cleanings == 1)
    await node.cleaner.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 8, 15])
async def test_closing_in_the_middle_leaves_a_whole_log(tmp_path: Path, turns: int) -> None:
    node = Node(tmp_path)
    node.fill("t", 300, keys=7)
    node.start()
    await node.until(lambda: bool(node.cleaner.running_count or node.cleaner.totals.cleanings))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    await node.cleaner.close()
    log = node.logs.close_and_open()
    newest = {key: value for _, key, value in contents(log)}
    assert len(newest) == 7
    assert [name for name in node.logs.files("*") if name.endswith((".cleaned", ".swap"))] == []


@pytest.mark.parametrize("then", ["all replicas are in sync", "the longest absence is over"])
async def test_tombstones_wait_for_a_replica_that_is_not_in_sync(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.is_on_all = False
    log = node.logs.log
    log.set_config(replace(CONFIG, delete_retention_ms=0))

    async def clean_again() -> None:
        cleanings = node.cleaner.totals.cleanings
        node.fill("t", 50)
        await node.until(lambda: node.cleaner.totals.cleanings > cleanings and not node.cleaner.running_count)

    def has_tombstone() -> bool:
        return (b"deleted", None) in [(key, value) for _, key, value in contents(log)]

    log.append_as_leader(batch(key=b"deleted", value=None), 0, NOW)
    node.start()
    for _ in range(3):
        await clean_again()
        assert has_tombstone()
    if then == "all replicas are in sync":
        node.is_on_all = True
    else:
        monkeypatch.setattr(log_cleaner, "ABSENCE_MS_MAX", 0)
    await clean_again()
    assert not has_tombstone()
    await node.cleaner.close()


async def test_a_broker_of_which_no_controller_hears_knows_of_no_replica_in_sync(start_node: StartNode) -> None:
    """Its metadata named an ISR of before, and tombstones went that a replica outside of it had not copied yet."""
    running = await start_node()
    await (await running.connect()).create_topic("t")
    broker: Any = running.node._broker
    log = broker.partitions.find("t", 0).log
    assert broker.cleaner._is_on_all_replicas(log)
    broker.lifecycle._session_start_s -= 3600
    assert not broker.cleaner._is_on_all_replicas(log)


@pytest.mark.slow
async def test_retention_waits_for_the_end_of_a_cleaning(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"log.cleaner.io.max.bytes.per.second": "20000"})
    log = node.fill("t", 200)
    log.set_config(replace(CONFIG, cleanup_policy=frozenset({"compact", "delete"}), retention_bytes=0))
    node.start()
    await node.until(lambda: node.cleaner.running_count == 1)
    before = log.segment_count
    node.logs.directory.maintain(NOW)
    assert log.segment_count == before > 3
    await node.until(lambda: node.looked_after == 1)
    assert log.segment_count == 1
    assert log.log_start_offset == 200
    await node.cleaner.close()


async def test_nothing_is_cleaned_where_it_is_switched_off(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"log.cleaner.enable": "false"})
    node.fill("t", 50)
    node.start()
    await asyncio.sleep(0.05)
    assert node.cleaner.totals.cleanings == 0
    await node.cleaner.close()
