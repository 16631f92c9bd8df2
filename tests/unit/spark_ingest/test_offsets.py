from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import list_offsets
from tidelog.client.sync import Admin
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataResponsePartition, MetadataResponseTopic
from tidelog.spark_ingest import offsets
from tidelog.spark_ingest.offsets import DataLoss, resolve_ranges
from tidelog.spark_ingest.option_table import STREAM
from tidelog.spark_ingest.options import OffsetBound, SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.spark_ingest.stream import StreamDriver

TIME = 1_700_000_000_000


def by_partition(topic: str, *values: int) -> str:
    """The JSON that gives partition 0 the first value, and so on."""
    return json.dumps({topic: {str(partition): value for partition, value in enumerate(values)}})


def ranges(node, **options: str):
    return [tuple(each) for each in resolve_ranges(node.options(**options)).ranges]


def test_everything_there_is_by_default(node, new_topic):
    topic = new_topic(5, 0, 3)
    assert ranges(node, subscribe=topic) == [(topic, 0, 0, 5), (topic, 1, 0, 0), (topic, 2, 0, 3)]
    assert isinstance(resolve_ranges(node.options(subscribe=topic)).ranges[0], OffsetRange)


def test_several_topics_by_name_and_by_pattern(node):
    for name in ("flights-1", "flights-2", "other"):
        node.topic(name, 1)
    expected = [("flights-1", 0, 0, 1), ("flights-2", 0, 0, 1)]
    assert ranges(node, subscribe="flights-2,flights-1") == expected
    assert ranges(node, subscribePattern="flights-.") == expected
    assert ranges(node, subscribePattern="lights") == expected  # found anywhere in the name, as by Spark's connector
    assert ranges(node, subscribePattern="^lights|ligh$") == []
    assert ranges(node, subscribePattern="__.*") == []  # internal topics are nobody's data


@pytest.mark.parametrize("strategy", ["subscribe", "subscribePattern"])
def test_a_read_outlives_a_broker_that_goes_away_while_it_is_planned(node, new_topic, monkeypatch, strategy):
    topic = new_topic(3)
    real, failures = Cluster.fetch_metadata, [KafkaError(ErrorCode.NETWORK_EXCEPTION) for _ in range(2)]

    async def fetch_metadata(cluster, topics, **given):
        if failures and cluster.metadata.nodes:  # it has started
            raise failures.pop()
        return await real(cluster, topics, **given)

    monkeypatch.setattr(Cluster, "fetch_metadata", fetch_metadata)
    assert ranges(node, **{strategy: topic}) == [(topic, 0, 0, 3)]
    assert not failures


@pytest.mark.parametrize("failures", [2, None])
def test_a_read_that_is_planned_while_no_broker_answers_waits_for_one(node, new_topic, failing_starts, failures):
    topic, attempts = new_topic(3), failing_starts(failures)
    if failures is None:
        with pytest.raises(KafkaError, match="no broker reached"):
            ranges(node, subscribe=topic, **{"kafka.default.api.timeout.ms": "300"})
        assert len(attempts) > 1
    else:
        assert ranges(node, subscribe=topic) == [(topic, 0, 0, 3)]


def test_assigned_partitions_only(node, new_topic):
    topic = new_topic(5, 6, 7)
    assert ranges(node, assign=f'{{"{topic}":[2,0]}}') == [(topic, 0, 0, 5), (topic, 2, 0, 7)]
    with pytest.raises(KafkaError, match=f"{topic}-3, which does not exist") as failure:
        ranges(node, assign=f'{{"{topic}":[3]}}')
    assert failure.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_topic_that_is_not_there_is_an_error_and_is_not_created(node):
    for _ in range(2):
        with pytest.raises(KafkaError, match="'nowhere' does not exist"):
            ranges(node, subscribe="nowhere")


def test_offsets_by_partition_with_earliest_and_latest_among_them(node, new_topic):
    topic = new_topic(5, 6)
    starting = by_partition(topic, 2, -2)
    ending = by_partition(topic, 4, -1)
    found = ranges(node, subscribe=topic, startingOffsets=starting, endingOffsets=ending)
    assert found == [(topic, 0, 2, 4), (topic, 1, 0, 6)]


