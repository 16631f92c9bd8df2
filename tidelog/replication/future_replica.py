"""The future replica in another log directory of the same broker: it copies the present log as a follower would.

This module copies, truncates and tracks progress. `broker/replicas/replica_moves.py` decides when and how fast, and
deletes the present log. Follows Kafka's ReplicaAlterLogDirsThread. Invariant: after `align`, the future log is a prefix
of the present log. It replaces the present log only while both end at the same offset and the controller knows its
directory.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tidelog.replication.follower import truncation_offset
from tidelog.replication.truncation import truncate_copy
from tidelog.storage.log.explained_gaps import keep_ends_below, read_for_copy
from tidelog.storage.segments.append import check_first_holds

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.partition_log import PartitionLog


class MoveState(Enum):
    COPYING = "it has not caught up yet"
    ASSIGNING = "it has; the controller is asked to assign the replica to its new directory (AssignReplicasToDirs)"
    ASSIGNED = "the controller has assigned it: it takes over as soon as it has caught up again"


class FutureReplica:
    __slots__ = (
        "begins_again", "damage_logged_at", "destination_id", "is_checked", "log", "overtaken_times", "partition",
        "source_id", "state",
    )  # fmt: skip

    def __init__(self, partition: Partition, log: PartitionLog, source_id: bytes, destination_id: bytes) -> None:
        self.partition = partition
        self.log = log
        self.source_id = source_id
        self.destination_id = destination_id
        self.state = MoveState.COPYING
        self.overtaken_times = 0
        self.is_checked = False
        """The log was read and found whole after it had caught up."""
        self.damage_logged_at = -1
        """The first offset of the damaged range of the present log that the move was last logged to wait for."""
        self.begins_again = False
        """The log is of an earlier process and is emptied first."""

    @property
    def has_caught_up(self) -> bool:
        return self.log.log_end_offset == self.partition.log.log_end_offset

    @property
    def has_what_is_acknowledged(self) -> bool:
        """Whether the device has all records of this log that it has of the present log (flush.messages)."""
        return self.log.committable_offset >= self.partition.log.committable_offset

    @property
    def assigned_directory_id(self) -> bytes:
        """The directory that the controller shall record for the replica."""
        return self.source_id if self.state is MoveState.COPYING else self.destination_id

    def read_next(self, bytes_max: int) -> memoryview | None:
        """The next batches to append, or None. Raises ColdRead, OSError, CorruptLog.

        They include uncommitted records: if the present log is truncated, `align` truncates this one too.
        """
        log = self.partition.log
        if log.log_end_offset == self.log.log_end_offset:
            return None
        result = read_for_copy(log, self.log.log_end_offset, bytes_max)
        return memoryview(b"".join(result.regions)) if result.regions else None

    def append(self, batches: memoryview, now_ms: int) -> None:
        log, present = self.log, self.partition.log
        base_offset = int.from_bytes(batches[:8], "big")
        if base_offset < log.log_end_offset == log.log_start_offset:
            check_first_holds(batches, log.log_end_offset)
            log.truncate_fully_and_start_at(base_offset)  # the present log starts inside a batch
        log.append_as_follower(batches, now_ms, may_have_gaps=True)  # the present log explains its gaps
        log.set_high_watermark(max(present.high_watermark, present.log_start_offset))
        if log.log_start_offset < present.log_start_offset:
            log.delete_records(present.log_start_offset)

    def align(self) -> None:
        """Truncate the records that the present log does not have. Begin anew at the present log's start if it is after
        this log's end, or if this log is empty and begins later: the present log may have begun anew in between.

        Explain the gaps here, too. The topic may have ceased to be compacted since the last records were copied.
        """
        log, present = self.log, self.partition.log
        if not log.config.is_compacted:
            log.explain_gaps(max(present.gaps_explained_below, present.cleaned_offset))
        if self.begins_again:
            log.truncate_fully_and_start_at(present.log_start_offset)
            self.begins_again = False
        while log.log_end_offset > log.log_start_offset:
            epoch = log.leader_epochs.epoch_for_offset(log.log_end_offset - 1)
            present_epoch, present_end = present.end_offset_for_epoch(epoch)
            if present_epoch == epoch and present_end >= log.log_end_offset:
                break
            own_epoch, own_end = log.end_offset_for_epoch(present_epoch)
            target = truncation_offset(present_epoch, present_end, own_epoch, own_end, log.log_end_offset)
            if not log.log_start_offset <= target < log.log_end_offset:
                target = log.log_start_offset  # the offset at which the logs diverge is unknown
            truncate_copy(log, target)
        begins_later = log.log_start_offset == log.log_end_offset > present.log_start_offset
        if begins_later or not present.log_start_offset <= log.log_end_offset <= present.log_end_offset:
            log.truncate_fully_and_start_at(present.log_start_offset)
        elif log.log_start_offset < present.log_start_offset:
            log.set_high_watermark(max(log.high_watermark, present.log_start_offset))
            log.delete_records(present.log_start_offset)

    def keep_ends(self) -> None:
        """Record that each segment of the copy ends where the next one begins. From the offset up to which the present
        log is cleaned alone, a start would take a lost end, or a lost segment, for cleaned. Raises OSError.
        """
        if self.partition.log.cleaned_offset > 0:
            keep_ends_below(self.log, self.partition.log.cleaned_offset)

    def take_over(self) -> None:
        """Copy the present log's state besides its records, and become the partition's log."""
        log, present = self.log, self.partition.log
        assert self.has_caught_up, (log, present)
        if present.committable_offset < log.log_end_offset:
            # After a loss of power that takes the new name of the directory, the present log counts.
            log.durability.block_from(present.committable_offset)
        log.set_high_watermark(present.high_watermark)
        for epoch, start_offset in present.leader_epochs:
            if epoch > log.leader_epochs.latest:
                log.leader_epochs.assign(epoch, start_offset)  # an epoch without records yet
        log.cleaned_offset = present.cleaned_offset
        log.producers.refused = present.producers.refused
        log.producers.verifications = present.producers.verifications  # their batches enter this log
        self.partition.log = log
