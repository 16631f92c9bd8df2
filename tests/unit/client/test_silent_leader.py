"""A consumer of which one leader does not answer: it looks up and reads the partitions of the others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import HANDLERS, SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, T1, consumer, fill, read
from tests.unit.client.test_consumer import until as until_consumed
from tidelog.client import Admin, OffsetAndMetadata
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest
from tidelog.protocol.messages.offset_for_leader_epoch import OffsetForLeaderEpochRequest

LONG_MS = 3_600_000


def answered_but_by(silent: int, handler: Callable[[FakeNode, Any], Any]) -> Callable[[Any, FakeNode], Any]:
    return lambda request, node: SILENCE if node.node_id == silent else handler(node, request)


async def test_a_partition_that_comes_later_is_looked_up():
    async with FakeCluster(t=2, nodes=2) as cluster:
        fill(cluster, "t", 1, 5)
        find = answered_but_by(cluster.topics["t"][0].leader, FakeNode.on_list_offsets)
        cluster.script(ListOffsetsRequest, *[find] * 9)
        async with consumer(cluster, request_timeout_ms=LONG_MS) as consuming:
            consuming.assign([T0])
            await until_consumed(lambda: cluster.sent(ListOffsetsRequest), consuming)
            consuming.assign([T0, T1])
            assert await read(consuming, 5) == list(range(5))
        assert len(cluster.sent(ListOffsetsRequest)) == 2, "the silent leader is not asked again"


async def test_a_position_is_there_when_its_own_leader_has_answered():
    async with FakeCluster(t=2, nodes=2) as cluster:
        find = answered_but_by(cluster.topics["t"][0].leader, FakeNode.on_list_offsets)
        cluster.script(ListOffsetsRequest, *[find] * 9)
        async with consumer(cluster, request_timeout_ms=LONG_MS) as consuming:
            consuming.assign([T0, T1])
            async with asyncio.timeout(PATIENCE_S):
                assert await consuming.position(T1) == 0


async def test_a_position_is_validated_with_another_new_leader():
    async with FakeCluster(t=2, nodes=3) as cluster:
        cluster.versions = {1: (4, 11)}  # no divergence in answers to fetches
        for number in range(2):
            fill(cluster, "t", number, 5)
        async with consumer(cluster, "t", request_timeout_ms=LONG_MS, metadata_max_age_ms=20) as consuming:
            await read(consuming, 10)
            ask = answered_but_by(3, FakeNode.on_offset_for_leader_epoch)
            cluster.script(OffsetForLeaderEpochRequest, *[ask] * 9)
            cluster.move_leader("t", 0, 3)
            await until_consumed(lambda: cluster.sent(OffsetForLeaderEpochRequest), consuming)
            cluster.move_leader("t", 1, 1)
            fill(cluster, "t", 1, 2)
            assert await read(consuming, 2) == [5, 6]
        asked = [node for node, _, each in cluster.requests if isinstance(each, OffsetForLeaderEpochRequest)]
        assert asked == [3, 1]


async def test_partitions_with_committed_offsets_are_read_beside_one_without():
    async with FakeCluster(t=2) as cluster:
        fill(cluster, "t", 1, 3)
        async with consumer(cluster, group_id="g", auto_offset_reset="none") as consuming:
            consuming.assign([T0, T1])
            await consuming.commit({T1: 1})
            offsets: list[int] = []
            problems: set[str] = set()
            async with asyncio.timeout(PATIENCE_S):
                while len(offsets) < 2 or not problems:
                    try:
                        batch = await consuming.poll(100)
                    except KafkaError as error:
                        problems.add(str(error))
                    else:
                        offsets += [record.offset for records in batch.values() for record in records]
        assert offsets == [1, 2]
        assert problems == {"OFFSET_OUT_OF_RANGE: t-0 has no committed offset, auto_offset_reset=none"}


async def test_an_offset_of_an_earlier_time_with_the_partition_is_not_used():
    """Another member may have read on and committed in between."""
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 9)
        entered, gate = asyncio.Event(), asyncio.Event()

        async def late(request: OffsetFetchRequest, node: FakeNode) -> Any:
            answer = node.on_group(request)
            entered.set()
            await gate.wait()
            return answer

        cluster.script(OffsetFetchRequest, late)
        async with consumer(cluster, group_id="g") as consuming:
            consuming.assign([T0])
            await consuming.commit({T0: OffsetAndMetadata(1)})
            await until_consumed(entered.is_set, consuming)
            consuming.assign([])
            (group,) = cluster.groups.groups.values()
            group.offsets[T0] = (5, "")
            consuming.assign([T0])
            gate.set()
            assert await read(consuming, 4) == [5, 6, 7, 8]


async def test_a_committed_offset_that_comes_after_a_seek_that_was_reset_is_not_used():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 9)
        entered, gate = asyncio.Event(), asyncio.Event()

        async def late(request: OffsetFetchRequest, node: FakeNode) -> Any:
            entered.set()
            await asyncio.wait_for(gate.wait(), PATIENCE_S)
            return node.on_group(request)

        cluster.script(OffsetFetchRequest, late)
        async with consumer(cluster, group_id="g") as consuming:
            consuming.assign([T0])
            await consuming.commit({T0: OffsetAndMetadata(5)})
            await until_consumed(entered.is_set, consuming)
            consuming.seek(T0, 1000)
            await until_consumed(lambda: consuming._subscription.state(T0).reset_to is not None, consuming)
            gate.set()
            assert await read(consuming, 9) == list(range(9))


@pytest.mark.parametrize("call", ["list_offsets", "delete_records"])
async def test_a_partition_that_moves_is_asked_for_again_before_another_leader_answers(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with (
        FakeCluster(t=2, nodes=3) as cluster,
        Admin(bootstrap_servers=cluster.bootstrap, request_timeout_ms=LONG_MS) as administrator,
    ):

        def answer(request: Any, node: FakeNode) -> object:
            if node.node_id == cluster.topics["t"][0].leader:
                return SILENCE
            if node.node_id == 2:
                cluster.move_leader("t", 1, 3)
            if isinstance(request, ListOffsetsRequest):
                return node.on_list_offsets(request)
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER if node.node_id == 2 else ErrorCode.NONE
            result = DeleteRecordsPartitionResult(partition_index=1, low_watermark=5, error_code=code)
            return DeleteRecordsResponse(topics=[DeleteRecordsTopicResult(name="t", partitions=[result])])

        monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
        kind = ListOffsetsRequest if call == "list_offsets" else DeleteRecordsRequest
        cluster.script(kind, *[answer] * 9)
        targets = {T0: -1, T1: -1}
        calling = asyncio.ensure_future(getattr(administrator, call)(targets))
        await until(lambda: any(node == 3 for node, _, each in cluster.requests if isinstance(each, kind)))
        calling.cancel()
        await asyncio.wait([calling])
