"""What fuzzing found once, and every seed: run with the fast tests, by the file's name `<target>-<what>.bin`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import dispatcher
from tests.fuzz.decoders import TARGETS
from tests.fuzz.run import NAMES, changed_at_random
from tests.fuzz.target import Findings, Target
from tidelog.broker.coordinators.group import joins

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.bin"))
BY_NAME = {each.name: each for each in (*TARGETS, dispatcher.TARGET)}


@pytest.fixture(autouse=True)
def no_node_stays() -> Iterator[None]:
    logger = logging.getLogger("tidelog")
    propagates, random_uuid = logger.propagate, joins.random_uuid
    yield
    dispatcher.end()
    logger.propagate, joins.random_uuid = propagates, random_uuid


def test_every_target_is_run() -> None:
    assert list(BY_NAME) == list(NAMES)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_was_found_once(path: Path) -> None:
    BY_NAME[path.stem.partition("-")[0]].run(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_seeds(name: str) -> None:
    for seed in BY_NAME[name].seeds():
        BY_NAME[name].run(seed)


def test_a_finding_is_kept_once_and_by_its_smallest_input(tmp_path: Path) -> None:
    def fails(data: bytes) -> None:
        if b"x" in data:
            raise ZeroDivisionError("a bug")

    findings = Findings(Target("planted", fails, lambda: iter([b"axb"])), tmp_path)
    for data in (b"a", b"axb", b"x", b"xyz"):
        findings.run(data)
    assert list(findings.kinds.values()) == [3]
    (kept,) = tmp_path.glob("*.bin")
    assert kept.read_bytes() == b"x"


def test_without_atheris_seeds_are_changed_at_random(tmp_path: Path) -> None:
    seen: set[bytes] = set()
    target = Target("planted", seen.add, lambda: iter([]))
    (tmp_path / "seed").write_bytes(b"a seed of some length")
    changed_at_random(target, Findings(target, tmp_path / "findings"), tmp_path, 0.05)
    assert len(seen) > 10