class Counted(TopicPartition):
    """A partition that counts how often any of its kind is hashed or compared."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def test_thousands_of_named_partitions_are_each_looked_at_a_few_times():
    """A comparison of each with each took seconds for 10,000 of them, and a stream makes it at every trigger."""
    named = tuple(Counted("t", index) for index in range(1_000))
    servers = {"kafka.bootstrap.servers": "127.0.0.1:9"}
    assigned = replace(SourceOptions.parse({**servers, "assign": '{"t": [0]}'}), partitions=named)
    partitions = [MetadataResponsePartition(partition_index=index) for index in range(1_000)]
    topic = MetadataResponseTopic(name="t", partitions=partitions)
    bound = OffsetBound(dict.fromkeys(named, 5), option="startingOffsets")
    Counted.looks = 0
    assert len(offsets._all_partitions([topic], assigned)) == 1_000
    assert len(offsets.selected(assigned, named)) == 1_000
    assert offsets._incomplete(bound, named) is None
    assert Counted.looks < 30_000


def test_offsets_must_name_exactly_the_partitions_read(node, new_topic):
    topic = new_topic(5, 6)
    one = by_partition(topic, 2)
    three = by_partition(topic, 0, 0, 0)
    with pytest.raises(ConfigError, match=f"it lacks {topic}-1; use -2 for earliest"):
        ranges(node, subscribe=topic, startingOffsets=one)
    with pytest.raises(ConfigError, match=f"it lacks {topic}-1; use -1 for latest"):
        ranges(node, subscribe=topic, endingOffsets=one)
    with pytest.raises(ConfigError, match=f"partitions that are not read: {topic}-2"):
        ranges(node, subscribe=topic, startingOffsets=three)


def test_timestamps_become_the_first_offset_at_or_after_them(node, new_topic):
    topic = new_topic(10, 20)
    assert ranges(node, subscribe=topic, startingTimestamp=str(TIME + 4)) == [(topic, 0, 4, 10), (topic, 1, 4, 20)]
    times = by_partition(topic, TIME + 1, TIME + 9)
    assert ranges(node, subscribe=topic, startingOffsetsByTimestamp=times) == [(topic, 0, 1, 10), (topic, 1, 9, 20)]
    assert ranges(node, subscribe=topic, endingOffsetsByTimestamp=times) == [(topic, 0, 0, 1), (topic, 1, 0, 9)]


@pytest.fixture
def live_topic(node, new_topic, monkeypatch):
    """`live_topic(moment)`: a topic of 5 records that has 10 before or after the bounds of a read are looked up.

    The group `live` has committed 8 then.
    """

    def begin(moment):
        name, real, sizes = new_topic(5), offsets._bound_offsets, [5]

        def grow():
            for size in sizes:
                node.fill(name, 5, start=size)
                with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
                    admin.alter_group_offsets("live", {TopicPartition(name, 0): 8})
            sizes.clear()

        async def bound_offsets(cluster, options, bound, partitions):
            if moment == "before":
                grow()
            found = await real(cluster, options, bound, partitions)
            if bound.by_time:
                grow()
            return found

        monkeypatch.setattr(offsets, "_bound_offsets", bound_offsets)
        return name

    return begin


LATE = str(TIME + 8)
COMMITTED = {"startingOffsets": "committed", "startingOffsetsGroup": "live"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(COMMITTED, (8, 8)), ({"startingTimestamp": LATE}, (8, 8)), ({"endingTimestamp": LATE}, (0, 8))],
    ids=["committed", "start by time", "end by time"],
)
@pytest.mark.parametrize("is_strict", ["true", "false"])
def test_a_bound_that_moves_with_the_log_while_a_read_is_planned_is_no_data_loss(
    node, live_topic, given, expected, is_strict
):
    topic = live_topic("before")
    assert ranges(node, subscribe=topic, failOnDataLoss=is_strict, **given) == [(topic, 0, *expected)]


def test_a_read_up_to_a_time_ends_before_records_of_that_time_that_come_while_it_is_planned(node, live_topic):
    topic = live_topic("after")
    assert ranges(node, subscribe=topic, endingTimestamp=LATE) == [(topic, 0, 0, 5)]


@pytest.mark.parametrize(
    ("moment", "given", "first"),
    [
        ("before", COMMITTED, 8),
        ("before", {"startingTimestamp": LATE}, 8),
        ("after", {"startingTimestamp": LATE, "startingOffsetsByTimestampStrategy": "latest"}, 5),
    ],
    ids=["committed", "by time", "by a time that no record has yet"],
)
@pytest.mark.parametrize("is_available_now", [False, True])
def test_a_stream_passes_over_no_record_that_comes_while_its_start_is_looked_up(
    node, live_topic, moment, given, first, is_available_now
):
    """Nor does it begin before its start, where that is after the end of a run with AvailableNow."""
    topic = live_topic(moment)
    options = {"kafka.bootstrap.servers": node.bootstrap_servers, "subscribe": topic, **given}
    with closing(StreamDriver(SourceOptions.parse(options, STREAM))) as stream:
        if is_available_now:
            stream.prepare_for_available_now()
        start = stream.initial_offset()
        assert start == {topic: {"0": first}}
        assert stream.latest_offset(start) == (start if is_available_now or first == 5 else {topic: {"0": 10}})


@pytest.mark.slow
@pytest.mark.parametrize("is_pattern", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_read_is_planned_again_where_a_topic_is_gone_while_it_is_planned(
    node, new_topic, monkeypatch, caplog, moment, is_pattern
):
    """It failed where loss is tolerated, too. With a pattern the topic is deleted, else created again with less."""
    topic, real, steps = new_topic(5, 6), offsets._await_metadata, ["once"]

    async def await_metadata(cluster, options, topics):
        if moment == "after":
            await real(cluster, options, topics)
        if steps:
            steps.clear()
            with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
                admin.delete_topics([topic])
            if not is_pattern:
                node.topic(topic, 2)
        if moment == "before":
            await real(cluster, options, topics)

    monkeypatch.setattr(offsets, "_await_metadata", await_metadata)
    wanted = {"subscribePattern": f"^{topic}$"} if is_pattern else {"subscribe": topic}
    assert ranges(node, failOnDataLoss="false", **wanted) == ([] if is_pattern else [(topic, 0, 0, 2)])
    assert [message for message in caplog.messages if "the read is planned again" in message]
    if moment == "before" and not is_pattern:
        steps.append("once")
        with pytest.raises(KafkaError, match="was created again"):
            ranges(node, **wanted)


@pytest.mark.parametrize(
    "error",
    [
        KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        offsets.MissingPartition(TopicPartition("t", 0), "assign names t-0, which does not exist"),
    ],
)
def test_a_read_is_not_planned_again_behind_an_error_that_would_come_again(
    error: KafkaError, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    async def edges(*_: object) -> None:
        planned.append(error)
        raise error

    monkeypatch.setattr(offsets, "_edges", edges)
    options: Any = SimpleNamespace(starting=None, ending=None, fail_on_data_loss=False)
    cluster: Any = None
    with pytest.raises(type(error)):
        asyncio.run(offsets._edges_of_batch(cluster, options))
    assert planned == [error]


def test_a_timestamp_after_the_last_record(node, new_topic):
    topic = new_topic(10, 20)
    late = str(TIME + 15)
    assert ranges(node, subscribe=topic, endingTimestamp=late) == [(topic, 0, 0, 10), (topic, 1, 0, 15)]
    with pytest.raises(ConfigError, match=f"{topic}-0 has no record at or after {late}"):
        ranges(node, subscribe=topic, startingTimestamp=late)
    found = ranges(node, subscribe=topic, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest")
    assert found == [(topic, 0, 10, 10), (topic, 1, 15, 20)]


@pytest.mark.parametrize("bound", ["startingOffsets", "endingOffsets"])
def test_offsets_beyond_the_log_are_data_loss_or_cut_with_a_warning(node, new_topic, bound, caplog):
    topic = new_topic(5)
    beyond = {bound: by_partition(topic, 50)}
    with pytest.raises(DataLoss, match=f"{bound} of {topic}-0 is 50, but its log ends at 5.*failOnDataLoss"):
        ranges(node, subscribe=topic, **beyond)
    cut = (topic, 0, 5, 5) if bound == "startingOffsets" else (topic, 0, 0, 5)
    assert ranges(node, subscribe=topic, failOnDataLoss="false", **beyond) == [cut]
    assert [message for message in caplog.messages if "is 50, but its log ends at 5" in message]


@pytest.fixture
def open_transaction(monkeypatch):
    """Under read_committed every partition is readable up to 6 only, as when a transaction began there."""

    def begin():
        real = list_offsets

        async def of_this_isolation(cluster, timestamps, *, isolation_level="read_uncommitted", timeout_ms):
            found = await real(cluster, timestamps, timeout_ms=timeout_ms)
            if isolation_level == "read_uncommitted":
                return found
            return {partition: each and each._replace(offset=min(each.offset, 6)) for partition, each in found.items()}

        monkeypatch.setattr(offsets, "list_offsets", of_this_isolation)

    return begin


def test_offsets_above_the_last_stable_offset_are_no_data_loss(node, new_topic, open_transaction):
    topic = new_topic(10)
    open_transaction()
    committed = {"subscribe": topic, "kafka.isolation.level": "read_committed"}
    assert ranges(node, **committed) == [(topic, 0, 0, 6)]
    assert ranges(node, **committed, endingOffsets=by_partition(topic, 9)) == [(topic, 0, 0, 9)]
    assert ranges(node, **committed, startingOffsets=by_partition(topic, 8)) == [(topic, 0, 8, 8)]
    assert ranges(node, **committed, endingOffsets=by_partition(topic, 10), failOnDataLoss="false") == [
        (topic, 0, 0, 10)
    ]
    with pytest.raises(DataLoss, match="is 11, but its log ends at 10"):
        ranges(node, **committed, endingOffsets=by_partition(topic, 11))


def test_options_without_effect_are_named_in_the_log_of_a_read(node, new_topic, caplog):
    pytest.importorskip("pyspark")
    from tidelog.spark_ingest.source import TidelogReader

    options = node.options(subscribe=new_topic(1), **{"kafka.group.id": "mine"})
    assert len(TidelogReader(options, ("offset",)).partitions()) == 1
    assert caplog.messages == ["option 'kafka.group.id' has no effect on this source"]


def test_an_end_before_the_start_is_refused_as_by_sparks_connector(node, new_topic):
    topic = new_topic(9)
    starting, ending = by_partition(topic, 7), by_partition(topic, 3)
    with pytest.raises(ConfigError, match=f"startingOffsets of {topic}-0 is 7, above its endingOffsets, 3"):
        ranges(node, subscribe=topic, startingOffsets=starting, endingOffsets=ending)
    with pytest.raises(
        ConfigError, match=f"startingOffsets of {topic}-0 is offset 7, above its endingTimestamp, offset 3"
    ):
        ranges(node, subscribe=topic, startingOffsets=starting, endingTimestamp=str(TIME + 3))
