"""`elect-leaders`, `reassign`, `quorum` and `topics` with a stand-in for the admin client: what they ask and say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tidelog.cli import elect_leaders, quorum, topics
from tidelog.cli.main import main
from tidelog.cli.reassign import command as reassign
from tidelog.cli.reassign import directories as reassign_directories
from tidelog.cli.reassign.directories import RATE
from tidelog.cli.reassign.partition_lists import FOLLOWER_RATE, LEADER_RATE
from tidelog.client import BrokerErrors, TopicPartition
from tidelog.client.model import (
    ClusterDescription,
    ConfigEntry,
    Node,
    PartitionDescription,
    PartitionReassignment,
    QuorumDescription,
    QuorumReplica,
    Replica,
    ReplicaLogDirs,
    TopicDescription,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

F0, F1 = TopicPartition("flights", 0), TopicPartition("flights", 1)
SILENCE = KafkaError(ErrorCode.REQUEST_TIMED_OUT, "no answer")
Cli = Callable[..., tuple[int, str, str]]


class StandIn:
    """Brokers 1 to 4, a topic of two partitions on 1 and 2; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.placed: dict[TopicPartition, tuple[int, ...]] = {F0: (1, 2), F1: (2, 1)}
        self.isr: dict[TopicPartition, tuple[int, ...]] = {F0: (1, 2), F1: (2, 1)}
        self.leaders: dict[TopicPartition, int | None] = {F0: 1, F1: 2}
        self.moves: dict[TopicPartition, PartitionReassignment] = {}
        self.outcomes: dict[TopicPartition, KafkaError | None] = {}
        self.configs: dict[str, str] = {}
        self.rates: dict[int, ConfigEntry] = {}
        self.fenced: set[int] = set()
        self.hanging: set[int] = set()
        self.registered: tuple[int, ...] = (1, 2, 3, 4)
        self.homes: dict[Replica, str] = {}
        self.futures: dict[Replica, str] = {}
        self.refusals: dict[Replica, KafkaError | None] = {}

    def __call__(self, **options: Any) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *how: object) -> None:
        return None

    async def describe_topics(self, names: Iterable[str] | None = None) -> dict[str, TopicDescription]:
        partitions = tuple(
            PartitionDescription(place.partition, self.leaders[place], 0, self.placed[place], self.isr[place])
            for place in self.placed
        )
        return {"flights": TopicDescription("flights", bytes(16), False, partitions)}

    async def describe_configs(
        self, *, topics: Iterable[str] = (), brokers: Iterable[int] = (), keys: Any = None
    ) -> dict[Any, dict[str, ConfigEntry]]:
        entries = {key: ConfigEntry(key, value, 1, False, False) for key, value in self.configs.items()}
        rates = {each: {RATE: self.rates[each]} if each in self.rates else {} for each in brokers}
        return {**dict.fromkeys(topics, entries), **rates}

    async def describe_cluster(self, *, include_fenced: bool = False) -> ClusterDescription:
        nodes = (Node(each, "h", 9092, fenced=each in self.fenced) for each in self.registered)
        return ClusterDescription("c", 1, tuple(node for node in nodes if include_fenced or not node.fenced))

    async def list_partition_reassignments(self, partitions: Any = None) -> dict[TopicPartition, PartitionReassignment]:
        return self.moves

    async def alter_partition_reassignments(
        self, targets: Mapping[TopicPartition, Sequence[int] | None]
    ) -> dict[TopicPartition, KafkaError | None]:
        self.asked.append(("move", targets))
        return {partition: self.outcomes.get(partition) for partition in targets}

    def _require_running(self, brokers: Iterable[int]) -> None:
        """Only a broker itself answers these requests."""
        if self.fenced.intersection(brokers):
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "a broker is down")

    async def describe_replica_log_dirs(self, replicas: Iterable[Replica]) -> dict[Replica, ReplicaLogDirs]:
        replicas = list(replicas)
        self._require_running(replica.broker_id for replica in replicas)
        held = {Replica(*partition, broker) for partition, brokers in self.placed.items() for broker in brokers}
        described = {
            replica: ReplicaLogDirs(self.homes.get(replica, "/a"), self.futures.get(replica))
            for replica in replicas
            if replica in held and replica.broker_id not in self.hanging
        }
        errors = dict.fromkeys(self.hanging.intersection(each.broker_id for each in replicas), SILENCE)
        if errors and described:
            raise BrokerErrors(SILENCE.code, SILENCE.message, described, errors)
        if errors:
            raise SILENCE
        return described

    async def alter_replica_log_dirs(self, paths: Mapping[Replica, str]) -> dict[Replica, KafkaError | None]:
        self._require_running(replica.broker_id for replica in paths)
        self.asked.append(("directories", dict(paths)))
        return {replica: self.refusals.pop(replica, None) for replica in paths}

    async def incremental_alter_configs(self, *, topics: Any = None, brokers: Any = None, **how: Any) -> None:
        self._require_running(brokers or ())
        self.asked.append(("configs", topics or brokers))

    async def create_partitions(self, counts: Mapping[str, int], **how: Any) -> None:
        self.asked.append(("partitions", counts))

    async def elect_leaders(self, partitions: Any, *, unclean: bool) -> dict[TopicPartition, KafkaError | None]:
        self.asked.append(("unclean" if unclean else "preferred", partitions))
        return self.outcomes

    async def add_raft_voter(self, *what: Any) -> None:
        self.asked.append(("add", what))

    async def remove_raft_voter(self, *what: Any) -> None:
        self.asked.append(("remove", what))

    async def describe_quorum(self) -> QuorumDescription:
        voters = (QuorumReplica(1, bytes(16), 90, 1_000, -1), QuorumReplica(2, b"\1" * 16, 100, 2_000, 2_000))
        return QuorumDescription(2, 5, 90, voters, (QuorumReplica(7, bytes(16), 80, 1, 1),), {2: (("C", "h", 9093),)})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for module in (elect_leaders, quorum, reassign, topics):
        monkeypatch.setattr(module, "Admin", stand_in)
    monkeypatch.setattr(reassign, "_HEARSAY_S", 0)
    return stand_in


