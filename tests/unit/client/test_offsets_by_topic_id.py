"""Commits and fetches of offsets name topics by id, so that a new topic does not get the position of a deleted one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_commit_queue import committed, refuse
from tests.unit.client.test_consumer import T0, consumer, fill, read, until
from tidelog.client import Consumer, OffsetAndMetadata, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.join_group import JoinGroupRequest
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)

COMMIT, FETCH = 8, 9
QUIET: dict[str, Any] = {"group_id": "g", "enable_auto_commit": False, "metadata_max_age_ms": 300_000}


def make_anew(cluster: FakeCluster, topic: str) -> None:
    """Delete the topic, with the groups' offsets as brokers do, and create one of the same name."""
    partitions = len(cluster.topics.pop(topic))
    for group in cluster.groups.groups.values():
        for name, number in list(group.offsets):
            if name == topic:
                del group.offsets[name, number]
    cluster.create(topic, partitions)


async def new_metadata(cluster: FakeCluster) -> None:
    """Wait until the client has metadata of this moment or later."""
    asked = len(cluster.sent(MetadataRequest))
    await until(lambda: len(cluster.sent(MetadataRequest)) > asked + 1)


async def poll_records(consuming: Consumer, count: int) -> None:
    """Poll until so many records of any partitions have come."""
    async with asyncio.timeout(PATIENCE_S):
        while count > 0:
            count -= sum(map(len, (await consuming.poll(100)).values()))


class TestCommits:
    async def test_the_position_of_a_deleted_topic_does_not_reach_the_new_one(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 20)
            async with consumer(cluster, "t", **QUIET) as consuming:
                await read(consuming, 20)
                make_anew(cluster, "t")
                with pytest.raises(KafkaError, match=r"commit of t-0") as refused:
                    await consuming.commit()
                assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                fill(cluster, "t", 0, 30)
                assert not committed(cluster)
                assert await read(consuming, 30) == list(range(30))
                await consuming.commit()
                assert committed(cluster) == {T0: 30}

    async def test_a_retry_keeps_the_id_of_its_call(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 20)
            async with consumer(cluster, "t", **QUIET | {"metadata_max_age_ms": 20}) as consuming:
                await read(consuming, 20)

                async def busy(request: OffsetCommitRequest, node: FakeNode) -> Any:
                    make_anew(cluster, "t")
                    await new_metadata(cluster)
                    return refuse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)(request, node)

                cluster.script(OffsetCommitRequest, busy)
                with pytest.raises(KafkaError) as refused:
                    await consuming.commit({T0: 20})
                assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                assert not committed(cluster)

    async def test_the_offsets_of_a_deleted_topic_hold_up_no_others_and_no_close(self):
        other = TopicPartition("other", 0)
        async with FakeCluster(t=1, other=1) as cluster:
            for partition in (T0, other):
                fill(cluster, partition.topic, 0, 3)
            options = QUIET | {"enable_auto_commit": True, "allow_auto_create_topics": False}
            consuming = consumer(cluster, "t", "other", **options)
            await poll_records(consuming, 6)
            del cluster.topics["t"]
            await asyncio.wait_for(consuming.close(), PATIENCE_S / 4)
            assert committed(cluster) == {other: 3}

    @pytest.mark.parametrize("passing", [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR])
    @pytest.mark.parametrize("final", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
    async def test_a_topic_that_is_refused_for_good_hides_no_passing_error_of_another(self, passing, final):
        other = TopicPartition("other", 0)

        def refused(request: Any, node: FakeNode) -> OffsetCommitResponse:
            topics = [
                OffsetCommitResponseTopic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[OffsetCommitResponsePartition(partition_index=0, error_code=code)],
                )
                for topic in request.topics
                for code in [final if "t" in (topic.name, names.get(topic.topic_id)) else passing]
            ]
            topics.sort(key=lambda topic: topic.partitions[0].error_code != final)
            return OffsetCommitResponse(topics=topics)

        async with FakeCluster(t=1, other=1) as cluster:
            names = {topic_id: name for name, topic_id in cluster.ids.items()}
            async with consumer(cluster, **QUIET) as consuming:
                consuming.assign([T0, other])
                await consuming.commit({T0: 0, other: 0})
                cluster.script(OffsetCommitRequest, refused, refused)
                looked_up = len(cluster.sent(FindCoordinatorRequest))
                await asyncio.wait_for(consuming.commit({T0: 1, other: 3}), PATIENCE_S)
                assert committed(cluster) == {T0: 1, other: 3}
                is_moved = passing is ErrorCode.NOT_COORDINATOR
                assert len(cluster.sent(FindCoordinatorRequest)) == looked_up + (2 if is_moved else 0)

    async def test_a_coordinator_that_does_not_know_the_topic_yet_is_asked_again(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 2)
            async with consumer(cluster, "t", **QUIET) as consuming:
                await read(consuming, 2)
                cluster.script(OffsetCommitRequest, *[refuse(ErrorCode.UNKNOWN_TOPIC_ID)] * 2)
                await consuming.commit()
                assert committed(cluster) == {T0: 2}

    @pytest.mark.parametrize(
        ("change", "version"),
        [
            (lambda cluster: None, 10),
            (lambda cluster: cluster.versions.update({COMMIT: (2, 9)}), 9),
            (lambda cluster: cluster.versions.update({COMMIT: (2, 8)}), 8),
            (lambda cluster: cluster.ids.update(t=bytes(16)), 9),
        ],
        ids=["ids", "no version with ids", "an older version", "no ids"],
    )
    async def test_topics_have_names_where_ids_are_not_known(
        self, change: Callable[[FakeCluster], None], version: int
    ) -> None:
        async with FakeCluster(t=1) as cluster:
            change(cluster)
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t", **QUIET) as consuming:
                await read(consuming, 3)
                await consuming.commit()
                assert cluster.versions_of(OffsetCommitRequest) == {version}
                assert committed(cluster) == {T0: 3}

    async def test_one_topic_without_metadata_gives_all_of_a_commit_their_names(self):
        async with FakeCluster(t=1, other=1) as cluster:
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t", **QUIET) as consuming:
                await read(consuming, 3)
                other = TopicPartition("other", 0)
                await consuming.commit({T0: 3, other: 7})
                assert cluster.versions_of(OffsetCommitRequest) == {9}
                assert committed(cluster) == {T0: 3, other: 7}


