"""Idempotence under a hostile network: the producer's real batching and sequences against a model of Kafka's log.

The network delivers requests in order per connection, but may drop a connection with any number of its requests, and
their answers, unseen; brokers refuse records, or forget the producer while it is at rest; batches expire. A broker that
is killed comes back with its log, and of a producer it knows only the last batch, as from Kafka's snapshot. Another
leader has only the batches that were committed. A log that is asked may answer late, or not, or be a follower's. A
topic may be deleted and made anew, or only seem so to a broker that is behind. What must hold: no record is in the log
twice, records are in the order in which they were sent, every acknowledged one is committed, and once the network heals
everything that was not failed arrives. The tests at the end sabotage the session and check that this model notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.model import TopicPartition
from tidelog.client.producing.accumulator import Accumulator, ProducerBatch
from tidelog.client.producing.producer_session import IDLE_MS, ProducerSession, Verdict, _PartitionSequences
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode

PARTITIONS = [TopicPartition("t", 0), TopicPartition("t", 1)]
IN_FLIGHT = 12  # as over several connections, when leaders move: the session keeps to its own bound
TIMEOUT_MS = 400
Batch = ProducerBatch[int]


class Entry(NamedTuple):
    """One batch in a log."""

    producer_id: int
    epoch: int
    sequence: int
    tickets: tuple[int, ...]


class ModelLog:
    """One partition's leader as Kafka's `ProducerStateManager`: last five batches, epochs, no gaps."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.committed = 0
        """How many of the entries every replica has."""
        self.node_id = 1
        self.nodes = 1
        self.topic_id = 1
        self.learn(())

    def make_anew(self) -> None:
        """The topic is deleted and created again."""
        self.topic_id += 1
        self.entries, self.committed = [], 0
        self.learn(())

    def learn(self, entries: Iterable[Entry]) -> None:
        self.epoch = self.producer_id = -1
        self.next_sequence = 0
        self.last_five: deque[tuple[int, int]] = deque(maxlen=5)
        for entry in entries:
            self.note(entry)

    def note(self, entry: Entry) -> None:
        if (entry.producer_id, entry.epoch) != (self.producer_id, self.epoch):
            self.last_five.clear()
        self.producer_id, self.epoch = entry.producer_id, entry.epoch
        self.last_five.append((entry.sequence, len(entry.tickets)))
        self.next_sequence = (entry.sequence + len(entry.tickets)) & 0x7FFFFFFF

    @property
    def records(self) -> list[int]:
        return [ticket for entry in self.entries for ticket in entry.tickets]

    @property
    def committed_records(self) -> set[int]:
        return {ticket for entry in self.entries[: self.committed] for ticket in entry.tickets}

    def append(self, sent: Sent) -> ErrorCode:
        known = sent.producer_id == self.producer_id
        if known and sent.epoch < self.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if known and sent.epoch > self.epoch and sent.sequence != 0:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if known and sent.epoch == self.epoch:
            if (sent.sequence, len(sent.tickets)) in self.last_five:
                return ErrorCode.NONE  # a duplicate, answered as the first was
            if sent.sequence != self.next_sequence:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        self.entries.append(Entry(sent.producer_id, sent.epoch, sent.sequence, tuple(sent.tickets)))
        self.note(self.entries[-1])
        return ErrorCode.NONE

    def kill(self) -> None:
        """The leader's process dies and comes back: of the producer it knows the last batch."""
        while len(self.last_five) > 1:
            self.last_five.popleft()

    def move(self) -> None:
        """Another replica leads, with the committed batches; it has been there all the time."""
        del self.entries[self.committed :]
        forgotten = self.producer_id < 0
        self.learn(self.entries)
        if forgotten:
            self.producer_id = -1
        self.nodes += 1
        self.node_id = self.nodes

    def describe(self, missing: int = 0) -> tuple[int, int, int, int]:
        """DescribeProducers: node, producer id, epoch, last sequence. A follower may miss the last batches."""
        if not missing:
            return self.node_id, self.producer_id, self.epoch, (self.next_sequence - 1) & 0x7FFFFFFF
        follower = ModelLog()
        follower.learn(self.entries[: max(0, len(self.entries) - missing)])
        return -2, follower.producer_id, follower.epoch, (follower.next_sequence - 1) & 0x7FFFFFFF


