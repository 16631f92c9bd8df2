"""The records with which nodes enter the cluster: a new cluster's first features, controllers, brokers. Pure.

A broker registers fenced and is unfenced when it has caught up; what it leads then is `leaders.py`'s to say. Follows
Kafka's `ClusterControlManager` and `ActivationRecordsGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    ControllerEndpoint,
    ControllerFeature,
    FeatureLevelRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
)
from tidelog.replication.controller.image import ELR_FEATURE, METADATA_VERSION, EndpointImage
from tidelog.replication.controller.record_codec import LATEST_METADATA_VERSION, LOWEST_METADATA_VERSION

Features = Mapping[str, tuple[int, int]]

# What a Tidelog node supports, lowest to highest level, and what a new cluster starts with. Features whose protocols
# are not served stay at 0 and unlisted, so that no client relies on them.
SUPPORTED_FEATURES: dict[str, tuple[int, int]] = {
    METADATA_VERSION: (LOWEST_METADATA_VERSION, LATEST_METADATA_VERSION),
    ELR_FEATURE: (0, 1),
    "kraft.version": (0, 0),
}
NEW_CLUSTER_FEATURES: dict[str, int] = {METADATA_VERSION: LATEST_METADATA_VERSION, ELR_FEATURE: 1}


class BrokerRegistration(NamedTuple):
    """What a broker says of itself when it starts."""

    node_id: int
    incarnation_id: bytes
    endpoints: Sequence[EndpointImage]
    features: Features = SUPPORTED_FEATURES
    rack: str | None = None
    log_dirs: Sequence[bytes] = ()


def bootstrap_records(features: Mapping[str, int]) -> list[Any]:
    """The first records of a new cluster: its feature levels, metadata.version first."""
    assert METADATA_VERSION in features, "a cluster without metadata.version cannot be read by Kafka"
    names = [METADATA_VERSION, *sorted(name for name in features if name != METADATA_VERSION)]
    return [FeatureLevelRecord(name=name, feature_level=features[name]) for name in names if features[name]]


def register_controller(
    node_id: int, incarnation_id: bytes, endpoints: Iterable[EndpointImage], features: Features
) -> RegisterControllerRecord:
    return RegisterControllerRecord(
        controller_id=node_id,
        incarnation_id=incarnation_id,
        zk_migration_ready=False,
        end_points=[
            ControllerEndpoint(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
            for one in endpoints
        ],
        features=[
            ControllerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in features.items()
        ],
    )


def register_broker(registration: BrokerRegistration, broker_epoch: int) -> RegisterBrokerRecord:
    """A broker's start, fenced until `unfence_broker`. `broker_epoch`: the offset this record will have."""
    return RegisterBrokerRecord(
        broker_id=registration.node_id,
        incarnation_id=registration.incarnation_id,
        broker_epoch=broker_epoch,
        end_points=[
            BrokerEndpoint(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
            for one in registration.endpoints
        ],
        features=[
            BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in registration.features.items()
        ],
        rack=registration.rack,
        fenced=True,
        in_controlled_shutdown=False,
        log_dirs=list(registration.log_dirs),
    )


def unfence_broker(node_id: int, broker_epoch: int) -> BrokerRegistrationChangeRecord:
    return BrokerRegistrationChangeRecord(broker_id=node_id, broker_epoch=broker_epoch, fenced=-1)