@pytest.fixture
def cli(cluster: StandIn, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return status, shown.out, shown.err

    return run


def written(path: Path, text: str) -> str:
    (path / "file.json").write_text(text)
    return str(path / "file.json")


def plan(path: Path, replicas: Mapping[TopicPartition, Sequence[int]]) -> str:
    entries = [{"topic": one.topic, "partition": one.partition, "replicas": list(to)} for one, to in replicas.items()]
    return written(path, json.dumps({"version": 1, "partitions": entries}))


# ---------------------------------------------------------------------------------------------------------- elections


def test_leaders_are_elected(cluster: StandIn, cli: Cli, tmp_path: Path):
    cluster.outcomes = {F0: None, F1: KafkaError(ErrorCode.ELECTION_NOT_NEEDED, "no")}
    status, out, err = cli("elect-leaders", "--all")
    assert (status, out) == (0, "flights-0: elected\nflights-1: no election needed\n")
    assert err == "elected 1 leader\n"
    cli("elect-leaders", "--unclean", "--topic", "flights")
    cli("elect-leaders", "--preferred", "--topic", "flights", "--partition", "1")
    cli("elect-leaders", "--json", written(tmp_path, '{"partitions":[{"topic":"flights","partition":1}]}'))
    assert cluster.asked == [("preferred", None), ("unclean", [F0, F1]), ("preferred", [F1]), ("preferred", [F1])]


def test_an_election_that_fails_is_told_by_the_exit_code(cluster: StandIn, cli: Cli):
    cluster.outcomes = {F0: KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "flights-0: it is down")}
    status, out, err = cli("elect-leaders", "--all")
    assert (status, out) == (1, "")
    assert err.splitlines()[0] == "tidelog: PREFERRED_LEADER_NOT_AVAILABLE: flights-0: it is down"


# -------------------------------------------------------------------------------------------------------------- moves


