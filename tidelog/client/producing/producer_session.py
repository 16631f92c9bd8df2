"""Idempotence: which producer id, epoch and sequence a batch carries, and what an error of the broker means for it.

Pure; the rules are KIP-98 and KIP-360 as Java's `TransactionManager` has them for a producer without transactions.
Invariants: a batch keeps its (producer id, epoch, sequence) as long as it may be in the log, so that a resend is a
duplicate and not a second copy; a batch is sent again only when all before it are settled; from the oldest unsettled
batch on at most `WINDOW` are sent, settled or not, which is how many the broker knows for duplicates; after a rest, one
goes alone until it is acknowledged. Sequences start anew, under a higher epoch, only when nothing of the partition is
on the wire and the oldest unsettled batch is known not to be in the log (then none after it can be, as the broker takes
sequences without gaps).

A refusal as out of sequence does not say that a batch is missing: a broker that was killed remembers only the last
batch of each producer, and refuses those before it. While the oldest batch is in doubt the partition's leader is asked
how far its log reaches (DescribeProducers, KIP-664): `inquiries`, then `learned` or `unanswerable`. The leader's log is
not yet the committed log. So the last batch that is there, which every broker recognises, is sent again, and its
acknowledgement is that of those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from tidelog.client.model import TopicPartition
from tidelog.client.producing.accumulator import ProducerBatch
from tidelog.protocol.errors import ErrorCode

WINDOW = 5
REST_MS = 60_000.0
"""Far below any `producer.id.expiration.ms`, after which a broker forgets a producer that is silent."""
_LAST_EPOCH = 32767
_SEQUENCE_MASK = 0x7FFFFFFF

_HALF_OF_SEQUENCES = 2**30
_NOT_APPENDED = frozenset(
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
"""Answers that a broker gives before it appends. NOT_LEADER_OR_FOLLOWER is not one of them: a leader that is deposed
while a batch waits for its replicas answers so, and the batch may survive."""

Batch = ProducerBatch[Any]


class Verdict(Enum):
    """What to do with a batch the broker answered with an error."""

    RETRY = "retry"
    SUCCEED = "succeed"
    FAIL = "fail"


class _Sequences:
    """One partition: its identity, its next sequence, and the batches that carry one and are not settled, in order."""

    __slots__ = (
        "active_ms",
        "checked_by",
        "confirmed",
        "gap",
        "next_sequence",
        "producer_epoch",
        "producer_id",
        "settled_up_to",
        "unsettled",
        "window",
        "witness",
    )

    def __init__(self) -> None:
        self.producer_id = -1
        self.producer_epoch = -1
        self.next_sequence = 0
        self.settled_up_to = 0
        """The sequence after the last acknowledged one."""
        self.unsettled: list[Batch] = []
        self.window: deque[tuple[int, int]] = deque()
        """The places of the batches begun since the oldest unsettled one, it included."""
        self.confirmed = False
        """The broker acknowledged a batch since the last rest. Until then it may know nothing of this producer, and a
        broker that knows nothing takes any sequence: the second batch, too, before a first that it refused."""
        self.active_ms = 0.0
        """When the last batch was begun."""
        self.gap = False
        """A batch was given up: whether its sequence was used is unknown until a later one is acknowledged."""
        self.checked_by = -1
        """The node whose log was found not to hold the oldest unsettled batch; -1 after an attempt that is in doubt."""
        self.witness: Batch | None = None
        """The last batch that the leader's log holds. It goes first, alone, and stands for those before it."""


