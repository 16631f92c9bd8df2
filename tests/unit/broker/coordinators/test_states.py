from __future__ import annotations

import pytest

from tidelog.broker.coordinators.group.states import (
    CAN_REBALANCE,
    COMMIT_ANSWER,
    DELETE_ANSWER,
    HEARTBEAT_ANSWER,
    TRANSITIONS,
    GroupEvent,
    GroupState,
    next_state,
)

# Kafka's ClassicGroupState: which states a state may be entered from.
VALID_PREVIOUS = {
    GroupState.EMPTY: {GroupState.PREPARING_REBALANCE},
    GroupState.PREPARING_REBALANCE: {GroupState.STABLE, GroupState.COMPLETING_REBALANCE, GroupState.EMPTY},
    GroupState.COMPLETING_REBALANCE: {GroupState.PREPARING_REBALANCE},
    GroupState.STABLE: {GroupState.COMPLETING_REBALANCE},
    GroupState.DEAD: set(GroupState) - {GroupState.DEAD},
}


def test_the_table_allows_what_kafkas_does():
    previous: dict[GroupState, set[GroupState]] = {}
    for (state, _), target in TRANSITIONS.items():
        previous.setdefault(target, set()).add(state)
    assert previous == VALID_PREVIOUS
    assert previous[GroupState.PREPARING_REBALANCE] == CAN_REBALANCE


def test_every_state_has_every_answer():
    for table in (HEARTBEAT_ANSWER, COMMIT_ANSWER, DELETE_ANSWER):
        assert set(table) == set(GroupState)


def test_a_move_outside_the_table_is_our_bug():
    with pytest.raises(AssertionError, match="ASSIGNED cannot happen to a group that is Empty"):
        next_state(GroupState.EMPTY, GroupEvent.ASSIGNED)
