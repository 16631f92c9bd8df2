"""Replicas of one partition through elections, deletions and restarts: what was promised is in each that joins the ISR.

TIDELOG_SEED=7 replays one history; TIDELOG_REPLICA_SEEDS=10000 runs that many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.catching import assert_caught
from tests.simulation.replica_compaction import CompactedReplicas
from tests.simulation.replica_emptied import EmptiedReplicas
from tests.simulation.replica_history import ReplicaHistory
from tests.simulation.replica_places import PlacesOfReplicas
from tidelog.broker.replicas.discovered_logs import DiscoveredLogs
from tidelog.broker.replicas.hosting import Hosting
from tidelog.protocol.batches.control_batches import ControlRecordType
from tidelog.protocol.batches.record_batch import BatchHeader
from tidelog.replication import future_replica, partition
from tidelog.replication.partition import Partition
from tidelog.storage.cleaner.choice import CleanableRange, cleanable_range
from tidelog.storage.cleaner.transactions import CleanedTransactions
from tidelog.storage.log import compaction, loader
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.producer_state import CompletedTransaction, EndMarker, ProducerState
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.segment import Segment

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED_SEEDS = 2000


@pytest.fixture(autouse=True)
def quiet():
    """Errors reach the history, and nothing else."""
    logger = logging.getLogger("tidelog")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    yield
    logger.setLevel(level)
    logger.propagate = propagates


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=5, full=50))
def test_each_member_of_the_isr_has_what_was_promised(chosen: range):
    for seed in chosen:
        ReplicaHistory(seed).run()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=0, full=10))
def test_two_and_four_replicas_have_it_too(chosen: range, count: int):
    for seed in chosen:
        ReplicaHistory(seed, count=count).run()


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=5, full=50))
def test_replicas_that_move_and_have_transactions_have_it_too(chosen: range):
    for seed in chosen:
        PlacesOfReplicas(seed).run()


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=5, full=50))
def test_replicas_that_are_cleaned_keep_the_newest_of_each_key(chosen: range):
    for seed in chosen:
        CompactedReplicas(seed).run()


@pytest.mark.parametrize("chosen", seeds("TIDELOG_REPLICA_SEEDS", chunk=5, fast=5, full=20))
def test_replicas_that_missed_a_deletion_have_what_was_promised(chosen: range):
    for seed in chosen:
        EmptiedReplicas(seed).run()


@pytest.mark.parametrize("kind", [ReplicaHistory, PlacesOfReplicas, CompactedReplicas, EmptiedReplicas])
def test_a_seed_does_the_same_again(kind: type[ReplicaHistory]):
    first, second = kind(42), kind(42)
    first.run()
    second.run()
    assert first.steps == second.steps
    assert first.cluster.requests == second.cluster.requests


def go_on_without_an_epoch(patch: pytest.MonkeyPatch) -> None:
    """The broker's own mistake once."""
    patch.setattr(Partition, "beginning", lambda partition: None)


def forget_aborted_transactions(patch: pytest.MonkeyPatch) -> None:
    """At a start, where no scan makes the index anew."""
    open_segment = loader._Loader._open_segment

    def forgetful(self: loader._Loader, base_offset: int, size_bytes: int, *, has_transaction_index: bool) -> Segment:
        return open_segment(self, base_offset, size_bytes, has_transaction_index=False)

    patch.setattr(loader._Loader, "_open_segment", forgetful)
    patch.setattr(loader._Loader, "_read_transaction_sums", lambda self: None)


def read_what_is_ended_but_not_replicated(patch: pytest.MonkeyPatch) -> None:
    accept_marker = ProducerState.accept_marker

    def hasty(state: ProducerState, marker: EndMarker) -> CompletedTransaction | None:
        completed = accept_marker(state, marker)
        if completed is not None:
            del state.unreplicated[completed.first_offset]
        return completed

    patch.setattr(ProducerState, "accept_marker", hasty)


def start_with_a_copy_that_is_behind(patch: pytest.MonkeyPatch) -> None:
    """The controller knew its directory, and the process ended before it had caught up again."""
    claim = DiscoveredLogs.claim

    def trusting(logs: DiscoveredLogs, key: tuple[str, int], topic_id: bytes, directory_id: bytes, **kept: bool) -> Any:
        if any(key in home.futures and home.directory_id == directory_id for home in logs._directories.homes):
            return None
        return claim(logs, key, topic_id, directory_id, **kept)

    patch.setattr(DiscoveredLogs, "claim", trusting)


def clean_open_transactions(patch: pytest.MonkeyPatch) -> None:
    def hasty(segments: Any, first_dirty: int, stable: int, config: LogConfig, now_ms: int) -> CleanableRange:
        return cleanable_range(segments, first_dirty, INT64_MAX, config, now_ms)

    patch.setattr(compaction, "cleanable_range", hasty)


def drop_needed_markers(patch: pytest.MonkeyPatch) -> None:
    """A marker goes though batches of its transaction are left."""
    on_control = CleanedTransactions.on_control

    def careless(self: CleanedTransactions, header: BatchHeader, kind: ControlRecordType | None) -> Any:
        on_control(self, header, kind)
        return True, None

    patch.setattr(CleanedTransactions, "on_control", careless)


def keep_what_a_cut_has_left(patch: pytest.MonkeyPatch) -> None:
    """A cleaned copy is cut by an unclean election, and goes on from there."""
    for module in (partition, future_replica):
        patch.setattr(module, "truncate_copy", PartitionLog.truncate_to)


def remove_what_another_replica_lacks(patch: pytest.MonkeyPatch) -> None:
    """Tombstones go after `delete.retention.ms`, also while a replica is away."""
    patch.setattr(Hosting, "is_on_all_replicas", lambda hosting, log: True)


PLANTS: list[tuple[Plant, str, type[ReplicaHistory]]] = [
    (go_on_without_an_epoch, "PromisedRecordsArePresent", EmptiedReplicas),
    (forget_aborted_transactions, "CommittedRecordsAreRead", PlacesOfReplicas),
    (read_what_is_ended_but_not_replicated, "OnlyStableRecordsAreRead", PlacesOfReplicas),
    (start_with_a_copy_that_is_behind, "PromisedRecordsArePresent", PlacesOfReplicas),
    (clean_open_transactions, "ReadsGoOn", CompactedReplicas),
    (drop_needed_markers, "CommittedRecordsAreRead", CompactedReplicas),
    (keep_what_a_cut_has_left, "PromisedRecordsArePresent", CompactedReplicas),
    (remove_what_another_replica_lacks, "DeletedKeysStayDeleted", CompactedReplicas),
]
FIRST_SEEDS: dict[Plant, int] = {
    clean_open_transactions: 52,
    drop_needed_markers: 55,
    keep_what_a_cut_has_left: 140,
    remove_what_another_replica_lacks: 104,
}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "invariant", "kind"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_mistake_is_caught(
    plant: Plant, invariant: str, kind: type[ReplicaHistory], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    assert_caught(kind, invariant, FIRST_SEEDS.get(plant, 0), PLANTED_SEEDS)
