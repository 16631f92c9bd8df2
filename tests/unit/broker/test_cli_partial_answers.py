"""What commands print when a part of the cluster cannot answer: a partition without a leader, a quorum without one."""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, wait_until
from tidelog import EmbeddedBroker, EmbeddedCluster, NewTopic, TopicPartition
from tidelog.cli.common import change_each
from tidelog.cli.main import main
from tidelog.cli.topic_records import print_failures
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import ErrorCode, KafkaError

Cli = Callable[..., tuple[int, str, str]]
MISSING = "tidelog: LEADER_NOT_AVAILABLE: without flights-1: no leader, see `tidelog topics describe --unavailable`\n"


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """Three nodes; partition 0 of `flights` with three records on the first, an empty partition 1 on the second."""
    with EmbeddedCluster(brokers=3) as running:
        with Admin(bootstrap_servers=running.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("flights", replica_assignments={0: [1], 1: [2]})])
        with Producer(bootstrap_servers=running.bootstrap_servers) as producer:
            for number in range(3):
                producer.send_and_wait("flights", b"%d" % number, partition=0)
        yield running


@pytest.fixture
def cli(cluster: EmbeddedCluster, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command: (exit code, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([*words, "-b", cluster.bootstrap_servers, "-X", "default.api.timeout.ms=2000"])
        return (status, *capfd.readouterr())

    return run


@pytest.mark.slow
def test_a_partition_without_a_leader_does_not_hide_the_others(cluster: EmbeddedCluster, cli: Cli):
    cluster.kill(2)
    wait_until(lambda: len(json.loads(cli("topics", "describe", "--unavailable", "--json")[1])) == 1)
    row = {"topic": "flights", "partition": 0}

    status, out, problem = cli("topics", "offsets", "flights", "--json")
    assert (status, json.loads(out), problem) == (1, [row | {"earliest": 0, "latest": 3}], MISSING)
    status, out, problem = cli("producers", "flights", "--json")
    assert (status, [each["partition"] for each in json.loads(out)], problem) == (1, [0], MISSING)
    assert cli("transactions", "blocking", "--json") == (1, "[]\n", MISSING)
    assert cli("transactions", "find-hanging", "flights", "--json") == (1, "[]\n", MISSING)
    assert cli("consume", "flights", "--from-beginning", "-n", "3") == (0, "0\n1\n2\n", "3 records\n")
    words = ("consume", "flights", "--from-beginning", "--timeout-ms", "100")
    unread = "tidelog: without flights-1: REQUEST_TIMED_OUT: the position of flights-1 was not found"
    for more, out in ((), "0\n1\n2\n"), (("-p", "1"), ""), (("-g", "readers"), "0\n1\n2\n"):
        status, records, problem = cli(*words, *more)
        assert (status, records, unread in problem, problem.count("\n")) == (1, out, True, 2)
    assert cli(*words, "-p", "0") == (0, "0\n1\n2\n", "3 records\n")
    unread = "tidelog: without flights-1: REQUEST_TIMED_OUT: offsets of flights-1 not found in"
    past, later = ("--from-time", "2026-03-01"), ("--until-time", str(time.time_ns() // 1_000_000))
    for bounds in ["-o", "earliest", "-e"], ["-o", "-9", "--timeout-ms", "100"], [*past, *later]:
        status, records, problem = cli("consume", "flights", *bounds)
        assert (status, records, unread in problem, problem.count("\n")) == (1, "0\n1\n2\n", True, 2), problem
    status, records, problem = cli("consume", "flights", "-o", "earliest", "-e", "-p", "1")
    assert (status, records, problem.count("\n")) == (1, "", 1)
    status, out, problem = cli("topics", "delete-records", "flights", "--all", "--json")
    assert (status, json.loads(out), problem) == (1, [row | {"low_watermark": 3}], MISSING)
    assert cli("topics", "offsets", "flights", "-p", "0")[::2] == (0, "")


@pytest.mark.slow
def test_a_signal_ends_a_read_that_waits_for_a_partition(cluster: EmbeddedCluster):
    cluster.kill(2)
    words = ["consume", "flights", "-p", "1", "--timeout-ms", "1", "-b", cluster.bootstrap_servers]
    program = "import sys, tidelog.cli.consume as _, tidelog.cli.main as cli; print(); sys.exit(cli.main(sys.argv[1:]))"
    reading = subprocess.Popen(
        [sys.executable, "-uc", program, *words, "-X", f"default.api.timeout.ms={PATIENCE_S * 1000:.0f}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reading.stdout is not None
    assert select.select([reading.stdout], [], [], PATIENCE_S)[0]  # it has loaded its modules
    time.sleep(3)  # it is past the timeout, and waits for a position
    reading.send_signal(signal.SIGINT)
    assert "Traceback" not in reading.communicate(timeout=PATIENCE_S)[1]
    assert reading.returncode == 0


@pytest.mark.slow
def test_a_quorum_without_a_leader_does_not_hide_the_brokers(cluster: EmbeddedCluster, cli: Cli):
    cluster.kill(2, 3)
    wait_until(lambda: "the metadata quorum does not answer, it may have no leader" in cli("quorum", "describe")[2])
    status, out, problem = cli("brokers", "list", "--json")
    states = {each["broker"]: each["state"] for each in json.loads(out)}
    assert (status, states[1], sorted(states)) == (1, "running", [1, 2, 3])
    assert "running" not in (states[2], states[3])
    assert "without the roles: the metadata quorum does not answer" in problem

    status, out, _ = cli("top", "--once", "--delay", "0.1", "--json")
    assert status == 0
    assert next(each["state"] for each in json.loads(out)["brokers"]) == "running"


@pytest.mark.slow
def test_a_broker_that_hangs_does_not_hide_what_the_others_have(cluster: EmbeddedCluster, cli: Cli):
    cluster.pause(2)
    try:
        status, out, problem = cli("topics", "describe", "flights", "--sizes", "--json")
        sizes = [each["size_bytes"] for each in json.loads(out)[0]["partitions"]]
        assert (status, sizes[0] > 0, sizes[1]) == (1, True, None)
        assert problem.startswith("tidelog: without broker 2: ")
        status, out, problem = cli("log-dirs", "describe", "--broker-list", "1,2", "--json")
        assert (status, [each["broker"] for each in json.loads(out)["brokers"]]) == (1, [1])
        assert problem.startswith("tidelog: without broker 2: ")
        status, out, problem = cli("configs", "describe", "brokers", "--all", "-k", "log.retention.ms", "--json")
        assert (status, [each["name"] for each in json.loads(out)]) == (1, ["1", "3"])
        assert problem.startswith("tidelog: without broker 2: ")
        words = ("configs", "alter", "brokers", "1", "2", "3", "--set", "log.retention.ms=9000000")
        status, out, problem = cli(*words, "--json")
        assert [each["outcome"] for each in json.loads(out)] == ["changed", "no answer", "changed"]
        assert (status, problem.count("\n")) == (1, 1)
        assert problem.startswith("tidelog: broker '2': it may be carried out yet: ")
    finally:
        cluster.resume(2)


async def test_changes_after_one_without_an_answer_are_not_tried(capfd: pytest.CaptureFixture[str]):
    problems = {
        "refused": KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "refused"),
        "unanswered": KafkaError(ErrorCode.REQUEST_TIMED_OUT, "unanswered"),
    }

    async def change(name: str) -> str:
        if name in problems:
            raise problems[name]
        return "deleted"

    names = ["first", "refused", "second", "unanswered", "third", "fourth"]
    outcomes = dict(zip(names, ["deleted", "failed", "deleted", "no answer", "not tried", "not tried"]))
    assert await change_each(names, change) == (outcomes, 1)
    lines = [
        f"tidelog: {problems['refused']}",
        f"tidelog: unanswered: it may be carried out yet: {problems['unanswered']}",
        "tidelog: not tried: third, fourth",
    ]
    assert capfd.readouterr().err.splitlines() == lines
    assert await change_each(["first"], change) == ({"first": "deleted"}, 0)


@pytest.mark.slow
def test_a_topic_is_described_where_its_only_leader_hangs(cluster: EmbeddedCluster, cli: Cli):
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("quiet", replica_assignments={0: [2]})])
    cluster.pause(2)
    try:
        status, out, problem = cli("topics", "describe", "quiet", "--sizes", "--json")
        assert (status, [each["size_bytes"] for each in json.loads(out)[0]["partitions"]]) == (1, [None])
        assert problem.count("\n") == 1
    finally:
        cluster.resume(2)


@pytest.mark.slow
def test_a_broker_that_hangs_does_not_hide_what_the_others_coordinate(cluster: EmbeddedCluster, cli: Cli):
    names = [f"g{number}" for number in range(20)]
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        for name in names:
            admin.alter_group_offsets(name, {TopicPartition("flights", 0): 1})
        admin.fence_producers(names)
        coordinators = {name: group.coordinator for name, group in admin.describe_groups(names).items()}
        of_others = [name for name in sorted(names) if (node := coordinators[name]) is not None and node.node_id != 2]
        ids = sorted(each.transactional_id for each in admin.list_transactions() if each.coordinator_id != 2)
    assert max(len(of_others), len(ids)) < 20
    cluster.pause(2)
    try:
        for words, key, left in (
            (("groups", "list"), "group", of_others),
            (("groups", "describe", "--state"), "group", of_others),
            (("transactions", "list"), "transactional_id", ids),
        ):
            status, out, problem = cli(*words, "--json")
            assert (status, [each[key] for each in json.loads(out)]) == (1, left)
            assert problem.startswith("tidelog: without broker 2: ")
            assert problem.count("\n") == 1
    finally:
        cluster.resume(2)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A node without the log of `flights-1`. In each other partition a transaction is open behind a record."""
    with EmbeddedBroker(tmp_path) as broker:
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("flights", num_partitions=3), NewTopic("lost")])
            with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
                for number in range(3):
                    producer.send_and_wait("flights", b"x", partition=number)
                producer.send_and_wait("lost", b"x")
            admin.alter_group_offsets("readers", {TopicPartition("flights", number): 0 for number in range(3)})
            admin.alter_group_offsets("lone", {TopicPartition("flights", 1): 0})
        producer = Producer(bootstrap_servers=broker.bootstrap_servers, transactional_id="one")
        producer.begin_transaction()
        for number in (0, 2):
            producer.send_and_wait("flights", b"y", partition=number)
    producer.close(timeout_ms=0)
    for lost in ("flights-1", "lost-0"):
        shutil.rmtree(tmp_path / lost)
    with EmbeddedBroker(tmp_path) as broker:
        yield broker


@pytest.mark.slow
def test_a_partition_whose_leader_lacks_its_log_does_not_hide_the_others(
    damaged: EmbeddedBroker, capfd: pytest.CaptureFixture[str]
):
    def cli(*words: str) -> tuple[int, Any, str]:
        capfd.readouterr()
        options = ("-b", damaged.bootstrap_servers, "-X", "default.api.timeout.ms=1000")
        status = main([*words, "--json", *options])
        out, problem = capfd.readouterr()
        return status, json.loads(out), problem

    refused = "KAFKA_STORAGE_ERROR: flights-1"
    for words, others in (
        (("topics", "offsets", "flights"), [0, 2]),
        (("topics", "offsets", "flights", "--time", "0"), [0, 2]),
        (("producers", "flights"), [0, 2]),
        (("transactions", "blocking", "flights"), [0, 2]),
        (("transactions", "find-hanging", "flights"), []),
        (("topics", "delete-records", "flights", "--before-offset", "1"), [0, 2]),
        (("topics", "delete-records", "flights", "--before-time", "0"), [0, 2]),
    ):
        status, rows, problem = cli(*words)
        assert (status, sorted({each["partition"] for each in rows})) == (1, others)
        assert problem.splitlines()[-1].endswith(refused)
    status, groups, problem = cli("groups", "describe", "readers")
    assert (status, [each["partition"] for each in groups[0]["offsets"]]) == (1, [0, 2])
    assert refused in problem
    status, groups, problem = cli("groups", "describe")
    offsets = {each["group"]: [offset["partition"] for offset in each["offsets"]] for each in groups}
    assert (status, offsets) == (1, {"lone": [], "readers": [0, 2]})
    assert problem.count(refused) == 2
    status, topics, _ = cli("topics", "describe", "flights", "--offsets")
    assert (status, [each["earliest"] for each in topics[0]["partitions"]]) == (1, [1, None, 1])
    status, topics, problem = cli("topics", "describe", "lost", "--offsets")
    assert (status, [each["latest"] for each in topics[0]["partitions"]]) == (1, [None])
    assert problem.count("\n") == 1
    groups = cli("top", "--once", "--delay", "0.1")[1]["groups"]
    assert [each["lag"] > 0 for each in groups if each["group"] == "readers"] == [True]


def test_a_line_has_all_partitions_that_have_failed_in_the_same_way(capfd: pytest.CaptureFixture[str]):
    lost = {TopicPartition("flights", each): KafkaError(ErrorCode.NETWORK_EXCEPTION, "closed") for each in range(6)}
    damaged = {
        (partition := TopicPartition("ports", each)): KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{partition} is lost")
        for each in range(10, 6, -1)
    }
    alone = {
        TopicPartition("users", 0): KafkaError(ErrorCode.INVALID_RECORD, "users-0"),
        TopicPartition("a", 1): lost[TopicPartition("flights", 0)],
    }
    print_failures(lost | damaged | alone)
    assert capfd.readouterr().err.splitlines() == [
        "tidelog: NETWORK_EXCEPTION: closed (a-1, flights-0, flights-1 and 4 more)",
        "tidelog: KAFKA_STORAGE_ERROR: ports-7 is lost (also ports-8, ports-9, ports-10)",
        "tidelog: INVALID_RECORD: users-0",
    ]


def test_records_are_deleted_of_the_partitions_that_have_the_offset(
    damaged: EmbeddedBroker, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    offsets = {0: 1, 2: 1000}
    plan = {"partitions": [{"topic": "flights", "partition": each, "offset": at} for each, at in offsets.items()]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    capfd.readouterr()
    words = ["topics", "delete-records", "--offset-json-file", str(tmp_path / "plan.json"), "--json"]
    assert main([*words, "-b", damaged.bootstrap_servers]) == 1
    out, problem = capfd.readouterr()
    assert json.loads(out) == [{"topic": "flights", "partition": 0, "low_watermark": 1}]
    explanation = "tidelog: OFFSET_OUT_OF_RANGE: flights-2 ends before that offset: see `tidelog topics offsets`\n"
    assert problem == explanation
