"""The commands of the active controller: one method per request, which carries out a pure decision.

A method returns the response, with the errors of single items. It raises a KafkaError for the
whole request, for instance NOT_CONTROLLER on a node that is not active. Invariant: a response is
sent after its records are committed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.allocate_producer_ids import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from tidelog.protocol.messages.alter_configs import AlterConfigsRequest, AlterConfigsResponse
from tidelog.protocol.messages.alter_partition import AlterPartitionRequest, AlterPartitionResponse
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
)
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
)
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest, BrokerRegistrationResponse
from tidelog.protocol.messages.controller_registration import (
    ControllerRegistrationRequest,
    ControllerRegistrationResponse,
)
from tidelog.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsResponse
from tidelog.protocol.messages.elect_leaders import ElectLeadersRequest, ElectLeadersResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tidelog.protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse
from tidelog.protocol.messages.update_features import UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.replication.controller.decisions import (
    brokers,
    config_changes,
    directories,
    features,
    isr_alterations,
    leaders,
    partition_creation,
    reassignment,
)
from tidelog.replication.controller.decisions.liveness import BrokerSessions, BrokerState
from tidelog.replication.controller.decisions.state import (
    ELEMENTS_AT_ONCE,
    ControllerState,
    CreatedTopic,
    NewTopic,
    ProducerIdBlock,
    Steps,
)
from tidelog.replication.controller.raft_port import RaftLog

logger = logging.getLogger("tidelog.controller")

T = TypeVar("T")


class ControllerCommands:
    """A mixin of `Controller`, which implements `command` and `command_in_steps`."""

    _state: ControllerState
    _sessions: BrokerSessions
    _raft: RaftLog
    pause: Callable[[], Awaitable[None]]

    async def command(self, decide: Callable[[], tuple[list[Any], T]], timeout_ms: int = 0) -> T:
        raise NotImplementedError

    async def command_in_steps(self, decide: Callable[[], Steps[T]], timeout_ms: int = 0) -> T:
        raise NotImplementedError

    def now_ms(self) -> float:
        raise NotImplementedError

    def suspect(self, broker_id: int) -> None:
        """Probe the broker's address, and fence the broker if its process is gone."""
        raise NotImplementedError

    # -- topics ------------------------------------------------------------------------------------------------------

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_ms: int = 0
    ) -> dict[str, CreatedTopic | KafkaError]:
        """The result of each topic. Raises KafkaError(POLICY_VIOLATION,
        REQUEST_TIMED_OUT) for the whole request.
        """

        def decide() -> Steps[dict[str, CreatedTopic | KafkaError]]:
            records, results = yield from self._state.create_topics_in_steps(topics)
            return [] if validate_only else records, results

        return await self.command_in_steps(decide, timeout_ms)

    async def delete_topics(self, topic_ids: Sequence[bytes], *, timeout_ms: int = 0) -> dict[bytes, KafkaError | None]:
        """The error of each topic, or None for a deleted topic. Raises
        KafkaError(REQUEST_TIMED_OUT).
        """
        return await self.command(lambda: self._state.delete_topics(topic_ids), timeout_ms)

    async def create_partitions(self, request: CreatePartitionsRequest, version: int = 0) -> CreatePartitionsResponse:
        def decide() -> Steps[CreatePartitionsResponse]:
            records, response = yield from partition_creation.create_partitions(self._state, request)
            return [] if request.validate_only else records, response

        return await self.command_in_steps(decide, request.timeout_ms)

    # -- brokers and controllers -------------------------------------------------------------------------------------

    async def register_broker(self, request: BrokerRegistrationRequest, version: int = 0) -> BrokerRegistrationResponse:
        def decide() -> tuple[list[Any], BrokerRegistrationResponse]:
            broker_id, now_ms = request.broker_id, self.now_ms()
            try:
                registration = brokers.register_broker(
                    self._state,
                    request,
                    has_valid_session=self._sessions.has_valid_session(broker_id, now_ms),
                    next_offset=self._raft.end_offset,
                    was_heard=self._sessions.was_heard(broker_id),
                )
            except KafkaError as error:
                if error.code == ErrorCode.DUPLICATE_BROKER_REGISTRATION:
                    self.suspect(broker_id)  # the old process may have ended without a sign
                else:  # the broker gets the code alone
                    logger.warning("broker %d is not registered: %s", broker_id, error)
                raise
            epoch = registration.broker_epoch
            self._sessions.register(broker_id, epoch, fenced=registration.fenced, now_ms=now_ms, was_heard=True)
            return registration.records, BrokerRegistrationResponse(broker_epoch=epoch)

        return await self.command(decide)

    async def broker_heartbeat(self, request: BrokerHeartbeatRequest, version: int = 0) -> BrokerHeartbeatResponse:
        def decide() -> tuple[list[Any], BrokerHeartbeatResponse]:
            records, response, state = brokers.heartbeat(self._state, self._sessions, request, self.now_ms())
            if state is BrokerState.CONTROLLED_SHUTDOWN:
                last_offset = self._raft.end_offset + len(records) - 1
                self._sessions.enter_controlled_shutdown(request.broker_id, last_offset)
            return records, response

        return await self.command(decide, self._sessions.timeout_ms)

    async def unregister_broker(self, request: UnregisterBrokerRequest, version: int = 0) -> UnregisterBrokerResponse:
        def decide() -> tuple[list[Any], UnregisterBrokerResponse]:
            records = brokers.unregister_broker(self._state, request.broker_id)
            self._sessions.remove(request.broker_id)
            return records, UnregisterBrokerResponse(error_message=None)

        return await self.command(decide)

    async def register_controller(
        self, request: ControllerRegistrationRequest, version: int = 0
    ) -> ControllerRegistrationResponse:
        return await self.command(
            lambda: (
                brokers.register_controller(self._state, request),
                ControllerRegistrationResponse(error_message=None),
            )
        )

    async def assign_replicas_to_dirs(
        self, request: AssignReplicasToDirsRequest, version: int = 0
    ) -> AssignReplicasToDirsResponse:
        return await self.command_in_steps(lambda: directories.assign_replicas_to_dirs(self._state, request))

    # -- partitions --------------------------------------------------------------------------------------------------

    async def alter_partition(self, request: AlterPartitionRequest, version: int) -> AlterPartitionResponse:
        return await self.command_in_steps(lambda: isr_alterations.alter_partition(self._state, request, version))

    async def elect_leaders(self, request: ElectLeadersRequest, version: int = 0) -> ElectLeadersResponse:
        return await self.command_in_steps(lambda: leaders.elect_leaders(self._state, request), request.timeout_ms)

    async def alter_partition_reassignments(
        self, request: AlterPartitionReassignmentsRequest, version: int = 0
    ) -> AlterPartitionReassignmentsResponse:
        return await self.command_in_steps(
            lambda: reassignment.alter_partition_reassignments(self._state, request), request.timeout_ms
        )

    async def list_partition_reassignments(
        self, request: ListPartitionReassignmentsRequest, version: int = 0
    ) -> ListPartitionReassignmentsResponse:
        if len(self._state.index.reassigning) > ELEMENTS_AT_ONCE:
            await self.pause()  # 20 bytes ask for all of them: one such answer in a turn of the loop
        return await self.command(
            lambda: ([], reassignment.list_partition_reassignments(self._state, request)), request.timeout_ms
        )

    # -- configuration, features, producer ids -----------------------------------------------------------------------

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, version: int = 0
    ) -> IncrementalAlterConfigsResponse:
        return await self.command(lambda: config_changes.incremental_alter_configs(self._state, request))

    async def alter_configs(self, request: AlterConfigsRequest, version: int = 0) -> AlterConfigsResponse:
        return await self.command(lambda: config_changes.alter_configs(self._state, request))

    async def update_features(self, request: UpdateFeaturesRequest, version: int) -> UpdateFeaturesResponse:
        return await self.command(lambda: features.update_features(self._state, request, version), request.timeout_ms)

    async def allocate_producer_ids(self, broker_id: int) -> ProducerIdBlock:
        """Raises KafkaError(BROKER_ID_NOT_REGISTERED)."""
        return await self.command(lambda: self._state.allocate_producer_ids(broker_id))

    async def allocate_producer_ids_for(
        self, request: AllocateProducerIdsRequest, version: int = 0
    ) -> AllocateProducerIdsResponse:
        def decide() -> tuple[list[Any], AllocateProducerIdsResponse]:
            self._state.check_broker_epoch(request.broker_id, request.broker_epoch)
            records, block = self._state.allocate_producer_ids(request.broker_id)
            return records, AllocateProducerIdsResponse(producer_id_start=block.first, producer_id_len=block.size)

        return await self.command(decide)
