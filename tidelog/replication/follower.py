"""A follower's decisions: where to truncate its log, and how to react to an error.

Pure. The rules are those of Kafka's AbstractFetcherThread with truncation on fetch (KIP-101, KIP-279, KIP-595).
Invariant: a log is truncated only where it may differ from the leader's by leader epochs, never by the high watermark,
which may be below acknowledged records.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tidelog.protocol.errors import ErrorCode

UNDEFINED = -1


def truncation_offset(leader_epoch: int, leader_end: int, own_epoch: int, own_end: int, log_end: int) -> int:
    """The offset to truncate to, from the leader's (epoch, end offset) and this log's (epoch, end offset).

    `own_epoch` is this log's largest epoch that is at most the leader's, or -1 if unknown; `own_end` is its end. If
    `own_epoch` is smaller than the leader's, the next fetch starts at `own_end` and compares the logs again.
    """
    if own_epoch == UNDEFINED:
        return min(leader_end, log_end)
    if own_epoch != leader_epoch:
        return min(own_end, log_end)
    return min(own_end, leader_end, log_end)


class Reset(NamedTuple):
    """The repair of a log whose end is outside the leader's log: truncate it to `offset`, or empty it to start at
    `offset`.
    """

    offset: int
    empties: bool


def out_of_range(leader_start: int, leader_end: int, log_end: int) -> Reset | None:
    """The repair after OFFSET_OUT_OF_RANGE, by the leader's bounds; None: the logs fit, so fetch again.

    The leader's log ends below this log's end after an unclean election. It starts above this log's end if this replica
    was away for long.
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


# Other errors mean RETRY.
REACTIONS = {
    ErrorCode.OFFSET_OUT_OF_RANGE: Reaction.RESET,
    ErrorCode.FENCED_LEADER_EPOCH: Reaction.AWAIT_METADATA,
}


# Errors that start a new fetch session at once. Other errors of a whole request are followed by a pause first.
SESSION_ERRORS = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
)
