"""A log with many segments is emptied: few syncs, and a loss of power at any point leaves a log without a gap."""

from __future__ import annotations

import logging
from random import Random

import pytest

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, batch, offsets_of, records_of
from tidelog.storage.files.checkpoints import PARTITION_METADATA_FILE
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig

PATH = "/data"
CONFIG = LogConfig(file_delete_delay_ms=0)
SEGMENTS = 8
FIRST = 10
END = FIRST + SEGMENTS


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


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
            found.append_as_leader(batch(timestamp=NOW), 9, NOW)
        else:
            raise AssertionError("it has no end")
    assert (FIRST, END) in outcomes
    assert len(outcomes) > 2


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
