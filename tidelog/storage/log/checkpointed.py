"""What the checkpoints of a log directory say of its logs, collected from one log after the other.

Others may run between two logs: each log is named as it is when it is added. Invariant: its offsets are from the
same moment. A start needs the epochs at the log start that is named, and the recovery point of the flush after which a
log does not count as a cleaned one any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.storage.files.checkpoints import HIGH_WATERMARK_FILE, LOG_START_FILE, RECOVERY_POINT_FILE
from tidelog.storage.files.log_files import EpochContent
from tidelog.storage.log.partition_log import PartitionLog

TopicPartition = tuple[str, int]


class CheckpointedOffsets:
    """`kept`: file name -> what it says of logs that are not open, and goes on to say."""

    def __init__(self, kept: Mapping[str, Mapping[TopicPartition, int]]) -> None:
        self.recovery_points: dict[TopicPartition, int] = dict(kept.get(RECOVERY_POINT_FILE, {}))
        self.log_starts: dict[TopicPartition, int] = dict(kept.get(LOG_START_FILE, {}))
        self.high_watermarks: dict[TopicPartition, int] = dict(kept.get(HIGH_WATERMARK_FILE, {}))
        self.cleaned: dict[TopicPartition, int] = {}
        self.epochs: list[EpochContent] = []
        """The epoch files of the logs whose start has moved. They are written before the log start checkpoint.

        The first epoch begins at the log start offset. A start uses the lower offset of both files: neither has a
        checksum, and a damaged one must not delete records.
        """
        self.retiring: list[tuple[PartitionLog, int]] = []
        """(log, its start in these files) of each log with segments to remove."""

    def add(self, key: TopicPartition, log: PartitionLog | None, future: PartitionLog | None) -> None:
        """Add what is there of this partition: its log, or the one that is to take its place, or both."""
        for each in (log, future):
            if each is not None and each.start_moved():
                self.epochs.append(each.durability.files.epochs(each.leader_epochs))
        named = log or future
        if named is None:
            return
        self.recovery_points[key] = named.recovery_point
        self.high_watermarks[key] = named.high_watermark
        # Kafka omits logs that start at their first segment. Here the removal of earlier segments may not be durable.
        if named.log_start_offset > 0:
            self.log_starts[key] = named.log_start_offset
        if log is not None and log.segments.condemned:
            self.retiring.append((log, log.log_start_offset))
        cleaned = cleaned_offset(named)
        if cleaned is not None:
            self.cleaned[key] = cleaned


def cleaned_offset(log: PartitionLog) -> int | None:
    """Return the offset below which a log is cleaned, for the cleaner's checkpoint; None if it has no entry there.

    A compacted log has one. It is 0 if this node never cleaned the log, because it may be a copy of a cleaned log.
    A log that is no longer compacted keeps its entry until the names of its gaps are on the device, or the recovery
    point is above its gaps.
    """
    return max(log.cleaned_offset, 0) if log.config.is_compacted or log.unsynced_gaps_below else None
