"""Tidelog: a Kafka-compatible broker in pure Python.

The face of the package: its public names, each imported from its room on first use, so that `import tidelog`
costs nothing and a client never loads the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.client import Admin, Consumer, NewTopic, Producer, TopicPartition
    from tidelog.testing.embedded import EmbeddedBroker

__all__ = ["Admin", "Consumer", "EmbeddedBroker", "NewTopic", "Producer", "TopicPartition", "__version__"]

_HOMES: dict[str, str] = {
    "Admin": "tidelog.client",
    "Consumer": "tidelog.client",
    "EmbeddedBroker": "tidelog.testing.embedded",
    "NewTopic": "tidelog.client",
    "Producer": "tidelog.client",
    "TopicPartition": "tidelog.client",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
