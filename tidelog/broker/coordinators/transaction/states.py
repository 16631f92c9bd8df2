"""The states of a transactional id, as tables.

This module holds the states, their names and numbers, and the transitions between them.
`transitions` makes them. Invariant: the state of an id changes only along `VALID_PREVIOUS_STATES`.
Source: Kafka's `TransactionState`.
"""

from __future__ import annotations

from enum import IntEnum


class TransactionState(IntEnum):
    """The value is the number in the records of `__transaction_state`."""

    EMPTY = 0  # the producer has an identity and no transaction yet
    ONGOING = 1
    PREPARE_COMMIT = 2  # the decision is stored, the markers are being written
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4  # every partition has its marker
    COMPLETE_ABORT = 5
    DEAD = 6  # the id has expired; a tombstone is being written
    PREPARE_EPOCH_FENCE = 7  # never stored: the epoch is fenced by the record of the abort


_S = TransactionState

STATE_NAMES: dict[TransactionState, str] = {
    _S.EMPTY: "Empty",
    _S.ONGOING: "Ongoing",
    _S.PREPARE_COMMIT: "PrepareCommit",
    _S.PREPARE_ABORT: "PrepareAbort",
    _S.COMPLETE_COMMIT: "CompleteCommit",
    _S.COMPLETE_ABORT: "CompleteAbort",
    _S.DEAD: "Dead",
    _S.PREPARE_EPOCH_FENCE: "PrepareEpochFence",
}
STATES_BY_NAME = {name: state for state, name in STATE_NAMES.items()}

VALID_PREVIOUS_STATES: dict[TransactionState, frozenset[TransactionState]] = {
    _S.EMPTY: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.ONGOING: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.PREPARE_COMMIT: frozenset({_S.ONGOING}),
    # Transaction version 2 lets a client abort when it does not know whether the coordinator knows
    # of its transaction.
    _S.PREPARE_ABORT: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.COMPLETE_COMMIT: frozenset({_S.PREPARE_COMMIT}),
    _S.COMPLETE_ABORT: frozenset({_S.PREPARE_ABORT}),
    _S.DEAD: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
    _S.PREPARE_EPOCH_FENCE: frozenset({_S.ONGOING}),
}

COMPLETED = frozenset({_S.COMPLETE_COMMIT, _S.COMPLETE_ABORT})
PREPARED = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
EXPIRABLE = VALID_PREVIOUS_STATES[_S.DEAD]
