"""`brokers`, `log-dirs`, `features`, `producers` and the offsets of topics, against a real node."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import wait_until
from tidelog import EmbeddedBroker, EmbeddedCluster
from tidelog.cli.brokers import command as brokers_command
from tidelog.cli.brokers.command import Broker
from tidelog.cli.common import as_bytes, as_time
from tidelog.cli.main import main
from tidelog.cli.reassign.directories import RATE
from tidelog.client import Admin as AsyncAdmin
from tidelog.client import TopicPartition
from tidelog.client.model import ClusterDescription, Node
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import ErrorCode, KafkaError

Cli = Callable[..., tuple[int, str, str]]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config={"node.id": 0, "broker.rack": "r1"}) as running:
        yield running


@pytest.fixture
def cli(broker: EmbeddedBroker, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command against the node: (exit code, standard output, standard error)."""
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", broker.bootstrap_servers)

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(words))
        return (status, *capfd.readouterr())

    return run


@pytest.fixture
def topic(broker: EmbeddedBroker) -> str:
    """Two partitions; three records in the first, of 1, 2 and 3 seconds after the beginning of time."""
    name = f"topic-{next(_numbers)}"
    assert main(["topics", "create", name, "-p", "2", "-b", broker.bootstrap_servers]) == 0
    with Producer(bootstrap_servers=broker.bootstrap_servers, acks="all") as producer:
        for second in (1, 2, 3):
            producer.send_and_wait(name, b"v" * 100, partition=0, timestamp_ms=second * 1000)
    return name


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_offsets_of_a_topic(cli: Cli, topic: str):
    header, first, second = rows(cli("topics", "offsets", topic)[1])
    assert header == "TOPIC PARTITION EARLIEST LATEST OFFSETS".split()
    assert (first, second) == ([topic, "0", "0", "3", "3"], [topic, "1", "0", "0", "0"])
    assert json.loads(cli("topics", "offsets", topic, "-p", "0", "--json")[1]) == [
        {"topic": topic, "partition": 0, "earliest": 0, "latest": 3}
    ]


@pytest.mark.parametrize(
    ("time", "offset", "timestamp_ms"),
    [
        ("1500", 1, 2000),
        ("1970-01-01T00:00:02.5", 2, 3000),
        ("max-timestamp", 2, 3000),
        ("-2", 0, None),
        ("latest", 3, None),
        ("3001", None, None),
    ],
)
def test_offsets_at_a_time(cli: Cli, topic: str, time: str, offset: int | None, timestamp_ms: int | None):
    ((status, out, _), text) = (
        cli("topics", "offsets", topic, "--time", time, "-p", "0", "--json"),
        cli("topics", "offsets", topic, "--time", time, "-p", "0")[1],
    )
    (found,) = json.loads(out)
    assert (status, found["offset"], found["timestamp_ms"]) == (0, offset, timestamp_ms)
    shown = "-" if timestamp_ms is None else as_time(timestamp_ms)
    assert rows(text)[1] == [topic, "0", "-" if offset is None else str(offset), shown]


