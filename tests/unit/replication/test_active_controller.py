"""The controller's shell over a quorum in memory: takes over, decides, answers when committed, gives up the lead."""

from __future__ import annotations

import asyncio
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.replication.clusters import directory_id
from tests.unit.replication.controller_harness import Broker, Member, Quorum, cluster
from tests.unit.replication.test_isr_alterations import proposal
from tidelog.broker.cluster.topic_creation import TopicCreator
from tidelog.broker.config.node_config import NodeConfig
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsRequestDirectoryData,
    AssignReplicasToDirsRequestPartitionData,
    AssignReplicasToDirsRequestTopicData,
)
from tidelog.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tidelog.replication.controller import controller as controller_module
from tidelog.replication.controller.decisions import partition_creation
from tidelog.replication.controller.decisions.state import ControllerState, NewTopic


async def new_topic(member, name="t", *assignments, **configs):
    assignments = assignments or ((1, 2, 3),)
    topic = NewTopic(
        name,
        assignments=list(enumerate(assignments)),
        configs=[(key.replace("_", "."), value) for key, value in configs.items()],
    )
    outcome = (await member.controller.create_topics([topic]))[name]
    assert not isinstance(outcome, KafkaError), outcome
    return lambda index=0: member.controller.image.topics_by_name[name].partitions[index]


async def test_a_new_cluster_gets_its_features_and_its_controller():
    _, member, brokers = await cluster([1])
    image = member.controller.image
    assert image.features == {"metadata.version": 30, "eligible.leader.replicas.version": 1, "transaction.version": 2}
    assert list(image.controllers) == [100]
    assert image.brokers[1].is_active
    assert image.brokers[1].epoch == brokers[1].epoch
    assert image.controller_id == 100


async def test_what_a_standby_reads_is_what_the_active_one_built():
    quorum, member, _ = await cluster()
    standby = Member(quorum, 101)
    quorum.commit()
    standby.tracker.on_high_watermark(quorum.high_watermark)
    await new_topic(member)
    assert standby.tracker.image.topics_by_name == member.tracker.image.topics_by_name
    assert standby.tracker.image.brokers == member.tracker.image.brokers
    assert standby.tracker.offset == member.tracker.offset
    # The first thing told is the difference from nothing, and then each change is told once.
    assert [sorted(delta.changed_brokers) for _, delta in standby.told] == [[1, 2, 3], []]


async def test_a_standby_refuses():
    quorum, _, _ = await cluster()
    standby = Member(quorum, 101)
    with pytest.raises(KafkaError) as caught:
        await standby.controller.create_topics([NewTopic("t")])
    assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_a_leader_that_has_lost_its_majority_answers_nothing_before_it_resigns():
    """No commit proves an answer without records, and another controller may have fenced the broker."""
    _, member, brokers = await cluster()
    await brokers[1].heartbeat(member.controller)
    member.log.has_lost_majority = True
    with pytest.raises(KafkaError) as caught:
        await brokers[1].heartbeat(member.controller)
    assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_nothing_is_told_or_answered_before_it_is_committed():
    quorum, member, _ = await cluster()
    quorum.hold = True
    told = len(member.told)
    creating = asyncio.create_task(member.controller.create_topics([NewTopic("t", 1, 3)]))
    await asyncio.sleep(0.01)
    assert not creating.done()
    assert len(member.told) == told
    quorum.commit()
    assert "t" in await creating
    assert "t" in member.controller.image.topics_by_name
    assert len(member.told) == told + 1


async def test_a_later_decision_sees_an_earlier_one_that_is_not_committed():
    quorum, member, _ = await cluster()
    quorum.hold = True
    first, second = (asyncio.create_task(member.controller.create_topics([NewTopic("t", 1, 1)])) for _ in range(2))
    await asyncio.sleep(0.01)
    # A refusal rests on the uncommitted topic, so it waits as well.
    assert not second.done()
    quorum.commit()
    assert not isinstance((await first)["t"], KafkaError)
    refused = (await second)["t"]
    assert isinstance(refused, KafkaError)
    assert refused.code is ErrorCode.TOPIC_ALREADY_EXISTS


async def test_who_loses_the_lead_forgets_what_was_not_committed():
    quorum, member, _ = await cluster()
    other = Member(quorum, 101)
    quorum.commit()
    other.tracker.on_high_watermark(quorum.high_watermark)
    quorum.hold = True
    creating = asyncio.create_task(member.controller.create_topics([NewTopic("t", 1, 1)]))
    await asyncio.sleep(0.01)
    quorum.hold = False
    quorum.lead(other.log)
    with pytest.raises(KafkaError) as caught:
        await creating
    assert caught.value.code is ErrorCode.NOT_CONTROLLER
    assert not member.controller.is_active
    await other.controller.create_topics([NewTopic("u", 1, 1)])
    assert list(member.controller.image.topics_by_name) == ["u"]
    # Back again: what the other did is known.
    quorum.lead(member.log)
    outcome = (await member.controller.create_topics([NewTopic("u", 1, 1)]))["u"]
    assert isinstance(outcome, KafkaError)
    assert outcome.code is ErrorCode.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize("leads_again", [False, True])
