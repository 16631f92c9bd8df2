"""The names of Kafka's internal topics."""

from __future__ import annotations

from typing import Final

OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SHARE_GROUPS_TOPIC: Final = "__share_group_state"
INTERNAL_TOPICS: Final = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC, SHARE_GROUPS_TOPIC})
COORDINATOR_TOPICS: Final = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})
"""The number of their partitions places each group and transactional id."""
