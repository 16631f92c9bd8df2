"""A log on a disk that loses what was not synced: whatever happens, what was promised is there and all of it is true.

TIDELOG_SEED=7 replays one history; TIDELOG_STORAGE_SEEDS=10000 runs that many. The second half plants the
classic mistakes, one at a time, and requires that the simulation catches each: a check that cannot fail checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.catching import assert_caught
from tests.simulation.divergent_history import DivergentHistory
from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.simulation.storage_history import History
from tests.unit.storage.batches import NOW, batch, idempotent, offsets_of, records_of
from tests.unit.storage.test_damage import repair
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.storage.files.checkpoints import CLEAN_SHUTDOWN_FILE, RECOVERY_POINT_FILE, OffsetCheckpoints
from tidelog.storage.log import loader
from tidelog.storage.log.checkpointed import CheckpointedOffsets
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.flush import Durability, FlushTask
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.verification import SNAPSHOT, LogFacts, StoppedLog
from tidelog.storage.producers.producer_snapshots import ProducerSnapshots
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments import examination
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.sparse_index import SparseIndex

pytestmark = pytest.mark.usefixtures("quiet")

PLANTED_SEEDS = 2000


@pytest.mark.parametrize("chosen", seeds("TIDELOG_STORAGE_SEEDS", chunk=50, fast=100, full=300))
def test_a_log_survives_what_a_bad_disk_does(chosen: range):
    for seed in chosen:
        History(seed).run()


@pytest.mark.parametrize("chosen", seeds("TIDELOG_STORAGE_SEEDS", chunk=50, fast=100, full=300))
def test_a_log_that_diverges_from_its_leaders_survives_it_too(chosen: range):
    """Of epochs that its file knows otherwise it refused batches."""
    for seed in chosen:
        DivergentHistory(seed).run()


def test_no_snapshot_of_producers_below_the_recovery_point_is_torn():
    """What a start after a kill had written was never synced: `log verify` called a healthy log damaged for good."""
    config = LogConfig(segment_bytes=400)
    for seed in range(10):
        disk, sequence = SimulatedDisk(Random(seed)), count()
        logs = LogDirectory.open(disk, "/data", node_id=1, cluster_id="cluster")
        logs.load(lambda topic: config, NOW)
        log = logs.create_log("t", 0, bytes(16), config, NOW)
        for is_at_end in (False, False, True):
            for _ in range(8):
                log.append_as_leader(idempotent(next(sequence), value=b"." * 100), 0, NOW)
            if is_at_end:
                break
            disk.end_process()
            logs = LogDirectory.open(disk, "/data", node_id=1, cluster_id="cluster")
            logs.ending = Ending.KILLED
            log = logs.load(lambda topic: config, NOW)["t", 0]
            log.flush()
            logs.write_checkpoints()
        disk.lose_power()
        facts = LogFacts(recovery_point=OffsetCheckpoints(disk, "/data").read(RECOVERY_POINT_FILE)["t", 0])
        assert SNAPSHOT not in {each.kind for each in StoppedLog(disk, "/data/t-0", facts).verify()}


def test_a_seed_does_the_same_again():
    first, second = History(42), History(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.disk.operations == second.disk.operations
    assert first.model.batches == second.model.batches


def test_the_checkpoints_that_a_start_believes_stay_over_a_loss_of_power():
    """They were renamed and not synced before a kill: an older recovery point, above a later truncation, came back."""
    for seed in range(20):
        disk = SimulatedDisk(Random(seed))

        def opened(disk: SimulatedDisk = disk) -> tuple[LogDirectory, bytes]:
            directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
            directory.load(lambda topic: LogConfig(), 0)
            return directory, disk.read_file(f"/data/{RECOVERY_POINT_FILE}")

        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
        directory.load(lambda topic: LogConfig(), 0)
        log = directory.create_log("t", 0, bytes(15) + b"\x07", LogConfig(), 0)
        log.append_as_leader(batch(3), 0, NOW)
        directory.close()
        directory, _ = opened()
        task = directory.begin_checkpoints()
        task.run()
        directory.finish_checkpoints(task)
        disk.end_process()
        _, believed = opened()
        disk.lose_power()
        assert opened()[1] == believed


@pytest.mark.parametrize("operations", range(4, 14))
def test_a_loss_of_power_in_a_clean_stop_of_many_logs_gives_no_deleted_record_back(operations: int):
    """The new file of the epochs took the name of the old one before its content was on the device: it was empty."""
    for seed in range(40):
        disk = SimulatedDisk(Random(seed))
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
        directory.load(lambda topic: LogConfig(), NOW)
        log = directory.create_log("t", 0, bytes(15) + b"\x07", LogConfig(), NOW)
        for _ in range(6):
            log.append_as_leader(batch(), 1, NOW)
        log.set_high_watermark(6)
        log.flush()
        log.delete_records(4)
        directory.write_checkpoints()
        log.append_as_leader(batch(), 2, NOW)
        directory.sync_at_once_from = 1
        disk.fail_after(operations)
        with suppress(PowerLoss):
            directory.close()
        disk.lose_power()
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
        (log,) = directory.load(lambda topic: LogConfig(), NOW).values()
        assert log.log_start_offset == 4


def test_what_is_flushed_stays_though_retention_took_out_segments_before_their_sync():
    """Their log start was not checkpointed yet: a start scanned them, and ended the log in the first that was lost."""
    config = LogConfig(retention_bytes=1, file_delete_delay_ms=0)
    for seed in range(20):
        disk = SimulatedDisk(Random(seed))
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
        directory.load(lambda topic: config, NOW)
        log = directory.create_log("t", 0, bytes(15) + b"\x07", config, NOW)
        log.flush()
        for _ in range(3):
            log.append_as_leader(batch(), 0, NOW)
            log.roll(NOW)
        log.append_as_leader(batch(), 0, NOW)
        log.set_high_watermark(4)
        list(directory.maintained(NOW, []))
        assert directory.has_condemned
        log.flush()
        disk.lose_power()
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id=None)
        (log,) = directory.load(lambda topic: config, NOW).values()
        assert log.log_end_offset == 4
        assert not log.damaged_ranges()


Plant = Callable[[pytest.MonkeyPatch], None]


def skip_the_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlushTask, "run", lambda task: None)


def sync_files_but_not_directories(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlushTask, "add_directories", lambda task, paths: None)


def acknowledge_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionLog, "committable_offset", property(lambda log: log.log_end_offset))


def leave_the_torn_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "cut", lambda segment, position: None)


def believe_an_index_of_zeros(patch: pytest.MonkeyPatch) -> None:
    write = SparseIndex._write_whole

    def keep(index: SparseIndex) -> int:
        if not index._disk.exists(index.path):
            return write(index)
        rows = index._disk.size_of(index.path) // index.row_size_bytes
        bases = index._key_base, index._value_base
        SparseIndex.__init__(index, index._disk, index.path, index._struct, *bases, rows)
        return 0

    patch.setattr(SparseIndex, "_write_whole", keep)


def scan_without_the_crc(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(examination, "is_crc_right", lambda data, header: True)


def leave_segments_behind_a_gap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader._Loader, "_remove", lambda loader, segments: None)


def keep_the_clean_marker(patch: pytest.MonkeyPatch) -> None:
    remove = SimulatedDisk.remove

    def careless(disk: SimulatedDisk, path: str) -> None:
        if not path.endswith(CLEAN_SHUTDOWN_FILE):
            remove(disk, path)

    patch.setattr(SimulatedDisk, "remove", careless)


def truncate_without_checkpointing(patch: pytest.MonkeyPatch) -> None:
    truncated = Durability.truncated

    def silent(durability: Durability, offset: int) -> bool:
        truncated(durability, offset)
        return False

    patch.setattr(Durability, "truncated", silent)


def checkpoint_the_end_of_an_open_segment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionLog, "recovery_point", property(lambda log: log.durability.recovery_point))


def delete_before_the_log_start_is_checkpointed(patch: pytest.MonkeyPatch) -> None:
    add = CheckpointedOffsets.add

    def forgetful(offsets: CheckpointedOffsets, *log: Any) -> None:
        add(offsets, *log)
        offsets.log_starts.clear()

    patch.setattr(CheckpointedOffsets, "add", forgetful)


def keep_epochs_of_a_lost_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderEpochs, "truncate_from_end", lambda epochs, offset: False)


def trust_a_snapshot_from_the_future(patch: pytest.MonkeyPatch) -> None:
    load = ProducerSnapshots.load_latest

    def trusting(snapshots: ProducerSnapshots, log_start_offset: int, log_end_offset: int) -> Any:
        return load(snapshots, log_start_offset, 1 << 62)

    patch.setattr(ProducerSnapshots, "load_latest", trusting)


def forget_sequences_on_replay(patch: pytest.MonkeyPatch) -> None:
    def blind(state: ProducerState, header: BatchHeader, marker: object) -> None:
        state.end_offset = header.next_offset

    patch.setattr(ProducerState, "replay", blind)


PLANTS = [
    (skip_the_fsync, "AcknowledgedRecordsArePresent"),
    (sync_files_but_not_directories, "AcknowledgedRecordsArePresent"),
    (acknowledge_before_the_flush, "AcknowledgedRecordsArePresent"),
    (leave_the_torn_tail, "LogIsAPrefixOfWhatWasAppended"),
    (believe_an_index_of_zeros, "IndexesAgreeWithTheLog"),
    (scan_without_the_crc, "LogIsAPrefixOfWhatWasAppended"),
    (leave_segments_behind_a_gap, "LogIsAPrefixOfWhatWasAppended"),
    # It takes longer to find than all others together.
    (keep_the_clean_marker, "AcknowledgedRecordsArePresent"),
    (delete_before_the_log_start_is_checkpointed, "LogStartIsWhereItWasPut"),
    (trust_a_snapshot_from_the_future, "ProducersAreRemembered"),
    (forget_sequences_on_replay, "ProducersAreRemembered"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "invariant"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    first_seed = 165 if plant is trust_a_snapshot_from_the_future else 0
    assert_caught(lambda seed: History(seed, {}), invariant, first_seed, PLANTED_SEEDS)


# These need several things to come together, so their histories are steered to where they do.
NO_FLUSH = {"flush_messages": INT64_MAX}
QUIET = dict.fromkeys(("begin_flush", "finish_flush", "maintain", "delete_records", "restart_cleanly"), 0)
TRANSACTIONS = {"append_transactional": 20, "end_transaction": 16, "truncate": 0, "delete_records": 0}
DEEP_PLANTS = [
    (
        truncate_without_checkpointing,
        "LogIsAPrefixOfWhatWasAppended",
        {"append": 60, "truncate": 5, "checkpoint": 6, "flush": 4, "lose_power": 3, **QUIET},
        {"segment_bytes": 1000, "retention_bytes": -1, **NO_FLUSH},
    ),
    (
        checkpoint_the_end_of_an_open_segment,
        "TransactionsAreKnown",
        {"append": 4, "checkpoint": 8, "flush": 12, "lose_power": 3, **TRANSACTIONS},
        {"segment_bytes": 1000, "index_interval_bytes": 0},
    ),
]
DEEP_FIRST_SEEDS: dict[Plant, int] = {truncate_without_checkpointing: 1494, checkpoint_the_end_of_an_open_segment: 353}


@pytest.mark.hunt
@pytest.mark.parametrize(
    ("plant", "invariant", "weights", "settings"), DEEP_PLANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_deeply_planted_bug_is_caught(
    plant: Plant, invariant: str, weights: dict[str, int], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    for seed in range(20):
        History(seed, weights, **settings).run()  # the soil itself is sound
    plant(monkeypatch)
    first_seed = DEEP_FIRST_SEEDS[plant]
    assert_caught(lambda seed: History(seed, weights, **settings), invariant, first_seed, PLANTED_SEEDS)


@pytest.mark.slow
def test_epochs_kept_of_a_lost_tail_are_caught(monkeypatch: pytest.MonkeyPatch):
    """A leader's own records take the place of such epochs, a follower's do not."""
    keep_epochs_of_a_lost_tail(monkeypatch)
    assert_caught(lambda seed: DivergentHistory(seed, {}), "LeaderEpochsAgree", 0, PLANTED_SEEDS)


def opened(disk: SimulatedDisk, config: LogConfig) -> LogDirectory:
    directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="cluster")
    directory.load(lambda topic: config, NOW)
    return directory


@pytest.mark.parametrize("seed", range(4))
def test_the_repair_of_a_missing_first_segment_stays_after_a_loss_of_power(seed: int):
    """The repair syncs the file, in which the start had put nothing, but not its name."""
    disk, config = SimulatedDisk(Random(seed)), LogConfig()
    directory = opened(disk, config)
    log = directory.create_log("t", 0, bytes(16), config, NOW)
    log.flush()
    log.append_as_leader(batch(2), 0, NOW)
    log.roll(NOW)
    log.append_as_leader(batch(), 0, NOW)
    copy = disk.read_file(log.segments[0].path)
    directory.close()
    disk.remove(log.segments[0].path)
    disk.sync_everything()
    log = opened(disk, config).logs["t", 0]
    repair(log, {0: copy})
    assert not log.damaged_ranges()
    disk.lose_power()
    assert offsets_of(records_of(opened(disk, config).logs["t", 0])) == [0, 1, 2]


def test_no_record_before_a_gap_that_the_index_cannot_hold_is_passed_over_after_a_loss_of_power():
    """A start believes that the segment before such a gap ends there."""
    far, config = 2**31 + 5, LogConfig(cleanup_policy=frozenset({"compact"}))
    ends = set[int]()
    for seed in range(30):
        disk = SimulatedDisk(Random(seed))
        log = opened(disk, config).create_log("t", 0, bytes(16), config, NOW)
        log.flush()
        log.append_as_leader(batch(3, key=b"k"), 0, NOW)
        log.append_as_follower(batch(key=b"k", base_offset=far, leader_epoch=0), NOW)
        disk.lose_power()
        log = opened(disk, config).logs["t", 0]
        ends.add(log.log_end_offset)
        first = next(iter(log.segments))
        assert log.log_end_offset < far or (first.size_bytes and not log.damaged_ranges())
    assert far + 1 in ends


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_the_repair_of_a_segment_that_was_removed_in_use_stays_after_a_loss_of_power(seed: int, number: int) -> None:
    """The file that takes its place is synced by the repair, but was made by its name long before."""
    disk, config = SimulatedDisk(Random(seed)), LogConfig()
    disk.make_directory("/data")

    def opened() -> PartitionLog:
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="cluster")
        directory.load(lambda topic: config, NOW)
        return directory.logs.get(("t", 0)) or directory.create_log("t", 0, bytes(16), config, NOW)

    log = opened()
    for _ in range(3):
        log.append_as_leader(batch(2), 0, NOW)
        log.roll(NOW)
    log.flush()
    segment = log.segments[number]
    copy = disk.read_file(segment.path)
    segment.release()
    disk.remove(segment.path)
    disk.sync_everything()
    segment.findings = segment.examine()
    log.adopt_findings(segment)
    repair(log, {segment.base_offset: copy})
    assert not log.damaged_ranges()
    disk.lose_power()
    assert disk.exists(segment.path)
    assert offsets_of(records_of(opened())) == [*range(6)]


@pytest.mark.parametrize("seed", range(8))
def test_what_follows_a_lost_end_does_not_count_as_synced(seed: int) -> None:
    """The log has lost its end, which the recovery point says was on the device. What takes its place is not there."""
    disk, config = SimulatedDisk(Random(seed)), LogConfig(segment_bytes=300)
    disk.make_directory("/data")

    def opened(ending: Ending) -> PartitionLog:
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="cluster")
        directory.ending = ending
        directory.load(lambda topic: config, NOW)
        if ("t", 0) not in directory.logs:
            directory.create_log("t", 0, bytes(16), config, NOW)
        return directory.logs["t", 0]

    log = opened(Ending.POWER_LOSS)
    for _ in range(8):
        log.append_as_leader(batch(), 0, NOW)
    log.flush()
    log.write_checkpoint()  # no other replica has them yet
    file = disk.open(log.segments.active.path)
    file.truncate(log.segments.active.size_bytes // 2)
    file.sync()
    disk.end_process()
    log = opened(Ending.KILLED)
    assert log.log_end_offset == 6
    for _ in range(10):
        log.append_as_leader(batch(), 0, NOW)
    disk.lose_power()
    log = opened(Ending.POWER_LOSS)
    assert not [each for each in log.segments if each.examine().damage]
