from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.model import EARLIEST_TIMESTAMP, NewTopic, OffsetAndTimestamp
from tidelog.client.network import offsets, raw_fetch
from tidelog.client.network.cluster import Cluster
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.batches.columnar import COLUMNS
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.spark_ingest import fetch
from tidelog.spark_ingest.fetch import read_range, read_ranges
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.planning import OffsetRange

pa = pytest.importorskip("pyarrow")

TIME = 1_700_000_000_000


def read(node, topic, start, end, *, partition=0, columns=COLUMNS, topic_id=bytes(16), **options):
    """All rows of a range as one table."""
    planned = OffsetRange(topic, partition, start, end)
    batches = list(read_range(node.options(subscribe=topic, **options), planned, columns, topic_id))
    return pa.Table.from_batches(batches) if batches else None


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_record_of_the_range_comes_once_and_in_order(node, new_topic, codec):
    topic = new_topic(0, 500, compression_type=codec, batch_size=2_000)
    table = read(node, topic, 0, 500, partition=1)
    assert table["offset"].to_pylist() == list(range(500))
    assert table["value"].to_pylist() == [b"value %d" % offset for offset in range(500)]
    assert table["key"].to_pylist() == [b"key %d" % offset for offset in range(500)]
    assert set(table["topic"].to_pylist()) == {topic}
    assert set(table["partition"].to_pylist()) == {1}
    assert table["timestamp"].cast(pa.int64()).to_pylist()[:2] == [TIME * 1000, (TIME + 1) * 1000]


def test_a_timestamp_that_spark_cannot_hold_is_an_error_and_no_other_time(node):
    unbounded = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("nanoseconds", 1, configs=unbounded)])
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for timestamp in (TIME, TIME * 1_000_000, 2**53):
            producer.send("nanoseconds", b"v", partition=0, timestamp_ms=timestamp).result(30)
    assert read(node, "nanoseconds", 0, 1)["timestamp"].cast(pa.int64()).to_pylist() == [TIME * 1000]
    with pytest.raises(KafkaError, match=r"a record of nanoseconds-0 at offsets 0 to 2 .* A schema without the column"):
        read(node, "nanoseconds", 0, 3)
    assert read(node, "nanoseconds", 0, 3, columns=("value", "offset")).num_rows == 3
    assert read(node, "nanoseconds", 2, 3)["timestamp"].cast(pa.int64()).to_pylist() == [2**53 * 1000]


@pytest.mark.slow
def test_a_read_imports_neither_pandas_nor_the_functions_of_arrow(node, new_topic):
    code = (
        "import sys\n"
        "from tidelog.spark_ingest.fetch import read_range\n"
        "from tidelog.spark_ingest.options import SourceOptions\n"
        "from tidelog.spark_ingest.planning import OffsetRange\n"
        "servers, topic = sys.argv[1:]\n"
        "options = SourceOptions.parse({'kafka.bootstrap.servers': servers, 'subscribe': topic}, 'batch')\n"
        "batches = read_range(options, OffsetRange(topic, 0, 0, 10), ('value', 'timestamp'))\n"
        "rows = sum(batch.num_rows for batch in batches)\n"
        "print(rows, [name for name in ('pandas', 'pyarrow.compute') if name in sys.modules])"
    )
    topic = new_topic(10)
    read(node, topic, 0, 10)  # compiles the kernel, which takes long on a busy machine
    arguments = [sys.executable, "-c", code, node.bootstrap_servers, topic]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "10 []\n"


@pytest.mark.slow
def test_a_task_of_several_ranges_reads_one_after_the_other(node, new_topic):
    topic = new_topic(20, 0, 30)
    node.topic(f"{topic}-gone", 5)
    gone_id = topic_id_of(node, f"{topic}-gone")
    delete(node, f"{topic}-gone")
    node.topic(f"{topic}-gone", 5)
    ranges = [
        (OffsetRange(topic, 2, 3, 6), topic_id_of(node, topic)),
        (OffsetRange(f"{topic}-gone", 0, 0, 5), gone_id),
        (OffsetRange(topic, 0, 18, 20), bytes(16)),
    ]
    options = node.options(subscribe=topic, failOnDataLoss="false")
    table = pa.Table.from_batches(list(read_ranges(options, ranges, ("partition", "offset"))))
    assert table.to_pydict() == {"partition": [2, 2, 2, 0, 0], "offset": [3, 4, 5, 18, 19]}