class TestFetches:
    @pytest.mark.parametrize("newest", [10, 9, 7, 5])
    async def test_offsets_are_found_with_every_version(self, newest):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            cluster.groups.group("g").offsets[T0] = (4, "note")
            cluster.versions[FETCH] = (1, newest)
            if newest < 8:
                rows = [{"partition_index": 0, "committed_offset": 4, "metadata": "note"}]
                cluster.script(OffsetFetchRequest, *[lambda request, node: old_answer(rows)] * 2)
            async with consumer(cluster, "t", **QUIET) as consuming:
                assert await consuming.committed(T0) == {T0: OffsetAndMetadata(4, "note")}
                assert await read(consuming, 5) == list(range(4, 9))
                assert cluster.versions_of(OffsetFetchRequest) == {newest}

    async def test_a_deleted_topic_holds_up_no_positions_of_others(self):
        async with FakeCluster(t=1, other=1) as cluster:
            options = QUIET | {"allow_auto_create_topics": False, "metadata_max_age_ms": 100}
            async with consumer(cluster, "t", "other", **options) as consuming:
                for topic in ("t", "other"):
                    fill(cluster, topic, 0, 3)
                await poll_records(consuming, 6)
                await consuming.commit()
                del cluster.topics["t"]
                await new_metadata(cluster)
                for member in list(cluster.groups.group("g").members):
                    cluster.groups.expel("g", member)
                await until(lambda: len(cluster.sent(JoinGroupRequest)) > 1, consuming)
                fill(cluster, "other", 0, 2)
                await asyncio.wait_for(poll_records(consuming, 2), PATIENCE_S / 4)
                with pytest.raises(KafkaError, match="offset of t-0") as refused:
                    await asyncio.wait_for(consuming.committed(T0), PATIENCE_S / 4)
                assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    async def test_an_id_that_the_coordinator_does_not_know_is_looked_up_again(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", **QUIET) as consuming:
            await consuming.start()
            make_anew(cluster, "t")
            cluster.groups.group("g").offsets[T0] = (2, "")
            fill(cluster, "t", 0, 5)
            assert await read(consuming, 3) == [2, 3, 4]

    async def test_an_offset_of_a_topic_that_is_deleted_meanwhile_is_not_a_position(self):
        async with FakeCluster(t=1) as cluster:
            cluster.groups.group("g").offsets[T0] = (4, "")
            async with consumer(cluster, "t", **QUIET | {"metadata_max_age_ms": 20}) as consuming:

                async def late(request: OffsetFetchRequest, node: FakeNode) -> Any:
                    answer = cluster.groups.fetch_offsets(request)
                    make_anew(cluster, "t")
                    fill(cluster, "t", 0, 9)
                    await new_metadata(cluster)
                    return answer

                cluster.script(OffsetFetchRequest, late)
                assert await read(consuming, 9) == list(range(9))


def old_answer(rows: list[dict[str, Any]]) -> OffsetFetchResponse:
    partitions = [OffsetFetchResponsePartition(**row) for row in rows]
    return OffsetFetchResponse(topics=[OffsetFetchResponseTopic(name="t", partitions=partitions)])
