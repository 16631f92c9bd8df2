"""The driver's side of a stream against an embedded node, without Spark."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.unit.spark_ingest.conftest import TIME
from tidelog import NewTopic
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.sync import Admin, Consumer
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.spark_ingest import offsets as offsets_module
from tidelog.spark_ingest import stream as stream_module
from tidelog.spark_ingest.offsets import DataLoss, PresentEnds, find_ends
from tidelog.spark_ingest.option_table import STREAM
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.stream import StreamDriver


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


@contextmanager
def driver(node, *, clock=None, **options: str) -> Iterator[StreamDriver]:
    parsed = SourceOptions.parse({"kafka.bootstrap.servers": node.bootstrap_servers, **options}, STREAM)
    with closing(StreamDriver(parsed, clock or Clock())) as stream:
        yield stream


def admin(node) -> Admin:
    return Admin(bootstrap_servers=node.bootstrap_servers)


def test_a_new_stream_begins_at_the_end_by_default(node, new_topic):
    topic = new_topic(5, 0)
    with driver(node, subscribe=topic) as stream:
        first = stream.initial_offset()
        assert first == {topic: {"0": 5, "1": 0}}
        assert stream.latest_offset(first) is first
        node.fill(topic, 2, 1, start=5)
        assert stream.initial_offset() == first
        latest = stream.latest_offset(first)
        assert latest == {topic: {"0": 7, "1": 1}}
        assert stream.reported_offset() == latest
        assert stream.ranges(first, latest) == [(topic, 0, 5, 7), (topic, 1, 0, 1)]


def test_the_offset_is_a_value_of_json(node, new_topic):
    topic = new_topic(3, 4)
    with driver(node, subscribe=topic, startingOffsets="earliest") as stream:
        first = stream.initial_offset()
        assert json.loads(json.dumps(first)) == first
        # Spark hands back what it has read from its log.
        assert stream.latest_offset(json.loads(json.dumps(first))) == {topic: {"0": 3, "1": 4}}


def test_the_beginning_may_be_offsets_or_times(node, new_topic):
    topic = new_topic(5, 6)
    offsets = json.dumps({topic: {"0": 2, "1": -1}})
    with driver(node, subscribe=topic, startingOffsets=offsets) as stream:
        assert stream.initial_offset() == {topic: {"0": 2, "1": 6}}
    with driver(node, subscribe=topic, startingTimestamp=str(1_700_000_000_003)) as stream:
        assert stream.initial_offset() == {topic: {"0": 3, "1": 3}}


def test_a_batch_is_at_most_the_limit(node, new_topic):
    topic = new_topic(100, 10)
    with driver(node, subscribe=topic, startingOffsets="earliest") as stream:
        offset, batches = stream.initial_offset(), 0
        while (latest := stream.latest_offset(offset, max_offsets=50)) is not offset:
            assert sum(each.size for each in stream.ranges(offset, latest)) <= 50
            offset, batches = latest, batches + 1
    assert (offset, batches) == ({topic: {"0": 100, "1": 10}}, 3)


def test_a_batch_waits_for_its_minimum_and_is_cut_to_its_maximum(node, new_topic):
    topic, clock = new_topic(10), Clock()
    with driver(node, clock=clock, subscribe=topic, startingOffsets="earliest", maxTriggerDelay="60s") as stream:

        def latest(start):
            return stream.latest_offset(start, min_offsets=8, max_offsets=9)

        offset = latest(stream.initial_offset())
        assert offset == {topic: {"0": 9}}
        assert latest(offset) is offset  # one offset is not enough
        clock.now_ms = 59_999
        assert latest(offset) is offset
        clock.now_ms = 60_000
        assert latest(offset) == {topic: {"0": 10}}
        offset = {topic: {"0": 10}}
        assert latest(offset) is offset
        node.fill(topic, 30, start=10)
        assert latest(offset) == {topic: {"0": 19}}


def test_available_now_ends_where_the_logs_ended(node, new_topic):
    topic = new_topic(5)
    with driver(node, subscribe=topic, startingOffsets="earliest", minOffsetsPerTrigger="50") as stream:
        stream.prepare_for_available_now()
        node.fill(topic, 5, start=5)
        with admin(node) as client:
            client.create_partitions({topic: 2})
        offset = stream.latest_offset(stream.initial_offset(), max_offsets=3, min_offsets=50)
        assert offset == {topic: {"0": 3}}
        offset = stream.latest_offset(offset, max_offsets=3, min_offsets=50)
        assert offset == {topic: {"0": 5}}
        assert stream.latest_offset(offset, max_offsets=3, min_offsets=50) is offset


def test_available_now_from_the_end_reads_nothing_though_records_come(node, new_topic):
    topic = new_topic(5)
    with driver(node, subscribe=topic) as stream:
        stream.prepare_for_available_now()
        node.fill(topic, 5, start=5)
        first = stream.initial_offset()
        assert first == {topic: {"0": 5}}
        assert stream.latest_offset(first) is first


def test_new_partitions_and_topics_are_found(node, new_topic):
    topic = new_topic(2)
    with driver(node, subscribePattern=f"^{topic}", startingOffsets="latest") as stream:
        first = stream.initial_offset()
        assert first == {topic: {"0": 2}}
        with admin(node) as client:
            client.create_partitions({topic: 3})
        node.topic(f"{topic}-more", 4)
        node.fill(topic, 0, 0, 6)
        assert stream.latest_offset(first) == first  # the first micro-batch is empty
        latest = stream.latest_offset(first)
        assert latest == {topic: {"0": 2, "1": 0, "2": 6}, f"{topic}-more": {"0": 4}}
        assert stream.ranges(first, latest) == [(topic, 2, 0, 6), (f"{topic}-more", 0, 0, 4)]


def test_a_pattern_without_a_topic_waits_for_one(node, new_topic):
    with driver(node, subscribePattern="^waited-for$") as stream:
        first = stream.initial_offset()
        assert first == {}
        assert stream.latest_offset(first) is first
        assert stream.reported_offset() is None
        node.topic("waited-for", 3)
        assert stream.latest_offset(first) == {"waited-for": {"0": 3}}


def trim(node, topic: str, offset: int) -> None:
    with admin(node) as client:
        client.delete_records({TopicPartition(topic, 0): offset})


def test_a_new_partition_without_its_first_records_is_data_loss(node, new_topic):
    topic = new_topic(9)
    trim(node, topic, 4)
    end = {topic: {"0": 9}}
    for options in ({"subscribe": topic}, {"subscribePattern": f"^{topic}$"}):
        with driver(node, **options) as stream:
            with pytest.raises(DataLoss, match=f"the new {topic}-0 begins at 4 instead of 0"):
                stream.latest_offset({})
            with pytest.raises(DataLoss, match="begins at 4"):
                stream.ranges({}, end)
    with driver(node, subscribe=topic, failOnDataLoss="false") as stream:
        assert stream.latest_offset({}) == end
        assert stream.ranges({}, end) == [(topic, 0, 4, 9)]


@pytest.mark.slow
def test_a_deleted_topic_is_data_loss_or_leaves_the_stream(node, new_topic):
    topic = new_topic(2)
    for fails in ("true", "false"):
        node.topic(f"{topic}-gone", 5)
        both = f"{topic},{topic}-gone"
        with driver(node, subscribe=both, startingOffsets="earliest", failOnDataLoss=fails) as stream:
            first = stream.initial_offset()
            with admin(node) as client:
                client.delete_topics([f"{topic}-gone"])
            if fails == "true":
                with pytest.raises(KafkaError, match=f"topic '{topic}-gone' does not exist"):
                    stream.latest_offset(first)
                continue
            latest = stream.latest_offset(first)
            assert latest == {topic: {"0": 2}}
            assert stream.ranges(first, latest) == [(topic, 0, 0, 2)]
            node.topic(f"{topic}-gone", 3)
            again = stream.latest_offset(latest)
            assert stream.ranges(latest, again) == [(f"{topic}-gone", 0, 0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("is_subscribed", [True, False])
def test_a_new_topic_that_is_deleted_before_its_batch_is_replayed_leaves_the_batch_where_loss_is_tolerated(
    node, new_topic, is_subscribed
):
    topic = new_topic(2)
    node.topic(f"{topic}-gone", 4)
    with admin(node) as client:
        client.delete_topics([f"{topic}-gone"])
    start, end = {topic: {"0": 0}}, {topic: {"0": 2}, f"{topic}-gone": {"0": 4}}
    names = {"subscribe": f"{topic},{topic}-gone"} if is_subscribed else {"subscribePattern": f"^{topic}"}
    limits = {"kafka.default.api.timeout.ms": "2000"}
    with driver(node, **names, **limits, failOnDataLoss="false") as stream:
        assert stream.ranges(start, end) == [(topic, 0, 0, 2)]
    with driver(node, **names, **limits) as stream, pytest.raises(KafkaError, match=f"'{topic}-gone' does not exist"):
        stream.ranges(start, end)


def lag_once(monkeypatch, name: str, topic: str) -> list[str]:
    """Let the first answer of a look at the cluster lack this topic, as that of a broker that lags behind."""
    real = getattr(stream_module, name)
    lagged: list[str] = []

    async def look(cluster, options, *given):
        found = await real(cluster, options, *given)
        if lagged:
            return found
        lagged.append(topic)
        if name == "find_log_starts":
            return {each: offset for each, offset in found.items() if each.topic != topic}
        return PresentEnds(
            *({key: value for key, value in each.items() if topic not in (key, key[0])} for each in found)
        )

    monkeypatch.setattr(stream_module, name, look)
    return lagged


@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("is_available_now", [True, False])
def test_a_topic_that_one_broker_does_not_know_yet_stays_in_the_stream(
    node, new_topic, monkeypatch, fails, is_available_now
):
    topic = new_topic(5)
    lagged = lag_once(monkeypatch, "find_ends", topic)
    with driver(node, subscribePattern=f"^{topic}$", failOnDataLoss=fails) as stream:
        if is_available_now:
            stream.prepare_for_available_now()
        assert stream.latest_offset({topic: {"0": 3}}) == {topic: {"0": 5}}
    assert lagged


@pytest.mark.parametrize("step", ["initial_offset", "prepare_for_available_now", "latest_offset", "ranges"])
@pytest.mark.parametrize("strategy", ["subscribe", "assign"])
def test_a_named_topic_that_one_broker_does_not_know_yet_ends_no_stream(node, new_topic, monkeypatch, strategy, step):
    topic, real, lagging = new_topic(5, 2), Cluster.fetch_metadata, 4  # the first attempt and the retries of one look

    async def fetch_metadata(cluster, topics, **given):
        nonlocal lagging
        answer = await real(cluster, topics, **given)
        if topics and not given and lagging:
            lagging -= 1
            for each in answer.topics:
                each.error_code, each.partitions = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), []
        return answer

    monkeypatch.setattr(Cluster, "fetch_metadata", fetch_metadata)
    names = {"subscribe": topic, "assign": json.dumps({topic: [1]})}
    start = {"subscribe": {topic: {"0": 5}}, "assign": {}}[strategy]
    end = {"subscribe": {topic: {"0": 5, "1": 2}}, "assign": {topic: {"1": 2}}}[strategy]
    with driver(node, **{strategy: names[strategy]}) as stream:
        found = getattr(stream, step)(*{"latest_offset": [start], "ranges": [start, end]}.get(step, ()))
    results = {"initial_offset": end, "latest_offset": end, "ranges": [(topic, 1, 0, 2)]}
    assert found == results.get(step)
    assert not lagging


def test_a_new_topic_that_one_broker_does_not_know_yet_stays_in_its_batch(node, new_topic, monkeypatch):
    topic = new_topic(5)
    lagged = lag_once(monkeypatch, "find_log_starts", topic)
    with driver(node, subscribe=topic, failOnDataLoss="false") as stream:
        assert stream.ranges({}, {topic: {"0": 5}}) == [(topic, 0, 0, 5)]
    assert lagged


def test_a_topic_that_is_not_subscribed_any_more_leaves_the_stream(node, new_topic):
    topic = new_topic(5)
    other = f"{topic}-other"
    node.topic(other, 2)
    with driver(node, subscribe=topic, failOnDataLoss="false") as stream:
        assert stream.latest_offset({topic: {"0": 3}, other: {"0": 1}}) == {topic: {"0": 5}}


def test_a_topic_that_is_not_subscribed_any_more_is_not_called_gone(node, new_topic):
    topic = new_topic(5)
    other = f"{topic}-other"
    node.topic(other, 2)
    expected = f"{other}-0 is not in subscribe, subscribePattern or assign any more"
    with driver(node, subscribe=topic) as stream, pytest.raises(DataLoss, match=expected):
        stream.latest_offset({topic: {"0": 3}, other: {"0": 1}})


def create_again(node, topic: str, size: int) -> None:
    with admin(node) as client:
        client.delete_topics([topic])
    node.topic(topic, size)


@pytest.mark.parametrize("size", [2, 9])
def test_a_topic_created_again_is_data_loss_however_many_records_it_has(node, new_topic, size):
    topic = new_topic(5)
    with driver(node, subscribe=topic) as stream:
        first = stream.initial_offset()
        create_again(node, topic, size)
        with pytest.raises(DataLoss, match=f"{topic}-0 was deleted and created again; the stream was at offset 5"):
            stream.latest_offset(first)


@pytest.mark.parametrize("size", [0, 2, 9])
def test_a_topic_created_again_is_read_from_its_beginning_where_loss_is_tolerated(node, new_topic, size):
    topic = new_topic(5)
    with driver(node, subscribe=topic, failOnDataLoss="false") as stream:
        first = stream.initial_offset()
        create_again(node, topic, size)
        beginning = stream.latest_offset(first)
        assert beginning == {topic: {"0": 0}}
        assert stream.ranges(first, beginning) == []
        latest = stream.latest_offset(beginning)
        assert latest == {topic: {"0": size}}
        assert [each.size for each in stream.ranges(beginning, latest)] == ([size] if size else [])


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 2, 9])
def test_available_now_ends_at_the_end_of_a_topic_that_was_created_again_where_loss_is_tolerated(node, new_topic, size):
    topic = new_topic(5)
    with driver(node, subscribe=topic, startingOffsets="earliest", failOnDataLoss="false") as stream:
        stream.prepare_for_available_now()
        offset = stream.latest_offset(stream.initial_offset(), max_offsets=1)
        create_again(node, topic, size)
        offset = stream.latest_offset(offset, max_offsets=1)
        assert offset == {topic: {"0": 0}}
        node.fill(topic, 20, start=size)  # after the end of the run
        for end in range(1, size + 1):
            offset = stream.latest_offset(offset, max_offsets=1)
            assert offset == {topic: {"0": end}}
        assert stream.latest_offset(offset, max_offsets=1) is offset


@pytest.mark.parametrize("is_created_again", [True, False])
def test_available_now_notices_that_a_topic_was_deleted(node, new_topic, is_created_again):
    topic = new_topic(5)
    with driver(node, subscribePattern=f"^{topic}", startingOffsets="earliest") as stream:
        stream.prepare_for_available_now()
        offset = stream.latest_offset(stream.initial_offset(), max_offsets=1)
        if is_created_again:
            create_again(node, topic, 9)
        else:
            with admin(node) as client:
                client.delete_topics([topic])
        with pytest.raises(DataLoss, match="was deleted and created again" if is_created_again else "is gone"):
            stream.latest_offset(offset, max_offsets=1)


def test_available_now_reads_a_new_topic_that_a_broker_behind_the_others_does_not_know_yet(
    node, new_topic, monkeypatch
):
    topic = new_topic(5)
    new = f"{topic}-new"
    with admin(node) as client:
        client.create_topics([NewTopic(new)])
    node.fill(new, 3)
    with driver(node, subscribePattern=f"^{topic}", startingOffsets="earliest") as stream:
        stream.prepare_for_available_now()

        async def find_before(*arguments):
            ends = await find_ends(*arguments)
            ids = {topic: ends.topic_ids[topic]}
            return PresentEnds({each: end for each, end in ends.offsets.items() if each.topic in ids}, ids)

        with monkeypatch.context() as patch:
            patch.setattr("tidelog.spark_ingest.stream.find_ends", find_before)
            offset = stream.latest_offset({topic: {"0": 0}}, max_offsets=1)
        assert offset == {topic: {"0": 1}}
        node.fill(new, 20, start=3)  # after the end of the run
        assert stream.latest_offset(offset) == {topic: {"0": 5}, new: {"0": 3}}


def test_committed_offsets_are_a_beginning(node, new_topic):
    topic = new_topic(5, 6)
    with admin(node) as client:
        client.alter_group_offsets(f"group-{topic}", {TopicPartition(topic, 1): 4})
    committed = {"subscribe": topic, "startingOffsets": "committed", "kafka.group.id": f"group-{topic}"}
    with driver(node, **committed) as stream:
        assert stream.initial_offset() == {topic: {"0": 0, "1": 4}}
    with driver(node, **committed, startingOffsetsWithoutCommit="latest") as stream:
        assert stream.initial_offset() == {topic: {"0": 5, "1": 4}}


def test_committed_offsets_that_are_gone_are_data_loss(node, new_topic):
    topic = new_topic(5)
    with admin(node) as client:
        client.alter_group_offsets(f"group-{topic}", {TopicPartition(topic, 0): 1})
    trim(node, topic, 3)
    committed = {"subscribe": topic, "startingOffsets": "committed", "startingOffsetsGroup": f"group-{topic}"}
    with driver(node, **committed) as stream, pytest.raises(DataLoss, match="is 1, but its log begins at 3"):
        stream.initial_offset()
    with driver(node, **committed, failOnDataLoss="false") as stream:
        assert stream.initial_offset() == {topic: {"0": 3}}


def committed_of(node, group: str) -> dict[TopicPartition, int]:
    with admin(node) as client:
        return {partition: each.offset for partition, each in client.list_group_offsets(group).items()}


def test_progress_is_committed_for_a_group_once_it_is_processed(node, new_topic):
    topic = new_topic(5)
    group, partition = f"lag-{topic}", TopicPartition(topic, 0)
    with driver(node, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=group) as stream:
        first = stream.initial_offset()
        latest = stream.latest_offset(first, max_offsets=3)
        stream.ranges(first, latest)
        assert committed_of(node, group) == {partition: 0}  # the batch is planned, and not processed yet
        stream.commit(latest)
        assert committed_of(node, group) == {partition: 3}
        # Spark never calls `commit` for the last batch, but it asks for more once that is processed.
        end = stream.latest_offset(latest)
        assert stream.latest_offset(end) is end
        assert committed_of(node, group) == {partition: 5}


def test_a_group_with_members_takes_no_progress(node, new_topic):
    topic = new_topic(1)
    group = f"members-{topic}"
    with Consumer(
        topic, bootstrap_servers=node.bootstrap_servers, group_id=group, auto_offset_reset="earliest"
    ) as member:
        assert next(iter(member)).offset == 0
        with driver(node, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=group) as stream:
            with pytest.raises(KafkaError, match=f"group '{group}' takes no commits; it has members") as failure:
                stream.latest_offset(stream.initial_offset())
            assert failure.value.code is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_refusal_of_progress_says_its_cause(node, new_topic, monkeypatch):
    async def refuse(cluster, options, offsets):
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, "the broker has no version of OffsetCommit")

    monkeypatch.setattr(stream_module, "commit_offsets", refuse)
    topic = new_topic(1)
    cause = "group 'g' takes no commits: the broker has no version of OffsetCommit"
    with (
        driver(node, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup="g") as stream,
        pytest.raises(KafkaError, match=cause),
    ):
        stream.latest_offset(stream.initial_offset())


def test_errors_that_pass_are_outlived_and_others_are_not(node, new_topic, monkeypatch):
    topic = new_topic(5)
    real, errors = offsets_module.find_ends, [ErrorCode.NETWORK_EXCEPTION, ErrorCode.NOT_LEADER_OR_FOLLOWER]

    async def find_ends(cluster, options):
        if errors:
            raise KafkaError(errors.pop(), "a broker is down")
        return await real(cluster, options)

    monkeypatch.setattr(stream_module, "find_ends", find_ends)
    with driver(node, subscribe=topic, startingOffsets="earliest") as stream:
        first = stream.initial_offset()
        assert stream.latest_offset(first) == {topic: {"0": 5}}
        errors.append(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(KafkaError, match="a broker is down"):
            stream.latest_offset(first)


def test_an_outage_ends_a_stream_when_its_time_is_up(node, new_topic, monkeypatch):
    attempts = []

    async def find_ends(cluster, options):
        attempts.append(1)
        raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "all brokers are down")

    monkeypatch.setattr(stream_module, "find_ends", find_ends)
    with driver(node, subscribe=new_topic(1), **{"kafka.default.api.timeout.ms": "500"}) as stream:
        first = stream.initial_offset()
        with pytest.raises(KafkaError, match="all brokers are down"):
            stream.latest_offset(first)
    assert len(attempts) > 1


@pytest.mark.parametrize("step", ["initial_offset", "prepare_for_available_now"])
@pytest.mark.parametrize("failures", [2, None])
def test_a_stream_that_starts_while_no_broker_answers_waits_for_one(node, new_topic, failing_starts, step, failures):
    topic, attempts = new_topic(5), failing_starts(failures)
    limit = {} if failures else {"kafka.default.api.timeout.ms": "500"}
    with driver(node, subscribe=topic, startingOffsets="earliest", **limit) as stream:
        if failures is None:
            with pytest.raises(KafkaError, match="no broker reached"):
                getattr(stream, step)()
            assert len(attempts) > 1
        else:
            getattr(stream, step)()
            assert stream.latest_offset(stream.initial_offset()) == {topic: {"0": 5}}


def test_a_commit_that_fails_later_is_a_warning_and_the_stream_goes_on(node, new_topic, monkeypatch, caplog):
    topic = new_topic(5)
    real, errors = offsets_module.commit_offsets, [ErrorCode.NONE, ErrorCode.GROUP_AUTHORIZATION_FAILED]

    async def commit_offsets(cluster, options, offsets):
        if errors and (code := errors.pop(0)):
            raise KafkaError(code, "no")
        await real(cluster, options, offsets)

    monkeypatch.setattr(stream_module, "commit_offsets", commit_offsets)
    group = f"warned-{topic}"
    with driver(node, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=group) as stream:
        first = stream.initial_offset()
        latest = stream.latest_offset(first)
        stream.commit(latest)
        assert any(f"could not be committed for group '{group}'" in message for message in caplog.messages)
        assert stream.latest_offset(latest) is latest
    assert committed_of(node, group) == {TopicPartition(topic, 0): 5}


def test_an_idle_stream_tries_commits_that_fail_ever_less_often(node, new_topic, monkeypatch):
    topic, clock, attempts = new_topic(5), Clock(), []

    async def commit_offsets(cluster, options, offsets):
        attempts.append(clock.now_ms)
        if 1 < len(attempts) < 20:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, "a member has joined")

    monkeypatch.setattr(stream_module, "commit_offsets", commit_offsets)
    with driver(
        node, clock=clock, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=f"busy-{topic}"
    ) as stream:
        latest = stream.latest_offset(stream.initial_offset())
        while len(attempts) < 20:
            stream.commit(latest)
            clock.now_ms += 100
        pauses = [after - before for before, after in itertools.pairwise(attempts)]
        assert pauses == sorted(pauses)
        assert pauses[-1] == 60_000
        stream.commit({topic: {"0": 4}})  # after a success nothing is put off
    assert len(attempts) == 21


@pytest.mark.parametrize("stale_answers", [2, 99])
def test_a_leader_that_does_not_know_yet_what_is_committed_is_asked_again(node, new_topic, monkeypatch, stale_answers):
    topic, answers = new_topic(5), 0
    real = offsets_module.find_ends

    async def find_ends(cluster, options):
        nonlocal answers
        answers += 1
        present = await real(cluster, options)
        return present._replace(offsets={TopicPartition(topic, 0): 3}) if answers <= stale_answers else present

    monkeypatch.setattr(stream_module, "find_ends", find_ends)
    with driver(node, subscribe=topic, **{"fetchOffset.numRetries": "2"}) as stream:
        first = stream.initial_offset()
        if stale_answers == 2:
            assert stream.latest_offset(first) is first
        else:
            with pytest.raises(DataLoss, match=f"{topic}-0 ends at 3, before offset 5 of the stream"):
                stream.latest_offset(first)
    assert answers == 3


@pytest.mark.parametrize("starting", ["latest", "earliest", "by partition"])
def test_the_first_micro_batch_runs_again_as_it_was(node, new_topic, starting):
    """Spark keeps its end alone. A restart finds more partitions and later ends: the query could not go on for good."""
    topic = new_topic(5, 5)
    offsets = {"by partition": json.dumps({topic: {"0": 2, "1": -1}})}.get(starting, starting)
    options = {"subscribe": topic} if starting == "by partition" else {"subscribePattern": f"^{topic}"}
    with driver(node, **options, startingOffsets=offsets) as stream:
        first = stream.initial_offset()
        node.fill(topic, 1, 1)  # before the first look
        end = json.loads(json.dumps(stream.latest_offset(first)))
        ranges = stream.ranges(first, end)
    assert ranges == {
        "latest": [], "earliest": [(topic, 0, 0, 6), (topic, 1, 0, 6)], "by partition": [(topic, 0, 2, 6)],
    }[starting]  # fmt: skip
    node.fill(topic, 2, 2)
    if starting != "by partition":
        node.topic(f"{topic}-more", 4)
    with driver(node, **options, startingOffsets=offsets) as stream:
        assert stream.ranges(stream.initial_offset(), end) == ranges
        read = stream.ranges(end, stream.latest_offset(end))
    new = [] if starting == "by partition" else [(f"{topic}-more", 0, 0, 4)]
    assert read == [*((topic, number, end[topic][str(number)], 8) for number in (0, 1)), *new]


@pytest.mark.parametrize("kind", ["by time", "by time, none matches", "no commit", "a commit that moves"])
def test_the_first_micro_batch_runs_again_where_a_restart_finds_a_later_start(node, new_topic, kind):
    topic = new_topic(5, 5)
    group = f"first-{topic}"
    at_time = {"startingTimestamp": str(TIME + 3), "startingOffsetsByTimestampStrategy": "latest"}
    options, ranges = {
        "by time": (at_time, [(topic, 0, 3, 5), (topic, 1, 3, 5)]),
        "by time, none matches": (at_time | {"startingTimestamp": str(TIME + 100)}, []),
        "no commit": ({"startingOffsets": "committed", "startingOffsetsWithoutCommit": "latest"}, [(topic, 1, 2, 5)]),
        "a commit that moves": ({"startingOffsets": "committed"}, [(topic, 0, 0, 5), (topic, 1, 2, 5)]),
    }[kind]  # fmt: skip
    options |= {"subscribePattern": f"^{topic}"} | ({} if "time" in kind else {"startingOffsetsGroup": group})
    with admin(node) as client:
        client.alter_group_offsets(group, {TopicPartition(topic, 1): 2})
        with driver(node, **options) as stream:
            first = stream.initial_offset()
            node.topic(f"{topic}-early", 4)
            end = stream.latest_offset(first)
            assert stream.ranges(first, end) == ranges
        node.fill(topic, 3, 3)
        if kind == "a commit that moves":
            client.alter_group_offsets(group, {TopicPartition(topic, 0): 7})
            ranges = ranges[1:]  # the group has read the others meanwhile
    with driver(node, **options) as stream:
        assert stream.ranges(stream.initial_offset(), end) == ranges
        read = stream.ranges(end, stream.latest_offset(end))
    assert read == [(topic, 0, 5, 8), (topic, 1, 5, 8), (f"{topic}-early", 0, 0, 4)]


def starts_of_named_partitions(topic: str) -> dict[str, dict[str, str]]:
    """Options that give a partition that is added no start, by kind."""
    times = json.dumps({topic: {"0": TIME + 2, "1": TIME + 2}})
    committed = {"startingOffsetsGroup": f"named-{topic}", "startingOffsetsWithoutCommit": "error"}
    return {
        "offsets": {"startingOffsets": json.dumps({topic: {"0": 2, "1": 2}})},
        "latest": {"startingOffsets": json.dumps({topic: {"0": 2, "1": -1}})},
        "time": {"startingTimestamp": str(TIME + 2)},
        "times": {"startingOffsetsByTimestamp": times},
        "commits": {"startingOffsets": "committed", **committed},
    }


@pytest.mark.parametrize("added", ["a partition", "a topic"])
@pytest.mark.parametrize("kind", ["offsets", "latest", "time", "times", "commits"])
def test_partitions_that_the_options_give_no_start_refuse_no_restart_in_the_first_micro_batch(
    node, new_topic, kind, added
):
    topic = new_topic(5, 5)
    options = {"subscribePattern": f"^{topic}", **starts_of_named_partitions(topic)[kind]}
    new = TopicPartition(topic, 2) if added == "a partition" else TopicPartition(f"{topic}-more", 0)
    with admin(node) as client:
        client.alter_group_offsets(f"named-{topic}", {TopicPartition(topic, 0): 2, TopicPartition(topic, 1): 2})
        with driver(node, **options) as stream:
            first = stream.initial_offset()
            end = stream.latest_offset(first)
            ranges = stream.ranges(first, end)
        assert [each.partition for each in ranges] == ([0] if kind == "latest" else [0, 1])
        client.create_partitions({topic: 3}) if added == "a partition" else node.topic(new.topic, 0)
    with driver(node, **options) as stream:
        assert stream.ranges(stream.initial_offset(), end) == ranges
        now = stream.latest_offset(end)
        with pytest.raises(ConfigError, match=str(new)), driver(node, **options) as new_query:
            new_query.latest_offset(new_query.initial_offset())  # a new query needs a start of each
        node.fill(new.topic, *[0] * new.partition, 1)
        assert stream.ranges(now, stream.latest_offset(now)) == [(*new, 0, 1)]


def test_a_partition_without_a_start_that_is_in_the_first_micro_batch_refuses_its_restart(node, new_topic):
    topic = new_topic(5, 5)
    options = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 2}})}
    with driver(node, **options) as stream, pytest.raises(ConfigError, match=f"{topic}-1"):
        stream.ranges(stream.initial_offset(), {topic: {"0": 5, "1": 5}})


@pytest.mark.parametrize("starting", ["time", "earliest"])
def test_a_partition_that_is_added_before_the_first_look_waits_for_the_next_micro_batch(node, new_topic, starting):
    """A restart would look for its start by time, or not have one."""
    topic = new_topic(5)
    options = {"time": {"startingTimestamp": str(TIME + 2)}, "earliest": {"startingOffsets": "earliest"}}[starting]
    with driver(node, subscribe=topic, **options) as stream:
        first = stream.initial_offset()
        with admin(node) as client:
            client.create_partitions({topic: 2})
        node.fill(topic, 0, 4)
        end = stream.latest_offset(first)
        assert end == {topic: {"0": 5}}
        read = [(topic, 1, 0, 4)]
        assert stream.ranges(end, stream.latest_offset(end)) == read
    with driver(node, subscribe=topic, **options) as stream:
        assert stream.ranges(stream.initial_offset(), end) == [(topic, 0, 2 if starting == "time" else 0, 5)]
        assert stream.ranges(end, stream.latest_offset(end)) == read


@pytest.mark.slow
def test_a_topic_that_is_deleted_leaves_the_first_micro_batch_where_loss_is_tolerated(node, new_topic):
    topic = new_topic(5)
    node.topic(f"{topic}-gone", 3)
    options = {"subscribe": f"{topic},{topic}-gone", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    with driver(node, **options) as stream:
        end = stream.latest_offset(stream.initial_offset())
    with admin(node) as client:
        client.delete_topics([f"{topic}-gone"])
    with driver(node, **options) as stream:
        assert stream.ranges(stream.initial_offset(), end) == [(topic, 0, 0, 5)]
        assert stream.latest_offset(end) == {topic: {"0": 5}}
    with driver(node, **options) as stream, pytest.raises(KafkaError, match="does not exist"):
        stream.latest_offset(stream.initial_offset())  # a new query needs its topics


@pytest.mark.slow
def test_a_partition_without_a_start_is_named_also_where_a_topic_is_gone(node, new_topic):
    """The topic refuses no restart where loss is tolerated, and its name would lead astray."""
    topic = new_topic(5, 5)
    options = {"subscribe": f"{topic},gone", "startingOffsets": json.dumps({topic: {"0": 2}})}
    with driver(node, **options, failOnDataLoss="false") as stream:
        first = stream.initial_offset()
        with pytest.raises(ConfigError, match=f"lacks {topic}-1"):
            stream.ranges(first, {topic: {"0": 5, "1": 5}})
    with (
        driver(node, **options, failOnDataLoss="false") as new_query,
        pytest.raises(KafkaError, match="does not exist"),
    ):
        new_query.latest_offset(new_query.initial_offset())


def test_records_of_a_time_that_are_gone_refuse_no_restart_where_loss_is_tolerated(node, new_topic):
    topic = new_topic(5, 5)
    options = {"subscribe": topic, "startingTimestamp": str(TIME + 2)}
    with driver(node, **options) as stream:
        end = stream.latest_offset(stream.initial_offset())
    trim(node, topic, 5)
    with driver(node, **options) as stream, pytest.raises(ConfigError, match=f"{topic}-0 has no record"):
        stream.ranges(stream.initial_offset(), end)
    with driver(node, **options, failOnDataLoss="false") as stream:
        assert stream.ranges(stream.initial_offset(), end) == [(topic, 1, 2, 5)]
        assert stream.latest_offset(end) == end
    with (
        driver(node, **options, failOnDataLoss="false") as new_query,
        pytest.raises(ConfigError, match="has no record"),
    ):
        new_query.latest_offset(new_query.initial_offset())


@pytest.mark.parametrize("options", [{}, {"startingTimestamp": str(TIME + 9)}], ids=["latest", "time"])
def test_a_topic_with_fewer_records_than_before_has_none_in_a_first_micro_batch_from_its_end(node, new_topic, options):
    """A task would wait for offsets that do not come."""
    topic = new_topic(5)
    options = {"subscribe": topic, "startingOffsetsByTimestampStrategy": "latest", **options}
    with driver(node, **options) as stream:
        end = stream.latest_offset(stream.initial_offset())
    with admin(node) as client:
        client.delete_topics([topic])
    node.topic(topic, 2)
    with driver(node, **options) as stream:
        assert stream.ranges(stream.initial_offset(), end) == []
        with pytest.raises(DataLoss, match="ends at 2, before offset 5"):
            stream.latest_offset(end)


def test_records_that_retention_took_from_the_first_micro_batch_are_a_loss_when_it_runs_again(node, new_topic):
    topic = new_topic(5)
    with driver(node, subscribe=topic, startingOffsets="earliest") as stream:
        end = stream.latest_offset(stream.initial_offset())
    node.fill(topic, 3)
    trim(node, topic, 7)
    with (
        driver(node, subscribe=topic, startingOffsets="earliest") as stream,
        pytest.raises(DataLoss, match="went back"),
    ):
        stream.ranges(stream.initial_offset(), end)


@pytest.mark.parametrize("starting", [{"startingOffsets": "earliest"}, {"startingTimestamp": str(TIME + 1)}])
def test_records_that_retention_may_have_taken_from_the_first_micro_batch_are_a_warning(
    node, new_topic, starting, caplog
):
    """Spark keeps no start of it, so the first offset of the log may be the start of its first run."""
    topic = new_topic(5, 5)
    with driver(node, subscribe=topic, **starting) as stream:
        first = stream.initial_offset()
        end = stream.latest_offset(first)
        stream.ranges(first, end)
    assert not caplog.messages
    trim(node, topic, 3)
    with driver(node, subscribe=topic, **starting) as stream:
        begins = stream.initial_offset()
        assert stream.ranges(begins, end)[0] == (topic, 0, 3, 5)
        assert [message for message in caplog.messages if "are lost" in message] == [
            f"the first micro-batch runs again from where the logs begin now: {topic}-0 at 3. Records that retention "
            "has removed since its first run are lost"
        ]