async def test_a_lead_that_is_over_when_all_is_replayed_is_not_taken(leads_again):
    """It wrote the first records of its epoch into a later one, or gave up the later lead."""
    quorum, member, _ = await cluster()
    past = quorum.epoch
    quorum.lead(None)
    quorum.epoch, quorum.leader = (past + 2, member.log) if leads_again else (past, None)
    leader, written = quorum.leader, list(quorum.batches)
    # A record is to be written.
    member.controller._identity = member.controller._identity._replace(incarnation_id=b"x" * 16)
    member.tracker.on_lead(past)
    assert not member.controller.is_active
    assert (quorum.leader, quorum.batches) == (leader, written)
    member.tracker.on_resign(past)
    if leads_again:
        member.tracker.on_lead(past + 2)
        assert member.controller.is_active
        assert member.controller.epoch == past + 2
        assert len(quorum.batches) == len(written) + 1


async def test_several_changes_committed_together_are_told_as_one():
    quorum, member, _ = await cluster()
    quorum.hold = True
    told = len(member.told)
    tasks = [asyncio.create_task(member.controller.create_topics([NewTopic(name, 1, 1)])) for name in "ab"]
    await asyncio.sleep(0.01)
    quorum.commit()
    await asyncio.gather(*tasks)
    ((_, delta),) = member.told[told:]
    assert [topic.name for topic in delta.created_topics.values()] == ["a", "b"]


async def test_an_answer_that_takes_too_long_is_a_timeout():
    quorum, member, _ = await cluster()
    quorum.hold = True
    with pytest.raises(KafkaError) as caught:
        await member.controller.create_topics([NewTopic("t", 1, 1)], timeout_ms=20)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_a_log_that_cannot_be_written_ends_the_lead():
    quorum, member, _ = await cluster()
    member.log.failure = OSError("disk full")
    with pytest.raises(KafkaError) as caught:
        await member.controller.create_topics([NewTopic("t", 1, 1)])
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert not member.controller.is_active
    assert quorum.leader is None


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_broker_that_is_gone_is_fenced_as_soon_as_its_connection_breaks():
    _, member, brokers = await cluster()
    partition = await new_topic(member)
    member.refusing.add(9001)
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await until(lambda: partition().leader == 2)
    assert member.controller.image.brokers[1].fenced
    assert (partition().isr, partition().leader_epoch) == ((2, 3), 1)


@pytest.mark.slow
async def test_a_broker_that_hangs_is_left_to_its_session():
    _, member, brokers = await cluster(session_timeout_ms=2000, probe_timeout_ms=20)
    partition = await new_topic(member)
    member.hanging.add(9001)
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.1)
    assert partition().leader == 1
    async with asyncio.timeout(PATIENCE_S):
        while partition().leader == 1:
            await asyncio.sleep(0.05)
            for broker_id in (2, 3):
                await brokers[broker_id].heartbeat(member.controller)
    assert partition().leader == 2


async def test_an_old_suspicion_does_not_fence_a_new_incarnation():
    _, member, brokers = await cluster()
    member.refusing.add(9001)
    member.controller.broker_connection_lost(1, brokers[1].epoch - 1)
    await asyncio.sleep(0.05)
    assert member.probed == []
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    member.has_heard_nobody()
    again = Broker(1, incarnation=2)
    await again.join(member.controller)
    await asyncio.sleep(0.05)
    assert not member.controller.image.brokers[1].fenced


async def test_a_refusal_counts_only_of_the_inter_broker_listener_that_the_controller_knows():
    """Another listener's address may lead to the controller's own host: EXTERNAL://localhost:9092."""
    quorum, member, _ = await cluster([1])
    two = Broker(2)
    two.listener_name = "EXTERNAL"
    await two.join(member.controller)
    await member.learned()
    partition = await new_topic(member, "t", (2, 1))
    other = Member(quorum, 101)
    other.tracker.on_high_watermark(quorum.high_watermark)
    await other.learned()
    for controller in (member, other):
        controller.refusing |= {9002}
    member.controller.broker_connection_lost(2, two.epoch)
    await asyncio.sleep(0.1)
    quorum.lead(other.log)
    await asyncio.sleep(0.1)
    assert partition().leader == 2
    assert not any(broker.fenced for broker in other.controller.image.brokers.values())


