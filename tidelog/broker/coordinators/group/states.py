"""The states of a classic group, as tables.

This module holds the transitions between states, and the answers that depend on the state alone.
`rebalance` applies the events to the members. Invariant: a group changes its state only by
`next_state`, which asserts that the table has the transition. Source: Kafka's `ClassicGroupState`.
"""

from __future__ import annotations

from enum import Enum

from tidelog.protocol.errors import ErrorCode


class GroupState(Enum):
    """The value is the name in the answers of DescribeGroups and ListGroups."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupEvent(Enum):
    """The cause of a transition. The value describes it."""

    REBALANCE = "membership or metadata changed: all members must join again"
    JOINED = "the join phase is over and the group has members"
    EMPTIED = "the join phase is over and the group has no members"
    ASSIGNED = "the leader's assignment is committed"
    REMOVED = "the group is deleted, or its partition has another coordinator"


_S, _E = GroupState, GroupEvent

TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_S.EMPTY, _E.REBALANCE): _S.PREPARING_REBALANCE,
    (_S.STABLE, _E.REBALANCE): _S.PREPARING_REBALANCE,
    (_S.COMPLETING_REBALANCE, _E.REBALANCE): _S.PREPARING_REBALANCE,
    (_S.PREPARING_REBALANCE, _E.JOINED): _S.COMPLETING_REBALANCE,
    (_S.PREPARING_REBALANCE, _E.EMPTIED): _S.EMPTY,
    (_S.COMPLETING_REBALANCE, _E.ASSIGNED): _S.STABLE,
    (_S.EMPTY, _E.REMOVED): _S.DEAD,
    (_S.PREPARING_REBALANCE, _E.REMOVED): _S.DEAD,
    (_S.COMPLETING_REBALANCE, _E.REMOVED): _S.DEAD,
    (_S.STABLE, _E.REMOVED): _S.DEAD,
}

CAN_REBALANCE = frozenset(state for state, event in TRANSITIONS if event is GroupEvent.REBALANCE)

# The answer to a heartbeat of a member of the current generation.
HEARTBEAT_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.UNKNOWN_MEMBER_ID,
    _S.PREPARING_REBALANCE: ErrorCode.REBALANCE_IN_PROGRESS,
    _S.COMPLETING_REBALANCE: ErrorCode.NONE,
    _S.STABLE: ErrorCode.NONE,
    _S.DEAD: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}

# The answer to an offset commit of a member of the current generation.
COMMIT_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.NONE,
    _S.PREPARING_REBALANCE: ErrorCode.NONE,  # members of the generation that ends may still commit
    _S.COMPLETING_REBALANCE: ErrorCode.REBALANCE_IN_PROGRESS,
    _S.STABLE: ErrorCode.NONE,
    _S.DEAD: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}

# The answer to DeleteGroups.
DELETE_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.NONE,
    _S.PREPARING_REBALANCE: ErrorCode.NON_EMPTY_GROUP,
    _S.COMPLETING_REBALANCE: ErrorCode.NON_EMPTY_GROUP,
    _S.STABLE: ErrorCode.NON_EMPTY_GROUP,
    _S.DEAD: ErrorCode.GROUP_ID_NOT_FOUND,
}


def next_state(state: GroupState, event: GroupEvent) -> GroupState:
    """The state after the event. Asserts that the table allows the event."""
    target = TRANSITIONS.get((state, event))
    assert target is not None, f"{event.name} cannot happen to a group that is {state.value}"
    return target
