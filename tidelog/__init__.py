"""Tidelog: a Kafka-compatible broker in pure Python.

The face of the package: what users call, pass, get back and catch. Each name is imported from its room on first use, so
that `import tidelog` costs nothing and a client never loads the server. The blocking clients are in
`tidelog.client.sync`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.client.admin.client import Admin
    from tidelog.client.admin.configs import ConfigChange, ConfigResource
    from tidelog.client.assignment.assignors import Assignor
    from tidelog.client.assignment.protocol import MemberSubscription
    from tidelog.client.consuming.consumer import Consumer
    from tidelog.client.consuming.log_truncation import LogTruncation
    from tidelog.client.consuming.subscription import RebalanceListener
    from tidelog.client.metrics import ConsumerMetrics, ProducerMetrics
    from tidelog.client.model import (
        BrokerErrors,
        ConsumerGroupMetadata,
        ConsumerRecord,
        NewTopic,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        PartitionErrors,
        ProducerRecord,
        RecordMetadata,
        Replica,
        TopicPartition,
        WrittenRange,
    )
    from tidelog.client.producing.interceptors import ProducerInterceptor
    from tidelog.client.producing.producer import Producer
    from tidelog.client.producing.send_group import BatchSendError
    from tidelog.client.producing.transaction_errors import (
        ProducerFenced,
        TransactionAbortable,
        TransactionAborted,
        TransactionError,
        TransactionFatal,
        TransactionTimeout,
    )
    from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
    from tidelog.testing.cluster import EmbeddedCluster
    from tidelog.testing.embedded import EmbeddedBroker

__all__ = [
    "Admin",
    "Assignor",
    "BatchSendError",
    "BrokerErrors",
    "ConfigChange",
    "ConfigError",
    "ConfigResource",
    "Consumer",
    "ConsumerGroupMetadata",
    "ConsumerMetrics",
    "ConsumerRecord",
    "EmbeddedBroker",
    "EmbeddedCluster",
    "ErrorCode",
    "KafkaError",
    "LogTruncation",
    "MemberSubscription",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "PartitionErrors",
    "Producer",
    "ProducerFenced",
    "ProducerInterceptor",
    "ProducerMetrics",
    "ProducerRecord",
    "RebalanceListener",
    "RecordMetadata",
    "Replica",
    "TopicPartition",
    "TransactionAbortable",
    "TransactionAborted",
    "TransactionError",
    "TransactionFatal",
    "TransactionTimeout",
    "WrittenRange",
    "__version__",
]

_HOMES: dict[str, str] = {
    "Admin": "client.admin.client",
    "Assignor": "client.assignment.assignors",
    "BatchSendError": "client.producing.send_group",
    "BrokerErrors": "client.model",
    "ConfigChange": "client.admin.configs",
    "ConfigError": "protocol.errors",
    "ConfigResource": "client.admin.configs",
    "Consumer": "client.consuming.consumer",
    "ConsumerGroupMetadata": "client.model",
    "ConsumerMetrics": "client.metrics",
    "ConsumerRecord": "client.model",
    "EmbeddedBroker": "testing.embedded",
    "EmbeddedCluster": "testing.cluster",
    "ErrorCode": "protocol.errors",
    "KafkaError": "protocol.errors",
    "LogTruncation": "client.consuming.log_truncation",
    "MemberSubscription": "client.assignment.protocol",
    "NewTopic": "client.model",
    "OffsetAndMetadata": "client.model",
    "OffsetAndTimestamp": "client.model",
    "PartitionErrors": "client.model",
    "Producer": "client.producing.producer",
    "ProducerFenced": "client.producing.transaction_errors",
    "ProducerInterceptor": "client.producing.interceptors",
    "ProducerMetrics": "client.metrics",
    "ProducerRecord": "client.model",
    "RebalanceListener": "client.consuming.subscription",
    "RecordMetadata": "client.model",
    "Replica": "client.model",
    "TopicPartition": "client.model",
    "TransactionAbortable": "client.producing.transaction_errors",
    "TransactionAborted": "client.producing.transaction_errors",
    "TransactionError": "client.producing.transaction_errors",
    "TransactionFatal": "client.producing.transaction_errors",
    "TransactionTimeout": "client.producing.transaction_errors",
    "WrittenRange": "client.model",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog' has no attribute {name!r}")
    value = getattr(import_module(f"tidelog.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
