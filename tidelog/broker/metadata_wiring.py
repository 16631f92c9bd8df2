"""From a node's configuration to what the controller and the metadata log want: values for `node.py` to join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidelog.broker.config.definitions import list_config_default
from tidelog.broker.config.validation import controller_config_problem
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest
from tidelog.protocol.messages.broker_registration import Feature as RegisteredFeature
from tidelog.protocol.messages.broker_registration import Listener as RegisteredListener
from tidelog.replication.controller.decisions.state import ControllerSettings
from tidelog.replication.controller.decisions.supported_features import BROKER_FEATURES
from tidelog.replication.controller.metadata.image import EndpointImage
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import Listener, NodeConfig
    from tidelog.replication.quorum.raft.voters import VoterSet

_SECURITY_PROTOCOLS = {"PLAINTEXT": 0, "SSL": 1, "SASL_PLAINTEXT": 2, "SASL_SSL": 3}


def controller_settings(
    config: NodeConfig,
    cluster_id: str,
    voters: Callable[[], Sequence[int]],
    kraft_version: Callable[[], int] = lambda: 0,
) -> ControllerSettings:
    return ControllerSettings(
        default_partition_count=config.integer("num.partitions"),
        default_replication_factor=config.integer("default.replication.factor"),
        config_problem=controller_config_problem(config),
        list_config_default=list_config_default,
        voters=voters,
        kraft_version=kraft_version,
        cluster_id=cluster_id,
        min_insync_replicas=config.integer("min.insync.replicas"),
        unclean_leader_election=config.flag("unclean.leader.election.enable"),
        session_timeout_ms=config.integer("broker.session.timeout.ms"),
        auto_rebalance=config.flag("auto.leader.rebalance.enable"),
        imbalance_check_interval_ms=config.integer("leader.imbalance.check.interval.seconds") * 1000,
        unclean_check_interval_ms=config.integer("unclean.leader.election.interval.ms"),
        inter_broker_listener=config.inter_broker_listener,
    )


def metadata_log_config(config: NodeConfig) -> LogConfig:
    """The metadata log rolls like any log. Snapshots decide what is deleted, so it has no retention settings."""
    segment_bytes = config["internal.metadata.log.segment.bytes"] or config.integer("metadata.log.segment.bytes")
    return LogConfig(
        segment_bytes=segment_bytes,
        segment_ms=config.integer("metadata.log.segment.ms"),
        retention_ms=-1,
        retention_bytes=-1,
        max_message_bytes=config.integer("internal.metadata.max.batch.size.in.bytes"),
        file_delete_delay_ms=config.integer("internal.metadata.delete.delay.millis"),
        message_timestamp_after_max_ms=INT64_MAX,
    )


def quorum_settings(config: NodeConfig, bound_ports: Mapping[str, int]) -> QuorumSettings:
    """`bound_ports`: listener name -> port."""
    return QuorumSettings(
        voters={node_id: Endpoint(*address) for node_id, address in config.quorum_voters.items()},
        bootstrap_servers=[Endpoint(*address) for address in config.quorum_bootstrap],
        own_endpoints=[(one.name, Endpoint(one.host, one.port)) for one in controller_endpoints(config, bound_ports)],
        election_timeout_ms=config.integer("controller.quorum.election.timeout.ms"),
        fetch_timeout_ms=config.integer("controller.quorum.fetch.timeout.ms"),
        election_backoff_max_ms=config.integer("controller.quorum.election.backoff.max.ms"),
        request_timeout_ms=config.integer("controller.quorum.request.timeout.ms"),
        retry_backoff_ms=config.integer("controller.quorum.retry.backoff.ms"),
        retention=MetadataRetention(
            config.integer("metadata.max.retention.bytes"), config.integer("metadata.max.retention.ms")
        ),
        scrub_interval_ms=config.integer("log.scrub.interval.ms"),
        scrub_bytes_per_s=config.integer("log.scrub.bytes.per.second"),
    )


def broker_registration(
    config: NodeConfig,
    cluster_id: str,
    incarnation_id: bytes,
    bound_ports: Mapping[str, int],
    directory_ids: Sequence[bytes],
    previous_epoch: int,
) -> BrokerRegistrationRequest:
    """The registration of this broker. `directory_ids`: those of all log.dirs, in order."""
    endpoints = [_endpoint(listener) for listener in config.advertised_listeners(bound_ports)]
    return BrokerRegistrationRequest(
        broker_id=config.node_id,
        cluster_id=cluster_id,
        incarnation_id=incarnation_id,
        listeners=[
            RegisteredListener(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
            for one in endpoints
        ],
        features=[
            RegisteredFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in BROKER_FEATURES.items()
        ],
        rack=config["broker.rack"],
        log_dirs=list(directory_ids),
        previous_broker_epoch=previous_epoch,
    )


def quorum_wait(voters: VoterSet, bootstrap: Sequence[Endpoint], node_id: int, is_controller: bool) -> str:
    """One line for the user: which nodes this node waits for while it knows no leader of the metadata quorum."""
    others = [voter for voter in voters if voter.key.id != node_id]
    if others:
        names = ", ".join(f"{one.key.id}{f' at {one.endpoint}' if one.endpoint else ''}" for one in others)
        return (
            f"no leader of the metadata quorum is known: this node waits for voter{'s' if len(others) > 1 else ''} "
            f"{names}; {voters.majority} of {len(voters)} voters must run and reach each other"
        )
    if len(voters):
        return "no leader of the metadata quorum is known: this node is its only voter and does not lead yet"
    servers = ", ".join(map(str, bootstrap))
    remedy = (
        "; if none of them has a quorum, stop this node and make it the first voter with `tidelog format --standalone`"
        if is_controller
        else ""
    )
    return f"no metadata quorum is known: this node waits for a controller at {servers}{remedy}"


def controller_endpoints(config: NodeConfig, bound_ports: Mapping[str, int]) -> list[EndpointImage]:
    """The addresses at which other nodes and clients reach this controller."""
    return [_endpoint(listener) for listener in config.advertised_controller_listeners(bound_ports)]


def _endpoint(listener: Listener) -> EndpointImage:
    return EndpointImage(listener.name, listener.host, listener.port, _SECURITY_PROTOCOLS[listener.security_protocol])
