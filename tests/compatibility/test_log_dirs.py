"""A node with two log directories: described, replicas moved between them, by Kafka's tools too, and one taken away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conftest import SERVERS, create_topic, start
from tests.compatibility.wire import Wire
from tidelog.bench import peers
from tidelog.bench.frames import record_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.testing.processes import ServerProcess

LOG_DIRS = "org.apache.kafka.tools.LogDirsCommand"
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
INVALID_REPLICATION_FACTOR, INVALID_REPLICA_ASSIGNMENT = 38, 39
PATIENCE_S = 120.0


class Disks:
    """A running node, and its two directories; a third one is for the metadata."""

    def __init__(self, node: ServerProcess, homes: list[Path]) -> None:
        self.node, self.homes = node, homes

    def ask(self, api: str, version: int, **values: Any) -> Any:
        with Wire(self.node.port) as wire:
            return wire.ask(api, version, **values)

    def topic(self, name: str, partitions: int = 1) -> str:
        return create_topic(self.node.port, name, partitions)

    def produce(self, topic: str, *values: bytes) -> tuple[int, int]:
        data = [{"index": 0, "records": record_batch(list(values), int(time.time() * 1000))}]
        answer = self.ask("produce", 9, acks=-1, timeout=10_000, topic_data=[{"name": topic, "partition_data": data}])
        produced = answer.responses[0].partition_responses[0]
        return int(produced.error_code), int(produced.base_offset)

    def end_of(self, topic: str) -> int:
        wanted = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}]
        listed = self.ask("list_offsets", 7, replica_id=-1, topics=wanted).topics[0].partitions[0]
        return int(listed.offset)

    def described(self, version: int = 4) -> dict[Path, Any]:
        answer = self.ask("describe_log_dirs", version, topics=None)
        return {Path(result.log_dir): result for result in answer.results}

    def home_of(self, topic: str, index: int = 0) -> Path:
        """Where its replica lies, and will lie."""
        found = {
            partition.is_future_key: path
            for path, result in self.described().items()
            for each in result.topics
            for partition in each.partitions
            if (each.name, partition.partition_index) == (topic, index)
        }
        return found.get(True, found[False])

    def other(self, home: Path) -> Path:
        return next(each for each in self.homes if each != home)

    def move(self, path: Path | str, topic: str, index: int = 0, version: int = 2) -> int:
        dirs = [{"path": str(path), "topics": [{"name": topic, "partitions": [index]}]}]
        answer = self.ask("alter_replica_log_dirs", version, dirs=dirs)
        (result,) = answer.results
        assert (result.topic_name, [each.partition_index for each in result.partitions]) == (topic, [index])
        return int(result.partitions[0].error_code)

    def until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def tool(self, *arguments: str) -> str:
        done = peers.java(arguments[0], "--bootstrap-server", self.node.bootstrap_servers, *arguments[1:])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=SERVERS)
def disks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disks]:
    directory = tmp_path_factory.mktemp(request.param)
    homes = [directory / "one", directory / "two"]
    options = {
        "log.dirs": ",".join(map(str, homes)),
        "metadata.log.dir": str(directory / "data"),
        "replica.high.watermark.checkpoint.interval.ms": "500",
        "auto.create.topics.enable": "false",
    }
    with start(request.param, directory, **options) as node:
        yield Disks(node, homes)


def test_every_directory_is_described(disks: Disks) -> None:
    topic = disks.topic("described", 4)
    for version in range(1, 5):
        found = disks.described(version)
        assert set(found) == set(disks.homes)
        for result in found.values():
            assert result.error_code == 0
            if version >= 4:
                assert 0 < result.usable_bytes < result.total_bytes
    held = {path: [each.name for each in result.topics] for path, result in found.items()}
    assert all(topic in names for names in held.values()), "both are used"


def test_a_replica_moves_with_all_it_holds(disks: Disks) -> None:
    topic = disks.topic("moved")
    for number in range(50):
        assert disks.produce(topic, b"%d" % number) == (0, number)
    home = disks.home_of(topic)
    target = disks.other(home)
    for version in (1, 2):
        assert disks.move(target, topic, version=version) == 0
    disks.until("it has moved", lambda: (target / f"{topic}-0").exists() and not (home / f"{topic}-0").exists())
    assert disks.home_of(topic) == target
    assert disks.end_of(topic) == 50
    assert disks.produce(topic, b"more") == (0, 50)


def test_what_cannot_be_moved_is_refused(disks: Disks, tmp_path: Path) -> None:
    topic = disks.topic("refused")
    home = disks.home_of(topic)
    found = {
        "unknown topic": disks.move(home, "nowhere"),
        "unknown partition": disks.move(home, topic, 9),
        "unknown directory": disks.move(tmp_path, topic),
        "unknown directory of an unknown topic": disks.move(tmp_path, "nowhere"),
        "no absolute path": disks.move("one", topic),
        "too long a name": disks.move(home, "l" * 240),
        "where it is": disks.move(home, topic),
    }
    assert found == {
        "unknown topic": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "unknown partition": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "unknown directory": ErrorCode.LOG_DIR_NOT_FOUND,
        "unknown directory of an unknown topic": ErrorCode.LOG_DIR_NOT_FOUND,
        "no absolute path": ErrorCode.LOG_DIR_NOT_FOUND,
        "too long a name": ErrorCode.INVALID_TOPIC_EXCEPTION,
        "where it is": ErrorCode.NONE,
    }


def test_a_cordoned_directory_gets_no_new_replicas(disks: Disks) -> None:
    def cordon(value: str | None, *expected: Path) -> None:
        change = {"name": "cordoned.log.dirs", "config_operation": 0 if value else 1, "value": value}
        resources = [{"resource_type": 4, "resource_name": "1", "configs": [change]}]
        answer = disks.ask("incremental_alter_configs", 1, resources=resources, validate_only=False)
        assert answer.responses[0].error_code == 0, answer.responses[0].error_message

        def told() -> bool:
            return {path for path, result in disks.described(5).items() if result.is_cordoned} == set(expected)

        disks.until("the broker knows", told)

    def create(name: str) -> int:
        topic = {"name": name, "num_partitions": 1, "replication_factor": 1}
        answer = disks.ask("create_topics", 7, topics=[topic], timeout=10_000, validate_only=True)
        return int(answer.topics[0].error_code)

    full, free = disks.homes
    cordon(str(full), full)
    topic = disks.topic("beside-a-cordon", 3)
    assert {disks.home_of(topic, index) for index in range(3)} == {free}
    assert disks.move(full, topic) == INVALID_REPLICA_ASSIGNMENT
    assert disks.move(free, topic) == 0
    cordon("*", full, free)
    disks.until("the controller knows", lambda: create("nowhere") == INVALID_REPLICATION_FACTOR)
    cordon(None)
    disks.until("the controller knows", lambda: create("somewhere") == 0)
    assert disks.move(full, topic) == 0


@pytest.mark.usefixtures("need_java")
def test_kafkas_tools_describe_and_move(disks: Disks, tmp_path: Path) -> None:
    topic = disks.topic("by-tools")
    assert disks.produce(topic, b"x")[0] == 0
    home = disks.home_of(topic)
    target = disks.other(home)
    output = disks.tool(LOG_DIRS, "--describe", "--topic-list", topic)
    (broker,) = json.loads(output.splitlines()[-1])["brokers"]
    found = {each["logDir"]: each for each in broker["logDirs"]}
    assert {path: each["error"] for path, each in found.items()} == dict.fromkeys(map(str, disks.homes))
    (partition,) = found[str(home)]["partitions"]
    assert (partition["partition"], partition["offsetLag"], partition["isFuture"]) == (f"{topic}-0", 0, False)
    assert partition["size"] > 0

    plan = tmp_path / "plan.json"
    entry = {"topic": topic, "partition": 0, "replicas": [1], "log_dirs": [str(target)]}
    plan.write_text(json.dumps({"version": 1, "partitions": [entry]}))
    output = disks.tool(REASSIGN, "--reassignment-json-file", str(plan), "--execute")
    assert "Successfully started" in output
    verify = (REASSIGN, "--reassignment-json-file", str(plan), "--verify")
    disks.until("it has moved", lambda: "completed successfully" in disks.tool(*verify))
    assert disks.home_of(topic) == target
    assert disks.end_of(topic) == 1


def test_a_directory_that_is_taken_away_goes_offline_and_the_rest_serves(disks: Disks) -> None:
    """The last test: the directory does not come back."""
    topics = [disks.topic(f"until-the-end-{number}") for number in range(2)]
    gone = disks.homes[1]
    for topic, home in zip(topics, disks.homes):
        assert disks.produce(topic, b"x") == (0, 0)
        if disks.home_of(topic) != home:
            assert disks.move(home, topic) == 0
    disks.until(
        "each is in one", lambda: all((home / f"{topic}-0").exists() for topic, home in zip(topics, disks.homes))
    )
    # At once: a directory that is emptied file by file gets new ones meanwhile from the broker.
    gone.rename(gone.with_name("taken-away"))
    disks.until("it is noticed", lambda: disks.described()[gone].error_code == ErrorCode.KAFKA_STORAGE_ERROR)
    result = disks.described()[gone]
    assert (result.topics, result.total_bytes) == ((), -1)
    assert disks.produce(topics[1], b"y") == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
    assert disks.produce(topics[0], b"y") == (0, 1)

    def partition_of(topic: str) -> Any:
        return disks.ask("metadata", 12, topics=[{"name": topic}]).topics[0].partitions[0]

    disks.until("nobody leads it", lambda: partition_of(topics[1]).leader_id == -1)
    found = partition_of(topics[1])
    assert (found.error_code, tuple(found.offline_replicas)) == (ErrorCode.LEADER_NOT_AVAILABLE, (1,))
    assert disks.move(gone, topics[0]) == ErrorCode.KAFKA_STORAGE_ERROR
    assert disks.move(disks.homes[0], topics[1]) == ErrorCode.KAFKA_STORAGE_ERROR
    new = disks.topic("new")
    assert disks.produce(new, b"z") == (0, 0)
    assert disks.home_of(new) == disks.homes[0]
