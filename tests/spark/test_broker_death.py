"""Spark's batch read from a cluster of three brokers, one of which is killed while tasks run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import join
from tidelog.bench.clusters import RunningCluster
from tidelog.client import NewTopic, sync
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOPIC, PARTITIONS, RECORDS = "spark-through", 12, 120_000


def test_a_batch_read_survives_the_death_of_a_broker(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    cluster = EmbeddedCluster(3, tmp_path)
    with RunningCluster(cluster):
        with sync.Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3)])
        with sync.Producer(bootstrap_servers=cluster.bootstrap_servers) as producer:
            for number in range(RECORDS):
                producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS)
            producer.flush()

        session, killed = spark.sparkContext, threading.Event()

        def kill_when_some_tasks_are_done() -> None:
            tracker = session.statusTracker()
            while not killed.is_set():
                for stage in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage)
                    if info is not None and 0 < info.numCompletedTasks < info.numTasks:
                        cluster.kill(2)
                        killed.set()
                        return
                time.sleep(0.005)

        records = (
            spark.read.format("tidelog")
            .option("kafka.bootstrap.servers", cluster.bootstrap_servers)
            .option("subscribe", TOPIC)
            .load()
        )
        killer = threading.Thread(target=kill_when_some_tasks_are_done)
        killer.start()
        try:
            value = F.col("value").cast("string").cast("long")
            found = records.select(value.alias("number")).agg(
                F.count("*").alias("count"), F.sum("number").alias("sum"), F.countDistinct("number").alias("distinct")
            )
            row = found.collect()[0]
            was_killed = killed.is_set()
        finally:
            killed.set()
            join(killer)
        assert was_killed, "the read was over before the broker could be killed"
        assert (row["count"], row["distinct"], row["sum"]) == (RECORDS, RECORDS, RECORDS * (RECORDS - 1) // 2)
