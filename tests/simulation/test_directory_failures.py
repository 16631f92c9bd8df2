"""Histories of clusters whose nodes have two log directories each: they break and are mended, replicas move.

What is acknowledged has been synced, so that it does not matter how many break at once: nothing of it is lost, others
lead the partitions of a broken directory where there are others, and all is in sync again when all is mended.
TIDELOG_SEED=7 replays one; TIDELOG_DIRECTORY_SEEDS says how many.
"""

from __future__ import annotations

import errno
from random import Random
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.cluster import Layout
from tests.simulation.cluster_faults import DIRECTORY_WEIGHTS, MOVING_WEIGHTS
from tests.simulation.cluster_history import ClusterHistory
from tests.simulation.stage import Stage, stage
from tidelog.broker.replicas import replica_moves
from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
from tidelog.client.admin.client import Admin
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.controller.decisions import activation
from tidelog.replication.controller.metadata.image import METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import (
    DIRECTORIES_VERSION,
    LATEST_METADATA_VERSION,
    LOWEST_METADATA_VERSION,
)


def history(seed: int, **options: Any) -> ClusterHistory:
    rng = Random(seed * 65537 + 5)
    config = {
        "log.segment.bytes": str(rng.choice((1 << 30, 1 << 20))),
        "default.replication.factor": "3",
        "min.insync.replicas": "2",
        "offsets.topic.replication.factor": "3",
        "log.flush.interval.messages": "1",
    }
    layout = Layout((1, 2, 3), (1, 2, 3, 4), config, log_dirs=("/data", "/more"))
    return ClusterHistory(
        seed, layout=layout, syncs=True, weights=MOVING_WEIGHTS if seed % 2 else DIRECTORY_WEIGHTS, **options
    )


