"""Options of streams, and those that streams and batch reads refuse of each other."""

from __future__ import annotations

import pytest

from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.option_table import BATCH, BOTH, FORBIDDEN, SOURCE_OPTIONS, STREAM, WRONG_MODE
from tidelog.spark_ingest.options import EARLIEST, LATEST, OffsetBound, SourceOptions, wants_headers

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "t"}


def stream(**options: str) -> SourceOptions:
    return SourceOptions.parse({**SERVERS, **options}, STREAM)


def refusal(mode: str = STREAM, **options: str) -> str:
    with pytest.raises(ConfigError) as failure:
        SourceOptions.parse({**SERVERS, **options}, mode)
    message = str(failure.value)
    assert "\n" not in message
    return message


def test_the_defaults_are_those_of_sparks_stream():
    options = stream()
    assert options.starting == OffsetBound(LATEST, option="startingOffsets")
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger) == (None, None)
    assert (options.max_trigger_delay_ms, options.commit_group) == (900_000, "")


def test_a_stream_may_begin_at_either_end_or_at_offsets():
    assert stream(startingOffsets="Earliest").starting.value == EARLIEST
    assert stream(startingOffsets="latest").starting.value == LATEST
    values = stream(startingOffsets='{"t":{"0":-1,"1":-2,"2":5}}').starting.value
    assert values == {("t", 0): LATEST, ("t", 1): EARLIEST, ("t", 2): 5}
    assert "-2 (earliest) or -1 (latest) or an offset" in refusal(startingOffsets='{"t":{"0":-3}}')


def test_limits_are_whole_numbers_and_fit_each_other():
    options = stream(maxOffsetsPerTrigger=str(2**40), minOffsetsPerTrigger="7", maxTriggerDelay="90s")
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger) == (2**40, 7)
    assert options.max_trigger_delay_ms == 90_000
    assert "above maxOffsetsPerTrigger (3)" in refusal(minOffsetsPerTrigger="4", maxOffsetsPerTrigger="3")
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
        for text in ("0", "-1", str(2**63)):
            assert f"{name} must be a whole number, at least 1 and below 2^63, not '{text}'" in refusal(**{name: text})


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("15m", 900_000), ("2min", 120_000), ("1h", 3_600_000), ("1d", 86_400_000), ("10s", 10_000), ("7ms", 7), ("9", 9)],
)
def test_delays_are_written_as_sparks(text, milliseconds):
    assert stream(maxTriggerDelay=text).max_trigger_delay_ms == milliseconds


@pytest.mark.parametrize("text", ["", "m", "1.5m", "-1s", "1 fortnight", "9" * 30])
def test_other_delays_are_refused(text):
    assert "maxTriggerDelay must be a time such as" in refusal(maxTriggerDelay=text)


EXAMPLES = {option.name: option.example for option in SOURCE_OPTIONS}


@pytest.mark.parametrize("option", [option for option in SOURCE_OPTIONS if option.mode != BOTH], ids=lambda o: o.name)
def test_an_option_of_one_kind_of_read_is_refused_in_the_other(option):
    other = STREAM if option.mode == BATCH else BATCH
    assert f"{option.name!r} is not allowed in a " in refusal(other, **{option.name: option.example})
    assert WRONG_MODE[option.name.lower()] in refusal(other, **{option.name: option.example})
    SourceOptions.parse({**SERVERS, option.name: option.example}, option.mode)


@pytest.mark.parametrize("option", SOURCE_OPTIONS, ids=lambda option: option.name)
def test_the_example_of_every_option_is_taken(option):
    options = {**SERVERS, option.name: option.example}
    if option.name in ("subscribePattern", "assign"):
        del options["subscribe"]
    if option.name.startswith("startingOffsets") and option.name.endswith(("Group", "WithoutCommit")):
        options |= {"startingOffsets": "committed", "kafka.group.id": "g"}
    for mode in (BATCH, STREAM):
        if option.mode in (mode, BOTH):
            SourceOptions.parse(options, mode)


def test_every_refusal_between_the_kinds_has_a_reason():
    assert set(WRONG_MODE) == {option.name.lower() for option in SOURCE_OPTIONS if option.mode != BOTH}
    assert not FORBIDDEN.keys() & WRONG_MODE.keys()


def test_committed_offsets_need_a_group():
    assert "needs a group" in refusal(startingOffsets="committed")
    assert stream(startingOffsets="committed", **{"kafka.group.id": "a"}).starting.group == "a"
    assert stream(startingOffsets="COMMITTED", commitOffsetsToGroup="b").starting.group == "b"
    named = stream(startingOffsets="committed", startingOffsetsGroup="c", **{"kafka.group.id": "a"})
    assert named.starting == OffsetBound(EARLIEST, option="startingOffsets", group="c")
    assert named.without_effect == ()


def test_what_has_no_commit_begins_where_the_options_say():
    def starting(mode: str, fallback: str) -> OffsetBound:
        given = {"startingOffsets": "committed", "kafka.group.id": "a", "startingOffsetsWithoutCommit": fallback}
        return SourceOptions.parse({**SERVERS, **given}, mode).starting

    assert starting(STREAM, "latest").value == LATEST
    assert starting(BATCH, "error").is_commit_required
    with pytest.raises(ConfigError, match="must be earliest or error, not 'latest'"):
        starting(BATCH, "latest")
    with pytest.raises(ConfigError, match="must be earliest, latest or error, not 'none'"):
        starting(STREAM, "none")
    assert "has a meaning with startingOffsets=committed only" in refusal(startingOffsetsGroup="a")
    assert "has a meaning with startingOffsets=committed only" in refusal(startingOffsetsWithoutCommit="error")


def test_times_go_before_committed_offsets_as_before_all_offsets():
    bound = stream(startingOffsets="committed", startingTimestamp="5", **{"kafka.group.id": "a"}).starting
    assert (bound.value, bound.by_time, bound.group) == (5, True, "")


def test_bounds_by_partition_must_fit_each_other():
    def bounds(starting: str, ending: str) -> str:
        return refusal(BATCH, startingOffsets=starting, endingOffsets=ending)

    assert "startingOffsets of t-0 is 5, above its endingOffsets, 4" in bounds('{"t":{"0":5}}', '{"t":{"0":4}}')
    assert "must name the same partitions; t-1 is in one only" in bounds('{"t":{"0":5}}', '{"t":{"0":5,"1":6}}')
    starting, ending = '{"t":{"0":-2,"1":9}}', '{"t":{"0":4,"1":-1}}'
    options = SourceOptions.parse({**SERVERS, "startingOffsets": starting, "endingOffsets": ending})
    assert isinstance(options.starting.value, dict)
    assert options.starting.value[TopicPartition("t", 1)] == 9


def test_the_schema_needs_no_knowledge_of_the_kind_of_read():
    assert not wants_headers({**SERVERS, "maxOffsetsPerTrigger": "5"})
    assert wants_headers({**SERVERS, "endingOffsets": "latest", "includeHeaders": "true"})
    with pytest.raises(ConfigError, match="did you mean startingOffsets"):
        wants_headers({**SERVERS, "startingOffset": "latest"})
    with pytest.raises(ConfigError, match="includeHeaders must be true or false"):
        wants_headers({**SERVERS, "includeHeaders": "maybe"})
