"""Where a follower cuts its log, and how it waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.replication.backoff import Backoff
from tidelog.replication.follower import Reset, out_of_range, truncation_offset
from tidelog.storage.segments.leader_epochs import LeaderEpochs


@pytest.mark.parametrize(
    ("leader", "own", "log_end", "cut_at"),
    [
        ((3, 20), (3, 30), 30, 20),  # the same epoch went on for longer here
        ((3, 40), (3, 30), 35, 30),  # here it ended earlier: what follows is of an epoch the leader never saw
        ((3, 40), (2, 15), 35, 15),  # epoch 3 is unknown here: ask again from the end of epoch 2
        ((3, 40), (-1, -1), 35, 35),
        ((3, 20), (-1, -1), 35, 20),
    ],
)
def test_where_to_cut(leader: tuple[int, int], own: tuple[int, int], log_end: int, cut_at: int) -> None:
    assert truncation_offset(*leader, *own, log_end) == cut_at


def test_what_to_do_out_of_range() -> None:
    assert out_of_range(5, 10, 20) == Reset(10, empties=False)
    assert out_of_range(30, 40, 20) == Reset(30, empties=True)
    assert out_of_range(5, 40, 20) is None
    assert out_of_range(20, 20, 20) is None


# A log is the epoch of each record. Those of one epoch are one leader's, so they agree wherever both logs have them.
logs = st.lists(st.integers(0, 6), max_size=12).map(sorted)


def epochs_of(log: list[int]) -> LeaderEpochs:
    found = LeaderEpochs()
    for offset, epoch in enumerate(log):
        found.assign(epoch, offset)
    return found


@given(logs, logs)
def test_cutting_by_epochs_ends_where_the_logs_agree_and_never_below(leader: list[int], follower: list[int]) -> None:
    theirs = epochs_of(leader)
    theirs.assign(7, len(leader))  # it leads now
    for _ in range(10):
        own = epochs_of(follower)
        if own.latest < 0:
            break
        epoch, end = theirs.end_offset_for(own.latest, len(leader))
        if epoch == own.latest and end >= len(follower):
            break
        cut_at = truncation_offset(epoch, end, *own.end_offset_for(epoch, len(follower)), len(follower))
        assert cut_at < len(follower), "no progress"
        follower = follower[:cut_at]
    else:
        pytest.fail("it never ends")
    # Of the epochs both know, what is left is a prefix of the leader's log or something the leader never had before it.
    known = [epoch for epoch in follower if epoch in leader]
    assert len(known) <= len(leader)
    if follower:
        assert theirs.end_offset_for(follower[-1], len(leader))[1] >= len(follower)


def test_pauses_grow_to_a_bound_and_begin_anew() -> None:
    rng = random.Random(1)
    backoff = Backoff(10, 200)
    pauses = [backoff.next_ms(rng) for _ in range(8)]
    for pause, whole in zip(pauses, (10, 20, 40, 80, 160, 200, 200, 200)):
        assert whole / 2 <= pause <= whole
    backoff.reset()
    assert backoff.next_ms(rng) <= 10
