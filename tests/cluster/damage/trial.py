"""One damage case on a cluster of processes, from the first record to three whole copies.

A `Trial` starts the nodes and the clients, does the damage, brings everything back, asks for everything and looks at
the files. What goes wrong is collected as findings, worst first in `CLASSES`; the trial goes on as far as it can, so
that one finding does not hide another. Nothing here knows how a broker repairs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka
import confluent_kafka.admin

from tests.cluster.damage.cases import NODES, PARTITIONS, Case, replicas_of
from tests.cluster.damage.clients import ClientProcess
from tests.cluster.damage.injuries import METADATA, inflict
from tests.cluster.damage.reading import walk
from tests.cluster.damage.records import base_timestamp_ms
from tests.cluster.damage.replicas import Log, check_compacted, check_companions, check_replicas, read_log
from tidelog.bench.metadata import ClusterState, ask, await_brokers, await_leaders
from tidelog.bench.peers import KafkaProcess, java
from tidelog.bench.raw import BenchError
from tidelog.broker.config import definitions as config_definitions
from tidelog.testing.cluster import EmbeddedCluster, tidelog_node
from tidelog.testing.layout import NodeLayout
from tidelog.testing.processes import ServerFailed, ServerProcess

TOPIC, GROUP = "damaged", "readers"
CLASSES = (
    "client died",
    "lost",
    "wrong",
    "skipped",
    "node down",
    "stuck",
    "unwritable",
    "not whole at the end",
    "damage served",
    "well",
)
BURST, RATE = 1500, 300
TOPIC_CONFIG = {
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "segment.ms": "1000",
    "index.interval.bytes": "1024",
    "retention.ms": "-1",
}
OPTIONS = {
    "min.insync.replicas": "2",  # of the groups' offsets, too: with 1 a leader alone commits what has no second copy
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "replica.lag.time.max.ms": "2000",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "1",
    "metadata.log.max.record.bytes.between.snapshots": "4000",
    "replica.high.watermark.checkpoint.interval.ms": "1000",
}
BELIEVED_S = 60.0
SCRUBBING = {"log.scrub.bytes.per.second": str(64 << 20), "log.scrub.interval.ms": "3000"}
OWN_OPTIONS = {key: value for key, value in SCRUBBING.items() if key in config_definitions.BROKER}
START_S, IN_SYNC_S, SETTLE_S, READ_S, WHOLE_S = 60.0, 45.0, 45.0, 25.0, 40.0


@dataclass(slots=True)
class Outcome:
    case: Case
    findings: list[tuple[str, str]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return min((name for name, _ in self.findings), key=CLASSES.index, default="well")


class Trial:
    def __init__(self, case: Case, directory: Path, *, kafka: bool = False, dumps: bool = False) -> None:
        self.case, self.directory, self.kafka, self.dumps = case, directory, kafka, dumps
        self.outcome = Outcome(case)
        options = {**OPTIONS, **({} if kafka else OWN_OPTIONS)}
        controllers, make_node = (1 if case.separate else 0), _kafka_node if kafka else tidelog_node
        self.cluster = EmbeddedCluster(
            len(NODES), directory, controllers=controllers, config=options, make_node=make_node
        )
        # A crowded machine is slow at everything; only what never comes takes the whole time.
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1) / 2
        self.patience = min(max(3.0 if kafka else 1.0, crowd), 6.0)
        self.expected_down: set[int] = set()
        self.producer: ClientProcess | None = None
        self.reader: ClientProcess | None = None
        self._clients: list[ClientProcess] = []
        self._began = time.monotonic()
        self._injured_s = 0.0
        self._metadata_goal = 0
        """Where every copy of the metadata log must have come to: the longest at the first look."""
        self._base_timestamp_ms = base_timestamp_ms()

    def find(self, name: str, message: str) -> None:
        """Something is wrong."""
        if sum(1 for one, _ in self.outcome.findings if one == name) < 8:
            self.outcome.findings.append((name, f"{self._at()} {message}"))

    def note(self, message: str) -> None:
        self.outcome.notes.append(f"{self._at()} {message}")

    @property
    def _is_hopeless(self) -> bool:
        """Whether what comes now need not be waited for as long as by a cluster that may be well."""
        return any(name in ("stuck", "unwritable", "node down") for name, _ in self.outcome.findings)

    def _note_as(self, name: str, message: str) -> None:
        self.note(f"{name}, perhaps: {message}")

    def _at(self) -> str:
        return f"[{time.monotonic() - self._began:.1f} s]"

    # The course of it

    def run(self) -> Outcome:
        with ExitStack() as stack:
            stack.callback(self._end_everything)
            self._begin()
            self._do_damage()
            if self.case.absent is not None:
                self._check_in_sync(2)
                self.note(f"node {self.case.absent} comes back")
                self._launch(self.case.absent)
                self._await_ready([self.case.absent])
            self._check_in_sync(3)
            self._promote()
            self._go_on(1.0)
            self._settle()
            self._read_everything()
            self._try_something_new()
            self._await_whole()
            self._stop_and_check_files()
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _begin(self) -> None:
        case, cluster = self.case, self.cluster
        self.directory.mkdir(parents=True, exist_ok=True)
        cluster.start(START_S * self.patience)
        await_brokers((cluster.nodes[node].port for node in NODES), len(NODES))
        self._create(TOPIC, [replicas_of(one) for one in range(PARTITIONS)], TOPIC_CONFIG)
        self.producer = self._client(
            "producer",
            partitions=PARTITIONS,
            burst=BURST,
            rate=RATE,
            compression=case.compression,
            base_timestamp_ms=self._base_timestamp_ms,
        )
        self.reader = self._client("reader", **self._reading(), commits=True)
        self._until(30.0, lambda: len(self.acknowledged()) >= BURST * PARTITIONS, "unwritable", "the first records")
        self._go_on(0.7)
        if case.absent is not None:
            self.expected_down.add(case.absent)
            cluster.kill(case.absent)
            self._go_on(3.5)

    def _do_damage(self) -> None:
        case, cluster = self.case, self.cluster
        if case.moment == "running":
            self._injure_all()
            self._go_on(1.5)
            return
        if case.moment == "truncating":
            self._truncate()
            return
        present = [node for node in cluster.nodes if node != case.absent]
        down = present if case.moment.startswith("all") else [case.victim]
        self.expected_down.update(down)
        if case.moment.endswith("killed"):
            cluster.kill(*down)
        elif len(down) > 1:
            cluster.stop(20.0)
        else:
            cluster.nodes[case.victim].stop(20.0)
        self._injure_all()
        self._go_on(0.3)
        controllers = [node for node in down if node not in NODES]
        others = [node for node in down if node in NODES and node != case.victim]
        order = [*controllers, case.victim, *others] if case.victim_first else [*controllers, *others, case.victim]
        first = [*controllers, case.victim] if case.victim_first else order[:-1]
        for node in first:
            self._launch(node)
        if len(down) > 1:
            if len(first) > 1:
                self._await_ready(first)
            self._go_on(1.5)
        for node in order:
            if node not in first:
                self._launch(node)
        self._await_ready(order)

    def _truncate(self) -> None:
        """The victim, damaged while it runs, leads with records that no other has, and must cut them off."""
        cluster, victim = self.cluster, self.case.victim
        others = [node for node in cluster.nodes if node != victim]
        self.expected_down.update(others)
        cluster.kill(*others)
        hasty = confluent_kafka.Producer(
            {"bootstrap.servers": cluster.nodes[victim].bootstrap_servers, "acks": 1, "log_level": 0}
        )
        for _ in range(5):
            # As old as the others: a record of now would begin a segment.
            hasty.produce(TOPIC, b"not to stay", partition=self.case.partition, timestamp=self._base_timestamp_ms)
            hasty.flush(1.0)
        self._injure_all()
        cluster.nodes[victim].pause()
        for node in others:
            self._launch(node)
        self.expected_down.add(victim)
        self._await_ready(others)

        def is_led_elsewhere() -> bool:
            found = self._state().topics.get(TOPIC, {})
            return len(found) == PARTITIONS and all(one.leader in others for one in found.values())

        self._until(20.0, is_led_elsewhere, "stuck", "the others do not lead")
        cluster.nodes[victim].resume()
        self.expected_down.discard(victim)

    def _injure_all(self) -> None:
        for node, injury in self.case.victims:
            data = self.cluster.nodes[node].data_directory
            what = inflict(injury, data, f"{TOPIC}-{self.case.partition}")
            self._injured_s = time.monotonic()
            self.outcome.damage.append(f"{self._at()} node {node} {what}")

    def _promote(self) -> None:
        case = self.case
        if case.promotion == "preferred":
            where = [confluent_kafka.TopicPartition(TOPIC, one) for one in range(PARTITIONS)]
            client = self._admin()
            try:
                client.elect_leaders(confluent_kafka.ElectionType.PREFERRED, where).result(15)
            except confluent_kafka.KafkaException as error:
                self.note(f"the election of preferred leaders answered {error}")
        elif case.promotion == "kill_leader":
            leader = self._state().topics.get(TOPIC, {})[case.partition].leader
            if leader == case.victim or leader < 0:
                return
            self.expected_down.add(leader)
            self.cluster.kill(leader)
            self._go_on(1.5)
            self._launch(leader)
            self._await_ready([leader])
            self._check_in_sync(3)

    def _settle(self) -> None:
        """Every record is answered, and the reader that has run all along has read all of them."""
        assert self.producer is not None
        assert self.reader is not None
        settled = self.producer.ask("settle", "settled", SETTLE_S * self.patience)
        if settled is None:
            self.find("unwritable", f"records are not answered in {SETTLE_S * self.patience:.0f} s; {self._leaders()}")
        else:
            self.note(f"the longest wait for an acknowledgement: {settled['stall_s']} s")
        for report in self.producer.hear():
            if "failed" in report:
                self.find("unwritable", f"the producer failed: {report['failed']}")
        ends = self._ends()

        def has_read() -> bool:
            assert self.reader is not None
            answer = self.reader.ask("positions", "positions", 5.0)
            return answer is not None and all(answer["positions"][str(one)] >= end for one, end in ends.items())

        self._until(READ_S, has_read, "stuck", f"the running reader does not reach {ends}: {self._positions()}")

    def _read_everything(self) -> None:
        """With every tool: a new librdkafka consumer, our own, raw fetches at every position of every replica."""
        ends = self._ends()
        readers = [self._client(role, **self._reading(), ends=ends) for role in ("reader", "own_reader")]
        deadline = time.monotonic() + (10.0 if self._is_hopeless else READ_S) * self.patience
        for node in NODES:
            for partition in range(PARTITIONS):
                self._walk(node, partition, ends[partition])
        for client in readers:
            done = client.await_report("done", 0, max(deadline - time.monotonic(), 5.0))
            if client.died is None and done is None:
                answer = client.ask("positions", "positions", 5.0)
                at = None if answer is None else answer["positions"]
                self.find("stuck", f"{client.name} reads to {at} of {ends}")
            client.end()
            self._check_reader(client)
            if done is not None:
                self._check_records(client, ends)
        assert self.reader is not None
        self._check_reader(self.reader)

    def _walk(self, node: int, partition: int, end: int) -> None:
        server = self.cluster.nodes[node]
        if not server.alive:
            return
        walk_began_s = time.monotonic()
        found = walk(server.port, TOPIC, partition, (3.0 if self._is_hopeless else 15.0) * self.patience)
        who = f"a raw fetch of {partition} from node {node}"
        for wrong in found.wrong[:3]:
            self.find("wrong", f"{who}: {wrong}")
        if found.damaged:
            # A running node believes bytes that it has checked for up to a minute, unless the scrubber comes first
            # (decision 0016). A walk that gets no others than these is stuck.
            is_believed = self.case.moment == "running" and walk_began_s - self._injured_s < BELIEVED_S
            tell = self._note_as if is_believed else self.find
            tell("damage served", f"{who}, {len(found.damaged)} times: {found.damaged[0]}")
        if found.stuck:
            self.find("stuck", f"{who}: {found.stuck}")
        elif not found.not_served and found.high_watermark < end:
            # A follower may learn of the last record's commit late; the leader may not.
            leads = self._state().topics[TOPIC][partition].leader == node
            (self.find if leads else self._note_as)("lost", f"{who}: ends at {found.high_watermark} of {end}")
        codes = sorted({code for code in found.errors if not found.not_served})
        if codes:
            self.note(f"{who} met errors {codes}, {len(found.errors)} times")

    def _check_reader(self, client: ClientProcess) -> None:
        if client.died is not None:
            self.find("client died", client.died)
        for report in client.hear():
            if "skipped" in report:
                partition, expected, offset = report["skipped"]
                after = f", after {report['errors_before']} errors" if report["errors_before"] else ""
                self.find("skipped", f"{client.name}: partition {partition} goes from {expected} to {offset}{after}")
            if "wrong" in report:
                self.find("wrong", f"{client.name}: a wrong record at {report['wrong']}")
            if "error" in report:
                self.note(f"{client.name}: {report['error']}")

    def _check_records(self, client: ClientProcess, ends: Mapping[int, int]) -> None:
        """What a reader of everything has, against what was acknowledged: nothing lost, nothing twice, in order."""
        read: dict[tuple[int, int], int] = {}
        last: dict[int, int] = {}
        for partition, number, offset in client.records():
            if (partition, number) in read:
                where = read[partition, number]
                self.find("wrong", f"{client.name}: record {number} of {partition} at {where} and at {offset}")
            if number <= last.get(partition, -1):
                self.find("wrong", f"{client.name}: record {number} of {partition} behind {last[partition]}")
            read[partition, number] = offset
            last[partition] = number
        lost = [(one, number, at) for one, number, at in self.acknowledged() if read.get((one, number)) != at]
        if lost:
            self.find("lost", f"{client.name}: {len(lost)} acknowledged records are not there, the first is {lost[0]}")

    def _try_something_new(self) -> None:
        """The cluster takes new topics and records, and knows what was committed."""
        self._check_nodes()
        assert self.producer is not None
        self.producer.order("go")
        before = len(self.acknowledged())
        self._until(20.0, lambda: len(self.acknowledged()) > before + 50, "unwritable", "new records after all")
        settled = self.producer.ask("settle", "settled", 20.0 * self.patience)
        if settled is None:
            self.find("unwritable", "the last records are not answered")
        try:
            self._create("afterwards", [list(NODES)], {})
        except Exception as error:
            self.find("unwritable", f"a new topic: {error}")
        assert self.reader is not None
        answer = self.reader.ask("positions", "positions", 5.0)
        self.reader.end()
        if answer is not None and answer["committed"]:
            self._check_committed({int(one): at for one, at in answer["committed"].items()})

    def _check_committed(self, expected: dict[int, int]) -> None:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self.cluster.bootstrap_servers, "group.id": GROUP, "log_level": 0}
        )
        try:
            asked = [confluent_kafka.TopicPartition(TOPIC, one) for one in expected]
            found = {one.partition: one.offset for one in consumer.committed(asked, timeout=20 * self.patience)}
            if any(found[one] < at for one, at in expected.items()):
                self.find("lost", f"offsets committed {expected}, found {found}")
        except confluent_kafka.KafkaException as error:
            self.find("stuck", f"committed offsets: {error}")
        finally:
            consumer.close()

    # Files

    def _logs(self, directory: str, nodes: Iterable[int] = NODES) -> dict[int, Log]:
        logs = {}
        for node in nodes:
            data = self.cluster.nodes[node].data_directory
            logs[node] = read_log(data / directory, compacted=directory.startswith("__consumer"))
        return logs

    def _faults_of_data(self) -> list[str]:
        ends = self._known_ends
        wrong: list[str] = []
        for partition in range(PARTITIONS):
            wrong += check_replicas(self._logs(f"{TOPIC}-{partition}"), 0, ends[partition])
        offsets = self._logs("__consumer_offsets-0")
        wrong += check_compacted(offsets, max(log.end for log in offsets.values()))
        metadata = self._logs(METADATA, self.cluster.nodes)
        start = max(log.batches[0].base_offset if log.batches else 0 for log in metadata.values())
        self._metadata_goal = self._metadata_goal or max(log.end for log in metadata.values())
        return wrong + check_replicas(metadata, start, self._metadata_goal)

    def _await_whole(self) -> None:
        self._known_ends = self._ends()
        deadline = time.monotonic() + (15.0 if self._is_hopeless else WHOLE_S) * self.patience
        while wrong := self._faults_of_data():
            if time.monotonic() > deadline or self.kafka:
                break
            time.sleep(0.5)
        if not wrong:
            self.note("all copies are whole")
        self._check_nodes()

    def _stop_and_check_files(self) -> None:
        if self.producer is not None:
            self.producer.end()
        for client in self._clients:
            client.end()
        self.cluster.stop(30.0)
        for wrong in self._faults_of_data():
            self.find("not whole at the end", wrong)
        if faults := self._faults_of_companions():
            # A file that only helps to find may lie damaged until it is used: it must not outlive that.
            self.note(f"beside the logs: {'; '.join(faults)}")
            self._start_once_more()
            for wrong in self._faults_of_companions():
                self.find("not whole at the end", wrong)
        if self.dumps:
            self._dump()

    def _dump(self) -> None:
        """What Kafka's own tool says of every segment and index of the partition, on every node."""
        for node in NODES:
            directory = self.cluster.nodes[node].data_directory / f"{TOPIC}-{self.case.partition}"
            files = sorted(str(one) for kind in ("log", "index", "timeindex") for one in directory.glob(f"*.{kind}"))
            done = java("org.apache.kafka.tools.DumpLogSegments", "--files", ",".join(files), "--index-sanity-check")
            wrong = [line for line in done.stdout.splitlines() if "isvalid: false" in line or "ismatch" in line.lower()]
            if done.returncode != 0 or wrong:
                self.find("not whole at the end", f"Kafka dumps node {node}: {(done.stderr or str(wrong[:2]))[-300:]}")
        self.note("Kafka's DumpLogSegments has read every segment of the partition")

    def _faults_of_companions(self) -> list[str]:
        return [
            f"node {node}: {wrong}"
            for partition in range(PARTITIONS)
            for node, log in self._logs(f"{TOPIC}-{partition}").items()
            for wrong in check_companions(log)
        ]

    def _start_once_more(self) -> None:
        for node in self.cluster.nodes:
            self._launch(node)
        self._await_ready(list(self.cluster.nodes))
        self._check_in_sync(3)
        ends = self._ends()
        for node in NODES:
            for partition in range(PARTITIONS):
                self._walk(node, partition, ends[partition])
        self.cluster.stop(30.0)

    # Nodes

    def _launch(self, node: int) -> None:
        self.expected_down.discard(node)
        if not self.cluster.nodes[node].alive:
            self.cluster.launch(node)

    def _await_ready(self, nodes: list[int]) -> None:
        """A node that ends instead is found, and started once more, as a supervisor does."""
        for node in nodes:
            server = self.cluster.nodes[node]
            try:
                server.await_ready(START_S * self.patience)
            except ServerFailed as failed:
                self.find("node down", f"node {node}: {_last_lines(str(failed))}")
                if not server.alive:
                    self._launch(node)

    def _check_nodes(self) -> None:
        for node, server in self.cluster.nodes.items():
            if not server.alive and node not in self.expected_down:
                self.find(
                    "node down", f"node {node} ended with {server.exit_code}: {_last_lines(server.output_tail())}"
                )
                self._launch(node)
                self._await_ready([node])

    def _go_on(self, seconds: float) -> None:
        """Let the clients work for a while."""
        time.sleep(seconds)
        self._check_nodes()

    def _state(self) -> ClusterState:
        for node in NODES:
            server = self.cluster.nodes[node]
            if server.alive and node not in self.expected_down:
                try:
                    return ask(server.port, [TOPIC], 5.0)
                except (OSError, BenchError):
                    continue
        return ClusterState({}, -1, {})

    def _leaders(self) -> str:
        found = self._state().topics.get(TOPIC, {})
        return "; ".join(f"{one}: leader {state.leader}, ISR {state.in_sync}" for one, state in sorted(found.items()))

    def _check_in_sync(self, count: int) -> None:
        def whole() -> bool:
            found = self._state().topics.get(TOPIC, {})
            return len(found) == PARTITIONS and all(
                one.leader > 0 and len(one.in_sync) >= count for one in found.values()
            )

        self._until(IN_SYNC_S, whole, "stuck", f"not every partition is led with {count} in sync")

    # Clients

    def _reading(self) -> dict[str, Any]:
        return {"from": list(range(PARTITIONS)), "group": GROUP}

    def _client(self, role: str, **plan: Any) -> ClientProcess:
        name = f"{role} of everything" if "ends" in plan else role
        plan = {
            "role": role,
            "topic": TOPIC,
            "seed": self.case.seed,
            "bootstrap": self.cluster.bootstrap_servers,
            **plan,
        }
        client = ClientProcess(self.directory, name, plan)
        self._clients.append(client)
        return client

    def _admin(self) -> Any:
        return confluent_kafka.admin.AdminClient({"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": 0})

    def _create(self, name: str, assignment: list[list[int]], config: Mapping[str, str]) -> None:
        new_topic: Any = confluent_kafka.admin.__dict__["NewTopic"]
        topic = new_topic(name, len(assignment), replica_assignment=assignment, config=dict(config))
        client = self._admin()
        client.create_topics([topic])[name].result(30 * self.patience)
        port = next(self.cluster.nodes[node].port for node in NODES if self.cluster.nodes[node].alive)
        await_leaders(port, name, len(assignment), len(assignment[0]), 30 * self.patience)

    def acknowledged(self) -> list[tuple[int, int, int]]:
        assert self.producer is not None
        return self.producer.records()

    def _ends(self) -> dict[int, int]:
        """Behind the last acknowledged record of each partition."""
        ends = dict.fromkeys(range(PARTITIONS), 0)
        for partition, _, offset in self.acknowledged():
            ends[partition] = max(ends[partition], offset + 1)
        return ends

    def _positions(self) -> Any:
        assert self.reader is not None
        answer = self.reader.ask("positions", "positions", 5.0)
        return None if answer is None else answer["positions"]

    def _until(self, seconds: float, done: Callable[[], bool], name: str, what: str) -> bool:
        if self._is_hopeless:
            seconds = min(seconds, 10.0)
        deadline = time.monotonic() + seconds * self.patience
        while not done():
            if time.monotonic() > deadline:
                self.find(name, f"{what}: not within {seconds * self.patience:.0f} s; {self._leaders()}")
                return False
            time.sleep(0.05)
        return True

    def _end_everything(self) -> None:
        for client in self._clients:
            client.end(0.5)
        for server in self.cluster.nodes.values():
            server.kill()


def _kafka_node(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    return KafkaProcess(directory, layout.port, options, node_id=layout.node_id, voters={}, heap="384m")


def _last_lines(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])[-500:]