def test_a_plan_is_started_and_the_way_back_printed(cluster: StandIn, cli: Cli, tmp_path: Path):
    status, out, err = cli("reassign", "--json", plan(tmp_path, {F0: [2, 3], F1: [2, 1]}), "--execute")
    assert (status, err) == (0, "started 2 of 2 moves\n")
    assert [each["replicas"] for each in json.loads(out)["partitions"]] == [[1, 2], [2, 1]]
    assert cluster.asked == [("move", {F0: [2, 3], F1: [2, 1]})]


def test_throttles_come_first_and_go_last(cluster: StandIn, cli: Cli, tmp_path: Path):
    file = plan(tmp_path, {F0: [2, 3]})
    cli("reassign", "--json", file, "--execute", "--throttle", "1000")
    rate = {"leader.replication.throttled.rate": "1000", "follower.replication.throttled.rate": "1000"}
    replicas = {"leader.replication.throttled.replicas": "0:1,0:2", "follower.replication.throttled.replicas": "0:3"}
    assert cluster.asked == [
        ("configs", {"flights": replicas}),
        ("configs", {1: rate, 2: rate, 3: rate}),
        ("move", {F0: [2, 3]}),
    ]
    cluster.asked.clear()
    cluster.configs = replicas
    cluster.moves = {F0: PartitionReassignment((1, 2, 3), (3,), (1,))}
    status, out, _ = cli("reassign", "--json", file, "--verify")
    assert (status, cluster.asked) == (1, [])
    assert out.splitlines()[1].split() == ["flights", "0", "in", "progress", "1,2"]
    cluster.moves, cluster.placed = {}, {F0: (2, 3), F1: (2, 1)}
    cluster.isr = cluster.placed
    assert cli("reassign", "--json", file, "--verify", "--preserve-throttles")[0] == 0
    assert cluster.asked == []
    cluster.moves = {F1: PartitionReassignment((1, 2, 4), (4,), (1,))}
    assert cli("reassign", "--json", file, "--verify")[0] == 0
    assert cluster.asked == [], "another plan's move needs the rates of brokers"
    cluster.moves = {}
    status, out, err = cli("reassign", "--json", file, "--verify", "--output-json")
    assert (status, json.loads(out)) == (0, [{"topic": "flights", "partition": 0, "state": "complete"}])
    assert err == "took away the throttles of 1 topic\n"
    assert cluster.asked == [
        ("configs", {"flights": dict.fromkeys(replicas)}),
        ("configs", {broker: dict.fromkeys(rate) for broker in (1, 2, 3, 4)}),
    ]


def test_moves_away_from_a_lost_broker_are_throttled_on_the_others(cluster: StandIn, cli: Cli, tmp_path: Path):
    file, rate = plan(tmp_path, {F0: [2, 3]}), dict.fromkeys((LEADER_RATE, FOLLOWER_RATE), "1000")
    for fenced, registered in (({1}, (1, 2, 3, 4)), (set[int](), (2, 3, 4))):
        cluster.fenced, cluster.registered = fenced, registered
        cluster.asked.clear()
        status, _, err = cli("reassign", "--json", file, "--execute", "--throttle", "1000")
        assert (status, err.splitlines()) == (
            0,
            [
                "2 brokers held to 1,000 B/s for these moves",
                "tidelog: warning: broker 1 does not run: if it comes back, it is not held",
                "started 1 of 1 move",
            ],
        )
        assert cluster.asked[1:] == [("configs", {2: rate, 3: rate}), ("move", {F0: [2, 3]})]


def test_what_is_not_there_is_refused_before_anything_moves(cluster: StandIn, cli: Cli, tmp_path: Path):
    assert "no such brokers: 8, 9" in cli("reassign", "--json", plan(tmp_path, {F0: [9, 8]}), "--execute")[2]
    other = plan(tmp_path, {TopicPartition("other", 3): [1]})
    assert "UNKNOWN_TOPIC_OR_PARTITION: other-3" in cli("reassign", "--json", other, "--execute")[2]
    cluster.moves = {F1: PartitionReassignment((1, 2, 3), (3,), (1,))}
    file = plan(tmp_path, {F0: [3, 4]})
    status, _, err = cli("reassign", "--json", file, "--execute")
    assert (status, err) == (1, "tidelog: already moving 1 partition; --additional adds to them\n")
    assert cluster.asked == []
    assert cli("reassign", "--json", file, "--execute", "--additional")[0] == 0