def test_a_range_inside_a_batch_is_cut_out_of_it(node, new_topic):
    topic = new_topic(300)
    assert read(node, topic, 17, 23)["offset"].to_pylist() == list(range(17, 23))
    assert read(node, topic, 299, 300)["offset"].to_pylist() == [299]
    assert read(node, topic, 5, 5) is None


def test_many_small_fetches_lose_and_repeat_nothing(node, new_topic):
    topic = new_topic(1000, batch_size=500)
    table = read(node, topic, 3, 997, **{"kafka.max.partition.fetch.bytes": "2000"})
    assert table["offset"].to_pylist() == list(range(3, 997))


def squeezed(node, topic, batches, value):
    """Batches of one record that compress to next to nothing, a chunk of them far beyond the bound of one batch."""
    with Producer(bootstrap_servers=node.bootstrap_servers, compression_type="zstd", max_request_size=2**25) as records:
        for _ in range(batches):
            records.send_and_wait(topic, value, partition=0)


def test_a_topic_that_compresses_well_is_read_whatever_the_ratio(node, new_topic):
    topic = new_topic(0)
    squeezed(node, topic, 12, bytes(900_000))
    table = read(node, topic, 0, 12, maxDecompressedBatchBytes="1000000")
    assert table["offset"].to_pylist() == list(range(12))
    assert set(map(len, table["value"].to_pylist())) == {900_000}


def test_a_batch_above_the_bound_is_refused_with_the_option_that_raises_it(node, new_topic):
    topic = new_topic(1)
    squeezed(node, topic, 1, bytes(900_000))
    with pytest.raises(KafkaError) as failure:
        read(node, topic, 0, 2, maxDecompressedBatchBytes="800000")
    assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE
    message = str(failure.value)
    assert f"{topic}-0: batch at offset 1: zstd: decompresses to more than 800000 bytes" in message
    assert "maxDecompressedBatchBytes" in message


def test_only_the_columns_asked_for(node, new_topic):
    table = read(node, new_topic(3), 0, 3, columns=("value", "offset"))
    assert table.schema.names == ["value", "offset"]


def test_a_reader_that_stops_early_leaves_nothing_open(node, new_topic):
    topic = new_topic(2000, batch_size=500)
    options = node.options(subscribe=topic, **{"kafka.max.partition.fetch.bytes": "2000"})
    reading = read_range(options, OffsetRange(topic, 0, 0, 2000), ("offset",))
    assert next(reading).num_rows > 0
    reading.close()  # warnings are errors here: an unclosed loop or transport would fail the test


def test_waiting_for_records_that_do_not_come_ends_in_a_clear_error(node, new_topic, monkeypatch):
    real = raw_fetch._Reader._fetch

    async def ask(reader, offset):
        answer = await real(reader, offset)
        answer.records = b""
        return answer

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    options = {"kafkaConsumer.pollTimeoutMs": "300", "kafka.fetch.max.wait.ms": "50"}
    with pytest.raises(KafkaError) as failure:
        read(node, new_topic(5), 3, 5, failOnDataLoss="false", **options)
    assert failure.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_waiting_for_a_transaction_to_end_is_said(node, new_topic, monkeypatch):
    real = raw_fetch._Reader._fetch

    async def ask(reader, offset):
        answer = await real(reader, min(offset, 3))
        answer.records, answer.last_stable_offset = b"", 3
        return answer

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    options = {"kafkaConsumer.pollTimeoutMs": "300", "kafka.isolation.level": "read_committed"}
    with pytest.raises(KafkaError, match="an open transaction held the records back") as failure:
        read(node, new_topic(5), 3, 5, **options)
    assert failure.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_a_reader_may_take_any_time_for_the_rows(node, new_topic, monkeypatch):
    """As a task whose rows go through a slow function of a user: no broker is late by that."""
    topic, late_s, asked = new_topic(0), [0.0], []
    node_time, real = asyncio.BaseEventLoop.time, raw_fetch._Reader._fetch

    def time_of_task(loop):
        return node_time(loop) + (late_s[0] if threading.current_thread() is threading.main_thread() else 0)

    async def watched(reader, offset):
        asked.append(offset)
        return await real(reader, offset)

    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for _ in range(40):  # an answer of 8 MiB comes in many pieces
            producer.send(topic, bytes(500_000), partition=0)
        producer.flush()
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", time_of_task)
    monkeypatch.setattr(raw_fetch._Reader, "_fetch", watched)
    offsets = []
    for batch in read_range(node.options(subscribe=topic), OffsetRange(topic, 0, 0, 40), ("offset", "value")):
        offsets += batch["offset"].to_pylist()
        late_s[0] += 1000  # far above kafkaConsumer.pollTimeoutMs
    assert offsets == list(range(40))
    assert len(asked) == len(set(asked))


