"""What a follower decides: where to cut its log, what an error means.

Pure. The rules are those of Kafka's AbstractFetcherThread with truncation on fetch
(KIP-101, KIP-279, KIP-595). Invariant: a log is cut only below where it is known to agree with the leader's, by leader
epochs and never by high watermark, which may be older than what was acknowledged.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tidelog.protocol.errors import ErrorCode

UNDEFINED = -1


def truncation_offset(leader_epoch: int, leader_end: int, own_epoch: int, own_end: int, log_end: int) -> int:
    """Where to cut, given the leader's (epoch, end) and this log's answer to the same question for that epoch.

    `own_epoch` is the largest epoch here not above the leader's, `own_end` where it ends; -1 where none is known. If
    it is a smaller one, the leader is asked again from where that one ends.
    """
    if own_epoch == UNDEFINED:
        return min(leader_end, log_end)
    if own_epoch != leader_epoch:
        return min(own_end, log_end)
    return min(own_end, leader_end, log_end)


class Reset(NamedTuple):
    """What to do with a log whose end the leader does not have: cut it to `offset`, or empty it to begin there."""

    offset: int
    empties: bool


def out_of_range(leader_start: int, leader_end: int, log_end: int) -> Reset | None:
    """The leader said OFFSET_OUT_OF_RANGE and has told its bounds since. None: nothing to cut, ask again.

    It ends below this log after an unclean election; it begins above it when this replica was away for long.
    """
    if leader_end < log_end:
        return Reset(leader_end, empties=False)
    if leader_start > log_end:
        return Reset(leader_start, empties=True)
    return None


class Reaction(Enum):
    RETRY = "ask again after a pause"
    RESET = "ask for the leader's bounds"
    AWAIT_METADATA = "nothing to be done until the metadata says otherwise, but ask now and then"


# What is not here is answered with RETRY.
REACTIONS = {
    ErrorCode.OFFSET_OUT_OF_RANGE: Reaction.RESET,
    ErrorCode.FENCED_LEADER_EPOCH: Reaction.AWAIT_METADATA,
}


# The fetch session is begun anew; anything else said of a whole request is worth a pause first.
SESSION_ERRORS = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
)
