"""The accumulator against a model: nothing lost, nothing twice, order kept per partition, memory counted exactly."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidelog.client.model import TopicPartition
from tidelog.client.producing.accumulator import RECORD_OVERHEAD_BYTES, Accumulator, ProducerBatch
from tidelog.protocol.batches.records import BatchBuilder, decode_batch

PARTITIONS = [TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)]
LINGER_MS = 10
TIMEOUT_MS = 500
MEMORY_BYTES = 4_000


class AccumulatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accumulator: Accumulator[int] = Accumulator(
            lambda: BatchBuilder(160),
            memory_bytes=MEMORY_BYTES,
            max_record_bytes=1_000,
            linger_ms=LINGER_MS,
            delivery_timeout_ms=TIMEOUT_MS,
        )
        self.now_ms = 0.0
        self.next_ticket = 0
        self.unended: dict[TopicPartition, list[int]] = {partition: [] for partition in PARTITIONS}
        self.on_wire: deque[ProducerBatch[int]] = deque()
        self.sizes: dict[int, int] = {}

    @rule(partition=st.sampled_from(PARTITIONS), size=st.integers(0, 90))
    def append(self, partition, size):
        ticket = self.next_ticket
        queue = self.accumulator.queue(partition)
        value = b"%d:" % ticket + b"." * size
        taken = self.accumulator.append(queue, 1_000 + ticket, None, value, (), ticket, self.now_ms)
        charge = len(value) + RECORD_OVERHEAD_BYTES
        used = sum(self.sizes.values())
        assert (taken is not None) == (used == 0 or used + charge <= MEMORY_BYTES)
        if taken:
            self.next_ticket += 1
            self.unended[partition].append(ticket)
            self.sizes[ticket] = charge

    @rule(milliseconds=st.sampled_from([0, 1, 5, 10, 20]))
    def wait(self, milliseconds):
        self.now_ms += milliseconds

    @rule(partition=st.sampled_from(PARTITIONS))
    def take(self, partition):
        queue = self.accumulator.queue(partition)
        if not queue.waiting_batches or self.accumulator.ready_in_ms(queue, self.now_ms) > 0:
            return
        head = queue.waiting_batches[0]
        full = len(queue.waiting_batches) > 1
        assert full or head.attempts or self.now_ms >= head.created_ms + LINGER_MS or head.number < self.flushed
        batch = self.accumulator.take(queue)
        self.on_wire.append(batch)
        # What is on the wire is what was appended, in order, without gaps.
        values = [int(bytes(each.value or b"").split(b":")[0]) for each in decode_batch(batch.builder.build(1, 0, 0))]
        assert values == batch.tickets
        first = self.unended[partition].index(values[0])
        assert self.unended[partition][first : first + len(values)] == values

    flushed = 0

    @rule()
    def flush(self):
        self.accumulator.flush()
        self.flushed = self.accumulator.opened_batch_count
        for queue in self.accumulator.active_queues():
            head = queue.waiting_batches[0]
            assert head.attempts or self.accumulator.ready_in_ms(queue, self.now_ms) == 0

    @precondition(lambda self: self.on_wire)
    @rule(which=st.integers(0, 100))
    def succeed(self, which):
        self._end(self._pick(which))

    @precondition(lambda self: self.on_wire)
    @rule(which=st.integers(0, 100), backoff_ms=st.sampled_from([0, 7]))
    def put_back(self, which, backoff_ms):
        batch = self._pick(which)
        self.accumulator.put_back(batch, self.now_ms + backoff_ms)
        queue = self.accumulator.queue(batch.partition)
        assert batch in queue.waiting_batches

    @rule()
    def expire(self):
        for batch in self.accumulator.expired_batches(self.now_ms):
            assert batch.created_ms <= self.now_ms - TIMEOUT_MS
            if batch in self.on_wire:
                self.on_wire.remove(batch)
            self._end(batch)

    def _pick(self, which: int) -> ProducerBatch[int]:
        batch = self.on_wire[which % len(self.on_wire)]
        self.on_wire.remove(batch)
        return batch

    def _end(self, batch: ProducerBatch[int]) -> None:
        self.accumulator.complete(batch)
        for ticket in batch.tickets:
            self.unended[batch.partition].remove(ticket)
            del self.sizes[ticket]

    @invariant()
    def nothing_is_lost_and_waiting_batches_are_in_order(self):
        assert self.accumulator.used_bytes == sum(self.sizes.values())
        held: dict[TopicPartition, list[int]] = {partition: [] for partition in PARTITIONS}
        count = 0
        for batch in self.accumulator.incomplete_batches():
            held[batch.partition].extend(batch.tickets)
            count += 1
        assert count == self.accumulator.incomplete_count
        for partition in PARTITIONS:
            assert sorted(held[partition]) == self.unended[partition]
            waiting = [t for batch in self.accumulator.queue(partition).waiting_batches for t in batch.tickets]
            assert waiting == sorted(waiting)
        active = {queue.partition for queue in self.accumulator.active_queues()}
        assert active == {partition for partition in PARTITIONS if self.accumulator.queue(partition).waiting_batches}


TestAccumulator = AccumulatorMachine.TestCase
