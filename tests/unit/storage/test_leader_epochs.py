"""Which epoch begins where."""

from __future__ import annotations

import pytest

from tidelog.storage.segments.leader_epochs import EpochBatches, LeaderEpochs


def epochs(*entries: tuple[int, int]) -> LeaderEpochs:
    return LeaderEpochs(entries)


def test_an_epoch_is_noted_once():
    cache = epochs()
    assert cache.latest == -1
    assert cache.assign(2, 10)
    assert not cache.assign(2, 20)
    assert list(cache) == [(2, 10)]
    assert cache.latest == 2
    assert cache.is_dirty


def test_loading_does_not_make_it_dirty():
    assert not epochs((1, 0), (2, 5)).is_dirty


def test_an_epoch_without_records_gives_its_place_to_the_next():
    cache = epochs((1, 0), (2, 10))
    cache.assign(4, 10)
    assert list(cache) == [(1, 0), (4, 10)]


def test_an_earlier_start_or_epoch_removes_what_contradicts_it():
    cache = epochs((1, 0), (2, 10), (3, 20))
    cache.assign(4, 5)
    assert list(cache) == [(1, 0), (4, 5)]
    cache.assign(3, 8)
    assert list(cache) == [(1, 0), (3, 8)]


@pytest.mark.parametrize(
    ("epoch", "answer"),
    [(5, (5, 100)), (4, (3, 20)), (3, (3, 20)), (2, (2, 10)), (1, (1, 5)), (6, (-1, -1)), (-1, (-1, -1))],
)
def test_where_an_epoch_ended(epoch: int, answer: tuple[int, int]):
    assert epochs((2, 5), (3, 10), (5, 20)).end_offset_for(epoch, 100) == answer


def test_an_empty_cache_knows_no_end():
    assert epochs().end_offset_for(0, 7) == (-1, -1)


def test_the_epoch_of_an_offset():
    cache = epochs((2, 5), (3, 10))
    assert [cache.epoch_for_offset(offset) for offset in (4, 5, 9, 10, 99)] == [-1, 2, 2, 3, 3]


def test_truncation_from_the_end():
    cache = epochs((1, 0), (2, 10), (3, 20))
    assert not cache.truncate_from_end(21)
    assert cache.truncate_from_end(20)
    assert list(cache) == [(1, 0), (2, 10)]
    assert cache.latest == 2
    assert cache.truncate_from_end(0)
    assert (list(cache), cache.latest) == ([], -1)


def test_truncation_from_the_start_keeps_the_epoch_that_holds_the_offset():
    cache = epochs((1, 0), (2, 10), (3, 20))
    assert cache.truncate_from_start(15)
    assert list(cache) == [(2, 15), (3, 20)]
    assert cache.truncate_from_start(20)
    assert list(cache) == [(3, 20)]
    assert not cache.truncate_from_start(20)
    assert not cache.truncate_from_start(3)
    assert cache.earliest == (3, 20)


def test_epochs_of_deleted_records_correct_nothing():
    """The log starts behind the begin of the second one, in a segment that has both."""
    cache = epochs((2, 15), (4, 16))
    assert not cache.correct([(1, 10), (2, 12), (4, 16)], 15, 19)
    assert not cache.is_dirty
    wrong = epochs((1, 15), (4, 17))
    assert wrong.correct([(1, 10), (2, 12), (4, 16)], 15, 19)
    assert list(wrong) == [(2, 15), (4, 16)]


@pytest.mark.parametrize(("start", "corrected"), [(6, 9), (9, 9), (12, 12), (14, 14), (15, 9)])
def test_an_epoch_of_a_cleaned_log_keeps_a_start_that_may_be_right_or_begins_behind_the_batch_before(
    start: int, corrected: int
):
    """The cleaner may have removed its first batches."""
    batches = [EpochBatches(1, 0, 0, 7), EpochBatches(3, 9, 14, 20)]
    cache = epochs((1, 0), (3, start))
    assert cache.correct_by(batches, 0, 25, is_cleaned=True) == (start != corrected)
    assert list(cache) == [(1, 0), (3, corrected)]


def test_an_epoch_of_which_a_cleaner_has_removed_all_batches_stays():
    cache = epochs((1, 0), (2, 10), (3, 12))
    assert not cache.correct_by([EpochBatches(1, 0, 0, 7), EpochBatches(3, 9, 14, 20)], 0, 25, is_cleaned=True)
    assert list(cache) == [(1, 0), (2, 10), (3, 12)]
