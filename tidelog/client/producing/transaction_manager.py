"""The states of one transactional producer, and the requests that lead from one to the next.

Pure. The rules are those of Java's `TransactionManager` (KIP-98, 360, 447, 890, 1050). The shell
(`transaction_sender`) takes one request at a time from `next_request`, sends it, and hands back the
error code or the lack of an answer. Invariants: after an abortable error nothing but an abort ends
the transaction. EndTxn is the last request of a transaction, sent when each of its batches is
settled. A transaction has one version from its beginning to its end.

Version 1 has one epoch for many transactions: a request that arrives late may act on the next
transaction (KAFKA-17754). So after any request without an answer the epoch is bumped
(InitProducerId) before the next transaction begins. Version 2 has an epoch for each transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.producing.transaction_errors import (
    ProducerFenced,
    TransactionAbortable,
    TransactionAborted,
    TransactionError,
    TransactionFatal,
)
from tidelog.protocol.errors import ErrorCode, KafkaError


class State(Enum):
    """The state of the producer."""

    UNINITIALIZED = "uninitialized"
    INITIALIZING = "initializing"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"
    COMMITTING = "committing"
    ABORTING = "aborting"
    ABORTABLE_ERROR = "abortable error"
    FATAL_ERROR = "fatal error"


_FROM: dict[State, frozenset[State]] = {
    State.INITIALIZING: frozenset((State.UNINITIALIZED, State.READY, State.COMMITTING, State.ABORTING)),
    State.READY: frozenset((State.INITIALIZING, State.COMMITTING, State.ABORTING)),
    State.IN_TRANSACTION: frozenset((State.READY,)),
    State.COMMITTING: frozenset((State.IN_TRANSACTION,)),
    State.ABORTING: frozenset((State.IN_TRANSACTION, State.COMMITTING, State.ABORTABLE_ERROR)),
    State.ABORTABLE_ERROR: frozenset((State.IN_TRANSACTION, State.COMMITTING)),
    State.FATAL_ERROR: frozenset(State) - {State.FATAL_ERROR},
}
"""The states from which a state may be reached."""

FENCED_ERRORS = frozenset((ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED))
"""Answers of a coordinator to a producer whose epoch is no longer the current one."""
LOST_ID_ERRORS = frozenset((ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_ID_MAPPING))
"""The coordinator has forgotten the producer id, so that it would refuse EndTxn too."""
_ABORTABLE_ERRORS = frozenset(
    (
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_ID_NOT_FOUND,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.INVALID_COMMIT_OFFSET_SIZE,
        ErrorCode.INVALID_GROUP_ID,
        ErrorCode.OFFSET_METADATA_TOO_LARGE,
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.UNKNOWN_MEMBER_ID,
    )
)
_FATAL_BATCH_ERRORS = frozenset(
    (
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
    )
)
"""INVALID_PRODUCER_EPOCH from a partition's leader is not one of them: EndTxn tells whether the producer is fenced."""


class InitProducerId(NamedTuple):
    """Ask for an identity; with the present one, for its next epoch."""

    producer_id: int
    producer_epoch: int


class AddPartitions(NamedTuple):
    """Version 1: add partitions before their first batch."""

    partitions: frozenset[TopicPartition]


class AddOffsets(NamedTuple):
    """Version 1: add a group's committed offsets before their first commit."""

    group_id: str


