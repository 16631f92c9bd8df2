"""The place of one answer among those of its connection: filled in any order, emptied in that of the requests.

What is due, and when it is written, is `connection.py`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import deque

    from tidelog.broker.network.connection import KafkaConnection
    from tidelog.broker.network.request import Deferred


class AnswerSlot:
    __slots__ = ("connection", "deferred", "done", "frames", "size_bytes")

    def __init__(self, connection: KafkaConnection, deferred: Deferred | None = None) -> None:
        self.connection = connection
        self.deferred = deferred
        self.done = False
        self.frames: Any = None
        self.size_bytes = 0

    def fill(self, frames: Any) -> int:
        self.done, self.frames = True, frames
        self.size_bytes = sum(map(len, frames)) if type(frames) is list else len(frames)
        return self.size_bytes

    def completed(self, frames: Any) -> None:
        """The parked request has its answer, or None: there will be none."""
        connection = self.connection
        if frames is None:
            connection.close()
            return
        if connection.answer_head(self, frames):
            return
        connection.hold(self.fill(frames))

    def completed_exclusively(self, frames: Any) -> None:
        if frames is None:
            self.connection.close()
            return
        self.connection.end_exclusive()
        self.connection.hold(self.fill(frames))


def find_awaited(slots: deque[AnswerSlot]) -> Deferred | None:
    """The request whose answer is next and not there yet; all answers behind it wait, too."""
    return slots[0].deferred if slots and not slots[0].done else None
