"""A log with many segments is emptied: few syncs, and a crash leaves no gap and no prefix."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from random import Random

import pytest

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, batch, offsets_of, records_of
from tests.unit.storage.cleaning import clean, contents
from tidelog.storage.files.checkpoints import PARTITION_METADATA_FILE
from tidelog.storage.log import tidying
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig

pytestmark = pytest.mark.usefixtures("quiet")

PATH = "/data"
CONFIG = LogConfig(file_delete_delay_ms=0)
COMPACTED = LogConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=400)
SEGMENTS = 8
FIRST = 10
END = FIRST + SEGMENTS
OPERATIONS_MAX = 200


def opened(disk: SimulatedDisk) -> LogDirectory:
    directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id="cluster")
    directory.load(lambda topic: CONFIG, NOW)
    return directory


def fill(log: PartitionLog, count: int) -> None:
    """One batch in each of so many segments, all on the device."""
    for number in range(count):
        if number:
            log.roll(NOW)
        log.assign_epoch(number // 3)
        log.append_as_leader(batch(timestamp=NOW), number // 3, NOW)
    log.flush()


def log_with_segments(disk: SimulatedDisk, count: int, high_watermark: int) -> PartitionLog:
    """`fill`, from offset 10 on."""
    directory = opened(disk)
    log = directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
    log.truncate_fully_and_start_at(FIRST)
    fill(log, count)
    log.set_high_watermark(high_watermark)
    directory.write_checkpoints()
    return log


@pytest.mark.slow
@pytest.mark.parametrize("start", [FIRST - 5, FIRST + 6, END + 100])
@pytest.mark.parametrize("high_watermark", [FIRST + 3, END])
def test_a_loss_of_power_while_a_log_is_emptied_leaves_no_gap(start: int, high_watermark: int) -> None:
    outcomes = set()
    for seed in range(2):
        for operations in range(1, 1000):
            disk = SimulatedDisk(Random(seed))
            log = log_with_segments(disk, SEGMENTS, high_watermark)
            disk.fail_after(operations)
            try:
                log.truncate_fully_and_start_at(start)
            except PowerLoss:
                pass
            else:
                break
            disk.lose_power()
            directory = opened(disk)
            assert not directory.offline
            found = directory.logs["t", 0]
            begin, end = found.log_start_offset, found.log_end_offset
            outcomes.add((begin, end))
            assert not found.damaged_ranges()
            assert offsets_of(records_of(found)) == list(range(begin, end))
            assert end in (begin, END)  # none of it, or all of its end
            found.append_as_leader(batch(timestamp=NOW), 9, NOW)
        else:
            raise AssertionError("it has no end")
    assert (FIRST, END) in outcomes
    assert any(begin == end for begin, end in outcomes)


@pytest.mark.parametrize("action", ["empty", "truncate"])
def test_a_kill_while_a_log_loses_committed_records_is_no_loss_to_report(action: str) -> None:
    """The leader has lost them. This start missed them, and the broker did not speak for any of its logs."""
    for operations in range(1, 1000):
        disk = SimulatedDisk(Random(1))
        log = log_with_segments(disk, SEGMENTS, END)
        disk.fail_after(operations)
        try:
            if action == "empty":
                log.truncate_fully_and_start_at(FIRST + 6)
            else:
                log.truncate_to(FIRST + 2)
            is_over = True
        except PowerLoss:
            is_over = False
        disk.end_process()
        directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id="cluster")
        directory.ending = Ending.KILLED
        found = directory.load(lambda topic: CONFIG, NOW)["t", 0]
        assert not directory.shortened_logs, operations
        assert not found.damaged_ranges()
        if is_over:
            return
    raise AssertionError("it has no end")


def metadata_log(disk: SimulatedDisk) -> PartitionLog:
    directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id="cluster")
    return directory.open_metadata_log(CONFIG, NOW)


def test_a_loss_of_power_while_a_metadata_log_without_its_topic_id_is_emptied_leaves_no_gap() -> None:
    """No checkpoint has its start, so its segments may not go in any order."""
    for operations in range(1, 1000):
        disk = SimulatedDisk(Random(operations))
        log = metadata_log(disk)
        fill(log, SEGMENTS)
        disk.remove(f"{log.directory}/{PARTITION_METADATA_FILE}")
        disk.sync_everything()
        disk.end_process()
        log = metadata_log(disk)
        log.set_high_watermark(SEGMENTS)
        disk.fail_after(operations)
        try:
            log.truncate_fully_and_start_at(END)
        except PowerLoss:
            pass
        else:
            break
        disk.lose_power()
        found = metadata_log(disk)
        assert not found.damaged_ranges()
        assert offsets_of(records_of(found)) == list(range(found.log_start_offset, found.log_end_offset))
    else:
        raise AssertionError("it has no end")


def test_emptying_a_log_with_hundreds_of_segments_waits_for_few_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each segment, on the loop: 400 took 2.9 s."""
    syncs: list[str] = []
    disk = SimulatedDisk(Random(1))
    log = log_with_segments(disk, 400, FIRST + 398)
    sync_directory = SimulatedDisk.sync_directory

    def count(disk: SimulatedDisk, path: str) -> None:
        syncs.append(path)
        sync_directory(disk, path)

    monkeypatch.setattr(SimulatedDisk, "sync_directory", count)
    log.truncate_fully_and_start_at(1000)
    assert len(syncs) < 20
    assert [segment.base_offset for segment in log.segments] == [1000]
    log.segments.remove_doomed(NOW)
    assert len([entry for entry in disk.list_directory(f"{PATH}/t-0") if entry.name.endswith(".log")]) == 1


