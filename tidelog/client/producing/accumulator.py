"""The producer's memory: collects records into batches by partition until they are due to be sent.

Here: batching, linger, the memory bound, order of retries, expiry. Not here: sequences
(`producer_session`), leaders and requests (`sender`), and futures: a record's ticket is an opaque
value that the batch returns at its end. Pure. Invariants: a batch is in exactly one state: waiting,
in flight or complete. The waiting batches of a partition stay in creation order, retries included.
`used_bytes` is the sum over batches that are not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from tidelog.client.model import TopicPartition
from tidelog.client.producing.batch_delivery import BatchDelivery
from tidelog.client.producing.record_timestamps import RecordTimestamps
from tidelog.client.producing.send_group import SendGroup
from tidelog.protocol.batches.records import BatchBuilder, iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError

Ticket = TypeVar("Ticket")
Headers = Sequence[tuple[str, bytes | None]]

RECORD_OVERHEAD_BYTES = 128
"""Charged per record for its ticket and bookkeeping, so that the bound holds for tiny records too.
"""


class ProducerBatch(Generic[Ticket]):
    """Records of one partition that are sent together, with the identity of their first attempt."""

    __slots__ = (
        "attempts",
        "base_sequence",
        "builder",
        "charged_bytes",
        "created_ms",
        "delivery",
        "first_record",
        "group",
        "in_flight",
        "is_complete",
        "may_be_in_log",
        "number",
        "partition",
        "parts",
        "producer_epoch",
        "producer_id",
        "refusal",
        "retry_at_ms",
        "tickets",
        "timestamps",
    )

    def __init__(
        self, number: int, partition: TopicPartition, builder: BatchBuilder, now_ms: float, first_record: int = 0
    ) -> None:
        self.number = number
        self.first_record = first_record
        """The index of the first record in the original batch; above 0 for later parts of a split
        batch.

        A part has the number of the original batch.
        """
        self.partition = partition
        self.builder = builder
        self.created_ms = now_ms
        self.group: SendGroup | None = None
        """The call that sends the whole batch. Such a batch has no tickets."""
        self.tickets: list[Ticket] = []
        self.timestamps = RecordTimestamps()
        self.delivery = BatchDelivery(partition, self.timestamps)
        """For the records that are observed through it. A batch of a group needs none."""
        self.charged_bytes = 0
        self.attempts = 0
        self.refusal = ""
        """How the last attempt ended, for the error of a batch whose time is over."""
        self.retry_at_ms = 0.0
        self.in_flight = False
        self.is_complete = False
        self.parts: list[ProducerBatch[Ticket]] = []
        """The batches into which this batch was split."""
        self.producer_id = -1
        self.producer_epoch = -1
        self.base_sequence = -1
        self.may_be_in_log = False
        """An attempt got no response, or a response after which the batch may be in the log."""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key within the partition."""
        return self.number, self.first_record

    def incomplete_batches(self) -> Iterator[ProducerBatch[Ticket]]:
        """This batch, or its parts, as far as they are not complete."""
        if not self.is_complete:
            yield self
        for part in self.parts:
            yield from part.incomplete_batches()

    @property
    def record_count(self) -> int:
        return self.builder.record_count

    @property
    def size_bytes(self) -> int:
        return self.builder.size_bytes


