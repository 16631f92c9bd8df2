"""The estimate of the memory that a transactional id takes. Pure.

The charge is at least the memory that CPython uses, so that the node's budget bounds it.
"""

from __future__ import annotations

from collections.abc import Collection
from sys import getsizeof

from tidelog.broker.coordinators.transaction.transitions import TopicPartition

ID_BYTES = 2_000
# A partition of a transaction is held by its set, by that of the state under way, and by the set of
# the markers that are due.
PARTITION_BYTES = 600


def id_size_bytes(transactional_id: str) -> int:
    return ID_BYTES + getsizeof(transactional_id)


def partitions_size_bytes(partitions: Collection[TopicPartition]) -> int:
    if len(partitions) == 1:  # the usual number
        ((topic, _),) = partitions
        return PARTITION_BYTES + getsizeof(topic)
    return sum(PARTITION_BYTES + getsizeof(topic) for topic, _ in partitions)
