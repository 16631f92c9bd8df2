"""Damage to one file of one replica, or of two, in a cluster of processes with clients: nothing is lost, passed over or
stuck, and in the end there are three whole copies.

TIDELOG_DAMAGE says how many cases are drawn (`make hunt`: 100), TIDELOG_SEED replays one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.damage.cases import NAMED, drawn
from tests.cluster.damage.run import describe, run_one
from tests.doses import dose
from tidelog.broker.config import definitions as config_definitions

pytestmark = pytest.mark.skipif(
    "log.scrub.interval.ms" not in config_definitions.BROKER, reason="replicas do not repair themselves yet"
)
FIRST = int(os.environ.get("TIDELOG_SEED") or 1)
CASES = 1 if os.environ.get("TIDELOG_SEED") else dose("TIDELOG_DAMAGE")


@pytest.mark.hunt
@pytest.mark.parametrize("name", NAMED)
def test_damage_that_was_seen_to_hurt(name: str, tmp_path: Path) -> None:
    outcome = run_one(NAMED[name], tmp_path)
    assert outcome.name == "well", describe(outcome)


@pytest.mark.hunt
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_any_damage(seed: int, tmp_path: Path) -> None:
    outcome = run_one(drawn(seed), tmp_path)
    assert outcome.name == "well", describe(outcome)
