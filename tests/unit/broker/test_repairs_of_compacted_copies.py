"""Random histories of copies that are cleaned each at its own time, of which one is damaged and repaired.

What was deleted stays deleted, what is newest is there: at once, after a start, and when all is cleaned again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.broker.compacted_repairs import CompactedRepairs
from tests.unit.storage.batches import NOW
from tests.unit.storage.cleaning import clean, contents
from tidelog.protocol.batches.records import encode_batch

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


@pytest.mark.slow
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


@pytest.mark.parametrize("loses_file", [False, True])
async def test_a_range_with_the_log_start_in_its_first_batch_and_a_gap_at_its_end_is_repaired(
    tmp_path: Path, loses_file: bool
) -> None:
    """Its first offset cannot be asked for, and its last one is in no batch: the same attempt was made again and again.
    The cleaner reads what is before the log start, too.
    """
    history = CompactedRepairs(tmp_path, 1)
    made = history.copies[1]

    def write(*rows: tuple[bytes, bytes]) -> None:
        history.append(bytes(encode_batch([(NOW, key, value, ()) for key, value in rows])))

    write(*((b"%d" % number, b"first") for number in range(5)))
    for number in range(3):
        write((b"x", b"%d" % number))
    history.roll([1, 2, 3])
    write((b"0", b"last"))
    for copy in history.copies.values():
        clean(copy.log)
        copy.log.delete_records(4)
    path = made.folder / made.files("*.log")[0]
    if loses_file:
        made.close()
        path.unlink()
        made.open(NOW)
    else:
        data = path.read_bytes()
        end = int.from_bytes(data[8:12], "big") + 12
        path.write_bytes(bytes(end) + data[end:])
    assert history.find_damage("the first batch")
    await history.repair()
    read_from_4 = [(4, b"4", b"first"), (7, b"x", b"2"), (8, b"0", b"last")]
    assert [each for each in contents(made.log) if each[0] >= 4] == read_from_4
    history.roll([1])
    clean(made.log)
    assert [each for each in contents(made.log) if each[0] >= 4] == read_from_4
    history.close()