def test_over_a_slow_link_smaller_chunks_are_asked_for(node, new_topic, monkeypatch):
    real, asked = raw_fetch._Reader._fetch, []

    async def ask(reader, offset):
        asked.append(reader._chunk_size.bytes)
        if asked[-1] > 2**19:  # more than comes within the request timeout
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "127.0.0.1:1 did not answer Fetch in time")
        return await real(reader, offset)

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    options = {"kafkaConsumer.pollTimeoutMs": "60000", "kafka.retry.backoff.ms": "1"}
    topic = new_topic(50)
    assert read(node, topic, 0, 50, **options)["offset"].to_pylist() == list(range(50))
    assert asked == [2**23, 2**21, 2**19]
    assert read(node, topic, 0, 50, **options, **{"kafka.max.partition.fetch.bytes": "200000"}).num_rows == 50
    assert asked[3:] == [200_000]


def test_over_a_link_that_often_breaks_smaller_chunks_are_asked_for(node, new_topic, monkeypatch):
    """A task asked for the same chunk until its time was up."""
    real, asked = raw_fetch._Reader._fetch, []

    async def ask(reader, offset):
        asked.append(reader._chunk_size.bytes)
        if asked[-1] > 2**19:  # more than comes before the connection breaks
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "127.0.0.1:1 closed the connection")
        return await real(reader, offset)

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    topic = new_topic(50)
    table = read(node, topic, 0, 50, **{"kafkaConsumer.pollTimeoutMs": "60000", "kafka.retry.backoff.ms": "1"})
    assert table["offset"].to_pylist() == list(range(50))
    assert asked == [2**23, 2**23, 2**21, 2**19]


def test_chunks_grow_again_when_their_leader_is_back(node, new_topic, monkeypatch):
    """A leader that was away for a minute left a task with chunks of 64 KiB."""
    real, asked = raw_fetch._Reader._fetch, []

    async def ask(reader, offset):
        asked.append(reader._chunk_size.bytes)
        if len(asked) <= 8:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "127.0.0.1:1 closed the connection")
        return await real(reader, offset)

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    topic = new_topic(0)
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for _ in range(40):
            producer.send(topic, bytes(100_000), partition=0)
        producer.flush()
    table = read(node, topic, 0, 40, **{"kafkaConsumer.pollTimeoutMs": "60000", "kafka.retry.backoff.ms": "1"})
    assert table["offset"].to_pylist() == list(range(40))
    assert asked[7:12] == [2**16, 2**16, 2**18, 2**20, 2**22]


def test_a_size_that_failed_is_tried_again_later_each_time():
    size, failed = raw_fetch._ChunkSize(2**23), []
    for step in range(400):
        if size.bytes > 2**21:  # more than comes within the request timeout
            failed.append(step)
            size.shrink(2**16)
        else:
            size.handle_arrival()
    assert failed == [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]


def test_a_log_that_ends_before_the_range_is_data_loss(node, new_topic):
    topic = new_topic(5)
    with pytest.raises(DataLoss, match=rf"offsets 50 to 59 of {topic}-0 are gone.*ends at 5.*failOnDataLoss"):
        read(node, topic, 50, 60)
    assert read(node, topic, 50, 60, failOnDataLoss="false") is None