async def test_a_refusal_does_not_count_where_the_address_never_accepted():
    """As where a firewall between controller and broker rejects connections, and the broker heartbeats all the same."""
    quorum, member, _ = await cluster([1])
    member.refusing.add(9002)
    two = Broker(2)
    await two.join(member.controller)
    partition = await new_topic(member, "t", (2, 1))
    other = Member(quorum, 101)
    other.refusing.add(9002)
    other.tracker.on_high_watermark(quorum.high_watermark)
    for lead in (other, member, other):
        quorum.lead(lead.log)
        await asyncio.sleep(0.1)
    assert (partition().leader, partition().leader_epoch) == (2, 0)


async def test_an_address_proves_itself_anew_in_each_broker_epoch():
    _, member, brokers = await cluster()
    member.refusing.add(9001)
    member.has_heard_nobody()
    again = Broker(1, incarnation=2)
    await again.join(member.controller, previous_epoch=brokers[1].epoch)
    member.controller.broker_connection_lost(1, again.epoch)
    await asyncio.sleep(0.15)
    assert not member.controller.image.brokers[1].fenced


async def test_a_heartbeat_during_the_question_clears_the_suspicion(monkeypatch):
    _, member, brokers = await cluster()
    probe = member._probe

    async def slow(endpoint):
        await asyncio.sleep(0.02)
        await brokers[1].heartbeat(member.controller)
        return await probe(endpoint)

    monkeypatch.setattr(member.controller._detector, "_probe", slow)
    member.refusing.add(9001)
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.2)
    assert not member.controller.image.brokers[1].fenced


async def test_a_broker_that_was_fenced_wrongly_is_not_fenced_again_by_the_same_clue():
    """Its address accepted once and refuses since, though it lives: one election, not one for each suspicion."""
    _, member, brokers = await cluster()
    partition = await new_topic(member)
    member.refusing.add(9001)
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await until(lambda: partition().leader == 2)
    await brokers[1].heartbeat(member.controller)
    assert not member.controller.image.brokers[1].fenced
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.15)
    assert not member.controller.image.brokers[1].fenced


async def test_a_listener_that_closes_after_the_connections_is_asked_again():
    _, member, brokers = await cluster()
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.005)
    assert not member.controller.image.brokers[1].fenced
    member.refusing.add(9001)
    await until(lambda: member.controller.image.brokers[1].fenced)


async def test_a_heartbeat_clears_a_suspicion():
    _, member, brokers = await cluster()
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.005)
    await brokers[1].heartbeat(member.controller)
    await asyncio.sleep(0.03)
    member.probed.clear()
    await asyncio.sleep(0.2)
    assert member.probed == []


@pytest.mark.parametrize("elr", [False, True])
async def test_brokers_that_die_at_once_are_fenced_in_one_decision(elr):
    _, member, brokers = await cluster()
    if not elr:
        await without_elr(member)
    partition = await new_topic(member, "t", (1, 2))
    member.refusing |= {9001, 9002}
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await until(lambda: partition().leader == -1)
    if elr:
        assert (partition().isr, partition().elr) == ((), (1, 2))
    else:
        assert partition().isr == (1, 2)
    assert partition().leader_epoch == 1  # one election, not two


async def test_with_whole_logs_the_first_of_those_that_died_at_once_leads_when_it_is_back():
    _, member, brokers = await cluster()
    await without_elr(member)
    partition = await new_topic(member, "t", (1, 2))
    member.controller.fence([1, 2], "both are gone")
    await Broker(2, incarnation=2).join(member.controller, previous_epoch=brokers[2].epoch)
    assert (partition().leader, partition().isr) == (2, (1, 2))


async def test_where_records_may_be_lost_the_first_of_those_that_died_at_once_waits_for_the_other():
    _, member, brokers = await cluster()
    await without_elr(member)
    partition = await new_topic(member, "t", (1, 2))
    member.controller.fence([1, 2], "both are gone")
    await Broker(2, incarnation=2).join(member.controller)
    assert (partition().leader, partition().isr) == (-1, (1,))
    await Broker(1, incarnation=2).join(member.controller, previous_epoch=brokers[1].epoch)
    assert (partition().leader, partition().isr) == (1, (1,))


async def test_with_whole_logs_the_first_back_leads_as_an_eligible_replica():
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", (1, 2), min_insync_replicas="2")
    member.controller.fence([1, 2], "both are gone")
    await Broker(2, incarnation=2).join(member.controller, previous_epoch=brokers[2].epoch)
    assert (partition().leader, partition().isr, partition().elr) == (2, (2,), (1,))


