"""The rules of one transactional id: what a request makes of its state, or why it is refused. Pure.

A function takes the committed state and returns the next state, or an ErrorCode. The coordinator
stores the next state, and adopts it when it is committed. Callers check first that no transition is
under way. Invariants: for one producer id the epoch never goes down; a producer id whose epoch is
exhausted is replaced before its epoch overflows. Source: Kafka's `TransactionMetadata` and
`TransactionCoordinator`; KIP-98, KIP-360, KIP-890.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.broker.coordinators.transaction.states import (
    COMPLETED,
    PREPARED,
    VALID_PREVIOUS_STATES,
    TransactionState,
)
from tidelog.protocol.errors import ErrorCode

TopicPartition = tuple[str, int]

NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
EPOCH_MAX = 32_767
# A client never gets EPOCH_MAX, so that the coordinator can always fence the producer.
EXHAUSTED_EPOCH = EPOCH_MAX - 1
EPOCH_BUMP_VERSION = 2  # from this transaction version on each transaction has an epoch of its own

_S, _E = TransactionState, ErrorCode


class ProducerIdentity(NamedTuple):
    producer_id: int
    epoch: int


NO_IDENTITY = ProducerIdentity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class TransactionMetadata(NamedTuple):
    """The state of one transactional id, as its record has it.

    `last_producer_epoch` is not stored, as in Kafka: after a change of the coordinator it is -1.
    """

    producer_id: int
    timeout_ms: int
    update_ms: int
    state: TransactionState = TransactionState.EMPTY
    producer_epoch: int = NO_PRODUCER_EPOCH
    last_producer_epoch: int = NO_PRODUCER_EPOCH
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = -1
    client_version: int = 0  # the transaction version of the client

    @property
    def identity(self) -> ProducerIdentity:
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def is_commit(self) -> bool:
        return self.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)


Decision = TransactionMetadata | ErrorCode
# The next unused producer id; None until the controller has allocated more.
TakeProducerId = Callable[[], int | None]


def is_exhausted(epoch: int) -> bool:
    return epoch >= EXHAUSTED_EPOCH


def _check_transition(current: TransactionMetadata, state: TransactionState) -> None:
    assert current.state in VALID_PREVIOUS_STATES[state], f"{current.state.name} -> {state.name}"


def _changed(
    current: TransactionMetadata, state: TransactionState, update_ms: int, **changes: object
) -> TransactionMetadata:
    _check_transition(current, state)
    return current._replace(
        state=state,
        update_ms=update_ms,
        previous_producer_id=current.producer_id,
        **changes,  # type: ignore[arg-type]
    )


# -- InitProducerId ----------------------------------------------------------------------------------------------------


def initialize(
    current: TransactionMetadata,
    timeout_ms: int,
    expected: ProducerIdentity | None,
    server_version: int,
    take_producer_id: TakeProducerId,
    wall_ms: int,
) -> Decision:
    """A new identity for the id's producer. `expected`: the identity that the producer has (KIP-360).

    The result is in state PREPARE_ABORT where a transaction is open: it must end first, and the
    client asks again.
    """
    if expected is not None and not _is_own(current, expected):
        return _E.PRODUCER_FENCED
    if current.state in PREPARED:
        return _E.CONCURRENT_TRANSACTIONS
    if current.state is _S.ONGOING:
        return fence_and_abort(current, server_version, take_producer_id, wall_ms)
    fresh = {"timeout_ms": timeout_ms, "partitions": frozenset(), "start_ms": -1, "next_producer_id": NO_PRODUCER_ID}
    epoch = current.producer_epoch
    if is_exhausted(epoch) and (expected is None or expected.epoch == epoch):
        producer_id = take_producer_id()
        if producer_id is None:
            return _E.COORDINATOR_LOAD_IN_PROGRESS
        last_epoch = NO_PRODUCER_EPOCH if expected is None else epoch
        return _changed(
            current, _S.EMPTY, wall_ms, producer_id=producer_id, producer_epoch=0, last_producer_epoch=last_epoch,
            **fresh,
        )  # fmt: skip
    if expected is None:
        last_epoch, epoch = NO_PRODUCER_EPOCH, epoch + 1
    elif expected.epoch == epoch or epoch == NO_PRODUCER_EPOCH:
        # The producer goes on after an error, and no other has come since.
        last_epoch, epoch = epoch, epoch + 1
    elif expected.epoch == current.last_producer_epoch:
        last_epoch = current.last_producer_epoch  # the answer to the same request was lost
    else:
        return _E.PRODUCER_FENCED
    return _changed(current, _S.EMPTY, wall_ms, producer_epoch=epoch, last_producer_epoch=last_epoch, **fresh)


def _is_own(current: TransactionMetadata, expected: ProducerIdentity) -> bool:
    """Whether the identity may be that of the id's producer; its epoch is checked later.

    The previous producer id with an exhausted epoch is a producer whose answer with the new producer
    id was lost.
    """
    return (
        current.producer_epoch == NO_PRODUCER_EPOCH
        or expected.producer_id == current.producer_id
        or (expected.producer_id == current.previous_producer_id and is_exhausted(expected.epoch))
    )


def fence_and_abort(
    current: TransactionMetadata, server_version: int, take_producer_id: TakeProducerId, wall_ms: int
) -> Decision:
    """Abort an open transaction in the name of the coordinator, in an epoch that fences its producer.

    One bump, whatever the transaction version: the abort of version 2 bumps the epoch anyway.
    """
    if server_version >= EPOCH_BUMP_VERSION:
        return _ended_in_next_epoch(current, _S.PREPARE_ABORT, server_version, take_producer_id, wall_ms)
    return _changed(
        current,
        _S.PREPARE_ABORT,
        wall_ms,
        producer_epoch=min(current.producer_epoch + 1, EPOCH_MAX),
        last_producer_epoch=NO_PRODUCER_EPOCH,
        next_producer_id=NO_PRODUCER_ID,
        client_version=0,
    )


# -- partitions --------------------------------------------------------------------------------------------------------


def add_partitions(
    current: TransactionMetadata,
    producer: ProducerIdentity,
    partitions: frozenset[TopicPartition],
    client_version: int,
    wall_ms: int,
) -> Decision:
    """NONE where the transaction has all partitions already."""
    error = _identity_error(current, producer)
    if error is not _E.NONE:
        return error
    is_open = current.state is _S.ONGOING
    if is_open and partitions <= current.partitions:
        return _E.NONE
    _check_transition(current, _S.ONGOING)
    # The three transitions of a usual transaction name all fields: `_replace` takes four times as long.
    return TransactionMetadata(
        current.producer_id,
        current.timeout_ms,
        wall_ms,
        _S.ONGOING,
        current.producer_epoch,
        current.last_producer_epoch,
        current.producer_id,
        NO_PRODUCER_ID,
        current.partitions | partitions if current.partitions else partitions,
        current.start_ms if is_open else wall_ms,
        client_version,
    )


def verification_error(current: TransactionMetadata | None, producer: ProducerIdentity) -> ErrorCode:
    """Why the producer cannot have an open transaction; NONE if it may have one."""
    return _E.INVALID_PRODUCER_ID_MAPPING if current is None else _identity_error(current, producer)


def _identity_error(current: TransactionMetadata, producer: ProducerIdentity) -> ErrorCode:
    if current.producer_id != producer.producer_id:
        return _E.INVALID_PRODUCER_ID_MAPPING
    if current.producer_epoch != producer.epoch:
        return _E.PRODUCER_FENCED
    return _E.CONCURRENT_TRANSACTIONS if current.state in PREPARED else _E.NONE


# -- EndTxn ------------------------------------------------------------------------------------------------------------


def end_v1(
    current: TransactionMetadata, producer: ProducerIdentity, is_commit: bool, is_in_transition: bool, wall_ms: int
) -> Decision:
    """EndTxn of a client of transaction version 0 or 1. NONE where the transaction has ended so already.

    A late repetition that meets the producer's next transaction ends that one (KAFKA-17754): with
    one epoch for all transactions it cannot be told apart.
    """
    if current.producer_id != producer.producer_id:
        return _E.INVALID_PRODUCER_ID_MAPPING
    if current.producer_epoch != producer.epoch:
        return _E.PRODUCER_FENCED
    if is_in_transition:
        return _E.CONCURRENT_TRANSACTIONS
    if current.state is _S.ONGOING:
        state = _S.PREPARE_COMMIT if is_commit else _S.PREPARE_ABORT
        return _changed(current, state, wall_ms, next_producer_id=NO_PRODUCER_ID, client_version=0)
    if current.state in COMPLETED and current.is_commit == is_commit:
        return _E.NONE
    return _E.INVALID_TXN_STATE


def end_v2(
    current: TransactionMetadata,
    producer: ProducerIdentity,
    is_commit: bool,
    client_version: int,
    take_producer_id: TakeProducerId,
    wall_ms: int,
) -> Decision:
    """EndTxn of a client of transaction version 2: the end bumps the epoch.

    NONE for a repetition of the request that ended the transaction; the client then adopts the
    present identity. An abort is taken without a transaction, because a client aborts whenever it
    does not know how far its partitions were added.
    """
    is_retry_of_bump = current.producer_epoch == producer.epoch + 1
    is_retry_of_overflow = (
        producer == (current.previous_producer_id, EXHAUSTED_EPOCH)
        and current.previous_producer_id != current.producer_id
        and current.producer_epoch == 0
    )
    if current.producer_id != producer.producer_id and not is_retry_of_overflow:
        return _E.INVALID_PRODUCER_ID_MAPPING
    if current.state in COMPLETED and (is_retry_of_bump or is_retry_of_overflow):
        return _E.NONE if current.is_commit == is_commit else _E.INVALID_TXN_STATE
    if current.state in PREPARED and is_retry_of_bump:
        return _E.CONCURRENT_TRANSACTIONS
    if current.identity != producer:
        return _E.PRODUCER_FENCED
    if current.state is _S.ONGOING:
        state = _S.PREPARE_COMMIT if is_commit else _S.PREPARE_ABORT
        return _ended_in_next_epoch(current, state, client_version, take_producer_id, wall_ms)
    if current.state in PREPARED:
        return _E.PRODUCER_FENCED
    if is_commit:
        return _E.INVALID_TXN_STATE
    begun = current._replace(start_ms=wall_ms)  # the start is unknown, and a record must have one
    return _ended_in_next_epoch(begun, _S.PREPARE_ABORT, client_version, take_producer_id, wall_ms)


def _ended_in_next_epoch(
    current: TransactionMetadata,
    state: TransactionState,
    client_version: int,
    take_producer_id: TakeProducerId,
    wall_ms: int,
) -> Decision:
    next_producer_id = NO_PRODUCER_ID
    if is_exhausted(current.producer_epoch):
        taken = take_producer_id()
        if taken is None:
            return _E.COORDINATOR_LOAD_IN_PROGRESS
        next_producer_id = taken
    _check_transition(current, state)
    return TransactionMetadata(
        current.producer_id,
        current.timeout_ms,
        wall_ms,
        state,
        # EPOCH_MAX is never that of a client; an id that has it all the same must be able to end.
        min(current.producer_epoch + 1, EPOCH_MAX),
        current.producer_epoch,
        current.producer_id,
        next_producer_id,
        current.partitions,
        current.start_ms,
        client_version,
    )


def complete(current: TransactionMetadata, wall_ms: int) -> TransactionMetadata:
    """All markers of a prepared transaction are written. With an exhausted epoch the producer id changes."""
    state = _S.COMPLETE_COMMIT if current.is_commit else _S.COMPLETE_ABORT
    producer_id, epoch = identity_after(current)
    _check_transition(current, state)
    return TransactionMetadata(
        producer_id,
        current.timeout_ms,
        wall_ms,
        state,
        epoch,
        current.last_producer_epoch,
        current.producer_id,
        NO_PRODUCER_ID,
        frozenset(),
        current.start_ms,
        current.client_version,
    )


def identity_after(prepared: TransactionMetadata) -> ProducerIdentity:
    """The identity of the next transaction, of which the answer tells a client of version 2."""
    if prepared.client_version >= EPOCH_BUMP_VERSION and prepared.next_producer_id != NO_PRODUCER_ID:
        return ProducerIdentity(prepared.next_producer_id, 0)
    return prepared.identity