def test_a_log_that_begins_after_the_range_is_read_from_where_it_begins(node, new_topic, monkeypatch):
    """As after retention: fetches below 30 are out of range, and the log is said to begin at 30."""
    topic = new_topic(50)
    real_fetch, real_offsets = raw_fetch.fetch_raw, offsets.list_offsets

    def fetch_raw(cluster, partition, start, end, **options):
        if start >= 30:
            return real_fetch(cluster, partition, start, end, **options)

        async def refused():
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
            yield

        return refused()

    async def list_offsets(cluster, timestamps, **options):
        found = await real_offsets(cluster, timestamps, **options)
        for partition, timestamp in timestamps.items():
            if timestamp == EARLIEST_TIMESTAMP:
                found[partition] = OffsetAndTimestamp(30, -1)
        return found

    monkeypatch.setattr(fetch, "fetch_raw", fetch_raw)
    monkeypatch.setattr(fetch, "list_offsets", list_offsets)
    with pytest.raises(DataLoss, match=f"offsets 10 to 29 of {topic}-0 are gone: its log begins at 30"):
        read(node, topic, 10, 50)
    assert read(node, topic, 10, 50, failOnDataLoss="false")["offset"].to_pylist() == list(range(30, 50))
    assert read(node, topic, 10, 20, failOnDataLoss="false") is None


def topic_id_of(node, topic):
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        return admin.describe_topics([topic])[topic].topic_id


def delete(node, topic):
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.delete_topics([topic])


@pytest.mark.slow
def test_offsets_of_a_topic_are_not_read_from_another_one_of_its_name(node, new_topic):
    topic = new_topic(20)
    first_id = topic_id_of(node, topic)
    assert read(node, topic, 5, 8, topic_id=first_id).num_rows == 3
    delete(node, topic)
    node.topic(topic, 20)
    with pytest.raises(DataLoss, match=f"topic '{topic}' was created again, and the rest of {topic}-0 is gone"):
        read(node, topic, 5, 8, topic_id=first_id)
    assert read(node, topic, 5, 8, topic_id=first_id, failOnDataLoss="false") is None
    assert read(node, topic, 5, 8).num_rows == 3


@pytest.mark.slow
def test_a_partition_that_a_topic_lacks_since_it_was_created_again_is_gone(node, new_topic):
    """A micro-batch that runs again after a restart names it, and the topic's earlier id is not known then."""
    topic = new_topic(1, 1, 5)
    delete(node, topic)
    node.topic(topic, 5)
    timeouts = {"kafkaConsumer.pollTimeoutMs": "3000"}
    with pytest.raises(DataLoss, match=f"topic '{topic}' was created again, and the rest of {topic}-2 is gone"):
        read(node, topic, 0, 5, partition=2, **timeouts)
    assert read(node, topic, 0, 5, partition=2, failOnDataLoss="false", **timeouts) is None


@pytest.mark.slow
def test_a_topic_that_is_created_again_under_a_task_ends_it(node, new_topic):
    topic = new_topic(1000, batch_size=500)
    options = node.options(subscribe=topic, failOnDataLoss="false", **{"kafka.max.partition.fetch.bytes": "2000"})
    reading = read_range(options, OffsetRange(topic, 0, 0, 1000), ("offset",))
    rows = next(reading).num_rows
    delete(node, topic)
    node.topic(topic, 1000, batch_size=500)
    rows += sum(batch.num_rows for batch in reading)
    assert 0 < rows < 1000


def test_a_deleted_topic_is_left_out_where_loss_is_tolerated(node, new_topic):
    topic = new_topic(5)
    delete(node, topic)
    timeouts = {"kafkaConsumer.pollTimeoutMs": "300"}
    assert read(node, topic, 0, 5, failOnDataLoss="false", **timeouts) is None
    with pytest.raises(KafkaError) as failure:
        read(node, topic, 0, 5, **timeouts)
    assert failure.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.slow