def test_records_are_deleted_up_to_an_offset_a_time_and_the_end(cli: Cli, topic: str, tmp_path: Path):
    header, row = rows(cli("topics", "delete-records", topic, "-p", "0", "--before-offset", "1")[1])
    assert (header, row) == (["TOPIC", "PARTITION", "EARLIEST"], [topic, "0", "1"])
    assert json.loads(cli("topics", "delete-records", topic, "-p", "0", "--before-time", "2500", "--json")[1]) == [
        {"topic": topic, "partition": 0, "low_watermark": 2}
    ]
    assert rows(cli("topics", "offsets", topic)[1])[1] == [topic, "0", "2", "3", "1"]
    assert rows(cli("topics", "delete-records", topic, "--all")[1])[1:] == [[topic, "0", "3"], [topic, "1", "0"]]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": 0, "offset": -1}]}))
    assert rows(cli("topics", "delete-records", "--offset-json-file", str(plan))[1])[1] == [topic, "0", "3"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--before-offset", "9"], 1, "ends before that offset: see `tidelog topics offsets`"),
        (["-p", "7", "--all"], 1, "UNKNOWN_TOPIC_OR_PARTITION: there is no "),
        ([], 2, "--before-offset, --before-time or --all"),
        (["--all", "--before-offset", "1"], 2, "--before-offset, --before-time or --all"),
        (["--before-time", "soon"], 2, "'soon' is not a time"),
    ],
)
def test_a_wrong_deletion_deletes_nothing(cli: Cli, topic: str, words: list[str], status: int, said: str):
    got, out, err = cli("topics", "delete-records", topic, *words)
    assert (got, out) == (status, "")
    assert said in err
    assert rows(cli("topics", "offsets", topic)[1])[1] == [topic, "0", "0", "3", "3"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"partitions": [{"topic": "t"}]}', b'{"partitions": []}', b"[" * 100_000, b"\xff"]
)
def test_a_plan_of_deletions_that_is_none(cli: Cli, content: bytes, tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_bytes(content)
    status, out, err = cli("topics", "delete-records", "--offset-json-file", str(plan))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert str(plan) in err


def test_a_description_has_sizes_offsets_and_configs_on_request(cli: Cli, topic: str):
    header, first, second = rows(cli("topics", "describe", topic, "--sizes", "--offsets")[1])
    assert header[-3:] == ["SIZE", "EARLIEST", "LATEST"]
    assert int(first[-3]) > 300
    assert (first[-2:], second[-3:]) == (["0", "3"], ["0", "0", "0"])
    ((described,),) = (json.loads(cli("topics", "describe", topic, "--sizes", "--offsets", "--configs", "--json")[1]),)
    assert described["partitions"][0]["latest"] == 3
    assert described["partitions"][0]["size_bytes"] == int(first[-3])
    assert described["configs"]["cleanup.policy"] == "delete"
    (plain,) = json.loads(cli("topics", "describe", topic, "--json")[1])
    assert plain["configs"] == {}
    assert "size_bytes" not in plain["partitions"][0]


def test_brokers_are_listed(cli: Cli, broker: EmbeddedBroker, topic: str):
    header, row = rows(cli("brokers", "list")[1])
    assert header == "BROKER ADDRESS RACK ROLES STATE LEADERS REPLICAS LOGS".split()
    assert row[:5] == ["0", broker.bootstrap_servers, "r1", "broker,controller*", "running"]
    (described,) = json.loads(cli("brokers", "list", "--json")[1])
    assert described["leaders"] == described["replicas"] >= 2
    assert described["log_bytes"] == sum(each["size_bytes"] for each in described["log_dirs"]) > 300


@pytest.mark.slow
def test_a_move_between_directories_keeps_to_its_throttle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    homes = [tmp_path / "a", tmp_path / "b"]
    with EmbeddedBroker(config={"log.dirs": ",".join(map(str, homes))}) as broker:
        monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", broker.bootstrap_servers)
        with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
            for _ in range(20):
                producer.send_and_wait("flights", bytes(50_000), partition=0)
        _, target = sorted(homes, key=lambda home: not (home / "flights-0").exists())
        file = tmp_path / "moves.json"
        entry = {"topic": "flights", "partition": 0, "replicas": [1], "log_dirs": [str(target)]}
        file.write_text(json.dumps({"version": 1, "partitions": [entry]}))
        words, throttle = ("reassign", "--json", str(file)), "--replica-alter-log-dirs-throttle"
        assert main([*words, "--execute", throttle, "10000"]) == 0
        time.sleep(1)
        assert main([*words, "--verify"]) == 1
        assert main([*words, "--execute", throttle, "100000000"]) == 0
        wait_until(lambda: main([*words, "--verify"]) == 0)
        assert (target / "flights-0").exists()
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            assert admin.describe_configs(brokers=[1], keys=[RATE]) == {1: {}}
        assert main([*words, "--verify"]) == 0


def test_brokers_that_are_down_have_no_sizes(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    brokers = [
        Broker(Node(1, "h", 1)),
        Broker(Node(2, "h", 2, fenced=True)),
        Broker(Node(3, "h", 3), problem="cut off"),
    ]

    async def ask(*words: object, **how: object) -> tuple[list[Broker], None]:
        return brokers, None

    monkeypatch.setattr(brokers_command, "_ask", ask)
    assert [row[-4:] for row in rows(cli("brokers", "list")[1])[1:]] == [
        ["0", "0", "0", "B"],
        ["fenced", "0", "0", "-"],
        ["unreachable", "0", "0", "-"],
    ]
    assert [each["log_bytes"] for each in json.loads(cli("brokers", "list", "--json")[1])] == [0, None, None]
    status, out, _ = cli("brokers", "describe")
    assert status == 1
    assert "state:          unreachable: cut off\n" in out


def test_a_client_that_may_not_ask_for_the_quorum_reads_so(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    async def refuse(admin: AsyncAdmin) -> None:
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "the metadata quorum")

    monkeypatch.setattr(AsyncAdmin, "describe_quorum", refuse)
    problem = "tidelog: without the roles: CLUSTER_AUTHORIZATION_FAILED: the metadata quorum\n"
    assert cli("brokers", "list")[::2] == (1, problem)
    assert cli("brokers", "describe")[::2] == (1, problem)


def test_a_broker_is_described_with_its_versions(cli: Cli, broker: EmbeddedBroker):
    status, out, _ = cli("brokers", "describe", "0", "--api-versions")
    assert status == 0
    assert f"address:        {broker.bootstrap_servers}\n" in out
    assert f"{broker.directory} (" in out
    assert "metadata.version 7 to 30, now 30\n" in out
    assert ["18", "ApiVersions", "0", "4"] in rows(out)
    (described,) = json.loads(cli("brokers", "describe", "--json")[1])
    assert described["api_versions"]["ApiVersions"] == [0, 4]
    assert described["features"]["metadata.version"]["finalized"] == 30
    assert cli("brokers", "describe", "7")[::2] == (1, "tidelog: BROKER_NOT_AVAILABLE: there is no broker 7\n")


def test_log_directories_and_what_lies_in_them(cli: Cli, broker: EmbeddedBroker, topic: str):
    header, row = rows(cli("log-dirs", "describe")[1])
    assert header == "BROKER DIRECTORY STATE REPLICAS SIZE FREE VOLUME".split()
    assert row[:3] == ["0", str(broker.directory), "online"]
    first, second = rows(cli("log-dirs", "describe", "--topic-list", topic)[1])[1:]
    assert (first[:3], second[:4]) == ([topic, "0", "0"], [topic, "1", "0", "0"])
    (found,) = json.loads(cli("log-dirs", "describe", "--broker-list", "0", "--topic-list", topic, "--json")[1])[
        "brokers"
    ]
    partitions = found["logDirs"][0]["partitions"]
    assert [each["partition"] for each in partitions] == [f"{topic}-0", f"{topic}-1"]
    assert partitions[0]["size"] == int(first[3]) > 300
    assert cli("log-dirs", "describe", "--broker-list", "5")[0] == 1
    assert cli("log-dirs", "describe", "--broker-list", "one")[0] == 2
    assert cli("log-dirs", "describe", "--topic-list", "nothing")[0] == 1


def test_the_directories_of_a_broker_that_is_down_are_not_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    of_the_running = AsyncAdmin.describe_cluster

    async def with_another(admin: AsyncAdmin, *, include_fenced: bool = False) -> ClusterDescription:
        cluster = await of_the_running(admin, include_fenced=include_fenced)
        return replace(cluster, nodes=(*cluster.nodes, *[Node(5, "h", 1, fenced=True)] * include_fenced))

    monkeypatch.setattr(AsyncAdmin, "describe_cluster", with_another)
    answer = cli("log-dirs", "describe", "--broker-list", "5")
    assert answer == (1, "", "tidelog: BROKER_NOT_AVAILABLE: broker 5 is not running\n")
    assert cli("log-dirs", "describe")[0] == 0


def test_features_go_down_and_up(cli: Cli):
    name = "eligible.leader.replicas.version"
    assert [name, "0", "1", "1"] in rows(cli("features", "describe")[1])
    down = ("features", "downgrade", "--feature", f"{name}=0")
    assert cli(*down, "--dry-run")[:2] == (0, f"{name} would be at level 0.\n")
    assert [name, "0", "1", "1"] in rows(cli("features", "describe")[1])
    assert cli(*down)[:2] == (0, f"{name} is at level 0.\n")
    assert {"feature": name, "supported": [0, 1], "finalized": 0} in json.loads(
        cli("features", "describe", "--json")[1]
    )["features"]
    status, out, _ = cli("features", "upgrade", "--feature", f"{name}=1", "--json")
    assert (status, json.loads(out)) == (0, {"features": {name: 1}, "outcome": "finalized"})


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["upgrade", "--feature", "metadata.version=99"], 1, "only supports versions 7-30"),
        (["upgrade", "--feature", "eligible.leader.replicas.version=0"], 1, "INVALID_UPDATE_VERSION"),
        (["upgrade", "--feature", "share.version=1"], 1, "no feature 'share.version': there are eligible"),
        (["upgrade", "--feature", "metadata.version=4.3-IV0"], 2, "a level is a whole number"),
        (["downgrade", "--feature", "metadata.version=7"], 1, "might delete metadata information"),
    ],
)
def test_a_feature_level_that_cannot_be(cli: Cli, words: list[str], status: int, said: str):
    got, out, err = cli("features", *words)
    assert (got, out) == (status, "")
    assert said in err