class Sent:
    """One batch in a request: what the bytes say, not what the batch object says later."""

    def __init__(self, batch: Batch, topic_id: int) -> None:
        self.batch, self.topic_id = batch, topic_id
        self.partition = batch.partition
        self.tickets = list(batch.tickets)
        self.producer_id, self.epoch, self.sequence = batch.producer_id, batch.producer_epoch, batch.base_sequence


class World:
    """One producer, one broker, and a network that does what `choices` say; with none left, it behaves."""

    KINDS_OF_STEPS = 13

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
        self.topic_ids = dict.fromkeys(PARTITIONS, 1)
        """Those of the producer's metadata."""
        self.deleted: set[int] = set()
        """The records of deleted topics."""
        self.sent_order: dict[TopicPartition, list[int]] = {partition: [] for partition in PARTITIONS}
        self.acknowledged: set[int] = set()
        self.failed: set[int] = set()
        self.wire: deque[list[Sent]] = deque()
        self.answers: deque[list[tuple[Sent, ErrorCode, int]]] = deque()
        self.inquiries: dict[tuple[TopicPartition, int], tuple[int, int, int, int]] = {}
        self.now_ms = 0.0
        self.next_ticket = 0
        self.identities = 1
        self.expires = True

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
        for batch in self.accumulator.expired_batches(self.now_ms) if self.expires else ():
            self.fail(batch)
        self.session.restart_partitions()
        if self.session.needs_identity:
            self.identities += 1
            self.session.adopt_identity(self.identities, 0)
            self.session.restart_partitions()
        for inquiry in self.session.inquiries():
            self.inquire(*inquiry)
        if len(self.wire) + len(self.answers) >= IN_FLIGHT:
            return
        request = []
        for queue in list(self.accumulator.active_queues()):
            if self.accumulator.ready_in_ms(queue, self.now_ms) == 0 and self.session.may_send(queue.head):
                batch = self.accumulator.take(queue)
                self.session.prepare_send(batch, self.now_ms)
                request.append(Sent(batch, self.topic_ids[batch.partition]))
        if request:
            self.wire.append(request)

    def inquire(self, partition: TopicPartition, number: int) -> None:
        """As `LogInquirer`: the log answers now, or later what it says now; or it refuses, or a follower answers."""
        if not self.session.is_open(partition, number):
            return  # another inquiry's failure closed it
        said = self.inquiries.pop((partition, number), None)
        if said is None:
            how = self.choose(8)
            if how == 3:
                for batch in self.session.abandon_inquiry(partition, number):
                    self.fail(batch)
                return
            said = self.logs[partition].describe(self.choose(6) if how == 2 else 0)
            if how == 1:
                self.inquiries[partition, number] = said
                return
        node_id, producer_id, epoch, last_sequence = said
        if producer_id != self.session.producer_id_of(partition):
            epoch = last_sequence = -1
        assert self.session.is_known_epoch(partition, epoch)
        preferred = self.session.handle_log_end(partition, number, node_id, epoch, last_sequence)
        if preferred is not None:
            self.send_first(preferred)

    def send_first(self, batch: Batch) -> None:
        self.accumulator.prefer(batch)

    def hear(self) -> None:
        if not self.answers:
            return
        for sent, code, node_id in self.answers.popleft():
            self.hear_one(sent.batch, code, node_id)

    def hear_one(self, batch: Batch, code: ErrorCode, node_id: int) -> None:
        if batch.is_complete:
            return
        if code is ErrorCode.NONE:
            for each in (*self.session.batches_acknowledged_with(batch), batch):
                self.session.handle_acknowledgement(each)
                self.accumulator.complete(each)
                self.acknowledged.update(each.tickets)
            return
        verdict = self.session.handle_error(batch, code, node_id)
        if verdict is Verdict.RETRY:
            self.accumulator.put_back(batch, self.now_ms + self.choose(2) * 5)
        elif verdict is Verdict.UNKNOWN:
            for each in self.session.batches_until(batch):
                self.fail(each)
        elif code is ErrorCode.MESSAGE_TOO_LARGE and batch.record_count > 1 and self.choose(4):
            self.session.handle_split(batch, self.accumulator.split(batch))
        else:
            self.fail(batch)

    def fail(self, batch: Batch) -> None:
        self.session.handle_failure(batch)
        self.accumulator.complete(batch)
        self.failed.update(batch.tickets)

    # -- the network and the broker

    def deliver(self) -> None:
        if self.wire:
            self.answers.append([(sent, *self.process(sent)) for sent in self.wire.popleft()])

    def process(self, sent: Sent) -> tuple[ErrorCode, int]:
        log = self.logs[sent.partition]
        if sent.topic_id != log.topic_id:
            return ErrorCode.UNKNOWN_TOPIC_ID, log.node_id
        trouble = self.choose(16)
        if trouble == 1:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER, log.node_id
        if trouble == 2:
            return ErrorCode.MESSAGE_TOO_LARGE, log.node_id
        code = log.append(sent)
        if code is not ErrorCode.NONE:
            return code, log.node_id
        if trouble == 3:
            return ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, log.node_id
        if trouble == 4:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER, log.node_id  # no longer the leader, once it was appended
        log.committed = len(log.entries)
        return ErrorCode.NONE, log.node_id

    def cut(self) -> None:
        """The connection dies: some requests are still processed, no answer arrives."""
        for _ in range(self.choose(len(self.wire) + 1)):
            self.deliver()
        lost = [sent for request in self.wire for sent in request]
        lost += [sent for answer in self.answers for sent, _, _ in answer]
        self.wire.clear()
        self.answers.clear()
        for sent in lost:
            self.hear_one(sent.batch, ErrorCode.NETWORK_EXCEPTION, self.logs[sent.batch.partition].node_id)

    def kill(self) -> None:
        """Both partitions' leader dies, its connections with it, and comes back; or another one leads."""
        self.cut()
        for log in self.logs.values():
            if self.choose(3) == 2:
                log.move()
            if self.choose(3) < 2:
                log.kill()

    def forget_producer(self) -> None:
        """The producer rests so long that a broker forgets it; then it has much to send at once."""
        for _ in range(4):
            self.pump()
            self.deliver()
            self.hear()
        if not self.wire and not self.answers and not self.accumulator.incomplete_count:
            self.now_ms += IDLE_MS
            partition = PARTITIONS[self.choose(2)]
            self.logs[partition].producer_id = -1
            self.burst(partition)

    def burst(self, partition: TopicPartition) -> None:
        for _ in range(self.choose(12)):
            self.append(partition)
            self.pump()

    def replace_topic(self) -> None:
        """The producer learns of it now or later; or a broker that is behind lacks the topic, which is there."""
        partition = PARTITIONS[self.choose(2)]
        log = self.logs[partition]
        self.burst(partition)
        what = self.choose(3)
        if what:
            self.deleted.update(log.records)
            log.make_anew()
        if what < 2:
            self.learn_of_topic(partition)
            self.burst(partition)

    def learn_of_topic(self, partition: TopicPartition) -> None:
        """As `TopicRoutes.update`."""
        self.topic_ids[partition] = self.logs[partition].topic_id
        self.session.forget([partition])
        self.accumulator.forget(partition)

    def run(self, steps: int) -> None:
        friendly = [self.append, self.pump, self.deliver, self.hear, self.pump, self.deliver, self.hear]
        for _ in range(steps):
            step = self.choose(self.KINDS_OF_STEPS)
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
            elif step == 11:
                self.burst(PARTITIONS[self.choose(2)])
                self.kill()
            elif step == 12:
                self.burst(PARTITIONS[self.choose(2)])
            else:
                self.replace_topic()
            self.check()
        self.heal()

    def heal(self) -> None:
        """From here on everything works; in bounded time nothing may be left, and nothing waits for its expiry."""
        self.choices = iter(())
        self.expires = False
        for partition, log in self.logs.items():
            if self.topic_ids[partition] != log.topic_id:
                self.learn_of_topic(partition)
        for _ in range(60 + self.accumulator.incomplete_count):
            for step in (self.pump, self.deliver, self.hear):
                step()
            self.now_ms += 10
        assert self.accumulator.incomplete_count == 0, "stuck"
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
            assert set(acknowledged) <= log.committed_records | self.deleted, "an acknowledged record is not committed"


