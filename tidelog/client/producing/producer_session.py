"""Idempotence: producer id, epoch and sequence of each batch, and the meaning of errors.

Pure. The rules are KIP-98 and KIP-360 as in Java's `TransactionManager` for a producer without
transactions. Invariants: a batch keeps its (producer id, epoch, sequence) as long as it may be in
the log, so that a resend is a duplicate and not a second copy. A batch is sent again only when all
earlier batches are settled. From the oldest unsettled batch on at most `WINDOW` batches are sent,
settled or not: the broker recognises that many duplicates. After an idle time one batch goes alone
until it is acknowledged. Sequences restart, under a higher epoch, only when the partition has no
batch in flight and the oldest unsettled batch is known not to be in the log. Later batches cannot
be in the log then, because the broker accepts sequences without gaps only.

OUT_OF_ORDER_SEQUENCE_NUMBER does not prove that a batch is missing: a killed broker remembers only
the last batch of each producer and refuses earlier ones. While the oldest batch may be in the log,
the partition's leader is asked for the end of its log (DescribeProducers, KIP-664): `inquiries`,
then `handle_log_end` or `abandon_inquiry`. The leader's log is not the committed log yet. So the
last batch in it, which every broker recognises, is sent again, and its acknowledgement covers the
earlier batches. A part of a batch that was split after the whole had been appended unnoticed is
never recognised: when the same leader refuses it twice although its log has it, its outcome is
unknown for good. (Java writes such parts a second time, under a new epoch.)

A transactional producer never changes its epoch here, because the transaction coordinator gives the
epochs. Sequences do not restart inside a transaction: the batch fails, and the transaction with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from tidelog.client.model import TopicPartition
from tidelog.client.producing.accumulator import ProducerBatch
from tidelog.protocol.errors import ErrorCode

WINDOW = 5  # brokers recognise a producer's last five batches when they come again
IDLE_MS = 60_000.0
"""Far below any `producer.id.expiration.ms`, after which a broker forgets an idle producer."""
_MAX_EPOCH = 32767
_SEQUENCE_MASK = 0x7FFFFFFF

_HALF_SEQUENCE_RANGE = 2**30
_NOT_APPENDED_ERRORS = frozenset(
    {
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.RECORD_LIST_TOO_LARGE,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)
"""Errors that a broker returns before it appends.

NOT_LEADER_OR_FOLLOWER is not one of them: a leader that is deposed while a batch waits for its
replicas returns it, and the batch may survive.
"""

Batch = ProducerBatch[Any]


class Verdict(Enum):
    """The action for a batch after a broker's error."""

    RETRY = "retry"
    SUCCEED = "succeed"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The batch and those before it are in the leader's log, which cannot acknowledge them."""


class _PartitionSequences:
    """One partition: its identity, its next sequence, and its unsettled batches with a sequence, in
    order.
    """

    __slots__ = (
        "acknowledged_end",
        "checked_node_id",
        "has_gap",
        "has_other_log",
        "is_confirmed",
        "last_batch_in_log",
        "last_send_ms",
        "next_sequence",
        "producer_epoch",
        "producer_id",
        "refused_in_log",
        "unsettled_batches",
        "window",
    )

    def __init__(self) -> None:
        self.producer_id = -1
        self.producer_epoch = -1
        self.next_sequence = 0
        self.acknowledged_end = 0
        """The sequence after the last acknowledged one."""
        self.unsettled_batches: list[Batch] = []
        self.window: deque[tuple[int, int]] = deque()
        """The `order` of the batches sent since the oldest unsettled one, that one included."""
        self.is_confirmed = False
        """The broker has acknowledged a batch since the last idle time.

        Before that it may have no state of this producer. A broker without state accepts any
        sequence, for example the second batch before a refused first one.
        """
        self.last_send_ms = 0.0
        """The time at which the last new batch was sent."""
        self.has_gap = False
        """A batch failed, and its sequence may be unused until a later batch is acknowledged."""
        self.has_other_log = False
        """The topic was deleted or made anew, and no batch was sent since."""
        self.checked_node_id = -1
        """The node whose log lacks the oldest unsettled batch; -1 after an attempt with an unknown
        result.
        """
        self.last_batch_in_log: Batch | None = None
        """The last batch in the leader's log.

        It is sent first, alone, and its acknowledgement covers earlier ones.
        """
        self.refused_in_log: tuple[Batch, int] | None = None
        """The last batch in a leader's log that this leader, by its node id, has refused as out of order."""


