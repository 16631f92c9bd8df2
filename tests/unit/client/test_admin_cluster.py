"""What the admin client asks of the cluster itself: the requests it makes, and how it tells the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import DROP, HANDLERS, FakeCluster, FakeNode
from tests.unit.client.test_silent_leader import answered_but_by
from tidelog.client import Admin, TopicPartition
from tidelog.client.model import Node, PartitionReassignment, QuorumReplica, Replica
from tidelog.client.network import cluster as cluster_module
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import (
    add_raft_voter,
    alter_partition_reassignments,
    api_versions,
    create_partitions,
    delete_topics,
    describe_cluster,
    describe_quorum,
    elect_leaders,
    incremental_alter_configs,
    list_partition_reassignments,
    remove_raft_voter,
    unregister_broker,
)

FAST = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 10, "reconnect_backoff_ms": 5, "reconnect_backoff_max_ms": 10}
T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
SCRIPTED = (
    add_raft_voter,
    alter_partition_reassignments,
    create_partitions,
    delete_topics,
    describe_cluster,
    describe_quorum,
    elect_leaders,
    incremental_alter_configs,
    list_partition_reassignments,
    remove_raft_voter,
    unregister_broker,
)


@pytest.fixture(autouse=True)
def scripted_apis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake cluster offers these APIs too; what it answers is in each test."""
    for module in SCRIPTED:
        name = "".join(word.capitalize() for word in module.__name__.rpartition(".")[2].split("_"))
        request, response = getattr(module, f"{name}Request"), getattr(module, f"{name}Response")
        monkeypatch.setitem(HANDLERS, request.API_KEY, (request, response, None))


def admin(cluster: FakeCluster, **options: Any) -> Admin:
    return Admin(bootstrap_servers=cluster.bootstrap, **FAST, **options)


def told(outcomes: dict[TopicPartition, KafkaError | None]) -> dict[TopicPartition, ErrorCode | None]:
    return {partition: None if error is None else error.code for partition, error in outcomes.items()}


async def ask(request: type, answer: Any, call: Any, times: int = 1) -> tuple[Any, Any]:
    """(what `call` gives, the request it made) when the cluster answers with `answer`, or with each of a list."""
    async with FakeCluster(nodes=2) as cluster, admin(cluster) as asking:
        for each in answer if isinstance(answer, list) else [answer]:
            cluster.script(request, lambda *_, answered=each: answered)
        try:
            outcome = await call(asking)
        except KafkaError as error:
            outcome = error
        sent = cluster.sent(request)
        assert len(sent) == times
        return outcome, sent[-1]


# ---------------------------------------------------------------------------------------------------------- elections


def election(*results: tuple[str, int, int], error_code: int = 0) -> elect_leaders.ElectLeadersResponse:
    return elect_leaders.ElectLeadersResponse(
        error_code=error_code,
        replica_election_results=[
            elect_leaders.ReplicaElectionResult(
                topic=topic,
                partition_result=[elect_leaders.PartitionResult(partition_id=number, error_code=code)],
            )
            for topic, number, code in results
        ],
    )


async def test_leaders_are_elected_and_each_partition_has_its_outcome() -> None:
    outcomes, request = await ask(
        elect_leaders.ElectLeadersRequest,
        election(
            ("t", 0, 0), ("t", 1, ErrorCode.ELECTION_NOT_NEEDED), ("u", 0, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE)
        ),
        lambda asking: asking.elect_leaders([T0, U0, T1]),
    )
    assert told(outcomes) == {T0: None, T1: 84, U0: 80}
    assert "u-0" in str(outcomes[U0])
    assert request.election_type == 0
    assert [(each.topic, each.partitions) for each in request.topic_partitions] == [("t", [0, 1]), ("u", [0])]


async def test_everywhere_what_needs_no_election_is_not_told() -> None:
    outcomes, request = await ask(
        elect_leaders.ElectLeadersRequest,
        election(("t", 0, 0), ("t", 1, ErrorCode.ELECTION_NOT_NEEDED)),
        lambda asking: asking.elect_leaders(unclean=True),
    )
    assert told(outcomes) == {T0: None}
    assert (request.election_type, request.topic_partitions) == (1, None)


