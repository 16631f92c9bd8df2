"""Admin calls about the cluster: description, elections, reassignments, the metadata quorum.

The active controller answers them; brokers forward them to it. Invariant: results are returned by
partition, None for success, because the error of one partition does not concern the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidelog.client.admin.base import AdminBase, error_of, raise_on_error
from tidelog.client.arguments import (
    INT32_MAX,
    as_broker_ids,
    as_bytes_of,
    as_flag,
    as_int,
    as_list,
    as_mapping,
    as_partition_mapping,
    as_partitions,
    as_text,
    as_topic_name,
    shown,
)
from tidelog.client.model import (
    ClusterDescription,
    Node,
    PartitionReassignment,
    QuorumDescription,
    QuorumReplica,
    TopicPartition,
)
from tidelog.client.network.connection import Connection
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import add_raft_voter, alter_partition_reassignments, describe_quorum
from tidelog.protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from tidelog.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse, TopicPartitions
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListPartitionReassignmentsTopics,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.remove_raft_voter import RemoveRaftVoterRequest, RemoveRaftVoterResponse
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse

METADATA_TOPIC = "__cluster_metadata"

_PREFERRED, _UNCLEAN = 0, 1
_DIRECTORY_ID_BYTES = 16


class ClusterAdmin(AdminBase):
    """The cluster calls of `Admin`."""

    async def describe_cluster(self, *, include_fenced: bool = False) -> ClusterDescription:
        """Id, controller and brokers; with `include_fenced` also fenced brokers."""

        as_flag("include_fenced", include_fenced)

        async def ask(connection: Connection) -> DescribeClusterResponse:
            if not connection.supports(DescribeClusterRequest, 0):
                return await self._describe_by_metadata(connection)
            includes_fenced = include_fenced and connection.supports(DescribeClusterRequest, 2)
            request = DescribeClusterRequest(include_fenced_brokers=includes_fenced)
            return await connection.call(request, DescribeClusterResponse, self._config.request_timeout_ms)

        async def attempt() -> DescribeClusterResponse:
            return await (await self._connected_cluster()).ask_any(ask)

        response = await self._retry(attempt)
        raise_on_error(response.error_code, response.error_message, "the cluster")
        nodes = tuple(
            Node(broker.broker_id, broker.host, broker.port, broker.rack, broker.is_fenced)
            for broker in response.brokers
        )
        return ClusterDescription(response.cluster_id or None, response.controller_id, nodes)

    async def _describe_by_metadata(self, connection: Connection) -> DescribeClusterResponse:
        """The description of a broker without DescribeCluster, before Kafka 2.8. Java's Admin asks it so, too."""
        request = MetadataRequest(topics=[])
        metadata = await connection.call(request, MetadataResponse, self._config.request_timeout_ms)
        brokers = [
            DescribeClusterBroker(broker_id=node.node_id, host=node.host, port=node.port, rack=node.rack)
            for node in metadata.brokers
        ]
        return DescribeClusterResponse(
            cluster_id=metadata.cluster_id or "", controller_id=metadata.controller_id, brokers=brokers
        )

    async def unregister_broker(self, broker_id: int) -> None:
        """Remove the registration of a broker that is gone.

        Raises KafkaError(BROKER_ID_NOT_REGISTERED).
        """
        request = UnregisterBrokerRequest(broker_id=as_int("broker_id", broker_id))
        response = await self._call_controller(request, UnregisterBrokerResponse, lambda answer: [answer.error_code])
        raise_on_error(response.error_code, response.error_message, f"broker {broker_id}")

    # -- partitions

    async def create_partitions(
        self,
        counts: Mapping[str, int],
        *,
        assignments: Mapping[str, Sequence[Sequence[int]]] | None = None,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """Grow topics to `counts` partitions in total. `assignments` are the replicas of each new
        partition.

        Raises the KafkaError of the first refused topic, such as INVALID_PARTITIONS. Other topics
        may have grown. Waits for a quota as `create_topics` does.
        """
        new_assignments = {
            as_topic_name("a key of assignments", name): [
                CreatePartitionsAssignment(broker_ids=as_broker_ids(f"assignments[{name!r}]", brokers))
                for brokers in as_list(f"assignments[{name!r}]", replicas, "lists of broker ids")
            ]
            for name, replicas in as_mapping("assignments", assignments or {}, "broker ids by topic").items()
        }
        request = CreatePartitionsRequest(
            topics=[
                CreatePartitionsTopic(
                    name=as_topic_name("a key of counts", name),
                    count=as_int(f"counts[{name!r}]", count, -INT32_MAX),
                    assignments=new_assignments.get(name),
                )
                for name, count in as_mapping("counts", counts, "numbers of partitions by topic").items()
            ],
            timeout_ms=self._timeout_ms(timeout_ms),
            validate_only=as_flag("validate_only", validate_only),
        )

        results = await self._call_controller_within_quota(
            request, CreatePartitionsResponse, lambda answer: answer.results
        )
        for result in results:
            raise_on_error(result.error_code, result.error_message, f"topic {result.name!r}")

    async def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        unclean: bool = False,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Elect the preferred leader, or with `unclean` any live replica, which may lose records.

        Without `partitions` it covers the whole cluster, and the result omits partitions that need
        no election. The result of an elected partition is None.
        """
        request = ElectLeadersRequest(
            election_type=_UNCLEAN if as_flag("unclean", unclean) else _PREFERRED,
            topic_partitions=None
            if partitions is None
            else [TopicPartitions(topic=topic, partitions=numbers) for topic, numbers in _by_topic(partitions).items()],
            timeout_ms=self._timeout_ms(timeout_ms),
        )
        response = await self._call_controller(request, ElectLeadersResponse, lambda answer: [answer.error_code])
        raise_on_error(response.error_code, None, "election")
        results: dict[TopicPartition, KafkaError | None] = {}
        for topic in response.replica_election_results:
            for result in topic.partition_result:
                partition = TopicPartition(topic.topic, result.partition_id)
                error = error_of(result.error_code, result.error_message, str(partition))
                if partitions is not None or error is None or error.code is not ErrorCode.ELECTION_NOT_NEEDED:
                    results[partition] = error
        return results

    async def alter_partition_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        allow_replication_factor_change: bool = True,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Start to move partitions to these replicas. A target of None cancels the move.

        The result of an accepted partition is None.
        """
        topics: dict[str, alter_partition_reassignments.ReassignableTopic] = {}
        checked = as_partition_mapping("targets", targets, "broker ids", _as_replicas)
        for (topic, number), replicas in checked.items():
            entry = topics.setdefault(topic, alter_partition_reassignments.ReassignableTopic(name=topic))
            entry.partitions.append(
                alter_partition_reassignments.ReassignablePartition(partition_index=number, replicas=replicas)
            )
        request = alter_partition_reassignments.AlterPartitionReassignmentsRequest(
            timeout_ms=self._timeout_ms(timeout_ms),
            allow_replication_factor_change=as_flag("allow_replication_factor_change", allow_replication_factor_change),
            topics=list(topics.values()),
        )
        response = await self._call_controller(
            request,
            alter_partition_reassignments.AlterPartitionReassignmentsResponse,
            lambda answer: [answer.error_code],
        )
        raise_on_error(response.error_code, response.error_message, "reassignment")
        return {
            TopicPartition(topic.name, result.partition_index): error_of(
                result.error_code, result.error_message, f"{topic.name}-{result.partition_index}"
            )
            for topic in response.responses
            for result in topic.partitions
        }

    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The ongoing reassignments, of all partitions or of these."""
        request = ListPartitionReassignmentsRequest(
            timeout_ms=self._timeout_ms(timeout_ms),
            topics=None
            if partitions is None
            else [
                ListPartitionReassignmentsTopics(name=topic, partition_indexes=numbers)
                for topic, numbers in _by_topic(partitions).items()
            ],
        )
        response = await self._call_controller(
            request,
            ListPartitionReassignmentsResponse,
            lambda answer: [answer.error_code],
            changes_nothing=True,
        )
        raise_on_error(response.error_code, response.error_message, "reassignments")
        return {
            TopicPartition(topic.name, partition.partition_index): PartitionReassignment(
                tuple(partition.replicas), tuple(partition.adding_replicas), tuple(partition.removing_replicas)
            )
            for topic in response.topics
            for partition in topic.partitions
        }

    # -- the metadata quorum

    async def describe_quorum(self) -> QuorumDescription:
        """The leader's view of the voters and observers of the metadata log."""
        partition = describe_quorum.DescribeQuorumRequestPartitionData(partition_index=0)
        topic = describe_quorum.DescribeQuorumRequestTopicData(topic_name=METADATA_TOPIC, partitions=[partition])
        request = describe_quorum.DescribeQuorumRequest(topics=[topic])

        async def ask(connection: Connection) -> describe_quorum.DescribeQuorumResponse:
            return await connection.call(
                request, describe_quorum.DescribeQuorumResponse, self._config.request_timeout_ms
            )

        async def attempt() -> describe_quorum.DescribeQuorumResponse:
            answer = await self._ask_controller(ask)
            raise_on_error(answer.error_code, answer.error_message, "the metadata quorum")
            for result in answer.topics[0].partitions if answer.topics else ():
                raise_on_error(result.error_code, result.error_message, "the metadata quorum")
            return answer

        response = await self._retry(attempt)
        if not response.topics or not response.topics[0].partitions:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the answer does not tell of the metadata quorum")
        partition_result = response.topics[0].partitions[0]
        return QuorumDescription(
            partition_result.leader_id,
            partition_result.leader_epoch,
            partition_result.high_watermark,
            tuple(map(_replica, partition_result.current_voters)),
            tuple(map(_replica, partition_result.observers)),
            {
                node.node_id: tuple((listener.name, listener.host, listener.port) for listener in node.listeners)
                for node in response.nodes
            },
        )

    async def add_raft_voter(
        self, node_id: int, directory_id: bytes, endpoints: Iterable[tuple[str, str, int]]
    ) -> None:
        """Make an observing controller a voter. `endpoints` are (listener, host, port)."""
        request = add_raft_voter.AddRaftVoterRequest(
            cluster_id=None,
            timeout_ms=int(self._config.request_timeout_ms),
            voter_id=as_int("node_id", node_id),
            voter_directory_id=as_bytes_of("directory_id", directory_id, _DIRECTORY_ID_BYTES),
            listeners=[_as_listener(endpoint) for endpoint in as_list("endpoints", endpoints, "endpoints")],
        )
        response = await self._call_controller(
            request, add_raft_voter.AddRaftVoterResponse, lambda answer: [answer.error_code], repeatable=False
        )
        raise_on_error(response.error_code, response.error_message, f"voter {node_id}")

    async def remove_raft_voter(self, node_id: int, directory_id: bytes) -> None:
        """Remove a voter from the quorum."""
        request = RemoveRaftVoterRequest(
            cluster_id=None,
            voter_id=as_int("node_id", node_id),
            voter_directory_id=as_bytes_of("directory_id", directory_id, _DIRECTORY_ID_BYTES),
        )
        response = await self._call_controller(
            request, RemoveRaftVoterResponse, lambda answer: [answer.error_code], repeatable=False
        )
        raise_on_error(response.error_code, response.error_message, f"voter {node_id}")


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for topic, number in as_partitions("partitions", partitions):
        numbers.setdefault(topic, []).append(number)
    return numbers


def _as_replicas(name: str, value: Any) -> list[int] | None:
    return None if value is None else as_broker_ids(name, value)


def _as_listener(endpoint: Any) -> add_raft_voter.Listener:
    if not isinstance(endpoint, (tuple, list)) or len(endpoint) != 3:
        raise TypeError(f"an endpoint must be (listener, host, port), not {shown(endpoint)}")
    listener, host, port = endpoint
    return add_raft_voter.Listener(
        name=as_text("the listener of an endpoint", listener),
        host=as_text("the host of an endpoint", host),
        port=as_int("the port of an endpoint", port, 0, 65535),
    )


def _replica(state: describe_quorum.ReplicaState) -> QuorumReplica:
    return QuorumReplica(
        state.replica_id,
        state.replica_directory_id,
        state.log_end_offset,
        state.last_fetch_timestamp,
        state.last_caught_up_timestamp,
    )
