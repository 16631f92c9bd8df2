"""Registrations, log directories, new partitions: what is accepted, and what is said to the others."""

from __future__ import annotations

import pytest

from tests.unit.replication.clusters import apply, cluster_state, directory_id
from tests.unit.replication.controller_harness import Broker
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsRequestDirectoryData,
    AssignReplicasToDirsRequestPartitionData,
    AssignReplicasToDirsRequestTopicData,
)
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest
from tidelog.protocol.messages.broker_registration import Feature, Listener
from tidelog.protocol.messages.controller_registration import ControllerRegistrationRequest
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from tidelog.protocol.messages.metadata_records import (
    BrokerRegistrationChangeRecord,
    FeatureLevelRecord,
    RegisterBrokerRecord,
)
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.replication.controller.decisions import brokers, partition_creation
from tidelog.replication.controller.decisions.brokers import (
    NAMED_CHARACTERS_MAX,
    NAMED_MAX,
    heartbeat,
    register_broker,
    register_controller,
)
from tidelog.replication.controller.decisions.directories import assign_replicas_to_dirs
from tidelog.replication.controller.decisions.leaders import fence_brokers
from tidelog.replication.controller.decisions.liveness import BrokerSessions
from tidelog.replication.controller.decisions.partition_creation import create_partitions
from tidelog.replication.controller.decisions.placement import place_replicas
from tidelog.replication.controller.decisions.state import NewTopic, at_once


@pytest.fixture
def state():
    state = cluster_state([1, 2, 3], cluster_id="c")
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, [1, 2, 3])])])[0])
    return state


def part(state, index=0):
    return state.image.topics_by_name["t"].partitions[index]


def register(state, broker, *, has_valid_session=False, was_heard=True, **fields):
    request = broker.registration(**({"cluster_id": "c"} | fields))
    registered = register_broker(
        state, request, has_valid_session=has_valid_session, was_heard=was_heard, next_offset=500
    )
    apply(state, registered.records)
    return registered


def refusal(state, broker, **fields):
    with pytest.raises(KafkaError) as caught:
        register(state, broker, **fields)
    return caught.value.code


def test_a_new_broker_is_fenced_and_its_epoch_is_its_records_offset(state):
    registered = register(state, Broker(4))
    assert (registered.broker_epoch, state.image.brokers[4].fenced) == (500, True)
    again = register(state, Broker(1, incarnation=5))
    assert again.broker_epoch == 500 + len(again.records) - 1
    assert isinstance(again.records[-1], RegisterBrokerRecord)
    assert (part(state).leader, part(state).isr) == (2, (2, 3))


def test_the_same_incarnation_only_changes_what_it_says(state):
    register(state, Broker(4))
    apply(state, [BrokerRegistrationChangeRecord(broker_id=4, broker_epoch=500, fenced=-1)])
    registered = register(state, Broker(4), rack="r", has_valid_session=True)
    assert (registered.broker_epoch, registered.fenced, len(registered.records)) == (500, False, 1)
    assert (state.image.brokers[4].rack, state.image.brokers[4].fenced) == ("r", False)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"cluster_id": "d"}, ErrorCode.INCONSISTENT_CLUSTER_ID),
        ({"log_dirs": []}, ErrorCode.INVALID_REGISTRATION),
        ({"log_dirs": [UNASSIGNED_DIRECTORY]}, ErrorCode.INVALID_REGISTRATION),
        ({"log_dirs": [b"x" * 16] * 2}, ErrorCode.INVALID_REGISTRATION),
        ({"log_dirs": [directory_id(2)]}, ErrorCode.INVALID_REGISTRATION),
        ({"is_migrating_zk_broker": True}, ErrorCode.BROKER_ID_NOT_REGISTERED),
        ({"features": []}, ErrorCode.UNSUPPORTED_VERSION),
        (
            {"features": [Feature(name="metadata.version", min_supported_version=1, max_supported_version=29)]},
            ErrorCode.UNSUPPORTED_VERSION,
        ),
        (
            {"features": [Feature(name="metadata.version", min_supported_version=1, max_supported_version=30)]},
            ErrorCode.UNSUPPORTED_VERSION,  # it does not know of eligible leader replicas
        ),
    ],
)
def test_a_broker_that_does_not_fit_is_refused(state, fields, code):
    before = state.image
    assert refusal(state, Broker(4), **fields) is code
    assert state.image is before


