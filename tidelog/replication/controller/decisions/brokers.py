"""Brokers enter, say that they are alive, and leave: registrations and heartbeats become records and answers. Pure.

A registration is refused unless the broker fits what the cluster has agreed on; a heartbeat of another incarnation
than the registered one is. Follows Kafka's `ClusterControlManager` and `ReplicationControlManager`, except that a
restarted broker need not wait for the end of its old session when it comes with the same log directories: their lock
says that the old process is gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION

Records = list[Any]

_RESERVED_DIRECTORIES = (MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY, LOST_DIRECTORY)


class Registered(NamedTuple):
    records: Records
    broker_epoch: int
    fenced: bool


def register_broker(
    state: ControllerState, request: BrokerRegistrationRequest, *, has_valid_session: bool, next_offset: int
) -> Registered:
    """`next_offset`: that of the first record to be appended; a new incarnation's epoch is its record's offset.

    Raises KafkaError(INCONSISTENT_CLUSTER_ID, DUPLICATE_BROKER_REGISTRATION, INVALID_REGISTRATION,
    UNSUPPORTED_VERSION).
    """
    existing = state.image.brokers.get(request.broker_id)
    _check_registration(state, request, existing, has_valid_session)
    records: Records = []
    record = _broker_record(state, request)
    if existing is not None and existing.incarnation_id == request.incarnation_id:
        # The same process changes what it said of itself.
        record.broker_epoch, record.fenced = existing.epoch, existing.fenced
        record.in_controlled_shutdown = existing.in_controlled_shutdown
    else:
        clean = existing is not None and existing.epoch == request.previous_broker_epoch
        records = forget_incarnation(state, request.broker_id, clean=clean)
        record.broker_epoch = next_offset + len(records)
    records.append(record)
    return Registered(records, record.broker_epoch, record.fenced)


def _check_registration(
    state: ControllerState, request: BrokerRegistrationRequest, existing: BrokerImage | None, has_valid_session: bool
) -> None:
    cluster_id = state.settings.cluster_id
    if cluster_id and request.cluster_id != cluster_id:
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"Expected cluster ID {cluster_id}, but got cluster ID {request.cluster_id}",
        )
    if existing is not None and has_valid_session and existing.incarnation_id != request.incarnation_id:
        same_directories = bool(existing.log_dirs) and set(existing.log_dirs) == set(request.log_dirs)
        if not same_directories:
            raise KafkaError(
                ErrorCode.DUPLICATE_BROKER_REGISTRATION, "Another broker is registered with that broker id."
            )
    if request.is_migrating_zk_broker:
        raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, "Controller does not support registering ZK brokers.")
    if state.metadata_version >= DIRECTORIES_VERSION:
        _check_log_dirs(state, request)


def _check_log_dirs(state: ControllerState, request: BrokerRegistrationRequest) -> None:
    problem: str | None = None
    if not request.log_dirs:
        problem = "No directories specified in request"
    elif any(directory in _RESERVED_DIRECTORIES for directory in request.log_dirs):
        problem = "Reserved directory ID in request"
    elif len(set(request.log_dirs)) != len(request.log_dirs):
        problem = "Duplicate directory ID in request"
    for broker in state.image.brokers.values():
        if broker.node_id != request.broker_id and not set(broker.log_dirs).isdisjoint(request.log_dirs):
            problem = f"Broker {broker.node_id} is already registered with one of the directories"
    if problem is not None:
        raise KafkaError(ErrorCode.INVALID_REGISTRATION, problem)


def _broker_record(state: ControllerState, request: BrokerRegistrationRequest) -> RegisterBrokerRecord:
    supported = {one.name: (one.min_supported_version, one.max_supported_version) for one in request.features}
    # Whoever does not speak of it is as old as can be.
    supported.setdefault(METADATA_VERSION, (1, 1))
    for name, (low, high) in supported.items():
        _check_feature(state, name, low, high)
    for name in state.image.features:
        # What this controller does not know itself, from a cluster that was Kafka's, it cannot ask of a broker.
        if name not in supported and name in SUPPORTED_FEATURES:
            _check_feature(state, name, 0, 0)
    return RegisterBrokerRecord(
        broker_id=request.broker_id,
        incarnation_id=request.incarnation_id,
        end_points=[
            BrokerEndpoint(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
            for one in request.listeners
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
    # A feature at level 0 is off, and no broker has to know it.
    if not low <= finalized <= high and (finalized or name == METADATA_VERSION):
        raise KafkaError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"Unable to register because the broker does not support finalized version {finalized} of {name}. "
            f"The broker wants a version between {low} and {high}, inclusive.",
        )


def heartbeat(
    state: ControllerState, sessions: BrokerSessions, request: BrokerHeartbeatRequest, now_ms: float
) -> tuple[Records, BrokerHeartbeatResponse, BrokerState]:
    """Renews the session. Raises KafkaError(BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH)."""
    broker_id = request.broker_id
    state.check_broker_epoch(broker_id, request.broker_epoch)
    is_caught_up = request.current_metadata_offset >= request.broker_epoch
    before, after = sessions.next_state(
        broker_id,
        want_fence=request.want_fence,
        want_shut_down=request.want_shut_down,
        is_caught_up=is_caught_up,
        leads_any=state.index.leads_any(broker_id),
    )
    records: Records = []
    if after is not before:
        if after is BrokerState.UNFENCED:
            records = unfence_broker(state, broker_id)
        elif after is BrokerState.CONTROLLED_SHUTDOWN:
            records = begin_controlled_shutdown(state, broker_id)
        elif before is not BrokerState.FENCED:
            records = fence_brokers(state, [broker_id])
    sessions.touch(broker_id, after, request.current_metadata_offset, now_ms)
    if request.offline_log_dirs and state.metadata_version >= DIRECTORIES_VERSION:
        records += directories_offline(state, broker_id, request.offline_log_dirs, records)
    if request.cordoned_log_dirs is not None:
        records += _cordoned(state.image.brokers[broker_id], request.cordoned_log_dirs)
    response = BrokerHeartbeatResponse(
        is_caught_up=is_caught_up,
        is_fenced=after in (BrokerState.FENCED, BrokerState.SHUTDOWN_NOW),
        should_shut_down=after is BrokerState.SHUTDOWN_NOW,
    )
    return records, response, after


def _cordoned(broker: BrokerImage, log_dirs: list[bytes]) -> Records:
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
    """Nothing where the same is known already."""
    record = RegisterControllerRecord(
        controller_id=request.controller_id,
        incarnation_id=request.incarnation_id,
        zk_migration_ready=False,
        end_points=[
            ControllerEndpoint(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
            for one in request.listeners
        ],
        features=[
            ControllerFeature(
                name=one.name,
                min_supported_version=one.min_supported_version,
                max_supported_version=one.max_supported_version,
            )
            for one in request.features
        ],
    )
    known = state.image.controllers.get(request.controller_id)
    if known is not None and known.incarnation_id == request.incarnation_id:
        same_endpoints = [(one.name, one.host, one.port) for one in record.end_points] == [
            (one.name, one.host, one.port) for one in known.endpoints.values()
        ]
        if same_endpoints:
            return []
    return [record]
