"""The table of APIs that only pass the request to the metadata quorum or to the controller.

This module does not interpret a request: it passes the decoded request to the role and returns the role's response. A
refusal is made from the declaration of the response (`refusals`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tidelog.broker.apis.cluster_roles import ControllerRequests, QuorumRequests, controller, quorum
from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.add_raft_voter import AddRaftVoterRequest, AddRaftVoterResponse
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from tidelog.protocol.messages.alter_partition import AlterPartitionRequest, AlterPartitionResponse
from tidelog.protocol.messages.assign_replicas_to_dirs import AssignReplicasToDirsRequest, AssignReplicasToDirsResponse
from tidelog.protocol.messages.begin_quorum_epoch import BeginQuorumEpochRequest, BeginQuorumEpochResponse
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest, BrokerRegistrationResponse
from tidelog.protocol.messages.controller_registration import (
    ControllerRegistrationRequest,
    ControllerRegistrationResponse,
)
from tidelog.protocol.messages.describe_quorum import DescribeQuorumRequest, DescribeQuorumResponse
from tidelog.protocol.messages.end_quorum_epoch import EndQuorumEpochRequest, EndQuorumEpochResponse
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from tidelog.protocol.messages.fetch_snapshot import FetchSnapshotRequest, FetchSnapshotResponse
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tidelog.protocol.messages.remove_raft_voter import RemoveRaftVoterRequest, RemoveRaftVoterResponse
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse
from tidelog.protocol.messages.update_features import UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.protocol.messages.update_raft_voter import UpdateRaftVoterRequest, UpdateRaftVoterResponse
from tidelog.protocol.messages.vote import VoteRequest, VoteResponse

Role = TypeVar("Role")
Refuse = Callable[[Any, KafkaError, int], Any]

# From this version on, a Fetch that fails as a whole has an error of its own and no partitions.
FETCH_ERROR_AT_TOP_FROM: Final = 13


@dataclass(frozen=True, slots=True, eq=False)
class DelegatedApi(Generic[Role]):
    """One row. Like an API's module it has the three names that `dispatch` uses: REQUEST, handle, refuse."""

    REQUEST: Any  # the class of the request message, with its key and versions
    refuse: Refuse
    role: Callable[[Services], Role]
    ask: Callable[[Role, Any, int], Awaitable[Any]]
    answered: Callable[[Services, RequestContext, Any, Any], None] | None = None
    """Called with the request and the role's response."""

    async def handle(self, services: Services, context: RequestContext, request: Any) -> Any:
        """The role's response. Raises its KafkaError, NOT_CONTROLLER if another node is the active controller."""
        response = await self.ask(self.role(services), request, context.api_version)
        if self.answered is not None:
            self.answered(services, context, request, response)
        return response


def _refuse_fetch(request: Any, error: KafkaError, version: int) -> FetchResponse:
    """Old versions have no error for the whole request, so each partition has it."""
    topics = [] if version >= FETCH_ERROR_AT_TOP_FROM else request.topics
    return FetchResponse(
        error_code=error.code,
        session_id=request.session_id,
        responses=[
            FetchableTopicResponse(
                topic=topic.topic,
                partitions=[
                    PartitionData(partition_index=each.partition, error_code=error.code, high_watermark=-1)
                    for each in topic.partitions
                ],
            )
            for topic in topics
        ],
    )


def _quorum(
    request: type[Message], response: type[Message], ask: Callable[[QuorumRequests, Any, int], Awaitable[Any]]
) -> DelegatedApi[QuorumRequests]:
    return DelegatedApi(request, refusing(response), quorum, ask)


def _controller(
    request: type[Message], response: type[Message], ask: Callable[[ControllerRequests, Any, int], Awaitable[Any]]
) -> DelegatedApi[ControllerRequests]:
    return DelegatedApi(request, refusing(response), controller, ask)


