"""The settings of the transaction coordinator: Kafka's names with underscores, Kafka's defaults.

`broker/config/node_config.py` knows the keys and the sources of their values. The last bounds have
no key in Kafka: they bound the memory of a node, and the time of a write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TRANSACTIONS_MEMORY_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransactionCoordinatorConfig:
    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 7 * 24 * 3600 * 1000
    abort_timed_out_interval_ms: int = 10_000
    remove_expired_interval_ms: int = 3_600_000
    write_timeout_ms: int = 10_000
    max_memory_bytes: int = TRANSACTIONS_MEMORY_BYTES_MAX  # of all transactional ids of a node

    @classmethod
    def from_node(cls, integer: Callable[[str], int]) -> TransactionCoordinatorConfig:
        """`integer` looks a Kafka key up, as `NodeConfig.integer` does."""
        return cls(
            transaction_max_timeout_ms=integer("transaction.max.timeout.ms"),
            transactional_id_expiration_ms=integer("transactional.id.expiration.ms"),
            abort_timed_out_interval_ms=integer("transaction.abort.timed.out.transaction.cleanup.interval.ms"),
            remove_expired_interval_ms=integer("transaction.remove.expired.transaction.cleanup.interval.ms"),
        )
