"""A log directory changes hands: what Kafka 4.3 wrote opens in Tidelog, and what Tidelog wrote opens in Kafka."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from tests.compatibility.conftest import OPTIONS
from tests.compatibility.filling import (
    Filling,
    fill,
    read_back,
    read_committed_offsets,
)
from tests.compatibility.wire import Wire
from tidelog.bench.frames import record_batch
from tidelog.bench.peers import KafkaProcess
from tidelog.testing.processes import TidelogProcess

pytestmark = pytest.mark.usefixtures("need_java")


@pytest.fixture(scope="module")
def of_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Filling]]:
    """Kafka's data directory as it is after a kill, the same after a clean stop, and what was written into it."""
    home = tmp_path_factory.mktemp("written-by-kafka")
    with KafkaProcess(home, options=OPTIONS) as node:
        filling = fill(node.bootstrap_servers)
        node.kill()
        killed = Path(shutil.copytree(node.data_directory, home / "killed"))
        # The second life also leaves snapshots of the metadata, and a log that no longer begins at 0.
        node.options["metadata.log.max.record.bytes.between.snapshots"] = "1000"
        node.start()
        assert read_committed_offsets(node.bootstrap_servers, filling) == filling.committed
    assert any(node.data_directory.glob("__cluster_metadata-0/*.checkpoint"))
    yield killed, node.data_directory, filling
    shutil.rmtree(home)


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_what_kafka_wrote_opens_here(of_kafka: tuple[Path, Path, Filling], tmp_path: Path, state: str) -> None:
    killed, stopped, filling = deepcopy(of_kafka)
    data = shutil.copytree(killed if state == "killed" else stopped, tmp_path / "data")
    ids = _topic_ids(data)
    with TidelogProcess(tmp_path, options={**OPTIONS, "log.dirs": str(data)}) as node:
        assert read_back(node.bootstrap_servers, filling) == filling.records
        assert read_committed_offsets(node.bootstrap_servers, filling) == filling.committed
        with Wire(node.port) as wire:
            answer = wire.ask("metadata", 12, topics=[{"name": topic} for topic, _ in filling.records])
            assert {one.name: one.topic_id for one in answer.topics}.keys() == {topic for topic, _ in filling.records}
        _goes_on(node.port, filling)
        node.kill()
        node.start()
        assert read_back(node.bootstrap_servers, filling) == filling.records
        assert read_committed_offsets(node.bootstrap_servers, filling) == filling.committed
    assert node.exit_code == 0, node.output_tail()
    assert _topic_ids(data) == ids, "topics keep the ids Kafka gave them"


def test_what_tidelog_wrote_opens_in_kafka(tmp_path: Path) -> None:
    ours = TidelogProcess(tmp_path / "ours", options=OPTIONS)
    with ours:
        filling = fill(ours.bootstrap_servers)
    theirs = KafkaProcess(tmp_path / "theirs", options={**OPTIONS, "log.dirs": str(ours.data_directory)})
    with theirs:
        assert read_back(theirs.bootstrap_servers, filling) == filling.records
        assert read_committed_offsets(theirs.bootstrap_servers, filling) == filling.committed
        _goes_on(theirs.port, filling)
    with ours:
        assert read_back(ours.bootstrap_servers, filling) == filling.records
        assert read_committed_offsets(ours.bootstrap_servers, filling) == filling.committed


def _goes_on(port: int, filling: Filling) -> None:
    """Another record lands behind the last one."""
    topic, index = "filled-none", 0
    with Wire(port) as wire:
        now_ms = int(time.time() * 1000)
        data = [{"index": index, "records": record_batch([b"more"], now_ms)}]
        answer = wire.ask("produce", 9, acks=-1, timeout=10_000, topic_data=[{"name": topic, "partition_data": data}])
        produced = answer.responses[0].partition_responses[0]
        assert (produced.error_code, produced.base_offset) == (0, len(filling.records[topic, index]))
    filling.records[topic, index] = [*filling.records[topic, index], (None, b"more", None, now_ms)]


def _topic_ids(data: Path) -> dict[str, str]:
    """Without the checksum, which Kafka does not write."""
    files = data.glob("filled-*/partition.metadata")
    return {file.parent.name: file.read_text().partition("\ncrc32c")[0].strip() for file in files}
