"""Golden transcripts of the group coordinator: recorded from ours, and what they say is what Kafka 4.3 answers."""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path

import pytest

from tests.golden.group_transcript import INITIAL_DELAY_MS, MIN_SESSION_MS, SLOWER, InProcess, Remote, Transcript

DIRECTORY = Path(__file__).parent / "group"
TRANSCRIPTS = sorted(DIRECTORY.glob("*.txt"))
OURS_ALONE = "# Ours alone"  # the transcript's first line begins so where a Kafka cannot play it


def identifier(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=identifier)
def test_the_coordinator_answers_as_recorded(path: Path, rewrite: bool):
    script = path.read_text().splitlines()
    recorded = Transcript(InProcess()).run(script)
    if rewrite:
        path.write_text("\n".join(recorded) + "\n")
    assert recorded == path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TIDELOG_COMPAT_KAFKA"), reason="set TIDELOG_COMPAT_KAFKA=1 to ask Kafka itself")
def test_kafka_answers_as_recorded(tmp_path: Path):
    from tests.compatibility.conftest import create_topic
    from tests.compatibility.wire import Wire
    from tidelog.bench import peers

    if (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    options = {
        "offsets.topic.num.partitions": "4",
        "group.initial.rebalance.delay.ms": str(INITIAL_DELAY_MS * SLOWER),
        "group.min.session.timeout.ms": str(MIN_SESSION_MS * SLOWER),
    }
    differences: list[str] = []
    with peers.KafkaProcess(tmp_path, options=options) as kafka:
        create_topic(kafka.port, "t", 2)
        with Wire(kafka.port) as wire:
            topics = wire.ask("metadata", 12, topics=[{"name": "t"}]).topics
            wire.ask("find_coordinator", 4, coordinator_keys=["g"])
            time.sleep(3)  # until the offsets topic is there and loaded
        for path in TRANSCRIPTS:
            script = path.read_text().splitlines()
            if script[0].startswith(OURS_ALONE):
                continue
            ours = [line for line in script if not line.startswith("=")]
            # On a busy machine an answer may come after the next request: then once more, slowly.
            for settle_s in (0.2, 0.5):
                remote = Remote(kafka.port, topics[0].topic_id.bytes, settle_s)
                theirs = Transcript(remote, f"g-{path.stem}-{settle_s}").run(script)
                remote.close()
                if theirs == ours:
                    break
            else:
                differences += difflib.unified_diff(
                    ours, theirs, f"{path.stem} here", f"{path.stem} by Kafka", lineterm="", n=2
                )
    assert not differences, "\n".join(differences)
