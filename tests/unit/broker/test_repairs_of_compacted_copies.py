"""Random histories of copies that are cleaned each at its own time, of which one is damaged and repaired.

What was deleted stays deleted, what is newest is there: at once, after a start, and when all is cleaned again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.broker.compacted_repairs import CompactedRepairs

BROUGHT_A_KEY_BACK = (161, 363, 498, 598, 670, 673, 722, 736, 952, 988)
"""Before a copy of what is cleaned here was compared with what is missing here."""


@pytest.mark.parametrize("seed", BROUGHT_A_KEY_BACK)
async def test_no_repair_brings_a_deleted_key_back(tmp_path: Path, seed: int) -> None:
    history = CompactedRepairs(tmp_path, seed)
    await history.live_and_repair()
    assert history.is_damaged
    history.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_100, 20))
async def test_every_repair_leaves_the_newest_value_of_every_key(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 20):
        history = CompactedRepairs(tmp_path / f"{seed}", seed)
        await history.live_and_repair()
        history.close()


async def test_no_repair_brings_a_deleted_key_back_after_the_topic_has_ceased_to_be_compacted(tmp_path: Path) -> None:
    history = CompactedRepairs(tmp_path, 362, ceases_to_be_compacted=True)
    await history.live_and_repair()
    assert history.is_damaged
    history.close()


async def test_gaps_between_whole_batches_are_explained_again_by_the_replicas_that_have_them_too(
    tmp_path: Path,
) -> None:
    """Without `explained-gaps` one range of damage has several gaps, and the batches between them."""
    damaged = 0
    for seed in range(40, 60):
        history = CompactedRepairs(tmp_path / f"{seed}", seed, ceases_to_be_compacted=True, loses_explained_gaps=True)
        await history.live_and_repair()
        history.close()
        damaged += history.is_damaged
    assert damaged


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30_000, 30_100, 20))
async def test_every_repair_leaves_the_newest_values_after_the_topic_has_ceased_to_be_compacted(
    tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + 20):
        history = CompactedRepairs(tmp_path / f"{seed}", seed, ceases_to_be_compacted=True)
        await history.live_and_repair()
        history.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20_000, 20_200, 100))
async def test_a_replica_may_be_cleaned_during_the_copy_of_its_log(tmp_path: Path, first: int) -> None:
    cleaned = 0
    for seed in range(first, first + 100):
        history = CompactedRepairs(tmp_path / f"{seed}", seed, is_cleaned_meanwhile=True)
        await history.live_and_repair()
        history.close()
        cleaned += history.cleaned_meanwhile
    assert cleaned
