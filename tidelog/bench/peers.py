"""Apache Kafka for comparisons: its jars from Maven in a cache, its nodes on loopback, its tools.

Kafka is the reference that benchmarks and compatibility tests compare with; nothing of it is part of the product. The
jars live in $KAFKA_PEER_HOME, else ~/.cache/tidelog-peer. Where Java or Maven is missing, `why_unavailable` says so in
one line and callers skip.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess

KAFKA_VERSION = "4.3.1"
_CLUSTER_ID = "dGlkZWxvZy1iZW5jaC0wMQ"
_DEPENDENCIES = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-tools", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
SPARK_CONNECTOR = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
)
"""The newest of Spark's Kafka connectors that can be had."""
_MAVEN_S = 900.0
# The collector settings of Kafka's own start script.
_JVM = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
_LOGGING = """<Configuration status="ERROR">
  <Appenders><File name="file" fileName="{file}"><PatternLayout pattern="%d %p %c{{1}} %m%n"/></File></Appenders>
  <Loggers><Root level="INFO"><AppenderRef ref="file"/></Root></Loggers>
</Configuration>
"""


class PeerUnavailable(Exception):
    """Kafka cannot be run here; the message is one line for a person."""


def cache_directory() -> Path:
    """Where the jars are kept."""
    return Path(os.environ.get("KAFKA_PEER_HOME") or Path.home() / ".cache" / "tidelog-peer")


def why_unavailable() -> str | None:
    """Why Kafka cannot be run here, in one line; None when it can."""
    if shutil.which("java") is None:
        return "Apache Kafka skipped: no `java` on the path (Java 17 or newer)"
    if not (cache_directory() / "kafka").is_dir() and shutil.which("mvn") is None:
        return "Apache Kafka skipped: no `mvn` on the path to bring its jars (Apache Maven)"
    return None


def bring_kafka() -> str | None:
    """Bring the jars if need be. Returns None, or why Kafka cannot be run here, in one line."""
    if (reason := why_unavailable()) is not None:
        return reason
    try:
        jars()
    except PeerUnavailable as unavailable:
        return str(unavailable)
    return None


def pom(artifacts: Iterable[tuple[str, str, str]] = _DEPENDENCIES) -> str:
    """The Maven project that names what we need of Kafka."""
    dependencies = "".join(
        f"    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>\n"
        for group, artifact, version in artifacts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0">\n  <modelVersion>4.0.0</modelVersion>\n'
        "  <groupId>tidelog.bench</groupId>\n  <artifactId>kafka</artifactId>\n  <version>1</version>\n"
        f"  <packaging>pom</packaging>\n  <dependencies>\n{dependencies}  </dependencies>\n</project>\n"
    )


def jars(name: str = "kafka", artifacts: Iterable[tuple[str, str, str]] = _DEPENDENCIES) -> Path:
    """The directory of Kafka's jars, brought with Maven on first use. PeerUnavailable when that cannot be done."""
    target = cache_directory() / name
    if target.is_dir():
        return target
    reason = why_unavailable()
    if reason is not None:
        raise PeerUnavailable(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="kafka-part-") as scratch:
        project, fetched = Path(scratch, "pom.xml"), Path(scratch, "jars")
        project.write_text(pom(artifacts))
        maven = ["mvn", "-q", "-B", "-f", str(project), "dependency:copy-dependencies"]
        maven += ["-DincludeScope=runtime", f"-DoutputDirectory={fetched}"]
        try:
            done = subprocess.run(maven, check=False, capture_output=True, text=True, timeout=_MAVEN_S)
        except subprocess.TimeoutExpired:
            raise PeerUnavailable(f"Apache Kafka skipped: Maven did not bring its jars in {_MAVEN_S:g} s") from None
        if done.returncode != 0:
            raise PeerUnavailable(f"Apache Kafka skipped: Maven failed: {(done.stdout + done.stderr).strip()[-300:]}")
        try:
            fetched.rename(target)
        except OSError:
            # Another process brought them meanwhile.
            assert target.is_dir()
    return target


def java_command(*arguments: str, heap: str = "512m") -> list[str]:
    """The command line that runs a class of Kafka's with its arguments."""
    return ["java", f"-Xmx{heap}", "-Dlog4j2.level=ERROR", "-cp", f"{jars()}/*", *arguments]


