"""The delivery of one batch: what became of its records, for those who look at a record's outcome later.

Pure. A record without an observer costs nothing when its batch is delivered. Invariants: a delivery
is settled once, by `acknowledge` or `fail`, or it is split into the deliveries of the parts. Each
observer is notified once, in the order of the records.
"""

from __future__ import annotations

from copy import copy
from typing import Protocol

from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.protocol.errors import KafkaError


class Observer(Protocol):
    """The future of one record, once anything depends on it."""

    @property
    def index(self) -> int:
        """The place of the record in its batch."""

    def cancelled(self) -> bool: ...

    def handle_settled(self) -> None:
        """The delivery is settled."""

    def handle_split(self) -> None:
        """The batch is split. Observe the part that has the record."""


class BatchDelivery:
    """The outcome of one batch, shared by the futures of its records.

    It keeps no record, and timestamps only as runs of equal ones, because a future that is kept
    keeps it.
    """

    __slots__ = (
        "_base_offset",
        "_error",
        "_log_append_time_ms",
        "_observers",
        "_timestamps",
        "is_awaited",
        "is_settled",
        "partition",
        "parts",
    )

    def __init__(self, partition: TopicPartition, timestamps: RecordTimestamps) -> None:
        self.partition = partition
        self._timestamps = timestamps
        """Those of the batch, which grow with it."""
        self._base_offset = -1
        self._log_append_time_ms = -1
        self._observers: list[Observer] = []
        self.parts: list[tuple[BatchDelivery, int]] = []
        """The deliveries of a batch that is split, each with the number of its records."""
        self.is_awaited = False
        """A caller waits for one of the records: the batch is due without linger."""
        self.is_settled = False
        self._error: KafkaError | None = None

    def observe(self, observer: Observer) -> None:
        """Notify this future when the delivery is settled. Requires one that is not."""
        self._observers.append(observer)

    @property
    def error(self) -> KafkaError | None:
        """Why the records are not delivered. Each caller gets an exception of its own: a raise changes it, and all of
        them together would give it a traceback as long as the batch.
        """
        return None if self._error is None else copy(self._error)

    @property
    def cancelled_count(self) -> int:
        """The number of futures that were cancelled."""
        return sum(observer.cancelled() for observer in self._observers)

    def metadata(self, index: int) -> RecordMetadata:
        """The position of an acknowledged record. Raises the KafkaError of one that is not delivered."""
        if self._error is not None:
            raise copy(self._error)
        topic, partition = self.partition
        offset = self._base_offset if self._base_offset < 0 else self._base_offset + index
        timestamp_ms = self._timestamps.of(index) if self._log_append_time_ms < 0 else self._log_append_time_ms
        return RecordMetadata(topic, partition, offset, timestamp_ms)

    # -- the outcome

    def acknowledge(self, base_offset: int, log_append_time_ms: int) -> None:
        """The records are in the log; offset -1 when it is unknown, time -1 where the records' own time counts."""
        assert not self.is_settled
        self._base_offset = base_offset
        self._log_append_time_ms = log_append_time_ms
        self.is_settled = True
        self._notify()

    def fail(self, error: KafkaError) -> None:
        """The records are not delivered."""
        assert not self.is_settled
        self._error = error
        self.is_settled = True
        self._notify()

    def _notify(self) -> None:
        if self._observers:
            observers, self._observers = self._observers, []  # breaks the cycle with the futures
            if len(observers) > 1:
                observers.sort(key=lambda observer: observer.index)
            for observer in observers:
                observer.handle_settled()

    # -- parts

    def split(self, parts: list[tuple[BatchDelivery, int]]) -> None:
        """The batch is sent as these parts, which have so many of its records, in order."""
        assert not self.is_settled
        self.parts = parts
        observers, self._observers = self._observers, []
        for observer in observers:
            observer.handle_split()

    def part_of(self, index: int) -> tuple[BatchDelivery, int]:
        """The delivery that settles a record, and the record's place there."""
        if not self.parts:
            return self, index
        for part, count in self.parts:
            if index < count:
                return part.part_of(index)
            index -= count
        raise AssertionError("the parts of a batch have all its records")
