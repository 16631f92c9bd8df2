"""An idempotent producer with several batches under way, as librdkafka does it, against whole replicas.

Three nodes hold one partition with min.insync.replicas 2. The ISR shrinks and grows, leaders change, connections break
and processes are killed between any two requests of a pipeline. The producer drains what is under way before it sends
again or turns to another leader, sends the same batches again, and takes a success for a batch behind unanswered ones
as a success of those, too. It must never be told of a gap: librdkafka would raise its epoch and might write records
twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replication.replicas import ReplicaNode, Replicas, Sent
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.errors import ErrorCode
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.producers.refused_batches import RefusedBatches

PID = 7
IN_FLIGHT_MAX = 5
TIMEOUT_MS = 2000
STEPS = ["send"] * 6 + ["judge"] * 8 + ["receive"] * 4 + ["run"] * 3
STEPS += ["shrink", "grow", "grow", "cut", "elect", "turn", "turn", "break", "stop", "start", "forget", "tell"]
SENT_AGAIN = {
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
}


@dataclass
class UnderWay:
    sequence: int
    count: int
    sent: Sent | None = None
    """None: it has not reached the broker."""


@dataclass
class Pipeline:
    """The producer of one partition. `waiting`: batches to be sent again, by sequence."""

    cluster: Replicas
    leader: int = 1
    next_sequence: int = 0
    waiting: deque[UnderWay] = field(default_factory=deque)
    under_way: deque[UnderWay] = field(default_factory=deque)
    drains: bool = False
    asked: list[tuple[ReplicaNode, Sent]] = field(default_factory=list)
    acknowledged: int = 0
    """Sequences below it are, as far as the producer knows, in the log."""

    def send(self, count: int) -> None:
        if self.drains and self.under_way:
            return
        self.drains = False
        if len(self.under_way) >= IN_FLIGHT_MAX:
            return
        if self.waiting:
            batch = self.waiting.popleft()
        else:
            batch = UnderWay(self.next_sequence, count)
            self.next_sequence += count
        self.under_way.append(UnderWay(batch.sequence, batch.count))

    def judge(self) -> None:
        """The broker takes the next request off the connection."""
        batch = next((batch for batch in self.under_way if batch.sent is None), None)
        if batch is None:
            return
        node = self.cluster.nodes.get(self.leader)
        if node is None:
            self.break_connection()
            return
        values = [b"%d" % (batch.sequence + number) for number in range(batch.count)]
        sequence = {"producer_id": PID, "producer_epoch": 0, "base_sequence": batch.sequence}
        batch.sent = node.produce(*values, timeout_ms=TIMEOUT_MS, **sequence)
        self.asked.append((node, batch.sent))

    def receive(self) -> None:
        if not self.under_way or self.under_way[0].sent is None or self.under_way[0].sent.code is None:
            return
        batch = self.under_way.popleft()
        assert batch.sent is not None
        code = batch.sent.code
        if code == 0:
            self.acknowledged = max(self.acknowledged, batch.sequence + batch.count)
            self.waiting = deque(one for one in self.waiting if one.sequence >= self.acknowledged)
        else:
            assert code in SENT_AGAIN, f"{ErrorCode(code or 0).name} for sequence {batch.sequence}"
            self.put_back(batch)

    def put_back(self, batch: UnderWay) -> None:
        self.drains = True
        if batch.sequence >= self.acknowledged:
            self.waiting = deque(sorted([*self.waiting, batch], key=lambda one: one.sequence))

    def break_connection(self) -> None:
        """Nothing of what is under way is answered any more; what has arrived is judged all the same."""
        while self.under_way:
            self.put_back(self.under_way.popleft())

    def turn(self) -> None:
        """To the leader of now, once everything sent to the last one is over."""
        if self.leader != self.cluster.placed.leader and not self.under_way:
            self.leader = self.cluster.placed.leader


class World:
    def __init__(self) -> None:
        self.cluster = Replicas(3, min_insync_replicas="2")
        self.producer = Pipeline(self.cluster)

    @property
    def leader(self) -> int:
        return self.cluster.placed.leader

    def step(self, what: str, number: int) -> None:
        cluster, producer = self.cluster, self.producer
        isr = cluster.placed.isr
        living = [node for node in isr if node in cluster.nodes]
        if what == "send":
            producer.send(1 + number % 3)
        elif what == "judge":
            producer.judge()
        elif what == "receive":
            producer.receive()
        elif what == "run":
            cluster.loop.run_for((1, 30, 700)[number % 3])
        elif what == "shrink" and self.leader in living and len(isr) > 1:
            leaves = [node for node in isr if node != self.leader][number % (len(isr) - 1) :]
            cluster.cut.update((node, self.leader) for node in leaves)
            cluster.alter(isr=tuple(node for node in isr if node not in leaves))
        elif what == "grow":
            cluster.heal()
            cluster.loop.run_for(600)
            self.agree()
        elif what == "cut":
            node_id = number % 3 + 1
            cluster.cut.update((node_id, other) for other in cluster.broker_epochs if other != node_id)
        elif what == "elect" and living:
            cluster.elect(living[number % len(living)], isr)
        elif what == "turn":
            producer.turn()
        elif what == "break":
            producer.break_connection()
        elif what == "stop":
            self.stop(number % 3 + 1)
        elif what == "start":
            self.start()
        elif what == "forget" and self.leader in cluster.nodes:
            self.forget()
        elif what == "tell" and self.leader in cluster.nodes:
            cluster.tell()

    def agree(self) -> None:
        node = self.cluster.nodes.get(self.leader)
        while node is not None and node.proposals:
            partition, proposal = node.proposals[-1]
            if not partition.leads or partition.in_sync.pending is not proposal or proposal.adds is None:
                node.proposals.pop()
                continue
            self.cluster.agree(self.leader)

    def stop(self, node_id: int) -> None:
        """Kill one, if another of the ISR is left to lead."""
        cluster = self.cluster
        others = [node for node in cluster.placed.isr if node != node_id and node in cluster.nodes]
        if node_id not in cluster.nodes or not others:
            return
        if self.producer.leader == node_id:
            self.producer.break_connection()
        cluster.stop(node_id)
        isr = tuple(node for node in cluster.placed.isr if node != node_id)
        if cluster.placed.leader == node_id:
            cluster.elect(others[0], isr)
        elif node_id in cluster.placed.isr:
            cluster.alter(isr=isr)

    def start(self) -> None:
        cluster = self.cluster
        for node_id in cluster.broker_epochs:
            if node_id not in cluster.nodes:
                cluster.broker_epochs[node_id] += 100
                cluster.alter()
                cluster.start(node_id).hosting.start()
                cluster.tell()
                return

    def forget(self) -> None:
        """The replica is taken away from the leader for a moment, as when its directory is out of reach."""
        node = self.cluster.nodes[self.leader]
        partition = node.partition
        node.partition.leads = False
        self.producer.judge()
        partition.leads = True

    def settle(self) -> None:
        """All is well again: everything is sent, acknowledged and on all three."""
        cluster, producer = self.cluster, self.producer
        while len(cluster.nodes) < 3:
            self.start()
        for _ in range(200):
            self.step("grow", 0)
            while any(batch.sent is None for batch in producer.under_way):
                producer.judge()
            cluster.loop.run_for(50)
            while producer.under_way and producer.under_way[0].sent is not None:
                if producer.under_way[0].sent.code is None:
                    break
                producer.receive()
            producer.turn()
            while producer.waiting and not (producer.drains and producer.under_way):
                before = len(producer.under_way)
                producer.send(1)
                if len(producer.under_way) == before:
                    break
            if not producer.under_way and not producer.waiting and len(cluster.placed.isr) == 3:
                cluster.loop.run_for(TIMEOUT_MS + 100)
                return
        raise AssertionError(f"it never comes to rest: {producer}")

    def check(self) -> None:
        producer = self.producer
        assert producer.acknowledged == producer.next_sequence
        for asked, sent in producer.asked:
            assert sent.code is not None or asked not in self.cluster.nodes.values(), "never answered"
        for node in self.cluster.nodes.values():
            assert node.values() == [b"%d" % number for number in range(producer.next_sequence)]
            position = 0
            data = b"".join(map(bytes, node.log.read(0, 1 << 20, node.log.log_end_offset).regions))
            while position < len(data):
                header = read_header(data, position)
                assert header.producer_epoch == 0
                position += header.size_bytes


def run(steps: list[tuple[str, int]]) -> None:
    world = World()
    for what, number in steps:
        world.step(what, number)
    world.settle()
    world.check()


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), max_size=120))
def test_a_pipeline_is_never_told_of_a_gap_and_nothing_is_lost_or_doubled(steps: list[tuple[str, int]]) -> None:
    run(steps)


@pytest.mark.parametrize("count", [1, 2])
def test_a_leader_that_leads_again_knows_what_it_cut_before_what_it_refused(count: int) -> None:
    """It appends the first batches, loses the lead, refuses the next one, cuts the first ones, and leads again."""
    steps = [("send", 0), ("judge", 0), ("run", 2), ("run", 2), ("receive", 0), *[("send", 0)] * 4]
    steps += [*[("judge", 0)] * count, ("cut", 0), ("elect", 1), ("judge", 0), ("grow", 0), ("elect", 0), ("judge", 0)]
    run([*steps, *[("receive", 0)] * 3])


NARROW = ["send", "send", "shrink", "judge", "run", "grow", "judge", "receive", "receive"]


@pytest.mark.parametrize("first", [[], ["send", "judge", "run", "run", "receive"]])
def test_the_isr_grows_between_two_requests_of_a_pipeline(first: list[str]) -> None:
    run([(what, 0) for what in [*first, *NARROW]])


@pytest.mark.parametrize("first", [[], ["send", "judge", "run", "run", "receive"]])
def test_without_the_rule_the_model_sees_it(monkeypatch: pytest.MonkeyPatch, first: list[str]) -> None:
    monkeypatch.setattr(RefusedBatches, "find_cause", lambda *_: None)
    with pytest.raises(AssertionError):
        run([(what, 0) for what in [*first, *NARROW]])


def test_without_the_last_five_batches_the_model_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerState, "find_repeated", lambda *_: None)
    with pytest.raises(AssertionError):
        run([(what, 0) for what in ["send", "judge", "run", "break", "send", "judge", "receive"]])