@given(st.lists(st.integers(0, 239), max_size=300))
def test_each_record_once_and_in_order_whatever_the_network_does(choices):
    World(iter(choices), ProducerSession(idempotent=True)).run(len(choices) // 2)


class DirectlySent(Sent):
    """A record that is written before it has a batch."""

    def __init__(self, partition: TopicPartition, topic_id: int, ticket: int, identity: tuple[int, int, int]) -> None:
        self.partition, self.topic_id = partition, topic_id
        self.tickets = [ticket]
        self.producer_id, self.epoch, self.sequence = identity


class DirectWorld(World):
    """As `DirectSend`: a record goes to the broker without a batch while nothing else is under way. With the usual
    answer at once it never gets one.
    """

    def append(self, partition: TopicPartition | None = None) -> None:
        partition = partition or PARTITIONS[self.choose(2)]
        identity = self.session.lone_identity(partition, self.now_ms)
        if self.accumulator.incomplete_count or identity is None:
            super().append(partition)
            return
        ticket = self.next_ticket
        self.next_ticket += 1
        self.sent_order[partition].append(ticket)
        sent = DirectlySent(partition, self.topic_ids[partition], ticket, identity)
        self.session.begin_lone_send(partition, self.now_ms)
        if self.choose(9) == 8:  # the program is interrupted, and goes on
            if self.choose(2):
                self.process(sent)
            self.failed.add(ticket)
            return
        is_answered, arrives = self.choose(3) == 0, self.choose(2) == 0
        code, node_id = self.process(sent) if is_answered or arrives else (ErrorCode.NONE, -1)
        if is_answered and code is ErrorCode.NONE:
            self.session.handle_lone_acknowledgement(partition)
            self.acknowledged.add(ticket)
            return
        builder = BatchBuilder(100)
        value = b"%08d" % ticket
        builder.append(0, None, value)
        queue = self.accumulator.queue(partition)
        sent.batch = self.accumulator.add_in_flight(queue, builder, ticket, 0, None, value, self.now_ms)
        self.session.adopt_lone_batch(sent.batch, identity)
        if is_answered:
            self.hear_one(sent.batch, code, node_id)
        elif arrives:
            self.answers.append([(sent, code, node_id)])
        else:
            self.wire.append([sent])


@given(st.lists(st.integers(0, 239), max_size=300))
def test_the_same_for_records_that_are_sent_directly(choices):
    DirectWorld(iter(choices), ProducerSession(idempotent=True)).run(len(choices) // 2)


class ReplacedWorld(World):
    KINDS_OF_STEPS = 15


class DirectReplacedWorld(DirectWorld):
    KINDS_OF_STEPS = 15


@pytest.mark.parametrize("kind", [ReplacedWorld, DirectReplacedWorld])
@given(st.lists(st.integers(0, 239), max_size=300))
def test_the_same_when_topics_are_replaced(kind, choices):
    kind(iter(choices), ProducerSession(idempotent=True)).run(len(choices) // 2)


@pytest.mark.parametrize("kind", [ReplacedWorld, DirectReplacedWorld])
@pytest.mark.parametrize("seed", range(5))
def test_long_runs_while_topics_are_replaced(seed, kind):
    rng = Random(seed)
    kind((rng.randrange(240) for _ in range(1_500)), ProducerSession(idempotent=True)).run(600)


@given(st.lists(st.integers(0, 239), max_size=200))
def test_the_same_when_epochs_run_out(choices):
    session = ProducerSession(idempotent=True)
    world = World(iter(choices), session)
    session.adopt_identity(1, 32766)
    world.run(len(choices) // 2)


class StartsNearTheEnd(ProducerSession):
    """The sequences of the first epoch go round after a few records."""

    def _reset_sequences(self, state: _PartitionSequences) -> None:
        super()._reset_sequences(state)
        if state.producer_epoch == 0:
            state.next_sequence = state.acknowledged_end = 0x7FFFFFFF - 7


@given(st.lists(st.integers(0, 239), max_size=200))
def test_the_same_when_sequences_go_round(choices):
    World(iter(choices), StartsNearTheEnd(idempotent=True)).run(len(choices) // 2)


class CalmWorld(World):
    """Connections are cut and leaders are deposed, and nothing else: the broker remembers enough for every resend."""

    def kill(self) -> None:
        self.cut()

    def forget_producer(self) -> None:
        pass

    def process(self, sent: Sent) -> tuple[ErrorCode, int]:
        code, node_id = super().process(sent)
        if code is ErrorCode.MESSAGE_TOO_LARGE:
            return ErrorCode.NOT_ENOUGH_REPLICAS, node_id
        return code, node_id

    def inquire(self, partition: TopicPartition, number: int) -> None:
        raise AssertionError("the log had to be asked")


def run_calm(session: ProducerSession, seed: int) -> None:
    rng = Random(seed)
    world = CalmWorld((rng.randrange(240) for _ in range(1_500)), session)
    world.accumulator._delivery_timeout_ms = 1e9
    world.run(600)


@pytest.mark.parametrize("seed", range(10))
def test_a_log_is_not_asked_while_the_broker_remembers(seed):
    run_calm(ProducerSession(idempotent=True), seed)


LONG_RUNS = [pytest.param(seed, marks=pytest.mark.slow if seed < 4 else pytest.mark.hunt) for seed in range(20)]


@pytest.mark.parametrize("seed", LONG_RUNS)
def test_long_runs(seed):
    rng = Random(seed)
    kind = DirectWorld if seed % 2 else World
    kind((rng.randrange(240) for _ in range(8_000)), ProducerSession(idempotent=True)).run(3_000)


class ResendsAnew(ProducerSession):
    """Sabotage: a batch gets a new sequence each time it is sent."""

    def prepare_send(self, batch: Batch, now_ms: float) -> None:
        if batch.base_sequence >= 0:
            state = self._partitions[batch.partition]
            state.unsettled_batches.remove(batch)
            batch.base_sequence = -1
        super().prepare_send(batch, now_ms)


class PipelinesFromRest(ProducerSession):
    """Sabotage: the second batch does not wait to hear that the broker knows of the first."""

    def may_send(self, batch: Batch) -> bool:
        if batch.partition in self._partitions:
            self._partitions[batch.partition].is_confirmed = True
        return super().may_send(batch)


class KeepsTooManyUnsettled(ProducerSession):
    """Sabotage: more is unsettled than the broker remembers, so it does not know the oldest for a duplicate."""

    def __init__(self, *, idempotent: bool) -> None:
        super().__init__(idempotent=idempotent)
        self._limit = 50


class ForgetsTheGap(ProducerSession):
    """Sabotage: after a batch was given up the next ones go on as if its sequence had been used."""

    def handle_failure(self, batch: Batch) -> None:
        super().handle_failure(batch)
        self.pending_restarts.pop(batch.partition, None)
        if batch.partition in self._partitions:
            self._partitions[batch.partition].has_gap = False

    def handle_error(self, batch: Batch, code: ErrorCode, node_id: int) -> Verdict:
        if code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return Verdict.RETRY
        return super().handle_error(batch, code, node_id)


class NeverBumps(ProducerSession):
    """Sabotage: sequences start from 0 under the same epoch."""

    def _next_epoch(self) -> bool:
        return True


class TakesOutOfOrderForMissing(ProducerSession):
    """Sabotage: what is refused as out of sequence is taken to be in no log, as the Java producer takes it."""

    def handle_error(self, batch: Batch, code: ErrorCode, node_id: int) -> Verdict:
        self._partitions[batch.partition].unsettled_batches[0].may_be_in_log = False
        return super().handle_error(batch, code, node_id)


class BelievesAnyReplica(ProducerSession):
    """Sabotage: it does not matter whose log lacks a batch."""

    def handle_error(self, batch: Batch, code: ErrorCode, node_id: int) -> Verdict:
        state = self._partitions[batch.partition]
        if state.checked_node_id != -1:
            state.checked_node_id = node_id
        return super().handle_error(batch, code, node_id)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotaged",
    [
        ResendsAnew,
        PipelinesFromRest,
        ForgetsTheGap,
        NeverBumps,
        TakesOutOfOrderForMissing,
        BelievesAnyReplica,
    ],
)
def test_the_model_notices_a_sabotaged_session(sabotaged):
    for seed in range(40):
        rng = Random(seed)
        try:
            World((rng.randrange(240) for _ in range(1_500)), sabotaged(idempotent=True)).run(600)
        except AssertionError:
            return
    pytest.fail("the model has noticed nothing")


class KeepsTheEpochOfAForgottenTopic(ProducerSession):
    """Sabotage: a topic that comes back begins at sequence 0 under the same epoch."""

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        identity = self.identity
        super().forget(partitions)
        self._set_identity(*identity)


class TakesTheNewTopicForTheOldOne(ProducerSession):
    """Sabotage: batches go on while earlier ones are in flight, and a log without any of them takes the later first."""

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        super().forget(partitions)
        for state in self._partitions.values():
            state.has_other_log = False


@pytest.mark.slow
@pytest.mark.parametrize("sabotaged", [KeepsTheEpochOfAForgottenTopic, TakesTheNewTopicForTheOldOne])
def test_the_model_notices_a_session_that_is_sabotaged_where_it_forgets(sabotaged):
    for seed in range(40):
        rng = Random(seed)
        try:
            ReplacedWorld((rng.randrange(240) for _ in range(1_500)), sabotaged(idempotent=True)).run(600)
        except AssertionError:
            return
    pytest.fail("the model has noticed nothing")


def test_a_session_that_keeps_too_many_unsettled_has_to_ask():
    def run_some() -> None:
        for seed in range(40):
            run_calm(KeepsTooManyUnsettled(idempotent=True), seed)

    with pytest.raises(AssertionError, match="had to be asked"):
        run_some()


class TakesTheLeadersLogForCommitted(World):
    """Sabotage: a batch that is in the leader's log is acknowledged without being sent once more."""

    def send_first(self, batch: Batch) -> None:
        self.hear_one(batch, ErrorCode.NONE, -1)


def test_the_model_notices_that_a_log_is_taken_for_committed():
    for seed in range(40):
        rng = Random(seed)
        world = TakesTheLeadersLogForCommitted(
            (rng.randrange(240) for _ in range(1_500)), ProducerSession(idempotent=True)
        )
        try:
            world.run(600)
        except AssertionError as error:
            if "not committed" in str(error):
                return
    pytest.fail("the model has noticed nothing")