async def test_brokers_that_die_one_after_another_leave_the_last_one():
    _, member, brokers = await cluster()
    await without_elr(member)
    partition = await new_topic(member, "t", (1, 2))
    for broker_id in (1, 2):
        member.refusing.add(9000 + broker_id)
        member.controller.broker_connection_lost(broker_id, brokers[broker_id].epoch)
        await until(partial(lambda lost: member.controller.image.brokers[lost].fenced, broker_id))
    assert (partition().isr, partition().leader) == ((2,), -1)
    member.refusing.clear()
    await Broker(1, incarnation=2).join(member.controller)
    assert partition().leader == -1
    await Broker(2, incarnation=2).join(member.controller)
    assert (partition().isr, partition().leader) == ((2,), 2)


async def without_elr(member):
    response = await member.controller.update_features(
        UpdateFeaturesRequest(
            feature_updates=[
                FeatureUpdateKey(feature="eligible.leader.replicas.version", max_version_level=0, upgrade_type=2)
            ]
        ),
        2,
    )
    assert response.error_code == 0, response.error_message


async def test_a_new_controller_asks_after_everybody_at_once():
    quorum, member, _ = await cluster()
    partition = await new_topic(member)
    other = Member(quorum, 101)
    other.tracker.on_high_watermark(quorum.high_watermark)
    await other.learned()
    other.refusing.add(9001)
    quorum.lead(other.log)
    await until(lambda: partition().leader == 2)
    assert set(other.probed) == {9001, 9002, 9003}


async def test_a_controller_that_slept_blames_nobody(monkeypatch):
    _, member, _ = await cluster(session_timeout_ms=2_000)
    controller = member.controller
    now = controller.now_ms()
    monkeypatch.setattr(controller, "now_ms", lambda: now + 60_000)
    controller._tick()
    assert not any(broker.fenced for broker in controller.image.brokers.values())


# -- brokers come and go -----------------------------------------------------------------------------------------------


async def test_a_broker_is_unfenced_when_it_has_caught_up():
    _, member, _ = await cluster([1])
    broker = Broker(2)
    await broker.register(member.controller)
    behind = await broker.heartbeat(member.controller, current_metadata_offset=broker.epoch - 1)
    assert (behind.is_caught_up, behind.is_fenced) == (False, True)
    caught_up = await broker.heartbeat(member.controller)
    assert (caught_up.is_caught_up, caught_up.is_fenced) == (True, False)
    assert member.controller.image.brokers[2].is_active


async def test_controlled_shutdown_moves_leaders_before_it_lets_go():
    _, member, brokers = await cluster()
    partition = await new_topic(member)
    controller = member.controller
    answer = await brokers[1].heartbeat(controller, want_shut_down=True)
    assert (answer.is_fenced, answer.should_shut_down) == (False, False)
    assert (partition().leader, partition().isr) == (2, (2, 3))
    # Not before the others know.
    answer = await brokers[1].heartbeat(controller, want_shut_down=True)
    assert not answer.should_shut_down
    for broker_id in (2, 3):
        await brokers[broker_id].heartbeat(controller)
    answer = await brokers[1].heartbeat(controller, want_shut_down=True)
    assert (answer.is_fenced, answer.should_shut_down) == (True, True)
    assert controller.image.brokers[1].fenced


async def test_a_clean_restart_of_the_only_replica_changes_nothing_of_it():
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", (1,))
    member.has_heard_nobody()
    again = Broker(1, incarnation=2)
    await again.join(member.controller, previous_epoch=brokers[1].epoch)
    assert (partition().leader, partition().leader_epoch, partition().isr) == (1, 0, (1,))


async def test_an_unclean_restart_of_the_only_replica_starts_a_new_epoch():
    _, member, _ = await cluster()
    partition = await new_topic(member, "t", (1,))
    member.has_heard_nobody()
    await Broker(1, incarnation=2).join(member.controller)
    assert (partition().leader, partition().isr, partition().leader_recovery_state) == (1, (1,), 0)
    assert partition().leader_epoch > 0
    assert (partition().elr, partition().last_known_elr) == ((), ())


async def test_an_unclean_restart_costs_the_place_in_the_isr_and_among_the_eligible():
    _, member, _ = await cluster()
    partition = await new_topic(member, "t", (1, 2), min_insync_replicas="2")
    member.has_heard_nobody()
    await Broker(1, incarnation=2).register(member.controller)
    assert (partition().leader, partition().isr, partition().elr) == (2, (2,), ())


