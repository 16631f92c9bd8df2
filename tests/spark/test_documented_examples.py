"""The Python of docs/spark.md, block after block in one session."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Producer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
FLIGHTS = 60


def fill(bootstrap: str) -> None:
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic("flights", 2), NewTopic("carriers", 1, configs={"cleanup.policy": "compact"})])
        admin.alter_group_offsets("reports", {TopicPartition("flights", 0): 10})
    with Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(FLIGHTS):
            flight = {"carrier": "AB"[number % 2], "delay": number, "at": "2026-01-01T10:00:00Z"}
            producer.send("flights", json.dumps(flight).encode(), partition=number % 2)
        for name in (b"Old", b"Alpha"):
            producer.send("carriers", name, b"A")
        producer.flush()


def names(spark: Any, path: Path) -> list[tuple]:
    """The names that the stream has found, with their number."""
    return sorted(map(tuple, spark.read.parquet(str(path)).groupBy("carrier", "name").count().collect()))


def test_the_examples_run_in_their_order(spark, node, tmp_path, capsys):
    fill(node.bootstrap_servers)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"spark": spark}
    for block in blocks:
        code = block.replace("127.0.0.1:9092", node.bootstrap_servers).replace("out/", f"{tmp_path}{os.sep}")
        exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102
    assert len(blocks) == 6
    assert spark.read.parquet(str(tmp_path / "flights")).count() == FLIGHTS
    assert f"{FLIGHTS - 10}\n" in capsys.readouterr().out
    delays = spark.table("delays").selectExpr("carrier", "flights", "delay").collect()
    assert sorted(map(tuple, delays)) == [("A", 30, 29.0), ("B", 30, 30.0)]
    assert names(spark, tmp_path / "named" / "0") == [("A", "Alpha", 30), ("B", None, 30)]
    carriers = spark.read.parquet(str(tmp_path / "changes" / "0")).collect()
    assert [bytes(row.value) for row in carriers] == [b"Alpha"]
    with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
        producer.send_and_wait("carriers", b"Beta", b"B")
    namespace["add_names"](spark.createDataFrame([("B",)], "carrier string"), 1)
    assert names(spark, tmp_path / "named" / "1") == [("B", "Beta", 1)]  # a later micro-batch sees the change
