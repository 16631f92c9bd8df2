"""What operators do to a cluster while transactions run: replicas, leaders and directories move, versions change.

Each operation is drawn from a seed. An operation that the cluster refuses, or that a fault interrupts, is noted and
passed over: the checker judges what the clients see meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tidelog.client import TopicPartition
from tidelog.client.admin.features import SAFE_DOWNGRADE, UPGRADE
from tidelog.client.model import Replica
from tidelog.client.sync.admin import Admin
from tidelog.protocol.errors import KafkaError
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.layout import NodeLayout
from tidelog.testing.processes import ForkedNode, ServerProcess

INTERNAL_TOPICS: Final = ("__transaction_state", "__consumer_offsets")
SECOND_DIRECTORY: Final = "data-2"
TRANSACTION_VERSIONS: Final = (0, 1, 2, 2)
TIMEOUT_MS: Final = 3_000


class TwoDirectories(ForkedNode):
    """A node with a second log directory, so that replicas can move between the two."""

    def prepare(self) -> None:
        super().prepare()
        self.log_directories[1].mkdir(exist_ok=True)

    def arguments(self) -> list[str]:
        return [*super().arguments(), "-o", f"log.dirs={','.join(map(str, self.log_directories))}"]

    @property
    def log_directories(self) -> list[Path]:
        return [self.data_directory, self.directory / SECOND_DIRECTORY]


def two_directories(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    return TwoDirectories(directory, layout.port, options)


class Operators:
    """`topics`: those of the history; the internal ones of transactions and groups belong to it, too."""

    def __init__(self, cluster: EmbeddedCluster, topics: Sequence[str], choice: random.Random) -> None:
        self._cluster, self._topics, self._choice = cluster, [*topics, *INTERNAL_TOPICS], choice
        self._admin = Admin(
            bootstrap_servers=cluster.bootstrap_servers,
            request_timeout_ms=TIMEOUT_MS,
            default_api_timeout_ms=TIMEOUT_MS,
        )

    def operate(self) -> str:
        """Do one thing. Returns what it was, and its refusal."""
        choices: list[Callable[[], str]] = [self._move_replicas, self._move_replicas, self._elect, self._change_version]
        if any(isinstance(node, TwoDirectories) for node in self._cluster.nodes.values()):
            choices += [self._move_directories, self._move_directories]
        operation = self._choice.choice(choices)
        try:
            return operation()
        except (KafkaError, OSError) as error:
            return f"{operation.__name__[1:]} failed: {error}"

    def close(self) -> None:
        try:
            self._admin.update_features({"transaction.version": 2}, upgrade_type=UPGRADE)
        except (KafkaError, OSError):
            pass  # it is the finalized version already, or the next history begins with another one
        self._admin.close()

    def _partitions(self) -> list[TopicPartition]:
        described = self._admin.describe_topics(self._topics[: self._choice.choice((2, 3, 4, 4))])
        partitions = [
            TopicPartition(name, each.partition) for name, topic in described.items() for each in topic.partitions
        ]
        return self._choice.sample(partitions, self._choice.randrange(1, len(partitions) + 1))

    def _move_replicas(self) -> str:
        brokers = self._cluster.broker_ids
        fewest = min(2, len(brokers))
        targets = {
            each: self._choice.sample(brokers, self._choice.randrange(fewest, len(brokers) + 1))
            for each in self._partitions()
        }
        results = self._admin.alter_partition_reassignments(targets)
        return f"move {[f'{at} to {targets[at]} {error or str()}' for at, error in results.items()]}"

    def _elect(self) -> str:
        return f"elect {len(self._admin.elect_leaders())}"

    def _change_version(self) -> str:
        version = self._choice.choice(TRANSACTION_VERSIONS)
        current = self._admin.describe_versions().finalized_features.get("transaction.version", 0)
        kind = UPGRADE if version >= current else SAFE_DOWNGRADE
        self._admin.update_features({"transaction.version": version}, upgrade_type=kind)
        return f"transaction.version {version}"

    def _move_directories(self) -> str:
        paths: dict[Replica, str] = {}
        for at in self._partitions():
            broker = self._choice.choice(self._cluster.broker_ids)
            node = self._cluster.nodes[broker]
            assert isinstance(node, TwoDirectories)
            paths[Replica(*at, broker)] = str(self._choice.choice(node.log_directories))
        results = self._admin.alter_replica_log_dirs(paths)
        return f"move {sum(error is None for error in results.values())} of {len(results)} replicas between directories"
