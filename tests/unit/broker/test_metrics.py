"""What a scrape of a real node says, compared with what was done to it, and with what Kafka means by it."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire, batch
from tests.unit.broker.scraping import Scrape, commit, get, live, scrape
from tests.unit.broker.test_node import fetch, produce
from tests.unit.broker.transactions import (
    NOW,
    PID,
    FakeCoordinator,
    marker,
    partition_of,
    transactional,
    use,
    write_markers,
)
from tests.unit.broker.transactions import produce as produce_transactional
from tidelog.broker.apis.error_counts import count_errors
from tidelog.broker.metrics.cluster import ClusterCounts
from tidelog.broker.metrics.definitions import COUNTER, HISTOGRAM, METRICS
from tidelog.broker.metrics.exposition import Exposition, render
from tidelog.broker.metrics.partitions import OTHERS, PartitionTotals, TopicSeries
from tidelog.broker.network.counters import Histogram, RequestCounters, TopicTraffic
from tidelog.broker.replicas.flushes import Flushes
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.protocol.messages.sync_group import SyncGroupResponse
from tidelog.replication.controller.metadata.image import (
    NO_LEADER,
    MetadataDelta,
    MetadataImage,
    PartitionImage,
    TopicImage,
)
from tidelog.storage.producers.producer_state import ProducerState


@pytest.fixture
async def measured(start_node: StartNode) -> RunningNode:
    return await start_node(**{"metrics.port": "0"})


@pytest.fixture
async def lived(measured: RunningNode) -> Wire:
    """A connection to a node that `live` was done to."""
    wire = await measured.connect()
    await live(wire)
    return wire


async def test_every_metric_of_the_table_is_in_a_scrape_and_nothing_else(measured: RunningNode, lived: Wire):
    found = await scrape(measured)
    own = {name: kind for name, kind in found.types.items() if name.startswith("tidelog_")}
    assert own == {name: metric.kind for name, metric in METRICS.items()}
    others = {name.partition("_")[0] for name in found.types} - {"tidelog"}
    assert others == {"process", "python"}


def test_names_are_as_prometheus_wants_them():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"tidelog(_[a-z]+)+", name), name
        assert name.endswith("_total") == (metric.kind == COUNTER), name
        assert not re.search(r"_(ms|milliseconds|kb|percent|count)\b", name), name
        assert metric.kind != HISTOGRAM or name.endswith("_seconds"), name
        assert metric.help.endswith("."), name
        assert len(metric.help) <= 100, name


async def test_what_is_produced_and_fetched_is_counted(measured: RunningNode, lived: Wire):
    found = await scrape(measured)
    size = len(batch(b"one", b"two"))
    assert found("tidelog_topic_records_in_total", topic="t") == 4
    assert found("tidelog_topic_bytes_in_total", topic="t") == 2 * size
    assert found("tidelog_topic_bytes_out_total", topic="t") == 2 * size
    assert found("tidelog_log_size_bytes", topic="t") == 2 * size
    assert found("tidelog_log_segments", topic="t") == 1
    assert found("tidelog_topic_records_in_total", topic="__consumer_offsets") == 1
    assert found("tidelog_leader_partitions") == found("tidelog_partitions") == 3
    assert found("tidelog_connections", listener="PLAINTEXT") == 1
    assert found("tidelog_connections_accepted_total", server="broker") == 1
    assert found("process_resident_memory_bytes") > 1e6


async def test_requests_are_counted_by_api_and_version_with_their_errors(measured: RunningNode, lived: Wire):
    found = await scrape(measured)
    assert found("tidelog_requests_total", api="Produce", version="9") == 3
    assert found("tidelog_requests_total", api="FetchConsumer", version="11") == 2
    assert found("tidelog_requests_total", api="CreateTopics", version="7") >= 1
    assert found("tidelog_request_duration_seconds_count", api="Produce") == 3
    assert found("tidelog_request_duration_seconds_bucket", api="Produce", le="+Inf") == 3
    assert 0 < found("tidelog_request_duration_seconds_sum", api="Produce") < 5
    assert found("tidelog_request_errors_total", api="Produce", error="UNKNOWN_TOPIC_OR_PARTITION") == 1
    assert found("tidelog_request_errors_total", api="FetchConsumer", error="OFFSET_OUT_OF_RANGE") == 1


async def test_a_fetch_that_waits_is_waiting_and_its_time_counts(measured: RunningNode, lived: Wire):
    other = await measured.connect()
    before = await scrape(measured)
    other.send(fetch("t", offset=4, wait_ms=600_000), 11)
    for _ in range(500):
        found = await scrape(measured)
        if found("tidelog_requests_waiting", operation="FetchConsumer") == 1:
            break
    assert found("tidelog_requests_waiting", operation="FetchConsumer") == 1
    assert found("tidelog_request_duration_seconds_count", api="FetchConsumer") == 2  # it is not answered yet
    await asyncio.sleep(0.05)
    await lived.call(produce("t", batch(b"three")), 9, ProduceResponse)
    await other.receive(FetchResponse, 11)
    found = await scrape(measured)
    assert found("tidelog_requests_waiting", operation="FetchConsumer") == 0
    spent = "tidelog_request_duration_seconds_sum"
    assert found(spent, api="FetchConsumer") - before(spent, api="FetchConsumer") > 0.05
    assert found("tidelog_request_duration_seconds_count", api="FetchConsumer") == 3


async def test_a_produce_that_waits_for_the_device_is_waiting(start_node: StartNode, monkeypatch: pytest.MonkeyPatch):
    node = await start_node(**{"metrics.port": "0"})
    wire = await node.connect()
    await wire.create_topic("t", flush_messages="1")
    held: list[tuple[Flushes, Any]] = []
    flush = Flushes.flush
    monkeypatch.setattr(Flushes, "flush", lambda self, partition: held.append((self, partition)))
    wire.send(produce("t", batch(b"one")), 9)
    await until(lambda: bool(held))
    assert (await scrape(node))("tidelog_requests_waiting", operation="Produce") == 1
    monkeypatch.undo()
    flush(*held[0])
    await wire.receive(ProduceResponse, 9)
    found = await scrape(node)
    assert found("tidelog_requests_waiting", operation="Produce") == 0
    assert found("tidelog_log_flush_duration_seconds_count") >= 1


async def test_a_groups_lag_is_told_by_partition(measured: RunningNode, lived: Wire):
    found = await scrape(measured)
    assert found("tidelog_group_lag_records", group="g", topic="t", partition="0") == 3
    assert found("tidelog_groups", state="Empty") == 1
    assert found("tidelog_group_lag_series_left_out") == 0
    await commit(lived, "g", "t", 4)
    assert (await scrape(measured))("tidelog_group_lag_records", group="g", topic="t", partition="0") == 0


async def test_what_is_too_large_is_counted_as_rejected(measured: RunningNode):
    wire = await measured.connect()
    await wire.create_topic("t", max_message_bytes="100")
    data = batch(b"x" * 200)
    answer = await wire.call(produce("t", data), 9, ProduceResponse)
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.MESSAGE_TOO_LARGE
    found = await scrape(measured)
    assert found("tidelog_topic_bytes_rejected_total", topic="t") == len(data)
    assert found("tidelog_topic_produce_failures_total", topic="t") == 0  # Kafka: only what could not be known
    assert found("tidelog_topic_records_in_total", topic="t") == 0


async def test_open_transactions_are_told_with_their_age_and_what_they_hold_back(measured: RunningNode, lived: Wire):
    node = await scrape(measured)
    assert node("tidelog_open_transactions") == node("tidelog_oldest_open_transaction_seconds") == 0
    coordinator = use(measured, FakeCoordinator())
    await lived.create_topic("txn", 2)
    assert await produce_transactional(lived, {("txn", 0): transactional(0, 3), ("txn", 1): transactional()}) == [0, 0]
    log = partition_of(measured, "txn").log
    log.producers.entries[PID].last_timestamp -= 3600_000
    node = await scrape(measured)
    assert node("tidelog_open_transactions") == 2
    assert node("tidelog_stable_offset_lag_records", topic="txn") == 3
    since_import_s = time.time() - NOW / 1000  # the records are as old as the tests' module
    assert 3600 <= node("tidelog_oldest_open_transaction_seconds") < 3700 + since_import_s
    assert node("tidelog_partitions_with_late_transactions") == 1
    assert node("tidelog_transaction_verification_failures_total") == 0
    coordinator.error = ErrorCode.INVALID_TXN_STATE
    await produce_transactional(lived, {("txn", 0): transactional(producer_id=8)})
    await write_markers(lived, marker([("txn", 0), ("txn", 1)]))
    node = await scrape(measured)
    assert node("tidelog_open_transactions") == node("tidelog_partitions_with_late_transactions") == 0
    assert node("tidelog_stable_offset_lag_records", topic="txn") == 0
    assert node("tidelog_transaction_verification_failures_total") == 1
    assert node("tidelog_transaction_markers_waiting") == node("tidelog_transaction_markers_retried") == 0


async def test_a_deleted_topic_leaves_no_series(measured: RunningNode, lived: Wire):
    request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=60_000)
    await lived.call(request, 6, DeleteTopicsResponse)
    for _ in range(500):
        found = await scrape(measured)
        if not any(("topic", "t") in labels for _, labels in found.series):
            return
    raise AssertionError("the topic is still told of")


async def test_the_quorum_and_the_controller_are_told(measured: RunningNode, lived: Wire):
    found = await scrape(measured)
    assert found("tidelog_quorum_role", role="leader") == 1
    assert sum(found.of("tidelog_quorum_role").values()) == 1
    assert found("tidelog_quorum_leader_id") == 1
    assert found("tidelog_metadata_applied_offset") + 1 == found("tidelog_quorum_high_watermark")
    assert found("tidelog_controller_active") == found("tidelog_controller_active_brokers") == 1
    assert found("tidelog_controller_topics") == 2
    assert found("tidelog_controller_partitions") == 3
    assert found("tidelog_controller_offline_partitions") == 0
    assert found("tidelog_ready") == 1


async def test_who_asks_while_a_scrape_runs_gets_the_same(measured: RunningNode, lived: Wire):
    pages = await asyncio.gather(*(get(measured, "/metrics") for _ in range(5)))
    assert len({body for _, body in pages}) < 5
    assert all(status == 200 for status, _ in pages)


async def test_beyond_so_many_topics_they_are_added_up(start_node: StartNode):
    node = await start_node(**{"metrics.port": "0", "metrics.topics.max": "2"})
    wire = await node.connect()
    for name in ("a", "b", "c", "d"):
        await wire.create_topic(name)
        await wire.call(produce(name, batch(b"one")), 9, ProduceResponse)
    found = await scrape(node)
    told = {dict(labels)["topic"]: value for labels, value in found.of("tidelog_topic_records_in_total").items()}
    assert told == {"a": 1, "b": 1, OTHERS: 2}
    assert found("tidelog_log_segments", topic=OTHERS) == 2


def test_counters_of_the_others_never_go_back():
    series = TopicSeries(1)
    traffic = {name: TopicTraffic() for name in "abc"}
    for each in traffic.values():
        each.records_in = 10
    series.update(traffic)
    assert list(series.shown) == ["a"]
    del traffic["b"], traffic["a"]
    traffic["d"] = TopicTraffic()
    series.update(traffic)
    assert list(series.shown) == ["d"]
    others = series.others()
    assert others is not None
    assert others.records_in == 20
    traffic["c"] = TopicTraffic()  # deleted and made again
    traffic["c"].records_in = 1
    series.update(traffic)
    others = series.others()
    assert others is not None
    assert others.records_in == 21


def replica(index: int, isr: tuple[int, ...], replicas: tuple[int, ...] = (1, 2, 3), minimum: int = 2) -> Any:
    """A leader with a book as `isr.py` keeps it."""
    book = SimpleNamespace(
        isr=isr, replicas=replicas, min_isr=lambda wanted: min(wanted, len(replicas))
    )  # Kafka's effectiveMinIsr
    log = SimpleNamespace(
        producers=ProducerState(), size_bytes=10, segment_count=1, directory=f"/data/t-{index}", damaged_ranges=list,
        high_watermark=3, last_stable_offset=3,
    )  # fmt: skip
    watch = SimpleNamespace(produces=SimpleNamespace(waiting=()), syncs=SimpleNamespace(waiting=()))
    return SimpleNamespace(
        log=log, watch=watch, offline=False, topic="t", topic_id=b"t" * 16, index=index, leads=True, in_sync=book,
        min_insync_replicas=minimum,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("isr", "minimum", "under_replicated", "under_min", "at_min"),
    [
        ((1, 2, 3), 2, 0, 0, 0),
        ((1, 2), 2, 1, 0, 1),
        ((1,), 2, 1, 1, 0),
        ((1, 2, 3), 5, 0, 0, 1),
    ],
)
def test_under_replicated_and_min_isr_are_kafkas(
    isr: tuple[int, ...], minimum: int, under_replicated: int, under_min: int, at_min: int
):
    found = PartitionTotals()
    found.add_partitions([replica(0, isr, minimum=minimum)], MetadataImage())
    assert (found.under_replicated, found.under_min_isr, found.at_min_isr) == (under_replicated, under_min, at_min)


def test_replicas_that_are_being_added_are_not_missed():
    image = MetadataImage()
    placed = PartitionImage((1, 2, 3, 4), (1, 2, 3), 1, adding_replicas=(4,), removing_replicas=(3,))
    image.topics_by_id[b"t" * 16] = TopicImage("t", b"t" * 16, {0: placed})
    found = PartitionTotals()
    found.add_partitions([replica(0, (1, 2, 3), (1, 2, 3, 4))], image)
    assert (found.reassigning, found.under_replicated) == (1, 0)


async def test_a_connection_that_is_cut_is_counted_by_reason(measured: RunningNode):
    before = await scrape(measured)
    wire = await measured.connect()
    wire.writer.write(b"\x7f\xff\xff\xff not a request")
    assert await wire.reader.read() == b""
    found = await scrape(measured)
    cut = "tidelog_connections_cut_total"
    assert found(cut, server="broker", reason="malformed") == 1
    assert before(cut, server="broker", reason="malformed") == 0
    assert found(cut, server="broker", reason="idle") == 0


def test_a_leader_from_outside_the_isr_is_an_unclean_election():
    def image(leader: int, isr: tuple[int, ...]) -> MetadataImage:
        made = MetadataImage()
        made.topics_by_id[b"t" * 16] = TopicImage("t", b"t" * 16, {0: PartitionImage((1, 2, 3), isr, leader)})
        return made

    counts = ClusterCounts()
    changed = MetadataDelta(changed_partitions={b"t" * 16: {0}})
    history = [(1, (1, 2)), (2, (2,)), (NO_LEADER, (2,)), (3, (3,)), (3, (3, 1)), (1, (1, 3))]
    seen = []
    for leader, isr in history:
        counts.on_image(image(leader, isr), changed)
        seen.append(counts.unclean_elections)
    assert seen == [0, 0, 0, 1, 1, 1]


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    out = Exposition()
    out.add_histogram("tidelog_loop_delay_seconds", histogram)
    found = Scrape(render(out.families()[0]).decode())
    told = {dict(labels)["le"]: value for labels, value in found.of("tidelog_loop_delay_seconds_bucket").items()}
    assert told == {"1.0": 2, "2.0": 4, "+Inf": 5}
    assert found("tidelog_loop_delay_seconds_sum") == 14


def test_requests_fall_between_the_same_bounds():
    times = iter((0.00005, 0.0001, 0.0002, 60.0))
    produces = RequestCounters(lambda: next(times)).produce
    for _ in range(4):
        produces.answered(0.0)
    assert produces.durations.counts[:2] == [2, 1]
    assert produces.durations.counts[-1] == 1


def test_errors_are_found_wherever_they_are():
    response = MetadataResponse(
        topics=[
            MetadataResponseTopic(error_code=3),
            MetadataResponseTopic(partitions=[MetadataResponsePartition(error_code=5), MetadataResponsePartition()]),
        ]
    )
    found: dict[int, int] = {}
    count_errors(response, found)
    count_errors(SyncGroupResponse(error_code=22), found)
    count_errors(DeleteTopicsResponse(responses=[DeletableTopicResult(error_code=3)]), found)
    assert found == {3: 2, 5: 1, 22: 1}


async def test_a_label_may_hold_anything(measured: RunningNode):
    wire = await measured.connect()
    await live(wire)
    await commit(wire, 'quote" backslash\\ newline\n', "t", 0)
    found = await scrape(measured)
    labels = {"group": 'quote" backslash\\ newline\n', "topic": "t", "partition": "0"}
    assert found("tidelog_group_lag_records", **labels) == 4


async def test_a_cold_request_is_timed_to_its_end(measured: RunningNode):
    wire = await measured.connect()
    await wire.call(MetadataRequest(), 9, MetadataResponse)
    await wire.create_topic("t")
    found = await scrape(measured)
    for api in ("Metadata", "CreateTopics"):
        assert found("tidelog_request_duration_seconds_count", api=api) == 1
    # It waits for the metadata to be on the device.
    assert found("tidelog_request_duration_seconds_sum", api="CreateTopics") > 0.0001


async def test_damage_is_counted_once_and_what_the_scrubber_has_read_is_told(start_node: StartNode, tmp_path: Path):
    node = await start_node(**{"log.cleaner.enable": "false"})
    wire = await node.connect()
    await wire.create_topic("t")
    for _ in range(3):
        await wire.call(produce("t", batch(b"one", b"two")), 9, ProduceResponse)
    await node.stop()
    [path] = (tmp_path / "data").glob("t-0/*.log")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    node = await start_node(**{"metrics.port": "0"})
    wire = await node.connect()
    assert (await scrape(node))("tidelog_damaged_ranges") == 0, "a clean start reads no batches"

    async def is_refused_for_good() -> bool:
        answer = await wire.call(fetch("t", offset=2), 11, FetchResponse)
        return answer.responses[0].partitions[0].error_code == ErrorCode.CORRUPT_MESSAGE

    for _ in range(3000):
        if await is_refused_for_good():
            break
        await asyncio.sleep(0.01)
    assert await is_refused_for_good()
    broker = node.node._broker
    assert broker is not None
    broker.scrubber.counters.verified_bytes = 4711
    broker.scrubber.counters.passes = 3
    found = await scrape(node)
    assert found("tidelog_damaged_ranges") == 1
    assert found("tidelog_damaged_ranges_found_total") == 1
    assert found("tidelog_damaged_ranges_lost_total") == 1
    assert found("tidelog_damaged_ranges_repaired_total") == 0
    assert found("tidelog_scrub_verified_bytes_total") == 4711
    assert found("tidelog_scrub_passes_total") == 3
