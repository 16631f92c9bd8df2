"""The first records of a newly active controller. Pure. Follows Kafka's
`ActivationRecordsGenerator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.protocol.messages.controller_registration import ControllerRegistrationRequest, Feature, Listener
from tidelog.protocol.messages.metadata_records import AbortTransactionRecord, FeatureLevelRecord
from tidelog.replication.controller.decisions.brokers import controller_registration
from tidelog.replication.controller.decisions.config_changes import min_insync_replicas_records
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.decisions.supported_features import NEW_CLUSTER_FEATURES, SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import ELR_FEATURE, METADATA_VERSION, EndpointImage
from tidelog.replication.controller.metadata.record_codec import (
    CONTROLLERS_VERSION,
    LATEST_METADATA_VERSION,
    decode_record,
)


class ControllerIdentity(NamedTuple):
    """The registration data of this controller process."""

    incarnation_id: bytes
    endpoints: Sequence[EndpointImage] = ()

    def registration(self, node_id: int) -> ControllerRegistrationRequest:
        return ControllerRegistrationRequest(
            controller_id=node_id,
            incarnation_id=self.incarnation_id,
            zk_migration_ready=False,
            listeners=[
                Listener(name=entry.name, host=entry.host, port=entry.port, security_protocol=entry.security_protocol)
                for entry in self.endpoints
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
    """`in_transaction`: the log ends in an open metadata transaction of an earlier controller."""
    level = state.metadata_version
    records: list[Any] = [AbortTransactionRecord(reason="Controller failover")] if in_transaction else []
    if METADATA_VERSION not in state.image.features:
        bootstrap = [decode_record(value) for value in bootstrap_values()]
        initial_records = bootstrap or bootstrap_records(NEW_CLUSTER_FEATURES)
        records += initial_records
        levels = [entry.feature_level for entry in initial_records if _is_level_of(entry, METADATA_VERSION)]
        level = levels[-1] if levels else LATEST_METADATA_VERSION
        if any(_is_level_of(entry, ELR_FEATURE) and entry.feature_level for entry in initial_records):
            records += min_insync_replicas_records(state)
    if level >= CONTROLLERS_VERSION:
        records += controller_registration(state, identity.registration(state.node_id))
    return records


def _is_level_of(record: Any, name: str) -> bool:
    return isinstance(record, FeatureLevelRecord) and record.name == name


def bootstrap_records(features: Mapping[str, int]) -> list[Any]:
    """The first records of a new cluster: its feature levels, with metadata.version first."""
    assert METADATA_VERSION in features, "a cluster without metadata.version cannot be read by Kafka"
    names = [METADATA_VERSION, *sorted(name for name in features if name != METADATA_VERSION)]
    return [FeatureLevelRecord(name=name, feature_level=features[name]) for name in names if features[name]]
