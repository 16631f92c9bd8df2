"""The states of a classic group, as tables.

Here live which event leads from which state to which, and the answers that depend on the state alone. What the events
do to members lives in `rebalance`. The invariant: a group changes state only by `next_state`, so a move that the
table lacks is our bug. Source: Kafka's `ClassicGroupState`.
"""

from __future__ import annotations

from enum import Enum

from tidelog.protocol.errors import ErrorCode


class GroupState(Enum):
    """The value is the name that DescribeGroups and ListGroups show."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupEvent(Enum):
    """What moves a group from one state to another."""

    REBALANCE = "membership or metadata changed: everybody has to join again"
    JOINED = "the join phase is over and somebody is there"
    EMPTIED = "the join phase is over and nobody is there"
    ASSIGNED = "the leader's assignment is committed"
    REMOVED = "the group is deleted, or its partition moved away"


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

# A member of the current generation sends a heartbeat.
HEARTBEAT_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.UNKNOWN_MEMBER_ID,
    _S.PREPARING_REBALANCE: ErrorCode.REBALANCE_IN_PROGRESS,
    _S.COMPLETING_REBALANCE: ErrorCode.NONE,
    _S.STABLE: ErrorCode.NONE,
    _S.DEAD: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}

# A member of the current generation commits offsets.
COMMIT_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.NONE,
    _S.PREPARING_REBALANCE: ErrorCode.NONE,  # the offsets of the generation that ends are still welcome
    _S.COMPLETING_REBALANCE: ErrorCode.REBALANCE_IN_PROGRESS,
    _S.STABLE: ErrorCode.NONE,
    _S.DEAD: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}

# The group is to be deleted while in this state.
DELETE_ANSWER: dict[GroupState, ErrorCode] = {
    _S.EMPTY: ErrorCode.NONE,
    _S.PREPARING_REBALANCE: ErrorCode.NON_EMPTY_GROUP,
    _S.COMPLETING_REBALANCE: ErrorCode.NON_EMPTY_GROUP,
    _S.STABLE: ErrorCode.NON_EMPTY_GROUP,
    _S.DEAD: ErrorCode.GROUP_ID_NOT_FOUND,
}


def next_state(state: GroupState, event: GroupEvent) -> GroupState:
    """Where the event leads; asserts that the table allows it."""
    target = TRANSITIONS.get((state, event))
    assert target is not None, f"{event.name} cannot happen to a group that is {state.value}"
    return target
