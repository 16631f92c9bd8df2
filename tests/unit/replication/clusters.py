"""Small clusters made by hand, for tests of the controller's pure parts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.protocol.messages.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    RegisterBrokerRecord,
)
from tidelog.replication.controller.decisions.state import ControllerSettings, ControllerState
from tidelog.replication.controller.decisions.supported_features import SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import MetadataImage
from tidelog.replication.controller.metadata.records import ImageBuilder


def broker_records(node_id: int, *, rack: str | None = None, fenced: bool = False, directories: int = 1) -> list[Any]:
    """A registration and, unless `fenced`, what unfences it. Broker epoch = 100 + id."""
    records: list[Any] = [
        RegisterBrokerRecord(
            broker_id=node_id,
            broker_epoch=100 + node_id,
            incarnation_id=bytes([node_id]) * 16,
            end_points=[BrokerEndpoint(name="PLAINTEXT", host=f"host{node_id}", port=9092, security_protocol=0)],
            features=[
                BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
                for name, (low, high) in SUPPORTED_FEATURES.items()
            ],
            rack=rack,
            fenced=True,
            in_controlled_shutdown=False,
            log_dirs=[directory_id(node_id, index) for index in range(directories)],
        )
    ]
    if not fenced:
        records.append(BrokerRegistrationChangeRecord(broker_id=node_id, broker_epoch=100 + node_id, fenced=-1))
    return records


def directory_id(node_id: int, index: int = 0) -> bytes:
    return bytes([0xD0, node_id, index]) + bytes(13)


def replay(image: MetadataImage, records: Sequence[Any]) -> MetadataImage:
    builder = ImageBuilder(image)
    builder.replay_all(records)
    return builder.build(image.offset + len(records), 1, 0, -1)[0]


def apply(state: ControllerState, records: Sequence[Any]) -> None:
    """What the controller does after appending."""
    builder = ImageBuilder(state.image)
    builder.replay_all(records)
    state.adopt(*builder.build(state.image.offset + len(records), 1, 0, -1))


def cluster_state(
    broker_ids: Sequence[int] = (1,),
    *,
    fenced: Sequence[int] = (),
    racks: Mapping[int, str] | None = None,
    **settings: Any,
) -> ControllerState:
    state = ControllerState(ControllerSettings(**settings), random.Random(7))
    for node_id in broker_ids:
        apply(state, broker_records(node_id, fenced=node_id in fenced, rack=(racks or {}).get(node_id)))
    return state
