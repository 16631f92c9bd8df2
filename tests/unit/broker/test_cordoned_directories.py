"""Log directories that get no new replicas (cordoned.log.dirs, KIP-1066): the broker, its controller and who asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.test_replica_moves import Moving
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.describe_log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)


@pytest.fixture
async def moving(tmp_path: Path) -> AsyncIterator[Moving]:
    found = Moving(tmp_path)
    await found.start()
    yield found
    await found.running.stop()


async def cordon(moving: Moving, value: str | None, expected: int) -> None:
    """And wait until the controller knows of so many."""
    node_id = moving.running.node.config.node_id
    config = AlterableConfig(name="cordoned.log.dirs", config_operation=1 if value is None else 0, value=value)
    resource = AlterConfigsResource(resource_type=4, resource_name=str(node_id), configs=[config])
    request = IncrementalAlterConfigsRequest(resources=[resource])
    answer = await moving.wire.call(request, 1, IncrementalAlterConfigsResponse)
    assert answer.responses[0].error_code == 0, answer
    image = moving.running.node._services.image  # type: ignore[union-attr]
    await until(lambda: len(image().brokers[node_id].cordoned_log_dirs) == expected)


async def cordoned(moving: Moving) -> list[str]:
    answer = await moving.wire.call(DescribeLogDirsRequest(topics=None), 5, DescribeLogDirsResponse)
    return [each.log_dir for each in answer.results if each.is_cordoned]


async def create(moving: Moving, name: str, partitions: int = 1) -> int:
    topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    answer = await moving.wire.call(CreateTopicsRequest(topics=[topic], timeout_ms=30_000), 7, CreateTopicsResponse)
    code: int = answer.topics[0].error_code
    return code


def held(home: Path) -> set[str]:
    return {entry.name for entry in home.iterdir() if entry.is_dir()}


async def test_a_cordoned_directory_gets_no_new_replicas(moving: Moving) -> None:
    first, second = moving.homes
    assert await cordoned(moving) == []
    await cordon(moving, str(first), 1)
    assert await cordoned(moving) == [str(first)]
    assert await create(moving, "t", 4) == 0
    await until(lambda: held(second) == {f"t-{index}" for index in range(4)})
    assert not held(first)
    assert await moving.order(first) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert await moving.order(second) == 0, "it is there"
    await cordon(moving, None, 0)
    assert await create(moving, "u", 2) == 0
    await until(lambda: held(first) == {"u-0", "u-1"})
    assert await moving.order(first) == 0


async def test_a_broker_all_of_whose_directories_are_cordoned_gets_no_replicas(moving: Moving) -> None:
    assert await create(moving, "t") == 0
    await cordon(moving, "*", 2)
    assert await cordoned(moving) == [str(home) for home in moving.homes]
    assert await create(moving, "u") == ErrorCode.INVALID_REPLICATION_FACTOR
    await moving.running.stop()
    await moving.start()
    node_id = moving.running.node.config.node_id
    image = moving.running.node._services.image  # type: ignore[union-attr]
    await until(lambda: len(image().brokers[node_id].cordoned_log_dirs) == 2)
    assert await create(moving, "u") == ErrorCode.INVALID_REPLICATION_FACTOR, "a restart changes nothing"
    await cordon(moving, str(moving.homes[1]), 1)
    assert await create(moving, "u") == 0
    await until(lambda: "u-0" in held(moving.homes[0]))


async def test_a_controller_that_knows_no_cordons_is_told_of_none(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before metadata.version 4.3-IV0 a heartbeat has no place for it."""
    lifecycle: Any = moving.running.node._broker.lifecycle  # type: ignore[union-attr]
    told: list[tuple[list[bytes] | None, int]] = []
    attempt = lifecycle._channel.attempt

    async def watched(request: Any, version: int, **how: Any) -> Any:
        told.append((request.cordoned_log_dirs, version))
        return await attempt(request, version, **how)

    monkeypatch.setattr(lifecycle._channel, "attempt", watched)
    lifecycle.request_heartbeat()
    await until(lambda: told)
    assert told[-1] == ([], 2)
    lifecycle._cordoned = lambda: None
    lifecycle.request_heartbeat()
    await until(lambda: told[-1] == (None, 1))
