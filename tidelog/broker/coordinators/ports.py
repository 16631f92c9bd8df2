"""The interface between the coordinators' runtime and its node: a log per partition, clocks and
timers.

`broker/coordinators/group_ports.py` implements it for a node; tests have an implementation of their
own. Invariant: all calls come from the loop thread, and all callbacks run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from tidelog.protocol.errors import ErrorCode
from tidelog.storage.producers.verification import TransactionAppend, Verification


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Ports(Protocol):
    """The node's services for the runtime."""

    def append(self, partition: int, batch: bytearray, transaction: TransactionAppend | None = None) -> int:
        """Append as leader; returns the offset after the batch's last record. Raises KafkaError.

        `transaction`: for a batch of a producer's transaction, or the marker at its end.
        """

    def batch_bytes_max(self, partition: int) -> int:
        """The size in bytes of the largest batch that `append` takes. Raises KafkaError if another node leads."""

    def begin_verification(
        self, partition: int, producer_id: int, producer_epoch: int, adds: bool
    ) -> Verification | None:
        """For a producer that is about to write: what its first batch needs, None if it needs nothing.

        Raises KafkaError.
        """

    def is_committed(self, partition: int, offset: int) -> bool:
        """Whether all records below `offset` are committed, and this node leads the partition."""

    def when_committed(self, partition: int, offset: int, callback: Callable[[Exception | None], None]) -> None:
        """Call back with None when all records below `offset` are committed, or with the error that
        prevents it.
        """

    def read_log(self, partition: int) -> Iterator[memoryview]:
        """The partition's log from start to end, in chunks of whole batches.

        An empty chunk means that a thread still reads the next one.
        """

    def on_thread(self, work: Callable[[], bytes]) -> Callable[[], bytes | None]:
        """Start `work` on a thread. What this returns gives the result, None before there is one, or raises the error
        of `work`.
        """

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """The high watermark of a replica on this node; None if there is no replica."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> TimerHandle: ...

    def now_ms(self) -> int:
        """Monotonic time, for deadlines."""

    def wall_ms(self) -> int:
        """Wall clock time since 1970, for records."""


# The error for clients by the error of an append (Kafka's CoordinatorOperationExceptionHelper).
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


def error_for_members(error: ErrorCode) -> ErrorCode:
    """The error for a group's member or a producer, in place of the append's error."""
    return _APPEND_ERRORS.get(error, error)