# Every broker forwards these to the active controller (Kafka's forwardToController).
FORWARDED_ROWS: Final[tuple[DelegatedApi[Any], ...]] = (
    # Add and remove a voter of the metadata quorum (KIP-853).
    _quorum(AddRaftVoterRequest, AddRaftVoterResponse, lambda raft, request, version: raft.add_voter(request, version)),
    _quorum(
        RemoveRaftVoterRequest,
        RemoveRaftVoterResponse,
        lambda raft, request, version: raft.remove_voter(request, version),
    ),
    # The leader's view of the voters and observers of the metadata quorum.
    _quorum(
        DescribeQuorumRequest,
        DescribeQuorumResponse,
        lambda raft, request, version: raft.describe_quorum(request, version),
    ),
    # The reassignments under way.
    _controller(
        ListPartitionReassignmentsRequest,
        ListPartitionReassignmentsResponse,
        lambda active, request, version: active.list_partition_reassignments(request),
    ),
    # Remove the registration of a broker that will not return.
    _controller(
        UnregisterBrokerRequest,
        UnregisterBrokerResponse,
        lambda active, request, version: active.unregister_broker(request),
    ),
    # Change the levels of the cluster's features. As in Kafka, a refusal names no single feature.
    _controller(
        UpdateFeaturesRequest,
        UpdateFeaturesResponse,
        lambda active, request, version: active.update_features(request, version),
    ),
)

# Between nodes, on the controllers' listener.
CONTROLLER_ROWS: Final[tuple[DelegatedApi[Any], ...]] = (
    # A candidate, or a prospective one, requests this voter's vote.
    _quorum(VoteRequest, VoteResponse, lambda raft, request, version: raft.vote(request, version)),
    # The new leader of the metadata quorum announces itself; the old one resigns.
    _quorum(
        BeginQuorumEpochRequest,
        BeginQuorumEpochResponse,
        lambda raft, request, version: raft.begin_quorum_epoch(request, version),
    ),
    _quorum(
        EndQuorumEpochRequest,
        EndQuorumEpochResponse,
        lambda raft, request, version: raft.end_quorum_epoch(request, version),
    ),
    # Replicas of the metadata log fetch from its leader; members of the quorum send version 12 or higher.
    DelegatedApi(
        FetchRequest,
        _refuse_fetch,
        quorum,
        lambda raft, request, version: raft.fetch(request, version),
        lambda services, context, request, response: services.known_connections.on_fetch(
            context.connection, request, response, context.api_version
        ),
    ),
    # A part of a snapshot of the metadata log.
    _quorum(
        FetchSnapshotRequest,
        FetchSnapshotResponse,
        lambda raft, request, version: raft.fetch_snapshot(request, version),
    ),
    # A voter reports its addresses to the quorum's leader.
    _quorum(
        UpdateRaftVoterRequest,
        UpdateRaftVoterResponse,
        lambda raft, request, version: raft.update_voter(request, version),
    ),
    # A controller registers its addresses at the active controller.
    _controller(
        ControllerRegistrationRequest,
        ControllerRegistrationResponse,
        lambda active, request, version: active.register_controller(request),
    ),
    # A broker registers at its start and gets a broker epoch.
    _controller(
        BrokerRegistrationRequest,
        BrokerRegistrationResponse,
        lambda active, request, version: active.register_broker(request, version),
    ),
    # A broker reports the log directories of its replicas.
    _controller(
        AssignReplicasToDirsRequest,
        AssignReplicasToDirsResponse,
        lambda active, request, version: active.assign_replicas_to_dirs(request),
    ),
    # The next block of producer ids for a broker.
    _controller(
        AllocateProducerIdsRequest,
        AllocateProducerIdsResponse,
        lambda active, request, version: active.allocate_producer_ids_for(request),
    ),
    # A partition leader proposes another ISR.
    _controller(
        AlterPartitionRequest,
        AlterPartitionResponse,
        lambda active, request, version: active.alter_partition(request, version),
    ),
)
