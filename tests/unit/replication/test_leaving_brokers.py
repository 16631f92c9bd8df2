"""Heartbeats and registrations of brokers that leave, and of those that come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.replication.clusters import apply, cluster_state, directory_id
from tests.unit.replication.controller_harness import Broker
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest
from tidelog.protocol.messages.metadata_records import FeatureLevelRecord, PartitionChangeRecord
from tidelog.replication.controller.decisions.brokers import heartbeat, register_broker
from tidelog.replication.controller.decisions.leaders import begin_controlled_shutdown, fence_brokers, forget_broker
from tidelog.replication.controller.decisions.liveness import BrokerSessions, BrokerState
from tidelog.replication.controller.decisions.state import ControllerState, NewTopic


@pytest.fixture
def state() -> ControllerState:
    state = cluster_state([1, 2, 3])
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, [1, 2, 3])], configs=MINIMUM)])[0])
    return state


MINIMUM = [("min.insync.replicas", "3")]


def sessions_of(state: ControllerState) -> BrokerSessions:
    sessions = BrokerSessions(1000)
    for broker in state.image.brokers.values():
        sessions.register(broker.node_id, broker.epoch, fenced=broker.fenced, now_ms=0)
    return sessions


def beat(state: ControllerState, sessions: BrokerSessions, broker_id: int = 1, **fields: Any) -> BrokerState:
    values: dict[str, Any] = {
        "broker_id": broker_id,
        "broker_epoch": state.image.brokers[broker_id].epoch,
        "current_metadata_offset": 10_000,
    }
    records, _, after = heartbeat(state, sessions, BrokerHeartbeatRequest(**(values | fields)), 1)
    changed = [record.partition_id for record in records if isinstance(record, PartitionChangeRecord)]
    assert len(changed) == len(set(changed)), "a later record of a partition ignores the first"
    apply(state, records)
    return after


def test_a_broker_that_wants_to_be_fenced_leads_nothing_any_more(state: ControllerState) -> None:
    assert beat(state, sessions_of(state), want_fence=True) is BrokerState.FENCED
    partition = state.image.topics_by_name["t"].partitions[0]
    assert (state.image.brokers[1].fenced, partition.leader, partition.isr) == (True, 2, (2, 3))


def test_a_broker_that_has_not_read_its_registration_is_not_unfenced(state: ControllerState) -> None:
    apply(state, fence_brokers(state, [1]))
    sessions, epoch = sessions_of(state), state.image.brokers[1].epoch
    assert beat(state, sessions, current_metadata_offset=epoch - 1) is BrokerState.FENCED
    assert state.image.brokers[1].fenced
    assert beat(state, sessions, current_metadata_offset=epoch) is BrokerState.UNFENCED
    assert not state.image.brokers[1].fenced


def test_a_broker_that_leaves_while_a_directory_fails_changes_each_partition_once(state: ControllerState) -> None:
    assert state.image.topics_by_name["t"].partitions[0].directory_of(1) == directory_id(1)
    sessions = sessions_of(state)
    assert (
        beat(state, sessions, want_shut_down=True, offline_log_dirs=[directory_id(1)])
        is BrokerState.CONTROLLED_SHUTDOWN
    )
    partition = state.image.topics_by_name["t"].partitions[0]
    assert (partition.leader, partition.leader_epoch) == (2, 1)


def test_a_broker_that_leaves_stays_so_when_it_registers_again(state: ControllerState) -> None:
    broker = Broker(4)
    apply(state, register_broker(state, broker.registration(), has_valid_session=False, next_offset=500).records)
    apply(state, begin_controlled_shutdown(state, 4))
    again = register_broker(state, broker.registration(rack="r"), has_valid_session=True, next_offset=600)
    apply(state, again.records)
    present = state.image.brokers[4]
    assert (present.epoch, present.rack, present.in_controlled_shutdown) == (500, "r", True)


def test_a_leaving_broker_that_leads_again_does_not_stop_yet() -> None:
    sessions = BrokerSessions(1000)
    for broker_id in (1, 2, 3):
        sessions.register(broker_id, 10, fenced=broker_id == 3, now_ms=0)  # the third one is dead, and reads nothing
    sessions.enter_controlled_shutdown(1, 50)
    sessions.touch(2, BrokerState.UNFENCED, 50, 1)
    for leads_any, after in ((True, BrokerState.CONTROLLED_SHUTDOWN), (False, BrokerState.SHUTDOWN_NOW)):
        wish = sessions.next_state(1, want_fence=False, want_shut_down=True, is_caught_up=True, leads_any=leads_any)
        assert wish == (BrokerState.CONTROLLED_SHUTDOWN, after)


def test_an_unregistered_broker_is_not_eligible_as_a_leader(state: ControllerState) -> None:
    """A new machine with its id may register, with an empty disk."""
    apply(state, fence_brokers(state, [1]))
    assert state.image.topics_by_name["t"].partitions[0].elr == (1,)
    apply(state, forget_broker(state, 1))
    partition = state.image.topics_by_name["t"].partitions[0]
    assert (partition.isr, partition.elr) == ((2, 3), ())
