"""Producer, consumer and admin client on asyncio. Imports the protocol and nothing of the server.

The public names are imported on first use, so that `import tidelog` stays cheap and a producer
never loads the consumer. The blocking clients are in `tidelog.client.sync`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.client.admin.client import Admin
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
    from tidelog.protocol.errors import ConfigError

_MODULES = {
    "Admin": "admin.client",
    "BatchSendError": "producing.send_group",
    "BrokerErrors": "model",
    "ConfigError": "config",
    "Consumer": "consuming.consumer",
    "ConsumerGroupMetadata": "model",
    "ConsumerMetrics": "metrics",
    "ConsumerRecord": "model",
    "LogTruncation": "consuming.log_truncation",
    "NewTopic": "model",
    "OffsetAndMetadata": "model",
    "OffsetAndTimestamp": "model",
    "PartitionErrors": "model",
    "Producer": "producing.producer",
    "ProducerFenced": "producing.transaction_errors",
    "ProducerInterceptor": "producing.interceptors",
    "ProducerMetrics": "metrics",
    "ProducerRecord": "model",
    "RebalanceListener": "consuming.subscription",
    "RecordMetadata": "model",
    "TopicPartition": "model",
    "TransactionAbortable": "producing.transaction_errors",
    "TransactionAborted": "producing.transaction_errors",
    "TransactionError": "producing.transaction_errors",
    "TransactionFatal": "producing.transaction_errors",
    "TransactionTimeout": "producing.transaction_errors",
    "WrittenRange": "model",
}

__all__ = [
    "Admin",
    "BatchSendError",
    "BrokerErrors",
    "ConfigError",
    "Consumer",
    "ConsumerGroupMetadata",
    "ConsumerMetrics",
    "ConsumerRecord",
    "LogTruncation",
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
    "TopicPartition",
    "TransactionAbortable",
    "TransactionAborted",
    "TransactionError",
    "TransactionFatal",
    "TransactionTimeout",
    "WrittenRange",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'tidelog.client' has no attribute {name!r}")
    value = getattr(import_module(f"tidelog.client.{module}"), name)
    globals()[name] = value
    return value
