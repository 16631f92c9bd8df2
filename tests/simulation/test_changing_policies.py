"""A compacted log whose topic ceases to be compacted, and is again, under crashes: gaps are no damage, and no hole is.

Compaction leaves gaps. A start must not take them for damage, nor for the torn end of a log, also after a loss of power
that takes the file which explains them. And what explains gaps must not hide the records that a loss of power takes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.compaction_history import CompactionHistory
from tests.simulation.simulated_disk import SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch
from tests.unit.storage.cleaning import clean, contents
from tidelog.broker.replicas.hosting import _set_config
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.files import checkpoints
from tidelog.storage.files.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    EXPLAINED_GAPS_FILE,
    RECOVERY_POINT_FILE,
    CheckpointTask,
    OffsetCheckpoints,
)
from tidelog.storage.log import explained_gaps
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

pytestmark = pytest.mark.usefixtures("quiet")

CHUNK = 25
COMPACTED = LogConfig(
    segment_bytes=1000, cleanup_policy=frozenset({"compact"}), message_timestamp_after_max_ms=INT64_MAX
)  # fmt: skip
DELETED = replace(COMPACTED, cleanup_policy=frozenset({"delete"}))


def write_as_a_node_does(directory: LogDirectory, now_ms: int = NOW) -> None:
    """The checkpoints that are put in place are synced only where something waits for that."""
    task = directory.begin_checkpoints()
    task.run()
    if directory.finish_checkpoints(task):
        task.sync()
        directory.finish_synced_checkpoints(task, now_ms)


class PolicyHistory(CompactionHistory):
    """`CompactionHistory`, with changes of the topic's cleanup.policy."""

    step_count = 70

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.actions.append((self.change_policy, 5))

    def open(self) -> None:
        self.epoch += 1
        if self.rng.random() < 0.2:  # while the node was down
            self.draw_policy()
        super().open()

    def draw_policy(self) -> None:
        policy = frozenset(self.rng.choice(({"compact"}, {"delete"}, {"compact", "delete"})))
        self.config = replace(self.config, cleanup_policy=policy)

    def checkpoint(self) -> None:
        write_as_a_node_does(self.directory, self.now_ms)

    def change_policy(self) -> None:
        self.draw_policy()
        self.reconfigure()

    def clean_a_little(self) -> None:
        if self.compaction is not None or self.log.config.is_compacted:
            if self.compaction is None:
                self.directory.enter_in_cleaner_checkpoint(self.log)  # as the node's cleaner does
            super().clean_a_little()


@pytest.mark.parametrize("chosen", seeds("TIDELOG_COMPACTION_SEEDS", chunk=CHUNK, fast=CHUNK, full=5 * CHUNK))
def test_a_log_is_whole_whatever_its_policy_becomes(chosen: range):
    for seed in chosen:
        PolicyHistory(seed).run()


def compacted(tmp_path: Path) -> Logs:
    """A log that lacks offsets 0 and 1, and a topic that ceases to be compacted."""
    logs = Logs(tmp_path / "logs", COMPACTED)
    for _ in range(3):
        logs.append(batch(key=b"a"))
    logs.log.roll(NOW)
    clean(logs.log)
    logs.append(batch(key=b"b"))
    logs.directory.write_checkpoints()
    _set_config(logs.log, DELETED, logs.directory, set())
    logs.config = DELETED
    return logs


def test_what_explains_the_gaps_may_be_lost(tmp_path: Path):
    """The next checkpoint did not name the log any more: the records counted as torn, or as damaged for good."""
    logs = compacted(tmp_path)
    logs.directory.write_checkpoints()
    (logs.folder / EXPLAINED_GAPS_FILE).write_bytes(b"")  # a loss of power: it was not synced
    for _ in range(2):
        log = logs.kill_and_open()
        assert [offset for offset, _, _ in contents(log)] == [2, 3]
        assert not log.damaged_ranges()
        logs.directory.write_checkpoints()
        assert not logs.directory._cleaned  # the start has written the file anew, and synced it


@pytest.mark.parametrize("changes", ["while the node runs", "while it is down"])
def test_a_log_is_named_on_the_device_before_it_has_gaps(tmp_path: Path, changes: str):
    """Where a topic was compacted for a few seconds, no checkpoint named its log. Records that had been flushed were
    cut off with all behind them, or counted as damaged for good.
    """
    logs = Logs(tmp_path / "logs", DELETED)
    for _ in range(3):
        logs.append(batch(key=b"a"))
    logs.log.roll(NOW)
    logs.directory.write_checkpoints()
    _set_config(logs.log, COMPACTED, logs.directory, set())
    task = logs.directory.begin_checkpoints()
    task.run()
    unsynced = (logs.path / CLEANER_OFFSET_FILE).read_bytes()
    logs.directory.finish_checkpoints(task)
    (logs.path / CLEANER_OFFSET_FILE).write_bytes(unsynced)  # so a loss of power may leave it
    logs.directory.enter_in_cleaner_checkpoint(logs.log)
    clean(logs.log)
    logs.append(batch(key=b"b"))
    logs.log.flush()
    if changes == "while the node runs":
        _set_config(logs.log, DELETED, logs.directory, set())
        (logs.folder / EXPLAINED_GAPS_FILE).write_bytes(b"")  # a loss of power: it was not synced
    log = logs.kill_and_open()
    assert [offset for offset, _, _ in contents(log)] == [2, 3]
    assert not log.damaged_ranges()


