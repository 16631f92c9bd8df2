"""DescribeLogDirs on a real node: every replica with its size, in the directory that holds it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.test_node import MakeBatch, produce
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.replicas.log_directories import LogDirectories
from tidelog.protocol.messages.describe_log_dirs import (
    DescribableLogDirTopic,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
)
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.files.disk import OsDisk


def sizes(answer: Any) -> dict[str, dict[tuple[str, int], int]]:
    return {
        result.log_dir: {
            (topic.name, each.partition_index): each.partition_size
            for topic in result.topics
            for each in topic.partitions
        }
        for result in answer.results
    }


@pytest.mark.parametrize("version", DescribeLogDirsRequest.VERSIONS)
async def test_replicas_are_told_with_their_size(wire: Any, tmp_path: Path, make_batch: MakeBatch, version: int):
    await wire.create_topic("t", 2)
    batch = make_batch(b"x" * 100)
    await wire.call(produce("t", batch), 9, ProduceResponse)
    home = str(tmp_path / "data")
    everything = await wire.call(DescribeLogDirsRequest(topics=None), version, DescribeLogDirsResponse)
    assert sizes(everything) == {home: {("t", 0): len(batch), ("t", 1): 0}}
    (result,) = everything.results
    volume = os.statvfs(home)
    size_bytes = volume.f_blocks * volume.f_frsize if version >= 4 else -1
    assert (result.error_code, result.total_bytes, result.is_cordoned) == (0, size_bytes, False)
    assert (0 < result.usable_bytes <= size_bytes) if version >= 4 else result.usable_bytes == -1
    some = DescribeLogDirsRequest(
        topics=[DescribableLogDirTopic(topic="t", partitions=[1]), DescribableLogDirTopic(topic="u", partitions=[0])]
    )
    assert sizes(await wire.call(some, version, DescribeLogDirsResponse)) == {home: {("t", 1): 0}}
    none = DescribeLogDirsRequest(topics=[])
    assert sizes(await wire.call(none, version, DescribeLogDirsResponse)) == {home: {}}


async def test_each_directory_has_its_own(start_node: Any, tmp_path: Path):
    homes = [str(tmp_path / name) for name in ("one", "two")]
    wire = await (await start_node(**{"log.dirs": ",".join(homes)})).connect()
    await wire.create_topic("t", 4)
    answer = await wire.call(DescribeLogDirsRequest(topics=None), 5, DescribeLogDirsResponse)
    found = sizes(answer)
    assert set(found) == set(homes)
    assert sorted(key for held in found.values() for key in held) == [("t", index) for index in range(4)]
    assert all(found.values()), "both are used"


def test_the_path_of_a_directory_whose_name_is_not_utf_8_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every description failed."""
    below = tmp_path / os.fsdecode(b"d\xe2t\xe4")
    below.mkdir()
    monkeypatch.chdir(below)
    loop = asyncio.new_event_loop()
    loop.close()
    directories = LogDirectories(NodeConfig.load(None, {"log.dirs": "here"}), OsDisk(), loop, lambda error: None)
    assert directories.home_paths == {"here": f"{tmp_path}/d\\xe2t\\xe4/here"}