class ProducerSession:
    """Sequences of an idempotent producer, or with `idempotent=False` only the bound on what is on the wire."""

    def __init__(self, *, idempotent: bool, max_in_flight: int = WINDOW) -> None:
        assert not idempotent or max_in_flight <= WINDOW
        self._idempotent = idempotent
        self._limit = max_in_flight
        self._partitions: dict[TopicPartition, _Sequences] = {}
        self._restarting: dict[TopicPartition, None] = {}
        self._inquiries: dict[TopicPartition, int] = {}
        self._next_inquiry = 0
        self._producer_id = -1
        self._producer_epoch = -1
        self.epoch_bumps = 0

    # -- identity

    @property
    def needs_identity(self) -> bool:
        """InitProducerId must be asked before anything is sent."""
        return self._idempotent and self._producer_id < 0

    @property
    def identity(self) -> tuple[int, int]:
        return self._producer_id, self._producer_epoch

    def adopt_identity(self, producer_id: int, producer_epoch: int) -> None:
        """The coordinator's answer. Partitions change over to it as each of them comes to rest."""
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch

    # -- sending

    def may_send(self, batch: Batch) -> bool:
        """Whether the head of its partition's queue may go onto the wire now."""
        if self.needs_identity:
            return False
        state = self._partitions.get(batch.partition)
        if state is None:
            return True
        if not self._idempotent:
            return sum(each.on_wire for each in state.unsettled) < self._limit
        if batch.partition in self._restarting or batch.partition in self._inquiries:
            return False
        if state.witness is not None:
            return batch is state.witness
        if batch.base_sequence >= 0:
            return state.unsettled[0] is batch
        if state.gap or (state.unsettled and not state.confirmed):
            return False
        return len(state.window) < self._limit

    def begin(self, batch: Batch, now_ms: float) -> None:
        """The batch goes onto the wire: it gets its identity and sequence unless it has them from before."""
        assert not self.needs_identity
        state = self._partitions.get(batch.partition)
        if state is None:
            state = self._partitions[batch.partition] = _Sequences()
        if not self._idempotent:
            if batch not in state.unsettled:
                state.unsettled.append(batch)
            return
        if batch.base_sequence >= 0:
            return
        if not state.unsettled:
            if (state.producer_id, state.producer_epoch) != self.identity:
                self._start_anew(state)
            state.confirmed = state.confirmed and now_ms - state.active_ms < REST_MS
        state.active_ms = now_ms
        state.unsettled.append(batch)
        self._number(state, batch)

    def _start_anew(self, state: _Sequences) -> None:
        state.producer_id, state.producer_epoch = self.identity
        state.next_sequence = state.settled_up_to = 0
        state.gap = state.confirmed = False
        state.checked_by, state.witness = -1, None
        state.window.clear()

    @staticmethod
    def _number(state: _Sequences, batch: Batch) -> None:
        batch.producer_id = state.producer_id
        batch.producer_epoch = state.producer_epoch
        batch.base_sequence = state.next_sequence
        batch.in_doubt = False
        state.window.append(batch.order)
        state.next_sequence = (state.next_sequence + batch.record_count) & _SEQUENCE_MASK

    # -- hearing how it went

    def acknowledged(self, batch: Batch) -> None:
        """The batch is in the log. Those that it stands for (`vouched_for`) are acknowledged before it."""
        state = self._partitions[batch.partition]
        state.unsettled.remove(batch)
        if self._idempotent:
            if batch is state.witness:
                state.witness = None
            state.settled_up_to = (batch.base_sequence + batch.record_count) & _SEQUENCE_MASK
            state.confirmed = True
            self._after_settling(batch.partition, state)
        elif not state.unsettled:
            del self._partitions[batch.partition]

    def vouched_for(self, batch: Batch) -> list[Batch]:
        """The batches whose acknowledgement is that of this one: those before it, when it was sent as their witness."""
        state = self._partitions[batch.partition]
        return state.unsettled[: state.unsettled.index(batch)] if batch is state.witness else []

    def refused(self, batch: Batch, code: ErrorCode, node_id: int) -> Verdict:
        """That node answered with an error, or with nothing (NETWORK_EXCEPTION, REQUEST_TIMED_OUT).

        After FAIL the caller says `abandoned`, after SUCCEED `acknowledged`.
        """
        if not self._idempotent:
            return Verdict.RETRY if code.retriable else Verdict.FAIL
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return Verdict.SUCCEED
        state = self._partitions[batch.partition]
        state.witness = None
        if code not in _NOT_APPENDED:
            batch.in_doubt = True
            state.checked_by = -1
        if code in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID):
            # Refused for want of a predecessor: with none left, the broker does not know what we know of.
            if state.unsettled[0] is batch:
                self._renumber_or_ask(state, batch.partition, node_id)
            return Verdict.RETRY
        if code is ErrorCode.INVALID_PRODUCER_EPOCH:
            self._renumber_or_ask(state, batch.partition, node_id)
            return Verdict.RETRY
        return Verdict.RETRY if code.retriable else Verdict.FAIL

    def _renumber_or_ask(self, state: _Sequences, partition: TopicPartition, node_id: int) -> None:
        if not state.unsettled[0].in_doubt or state.checked_by == node_id:
            self._restarting[partition] = None
        elif partition not in self._inquiries:
            self._inquiries[partition] = self._next_inquiry
            self._next_inquiry += 1

    def divided(self, batch: Batch, parts: Sequence[Batch]) -> None:
        """The batch is sent as these from now on. Its sequences are theirs, so that those after it stay in sequence."""
        state = self._partitions[batch.partition]
        place = state.unsettled.index(batch)
        state.unsettled[place : place + 1] = parts
        if not self._idempotent:
            return
        place = state.window.index(batch.order)
        del state.window[place]
        sequence = batch.base_sequence
        for index, part in enumerate(parts):
            part.producer_id, part.producer_epoch, part.base_sequence = (
                batch.producer_id,
                batch.producer_epoch,
                sequence,
            )
            sequence = (sequence + part.record_count) & _SEQUENCE_MASK
            state.window.insert(place + index, part.order)

    def abandoned(self, batch: Batch) -> None:
        """The batch failed for good, refused or expired, perhaps while still on the wire."""
        state = self._partitions.get(batch.partition)
        if state is None or batch not in state.unsettled:
            return
        state.unsettled.remove(batch)
        if self._idempotent:
            state.gap = True
            if batch is state.witness:
                state.witness = None
            self._after_settling(batch.partition, state)
        elif not state.unsettled:
            del self._partitions[batch.partition]

    def _after_settling(self, partition: TopicPartition, state: _Sequences) -> None:
        oldest = state.unsettled[0].order if state.unsettled else None
        while state.window and (oldest is None or state.window[0] < oldest):
            state.window.popleft()
        if not state.unsettled:
            self._inquiries.pop(partition, None)
        if state.gap and not state.unsettled:
            if state.settled_up_to == state.next_sequence:
                state.gap = False
            else:
                self._restarting[partition] = None

    # -- asking the log

    def inquiries(self) -> list[tuple[TopicPartition, int]]:
        """Partitions whose leader must be asked, with nothing of theirs on the wire, each with its inquiry's number."""
        return [
            (partition, number)
            for partition, number in self._inquiries.items()
            if not any(batch.on_wire for batch in self._partitions[partition].unsettled)
        ]

    def is_open(self, partition: TopicPartition, inquiry: int) -> bool:
        """Whether the answer to this inquiry is still of interest."""
        return self._inquiries.get(partition) == inquiry

    def producer_id_of(self, partition: TopicPartition) -> int:
        """The producer id under which the partition's unsettled batches were sent."""
        return self._partitions[partition].producer_id

    def knows_epoch(self, partition: TopicPartition, producer_epoch: int) -> bool:
        """Whether an epoch found in a log is ours. A later one is not: the log says nothing of our batches then."""
        return producer_epoch <= self._partitions[partition].producer_epoch

    def learned(
        self, partition: TopicPartition, inquiry: int, node_id: int, producer_epoch: int, last_sequence: int
    ) -> Batch | None:
        """The last epoch and sequence of this producer in a node's log; -1 and -1 when it knows none.

        Returns the batch to send next, before older ones; None when all go again in order. Those that are not in the
        log keep their sequences for one more try: a late request that still arrives would make it a duplicate. When
        the same node, which is the leader then, refuses them again, they start anew.
        """
        if not self.is_open(partition, inquiry):
            return None
        del self._inquiries[partition]
        state = self._partitions[partition]
        present = [batch for batch in state.unsettled if _reaches(batch, producer_epoch, last_sequence)]
        if present:
            state.witness = present[-1]
        else:
            state.checked_by = node_id
        return state.witness

    def unanswerable(self, partition: TopicPartition, inquiry: int) -> list[Batch]:
        """The log cannot be asked. Returns the batches that may be in it or not: the caller fails them."""
        if not self.is_open(partition, inquiry):
            return []
        del self._inquiries[partition]
        return [batch for batch in self._partitions[partition].unsettled if batch.in_doubt]

    # -- starting anew

    def settle(self) -> list[TopicPartition]:
        """Give every partition that must start anew, and has nothing on the wire, sequences from 0 under a new epoch.

        Returns those partitions. At the last epoch the identity is given up: `needs_identity` turns true, and the
        partitions wait for the next call after `adopt_identity`.
        """
        due = [
            partition
            for partition in self._restarting
            if not any(batch.on_wire for batch in self._partitions[partition].unsettled)
        ]
        if not due or self.needs_identity:
            return []
        states = [self._partitions[partition] for partition in due]
        current = any((state.producer_id, state.producer_epoch) == self.identity for state in states)
        if current and not self._next_epoch():
            return []
        for state in states:
            self._start_anew(state)
            for batch in state.unsettled:
                self._number(state, batch)
        for partition in due:
            del self._restarting[partition]
            self._inquiries.pop(partition, None)
        return due

    @property
    def restart_pending(self) -> bool:
        """Some partition waits for `settle`."""
        return bool(self._restarting)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the sequences of partitions that are gone or idle; those with something unsettled stay.

        Should one of them come back, it starts from 0 under a higher epoch: under the same one, a new batch could be
        taken for a duplicate of an old one with the same sequences.
        """
        bump = False
        for partition in partitions:
            state = self._partitions.get(partition)
            if state is not None and not state.unsettled:
                del self._partitions[partition]
                self._restarting.pop(partition, None)
                self._inquiries.pop(partition, None)
                bump = bump or (state.producer_id, state.producer_epoch) == self.identity
        if bump and self._producer_id >= 0:
            self._next_epoch()

    def _next_epoch(self) -> bool:
        if self._producer_epoch >= _LAST_EPOCH:
            self._producer_id = self._producer_epoch = -1
            return False
        self._producer_epoch += 1
        self.epoch_bumps += 1
        return True


def _reaches(batch: Batch, producer_epoch: int, last_sequence: int) -> bool:
    """Whether a log that ends at this epoch and sequence holds the batch. Sequences go round."""
    if producer_epoch != batch.producer_epoch or last_sequence < 0:
        return False
    return (last_sequence - (batch.base_sequence + batch.record_count - 1)) & _SEQUENCE_MASK < _HALF_OF_SEQUENCES
