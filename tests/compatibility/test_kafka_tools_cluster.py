"""Kafka's own tools administer three Tidelog nodes that are one cluster, and read the files of its metadata quorum.

The tests run in the order of the file on one cluster, and each leaves it whole. `make compat` runs them on three Kafka
nodes as well.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compatibility.conftest import SERVERS
from tests.compatibility.test_kafka_tools import COMPLAINTS
from tidelog.bench import peers
from tidelog.bench.metadata import await_brokers
from tidelog.bench.peers import KafkaCluster
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.usefixtures("need_java")

OPTIONS = {
    "offsets.topic.num.partitions": "3",
    "group.initial.rebalance.delay.ms": "0",
    "replica.lag.time.max.ms": "2000",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "auto.leader.rebalance.enable": "false",
    "metadata.log.max.record.bytes.between.snapshots": "3000",
}
PATIENCE_S = 120.0

TOPICS = "org.apache.kafka.tools.TopicCommand"
QUORUM = "org.apache.kafka.tools.MetadataQuorumCommand"
ELECTION = "org.apache.kafka.tools.LeaderElectionCommand"
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
CONFIGS = "kafka.admin.ConfigCommand"
PRODUCE = "org.apache.kafka.tools.ProducerPerformance"
DUMP = "org.apache.kafka.tools.DumpLogSegments"

Cluster = EmbeddedCluster | KafkaCluster
Tool = Callable[..., str]


@pytest.fixture(scope="module", params=SERVERS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, each broker and controller."""
    directory = tmp_path_factory.mktemp(request.param)
    made: Cluster = KafkaCluster(directory, options=OPTIONS)
    if request.param == "tidelog":
        made = EmbeddedCluster(3, directory, config=OPTIONS)
    with made:
        await_brokers((node.port for node in made.nodes.values()), 3)
        yield made


@pytest.fixture
def tool(cluster: Cluster) -> Tool:
    """Standard output of a tool of Kafka's, told where the cluster is, that must succeed."""

    def run(name: str, *arguments: str, failing: bool = False) -> str:
        where = ("--bootstrap-server", cluster.bootstrap_servers)
        done = peers.java(name, *where, *arguments)
        assert (done.returncode != 0) == failing, done.stdout + done.stderr
        return done.stdout + (done.stderr if failing else "")

    return run


@pytest.fixture
def topic(tool: Tool, cluster: Cluster) -> str:
    """Three partitions, each with a replica on every node and another of them first."""
    name = f"spread-{time.time_ns()}"
    ids = list(cluster.nodes)
    assignment = ",".join(":".join(map(str, ids[first:] + ids[:first])) for first in range(3))
    tool(TOPICS, "--create", "--topic", name, "--replica-assignment", assignment)
    return name


