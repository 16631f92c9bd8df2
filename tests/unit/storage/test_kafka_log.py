"""A partition that Kafka 4.3.1 wrote (kafka_4_3/, see the README there) opens here and says the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.storage.batches import records_of
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import Record
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.producer_snapshots import decode_snapshot, encode_snapshot
from tidelog.storage.segments.log_config import LogConfig

WRITTEN = Path(__file__).parent / "kafka_4_3"
BASE = 1_700_000_000_000
NOW = BASE + 130_000
CONFIG = LogConfig(index_interval_bytes=256)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def expected() -> Iterator[Record]:
    """What the producers were told to send; offsets 124 and 129 are the markers of a commit and an abort."""
    tags = [codec for codec in CODECS for _ in range(24)]
    tags += ["committed"] * 4 + ["marker"] + ["aborted"] * 4 + ["marker"] + ["open"] * 2
    for n, tag in enumerate(tags):
        if tag != "marker":
            key = f"k{n}".encode() if n % 3 else None
            value = (f"{tag}-{n}-" * 4).encode() if n % 7 else None
            headers = (("h", b"v%d" % n), ("none", None)) if n % 5 == 0 else ()
            yield Record(n, BASE + n * 1000 - (n % 4) * 2500, key, value, headers)


@pytest.fixture(params=["clean", "killed", "killed with zero-filled indexes"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PartitionLog]:
    path = tmp_path / "data"
    shutil.copytree(WRITTEN, path)
    if request.param != "clean":
        (path / ".kafka_cleanshutdown").unlink()
        (path / "recovery-point-offset-checkpoint").write_text("0\n1\ngolden 0 0\n")
        (path / "golden-0" / "00000000000000000132.snapshot").unlink()
    if request.param.endswith("indexes"):
        for index in path.glob("golden-0/*index"):
            index.write_bytes(bytes(1 << 16))
        (path / "golden-0" / "00000000000000000124.txnindex").write_bytes(b"")
    directory = LogDirectory.open(OsDisk(), str(path), node_id=1, cluster_id="dGlkZWxvZy1wZWVyLTAwMQ")
    logs = directory.load(lambda topic: CONFIG, NOW)
    assert directory.was_clean is (request.param == "clean")
    yield logs["golden", 0]
    directory.close()


def test_every_record_is_read_back(log: PartitionLog):
    assert (log.log_start_offset, log.log_end_offset) == (0, 132)
    assert records_of(log) == list(expected())
    assert list(log.leader_epochs) == [(0, 0)]
    codecs = {header.compression for _, header in iter_headers(log.read(0, 10**6, 132).regions[0])}
    assert codecs == {0, 1, 2, 3, 4}


def test_look_ups_by_offset_and_time(log: PartitionLog):
    records = list(expected())
    for record in records:
        found = log.read(record.offset, 1, 132)
        [(_, header)] = iter_headers(found.regions[0])
        assert header.base_offset <= record.offset <= header.last_offset
    for timestamp in range(BASE - 1000, BASE + 120_000, 777):
        first = next(r for r in records if r.timestamp >= timestamp)
        found_at = log.offset_for_timestamp(timestamp)
        assert found_at is not None
        assert found_at[:2] == (first.timestamp, first.offset)


def test_producers_and_transactions(log: PartitionLog):
    log.set_high_watermark(132)
    entries = log.producers.entries
    assert {key: entry.last_sequence for key, entry in entries.items()} == {0: 23, 1: 23, 2: 23, 3: 23, 4: 23, 5: 9}
    assert log.last_stable_offset == entries[5].transaction_first_offset == 130
    assert log.aborted_transactions(0, 132) == [(5, 125, 129, 130)]


def test_rebuilt_files_are_kafkas_to_the_byte(log: PartitionLog):
    log.close()
    folder = Path(log.directory)
    for path in (WRITTEN / "golden-0").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_snapshot_written_again_is_the_same():
    for path in (WRITTEN / "golden-0").glob("*.snapshot"):
        assert encode_snapshot(decode_snapshot(path.read_bytes())) == path.read_bytes()
