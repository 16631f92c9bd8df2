"""One replica of one partition: its role and its log.

A leader appends, records its followers' fetches and advances the high watermark by the rules of `isr.py`. A follower
appends the batches that it fetches and adopts the leader's high watermark. `on_advance` notifies the layer above of a
new high watermark (for parked produces and waiting fetches). `ReplicaPorts.propose` sends a proposed ISR to the
controller. Invariant: the high watermark decreases only when the log is truncated, and a reader of committed data gets
no offset at or above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidelog.protocol.batches.record_batch import MAGIC, BatchHeader, check_crc
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.replication.isr import InSyncReplicas
from tidelog.replication.truncation import truncate_copy
from tidelog.storage.log.hidden_transactions import stable_bound
from tidelog.storage.log.pipelined_append import append_pipelined
from tidelog.storage.log.usual_append import append_usual
from tidelog.storage.producers.producer_state import FIRST_OFFSET, LAST_OFFSET
from tidelog.storage.producers.refused_batches import RefusedBatches, sequenced_header
from tidelog.storage.segments.append import check_first_holds

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import BrokerImage, PartitionImage
    from tidelog.replication.isr import FollowerReplica, Proposal
    from tidelog.storage.log.partition_log import AppendInfo, PartitionLog, ReadResult
    from tidelog.storage.producers.verification import TransactionAppend, Verification
    from tidelog.storage.segments.append import Batch

logger = logging.getLogger("tidelog.replication")


class Isolation(IntEnum):
    """How far a reader may read: Fetch's isolation levels, and the log end for a follower."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1
    LOG_END = 2


ACKS_ALL = -1


def _no_broker(broker_id: int) -> BrokerImage | None:
    return None


def _ignore_proposal(partition: Partition, proposal: Proposal) -> None:
    pass


@dataclass(slots=True)
class ReplicaPorts:
    """The interface of one node for its replicas. The defaults fit a node without peers.

    `now_ms`: monotonic time. `broker`: a broker's registration in the committed metadata. `propose`: sends a change of
    the ISR to the controller; the outcome comes back through `Partition.on_proposal_agreed` or `on_proposal_rejected`,
    which count it.
    """

    now_ms: Callable[[], float] = lambda: 0.0
    broker: Callable[[int], BrokerImage | None] = _no_broker
    broker_epoch: Callable[[], int] = lambda: -1
    propose: Callable[[Partition, Proposal], None] = _ignore_proposal
    lag_ms_max: int = 30_000
    isr_expands: int = 0
    isr_shrinks: int = 0
    isr_rejections: int = 0
    refused: RefusedBatches = field(default_factory=RefusedBatches)

    def eligible(self, broker_id: int, broker_epoch: int, directory: bytes) -> bool:
        """Whether this replica may join an ISR: its broker is active, its fetches do not state the epoch of an earlier
        process (KIP-841, KIP-903), and its log directory has not failed.

        Kafka does not look at the directory: a write waits for such a replica up to `replica.lag.time.max.ms`.
        """
        broker = self.broker(broker_id)
        if broker is None or not broker.is_active or broker_epoch not in (-1, broker.epoch):
            return False
        return not broker.has_lost(directory)


