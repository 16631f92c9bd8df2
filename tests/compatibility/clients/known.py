"""The stock clients of the matrix: how each is started, why one cannot be, and what it cannot do by itself."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from tests.compatibility.clients.client import Record

HERE = Path(__file__).parent


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


class Missing(Exception):
    """Why a client is not here, in one line."""


def _python(package: str, adapter: str) -> Callable[[], Sequence[str]]:
    def command() -> Sequence[str]:
        if importlib.util.find_spec(package) is None:
            raise Missing(f"{package} is not installed (pip install 'tidelog[dev]')")
        return [sys.executable, "-m", f"tests.compatibility.clients.{adapter}"]

    return command


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "confluent-kafka",
            _python("confluent_kafka", "confluent_adapter"),
            strategies=("range", "roundrobin", "cooperative"),
        ),
        Kind(
            "kafka-python",
            _python("kafka", "kafka_python_adapter"),
            loses=frozenset({"null in headers"}),
            strategies=("range", "roundrobin", "cooperative"),
        ),
        Kind(
            "aiokafka",
            _python("aiokafka", "aiokafka_adapter"),
            lacks={
                "set_group_offset": "its admin client does not alter offsets of groups",
                "delete_group": "its admin client does not delete groups",
            },
            loses=frozenset({"null in headers"}),
            strategies=("range", "roundrobin"),
        ),
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