def test_a_clean_stop_has_the_file_on_the_device(tmp_path: Path):
    logs = compacted(tmp_path)
    log = logs.close_and_open()
    assert (log.gaps_explained_below, logs.directory._cleaned) == (4, {})
    assert [offset for offset, _, _ in contents(log)] == [2, 3]


def compact_and_cease_on_a_full_volume(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is compacted again, its log is cleaned, and there is no space to explain the new gaps."""
    _set_config(logs.log, COMPACTED, logs.directory, set())
    logs.log.roll(NOW)
    for _ in range(8):
        logs.append(batch(key=b"a", value=b"." * 300))
    logs.log.roll(NOW)
    clean(logs.log)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(explained_gaps, "replace_file", refuse)
        _set_config(logs.log, DELETED, logs.directory, set())


def test_a_clean_stop_after_a_full_volume_keeps_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file of before was taken for the one that there was no space for: later gaps counted as damage."""
    logs = compacted(tmp_path)
    logs.log.flush()
    compact_and_cease_on_a_full_volume(logs, monkeypatch)
    log = logs.close_and_open()
    assert [offset for offset, _, _ in contents(log)] == [3, 11]
    assert not log.damaged_ranges()


def test_what_there_was_no_space_for_explains_no_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file of an earlier change, which a flush had put on the device, was taken for that of the last one."""
    logs = compacted(tmp_path)
    compact_and_cease_on_a_full_volume(logs, monkeypatch)
    logs.log.flush()
    logs.directory.write_checkpoints()
    log = logs.kill_and_open()
    assert [offset for offset, _, _ in contents(log)] == [3, 11]
    assert not log.damaged_ranges()


def test_a_log_that_moves_is_named_in_its_new_directory_before_it_takes_over(tmp_path: Path):
    """The next checkpoint named it, so that a loss of power before that could end it at a gap."""
    logs = Logs(tmp_path / "logs", COMPACTED)
    directory = logs.directory
    directory.create_future("moved", 0, TOPIC_ID, COMPACTED, NOW)
    future = directory.futures["moved", 0]
    future.append_as_follower(batch(key=b"a", base_offset=0, leader_epoch=0), NOW, may_have_gaps=True)
    future.append_as_follower(batch(key=b"b", base_offset=5, leader_epoch=0), NOW, may_have_gaps=True)
    future.flush()
    directory.promote_future("moved", 0)
    logs.config = DELETED
    logs.kill_and_open()
    log = logs.directory.logs["moved", 0]
    assert [offset for offset, _, _ in contents(log)] == [0, 5]
    assert not log.damaged_ranges()


@pytest.mark.parametrize("machine_ran_on", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_new_copy_is_named_before_it_has_gaps(tmp_path: Path, is_checkpointed: bool, machine_ran_on: bool):
    """The first checkpoint named it, after seconds. Until then a node that was killed or lost power, and came back when
    the topic was not compacted any more, took the gaps for damage, or cut off what had been flushed.
    """
    logs = Logs(tmp_path / "logs", COMPACTED)
    log = logs.directory.create_log("copied", 0, TOPIC_ID, COMPACTED, NOW)
    for base_offset in (7, 8, 15):
        log.append_as_follower(batch(key=b"a", base_offset=base_offset, leader_epoch=0), NOW)
        if is_checkpointed:
            write_as_a_node_does(logs.directory)
    log.flush()
    logs.config = DELETED
    for _ in range(2):
        logs.kill()
        logs.open(machine_ran_on=machine_ran_on)
        log = logs.directory.logs["copied", 0]
        assert [offset for offset, _, _ in contents(log)] == [7, 8, 15]
        assert not log.damaged_ranges()
        assert not logs.directory.shortened_logs


def test_the_checkpoints_of_a_copy_are_not_written_for_each_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = Logs(tmp_path / "logs", COMPACTED)
    log = logs.directory.create_log("copied", 0, TOPIC_ID, COMPACTED, NOW)
    written: list[object] = []
    write = OffsetCheckpoints.write

    def noted(*words: Any) -> None:
        written.append(words)
        write(*words)

    monkeypatch.setattr(OffsetCheckpoints, "write", noted)
    task = None
    for base_offset in range(0, 100, 10):
        log.append_as_follower(batch(key=b"a", base_offset=base_offset, leader_epoch=0), NOW)
        if task is not None:
            task.run()
            logs.directory.finish_checkpoints(task)
        task = logs.directory.begin_checkpoints()
    assert len(written) == 1


def test_a_loss_of_power_leaves_no_hole_in_a_segment_that_was_cut_after_its_cleaning(tmp_path: Path):
    """Its end counted as cleaned, though records were appended behind the cut: those in the next segment stayed."""
    logs = Logs(tmp_path / "logs", COMPACTED)
    for number in range(4):
        logs.append(batch(key=b"%d" % number))
    logs.log.roll(NOW)
    clean(logs.log)
    logs.directory.write_checkpoints()
    logs.log.high_watermark = 2
    logs.log.truncate_to(2)
    logs.log.flush()
    logs.directory.write_checkpoints()
    cut_at = (logs.folder / f"{0:020d}.log").stat().st_size
    logs.append(batch(key=b"a"), batch(key=b"b"))
    logs.log.roll(NOW)
    logs.append(batch(key=b"c"))
    first = logs.folder / f"{0:020d}.log"
    first.write_bytes(first.read_bytes()[:cut_at])  # a loss of power: what was behind was not synced
    log = logs.kill_and_open()
    assert (log.log_end_offset, [offset for offset, _, _ in contents(log)]) == (2, [0, 1])


def test_what_explains_gaps_explains_no_loss(tmp_path: Path):
    """A segment that had lost its end counted as cleaned: the records behind it stayed, without those before them."""
    logs = Logs(tmp_path / "logs", DELETED)
    logs.append(batch(), batch())
    logs.log.roll(NOW)
    logs.append(batch())
    logs.log.explain_gaps(3)
    first = logs.folder / f"{0:020d}.log"
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])  # a loss of power: neither was synced
    logs.kill()
    logs.directory = logs._open()
    assert logs.directory.ending is Ending.POWER_LOSS
    log = logs.directory.load(lambda topic: DELETED, NOW)["t", 0]
    assert log.log_end_offset == 1


PATH = "/data"


def directory_cleaned_by_kafka(disk: SimulatedDisk) -> LogDirectory:
    """All is on the device, but nothing says so: the recovery point is 0. Two segments end early."""

    def opened(config: LogConfig) -> LogDirectory:
        directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id=None)
        directory.load(lambda topic: config, NOW)
        return directory

    directory = opened(COMPACTED)
    log = directory.create_log("t", 0, TOPIC_ID, COMPACTED, NOW)
    for offset in range(0, 60, 3):
        fetched = batch(key=b"%d" % offset, value=b"." * 100, base_offset=offset, leader_epoch=0)
        log.append_as_follower(fetched, NOW)
    log.set_high_watermark(log.log_end_offset)
    paths = [segment.path for segment in log.segments]
    assert len(paths) > 3
    directory.close()
    for path in paths[1:3]:
        data = disk.read_file(path)
        *_, (last, _) = iter_headers(data)
        disk.write_file(path, data[:last], sync=True)
    disk.write_file(f"{PATH}/{CLEANER_OFFSET_FILE}", b"0\n1\nt 0 58\n", sync=True)
    disk.write_file(f"{PATH}/{RECOVERY_POINT_FILE}", b"0\n1\nt 0 0\n", sync=True)
    disk.remove(f"{PATH}/{CLEAN_SHUTDOWN_FILE}")
    disk.sync_everything()
    disk.end_process()
    return opened(COMPACTED)


def periodic(directory: LogDirectory) -> None:
    write_as_a_node_does(directory)


def of_another_log(directory: LogDirectory) -> None:
    """It is to be cleaned, and the checkpoint does not name it yet."""
    directory.enter_in_cleaner_checkpoint(directory.create_log("t", 1, TOPIC_ID, COMPACTED, NOW))


def before_a_truncation(directory: LogDirectory) -> None:
    directory.write_checkpoints()


def survives(checkpoint: Callable[[LogDirectory], None], seed: int) -> bool:
    """Whether the flushed records are there after a loss of power behind the first checkpoint without the log."""
    disk = SimulatedDisk(Random(seed))
    directory = directory_cleaned_by_kafka(disk)
    log = directory.logs["t", 0]
    expected = contents(log)
    _set_config(log, DELETED, directory, set())
    log.flush()
    checkpoint(directory)
    disk.lose_power()
    directory = LogDirectory.open(disk, PATH, node_id=1, cluster_id=None)
    log = directory.load(lambda topic: DELETED, NOW)["t", 0]
    return not log.damaged_ranges() and contents(log) == expected


@pytest.mark.parametrize("checkpoint", [periodic, of_another_log, before_a_truncation])
def test_a_log_leaves_the_cleaners_checkpoint_when_its_recovery_point_is_on_the_device(
    checkpoint: Callable[[LogDirectory], None],
):
    """A loss of power kept the rename of that checkpoint without that of the recovery points: what was flushed was cut
    off at the first segment that ends early.
    """
    assert all(survives(checkpoint, seed) for seed in range(40))


def test_it_is_seen_where_one_does_not_wait_for_the_other(monkeypatch: pytest.MonkeyPatch):
    def finish(of: OffsetCheckpoints, task: CheckpointTask) -> bool:
        for name in task.files:
            task.put_in_place(name)
        return False

    monkeypatch.setattr(checkpoints.OffsetCheckpoints, "finish", finish)
    assert not all(survives(periodic, seed) for seed in range(40))
