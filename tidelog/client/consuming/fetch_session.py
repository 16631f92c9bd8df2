"""The client's half of an incremental fetch session (KIP-227): a fetch names only what changed.

One session per broker. Pure. Invariant: after a successful response, broker and client hold the
same set of partitions with the same fetch offsets. After any other outcome the next request starts
a new session with a full fetch (`FetchSessionHandler`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode

NO_SESSION = 0
FULL_FETCH = 0
CLOSE_SESSION = -1
_MAX_EPOCH = 2**31 - 1


class FetchTarget(NamedTuple):
    """Where to fetch one partition from.

    `topic_id` is all zero when the broker has no topic ids.
    """

    topic_id: bytes
    offset: int
    leader_epoch: int
    last_fetched_epoch: int
    max_bytes: int


class FetchPlan(NamedTuple):
    """The content of one request."""

    session_id: int
    epoch: int
    to_send: dict[TopicPartition, FetchTarget]
    to_forget: list[tuple[TopicPartition, bytes]]
    """Each partition with the topic id under which the broker has it."""


class FetchSession:
    """The session with one broker."""

    __slots__ = ("_epoch", "_targets", "session_id")

    def __init__(self) -> None:
        self.session_id = NO_SESSION
        self._epoch = FULL_FETCH
        self._targets: dict[TopicPartition, FetchTarget] = {}

    def plan(self, targets: Mapping[TopicPartition, FetchTarget]) -> FetchPlan:
        """The next request for exactly `targets`."""
        if self._epoch == FULL_FETCH:
            self._targets = dict(targets)
            return FetchPlan(self.session_id, FULL_FETCH, dict(targets), [])
        to_send = {partition: target for partition, target in targets.items() if self._targets.get(partition) != target}
        to_forget = []
        for partition, previous in self._targets.items():
            target = targets.get(partition)
            if target is None or target.topic_id != previous.topic_id:
                # A recreated topic of the same name is another topic: the broker must drop the old
                # one.
                to_forget.append((partition, previous.topic_id))
        self._targets = dict(targets)
        return FetchPlan(self.session_id, self._epoch, to_send, to_forget)

    def handle_response(self, error: ErrorCode, session_id: int) -> None:
        """Take the broker's response.

        Session id 0 means that it keeps no session: continue with full fetches.
        """
        if error is not ErrorCode.NONE:
            keep = error not in (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
            self.restart(keep_id=keep)
        elif session_id == NO_SESSION:
            self.restart(keep_id=False)
        else:
            self.session_id = session_id
            self._epoch = 1 if self._epoch >= _MAX_EPOCH else self._epoch + 1

    def handle_failure(self) -> None:
        """Take a missing response: the broker may have processed the request."""
        self.restart(keep_id=True)

    def restart(self, *, keep_id: bool) -> None:
        """Start over with a full fetch. With `keep_id` the broker replaces the old session."""
        if not keep_id:
            self.session_id = NO_SESSION
        self._epoch = FULL_FETCH
        self._targets = {}

    def partitions(self) -> Iterable[TopicPartition]:
        """The partitions in the session."""
        return self._targets.keys()
