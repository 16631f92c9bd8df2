from __future__ import annotations

import pytest

from tests.unit.replication.clusters import apply, cluster_state
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata_records import (
    BrokerFeature,
    FeatureLevelRecord,
    RegisterBrokerRecord,
)
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tidelog.replication.controller.decisions.features import update_features

ELR, METADATA = "eligible.leader.replicas.version", "metadata.version"
TRANSACTION = "transaction.version"


@pytest.fixture
def state():
    state = cluster_state([1])
    apply(state, [FeatureLevelRecord(name=METADATA, feature_level=30), FeatureLevelRecord(name=ELR, feature_level=1)])
    return state


def update(state, name, level, upgrade_type=1, *, version=2, validate_only=False):
    key = FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=upgrade_type)
    request = UpdateFeaturesRequest(feature_updates=[key], validate_only=validate_only)
    records, response = update_features(state, request, version)
    apply(state, records)
    return records, ErrorCode(response.error_code), response


def test_down_and_up(state):
    assert update(state, ELR, 0, 2)[1] is ErrorCode.NONE
    assert not state.elr_enabled
    assert update(state, ELR, 1)[1] is ErrorCode.NONE
    assert state.elr_enabled


@pytest.mark.parametrize(("present", "code"), [(14, ErrorCode.NONE), (15, ErrorCode.INVALID_UPDATE_VERSION)])
def test_the_other_voters_are_asked_for_where_they_can_register(present, code):
    state = cluster_state([1], voters=lambda: (7, 8))
    apply(state, [FeatureLevelRecord(name=METADATA, feature_level=present)])
    assert update(state, METADATA, 30)[1] is code


def test_the_version_of_transactions_goes_up_and_down(state):
    for level, upgrade_type in [(1, 1), (2, 1), (1, 2), (0, 3), (2, 1)]:
        records, code, _ = update(state, TRANSACTION, level, upgrade_type)
        assert (records, code) == ([FeatureLevelRecord(name=TRANSACTION, feature_level=level)], ErrorCode.NONE)
        assert state.image.feature_level(TRANSACTION) == level
    assert update(state, TRANSACTION, 1, 1)[1] is ErrorCode.INVALID_UPDATE_VERSION, "a downgrade must say so"


def test_a_feature_of_kafkas_that_a_directory_brought_along_can_be_turned_off(state):
    apply(state, [FeatureLevelRecord(name="group.version", feature_level=1)])
    assert update(state, "group.version", 0, 2)[1] is ErrorCode.NONE
    assert state.image.feature_level("group.version") == 0


@pytest.mark.parametrize(
    ("name", "level", "upgrade_type"),
    [
        (TRANSACTION, 3, 1),
        (ELR, 0, 1),  # down, but called an upgrade
        (ELR, 2, 1),  # unknown level
        (ELR, -1, 2),
        (ELR, 0, 7),
        (METADATA, 31, 1),
        (METADATA, 20, 2),  # would lose records
        (METADATA, 20, 3),
        ("share.version", 1, 1),
        ("unheard.of", 0, 1),
        ("kraft.version", 1, 1),
    ],
)
def test_what_cannot_be_is_refused(state, name, level, upgrade_type):
    records, code, response = update(state, name, level, upgrade_type)
    assert (records, code) == ([], ErrorCode.INVALID_UPDATE_VERSION)
    assert name in response.error_message


def test_where_no_record_is_lost_metadata_version_goes_down(state):
    apply(state, [FeatureLevelRecord(name=METADATA, feature_level=25)])
    assert update(state, METADATA, 23, 2)[1] is ErrorCode.NONE
    assert state.metadata_version == 23


@pytest.mark.parametrize(
    ("present", "lowest"),
    [
        (7, 7), (8, 8), (9, 8), (10, 8), (11, 11), (12, 11), (13, 13), (14, 14), (15, 15), (16, 15), (17, 17), (18, 17),
        (19, 17), (20, 17), (21, 17), (22, 17), (23, 23), (24, 23), (25, 23), (26, 23), (27, 23), (28, 23), (29, 23),
        (30, 30),
    ],
)  # fmt: skip
@pytest.mark.parametrize("upgrade_type", [2, 3])
def test_metadata_version_goes_down_as_far_as_kafkas(present, lowest, upgrade_type):
    """What Kafka 4.3.1 answered to a dry run of each."""
    allowed = []
    for level in range(7, present + 1):
        state = cluster_state([1])
        apply(state, [FeatureLevelRecord(name=METADATA, feature_level=present)])
        if update(state, METADATA, level, upgrade_type, validate_only=True)[1] is ErrorCode.NONE:
            allowed.append(level)
    assert allowed == [*range(lowest, present + 1)]


def test_every_broker_and_controller_must_support_it(state):
    apply(
        state,
        [
            RegisterBrokerRecord(
                broker_id=2,
                broker_epoch=9,
                features=[BrokerFeature(name=METADATA, min_supported_version=1, max_supported_version=30)],
            )
        ],
    )
    assert update(state, ELR, 0, 2)[1] is ErrorCode.NONE
    assert update(state, ELR, 1)[1] is ErrorCode.INVALID_UPDATE_VERSION
    state.settings.voters = lambda: [100, 101]
    assert update(state, ELR, 1)[1] is ErrorCode.INVALID_UPDATE_VERSION


def test_older_versions_answer_for_each_feature(state):
    _, code, response = update(state, ELR, 0, 2, version=1)
    assert code is ErrorCode.NONE
    assert [(one.feature, one.error_code) for one in response.results] == [(ELR, ErrorCode.NONE)]
    _, code, response = update(state, ELR, 5, version=1)
    assert (code, response.results) == (ErrorCode.INVALID_UPDATE_VERSION, []), "a refusal is of the whole request"


def test_a_dry_run_changes_nothing(state):
    assert update(state, ELR, 0, 2, validate_only=True)[:2] == ([], ErrorCode.NONE)


def test_the_minimum_is_written_down_when_eligible_leaders_begin_to_be_kept(state):
    update(state, ELR, 0, 2)
    state.settings.min_insync_replicas = 2
    update(state, ELR, 1)
    assert state.image.configs[4, ""] == {"min.insync.replicas": "2"}


def test_of_one_feature_named_twice_the_last_counts(state):
    keys = [FeatureUpdateKey(feature=ELR, max_version_level=level, upgrade_type=1) for level in (7, 1)]
    records, response = update_features(state, UpdateFeaturesRequest(feature_updates=keys), 1)
    assert (len(records), response.error_code, len(response.results)) == (1, 0, 2)


@pytest.mark.parametrize(
    ("level", "kind", "told"),
    [
        (1, 1, None),
        (0, 1, "Can't downgrade the version of this feature"),
        (0, 2, "It cannot be changed here."),
        (2, 1, "Local controller 1 only supports versions 0-1"),
    ],
)
def test_the_quorums_own_level_is_only_confirmed(state, level, kind, told):
    state.node_id = 1
    state.settings.kraft_version = lambda: 1
    records, code, response = update(state, "kraft.version", level, kind)
    assert records == []
    assert (code is ErrorCode.NONE) == (told is None)
    assert told is None or told in response.error_message


def test_metadata_does_not_go_down_where_something_would_be_lost(state):
    _, code, response = update(state, METADATA, 20, 2)
    assert code is ErrorCode.INVALID_UPDATE_VERSION
    assert "Unsupported metadata.version downgrade from 30 to 20. Refusing" in response.error_message