async def test_a_clean_restart_leaves_the_broker_eligible():
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", (1, 2), min_insync_replicas="2")
    member.has_heard_nobody()
    await Broker(1, incarnation=2).register(member.controller, previous_epoch=brokers[1].epoch)
    assert (partition().leader, partition().isr, partition().elr) == (2, (2,), (1,))


async def test_heartbeats_of_another_incarnation_are_refused():
    _, member, brokers = await cluster()
    member.has_heard_nobody()
    await Broker(1, incarnation=2).join(member.controller)
    with pytest.raises(KafkaError) as caught:
        await brokers[1].heartbeat(member.controller, want_fence=True)
    assert caught.value.code is ErrorCode.STALE_BROKER_EPOCH
    assert not member.controller.image.brokers[1].fenced


async def test_the_reason_of_a_refused_registration_is_in_the_log(caplog: pytest.LogCaptureFixture):
    """The broker gets the code alone."""
    _, member, brokers = await cluster()
    stranger = brokers[3].registration(log_dirs=[directory_id(2)])
    with pytest.raises(KafkaError, match="already registered") as caught:
        await member.controller.register_broker(stranger, 4)
    assert caught.value.code is ErrorCode.INVALID_REGISTRATION
    assert "broker 3 is not registered: INVALID_REGISTRATION: Broker 2 is already registered with one of" in caplog.text


async def test_an_unregistered_broker_is_forgotten():
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", (1, 2))
    await member.controller.unregister_broker(UnregisterBrokerRequest(broker_id=1))
    assert 1 not in member.controller.image.brokers
    assert (partition().leader, partition().isr, partition().elr) == (2, (2,), ())
    with pytest.raises(KafkaError) as caught:
        await brokers[1].heartbeat(member.controller)
    assert caught.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED


async def test_preferred_leaders_come_back_by_themselves():
    _, member, brokers = await cluster(session_timeout_ms=60_000, imbalance_check_interval_ms=1)
    partition = await new_topic(member)
    controller = member.controller
    controller.fence([1], "test")
    await until(lambda: partition().leader == 2)
    await brokers[1].heartbeat(controller)
    # In sync again:
    answer = await controller.alter_partition(
        proposal(controller.image, 2, brokers[2].epoch, "t", {2: -1, 3: -1, 1: brokers[1].epoch}), 3
    )
    assert answer.topics[0].partitions[0].error_code == 0
    async with asyncio.timeout(PATIENCE_S):
        while partition().leader != 1:
            await asyncio.sleep(0.01)
            for broker in brokers.values():
                await broker.heartbeat(controller)


async def test_a_snapshot_is_written_when_enough_was_appended():
    quorum = Quorum()
    member = Member(quorum, 100, snapshot_bytes_min=200)
    quorum.lead(member.log)
    broker = Broker(1)
    await broker.join(member.controller)
    await until(lambda: member.log.forgotten)
    identity, values = member.log.snapshots[0]
    assert member.log.forgotten == [identity]
    fresh = Member(Quorum(), 101)
    fresh.tracker.on_snapshot(identity, values, 5)
    assert 1 in fresh.tracker.image.brokers
    assert fresh.tracker.offset == identity.end_offset - 1


async def test_a_second_process_of_a_broker_that_lives_is_refused():
    """A copy of its disk, started elsewhere: both would lead what only this broker has, in one leader epoch."""
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", (1,))
    for _ in range(3):
        with pytest.raises(KafkaError) as caught:
            await Broker(1, incarnation=2).register(member.controller, previous_epoch=brokers[1].epoch)
        assert caught.value.code is ErrorCode.DUPLICATE_BROKER_REGISTRATION
        await asyncio.sleep(0.02)
    assert (partition().leader, partition().leader_epoch) == (1, 0)
    assert not (await brokers[1].heartbeat(member.controller)).is_fenced


async def test_a_refused_successor_has_the_old_process_looked_for():
    """The connection of its heartbeats may break unnoticed: the successor must not wait for the whole session."""
    _, member, _ = await cluster()
    member.refusing.add(9001)
    again = Broker(1, incarnation=2)
    with pytest.raises(KafkaError):
        await again.register(member.controller)
    await until(lambda: member.controller.image.brokers[1].fenced)
    await again.join(member.controller)


async def test_an_address_proves_itself_when_the_broker_begins_to_serve():
    """A broker with thousands of logs listens long after its registration, when all attempts to connect are over."""
    _, member, _ = await cluster()
    member.refusing.add(9004)
    slow = Broker(4)
    await slow.register(member.controller)
    await until(lambda: 9004 in member.probed)
    for task in member.controller._detector._learning.values():
        task.cancel()
    member.refusing.clear()
    await slow.heartbeat(member.controller)
    await member.learned()
    member.refusing.add(9004)
    member.controller.broker_connection_lost(4, slow.epoch)
    await until(lambda: member.controller.image.brokers[4].fenced)


