"""Which requests of a connection wait for the answers to those before them.

Kafka serves one request of a connection after the other. Here the next one is served while one waits (decision 0005),
except where its answer depends on what the earlier one changes, and that is changed only when it is committed.
"""

from __future__ import annotations

from collections.abc import Collection

from tidelog.protocol.api import ApiKey

# All later requests of the connection wait for these.
EXCLUSIVE = frozenset(
    (
        ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.END_TXN, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
    )
)  # fmt: skip
# These wait for a Produce: they read up to the high watermark.
BEHIND_RECORDS = frozenset((ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.DELETE_RECORDS))
# These wait for what changes a group. Heartbeats and further commits do not.
BEHIND_GROUPS = frozenset(
    (
        ApiKey.OFFSET_FETCH, ApiKey.DESCRIBE_GROUPS, ApiKey.LIST_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
    )
)  # fmt: skip
BEHIND: dict[int, Collection[int]] = {
    ApiKey.OFFSET_COMMIT: BEHIND_GROUPS,
    ApiKey.LEAVE_GROUP: BEHIND_GROUPS,
    ApiKey.WRITE_TXN_MARKERS: BEHIND_RECORDS,
}
DELAYED = BEHIND_RECORDS | BEHIND_GROUPS
