"""Configs changed under a running node hold from the next request on, and deleting them brings back what was before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.produce import ProduceResponse

MakeBatch = Callable[..., bytes]
TOPIC, BROKER = 2, 4


async def alter(wire: Any, kind: int, name: str, key: str, value: str | None) -> None:
    """None deletes."""
    change = AlterableConfig(name=key, config_operation=value is None, value=value)
    resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=[change])
    answer = await wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1, IncrementalAlterConfigsResponse)
    assert [(each.error_code, each.error_message) for each in answer.responses] == [(0, None)]


async def code_of(wire: Any, batch: bytes) -> int:
    ((code, _),) = produced(await wire.call(produce("t", batch), 9, ProduceResponse))
    return code


@pytest.mark.parametrize(
    ("kind", "name", "key", "value", "refusal"),
    [
        (TOPIC, "t", "max.message.bytes", "30", ErrorCode.MESSAGE_TOO_LARGE),
        (BROKER, "", "message.max.bytes", "30", ErrorCode.MESSAGE_TOO_LARGE),
        (BROKER, "1", "message.max.bytes", "30", ErrorCode.MESSAGE_TOO_LARGE),
        (TOPIC, "t", "cleanup.policy", "compact", ErrorCode.INVALID_RECORD),
        (BROKER, "", "log.cleanup.policy", "compact", ErrorCode.INVALID_RECORD),
        (TOPIC, "t", "message.timestamp.before.max.ms", "1", ErrorCode.INVALID_TIMESTAMP),
        (BROKER, "1", "log.message.timestamp.before.max.ms", "1", ErrorCode.INVALID_TIMESTAMP),
    ],
)
async def test_what_may_be_appended_changes_at_once(
    wire: Any, make_batch: MakeBatch, kind: int, name: str, key: str, value: str, refusal: ErrorCode
) -> None:
    await wire.create_topic("t")
    batch = make_batch(b"a")
    assert await code_of(wire, batch) == ErrorCode.NONE
    await alter(wire, kind, name, key, value)
    assert await code_of(wire, batch) == refusal
    await alter(wire, kind, name, key, None)
    assert await code_of(wire, batch) == ErrorCode.NONE


async def test_the_minimum_changes_at_once(running: Any, wire: Any) -> None:
    """With one replica it refuses nobody (Partition.effectiveMinIsr), so the partition is looked at."""
    await wire.create_topic("t")
    partition = running.node._broker.partitions.find("t", 0)
    for kind, name, value, found in ((BROKER, "", "2", 2), (TOPIC, "t", "3", 3), (TOPIC, "t", None, 2)):
        await alter(wire, kind, name, "min.insync.replicas", value)
        assert partition.min_insync_replicas == found


async def test_a_topics_own_value_is_stronger_than_the_brokers(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", max_message_bytes="100000")
    await alter(wire, BROKER, "", "message.max.bytes", "30")
    assert await code_of(wire, make_batch(b"a")) == ErrorCode.NONE
    await alter(wire, TOPIC, "t", "max.message.bytes", None)
    assert await code_of(wire, make_batch(b"a")) == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(
    ("kind", "name", "key"), [(TOPIC, "t", "retention.bytes"), (BROKER, "", "log.retention.bytes")]
)
async def test_retention_that_is_shortened_deletes_what_is_there(
    start_node: Any, make_batch: MakeBatch, kind: int, name: str, key: str
) -> None:
    node = await start_node(**{"log.retention.check.interval.ms": "20"})
    wire = await node.connect()
    await wire.create_topic("t", segment_bytes="1048576", retention_ms="-1")
    for _ in range(3):
        assert await code_of(wire, make_batch(b"x" * 600_000)) == ErrorCode.NONE
    await asyncio.sleep(0.1)
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse))
    await alter(wire, kind, name, key, "1")
    for _ in range(3000):
        if (await wire.call(fetch("t"), 11, FetchResponse)).responses[0].partitions[0].error_code:
            break
        await asyncio.sleep(0.02)
    answer = await wire.call(fetch("t", offset=2), 11, FetchResponse)
    assert fetched(answer) == [b"x" * 600_000]


@pytest.mark.parametrize(("kind", "name", "key"), [(TOPIC, "t", "compression.type"), (BROKER, "1", "compression.type")])
async def test_batches_are_kept_in_the_codec_that_is_set(
    wire: Any, make_batch: MakeBatch, kind: int, name: str, key: str
) -> None:
    await wire.create_topic("t")

    async def codec_kept(offset: int) -> int:
        assert await code_of(wire, make_batch(b"x" * 1000)) == ErrorCode.NONE
        answer = await wire.call(fetch("t", offset=offset), 11, FetchResponse)
        return int(answer.responses[0].partitions[0].records[22]) & 7

    assert await codec_kept(0) == 0
    await alter(wire, kind, name, key, "zstd")
    assert await codec_kept(1) == 4
    await alter(wire, kind, name, key, None)
    assert await codec_kept(2) == 0


@pytest.mark.parametrize(
    ("kind", "name", "key"), [(TOPIC, "t", "message.timestamp.type"), (BROKER, "", "log.message.timestamp.type")]
)
async def test_batches_are_stamped_as_is_set(wire: Any, make_batch: MakeBatch, kind: int, name: str, key: str) -> None:
    await wire.create_topic("t")

    async def is_stamped() -> bool:
        answer = await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
        return bool(answer.responses[0].partition_responses[0].log_append_time_ms > 0)

    assert not await is_stamped()
    await alter(wire, kind, name, key, "LogAppendTime")
    assert await is_stamped()
    await alter(wire, kind, name, key, None)
    assert not await is_stamped()


async def test_connections_are_refused_from_the_number_that_is_set(running: Any, wire: Any) -> None:
    await alter(wire, BROKER, "1", "max.connections", "1")
    refused = await running.connect()
    assert await refused.reader.read() == b""
    await alter(wire, BROKER, "1", "max.connections", None)
    await (await running.connect()).create_topic("t")


async def test_segments_roll_at_the_size_that_is_set(running: Any, wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    log = running.node._broker.partitions.find("t", 0).log
    for _ in range(3):
        await code_of(wire, make_batch(b"x" * 600_000))
    assert log.segment_count == 1
    await alter(wire, TOPIC, "t", "segment.bytes", "1048576")
    for _ in range(2):
        await code_of(wire, make_batch(b"x" * 600_000))
    assert log.segment_count > 1


async def test_kafkas_own_tests_have_small_segments(running: Any, wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", internal_segment_bytes="300")
    log = running.node._broker.partitions.find("t", 0).log
    for _ in range(3):
        assert await code_of(wire, make_batch(b"x" * 200)) == 0
    assert log.segment_count == 3


async def test_a_partition_forgets_producers_after_the_time_that_is_set(running: Any, wire: Any) -> None:
    await wire.create_topic("t", retention_ms="5")
    log = running.node._broker.partitions.find("t", 0).log
    assert log.config.producer_id_expiration_ms == 86_400_000
    await alter(wire, BROKER, "", "producer.id.expiration.ms", "1234")
    assert (log.config.producer_id_expiration_ms, log.config.retention_ms) == (1234, 5)


async def test_throttled_replicas_get_the_rate_that_is_set(running: Any, wire: Any) -> None:
    throttle = running.node._broker.partitions.follower_fetches.answers.throttle
    unlimited = throttle.bytes_per_s
    await alter(wire, BROKER, "1", "leader.replication.throttled.rate", "1000")
    assert throttle.bytes_per_s == 1000
    await alter(wire, BROKER, "1", "leader.replication.throttled.rate", None)
    assert throttle.bytes_per_s == unlimited


async def test_what_was_set_outlives_a_restart(start_node: Any) -> None:
    node = await start_node()
    wire = await node.connect()
    await alter(wire, BROKER, "1", "max.connections", "70")
    await node.stop()
    node = await start_node()
    assert node.node.settings.integer("max.connections") == 70
