"""The retention of the metadata log's snapshots and of the records below them: metadata.max.retention.*. Pure.

The rules are those of Kafka's KafkaMetadataLog: the oldest snapshot may go once newer ones exist, and the log then
starts at the end of the next snapshot. Kafka keeps the newest one always. Here the newest two stay: if one of them is
damaged, the other one and the log behind it have the same content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SNAPSHOTS_KEPT_MIN: Final = 2


class SnapshotFacts(NamedTuple):
    """`last_timestamp_ms`: the timestamp of the last log record that the snapshot contains."""

    size_bytes: int
    last_timestamp_ms: int


class MetadataRetention(NamedTuple):
    """-1 means without limit."""

    bytes_max: int = 100 * 1024 * 1024
    age_ms_max: int = 7 * 24 * 60 * 60 * 1000

    def lets_oldest_go(self, snapshots: Sequence[SnapshotFacts], log_size_bytes: int, now_ms: int) -> bool:
        """Whether the first of `snapshots` (oldest first) may be removed, with the log below the second one's end."""
        if len(snapshots) <= SNAPSHOTS_KEPT_MIN:
            return False
        if 0 <= self.bytes_max < log_size_bytes + sum(one.size_bytes for one in snapshots):
            return True
        return 0 <= self.age_ms_max < now_ms - snapshots[0].last_timestamp_ms


KAFKA_RETENTION: Final = MetadataRetention()
"""Kafka's defaults."""
