"""A replica on its way to another log directory of its broker: it follows the present one as a follower its leader.

What is copied, what is cut, and how far it has come stand here; when, how fast, and what becomes of the present replica
is the floor above's (`broker/replicas/replica_moves.py`). Kafka's ReplicaAlterLogDirsThread. Invariant: the future log
is always a beginning of the present one, as far as it was aligned; it takes its place only while both end at the same
offset and the controller knows where it lies.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tidelog.replication.follower import truncation_offset
from tidelog.storage.segments.append import check_first_holds

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.partition_log import PartitionLog


class MoveState(Enum):
    COPYING = "it has not caught up yet"
    TELLING = "it has; the controller is being told where the replica will lie"
    TOLD = "the controller knows: it takes over as soon as it has caught up again"


class FutureReplica:
    __slots__ = ("destination_id", "log", "overtaken_times", "partition", "source_id", "state")

    def __init__(self, partition: Partition, log: PartitionLog, source_id: bytes, destination_id: bytes) -> None:
        self.partition = partition
        self.log = log
        self.source_id = source_id
        self.destination_id = destination_id
        self.state = MoveState.COPYING
        self.overtaken_times = 0

    @property
    def has_caught_up(self) -> bool:
        return self.log.log_end_offset == self.partition.log.log_end_offset

    @property
    def has_what_is_acknowledged(self) -> bool:
        """As it is to be under flush.messages: not only written but on the device, as in the present log."""
        return self.log.committable_offset >= self.partition.log.committable_offset

    @property
    def told_directory(self) -> bytes:
        """What the controller is to believe."""
        return self.source_id if self.state is MoveState.COPYING else self.destination_id

    def read_next(self, bytes_max: int) -> memoryview | None:
        """The batches to be appended next, None where there are none. Raises ColdRead, OSError, CorruptLog.

        To the log end, whatever is committed: what the present log may yet lose, this one loses with it.
        """
        log = self.partition.log
        if log.log_end_offset == self.log.log_end_offset:
            return None
        result = log.read(self.log.log_end_offset, bytes_max, log.log_end_offset)
        return memoryview(b"".join(result.regions)) if result.regions else None

    def append(self, batches: memoryview, now_ms: int) -> None:
        log, present = self.log, self.partition.log
        base_offset = int.from_bytes(batches[:8], "big")
        if base_offset < log.log_end_offset == log.log_start_offset:
            check_first_holds(batches, log.log_end_offset)
            log.truncate_fully_and_start_at(base_offset)  # the present log starts in the middle of a batch
        if not log.config.is_compacted:
            log.explain_gaps(max(present.gaps_explained_below, present.cleaned_offset))
        log.append_as_follower(batches, now_ms, may_have_gaps=True)  # the present log is what it should be
        log.set_high_watermark(max(present.high_watermark, present.log_start_offset))
        if log.log_start_offset < present.log_start_offset:
            log.delete_records(present.log_start_offset)

    def align(self) -> None:
        """Cut what the present log has not, or has no more; begin anew where it begins after this one ends."""
        log, present = self.log, self.partition.log
        while log.log_end_offset > log.log_start_offset:
            epoch = log.leader_epochs.epoch_for_offset(log.log_end_offset - 1)
            present_epoch, present_end = present.end_offset_for_epoch(epoch)
            if present_epoch == epoch and present_end >= log.log_end_offset:
                break
            own_epoch, own_end = log.end_offset_for_epoch(present_epoch)
            target = truncation_offset(present_epoch, present_end, own_epoch, own_end, log.log_end_offset)
            if not log.log_start_offset <= target < log.log_end_offset:
                target = log.log_start_offset  # nothing is known of where they part
            log.truncate_to(target)
        if log.log_end_offset < present.log_start_offset or log.log_end_offset > present.log_end_offset:
            log.truncate_fully_and_start_at(present.log_start_offset)
        elif log.log_start_offset < present.log_start_offset:
            log.set_high_watermark(max(log.high_watermark, present.log_start_offset))
            log.delete_records(present.log_start_offset)

    def take_over(self) -> None:
        """What the present log knows besides its records."""
        log, present = self.log, self.partition.log
        assert self.has_caught_up, (log, present)
        log.set_high_watermark(present.high_watermark)
        for epoch, start_offset in present.leader_epochs:
            if epoch > log.leader_epochs.latest:
                log.leader_epochs.assign(epoch, start_offset)  # it has begun, and nothing was written in it yet
        log.cleaned_offset = present.cleaned_offset
        log.producers.refused = present.producers.refused
        self.partition.log = log
