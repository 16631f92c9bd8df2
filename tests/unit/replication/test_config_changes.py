from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replication.clusters import apply, cluster_state
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import alter_configs as legacy
from tidelog.protocol.messages import incremental_alter_configs as incremental
from tidelog.protocol.messages.metadata_records import ClearElrRecord, ConfigRecord, FeatureLevelRecord
from tidelog.replication.controller.decisions.config_changes import (
    alter_configs,
    incremental_alter_configs,
    list_after,
    min_insync_replicas_records,
)
from tidelog.replication.controller.decisions.leaders import fence_brokers, unfence_broker
from tidelog.replication.controller.decisions.state import NewTopic

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)


def list_default(resource_type, name):
    return {"cleanup.policy": "delete"}[name]


def problem(resource_type, configs):
    return KafkaError(ErrorCode.INVALID_CONFIG, "a bad one") if "bad" in configs else None


@pytest.fixture
def state():
    state = cluster_state([1, 2], config_problem=problem, list_config_default=list_default)
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, [1, 2])])])[0])
    return state


def alter(state, *changes, resource_type=TOPIC, name="t", validate_only=False, times=1):
    configs = [
        incremental.AlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    resource = incremental.AlterConfigsResource(resource_type=resource_type, resource_name=name, configs=configs)
    request = incremental.IncrementalAlterConfigsRequest(resources=[resource] * times, validate_only=validate_only)
    records, response = incremental_alter_configs(state, request)
    apply(state, records)
    (answer,) = response.responses
    return records, ErrorCode(answer.error_code)


def configs(state, key=(TOPIC, "t")):
    return state.image.configs.get(key, {})


def test_set_and_delete(state):
    alter(state, ("retention.ms", SET, "5"), ("segment.ms", SET, "7"))
    assert configs(state) == {"retention.ms": "5", "segment.ms": "7"}
    records, code = alter(state, ("retention.ms", DELETE, None), ("segment.ms", SET, "7"))
    assert (len(records), code) == (1, ErrorCode.NONE)
    assert configs(state) == {"segment.ms": "7"}


def test_lists_grow_and_shrink_from_their_default(state):
    alter(state, ("cleanup.policy", APPEND, "compact"))
    assert configs(state)["cleanup.policy"] == "delete,compact"
    alter(state, ("cleanup.policy", APPEND, "compact"))
    assert configs(state)["cleanup.policy"] == "delete,compact"
    alter(state, ("cleanup.policy", SUBTRACT, "delete"))
    assert configs(state)["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("change", "options", "code"),
    [
        (("retention.ms", APPEND, "5"), {}, ErrorCode.INVALID_CONFIG),
        (("bad", SET, "5"), {}, ErrorCode.INVALID_CONFIG),
        (("retention.ms", SET, None), {}, ErrorCode.INVALID_REQUEST),
        (("retention.ms", 9, "1"), {}, ErrorCode.INVALID_REQUEST),
        (("retention.ms", SET, "x" * 40_000), {}, ErrorCode.INVALID_CONFIG),
        (("retention.ms", SET, "5"), {"name": "u"}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (("retention.ms", SET, "5"), {"name": "no name"}, ErrorCode.INVALID_TOPIC_EXCEPTION),
        (("x", SET, "5"), {"resource_type": BROKER, "name": "nine"}, ErrorCode.INVALID_REQUEST),
        (("x", SET, "5"), {"resource_type": BROKER, "name": "9"}, ErrorCode.BROKER_ID_NOT_REGISTERED),
        (("x", SET, "5"), {"resource_type": BROKER, "name": "-1"}, ErrorCode.INVALID_REQUEST),
        (("x", SET, "5"), {"resource_type": 1, "name": "9"}, ErrorCode.UNSUPPORTED_VERSION),
        (("x", SET, "5"), {"resource_type": 16, "name": ""}, ErrorCode.INVALID_REQUEST),
        (("x", SET, "5"), {"resource_type": 32, "name": ""}, ErrorCode.INVALID_REQUEST),
        (("bad", SET, "5"), {"name": "u"}, ErrorCode.INVALID_CONFIG),  # before it is asked whether there is a topic
        (("retention.ms", SET, "5"), {"times": 2}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_cannot_be_is_refused_whole(state, change, options, code):
    assert alter(state, change, **options) == ([], code)


def test_one_bad_config_spoils_its_resource(state):
    assert alter(state, ("retention.ms", SET, "5"), ("bad", SET, "1")) == ([], ErrorCode.INVALID_CONFIG)
    assert alter(state, ("a", SET, "5"), ("a", SET, "1")) == ([], ErrorCode.INVALID_REQUEST)


def test_a_dry_run_says_the_same_and_does_nothing(state):
    assert alter(state, ("retention.ms", SET, "5"), validate_only=True) == ([], ErrorCode.NONE)
    assert alter(state, ("bad", SET, "5"), validate_only=True) == ([], ErrorCode.INVALID_CONFIG)


def test_broker_configs_are_written_even_unchanged(state):
    for name in ("1", ""):
        for _ in range(2):
            records, _ = alter(state, ("x", SET, "1"), resource_type=BROKER, name=name)
            assert records == [ConfigRecord(resource_type=BROKER, resource_name=name, name="x", value="1")]


def test_the_minimum_is_one_for_all_while_eligible_leaders_are_kept(state):
    refused: tuple[list[object], ErrorCode] = ([], ErrorCode.INVALID_CONFIG)
    minimum = "min.insync.replicas"
    assert alter(state, (minimum, SET, "2"), resource_type=BROKER, name="1") == refused
    assert alter(state, (minimum, DELETE, None), resource_type=BROKER, name="") == refused
    records, code = alter(state, (minimum, SET, "2"), resource_type=BROKER, name="")
    assert (records[-1], code) == (ClearElrRecord(topic_name=""), ErrorCode.NONE)
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=0)])
    assert alter(state, (minimum, SET, "3"), resource_type=BROKER, name="1")[1] == ErrorCode.NONE
    assert alter(state, (minimum, DELETE, None), resource_type=BROKER, name="")[1] == ErrorCode.NONE


def test_the_minimum_is_written_down_when_eligible_leaders_begin_to_be_kept(state):
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=0)])
    alter(state, ("min.insync.replicas", SET, "2"), resource_type=BROKER, name="1")
    state.settings.min_insync_replicas = 3
    apply(state, min_insync_replicas_records(state))
    assert configs(state, (BROKER, "")) == {"min.insync.replicas": "3"}
    assert configs(state, (BROKER, "1")) == {}
    assert min_insync_replicas_records(state) == []


