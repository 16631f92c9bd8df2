"""From a node's configuration to what the controller and the metadata log want: values for `node.py` to join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tidelog.broker.config_definitions import topic_config_problem
from tidelog.replication.controller.image import EndpointImage
from tidelog.replication.controller.registration import SUPPORTED_FEATURES, BrokerRegistration
from tidelog.replication.controller.state import ControllerSettings
from tidelog.storage.log_config import INT64_MAX, LogConfig

if TYPE_CHECKING:
    from tidelog.broker.config import Listener, NodeConfig

_SECURITY_PROTOCOLS = {"PLAINTEXT": 0, "SSL": 1, "SASL_PLAINTEXT": 2, "SASL_SSL": 3}


def controller_settings(config: NodeConfig) -> ControllerSettings:
    defaults = config.topic_defaults()

    return ControllerSettings(
        default_partition_count=config.integer("num.partitions"),
        default_replication_factor=config.integer("default.replication.factor"),
        topic_config_problem=lambda topic_config: topic_config_problem(topic_config, defaults),
    )


def metadata_log_config(config: NodeConfig) -> LogConfig:
    """Rolled like any log; cut only behind a snapshot, so without retention of its own."""
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


def broker_registration(
    config: NodeConfig, incarnation_id: bytes, bound_ports: Mapping[str, int], directory_ids: Sequence[bytes]
) -> BrokerRegistration:
    """`bound_ports`: listener name -> port; `directory_ids`: of every log.dir, in order."""
    return BrokerRegistration(
        node_id=config.node_id,
        incarnation_id=incarnation_id,
        endpoints=[_endpoint(listener) for listener in config.advertised_listeners(bound_ports)],
        features=SUPPORTED_FEATURES,
        rack=config["broker.rack"],
        log_dirs=list(directory_ids),
    )


def controller_endpoints(config: NodeConfig) -> list[EndpointImage]:
    """Where other nodes would reach this controller; empty for a node that is alone."""
    names = {name.upper() for name in config.items("controller.listener.names")}
    return [_endpoint(listener) for listener in config.listeners if listener.name in names]


def _endpoint(listener: Listener) -> EndpointImage:
    return EndpointImage(listener.name, listener.host, listener.port, _SECURITY_PROTOCOLS[listener.security_protocol])