LISTENER = Listener(name="PLAINTEXT", host="h", port=1)
LONG = "h" * (NAMED_CHARACTERS_MAX + 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"listeners": [LISTENER] * (NAMED_MAX + 1)},
        {"listeners": [Listener(name="PLAINTEXT", host=LONG, port=1)]},
        {"features": [Feature(name="f", min_supported_version=1, max_supported_version=1)] * (NAMED_MAX + 1)},
        {"features": [Feature(name=LONG, min_supported_version=1, max_supported_version=1)]},
    ],
)
def test_a_registration_that_is_too_large_to_be_kept_on_every_node_is_refused(state, fields):
    assert refusal(state, Broker(4), **fields) is ErrorCode.INVALID_REGISTRATION
    request = ControllerRegistrationRequest(controller_id=4, **fields)
    with pytest.raises(KafkaError) as caught:
        register_controller(state, request)
    assert caught.value.code is ErrorCode.INVALID_REGISTRATION


def test_a_broker_that_names_too_much_is_refused(state):
    directories = [number.to_bytes(16, "big") for number in range(1000, 1001 + NAMED_MAX)]
    assert refusal(state, Broker(4), log_dirs=directories) is ErrorCode.INVALID_REGISTRATION
    assert refusal(state, Broker(4), rack=LONG) is ErrorCode.INVALID_REGISTRATION
    sessions = BrokerSessions(1000)
    for offline, cordoned in ((directories, None), ([], directories)):
        request = BrokerHeartbeatRequest(
            broker_id=1,
            broker_epoch=state.image.brokers[1].epoch,
            want_fence=True,
            offline_log_dirs=offline,
            cordoned_log_dirs=cordoned,
        )
        with pytest.raises(KafkaError) as caught:
            heartbeat(state, sessions, request, 0)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_where_as_many_nodes_are_registered_as_may_be_those_register_again(state, monkeypatch):
    monkeypatch.setattr(brokers, "NODES_MAX", 3)
    assert refusal(state, Broker(4)) is ErrorCode.INVALID_REGISTRATION
    register(state, Broker(1, incarnation=5))
    for number in range(3):
        apply(state, register_controller(state, ControllerRegistrationRequest(controller_id=number)))
    with pytest.raises(KafkaError, match="3 nodes are registered"):
        register_controller(state, ControllerRegistrationRequest(controller_id=3))
    assert register_controller(state, ControllerRegistrationRequest(controller_id=2, incarnation_id=b"n" * 16))


def test_two_processes_of_one_id(state):
    """The ids of the directories tell nothing: a copy of the disk has the same."""
    twin = Broker(1, incarnation=7)
    for log_dirs in ([b"x" * 16], twin.registration().log_dirs):
        code = refusal(state, twin, has_valid_session=True, log_dirs=log_dirs)
        assert code is ErrorCode.DUPLICATE_BROKER_REGISTRATION
    register(state, twin, has_valid_session=False, log_dirs=[b"x" * 16])


def test_a_restart_after_which_no_controller_knows_the_old_process(state):
    """A session out of the log: from the same directories at the same addresses it is the successor."""
    register(state, Broker(4), log_dirs=[directory_id(4, 0), directory_id(4, 1)])
    for used in (directory_id(4, 0), directory_id(4, 1)):
        assert refusal(state, Broker(5), log_dirs=[b"x" * 16, used]) is ErrorCode.INVALID_REGISTRATION
    again = Broker(4, incarnation=7)
    moved = [Listener(name="PLAINTEXT", host="other", port=9004, security_protocol=0)]
    heard_nothing = {"has_valid_session": True, "was_heard": False}
    for other in ({"log_dirs": [b"x" * 16]}, {"listeners": moved}):
        assert refusal(state, again, **heard_nothing, **other) is ErrorCode.DUPLICATE_BROKER_REGISTRATION
    # A directory may have been added or removed meanwhile.
    register(state, again, **heard_nothing, log_dirs=[directory_id(4, 1), directory_id(4, 2)])
    state.node_id = 4  # its process has the controller of this quorum, too
    register(state, Broker(4, incarnation=8), **heard_nothing, listeners=moved, log_dirs=[directory_id(4, 2)])


def test_a_failed_directory_takes_its_replicas_out(state):
    register(state, Broker(4), log_dirs=[directory_id(4, 0), directory_id(4, 1)])
    apply(state, [BrokerRegistrationChangeRecord(broker_id=4, broker_epoch=500, fenced=-1)])
    apply(state, state.create_topics([NewTopic("u", assignments=[(0, [4, 1]), (1, [4, 1])])])[0])
    topic = state.image.topics_by_name["u"]
    assert topic.partitions[0].directory_of(4) == UNASSIGNED_DIRECTORY
    directories = [
        AssignReplicasToDirsRequestDirectoryData(
            id=directory_id(4, index),
            topics=[
                AssignReplicasToDirsRequestTopicData(
                    topic_id=topic.topic_id,
                    partitions=[AssignReplicasToDirsRequestPartitionData(partition_index=index)],
                )
            ],
        )
        for index in (0, 1)
    ]
    assigned = AssignReplicasToDirsRequest(broker_id=4, broker_epoch=500, directories=directories)
    records, _ = at_once(assign_replicas_to_dirs(state, assigned))
    apply(state, records)
    topic = state.image.topics_by_name["u"]
    assert [one.directory_of(4) for one in topic.partitions.values()] == [directory_id(4, 0), directory_id(4, 1)]
    assert [one.leader for one in topic.partitions.values()] == [4, 4]

    sessions = BrokerSessions(1000)
    sessions.register(4, 500, fenced=False, now_ms=0)
    request = BrokerHeartbeatRequest(
        broker_id=4, broker_epoch=500, current_metadata_offset=600, offline_log_dirs=[directory_id(4, 1)]
    )
    apply(state, heartbeat(state, sessions, request, 5)[0])
    topic = state.image.topics_by_name["u"]
    assert [one.leader for one in topic.partitions.values()] == [4, 1]
    assert state.image.brokers[4].log_dirs == (directory_id(4, 0),)