def until(attempt: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not attempt():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def described(tool: Tool, topic: str) -> dict[int, tuple[int | None, list[int], list[int]]]:
    """Partition -> leader, replicas, ISR."""
    line = re.compile(r"Partition: (\d+)\s+Leader: (\w+)\s+Replicas: ([\d,]+)\s+Isr: ([\d,]*)")
    found = line.findall(tool(TOPICS, "--describe", "--topic", topic))
    return {
        int(number): (int(leader) if leader.isdecimal() else None, _ids(replicas), _ids(isr))
        for number, leader, replicas, isr in found
    }


def _ids(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def down(cluster: Cluster, node: int) -> ServerProcess:
    cluster.nodes[node].kill()
    return cluster.nodes[node]


# ------------------------------------------------------------------------------------------------------------- quorum


def test_the_quorum_has_a_leader_and_three_voters_that_follow(tool: Tool, cluster: Cluster) -> None:
    def follows() -> bool:
        status = dict(line.split(":", 1) for line in tool(QUORUM, "describe", "--status").splitlines() if ":" in line)
        assert int(status["LeaderId"]) in cluster.nodes
        assert int(status["LeaderEpoch"]) >= 1
        assert set(map(int, re.findall(r'"id": (\d+)', status["CurrentVoters"]))) == set(cluster.nodes)
        assert status["CurrentObservers"].strip() == "[]"
        return int(status["HighWatermark"]) > 0 and int(status["MaxFollowerLagTimeMs"]) < 2000

    until(follows)


def test_the_replication_of_the_quorum_is_shown(tool: Tool, cluster: Cluster) -> None:
    header, *lines = tool(QUORUM, "describe", "--replication").splitlines()
    assert header.split()[:4] == ["NodeId", "DirectoryId", "LogEndOffset", "Lag"]
    rows = [line.split() for line in lines if line.strip()]
    assert sorted(row[-1] for row in rows) == ["Follower", "Follower", "Leader"]
    assert {int(row[0]) for row in rows} == set(cluster.nodes)
    assert all(int(row[4]) > 0 and int(row[5]) > 0 for row in rows), "who fetched and caught up when"


# ------------------------------------------------------------------------------------------- a broker goes and returns


def test_what_lacks_a_replica_is_named_until_it_is_back(tool: Tool, topic: str, cluster: Cluster) -> None:
    gone, *others = cluster.nodes
    node = down(cluster, gone)
    under = ("--describe", "--under-replicated-partitions", "--topic", topic)
    until(lambda: len(re.findall(r"Partition: \d", tool(TOPICS, *under))) == 3)
    for leader, replicas, isr in described(tool, topic).values():
        assert (set(isr), set(replicas)) == (set(others), set(cluster.nodes))
        assert leader in others
    node.start()
    until(lambda: "Partition:" not in tool(TOPICS, *under))


def test_what_has_no_leader_is_named(tool: Tool, cluster: Cluster) -> None:
    last = max(cluster.nodes)
    name = f"alone-{time.time_ns()}"
    tool(TOPICS, "--create", "--topic", name, "--replica-assignment", str(last))
    node = down(cluster, last)
    unavailable = ("--describe", "--unavailable-partitions", "--topic", name)
    until(lambda: "Leader: none" in tool(TOPICS, *unavailable))
    node.start()
    until(lambda: "Partition:" not in tool(TOPICS, *unavailable))


def test_first_replicas_lead_again_when_told(tool: Tool, topic: str, cluster: Cluster, tmp_path: Path) -> None:
    gone = min(cluster.nodes)
    node = down(cluster, gone)
    until(lambda: all(leader not in (gone, None) for leader, _, _ in described(tool, topic).values()))
    node.start()
    until(lambda: all(len(isr) == 3 for _, _, isr in described(tool, topic).values()))
    (mine,) = [number for number, (_, replicas, _) in described(tool, topic).items() if replicas[0] == gone]
    file = tmp_path / "election.json"
    file.write_text(json.dumps({"partitions": [{"topic": topic, "partition": mine}]}))
    output = tool(ELECTION, "--election-type", "preferred", "--path-to-json-file", str(file))
    assert f"Successfully completed leader election (PREFERRED) for partitions {topic}-{mine}" in output
    until(lambda: described(tool, topic)[mine][0] == gone)
    again = tool(ELECTION, "--election-type", "preferred", "--topic", topic, "--partition", str(mine))
    assert f"Valid replica already elected for partitions {topic}-{mine}" in again
    tool(ELECTION, "--election-type", "preferred", "--all-topic-partitions")


# -------------------------------------------------------------------------------------------------------------- moves


def test_partitions_move_under_a_throttle_that_goes_again(tool: Tool, cluster: Cluster, tmp_path: Path) -> None:
    name = f"moving-{time.time_ns()}"
    one, two, three = cluster.nodes
    tool(TOPICS, "--create", "--topic", name, "--replica-assignment", f"{one}:{two},{two}:{three}")
    performance = peers.java(
        PRODUCE,
        *("--topic", name, "--num-records", "2000", "--record-size", "1000", "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={cluster.bootstrap_servers}", "acks=all"),
    )
    assert performance.returncode == 0, performance.stderr
    moves = [
        {"topic": name, "partition": 0, "replicas": [three, two]},
        {"topic": name, "partition": 1, "replicas": [two, three, one]},
    ]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": 1, "partitions": moves}))
    plan = ("--reassignment-json-file", str(file))
    output = tool(REASSIGN, *plan, "--execute", "--throttle", "20000000")
    assert f"Successfully started partition reassignments for {name}-0,{name}-1" in output
    assert "The inter-broker throttle limit was set to 20000000 B/s" in output
    assert f'"topic":"{name}","partition":0,"replicas":[{one},{two}]' in output, "the way back"

    def complete() -> bool:
        shown = tool(REASSIGN, *plan, "--verify")
        return all(f"Reassignment of partition {name}-{number} is completed." in shown for number in (0, 1))

    until(complete)
    until(lambda: [replicas for _, replicas, _ in described(tool, name).values()] == [[three, two], [two, three, one]])
    until(lambda: [set(isr) for _, _, isr in described(tool, name).values()] == [{three, two}, {one, two, three}])
    for kind, entity in (("topics", name), ("brokers", str(one))):
        shown = tool(CONFIGS, "--describe", "--entity-type", kind, "--entity-name", entity)
        assert "throttled" not in shown
    offsets = peers.java(
        "org.apache.kafka.tools.GetOffsetShell", "--bootstrap-server", cluster.bootstrap_servers, "--topic", name
    )
    assert sum(int(line.rsplit(":", 1)[1]) for line in offsets.stdout.split()) == 2000
    assert "No partition reassignments found." in tool(REASSIGN, "--list")


def test_a_plan_is_proposed_as_by_our_own_command(tool: Tool, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "topics.json"
    file.write_text(json.dumps({"version": 1, "topics": [{"topic": topic}]}))
    brokers = ",".join(map(str, cluster.nodes))
    theirs = tool(REASSIGN, "--generate", "--topics-to-move-json-file", str(file), "--broker-list", brokers)
    words = ("reassign", "--generate", "--topics-to-move-json", str(file), "--broker-list", brokers)
    where = ("--bootstrap-server", cluster.bootstrap_servers)
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", *words, *where],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    proposed = []
    for lines in (theirs.splitlines(), done.stdout.splitlines()):
        assert lines[:4] == theirs.splitlines()[:4]
        plan = json.loads(lines[4])
        assert plan.keys() == {"version", "partitions"}
        proposed.append(sorted(tuple(entry) for entry in plan["partitions"]))
        for field in ("replicas", "log_dirs"):
            assert [len(entry[field]) for entry in plan["partitions"]] == [3, 3, 3]
        assert sorted(entry["replicas"][0] for entry in plan["partitions"]) == sorted(cluster.nodes)
    assert proposed[0] == proposed[1]


def test_a_broker_that_is_not_there_is_no_place_to_move_to(tool: Tool, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": 0, "replicas": [77]}]}))
    output = tool(REASSIGN, "--reassignment-json-file", str(file), "--execute", failing=True)
    assert "Unknown broker id 77" in output


# ------------------------------------------------------------------------------------------------------------ configs


def test_configs_of_topics_and_brokers_are_changed(tool: Tool, topic: str, cluster: Cluster) -> None:
    of_topic = ("--entity-type", "topics", "--entity-name", topic)
    tool(CONFIGS, "--alter", *of_topic, "--add-config", "retention.ms=54321,cleanup.policy=[delete,compact]")
    until(lambda: "retention.ms=54321 " in tool(CONFIGS, "--describe", *of_topic))
    assert "cleanup.policy=delete,compact" in tool(CONFIGS, "--describe", *of_topic)
    tool(CONFIGS, "--alter", *of_topic, "--delete-config", "retention.ms")
    until(lambda: "retention.ms" not in tool(CONFIGS, "--describe", *of_topic))
    refused = tool(CONFIGS, "--alter", *of_topic, "--add-config", "retention.ms=soon", failing=True)
    assert "InvalidConfigurationException" in refused
    of_all = ("--entity-type", "brokers", "--entity-default")
    tool(CONFIGS, "--alter", *of_all, "--add-config", "log.retention.ms=7654321")
    until(lambda: "log.retention.ms=7654321" in tool(CONFIGS, "--describe", *of_all))
    of_one = ("--entity-type", "brokers", "--entity-name", str(max(cluster.nodes)))
    tool(CONFIGS, "--alter", *of_one, "--add-config", "leader.replication.throttled.rate=900000")
    until(lambda: "leader.replication.throttled.rate=900000" in tool(CONFIGS, "--describe", *of_one))
    tool(CONFIGS, "--alter", *of_one, "--delete-config", "leader.replication.throttled.rate")
    tool(CONFIGS, "--alter", *of_all, "--delete-config", "log.retention.ms")


def test_a_topic_is_given_partitions(tool: Tool, topic: str) -> None:
    tool(TOPICS, "--alter", "--topic", topic, "--partitions", "5")
    until(lambda: len(described(tool, topic)) == 5)
    refused = tool(TOPICS, "--alter", "--topic", topic, "--partitions", "4", failing=True)
    assert "currently has 5 partition(s)" in refused


# -------------------------------------------------------------------------------------------------------------- files


def test_the_metadata_log_and_its_snapshots_are_read_alike_on_every_node(cluster: Cluster) -> None:
    def snapshots(node: ServerProcess) -> list[Path]:
        return sorted(node.data_directory.glob("__cluster_metadata-0/*.checkpoint"))

    until(lambda: all(any(int(file.name[:20]) for file in snapshots(node)) for node in cluster.nodes.values()))
    registered, records = [], []
    for node in cluster.nodes.values():
        log = sorted(node.data_directory.glob("__cluster_metadata-0/*.log"))
        output = dumped([file for file in log if file.stat().st_size])
        assert "LeaderChange: " in output
        records.append(set(re.findall(r"^\| offset: \d+ .*payload: (\{.*\})", output, re.MULTILINE)))
        newest = dumped([snapshots(node)[-1]])
        assert "SnapshotHeader" in newest
        assert "SnapshotFooter" in newest
        registered.append(set(re.findall(r'"type":"REGISTER_BROKER_RECORD".*?"brokerId":(\d+)', newest)))
    assert registered == [set(map(str, cluster.nodes))] * 3
    assert set.intersection(*records), "the logs have nothing in common"


def dumped(files: list[Path]) -> str:
    done = peers.java(DUMP, "--cluster-metadata-decoder", "--files", ",".join(map(str, files)))
    assert done.returncode == 0, done.stderr
    assert COMPLAINTS.search(done.stdout) is None, COMPLAINTS.search(done.stdout)
    return done.stdout