class PartitionQueue(Generic[Ticket]):
    """The batches of one partition: waiting ones in order, the last perhaps open, and those in
    flight.
    """

    __slots__ = ("in_flight", "open_batch", "partition", "preferred_batch", "waiting_batches")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.waiting_batches: deque[ProducerBatch[Ticket]] = deque()
        self.preferred_batch: ProducerBatch[Ticket] | None = None
        """A waiting batch that is sent before older ones."""
        self.open_batch: ProducerBatch[Ticket] | None = None
        self.in_flight: list[ProducerBatch[Ticket]] = []

    @property
    def head(self) -> ProducerBatch[Ticket]:
        """The batch to send next. Requires a waiting batch."""
        return self.waiting_batches[0] if self.preferred_batch is None else self.preferred_batch


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
        self._active_queues: dict[TopicPartition, PartitionQueue[Ticket]] = {}
        self._flush_end_number = 0
        self.incomplete_count = 0
        self.used_bytes = 0
        self.opened_batch_count = 0
        """The number of batches ever opened. A caller detects a new batch by its change."""
        self.is_exhausted = False
        """A caller waits for memory, so all batches are due now."""

    # -- append

    def queue(self, partition: TopicPartition) -> PartitionQueue[Ticket]:
        """The queue of a partition, created on first use."""
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = PartitionQueue(partition)
        return queue

    def append(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
        now_ms: float | None = None,
    ) -> ProducerBatch[Ticket] | None:
        """Add a record. Returns its batch; or None, and adds nothing, when the memory is full.

        Without `now_ms` it opens no batch, and returns None when the record needs one. An empty
        accumulator accepts any record, even one larger than the memory, which would otherwise wait
        forever. Raises KafkaError(MESSAGE_TOO_LARGE) above `max_record_bytes`.
        """
        size_bytes = RECORD_OVERHEAD_BYTES
        if key is not None:
            size_bytes += len(key)
        if value is not None:
            size_bytes += len(value)
        if headers:
            for name, header_value in headers:
                size_bytes += 8 + len(name) + (0 if header_value is None else len(header_value))
        if size_bytes > self._max_charge:
            size_bytes -= RECORD_OVERHEAD_BYTES
            limit = self._max_charge - RECORD_OVERHEAD_BYTES
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE, f"a record of {size_bytes} bytes, max_request_size is {limit}"
            )
        used_bytes = self.used_bytes + size_bytes
        if used_bytes > self._memory_bytes and self.used_bytes:
            return None
        batch = queue.open_batch
        if batch is None or not batch.builder.append(timestamp_ms, key, value, headers):
            if now_ms is None:
                return None
            builder = self._new_builder()
            # A record that cannot be encoded raises here, and must not leave an empty batch.
            was_added = builder.append(timestamp_ms, key, value, headers)
            assert was_added, "an empty batch takes any record"
            batch = self._open_batch(queue, builder, now_ms)
        tickets = batch.tickets
        timestamps = batch.timestamps
        # As `timestamps.append`.
        if timestamp_ms != timestamps.last_ms:
            timestamps.last_ms = timestamp_ms
            timestamps.first_records.append(len(tickets))
            timestamps.run_timestamps_ms.append(timestamp_ms)
        tickets.append(ticket)
        batch.charged_bytes += size_bytes
        self.used_bytes = used_bytes
        return batch

    def append_batch(
        self, queue: PartitionQueue[Ticket], builder: BatchBuilder, group: SendGroup, now_ms: float
    ) -> ProducerBatch[Ticket] | None:
        """Add a whole batch after all records so far. Returns None, and adds nothing, when the memory is full.

        It takes no more records, so it is due at once, as are the batches before it.
        """
        size_bytes = builder.size_bytes + RECORD_OVERHEAD_BYTES
        if self.used_bytes and self.used_bytes + size_bytes > self._memory_bytes:
            return None
        batch = self._open_batch(queue, builder, now_ms)
        queue.open_batch = None
        batch.group = group
        group.appended_count += builder.record_count
        batch.charged_bytes = size_bytes
        self.used_bytes += size_bytes
        return batch

    def add_in_flight(
        self,
        queue: PartitionQueue[Ticket],
        builder: BatchBuilder,
        ticket: Ticket,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes,
        now_ms: float,
    ) -> ProducerBatch[Ticket]:
        """Add a batch of one record, without headers, that is sent already. Requires that all others are complete."""
        assert not self.incomplete_count
        batch: ProducerBatch[Ticket] = ProducerBatch(self.opened_batch_count, queue.partition, builder, now_ms)
        batch.timestamps.append(0, timestamp_ms)
        batch.tickets.append(ticket)
        batch.charged_bytes = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value)
        batch.in_flight = True
        batch.attempts = 1
        self.opened_batch_count += 1
        self.incomplete_count += 1
        self.used_bytes += batch.charged_bytes
        queue.in_flight.append(batch)
        return batch

    def _open_batch(self, queue: PartitionQueue[Ticket], builder: BatchBuilder, now_ms: float) -> ProducerBatch[Ticket]:
        batch: ProducerBatch[Ticket] = ProducerBatch(self.opened_batch_count, queue.partition, builder, now_ms)
        self.opened_batch_count += 1
        self.incomplete_count += 1
        queue.open_batch = batch
        queue.waiting_batches.append(batch)
        self._active_queues[queue.partition] = queue
        return batch

    # -- batches to send

    def active_queues(self) -> Iterable[PartitionQueue[Ticket]]:
        """Queues with waiting batches, the least recently used first."""
        return self._active_queues.values()

    @property
    def has_waiting_batches(self) -> bool:
        return bool(self._active_queues)

    def ready_in_ms(self, queue: PartitionQueue[Ticket], now_ms: float) -> float:
        """The time until the head of a non-empty queue is due; 0 when it is due now."""
        head = queue.head
        if head.attempts:
            return max(0.0, head.retry_at_ms - now_ms)
        if head is not queue.open_batch or head.delivery.is_awaited:
            return 0.0
        if head.number < self._flush_end_number or self.is_exhausted:
            return 0.0
        return max(0.0, head.created_ms + self._linger_ms - now_ms)

    def take(self, queue: PartitionQueue[Ticket]) -> ProducerBatch[Ticket]:
        """Move the head of the queue to the batches in flight. Later records open a new batch."""
        batch = queue.head
        self._remove_waiting(queue, batch)
        batch.in_flight = True
        batch.attempts += 1
        queue.in_flight.append(batch)
        if queue.waiting_batches:  # it is the last one of the active queues now
            self._active_queues[queue.partition] = self._active_queues.pop(queue.partition)
        return batch

    def prefer(self, batch: ProducerBatch[Ticket]) -> None:
        """Send this waiting batch next, once, before older ones."""
        queue = self._queues[batch.partition]
        assert batch in queue.waiting_batches
        queue.preferred_batch = batch

    def _remove_waiting(self, queue: PartitionQueue[Ticket], batch: ProducerBatch[Ticket]) -> None:
        if queue.waiting_batches[0] is batch:
            queue.waiting_batches.popleft()
        else:
            queue.waiting_batches.remove(batch)
        if batch is queue.open_batch:
            queue.open_batch = None
        if batch is queue.preferred_batch:
            queue.preferred_batch = None
        if not queue.waiting_batches:
            del self._active_queues[queue.partition]

    # -- results

    def put_back(self, batch: ProducerBatch[Ticket], retry_at_ms: float) -> None:
        """Return a batch in flight to its place in the waiting batches, for a retry."""
        queue = self._remove_in_flight(batch)
        batch.retry_at_ms = retry_at_ms
        self._insert_in_order(queue, batch)

    def _insert_in_order(self, queue: PartitionQueue[Ticket], batch: ProducerBatch[Ticket]) -> None:
        place = 0
        for other in queue.waiting_batches:
            if other.order > batch.order:
                break
            place += 1
        queue.waiting_batches.insert(place, batch)
        self._active_queues[queue.partition] = queue

    def split(self, batch: ProducerBatch[Ticket]) -> list[ProducerBatch[Ticket]]:
        """Split a batch in flight that is too large for the broker into two or more waiting
        batches.
        """
        records = list(iter_records(batch.builder.build(), batch.size_bytes))
        assert len(records) == batch.record_count > 1
        parts: list[ProducerBatch[Ticket]] = []
        for index, record in enumerate(records):
            headers = record.headers
            starts_part = index in (0, len(records) // 2)
            if starts_part or not parts[-1].builder.append(record.timestamp, record.key, record.value, headers):
                first_record = batch.first_record + index
                part: ProducerBatch[Ticket] = ProducerBatch(
                    batch.number, batch.partition, self._new_builder(), batch.created_ms, first_record
                )
                part.attempts = batch.attempts
                part.may_be_in_log = batch.may_be_in_log
                part.group = batch.group
                parts.append(part)
                part.builder.append(record.timestamp, record.key, record.value, headers)
            if batch.group is None:
                parts[-1].timestamps.append(len(parts[-1].tickets), record.timestamp)
                parts[-1].tickets.append(batch.tickets[index])
        for part in parts:
            part.charged_bytes = batch.charged_bytes * part.record_count // batch.record_count
        parts[-1].charged_bytes += batch.charged_bytes - sum(part.charged_bytes for part in parts)
        queue = self._remove_in_flight(batch)
        batch.is_complete = True
        batch.parts = parts
        for part in parts:
            self._insert_in_order(queue, part)
        self.incomplete_count += len(parts) - 1
        if batch.group is None:
            batch.delivery.split([(part.delivery, part.record_count) for part in parts])
        return parts

    def complete(self, batch: ProducerBatch[Ticket]) -> None:
        """Complete a batch that succeeded or failed for good, and free its memory."""
        assert not batch.is_complete, "a batch ends once"
        if batch.in_flight:
            self._remove_in_flight(batch)
        else:
            self._remove_waiting(self._queues[batch.partition], batch)
        batch.is_complete = True
        self.incomplete_count -= 1
        self.used_bytes -= batch.charged_bytes

    def _remove_in_flight(self, batch: ProducerBatch[Ticket]) -> PartitionQueue[Ticket]:
        queue = self._queues[batch.partition]
        queue.in_flight.remove(batch)
        batch.in_flight = False
        return queue

    # -- expiry and flush

    def expired_batches(self, now_ms: float) -> list[ProducerBatch[Ticket]]:
        """Batches, waiting or in flight, past their delivery timeout.

        The caller fails and completes them.
        """
        created_ms_max = now_ms - self._delivery_timeout_ms
        batches: list[ProducerBatch[Ticket]] = []
        for queue in self._queues.values():
            if queue.in_flight or queue.waiting_batches:
                batches.extend(batch for batch in queue.in_flight if batch.created_ms <= created_ms_max)
                for batch in queue.waiting_batches:
                    if batch.created_ms > created_ms_max:
                        break
                    batches.append(batch)
        return batches

    def flush(self) -> None:
        """Make all records appended so far due at once.

        Later records wait for their linger time.
        """
        self._flush_end_number = self.opened_batch_count

    def incomplete_batches(self) -> Iterator[ProducerBatch[Ticket]]:
        """Every batch that is not complete, in order within each partition."""
        for queue in self._queues.values():
            yield from queue.in_flight
            yield from queue.waiting_batches

    def forget(self, partition: TopicPartition) -> None:
        """Drop the queue of an unused partition, unless it has batches that are not complete."""
        queue = self._queues.get(partition)
        if queue is not None and not queue.waiting_batches and not queue.in_flight:
            del self._queues[partition]