async def test_a_successor_need_not_wait_where_a_proxy_accepts_for_the_dead():
    """The connection of the old process has closed, and the new one comes from the same directories and addresses."""
    _, member, brokers = await cluster()
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await asyncio.sleep(0.02)
    assert not member.controller.image.brokers[1].fenced
    moved = Broker(1, incarnation=2)
    moved.listener_name = "OTHER"
    with pytest.raises(KafkaError):
        await moved.register(member.controller)
    await Broker(1, incarnation=3).join(member.controller)


async def test_a_broker_that_connects_again_is_no_prey_to_its_copy():
    _, member, brokers = await cluster()
    member.controller.broker_connection_lost(1, brokers[1].epoch)
    await brokers[1].heartbeat(member.controller)
    with pytest.raises(KafkaError):
        await Broker(1, incarnation=2).register(member.controller)


async def count_steps(member, meanwhile=lambda: None):
    steps = 0

    async def pause():
        nonlocal steps
        steps += 1
        meanwhile()
        await asyncio.sleep(0)

    member.controller.pause = pause
    return lambda: steps


async def test_a_large_decision_is_made_in_steps():
    """5,000 names took 0.2 s of the active controller's loop, 10,000 partitions of one topic 0.1 s."""
    _, member, _ = await cluster()
    steps = await count_steps(member)
    results = await member.controller.create_topics([NewTopic(f"t{i}", 1, 1) for i in range(1000)], validate_only=True)
    assert len(results) == 1000
    assert steps() >= 9
    results = await member.controller.create_topics([NewTopic("u", 5000, 1)], validate_only=True)
    assert not isinstance(results["u"], KafkaError)
    assert steps() >= 9 + 10
    elections = ElectLeadersRequest(topic_partitions=[TopicPartitions(topic="t", partitions=list(range(2000)))])
    response = await member.controller.elect_leaders(elections)
    assert len(response.replica_election_results[0].partition_result) == 2000
    assert steps() >= 19 + 19


def _proposal_for(like, index):
    one = copy(like)
    one.partition_index = index
    return one


async def test_the_proposals_of_more_partitions_than_a_broker_names_are_decided_on_in_steps():
    """12,000 topics in one AlterPartition took 0.4 s of the active controller's loop."""
    _, member, brokers = await cluster()
    partition = await new_topic(member, "t", *[(1, 2)] * 4001)
    steps = await count_steps(member)
    request = proposal(member.controller.image, 1, brokers[1].epoch, "t", {1: brokers[1].epoch})
    [topic] = request.topics
    topic.partitions = [_proposal_for(topic.partitions[0], index) for index in range(2000)]
    answer = await member.controller.alter_partition(request, 3)
    assert ([one.error_code for one in answer.topics[0].partitions], steps()) == ([0] * 2000, 0)
    topic.partitions = [_proposal_for(topic.partitions[0], index) for index in range(4001)]
    answer = await member.controller.alter_partition(request, 3)
    refused = [ErrorCode.INVALID_UPDATE_VERSION] * 2000
    assert ([one.error_code for one in answer.topics[0].partitions], steps()) == ([*refused, *[0] * 2001], 2)
    assert {partition(index).isr for index in range(4001)} == {(1,)}
    assigned = AssignReplicasToDirsRequest(
        broker_id=2,
        broker_epoch=brokers[2].epoch,
        directories=[
            AssignReplicasToDirsRequestDirectoryData(
                id=b"another directory"[:16],
                topics=[
                    AssignReplicasToDirsRequestTopicData(
                        topic_id=topic.topic_id,
                        partitions=[AssignReplicasToDirsRequestPartitionData(partition_index=n) for n in range(4001)],
                    )
                ],
            )
        ],
    )
    response = await member.controller.assign_replicas_to_dirs(assigned)
    [assigned_topic] = response.directories[0].topics
    assert ([one.error_code for one in assigned_topic.partitions], steps()) == ([0] * 4001, 4)


async def test_large_decisions_are_made_one_after_another(monkeypatch):
    """Forty requests of 34 bytes, each for 10,000 partitions, held 400,000 records at once."""
    _, member, _ = await cluster()
    state = member.controller._state
    order = []
    record = type(state).partition_record

    def noted(self, topic_id, *others):
        order.append(topic_id)
        return record(self, topic_id, *others)

    monkeypatch.setattr(type(state), "partition_record", noted)
    create = member.controller.create_topics
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(create([NewTopic("t", 3000, 1)], validate_only=True) for _ in range(5)))
    assert len(order) == 15_000
    assert sum(one != other for one, other in pairwise(order)) == 4


