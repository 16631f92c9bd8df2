"""A future replica follows the present one whatever happens to that: cut, begun anew, led in other epochs."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.simulation.simulated_disk import SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, batch, idempotent
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.replication.future_replica import FutureReplica, MoveState
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.log_config import LogConfig

SMALL = LogConfig(segment_bytes=600, index_interval_bytes=100)


def content(log: PartitionLog) -> list[bytes]:
    """Every batch from the log start on."""
    found, offset = [], log.log_start_offset
    while offset < log.log_end_offset:
        result = log.read(offset, 1 << 20, log.log_end_offset)
        data = memoryview(b"".join(result.regions))
        found += [bytes(data[at : at + header.size_bytes]) for at, header in iter_headers(data)]
        offset = result.next_offset
    return found


class World:
    def __init__(self, seed: int = 1, config: LogConfig = SMALL) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(random.Random(seed))
        self.homes = [LogDirectory.open(self.disk, path, node_id=1, cluster_id="C" * 22) for path in ("/a", "/b")]
        self.present = self.homes[0].create_log("t", 0, TOPIC_ID, config, NOW)
        self.homes[1].create_future("t", 0, TOPIC_ID, config, NOW)
        self.epoch = 0
        self.partition = cast(Any, SimpleNamespace(log=self.present, topic="t", index=0))
        self.future = FutureReplica(self.partition, self.homes[1].futures["t", 0], b"a" * 16, b"b" * 16)

    def append(self, records: int = 2) -> None:
        self.present.append_as_leader(memoryview(bytearray(batch(records))), self.epoch, NOW)

    def lead(self) -> None:
        """In another epoch, after the end of the log was perhaps cut off by another leader."""
        self.present.truncate_to(self.rng.randint(self.present.high_watermark, self.present.log_end_offset))
        self.epoch += self.rng.randint(1, 2)
        self.present.assign_epoch(self.epoch)

    def commit(self) -> None:
        self.present.set_high_watermark(self.rng.randint(self.present.high_watermark, self.present.log_end_offset))

    def shorten(self) -> None:
        self.present.delete_records(self.rng.randint(self.present.log_start_offset, self.present.high_watermark))

    def begin_anew(self) -> None:
        """As after an unclean election, perhaps of a log that ends before the start of this one."""
        self.present.truncate_fully_and_start_at(self.rng.randint(0, self.present.log_end_offset + 9))
        self.epoch += 1

    def copy(self, bytes_max: int = 200) -> bool:
        self.future.align()
        batches = self.future.read_next(bytes_max)
        if batches is not None:
            self.future.append(batches, NOW)
        return batches is not None

    def finish(self) -> None:
        while self.copy():
            pass
        assert self.future.has_caught_up
        assert content(self.future.log) == content(self.present)
        assert self.future.log.log_start_offset == self.present.log_start_offset


@pytest.mark.parametrize("seed", range(60))
def test_it_ends_as_the_present_one_whatever_happened_to_that(seed: int) -> None:
    world = World(seed)
    acts = [world.append] * 8 + [world.copy] * 8 + [world.lead, world.commit, world.commit, world.shorten]
    if seed % 3 == 0:
        acts.append(world.begin_anew)
    for _ in range(80):
        world.rng.choice(acts)()
    world.finish()


def test_what_is_known_besides_the_records_comes_along() -> None:
    world = World()
    world.append()
    world.append()
    world.epoch = 4
    world.present.assign_epoch(4)
    world.append()
    world.present.set_high_watermark(5)
    world.present.delete_records(1)
    world.epoch = 7
    world.present.assign_epoch(7)
    world.present.cleaned_offset = 3
    world.finish()
    world.homes[1].promote_future("t", 0)
    world.future.take_over()
    log = world.partition.log
    assert log is world.homes[1].logs["t", 0]
    assert (log.high_watermark, log.log_start_offset, log.log_end_offset, log.cleaned_offset) == (5, 1, 6, 3)
    assert list(log.leader_epochs) == list(world.present.leader_epochs)
    assert log.leader_epochs.latest == 7
    assert log.directory == "/b/t-0"
    assert all(path.startswith("/b/t-0/") for segment in log.segments for path in segment.paths())
    log.append_as_leader(memoryview(bytearray(batch(1))), 7, NOW)
    log.roll(NOW)
    log.flush()
    world.homes[1].close()
    assert {entry.name for entry in world.disk.list_directory("/b")} >= {"t-0", ".kafka_cleanshutdown"}
    again = LogDirectory.open(world.disk, "/b", node_id=1, cluster_id=None)
    ((_, found),) = again.load(lambda topic: SMALL, NOW).items()
    assert (found.log_start_offset, found.log_end_offset) == (1, 7)


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_what_was_acknowledged_survives_a_loss_of_power_right_after_the_move(seed: int, is_flushed: bool) -> None:
    """The copy was synced before it took over, but not the new name of its directory: a start used the log of before,
    in which the last records were not.
    """
    world = World(seed, config=replace(SMALL, flush_messages=1))
    world.append()
    world.present.flush()
    world.append()
    world.finish()
    world.future.log.flush()
    world.homes[1].promote_future("t", 0)
    world.future.take_over()
    world.homes[0].delete_log("t", 0, NOW)
    log = world.partition.log
    assert log.flush_due
    if is_flushed:
        log.flush()
    acknowledged_end = log.committable_offset
    assert acknowledged_end == (4 if is_flushed else 2)
    world.disk.lose_power()
    homes = [LogDirectory.open(world.disk, path, node_id=1, cluster_id=None) for path in ("/b", "/a")]
    found = [log for home in homes for log in home.load(lambda topic: SMALL, NOW).values()]
    chosen, *_ = [*found, *homes[0].futures.values()]  # as a start does where the metadata names the second directory
    assert chosen.log_end_offset >= acknowledged_end


def test_gaps_from_while_the_topic_was_compacted_during_the_move_are_explained() -> None:
    """The copy has the settings of its beginning. The gaps behind the cleaned part counted as damage."""
    world = World()
    world.append()
    world.finish()
    compacted = replace(SMALL, cleanup_policy=frozenset({"compact"}))
    world.present.set_config(compacted)
    fetched = batch(base_offset=7, leader_epoch=0)
    world.present.append_as_follower(fetched, NOW)
    while world.copy():
        pass
    world.present.explain_gaps(world.present.log_end_offset)
    world.present.set_config(SMALL)
    world.finish()
    world.homes[1].promote_future("t", 0)
    world.future.take_over()
    assert len(content(world.partition.log)) == 2
    assert not world.partition.log.damaged_ranges()


def test_a_transaction_that_is_being_verified_begins_in_the_other_directory() -> None:
    world = World(config=replace(SMALL, verifies_transactions=True))
    world.append()
    verification = world.present.producers.begin_verification(7, 0, 0, True, NOW)
    world.finish()
    world.homes[1].promote_future("t", 0)
    world.future.take_over()
    log = world.partition.log
    log.append_as_leader(idempotent(0, transactional=True), 0, NOW, transaction=TransactionAppend(verification))
    assert log.producers.open_transaction_count == 1


def test_the_controller_is_to_believe_in_the_new_place_from_when_it_is_told() -> None:
    future = World().future
    assert future.assigned_directory_id == b"a" * 16
    for state in (MoveState.ASSIGNING, MoveState.ASSIGNED):
        future.state = state
        assert future.assigned_directory_id == b"b" * 16


def test_it_does_not_take_over_before_it_has_caught_up() -> None:
    world = World()
    world.append()
    with pytest.raises(AssertionError):
        world.future.take_over()


def test_a_future_log_is_found_again_and_can_be_discarded() -> None:
    world = World()
    world.append()
    world.copy()
    for home in world.homes:
        home.close()
    again = LogDirectory.open(world.disk, "/b", node_id=1, cluster_id=None)
    assert again.load(lambda topic: SMALL, NOW) == {}
    assert again.futures["t", 0].log_end_offset == 2
    again.discard_future("t", 0, NOW)
    assert again.futures == {}
    again.maintain(NOW + 1)
    assert not [entry for entry in world.disk.list_directory("/b") if entry.is_directory]


def test_a_copy_of_which_all_was_deleted_begins_anew_before_records_of_an_earlier_epoch() -> None:
    """An unclean election. The copy had them behind records of the later epoch: to a start after a kill, damage."""
    world = World(config=LogConfig())
    world.epoch = 9
    world.append()
    world.finish()
    world.present.set_high_watermark(2)
    world.present.delete_records(2)
    assert not world.copy()
    world.present.truncate_to(2)
    for offset in (2, 3):
        world.present.append_as_follower(batch(base_offset=offset, leader_epoch=7), NOW)
    assert world.copy()
    log = world.future.log
    assert list(log.leader_epochs) == list(world.present.leader_epochs) == [(7, 2)]
    assert (log.segments.first.base_offset, log.log_end_offset) == (2, 4)
    world.finish()


@pytest.mark.parametrize("deleted", [4, 6])
def test_a_copy_of_another_history_gets_the_records_before_its_start_too(deleted: int) -> None:
    """The present log began anew before this start, and had later records again when the copy looked."""
    world = World()
    world.epoch = 3
    for _ in range(3):
        world.append()
    world.finish()
    world.present.set_high_watermark(6)
    world.present.delete_records(deleted)
    world.finish()
    world.present.truncate_fully_and_start_at(2)
    world.epoch = 5
    for _ in range(4):
        world.append()
    world.finish()
    assert world.future.log.log_start_offset == 2


@pytest.mark.parametrize("gap", [3, 2**31 + 5])
def test_a_copy_of_a_log_that_ends_behind_a_gap_ends_there_too(gap: int) -> None:
    """There was nothing to copy in the gap: the move went on until the next record came."""
    compacted = replace(SMALL, cleanup_policy=frozenset({"compact"}))
    world = World(config=compacted)
    present = world.present
    present.append_as_leader(memoryview(bytearray(batch(2, key=b"k"))), 0, NOW)
    before = present.segments.active
    present.roll(NOW, 2 + gap)  # as in a log whose last batches Kafka's cleaner has removed, or after a truncation
    before.may_end_early = True
    present.log_end_offset = 2 + gap
    present.set_high_watermark(2 + gap)
    present.flush()
    while world.copy():
        pass
    assert world.future.has_caught_up
    world.future.log.flush()
    world.future.keep_ends()
    world.homes[1].promote_future("t", 0)
    world.future.take_over()
    log = world.partition.log
    log.append_as_leader(memoryview(bytearray(batch(2, key=b"k"))), world.epoch, NOW)
    log.flush()
    world.homes[1].write_checkpoints()
    world.disk.lose_power()
    again = LogDirectory.open(world.disk, "/b", node_id=1, cluster_id=None)
    ((_, found),) = again.load(lambda topic: compacted, NOW).items()
    assert not found.damaged_ranges()
    assert found.log_end_offset == gap + 4
    assert [
        header.record_count for each in content(found) for _, header in iter_headers(each) if header.record_count
    ] == [2, 2]
