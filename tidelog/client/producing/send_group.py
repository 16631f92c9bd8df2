"""The outcome of one call that sends many records: the ranges of offsets, or one error for all.

Pure: the future that gets the outcome is any object with a future's methods. Invariant: the future
gets its outcome once, when every record of the call is delivered or has failed.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple, Protocol

from tidelog.client.model import WrittenRange
from tidelog.protocol.errors import ErrorCode, KafkaError


class GroupFuture(Protocol):
    """The part of a future that a group needs."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Any, /) -> None: ...

    def exception(self) -> Any: ...


class BatchSendError(KafkaError):
    """Not every record of a `send_many`, `send_batch` or `send_arrow` was delivered.

    `written` has the ranges that are in the log. `failed_count` records were not delivered; as with
    a single record they may be in the log when their last attempt got no response. `code` and
    `message` are those of the first failure.
    """

    def __init__(self, code: ErrorCode, message: str | None, written: list[WrittenRange], failed_count: int) -> None:
        super().__init__(code, message)
        self.written = written
        self.failed_count = failed_count


class _Range(NamedTuple):
    base_offset: int
    record_count: int


class SendGroup:
    """The records of one call: how many are underway, which are written, and the first error.

    In place of a future it can be the ticket of a single record.
    """

    __slots__ = (
        "_failed_count",
        "_first_error",
        "_ranges",
        "_settled_count",
        "_topic",
        "appended_count",
        "future",
        "is_read",
        "record_count",
    )

    is_divisible = True
    """Whether a batch of the group may be split when a broker finds it too large."""

    def __init__(self, topic: str, future: GroupFuture, record_count: int, *, is_read: bool = True) -> None:
        self.future: Any = future
        self.record_count = record_count
        """All records, once `is_read`; until then those that an iterator has given so far."""
        self.is_read = is_read
        self.appended_count = 0
        """The records that are in the accumulator or beyond."""
        self._topic = topic
        self._ranges: dict[int, list[_Range]] = {}
        self._settled_count = 0
        self._failed_count = 0
        self._first_error: KafkaError | None = None
        if not record_count:
            self._settle(0)

    @property
    def unappended_count(self) -> int:
        """The records that are not in the accumulator yet, of those that are read."""
        return self.record_count - self.appended_count

    def end(self) -> None:
        """No records follow."""
        self.is_read = True
        self._settle(0)

    def acknowledge(self, partition: int, base_offset: int, count: int) -> None:
        """Note consecutive records in the log; offset -1 when it is unknown."""
        ranges = self._ranges.setdefault(partition, [])
        last = ranges[-1] if ranges else None
        if last is not None and base_offset == (-1 if last.base_offset < 0 else last.base_offset + last.record_count):
            ranges[-1] = _Range(last.base_offset, last.record_count + count)
        else:
            ranges.append(_Range(base_offset, count))
        self._settle(count)

    def fail(self, error: KafkaError, count: int) -> None:
        """Note records that are not delivered."""
        self._first_error = self._first_error or error
        self._failed_count += count
        self._settle(count)

    def fail_rest(self, error: KafkaError) -> None:
        """The records that were not appended will not be, and no others are read."""
        self.is_read = True
        self.fail(error, self.unappended_count)

    # -- the outcome

    def _settle(self, count: int) -> None:
        self._settled_count += count
        if self._settled_count < self.record_count or not self.is_read or self.future.done():
            return
        written = [
            WrittenRange(self._topic, partition, *each)
            for partition, ranges in sorted(self._ranges.items())
            for each in ranges
        ]
        error = self._first_error
        if error is None:
            self.future.set_result(self._result(written))
        else:
            self.future.set_exception(self._error(error, written))
            self.future.exception()  # marks it as retrieved: the sender has logged the failure

    def _result(self, written: list[WrittenRange]) -> Any:
        return written

    def _error(self, error: KafkaError, written: list[WrittenRange]) -> KafkaError:
        return BatchSendError(error.code, error.message, written, self._failed_count)


class BatchOutcome(SendGroup):
    """The outcome of one record batch: its range, or the error."""

    __slots__ = ()

    is_divisible = False

    def _result(self, written: list[WrittenRange]) -> Any:
        return written[0]

    def _error(self, error: KafkaError, written: list[WrittenRange]) -> KafkaError:
        return copy(error)  # of several batches that fail together each gets one of its own
