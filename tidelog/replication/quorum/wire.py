"""Converts the core's requests and responses to Kafka's messages and back. Pure.

The metadata log has one partition, so every list of topics and partitions has one entry. A message for another
partition raises KafkaError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import begin_quorum_epoch as begin
from tidelog.protocol.messages import end_quorum_epoch as end
from tidelog.protocol.messages import fetch, fetch_snapshot, update_raft_voter, vote
from tidelog.protocol.uuids import METADATA_TOPIC_ID
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.messages import (
    Answer,
    Ask,
    BeginAnswer,
    BeginAsk,
    EndAnswer,
    EndAsk,
    FetchAnswer,
    FetchAsk,
    OffsetAndEpoch,
    Peer,
    SnapshotAnswer,
    SnapshotAsk,
    UpdateVoterAnswer,
    UpdateVoterAsk,
    VoteAnswer,
    VoteAsk,
)
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import KRAFT_VERSION_MAX, KRAFT_VERSION_MIN, ReplicaKey

TOPIC: Final = "__cluster_metadata"
FETCH_VERSION: Final = 18
REPAIR_REPLICA_ID: Final = -3
"""Kafka's FUTURE_LOCAL_REPLICA_ID: the fetch of a voter that repairs its log (`metadata_repair.py`)."""
VERSIONS: Final[Mapping[type, int]] = {
    VoteAsk: 2, BeginAsk: 1, EndAsk: 1, FetchAsk: FETCH_VERSION, SnapshotAsk: 1, UpdateVoterAsk: 0,
}  # fmt: skip
Endpoints = Sequence[tuple[str, Endpoint]]


def _partition(topics: Sequence[Any], name: str = "topic_name") -> Any:
    """The entry of the only partition."""
    if len(topics) != 1 or getattr(topics[0], name) != TOPIC or len(topics[0].partitions) != 1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "not about the one partition of the metadata log")
    return topics[0].partitions[0]


def check_index(index: int) -> None:
    if index != 0:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"the metadata log has no partition {index}")


# -- the core's asks to Kafka's requests -------------------------------------------------------------------------------


