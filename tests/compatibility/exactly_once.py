"""What the proofs of exactly once with Java's programs share: options, programs that are killed, topics read whole."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.asking import await_healthy
from tests.patience import join
from tidelog.bench import peers
from tidelog.client.model import TopicPartition
from tidelog.client.sync import Admin, Consumer
from tidelog.testing.cluster import EmbeddedCluster

PATIENCE_S = 240.0
CLUSTER_OPTIONS = {
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "300",
    "replica.lag.time.max.ms": "3000",
}
FRAMEWORKS = (
    ("org.apache.kafka", "connect-file", peers.KAFKA_VERSION),
    ("org.apache.kafka", "kafka-streams-examples", peers.KAFKA_VERSION),
)


def jvm(classpath: Sequence[Path | str], *arguments: object) -> list[str]:
    """The command that runs a Java program that is small and starts often."""
    flags = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=WARN"]
    return ["java", *flags, "-cp", ":".join(map(str, classpath)), *map(str, arguments)]


def compiled(source: Path, classpath: Sequence[Path | str], target: Path) -> Path:
    """The directory of the classes of one Java source."""
    command = ["javac", "-nowarn", "-d", str(target), "-cp", ":".join(map(str, classpath)), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return target


def write_properties(path: Path, values: Mapping[str, object]) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    return path


def wait_for(condition: Callable[[], Any], otherwise: Callable[[], Any], pause_s: float = 0.2) -> None:
    """Until the condition holds; fails with `otherwise` after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(pause_s)


class Program:
    """A program that runs until it is killed, and can be started again."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command, self.log = list(command), log
        self._run_begins_at = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.exit_code is not None or self._process is None, "it runs"
        with self.log.open("ab") as log:
            self._run_begins_at = log.tell()
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """SIGKILL: it can say nothing more to any broker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def output(self, size_bytes: int = 4000) -> str:
        return self.log.read_bytes()[-size_bytes:].decode(errors="replace")

    def output_of_run(self) -> str:
        """What it has written since its last start."""
        return self.log.read_bytes()[self._run_begins_at :].decode(errors="replace")

    def __enter__(self) -> Program:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class BrokerKills:
    """Kills one broker after the other on a thread, each started again and in sync before the next one is killed.

    `rest_s` between two kills: every new group coordinator gives a dead member its session timeout anew, so that where
    a member dies brokers must live longer than that.
    """

    def __init__(self, cluster: EmbeddedCluster, topics: Iterable[str], rest_s: float = 1.0) -> None:
        self._cluster, self._topics, self._rest_s = cluster, list(topics), rest_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker kills")
        self.count = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        cluster = self._cluster
        try:
            while not self._stopping.is_set():
                node = cluster.broker_ids[self.count % len(cluster.broker_ids)]
                cluster.kill(node)
                self._stopping.wait(2.0)
                cluster.restart(node, PATIENCE_S)
                await_healthy(cluster, self._topics, PATIENCE_S)
                self.count += 1
                self._stopping.wait(self._rest_s)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> BrokerKills:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        join(self._thread, PATIENCE_S)
        if kind is None:
            assert self.error is None, self.error
            assert self.count > 0, "no broker was killed"


def records_of(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[list[tuple[str, str]]]:
    """Keys and values of each partition, up to its high watermark, once no transaction of the topic is open."""
    with (
        Admin(bootstrap_servers=bootstrap) as admin,
        Consumer(bootstrap_servers=bootstrap, isolation_level=isolation, auto_offset_reset="earliest") as consumer,
    ):
        partitions = [
            TopicPartition(topic, each.partition) for each in admin.describe_topics([topic])[topic].partitions
        ]
        latest: dict[TopicPartition, int | str] = dict.fromkeys(partitions, "latest")
        ends: Any = {}

        def settled() -> bool:
            ends.update(admin.list_offsets(latest))
            return bool(admin.list_offsets(latest, isolation_level="read_committed") == ends)

        wait_for(settled, lambda: f"transactions of {topic} stay open: {ends}")
        consumer.assign(partitions)
        found: dict[TopicPartition, list[tuple[str, str]]] = {partition: [] for partition in partitions}

        def is_read() -> bool:
            for partition, records in consumer.poll(200).items():
                found[partition] += [((one.key or b"").decode(), (one.value or b"").decode()) for one in records]
            return all(consumer.position(partition) >= ends[partition].offset for partition in partitions)

        wait_for(is_read, lambda: f"{topic} is not read to its end")
    return [found[partition] for partition in partitions]