def test_a_partition_whose_directory_is_named_again_and_again_is_changed_once(state):
    topic = state.image.topics_by_name["t"]
    register(state, Broker(1, incarnation=5), log_dirs=[directory_id(1), directory_id(1, 1)])
    epoch = state.image.brokers[1].epoch
    partitions = [AssignReplicasToDirsRequestPartitionData(partition_index=0) for _ in range(3)]
    directory = AssignReplicasToDirsRequestDirectoryData(
        id=directory_id(1, 1),
        topics=[AssignReplicasToDirsRequestTopicData(topic_id=topic.topic_id, partitions=partitions)],
    )
    request = AssignReplicasToDirsRequest(broker_id=1, broker_epoch=epoch, directories=[directory, directory])
    records, response = at_once(assign_replicas_to_dirs(state, request))
    codes = [one.error_code for each in response.directories for one in each.topics[0].partitions]
    assert codes == [ErrorCode.NONE, *[ErrorCode.INVALID_REQUEST] * 5]
    assert len(records) == 1


def add(state, name, count, assignments=None):
    topic = CreatePartitionsTopic(
        name=name,
        count=count,
        assignments=None
        if assignments is None
        else [CreatePartitionsAssignment(broker_ids=one) for one in assignments],
    )
    records, response = at_once(create_partitions(state, CreatePartitionsRequest(topics=[topic])))
    apply(state, records)
    return ErrorCode(response.results[0].error_code)


def test_partitions_above_the_bound_of_a_request_are_refused_before_they_are_placed(state, monkeypatch):
    """A request of 1 KB for 9,000 more partitions of each of 50 topics took 4 s of the active controller's loop."""
    apply(state, state.create_topics([NewTopic(f"u{number}", 1, 3) for number in range(5)])[0])
    placed = []

    def place(brokers, count, *others):
        placed.append(count)
        return place_replicas(brokers, count, *others)

    monkeypatch.setattr(partition_creation, "place_replicas", place)
    topics = [CreatePartitionsTopic(name=f"u{number}", count=9000, assignments=None) for number in range(5)]
    records, response = at_once(create_partitions(state, CreatePartitionsRequest(topics=topics)))
    assert placed == [len(records)] == [8999]
    refused = ErrorCode.POLICY_VIOLATION
    assert [each.error_code for each in response.results] == [0, refused, refused, refused, refused]


def test_a_topic_gets_more_partitions(state):
    assert add(state, "t", 3) is ErrorCode.NONE
    assert [len(one.replicas) for one in state.image.topics_by_name["t"].partitions.values()] == [3, 3, 3]
    assert add(state, "t", 4, [[3, 1, 2]]) is ErrorCode.NONE
    assert (part(state, 3).replicas, part(state, 3).leader) == ((3, 1, 2), 3)


@pytest.mark.parametrize(
    ("name", "count", "assignments", "code"),
    [
        ("u", 3, None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("t", 1, None, ErrorCode.INVALID_PARTITIONS),
        ("t", 0, None, ErrorCode.INVALID_PARTITIONS),
        ("t", 20_000, None, ErrorCode.POLICY_VIOLATION),
        ("t", 2, [[1, 2]], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 2, [[1, 2, 9]], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 3, [[1, 2, 3]], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_or_it_does_not(state, name, count, assignments, code):
    assert add(state, name, count, assignments) is code


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
def test_the_topics_of_the_coordinators_keep_their_partitions(state, name):
    """With another number of them a group would be looked for in another partition, without its offsets."""
    apply(state, state.create_topics([NewTopic(name, 3, 3)])[0])
    assert add(state, name, 4) is ErrorCode.INVALID_PARTITIONS
    assert len(state.image.topics_by_name[name].partitions) == 3


def test_a_partition_of_fenced_brokers_cannot_begin(state):
    apply(state, fence_brokers(state, [1, 2]))
    apply(state, state.create_topics([NewTopic("v", assignments=[(0, [3])])])[0])
    assert add(state, "v", 2, [[1]]) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
