"""Requests for the start and the end of a leader's log, by a follower whose log is out of the leader's range."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

if TYPE_CHECKING:
    from tidelog.replication.ports import Link

API_KEY: Final = 2
VERSION: Final = 7
LATEST: Final = -1
EARLIEST: Final = -2

OnBounds = Callable[["tuple[int, int] | None"], None]


def ask_bounds(
    link: Link,
    node_id: int,
    topic: str,
    index: int,
    leader_epoch: int,
    on_bounds: OnBounds,
    on_broken: Callable[[], None],
) -> None:
    """Call `on_bounds` with (log start, log end), or with None after an error. Call `on_broken`, perhaps twice, if the
    link breaks.
    """
    bounds: dict[int, int] = {}

    def on_answer(timestamp: int, body: memoryview | None) -> None:
        if body is None:
            on_broken()
            return
        try:
            answer = ListOffsetsResponse.decode(bytes(body), VERSION).topics[0].partitions[0]
        except (MalformedMessage, IndexError):
            bounds[timestamp] = -1
        else:
            bounds[timestamp] = -1 if answer.error_code else answer.offset
        if len(bounds) == 2:
            start, end = bounds[EARLIEST], bounds[LATEST]
            on_bounds((start, end) if start >= 0 and end >= 0 else None)

    for timestamp in (LATEST, EARLIEST):
        entry = ListOffsetsPartition(partition_index=index, current_leader_epoch=leader_epoch, timestamp=timestamp)
        request = ListOffsetsRequest(replica_id=node_id, topics=[ListOffsetsTopic(name=topic, partitions=[entry])])
        link.request(API_KEY, VERSION, bytes(request.encode(VERSION)), partial(on_answer, timestamp))
