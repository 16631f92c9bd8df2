"""The first records of a controller that takes over. Pure. Follows Kafka's `ActivationRecordsGenerator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.protocol.messages.controller_registration import ControllerRegistrationRequest, Feature, Listener
from tidelog.protocol.messages.metadata_records import AbortTransactionRecord, FeatureLevelRecord
from tidelog.replication.controller.decisions.brokers import register_controller
from tidelog.replication.controller.decisions.config_changes import min_insync_replicas_records
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.decisions.supported_features import NEW_CLUSTER_FEATURES, SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import ELR_FEATURE, METADATA_VERSION, EndpointImage
from tidelog.replication.controller.metadata.record_codec import decode_record


class ControllerIdentity(NamedTuple):
    """This process, as other nodes are to find it."""

    incarnation_id: bytes
    endpoints: Sequence[EndpointImage] = ()

    def registration(self, node_id: int) -> ControllerRegistrationRequest:
        return ControllerRegistrationRequest(
            controller_id=node_id,
            incarnation_id=self.incarnation_id,
            zk_migration_ready=False,
            listeners=[
                Listener(name=one.name, host=one.host, port=one.port, security_protocol=one.security_protocol)
                for one in self.endpoints
            ],
            features=[
                Feature(name=name, min_supported_version=low, max_supported_version=high)
                for name, (low, high) in SUPPORTED_FEATURES.items()
            ],
        )


def activation_records(
    state: ControllerState,
    identity: ControllerIdentity,
    bootstrap_values: Callable[[], Sequence[bytes]],
    *,
    in_transaction: bool,
) -> list[Any]:
    """`in_transaction`: the log ends in a metadata transaction that its author can no longer end."""
    records: list[Any] = [AbortTransactionRecord(reason="Controller failover")] if in_transaction else []
    if METADATA_VERSION not in state.image.features:
        formatted = [decode_record(value) for value in bootstrap_values()]
        first = formatted or bootstrap_records(NEW_CLUSTER_FEATURES)
        records += first
        if any(isinstance(one, FeatureLevelRecord) and one.name == ELR_FEATURE and one.feature_level for one in first):
            records += min_insync_replicas_records(state)
    return records + register_controller(state, identity.registration(state.node_id))


def bootstrap_records(features: Mapping[str, int]) -> list[Any]:
    """The first records of a new cluster: its feature levels, metadata.version first."""
    assert METADATA_VERSION in features, "a cluster without metadata.version cannot be read by Kafka"
    names = [METADATA_VERSION, *sorted(name for name in features if name != METADATA_VERSION)]
    return [FeatureLevelRecord(name=name, feature_level=features[name]) for name in names if features[name]]
