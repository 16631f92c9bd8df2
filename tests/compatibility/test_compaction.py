"""Compaction beside Kafka: its tools read what our cleaner leaves, and its cleaner leaves the same of the same log."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tests.compatibility.conftest import OPTIONS, start
from tests.unit.storage.cleaning import clean
from tidelog.bench import peers
from tidelog.bench.peers import KafkaProcess
from tidelog.protocol.batches.records import decode_batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import batch_at, headers
from tidelog.testing.processes import ServerProcess, TidelogProcess

CLEANER = {"log.cleaner.backoff.ms": "100", "log.segment.delete.delay.ms": "1000"}
SEGMENT_BYTES = 1024 * 1024  # no less is allowed
SETTINGS = {"segment.bytes": str(SEGMENT_BYTES), "min.cleanable.dirty.ratio": "0.01", "retention.ms": "-1"}
DUMP = "org.apache.kafka.tools.DumpLogSegments"
WRONG = re.compile(
    r"Mismatches in|timestamp mismatch|out of order|not found in the log|isvalid: false|Exception|corrupt"
)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def make_topic(node: ServerProcess, name: str, **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1, config={**SETTINGS, **settings})])[name].result(60)


def set_policy(node: ServerProcess, name: str, policy: str) -> None:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(60)


def write(node: ServerProcess, name: str, size_bytes: int, **options: Any) -> dict[bytes, bytes | None]:
    """Keyed records of every codec with deletions among them; the newest value of each key."""
    rng, newest, sent = random.Random(7), dict[bytes, bytes | None](), 0
    for codec in CODECS:
        producer = Producer(
            {
                "bootstrap.servers": node.bootstrap_servers,
                "compression.type": codec,
                "linger.ms": 5,
                "log_level": 2,
                **options,
            }
        )
        while sent < size_bytes * (CODECS.index(codec) + 1) / len(CODECS):
            key = b"k%d" % rng.randrange(500)
            value = None if rng.random() < 0.05 else rng.randbytes(rng.choice((20, 200, 2000)))
            producer.produce(name, value, key)
            newest[key] = value
            sent += len(value or b"")
            if rng.random() < 0.02:
                producer.flush()
        producer.flush()
    return newest


def read(node: ServerProcess, name: str) -> list[tuple[int, bytes, bytes | None]]:
    options = {"bootstrap.servers": node.bootstrap_servers, "group.id": "none", "enable.partition.eof": True}
    consumer = Consumer({**options, "isolation.level": "read_committed", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(name, 0, 0)])
    found = []
    while True:
        message = consumer.poll(20)
        assert message is not None
        if message.error() is not None:
            assert "end of partition" in str(message.error())
            break
        found.append((message.offset() or 0, message.key() or b"", message.value()))
    consumer.close()
    return found


def await_cleaned(node: ServerProcess, name: str) -> None:
    """Until everything but the active segment is cleaned."""
    folder = node.data_directory / f"{name}-0"
    active = max(int(path.stem) for path in folder.glob("*.log"))
    checkpoint = node.data_directory / "cleaner-offset-checkpoint"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        lines = checkpoint.read_text().splitlines() if checkpoint.exists() else []
        if any(line.startswith(f"{name} 0 ") and int(line.split()[2]) >= active for line in lines):
            return
        time.sleep(0.05)
    pytest.fail(f"{name} was not cleaned up to {active}: {lines}")


def dump(folder: Path, *patterns: str) -> str:
    files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.stat().st_size)
    done = peers.java(DUMP, "--deep-iteration", "--print-data-log", "--files", ",".join(map(str, files)))
    assert done.returncode == 0, done.stderr
    complaint = WRONG.search(done.stdout + done.stderr)
    assert complaint is None, (complaint, done.stdout[:2000], done.stderr[:2000])
    return done.stdout


@pytest.mark.usefixtures("need_java")
def test_kafka_reads_what_is_left(tmp_path: Path) -> None:
    ours = TidelogProcess(tmp_path / "ours", options={**OPTIONS, **CLEANER})
    with ours:
        make_topic(ours, "c", **{"cleanup.policy": "compact"})
        newest = write(ours, "c", 8 * SEGMENT_BYTES, **{"enable.idempotence": True})
        await_cleaned(ours, "c")
        left = read(ours, "c")
        assert {key: value for _, key, value in left} == newest
    folder = ours.data_directory / "c-0"
    closed = sorted(folder.glob("*.log"))[:-1]
    dumped = dump(folder, "*.log", "*.index", "*.timeindex", "*.snapshot")
    assert "deleteHorizonMs: OptionalLong[" in dumped
    assert sum(path.stat().st_size for path in closed) < 3 * SEGMENT_BYTES
    theirs = KafkaProcess(tmp_path / "theirs", options={**OPTIONS, **CLEANER, "log.dirs": str(ours.data_directory)})
    with theirs:
        assert read(theirs, "c") == left
        more = write(theirs, "c", 2 * SEGMENT_BYTES)
        await_cleaned(theirs, "c")
        assert {key: value for _, key, value in read(theirs, "c")} == {**newest, **more}
    with ours:
        assert {key: value for _, key, value in read(ours, "c")} == {**newest, **more}


class Left(NamedTuple):
    base_offset: int
    last_offset: int
    producer: tuple[int, int, int]
    attributes: int
    max_timestamp: int
    records: list[Any]


def left_of(log: PartitionLog) -> list[Left]:
    """Every batch that holds records, or that its producer is known by; the closed segments only."""
    found = []
    for segment in list(log.segments)[:-1]:
        for position, header in headers(segment):
            records = decode_batch(batch_at(segment, position, header), 0, header)
            producer = header.producer_id, header.producer_epoch, header.base_sequence
            max_timestamp = header.max_timestamp if records else 0
            if records or header.producer_id >= 0:
                found.append(
                    Left(header.base_offset, header.last_offset, producer, header.attributes, max_timestamp, records)
                )
    return found


def open_log(data: Path, policy: str) -> Iterator[PartitionLog]:
    """The log `t-0` of a copy of a node's directory."""
    config = LogConfig(segment_bytes=SEGMENT_BYTES, cleanup_policy=frozenset({policy}))
    (data / ".lock").unlink(missing_ok=True)
    directory = LogDirectory.open(OsDisk(), str(data), node_id=1, cluster_id=None)
    now_ms = int(time.time() * 1000)
    log = directory.load(lambda topic: config, now_ms)["t", 0]
    log.set_high_watermark(log.log_end_offset)
    yield log
    directory.close()