def request_of(ask: Ask, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> Any:
    return _REQUESTS[type(ask)](ask, cluster_id, own_endpoints, bytes_max)


def _vote_request(ask: VoteAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> vote.VoteRequest:
    data = vote.VoteRequestPartitionData(
        partition_index=0,
        replica_epoch=ask.epoch,
        replica_id=ask.candidate.id,
        replica_directory_id=ask.candidate.directory_id,
        voter_directory_id=ask.voter.directory_id,
        last_offset_epoch=ask.last_epoch,
        last_offset=ask.end_offset,
        pre_vote=ask.pre_vote,
    )
    topic = vote.VoteRequestTopicData(topic_name=TOPIC, partitions=[data])
    return vote.VoteRequest(cluster_id=cluster_id, voter_id=ask.voter.id, topics=[topic])


def _begin_request(ask: BeginAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> Any:
    data = begin.BeginQuorumEpochRequestPartitionData(
        partition_index=0,
        voter_directory_id=ask.voter.directory_id,
        leader_id=ask.leader_id,
        leader_epoch=ask.epoch,
    )
    return begin.BeginQuorumEpochRequest(
        cluster_id=cluster_id,
        voter_id=ask.voter.id,
        topics=[begin.BeginQuorumEpochRequestTopicData(topic_name=TOPIC, partitions=[data])],
        leader_endpoints=[begin.LeaderEndpoint(name=name, host=at.host, port=at.port) for name, at in own_endpoints],
    )


def _end_request(ask: EndAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> Any:
    data = end.EndQuorumEpochRequestPartitionData(
        partition_index=0,
        leader_id=ask.leader_id,
        leader_epoch=ask.epoch,
        preferred_candidates=[
            end.ReplicaInfo(candidate_id=key.id, candidate_directory_id=key.directory_id) for key in ask.preferred
        ],
    )
    return end.EndQuorumEpochRequest(
        cluster_id=cluster_id,
        topics=[end.EndQuorumEpochRequestTopicData(topic_name=TOPIC, partitions=[data])],
        leader_endpoints=[end.LeaderEndpoint(name=name, host=at.host, port=at.port) for name, at in own_endpoints],
    )


def _fetch_request(ask: FetchAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> fetch.FetchRequest:
    partition = fetch.FetchPartition(
        partition=0,
        current_leader_epoch=ask.epoch,
        fetch_offset=ask.end_offset,
        last_fetched_epoch=ask.last_epoch,
        log_start_offset=-1,
        partition_max_bytes=bytes_max,
        replica_directory_id=ask.replica.directory_id,
        high_watermark=ask.high_watermark,
    )
    return fetch.FetchRequest(
        cluster_id=cluster_id,
        replica_state=fetch.ReplicaState(replica_id=ask.replica.id, replica_epoch=-1),
        max_wait_ms=ask.max_wait_ms,
        min_bytes=0,
        max_bytes=bytes_max,
        session_id=0,
        session_epoch=-1,
        topics=[fetch.FetchTopic(topic_id=METADATA_TOPIC_ID, partitions=[partition])],
    )


def _snapshot_request(ask: SnapshotAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> Any:
    partition = fetch_snapshot.FetchSnapshotRequestPartitionSnapshot(
        partition=0,
        current_leader_epoch=ask.epoch,
        snapshot_id=fetch_snapshot.FetchSnapshotRequestSnapshotId(
            end_offset=ask.snapshot.end_offset, epoch=ask.snapshot.epoch
        ),
        position=ask.position,
        replica_directory_id=ask.replica.directory_id,
    )
    return fetch_snapshot.FetchSnapshotRequest(
        cluster_id=cluster_id,
        replica_id=ask.replica.id,
        max_bytes=bytes_max,
        topics=[fetch_snapshot.FetchSnapshotRequestTopicSnapshot(name=TOPIC, partitions=[partition])],
    )


def _update_request(ask: UpdateVoterAsk, cluster_id: str, own_endpoints: Endpoints, bytes_max: int) -> Any:
    return update_raft_voter.UpdateRaftVoterRequest(
        cluster_id=cluster_id,
        current_leader_epoch=ask.epoch,
        voter_id=ask.voter.id,
        voter_directory_id=ask.voter.directory_id,
        listeners=[update_raft_voter.Listener(name=name, host=at.host, port=at.port) for name, at in own_endpoints],
        k_raft_version_feature=update_raft_voter.KRaftVersionFeature(
            min_supported_version=KRAFT_VERSION_MIN, max_supported_version=KRAFT_VERSION_MAX
        ),
    )


_REQUESTS: Final[Mapping[type, Callable[..., Any]]] = {
    VoteAsk: _vote_request, BeginAsk: _begin_request, EndAsk: _end_request, FetchAsk: _fetch_request,
    SnapshotAsk: _snapshot_request, UpdateVoterAsk: _update_request,
}  # fmt: skip


# -- Kafka's responses to the core's answers ---------------------------------------------------------------------------


def answer_of(ask: Ask, response: Any) -> Answer:
    """Raises KafkaError for a response that does not fit the request."""
    if isinstance(ask, UpdateVoterAsk):
        leader = response.current_leader
        at = Endpoint(leader.host, leader.port) if leader.leader_id >= 0 and leader.port > 0 else None
        return UpdateVoterAnswer(response.error_code, leader.leader_epoch, leader.leader_id, at)
    if response.error_code:
        return _ANSWERS[type(ask)](response.error_code, -1)
    if isinstance(ask, FetchAsk):
        return _fetch_answer(response)
    if isinstance(ask, SnapshotAsk):
        return _snapshot_answer(response)
    data = _partition(response.topics)
    standing = (data.error_code, data.leader_epoch, data.leader_id, _leader_at(response, data.leader_id))
    if isinstance(ask, VoteAsk):
        return VoteAnswer(*standing, bool(data.vote_granted))
    return BeginAnswer(*standing) if isinstance(ask, BeginAsk) else EndAnswer(*standing)


def _leader_at(response: Any, leader_id: int) -> Endpoint | None:
    for node in response.node_endpoints:
        if node.node_id == leader_id:
            return Endpoint(node.host, node.port)
    return None


def _fetch_answer(response: fetch.FetchResponse) -> FetchAnswer:
    topics = response.responses
    if len(topics) != 1 or topics[0].topic_id != METADATA_TOPIC_ID or len(topics[0].partitions) != 1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "not an answer about the metadata log")
    data = topics[0].partitions[0]
    leader = data.current_leader
    diverging, snapshot = data.diverging_epoch, data.snapshot_id
    return FetchAnswer(
        data.error_code,
        leader.leader_epoch,
        leader.leader_id,
        _leader_at(response, leader.leader_id),
        data.high_watermark,
        OffsetAndEpoch(diverging.epoch, diverging.end_offset) if diverging.epoch >= 0 else None,
        SnapshotId(snapshot.end_offset, snapshot.epoch) if snapshot.epoch >= 0 and snapshot.end_offset >= 0 else None,
        data.records or b"",
        tuple(Peer(node.node_id, Endpoint(node.host, node.port)) for node in response.node_endpoints),
    )


def _snapshot_answer(response: fetch_snapshot.FetchSnapshotResponse) -> SnapshotAnswer:
    data = _partition(response.topics, "name")
    leader = data.current_leader
    return SnapshotAnswer(
        data.error_code,
        leader.leader_epoch,
        leader.leader_id,
        _leader_at(response, leader.leader_id),
        data.size,
        data.position,
        data.unaligned_records or b"",
    )


_ANSWERS: Final[Mapping[type, Callable[[int, int], Answer]]] = {
    VoteAsk: VoteAnswer, BeginAsk: BeginAnswer, EndAsk: EndAnswer, FetchAsk: FetchAnswer, SnapshotAsk: SnapshotAnswer,
    UpdateVoterAsk: UpdateVoterAnswer,
}  # fmt: skip


# -- requests to asks, answers to responses ----------------------------------------------------------------------------


def vote_ask(request: vote.VoteRequest) -> VoteAsk:
    data = _partition(request.topics)
    check_index(data.partition_index)
    return VoteAsk(
        data.replica_epoch,
        ReplicaKey(data.replica_id, data.replica_directory_id),
        ReplicaKey(request.voter_id, data.voter_directory_id),
        data.last_offset_epoch,
        data.last_offset,
        data.pre_vote,
    )


def vote_response(answer: VoteAnswer, version: int) -> vote.VoteResponse:
    data = vote.VoteResponsePartitionData(
        partition_index=0,
        error_code=answer.error,
        leader_id=answer.leader_id,
        leader_epoch=answer.epoch,
        vote_granted=answer.granted,
    )
    topic = vote.VoteResponseTopicData(topic_name=TOPIC, partitions=[data])
    return vote.VoteResponse(topics=[topic], node_endpoints=_nodes(vote.NodeEndpoint, answer, version >= 1))


def begin_ask(request: begin.BeginQuorumEpochRequest) -> BeginAsk:
    data = _partition(request.topics)
    check_index(data.partition_index)
    key = ReplicaKey(request.voter_id, data.voter_directory_id)
    return BeginAsk(data.leader_epoch, data.leader_id, key, _first(request.leader_endpoints))


def begin_response(answer: BeginAnswer, version: int) -> begin.BeginQuorumEpochResponse:
    data = begin.BeginQuorumEpochResponsePartitionData(
        partition_index=0, error_code=answer.error, leader_id=answer.leader_id, leader_epoch=answer.epoch
    )
    return begin.BeginQuorumEpochResponse(
        topics=[begin.BeginQuorumEpochResponseTopicData(topic_name=TOPIC, partitions=[data])],
        node_endpoints=_nodes(begin.NodeEndpoint, answer, version >= 1),
    )


def end_ask(request: end.EndQuorumEpochRequest) -> EndAsk:
    data = _partition(request.topics)
    check_index(data.partition_index)
    preferred = [ReplicaKey(one.candidate_id, one.candidate_directory_id) for one in data.preferred_candidates]
    preferred = preferred or [ReplicaKey(voter_id) for voter_id in data.preferred_successors]
    return EndAsk(data.leader_epoch, data.leader_id, tuple(preferred), _first(request.leader_endpoints))


def end_response(answer: EndAnswer, version: int) -> end.EndQuorumEpochResponse:
    data = end.EndQuorumEpochResponsePartitionData(
        partition_index=0, error_code=answer.error, leader_id=answer.leader_id, leader_epoch=answer.epoch
    )
    return end.EndQuorumEpochResponse(
        topics=[end.EndQuorumEpochResponseTopicData(topic_name=TOPIC, partitions=[data])],
        node_endpoints=_nodes(end.NodeEndpoint, answer, version >= 1),
    )


def fetch_ask(request: fetch.FetchRequest, version: int) -> FetchAsk:
    """Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION) for another partition than that of the metadata log."""
    topics = request.topics
    if len(topics) != 1 or len(topics[0].partitions) != 1 or topics[0].partitions[0].partition != 0:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if (topics[0].topic_id != METADATA_TOPIC_ID) if version >= 13 else (topics[0].topic != TOPIC):
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    data = topics[0].partitions[0]
    replica_id = request.replica_state.replica_id if version >= 15 else request.replica_id
    return FetchAsk(
        ReplicaKey(replica_id, data.replica_directory_id),
        data.current_leader_epoch,
        data.fetch_offset,
        data.last_fetched_epoch,
        data.high_watermark,
        max(0, request.max_wait_ms),
    )


def fetch_response(answer: FetchAnswer, log_start_offset: int, version: int) -> fetch.FetchResponse:
    data = fetch.PartitionData(
        partition_index=0,
        error_code=answer.error,
        high_watermark=answer.high_watermark,
        last_stable_offset=-1,
        log_start_offset=log_start_offset,
        aborted_transactions=None,
        records=answer.records,
    )
    if version >= 12:
        data.current_leader = fetch.LeaderIdAndEpoch(leader_id=answer.leader_id, leader_epoch=answer.epoch)
        if answer.diverging is not None:
            data.diverging_epoch = fetch.EpochEndOffset(
                epoch=answer.diverging.epoch, end_offset=answer.diverging.end_offset
            )
        if answer.snapshot is not None:
            data.snapshot_id = fetch.SnapshotId(end_offset=answer.snapshot.end_offset, epoch=answer.snapshot.epoch)
    topic = fetch.FetchableTopicResponse(topic=TOPIC, topic_id=METADATA_TOPIC_ID, partitions=[data])
    nodes = _nodes(fetch.NodeEndpoint, answer, version >= 16)
    for peer in answer.nodes if version >= 16 else ():
        if peer.id != answer.leader_id or not nodes:
            nodes.append(fetch.NodeEndpoint(node_id=peer.id, host=peer.endpoint.host, port=peer.endpoint.port))
    return fetch.FetchResponse(responses=[topic], node_endpoints=nodes)


def snapshot_ask(request: fetch_snapshot.FetchSnapshotRequest) -> SnapshotAsk:
    data = _partition(request.topics, "name")
    check_index(data.partition)
    return SnapshotAsk(
        ReplicaKey(request.replica_id, data.replica_directory_id),
        data.current_leader_epoch,
        SnapshotId(data.snapshot_id.end_offset, data.snapshot_id.epoch),
        data.position,
    )


def snapshot_response(
    answer: SnapshotAnswer, snapshot: SnapshotId, version: int
) -> fetch_snapshot.FetchSnapshotResponse:
    data = fetch_snapshot.FetchSnapshotResponsePartitionSnapshot(
        index=0,
        error_code=answer.error,
        snapshot_id=fetch_snapshot.FetchSnapshotResponseSnapshotId(
            end_offset=snapshot.end_offset, epoch=snapshot.epoch
        ),
        current_leader=fetch_snapshot.LeaderIdAndEpoch(leader_id=answer.leader_id, leader_epoch=answer.epoch),
        size=answer.size_bytes,
        position=answer.position,
        unaligned_records=answer.data,
    )
    return fetch_snapshot.FetchSnapshotResponse(
        topics=[fetch_snapshot.FetchSnapshotResponseTopicSnapshot(name=TOPIC, partitions=[data])],
        node_endpoints=_nodes(fetch_snapshot.NodeEndpoint, answer, version >= 1),
    )


def _first(endpoints: Sequence[Any]) -> Endpoint | None:
    return Endpoint(endpoints[0].host, endpoints[0].port) if endpoints else None


def _nodes(kind: Callable[..., Any], answer: Any, is_supported: bool) -> list[Any]:
    if not is_supported or answer.leader_id < 0 or answer.leader is None:
        return []
    return [kind(node_id=answer.leader_id, host=answer.leader.host, port=answer.leader.port)]
