"""Producer, consumer and admin, asyncio first; knows the protocol and nothing of the server.

The public names are imported on first use, so that `import tidelog` stays cheap and a producer never loads the
consumer. The blocking twins live in `tidelog.client.sync`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.client.admin import Admin
    from tidelog.client.config import ConfigError
    from tidelog.client.consumer import Consumer
    from tidelog.client.log_truncation import LogTruncation
    from tidelog.client.model import (
        ConsumerRecord,
        NewTopic,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        RecordMetadata,
        TopicPartition,
    )
    from tidelog.client.producer import Producer
    from tidelog.client.subscription import RebalanceListener

_HOMES = {
    "Admin": "admin",
    "ConfigError": "config",
    "Consumer": "consumer",
    "ConsumerRecord": "model",
    "LogTruncation": "log_truncation",
    "NewTopic": "model",
    "OffsetAndMetadata": "model",
    "OffsetAndTimestamp": "model",
    "Producer": "producer",
    "RebalanceListener": "subscription",
    "RecordMetadata": "model",
    "TopicPartition": "model",
}

__all__ = [
    "Admin",
    "ConfigError",
    "Consumer",
    "ConsumerRecord",
    "LogTruncation",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "Producer",
    "RebalanceListener",
    "RecordMetadata",
    "TopicPartition",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog.client' has no attribute {name!r}")
    value = getattr(import_module(f"tidelog.client.{home}"), name)
    globals()[name] = value
    return value