async def test_an_election_waits_for_a_controller_and_goes_through_a_connection_that_broke() -> None:
    outcomes, _ = await ask(
        elect_leaders.ElectLeadersRequest,
        [election(error_code=ErrorCode.NOT_CONTROLLER), DROP, election(("t", 0, 0))],
        lambda asking: asking.elect_leaders([T0]),
        times=3,
    )
    assert told(outcomes) == {T0: None}


async def test_a_refused_election_is_raised() -> None:
    outcome, _ = await ask(
        elect_leaders.ElectLeadersRequest,
        election(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
        lambda asking: asking.elect_leaders(),
    )
    assert outcome.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


# -------------------------------------------------------------------------------------------------------------- moves


async def test_moves_start_and_are_cancelled() -> None:
    of = alter_partition_reassignments
    answer = of.AlterPartitionReassignmentsResponse(
        responses=[
            of.ReassignableTopicResponse(
                name="t",
                partitions=[
                    of.ReassignablePartitionResponse(partition_index=0, error_message=None),
                    of.ReassignablePartitionResponse(
                        partition_index=1, error_code=85, error_message="nothing to cancel"
                    ),
                ],
            )
        ]
    )
    outcomes, request = await ask(
        of.AlterPartitionReassignmentsRequest,
        answer,
        lambda asking: asking.alter_partition_reassignments({T0: [3, 4], T1: None}),
    )
    assert told(outcomes) == {T0: None, T1: ErrorCode.NO_REASSIGNMENT_IN_PROGRESS}
    assert "nothing to cancel" in str(outcomes[T1])
    (topic,) = request.topics
    assert [(each.partition_index, each.replicas) for each in topic.partitions] == [(0, [3, 4]), (1, None)]
    assert request.allow_replication_factor_change


@pytest.mark.parametrize(("asked", "names"), [(None, None), ([T1], [("t", [1])])])
async def test_moves_under_way_are_listed(asked: Any, names: Any) -> None:
    of = list_partition_reassignments
    move = of.OngoingPartitionReassignment(
        partition_index=1, replicas=[1, 2, 3], adding_replicas=[3], removing_replicas=[1]
    )
    answer = of.ListPartitionReassignmentsResponse(topics=[of.OngoingTopicReassignment(name="t", partitions=[move])])
    moves, request = await ask(
        of.ListPartitionReassignmentsRequest, answer, lambda asking: asking.list_partition_reassignments(asked)
    )
    assert moves == {T1: PartitionReassignment((1, 2, 3), (3,), (1,))}
    assert moves[T1].target == (2, 3)
    assert (request.topics and [(each.name, each.partition_indexes) for each in request.topics]) == names


# ------------------------------------------------------------------------------------------------ partitions, configs


async def test_topics_grow_but_not_twice_when_the_answer_is_lost() -> None:
    of = create_partitions
    done = of.CreatePartitionsResponse(results=[of.CreatePartitionsTopicResult(name="t")])
    _, request = await ask(
        of.CreatePartitionsRequest,
        done,
        lambda asking: asking.create_partitions({"t": 3, "u": 2}, assignments={"u": [[1, 2]]}),
    )
    assert [
        (each.name, each.count, each.assignments and each.assignments[0].broker_ids) for each in request.topics
    ] == [
        ("t", 3, None),
        ("u", 2, [1, 2]),
    ]
    outcome, _ = await ask(of.CreatePartitionsRequest, DROP, lambda asking: asking.create_partitions({"t": 3}))
    assert outcome.code is ErrorCode.NETWORK_EXCEPTION
    refusal = of.CreatePartitionsTopicResult(name="t", error_code=37, error_message="fewer than now")
    outcome, _ = await ask(
        of.CreatePartitionsRequest,
        of.CreatePartitionsResponse(results=[refusal]),
        lambda asking: asking.create_partitions({"t": 1}),
    )
    assert str(outcome) == "INVALID_PARTITIONS: topic 't': fewer than now"


async def test_topics_beyond_the_controllers_quota_grow_later() -> None:
    of = create_partitions
    beyond = of.CreatePartitionsTopicResult(name="u", error_code=ErrorCode.THROTTLING_QUOTA_EXCEEDED)
    first = of.CreatePartitionsResponse(results=[of.CreatePartitionsTopicResult(name="t"), beyond])
    then = of.CreatePartitionsResponse(results=[of.CreatePartitionsTopicResult(name="u")])
    outcome, request = await ask(
        of.CreatePartitionsRequest, [first, then], lambda asking: asking.create_partitions({"t": 3, "u": 2}), times=2
    )
    assert outcome is None
    assert [each.name for each in request.topics] == ["u"]


async def test_topics_beyond_the_controllers_quota_are_deleted_later() -> None:
    of = delete_topics
    beyond = of.DeletableTopicResult(name="t", error_code=ErrorCode.THROTTLING_QUOTA_EXCEEDED)
    first = of.DeleteTopicsResponse(responses=[beyond, of.DeletableTopicResult(name="u")])
    then = of.DeleteTopicsResponse(responses=[of.DeletableTopicResult(name="t")])
    outcome, request = await ask(
        of.DeleteTopicsRequest, [first, then], lambda asking: asking.delete_topics(["t", "u"]), times=2
    )
    assert outcome is None
    assert [each.name for each in request.topics] == ["t"]


async def test_configs_are_set_and_put_back_each_broker_at_itself() -> None:
    of = incremental_alter_configs
    async with FakeCluster(nodes=3) as cluster, admin(cluster) as asking:
        for _ in range(3):
            cluster.script(of.IncrementalAlterConfigsRequest, lambda *_: of.IncrementalAlterConfigsResponse())
        await asking.incremental_alter_configs(
            topics={"t": {"a": "1", "b": None}}, brokers={None: {"c": "2"}, 2: {"c": None}, 3: {"c": "4"}}
        )
        sent = [
            (node, each) for node, _, each in cluster.requests if isinstance(each, of.IncrementalAlterConfigsRequest)
        ]
    found = [
        (
            node,
            each.resource_type,
            each.resource_name,
            [(one.name, one.config_operation, one.value) for one in each.configs],
        )
        for node, request in sent
        for each in request.resources
    ]
    own = [each for each in found if each[2] in ("2", "3")]
    assert sorted(own) == [(2, 4, "2", [("c", 1, None)]), (3, 4, "3", [("c", 0, "4")])]
    assert [each[1:] for each in found if each not in own] == [
        (2, "t", [("a", 0, "1"), ("b", 1, None)]),
        (4, "", [("c", 0, "2")]),
    ]


async def test_a_config_that_is_refused_is_raised() -> None:
    of = incremental_alter_configs
    refusal = of.AlterConfigsResourceResponse(resource_type=2, resource_name="t", error_code=40, error_message="no")
    outcome, _ = await ask(
        of.IncrementalAlterConfigsRequest,
        of.IncrementalAlterConfigsResponse(responses=[refusal]),
        lambda asking: asking.incremental_alter_configs(topics={"t": {"c": "x"}}),
    )
    assert str(outcome) == "INVALID_CONFIG: configuration of topic 't': no"


# --------------------------------------------------------------------------------------------------------- the cluster


async def test_the_cluster_with_those_that_are_down() -> None:
    of = describe_cluster
    nodes = [of.DescribeClusterBroker(broker_id=n, host="h", port=9, is_fenced=n == 2) for n in (1, 2)]
    cluster, request = await ask(
        of.DescribeClusterRequest,
        of.DescribeClusterResponse(cluster_id="c", controller_id=1, brokers=nodes),
        lambda asking: asking.describe_cluster(include_fenced=True),
    )
    assert request.include_fenced_brokers
    assert cluster.nodes == (Node(1, "h", 9), Node(2, "h", 9, fenced=True))


async def test_the_cluster_of_brokers_without_describe_cluster() -> None:
    """Those before Kafka 2.8. The call was refused with UNSUPPORTED_VERSION."""
    async with FakeCluster(nodes=2) as cluster, admin(cluster) as asking:
        assert describe_cluster.DescribeClusterRequest.API_KEY is not None
        cluster.versions[describe_cluster.DescribeClusterRequest.API_KEY] = (0, -1)
        described = await asking.describe_cluster(include_fenced=True)
        nodes = tuple(Node(each.node_id, "127.0.0.1", each.port) for each in cluster.nodes.values())
        assert (described.cluster_id, described.nodes) == ("fake", nodes)
        assert described.controller_id in cluster.nodes
        assert not cluster.sent(describe_cluster.DescribeClusterRequest)


async def test_a_broker_is_forgotten() -> None:
    of = unregister_broker
    outcome, request = await ask(
        of.UnregisterBrokerRequest,
        of.UnregisterBrokerResponse(error_code=102, error_message="who?"),
        lambda asking: asking.unregister_broker(9),
    )
    assert request.broker_id == 9
    assert str(outcome) == "BROKER_ID_NOT_REGISTERED: broker 9: who?"


def quorum_answer(error_code: int = 0) -> describe_quorum.DescribeQuorumResponse:
    of = describe_quorum
    voter = of.ReplicaState(
        replica_id=1,
        replica_directory_id=b"d" * 16,
        log_end_offset=7,
        last_fetch_timestamp=5,
        last_caught_up_timestamp=6,
    )
    partition = of.DescribeQuorumResponsePartitionData(
        partition_index=0,
        error_code=error_code,
        leader_id=1,
        leader_epoch=4,
        high_watermark=6,
        current_voters=[voter],
        observers=[of.ReplicaState(replica_id=9, log_end_offset=2)],
    )
    return of.DescribeQuorumResponse(
        topics=[of.DescribeQuorumResponseTopicData(topic_name="__cluster_metadata", partitions=[partition])],
        nodes=[of.Node(node_id=1, listeners=[of.Listener(name="CONTROLLER", host="h", port=9093)])],
    )


async def test_the_quorum_is_described_once_it_has_a_leader() -> None:
    quorum, request = await ask(
        describe_quorum.DescribeQuorumRequest,
        [quorum_answer(ErrorCode.NOT_LEADER_OR_FOLLOWER), quorum_answer()],
        lambda asking: asking.describe_quorum(),
        times=2,
    )
    assert request.topics[0].topic_name == "__cluster_metadata"
    assert (quorum.leader_id, quorum.leader_epoch, quorum.high_watermark) == (1, 4, 6)
    assert quorum.voters == (QuorumReplica(1, b"d" * 16, 7, 5, 6),)
    assert quorum.observers == (QuorumReplica(9, bytes(16), 2, -1, -1),)
    assert quorum.endpoints == {1: (("CONTROLLER", "h", 9093),)}


async def test_voters_come_and_go() -> None:
    of = add_raft_voter
    outcome, request = await ask(
        of.AddRaftVoterRequest,
        of.AddRaftVoterResponse(error_message=None),
        lambda asking: asking.add_raft_voter(4, b"d" * 16, [("C", "h", 1)]),
    )
    assert outcome is None
    assert (request.voter_id, request.voter_directory_id, request.listeners[0].port) == (4, b"d" * 16, 1)
    outcome, request = await ask(
        remove_raft_voter.RemoveRaftVoterRequest,
        remove_raft_voter.RemoveRaftVoterResponse(error_code=ErrorCode.VOTER_NOT_FOUND, error_message=None),
        lambda asking: asking.remove_raft_voter(4, b"d" * 16),
    )
    assert outcome.code is ErrorCode.VOTER_NOT_FOUND


# ----------------------------------------------------------------------------------------------------- one broker of it


ABOUT_A_BROKER: dict[str, Callable[[Admin, int], Coroutine[Any, Any, object]]] = {
    "versions": lambda asking, broker: asking.describe_versions(broker),
    "configs": lambda asking, broker: asking.describe_configs(brokers=[broker]),
    "config changes": lambda asking, broker: asking.incremental_alter_configs(brokers={broker: {"a": "1"}}),
    "log directories": lambda asking, broker: asking.describe_log_dirs([broker]),
    "replicas": lambda asking, broker: asking.describe_replica_log_dirs([Replica("t", 0, broker)]),
    "moves": lambda asking, broker: asking.alter_replica_log_dirs({Replica("t", 0, broker): "/d"}),
}


@pytest.mark.parametrize("call", ABOUT_A_BROKER.values(), ids=ABOUT_A_BROKER)
@pytest.mark.parametrize("tells_of_fenced", [True, False])
async def test_a_call_about_a_broker_that_does_not_exist_is_refused_at_once(call: Any, tells_of_fenced: bool) -> None:
    """It took `default_api_timeout_ms`, a minute."""
    of = describe_cluster
    async with FakeCluster(nodes=2, t=1) as cluster, admin(cluster) as asking:
        assert of.DescribeClusterRequest.API_KEY is not None
        cluster.versions[of.DescribeClusterRequest.API_KEY] = (0, 2 if tells_of_fenced else 1)
        brokers = [of.DescribeClusterBroker(broker_id=n, host="h", port=9) for n in (1, 2)]
        cluster.script(of.DescribeClusterRequest, lambda *_: of.DescribeClusterResponse(brokers=brokers))
        async with asyncio.timeout(PATIENCE_S / 2):
            with pytest.raises(KafkaError) as refused:
                await call(asking, 7)
        assert str(refused.value) == "BROKER_NOT_AVAILABLE: there is no broker 7; those that run: 1, 2"


async def test_a_call_about_a_broker_that_is_down_waits_for_it() -> None:
    of = describe_cluster
    fenced = [of.DescribeClusterBroker(broker_id=2, host="h", port=9, is_fenced=True)]
    async with FakeCluster(nodes=2) as cluster:
        node = cluster.nodes.pop(2)
        asked: list[object] = []

        def answer(*_: object) -> Any:
            asked.append(None)
            if len(asked) == 3:
                cluster.nodes[2] = node
            return of.DescribeClusterResponse(brokers=fenced)

        cluster.script(of.DescribeClusterRequest, *[answer] * 3)
        async with admin(cluster) as asking, asyncio.timeout(PATIENCE_S):
            assert (await asking.describe_versions(2)).apis
        assert len(asked) == 3


def _no_moves(*_: object) -> Message:
    return list_partition_reassignments.ListPartitionReassignmentsResponse()


READS: dict[str, tuple[Any, type[Message], Callable[[FakeNode, Any], Any]]] = {
    "versions": (Admin.describe_versions, api_versions.ApiVersionsRequest, FakeNode.on_api_versions),
    "moves": (
        Admin.list_partition_reassignments,
        list_partition_reassignments.ListPartitionReassignmentsRequest,
        _no_moves,
    ),
    "quorum": (Admin.describe_quorum, describe_quorum.DescribeQuorumRequest, lambda *_: quorum_answer()),
}


@pytest.mark.parametrize(("call", "kind", "answer"), READS.values(), ids=READS)
async def test_a_broker_that_hangs_does_not_hold_what_any_other_answers(
    call: Any, kind: type[Message], answer: Callable[[FakeNode, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeCluster(nodes=3) as cluster, admin(cluster, request_timeout_ms=3_600_000) as asking:
        await asking.list_topics()
        hanging = cluster.requests[-1][0]
        others = [each for each in cluster.nodes if each != hanging]
        await asyncio.gather(*(asking.describe_versions(each) for each in others))  # connected
        monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
        cluster.script(kind, *[answered_but_by(hanging, answer)] * 99)
        async with asyncio.timeout(PATIENCE_S):
            await call(asking)
