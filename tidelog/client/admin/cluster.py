"""What an administrator asks of the cluster itself: who it is, elections, moves of replicas, the quorum.

All of it is the active controller's to answer; brokers pass it on. Invariant: answers per partition are given per
partition, None for success, since what one partition refuses says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tidelog.client.admin.base import AdminBase, check, refusal
from tidelog.client.model import (
    ClusterDescription,
    Node,
    PartitionReassignment,
    QuorumDescription,
    QuorumReplica,
    TopicPartition,
    as_partition,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import add_raft_voter, alter_partition_reassignments, describe_quorum
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from tidelog.protocol.messages.describe_cluster import DescribeClusterRequest, DescribeClusterResponse
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListPartitionReassignmentsTopics,
)
from tidelog.protocol.messages.remove_raft_voter import RemoveRaftVoterRequest, RemoveRaftVoterResponse
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse

METADATA_TOPIC = "__cluster_metadata"

_PREFERRED, _UNCLEAN = 0, 1


class ClusterAdmin(AdminBase):
    """The part of `Admin` that is about the cluster."""

    async def describe_cluster(self, *, include_fenced: bool = False) -> ClusterDescription:
        """Id, controller and brokers; with `include_fenced` also those that are down but registered."""

        async def attempt() -> DescribeClusterResponse:
            cluster = await self._reach()
            connection = await cluster.any_connection()
            fenced = include_fenced and connection.supports(DescribeClusterRequest, 2)
            request = DescribeClusterRequest(include_fenced_brokers=fenced)
            return await connection.call(request, DescribeClusterResponse, self._config.request_timeout_ms)

        response = await self._until(attempt)
        check(response.error_code, response.error_message, "the cluster")
        nodes = tuple(
            Node(each.broker_id, each.host, each.port, each.rack, each.is_fenced) for each in response.brokers
        )
        return ClusterDescription(response.cluster_id, response.controller_id, nodes)

    async def unregister_broker(self, broker_id: int) -> None:
        """Forget a broker that will not come back. Raises KafkaError(BROKER_ID_NOT_REGISTERED)."""
        response = await self._ask_controller(
            UnregisterBrokerRequest(broker_id=broker_id), UnregisterBrokerResponse, lambda answer: [answer.error_code]
        )
        check(response.error_code, response.error_message, f"broker {broker_id}")

    # -- partitions

    async def create_partitions(
        self,
        counts: Mapping[str, int],
        *,
        assignments: Mapping[str, Sequence[Sequence[int]]] | None = None,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """Give topics more partitions, up to `counts` in all; `assignments` are the replicas of each new one.

        Raises the KafkaError of the first topic that was refused, such as INVALID_PARTITIONS; others may have grown.
        """
        placed = assignments or {}
        request = CreatePartitionsRequest(
            topics=[
                CreatePartitionsTopic(
                    name=name,
                    count=count,
                    assignments=[CreatePartitionsAssignment(broker_ids=list(brokers)) for brokers in placed[name]]
                    if name in placed
                    else None,
                )
                for name, count in counts.items()
            ],
            timeout_ms=timeout_ms or self._config.request_timeout_ms,
            validate_only=validate_only,
        )
        response = await self._ask_controller(
            request,
            CreatePartitionsResponse,
            lambda answer: [each.error_code for each in answer.results],
            repeatable=False,
        )
        for each in response.results:
            check(each.error_code, each.error_message, f"topic {each.name!r}")

    async def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        unclean: bool = False,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Make the first replica leader again or, `unclean`, any that is alive, though records may be lost.

        Without `partitions` in the whole cluster; then those that need no election are left out. None: elected.
        """
        request = ElectLeadersRequest(
            election_type=_UNCLEAN if unclean else _PREFERRED,
            topic_partitions=None
            if partitions is None
            else [TopicPartitions(topic=topic, partitions=numbers) for topic, numbers in _by_topic(partitions).items()],
            timeout_ms=timeout_ms or self._config.request_timeout_ms,
        )
        response = await self._ask_controller(request, ElectLeadersResponse, lambda answer: [answer.error_code])
        check(response.error_code, None, "election")
        outcomes: dict[TopicPartition, KafkaError | None] = {}
        for topic in response.replica_election_results:
            for each in topic.partition_result:
                partition = TopicPartition(topic.topic, each.partition_id)
                error = refusal(each.error_code, each.error_message, str(partition))
                if partitions is not None or error is None or error.code is not ErrorCode.ELECTION_NOT_NEEDED:
                    outcomes[partition] = error
        return outcomes

    async def alter_partition_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        allow_replication_factor_change: bool = True,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Start moving partitions to these replicas; None for a partition cancels its move. None: accepted."""
        topics: dict[str, alter_partition_reassignments.ReassignableTopic] = {}
        for given, replicas in targets.items():
            topic, number = as_partition(given)
            entry = topics.setdefault(topic, alter_partition_reassignments.ReassignableTopic(name=topic))
            entry.partitions.append(
                alter_partition_reassignments.ReassignablePartition(
                    partition_index=number, replicas=None if replicas is None else list(replicas)
                )
            )
        request = alter_partition_reassignments.AlterPartitionReassignmentsRequest(
            timeout_ms=timeout_ms or self._config.request_timeout_ms,
            allow_replication_factor_change=allow_replication_factor_change,
            topics=list(topics.values()),
        )
        response = await self._ask_controller(
            request,
            alter_partition_reassignments.AlterPartitionReassignmentsResponse,
            lambda answer: [answer.error_code],
        )
        check(response.error_code, response.error_message, "reassignment")
        return {
            TopicPartition(topic.name, each.partition_index): refusal(
                each.error_code, each.error_message, f"{topic.name}-{each.partition_index}"
            )
            for topic in response.responses
            for each in topic.partitions
        }

    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The moves under way, everywhere or of these partitions."""
        request = ListPartitionReassignmentsRequest(
            timeout_ms=timeout_ms or self._config.request_timeout_ms,
            topics=None
            if partitions is None
            else [
                ListPartitionReassignmentsTopics(name=topic, partition_indexes=numbers)
                for topic, numbers in _by_topic(partitions).items()
            ],
        )
        response = await self._ask_controller(
            request, ListPartitionReassignmentsResponse, lambda answer: [answer.error_code]
        )
        check(response.error_code, response.error_message, "reassignments")
        return {
            TopicPartition(topic.name, each.partition_index): PartitionReassignment(
                tuple(each.replicas), tuple(each.adding_replicas), tuple(each.removing_replicas)
            )
            for topic in response.topics
            for each in topic.partitions
        }

    # -- the metadata quorum

    async def describe_quorum(self) -> QuorumDescription:
        """The leader's view of the voters and observers of the metadata log."""
        partition = describe_quorum.DescribeQuorumRequestPartitionData(partition_index=0)
        topic = describe_quorum.DescribeQuorumRequestTopicData(topic_name=METADATA_TOPIC, partitions=[partition])
        request = describe_quorum.DescribeQuorumRequest(topics=[topic])

        async def attempt() -> describe_quorum.DescribeQuorumResponse:
            connection = await self._controller()
            answer = await connection.call(
                request, describe_quorum.DescribeQuorumResponse, self._config.request_timeout_ms
            )
            check(answer.error_code, answer.error_message, "the metadata quorum")
            for each in answer.topics[0].partitions if answer.topics else ():
                check(each.error_code, each.error_message, "the metadata quorum")
            return answer

        response = await self._until(attempt)
        if not response.topics or not response.topics[0].partitions:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the answer does not tell of the metadata quorum")
        told = response.topics[0].partitions[0]
        return QuorumDescription(
            told.leader_id,
            told.leader_epoch,
            told.high_watermark,
            tuple(map(_replica, told.current_voters)),
            tuple(map(_replica, told.observers)),
            {
                node.node_id: tuple((each.name, each.host, each.port) for each in node.listeners)
                for node in response.nodes
            },
        )

    async def add_raft_voter(
        self, node_id: int, directory_id: bytes, endpoints: Iterable[tuple[str, str, int]]
    ) -> None:
        """Make a controller that is an observer so far a voter. `endpoints`: (listener, host, port)."""
        request = add_raft_voter.AddRaftVoterRequest(
            cluster_id=None,
            timeout_ms=int(self._config.request_timeout_ms),
            voter_id=node_id,
            voter_directory_id=directory_id,
            listeners=[add_raft_voter.Listener(name=name, host=host, port=port) for name, host, port in endpoints],
        )
        response = await self._ask_controller(
            request, add_raft_voter.AddRaftVoterResponse, lambda answer: [answer.error_code], repeatable=False
        )
        check(response.error_code, response.error_message, f"voter {node_id}")

    async def remove_raft_voter(self, node_id: int, directory_id: bytes) -> None:
        """Take a voter out of the quorum."""
        request = RemoveRaftVoterRequest(cluster_id=None, voter_id=node_id, voter_directory_id=directory_id)
        response = await self._ask_controller(
            request, RemoveRaftVoterResponse, lambda answer: [answer.error_code], repeatable=False
        )
        check(response.error_code, response.error_message, f"voter {node_id}")


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for given in partitions:
        topic, number = as_partition(given)
        numbers.setdefault(topic, []).append(number)
    return numbers


def _replica(told: describe_quorum.ReplicaState) -> QuorumReplica:
    return QuorumReplica(
        told.replica_id,
        told.replica_directory_id,
        told.log_end_offset,
        told.last_fetch_timestamp,
        told.last_caught_up_timestamp,
    )
