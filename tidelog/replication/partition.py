"""One replica of one partition: its role and its log. Decides nothing by itself about replication.

The leader appends and moves the high watermark; who learns of a moved mark (parked produces, waiting fetches) is given
in as `on_advance` by the floor above. Invariant: the high watermark never goes back while this replica leads, and no
reader of committed data is given an offset at or above it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.image import INTERNAL_TOPICS

if TYPE_CHECKING:
    from tidelog.storage.log import AppendInfo, PartitionLog, ReadResult


class Isolation(IntEnum):
    """What a reader may see: Fetch's isolation level, and a follower, which reads to the log end."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1
    LOG_END = 2


ACKS_ALL = -1


class Partition:
    __slots__ = (
        "_on_advance", "index", "is_internal", "isr", "leader_epoch", "leader_id", "leads", "log",
        "min_insync_replicas", "offline", "topic", "topic_id",
    )  # fmt: skip

    def __init__(
        self, topic: str, index: int, topic_id: bytes, log: PartitionLog, on_advance: Callable[[Partition], None]
    ) -> None:
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.log = log
        self.is_internal = topic in INTERNAL_TOPICS
        self.leads = False
        self.offline = False
        self.leader_id = -1
        self.leader_epoch = -1
        self.isr: tuple[int, ...] = ()
        self.min_insync_replicas = 1
        self._on_advance = on_advance

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch} {'leads' if self.leads else ''}>"

    # -------------------------------------------------------------------------------------------------------- role

    def become_leader(self, leader_id: int, leader_epoch: int, isr: tuple[int, ...]) -> None:
        """Lead from `leader_epoch` on; a new epoch starts at the log end (KIP-101)."""
        assert leader_epoch >= self.leader_epoch, "a leader epoch never goes back"
        if not self.leads or leader_epoch > self.leader_epoch:
            self.log.assign_epoch(leader_epoch)
        self.leads = True
        self.leader_id, self.leader_epoch, self.isr = leader_id, leader_epoch, isr
        self.advance_high_watermark()

    def resign(self, leader_id: int, leader_epoch: int) -> None:
        self.leads = False
        self.leader_id, self.leader_epoch, self.isr = leader_id, leader_epoch, ()

    def require_leader(self, current_leader_epoch: int = -1, unknown_epoch: int | None = None) -> None:
        """Raise NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR, or a mismatch of epochs (KIP-320).

        The epoch is not looked at when it is `unknown_epoch`, or, where that is not given, negative.
        """
        if self.offline:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if not self.leads:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if current_leader_epoch in (self.leader_epoch, unknown_epoch):
            return
        if current_leader_epoch >= 0 or unknown_epoch is not None:
            fenced = current_leader_epoch < self.leader_epoch
            raise KafkaError(ErrorCode.FENCED_LEADER_EPOCH if fenced else ErrorCode.UNKNOWN_LEADER_EPOCH)

    # ------------------------------------------------------------------------------------------------------- append

    def append_as_leader(
        self, batches: memoryview, now_ms: int, required_acks: int = ACKS_ALL, from_client: bool = True
    ) -> AppendInfo:
        """Append client batches; `batches` must be writable, offsets and epoch are written into it.

        Raises NOT_ENOUGH_REPLICAS when acks=all and the ISR is smaller than min.insync.replicas, and whatever the
        log refuses.
        """
        if required_acks == ACKS_ALL and len(self.isr) < self.min_insync_replicas:
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"The size of the current ISR {list(self.isr)} is insufficient to satisfy the min.isr requirement "
                f"of {self.min_insync_replicas} for partition {self.topic}-{self.index}",
            )
        log = self.log
        info = log.append_as_leader(batches, self.leader_epoch, now_ms, from_client=from_client)
        if log.committable_offset > log.high_watermark:
            self.advance_high_watermark()
        return info

    def may_answer(self, last_offset: int, required_acks: int) -> bool:
        """Whether what was appended up to `last_offset` may be acknowledged: committed for acks=all; for acks=1 in the
        log and, where `flush.messages` asks for it, on the device (Kafka syncs before it answers)."""
        log = self.log
        return log.high_watermark > last_offset or (required_acks != ACKS_ALL and log.committable_offset > last_offset)

    def advance_high_watermark(self) -> None:
        """Move the mark to what every in-sync replica holds: alone in the ISR, to what the flush rule lets go."""
        log = self.log
        committable = log.committable_offset
        if self.leads and committable > log.high_watermark:
            log.set_high_watermark(committable)
            self._on_advance(self)

    # --------------------------------------------------------------------------------------------------------- read

    @property
    def high_watermark(self) -> int:
        return self.log.high_watermark

    def read_bound(self, isolation: Isolation) -> int:
        """The offset before which a reader of this isolation may read."""
        log = self.log
        if isolation == Isolation.READ_UNCOMMITTED:
            return log.high_watermark
        return log.last_stable_offset if isolation == Isolation.READ_COMMITTED else log.log_end_offset

    def read(self, offset: int, max_bytes: int, isolation: Isolation, min_one_batch: bool) -> ReadResult:
        """Whole batches from the one that holds `offset`; none between the bound and the log end.

        Raises OFFSET_OUT_OF_RANGE below the log start or above the log end, and `ColdRead` (see `storage.reader`).
        """
        return self.log.read(offset, max_bytes, self.read_bound(isolation), min_one_batch=min_one_batch)

    def divergence(self, last_fetched_epoch: int, fetch_offset: int) -> tuple[int, int] | None:
        """(epoch, end offset) to which the fetcher's log must be cut back, or None when it agrees (KIP-595)."""
        epoch, end_offset = self.log.end_offset_for_epoch(last_fetched_epoch)
        if epoch < 0:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no end offset is known for epoch {last_fetched_epoch}")
        return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < fetch_offset else None