def test_moves_are_cancelled_where_there_are_some(cluster: StandIn, cli: Cli, tmp_path: Path):
    cluster.moves = {F0: PartitionReassignment((1, 2, 3), (3,), (1,))}
    file = plan(tmp_path, {F0: [2, 3], F1: [4, 3]})
    assert cli("reassign", "--json", file, "--cancel")[::2] == (0, "cancelled 1 of 1 move\n")
    assert cluster.asked == [("move", {F0: None})]
    cluster.outcomes = {F0: KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "flights-0")}
    assert cli("reassign", "--json", file, "--cancel")[0] == 1


def with_directories(path: Path, *directories: str) -> str:
    entry = {"topic": "flights", "partition": 0, "replicas": [1, 2], "log_dirs": list(directories)}
    return written(path, json.dumps({"version": 1, "partitions": [entry]}))


def test_replicas_are_sent_to_the_directories_of_the_plan(
    cluster: StandIn, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reassign_directories, "PAUSE_S", 0)
    one, two = Replica("flights", 0, 1), Replica("flights", 0, 2)
    cluster.homes = {one: "/b"}
    status, out, err = cli("reassign", "--json", with_directories(tmp_path, "any", "/b"), "--execute")
    assert (status, err) == (0, "started 1 of 1 move\nmoving 1 replica between directories\n")
    assert json.loads(out)["partitions"][0]["log_dirs"] == ["/b", "/a"], "the way back"
    assert cluster.asked == [("move", {F0: [1, 2]}), ("directories", {two: "/b"})]
    cluster.asked.clear()
    cluster.refusals = {
        one: KafkaError(ErrorCode.REPLICA_NOT_AVAILABLE, "not yet"),
        two: KafkaError(ErrorCode.LOG_DIR_NOT_FOUND, "no"),
    }
    status, _, err = cli("reassign", "--json", with_directories(tmp_path, "/b", "/c"), "--execute")
    told = "tidelog: cannot move flights-0 on broker 2 to /c: LOG_DIR_NOT_FOUND: no"
    assert (status, err.splitlines()[1]) == (1, told)
    assert cluster.asked[1:] == [("directories", {one: "/b", two: "/c"}), ("directories", {one: "/b"})]
    monkeypatch.setattr(reassign_directories, "START_S", 0)
    cluster.refusals = {one: KafkaError(ErrorCode.REPLICA_NOT_AVAILABLE, "not yet")}
    status, _, err = cli("reassign", "--json", with_directories(tmp_path, "/b", "any"), "--execute")
    assert status == 1
    assert "flights-0 on broker 1 is not there yet" in err


def test_moves_between_directories_are_followed_and_stopped(cluster: StandIn, cli: Cli, tmp_path: Path):
    one, two = Replica("flights", 0, 1), Replica("flights", 0, 2)
    file = with_directories(tmp_path, "/b", "/c")
    cluster.futures = {one: "/b"}
    status, out, _ = cli("reassign", "--json", file, "--verify")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert (status, rows[-2:]) == (1, ["flights 0 1 in progress /b", "flights 0 2 in another directory /c"])
    cluster.moves = {F0: PartitionReassignment((1, 2, 3), (3,), (1,))}
    assert "stopped 1 move between directories" in cli("reassign", "--json", file, "--cancel")[2]
    assert cluster.asked[-1] == ("directories", {one: "/a"})
    cluster.moves, cluster.futures, cluster.homes = {}, {}, {one: "/b", two: "/c"}
    status, out, _ = cli("reassign", "--json", file, "--verify", "--output-json")
    assert (status, [each["state"] for each in json.loads(out)]) == (0, ["complete"] * 3)
    said = {"topic": "flights", "partition": 0, "broker_id": 1, "log_dir": "/b", "state": "complete"}
    assert json.loads(out)[1] == said
    status, _, err = cli("reassign", "--json", with_directories(tmp_path, "/b"), "--verify")
    assert (status, err.count("\n")) == (1, 1)
    assert "2 replicas, but 1 log_dir" in err


