"""One replica of one partition: its role and its log. Decides nothing by itself about replication.

A leader appends, books its followers' fetches and moves the high watermark by what `isr.py` says; a follower appends
what it fetched and adopts the leader's mark. Who learns of a moved mark (parked produces, waiting fetches) is given in
as `on_advance` by the floor above, who learns of a proposed ISR as `ReplicaPorts.propose`. Invariant: the high
watermark goes back only where the log is cut, and no reader of committed data is given an offset at or above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidelog.protocol.batches.record_batch import MAGIC, BatchHeader, check_crc
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.metadata.image import INTERNAL_TOPICS
from tidelog.replication.isr import InSyncReplicas
from tidelog.storage.producers.refused_batches import RefusedBatches, sequenced_header
from tidelog.storage.segments.append import check_first_holds

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import BrokerImage, PartitionImage
    from tidelog.replication.isr import FollowerReplica, Proposal
    from tidelog.storage.log.partition_log import AppendInfo, PartitionLog, ReadResult
    from tidelog.storage.producers.verification import TransactionAppend, Verification

logger = logging.getLogger("tidelog.replication")


class Isolation(IntEnum):
    """What a reader may see: Fetch's isolation level, and a follower, which reads to the log end."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1
    LOG_END = 2


ACKS_ALL = -1


def _nobody(broker_id: int) -> BrokerImage | None:
    return None


def _ask_nobody(partition: Partition, proposal: Proposal) -> None:
    pass


@dataclass(slots=True)
class ReplicaPorts:
    """What the replicas of one node ask of it; the defaults are those of a node without others.

    `now_ms`: monotonic. `broker`: a broker as the committed metadata has it. `propose`: send a change of the ISR to
    the controller; its outcome comes back through `Partition.on_proposal_agreed` or `on_proposal_rejected`, and is
    counted.
    """

    now_ms: Callable[[], float] = lambda: 0.0
    broker: Callable[[int], BrokerImage | None] = _nobody
    broker_epoch: Callable[[], int] = lambda: -1
    propose: Callable[[Partition, Proposal], None] = _ask_nobody
    lag_ms_max: int = 30_000
    isr_expands: int = 0
    isr_shrinks: int = 0
    isr_rejections: int = 0
    refused: RefusedBatches = field(default_factory=RefusedBatches)

    def eligible(self, broker_id: int, broker_epoch: int) -> bool:
        """May this replica join an ISR: alive, not stopping, and the same process that fetches (KIP-841, KIP-903)."""
        broker = self.broker(broker_id)
        return broker is not None and broker.is_active and broker_epoch in (-1, broker.epoch)


