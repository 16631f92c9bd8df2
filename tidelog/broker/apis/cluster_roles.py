"""The metadata quorum and the controller as request handlers see them: what each can be asked.

A command takes the request message and returns the response message, or raises the KafkaError that refuses all of it.
A node that is no controller has none; one that does not lead refuses by itself, with NOT_CONTROLLER as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.broker.apis.services import Services
    from tidelog.broker.network.request import RequestContext
    from tidelog.replication.controller.decisions.state import CreatedTopic, NewTopic

Response = TypeVar("Response", bound=Message)


class QuorumRequests(Protocol):
    """`replication.quorum.driver.RaftNode`, as far as others ask it."""

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


class ControllerCommands(Protocol):
    """`replication.controller.controller.Controller`, as far as others ask it."""

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
    """Raises REQUEST_TIMED_OUT where no time is given: Kafka's controllers then decide nothing."""
    if timeout_ms <= 0:
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT)


def controller(services: Services) -> ControllerCommands:
    """The active controller. Raises NOT_CONTROLLER if it is another node's."""
    found = cast("ControllerCommands | None", services.controller)
    if found is None or not found.is_active:
        raise KafkaError(ErrorCode.NOT_CONTROLLER)
    return found
