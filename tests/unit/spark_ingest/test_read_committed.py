"""read_committed: what batch reads and streams see of transactions that were committed, aborted or are still open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.transaction_logs import ABORT, COMMIT, OPEN, write_transactions
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin
from tidelog.spark_ingest.fetch import read_range
from tidelog.spark_ingest.offsets import resolve_ranges
from tidelog.spark_ingest.option_table import STREAM
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.stream import StreamDriver
from tidelog.testing.embedded import EmbeddedBroker

pa = pytest.importorskip("pyarrow")

# Committed: offsets 0 to 2, 9 and 10. Aborted: 4 to 7. Each transaction has its marker behind it, but the last.
TRANSACTIONS = ((COMMIT, 3), (ABORT, 4), (COMMIT, 2), (OPEN, 5))
LAST_STABLE_OFFSET, END = 12, 17
VISIBLE = [0, 1, 2, 9, 10]


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("transactions")
    with EmbeddedBroker(directory) as broker, Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("t", 1, configs={"retention.ms": "-1"})])
    write_transactions(directory, "t", TRANSACTIONS)
    with EmbeddedBroker(directory) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def options(bootstrap: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": bootstrap, "subscribe": "t", "kafka.isolation.level": "read_committed"}


def rows(options: SourceOptions, ranges) -> tuple[list[int], set[bytes]]:
    batches = [batch for each in ranges for batch in read_range(options, each, ("offset", "value"))]
    table = pa.Table.from_batches(batches)
    return table["offset"].to_pylist(), set(table["value"].to_pylist())


def test_a_batch_read_sees_committed_records_up_to_the_first_open_transaction(options):
    parsed = SourceOptions.parse(options)
    ranges = resolve_ranges(parsed).ranges
    assert ranges == [("t", 0, 0, LAST_STABLE_OFFSET)]
    assert rows(parsed, ranges) == (VISIBLE, {b"commit"})


def test_a_batch_read_of_everything_sees_everything(options):
    del options["kafka.isolation.level"]
    parsed = SourceOptions.parse(options)
    assert rows(parsed, resolve_ranges(parsed).ranges)[1] == {b"commit", b"abort", b"open"}


@pytest.mark.parametrize("max_offsets", [None, 1, 5])
def test_a_stream_sees_the_same_in_batches_of_any_size(options, max_offsets):
    parsed = SourceOptions.parse(options | {"startingOffsets": "earliest"}, STREAM)
    offsets = []
    with closing(StreamDriver(parsed)) as stream:
        offset = stream.initial_offset()
        while (end := stream.latest_offset(offset, max_offsets=max_offsets)) is not offset:
            for each in stream.ranges(offset, end):
                for batch in read_range(parsed, each, ("offset",)):
                    offsets += batch["offset"].to_pylist()
            offset = end
    assert (offset, offsets) == ({"t": {"0": LAST_STABLE_OFFSET}}, VISIBLE)


def test_a_stream_above_the_last_stable_offset_waits_and_has_lost_nothing(options):
    """As where a query read everything first, and is restarted with read_committed."""
    start = {"t": {"0": END - 1}}
    with closing(StreamDriver(SourceOptions.parse(options, STREAM))) as stream:
        assert stream.latest_offset(start) is start
        assert stream.initial_offset() == {"t": {"0": LAST_STABLE_OFFSET}}


@pytest.mark.parametrize("is_available_now", [True, False])
def test_a_stream_begins_at_its_offset_also_above_the_last_stable_one(options, is_available_now):
    """The checkpoint names the first offset: an earlier one would bring rows from before it in the next run."""
    options["startingOffsets"] = json.dumps({"t": {"0": END - 1}})
    with closing(StreamDriver(SourceOptions.parse(options, STREAM))) as stream:
        if is_available_now:
            stream.prepare_for_available_now()
        first = stream.initial_offset()
        assert first == {"t": {"0": END - 1}}
        assert stream.latest_offset(first) is first
