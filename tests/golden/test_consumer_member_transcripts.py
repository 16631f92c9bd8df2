"""Golden transcripts of the client's member of the consumer protocol, recorded from Kafka 4.3.1.

The client's state machine sends what is recorded, when it is answered as recorded. The fake coordinator of the
client's tests answers as recorded, and so does Kafka itself (TIDELOG_COMPAT_KAFKA=1; `--rewrite` records anew then).
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from tests.golden.consumer_member_transcript import Remote, Replay, Transcript
from tests.unit.client.fake_consumer_group import FakeConsumerGroups

DIRECTORY = Path(__file__).parent / "consumer_member"
TRANSCRIPTS = sorted(DIRECTORY.glob("*.txt"))
PARTITIONS = {"t": 4, "u": 2}
TOPIC_IDS = {name: bytes([number]) * 16 for number, name in enumerate(PARTITIONS, 1)}


def identifier(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=identifier)
def test_the_member_sends_what_is_recorded(path: Path) -> None:
    script = path.read_text().splitlines()
    assert Transcript(Replay(script, TOPIC_IDS), "g", TOPIC_IDS).run(script) == script


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=identifier)
def test_the_fake_answers_as_recorded(path: Path) -> None:
    groups = FakeConsumerGroups(lambda: {name: (TOPIC_IDS[name], count) for name, count in PARTITIONS.items()})
    script = path.read_text().splitlines()
    assert Transcript(groups.heartbeat, "g", TOPIC_IDS).run(script) == script


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TIDELOG_COMPAT_KAFKA"), reason="set TIDELOG_COMPAT_KAFKA=1 to ask Kafka itself")
def test_kafka_answers_as_recorded(tmp_path: Path, rewrite: bool) -> None:
    from tests.compatibility.conftest import create_topic
    from tests.compatibility.wire import Wire
    from tidelog.bench import peers

    if (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    with peers.KafkaProcess(tmp_path, options={"offsets.topic.num.partitions": "1"}) as kafka:
        for name, count in PARTITIONS.items():
            create_topic(kafka.port, name, count)
        with Wire(kafka.port) as wire:
            described = wire.ask("metadata", 12, topics=[{"name": name} for name in PARTITIONS]).topics
            topic_ids = {topic.name: topic.topic_id.bytes for topic in described}
            wire.ask("find_coordinator", 4, coordinator_keys=["g"])
            time.sleep(3)  # until the offsets topic is there and loaded
        for path in TRANSCRIPTS:
            script = path.read_text().splitlines()
            # On a busy machine the assignor may run after the next request: then once more, slowly.
            for settle_s in (1.5, 4.0):
                remote = Remote(kafka.port, settle_s)
                answered = Transcript(remote, f"g-{uuid.uuid4()}", topic_ids).run(script)
                remote.close()
                if answered == script or rewrite:
                    break
            if rewrite:
                path.write_text("\n".join(answered) + "\n")
            else:
                assert answered == script