def java(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a tool of Kafka's, e.g. `java("org.apache.kafka.tools.DumpLogSegments", "--files", ...)`; output as text."""
    return subprocess.run(java_command(*arguments), check=False, capture_output=True, text=True, timeout=timeout_s)


class KafkaProcess(ServerProcess):
    """One KRaft node of Apache Kafka, default settings and a 1 GB heap unless told otherwise.

    Alone it is broker and controller in one. As a part of `KafkaCluster` it is given the voters (node id -> controller
    port) and is a controller when it is one of them.
    """

    name = "kafka"

    def __init__(
        self,
        directory: str | Path,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        *,
        node_id: int = 1,
        voters: Mapping[int, int] | None = None,
        replicas: int = 1,
        heap: str = "1G",
    ) -> None:
        super().__init__(directory, port, options)
        self.node_id, self.heap, self.replicas = node_id, heap, replicas
        self.voters = dict(voters) if voters is not None else {node_id: free_port()}

    def properties(self) -> dict[str, str]:
        """The node's configuration: Kafka's defaults but for addresses, directories and internal topics' replicas."""
        replicas = str(self.replicas)
        listeners = f"PLAINTEXT://127.0.0.1:{self.port}"
        votes = self.node_id in self.voters
        return {
            "node.id": str(self.node_id),
            "process.roles": "broker,controller" if votes else "broker",
            "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{port}" for node, port in self.voters.items()),
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "advertised.listeners": listeners,
            "listeners": listeners + (f",CONTROLLER://127.0.0.1:{self.voters[self.node_id]}" if votes else ""),
            "log.dirs": str(self.data_directory),
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            **self.options,
        }

    @property
    def server_log(self) -> Path:
        return self.directory / "server.log"

    def prepare(self) -> None:
        super().prepare()
        lines = [f"{key}={value}\n" for key, value in self.properties().items()]
        (self.directory / "server.properties").write_text("".join(lines))
        (self.directory / "log4j2.xml").write_text(_LOGGING.format(file=self.server_log))
        if not (self.data_directory / "meta.properties").exists():
            done = java(
                "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", _CLUSTER_ID,
                "-c", str(self.directory / "server.properties"),
            )  # fmt: skip
            if done.returncode != 0:
                raise PeerUnavailable(f"Kafka could not format its directory: {done.stderr.strip()[-300:]}")

    def command(self) -> list[str]:
        return [
            "java",
            f"-Xmx{self.heap}",
            f"-Xms{self.heap}",
            *_JVM,
            f"-Dlog4j2.configurationFile={self.directory}/log4j2.xml",
            "-cp",
            f"{jars()}/*",
            "kafka.Kafka",
            str(self.directory / "server.properties"),
        ]

    def __enter__(self) -> KafkaProcess:
        super().__enter__()
        return self


class KafkaCluster:
    """Several Kafka nodes on loopback; the first `controllers` of them vote. Nodes are numbered from 1."""

    def __init__(
        self,
        directory: str | Path,
        brokers: int = 3,
        controllers: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        count = controllers if controllers is not None else (3 if brokers >= 3 else 1)
        voters = {node: free_port() for node in range(1, count + 1)}
        self.nodes = {
            node: KafkaProcess(
                Path(directory, f"node-{node}"), options=options, node_id=node, voters=voters, replicas=min(3, brokers)
            )
            for node in range(1, brokers + 1)
        }

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self.nodes.values())

    def start(self, timeout_s: float = 90.0) -> float:
        """Launch every node, then wait for all of them: none is ready before a majority of the voters runs."""
        for node in self.nodes.values():
            node.prepare()
        began = time.monotonic()
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.await_ready(timeout_s)
        return time.monotonic() - began

    def stop(self, timeout_s: float = 60.0) -> None:
        """All at once: the last ones could not hand their leaders over and would wait for a quorum that is gone."""
        for node in self.nodes.values():
            if node.alive:
                node.resume()
                os.kill(node.pid, signal.SIGTERM)
        for node in self.nodes.values():
            node.stop(timeout_s)

    def __enter__(self) -> KafkaCluster:
        try:
            self.start()
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