class ProducerSession:
    """Sequences of an idempotent producer; with `idempotent=False` only the bound on batches in
    flight.
    """

    def __init__(self, *, idempotent: bool, max_in_flight: int = WINDOW, transactional: bool = False) -> None:
        assert not idempotent or max_in_flight <= WINDOW
        assert idempotent or not transactional
        self._idempotent = idempotent
        self._transactional = transactional
        self._limit = max_in_flight
        self._partitions: dict[TopicPartition, _PartitionSequences] = {}
        self.pending_restarts: dict[TopicPartition, None] = {}
        """Partitions that wait for `restart_partitions`."""
        self.open_inquiries: dict[TopicPartition, int] = {}
        """Partitions whose leader must be asked, now or once their batches in flight have returned."""
        self._next_inquiry = 0
        self._set_identity(-1, -1)

    # -- identity

    def _set_identity(self, producer_id: int, producer_epoch: int) -> None:
        self.identity = producer_id, producer_epoch
        self.needs_identity = self._idempotent and producer_id < 0
        """InitProducerId must succeed before anything is sent."""

    def adopt_identity(self, producer_id: int, producer_epoch: int) -> None:
        """Set the identity from InitProducerId, or of the next transaction from EndTxn.

        Each partition adopts it when it has no unsettled batch. Between transactions none has.
        """
        if self._transactional:
            assert not any(state.unsettled_batches for state in self._partitions.values()), "a transaction is open"
            self._partitions.clear()
        self._set_identity(producer_id, producer_epoch)

    def drop_identity(self) -> None:
        """The cluster is another one now: there the identity may be that of another producer, and a batch of either
        would count as a duplicate of the other's. Unsettled batches restart under the next identity.

        The coordinator of a transactional producer refuses its id, so it goes on with an error.
        """
        if not self._idempotent or self._transactional:
            return
        self._set_identity(-1, -1)
        self.open_inquiries.clear()
        self.pending_restarts.update(
            (partition, None) for partition, state in self._partitions.items() if state.unsettled_batches
        )

    # -- sending

    def may_send(self, batch: Batch) -> bool:
        """Whether this batch, the head of its partition's queue, may be sent now."""
        if self.needs_identity:
            return False
        state = self._partitions.get(batch.partition)
        if state is None:
            return True
        if not self._idempotent:
            return sum(sent.in_flight for sent in state.unsettled_batches) < self._limit
        if (self.pending_restarts and batch.partition in self.pending_restarts) or (
            self.open_inquiries and batch.partition in self.open_inquiries
        ):
            return False
        if state.has_other_log and any(sent.in_flight for sent in state.unsettled_batches):
            # The new log accepts any sequence first, and an earlier batch that comes back would be out of order there.
            return False
        if state.last_batch_in_log is not None:
            return batch is state.last_batch_in_log
        if batch.base_sequence >= 0:
            return state.unsettled_batches[0] is batch
        if state.has_gap or (state.unsettled_batches and not state.is_confirmed):
            return False
        return len(state.window) < self._limit

    def prepare_send(self, batch: Batch, now_ms: float) -> None:
        """Give a batch that is about to be sent its identity and sequence, unless it has them
        already.
        """
        assert not self.needs_identity
        state = self._partitions.get(batch.partition)
        if state is None:
            state = self._partitions[batch.partition] = _PartitionSequences()
        if not self._idempotent:
            if batch not in state.unsettled_batches:
                state.unsettled_batches.append(batch)
            return
        if state.has_other_log:
            state.has_other_log = state.is_confirmed = False
        if batch.base_sequence >= 0:
            return
        if not state.unsettled_batches:
            if (state.producer_id, state.producer_epoch) != self.identity:
                self._reset_sequences(state)
            state.is_confirmed = state.is_confirmed and now_ms - state.last_send_ms < IDLE_MS
        state.last_send_ms = now_ms
        state.unsettled_batches.append(batch)
        self._assign_sequence(state, batch)

    def _reset_sequences(self, state: _PartitionSequences) -> None:
        state.producer_id, state.producer_epoch = self.identity
        state.next_sequence = state.acknowledged_end = 0
        state.has_gap = state.is_confirmed = False
        state.checked_node_id, state.last_batch_in_log, state.refused_in_log = -1, None, None
        state.window.clear()

    @staticmethod
    def _assign_sequence(state: _PartitionSequences, batch: Batch) -> None:
        batch.producer_id = state.producer_id
        batch.producer_epoch = state.producer_epoch
        batch.base_sequence = sequence = state.next_sequence
        batch.may_be_in_log = False
        state.window.append(batch.order)
        state.next_sequence = (sequence + batch.builder.record_count) & _SEQUENCE_MASK

    # -- one batch alone

    def lone_identity(self, partition: TopicPartition, now_ms: float) -> tuple[int, int, int] | None:
        """The producer id, epoch and sequence that a new batch would be sent with now; None when anything is unsettled
        or not confirmed.
        """
        state = self._partitions.get(partition)
        if (
            state is None
            or not state.is_confirmed
            or state.unsettled_batches
            or state.acknowledged_end != state.next_sequence
            or state.has_other_log
            or now_ms - state.last_send_ms >= IDLE_MS
            or (state.producer_id, state.producer_epoch) != self.identity
            or partition in self.pending_restarts
        ):
            return None
        return state.producer_id, state.producer_epoch, state.next_sequence

    def begin_lone_send(self, partition: TopicPartition, now_ms: float) -> None:
        """A record with the `lone_identity` of this moment is about to be sent.

        No later one gets its sequence, even when nothing else follows, because of an interrupt for example. The log may
        lack that sequence then. The next batch is refused as out of order, and restarts the sequences.
        """
        state = self._partitions[partition]
        state.last_send_ms = now_ms
        state.next_sequence = (state.next_sequence + 1) & _SEQUENCE_MASK

    def handle_lone_acknowledgement(self, partition: TopicPartition) -> None:
        """The record that was sent alone is in the log."""
        state = self._partitions[partition]
        state.acknowledged_end = state.next_sequence

    def adopt_lone_batch(self, batch: Batch, identity: tuple[int, int, int]) -> None:
        """The record that was sent alone is in this batch now, and not settled."""
        state = self._partitions[batch.partition]
        batch.producer_id, batch.producer_epoch, batch.base_sequence = identity
        state.window.append(batch.order)
        state.unsettled_batches.append(batch)

    # -- results

    def handle_acknowledgement(self, batch: Batch) -> None:
        """Note that the batch is in the log, after the `batches_acknowledged_with` it."""
        state = self._partitions[batch.partition]
        state.unsettled_batches.remove(batch)
        if self._idempotent:
            if batch is state.last_batch_in_log:
                state.last_batch_in_log = None
            state.acknowledged_end = (batch.base_sequence + batch.builder.record_count) & _SEQUENCE_MASK
            state.is_confirmed = True
            self._after_settling(batch.partition, state)
        elif not state.unsettled_batches:
            del self._partitions[batch.partition]

    def batches_acknowledged_with(self, batch: Batch) -> list[Batch]:
        """The earlier batches that the acknowledgement of this one covers: all, when it is the last
        batch in the log.
        """
        state = self._partitions[batch.partition]
        return (
            state.unsettled_batches[: state.unsettled_batches.index(batch)] if batch is state.last_batch_in_log else []
        )

    def batches_until(self, batch: Batch) -> list[Batch]:
        """This batch and all unsettled ones before it."""
        unsettled = self._partitions[batch.partition].unsettled_batches
        return unsettled[: unsettled.index(batch) + 1]

    def handle_error(self, batch: Batch, code: ErrorCode, node_id: int) -> Verdict:
        """Take a node's error, or a missing response (NETWORK_EXCEPTION, REQUEST_TIMED_OUT).

        After FAIL the caller calls `handle_failure`, after SUCCEED `handle_acknowledgement`, after
        UNKNOWN `handle_failure` for each of the `batches_until` this one.
        """
        if not self._idempotent:
            return Verdict.RETRY if code.retriable else Verdict.FAIL
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return Verdict.SUCCEED
        state = self._partitions[batch.partition]
        if self._transactional:
            # An earlier batch may be sent again before this one. Without an earlier one, a sequence
            # is missing in the log for good.
            waits = code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and state.unsettled_batches[0] is not batch
            return Verdict.RETRY if waits or code.retriable else Verdict.FAIL
        is_last_in_log = batch is state.last_batch_in_log
        state.last_batch_in_log = None
        if code not in _NOT_APPENDED_ERRORS:
            batch.may_be_in_log = True
            state.checked_node_id = -1
        if code in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID):
            if is_last_in_log:
                if state.refused_in_log == (batch, node_id):
                    return Verdict.UNKNOWN
                state.refused_in_log = (batch, node_id)
            # The broker misses an earlier sequence. Without an earlier unsettled batch, its state
            # lacks batches that were acknowledged.
            if state.unsettled_batches[0] is batch:
                self._restart_or_inquire(state, batch.partition, node_id)
            return Verdict.RETRY
        if code is ErrorCode.INVALID_PRODUCER_EPOCH:
            self._restart_or_inquire(state, batch.partition, node_id)
            return Verdict.RETRY
        return Verdict.RETRY if code.retriable else Verdict.FAIL

    def _restart_or_inquire(self, state: _PartitionSequences, partition: TopicPartition, node_id: int) -> None:
        if not state.unsettled_batches[0].may_be_in_log or state.checked_node_id == node_id:
            self.pending_restarts[partition] = None
        elif partition not in self.open_inquiries:
            self.open_inquiries[partition] = self._next_inquiry
            self._next_inquiry += 1

    def handle_split(self, batch: Batch, parts: Sequence[Batch]) -> None:
        """Replace the batch by its parts.

        They share its sequences, so that later batches stay in sequence.
        """
        state = self._partitions[batch.partition]
        start = state.unsettled_batches.index(batch)
        state.unsettled_batches[start : start + 1] = parts
        if not self._idempotent:
            return
        start = state.window.index(batch.order)
        del state.window[start]
        sequence = batch.base_sequence
        for index, part in enumerate(parts):
            part.producer_id, part.producer_epoch, part.base_sequence = (
                batch.producer_id,
                batch.producer_epoch,
                sequence,
            )
            sequence = (sequence + part.record_count) & _SEQUENCE_MASK
            state.window.insert(start + index, part.order)

    def handle_failure(self, batch: Batch) -> None:
        """Note that the batch failed for good, by an error or by expiry, perhaps in flight."""
        state = self._partitions.get(batch.partition)
        if state is None or batch not in state.unsettled_batches:
            return
        state.unsettled_batches.remove(batch)
        if self._idempotent:
            state.has_gap = True
            if batch is state.last_batch_in_log:
                state.last_batch_in_log = None
            self._after_settling(batch.partition, state)
        elif not state.unsettled_batches:
            del self._partitions[batch.partition]

    def _after_settling(self, partition: TopicPartition, state: _PartitionSequences) -> None:
        if state.unsettled_batches:
            oldest = state.unsettled_batches[0].order
            while state.window and state.window[0] < oldest:
                state.window.popleft()
            return
        state.window.clear()
        if self.open_inquiries:
            self.open_inquiries.pop(partition, None)
        if state.has_gap:
            if state.acknowledged_end == state.next_sequence:
                state.has_gap = False
            elif not self._transactional:
                self.pending_restarts[partition] = None

    # -- inquiries of the log

    def inquiries(self) -> list[tuple[TopicPartition, int]]:
        """Partitions whose leader must be asked and that have no batch in flight, with the
        inquiry's number.
        """
        return [
            (partition, number)
            for partition, number in self.open_inquiries.items()
            if partition not in self.pending_restarts
            and not any(batch.in_flight for batch in self._partitions[partition].unsettled_batches)
        ]

    def is_open(self, partition: TopicPartition, inquiry: int) -> bool:
        """Whether this inquiry still needs a result."""
        return self.open_inquiries.get(partition) == inquiry

    def producer_id_of(self, partition: TopicPartition) -> int:
        """The producer id of the partition's unsettled batches."""
        return self._partitions[partition].producer_id

    def is_known_epoch(self, partition: TopicPartition, producer_epoch: int) -> bool:
        """Whether an epoch in a log is from this producer.

        A log with a later epoch says nothing of its batches.
        """
        return producer_epoch <= self._partitions[partition].producer_epoch

    def handle_log_end(
        self, partition: TopicPartition, inquiry: int, node_id: int, producer_epoch: int, last_sequence: int
    ) -> Batch | None:
        """Take the last epoch and sequence of this producer in a node's log; -1 and -1 without any.

        Returns the batch to send next, before older ones; None when all are sent again in order.
        Batches that are not in the log keep their sequences for one more attempt: a late request
        that still arrives would make that attempt a duplicate. When the same node, still the
        leader, refuses them again, their sequences restart.
        """
        if not self.is_open(partition, inquiry):
            return None
        del self.open_inquiries[partition]
        state = self._partitions[partition]
        batches_in_log = [
            batch for batch in state.unsettled_batches if _is_in_log(batch, producer_epoch, last_sequence)
        ]
        if batches_in_log:
            state.last_batch_in_log = batches_in_log[-1]
        else:
            state.checked_node_id = node_id
        return state.last_batch_in_log

    def abandon_inquiry(self, partition: TopicPartition, inquiry: int) -> list[Batch]:
        """Close an inquiry without a result.

        Returns the batches with an unknown result, for the caller to fail.
        """
        if not self.is_open(partition, inquiry):
            return []
        del self.open_inquiries[partition]
        return [batch for batch in self._partitions[partition].unsettled_batches if batch.may_be_in_log]

    # -- restarts

    def restart_partitions(self) -> list[TopicPartition]:
        """Restart sequences from 0 under a new epoch in every pending partition without a batch in
        flight.

        Returns those partitions. After the last epoch the identity is dropped: `needs_identity`
        becomes true, and the partitions wait for the next call after `adopt_identity`.
        """
        partitions_at_rest = [
            partition
            for partition in self.pending_restarts
            if not any(batch.in_flight for batch in self._partitions[partition].unsettled_batches)
        ]
        if not partitions_at_rest or self.needs_identity:
            return []
        states = [self._partitions[partition] for partition in partitions_at_rest]
        is_current_identity = any((state.producer_id, state.producer_epoch) == self.identity for state in states)
        if is_current_identity and not self._next_epoch():
            return []
        for state in states:
            self._reset_sequences(state)
            for batch in state.unsettled_batches:
                self._assign_sequence(state, batch)
        for partition in partitions_at_rest:
            del self.pending_restarts[partition]
            self.open_inquiries.pop(partition, None)
        return partitions_at_rest

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the sequences of deleted or idle partitions, unless they have unsettled batches.

        A partition that returns starts from 0 under a higher epoch: under the same epoch a broker
        could take a new batch for a duplicate of an old one with the same sequences. A transactional
        producer keeps them until its epoch changes. What is kept goes on in order: the batches in flight
        come back first, and then one goes alone until the new log has acknowledged it.
        """
        needs_new_epoch = False
        for partition in partitions:
            state = self._partitions.get(partition)
            if state is None:
                continue
            if state.unsettled_batches or self._transactional:
                state.has_other_log = True
            else:
                del self._partitions[partition]
                self.pending_restarts.pop(partition, None)
                self.open_inquiries.pop(partition, None)
                needs_new_epoch = needs_new_epoch or (state.producer_id, state.producer_epoch) == self.identity
        if needs_new_epoch and self.identity[0] >= 0:
            self._next_epoch()

    def _next_epoch(self) -> bool:
        producer_id, producer_epoch = self.identity
        if producer_epoch >= _MAX_EPOCH:
            self._set_identity(-1, -1)
            return False
        self._set_identity(producer_id, producer_epoch + 1)
        return True


def _is_in_log(batch: Batch, producer_epoch: int, last_sequence: int) -> bool:
    """Whether a log that ends at this epoch and sequence holds the batch. Sequences wrap around."""
    if producer_epoch != batch.producer_epoch or last_sequence < 0:
        return False
    return (last_sequence - (batch.base_sequence + batch.record_count - 1)) & _SEQUENCE_MASK < _HALF_SEQUENCE_RANGE
