"""The transaction coordinator of one `__transaction_state` partition. It handles requests, deadlines,
written markers and replayed records.

This module finds the id of a request and guards it against two transitions at a time. The rules live
in `transitions`, the I/O in `runtime`. Invariants: an id changes its state only in `replay`, so that a
coordinator loaded from the log equals the one that wrote it, and a failed append changes nothing
(KAFKA-9666); an id has at most one transition under way; a transaction is complete only when each of
its partitions has its marker. Source: Kafka's `TransactionCoordinator`, `TransactionStateManager` and
`TransactionMarkerChannelManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from tidelog.broker.coordinators.group.memory import GroupMemory, GroupMemoryBudget
from tidelog.broker.coordinators.outcome import Now, Outcome
from tidelog.broker.coordinators.timers import TimerQueue
from tidelog.broker.coordinators.transaction import records, transitions
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.memory import id_size_bytes, partitions_size_bytes
from tidelog.broker.coordinators.transaction.records import TransactionRecord
from tidelog.broker.coordinators.transaction.states import EXPIRABLE, PREPARED, TransactionState
from tidelog.broker.coordinators.transaction.transitions import (
    EPOCH_BUMP_VERSION,
    NO_IDENTITY,
    ProducerIdentity,
    TakeProducerId,
    TopicPartition,
    TransactionMetadata,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

# The bounds of one turn of a check; the rest follows a millisecond later.
ABORTS_PER_TURN = 50
IDS_CHECKED_PER_TURN = 500
OPEN_CHECKED_PER_TURN = 2_000  # open transactions; most are within their timeout
# Deadlines of ids.
DEADLINES_PER_TURN = 50
# Keeps a batch of tombstones below max.message.bytes of the topic.
TOMBSTONE_BYTES_PER_WRITE = 500_000
_TOMBSTONE_BYTES = 100  # without the transactional id
# Where ids nearly fill the memory of a node, those that are unused for the longest go early: a quarter of a partition's
# in one look, none that was used within this time, and at most one look in this interval.
UNUSED_MS_MIN = 3_600_000
EARLY_INTERVAL_MS = 60_000
COMPLETION_RETRY_MS = 100
# A transaction takes no further partition when its record is larger: the record of its end has some bytes more, and
# must fit into a batch of the topic, too. Few partitions always fit.
RECORD_BYTES_MAX = 1_000_000
FEW_PARTITIONS = 1_000
_AT_ONCE_MS = 0
# An add that meets a transition waits for its end for so long after its beginning: as long as clients pause before they
# ask again. A transition that takes longer is no matter of milliseconds, and its requests are refused at once.
WAIT_MS = 20
WAITING_ADDS_MAX = 1_000
WAITING_PARTITIONS_MAX = 100  # of one add

_E = ErrorCode


class TimerKey(NamedTuple):
    kind: str  # "abort", "expire", or with an id "complete" or "wait"
    transactional_id: str = ""


ABORT = TimerKey("abort")
EXPIRE = TimerKey("expire")


class Transition(NamedTuple):
    """The context of a write: the ids whose transitions it stores."""

    transactional_ids: tuple[str, ...]


class MarkersDue(NamedTuple):
    """A message for the node: a prepared transaction needs these markers."""

    transactional_id: str
    producer: ProducerIdentity
    is_commit: bool
    transaction_version: int
    partitions: frozenset[TopicPartition]


class WaitingAdd(NamedTuple):
    """A request to add partitions, which waits for the end of a transition."""

    producer: ProducerIdentity
    partitions: frozenset[TopicPartition]
    client_version: int
    token: int


class TransactionalId:
    """One id. `metadata` is None until the first record is committed."""

    __slots__ = ("is_in_transition", "memory", "metadata", "size_bytes", "unmarked", "wait_until_ms", "waiting")

    def __init__(self, transactional_id: str, memory: GroupMemory) -> None:
        self.size_bytes = id_size_bytes(transactional_id)  # without partitions
        self.metadata: TransactionMetadata | None = None
        self.is_in_transition = False  # a record is being written
        self.unmarked: frozenset[TopicPartition] = frozenset()  # partitions without the marker that is due
        self.memory = memory
        self.waiting: list[WaitingAdd] = []
        self.wait_until_ms = 0  # until then an add waits for the end of the transition

    @property
    def is_busy(self) -> bool:
        """No other transition may begin: one is being written, or markers are."""
        return self.is_in_transition or (self.metadata is not None and self.metadata.state in PREPARED)


class TransactionCoordinator:
    """All calls come from one thread. Each token gets exactly one reply, in this or a later outcome."""

    decode = staticmethod(records.decode)

    def __init__(
        self,
        config: TransactionCoordinatorConfig,
        transaction_version: Callable[[], int],
        take_producer_id: TakeProducerId,
        memory: GroupMemoryBudget | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`transaction_version`: the finalized level. All coordinators of a node share `memory`."""
        self._config = config
        self._transaction_version = transaction_version
        self._take_producer_id = take_producer_id
        self._memory = memory or GroupMemoryBudget(config.max_memory_bytes)
        self._on_close = on_close
        self.ids: dict[str, TransactionalId] = {}
        self._open: dict[str, None] = {}  # ids with an open transaction
        self._to_mark: dict[str, None] = {}  # prepared ids whose markers are not on their way
        self._timers: TimerQueue[TimerKey] = TimerQueue()
        self._ids_to_check: list[str] = []
        self._expiration_ms = config.transactional_id_expiration_ms
        self._next_early_ms = 0
        self._open_to_check: list[str] = []
        self._waiting_count = 0

    def encode(self, record: TransactionRecord) -> tuple[bytes, bytes | None]:
        return records.encode(record, self._transaction_version())

    # -- requests ----------------------------------------------------------------------------------------------------

    def initialize(
        self, transactional_id: str, timeout_ms: int, expected: ProducerIdentity | None, token: int, now: Now
    ) -> Outcome:
        """Replies with a ProducerIdentity."""
        outcome = Outcome(now)
        entry = self.ids.get(transactional_id)
        if entry is not None and entry.is_busy:
            outcome.refuse(token, _E.CONCURRENT_TRANSACTIONS)
            return outcome
        current = entry.metadata if entry is not None else None
        if current is None:
            producer_id = self._take_producer_id()
            if producer_id is None:
                outcome.refuse(token, _E.COORDINATOR_LOAD_IN_PROGRESS)
                return outcome
            current = TransactionMetadata(producer_id, timeout_ms, now.wall_ms)
        decided = transitions.initialize(
            current, timeout_ms, expected, self._transaction_version(), self._take_producer_id, now.wall_ms
        )
        if isinstance(decided, ErrorCode):
            outcome.refuse(token, decided)
        elif decided.state is TransactionState.PREPARE_ABORT:
            # The epoch of the fence is not given to the client: it asks again once the abort is complete.
            outcome.note(f"transactional id {transactional_id}: its transaction is aborted, a new producer has come")
            self._begin(transactional_id, decided, outcome, token, KafkaError(_E.CONCURRENT_TRANSACTIONS))
        else:
            self._begin(transactional_id, decided, outcome, token, decided.identity)
        return outcome

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        partitions: frozenset[TopicPartition],
        client_version: int,
        token: int,
        now: Now,
        waits: bool = True,
    ) -> Outcome:
        """Replies with an ErrorCode. `waits`: for a short transition that is under way."""
        outcome = Outcome(now)
        self._add(transactional_id, WaitingAdd(producer, partitions, client_version, token), waits, outcome)
        return outcome

    def _add(self, transactional_id: str, add: WaitingAdd, waits: bool, outcome: Outcome) -> None:
        producer, partitions, client_version, token = add
        entry = self.ids.get(transactional_id)
        if entry is not None and entry.is_busy:
            # First of all: across an exhausted epoch a producer of version 2 already uses the
            # identity of the transition that is under way (KAFKA-18660).
            if not (waits and self._may_wait(entry, add, outcome.now_ms)):
                outcome.reply(token, _E.CONCURRENT_TRANSACTIONS)
                return
            if not entry.waiting:
                self._timers.set(TimerKey("wait", transactional_id), entry.wait_until_ms)
            entry.waiting.append(add)
            self._waiting_count += 1
            return
        if entry is None or entry.metadata is None:
            outcome.reply(token, _E.INVALID_PRODUCER_ID_MAPPING)
            return
        decided = transitions.add_partitions(entry.metadata, producer, partitions, client_version, outcome.wall_ms)
        if isinstance(decided, ErrorCode):
            outcome.reply(token, decided)
        elif self._is_too_large(transactional_id, decided):
            outcome.reply(token, _E.UNKNOWN_SERVER_ERROR)  # as for a record that the topic refuses
        else:
            self._begin(transactional_id, decided, outcome, token, _E.NONE)

    def _may_wait(self, entry: TransactionalId, add: WaitingAdd, now_ms: int) -> bool:
        return (
            entry.metadata is not None
            and now_ms < entry.wait_until_ms
            and self._waiting_count < WAITING_ADDS_MAX
            and len(add.partitions) <= WAITING_PARTITIONS_MAX
        )

    def _take_waiting(self, transactional_id: str, entry: TransactionalId) -> list[WaitingAdd]:
        waiting, entry.waiting = entry.waiting, []
        self._waiting_count -= len(waiting)
        self._timers.cancel(TimerKey("wait", transactional_id))
        return waiting

    def _serve_waiting(self, transactional_id: str, waits: bool, outcome: Outcome) -> None:
        """The transition is over, or `waits` is False: the adds wait no longer."""
        entry = self.ids.get(transactional_id)
        if entry is not None and entry.waiting:
            for add in self._take_waiting(transactional_id, entry):
                self._add(transactional_id, add, waits, outcome)

    def _is_too_large(self, transactional_id: str, metadata: TransactionMetadata) -> bool:
        if len(metadata.partitions) <= FEW_PARTITIONS:
            return False
        key, value = self.encode(TransactionRecord(transactional_id, metadata))
        return value is not None and len(key) + len(value) > RECORD_BYTES_MAX

    def verify_partitions(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether the partitions are in the producer's open transaction.

        A transition under way is no matter: the partition's leader checks once more when it appends.
        """
        entry = self.ids.get(transactional_id)
        metadata = entry.metadata if entry is not None else None
        error = transitions.verification_error(metadata, producer)
        if metadata is None or error is not _E.NONE:
            return dict.fromkeys(partitions, error)
        return {
            partition: _E.NONE if partition in metadata.partitions else _E.TRANSACTION_ABORTABLE
            for partition in partitions
        }

    def end(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        is_commit: bool,
        client_version: int,
        token: int,
        now: Now,
    ) -> Outcome:
        """Replies with the ProducerIdentity for the next transaction, NO_IDENTITY before version 2."""
        outcome = Outcome(now)
        entry = self.ids.get(transactional_id)
        current = entry.metadata if entry is not None else None
        has_next_epoch = client_version >= EPOCH_BUMP_VERSION
        if entry is not None and entry.is_busy and (has_next_epoch or current is None):
            outcome.refuse(token, _E.CONCURRENT_TRANSACTIONS)
            return outcome
        if entry is None or current is None:
            outcome.refuse(token, _E.INVALID_PRODUCER_ID_MAPPING)
            return outcome
        if has_next_epoch:
            decided = transitions.end_v2(
                current, producer, is_commit, client_version, self._take_producer_id, now.wall_ms
            )
        else:
            decided = transitions.end_v1(current, producer, is_commit, entry.is_busy, now.wall_ms)
        if not isinstance(decided, ErrorCode):
            identity = transitions.identity_after(decided) if has_next_epoch else NO_IDENTITY
            self._begin(transactional_id, decided, outcome, token, identity)
        elif decided is _E.NONE:
            outcome.reply(token, current.identity if has_next_epoch else NO_IDENTITY)
        else:
            outcome.refuse(token, decided)
        return outcome

    def on_marked(
        self, transactional_id: str, producer: ProducerIdentity, partitions: frozenset[TopicPartition], now: Now
    ) -> Outcome:
        """These partitions have the marker of this producer, or exist no more."""
        outcome = Outcome(now)
        entry = self.ids.get(transactional_id)
        metadata = entry.metadata if entry is not None else None
        if entry is None or metadata is None or metadata.state not in PREPARED or metadata.identity != producer:
            return outcome
        entry.unmarked -= partitions
        self._complete_if_marked(transactional_id, entry, outcome)
        return outcome

    # -- writes ------------------------------------------------------------------------------------------------------

    def _begin(
        self,
        transactional_id: str,
        metadata: TransactionMetadata,
        outcome: Outcome,
        token: int | None = None,
        answer: object = None,
        before: tuple[TransactionMetadata, ...] = (),
    ) -> None:
        """Store the next state of an id. The answer leaves when it is committed, a KafkaError if it fails.

        `before`: states that come first, in the same batch.
        """
        entry = self.ids.get(transactional_id)
        growth_bytes = self._growth_bytes(entry, transactional_id, metadata)
        if growth_bytes > 0 and self._memory.is_nearly_full and outcome.now_ms >= self._next_early_ms:
            self._next_early_ms = outcome.now_ms + EARLY_INTERVAL_MS
            self._timers.set(EXPIRE, outcome.now_ms)
        if growth_bytes > 0 and token is not None and not self._memory.has_room_for(growth_bytes):
            outcome.warn("transactions hold too much", "a transaction is refused: those of this node hold too much")
            outcome.refuse(token, _E.COORDINATOR_NOT_AVAILABLE)
            return
        if entry is None:
            entry = self.ids[transactional_id] = TransactionalId(transactional_id, GroupMemory(self._memory))
        if growth_bytes > 0:
            entry.memory.hold(entry.memory.held_bytes + growth_bytes)
        entry.is_in_transition = True
        entry.wait_until_ms = outcome.now_ms + WAIT_MS
        records = [TransactionRecord(transactional_id, metadata)]
        if before:
            records[:0] = [TransactionRecord(transactional_id, each) for each in before]
        context = Transition((transactional_id,))
        if token is None:
            outcome.write(records, context)
        else:
            outcome.reply_when_stored(records, token, answer, context)

    def _growth_bytes(self, entry: TransactionalId | None, transactional_id: str, metadata: TransactionMetadata) -> int:
        """What this state takes beyond what the id holds."""
        if entry is None:
            return partitions_size_bytes(metadata.partitions) + id_size_bytes(transactional_id)
        if not metadata.partitions:
            return entry.size_bytes - entry.memory.held_bytes
        return partitions_size_bytes(metadata.partitions) + entry.size_bytes - entry.memory.held_bytes

    def _complete_if_marked(self, transactional_id: str, entry: TransactionalId, outcome: Outcome) -> None:
        if entry.unmarked or entry.is_in_transition or entry.metadata is None:
            return
        completed = transitions.complete(entry.metadata, outcome.wall_ms)
        if not (entry.waiting and self._complete_and_add(transactional_id, entry, completed, outcome)):
            self._begin(transactional_id, completed, outcome)

    def _complete_and_add(
        self, transactional_id: str, entry: TransactionalId, completed: TransactionMetadata, outcome: Outcome
    ) -> bool:
        """Whether the next transaction begins in the batch of the completion, which saves a round of replication.

        Both are committed, or none.
        """
        producer, partitions, client_version, token = entry.waiting[0]
        begun = transitions.add_partitions(completed, producer, partitions, client_version, outcome.wall_ms)
        if isinstance(begun, ErrorCode) or not self._memory.has_room_for(
            self._growth_bytes(entry, transactional_id, begun)
        ):
            return False  # it is answered when the completion is committed
        _, *others = self._take_waiting(transactional_id, entry)
        self._begin(transactional_id, begun, outcome, token, _E.NONE, (completed,))
        for add in others:
            self._add(transactional_id, add, True, outcome)
        return True

    def _send_markers(self, outcome: Outcome) -> None:
        """Send the markers of all transactions that were prepared since the last call."""
        if not self._to_mark:
            return
        to_mark, self._to_mark = self._to_mark, {}
        for transactional_id in to_mark:
            entry = self.ids[transactional_id]
            metadata = entry.metadata
            assert metadata is not None
            if entry.unmarked:
                outcome.send(
                    MarkersDue(
                        transactional_id, metadata.identity, metadata.is_commit, metadata.client_version,
                        metadata.partitions,
                    )
                )  # fmt: skip
            self._complete_if_marked(transactional_id, entry, outcome)

    def on_committed(self, context: Transition, now: Now) -> Outcome | None:
        if not self._to_mark and not self._waiting_count:
            return None
        outcome = Outcome(now)
        self._send_markers(outcome)
        for transactional_id in context.transactional_ids:
            self._serve_waiting(transactional_id, True, outcome)
        return outcome

    def on_failed(self, context: Transition, error: ErrorCode, in_log: bool, now: Now) -> Outcome:
        """The ids keep their states. A record that may still be committed holds its id until then."""
        outcome = Outcome(now)
        if in_log:
            return outcome
        for transactional_id in context.transactional_ids:
            entry = self.ids.get(transactional_id)
            if entry is None:
                continue
            entry.is_in_transition = False
            if entry.metadata is None:
                self._forget(transactional_id)
                continue
            self._charge(entry, entry.metadata)
            if entry.metadata.state in PREPARED:
                # The client has its answer: the completion must be stored some time.
                self._timers.set(TimerKey("complete", transactional_id), now.steady_ms + COMPLETION_RETRY_MS)
        return outcome

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, offset: int, record: TransactionRecord, producer_id: int = -1) -> None:
        transactional_id, metadata = record
        self._open.pop(transactional_id, None)
        self._to_mark.pop(transactional_id, None)
        if metadata is None:
            if transactional_id in self.ids:
                self._forget(transactional_id)
            return
        entry = self.ids.get(transactional_id)
        if entry is None:
            entry = self.ids[transactional_id] = TransactionalId(transactional_id, GroupMemory(self._memory))
        entry.metadata = metadata
        entry.is_in_transition = False
        entry.unmarked = frozenset()
        self._charge(entry, metadata)
        if metadata.state is TransactionState.ONGOING:
            self._open[transactional_id] = None
        elif metadata.state in PREPARED:
            entry.unmarked = metadata.partitions
            self._to_mark[transactional_id] = None

    def replay_end_transaction(self, producer_id: int, committed: bool, count_max: int) -> int:
        """The topic has no transactions of its own."""
        return 0

    def restore_some(self, now: Now) -> bool:
        return False

    def on_loaded(self, now: Now) -> Outcome:
        """Go on where the former coordinator stopped: prepared transactions get their markers."""
        outcome = Outcome(now)
        self._timers.set(ABORT, now.steady_ms + self._config.abort_timed_out_interval_ms)
        self._timers.set(EXPIRE, now.steady_ms + self._config.remove_expired_interval_ms)
        self._send_markers(outcome)
        return outcome

    def close(self) -> None:
        for entry in self.ids.values():
            entry.memory.release()
        self.ids.clear()
        self._open.clear()
        self._open_to_check.clear()
        self._to_mark.clear()
        self._waiting_count = 0
        self._on_close()

    def _charge(self, entry: TransactionalId, metadata: TransactionMetadata) -> None:
        entry.memory.hold(entry.size_bytes + partitions_size_bytes(metadata.partitions))

    def _forget(self, transactional_id: str) -> None:
        entry = self.ids.pop(transactional_id)
        assert not entry.waiting, transactional_id
        entry.memory.release()

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        # An error between a replay and its `on_committed`, for instance in an answer, must not hold back the markers.
        return _AT_ONCE_MS if self._to_mark else self._timers.next_deadline_ms()

    def on_deadline(self, now: Now) -> Outcome:
        outcome = Outcome(now)
        self._send_markers(outcome)
        for _ in range(DEADLINES_PER_TURN):
            key = self._timers.pop_due(now.steady_ms)
            if key is None:
                break
            if key == ABORT:
                self._abort_timed_out(outcome)
            elif key == EXPIRE:
                self._expire(outcome)
            elif key.kind == "wait":
                self._serve_waiting(key.transactional_id, False, outcome)
            else:
                entry = self.ids.get(key.transactional_id)
                if entry is not None and entry.metadata is not None and entry.metadata.state in PREPARED:
                    self._complete_if_marked(key.transactional_id, entry, outcome)
        return outcome

    def _abort_timed_out(self, outcome: Outcome) -> None:
        """Abort the transactions that have been open for longer than their timeout; a bounded number per turn."""
        if not self._open_to_check:
            self._open_to_check = list(self._open)
        abort_count = 0
        for _ in range(OPEN_CHECKED_PER_TURN):
            if not self._open_to_check or abort_count == ABORTS_PER_TURN:
                break
            abort_count += self._abort_if_timed_out(self._open_to_check.pop(), outcome)
        pause_ms = 1 if self._open_to_check else self._config.abort_timed_out_interval_ms
        self._timers.set(ABORT, outcome.now_ms + pause_ms)

    def _abort_if_timed_out(self, transactional_id: str, outcome: Outcome) -> bool:
        """Whether it was; its abort is being written now."""
        entry = self.ids.get(transactional_id)
        metadata = entry.metadata if entry is not None else None
        if entry is None or metadata is None or transactional_id not in self._open or entry.is_busy:
            return False
        if metadata.start_ms + metadata.timeout_ms >= outcome.wall_ms:
            return False
        decided = transitions.fence_and_abort(
            metadata, self._transaction_version(), self._take_producer_id, outcome.wall_ms
        )
        if isinstance(decided, ErrorCode):
            return False  # the next producer id is being fetched; the next check tries again
        outcome.note(
            f"transactional id {transactional_id}: its transaction is aborted, "
            f"it was open for more than {metadata.timeout_ms} ms"
        )
        self._begin(transactional_id, decided, outcome)
        return True

    def _expire(self, outcome: Outcome) -> None:
        """Delete ids that have not been used for transactional.id.expiration.ms, or for the longest."""
        if not self._ids_to_check:
            self._choose_ids_to_check()
        unused_since_ms = outcome.wall_ms - self._expiration_ms
        expired_ids: list[str] = []
        size_bytes = 0
        for _ in range(IDS_CHECKED_PER_TURN):
            if not self._ids_to_check or size_bytes >= TOMBSTONE_BYTES_PER_WRITE:
                break
            transactional_id = self._ids_to_check.pop()
            entry = self.ids.get(transactional_id)
            if entry is None or entry.is_busy or entry.waiting or entry.metadata is None:
                continue
            if entry.metadata.state in EXPIRABLE and entry.metadata.update_ms <= unused_since_ms:
                entry.is_in_transition = True
                entry.wait_until_ms = outcome.now_ms  # an add that waited would go with the id, without an answer
                expired_ids.append(transactional_id)
                size_bytes += _TOMBSTONE_BYTES + 3 * len(transactional_id)
        if expired_ids:
            is_early = self._expiration_ms < self._config.transactional_id_expiration_ms
            reason = " early: those of this node nearly fill their memory" if is_early else ""
            outcome.note(f"{len(expired_ids)} transactional ids, such as {expired_ids[0]}, expired{reason}")
            tombstones = [TransactionRecord(transactional_id, None) for transactional_id in expired_ids]
            outcome.write(tombstones, Transition(tuple(expired_ids)))
        pause_ms = 1 if self._ids_to_check else self._config.remove_expired_interval_ms
        self._timers.set(EXPIRE, outcome.now_ms + pause_ms)

    def _choose_ids_to_check(self) -> None:
        self._ids_to_check = list(self.ids)
        self._expiration_ms = self._config.transactional_id_expiration_ms
        if self._memory.is_nearly_full:  # a client with ever new ids must not shut out all others for a week
            self._ids_to_check.sort(key=self._last_use_ms)
            del self._ids_to_check[-(-len(self.ids) // 4) :]
            self._expiration_ms = min(self._expiration_ms, UNUSED_MS_MIN)

    def _last_use_ms(self, transactional_id: str) -> int:
        metadata = self.ids[transactional_id].metadata
        return metadata.update_ms if metadata is not None else 0

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> TransactionMetadata | None:
        """The committed state; a prepared transaction shows the partitions that lack its marker."""
        entry = self.ids.get(transactional_id)
        if entry is None or entry.metadata is None:
            return None
        if entry.metadata.state in PREPARED:
            return entry.metadata._replace(partitions=entry.unmarked)
        return entry.metadata

    def transactions(self) -> Iterator[tuple[str, TransactionMetadata]]:
        """All ids with a committed state."""
        for transactional_id, entry in self.ids.items():
            if entry.metadata is not None:
                yield transactional_id, entry.metadata

    def open_start_times_ms(self) -> Iterator[int]:
        """When each open transaction began, by the wall clock."""
        for transactional_id in self._open:
            metadata = self.ids[transactional_id].metadata
            if metadata is not None:
                yield metadata.start_ms
