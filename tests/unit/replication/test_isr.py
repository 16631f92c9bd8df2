"""The leader's book by itself: random histories against the plain definitions, and the rules one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.uuids import LOST_DIRECTORY, MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.replication.controller.metadata.image import BrokerImage
from tidelog.replication.isr import UNKNOWN_OFFSET, InSyncReplicas
from tidelog.replication.partition import ReplicaPorts

LAG_MS = 1000


def book(isr: tuple[int, ...] = (1, 2, 3), *, leader_end: int = 10) -> InSyncReplicas:
    found = InSyncReplicas(1, LAG_MS)
    found.assign((1, 2, 3), isr, 5, 7, leader_end, 0.0)
    return found


def anyone(broker_id: int, broker_epoch: int) -> bool:
    return True


def nobody(broker_id: int, broker_epoch: int) -> bool:
    return False


def test_the_mark_is_the_least_end_of_those_in_sync() -> None:
    found = book((1, 2), leader_end=0)
    found.followers[2].fetched(4, 9, 2000.0)
    assert found.high_watermark(9, lambda: 5000.0, anyone) == 4
    found.followers[2].fetched(9, 9, 2000.0)
    assert found.high_watermark(9, lambda: 5000.0, anyone) == 9, "replica 3 is far away and not waited for"


def test_the_minimum_is_at_most_the_number_of_replicas() -> None:
    assert [book((1, 2)).min_isr(minimum) for minimum in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_caught_up_is_who_reached_the_end_of_its_last_fetch() -> None:
    found = book((1, 2), leader_end=0)
    follower = found.followers[2]
    follower.fetched(0, 10, 100.0)
    follower.fetched(10, 25, 200.0)
    assert follower.last_caught_up_ms == 100.0, "always behind, and never by more than a round"
    follower.fetched(20, 30, 300.0)
    assert follower.last_caught_up_ms == 100.0, "it fetches, but it does not reach the end"
    assert found.shrinkage(40, 1099.0, 1) is None
    proposal = found.shrinkage(40, 1101.0, 1)
    assert proposal is not None
    assert proposal.removes == (2,)


def test_a_burst_does_not_throw_anybody_out() -> None:
    """Why replica.lag.max.messages is no more."""
    found = book(leader_end=0)
    for follower in found.followers.values():
        follower.fetched(0, 0, 1000.0)
    assert found.shrinkage(1_000_000, 1500.0, 1) is None


def test_nobody_joins_below_the_mark_or_the_start_of_the_epoch() -> None:
    found = book((1, 2), leader_end=10)
    follower = found.followers[3]
    for end, mark, joins in ((9, 5, False), (10, 11, False), (10, 10, True)):
        follower.fetched(end, 20, 0.0)
        proposal = found.expansion(follower, mark, 1, anyone)
        assert (proposal is not None) == joins
    assert found.followers[3].in_maximal_isr
    assert found.pending is not None
    assert [broker_id for broker_id, _ in found.pending.isr] == [1, 2, 3]


def test_who_may_not_join_is_neither_proposed_nor_waited_for() -> None:
    found = book((1,), leader_end=0)
    found.followers[2].fetched(5, 5, 100.0)
    assert found.expansion(found.followers[2], 5, 1, nobody) is None
    assert found.high_watermark(9, lambda: 100.0, nobody) == 9
    assert found.high_watermark(9, lambda: 100.0, anyone) == 5


def test_a_member_that_was_proposed_away_still_counts_until_the_controller_agrees() -> None:
    found = book(leader_end=0)
    found.followers[2].fetched(9, 9, 3000.0)
    proposal = found.shrinkage(9, 3000.0, 1)
    assert proposal is not None
    assert proposal.removes == (3,)
    assert found.high_watermark(9, lambda: 3000.0, nobody) == -1
    assert found.shrinkage(9, 9000.0, 1) is None, "one at a time"
    found.assign((1, 2, 3), (1, 2), 5, 8, 9, 3000.0)
    assert found.high_watermark(9, lambda: 3000.0, nobody) == 9


def test_a_proposal_that_the_metadata_has_overtaken_is_not_withdrawn_again() -> None:
    found = book(leader_end=0)
    first = found.shrinkage(9, 3000.0, 1)
    assert first is not None
    found.assign((1, 2, 3), (1, 2, 3), 5, 9, 9, 3000.0)
    second = found.shrinkage(9, 3000.0, 1)
    found.withdraw(first)
    assert found.pending is second is not None


def test_a_new_epoch_gives_members_the_whole_time_and_others_none() -> None:
    found = book((1, 2), leader_end=0)
    found.assign((1, 2, 3), (1, 2), 6, 8, 50, 7000.0)
    assert found.epoch_start_offset == 50
    assert found.shrinkage(60, 7999.0, 1) is None
    assert found.followers[3].last_caught_up_ms < 0
    found.followers[2].fetched(0, 60, 7100.0)
    assert found.shrinkage(60, 7999.0, 1) is None, "its first fetch, behind the end, takes none of the time"
    assert found.shrinkage(60, 8001.0, 1) is not None


def test_what_a_follower_held_in_an_earlier_epoch_counts_no_more() -> None:
    """The leader may have missed an epoch in between, for whose leader the follower cut its log."""
    found = book((1, 2), leader_end=0)
    found.followers[2].fetched(33, 34, 1000.0)
    found.followers[2].broker_epoch = 5
    found.assign((1, 2, 3), (1, 2), 7, 9, 34, 2000.0)
    assert found.followers[2].broker_epoch == -1, "a later process of it may fetch"
    assert found.high_watermark(34, lambda: 2000.0, nobody) == UNKNOWN_OFFSET
    found.followers[2].fetched(26, 34, 2100.0)
    assert found.high_watermark(34, lambda: 2100.0, nobody) == 26


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("fetch"), st.sampled_from((2, 3)), st.integers(0, 100)),
        st.tuples(st.just("pass"), st.integers(1, 700)),
        st.tuples(st.just("check")),
        st.tuples(st.just("agree")),
        st.tuples(st.just("reject")),
    ),
    max_size=60,
)


@given(steps)
def test_no_history_lets_the_mark_pass_a_member(history: list[tuple[Any, ...]]) -> None:
    found = book(leader_end=0)
    end, mark, now_ms, partition_epoch = 0, 0, 0.0, 7
    sure = {1, 2, 3}  # what the controller may believe, whatever became of the open proposal
    for kind, *values in history:
        if kind == "append":
            end += values[0]
        elif kind == "pass":
            now_ms += values[0]
        elif kind == "fetch":
            follower = found.followers[values[0]]
            offset = max(follower.log_end_offset, 0) + (end - max(follower.log_end_offset, 0)) * values[1] // 100
            follower.fetched(offset, end, now_ms)
            found.expansion(follower, mark, 1, anyone)
        elif kind == "check":
            found.shrinkage(end, now_ms, 1)
        elif found.pending is not None:
            if kind == "agree":
                partition_epoch += 1
                members = tuple(broker_id for broker_id, _ in found.pending.isr)
                found.assign((1, 2, 3), members, 5, partition_epoch, end, now_ms)
            else:
                found.withdraw(found.pending)
        sure = set(found.isr)
        if found.pending is not None:
            sure |= {broker_id for broker_id, _ in found.pending.isr}
        before, mark = mark, max(mark, found.high_watermark(end, partial(float, now_ms), anyone))
        if mark > before:
            for each in sure - {1}:
                assert found.followers[each].log_end_offset >= mark, (each, found.followers, mark)


HOME = b"h" * 16
ELSEWHERE = b"e" * 16


@pytest.mark.parametrize(
    ("registration", "broker_epoch", "directory", "expected"),
    [
        ({}, 5, HOME, True),
        ({}, -1, HOME, True),
        ({}, 4, HOME, False),
        ({"fenced": True}, 5, HOME, False),
        ({"in_controlled_shutdown": True}, 5, HOME, False),
        ({}, 5, ELSEWHERE, False),
        ({}, 5, LOST_DIRECTORY, False),
        ({}, 5, UNASSIGNED_DIRECTORY, True),
        ({}, 5, MIGRATING_DIRECTORY, True),
        ({"log_dirs": ()}, 5, ELSEWHERE, True),
        ({"log_dirs": ()}, 5, LOST_DIRECTORY, False),
    ],
)
def test_which_replicas_may_join(
    registration: dict[str, Any], broker_epoch: int, directory: bytes, expected: bool
) -> None:
    broker = BrokerImage(2, 5, bytes(16), {}, **{"fenced": False, "log_dirs": (HOME,), **registration})
    ports = ReplicaPorts(broker=lambda broker_id: broker if broker_id == 2 else None)
    assert ports.eligible(2, broker_epoch, directory) is expected
    assert not ports.eligible(3, broker_epoch, directory), "it is not registered"
