"""Each check that keeps an ISR honest, taken away once: then the story in which a record is lost comes true."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.unit.replication.clusters import apply, broker_records, cluster_state
from tests.unit.replication.controller_harness import Broker, cluster
from tests.unit.replication.test_isr_alterations import proposal
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.metadata_records import FeatureLevelRecord
from tidelog.replication.controller.decisions import isr_alterations
from tidelog.replication.controller.decisions.isr_alterations import alter_partition
from tidelog.replication.controller.decisions.leaders import fence_brokers, forget_incarnation, unfence_broker
from tidelog.replication.controller.decisions.state import ControllerState, NewTopic, at_once
from tidelog.replication.controller.failure_detection import FailureDetector
from tidelog.replication.ports import PortState


@pytest.fixture
def state():
    state = cluster_state([1, 2, 3])
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    return state


def create(state, replicas):
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, replicas)])])[0])


def isr(state):
    return state.image.topics_by_name["t"].partitions[0].isr


def ask(state, request):
    apply(state, at_once(alter_partition(state, request, 3))[0])


def restart(state, broker_id, epoch, *, clean):
    apply(state, forget_incarnation(state, broker_id, clean=clean))
    registration, _ = broker_records(broker_id)
    registration.broker_epoch = epoch
    apply(state, [registration])
    apply(state, unfence_broker(state, broker_id))


def a_late_proposal(state):
    """2 was to stay and 3 to go; but 2 went, and a record was acknowledged by 1 and 3 before 2 was back."""
    create(state, [1, 2, 3])
    late = proposal(state.image, 1, 101, "t", {1: 101, 2: 102})
    apply(state, fence_brokers(state, [2]))
    assert isr(state) == (1, 3)
    apply(state, unfence_broker(state, 2))
    ask(state, late)
    assert 2 not in isr(state), "2 is in sync without what was acknowledged"


def a_late_proposal_of_the_process_before(state):
    """1 alone in sync wanted 2 in, was killed, and its successor acknowledges alone: it does not know of 2."""
    create(state, [1, 2])
    apply(state, fence_brokers(state, [2]))
    apply(state, unfence_broker(state, 2))
    late = proposal(state.image, 1, 101, "t", {1: 101, 2: 102})
    restart(state, 1, 500, clean=True)
    assert isr(state) == (1,)
    with suppress(KafkaError):
        ask(state, late)
    assert 2 not in isr(state), "2 is in sync without what was acknowledged"


def a_member_that_lost_its_tail_meanwhile(state):
    """2 had caught up when 1 asked for it; then it lost power, and is back with less."""
    create(state, [1, 2])
    apply(state, fence_brokers(state, [2]))
    apply(state, unfence_broker(state, 2))
    late = proposal(state.image, 1, 101, "t", {1: 101, 2: 102})
    restart(state, 2, 500, clean=False)
    ask(state, late)
    assert 2 not in isr(state), "2 is in sync without what was acknowledged"


def without_partition_epoch(state, monkeypatch):
    problem = isr_alterations._problem

    def careless(state, leader_id, topic, wanted, isr):
        wanted.partition_epoch = topic.partitions[wanted.partition_index].partition_epoch
        return problem(state, leader_id, topic, wanted, isr)

    monkeypatch.setattr(isr_alterations, "_problem", careless)


def without_broker_epoch(state, monkeypatch):
    monkeypatch.setattr(ControllerState, "check_broker_epoch", lambda *arguments: None)
    without_member_epochs(state, monkeypatch)


def without_member_epochs(state, monkeypatch):
    monkeypatch.setattr(
        isr_alterations,
        "_is_eligible",
        lambda state, partition, member: state.image.brokers[member.broker_id].is_active,
    )


STORIES = [
    (a_late_proposal, without_partition_epoch),
    (a_late_proposal_of_the_process_before, without_broker_epoch),
    (a_member_that_lost_its_tail_meanwhile, without_member_epochs),
]


@pytest.mark.parametrize("story", [story for story, _ in STORIES])
def test_nothing_stale_gets_into_an_isr(state, story):
    story(state)


@pytest.mark.parametrize(("story", "bug"), STORIES)
def test_without_the_check_it_does(state, monkeypatch, story, bug):
    bug(state, monkeypatch)
    with pytest.raises(AssertionError, match="without what was acknowledged"):
        story(state)


@pytest.mark.parametrize("planted", [False, True])
async def test_an_answer_about_the_old_process_must_not_fence_the_new_one(monkeypatch, planted):
    _, member, brokers = await cluster(probe_timeout_ms=60_000)
    detector = member.controller._detector
    asked, late_answer = asyncio.Event(), asyncio.Event()

    async def probe(endpoint):
        if endpoint.port != 9001:
            return PortState.ACCEPTS
        answer = PortState.ACCEPTS if asked.is_set() else PortState.REFUSES  # the first is about the old process
        asked.set()
        await late_answer.wait()
        return answer

    monkeypatch.setattr(detector, "_probe", probe)
    if planted:

        def careless(self, gone):
            self._controller.fence(list(gone), "planted")

        monkeypatch.setattr(FailureDetector, "_fence", careless)
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asked.wait()
    member.has_heard_nobody()
    await Broker(1, incarnation=2).join(member.controller, previous_epoch=brokers[1].epoch)
    task = detector._task
    assert task is not None
    late_answer.set()
    await task
    assert (1 not in member.controller.unfenced_epochs()) is planted