def test_a_broker_that_is_lost_keeps_no_other_from_its_directories(cluster: StandIn, cli: Cli, tmp_path: Path):
    one = Replica("flights", 0, 1)
    cluster.fenced = {2}
    file = with_directories(tmp_path, "/b", "/c")
    status, _, err = cli("reassign", "--json", file, "--execute", "--replica-alter-log-dirs-throttle", "1000")
    assert (status, err.splitlines()) == (
        1,
        [
            "1 broker held to 1,000 B/s between directories",
            "started 1 of 1 move",
            "tidelog: cannot move flights-0 on broker 2 to /c: the broker does not run",
        ],
    )
    assert cluster.asked == [("configs", {1: {RATE: "1000"}}), ("move", {F0: [1, 2]}), ("directories", {one: "/b"})]
    cluster.futures = {one: "/b"}
    _, out, _ = cli("reassign", "--json", file, "--verify")
    assert [line.split(maxsplit=3)[2:] for line in out.splitlines()[-2:]] == [
        ["1", "in progress          /b"],
        ["2", "broker does not run  /c"],
    ]
    cluster.moves, cluster.configs = {F0: PartitionReassignment((1, 2), (), ())}, {FOLLOWER_RATE: "0:2"}
    status, _, err = cli("reassign", "--json", file, "--cancel")
    text = "broker 2 does not run: if it comes back, it goes on with its moves between directories"
    lines = ["cancelled 1 of 1 move", f"tidelog: warning: {text}", "stopped 1 move between directories"]
    assert (status, err.splitlines()) == (0, [*lines, "took away the throttles of 1 topic"])
    assert ("directories", {one: "/a"}) in cluster.asked


def test_a_broker_that_hangs_does_not_hide_the_moves_of_others(cluster: StandIn, cli: Cli, tmp_path: Path):
    one, two = Replica("flights", 0, 1), Replica("flights", 0, 2)
    file = with_directories(tmp_path, "/b", "/c")
    cluster.futures, cluster.hanging = {one: "/b", two: "/c"}, {2}
    line = f"tidelog: without broker 2: {SILENCE}"
    status, out, err = cli("reassign", "--json", file, "--verify", "--output-json")
    states = [each["state"] for each in json.loads(out)]
    assert (status, states, err) == (1, ["complete", "in progress", "broker does not answer"], line + "\n")
    status, _, err = cli("reassign", "--json", file, "--cancel")
    assert (status, err.splitlines()[1:]) == (1, [line, "stopped 1 move between directories"])
    assert cluster.asked[-1] == ("directories", {one: "/a"})
    cluster.hanging = {1, 2}
    status, out, err = cli("reassign", "--json", file, "--verify", "--output-json")
    assert (status, err.count("\n")) == (1, 2)
    assert [each["state"] for each in json.loads(out)] == ["complete", *["broker does not answer"] * 2]
    cluster.hanging, cluster.futures = set(), {one: "/b", two: "/c"}
    cluster.refusals = {one: KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "no")}
    status, _, err = cli("reassign", "--json", file, "--cancel")
    refusal = "tidelog: cannot cancel the move of flights-0 on broker 1: KAFKA_STORAGE_ERROR: no"
    assert (status, err.splitlines()[1:]) == (1, [refusal, "stopped 1 move between directories"])


