"""The order of the damaged partitions, without a clock."""

from __future__ import annotations

from typing import Any

from tidelog.broker.replicas.repair_queue import PAUSE_S_MIN, REPAIRED_AT_ONCE_MAX, WHOLE_COPIES_MAX, RepairQueue

PAUSE_S_MAX = 4 * PAUSE_S_MIN


def of(count: int) -> tuple[RepairQueue, list[Any]]:
    """So many partitions, each due a second after the one before it."""
    queue = RepairQueue()
    partitions: list[Any] = [f"t-{number}" for number in range(count)]
    for number, partition in enumerate(partitions):
        queue.hurry(partition, float(number))
    return queue, partitions


def end(queue: RepairQueue, partition: Any, now_s: float, *, is_done: bool = False, has_changed: bool = False) -> None:
    queue.plan_next(partition, now_s, is_done=is_done, has_changed=has_changed, pause_s_max=PAUSE_S_MAX)
    queue.end(partition)


def test_what_is_not_due_waits_for_its_time() -> None:
    queue, partitions = of(3)
    assert (queue.begin_due(1.5), queue.next_due_s()) == (partitions[:2], 2.0)
    assert (queue.begin_due(2.0), queue.next_due_s()) == (partitions[2:], None)


def test_the_next_one_waits_for_a_free_lane() -> None:
    queue, partitions = of(REPAIRED_AT_ONCE_MAX + 1)
    assert queue.begin_due(9.0) == partitions[:-1]
    assert len({*queue.lanes.values()}) == REPAIRED_AT_ONCE_MAX
    assert (queue.begin_due(9.0), queue.next_due_s()) == ([], None)
    lane = queue.lanes[partitions[1]]
    end(queue, partitions[1], 9.0)
    assert queue.begin_due(9.0) == partitions[-1:]
    assert queue.lanes[partitions[-1]] == lane


def test_attempts_in_vain_become_rarer_until_something_changes() -> None:
    queue, (partition,) = of(1)
    pauses, now_s = [], 0.0
    for number in range(6):
        assert queue.begin_due(now_s) == [partition]
        end(queue, partition, now_s, has_changed=number == 4)
        due_s = queue.next_due_s()
        assert due_s is not None
        pauses.append(round((due_s - now_s) / PAUSE_S_MIN))
        now_s = due_s
    assert pauses == [1, 2, 4, 4, 1, 2]


def test_what_is_reported_during_an_attempt_is_due_again_also_where_that_was_the_last() -> None:
    queue, (partition,) = of(1)
    queue.begin_due(0.0)
    queue.hurry(partition, 0.5)
    assert queue.begin_due(0.5) == [], "never two at once"
    end(queue, partition, 1.0, is_done=True)
    assert queue.begin_due(1.0) == [partition]
    end(queue, partition, 1.0, is_done=True)
    assert (queue.waiting, queue.lanes, queue.next_due_s()) == ({}, {}, None)


def test_a_date_moves_only_forward() -> None:
    queue, partitions = of(2)
    assert not queue.hurry_until(partitions[0], 0.5)
    assert queue.hurry_until(partitions[1], 0.5)
    assert queue.next_due_s() == 0.0
    assert queue.begin_due(0.5) == partitions
    assert not queue.hurry_until("not damaged", 0.5)  # type: ignore[arg-type]


def test_one_that_wants_to_copy_a_whole_log_waits_for_the_end_of_a_copy() -> None:
    queue, partitions = of(WHOLE_COPIES_MAX + 1)
    queue.begin_due(9.0)
    assert [queue.begin_whole_copy(each) for each in partitions] == [*[True] * WHOLE_COPIES_MAX, False]
    end(queue, partitions[-1], 9.0)
    assert (queue.begin_due(99.0), queue.next_due_s()) == ([], None)
    assert queue.hurry_until(partitions[-1], 99.0), "for a gap"
    assert queue.begin_due(99.0) == partitions[-1:]
    assert not queue.begin_whole_copy(partitions[-1])
    end(queue, partitions[-1], 99.0)
    queue.end_whole_copy()
    assert queue.begin_due(999.0) == partitions[-1:]


def test_one_that_is_hurried_during_its_attempt_waits_for_no_copy() -> None:
    """A broker that is back may have the range, and the attempt has not asked it."""
    queue, partitions = of(WHOLE_COPIES_MAX + 1)
    queue.begin_due(9.0)
    assert all(queue.begin_whole_copy(each) for each in partitions[:-1])
    queue.hurry(partitions[-1], 9.0)
    assert not queue.begin_whole_copy(partitions[-1])
    end(queue, partitions[-1], 9.5)
    assert queue.begin_due(9.5) == partitions[-1:]
