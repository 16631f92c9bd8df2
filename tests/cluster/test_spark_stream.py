"""The driver and the tasks of a Spark stream while brokers are killed under it: no record is lost or repeated."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer
from tidelog.spark_ingest.fetch import read_range
from tidelog.spark_ingest.option_table import STREAM
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.stream import StreamDriver
from tidelog.testing import EmbeddedCluster

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

PARTITIONS, RECORDS = 6, 600


def test_a_stream_outlives_the_death_of_every_broker_in_turn(tmp_path: Path) -> None:
    with EmbeddedCluster(brokers=3, directory=tmp_path) as cluster:
        with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("through", PARTITIONS, 3)])
        given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": "through"}
        options = SourceOptions.parse(given | {"startingOffsets": "earliest"}, STREAM)
        found: Counter[bytes] = Counter()
        with (
            closing(StreamDriver(options)) as stream,
            Producer(bootstrap_servers=cluster.bootstrap_servers) as producer,
        ):
            offset = stream.initial_offset()
            for turn, broker in enumerate((*cluster.broker_ids, None)):
                for number in range(RECORDS):
                    producer.send("through", b"%d/%d" % (turn, number), partition=number % PARTITIONS)
                producer.flush()
                if broker is not None:
                    cluster.kill(broker)
                while (end := stream.latest_offset(offset)) is not offset:
                    for each in stream.ranges(offset, end):
                        for batch in read_range(options, each, ("value",), stream.topic_id(each.topic)):
                            found.update(batch["value"].to_pylist())
                    offset = end
                if broker is not None:
                    cluster.restart(broker)
    assert found == Counter(b"%d/%d" % (turn, number) for turn in range(4) for number in range(RECORDS))
