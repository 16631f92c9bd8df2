"""Kafka's Java producer in transactions, its TransactionsCommand and its dump tool, on Tidelog and on Kafka itself."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compatibility.conftest import start
from tests.compatibility.test_kafka_tools_records import run
from tests.patience import PATIENCE_S
from tidelog.bench import peers
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.usefixtures("need_java")

NewTopic = Callable[..., str]


def rows(told: str) -> list[dict[str, str]]:
    """A table of the tool, by the names of its columns."""
    lines = [line.split("\t") for line in told.splitlines() if line.strip()]
    names = [name.strip() for name in lines[0]]
    return [dict(zip(names, (cell.strip() for cell in line), strict=False)) for line in lines[1:]]


def produce_in_transactions(server: ServerProcess, topic: str, transactional_id: str) -> str:
    done = peers.java(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", "400", "--record-size", "100", "--throughput", "1000"),
        *("--transactional-id", transactional_id, "--transaction-duration-ms", "50"),
        *("--producer-props", f"bootstrap.servers={server.bootstrap_servers}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_the_java_producer_commits_and_its_transactions_are_listed_and_described(
    server: ServerProcess, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    assert "400 records sent" in produce_in_transactions(server, topic, topic)
    (listed,) = rows(run(server, "TransactionsCommand", "list", "--transactional-id-pattern", re.escape(topic) + ".*"))
    assert (listed["TransactionalId"], listed["TransactionState"]) == (topic, "CompleteCommit")
    (described,) = rows(run(server, "TransactionsCommand", "describe", "--transactional-id", topic))
    assert described["TransactionState"] == "CompleteCommit"
    assert int(described["ProducerEpoch"]) >= 1, "each transaction has an epoch of its own"
    assert described["ProducerId"] == listed["ProducerId"]
    assert described["TopicPartitions"] == ""


def test_an_open_transaction_is_described_with_its_partitions(server: ServerProcess, new_topic: NewTopic) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    topic = new_topic(partitions=2)
    producer = confluent.Producer(
        {"bootstrap.servers": server.bootstrap_servers, "transactional.id": topic, "log_level": 0}
    )
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=1)
    producer.flush(PATIENCE_S)
    (described,) = rows(run(server, "TransactionsCommand", "describe", "--transactional-id", topic))
    assert (described["TransactionState"], described["TopicPartitions"]) == ("Ongoing", f"{topic}-1")
    assert described["TransactionTimeoutMs"] == "60000"
    assert int(described["CurrentTransactionStartTimeMs"]) > 1_000_000_000_000
    producer.abort_transaction(PATIENCE_S)


def test_the_dump_tool_reads_the_log_of_transactions(tmp_path: Path) -> None:
    with start("tidelog", tmp_path / "node", **{"transaction.state.log.num.partitions": "1"}) as node:
        produce_in_transactions(node, "t", "tx")
        directory = next((tmp_path / "node").rglob("__transaction_state-0"))
    file = next(directory.glob("*.log"))
    done = peers.java("org.apache.kafka.tools.DumpLogSegments", "--transaction-log-decoder", "--files", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    payloads = [json.loads(payload)["data"] for payload in re.findall(r"payload: (.*)", done.stdout)]
    states = [state for state, _ in itertools.groupby(payload["transactionStatus"] for payload in payloads)]
    assert states[0] == 0
    assert states[1:] == [1, 2, 4] * ((len(states) - 1) // 3), "each transaction: ongoing, prepared, complete"
    assert len(states) > 3
    epochs = [payload["producerEpoch"] for payload in payloads if payload["transactionStatus"] == 4]
    assert epochs == list(range(1, len(epochs) + 1)), "each transaction has an epoch of its own"
    assert payloads[1]["transactionPartitions"][0]["topic"] == "t"
    assert 'key: {"type":"0","data":{"transactionalId":"tx"}}' in done.stdout