class Partition:
    __slots__ = (
        "_on_advance", "_ports", "awaits_followers", "future_log", "in_sync", "index", "is_internal", "leader_epoch",
        "leader_id", "leads", "log", "min_insync_replicas", "offline", "partition_epoch", "refused",
        "throttled_as_follower", "throttled_as_leader", "topic", "topic_id", "watch",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        index: int,
        topic_id: bytes,
        log: PartitionLog,
        on_advance: Callable[[Partition], None],
        ports: ReplicaPorts,
    ) -> None:
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.log = log
        self.future_log: PartitionLog | None = None
        """On its way to another log directory, to take the place of `log`."""
        self.is_internal = topic in INTERNAL_TOPICS
        self.leads = False
        self.offline = False
        self.leader_id = -1
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.in_sync = InSyncReplicas(-1, ports.lag_ms_max)
        """The leader's book; empty while this replica does not lead."""
        self.awaits_followers = False
        """Whether an append alone cannot move the mark: somebody else is in sync, or the ISR is too small."""
        self.min_insync_replicas = 1
        self.refused = ports.refused.of((topic_id, index), (topic, index))
        self.throttled_as_leader = self.throttled_as_follower = False
        self.watch: Any = None
        """Who waits for this partition; the floor above keeps it here, so that no append has to look it up."""
        self._on_advance = on_advance
        self._ports = ports

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch} {'leads' if self.leads else ''}>"

    # -------------------------------------------------------------------------------------------------------- role

    def become_leader(self, placed: PartitionImage) -> bool:
        """Lead, or go on leading, as the metadata says; True when a leader epoch begins here.

        A new epoch starts at the log end (KIP-101). What an answer of the controller has told already is passed over.
        """
        begins = placed.leader_epoch > self.leader_epoch or not self.leads
        if not begins and placed.partition_epoch <= self.partition_epoch:
            return False
        assert placed.leader_epoch >= self.leader_epoch, "a leader epoch never goes back"
        log, ports = self.log, self._ports
        if not self.leads:
            self.in_sync = InSyncReplicas(placed.leader, ports.lag_ms_max)
        if begins:
            log.assign_epoch(placed.leader_epoch)
        log.producers.refused = self.refused
        proposal = self.in_sync.pending
        if proposal is not None and {member for member, _ in proposal.isr} == set(placed.isr):
            self._count(proposal)  # the metadata came before the answer
        self.in_sync.assign(
            placed.replicas, placed.isr, placed.leader_epoch, placed.partition_epoch, log.log_end_offset,
            ports.now_ms(),
        )  # fmt: skip
        self.leads = True
        self.leader_id, self.leader_epoch = placed.leader, placed.leader_epoch
        self._isr_changed()
        return begins

    def become_follower(self, placed: PartitionImage) -> bool:
        """Follow whoever leads, or nobody (-1); True when the leader or its epoch is another one."""
        if placed.leader_epoch < self.leader_epoch:
            return False
        changed = self.leads or (placed.leader, placed.leader_epoch) != (self.leader_id, self.leader_epoch)
        self.leads = False
        self.leader_id, self.leader_epoch = placed.leader, placed.leader_epoch
        self.partition_epoch = placed.partition_epoch
        if self.in_sync.followers or self.in_sync.isr:
            self.in_sync = InSyncReplicas(-1, self._ports.lag_ms_max)
        return changed

    def require_leader(self, current_leader_epoch: int = -1, unknown_epoch: int | None = None) -> None:
        """Raise NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR, or a mismatch of epochs (KIP-320).

        The epoch is not looked at when it is `unknown_epoch`, or, where that is not given, negative.
        """
        if self.offline:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if not self.leads:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        self.require_epoch(current_leader_epoch, unknown_epoch)

    def require_epoch(self, current_leader_epoch: int, unknown_epoch: int | None = None) -> None:
        """FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH, of a leader or a follower."""
        if current_leader_epoch in (self.leader_epoch, unknown_epoch):
            return
        if current_leader_epoch >= 0 or unknown_epoch is not None:
            fenced = current_leader_epoch < self.leader_epoch
            raise KafkaError(ErrorCode.FENCED_LEADER_EPOCH if fenced else ErrorCode.UNKNOWN_LEADER_EPOCH)

    # ------------------------------------------------------------------------------------------------- leader: append

    def append_as_leader(
        self,
        batches: memoryview,
        now_ms: int,
        required_acks: int = ACKS_ALL,
        from_client: bool = True,
        transaction: TransactionAppend | None = None,
    ) -> AppendInfo:
        """Append client batches; `batches` must be writable, offsets and epoch are written into it.

        Raises NOT_ENOUGH_REPLICAS when acks=all and the ISR is smaller than min.insync.replicas, unless the batch is in
        the log already, and whatever the log refuses. The mark may have moved when it returns: the caller tells those
        who wait for it, once it has done its own part, and `on_advance` is not called.
        """
        book = self.in_sync
        if required_acks == ACKS_ALL and len(book.isr) < self.min_insync_replicas and self.is_under_min_isr:
            repeated = self._find_repeated(batches) if from_client else None
            if repeated is not None:
                return repeated
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"The size of the current ISR {list(self.in_sync.isr)} is insufficient to satisfy the min.isr "
                f"requirement of {self.min_insync_replicas} for partition {self.topic}-{self.index}",
            )
        log = self.log
        info = log.append_as_leader(
            batches, self.leader_epoch, now_ms, from_client=from_client, transaction=transaction
        )
        if not self.awaits_followers:
            if book.followers or log.durability.blocked_from >= 0 or not self.leads:
                self._move_high_watermark()
            elif log.high_watermark < log.log_end_offset:
                log.set_high_watermark(log.log_end_offset)  # what the above comes to for the only replica
        return info

    def begin_verification(
        self, producer_id: int, producer_epoch: int, first_sequence: int, adds: bool, now_ms: int
    ) -> Verification | None:
        """What a transactional batch that has come needs to be appended; None where it needs nothing.

        `adds`: the coordinator is to add this partition to the transaction, which it must hear of in any case. Raises
        INVALID_PRODUCER_EPOCH.
        """
        if not adds and not self.log.config.verifies_transactions:
            return None
        return self.log.producers.begin_verification(producer_id, producer_epoch, first_sequence, adds, now_ms)

    def _find_repeated(self, batches: memoryview) -> AppendInfo | None:
        """Where the batch is in the log already. Its producer waits for the acknowledgement, not for a place."""
        header = sequenced_header(batches)
        if header is None:
            return None
        repeated = self.log.producers.find_repeated(
            header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta
        )
        # A damaged header could name another batch.
        return self.log.repeated(repeated) if repeated is not None and check_crc(batches, 0, header) else None

    def note_refused(self, batches: memoryview | None, code: ErrorCode, now_ms: int) -> None:
        """A client's batch was refused with `code`, here or before it came here."""
        header = sequenced_header(batches)
        if header is not None:
            expected = self.log.producers.expected_sequence(header.producer_id, header.producer_epoch)
            self.refused.note(header, code, expected, now_ms)

    @property
    def is_under_min_isr(self) -> bool:
        book = self.in_sync
        return len(book.isr) < self.min_insync_replicas and len(book.isr) < book.min_isr(self.min_insync_replicas)

    def may_answer(self, last_offset: int, required_acks: int) -> bool:
        """Whether what was appended up to `last_offset` may be acknowledged: committed for acks=all; for acks=1 in the
        log and, where `flush.messages` asks for it, on the device (Kafka syncs before it answers)."""
        log = self.log
        return log.high_watermark > last_offset or (required_acks != ACKS_ALL and log.committable_offset > last_offset)

    # ------------------------------------------------------------------------------------- leader: followers, the mark

    def follower(self, broker_id: int, broker_epoch: int, stated_epoch: int) -> FollowerReplica:
        """The book's entry of a replica that fetches, stating this leader epoch, or -1 for none.

        Raises UNKNOWN_LEADER_EPOCH for one that is not assigned, as far as this node knows (it asks again), and
        NOT_LEADER_OR_FOLLOWER for a process that has been replaced by a later one (KIP-903).
        """
        follower = self.in_sync.followers.get(broker_id)
        if follower is None:
            code = ErrorCode.UNKNOWN_LEADER_EPOCH if stated_epoch >= 0 else ErrorCode.NOT_LEADER_OR_FOLLOWER
            raise KafkaError(code, f"broker {broker_id} is no replica of {self}")
        if broker_epoch != follower.broker_epoch:
            broker = self._ports.broker(broker_id)
            if broker is not None and -1 < broker_epoch < broker.epoch:
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"a fetch of broker epoch {broker_epoch}")
            follower.broker_epoch = broker_epoch
        return follower

    def follower_fetched(self, follower: FollowerReplica, fetch_offset: int, now_ms: float) -> None:
        """A follower fetches from `fetch_offset`: it holds everything below. Its log has been found to agree."""
        log = self.log
        moved = follower.fetched(fetch_offset, log.log_end_offset, now_ms)
        if not follower.in_maximal_isr:
            self._propose(
                self.in_sync.expansion(follower, log.high_watermark, self._ports.broker_epoch(), self._ports.eligible)
            )
        if moved and fetch_offset > log.high_watermark:
            self.advance_high_watermark()

    def advance_high_watermark(self) -> None:
        """Move the mark to what every in-sync replica holds: alone in the ISR, to what the flush rule lets go."""
        if self._move_high_watermark():
            self._on_advance(self)

    def _move_high_watermark(self) -> bool:
        log = self.log
        blocked_from = log.durability.blocked_from
        mark = log.log_end_offset if blocked_from < 0 else blocked_from
        if not self.leads or mark <= log.high_watermark:
            return False
        book = self.in_sync
        if book.followers:
            if len(book.isr) < self.min_insync_replicas and self.is_under_min_isr:
                return False  # KIP-966
            mark = book.high_watermark(mark, self._ports.now_ms, self._ports.eligible)
            if mark <= log.high_watermark:
                return False
        log.set_high_watermark(mark)
        return True

    def check_isr(self) -> None:
        """From time to time: propose to leave out who lags, and look whether the mark may move without them."""
        if not self.leads or self.offline or not self.in_sync.followers:
            return
        ports, book = self._ports, self.in_sync
        end = self.log.log_end_offset
        if any(each.in_maximal_isr and each.log_end_offset != end for each in book.followers.values()):
            end = self._copyable_end()
        self._propose(book.shrinkage(end, ports.now_ms(), ports.broker_epoch()))
        self.advance_high_watermark()

    def _copyable_end(self) -> int:
        """Where followers must stop: at the log end, or at damage above the high watermark.

        Whoever has come so far does not lag. Were it left out of the ISR, this replica would commit alone what it
        cannot read, and no other could lead in its place.
        """
        log = self.log
        uncommitted = (each.first_offset for _, each in log.damaged_ranges() if each.first_offset >= log.high_watermark)
        return min(uncommitted, default=log.log_end_offset)

    def resign(self) -> bool:
        """Ask the controller for another leader; False while another change of the ISR is on its way."""
        if not self.leads or self.offline:
            return False
        proposal = self.in_sync.resignation(self._ports.broker_epoch())
        self._propose(proposal)
        return proposal is not None

    def delete_records_as_leader(self, offset: int) -> int:
        """Move the log start to `offset` (-1: the high watermark), unless it is there; returns the offset meant.

        Raises POLICY_VIOLATION for a topic that is compacted only, OFFSET_OUT_OF_RANGE.
        """
        log = self.log
        if not log.config.is_deleted_by_age_or_size:
            message = f"records of {self.topic}-{self.index} are not deleted: its cleanup.policy forbids it"
            raise KafkaError(ErrorCode.POLICY_VIOLATION, message)
        meant = log.high_watermark if offset == -1 else offset
        if meant < 0:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is no offset")
        log.delete_records(meant)
        return meant

    @property
    def low_watermark(self) -> int:
        """The offset at which every living replica's log starts, or an earlier one; -1 while one has not said so.

        The log that is to take this one's place counts, too (Partition.lowWatermarkIfLeader).
        """
        lowest = self.log.log_start_offset
        if self.future_log is not None and self.future_log.log_start_offset < lowest:
            lowest = self.future_log.log_start_offset
        for follower in self.in_sync.followers.values():
            if follower.log_start_offset < lowest:
                broker = self._ports.broker(follower.broker_id)
                if broker is not None and not broker.fenced:
                    lowest = follower.log_start_offset
        return lowest

    def _propose(self, proposal: Proposal | None) -> None:
        if proposal is not None:
            self._note_awaited()
            level = logging.INFO if proposal.removes else logging.DEBUG
            logger.log(level, "%s-%d: %s", self.topic, self.index, proposal)
            self._ports.propose(self, proposal)

    def on_proposal_agreed(
        self, proposal: Proposal, isr: tuple[int, ...], leader_epoch: int, partition_epoch: int
    ) -> None:
        if self.leads and self.in_sync.agreed(proposal, isr, leader_epoch, partition_epoch):
            self._count(proposal)
            self._isr_changed()

    def _count(self, proposal: Proposal) -> None:
        if proposal.adds is None:
            self._ports.isr_shrinks += 1
        else:
            self._ports.isr_expands += 1

    def on_proposal_rejected(self, proposal: Proposal) -> None:
        """The controller has refused it for good. What it may have done is not rejected: then the metadata says so."""
        if self.leads and proposal is self.in_sync.pending:
            self._ports.isr_rejections += 1
            self.in_sync.rejected(proposal)
            self._isr_changed()

    def _isr_changed(self) -> None:
        self.partition_epoch = self.in_sync.partition_epoch
        self._note_awaited()
        self.advance_high_watermark()

    def _note_awaited(self) -> None:
        self.awaits_followers = any(each.in_maximal_isr for each in self.in_sync.followers.values())

    # ------------------------------------------------------------------------------------------------------- follower

    def append_as_follower(self, batches: memoryview, now_ms: int) -> None:
        """Append what the leader sent. Raises CORRUPT_MESSAGE, OFFSET_OUT_OF_RANGE, OSError, CorruptLog.

        An empty log takes a batch that begins before it: the leader's log may start in the middle of one.
        """
        assert not self.leads
        log = self.log
        if log.log_start_offset == log.log_end_offset:
            base_offset, mark = int.from_bytes(batches[:8], "big"), log.high_watermark
            if base_offset < log.log_end_offset:
                check_first_holds(batches, log.log_end_offset)
                log.truncate_fully_and_start_at(base_offset)
                log.append_as_follower(batches, now_ms, epoch_max=self.leader_epoch)
                log.set_high_watermark(mark)
                return
        log.append_as_follower(batches, now_ms, epoch_max=self.leader_epoch)

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """Cut the log. Batches that go were refused when the lead was lost: what is pipelined behind them is no gap.

        This replica may lead again before they come again. Raises what the log's own `truncate_to` does.
        """
        log, producers = self.log, self.log.producers
        lost = sorted(
            (batch[2], producer_id, entry.epoch, batch)
            for producer_id, entry in producers.entries.items()
            for batch in entry.batches
            if batch[3] >= offset
        )
        log.truncate_to(offset)
        for first_offset, producer_id, epoch, batch in lost:
            expected = producers.expected_sequence(producer_id, epoch)
            header = BatchHeader(
                first_offset, 0, -1, MAGIC, 0, 0, batch[3] - first_offset, 0, 0, producer_id, epoch, batch[0], 0
            )
            self.refused.note(header, ErrorCode.NOT_LEADER_OR_FOLLOWER, expected, now_ms)

    def adopt(self, high_watermark: int, log_start_offset: int) -> bool:
        """Take over the leader's marks, as far as this log reaches; whether the log starts elsewhere now."""
        log = self.log
        mark = high_watermark if high_watermark < log.log_end_offset else log.log_end_offset
        if mark > log.high_watermark:
            log.set_high_watermark(mark)
            self._on_advance(self)
        if log.log_start_offset < log_start_offset <= log.high_watermark:
            log.delete_records(log_start_offset)
            return True
        return False

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
        if fetch_offset < self.log.log_start_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {fetch_offset} is no longer in the log")
        return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < fetch_offset else None
