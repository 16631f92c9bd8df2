"""Histories of clusters in which files are damaged: nothing is lost, and in the end every copy is whole.

TIDELOG_SEED=7 replays one, TIDELOG_DAMAGE_SEEDS=500 runs that many. Here is also shown that damage is seen.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.damage.injuries import FIELDS, Injury, damaged
from tests.doses import seeds
from tests.simulation import planted
from tests.simulation.damage_faults import files_of
from tests.simulation.damage_history import DamageHistory, faults_of_copies
from tests.simulation.stage import stage
from tests.simulation.world import Broken
from tidelog.broker.config import definitions as config_definitions

REPAIRS = "log.scrub.interval.ms" in config_definitions.BROKER


def test_every_copy_of_a_quiet_cluster_is_whole_until_one_is_damaged() -> None:
    with stage() as directed:
        directed.up()
        for number in range(5):
            directed.send(b"%d" % number)
        directed.wait(2)
        assert faults_of_copies(directed.cluster) == []
        files = files_of(directed.cluster.nodes[2].host.disk)
        inode = next(inode for path, inode in files.items() if path.endswith(".log") and inode.data)
        data = bytes(inode.data)
        for way in FIELDS:
            changed, what = damaged(Injury("active", way, 0.0, 0.5, 0.5), data)
            assert changed is not None
            inode.data = bytearray(changed)
            assert faults_of_copies(directed.cluster) != [], what


@pytest.mark.skipif(not REPAIRS, reason="replicas do not repair themselves yet")
@pytest.mark.parametrize("chosen", seeds("TIDELOG_DAMAGE_SEEDS", chunk=5, fast=0, full=5))
def test_nothing_is_lost_to_a_bad_disk(chosen: range) -> None:
    for seed in chosen:
        DamageHistory(seed).run()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(215, id="the end of a cut log lies inside of a batch, by its checkpoints"),
        pytest.param(470, id="the same behind damage that was repaired"),
        pytest.param(537, id="a broker replays a metadata record that changed after it was checked"),
    ],
)
@pytest.mark.slow
def test_seeds_of_past_failures(seed: int) -> None:
    DamageHistory(seed).run()


@pytest.mark.slow
def test_a_seed_with_a_bad_disk_does_the_same_again() -> None:
    def trace() -> str:
        history = DamageHistory(0)
        try:
            return history.run()
        except Exception as error:
            return str(error)

    assert trace() == trace()


# A replica that still has what an older leader wrote, beside damage, and hardly anything else.
STALE: dict[str, Any] = {"weights": {"damage_beside_a_stale_replica": 10, "kill_leader": 1}}


@pytest.mark.hunt
def test_a_copy_of_a_stale_replica_that_is_taken_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        DamageHistory(seed, **STALE).run()  # without the mistake they break nothing

    def hunt() -> None:
        for seed in range(100):
            DamageHistory(seed, **STALE).run()

    planted.repair_from_a_stale_replica(monkeypatch)
    with pytest.raises(Broken, match=r"WholeRecordsNeverChange|EveryCopyIsWhole"):
        hunt()


# Reassignments that leave only a replica with a bad disk, whose damage nobody has met.
REMOVING: dict[str, Any] = {
    "weights": {"damage_running": 20, "reassign_to_a_bad_disk": 6, "kill_leader": 1, "elect_preferred": 2}
}


@pytest.mark.parametrize("chosen", seeds("TIDELOG_DAMAGE_SEEDS", chunk=5, fast=0, full=5))
def test_nothing_is_lost_to_a_bad_disk_that_stays_alone(chosen: range) -> None:
    for seed in chosen:
        DamageHistory(seed, **REMOVING).run()


@pytest.mark.hunt
def test_a_removal_of_whole_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    DamageHistory(18, **REMOVING).run()
    planted.remove_replicas_unread(monkeypatch)
    with pytest.raises(Broken, match="EveryCopyIsWhole"):
        DamageHistory(18, **REMOVING).run()


@pytest.mark.hunt
def test_a_claim_to_be_clean_whatever_was_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hunt() -> None:
        for seed in range(126, 300):
            DamageHistory(seed).run()

    planted.claim_before_the_scan(monkeypatch)
    with pytest.raises(Broken):
        hunt()
