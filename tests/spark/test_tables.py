"""`tidelog.spark_ingest.latest` and the columns beside it."""

from __future__ import annotations

import pytest

from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def people(node):
    """A compacted topic: keys that are set again, deleted, deleted and set again, and one in two partitions."""
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("people", 2, configs={"cleanup.policy": "compact"})])
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        for partition, time_s, key, value in (
            (0, 1, b"ann", b'{"city": "Rome", "age": 1}'),
            (1, 9, b"bob", b'{"city": "Oslo", "age": 2}'),
            (0, 3, b"ann", b'{"city": "Bern", "age": 3}'),
            (1, 4, b"bob", b'{"city": "Riga", "age": 4}'),  # later, though its clock says otherwise
            (0, 5, b"eve", b'{"city": "Kiel", "age": 5}'),
            (0, 6, b"eve", None),
            (0, 7, b"dan", None),
            (0, 8, b"dan", b"no JSON"),
            (0, 2, b"moved", b'{"city": "here"}'),
            (1, 8, b"moved", b'{"city": "there"}'),
            (1, 8, b"moved-and-gone", b'{"city": "there"}'),
            (0, 9, b"moved-and-gone", None),
        ):
            producer.send("people", value, key, partition=partition, timestamp_ms=1_700_000_000_000 + time_s)
        producer.flush()
    return {"kafka.bootstrap.servers": node.bootstrap_servers}


def test_a_compacted_topic_is_a_table_of_the_latest_values(spark, people):
    from tidelog.spark_ingest import json_value, latest

    table = latest(spark, "people", **people)
    assert table.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = table.select("key", json_value("city string, age int").alias("person")).select("key", "person.*").collect()
    assert sorted((row.key.decode(), row.city, row.age) for row in rows) == [
        ("ann", "Bern", 3),
        ("bob", "Riga", 4),
        ("dan", None, None),
        ("moved", "there", None),
    ]


def test_a_value_with_a_schema_id_is_taken_apart(spark):
    from tidelog.spark_ingest import schema_id, schema_payload

    values = [b"\0\0\0\x01\x02payload", b"\0\xff\xff\xff\xff", b"\x01\0\0\0\x05x", b"\0\0", None]
    frame = spark.createDataFrame([(value,) for value in values], "value binary")
    rows = frame.select(schema_id().alias("id"), schema_payload().alias("payload")).collect()
    found = [(row.id, None if row.payload is None else bytes(row.payload)) for row in rows]
    assert found == [(258, b"payload"), (2**32 - 1, b""), (None, None), (None, None), (None, None)]
