from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.spark_ingest.planning import OffsetRange, divide, plan_ranges, share_tasks


def whole(partition: int, start: int, end: int) -> OffsetRange:
    return OffsetRange("t", partition, start, end)


def sizes(ranges) -> list[int]:
    return [each.size for each in ranges]


def test_one_task_per_partition_unless_asked_and_none_for_the_empty():
    ranges = [whole(0, 5, 10), whole(1, 7, 7), whole(2, 9, 3), whole(3, 0, 1)]
    assert plan_ranges(ranges) == [whole(0, 5, 10), whole(3, 0, 1)]
    assert plan_ranges([]) == []


def test_large_ranges_are_divided_evenly():
    assert plan_ranges([whole(0, 0, 10)], max_records_per_partition=4) == [
        whole(0, 0, 3),
        whole(0, 3, 6),
        whole(0, 6, 10),
    ]
    assert sizes(plan_ranges([whole(0, 0, 8), whole(1, 0, 4)], max_records_per_partition=4)) == [4, 4, 4]


def test_more_tasks_are_given_in_proportion_to_size():
    ranges = [whole(0, 0, 300), whole(1, 0, 100)]
    assert sizes(plan_ranges(ranges, min_partitions=4)) == [100, 100, 100, 100]
    assert sizes(plan_ranges(ranges, min_partitions=8)) == [50] * 8
    assert plan_ranges(ranges, min_partitions=2) == ranges
    assert len(plan_ranges([whole(number, 0, 100) for number in range(4)], min_partitions=10)) == 12  # 2.5 each


def test_small_ranges_stay_whole_and_the_large_get_the_rest():
    ranges = [whole(0, 0, 1), whole(1, 0, 1), whole(2, 0, 1000)]
    planned = plan_ranges(ranges, min_partitions=6)
    assert planned[:2] == ranges[:2]
    assert sizes(planned[2:]) == [250] * 4


def test_the_limit_is_kept_when_more_tasks_are_asked_for_too():
    planned = plan_ranges([whole(0, 0, 100)], min_partitions=20, max_records_per_partition=30)
    assert len(planned) == 20
    assert sum(sizes(planned)) == 100


def test_no_more_pieces_than_offsets():
    assert sizes(divide(whole(0, 5, 8), 10)) == [1, 1, 1]
    assert divide(whole(0, 5, 5), 3) == []


lengths = st.lists(st.integers(0, 5000), max_size=8)


@given(lengths, st.none() | st.integers(1, 60), st.none() | st.integers(1, 3000))
def test_every_offset_is_read_exactly_once(lengths, min_partitions, max_records):
    ranges = [whole(index, 100 * index, 100 * index + length) for index, length in enumerate(lengths)]
    planned = plan_ranges(ranges, min_partitions, max_records)
    assert all(each.size > 0 for each in planned)
    for each in ranges:
        parts = sorted(part for part in planned if part.partition == each.partition)
        assert sum(sizes(parts)) == each.size
        cuts = [part.start for part in parts] + [parts[-1].end] if parts else []
        assert cuts == sorted(set(cuts))
        if parts:
            assert (cuts[0], cuts[-1]) == (each.start, each.end)
    if max_records is not None:
        assert all(each.size <= max_records for each in planned)
    if min_partitions is not None and planned:
        # Rounding may miss the number by a part for each range.
        assert len(planned) >= min(min_partitions - len(ranges), sum(lengths))


def test_small_ranges_share_a_task_where_that_is_asked_for():
    ranges = [whole(0, 0, 3), whole(1, 0, 4), whole(2, 0, 50), whole(3, 0, 2), whole(4, 0, 1)]
    assert [len(task) for task in share_tasks(ranges, None)] == [1, 1, 1, 1, 1]
    assert [sizes(task) for task in share_tasks(ranges, 5)] == [[3, 4], [50], [2, 1]]
    assert [sizes(task) for task in share_tasks(ranges, 7)] == [[3, 4], [50], [2, 1]], "a full task gets no more"
    assert [sizes(task) for task in share_tasks(ranges, 5, 6)] == [[3], [4], [50], [2, 1]]
    assert share_tasks([], 5) == []


@given(lengths, st.none() | st.integers(1, 3000), st.none() | st.integers(1, 3000))
def test_tasks_hold_every_range_once_and_in_order(lengths, min_records, max_records):
    ranges = plan_ranges([whole(index, 0, length) for index, length in enumerate(lengths)], None, max_records)
    tasks = share_tasks(ranges, min_records, max_records)
    assert [each for task in tasks for each in task] == ranges
    assert all(len(task) == 1 or sum(sizes(task)) <= (max_records or sum(lengths)) for task in tasks)
    if min_records is not None and max_records is None:
        assert all(sum(sizes(task)) >= min_records for task in tasks[:-1])
