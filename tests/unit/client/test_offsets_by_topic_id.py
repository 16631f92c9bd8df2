"""Commits and fetches of offsets name topics by id, so that a new topic does not get the position of a deleted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_commit_queue import committed, refuse
from tests.unit.client.test_consumer import T0, consumer, fill, read, until
from tidelog.client import OffsetAndMetadata, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
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
