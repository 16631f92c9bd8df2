"""The producer's memory: records gathered into one batch per partition until they are worth sending.

Here: batching, linger, the memory bound, order of retries, expiry. Not here: sequences (`producer_session`), leaders
and requests (`sender`), and futures: a record's ticket is an opaque value handed back when its batch ends. Pure.
Invariants: a batch is in exactly one of waiting, on the wire, ended; within a partition the waiting batches stay in the
order in which they were created, retried or not; `used_bytes` is the sum over batches that have not ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from tidelog.client.model import TopicPartition
from tidelog.protocol.batches.records import BatchBuilder, iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError

Ticket = TypeVar("Ticket")
Headers = Sequence[tuple[str, bytes | None]]

RECORD_OVERHEAD_BYTES = 128
"""Charged per record beside its own bytes, for its ticket and bookkeeping, so that the bound holds for tiny records."""


class ProducerBatch(Generic[Ticket]):
    """Records of one partition that travel together, with the identity under which they were first sent."""

    __slots__ = (
        "attempts",
        "base_sequence",
        "builder",
        "charged_bytes",
        "created_ms",
        "ended",
        "first_record",
        "in_doubt",
        "number",
        "on_wire",
        "partition",
        "parts",
        "producer_epoch",
        "producer_id",
        "retry_at_ms",
        "tickets",
        "timestamps_ms",
    )

    def __init__(
        self, number: int, partition: TopicPartition, builder: BatchBuilder, now_ms: float, first_record: int = 0
    ) -> None:
        self.number = number
        self.first_record = first_record
        """Of a part of a batch that was divided: where it begins in that batch, whose number it has."""
        self.partition = partition
        self.builder = builder
        self.created_ms = now_ms
        self.tickets: list[Ticket] = []
        self.timestamps_ms: list[int] = []
        self.charged_bytes = 0
        self.attempts = 0
        self.retry_at_ms = 0.0
        self.on_wire = False
        self.ended = False
        self.parts: list[ProducerBatch[Ticket]] = []
        """The batches that it was divided into."""
        self.producer_id = -1
        self.producer_epoch = -1
        self.base_sequence = -1
        self.in_doubt = False
        """An attempt got no answer, or one that does not exclude that the batch is in the log."""

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the order of its partition."""
        return self.number, self.first_record

    def unended(self) -> Iterator[ProducerBatch[Ticket]]:
        """Itself, or those of its parts that have not ended."""
        if not self.ended:
            yield self
        for part in self.parts:
            yield from part.unended()

    @property
    def record_count(self) -> int:
        return len(self.tickets)

    @property
    def size_bytes(self) -> int:
        return self.builder.size_bytes


class PartitionQueue(Generic[Ticket]):
    """The batches of one partition: waiting in order, the last of them perhaps still open, and those on the wire."""

    __slots__ = ("on_wire", "open_batch", "partition", "preferred", "waiting")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.waiting: deque[ProducerBatch[Ticket]] = deque()
        self.preferred: ProducerBatch[Ticket] | None = None
        """A waiting batch that is sent before those that were created before it."""
        self.open_batch: ProducerBatch[Ticket] | None = None
        self.on_wire: list[ProducerBatch[Ticket]] = []

    @property
    def head(self) -> ProducerBatch[Ticket]:
        """The batch to send next. Something must be waiting."""
        return self.waiting[0] if self.preferred is None else self.preferred


