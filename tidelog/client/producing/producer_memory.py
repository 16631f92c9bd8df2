"""The accumulator of one producer: bounded by its options, and by its transactions.

Invariant: with transactions, every record and batch belongs to an open one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidelog.client.config import ProducerConfig
from tidelog.client.producing.accumulator import Accumulator, Headers, PartitionQueue, ProducerBatch
from tidelog.client.producing.send_group import SendGroup
from tidelog.client.producing.sender import Ticket
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.protocol.batches.records import BatchBuilder


class _TransactionalAccumulator(Accumulator[Ticket]):
    """Takes records only in an open transaction.

    A subclass, so that a producer without transactions pays nothing for the check.
    """

    def __init__(self, manager: TransactionManager, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._manager = manager

    def append(
        self,
        queue: PartitionQueue[Ticket],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        ticket: Ticket,
        now_ms: float | None = None,
    ) -> ProducerBatch[Ticket] | None:
        """Add a record. Raises without an open transaction."""
        self._manager.add_partition(queue.partition)
        return super().append(queue, timestamp_ms, key, value, headers, ticket, now_ms)

    def append_batch(
        self, queue: PartitionQueue[Ticket], builder: BatchBuilder, group: SendGroup, now_ms: float
    ) -> ProducerBatch[Ticket] | None:
        """Add a batch. Raises without an open transaction."""
        self._manager.add_partition(queue.partition)
        return super().append_batch(queue, builder, group, now_ms)


def new_accumulator(
    config: ProducerConfig, manager: TransactionManager | None, new_builder: Callable[[], BatchBuilder]
) -> Accumulator[Ticket]:
    """The accumulator of a producer with these options."""
    options: dict[str, Any] = {
        "memory_bytes": config.buffer_memory,
        "max_record_bytes": config.max_request_size,
        "linger_ms": config.full_linger_ms,
        "delivery_timeout_ms": config.delivery_timeout_ms,
    }
    return (
        Accumulator(new_builder, **options)
        if manager is None
        else _TransactionalAccumulator(manager, new_builder, **options)
    )
