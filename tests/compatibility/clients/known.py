"""The stock clients of the matrix: how each is started, why one cannot be, and what it cannot do by itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from tests.compatibility.clients.client import Record
from tidelog.bench import peers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Kind:
    """`command` raises Missing where the client is not installed. `lacks` maps what it cannot do to the reason.

    `loses`: what of a record does not pass through it as it is, see `reduced`.
    """

    name: str
    command: Callable[[], Sequence[str]]
    lacks: Mapping[str, str] = field(default_factory=dict)
    loses: frozenset[str] = frozenset()
    strategies: tuple[str, ...] = ("range",)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_python: bool = False


class Missing(Exception):
    """Why a client is not here, in one line."""


def _python(package: str, adapter: str) -> Callable[[], Sequence[str]]:
    def command() -> Sequence[str]:
        if importlib.util.find_spec(package) is None:
            raise Missing(f"{package} is not installed (pip install 'tidelog[dev]')")
        return [sys.executable, "-m", f"tests.compatibility.clients.{adapter}"]

    return command


def _node() -> Sequence[str]:
    if shutil.which("node") is None:
        raise Missing("no `node` on the path (Node.js 18 or newer)")
    folder = HERE.parent / "kafkajs"
    if not (folder / "node_modules" / "kafkajs").is_dir():
        raise Missing(f"its packages are not installed (make clients, or npm ci in {folder.relative_to(ROOT)})")
    return ["node", str(folder / "adapter.js")]


def _kcat() -> Sequence[str]:
    if shutil.which("kcat") is None:
        raise Missing("no `kcat` on the path (apt install kcat)")
    return [sys.executable, "-m", "tests.compatibility.clients.kcat_adapter"]


def _franz_go() -> Sequence[str]:
    adapter = HERE.parent / "franz_go" / "adapter"
    if not adapter.is_file():
        raise Missing(f"it is not built (make clients, or go build -o adapter in {adapter.parent.relative_to(ROOT)})")
    return [str(adapter)]


def _java() -> Sequence[str]:
    if (reason := peers.bring_kafka()) is not None:
        raise Missing(reason)
    classes = HERE.parent / "java" / "classes"
    if not (classes / "Adapter.class").is_file():
        raise Missing(f"it is not built (make clients, which runs javac in {classes.parent.relative_to(ROOT)})")
    # It only talks, so what takes long to compile well need not be.
    jvm = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Dlog4j2.level=ERROR"]
    return [*jvm, "-cp", f"{classes}:{peers.jars()}/*", "Adapter"]


_NO_ADMIN = "it administers nothing"

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "confluent-kafka",
            _python("confluent_kafka", "confluent_adapter"),
            is_python=True,
            strategies=("range", "roundrobin", "cooperative"),
        ),
        Kind(
            "kafka-python",
            _python("kafka", "kafka_python_adapter"),
            is_python=True,
            loses=frozenset({"null in headers"}),
            strategies=("range", "roundrobin", "cooperative"),
        ),
        Kind(
            "aiokafka",
            _python("aiokafka", "aiokafka_adapter"),
            is_python=True,
            lacks={
                "set_group_offset": "its admin client does not alter offsets of groups",
                "delete_group": "its admin client does not delete groups",
            },
            loses=frozenset({"null in headers"}),
            strategies=("range", "roundrobin"),
        ),
        Kind(
            "kafkajs",
            _node,
            loses=frozenset({"null in headers"}),
            strategies=("roundrobin",),
            environment={"KAFKAJS_NO_PARTITIONER_WARNING": "1"},
        ),
        Kind(
            "kcat",
            _kcat,
            lacks={
                "idempotent": "it does not tell the offsets it was given",
                "committed": "it shows no committed offsets",
                "create_topic": _NO_ADMIN,
                "set_config": _NO_ADMIN,
                "delete_records": _NO_ADMIN,
                "groups": _NO_ADMIN,
                "group_offsets": _NO_ADMIN,
                "delete_group": _NO_ADMIN,
            },
            loses=frozenset({"timestamp", "empty keys"}),
            strategies=("range", "roundrobin"),
        ),
        Kind("franz-go", _franz_go, strategies=("range", "roundrobin", "cooperative")),
        Kind("java", _java, strategies=("range", "roundrobin", "cooperative")),
    )
}


def reduced(record: Record, lost: Set[str]) -> Record:
    """A record without what gets lost, and without its place."""
    headers = record.headers
    if "null in headers" in lost:
        headers = tuple((name, data or b"") for name, data in headers)
    return record._replace(
        headers=headers,
        timestamp=None if "timestamp" in lost else record.timestamp,
        key=record.key or None if "empty keys" in lost else record.key,
        value=record.value or None if "empty values" in lost else record.value,
        partition=0,
        offset=-1,
    )


def environment(kind: Kind) -> dict[str, str]:
    return {**os.environ, **kind.environment}
