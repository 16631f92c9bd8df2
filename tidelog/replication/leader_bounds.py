"""Asks for the starts and the ends of a leader's logs, for followers whose logs are out of the leader's range.

After a long absence all partitions of a link may ask at once. Invariant: one question is open at a time, a pair of
ListOffsets requests. It names the partitions that have asked since the one before it, ASKED_AT_ONCE_MAX at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

if TYPE_CHECKING:
    from tidelog.replication.followed_partition import FollowedPartition, Key
    from tidelog.replication.ports import Link

API_KEY: Final = 2
VERSION: Final = 7
LATEST: Final = -1
EARLIEST: Final = -2
ASKED_AT_ONCE_MAX: Final = 500

Asked = dict[tuple[str, int], "FollowedPartition"]
Offsets = dict[tuple[str, int], int]
OnBounds = Callable[["FollowedPartition", "tuple[int, int] | None"], None]


class LeaderBounds:
    """Calls `on_bounds` with (log start, log end), or with None after an error; `on_broken` if the link breaks."""

    def __init__(self, node_id: int, on_bounds: OnBounds, on_broken: Callable[[], None]) -> None:
        self._node_id = node_id
        self._on_bounds = on_bounds
        self._on_broken = on_broken
        self._waiting: dict[Key, FollowedPartition] = {}
        self._asked: Asked = {}
        self.answered_count = 0

    @property
    def is_open(self) -> bool:
        """Whether the leader owes an answer."""
        return bool(self._asked)

    def forget(self) -> None:
        """The link is closed: the open question gets no answer, and the partitions ask again on another link."""
        self._waiting.clear()
        self._asked = {}

    def ask(self, link: Link, followed: FollowedPartition) -> None:
        if self._asked.get((followed.partition.topic, followed.partition.index)) is not followed:
            self._waiting[followed.key] = followed
        if not self._asked:
            self._send(link)

    def _send(self, link: Link) -> None:
        asked: Asked = {}
        for key in list(islice(self._waiting, ASKED_AT_ONCE_MAX)):
            followed = self._waiting.pop(key)
            asked[followed.partition.topic, followed.partition.index] = followed
        self._asked = asked
        answers: dict[int, Offsets] = {}
        for timestamp in (LATEST, EARLIEST):
            request = self._request(asked, timestamp)
            on_answer = partial(self._answered, link, asked, answers, timestamp)
            link.request(API_KEY, VERSION, bytes(request.encode(VERSION)), on_answer)

    def _request(self, asked: Asked, timestamp: int) -> ListOffsetsRequest:
        topics: dict[str, list[ListOffsetsPartition]] = {}
        for (topic, index), followed in asked.items():
            topics.setdefault(topic, []).append(
                ListOffsetsPartition(
                    partition_index=index, current_leader_epoch=followed.leader_epoch, timestamp=timestamp
                )
            )
        return ListOffsetsRequest(
            replica_id=self._node_id,
            topics=[ListOffsetsTopic(name=name, partitions=partitions) for name, partitions in topics.items()],
        )

    def _answered(
        self, link: Link, asked: Asked, answers: dict[int, Offsets], timestamp: int, body: memoryview | None
    ) -> None:
        if asked is not self._asked:
            return  # of a link that is closed
        if body is None:
            self._on_broken()
            return
        self.answered_count += 1
        answers[timestamp] = _offsets(body)
        if len(answers) < 2:
            return
        self._asked = {}
        for place, followed in asked.items():
            start, end = answers[EARLIEST].get(place, -1), answers[LATEST].get(place, -1)
            self._on_bounds(followed, (start, end) if start >= 0 and end >= 0 else None)
        if self._waiting and not self._asked:
            self._send(link)


def _offsets(body: memoryview) -> Offsets:
    """The offsets in an answer, without those of errors; none if it cannot be read."""
    try:
        response = ListOffsetsResponse.decode(bytes(body), VERSION)
    except MalformedMessage:
        return {}
    return {
        (topic.name, each.partition_index): each.offset
        for topic in response.topics
        for each in topic.partitions
        if not each.error_code
    }
