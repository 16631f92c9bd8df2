"""The clusters that histories run on, ours or Apache Kafka's, and what happens to them meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.asking import SAFE_DOWNGRADE, set_feature
from tests.cluster.conftest import SWIFT, kafka_node
from tests.patience import PATIENCE_S, join
from tests.transactions.operators import Operators, two_directories
from tidelog.bench.metadata import await_brokers
from tidelog.testing.cluster import EmbeddedCluster, forked_node

OPTIONS = {
    **SWIFT,
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.min.isr": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "auto.create.topics.enable": "false",
    "group.min.session.timeout.ms": "1000",
}
FAULTS = ("kill", "pause", "cut", "restart", "operate")


@contextmanager
def running_cluster(
    kind: str, directory: Path, brokers: int, transaction_version: int | None, faults: Sequence[str]
) -> Iterator[EmbeddedCluster]:
    make_node = kafka_node if kind == "kafka" else two_directories if "operate" in faults else forked_node
    cluster = EmbeddedCluster(brokers, directory, config=OPTIONS, cuttable="cut" in faults, make_node=make_node)
    with cluster:
        try:
            await_brokers((cluster.nodes[node].port for node in cluster.broker_ids), brokers)
            if transaction_version is not None:
                set_feature(cluster, "transaction.version", transaction_version, SAFE_DOWNGRADE)
            yield cluster
        finally:
            cluster.kill(*(node for node, server in cluster.nodes.items() if server.alive))


class Faults:
    """Strikes again and again on a thread of its own, between `start` and `end`; `end` mends everything."""

    def __init__(
        self, cluster: EmbeddedCluster, kinds: Sequence[str], choice: random.Random, topics: Sequence[str]
    ) -> None:
        assert set(kinds) <= set(FAULTS), kinds
        assert "cut" not in kinds or cluster.links is not None
        self._cluster, self._kinds, self._choice = cluster, list(kinds), choice
        self.log: list[tuple[float, str]] = []
        self._operators = Operators(cluster, topics, choice) if "operate" in kinds else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")

    def start(self) -> None:
        if self._kinds:
            self._thread.start()

    def end(self) -> None:
        """When every node runs and is ready again."""
        self._stop.set()
        if self._kinds:
            join(self._thread, 5 * PATIENCE_S)
        self._cluster.restore(120)
        if self._operators is not None:
            self._operators.close()

    def _note(self, what: str) -> None:
        self.log.append((time.monotonic(), what))

    def _rest(self, *choices_s: float) -> None:
        self._stop.wait(self._choice.choice(choices_s))

    def _run(self) -> None:
        self._rest(0.2, 0.5, 1.0)
        ways: dict[str, Callable[[list[int]], None]] = {
            "kill": self._kill, "pause": self._pause, "cut": self._cut, "restart": self._restart,
            "operate": self._operate,
        }  # fmt: skip
        while not self._stop.is_set():
            brokers = self._cluster.broker_ids
            nodes = self._choice.sample(brokers, self._choice.choice([1, 1, 1, min(2, len(brokers))]))
            ways[self._choice.choice(self._kinds)](nodes)
            self._rest(0.2, 1.0, 2.5)

    def _kill(self, nodes: list[int]) -> None:
        self._note(f"kill {nodes}")
        self._cluster.kill(*nodes)
        self._rest(0.0, 0.3, 1.5)
        for node in nodes:
            self._note(f"start {node}")
            self._cluster.launch(node)

    def _restart(self, nodes: list[int]) -> None:
        node = nodes[0]
        self._note(f"stop {node}")
        self._cluster.nodes[node].stop()
        if self._cluster.links is not None:
            self._cluster.links.down(node)
        self._note(f"start {node}")
        self._cluster.launch(node)

    def _operate(self, nodes: list[int]) -> None:
        assert self._operators is not None
        self._note(f"operate {self._operators.operate()}")

    def _pause(self, nodes: list[int]) -> None:
        self._note(f"pause {nodes}")
        for node in nodes:
            self._cluster.nodes[node].pause()
        self._rest(0.1, 0.7, 2.0, 3.5)
        for node in nodes:
            self._cluster.nodes[node].resume()
        self._note(f"resume {nodes}")

    def _cut(self, nodes: list[int]) -> None:
        links = self._cluster.links
        assert links is not None
        clients = self._choice.random() < 0.6
        self._note(f"cut {nodes} from all {'and the clients' if clients else 'nodes'}")
        self._cluster.cut(*nodes, clients=clients)
        self._rest(0.3, 1.0, 3.0)
        links.heal(reset=self._choice.random() < 0.5)
        self._note("heal")
