"""Elections over many partitions, when brokers change state or operators request them. Pure.

Each decision turns one state into records; `partition_changes.py` decides on a single
partition. Follows Kafka's `ReplicationControlManager`, with one exception: one decision fences all brokers that die
together. When a whole ISR dies at once, none of its replicas is known to lack records.
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
from tidelog.replication.controller.decisions.state import ELEMENTS_AT_ONCE, ControllerState, Steps
from tidelog.replication.controller.metadata.image import NO_LEADER
from tidelog.replication.controller.metadata.partition_index import Key

PREFERRED_ELECTION = 0
UNCLEAN_ELECTION = 1
ELECTIONS_PER_ROUND_MAX = 1_000  # Kafka's MAX_ELECTIONS_PER_IMBALANCE

Records = list[Any]


def update_leaders_and_isrs(
    state: ControllerState,
    partitions: Iterable[Key],
    *,
    gone: Collection[int] = (),
    back: Collection[int] = (),
    unclean_shutdown: Collection[int] = (),
) -> Records:
    """Remove brokers from the ISR of these partitions, and elect leaders where necessary.

    `gone`: dead or leaving brokers. `back`: brokers that may lead again. `unclean_shutdown`:
    brokers that are gone and may have lost records, so that they leave the ELR too.
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


# -- brokers that change state -----------------------------------------------------------------------------------------


def fence_brokers(state: ControllerState, broker_ids: Collection[int]) -> Records:
    """Fence all these brokers in one decision."""
    affected_partitions = dict.fromkeys(key for broker_id in broker_ids for key in state.index.in_isr(broker_id))
    records = update_leaders_and_isrs(state, affected_partitions, gone=broker_ids)
    for broker_id in broker_ids:
        broker = state.image.brokers[broker_id]
        records.append(BrokerRegistrationChangeRecord(broker_id=broker_id, broker_epoch=broker.epoch, fenced=1))
    return records


def unfence_broker(state: ControllerState, broker_id: int) -> Records:
    """Unfence a broker, and elect it for the leaderless partitions that it may lead."""
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
    """A new incarnation registers: remove the old incarnation from leaderships and ISRs.

    After a clean stop the broker's logs are whole. It stays eligible, and keeps leading in the same
    epoch where it is the only ISR member, because no other replica can have led since. A leaderless
    ISR died as a whole, and its first member to return with whole logs is to lead. A member that may
    have lost records leaves it; without ELR the last member stays.
    """
    in_isr = state.index.in_isr(broker_id)
    if clean:
        topics = state.image.topics_by_id
        led_partitions = [
            (key, topics[key[0]].partitions[key[1]]) for key in in_isr if key not in state.index.leaderless
        ]
        leaving_keys = [key for key, partition in led_partitions if partition.isr != (broker_id,)]
        return update_leaders_and_isrs(state, leaving_keys, gone=(broker_id,))
    if not state.elr_enabled:
        return update_leaders_and_isrs(state, in_isr, gone=(broker_id,))
    affected_partitions = dict.fromkeys((*in_isr, *state.index.in_elr(broker_id)))
    return update_leaders_and_isrs(state, affected_partitions, unclean_shutdown=(broker_id,))


def forget_broker(state: ControllerState, broker_id: int) -> Records:
    """Remove an unregistered broker from leaderships, ISRs and ELRs."""
    affected_partitions = dict.fromkeys((*state.index.in_isr(broker_id), *state.index.in_elr(broker_id)))
    return update_leaders_and_isrs(state, affected_partitions, unclean_shutdown=(broker_id,))


# -- elections on request and by schedule ------------------------------------------------------------------------------


def elect_leaders(state: ControllerState, request: ElectLeadersRequest) -> Steps[ElectLeadersResponse]:
    """The elections of an ElectLeaders request. Raises KafkaError(INVALID_REQUEST).

    The response to a request for all partitions omits those that need no election.
    """
    if request.topic_partitions is not None and not request.topic_partitions:
        return [], ElectLeadersResponse()
    if request.election_type not in (PREFERRED_ELECTION, UNCLEAN_ELECTION):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown election type {request.election_type}")
    elects_all = request.topic_partitions is None
    if request.topic_partitions is None:
        requested_partitions = [(topic.name, list(topic.partitions)) for topic in state.image.topics_by_name.values()]
    else:
        requested_partitions = [(topic_data.topic, topic_data.partitions) for topic_data in request.topic_partitions]
    rules = state.election_rules()
    records: Records = []
    response = ElectLeadersResponse()
    elected: set[tuple[str, int]] = set()  # so that a partition that is named again begins one leader epoch
    number = 0
    for name, indexes in requested_partitions:
        results = ReplicaElectionResult(topic=name)
        response.replica_election_results.append(results)
        for index in indexes:
            number += 1
            if number % ELEMENTS_AT_ONCE == 0:
                yield
            outcome = None if (name, index) in elected else _elect(state, rules, name, index, request.election_type)
            if isinstance(outcome, PartitionChangeRecord):
                records.append(outcome)
                elected.add((name, index))
            if not isinstance(outcome, KafkaError):
                results.partition_result.append(PartitionResult(partition_id=index, error_message=None))
            elif not elects_all or outcome.code != ErrorCode.ELECTION_NOT_NEEDED:
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
    is_preferred = election_type == PREFERRED_ELECTION
    if partition.leader == partition.replicas[0] if is_preferred else partition.leader != NO_LEADER:
        return KafkaError(ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition.")
    change = PartitionChange(partition, index, state.topic_rules(topic), rules)
    change.election = Election.PREFERRED if is_preferred else Election.UNCLEAN
    record = change.build()
    if record is None:
        if is_preferred:
            return KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        message = "Eligible topic partition leaders are not available."
        return KafkaError(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, message)
    return record


def elect_preferred_leaders(state: ControllerState, limit: int = ELECTIONS_PER_ROUND_MAX) -> Records:
    """Automatic preferred elections, for brokers whose preferred partitions have too many other
    leaders.

    The bound is `imbalance_percent` (leader.imbalance.per.broker.percentage).
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
    """Automatic unclean elections, for the leaderless partitions of topics that allow them."""
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
