"""The client's half of an incremental fetch session (KIP-227): say what changed, not everything, in every fetch.

One per broker. Pure. Invariant: after a successful answer, broker and client hold the same set of partitions with the
same fetch offsets; after anything else the next request starts a session anew, in full (`FetchSessionHandler`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode

NO_SESSION = 0
FULL_FETCH = 0
CLOSE_SESSION = -1
_LAST_EPOCH = 2**31 - 1


class FetchTarget(NamedTuple):
    """From where one partition is to be fetched. `topic_id` is all zero where the broker has none."""

    topic_id: bytes
    offset: int
    leader_epoch: int
    last_fetched_epoch: int
    max_bytes: int


class FetchPlan(NamedTuple):
    """What one request says."""

    session_id: int
    epoch: int
    to_send: dict[TopicPartition, FetchTarget]
    to_forget: list[tuple[TopicPartition, bytes]]
    """With the topic id under which the broker knows the partition."""


class FetchSession:
    """The session with one broker."""

    __slots__ = ("_epoch", "_known", "session_id")

    def __init__(self) -> None:
        self.session_id = NO_SESSION
        self._epoch = FULL_FETCH
        self._known: dict[TopicPartition, FetchTarget] = {}

    def plan(self, targets: Mapping[TopicPartition, FetchTarget]) -> FetchPlan:
        """The next request for exactly `targets`."""
        if self._epoch == FULL_FETCH:
            self._known = dict(targets)
            return FetchPlan(self.session_id, FULL_FETCH, dict(targets), [])
        to_send = {partition: target for partition, target in targets.items() if self._known.get(partition) != target}
        to_forget = []
        for partition, known in self._known.items():
            target = targets.get(partition)
            if target is None or target.topic_id != known.topic_id:
                # A topic created anew under its old name is another topic: the broker must drop the old one.
                to_forget.append((partition, known.topic_id))
        self._known = dict(targets)
        return FetchPlan(self.session_id, self._epoch, to_send, to_forget)

    def answered(self, error: ErrorCode, session_id: int) -> None:
        """The broker answered. 0 as session id says that it keeps none: go on with full fetches."""
        if error is not ErrorCode.NONE:
            keep = error not in (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
            self.restart(keep_id=keep)
        elif session_id == NO_SESSION:
            self.restart(keep_id=False)
        else:
            self.session_id = session_id
            self._epoch = 1 if self._epoch >= _LAST_EPOCH else self._epoch + 1

    def failed(self) -> None:
        """No answer came: the broker may or may not have seen the request."""
        self.restart(keep_id=True)

    def restart(self, *, keep_id: bool) -> None:
        """Start over with a full fetch; with its id kept the broker replaces the old session instead of adding one."""
        if not keep_id:
            self.session_id = NO_SESSION
        self._epoch = FULL_FETCH
        self._known = {}

    def partitions(self) -> Iterable[TopicPartition]:
        """Those the broker would answer for."""
        return self._known.keys()
