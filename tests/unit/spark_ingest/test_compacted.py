"""Reads of a compacted log: every record that is left comes once, whatever range of offsets a task has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.patience import wait_until
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.spark_ingest.fetch import read_range
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.testing.embedded import EmbeddedBroker

pa = pytest.importorskip("pyarrow")

RECORDS, KEYS = 3_000, 40
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": str(1024 * 1024), "min.cleanable.dirty.ratio": "0.01"}
COLUMNS = ("key", "value", "offset")
Row = tuple[int, bytes | None, bytes | None]


def fill(bootstrap: str) -> None:
    rng = random.Random(3)
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic("compacted", 1, configs=CONFIGS)])
    for start, codec in zip(range(0, RECORDS, RECORDS // 3), ("none", "lz4", "zstd")):
        with Producer(bootstrap_servers=bootstrap, compression_type=codec, batch_size=8_000) as producer:
            for number in range(start, start + RECORDS // 3):
                # A record of a key of its own is left however often the cleaner runs.
                key = b"once %d" % number if number % 150 == 99 else b"key %d" % rng.randrange(KEYS)
                producer.send("compacted", rng.randbytes(2_000), key, partition=0)
            producer.flush()


class Compacted:
    """A topic of which the cleaner has left a few records."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def rows(self) -> list[Row]:
        """The records of the log, by a consumer."""
        partition = TopicPartition("compacted", 0)
        found: list[Row] = []
        with Consumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([partition])
            while consumer.position(partition) < RECORDS:
                records = consumer.poll(500).get(partition, [])
                found += [(record.offset, record.key, record.value) for record in records]
        return found

    def read(self, start: int, end: int, **options: str) -> list[Row]:
        given = {"kafka.bootstrap.servers": self.bootstrap, "subscribe": "compacted"}
        parsed = SourceOptions.parse(given | options)
        batches = list(read_range(parsed, OffsetRange("compacted", 0, start, end), COLUMNS))
        columns = [[value for batch in batches for value in batch.column(name).to_pylist()] for name in COLUMNS]
        return [(offset, key, value) for key, value, offset in zip(*columns)]


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compacted]:
    directory = tmp_path_factory.mktemp("compacted")
    with EmbeddedBroker(directory, {"log.cleaner.backoff.ms": 100}) as broker:
        fill(broker.bootstrap_servers)
        # The active segment stays as it is: of 6 MB a third is much more than that.
        wait_until(lambda: len(Compacted(broker.bootstrap_servers).rows()) < RECORDS // 3, every_s=0.2)
    # Nothing changes while the tests read.
    with EmbeddedBroker(directory, {"log.cleaner.enable": False}) as broker:
        yield Compacted(broker.bootstrap_servers)


def gaps(rows: list[Row]) -> list[tuple[int, int]]:
    """The offsets without a record, longest first."""
    ends = [(before + 1, after) for (before, *_), (after, *_) in pairwise([(-1, None, None), *rows])]
    return sorted((each for each in ends if each[1] > each[0]), key=lambda each: each[0] - each[1])


@pytest.mark.slow
def test_a_whole_read_is_what_a_consumer_finds(compacted):
    rows = compacted.rows()
    assert len(gaps(rows)) > 5
    assert compacted.read(0, RECORDS) == rows


@pytest.mark.slow
def test_a_range_that_begins_or_ends_in_a_gap_or_is_one_has_the_records_of_its_offsets(compacted):
    rows = compacted.rows()
    for first, last in gaps(rows)[:5]:
        middle = (first + last) // 2
        for start, end in ((first, last), (middle, last), (first, middle), (middle, last + 40), (first - 40, middle)):
            start, end = max(start, 0), min(end, RECORDS)
            assert compacted.read(start, end) == [row for row in rows if start <= row[0] < end], (start, end)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", ["3000", "65536"])
def test_successive_ranges_join_without_loss_or_repetition(compacted, chunk_bytes):
    cuts = sorted({0, RECORDS, *random.Random(5).sample(range(RECORDS), 25)})
    options = {"kafka.max.partition.fetch.bytes": chunk_bytes}
    joined = [row for start, end in pairwise(cuts) for row in compacted.read(start, end, **options)]
    assert joined == compacted.rows()