async def test_a_decision_whose_image_has_changed_between_its_steps_is_made_again():
    _, member, _ = await cluster()

    def create_another():
        records, _ = member.controller._state.create_topics([NewTopic("t150", 1, 1)])
        member.controller._append(records)

    steps = await count_steps(member, create_another)
    results = await member.controller.create_topics([NewTopic(f"t{i}", 1, 1) for i in range(200)])
    assert steps() == 2 * 2
    refused = results.pop("t150")
    assert isinstance(refused, KafkaError)
    assert refused.code is ErrorCode.TOPIC_ALREADY_EXISTS
    assert not any(isinstance(result, KafkaError) for result in results.values())
    assert len(member.controller.image.topics_by_name) == 200


async def test_a_decision_comes_to_an_end_while_others_change_the_image_all_the_time():
    _, member, _ = await cluster()
    numbers = iter(range(1000))
    steps = await count_steps(
        member,
        lambda: member.controller._append(
            member.controller._state.create_topics([NewTopic(f"u{next(numbers)}", 1, 1)])[0]
        ),
    )
    results = await member.controller.create_topics([NewTopic(f"t{i}", 1, 1) for i in range(200)])
    assert not any(isinstance(result, KafkaError) for result in results.values())
    assert steps() == 3 * 2
    assert len(member.controller.image.topics_by_name) == 206


@pytest.mark.parametrize("topic_count", [50, 150])
async def test_what_is_more_than_one_atomic_batch_is_refused(monkeypatch, topic_count):
    """Its second batch began in the midst of a topic: a node that had only the first knew it without partitions."""
    monkeypatch.setattr(controller_module, "RECORDS_PER_BATCH", 20 * topic_count)
    quorum, member, _ = await cluster()
    end_offset = quorum.end_offset
    configs = [(f"key.{number}", "1") for number in range(18)]
    topics = [NewTopic(f"t{number}", 1, 1, configs=configs) for number in range(topic_count)]
    with pytest.raises(KafkaError) as caught:
        await member.controller.create_topics([*topics, NewTopic("u", 1, 1)])
    assert caught.value.code is ErrorCode.POLICY_VIOLATION
    assert quorum.end_offset == end_offset
    await member.controller.create_topics(topics)
    assert [len(batch.values) for batch in quorum.batches if batch.last_offset >= end_offset] == [20 * topic_count]


async def large_decisions_that_wait(member, count, **options):
    """Creations of many partitions, of which the first does not come to its end."""
    forever = asyncio.Event()
    member.controller.pause = forever.wait
    create = member.controller.create_topics
    tasks = [asyncio.create_task(create([NewTopic(f"t{i}", 3000, 1)], **options)) for i in range(count)]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks, forever


@pytest.mark.slow
async def test_few_large_decisions_wait(monkeypatch):
    """4,000 requests of 33 bytes took ten minutes, and all the places for requests of the node, heartbeats' too."""
    monkeypatch.setattr(controller_module, "LARGE_UNDER_WAY_MAX", 3)
    _, member, _ = await cluster()
    tasks, forever = await large_decisions_that_wait(member, 5)
    for refused in tasks[3:]:
        with pytest.raises(KafkaError) as caught:
            await asyncio.wait_for(refused, PATIENCE_S)
        assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    await asyncio.wait_for(member.controller.create_topics([NewTopic("small", 1, 1)]), PATIENCE_S)
    forever.set()
    await asyncio.wait_for(asyncio.gather(*tasks[:3]), PATIENCE_S)
    await asyncio.wait_for(member.controller.create_topics([NewTopic("t3", 3000, 1)]), PATIENCE_S)
    assert sorted(member.controller.image.topics_by_name) == ["small", "t0", "t1", "t2", "t3"]


async def test_the_timeout_of_a_large_decision_counts_while_it_waits():
    """The topic was created minutes after its client had gone."""
    _, member, _ = await cluster()
    tasks, forever = await large_decisions_that_wait(member, 3, timeout_ms=20)
    for timed_out in tasks:
        with pytest.raises(KafkaError) as caught:
            await asyncio.wait_for(timed_out, PATIENCE_S)
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    forever.set()
    await asyncio.sleep(0.01)
    assert not member.controller.image.topics_by_name