def test_moves_between_directories_are_throttled_until_all_is_done(cluster: StandIn, cli: Cli, tmp_path: Path):
    one, two = Replica("flights", 0, 1), Replica("flights", 0, 2)
    file = with_directories(tmp_path, "/b", "/c")
    status, _, err = cli("reassign", "--json", file, "--execute", "--replica-alter-log-dirs-throttle", "1000")
    assert (status, err.splitlines()[0]) == (0, "2 brokers held to 1,000 B/s between directories")
    rate = {RATE: "1000"}
    assert [name for name, _ in cluster.asked] == ["configs", "move", "directories"]
    assert cluster.asked[0] == ("configs", {1: rate, 2: rate})
    # What holds for all brokers was not set by a move.
    cluster.rates = {1: ConfigEntry(RATE, "1000", 2, False, False), 2: ConfigEntry(RATE, "9", 3, False, False)}
    cluster.futures, cluster.homes = {one: "/b"}, {two: "/c"}
    cluster.asked.clear()
    assert cli("reassign", "--json", file, "--verify")[0] == 1
    cluster.futures, cluster.homes = {}, {one: "/b", two: "/c"}
    assert cli("reassign", "--json", file, "--verify", "--preserve-throttles")[0] == 0
    assert cluster.asked == []
    status, _, err = cli("reassign", "--json", file, "--verify")
    assert (status, err) == (0, "took away the throttles between directories of 1 broker\n")
    assert cluster.asked == [("configs", {1: {RATE: None}})]
    cluster.asked.clear()
    cli("reassign", "--json", file, "--cancel")
    assert ("configs", {1: {RATE: None}}) in cluster.asked
    cluster.asked.clear()
    elsewhere = plan(tmp_path, {F0: [1, 2]})
    status, _, err = cli("reassign", "--json", elsewhere, "--execute", "--replica-alter-log-dirs-throttle", "1000")
    assert (status, err.splitlines()[0]) == (0, "0 brokers held to 1,000 B/s between directories")
    assert cluster.asked == [("move", {F0: [1, 2]})]


def test_moves_are_listed(cluster: StandIn, cli: Cli):
    cluster.moves = {F0: PartitionReassignment((1, 2, 3), (3,), (1,))}
    assert cli("reassign", "--list")[1].splitlines()[1].split() == ["flights", "0", "1,2,3", "3", "1"]
    (move,) = json.loads(cli("reassign", "--list", "--output-json")[1])
    assert move == {"topic": "flights", "partition": 0, "replicas": [1, 2, 3], "adding": [3], "removing": [1]}


def test_a_plan_is_proposed_in_the_words_of_kafkas_tool(cluster: StandIn, cli: Cli, tmp_path: Path):
    topics_file = written(tmp_path, '{"version":1,"topics":[{"topic":"flights"}]}')
    words = ("reassign", "--generate", "--topics-to-move-json", topics_file, "--broker-list")
    status, out, err = cli(*words, "3,4")
    assert (status, err, cluster.asked) == (0, "", [])
    head, now, blank, title, proposed = out.splitlines()
    assert (head, blank) == ("Current partition replica assignment", "")
    assert now.startswith(
        '{"version":1,"partitions":[{"topic":"flights","partition":0,"replicas":[1,2],"log_dirs":["/a","/a"]'
    )
    assert title == "Proposed partition reassignment configuration"
    assert sorted(each["replicas"] for each in json.loads(proposed)["partitions"]) == [[3, 4], [4, 3]]
    assert cli("reassign", "--json", written(tmp_path, proposed), "--execute")[0] == 0
    topics_file = written(tmp_path, '{"version":1,"topics":[{"topic":"flights"}]}')
    assert cli(*words, "3,9,8")[2] == "tidelog: no such brokers: 8, 9\n"
    assert cli(*words, "3,3")[2] == "tidelog: 3,3 names a broker twice\n"
    assert cli(*words, "3,x")[2] == "tidelog: expected a broker's id, not 'x'\n"
    assert "so many brokers are wanted, not 1" in cli(*words, "3")[2]


# ------------------------------------------------------------------------------------------------------------- topics


def test_topics_change(cluster: StandIn, cli: Cli):
    words = ("topics", "alter", "flights", "-p", "3", "-c", "a=1", "--delete-config", "b")
    status, out, _ = cli(*words)
    assert (status, out) == (0, "Changed the configuration of topic flights.\nTopic flights has 3 partitions.\n")
    assert cluster.asked == [("configs", {"flights": {"a": "1", "b": None}}), ("partitions", {"flights": 3})]