def opened_compacted(disk: SimulatedDisk, *, machine_ran_on: bool = False) -> LogDirectory:
    directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id="cluster")
    if machine_ran_on:
        directory.ending = Ending.KILLED
    directory.load(lambda topic: COMPACTED, NOW)
    return directory


def log_of(directory: LogDirectory) -> PartitionLog:
    log = directory.logs["t", 0]
    assert not log.damaged_ranges()
    log.set_high_watermark(log.log_end_offset)
    return log


def cleaned(disk: SimulatedDisk) -> LogDirectory:
    """Of the keys a to f, a and b come first and were superseded: the cleaner has removed them."""
    directory = opened_compacted(disk)
    log = directory.create_log("t", 0, TOPIC_ID, COMPACTED, NOW)
    log.flush()
    for keys in (b"abcde", b"ab", b"f"):
        for key in keys:
            log.append_as_leader(batch(key=bytes((key,)), value=b"." * 100), 0, NOW)
        log.roll(NOW)
    log.set_high_watermark(log.log_end_offset)
    clean(log)
    log.append_as_leader(batch(key=b"g"), 0, NOW)
    log.set_high_watermark(log.log_end_offset)
    log.flush()
    directory.write_checkpoints()
    assert len(log.segments) > 2
    return directory


@pytest.mark.parametrize("crash", ["kill", "loss of power"])
def test_a_crash_leaves_the_whole_log_or_none_of_it(crash: str) -> None:
    """A prefix lacked what later records had superseded: a follower went on behind it, and never got them."""
    is_over, operations = False, 0
    while not is_over:
        operations += 1
        assert operations < OPERATIONS_MAX
        disk = SimulatedDisk(Random(operations))
        log = log_of(cleaned(disk))
        before = contents(log)
        disk.clock_ms = count(1).__next__  # what is written after the mark is newer
        disk.fail_after(operations)
        try:
            log.truncate_fully_and_start_at(0)
            is_over = True
        except PowerLoss:
            pass
        end(disk, crash)
        for again in range(1, 4):  # the start may end in the middle, too
            disk.fail_after(again * 3)
            with suppress(PowerLoss):
                opened_compacted(disk, machine_ran_on=crash == "kill")
            end(disk, crash)
        log = log_of(opened_compacted(disk, machine_ran_on=crash == "kill"))
        assert contents(log) in ([] if is_over else before, []), operations
    assert operations > 20


def killed_with_a_mark(
    seed: int, operations: int = 1
) -> tuple[SimulatedDisk, list[tuple[int, bytes | None, bytes | None]], int]:
    """A process was killed when it had just made the mark: the disk, what was in the log, and after how many operations
    of the emptying this is.
    """
    for number in range(operations, OPERATIONS_MAX):
        disk = SimulatedDisk(Random(seed))
        log = log_of(cleaned(disk))
        before = contents(log)
        disk.fail_after(number)
        with suppress(PowerLoss):
            log.truncate_fully_and_start_at(0)
        disk.end_process()
        if disk.exists(f"{PATH}/t-0/{tidying.EMPTYING_FILE}"):
            return disk, before, number
    raise AssertionError("there is no mark")


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_of_power_in_the_start_after_a_kill_leaves_the_whole_log_or_none_of_it(seed: int) -> None:
    """The mark was not on the device yet when the start removed the first segments: the last ones could stay."""
    _, _, made_after = killed_with_a_mark(seed)
    is_over, operations = False, 0
    while not is_over:
        operations += 1
        disk, before, _ = killed_with_a_mark(seed, made_after)
        disk.fail_after(operations)
        with suppress(PowerLoss):
            opened_compacted(disk, machine_ran_on=True)
            is_over = True
        disk.lose_power()
        assert contents(log_of(opened_compacted(disk))) in (before, []), operations
    assert operations > 20


def end(disk: SimulatedDisk, crash: str) -> None:
    if crash == "kill":
        disk.end_process()
    else:
        disk.lose_power()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_to_the_emptied_log_stays(seed: int) -> None:
    disk = SimulatedDisk(Random(seed))
    directory = cleaned(disk)
    log = log_of(directory)
    log.truncate_fully_and_start_at(0)
    log.append_as_leader(batch(key=b"a"), 1, NOW)
    log.set_high_watermark(1)
    log.flush()
    disk.lose_power()
    assert [key for _, key, _ in contents(log_of(opened_compacted(disk)))] == [b"a"]


@pytest.mark.parametrize("use", ["append", "lead", "follow"])
def test_a_mark_that_another_broker_has_passed_over_removes_nothing(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka, or an earlier version, opens what is left of the log, serves it, and perhaps goes on behind it."""
    passed_over = 0
    for operations in range(1, OPERATIONS_MAX):
        disk = SimulatedDisk(Random(operations))
        log = log_of(cleaned(disk))
        disk.fail_after(operations)
        try:
            log.truncate_fully_and_start_at(0)
            break
        except PowerLoss:
            pass
        disk.end_process()
        passed_over += disk.exists(f"{PATH}/t-0/{tidying.EMPTYING_FILE}")
        disk.clock_ms = lambda: 1000
        with monkeypatch.context() as patch:
            patch.setattr(tidying, "_finish_emptying", lambda disk, directory, names: None)
            directory = opened_compacted(disk, machine_ran_on=True)
            log = log_of(directory)
            if use != "follow":
                log.assign_epoch(2)
            if use == "append":
                log.append_as_leader(batch(key=b"h"), 2, NOW)
                log.set_high_watermark(log.log_end_offset)
                log.flush()
            written = contents(log)
            directory.close()
        assert contents(log_of(opened_compacted(disk))) == written, operations
        assert not disk.exists(f"{PATH}/t-0/{tidying.EMPTYING_FILE}")
    assert passed_over > 5