def test_offsets_beyond_the_end_of_a_log_are_lost_and_not_waited_for_in_vain(node, new_topic):
    topic = new_topic(30)
    delete(node, topic)
    node.topic(topic, 7)  # a replay after a restart, which does not know the first topic's id
    timeouts = {"kafkaConsumer.pollTimeoutMs": "300"}
    assert read(node, topic, 0, 30, failOnDataLoss="false", **timeouts).num_rows == 7
    assert read(node, topic, 7, 30, failOnDataLoss="false", **timeouts) is None
    with pytest.raises(DataLoss, match=f"offsets 7 to 29 of {topic}-0 are gone: its log ends at 7"):
        read(node, topic, 0, 30, **timeouts)


def test_a_task_does_not_wait_long_for_a_topic_that_the_brokers_do_not_know(node, new_topic, monkeypatch):
    monkeypatch.setattr(fetch, "UNKNOWN_TOPIC_TIMEOUT_MS", 300)
    topic = new_topic(5)
    delete(node, topic)
    assert read(node, topic, 0, 5, failOnDataLoss="false") is None


def test_brokers_that_do_not_answer_are_no_data_loss(node, new_topic, monkeypatch):
    topic, waits = new_topic(5), []

    async def no_answer(cluster, name, timeout_ms):
        waits.append(timeout_ms)
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "no broker answers")

    monkeypatch.setattr(Cluster, "topic", no_answer)
    with pytest.raises(KafkaError, match="no broker answers"):
        read(node, topic, 0, 5, failOnDataLoss="false")
    assert sum(waits) == 120_000


def test_a_leader_that_refuses_what_its_log_is_said_to_hold_ends_the_read(node, new_topic, monkeypatch):
    monkeypatch.setattr(fetch, "_OUT_OF_RANGE_ERRORS_MAX", 3)
    asked = []

    def fetch_raw(cluster, partition, start, end, **options):
        async def refused():
            asked.append(start)
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
            yield

        return refused()

    monkeypatch.setattr(fetch, "fetch_raw", fetch_raw)
    with pytest.raises(KafkaError) as failure:
        read(node, new_topic(5), 0, 5)
    assert failure.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert asked == [0] * 4


def test_a_damaged_batch_is_an_error_and_not_a_gap(node, new_topic, monkeypatch):
    topic = new_topic(100, batch_size=500)
    real = raw_fetch._Reader._fetch

    async def ask(reader, offset):
        answer = await real(reader, offset)
        damaged = bytearray(answer.records or b"")
        second = 12 + int.from_bytes(damaged[8:12], "big")
        damaged[second + 23 : second + 27] = b"\xff\xff\xfc\x18"  # the last offset delta: -1000
        answer.records = bytes(damaged)
        return answer

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", ask)
    with pytest.raises(KafkaError, match=f"{topic}-0: wrong CRC of the batch at offset"):
        read(node, topic, 0, 100, **{"kafkaConsumer.pollTimeoutMs": "300"})


@pytest.mark.parametrize("failures", [2, None])
def test_a_task_that_begins_while_no_broker_answers_waits_as_one_that_runs(node, new_topic, failing_starts, failures):
    topic, attempts = new_topic(5), failing_starts(failures)
    if failures is None:
        with pytest.raises(KafkaError, match="no broker reached"):
            read(node, topic, 0, 5, **{"kafkaConsumer.pollTimeoutMs": "300"})
        assert len(attempts) > 1
    else:
        assert read(node, topic, 0, 5).num_rows == 5


def test_other_errors_pass_up(node):
    with pytest.raises(KafkaError) as failure:
        read(node, "nowhere", 0, 1, **{"kafkaConsumer.pollTimeoutMs": "200"})
    assert failure.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "size", "pieces"), [(25_000, 1, 3), (100, 400_000, 5), (3, 20_000_000, 3), (0, 0, 0)])
def test_batches_for_spark_are_bounded_in_rows_and_bytes(rows, size, pieces):
    values = pa.array([bytes(size)] * rows, pa.binary())
    whole = pa.RecordBatch.from_arrays([values, pa.array(range(rows), pa.int64())], names=["value", "offset"])
    parts = list(fetch.slices(whole))
    assert len(parts) == pieces
    assert [offset for part in parts for offset in part["offset"].to_pylist()] == list(range(rows))
    assert all(part.num_rows <= fetch.MAX_ROWS for part in parts)
