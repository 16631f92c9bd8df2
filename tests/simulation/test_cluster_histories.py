"""Histories of whole clusters, the real broker, controller and client code in them, and no invariant broken.

TIDELOG_SEED=7 replays one; TIDELOG_CLUSTER_SEEDS=10000 runs that many. Planted bugs show that the invariants can
break: see `test_planted_bugs`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doses import seeds
from tests.simulation.cluster import SimulatedNode
from tests.simulation.cluster_faults import Fault, Faults
from tests.simulation.cluster_history import ClusterHistory

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("chosen", seeds("TIDELOG_CLUSTER_SEEDS", chunk=3, fast=3, full=9))
def test_a_cluster_survives_what_a_bad_world_does(chosen: range):
    for seed in chosen:
        ClusterHistory(seed).run()


# Histories that once broke something, each with what it was: docs/simulation.md.
REGRESSIONS = (21, 29, 44, 52, 116, 1011, 2032, 15286, 15532, 16044, 46463, 50026, 51018, 60219)


@pytest.mark.slow
@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_broke_stays_mended(seed: int):
    ClusterHistory(seed).run()


@pytest.mark.slow
def test_no_node_is_killed_when_all_is_mended(monkeypatch: pytest.MonkeyPatch):
    """A disk that fills at the end of the faults would be replaced seconds later, while the history is judged."""
    times: dict[str, list[float]] = {"heal": [], "kill": []}
    history = ClusterHistory(3, [])
    history.planned = [Fault(history.duration_s - 0.1, "fill_disk", 2, 0.9)]

    def note(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noted(self: object, *arguments: object) -> None:
            times[name].append(history.world.now)
            method(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    note(Faults, "heal")
    note(SimulatedNode, "kill")
    history.run()
    [healed] = times["heal"]
    assert not [at for at in times["kill"] if at > healed]


SAME = """
from tests.simulation.cluster_history import ClusterHistory
print(ClusterHistory({seed}).run())
"""


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_another_process():
    def trace(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SAME.format(seed=3)],
            check=False,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert trace("1") == trace("2")
