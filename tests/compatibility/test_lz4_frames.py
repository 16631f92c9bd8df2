"""Frames of lz4 with each size of block, read by Kafka's own Java consumer and by our readers.

Java's producer writes blocks of 64 KiB only, and our client larger ones for larger batches. Others may write any size.
"""

from __future__ import annotations

import base64
import itertools
import random
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence

import cramjam
import pytest

from tests.compatibility.odd_batches import batch, record
from tests.compatibility.wire import Wire
from tidelog.bench import peers
from tidelog.client.sync import Consumer, Producer
from tidelog.testing.processes import ServerProcess

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("need_java")

NewTopic = Callable[..., str]

# Version 1, independent blocks, no checksums; the size of a block; the descriptor's checksum.
HEADERS = {4: b"\x60\x40\x82", 5: b"\x60\x50\xfb", 6: b"\x60\x60\x51", 7: b"\x60\x70\x73"}
MAGIC = b"\x04\x22\x4d\x18"
STORED = 0x80000000
LINE = 1000
"""A line of base64 has no repetitions that lz4 finds: a block of them is stored as it is."""


def lines(count: int, *, is_random: bool) -> list[bytes]:
    randoms = random.Random(count)
    if is_random:
        return [base64.b64encode(randoms.randbytes(LINE * 3 // 4)) for _ in range(count)]
    return [b"flight %d " % number * (LINE // 12) for number in range(count)]


def frame(data: bytes, size_code: int) -> bytes:
    """Independent blocks of the size with that code."""
    block_bytes = 1 << (8 + 2 * size_code)
    out = [MAGIC, HEADERS[size_code]]
    for start in range(0, len(data), block_bytes):
        chunk = data[start : start + block_bytes]
        block = bytes(cramjam.lz4.compress_block(chunk, store_size=False))
        is_smaller = len(block) < len(chunk)
        out.append(struct.pack("<I", len(block) if is_smaller else len(chunk) | STORED))
        out.append(block if is_smaller else chunk)
    return b"".join([*out, bytes(4)])


def read_by_java(server: ServerProcess, topic: str, count: int) -> list[bytes]:
    done = subprocess.run(
        peers.java_command(
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *("--bootstrap-server", server.bootstrap_servers, "--topic", topic, "--from-beginning"),
            *("--max-messages", str(count), "--timeout-ms", "30000"),
        ),
        check=False,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.splitlines()


def read_by_us(server: ServerProcess, topic: str, count: int) -> Iterator[list[bytes | None]]:
    """The values as objects and as a table: the readers of the client and of the Spark source."""
    options = {"bootstrap_servers": server.bootstrap_servers, "auto_offset_reset": "earliest"}
    with Consumer(topic, **options) as consumer:
        found: list[bytes | None] = []
        while len(found) < count:
            polled = consumer.poll(timeout_ms=30_000)
            assert polled, f"{len(found)} of {count} records"
            found += [each.value for records in polled.values() for each in records]
        yield found
    with Consumer(topic, **options) as consumer:
        found = []
        while len(found) < count:
            polled = consumer.poll_arrow(timeout_ms=30_000, columns=("value",))
            assert polled.num_rows, f"{len(found)} of {count} records"
            found += polled["value"].to_pylist()
        yield found


def assert_all_read(server: ServerProcess, topic: str, written: Sequence[bytes]) -> None:
    assert read_by_java(server, topic, len(written)) == written
    for found in read_by_us(server, topic, len(written)):
        assert found == written


def test_blocks_of_every_size_are_read(server: ServerProcess, new_topic: NewTopic) -> None:
    """A block and a half of lines that repeat themselves, and of lines that do not."""
    topic, written = new_topic(max_message_bytes="10000000"), []
    with Wire(server.port) as wire:
        for size_code in HEADERS:
            count = (1 << (8 + 2 * size_code)) * 3 // (2 * LINE)
            for is_random in (False, True):
                values = lines(count, is_random=is_random)
                payload = b"".join(record(value, delta=delta) for delta, value in enumerate(values))
                records = batch(values, attributes=3, payload=frame(payload, size_code))  # type: ignore[arg-type]
                data = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
                answer = wire.ask("produce", 9, acks=-1, timeout=30_000, topic_data=data)
                assert answer.responses[0].partition_responses[0].error_code == 0, answer
                written += values
    assert_all_read(server, topic, written)


def test_what_our_client_writes_is_read(server: ServerProcess, new_topic: NewTopic) -> None:
    """Batches of less than a block, of exactly one, and of several, as records and as the sink's columns."""
    topic, written = new_topic(), []
    cases = itertools.product((None, 1, 9, 17), (1_000, 65_536, 65_536 + LINE, 262_144, 524_288))
    for level, batch_bytes in cases:
        options = {"compression_type": "lz4", "compression_level": level, "batch_size": batch_bytes}
        with Producer(bootstrap_servers=server.bootstrap_servers, linger_ms=1000, **options) as producer:
            for is_random in (False, True):
                values = lines(batch_bytes * 3 // (2 * LINE), is_random=is_random)
                sent = [producer.send(topic, value, partition=0) for value in values]
                producer.flush()
                assert all(each.result().offset >= 0 for each in sent)
                table = pa.table({"value": pa.array(values, pa.binary()), "partition": [0] * len(values)})
                producer.send_arrow(topic, table).result()
                written += values * 2
    assert_all_read(server, topic, written)
