"""SIGKILL at any moment, again and again, with an idempotent producer that never stops.

`log.flush.interval.messages=1`. After every kill the node must start, keep every acknowledged record once and in order,
and find by offset and by time what a full scan finds. TIDELOG_KILLS says how often (`make kill-test`: 100),
TIDELOG_SEED replays the moments.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.checking import Sent, check_offset_lookup, check_partition, check_time_lookup
from tests.cluster.sending import ConfluentSending, Sending, scan
from tests.compatibility.wire import Wire
from tests.doses import dose
from tidelog.testing.processes import TidelogProcess

admin = pytest.importorskip("confluent_kafka.admin")

pytestmark = pytest.mark.slow

KILLS = dose("TIDELOG_KILLS")
SEED = int(os.environ.get("TIDELOG_SEED") or time.time())
TOPIC, PARTITIONS = "killed", 3
FULL_CHECK_EVERY = 20
OPTIONS = {"log.flush.interval.messages": "1", "offsets.topic.num.partitions": "1"}
# Many index entries and a few segments, so that the indexes have something to get wrong.
TOPIC_CONFIG = {"segment.bytes": str(1 << 20), "index.interval.bytes": "512"}


def list_offset(wire: Wire, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
    wanted = [{"name": TOPIC, "partitions": [{"partition_index": partition, "timestamp": timestamp_ms}]}]
    answer = wire.ask("list_offsets", 7, replica_id=-1, topics=wanted).topics[0].partitions[0]
    assert answer.error_code == 0, answer
    return (answer.timestamp, answer.offset) if answer.offset >= 0 else None


def batch_at(wire: Wire, partition: int, offset: int) -> tuple[int, int]:
    wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 4096}
    topics = [{"topic": TOPIC, "partitions": [wanted]}]
    answer = wire.ask("fetch", 12, max_wait=0, min_bytes=0, max_bytes=4096, topics=topics).responses[0].partitions[0]
    assert answer.error_code == 0, answer
    first, last_delta = struct.unpack_from(">q15xi", answer.records)
    return first, first + last_delta


def check_everything(node: TidelogProcess, sent: list[Sent], choice: random.Random, lookups: int = 200) -> None:
    """The whole log of a node that nobody writes to, against what was sent."""
    with Wire(node.port) as wire:
        for partition, expected in enumerate(sent):
            end = list_offset(wire, partition, -1)
            assert end is not None
            found = scan(node.bootstrap_servers, TOPIC, partition, end[1])
            check_partition(expected, found)
            times = [record.timestamp_ms for record in found]
            targets = [choice.randrange(min(times) - 5, max(times) + 6) for _ in range(lookups)]
            check_time_lookup(found, targets, partial(list_offset, wire, partition))
            offsets = [choice.randrange(len(found)) for _ in range(lookups)]
            check_offset_lookup(offsets, partial(batch_at, wire, partition))


def check_what_was_acknowledged(
    node: TidelogProcess, sending: Sending, choice: random.Random, lookups: int = 20
) -> None:
    """Right after a start, while the producer goes on: the log reaches what was acknowledged, and finds it."""
    before = sending.acknowledged()
    with Wire(node.port) as wire:
        for partition, acknowledged in enumerate(before):
            if not acknowledged:
                continue
            end = list_offset(wire, partition, -1)
            assert end is not None
            assert end[1] > max(acknowledged.values()), f"partition {partition} ends at {end[1]}: acknowledged is lost"
            offsets = choice.choices(list(acknowledged.values()), k=lookups)
            check_offset_lookup(offsets, partial(batch_at, wire, partition))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TidelogProcess]:
    with TidelogProcess(tmp_path, options=OPTIONS) as running:
        client = admin.AdminClient({"bootstrap.servers": running.bootstrap_servers, "log_level": 0})
        client.create_topics([admin.NewTopic(TOPIC, PARTITIONS, 1, config=TOPIC_CONFIG)])[TOPIC].result(60)
        yield running


@pytest.fixture
def choice() -> random.Random:
    print(f"seed {SEED}")
    return random.Random(SEED)


@pytest.fixture
def sending(node: TidelogProcess, choice: random.Random) -> Iterator[Sending]:
    running = ConfluentSending(node.bootstrap_servers, TOPIC, PARTITIONS, choice).start()
    yield running
    running.end()


@pytest.mark.hunt
def test_nothing_acknowledged_is_lost_however_often_the_node_is_killed(
    node: TidelogProcess, sending: Sending, choice: random.Random
) -> None:
    slowest_s, early = 0.0, 0
    for kill in range(1, KILLS + 1):
        time.sleep(choice.uniform(0.0, 0.5))
        node.kill()
        while choice.random() < 0.25:
            # Also while it starts and recovers.
            node.launch()
            time.sleep(choice.uniform(0.05, 0.4))
            node.kill()
            early += 1
        slowest_s = max(slowest_s, node.start(30))
        check_what_was_acknowledged(node, sending, choice)
        assert sending.failures == []
        if kill % FULL_CHECK_EVERY == 0 or kill == KILLS:
            sending.settle()
            check_everything(node, sending.sent, choice)
            sending.go_on()
    records = sum(len(one.timestamps_ms) for one in sending.sent)
    assert records > 20 * KILLS, "the producer hardly ran"
    print(f"{KILLS} kills, {early} more during start; {records} records; slowest start {slowest_s:.2f} s")


def test_a_record_cut_off_behind_the_nodes_back_is_noticed(
    node: TidelogProcess, sending: Sending, choice: random.Random
) -> None:
    """Plants a loss: the last batch of a partition is cut from its file, and the check must say so.

    A node that has saved a high watermark behind the batch knows that it was acknowledged: it answers CORRUPT_MESSAGE.
    """
    deadline = time.monotonic() + 120
    while not all(sending.acknowledged()) and time.monotonic() < deadline:
        time.sleep(0.05)
    sending.settle()
    check_everything(node, sending.sent, choice, lookups=20)
    node.kill()
    log = max((node.data_directory / f"{TOPIC}-0").glob("*.log"))
    os.truncate(log, log.stat().st_size - 1)
    node.start()
    with pytest.raises(AssertionError, match=r"is lost|INVALID_MSG"):
        check_everything(node, sending.sent, choice, lookups=20)