@pytest.mark.parametrize("chosen", seeds("TIDELOG_DIRECTORY_SEEDS", chunk=2, fast=2, full=4))
def test_nothing_acknowledged_is_lost_with_a_directory(chosen: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas move between the directories meanwhile, slowly enough for something to happen on the way."""
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 500)
    monkeypatch.setattr(replica_moves, "IDLE_S", 0.2)
    for seed in chosen:
        history(seed).run()


# Step by step


TWO = ("/more", "/third")


def begin(play: Stage) -> str:
    """t is led by broker 1, which is given a record; the directory that it lies in there, not that of the metadata."""
    play.up(tuple(play.brokers))
    assert play.send(b"first") == 0
    home = str(play.replica(1).log.directory.rpartition("/")[0])
    assert play.leader == 1
    return home


def broker_epochs(play: Stage) -> dict[int, int]:
    controller: Any = play.node(9).node
    return {broker.node_id: broker.epoch for broker in controller._metadata.image.brokers.values()}


def test_another_leads_at_once_and_the_broker_serves_the_rest(quiet: None) -> None:
    with stage(log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        play.node(1).host.disk.break_directory(home, errno.EIO)
        play.node(1).disk_was_bad = True
        assert play.refused(b"not taken") == ErrorCode.KAFKA_STORAGE_ERROR
        play.until("another leads", lambda: play.leader in (2, 3), 1)
        assert play.isr == [2, 3]
        assert play.send(b"second") == 1
        assert play.node(1).ready
        assert play.cluster.placed("t").leader_epoch == 1
        play.node(1).host.disk.broken.clear()
        play.node(1).kill()
        play.node(1).start()
        play.until("all are back", play.cluster.all_in_sync, 60)
        assert play.values(1) == [b"first", b"second"]


@pytest.mark.parametrize("level", [LOWEST_METADATA_VERSION, DIRECTORIES_VERSION - 1])
def test_a_failure_counts_after_an_upgrade(level: int, quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The brokers registered when there was no place for their directories in the metadata."""
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: level})
    with stage(log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        epochs = broker_epochs(play)

        async def upgrade(admin: Admin) -> None:
            await admin.update_features({METADATA_VERSION: LATEST_METADATA_VERSION})

        play.admin(upgrade)
        play.wait(2)
        play.node(1).host.disk.break_directory(home, errno.EIO)
        play.node(1).disk_was_bad = True
        play.refused(b"not taken")
        play.until("another leads", lambda: play.leader in (2, 3), 1)
        assert play.send(b"second") == 1
        assert broker_epochs(play) == epochs


def test_a_failure_counts_before_the_controller_knows_the_directory(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker reports the directory of a replica until the controller has it. It stopped when the directory failed,
    and the replica led for good what it could not serve.
    """
    honest, is_lost = DirectoryAssignments._send, True

    async def send(self: DirectoryAssignments, sent: Any) -> bool:
        return False if is_lost else await honest(self, sent)

    monkeypatch.setattr(DirectoryAssignments, "_send", send)
    with stage(log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        play.wait(2)
        play.node(1).host.disk.break_directory(home, errno.EIO)
        play.node(1).disk_was_bad = True
        play.refused(b"not taken")
        play.wait(2)
        assert play.leader == 1
        is_lost = False
        play.until("another leads", lambda: play.leader in (2, 3), 20)
        assert play.send(b"second") == 1


def test_a_replica_from_before_an_upgrade_may_be_in_a_directory_that_is_offline(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker was down when the metadata got a place for directories. It began the replica anew, and led with it."""
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: DIRECTORIES_VERSION - 1})
    with stage((1, 2), log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        node = play.node(1)
        play.node(2).kill()
        play.until("2 has left", lambda: play.isr == [1])
        assert play.send(b"second") == 1
        node.kill()
        node.disk_was_bad = True
        play.node(2).start()
        play.until("2 is up", lambda: play.node(2).ready)

        async def upgrade(admin: Admin) -> None:
            await admin.update_features({METADATA_VERSION: LATEST_METADATA_VERSION})

        play.wait(12)
        play.admin(upgrade)
        node.host.disk.break_directory(home, errno.EIO)
        node.start()
        play.until("1 is up", lambda: node.ready)
        play.wait(5)
        node.host.disk.broken.clear()
        node.kill()
        node.start()
        play.until("all are back", play.cluster.all_in_sync, 60)
        assert play.values(2) == [b"first", b"second"]


@pytest.mark.parametrize("level", [LOWEST_METADATA_VERSION, DIRECTORIES_VERSION - 1])
def test_the_broker_ends_where_the_metadata_have_no_directories(
    level: int, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on, and led for good what it could not serve."""
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: level})
    with stage(log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        play.node(1).host.disk.break_directory(home, errno.EIO)
        play.node(1).disk_was_bad = True
        play.refused(b"not taken")
        play.until("it has ended", lambda: not play.node(1).running, 5)
        play.until("another leads", lambda: play.leader in (2, 3))
        assert play.send(b"second") == 1


def test_nor_does_it_start_there_without_a_directory(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began the replicas in it anew elsewhere, and led with nothing."""
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: DIRECTORIES_VERSION - 1})
    with stage((1,), log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        node = play.node(1)
        node.kill()
        node.disk_was_bad = True
        node.host.disk.break_directory(home, errno.EIO)
        node.start()
        play.until("it has ended", lambda: not node.running)
        node.host.disk.broken.clear()
        node.start()
        play.until("it leads", lambda: play.leader == 1 and node.ready)
        assert play.values(1) == [b"first"]


@pytest.mark.parametrize("level", [LOWEST_METADATA_VERSION, DIRECTORIES_VERSION - 1])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_directories_of_replicas_are_known_after_an_upgrade(
    level: int, restarts: bool, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a start with another disk in the place of the present one takes them for new ones, and begins empty logs."""
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: level})
    with stage() as play:
        begin(play)

        async def upgrade(admin: Admin) -> None:
            await admin.update_features({METADATA_VERSION: LATEST_METADATA_VERSION})

        if restarts:
            play.node(2).stop()
            play.until("2 has stopped", lambda: not play.node(2).running, 30)
        play.admin(upgrade)
        play.node(2).start()
        play.until("all are in sync", play.cluster.all_in_sync, 60)
        play.wait(2)
        controller: Any = play.node(9).node
        brokers = controller._metadata.image.brokers
        placed = play.cluster.placed("t")
        assert list(placed.directories) == [brokers[broker_id].log_dirs[0] for broker_id in placed.replicas]


def test_who_cannot_tell_the_controller_ends(quiet: None) -> None:
    with stage(log_dirs=TWO, metadata_log_dir="/data", log_dir_failure_timeout_ms="10000") as play:
        home = begin(play)
        node = play.node(1)
        play.cluster.network.isolate("n1", ["n2", "n3", "n9"])
        node.host.disk.break_directory(home, errno.EIO)
        node.disk_was_bad = True
        play.refused(b"not taken")
        play.until("it has ended", lambda: not node.running, 30)


def test_the_only_in_sync_replica_comes_back_with_its_directory(quiet: None) -> None:
    """Nobody else may lead meanwhile: nothing that was acknowledged is forgotten."""
    with stage((1, 2), log_dirs=TWO, metadata_log_dir="/data") as play:
        home = begin(play)
        play.node(2).kill()
        play.until("2 has left", lambda: play.isr == [1])
        assert play.send(b"second") == 1
        disk = play.node(1).host.disk
        disk.break_directory(home, errno.ENOSPC)
        play.node(1).disk_was_bad = True
        play.refused(b"not taken")
        play.until("nobody leads", lambda: play.leader == -1)
        play.node(2).start()
        play.wait(10)
        assert play.leader in (-1, 1)
        disk.broken.clear()
        play.node(1).kill()
        play.node(1).start()
        play.until("all are back", play.cluster.all_in_sync, 60)
        assert play.values(2)[:2] == [b"first", b"second"]
