"""Idempotence under a hostile network: the producer's real batching and sequences against a model of Kafka's log.

The network delivers requests in order per connection, but may drop a connection with any number of its requests, and
their answers, unseen; brokers refuse records, or forget the producer while it is at rest; batches expire. What
must hold: no record is in the log twice, records are in the order in which they were sent, every acknowledged one is
there, and once the network heals everything that was not failed arrives. The tests at the end sabotage the session and
check that this model notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.accumulator import Accumulator, ProducerBatch
from tidelog.client.model import TopicPartition
from tidelog.client.producer_session import REST_MS, ProducerSession, Verdict
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.records import BatchBuilder

PARTITIONS = [TopicPartition("t", 0), TopicPartition("t", 1)]
IN_FLIGHT = 12  # as over several connections, when leaders move: the session keeps to its own bound
TIMEOUT_MS = 400
Batch = ProducerBatch[int]


class ModelLog:
    """One partition's leader as Kafka's `ProducerStateManager`: last five batches, epochs, no gaps."""

    def __init__(self) -> None:
        self.records: list[int] = []
        self.epoch = -1
        self.producer_id = -1
        self.next_sequence = 0
        self.last_five: deque[tuple[int, int]] = deque(maxlen=5)

    def append(self, sent: Sent) -> ErrorCode:
        if sent.producer_id != self.producer_id:
            self.producer_id, self.epoch = sent.producer_id, -1
            self.last_five.clear()
        if sent.epoch < self.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if sent.epoch > self.epoch:
            if self.epoch >= 0 and sent.sequence != 0:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            self.epoch, self.next_sequence = sent.epoch, sent.sequence
            self.last_five.clear()
        if (sent.sequence, len(sent.tickets)) in self.last_five:
            return ErrorCode.NONE  # a duplicate, answered as the first was
        if sent.sequence != self.next_sequence:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        self.records.extend(sent.tickets)
        self.last_five.append((sent.sequence, len(sent.tickets)))
        self.next_sequence += len(sent.tickets)
        return ErrorCode.NONE


class Sent:
    """One batch in a request: what the bytes say, not what the batch object says later."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.tickets = list(batch.tickets)
        self.producer_id, self.epoch, self.sequence = batch.producer_id, batch.producer_epoch, batch.base_sequence


class World:
    """One producer, one broker, and a network that does what `choices` say; with none left, it behaves."""

    def __init__(self, choices: Iterator[int], session: ProducerSession) -> None:
        self.choices = choices
        self.session = session
        self.session.adopt_identity(1, 0)
        self.accumulator: Accumulator[int] = Accumulator(
            lambda: BatchBuilder(100),
            memory_bytes=1_000_000,
            max_record_bytes=1_000,
            linger_ms=0,
            delivery_timeout_ms=TIMEOUT_MS,
        )
        self.logs = {partition: ModelLog() for partition in PARTITIONS}
        self.sent_order: dict[TopicPartition, list[int]] = {partition: [] for partition in PARTITIONS}
        self.acknowledged: set[int] = set()
        self.failed: set[int] = set()
        self.wire: deque[list[Sent]] = deque()
        self.answers: deque[list[tuple[Sent, ErrorCode]]] = deque()
        self.now_ms = 0.0
        self.next_ticket = 0
        self.identities = 1

    def choose(self, options: int) -> int:
        """0 when the choices have run out: the friendliest option is always the first."""
        return next(self.choices, 0) % options

    # -- the producer

    def append(self, partition: TopicPartition | None = None) -> None:
        partition = partition or PARTITIONS[self.choose(2)]
        queue = self.accumulator.queue(partition)
        assert self.accumulator.append(queue, 0, None, b"%08d" % self.next_ticket, (), self.next_ticket, self.now_ms)
        self.sent_order[partition].append(self.next_ticket)
        self.next_ticket += 1

    def pump(self) -> None:
        """As `Sender`: expire, settle, then one request with the head of every partition that may be sent."""
        for batch in self.accumulator.expired(self.now_ms):
            self.fail(batch)
        self.session.settle()
        if self.session.needs_identity:
            self.identities += 1
            self.session.adopt_identity(self.identities, 0)
            self.session.settle()
        if len(self.wire) + len(self.answers) >= IN_FLIGHT:
            return
        request = []
        for queue in list(self.accumulator.active()):
            if self.accumulator.ready_in_ms(queue, self.now_ms) == 0 and self.session.may_send(queue.waiting[0]):
                batch = self.accumulator.take(queue)
                self.session.begin(batch, self.now_ms)
                request.append(Sent(batch))
        if request:
            self.wire.append(request)

    def hear(self) -> None:
        if not self.answers:
            return
        for sent, code in self.answers.popleft():
            batch = sent.batch
            if batch.ended:
                continue
            if code is ErrorCode.NONE:
                self.session.acknowledged(batch)
                self.accumulator.end(batch)
                self.acknowledged.update(batch.tickets)
                continue
            verdict = self.session.refused(batch, code)
            if verdict is Verdict.RETRY:
                self.accumulator.put_back(batch, self.now_ms + self.choose(2) * 5)
            else:
                self.fail(batch)

    def fail(self, batch: Batch) -> None:
        self.session.abandoned(batch)
        self.accumulator.end(batch)
        self.failed.update(batch.tickets)

    # -- the network and the broker

    def deliver(self) -> None:
        if self.wire:
            self.answers.append([(sent, self.process(sent)) for sent in self.wire.popleft()])

    def process(self, sent: Sent) -> ErrorCode:
        trouble = self.choose(16)
        if trouble == 1:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if trouble == 2:
            return ErrorCode.MESSAGE_TOO_LARGE
        code = self.logs[sent.batch.partition].append(sent)
        if trouble == 3 and code is ErrorCode.NONE:
            return ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return code

    def cut(self) -> None:
        """The connection dies: some requests are still processed, no answer arrives."""
        for _ in range(self.choose(len(self.wire) + 1)):
            self.deliver()
        lost = [sent for request in self.wire for sent in request]
        lost += [sent for answer in self.answers for sent, _ in answer]
        self.wire.clear()
        self.answers.clear()
        for sent in lost:
            if not sent.batch.ended:
                self.accumulator.put_back(sent.batch, self.now_ms)

    def forget_producer(self) -> None:
        """The producer rests so long that a broker forgets it."""
        if not self.wire and not self.answers and not self.accumulator.unended_count:
            self.now_ms += REST_MS
            self.logs[PARTITIONS[self.choose(2)]].producer_id = -1

    def run(self, steps: int) -> None:
        friendly = [self.append, self.pump, self.deliver, self.hear, self.pump, self.deliver, self.hear]
        for _ in range(steps):
            step = self.choose(12)
            if step < 7:
                friendly[step]()
            elif step == 7:
                self.cut()
            elif step == 8:
                self.now_ms += 20
            elif step == 9:
                self.now_ms += 150
            elif step == 10:
                self.forget_producer()
            else:
                partition = PARTITIONS[self.choose(2)]
                for _ in range(self.choose(12)):
                    self.append(partition)
                    self.pump()
            self.check()
        self.heal()

    def heal(self) -> None:
        """From here on everything works; in bounded time nothing may be left."""
        self.choices = iter(())
        for _ in range(60):
            for step in (self.pump, self.deliver, self.hear):
                step()
            self.now_ms += 10
        assert self.accumulator.unended_count == 0, "stuck"
        self.check()
        everything = {ticket for order in self.sent_order.values() for ticket in order}
        assert self.acknowledged | self.failed == everything
        for _ in range(4):
            self.append()
        for _ in range(30):
            for step in (self.pump, self.deliver, self.hear):
                step()
        assert set(range(len(everything), self.next_ticket)) <= self.acknowledged, "nothing gets through any more"
        self.check()

    def check(self) -> None:
        for partition, log in self.logs.items():
            assert len(set(log.records)) == len(log.records), "a record is in the log twice"
            assert log.records == sorted(log.records), "records are out of order"
            acknowledged = [ticket for ticket in self.sent_order[partition] if ticket in self.acknowledged]
            assert set(acknowledged) <= set(log.records), "an acknowledged record is not in the log"


