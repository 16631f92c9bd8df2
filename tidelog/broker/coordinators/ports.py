"""What the coordinators' runtime needs from the node around it: a log per partition, the time, and timers.

Here lives the contract alone; the node's side of it is `broker/coordinators/group_ports.py`, tests bring their own.
The invariant: everything is called from the loop thread, and everything calls back there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from tidelog.protocol.errors import ErrorCode


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Ports(Protocol):
    """What the runtime needs from the node. All calls come from, and all callbacks go to, the loop thread."""

    def append(self, partition: int, batch: bytearray) -> int:
        """Append as leader; returns the offset after the last record. Raises KafkaError."""

    def when_committed(self, partition: int, offset: int, callback: Callable[[Exception | None], None]) -> None:
        """Call back once everything below `offset` is committed, or with why it never will be from here."""

    def read_log(self, partition: int) -> Iterator[memoryview]:
        """The partition's log from its start to its end: whole batches, some at a time; none where they must be waited
        for, on a thread."""

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """Of any partition that this node has a replica of."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> TimerHandle: ...

    def now_ms(self) -> int:
        """Time that never jumps, for deadlines."""

    def wall_ms(self) -> int:
        """Time since 1970, for records."""


# What a failed append means to a member (Kafka's CoordinatorOperationExceptionHelper).
_APPEND_ERRORS: dict[ErrorCode, ErrorCode] = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.INVALID_FETCH_SIZE: ErrorCode.UNKNOWN_SERVER_ERROR,
}


def told_to_members(error: ErrorCode) -> ErrorCode:
    """The error a group's member or a producer understands, for one that an append was refused with."""
    return _APPEND_ERRORS.get(error, error)