def test_producers_of_a_topic(cli: Cli, topic: str):
    header, row = rows(cli("producers", topic)[1])
    assert " ".join(header) == "TOPIC PARTITION PRODUCER EPOCH LAST SEQUENCE LAST WRITTEN TRANSACTION FROM"
    assert (row[:2], row[3:]) == ([topic, "0"], ["0", "2", "1970-01-01T00:00:03.000Z", "-"])
    (found,) = json.loads(cli("producers", topic, "-p", "0", "--json")[1])
    assert (found["partition"], found["last_sequence"], found["last_timestamp_ms"]) == (0, 2, 3000)
    assert json.loads(cli("producers", topic, "-p", "1", "--json")[1]) == []
    assert "UNKNOWN_TOPIC_OR_PARTITION" in cli("producers", topic, "-p", "5")[2]


def test_the_blocking_admin_has_the_same(broker: EmbeddedBroker, topic: str):
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        ((directory,),) = admin.describe_log_dirs([0], [topic]).values()
        assert [replica.partition for replica in directory.replicas] == [0, 1]
        assert admin.describe_versions(0).finalized_features["metadata.version"] == 30
        (producers,) = admin.describe_producers([TopicPartition(topic, 0)]).values()
        assert [each.last_sequence for each in producers] == [2]
        admin.update_features({"metadata.version": 30}, validate_only=True)
        for call in (lambda wanted: admin.delete_records(dict.fromkeys(wanted, 0)), admin.describe_producers):
            with pytest.raises(KafkaError, match=r"UNKNOWN_TOPIC_OR_PARTITION: .* has 2 partitions, not one"):
                call([TopicPartition(topic, 9)])