@given(st.lists(st.integers(0, 239), max_size=300))
def test_each_record_once_and_in_order_whatever_the_network_does(choices):
    World(iter(choices), ProducerSession(idempotent=True)).run(len(choices) // 2)


@given(st.lists(st.integers(0, 239), max_size=200))
def test_the_same_when_epochs_run_out(choices):
    session = ProducerSession(idempotent=True)
    world = World(iter(choices), session)
    session.adopt_identity(1, 32766)
    world.run(len(choices) // 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_runs(seed):
    rng = Random(seed)
    World((rng.randrange(240) for _ in range(8_000)), ProducerSession(idempotent=True)).run(3_000)


class ResendsAnew(ProducerSession):
    """Sabotage: a batch gets a new sequence each time it is sent."""

    def begin(self, batch: Batch, now_ms: float) -> None:
        if batch.base_sequence >= 0:
            state = self._partitions[batch.partition]
            state.unsettled.remove(batch)
            batch.base_sequence = -1
        super().begin(batch, now_ms)


class PipelinesFromRest(ProducerSession):
    """Sabotage: the second batch does not wait to hear that the broker knows of the first."""

    def may_send(self, batch: Batch) -> bool:
        if batch.partition in self._partitions:
            self._partitions[batch.partition].confirmed = True
        return super().may_send(batch)


class KeepsTooManyUnsettled(ProducerSession):
    """Sabotage: more is unsettled than the broker remembers, so it does not know the oldest for a duplicate."""

    def __init__(self, *, idempotent: bool) -> None:
        super().__init__(idempotent=idempotent)
        self._limit = 50


class ForgetsTheGap(ProducerSession):
    """Sabotage: after a batch was given up the next ones go on as if its sequence had been used."""

    def abandoned(self, batch: Batch) -> None:
        super().abandoned(batch)
        self._restarting.pop(batch.partition, None)
        if batch.partition in self._partitions:
            self._partitions[batch.partition].gap = False

    def refused(self, batch: Batch, code: ErrorCode) -> Verdict:
        if code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return Verdict.RETRY
        return super().refused(batch, code)


class NeverBumps(ProducerSession):
    """Sabotage: sequences start from 0 under the same epoch."""

    def _next_epoch(self) -> bool:
        return True


@pytest.mark.parametrize(
    "sabotaged", [ResendsAnew, PipelinesFromRest, KeepsTooManyUnsettled, ForgetsTheGap, NeverBumps]
)
def test_the_model_notices_a_sabotaged_session(sabotaged):
    caught = 0
    for seed in range(40):
        rng = Random(seed)
        try:
            World((rng.randrange(240) for _ in range(1_500)), sabotaged(idempotent=True)).run(600)
        except AssertionError:
            caught += 1
    assert caught
