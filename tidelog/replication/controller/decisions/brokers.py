"""Registrations and heartbeats of brokers and controllers: decisions that give records and
responses. Pure.

A registration is refused if the broker does not support the cluster's features. A heartbeat is
refused if its incarnation is not the registered one. Follows Kafka's `ClusterControlManager` and
`ReplicationControlManager`, with one exception: a restarted broker need not wait for the end of a
session whose process has no connection to this controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest
from tidelog.protocol.messages.controller_registration import ControllerRegistrationRequest
from tidelog.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    ControllerEndpoint,
    ControllerFeature,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    UnregisterBrokerRecord,
)
from tidelog.protocol.uuids import LOST_DIRECTORY, MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.replication.controller.decisions.directories import directories_offline
from tidelog.replication.controller.decisions.leaders import (
    begin_controlled_shutdown,
    fence_brokers,
    forget_broker,
    forget_incarnation,
    unfence_broker,
)
from tidelog.replication.controller.decisions.liveness import BrokerSessions, BrokerState
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.decisions.supported_features import SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import METADATA_VERSION, BrokerImage
from tidelog.replication.controller.metadata.record_codec import CONTROLLERS_VERSION, DIRECTORIES_VERSION

Records = list[Any]

NODES_MAX: Final = 1_000
NAMED_MAX: Final = 500
NAMED_CHARACTERS_MAX: Final = 16_384
"""The bounds of registered brokers, of registered controllers, and of what one registration names. Kafka has none.
Every node keeps all registrations, and each new one is compared with all others."""

_RESERVED_DIRECTORIES = (MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY, LOST_DIRECTORY)


class Registration(NamedTuple):
    records: Records
    broker_epoch: int
    fenced: bool


def register_broker(
    state: ControllerState,
    request: BrokerRegistrationRequest,
    *,
    has_valid_session: bool,
    next_offset: int,
    was_heard: bool = True,
) -> Registration:
    """`next_offset`: the offset of the next record; a new incarnation's epoch is the offset of its
    record. `was_heard`: whether the process of the valid session has spoken to this controller,
    over a connection that still stands.

    Raises KafkaError(INCONSISTENT_CLUSTER_ID, DUPLICATE_BROKER_REGISTRATION, INVALID_REGISTRATION,
    UNSUPPORTED_VERSION).
    """
    present = state.image.brokers.get(request.broker_id)
    _check_bounds(request.broker_id, state.image.brokers, request, len(request.log_dirs), len(request.rack or ""))
    _check_registration(state, request, present, has_valid_session, was_heard)
    records: Records = []
    record = _broker_record(state, request)
    if present is not None and present.incarnation_id == request.incarnation_id:
        # The same process changes its registration.
        record.broker_epoch, record.fenced = present.epoch, present.fenced
        record.in_controlled_shutdown = present.in_controlled_shutdown
    else:
        is_clean = present is not None and present.epoch == request.previous_broker_epoch
        records = forget_incarnation(state, request.broker_id, clean=is_clean)
        record.broker_epoch = next_offset + len(records)
    records.append(record)
    return Registration(records, record.broker_epoch, record.fenced)


def _check_bounds(
    node_id: int, known: Mapping[int, object], request: Any, entries: int = 0, characters: int = 0
) -> None:
    """`entries` and `characters`: those of the request that are neither listeners nor features."""
    entries += len(request.listeners) + len(request.features)
    problem: str | None = None
    if node_id not in known and len(known) >= NODES_MAX:
        problem = f"{NODES_MAX} nodes are registered"
    elif entries > NAMED_MAX:
        problem = f"More than {NAMED_MAX} listeners, features and directories"
    else:
        characters += sum(len(entry.name) + len(entry.host) for entry in request.listeners)
        characters += sum(len(entry.name) for entry in request.features)
        if characters > NAMED_CHARACTERS_MAX:
            problem = f"More than {NAMED_CHARACTERS_MAX} characters"
    if problem is not None:
        raise KafkaError(ErrorCode.INVALID_REGISTRATION, problem)


def _check_registration(
    state: ControllerState,
    request: BrokerRegistrationRequest,
    present: BrokerImage | None,
    has_valid_session: bool,
    was_heard: bool,
) -> None:
    cluster_id = state.settings.cluster_id
    if cluster_id and request.cluster_id != cluster_id:
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"Expected cluster ID {cluster_id}, but got cluster ID {request.cluster_id}",
        )
    if (
        present is not None
        and has_valid_session
        and present.incarnation_id != request.incarnation_id
        and (was_heard or not _is_restarted(state, request, present))
    ):
        raise KafkaError(ErrorCode.DUPLICATE_BROKER_REGISTRATION, "Another broker is registered with that broker id.")
    if request.is_migrating_zk_broker:
        raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, "Controller does not support registering ZK brokers.")
    if state.metadata_version >= DIRECTORIES_VERSION:
        _check_log_dirs(state, request)


def _is_restarted(state: ControllerState, request: BrokerRegistrationRequest, present: BrokerImage) -> bool:
    """Whether the request comes from the same directories at the same addresses, or from this controller's own node.

    The ids of the directories alone prove nothing: a copy of a disk has them too, on another machine. One of them is
    enough beside the address: others may have been added or removed before the restart.
    """
    if set(present.log_dirs).isdisjoint(request.log_dirs):
        return False
    addresses = {(entry.name, entry.host, entry.port) for entry in request.listeners}
    present_addresses = {(entry.name, entry.host, entry.port) for entry in present.endpoints.values()}
    return request.broker_id == state.node_id or addresses == present_addresses


def _check_log_dirs(state: ControllerState, request: BrokerRegistrationRequest) -> None:
    problem: str | None = None
    requested = set(request.log_dirs)
    if not request.log_dirs:
        problem = "No directories specified in request"
    elif any(directory in _RESERVED_DIRECTORIES for directory in request.log_dirs):
        problem = "Reserved directory ID in request"
    elif len(requested) != len(request.log_dirs):
        problem = "Duplicate directory ID in request"
    for broker in state.image.brokers.values():
        if broker.node_id != request.broker_id and not requested.isdisjoint(broker.log_dirs):
            problem = f"Broker {broker.node_id} is already registered with one of the directories"
    if problem is not None:
        raise KafkaError(ErrorCode.INVALID_REGISTRATION, problem)


def _broker_record(state: ControllerState, request: BrokerRegistrationRequest) -> RegisterBrokerRecord:
    supported = {entry.name: (entry.min_supported_version, entry.max_supported_version) for entry in request.features}
    # A broker that does not state the feature supports the lowest level.
    supported.setdefault(METADATA_VERSION, (1, 1))
    for name, (low, high) in supported.items():
        _check_feature(state, name, low, high)
    for name in state.image.features:
        # A former Kafka cluster may have features unknown to this controller, which are not
        # checked.
        if name not in supported and name in SUPPORTED_FEATURES:
            _check_feature(state, name, 0, 0)
    return RegisterBrokerRecord(
        broker_id=request.broker_id,
        incarnation_id=request.incarnation_id,
        end_points=[
            BrokerEndpoint(name=entry.name, host=entry.host, port=entry.port, security_protocol=entry.security_protocol)
            for entry in request.listeners
        ],
        features=[
            BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in supported.items()
        ],
        rack=request.rack,
        fenced=True,
        log_dirs=list(request.log_dirs) if state.metadata_version >= DIRECTORIES_VERSION else [],
    )


def _check_feature(state: ControllerState, name: str, low: int, high: int) -> None:
    finalized = state.image.feature_level(name)
    # A feature at level 0 is disabled, and brokers need not support it.
    if not low <= finalized <= high and (finalized or name == METADATA_VERSION):
        raise KafkaError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"Unable to register because the broker does not support finalized version {finalized} of {name}. "
            f"The broker wants a version between {low} and {high}, inclusive.",
        )


def heartbeat(
    state: ControllerState, sessions: BrokerSessions, request: BrokerHeartbeatRequest, now_ms: float
) -> tuple[Records, BrokerHeartbeatResponse, BrokerState]:
    """Renews the session. Raises KafkaError(BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH, INVALID_REQUEST)."""
    broker_id = request.broker_id
    state.check_broker_epoch(broker_id, request.broker_epoch)
    if max(len(request.offline_log_dirs), len(request.cordoned_log_dirs or ())) > NAMED_MAX:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"More than {NAMED_MAX} directories")
    is_caught_up = request.current_metadata_offset >= request.broker_epoch
    old_state, new_state = sessions.next_state(
        broker_id,
        want_fence=request.want_fence,
        want_shut_down=request.want_shut_down,
        is_caught_up=is_caught_up,
        leads_any=state.index.led_count(broker_id) > 0,
    )
    records: Records = []
    if new_state is not old_state:
        if new_state is BrokerState.UNFENCED:
            records = unfence_broker(state, broker_id)
        elif new_state is BrokerState.CONTROLLED_SHUTDOWN:
            records = begin_controlled_shutdown(state, broker_id)
        elif old_state is not BrokerState.FENCED:
            records = fence_brokers(state, [broker_id])
    sessions.touch(broker_id, new_state, request.current_metadata_offset, now_ms)
    if request.offline_log_dirs and state.metadata_version >= DIRECTORIES_VERSION:
        records += directories_offline(state, broker_id, request.offline_log_dirs, records)
    if request.cordoned_log_dirs is not None:
        records += _cordoned_records(state.image.brokers[broker_id], request.cordoned_log_dirs)
    response = BrokerHeartbeatResponse(
        is_caught_up=is_caught_up,
        is_fenced=new_state in (BrokerState.FENCED, BrokerState.SHUTDOWN_NOW),
        should_shut_down=new_state is BrokerState.SHUTDOWN_NOW,
    )
    return records, response, new_state


def _cordoned_records(broker: BrokerImage, log_dirs: list[bytes]) -> Records:
    if tuple(log_dirs) == broker.cordoned_log_dirs:
        return []
    return [
        BrokerRegistrationChangeRecord(
            broker_id=broker.node_id, broker_epoch=broker.epoch, cordoned_log_dirs=list(log_dirs)
        )
    ]


def unregister_broker(state: ControllerState, broker_id: int) -> Records:
    """Raises KafkaError(BROKER_ID_NOT_REGISTERED)."""
    broker = state.image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {broker_id} is not currently registered")
    return [
        *forget_broker(state, broker_id),
        UnregisterBrokerRecord(broker_id=broker_id, broker_epoch=broker.epoch),
    ]


def register_controller(state: ControllerState, request: ControllerRegistrationRequest) -> Records:
    """No records if the same registration exists. Raises KafkaError(INVALID_REGISTRATION), and UNSUPPORTED_VERSION
    below 3.7: Kafka's nodes cannot read a log that has registrations of controllers there.
    """
    _check_bounds(request.controller_id, state.image.controllers, request)
    if state.metadata_version < CONTROLLERS_VERSION:
        message = "The current MetadataVersion is too old to support controller registrations."
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, message)
    return controller_registration(state, request)


def controller_registration(state: ControllerState, request: ControllerRegistrationRequest) -> Records:
    """As `register_controller`, at any level."""
    record = RegisterControllerRecord(
        controller_id=request.controller_id,
        incarnation_id=request.incarnation_id,
        zk_migration_ready=False,
        end_points=[
            ControllerEndpoint(
                name=entry.name, host=entry.host, port=entry.port, security_protocol=entry.security_protocol
            )
            for entry in request.listeners
        ],
        features=[
            ControllerFeature(
                name=entry.name,
                min_supported_version=entry.min_supported_version,
                max_supported_version=entry.max_supported_version,
            )
            for entry in request.features
        ],
    )
    present_controller = state.image.controllers.get(request.controller_id)
    if present_controller is not None and present_controller.incarnation_id == request.incarnation_id:
        has_same_endpoints = [(entry.name, entry.host, entry.port) for entry in record.end_points] == [
            (entry.name, entry.host, entry.port) for entry in present_controller.endpoints.values()
        ]
        if has_same_endpoints:
            return []
    return [record]