def test_sizes_and_times_are_written_for_people():
    assert [as_bytes(size) for size in (-1, 0, 1023, 1536, 200 * 2**20, 5 * 2**60)] == [
        "-",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 MiB",
        "5242880 TiB",
    ]
    assert (as_time(-1), as_time(1795368655522)) == ("-", "2026-11-22T17:30:55.522Z")
    assert as_time(2**62) == str(2**62)


def test_a_broker_that_runs_or_never_was_is_not_unregistered(cli: Cli):
    assert cli("brokers", "unregister", "0") == (
        1,
        "",
        "tidelog: broker 0 runs: stop it before its registration ends\n",
    )
    status, out, err = cli("brokers", "unregister", "7")
    assert (status, out) == (1, "")
    assert err.startswith("tidelog: BROKER_ID_NOT_REGISTERED: broker 7")


@pytest.mark.slow
def test_a_broker_that_is_gone_leaves_the_list(cli: Cli):
    with EmbeddedCluster(2, controllers=1) as cluster:
        where = ("-b", cluster.bootstrap_servers.split(",")[0])

        def states() -> dict[int, str]:
            return {each["broker"]: each["state"] for each in json.loads(cli("brokers", "list", "--json", *where)[1])}

        cluster.kill(2)
        wait_until(lambda: states()[2] == "fenced")
        assert cli("brokers", "unregister", "2", *where) == (0, "Broker 2 is not registered any more.\n", "")
        wait_until(lambda: states() == {1: "running"})
