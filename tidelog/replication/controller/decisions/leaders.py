"""Who leads what, as brokers come and go and as operators ask: decisions over many partitions. Pure.

Each decision is on one state and gives records; `partition_changes.py` decides for the single partition. Follows
Kafka's `ReplicationControlManager`, except that brokers found dead at one moment are fenced in one decision: where a
whole ISR dies at once, nobody of it is known to have had less than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)
from tidelog.protocol.messages.metadata_records import BrokerRegistrationChangeRecord, PartitionChangeRecord
from tidelog.replication.controller.decisions.partition_changes import (
    Election,
    ElectionRules,
    PartitionChange,
    TopicRules,
)
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.metadata.image import NO_LEADER
from tidelog.replication.controller.metadata.partition_index import Key

PREFERRED_ELECTION = 0
UNCLEAN_ELECTION = 1
ELECTIONS_PER_ROUND_MAX = 1_000

Records = list[Any]


def update_leaders_and_isrs(
    state: ControllerState,
    partitions: Iterable[Key],
    *,
    gone: Collection[int] = (),
    back: Collection[int] = (),
    unclean_shutdown: Collection[int] = (),
) -> Records:
    """Take brokers out of the ISR of these partitions and elect where need be.

    `gone`: dead or leaving. `back`: may lead again. `unclean_shutdown`: gone, and not to be trusted to have kept what
    they had, so no longer eligible either.
    """
    removed = {*gone, *unclean_shutdown}
    rules = state.election_rules(gone=removed, back=back)
    topics: dict[bytes, TopicRules] = {}
    records: Records = []
    for topic_id, index in partitions:
        topic = state.image.topics_by_id[topic_id]
        topic_rules = topics.get(topic_id)
        if topic_rules is None:
            topic_rules = topics[topic_id] = state.topic_rules(topic)
        change = PartitionChange(topic.partitions[index], index, topic_rules, rules)
        if topic_rules.unclean:
            change.election = Election.UNCLEAN
        if removed:
            change.isr = [replica for replica in change.isr if replica not in removed]
            change.unclean_shutdown = unclean_shutdown
        record = change.build()
        if record is not None:
            records.append(record)
    return records


# -- brokers come and go -----------------------------------------------------------------------------------------------


def fence_brokers(state: ControllerState, broker_ids: Collection[int]) -> Records:
    """All of them at once."""
    affected = dict.fromkeys(key for broker_id in broker_ids for key in state.index.in_isr(broker_id))
    records = update_leaders_and_isrs(state, affected, gone=broker_ids)
    for broker_id in broker_ids:
        broker = state.image.brokers[broker_id]
        records.append(BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, fenced=1))
    return records


def unfence_broker(state: ControllerState, broker_id: int) -> Records:
    """It leads what has no leader and can have it."""
    broker = state.image.brokers[broker_id]
    leaderless = [
        (topic_id, index)
        for topic_id, index in state.index.leaderless
        if broker_id in state.image.topics_by_id[topic_id].partitions[index].replicas
    ]
    return [
        BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, fenced=-1),
        *update_leaders_and_isrs(state, leaderless, back=(broker_id,)),
    ]


def begin_controlled_shutdown(state: ControllerState, broker_id: int) -> Records:
    records: Records = []
    broker = state.image.brokers[broker_id]
    if not broker.in_controlled_shutdown:
        records.append(
            BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, in_controlled_shutdown=1)
        )
    return records + update_leaders_and_isrs(state, state.index.in_isr(broker_id), gone=(broker_id,))


def forget_incarnation(state: ControllerState, broker_id: int, *, clean: bool) -> Records:
    """A new incarnation registers: what the old one led or was in sync with is no longer so.

    After a clean stop its logs are whole. Then it stays eligible, and where it alone was in sync it goes on leading in
    the same epoch: nobody else can have led meanwhile, and it has all that it ever had. An ISR without a leader died as
    a whole, and whoever of it returns first is to lead: it stays as it is, unless its members may have lost something
    and eligible leader replicas are kept to know who has not.
    """
    in_isr = state.index.in_isr(broker_id)
    if clean or not state.elr_enabled:
        topics = state.image.topics_by_id
        led = [(key, topics[key[0]].partitions[key[1]]) for key in in_isr if key not in state.index.leaderless]
        leaving = [key for key, partition in led if not clean or partition.isr != (broker_id,)]
        return update_leaders_and_isrs(state, leaving, gone=(broker_id,))
    affected = dict.fromkeys((*in_isr, *state.index.in_elr(broker_id)))
    return update_leaders_and_isrs(state, affected, unclean_shutdown=(broker_id,))


def forget_broker(state: ControllerState, broker_id: int) -> Records:
    """It is unregistered and will not come back."""
    affected = dict.fromkeys((*state.index.in_isr(broker_id), *state.index.in_elr(broker_id)))
    return update_leaders_and_isrs(state, affected, unclean_shutdown=(broker_id,))


# -- elections that are asked for --------------------------------------------------------------------------------------


def elect_leaders(state: ControllerState, request: ElectLeadersRequest) -> tuple[Records, ElectLeadersResponse]:
    """By hand. Where all partitions are meant, those that need no election are left out of the answer.

    Raises KafkaError(INVALID_REQUEST).
    """
    if request.topic_partitions is not None and not request.topic_partitions:
        return [], ElectLeadersResponse()
    if request.election_type not in (PREFERRED_ELECTION, UNCLEAN_ELECTION):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown election type {request.election_type}")
    everywhere = request.topic_partitions is None
    if request.topic_partitions is None:
        wanted = [(topic.name, list(topic.partitions)) for topic in state.image.topics_by_name.values()]
    else:
        wanted = [(one.topic, one.partitions) for one in request.topic_partitions]
    rules = state.election_rules()
    records: Records = []
    response = ElectLeadersResponse()
    for name, indexes in wanted:
        results = ReplicaElectionResult(topic=name)
        response.replica_election_results.append(results)
        for index in indexes:
            outcome = _elect(state, rules, name, index, request.election_type)
            if isinstance(outcome, PartitionChangeRecord):
                records.append(outcome)
                results.partition_result.append(PartitionResult(partition_id=index, error_message=None))
            elif not everywhere or outcome.code != ErrorCode.ELECTION_NOT_NEEDED:
                results.partition_result.append(
                    PartitionResult(partition_id=index, error_code=outcome.code, error_message=outcome.message)
                )
    return records, response


def _elect(
    state: ControllerState, rules: ElectionRules, name: str, index: int, election_type: int
) -> PartitionChangeRecord | KafkaError:
    topic = state.image.topics_by_name.get(name)
    if topic is None:
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such topic as {name}")
    partition = topic.partitions.get(index)
    if partition is None:
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such partition as {name}-{index}")
    preferred = election_type == PREFERRED_ELECTION
    if partition.leader == partition.replicas[0] if preferred else partition.leader != NO_LEADER:
        return KafkaError(ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition.")
    change = PartitionChange(partition, index, state.topic_rules(topic), rules)
    change.election = Election.PREFERRED if preferred else Election.UNCLEAN
    record = change.build()
    if record is None:
        if preferred:
            return KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        message = "Eligible topic partition leaders are not available."
        return KafkaError(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, message)
    return record


def elect_preferred_leaders(state: ControllerState, limit: int = ELECTIONS_PER_ROUND_MAX) -> Records:
    """Automatic: for the brokers of which too many preferred partitions are led by others.

    Too many is more than `imbalance_percent` (leader.imbalance.per.broker.percentage).
    """
    rules = state.election_rules()
    records: Records = []
    for broker_id, partitions, preferring in state.index.imbalanced():
        if broker_id not in rules.electable or len(partitions) * 100 <= state.settings.imbalance_percent * preferring:
            continue
        for topic_id, index in partitions:
            if len(records) >= limit:
                return records
            topic = state.image.topics_by_id[topic_id]
            partition = topic.partitions[index]
            if partition.replicas[0] not in partition.isr:
                continue
            change = PartitionChange(partition, index, state.topic_rules(topic), rules)
            change.election = Election.PREFERRED
            record = change.build()
            if record is not None:
                records.append(record)
    return records


def elect_unclean_leaders(state: ControllerState, limit: int = ELECTIONS_PER_ROUND_MAX) -> Records:
    """Automatic: leaderless partitions of topics that allow it."""
    rules = state.election_rules()
    records: Records = []
    for topic_id, index in state.index.leaderless:
        if len(records) >= limit:
            break
        topic = state.image.topics_by_id[topic_id]
        if state.unclean_enabled(topic.name):
            outcome = _elect(state, rules, topic.name, index, UNCLEAN_ELECTION)
            if isinstance(outcome, PartitionChangeRecord):
                records.append(outcome)
    return records
