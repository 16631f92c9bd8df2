"""A consumer whose leader changes: no record is passed over when the new one has another log (KIP-320)."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, consumer, fill, read, until
from tidelog.client import LogTruncation, OffsetAndMetadata
from tidelog.client.consuming.subscription import LEFT_PARTITIONS_MAX, Subscription
from tidelog.client.model import TopicPartition
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchResponse, OffsetFetchResponseGroup
from tidelog.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)

NO_DIVERGENCE_IN_FETCH = {1: (4, 11)}
NO_EPOCHS_ASKED = {23: (0, -1)}
"""As a broker that answers no OffsetForLeaderEpoch."""
EITHER_WAY = pytest.mark.parametrize("versions", [{}, NO_DIVERGENCE_IN_FETCH, NO_EPOCHS_ASKED])
RESETS = pytest.mark.parametrize("reset", ["earliest", "latest"])


def elect_uncleanly(cluster: FakeCluster, node_id: int, end_offset: int, then_written: int) -> None:
    """A replica with this much leads, and as many records are written as make the old positions exist again."""
    cluster.topics["t"][0].truncate(end_offset)
    cluster.move_leader("t", 0, node_id)
    fill(cluster, "t", 0, then_written)


class TestAfterAnUncleanElection:
    @EITHER_WAY
    @RESETS
    async def test_the_position_goes_back_to_where_the_log_differs(self, versions, reset):
        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.versions = dict(versions)
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset=reset) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
                elect_uncleanly(cluster, 2, 3, 12)
                assert await read(consuming, 12) == list(range(3, 15)), "3 to 8 were written anew and never read"

    @EITHER_WAY
    async def test_without_a_reset_policy_it_is_an_error_until_a_seek(self, versions):
        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.versions = dict(versions)
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset="none") as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
                elect_uncleanly(cluster, 2, 3, 12)
                for _ in range(3):
                    with pytest.raises(LogTruncation, match="t-0: the log differs from 3 on") as caught:
                        await read(consuming, 1)
                    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
                    assert caught.value.partition == T0
                    assert caught.value.position == OffsetAndMetadata(9, "", 0)
                    assert caught.value.divergent_offset == OffsetAndMetadata(3, "", 0)
                assert caught.value.divergent_offset is not None
                consuming.seek(T0, caught.value.divergent_offset)
                assert await read(consuming, 12) == list(range(3, 15))

    @EITHER_WAY
    async def test_what_was_fetched_ahead_of_the_old_leader_is_not_handed_out(self, versions):
        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.versions = dict(versions)
            fill(cluster, "t", 0, 30, per_batch=3)
            async with consumer(cluster, "t", max_poll_records=2, metadata_max_age_ms=20) as consuming:
                assert await read(consuming, 2) == [0, 1]
                await asyncio.sleep(0.05)
                elect_uncleanly(cluster, 2, 9, 3)
                await until(lambda: any(node == 2 and isinstance(r, FetchRequest) for node, _, r in cluster.requests))
                found: list[tuple[int, int]] = []
                async with asyncio.timeout(PATIENCE_S):
                    while len(found) < 10:
                        for records in (await consuming.poll(1000)).values():
                            found += [(record.offset, record.leader_epoch) for record in records]
                assert found == [(offset, 1 if offset >= 9 else 0) for offset in range(2, 12)]

    async def test_the_answer_of_a_leader_before_the_present_one_settles_nothing(self):
        has_moved = asyncio.Event()

        async def answer_late(request: OffsetForLeaderEpochRequest, node: FakeNode) -> object:
            answer = node.on_offset_for_leader_epoch(request)
            await asyncio.wait_for(has_moved.wait(), PATIENCE_S)
            return answer

        async with FakeCluster(nodes=3, t=1) as cluster:
            cluster.versions = dict(NO_DIVERGENCE_IN_FETCH)
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, "t", metadata_max_age_ms=20) as consuming:
                assert await read(consuming, 9) == list(range(9))
                cluster.script(OffsetForLeaderEpochRequest, answer_late)
                cluster.move_leader("t", 0, 2)
                await until(lambda: cluster.sent(OffsetForLeaderEpochRequest), consuming)
                elect_uncleanly(cluster, 3, 3, 12)
                await until(lambda: consuming._subscription.state(T0).current_epoch == 2, consuming)
                has_moved.set()
                assert await read(consuming, 12) == list(range(3, 15))

    async def test_what_the_old_leader_answers_during_the_check_is_not_handed_out(self):
        is_fetched, is_checked, may_answer, may_settle = (asyncio.Event() for _ in range(4))

        async def fetch_late(request: FetchRequest, node: FakeNode) -> object:
            fill(cluster, "t", 0, 3)
            answer = await node.on_fetch(request)
            is_fetched.set()
            await asyncio.wait_for(may_answer.wait(), PATIENCE_S)
            return answer

        async def check_late(request: OffsetForLeaderEpochRequest, node: FakeNode) -> object:
            is_checked.set()
            await asyncio.wait_for(may_settle.wait(), PATIENCE_S)
            return node.on_offset_for_leader_epoch(request)

        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.versions = dict(NO_DIVERGENCE_IN_FETCH)
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, "t", metadata_max_age_ms=20) as consuming:
                assert await read(consuming, 9) == list(range(9))
                cluster.script(FetchRequest, fetch_late)
                cluster.script(OffsetForLeaderEpochRequest, check_late)
                await until(is_fetched.is_set, consuming)
                elect_uncleanly(cluster, 2, 3, 12)
                await until(is_checked.is_set, consuming)
                may_answer.set()
                for _ in range(10):
                    assert await consuming.poll(10) == {}
                may_settle.set()
                assert await read(consuming, 12) == list(range(3, 15))

    async def test_a_log_of_which_the_epoch_is_unknown_is_reset(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.move_leader("t", 0, 2)
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 9) == list(range(9))
                unknown = [EpochEndOffset(partition=0)]
                answer = OffsetForLeaderEpochResponse(
                    topics=[OffsetForLeaderTopicResult(topic="t", partitions=unknown)]
                )
                cluster.script(OffsetForLeaderEpochRequest, lambda request, node: answer)
                cluster.move_leader("t", 0, 1)
                assert await read(consuming, 9) == list(range(9))

    async def test_an_error_of_the_answer_is_tried_again(self):
        def refuse(code: ErrorCode) -> Any:
            rows = [EpochEndOffset(partition=0, error_code=code)]
            answer = OffsetForLeaderEpochResponse(topics=[OffsetForLeaderTopicResult(topic="t", partitions=rows)])
            return lambda request, node: answer

        codes = (
            ErrorCode.FENCED_LEADER_EPOCH,
            ErrorCode.UNKNOWN_LEADER_EPOCH,
            ErrorCode.NOT_LEADER_OR_FOLLOWER,
            ErrorCode.KAFKA_STORAGE_ERROR,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ErrorCode.UNKNOWN_SERVER_ERROR,
        )
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 9) == list(range(9))
                cluster.script(OffsetForLeaderEpochRequest, *map(refuse, codes))
                cluster.script(OffsetForLeaderEpochRequest, lambda request, node: OffsetForLeaderEpochResponse())
                cluster.move_leader("t", 0, 2)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [9, 10, 11]
                assert len(cluster.sent(OffsetForLeaderEpochRequest)) >= len(codes) + 2


class TestAfterACleanElection:
    @EITHER_WAY
    async def test_reading_goes_on(self, versions):
        async with FakeCluster(nodes=2, t=1) as cluster:
            cluster.versions = dict(versions)
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t", auto_offset_reset="none") as consuming:
                await consuming.start()
                await until(lambda: consuming.assignment())
                consuming.seek(T0, 0)
                assert await read(consuming, 3) == [0, 1, 2]
                for round_ in range(1, 5):
                    cluster.move_leader("t", 0, 1 + round_ % 2)
                    fill(cluster, "t", 0, 3)
                    assert await read(consuming, 3) == [3 * round_, 3 * round_ + 1, 3 * round_ + 2]

    async def test_epochs_in_which_nothing_was_written_are_no_truncation(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 3)
            cluster.move_leader("t", 0, 2)
            async with consumer(cluster, auto_offset_reset="none") as consuming:
                consuming.assign([T0])
                await consuming.seek_to_end(T0)
                for node in (1, 2, 1):
                    await consuming.poll(50)
                    cluster.move_leader("t", 0, node)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [3, 4, 5]

    async def test_each_fetch_says_the_epochs_of_the_leader_and_of_the_last_record(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 3) == [0, 1, 2]
                cluster.move_leader("t", 0, 2)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [3, 4, 5]
                await consuming.poll(100)
                said = [
                    (each.fetch_offset, each.current_leader_epoch, each.last_fetched_epoch)
                    for node, _, request in cluster.requests
                    if isinstance(request, FetchRequest)
                    for topic in request.topics
                    for each in topic.partitions
                ]
                assert (3, 0, 0) in said
                assert (3, 1, 0) in said
                assert said[-1] == (6, 1, 1)


class TestCommittedOffsets:
    async def test_they_carry_the_epoch_and_are_checked_before_they_are_read_from(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, "t", group_id="g") as consuming:
                assert await read(consuming, 9) == list(range(9))
            assert cluster.sent(OffsetCommitRequest)[-1].topics[0].partitions[0].committed_leader_epoch == 0
            elect_uncleanly(cluster, 2, 3, 12)
            async with consumer(cluster, "t", group_id="g") as consuming:
                assert await read(consuming, 12) == list(range(3, 15))

    async def test_an_epoch_newer_than_the_metadata_is_no_truncation_but_stale_metadata(self):
        """The old leader knows nothing of the epoch in which the offset was committed."""
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 9)
            group = cluster.groups.group("g")
            group.offsets["t", 0], group.epochs["t", 0] = (12, ""), 1
            async with consumer(cluster, "t", group_id="g") as consuming:
                await until(lambda: consuming.assignment(), consuming)
                for _ in range(10):
                    assert await consuming.poll(10) == {}
                assert not cluster.sent(OffsetForLeaderEpochRequest)
                cluster.move_leader("t", 0, 2)
                fill(cluster, "t", 0, 6)
                assert await read(consuming, 3) == [12, 13, 14]

    async def test_but_of_a_topic_that_was_created_anew_it_is_reset_in_the_end(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 3)
            group = cluster.groups.group("g")
            group.offsets["t", 0], group.epochs["t", 0] = (12, ""), 7
            async with consumer(cluster, "t", group_id="g", default_api_timeout_ms=300) as consuming:
                assert await read(consuming, 3) == [0, 1, 2]

    @pytest.mark.parametrize(
        "code",
        [
            ErrorCode.STALE_MEMBER_EPOCH,
            ErrorCode.UNSTABLE_OFFSET_COMMIT,
            ErrorCode.NOT_COORDINATOR,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            None,
            "no group",
        ],
    )
    async def test_an_error_never_leads_to_a_reset(self, code):
        def refuse(request: OffsetFetchRequest, node: FakeNode) -> OffsetFetchResponse:
            if code == "no group":
                return OffsetFetchResponse()
            group = OffsetFetchResponseGroup(group_id="g", error_code=code or 0)
            return OffsetFetchResponse(groups=[group])

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            group = cluster.groups.group("g")
            group.offsets["t", 0] = (6, "")
            cluster.script(OffsetFetchRequest, refuse, refuse)
            async with consumer(cluster, "t", group_id="g") as consuming:
                assert await read(consuming, 3) == [6, 7, 8]
            assert len(cluster.sent(OffsetFetchRequest)) == 3

    @pytest.mark.parametrize("code", [ErrorCode.GROUP_AUTHORIZATION_FAILED, ErrorCode.UNKNOWN_MEMBER_ID])
    async def test_one_that_does_not_pass_is_raised(self, code):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            group = cluster.groups.group("g")
            group.offsets["t", 0] = (6, "")
            refusal = OffsetFetchResponse(groups=[OffsetFetchResponseGroup(group_id="g", error_code=code)])
            cluster.script(OffsetFetchRequest, lambda request, node: refusal)
            async with consumer(cluster, "t", group_id="g") as consuming:
                with pytest.raises(KafkaError) as caught:
                    await read(consuming, 1)
                assert caught.value.code is code
                assert await read(consuming, 3) == [6, 7, 8]


class TestLateAnswers:
    """Answers for an offset from which a seek has turned away, before it or behind."""

    @staticmethod
    def _late(gate: asyncio.Event, answer: Any) -> Any:
        async def action(request: FetchRequest, node: FakeNode) -> Any:
            await gate.wait()
            answered = answer(request, node)
            return await answered if inspect.isawaitable(answered) else answered

        return action

    @pytest.mark.parametrize(("from_offset", "to_offset"), [(20, 3), (3, 20)])
    async def test_an_error_for_an_offset_that_is_no_longer_asked_for_resets_nothing(self, from_offset, to_offset):
        gate = asyncio.Event()

        def out_of_range(request: FetchRequest, node: FakeNode) -> FetchResponse:
            [topic] = request.topics
            data = PartitionData(partition_index=0, error_code=ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark=-1)
            rows = [FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=[data])]
            return FetchResponse(responses=rows)

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 30)
            cluster.script(FetchRequest, self._late(gate, out_of_range))
            async with consumer(cluster, auto_offset_reset="latest") as consuming:
                consuming.assign([T0])
                consuming.seek(T0, from_offset)
                await until(lambda: cluster.sent(FetchRequest), consuming)
                consuming.seek(T0, to_offset)
                gate.set()
                assert await read(consuming, 5) == list(range(to_offset, to_offset + 5))

    @pytest.mark.parametrize(("from_offset", "to_offset"), [(20, 3), (3, 20)])
    async def test_records_of_an_offset_that_is_no_longer_asked_for_are_not_taken_in(self, from_offset, to_offset):
        gate = asyncio.Event()
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 30)
            late = self._late(gate, lambda request, node: node.on_fetch(request))
            cluster.script(FetchRequest, late)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, from_offset)
                await until(lambda: cluster.sent(FetchRequest), consuming)
                consuming.seek(T0, to_offset)
                gate.set()
                await until(lambda: len(cluster.sent(FetchRequest)) >= 2)
                asked = [each.fetch_offset for each in cluster.sent(FetchRequest)[1].topics[0].partitions]
                assert asked == [to_offset], "the late answer would have moved on what is fetched next"
                assert await read(consuming, 5) == list(range(to_offset, to_offset + 5))

    async def test_an_offset_out_of_range_of_who_led_before_resets_nothing(self):
        gate = asyncio.Event()
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset="latest", metadata_max_age_ms=20) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 5)

                async def out_of_range(request: FetchRequest, node: FakeNode) -> FetchResponse:
                    await gate.wait()
                    [topic] = request.topics
                    data = PartitionData(partition_index=0, error_code=ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark=-1)
                    rows = [FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=[data])]
                    return FetchResponse(responses=rows)

                cluster.script(FetchRequest, out_of_range)
                await until(lambda: cluster.sent(FetchRequest), consuming)
                cluster.move_leader("t", 0, 2)
                hold = asyncio.Event()

                async def slowly(request: FetchRequest, node: FakeNode) -> Any:
                    await hold.wait()
                    return await node.on_fetch(request)

                cluster.script(FetchRequest, slowly)
                await until(lambda: len(cluster.sent(FetchRequest)) == 2, consuming)
                gate.set()
                await asyncio.sleep(0.05)
                hold.set()
                assert await asyncio.wait_for(read(consuming, 4), PATIENCE_S) == [5, 6, 7, 8]


def test_positions_after_a_divergence():
    subscription = Subscription()
    partition = TopicPartition("t", 0)
    subscription.assign([partition])
    state = subscription.assigned[partition]

    def at(position: int, epoch: int) -> None:
        subscription.seek(partition, position, epoch)
        assert subscription.fetchable_partitions(subscription.assigned, 0) == [], "not before the leader was asked"

    at(10, 5)
    assert subscription.handle_divergence(partition, 5, 12, -2) is None
    assert (state.position, state.leader_epoch, subscription.fetchable_partitions(subscription.assigned, 0)) == (
        10,
        5,
        [partition],
    )
    at(10, 5)
    assert subscription.handle_divergence(partition, 3, 10, -2) is None
    assert (state.position, state.leader_epoch, subscription.fetchable_partitions(subscription.assigned, 0)) == (
        10,
        3,
        [partition],
    )
    at(10, 5)
    assert subscription.handle_divergence(partition, 3, 7, -2) is None
    assert (state.position, state.leader_epoch, subscription.fetchable_partitions(subscription.assigned, 0)) == (
        7,
        3,
        [partition],
    )
    at(10, 5)
    assert subscription.handle_divergence(partition, -1, -1, -2) is None
    assert subscription.pending_resets(0) == {partition: -2}
    at(10, 5)
    problem = subscription.handle_divergence(partition, -1, -1, None)
    assert problem is not None
    assert problem.divergent_offset is None
    assert subscription.fetchable_partitions(subscription.assigned, 0) == []


class TestATopicCreatedAnew:
    """Under its old name, and as long as the old one, so that the positions exist again in the same leader epoch."""

    @RESETS
    async def test_it_is_read_from_its_beginning(self, reset, caplog):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset=reset, metadata_max_age_ms=20) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
                cluster.create("t", 1)
                fill(cluster, "t", 0, 12)
                assert await read(consuming, 12) == list(range(12))
        said = "t-0 was truncated below 9 when its topic was deleted and created anew: back to 0"
        assert [record.getMessage() for record in caplog.records if "t-0" in record.getMessage()] == [said]

    @pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
    @pytest.mark.parametrize("has_read_deleted_topic", [True, False])
    async def test_it_is_not_read_again_after_a_broker_that_is_behind_named_the_deleted_topic(
        self, reset, has_read_deleted_topic
    ):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 2)
            stale_answer = next(iter(cluster.nodes.values())).on_metadata(MetadataRequest(topics=None))
            if not has_read_deleted_topic:
                cluster.create("t", 1)
            async with consumer(cluster, auto_offset_reset=reset, metadata_max_age_ms=20) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                if has_read_deleted_topic:
                    assert await read(consuming, 2) == [0, 1]
                    cluster.create("t", 1)
                    await until(lambda: consuming._subscription.state(T0).topic_id == cluster.ids["t"])
                    consuming.seek(T0, 0)
                fill(cluster, "t", 0, 9)
                assert await read(consuming, 9) == list(range(9))
                for _ in range(2):
                    cluster.script(MetadataRequest, *[lambda request, node: stale_answer] * 2)
                    await until(lambda: not cluster.scripts[MetadataRequest])
                    await until(lambda: consuming._subscription.state(T0).topic_id == cluster.ids["t"])
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [9, 10, 11]

    @pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
    @pytest.mark.parametrize("has_old_topic", [True, False])
    async def test_a_partition_that_a_broker_that_is_behind_does_not_have_keeps_its_position(
        self, reset, has_old_topic
    ):
        """Such a broker names the deleted topic, with one partition, or none. A consumer without a group reads all."""
        partition = TopicPartition("t", 1)
        async with FakeCluster(t=1) as cluster:
            if not has_old_topic:
                cluster.topics.clear()
            stale_answer = next(iter(cluster.nodes.values())).on_metadata(MetadataRequest(topics=None))
            cluster.create("t", 2)
            async with consumer(cluster, auto_offset_reset=reset, metadata_max_age_ms=20) as consuming:
                consuming.subscribe(pattern="t")
                await until(lambda: len(consuming.assignment()) == 2)
                consuming.seek(T0, 0)
                consuming.seek(partition, 0)
                fill(cluster, "t", 1, 5)
                assert await read(consuming, 5) == list(range(5))
                consuming.pause(T0)
                for _ in range(2):
                    cluster.script(MetadataRequest, lambda request, node: stale_answer)
                    await until(lambda: partition not in consuming.assignment(), consuming)
                    await until(lambda: partition in consuming.assignment())
                fill(cluster, "t", 1, 3)
                assert await read(consuming, 3) == [5, 6, 7]
                assert consuming.paused() == {T0}

    async def test_a_topic_of_a_pattern_that_was_gone_is_read_from_its_beginning(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset="latest", metadata_max_age_ms=20) as consuming:
                consuming.subscribe(pattern="t")
                await until(lambda: len(consuming.assignment()) == 1, consuming)
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
                del cluster.topics["t"]
                await until(lambda: not consuming.assignment(), consuming)
                cluster.create("t", 1)
                fill(cluster, "t", 0, 12)
                assert await read(consuming, 12) == list(range(12))

    async def test_an_answer_with_records_of_the_deleted_topic_that_comes_later_does_not_count(self):
        is_created = asyncio.Event()

        async def answer_late(request: FetchRequest, node: FakeNode) -> object:
            answer = await node.on_fetch(request)
            await asyncio.wait_for(is_created.wait(), PATIENCE_S)
            return answer

        async with FakeCluster(t=1) as cluster:
            deleted_log = cluster.topics["t"][0]
            deleted_log.append(bytes(encode_batch([(1000, None, b"deleted", ())])))
            cluster.script(FetchRequest, answer_late)
            async with consumer(cluster, metadata_max_age_ms=20) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                await until(lambda: cluster.sent(FetchRequest), consuming)
                cluster.create("t", 1)
                fill(cluster, "t", 0, 3)
                await until(lambda: consuming._subscription.state(T0).topic_id == cluster.ids["t"])
                is_created.set()
                assert await read(consuming, 3) == [0, 1, 2]

    def test_the_position_from_before_a_seek_does_not_come_back(self):
        new_id, deleted_id = b"n" * 16, b"d" * 16
        subscription = Subscription()
        subscription.assign([T0])
        assert subscription.update_topic_ids(lambda _: new_id) == ([], [])
        subscription.seek(T0, 7)
        assert subscription.update_topic_ids(lambda _: deleted_id) == ([T0], [])
        assert subscription.update_topic_ids(lambda _: new_id) == ([], [T0])
        assert subscription.update_topic_ids(lambda _: deleted_id) == ([], [T0])
        subscription.seek(T0, 3)
        assert subscription.update_topic_ids(lambda _: new_id) == ([T0], [])

    def test_the_epoch_of_a_position_comes_back_with_it_and_no_position_does_not(self):
        new_id, deleted_id = b"n" * 16, b"d" * 16
        subscription = Subscription()
        subscription.assign([T0])
        for topic_id in (new_id, deleted_id, new_id):
            assert subscription.update_topic_ids({"t": topic_id}.__getitem__) == ([], [])
        subscription.seek(T0, 7, 2)
        assert subscription.update_topic_ids(lambda _: NO_TOPIC_ID) == ([], [])  # metadata without the topic
        assert subscription.update_topic_ids(lambda _: deleted_id) == ([T0], [])
        assert subscription.update_topic_ids(lambda _: new_id) == ([], [T0])
        state = subscription.state(T0)
        assert (state.position, state.leader_epoch, state.awaiting_validation) == (7, 2, True)

    def test_the_states_of_partitions_that_have_left_are_bounded_and_end_with_the_subscription(self):
        subscription = Subscription()
        subscription.subscribe(["t"], None, None)
        count = LEFT_PARTITIONS_MAX + 1
        subscription.follow_metadata([TopicPartition("t", number) for number in range(count)])
        states = dict(subscription.assigned)
        subscription.follow_metadata([])
        subscription.follow_metadata(states)
        kept = [each for each, state in subscription.assigned.items() if states[each] is state]
        assert kept == [TopicPartition("t", number) for number in range(1, count)]
        subscription.follow_metadata([])
        subscription.subscribe(["t"], None, None)
        subscription.follow_metadata(kept)
        assert not [each for each, state in subscription.assigned.items() if states[each] is state]

    async def test_without_a_reset_policy_it_is_an_error_until_a_seek(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            async with consumer(cluster, auto_offset_reset="none", metadata_max_age_ms=20) as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
                cluster.create("t", 1)
                fill(cluster, "t", 0, 9)
                with pytest.raises(LogTruncation) as caught:
                    await read(consuming, 1)
                assert caught.value.divergent_offset == OffsetAndMetadata(0, "", 0)
                consuming.seek(T0, 0)
                assert await read(consuming, 9) == list(range(9))
