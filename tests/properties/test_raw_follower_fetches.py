"""A leader answers followers' requests of any kind in the short ways as in the general ones.

Two replicas ask for several partitions in several sessions: also twice, with the session epoch, the leader epoch, the
offset or the broker epoch of before, while partitions are led by others, go and return, and sessions are closed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_usual_follower_fetches import in_general_ways
from tests.unit.replication.replicas import Replicas
from tidelog.broker.network.request import Deferred
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import Record
from tidelog.protocol.hot_replication import VERSION, RequestTemplate
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.replication.controller.metadata.image import MetadataDelta, PartitionImage, TopicImage
from tidelog.replication.partition import Partition

TOPIC_ID = b"M" * 16
STEPS = 120
MUCH = 1 << 30


class Session:
    def __init__(self, session_id: int, template: RequestTemplate) -> None:
        self.id, self.template, self.epoch = session_id, template, 1


class RawFollowers:
    """Node 1 leads, nodes 2 and 3 are cut off, and this speaks for them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        selector = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
        self.cluster = Replicas(3, seed=seed, **({"replica_selector_class": selector} if rng.random() < 0.3 else {}))
        self.cluster.cut.update({(2, 1), (3, 1)})
        self.node = self.cluster.nodes[1]
        self.fetches = self.node.partitions.follower_fetches
        image = PartitionImage(replicas=(1, 2, 3), isr=(1, 2, 3), leader=1, leader_epoch=0, partition_epoch=0)
        self.placed = dict.fromkeys(range(rng.randint(1, 3)), image)
        self.answers: list[bytes | None] = []
        self.sessions: list[Session] = []
        self.show()

    def show(self) -> None:
        cluster, topic = self.cluster, TopicImage("many", TOPIC_ID, dict(self.placed))
        cluster._publish()
        cluster.image = replace(
            cluster.image,
            topics_by_name={**cluster.image.topics_by_name, "many": topic},
            topics_by_id={**cluster.image.topics_by_id, TOPIC_ID: topic},
        )
        changed = {TOPIC_ID: set(self.placed)}
        delta = MetadataDelta(changed_partitions=changed, changed_brokers=set(cluster.image.brokers))
        self.node.hosting.apply(cluster.image, delta)

    def hosted(self, index: int) -> Partition | None:
        return self.node.partitions.find(TOPIC_ID, index)

    def send(self, body: bytes | bytearray) -> None:
        place = len(self.answers)
        self.answers.append(None)

        def done(frames: Any) -> None:
            self.answers[place] = b"".join(frames) if isinstance(frames, list) else bytes(frames)

        answer = self.node.serve(1, VERSION, memoryview(bytearray(body)))
        if isinstance(answer, Deferred):
            answer.on_complete(done)
        else:
            done(answer)

    def begin(self) -> None:
        rng, replica_id = self.rng, self.rng.choice((2, 2, 3))
        epoch = self.cluster.broker_epochs[replica_id] if rng.random() < 0.95 else 99
        template = RequestTemplate(replica_id, epoch, rng.choice((0, 5, 500)), 1, MUCH, 1 << 18)
        indexes = rng.sample(list(self.placed), rng.randint(1, len(self.placed)))
        self.send(template.many(0, 0, [(TOPIC_ID, each, self.placed[each].leader_epoch, 0, -1, 0) for each in indexes]))
        self.cluster.loop.run_for(600)
        answer = self.answers[-1]
        assert answer is not None
        self.sessions = [*self.sessions[-4:], Session(FetchResponse.decode(answer[9:], VERSION).session_id, template)]

    def entry(self, index: int) -> tuple[bytes, int, int, int, int, int]:
        rng, partition = self.rng, self.hosted(index)
        log = None if partition is None else partition.log
        end, start, high_watermark = (
            (0, 0, 0) if log is None else (log.log_end_offset, log.log_start_offset, log.high_watermark)
        )
        offset = rng.choice((end, end, end, high_watermark, max(0, end - 1), rng.choice((0, end + 1, MUCH, -1))))
        latest = log.leader_epochs.latest if log is not None and offset else -1
        epoch = self.placed[index].leader_epoch
        if rng.random() < 0.06:
            latest, epoch = latest + rng.choice((-1, 0, 1)), epoch + rng.choice((-1, 0, 1))
        return TOPIC_ID, index, epoch, offset, latest, start if rng.random() < 0.7 else rng.choice((0, 1))

    def ask(self) -> None:
        rng = self.rng
        if not self.sessions or rng.random() < 0.05:
            self.begin()
            return
        session = rng.choice(self.sessions)
        template = session.template
        if rng.random() < 0.03:
            template = RequestTemplate(rng.choice((2, 3)), rng.choice((99, 100, 101)), 5, 1, MUCH, 1 << 18)
        is_wrong = rng.random() < 0.03
        epoch = session.epoch + (rng.choice((-1, 1)) if is_wrong else 0)
        if rng.random() < 0.75:
            body: bytes | bytearray = template.one(session.id, epoch, *self.entry(rng.choice(list(self.placed))))
        else:
            asked = rng.sample(list(self.placed), rng.randint(0, len(self.placed)))
            forgotten = [(TOPIC_ID, each) for each in self.placed if each not in asked and rng.random() < 0.2]
            body = template.many(session.id, epoch, [self.entry(each) for each in asked], forgotten)
        session.epoch += not is_wrong
        for _ in range(1 + (rng.random() < 0.03)):
            self.send(body)

    def produce(self) -> None:
        partition = self.hosted(self.rng.choice(list(self.placed)))
        if partition is not None and partition.leads:
            batch = encode_batch([Record(0, self.node.clock_ms(), None, b"x" * self.rng.randint(1, 70))])
            self.node.partitions.append(partition, memoryview(batch), self.node.clock_ms(), 1)

    def happen(self) -> None:
        rng, index = self.rng, self.rng.choice(list(self.placed))
        placed, partition = self.placed[index], self.hosted(index)
        kind = rng.choice(("elect", "delete", "delete", "isr", "leave", "close", "restart"))
        later = replace(placed, partition_epoch=placed.partition_epoch + 1)
        if kind == "elect":
            leader = 1 if placed.leader == 2 or rng.random() < 0.6 else 2
            self.placed[index] = replace(later, leader=leader, leader_epoch=placed.leader_epoch + 1)
        elif kind == "isr":
            self.placed[index] = replace(later, isr=tuple(sorted({1, *rng.sample((1, 2, 3), 2)})))
        elif kind == "leave" and placed.leader != 1:
            self.placed[index] = replace(later, replicas=(2, 3), isr=(2, 3))
        elif kind == "restart":
            self.cluster.broker_epochs[rng.choice((2, 3))] += 1
        elif kind == "close" and self.fetches.sessions:
            self.fetches._close(rng.choice(sorted(self.fetches.sessions)))
        elif kind == "delete" and partition is not None and partition.leads:
            log = partition.log
            self.node.partitions.delete_records(partition, rng.randint(log.log_start_offset, log.high_watermark))
        self.show()

    def run(self) -> list[Any]:
        """What is told, and what the leader knows of its followers after each step."""
        known: list[Any] = []
        for _ in range(STEPS):
            drawn = self.rng.random()
            if drawn < 0.6:
                self.ask()
            elif drawn < 0.78:
                self.produce()
            elif drawn < 0.92:
                self.cluster.loop.run_for(self.rng.choice((0, 1, 3, 30, 600)))
            else:
                self.happen()
            self.cluster.loop.settle()
            known.append([self.known_of(self.hosted(index)) for index in self.placed])
        self.cluster.loop.run_for(40_000)
        assert self.fetches.entry_count == sum(len(each.entries) for each in self.fetches.sessions.values())
        return [*map(self.told, self.answers), *known]

    @staticmethod
    def known_of(partition: Partition | None) -> Any:
        if partition is None:
            return None
        followers = partition.in_sync.followers.values()
        return partition.log.high_watermark, [
            (each.log_end_offset, each.log_start_offset, each.last_caught_up_ms) for each in followers
        ]

    @staticmethod
    def told(answer: bytes | None) -> Any:
        """The partitions in any order."""
        assert answer is not None, "each request is answered"
        response = FetchResponse.decode(answer[9:], VERSION)
        partitions = [each for topic in response.responses for each in topic.partitions]
        told = sorted((each.partition_index, bytes(each.records or b""), repr(each)) for each in partitions)
        return response.error_code, response.session_id, told


@given(st.integers(0, 2**32))
def test_any_request_is_answered_as_in_the_general_ways(seed: int) -> None:
    short = RawFollowers(seed).run()
    with ExitStack() as stack:
        in_general_ways(stack)
        general = RawFollowers(seed).run()
    for number, (one, other) in enumerate(zip(short, general, strict=True)):
        assert one == other, f"number {number}"


def test_most_requests_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    followers = RawFollowers(7)
    answered: list[bool] = []
    serve_one = followers.fetches.serve_one

    def count(body: memoryview, number: int) -> Any:
        answer = serve_one(body, number)
        answered.append(answer is not None)
        return answer

    monkeypatch.setattr(followers.fetches, "serve_one", count)
    followers.run()
    assert sum(answered) > len(followers.answers) / 3