class OffsetsToCommit:
    """One call of `send_offsets_to_transaction`; `is_done` when the group coordinator has all of them."""

    __slots__ = ("group", "is_done", "offsets")

    def __init__(self, group: ConsumerGroupMetadata, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        self.group = group
        self.offsets = offsets
        self.is_done = False


class CommitOffsets(NamedTuple):
    """Commit offsets as a part of the transaction."""

    commit: OffsetsToCommit


class EndTxn(NamedTuple):
    """End the transaction."""

    committed: bool


Request = InitProducerId | AddPartitions | AddOffsets | CommitOffsets | EndTxn


class TransactionManager:
    """The transactions of one producer. `number` counts them; every change raises `revision`."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.state = State.UNINITIALIZED
        self.revision = 0
        self.number = 0
        """The number of the open transaction, or of the last one."""
        self.ended_number = 0
        """The last transaction whose end was acknowledged."""
        self.ended_by_commit = False
        self.uses_version_2 = False
        """Whether the open transaction is one of version 2."""
        self.producer_id = -1
        self.producer_epoch = -1
        self._error: TransactionError | None = None
        self._needs_new_epoch = False
        self._skips_end_txn = False
        self._end_txn_was_sent = False
        self._commit_may_be_done = False
        """A commit was sent and not answered."""
        self._is_open = False
        """The coordinator has acknowledged a part of this transaction."""
        self._may_be_open = False
        """A request was sent that opens the transaction at the coordinator."""
        self._new_partitions: set[TopicPartition] = set()
        self._partitions: set[TopicPartition] = set()
        self._groups: set[str] = set()
        self._offset_commits: deque[OffsetsToCommit] = deque()

    # -- state

    @property
    def identity(self) -> tuple[int, int]:
        return self.producer_id, self.producer_epoch

    @property
    def has_transaction(self) -> bool:
        """Whether a transaction is open, or ends at present."""
        return self.state in (State.IN_TRANSACTION, State.COMMITTING, State.ABORTING, State.ABORTABLE_ERROR)

    @property
    def may_be_open(self) -> bool:
        """Whether the coordinator may know of the open transaction."""
        return self._may_be_open

    @property
    def has_pending_offsets(self) -> bool:
        """Whether an offset commit of the open transaction is not acknowledged."""
        return bool(self._offset_commits)

    @property
    def error(self) -> TransactionError:
        """A new exception for the present error state."""
        error = self._error
        assert error is not None, "only in an error state"
        return type(error)(error.code, error.message)

    def raise_error(self) -> None:
        """Raise in an error state."""
        if self.state in (State.ABORTABLE_ERROR, State.FATAL_ERROR):
            raise self.error

    def _move(self, state: State) -> None:
        assert self.state in _FROM[state], f"no way from {self.state.name} to {state.name}"
        self.state = state
        self.revision += 1

    # -- what the program does

    def initialize(self) -> None:
        """Ask for the first identity."""
        if self.state is State.UNINITIALIZED:
            self._move(State.INITIALIZING)

    def begin(self, uses_version_2: bool) -> bool:
        """Begin a transaction, in READY. False when the epoch must be bumped before.

        The epoch is bumped when the cluster's version has changed, so that the two versions never
        share one.
        """
        assert self.state is State.READY
        if self.number and uses_version_2 != self.uses_version_2:
            self.uses_version_2 = uses_version_2
            self._move(State.INITIALIZING)
            return False
        self.uses_version_2 = uses_version_2
        self.number += 1
        self._move(State.IN_TRANSACTION)
        return True

    def check_open(self) -> int:
        """The number of the open transaction. Raises when records cannot be added to it."""
        if self.state is not State.IN_TRANSACTION:
            self.raise_error()
            if self.state is State.ABORTING:
                raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the transaction is being aborted")
            raise RuntimeError(
                "this producer is transactional: send needs an open transaction (`async with producer.transaction():`)"
            )
        return self.number

    def check_still_open(self, number: int) -> None:
        """Raise when the transaction with this number has ended."""
        if self.ended_number >= number:
            text = "the transaction of this record ended before it was sent"
            raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, text)
        self.check_open()

    @property
    def open_number(self) -> int:
        """The number of the open transaction, 0 without one."""
        return self.number if self.state is State.IN_TRANSACTION else 0

    def add_partition(self, partition: TopicPartition) -> None:
        """Make a partition a part of the open transaction. Raises without one."""
        if self.state is not State.IN_TRANSACTION:
            self.check_open()
        if not self.uses_version_2 and partition not in self._partitions and partition not in self._new_partitions:
            self._new_partitions.add(partition)
            self.revision += 1

    def add_offsets(
        self, group: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> OffsetsToCommit:
        """Queue a group's offsets."""
        self.check_open()
        commit = OffsetsToCommit(group, dict(offsets))
        self._offset_commits.append(commit)
        self.revision += 1
        return commit

    def commit(self) -> None:
        """Begin the end of the transaction. Raises in an error state and without a transaction."""
        self.raise_error()
        if self.state is State.COMMITTING:
            return
        if self.state is not State.IN_TRANSACTION:
            raise RuntimeError(f"there is no transaction to commit, the producer is {self.state.value}")
        self._move(State.COMMITTING)

    @property
    def may_abort(self) -> bool:
        """Whether the transaction can still be aborted: no commit was sent to the coordinator."""
        return (
            self.has_transaction
            and self.state is not State.ABORTING
            and not (self.state is State.COMMITTING and self._end_txn_was_sent)
        )

    def abort(self) -> None:
        """Begin an abort.

        Raises TransactionFatal; RuntimeError without a transaction, or after a commit was sent.
        """
        if self.state is State.FATAL_ERROR:
            raise self.error
        if self.state is State.ABORTING:
            return
        if not self.may_abort:
            if self.state is State.COMMITTING:
                raise RuntimeError("the commit was sent already; repeat commit_transaction to learn its outcome")
            raise RuntimeError(f"there is no transaction to abort, the producer is {self.state.value}")
        self._new_partitions.clear()
        self._offset_commits.clear()
        self._end_txn_was_sent = False
        self._move(State.ABORTING)

    # -- batches

    def may_send(self, partition: TopicPartition, *, is_resend: bool) -> bool:
        """Whether a batch may be sent. A batch with a sequence is sent until it is settled."""
        if self.state is State.FATAL_ERROR:
            return False
        if is_resend:
            return True
        if self.state not in (State.IN_TRANSACTION, State.COMMITTING):
            return False
        return self.uses_version_2 or partition in self._partitions

    def note_batch_sent(self) -> None:
        """Version 2: a batch opens the transaction."""
        self._may_be_open = True

    def handle_batch_failure(self, error: KafkaError, *, had_sequence: bool) -> None:
        """A record of the transaction failed for good, by an answer or by a timeout."""
        if not self.has_transaction:
            return
        if had_sequence:
            # The next sequence of the partition is not known.
            self._needs_new_epoch = True
        if error.code in _FATAL_BATCH_ERRORS:
            self.fail(error.code, str(error))
        else:
            self.handle_problem(error.code, f"a record was not delivered: {error}")

    def handle_problem(self, code: ErrorCode, message: str) -> None:
        """The open transaction can only be aborted from here on, unless its commit was sent already."""
        if not self._end_txn_was_sent:
            self._make_abortable(code, message)

    def _make_abortable(self, code: ErrorCode, message: str) -> None:
        if self.state in (State.IN_TRANSACTION, State.COMMITTING):
            self._error = TransactionAbortable(code, message)
            self._offset_commits.clear()
            self._move(State.ABORTABLE_ERROR)

    def fail(self, code: ErrorCode, message: str) -> None:
        """The end of this producer."""
        if self.state is State.FATAL_ERROR:
            return
        if code in FENCED_ERRORS:
            text = (
                f"transactional id {self.transactional_id!r}: another producer with this id has begun, "
                f"or the transaction outlived transaction_timeout_ms ({message})"
            )
            self._error = ProducerFenced(ErrorCode.PRODUCER_FENCED, text)
        else:
            if code is ErrorCode.INVALID_TXN_STATE:
                # Version 2 answers so after an abort by the coordinator.
                message += "; the coordinator may have aborted the transaction after transaction_timeout_ms"
            self._error = TransactionFatal(code, f"transactional id {self.transactional_id!r}: {message}")
        self._move(State.FATAL_ERROR)

    # -- requests

    def next_request(self, has_incomplete_batches: bool) -> Request | None:
        """The request to send now. The caller hands its result to one of the `handle_` methods before the next."""
        if self.state is State.INITIALIZING:
            return InitProducerId(self.producer_id, self.producer_epoch)
        if self.state in (State.IN_TRANSACTION, State.COMMITTING):
            if self._new_partitions:
                return AddPartitions(frozenset(self._new_partitions))
            if self._offset_commits:
                commit = self._offset_commits[0]
                if self.uses_version_2 or commit.group.group_id in self._groups:
                    return CommitOffsets(commit)
                return AddOffsets(commit.group.group_id)
        if self.state not in (State.COMMITTING, State.ABORTING) or has_incomplete_batches:
            return None
        if self._may_be_open and not self._skips_end_txn:
            return EndTxn(self.state is State.COMMITTING)
        self._complete()
        return self.next_request(False)

    def confirm_sending(self, request: Request) -> bool:
        """The request is about to be sent. False when the state has changed since, so that it must not be."""
        if isinstance(request, InitProducerId):
            return self.state is State.INITIALIZING
        if isinstance(request, EndTxn):
            if self.state is not (State.COMMITTING if request.committed else State.ABORTING):
                return False
            self._end_txn_was_sent = True
            return True
        if self.state not in (State.IN_TRANSACTION, State.COMMITTING):
            return False
        self._may_be_open = True
        return True

    def handle_unanswered(self, request: Request) -> None:
        """The request may arrive yet, or its answer was lost."""
        if not self.uses_version_2 and not isinstance(request, InitProducerId):
            self._needs_new_epoch = True
        if isinstance(request, EndTxn) and request.committed:
            self._commit_may_be_done = True

    def handle_identity(self, producer_id: int, producer_epoch: int) -> None:
        """InitProducerId succeeded."""
        self._set_identity(producer_id, producer_epoch)
        if self.state is State.INITIALIZING:
            self._move(State.READY)

    def handle_partitions_added(self, request: AddPartitions) -> None:
        """AddPartitionsToTxn succeeded, perhaps after the transaction failed."""
        self._is_open = True
        self._new_partitions -= request.partitions
        self._partitions |= request.partitions
        self.revision += 1

    def handle_group_added(self, request: AddOffsets) -> None:
        """AddOffsetsToTxn succeeded."""
        self._is_open = True
        self._groups.add(request.group_id)
        self.revision += 1

    def handle_offsets_committed(self, request: CommitOffsets) -> None:
        """TxnOffsetCommit succeeded for all partitions."""
        self._is_open = True
        request.commit.is_done = True
        if self._offset_commits and self._offset_commits[0] is request.commit:
            self._offset_commits.popleft()
        self.revision += 1

    def handle_ended(self, request: EndTxn, producer_id: int, producer_epoch: int) -> None:
        """EndTxn succeeded; version 2 brings the identity of the next transaction, version 1 has -1."""
        if self.uses_version_2:
            if producer_id >= 0:
                self._set_identity(producer_id, producer_epoch)
            else:
                self._needs_new_epoch = True
        if self.state in (State.COMMITTING, State.ABORTING):
            assert request.committed is (self.state is State.COMMITTING)
            self._complete()

    def handle_refusal(self, request: Request, code: ErrorCode, message: str) -> None:
        """An answer with an error that is not retriable."""
        if isinstance(request, InitProducerId):
            self.fail(code, f"no producer id: {message}")
        elif code in FENCED_ERRORS:
            self.fail(code, message)
        elif self._commit_may_be_done:
            # An abort would be reported for a transaction that may be committed.
            self.fail(code, f"{message}, and an earlier attempt of the commit may have succeeded")
        elif code in LOST_ID_ERRORS:
            self._needs_new_epoch = True
            self._skips_end_txn = True
            self._make_abortable(code, message)
        elif code is ErrorCode.INVALID_TXN_STATE and self.state is State.ABORTING and not self._is_open:
            # The request that would have opened the transaction did not arrive.
            self._complete()
        elif isinstance(request, EndTxn):
            self._handle_refused_end(code, message)
        elif code in _ABORTABLE_ERRORS or (isinstance(request, AddPartitions) and code not in _FATAL_ANSWERS):
            self._make_abortable(code, message)
        else:
            self.fail(code, message)

    def _handle_refused_end(self, code: ErrorCode, message: str) -> None:
        """Fail for good at a code that is not one of EndTxn.

        The transaction may have ended, so the program is not offered to abort it.
        """
        if self.state is State.ABORTING:
            self.fail(code, f"the transaction could not be aborted: {message}")
        elif code is ErrorCode.TRANSACTION_ABORTABLE:
            self._make_abortable(code, message)
        else:
            self.fail(code, message)

    # -- ends

    def _set_identity(self, producer_id: int, producer_epoch: int) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self._needs_new_epoch = False
        self.revision += 1

    def _complete(self) -> None:
        """The transaction has ended. The next one may need a new epoch."""
        self.ended_number = self.number
        self.ended_by_commit = self.state is State.COMMITTING
        self._skips_end_txn = self._end_txn_was_sent = self._commit_may_be_done = False
        self._is_open = self._may_be_open = False
        self._new_partitions.clear()
        self._partitions.clear()
        self._groups.clear()
        self._offset_commits.clear()
        self._error = None
        self._move(State.INITIALIZING if self._needs_new_epoch else State.READY)


_FATAL_ANSWERS = frozenset(
    (
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    )
)
"""Answers to AddPartitionsToTxn that concern more than a partition."""