def test_kafkas_cleaner_leaves_the_same(need_java: None, tmp_path: Path) -> None:
    """Transactions, some of them aborted, idempotent batches, deletions: cleaned by both from the same files."""
    kafka = start("kafka", tmp_path / "kafka", **CLEANER)
    with kafka:
        make_topic(kafka, "t", **{"cleanup.policy": "delete"})
        write(kafka, "t", 2 * SEGMENT_BYTES, **{"enable.idempotence": True})
        rng = random.Random(3)
        producer = Producer(
            {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": "x", "linger.ms": 5, "log_level": 2}
        )
        producer.init_transactions(20)
        for number in range(60):
            producer.begin_transaction()
            for _ in range(rng.randrange(1, 40)):
                value = None if rng.random() < 0.1 else b"%d-" % number + rng.randbytes(1000)
                producer.produce("t", value, b"k%d" % rng.randrange(800))
            producer.flush()
            if rng.random() < 0.4:
                producer.abort_transaction(20)
            else:
                producer.commit_transaction(20)
        write(kafka, "t", 2 * SEGMENT_BYTES)
    assert kafka.exit_code is not None
    copy = Path(shutil.copytree(kafka.data_directory, tmp_path / "ours"))
    with kafka:
        set_policy(kafka, "t", "compact")
        await_cleaned(kafka, "t")
    for log in open_log(copy, "compact"):
        clean(log)
        ours, aborted = left_of(log), log.aborted_transactions(0, log.log_end_offset)
    dump(copy / "t-0", "*.log", "*.index", "*.timeindex", "*.txnindex", "*.snapshot")
    for log in open_log(kafka.data_directory, "compact"):
        theirs, their_aborted = left_of(log), log.aborted_transactions(0, log.log_end_offset)
    assert [each for each in ours if each.records] == [each for each in theirs if each.records]
    assert {each[:3] for each in ours} == {each[:3] for each in theirs}
    assert [row[:3] for row in aborted] == [row[:3] for row in their_aborted]
    assert len(their_aborted) > 5
