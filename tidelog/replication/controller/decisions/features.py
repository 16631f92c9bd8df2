"""UpdateFeatures: changes of finalized feature levels (KIP-584). Pure.

Invariants: every registered broker and controller supports a finalized level; a downgrade of
metadata.version loses no records. Follows Kafka's `FeatureControlManager`.
"""

from __future__ import annotations

from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata_records import FeatureLevelRecord
from tidelog.protocol.messages.update_features import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tidelog.replication.controller.decisions.config_changes import min_insync_replicas_records
from tidelog.replication.controller.decisions.state import ControllerState
from tidelog.replication.controller.decisions.supported_features import SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import ELR_FEATURE, METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import CONTROLLERS_VERSION, ELR_VERSION

Records = list[Any]

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
RESULTS_VERSION_MAX = 1  # later versions have one error for the whole request

# The metadata.version levels with new kinds or versions of records, which a downgrade below them would lose. In Kafka
# 4.3's `MetadataVersion` they are those with `didMetadataChange`.
_LEVELS_WITH_NEW_RECORDS = (8, 11, 13, 14, 15, 17, 23, 30)
# Far above the number of features that exist.
UPDATES_MAX = 1000
KRAFT_VERSION = "kraft.version"
KRAFT_VERSIONS = (0, 1)


def update_features(
    state: ControllerState, request: UpdateFeaturesRequest, version: int
) -> tuple[Records, UpdateFeaturesResponse]:
    """Apply all updates or none."""
    records: Records = []
    names = [update.feature for update in request.feature_updates]
    updates = {update.feature: update for update in request.feature_updates}
    if len(names) > UPDATES_MAX:
        message = f"More than {UPDATES_MAX} features in one request."
        return [], UpdateFeaturesResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=message)
    try:
        proposed = state.image.features | {name: update.max_version_level for name, update in updates.items()}
        for update in updates.values():
            records += _update(state, update, _upgrade_type(update, version), proposed)
    except KafkaError as error:
        return [], _error_response(error)
    results = [UpdatableFeatureResult(feature=name, error_message=ErrorCode.NONE.name) for name in names]
    return (
        [] if request.validate_only else records,
        UpdateFeaturesResponse(error_message=None, results=results if version <= RESULTS_VERSION_MAX else []),
    )


def _error_response(error: KafkaError) -> UpdateFeaturesResponse:
    message = f"The update failed for all features since the following feature had an error: {error.message}"
    return UpdateFeaturesResponse(error_code=error.code, error_message=message)


def _upgrade_type(update: FeatureUpdateKey, version: int) -> int:
    if version == 0:
        return UNSAFE_DOWNGRADE if update.allow_downgrade else UPGRADE
    return update.upgrade_type


def _update(state: ControllerState, update: FeatureUpdateKey, upgrade_type: int, proposed: dict[str, int]) -> Records:
    name, level = update.feature, update.max_version_level
    present = state.settings.kraft_version() if name == KRAFT_VERSION else state.image.feature_level(name)
    problem: str | None = None
    if upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        problem = "The controller does not support the given upgrade type."
    elif level < 0:
        problem = "A feature version cannot be less than 0."
    else:
        problem = _reason_not_supported(state, name, level)
    if problem is None and level < present and upgrade_type == UPGRADE:
        problem = (
            "Can't downgrade the version of this feature without setting the upgrade type to either safe or "
            "unsafe downgrade."
        )
    elif problem is None and level > present and upgrade_type != UPGRADE:
        problem = "Can't downgrade to a newer version."
    if problem is None and name == METADATA_VERSION:
        _check_metadata_version(present, level, upgrade_type)
    if problem is None and name == KRAFT_VERSION and level != present:
        problem = "It cannot be changed here."
    if problem is None and name == ELR_FEATURE and level > 0 and proposed.get(METADATA_VERSION, 0) < ELR_VERSION:
        problem = f"{name} could not be set to {level} because it depends on {METADATA_VERSION} level {ELR_VERSION}"
    if problem is not None:
        raise KafkaError(
            ErrorCode.INVALID_UPDATE_VERSION, f"Invalid update version {level} for feature {name}. {problem}"
        )
    if name == KRAFT_VERSION:
        return []  # it is not a feature of the image
    enables_elr = name == ELR_FEATURE and level > 0 and not present
    return [
        FeatureLevelRecord(name=name, feature_level=level),
        *(min_insync_replicas_records(state) if enables_elr else ()),
    ]


def _check_metadata_version(present: int, level: int, upgrade_type: int) -> None:
    if level >= present or not any(level < first_level <= present for first_level in _LEVELS_WITH_NEW_RECORDS):
        return
    if upgrade_type == UNSAFE_DOWNGRADE:
        reason = "Unsafe metadata downgrade is not supported in this version."
    else:
        reason = "Refusing to perform the requested downgrade because it might delete metadata information."
    message = f"Unsupported metadata.version downgrade from {present} to {level}. {reason}"
    raise KafkaError(ErrorCode.INVALID_UPDATE_VERSION, message)


def _reason_not_supported(state: ControllerState, name: str, level: int) -> str | None:
    if name == KRAFT_VERSION:
        low, high = KRAFT_VERSIONS
        return None if low <= level <= high else f"Local controller {state.node_id} only supports versions {low}-{high}"
    if name not in SUPPORTED_FEATURES and (level or not state.image.feature_level(name)):
        return f"Local controller {state.node_id} does not support this feature."  # one of Kafka's may be turned off
    low, high = SUPPORTED_FEATURES.get(name, (0, 0))
    if (level or name == METADATA_VERSION) and not low <= level <= high:
        return f"Local controller {state.node_id} only supports versions {low}-{high}"
    for broker in state.image.brokers.values():
        low, high = broker.features.get(name, (0, 0))
        if level and not low <= level <= high:
            return f"Broker {broker.node_id} only supports versions {low}-{high}"
    for controller in state.image.controllers.values():
        low, high = controller.features.get(name, (0, 0))
        if level and controller.node_id != state.node_id and not low <= level <= high:
            return f"Controller {controller.node_id} only supports versions {low}-{high}"
    # Below 3.7 no controller is registered, and nothing is known of the others.
    for voter in state.settings.voters() if state.metadata_version >= CONTROLLERS_VERSION else ():
        if voter != state.node_id and voter not in state.image.controllers:
            return f"controller {voter} has not registered, and may not support this feature"
    return None
