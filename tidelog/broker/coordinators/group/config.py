"""The settings of the group coordinator: Kafka's names with underscores, Kafka's defaults.

`broker/config/node_config.py` knows the keys and the sources of their values. The last bounds have
no key in Kafka: they bound the memory of a node against its clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

METADATA_BYTES_MAX = 1_048_576
ASSIGNMENT_BYTES_MAX = 1_048_576
GROUP_MEMORY_BYTES_MAX = 64 * 1024 * 1024
GROUPS_MEMORY_BYTES_MAX = 256 * 1024 * 1024
OFFSETS_MEMORY_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class GroupCoordinatorConfig:
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_initial_rebalance_delay_ms: int = 3_000
    group_max_size: int = 2_147_483_647
    offset_metadata_max_bytes: int = 4096
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000
    offsets_retention_check_interval_ms: int = 600_000
    offsets_commit_timeout_ms: int = 5_000
    offsets_topic_compression_codec: int = 0
    new_member_join_timeout_ms: int = 5 * 60 * 1000  # Kafka's CLASSIC_GROUP_NEW_MEMBER_JOIN_TIMEOUT_MS
    max_timers: int = 200_000  # members and pending member ids of one partition
    max_group_metadata_bytes: int = METADATA_BYTES_MAX  # of one member; fits into a batch of the offsets topic
    max_assignment_bytes: int = ASSIGNMENT_BYTES_MAX  # of one member
    max_group_memory_bytes: int = GROUP_MEMORY_BYTES_MAX  # of one group
    max_groups_memory_bytes: int = GROUPS_MEMORY_BYTES_MAX  # of all groups of a node
    max_offsets_memory_bytes: int = OFFSETS_MEMORY_BYTES_MAX  # of the committed offsets of all groups of a node

    @classmethod
    def from_node(cls, integer: Callable[[str], int]) -> GroupCoordinatorConfig:
        """`integer` looks a Kafka key up, as `NodeConfig.integer` does."""
        return cls(
            group_min_session_timeout_ms=integer("group.min.session.timeout.ms"),
            group_max_session_timeout_ms=integer("group.max.session.timeout.ms"),
            group_initial_rebalance_delay_ms=integer("group.initial.rebalance.delay.ms"),
            group_max_size=integer("group.max.size"),
            offset_metadata_max_bytes=integer("offset.metadata.max.bytes"),
            offsets_retention_ms=integer("offsets.retention.minutes") * 60_000,
            offsets_retention_check_interval_ms=integer("offsets.retention.check.interval.ms"),
            offsets_commit_timeout_ms=integer("offsets.commit.timeout.ms"),
            offsets_topic_compression_codec=integer("offsets.topic.compression.codec"),
        )