async def test_a_large_decision_on_what_was_never_committed_is_made_again():
    quorum, member, _ = await cluster()
    other = Member(quorum, 101)
    quorum.hold = True
    lost = asyncio.create_task(member.controller.create_topics([NewTopic("t", 1, 1)]))
    await asyncio.sleep(0)

    def lose_and_win():
        if not lost.done():
            quorum.hold = False
            quorum.lead(other.log)
            quorum.lead(member.log)

    await count_steps(member, lose_and_win)
    topics = [NewTopic("t", 1, 1), *(NewTopic(f"bad name {number}", 1, 1) for number in range(200))]
    answer = await asyncio.wait_for(member.controller.create_topics(topics), PATIENCE_S)
    with pytest.raises(KafkaError):
        await lost
    assert not isinstance(answer["t"], KafkaError), answer["t"]


async def test_new_partitions_are_not_refused_for_a_broker_that_is_fenced_between_the_steps():
    """They were placed on it in one step, and in the next nobody lived who could lead them."""
    _, member, _ = await cluster()
    await new_topic(member, "t", (1,))
    pauses = iter(range(100))

    def fence_in_the_second():
        if next(pauses) == 1:
            member.controller.fence([2], "it is a test")

    steps = await count_steps(member, fence_in_the_second)
    request = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name="t", count=2000, assignments=None)])
    response = await asyncio.wait_for(member.controller.create_partitions(request), PATIENCE_S)
    assert response.results[0].error_code == 0, response
    assert steps() > 5
    partitions = member.controller.image.topics_by_name["t"].partitions
    assert {partition.leader for partition in partitions.values()} == {1, 3}


async def test_too_many_manual_assignments_are_refused_before_each_is_checked(monkeypatch):
    """49,000 took 0.2 s of the loop at once."""
    _, member, _ = await cluster()
    monkeypatch.setattr(ControllerState, "check_manual_assignment", None)
    topic = NewTopic("t", assignments=[(index, [1]) for index in range(10_001)])
    refused = (await member.controller.create_topics([topic]))["t"]
    assert isinstance(refused, KafkaError)
    assert refused.code is ErrorCode.POLICY_VIOLATION


@pytest.mark.parametrize(("topic_count", "partition_count"), [(20, 300), (99, 100), (2, 500)])
async def test_many_topics_of_few_partitions_are_decided_on_in_steps(topic_count, partition_count):
    """20 topics of 499 partitions were one step of a quarter of a second, and no large decision."""
    _, member, _ = await cluster()
    state = member.controller._state
    topics = [NewTopic(f"t{number}", partition_count, 1) for number in range(topic_count)]
    count = topic_count * partition_count
    assert len(list(state.create_topics_in_steps(topics))) >= count // 1000
    await member.controller.create_topics([NewTopic(topic.name, 1, 1) for topic in topics])
    grown = [CreatePartitionsTopic(name=topic.name, count=partition_count + 1, assignments=None) for topic in topics]
    request = CreatePartitionsRequest(topics=grown, timeout_ms=1000)
    assert len(list(partition_creation.create_partitions(member.controller._state, request))) >= count // 1000


@pytest.mark.parametrize(
    "topic", [NewTopic("t", 61, 1), NewTopic("t", -1, 1), NewTopic("t", 1, 1, configs=[("a", "b")] * 60)]
)
async def test_a_creation_that_is_not_small_does_nothing_before_its_turn(monkeypatch, topic):
    """1,500 requests of 36 bytes for 500 partitions each were decided on in a few turns, and the lead moved."""
    _, member, _ = await cluster()
    state = member.controller._state
    state.settings.default_partition_count = 61
    monkeypatch.setattr(ControllerState, "_create_topic", None)  # cannot be called
    assert next(state.create_topics_in_steps([topic]), "a step") is None


async def test_the_topics_of_coordinators_do_not_wait_for_large_creations(monkeypatch):
    """They count 53 and 55 with their configs. They were refused while a hundred waited: a first group had to wait."""
    _, member, _ = await cluster()
    tasks, forever = await large_decisions_that_wait(member, controller_module.LARGE_UNDER_WAY_MAX)
    one_replica = {"offsets.topic.replication.factor": "1", "transaction.state.log.replication.factor": "1"}
    creator = TopicCreator(NodeConfig.load(None, one_replica), cast(Any, None))
    for name in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
        topic = creator._topic(name)
        created = (await asyncio.wait_for(member.controller.create_topics([topic]), PATIENCE_S))[name]
        assert not isinstance(created, KafkaError)
        assert created.partition_count == 50
    forever.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_forty_clients_create_thousands_of_partitions_at_the_same_time():
    """Of twenty parallel requests for 2,500 partitions each, four were refused, and not every client tries again."""
    _, member, _ = await cluster()
    create = partial(member.controller.create_topics, validate_only=True, timeout_ms=60_000)
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*(create([NewTopic(f"t{number}", 501, 1)]) for number in range(40)))
    assert not any(isinstance(result, KafkaError) for results in answers for result in results.values())
