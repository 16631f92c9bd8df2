"""librdkafka ends its own process when it is answered with zeros where a batch should be: no damage may lead there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compatibility.test_confluent import produce_all
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.testing.processes import TidelogProcess

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")

CONSUMER = """
import sys
import confluent_kafka as confluent
consumer = confluent.Consumer(
    {"bootstrap.servers": sys.argv[1], "group.id": "reader", "check.crcs": True, "log_level": 0}
)
consumer.assign([confluent.TopicPartition("t", 0, int(sys.argv[2]))])
while not (messages := consumer.consume(1, 1.0)):
    pass
print("error" if messages[0].error() else f"record {messages[0].offset()}")
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TidelogProcess]:
    with TidelogProcess(tmp_path, options={"log.scrub.interval.ms": "1000000"}) as running:
        yield running


def first_message(node: TidelogProcess, offset: int) -> str:
    """What a consumer at `offset` is given first."""
    command = [sys.executable, "-c", CONSUMER, node.bootstrap_servers, str(offset)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


@pytest.mark.parametrize("kept_bytes", [0, 75], ids=["at a batch", "in a batch"])
def test_an_active_segment_that_is_cut_and_written_on(node: TidelogProcess, kept_bytes: int) -> None:
    """What lies between the cut and the next batch reads as zeros, and all of it was appended a moment ago."""
    for _ in range(20):
        produce_all(node, "t", [{"value": b"v" * 200, "partition": 0}])
    [path] = node.data_directory.glob("t-0/*.log")
    position, header = list(iter_headers(path.read_bytes()))[10]
    assert header.size_bytes > kept_bytes + 100
    os.truncate(path, position + kept_bytes)
    produce_all(node, "t", [{"value": b"behind", "partition": 0}])
    assert first_message(node, 0) == "record 0"
    assert first_message(node, 20) == "record 20"
    for offset in (10, 11, 19):
        assert first_message(node, offset) == "error"