class Accumulator(Generic[Ticket]):
    """All partitions' queues under one memory bound. Times are milliseconds of any steady clock."""

    def __init__(
        self,
        new_builder: Callable[[], BatchBuilder],
        *,
        memory_bytes: int,
        max_record_bytes: int,
        linger_ms: float,
        delivery_timeout_ms: float,
    ) -> None:
        self._new_builder = new_builder
        self._memory_bytes = memory_bytes
        self._max_charge = max_record_bytes + RECORD_OVERHEAD_BYTES
        self._linger_ms = linger_ms
        self._delivery_timeout_ms = delivery_timeout_ms
        self._queues: dict[TopicPartition, PartitionQueue[Ticket]] = {}
        self._active: dict[TopicPartition, PartitionQueue[Ticket]] = {}
        self._flushed_number = 0
        self._unended = 0
        self.used_bytes = 0
        self.opened_batches = 0
        """How many batches were ever opened: a caller compares two readings to see that one was."""
        self.exhausted = False
        """Somebody waits for memory: everything is worth sending now."""

    # -- taking records in

    def queue(self, partition: TopicPartition) -> PartitionQueue[Ticket]:
        """The queue of a partition, made on first use."""
        found = self._queues.get(partition)
        if found is None:
            found = self._queues[partition] = PartitionQueue(partition)
        return found

    def append(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
        now_ms: float,
    ) -> bool:
        """Add a record; False when the memory is full, and then nothing was added.

        One record is always taken when nothing else is held, even if it is more than the memory: refusing it would wait
        forever. Raises KafkaError(MESSAGE_TOO_LARGE) above `max_record_bytes`.
        """
        size_bytes = RECORD_OVERHEAD_BYTES
        if key is not None:
            size_bytes += len(key)
        if value is not None:
            size_bytes += len(value)
        for name, header_value in headers:
            size_bytes += 8 + len(name) + (0 if header_value is None else len(header_value))
        if size_bytes > self._max_charge:
            size_bytes -= RECORD_OVERHEAD_BYTES
            limit = self._max_charge - RECORD_OVERHEAD_BYTES
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE, f"a record of {size_bytes} bytes, max_request_size is {limit}"
            )
        used_bytes = self.used_bytes
        if used_bytes and used_bytes + size_bytes > self._memory_bytes:
            return False
        batch = queue.open_batch
        if batch is None or not batch.builder.append(timestamp_ms, key, value, headers):
            batch = self._open(queue, now_ms)
            taken = batch.builder.append(timestamp_ms, key, value, headers)
            assert taken, "an empty batch takes any record"
        batch.tickets.append(ticket)
        batch.timestamps_ms.append(timestamp_ms)
        batch.charged_bytes += size_bytes
        self.used_bytes = used_bytes + size_bytes
        return True

    def _open(self, queue: PartitionQueue[Ticket], now_ms: float) -> ProducerBatch[Ticket]:
        batch: ProducerBatch[Ticket] = ProducerBatch(self.opened_batches, queue.partition, self._new_builder(), now_ms)
        self.opened_batches += 1
        self._unended += 1
        queue.open_batch = batch
        queue.waiting.append(batch)
        self._active[queue.partition] = queue
        return batch

    # -- deciding what to send

    def active(self) -> Iterable[PartitionQueue[Ticket]]:
        """Queues with something waiting, in rotation: the one that was sent from longest ago comes first."""
        return self._active.values()

    def ready_in_ms(self, queue: PartitionQueue[Ticket], now_ms: float) -> float:
        """How long until the head of a non-empty queue is worth sending, as far as time goes; 0 when it is now."""
        head = queue.head
        if head.attempts:
            return max(0.0, head.retry_at_ms - now_ms)
        if head is not queue.open_batch or head.number < self._flushed_number or self.exhausted:
            return 0.0
        return max(0.0, head.created_ms + self._linger_ms - now_ms)

    def take(self, queue: PartitionQueue[Ticket]) -> ProducerBatch[Ticket]:
        """The head of the queue goes onto the wire. Records that follow open a batch of their own."""
        batch = queue.head
        self._off_waiting(queue, batch)
        batch.on_wire = True
        batch.attempts += 1
        queue.on_wire.append(batch)
        self._active.pop(queue.partition, None)
        if queue.waiting:
            self._active[queue.partition] = queue
        return batch

    def prefer(self, batch: ProducerBatch[Ticket]) -> None:
        """A waiting batch is sent next, once, before those that were created before it."""
        queue = self._queues[batch.partition]
        assert batch in queue.waiting
        queue.preferred = batch

    def _off_waiting(self, queue: PartitionQueue[Ticket], batch: ProducerBatch[Ticket]) -> None:
        if queue.waiting[0] is batch:
            queue.waiting.popleft()
        else:
            queue.waiting.remove(batch)
        if batch is queue.open_batch:
            queue.open_batch = None
        if batch is queue.preferred:
            queue.preferred = None
        if not queue.waiting:
            del self._active[queue.partition]

    # -- hearing how it went

    def put_back(self, batch: ProducerBatch[Ticket], retry_at_ms: float) -> None:
        """The batch did not make it and is to be sent again: back to its place in the order."""
        queue = self._off_wire(batch)
        batch.retry_at_ms = retry_at_ms
        self._wait(queue, batch)

    def _wait(self, queue: PartitionQueue[Ticket], batch: ProducerBatch[Ticket]) -> None:
        place = 0
        for waiting in queue.waiting:
            if waiting.order > batch.order:
                break
            place += 1
        queue.waiting.insert(place, batch)
        self._active[queue.partition] = queue

    def divide(self, batch: ProducerBatch[Ticket]) -> list[ProducerBatch[Ticket]]:
        """A batch on the wire is too large for the broker: its records in two batches, or a few, to be sent now."""
        records = list(iter_records(batch.builder.build(), batch.size_bytes))
        assert len(records) == batch.record_count > 1
        parts: list[ProducerBatch[Ticket]] = []
        for index, record in enumerate(records):
            headers = record.headers
            anew = index in (0, len(records) // 2)
            if anew or not parts[-1].builder.append(record.timestamp, record.key, record.value, headers):
                first_record = batch.first_record + index
                part: ProducerBatch[Ticket] = ProducerBatch(
                    batch.number, batch.partition, self._new_builder(), batch.created_ms, first_record
                )
                part.attempts = batch.attempts
                part.in_doubt = batch.in_doubt
                parts.append(part)
                part.builder.append(record.timestamp, record.key, record.value, headers)
            parts[-1].tickets.append(batch.tickets[index])
            parts[-1].timestamps_ms.append(record.timestamp)
        for part in parts:
            part.charged_bytes = batch.charged_bytes * part.record_count // batch.record_count
        parts[-1].charged_bytes += batch.charged_bytes - sum(part.charged_bytes for part in parts)
        queue = self._off_wire(batch)
        batch.ended = True
        batch.parts = parts
        for part in parts:
            self._wait(queue, part)
        self._unended += len(parts) - 1
        return parts

    def end(self, batch: ProducerBatch[Ticket]) -> None:
        """The batch succeeded or failed for good: its memory is free."""
        assert not batch.ended, "a batch ends once"
        queue = self._queues[batch.partition]
        if batch.on_wire:
            self._off_wire(batch)
        else:
            self._off_waiting(queue, batch)
        batch.ended = True
        self._unended -= 1
        self.used_bytes -= batch.charged_bytes

    def _off_wire(self, batch: ProducerBatch[Ticket]) -> PartitionQueue[Ticket]:
        queue = self._queues[batch.partition]
        queue.on_wire.remove(batch)
        batch.on_wire = False
        return queue

    # -- the rest

    def expired(self, now_ms: float) -> list[ProducerBatch[Ticket]]:
        """Batches, waiting or on the wire, whose delivery timeout is over; the caller fails and ends them."""
        deadline = now_ms - self._delivery_timeout_ms
        found: list[ProducerBatch[Ticket]] = []
        for queue in self._queues.values():
            if queue.on_wire or queue.waiting:
                found.extend(batch for batch in queue.on_wire if batch.created_ms <= deadline)
                for batch in queue.waiting:
                    if batch.created_ms > deadline:
                        break
                    found.append(batch)
        return found

    def flush(self) -> None:
        """Everything appended so far is worth sending at once; later records wait their linger again."""
        self._flushed_number = self.opened_batches

    def unended(self) -> Iterator[ProducerBatch[Ticket]]:
        """Every batch that has not ended, per partition in order."""
        for queue in self._queues.values():
            yield from queue.on_wire
            yield from queue.waiting

    @property
    def unended_count(self) -> int:
        return self._unended

    def forget(self, partition: TopicPartition) -> None:
        """Drop the queue of a partition that is no longer used; kept while anything of it has not ended."""
        queue = self._queues.get(partition)
        if queue is not None and not queue.waiting and not queue.on_wire:
            del self._queues[partition]
