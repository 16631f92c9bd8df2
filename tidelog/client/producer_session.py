"""Idempotence: which producer id, epoch and sequence a batch carries, and what an error of the broker means for it.

Pure; the rules are KIP-98 and KIP-360 as Java's `TransactionManager` has them for a producer without transactions.
Invariants: a batch keeps its (producer id, epoch, sequence) as long as it may be in the log, so that a resend is a
duplicate and not a second copy; a batch is sent again only when all before it are settled; from the oldest unsettled
batch on at most `WINDOW` are sent, settled or not, which is how many the broker knows for duplicates; after a rest, one
goes alone until it is acknowledged. Sequences start anew, under a higher epoch, only when nothing of the partition is
on the wire and the oldest unsettled batch is known not to be in the log (then none after it can be, as the broker takes
sequences without gaps).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

from tidelog.client.accumulator import ProducerBatch
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode

WINDOW = 5
REST_MS = 60_000.0
"""Far below any `producer.id.expiration.ms`, after which a broker forgets a producer that is silent."""
_LAST_EPOCH = 32767
_SEQUENCE_MASK = 0x7FFFFFFF

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
        "confirmed",
        "gap",
        "next_sequence",
        "producer_epoch",
        "producer_id",
        "settled_up_to",
        "unsettled",
        "window",
    )

    def __init__(self) -> None:
        self.producer_id = -1
        self.producer_epoch = -1
        self.next_sequence = 0
        self.settled_up_to = 0
        """The sequence after the last acknowledged one."""
        self.unsettled: list[Batch] = []
        self.window: deque[int] = deque()
        """The numbers of the batches begun since the oldest unsettled one, it included."""
        self.confirmed = False
        """The broker acknowledged a batch since the last rest. Until then it may know nothing of this producer, and a
        broker that knows nothing takes any sequence: the second batch, too, before a first that it refused."""
        self.active_ms = 0.0
        """When the last batch was begun."""
        self.gap = False
        """A batch was given up: whether its sequence was used is unknown until a later one is acknowledged."""


class ProducerSession:
    """Sequences of an idempotent producer, or with `idempotent=False` only the bound on what is on the wire."""

    def __init__(self, *, idempotent: bool, max_in_flight: int = WINDOW) -> None:
        assert not idempotent or max_in_flight <= WINDOW
        self._idempotent = idempotent
        self._limit = max_in_flight
        self._partitions: dict[TopicPartition, _Sequences] = {}
        self._restarting: dict[TopicPartition, None] = {}
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
        if batch.partition in self._restarting:
            return False
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
        state.window.clear()

    @staticmethod
    def _number(state: _Sequences, batch: Batch) -> None:
        batch.producer_id = state.producer_id
        batch.producer_epoch = state.producer_epoch
        batch.base_sequence = state.next_sequence
        state.window.append(batch.number)
        state.next_sequence = (state.next_sequence + batch.record_count) & _SEQUENCE_MASK

    # -- hearing how it went

    def acknowledged(self, batch: Batch) -> None:
        """The batch is in the log."""
        state = self._partitions[batch.partition]
        state.unsettled.remove(batch)
        if self._idempotent:
            state.settled_up_to = (batch.base_sequence + batch.record_count) & _SEQUENCE_MASK
            state.confirmed = True
            self._after_settling(batch.partition, state)
        elif not state.unsettled:
            del self._partitions[batch.partition]

    def refused(self, batch: Batch, code: ErrorCode) -> Verdict:
        """The broker answered with an error. After FAIL the caller says `abandoned`, after SUCCEED `acknowledged`."""
        if not self._idempotent:
            return Verdict.RETRY if code.retriable else Verdict.FAIL
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return Verdict.SUCCEED
        state = self._partitions[batch.partition]
        if code in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID):
            # Refused for want of a predecessor: with none left, the broker does not know what we know of.
            if state.unsettled[0] is batch:
                self._restarting[batch.partition] = None
            return Verdict.RETRY
        if code is ErrorCode.INVALID_PRODUCER_EPOCH:
            self._restarting[batch.partition] = None
            return Verdict.RETRY
        return Verdict.RETRY if code.retriable else Verdict.FAIL

    def abandoned(self, batch: Batch) -> None:
        """The batch failed for good, refused or expired, perhaps while still on the wire."""
        state = self._partitions.get(batch.partition)
        if state is None or batch not in state.unsettled:
            return
        state.unsettled.remove(batch)
        if self._idempotent:
            state.gap = True
            self._after_settling(batch.partition, state)
        elif not state.unsettled:
            del self._partitions[batch.partition]

    def _after_settling(self, partition: TopicPartition, state: _Sequences) -> None:
        oldest = state.unsettled[0].number if state.unsettled else None
        while state.window and (oldest is None or state.window[0] < oldest):
            state.window.popleft()
        if state.gap and not state.unsettled:
            if state.settled_up_to == state.next_sequence:
                state.gap = False
            else:
                self._restarting[partition] = None

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