def test_partitions_in_trouble(cluster: StandIn, cli: Cli):
    def shown(option: str) -> list[int]:
        described = json.loads(cli("topics", "describe", option, "--json")[1])
        return [each["partition"] for topic in described for each in topic["partitions"]]

    assert shown("--under-replicated") == shown("--unavailable") == []
    cluster.isr[F1] = (2,)
    cluster.leaders[F0] = None
    assert (shown("--under-replicated"), shown("--unavailable")) == ([1], [0])
    cluster.moves = {F1: PartitionReassignment((2, 1), adding=(1,), removing=())}
    assert shown("--under-replicated") == [], "a replica that is only coming is not missed"


# ------------------------------------------------------------------------------------------------------------- quorum


def test_the_quorum_is_described(cli: Cli):
    status, out, _ = cli("quorum", "describe")
    lines = dict(line.split(":", 1) for line in out.splitlines())
    assert (status, lines["leader"].strip(), lines["largest lag of a voter"].strip()) == (0, "2", "10")
    assert lines["voters"].strip() == "1, 2 (h:9093)"
    rows = [line.split()[:4] for line in cli("quorum", "describe", "--replication")[1].splitlines()[1:]]
    assert rows == [["2", "leader", "100", "0"], ["1", "follower", "90", "10"], ["7", "observer", "80", "20"]]
    described = json.loads(cli("quorum", "describe", "--json")[1])
    assert (described["high_watermark"], described["replicas"][0]["endpoints"]) == (90, ["C://h:9093"])


def test_voters_come_and_go(cluster: StandIn, cli: Cli):
    directory = "AQEBAQEBAQEBAQEBAQEBAQ"
    assert cli("quorum", "add-voter", "4", directory, "C://127.0.0.1:9096", "D://[::1]:1")[0] == 0
    assert cli("quorum", "remove-voter", "4", directory)[0] == 0
    assert cluster.asked == [
        ("add", (4, b"\1" * 16, [("C", "127.0.0.1", 9096), ("D", "::1", 1)])),
        ("remove", (4, b"\1" * 16)),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["elect-leaders"],
        ["elect-leaders", "--all", "--topic", "t"],
        ["elect-leaders", "--all", "-p", "0"],
        ["elect-leaders", "--json", "/nowhere"],
        ["reassign"],
        ["reassign", "--execute"],
        ["reassign", "--list", "--json", __file__],
        ["reassign", "--generate"],
        ["reassign", "--generate", "--broker-list", "1"],
        ["reassign", "--generate", "--json", __file__, "--topics-to-move-json", __file__, "--broker-list", "1"],
        ["reassign", "--list", "--broker-list", "1"],
        ["topics", "alter", "t"],
        ["topics", "alter", "t", "--config", "retention.ms=1", "--delete-config", "retention.ms"],
        ["quorum", "add-voter", "4", "short", "C://h:1"],
        ["quorum", "add-voter", "4", "AQEBAQEBAQEBAQEBAQEBAQ", "h:1"],
    ],
)
def test_wrong_usage(cluster: StandIn, cli: Cli, words: list[str]):
    assert cli(*words)[0] == 2
    assert cluster.asked == []


@pytest.mark.parametrize(
    "words",
    [
        ["elect-leaders"],
        ["reassign"],
        ["quorum"],
        ["quorum", "describe"],
        ["quorum", "add-voter"],
        ["quorum", "remove-voter"],
        ["topics", "alter"],
        ["topics", "describe"],
        ["format"],
    ],
)
def test_help_has_an_example(cli: Cli, words: list[str]):
    status, out, _ = cli(*words, "--help")
    assert (status, "Example" in out) == (0, True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"{", "not JSON"), (b"[" * 100_000, "nested too deeply"), (b"\xff\xfe{", "not UTF-8 text")],
)
@pytest.mark.parametrize(
    "words",
    [
        ["reassign", "--execute", "--json"],
        ["reassign", "--generate", "--broker-list", "1", "--topics-to-move-json"],
        ["elect-leaders", "--json"],
    ],
)
def test_a_file_that_is_no_plan_is_one_line(cli: Cli, tmp_path: Path, words: list[str], content: bytes, problem: str):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    status, _, err = cli(*words, str(file))
    assert (status, err.count("\n")) == (1, 1)
    assert problem in err
    assert str(file) in err
