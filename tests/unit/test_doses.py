"""Seeds are shared out among `make check`, `make test` and the hunts, none is lost, and a test takes every dose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FAST_VARIANTS_MAX, pytest_collection_modifyitems
from tests.doses import DOSES, dose, seeds

TESTS = Path(__file__).resolve().parents[1]


def by_mark(chosen: list[Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for parameter in chosen:
        (mark,) = [each.name for each in parameter.marks] or ["fast"]
        found.setdefault(mark, []).extend(parameter.values[0])
    return found


def test_seeds_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDELOG_SEED", raising=False)
    monkeypatch.setenv("TIDELOG_RAFT_SEEDS", "20")
    found = by_mark(seeds("TIDELOG_RAFT_SEEDS", chunk=2, fast=4, full=10))
    assert found == {"fast": list(range(4)), "slow": list(range(4, 10)), "hunt": list(range(10, 20))}


def test_a_small_number_takes_nothing_from_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDELOG_SEED", raising=False)
    monkeypatch.setenv("TIDELOG_RAFT_SEEDS", "1")
    assert by_mark(seeds("TIDELOG_RAFT_SEEDS", chunk=5, fast=0, full=10)) == {"slow": list(range(10))}


def test_one_seed_is_replayed_by_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDELOG_SEED", "4711")
    assert by_mark(seeds("TIDELOG_RAFT_SEEDS", chunk=5, fast=5, full=10)) == {"fast": [4711]}


def test_a_number_of_its_own_comes_before_the_dose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDELOG_KILLS", raising=False)
    for size in ("small", "large"):
        monkeypatch.setenv("TIDELOG_DOSE", size)
        assert dose("TIDELOG_KILLS") == getattr(DOSES["TIDELOG_KILLS"], size)
    monkeypatch.setenv("TIDELOG_KILLS", "7")
    assert dose("TIDELOG_KILLS") == 7


@pytest.mark.parametrize("variable", DOSES)
def test_a_dose_is_taken_by_a_test_and_is_larger_when_large(variable: str) -> None:
    users = [path for path in TESTS.rglob("*.py") if f'("{variable}"' in path.read_text()]
    assert [path for path in users if path.name != "test_doses.py"]
    assert DOSES[variable].small < DOSES[variable].large


class Variant:
    """What the choice of variants reads of a test, and what it writes."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.marks = list(marks)

    def iter_markers(self, name: str) -> list[str]:
        return [mark for mark in self.marks if mark == name]

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_make_check_takes_a_few_variants_of_a_test() -> None:
    many: list[Any] = [Variant(f"test_a.py::test_many[{number}]") for number in range(FAST_VARIANTS_MAX + 5)]
    few: list[Any] = [Variant(f"test_a.py::test_few[{number}]") for number in range(FAST_VARIANTS_MAX)]
    hunts: list[Any] = [Variant(f"test_a.py::test_hunt[{number}]", "hunt") for number in range(2 * FAST_VARIANTS_MAX)]
    pytest_collection_modifyitems([*many, *few, *hunts])
    assert [test.marks for test in few] == [[]] * FAST_VARIANTS_MAX
    assert [test.marks for test in hunts] == [["hunt"]] * (2 * FAST_VARIANTS_MAX)
    chosen = {test.nodeid for test in many if not test.marks}
    assert len(chosen) == FAST_VARIANTS_MAX
    assert [test.marks for test in many if test.nodeid not in chosen] == [["slow"]] * 5

    again: list[Any] = [Variant(test.nodeid) for test in reversed(many)]
    pytest_collection_modifyitems(again)
    assert {test.nodeid for test in again if not test.marks} == chosen, "whatever the order"
