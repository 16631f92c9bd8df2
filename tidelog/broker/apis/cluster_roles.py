"""The interfaces of the metadata quorum and the controller for request handlers.

A command takes the request message and returns the response message, or raises the KafkaError that refuses the whole
request. A node without a controller, or with an inactive one, raises NOT_CONTROLLER.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.broker.apis.services import Services
    from tidelog.broker.network.request import RequestContext
    from tidelog.replication.controller.decisions.state import CreatedTopic, NewTopic


class QuorumRequests(Protocol):
    """The part of `replication.quorum.driver.RaftNode` that handlers use."""

    leader_id: int
    kraft_version: int

    def vote(self, request: Any, version: int) -> Awaitable[Any]: ...
    def begin_quorum_epoch(self, request: Any, version: int) -> Awaitable[Any]: ...
    def end_quorum_epoch(self, request: Any, version: int) -> Awaitable[Any]: ...
    def fetch(self, request: Any, version: int) -> Awaitable[Any]: ...
    def fetch_snapshot(self, request: Any, version: int) -> Awaitable[Any]: ...
    def describe_quorum(self, request: Any, version: int) -> Awaitable[Any]: ...
    def add_voter(self, request: Any, version: int) -> Awaitable[Any]: ...
    def remove_voter(self, request: Any, version: int) -> Awaitable[Any]: ...
    def update_voter(self, request: Any, version: int) -> Awaitable[Any]: ...


class ControllerRequests(Protocol):
    """The part of `replication.controller.controller.Controller` that handlers use."""

    is_active: bool

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_ms: int = 0
    ) -> dict[str, CreatedTopic | KafkaError]: ...
    async def delete_topics(
        self, topic_ids: Sequence[bytes], *, timeout_ms: int = 0
    ) -> dict[bytes, KafkaError | None]: ...
    def register_broker(self, request: Any, version: int) -> Awaitable[Any]: ...
    def broker_heartbeat(self, request: Any, version: int) -> Awaitable[Any]: ...
    def broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None: ...
    def alter_partition(self, request: Any, version: int) -> Awaitable[Any]: ...
    def allocate_producer_ids_for(self, request: Any) -> Awaitable[Any]: ...
    def register_controller(self, request: Any) -> Awaitable[Any]: ...
    def assign_replicas_to_dirs(self, request: Any) -> Awaitable[Any]: ...
    def unregister_broker(self, request: Any) -> Awaitable[Any]: ...
    def elect_leaders(self, request: Any, version: int) -> Awaitable[Any]: ...
    def alter_partition_reassignments(self, request: Any, version: int) -> Awaitable[Any]: ...
    def list_partition_reassignments(self, request: Any) -> Awaitable[Any]: ...
    def create_partitions(self, request: Any, version: int) -> Awaitable[Any]: ...
    def alter_configs(self, request: Any) -> Awaitable[Any]: ...
    def incremental_alter_configs(self, request: Any) -> Awaitable[Any]: ...
    def update_features(self, request: Any, version: int) -> Awaitable[Any]: ...


def at_controller(services: Services, context: RequestContext) -> bool:
    """Whether the request came to the controller's listener, not to a broker's."""
    return context.listener_name in services.config.controller_listener_names


def quorum(services: Services) -> QuorumRequests:
    return cast(QuorumRequests, cast(Any, services).raft)


def check_time(timeout_ms: int) -> None:
    """Raises REQUEST_TIMED_OUT for a timeout of 0 or less; Kafka's controllers then change nothing.

    What needs no controller, as an empty list, has its answer in any time.
    """
    if timeout_ms <= 0:
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT)


def controller(services: Services) -> ControllerRequests:
    """This node's controller. Raises NOT_CONTROLLER if it is not the active one."""
    node_controller = cast("ControllerRequests | None", services.controller)
    if node_controller is None or not node_controller.is_active:
        raise KafkaError(ErrorCode.NOT_CONTROLLER)
    return node_controller
