"""UpdateFeatures, key 57, versions 0-2, flexible from the first: move finalized features up or
down.

Version 1 adds a dry run and the kinds of downgrade, 2 answers with one error instead of one per
feature.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, boolean, int8, int16, int32, string


class FeatureUpdateKey(Message):
    feature: str = string()
    max_version_level: int = int16()
    allow_downgrade: bool = boolean("0")
    upgrade_type: int = int8("1+", default=1)


class UpdateFeaturesRequest(Message, key=57, versions="0-2", flexible="0+"):
    timeout_ms: int = int32(default=60000)
    feature_updates: list[FeatureUpdateKey] = array(FeatureUpdateKey)
    validate_only: bool = boolean("1+")


class UpdatableFeatureResult(Message):
    feature: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable="0-1")


class UpdateFeaturesResponse(Message, key=57, versions="0-2", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    results: list[UpdatableFeatureResult] = array(UpdatableFeatureResult, "0-1", ignorable=True)