def test_the_old_api_replaces_everything(state):
    alter(state, ("retention.ms", SET, "5"), ("segment.ms", SET, "7"))
    resource = legacy.AlterConfigsResource(
        resource_type=TOPIC, resource_name="t", configs=[legacy.AlterableConfig(name="retention.ms", value="6")]
    )
    records, response = alter_configs(state, legacy.AlterConfigsRequest(resources=[resource]))
    assert response.responses[0].error_code == 0
    apply(state, records)
    assert configs(state) == {"retention.ms": "6"}


@pytest.mark.parametrize(("kind", "name"), [(TOPIC, "t"), (BROKER, "")])
def test_a_new_minimum_leaves_the_eligible_replicas_of_partitions_without_a_leader(state, kind, name):
    """Nothing is committed there: without them no replica that returns could lead."""
    alter(state, ("min.insync.replicas", SET, "2"))
    apply(state, fence_brokers(state, [1, 2]))
    before = state.image.topics_by_name["t"].partitions[0]
    assert (before.leader, before.elr) == (-1, (1, 2))
    alter(state, ("min.insync.replicas", SET, "1"), resource_type=kind, name=name)
    after = state.image.topics_by_name["t"].partitions[0]
    assert (after.elr, after.last_known_elr) == (before.elr, before.last_known_elr)
    assert state.index.in_elr(1)
    apply(state, unfence_broker(state, 2))
    assert state.image.topics_by_name["t"].partitions[0].leader == 2


def test_a_new_minimum_voids_what_is_known_of_eligible_leaders(state):
    alter(state, ("min.insync.replicas", SET, "2"))
    apply(state, fence_brokers(state, [1]))
    assert state.image.topics_by_name["t"].partitions[0].elr == (1,)
    records, _ = alter(state, ("min.insync.replicas", SET, "1"))
    assert isinstance(records[-1], ClearElrRecord)
    assert state.image.topics_by_name["t"].partitions[0].elr == ()
    assert state.index.in_elr(1) == ()
    records, _ = alter(state, ("min.insync.replicas", SET, "1"))
    assert records == []


def test_a_list_grows_up_to_the_bound_of_all_values(state):
    _, code = alter(state, ("cleanup.policy", APPEND, "x" * 32_760))
    assert (code, len(configs(state)["cleanup.policy"])) == (ErrorCode.NONE, 32_767)
    _, code = alter(state, ("cleanup.policy", APPEND, "y"))
    assert (code, len(configs(state)["cleanup.policy"])) == (ErrorCode.INVALID_CONFIG, 32_767)
    _, code = alter(state, ("cleanup.policy", SUBTRACT, "delete"))
    assert (code, len(configs(state)["cleanup.policy"])) == (ErrorCode.NONE, 32_760)


@given(st.sampled_from([APPEND, SUBTRACT]), st.text("a,bc", max_size=8), st.text("a,bc", max_size=8))
def test_a_list_changes_item_by_item(operation, value, present):
    parts = [part for part in present.split(",") if part]
    for part in value.split(","):
        if operation == APPEND and part not in parts:
            parts.append(part)
        elif operation == SUBTRACT and part in parts:
            parts.remove(part)
    assert list_after(operation, value, present) == ",".join(parts)


@pytest.mark.parametrize("operation", [APPEND, SUBTRACT])
def test_a_list_changes_in_time_in_proportion_to_its_length(operation):
    """Item by item, these take a minute."""
    value = ",".join(map(str, range(40_000)))
    began_s = time.process_time()
    list_after(operation, value, ",".join(map(str, reversed(range(40_000)))))
    assert time.process_time() - began_s < 0.5