class Partition:
    __slots__ = (
        "_on_advance", "_ports", "awaits_followers", "directories", "future_log", "in_sync", "index", "is_in_isr",
        "is_internal", "leader_epoch", "leader_id", "leads", "log", "min_insync_replicas", "offline",
        "partition_epoch", "refused", "throttled_as_follower", "throttled_as_leader", "topic", "topic_id", "watch",
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
        """The copy in another log directory, which replaces `log` when a move ends."""
        self.is_internal = topic in INTERNAL_TOPICS
        self.leads = False
        self.offline = False
        self.leader_id = -1
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.in_sync = InSyncReplicas(-1, ports.lag_ms_max)
        """The leader's state of the ISR and the followers; empty while this replica does not lead."""
        self.directories: tuple[bytes, ...] = ()
        """The log directories of all replicas, in the order of the assignment, while this replica leads."""
        self.is_in_isr = True
        """Whether the metadata has this replica in the ISR, while it follows."""
        self.awaits_followers = False
        """Whether another replica is in the maximal ISR, so that an append alone cannot advance the high watermark."""
        self.min_insync_replicas = 1
        self.refused = ports.refused.of((topic_id, index), (topic, index))
        self.throttled_as_leader = self.throttled_as_follower = False
        self.watch: Any = None
        """The requests that wait for this partition. The layer above stores them here, to save appends a lookup."""
        self._on_advance = on_advance
        self._ports = ports

    def __str__(self) -> str:
        return f"{self.topic}-{self.index}"

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch} {'leads' if self.leads else ''}>"

    # -------------------------------------------------------------------------------------------------------- role

    def become_leader(self, assignment: PartitionImage, now_ms: int) -> bool:
        """Lead, or continue to lead, by this metadata. Returns whether a leader epoch begins.

        A new epoch starts at the log end (KIP-101). Metadata that is applied already is ignored. `now_ms`: the clock of
        the appends.
        """
        begins = assignment.leader_epoch > self.leader_epoch or not self.leads
        if not begins and assignment.partition_epoch <= self.partition_epoch:
            return False
        assert assignment.leader_epoch >= self.leader_epoch, "a leader epoch never goes back"
        self.directories = assignment.directories
        log, ports = self.log, self._ports
        if not self.leads:
            self.in_sync = InSyncReplicas(assignment.leader, ports.lag_ms_max)
        if begins:
            log.assign_epoch(assignment.leader_epoch)
            if not self.leads and assignment.leader_epoch > 0:  # another replica or process has led
                self.refused.on_election(now_ms)
        log.producers.refused = self.refused
        if self.in_sync.pending is not None:
            self._count(self.in_sync.pending, assignment.isr)
        self.in_sync.assign(
            assignment.replicas, assignment.isr, assignment.leader_epoch, assignment.partition_epoch,
            log.log_end_offset, ports.now_ms(), assignment.elr,
        )  # fmt: skip
        self.leads = True
        self.leader_id, self.leader_epoch = assignment.leader, assignment.leader_epoch
        self._isr_changed()
        return begins

    def become_follower(self, assignment: PartitionImage) -> bool:
        """Follow the leader in this metadata (-1: none). Returns whether the leader or its epoch has changed."""
        if assignment.leader_epoch < self.leader_epoch:
            return False
        changed = self.leads or (assignment.leader, assignment.leader_epoch) != (self.leader_id, self.leader_epoch)
        self.leads = False
        self.leader_id, self.leader_epoch = assignment.leader, assignment.leader_epoch
        self.partition_epoch = assignment.partition_epoch
        if self.in_sync.followers or self.in_sync.isr:
            self.in_sync = InSyncReplicas(-1, self._ports.lag_ms_max)
        return changed

    def require_leader(self, current_leader_epoch: int = -1, unknown_epoch: int | None = None) -> None:
        """Raise NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR, or the errors of `require_epoch` (KIP-320)."""
        if self.offline:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if not self.leads:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        self.require_epoch(current_leader_epoch, unknown_epoch)

    def require_epoch(self, current_leader_epoch: int, unknown_epoch: int | None = None) -> None:
        """Raise FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH, on a leader or a follower.

        `unknown_epoch` is not checked. Without `unknown_epoch`, a negative epoch is not checked.
        """
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
        """Append client batches. `batches` must be writable, because offsets and epoch are written into it.

        Raises NOT_ENOUGH_REPLICAS if acks=all and the ISR is smaller than min.insync.replicas, unless the batch is in
        the log already. Raises the errors of the log's append. The append may advance the high watermark without a call
        of `on_advance`: the caller notifies the waiting requests after its own work.
        """
        in_sync = self.in_sync
        if required_acks == ACKS_ALL and len(in_sync.isr) < self.min_insync_replicas and self.is_under_min_isr:
            repeated = self._find_repeated(batches) if from_client else None
            if repeated is not None:
                return repeated
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"The size of the current ISR {list(self.in_sync.isr)} is insufficient to satisfy the min.isr "
                f"requirement of {self.min_insync_replicas} for partition {self.topic}-{self.index}",
            )
        log = self.log
        # `PartitionLog.append_as_leader` begins with `append_usual`; nearly every produce saves its call.
        info = append_usual(log, batches, self.leader_epoch, now_ms, from_client, transaction)
        if info is None:
            info = log.append_as_leader(
                batches, self.leader_epoch, now_ms, from_client=from_client, transaction=transaction
            )
        if not self.awaits_followers:
            if in_sync.followers or log.durability.blocked_from >= 0 or not self.leads:
                self._move_high_watermark()
            else:
                log.set_high_watermark(log.log_end_offset)  # a shortcut for an only replica
        return info

    def append_pipelined_as_leader(
        self, batches: Sequence[memoryview], now_ms: int, required_acks: int
    ) -> tuple[bytes, list[Batch]]:
        """`append_as_leader` for the batches at the start that can be appended with one write.

        Returns the bytes in the log and the appended batches; none, without a change, if `append_as_leader` must handle
        the first.
        """
        if required_acks == ACKS_ALL and len(self.in_sync.isr) < self.min_insync_replicas and self.is_under_min_isr:
            return b"", []
        written = append_pipelined(self.log, batches, self.leader_epoch, now_ms)
        if written[1] and not self.awaits_followers:
            self._move_high_watermark()
        return written

    def begin_verification(
        self, producer_id: int, producer_epoch: int, first_sequence: int, adds: bool, now_ms: int
    ) -> Verification | None:
        """The verification that a transactional batch needs before its append, or None.

        `adds`: the coordinator must add this partition to the transaction, so the verification is always needed. Raises
        INVALID_PRODUCER_EPOCH.
        """
        if not adds and not self.log.config.verifies_transactions:
            return None
        return self.log.producers.begin_verification(producer_id, producer_epoch, first_sequence, adds, now_ms)

    def _find_repeated(self, batches: memoryview) -> AppendInfo | None:
        """The append of a batch that is in the log already, or None. Its producer only waits for an acknowledgement."""
        header = sequenced_header(batches)
        if header is None:
            return None
        producers = self.log.producers
        repeated = producers.find_repeated(
            header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta
        )
        if repeated is None or (
            header.is_transactional and producers.is_of_ended_transaction(header.producer_id, repeated)
        ):
            return None
        # A damaged header could identify another batch.
        return self.log.repeated(repeated) if check_crc(batches, 0, header) else None

    def note_refused(self, batches: memoryview | None, code: ErrorCode, now_ms: int) -> None:
        """Record that a client's batch was refused with `code`, by this partition or by an earlier check."""
        header = sequenced_header(batches)
        if header is not None:
            expected = self.log.producers.expected_sequence(header.producer_id, header.producer_epoch)
            self.refused.note(header, code, expected, now_ms)

    @property
    def is_under_min_isr(self) -> bool:
        in_sync = self.in_sync
        return len(in_sync.isr) < self.min_insync_replicas and len(in_sync.isr) < in_sync.min_isr(
            self.min_insync_replicas
        )

    def may_answer(self, last_offset: int, required_acks: int) -> bool:
        """Whether an append up to `last_offset` may be acknowledged.

        acks=all needs a committed append. acks=1 needs an append in the log, and on the device if `flush.messages`
        demands it (Kafka syncs before it responds).
        """
        log = self.log
        return log.high_watermark > last_offset or (required_acks != ACKS_ALL and log.committable_offset > last_offset)

    # ------------------------------------------------------------------------------- leader: followers, high watermark

    def follower(self, broker_id: int, broker_epoch: int, stated_epoch: int) -> FollowerReplica:
        """The state of the replica that fetches. `stated_epoch`: the leader epoch of its request, or -1.

        Raises UNKNOWN_LEADER_EPOCH for a replica that is not assigned in this node's metadata; the replica retries.
        Raises NOT_LEADER_OR_FOLLOWER for a process that a later one has replaced (KIP-903), and for an unassigned
        replica that states no leader epoch.
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
        """A follower fetches from `fetch_offset`, so it holds all records below. The caller has checked that its log
        agrees with this one.
        """
        log = self.log
        moved = follower.fetched(fetch_offset, log.log_end_offset, now_ms)
        if not follower.in_maximal_isr:
            self._propose(
                self.in_sync.expansion(follower, log.high_watermark, self._ports.broker_epoch(), self._may_join)
            )
        if moved and fetch_offset > log.high_watermark and self._move_high_watermark():
            self._on_advance(self)

    def advance_high_watermark(self) -> None:
        """Advance the high watermark to the offset that every in-sync replica has reached.

        A leader alone in the ISR advances it to the offset that the flush rule allows.
        """
        if self._move_high_watermark():
            self._on_advance(self)

    def _move_high_watermark(self) -> bool:
        log = self.log
        blocked_from = log.durability.blocked_from
        high_watermark = log.log_end_offset if blocked_from < 0 else blocked_from
        if not self.leads or high_watermark <= log.high_watermark:
            return False
        in_sync = self.in_sync
        if in_sync.followers:
            if len(in_sync.isr) < self.min_insync_replicas and self.is_under_min_isr:
                return False  # KIP-966
            high_watermark = in_sync.high_watermark(high_watermark, self._ports.now_ms, self._may_join)
            if high_watermark <= log.high_watermark:
                return False
        log.set_high_watermark(high_watermark)
        return True

    def check_isr(self) -> None:
        """A periodic task: propose to remove lagging followers from the ISR, and advance the high watermark if
        possible.
        """
        if not self.leads or self.offline or not self.in_sync.followers:
            return
        ports, in_sync = self._ports, self.in_sync
        end = self.log.log_end_offset
        if any(each.in_maximal_isr and each.log_end_offset != end for each in in_sync.followers.values()):
            end = self._copyable_end()
        self._propose(in_sync.shrinkage(end, ports.now_ms(), ports.broker_epoch()))
        self.advance_high_watermark()

    def _copyable_end(self) -> int:
        """The offset up to which followers can copy: the log end, or the first damage above the high watermark.

        A follower at this offset does not lag. If it left the ISR, this replica would commit alone records that it
        cannot read, and no other replica could replace it as leader.
        """
        log = self.log
        uncommitted = (each.first_offset for _, each in log.damaged_ranges() if each.first_offset >= log.high_watermark)
        return min(uncommitted, default=log.log_end_offset)

    def resign(self) -> bool:
        """Ask the controller for another leader. Returns False while another change of the ISR is open."""
        if not self.leads or self.offline:
            return False
        proposal = self.in_sync.resignation(self._ports.broker_epoch())
        self._propose(proposal)
        return proposal is not None

    def confirm_reading(self) -> None:
        """Tell the controller that this leader has read its log, so that a reassignment may remove other replicas."""
        if self.leads and not self.offline:
            self._propose(self.in_sync.confirmation(self._ports.broker_epoch()))

    def delete_records_as_leader(self, offset: int) -> int:
        """Advance the log start to `offset` (-1: the high watermark). Returns that offset.

        Raises POLICY_VIOLATION for a topic that is only compacted, and OFFSET_OUT_OF_RANGE.
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
        """The lowest log start offset of this replica and of all unfenced followers; -1 while one is unknown.

        The future log counts too (Kafka's Partition.lowWatermarkIfLeader).
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

    def on_proposal_agreed(self, proposal: Proposal, partition_epoch: int) -> None:
        """The controller has agreed. The metadata brings the new ISR, unless this partition epoch is here already.

        The ISR in the response may come before a raised min.insync.replicas, by which the controller has decided: this
        leader would commit alone what an eligible replica lacks. (Kafka adopts it.)
        """
        if self.leads and partition_epoch == self.partition_epoch:
            self._withdraw(proposal)

    def _count(self, proposal: Proposal, isr: tuple[int, ...]) -> None:
        """Count the proposal if this ISR is its outcome."""
        if proposal.adds is not None:
            self._ports.isr_expands += proposal.adds in isr
        elif proposal.removes:
            self._ports.isr_shrinks += not set(proposal.removes).intersection(isr)

    def on_proposal_rejected(self, proposal: Proposal) -> None:
        """The controller has refused the proposal for good. A proposal with an unknown outcome is not rejected: the
        metadata shows its outcome.
        """
        if self.leads and proposal is self.in_sync.pending:
            self._ports.isr_rejections += 1
            self._withdraw(proposal)

    def _withdraw(self, proposal: Proposal) -> None:
        self.in_sync.withdraw(proposal)
        self._isr_changed()

    def _isr_changed(self) -> None:
        self.partition_epoch = self.in_sync.partition_epoch
        self._note_awaited()
        self.advance_high_watermark()

    def _may_join(self, broker_id: int, broker_epoch: int) -> bool:
        directory = UNASSIGNED_DIRECTORY
        for replica, each in zip(self.in_sync.replicas, self.directories):
            if replica == broker_id:
                directory = each
        return self._ports.eligible(broker_id, broker_epoch, directory)

    def _note_awaited(self) -> None:
        self.awaits_followers = any(each.in_maximal_isr for each in self.in_sync.followers.values())

    # ------------------------------------------------------------------------------------------------------- follower

    def append_as_follower(self, batches: memoryview, now_ms: int) -> None:
        """Append batches of the leader. Raises CORRUPT_MESSAGE, OFFSET_OUT_OF_RANGE, OSError, CorruptLog.

        An empty log accepts a batch that begins before its start, because the leader's log may start inside a batch.
        """
        assert not self.leads
        log = self.log
        if log.log_start_offset == log.log_end_offset:
            base_offset, high_watermark = int.from_bytes(batches[:8], "big"), log.high_watermark
            if base_offset < log.log_end_offset:
                check_first_holds(batches, log.log_end_offset)
                log.truncate_fully_and_start_at(base_offset)
                log.append_as_follower(batches, now_ms, epoch_max=self.leader_epoch)
                log.set_high_watermark(high_watermark)
                return
        log.append_as_follower(batches, now_ms, epoch_max=self.leader_epoch)

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """`truncate_copy`, and record the removed batches as refused.

        Their producers send them again, and this replica may lead by then. The record keeps it from treating the
        batches that were pipelined behind them as a gap in the sequence.
        """
        log, producers = self.log, self.log.producers
        lost = sorted(
            (
                (batch[FIRST_OFFSET], producer_id, entry.epoch, batch)
                for producer_id, entry in producers.entries.items()
                for batch in entry.batches
                if batch[LAST_OFFSET] >= offset
            ),
            reverse=True,  # each joins the refused batches behind it
        )
        truncate_copy(log, offset)
        for first_offset, producer_id, epoch, (first_sequence, _, _, last_offset, _) in lost:
            expected = producers.expected_sequence(producer_id, epoch)
            last_delta = last_offset - first_offset
            header = BatchHeader(
                first_offset, 0, -1, MAGIC, 0, 0, last_delta, 0, 0, producer_id, epoch, first_sequence, 0
            )
            self.refused.note(header, ErrorCode.NOT_LEADER_OR_FOLLOWER, expected, now_ms)

    def adopt(self, high_watermark: int, log_start_offset: int) -> bool:
        """Adopt the leader's high watermark and log start, within this log. Returns whether the log start moved."""
        log = self.log
        if high_watermark > log.log_end_offset:
            high_watermark = log.log_end_offset
        if high_watermark > log.high_watermark:
            log.set_high_watermark(high_watermark)
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
        """The offset below which a reader of this isolation may read."""
        log = self.log
        if isolation == Isolation.READ_UNCOMMITTED:
            return log.high_watermark
        return log.last_stable_offset if isolation == Isolation.READ_COMMITTED else log.log_end_offset

    def read(self, offset: int, max_bytes: int, isolation: Isolation, min_one_batch: bool) -> ReadResult:
        """Whole batches from the one that holds `offset`, up to the isolation's bound.

        Raises OFFSET_OUT_OF_RANGE below the log start or above the log end, and `ColdRead` (see `storage.reader`).
        """
        log, bound = self.log, self.read_bound(isolation)
        if log.hidden_ends and isolation == Isolation.READ_COMMITTED:
            bound = stable_bound(log, offset)
        return log.read(offset, max_bytes, bound, min_one_batch=min_one_batch)

    def divergence(self, last_fetched_epoch: int, fetch_offset: int) -> tuple[int, int] | None:
        """(epoch, end offset) to which the fetcher must truncate its log, or None when the logs agree (KIP-595).

        Raises ColdRead and DamagedRecords: nothing is truncated or kept for an offset that is only in the file of
        epochs.
        """
        epoch, end_offset = self.log.confirmed_end_of_epoch(last_fetched_epoch, fetch_offset)
        if epoch < 0:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no end offset is known for epoch {last_fetched_epoch}")
        if fetch_offset < self.log.log_start_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {fetch_offset} is no longer in the log")
        return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < fetch_offset else None

    def beginning(self) -> tuple[int, int]:
        """The `divergence` of an empty log without an epoch that begins above this one: it begins again where this one
        does.

        Nothing tells that the records between were in its history. After an unclean election they may be acknowledged
        ones of this leader, and it would join the ISR without them. A member of the ISR or of the ELR has shown that it
        had them, and might be elected with an end below the high watermark.
        """
        log = self.log
        return max(log.leader_epochs.epoch_for_offset(log.log_start_offset), 0), log.log_start_offset
