"""DeleteRecords: through a real node in every version, and over replicas whose links and clocks the test holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.test_node import MakeBatch, fetch, produce
from tests.unit.replication.replicas import ReplicaNode, Replicas
from tidelog.broker.apis.records import delete_records
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.replicas import deletions
from tidelog.broker.replicas.repairs import REPAIR_COMMITTED_REPLICA_ID, REPAIR_REPLICA_ID
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.replication.controller.metadata.image import MetadataDelta

VERSIONS = DeleteRecordsRequest.VERSIONS


def request(*wanted: tuple[str, int, int], timeout_ms: int = 1000) -> DeleteRecordsRequest:
    """(topic, partition, offset)"""
    return DeleteRecordsRequest(
        topics=[
            DeleteRecordsTopic(name=name, partitions=[DeleteRecordsPartition(partition_index=index, offset=offset)])
            for name, index, offset in wanted
        ],
        timeout_ms=timeout_ms,
    )


def told(response: DeleteRecordsResponse) -> list[tuple[str, int, int, int]]:
    return [
        (topic.name, each.partition_index, each.low_watermark, each.error_code)
        for topic in response.topics
        for each in topic.partitions
    ]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_log_begins_where_it_was_asked_to(wire: Any, make_batch: MakeBatch, version: int) -> None:
    await wire.create_topic("t", 2)
    await wire.call(produce("t", make_batch(b"a", b"b", b"c", b"d"), make_batch(b"e")), 9, ProduceResponse)
    answer = await wire.call(request(("t", 0, 3), ("t", 1, -1)), version, DeleteRecordsResponse)
    assert told(answer) == [("t", 0, 3, 0), ("t", 1, 1, 0)]
    again = await wire.call(request(("t", 0, 1)), version, DeleteRecordsResponse)
    assert told(again) == [("t", 0, 3, 0)], "what is gone does not come back"
    too_early = (await wire.call(fetch("t", 2), 11, FetchResponse)).responses[0].partitions[0]
    assert too_early.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert too_early.log_start_offset == -1, "as in Kafka"
    for replica_id in (REPAIR_REPLICA_ID, REPAIR_COMMITTED_REPLICA_ID):  # these replicas ask for what is left
        answer = await wire.call(fetch("t", 2, replica_id=replica_id), 11, FetchResponse)
        too_early = answer.responses[0].partitions[0]
        assert (too_early.error_code, too_early.log_start_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 3)
    rest = (await wire.call(fetch("t", 3), 11, FetchResponse)).responses[0].partitions[0]
    assert (rest.error_code, rest.log_start_offset, bool(rest.records)) == (0, 3, True)


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_cannot_be_deleted_is_said_for_each(wire: Any, make_batch: MakeBatch, version: int) -> None:
    await wire.create_topic("t")
    await wire.create_topic("compacted", cleanup_policy="compact")
    await wire.create_topic("both", cleanup_policy="compact,delete")
    await wire.call(produce("t", make_batch(b"a", b"b")), 9, ProduceResponse)
    wanted = [("t", 0, 3), ("compacted", 0, 0), ("t", 1, 0), ("none", 0, 0), ("both", 0, -1)]
    for each in wanted:
        (found,) = told(await wire.call(request(each), version, DeleteRecordsResponse))
        code = {
            ("t", 0): ErrorCode.OFFSET_OUT_OF_RANGE,
            ("compacted", 0): ErrorCode.POLICY_VIOLATION,
            ("both", 0): ErrorCode.NONE,
        }.get(each[:2], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        assert found == (*each[:2], 0 if code == 0 else -1, code)
    (below,) = told(await wire.call(request(("t", 0, -2)), version, DeleteRecordsResponse))
    assert below == ("t", 0, -1, ErrorCode.OFFSET_OUT_OF_RANGE)
    many = await wire.call(request(*wanted, ("t", 0, 1)), version, DeleteRecordsResponse)
    assert dict.fromkeys(told(many)) == dict.fromkeys(
        [
            ("t", 0, 1, 0), ("t", 1, -1, 3), ("compacted", 0, -1, 44), ("none", 0, -1, 3), ("both", 0, 0, 0),
        ]
    )  # fmt: skip


async def test_a_waiting_consumer_hears_of_it(wire: Any, running: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a", b"b")), 9, ProduceResponse)
    await wire.call(request(("t", 0, -1)), 2, DeleteRecordsResponse)
    late = await running.connect()
    late.send(fetch("t", 2, wait_ms=600_000), 11)
    await asyncio.sleep(0.05)
    await wire.call(produce("t", make_batch(b"c")), 9, ProduceResponse)
    answer = (await late.receive(FetchResponse, 11)).responses[0].partitions[0]
    assert (answer.log_start_offset, bool(answer.records)) == (2, True)


async def test_segments_below_the_start_go_and_it_outlives_a_restart(start_node: Any, make_batch: MakeBatch) -> None:
    running = await start_node(**{"log.retention.check.interval.ms": "50"})
    wire = await running.connect()
    await wire.create_topic("t", segment_bytes="1048576", file_delete_delay_ms="0", retention_ms="-1")
    for _ in range(3):
        await wire.call(produce("t", make_batch(b"x" * 700_000)), 9, ProduceResponse)
    partition = running.node._broker.partitions.leader("t", 0)
    assert partition.log.segment_count == 3
    await wire.call(request(("t", 0, 2)), 2, DeleteRecordsResponse)
    await until(lambda: partition.log.segment_count == 1)
    await running.stop()
    wire = await (await start_node()).connect()
    assert told(await wire.call(request(("t", 0, 0)), 2, DeleteRecordsResponse)) == [("t", 0, 2, 0)]


async def test_internal_topics_are_left_alone(running: Any, wire: Any) -> None:
    await wire.create_topic("__consumer_offsets")
    answer = await wire.call(
        request(("__consumer_offsets", 0, -1), ("__transaction_state", 0, 0)), 1, DeleteRecordsResponse
    )
    assert told(answer) == [
        ("__consumer_offsets", 0, -1, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("__transaction_state", 0, -1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_refusal_names_every_partition(version: int) -> None:
    error = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR)
    answer = delete_records.refuse(request(("t", 0, 1), ("u", 2, 3)), error, version)
    decoded = DeleteRecordsResponse.decode(answer.encode(version), version)
    assert told(decoded) == [("t", 0, -1, -1), ("u", 2, -1, -1)]


# ------------------------------------------------------------------------------------------------------ over replicas


class Asked:
    """One request to a node of a `Replicas` and what has become of it."""

    def __init__(self, node: ReplicaNode, offset: int, timeout_ms: int = 60_000) -> None:
        self.context = RequestContext(21, 2, 1, None, "test", "PLAINTEXT")
        answer = delete_records.handle(node.services, self.context, request(("t", 0, offset), timeout_ms=timeout_ms))
        self.answer = answer

    @property
    def told(self) -> tuple[int, int] | None:
        answer = self.answer.response if isinstance(self.answer, Deferred) else self.answer
        return None if answer is None else told(answer)[0][2:]


def filled(count: int, records: int = 5) -> Replicas:
    cluster = Replicas(count)
    for number in range(records):
        cluster.nodes[1].produce(b"%d" % number)
    cluster.loop.run_for(600)
    return cluster


def test_it_is_answered_when_every_replica_has_done_it() -> None:
    cluster = filled(3)
    before = cluster.loop.now_s
    asked = Asked(cluster.nodes[1], 3)
    assert asked.told is None
    cluster.loop.settle()
    assert asked.told == (3, 0)
    assert cluster.loop.now_s == before, "nobody had to wait for the end of a fetch"
    assert [node.log.log_start_offset for node in cluster.nodes.values()] == [3, 3, 3]
    assert not len(cluster.nodes[1].partitions.deletions)
    cluster.requests.clear()
    cluster.loop.run_for(400)
    assert cluster.requests == [], "and they are at rest again"


def test_one_that_does_not_follow_lets_the_time_run_out() -> None:
    cluster = filled(3)
    cluster.cut |= {(3, 1)}
    asked = Asked(cluster.nodes[1], 4, timeout_ms=300)
    cluster.loop.run_for(200)
    assert asked.told is None
    cluster.loop.run_for(200)
    assert asked.told == (0, ErrorCode.REQUEST_TIMED_OUT)
    assert not len(cluster.nodes[1].partitions.deletions)
    assert cluster.nodes[1].log.log_start_offset == 4


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "WAITING_MAX", 2)
    cluster = filled(3)
    cluster.cut |= {(3, 1)}
    waiting = [Asked(cluster.nodes[1], 3), Asked(cluster.nodes[1], 4)]
    assert Asked(cluster.nodes[1], 5).told == (0, ErrorCode.REQUEST_TIMED_OUT)
    cluster.cut.clear()
    cluster.loop.run_for(2000)
    assert [asked.told for asked in waiting] == [(5, 0), (5, 0)]
    assert not len(cluster.nodes[1].partitions.deletions)
    assert Asked(cluster.nodes[1], -1).told == (5, 0)


def test_a_broker_that_is_gone_is_not_waited_for() -> None:
    cluster = filled(3)
    cluster.cut |= {(3, 1)}
    asked = Asked(cluster.nodes[1], 4)
    cluster.loop.run_for(100)
    assert asked.told is None
    cluster.fenced.add(3)
    cluster.alter(isr=(1, 2))
    assert asked.told == (4, 0)


def test_a_replica_that_is_taken_away_is_not_waited_for() -> None:
    cluster = filled(3)
    cluster.cut |= {(3, 1)}
    asked = Asked(cluster.nodes[1], 4)
    cluster.loop.run_for(100)
    cluster.alter(isr=(1, 2), replicas=(1, 2))
    assert asked.told == (4, 0)


def test_a_deposed_leader_says_so() -> None:
    cluster = filled(2)
    cluster.cut |= {(2, 1)}
    asked = Asked(cluster.nodes[1], 4)
    cluster.elect(2, [1, 2])
    assert asked.told == (-1, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert Asked(cluster.nodes[1], 4).told == (-1, ErrorCode.NOT_LEADER_OR_FOLLOWER)


def test_a_topic_that_is_deleted_meanwhile_is_unknown() -> None:
    cluster = filled(2)
    cluster.cut |= {(2, 1)}
    asked = Asked(cluster.nodes[1], 4)
    topic = cluster.image.topics_by_name["t"]
    cluster.nodes[1].hosting.apply(cluster.image, MetadataDelta(deleted_topics={topic.topic_id: topic}))
    assert asked.told == (-1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def test_who_has_left_is_forgotten() -> None:
    cluster = filled(2)
    cluster.cut |= {(2, 1)}
    asked = Asked(cluster.nodes[1], 4)
    assert isinstance(asked.answer, Deferred)
    assert asked.answer.on_abandon is not None
    asked.answer.on_abandon()
    assert not len(cluster.nodes[1].partitions.deletions)
    cluster.loop.run_for(61_000)
    assert asked.told is None


def test_a_follower_that_was_away_takes_the_start_over_when_it_is_back() -> None:
    cluster = filled(2)
    cluster.cut |= {(2, 1)}
    asked = Asked(cluster.nodes[1], 2)
    cluster.loop.run_for(100)
    cluster.heal()
    cluster.loop.run_for(2000)
    assert asked.told == (2, 0)
    assert cluster.nodes[2].log.log_start_offset == 2
