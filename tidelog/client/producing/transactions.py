"""The transactional calls of a producer: each ends by a result, an error, or its timeout.

Here: the waits, and the `async with` block. `TransactionManager` has the states,
`transaction_sender` sends. Invariants: a call that ends early, by its timeout or because its task
is cancelled, leaves the work to the background, and the next call continues it. An offset commit
that was left so makes the transaction abortable, because its fate is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ProducerConfig
from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.client.producing.transaction_errors import (
    TransactionAbortable,
    TransactionAborted,
    TransactionError,
    TransactionTimeout,
)
from tidelog.client.producing.transaction_manager import State, TransactionManager
from tidelog.client.producing.transaction_sender import TransactionSender
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = client_logger(__name__)

INTERRUPTED_ABORT_S = 1.0
"""How long a cancelled or interrupted block waits for its abort, which then goes on in the background."""

_OPEN_OR_FAILED = (State.ABORTABLE_ERROR, State.FATAL_ERROR, State.IN_TRANSACTION)
_RESTING = (State.READY, *_OPEN_OR_FAILED)
_ENDING = (State.COMMITTING, State.ABORTING)


class Transactions:
    """The transactions of one producer, from its start on."""

    def __init__(self, config: ProducerConfig, manager: TransactionManager, sender: TransactionSender) -> None:
        self._config = config
        self._manager = manager
        self._sender = sender
        self._is_detached = False
        self._commits_ahead = 0
        self._has_none_ahead = asyncio.Event()
        self._has_none_ahead.set()
        self._number_of_close = 0
        """The transaction that `close` has aborted."""
        self._unreported_number = 0
        """The last transaction whose commit or abort was called and has not returned."""
        self._has_failed_to_begin = False

    # -- calls

    def handle_other_cluster(self) -> None:
        """The cluster is another one now."""
        self._sender.handle_other_cluster()

    async def initialize(self, deadline: float) -> None:
        """Get a producer id, after the end of what an earlier producer left open."""
        self._manager.initialize()
        await self._wait_until(lambda: self._manager.state is not State.INITIALIZING, "init_transactions", deadline)
        if self._manager.state is State.FATAL_ERROR:
            raise self._manager.error

    @property
    def refuses_begin(self) -> bool:
        """Whether a begin raises: a transaction is open, or has failed."""
        return self._manager.state in _OPEN_OR_FAILED

    async def begin(self, deadline: float) -> int:
        """Begin a transaction, after the end of the previous one. Returns its number.

        After a call that raises, or is cancelled, there is none to commit or to abort, also if the previous one still
        ends.
        """
        manager = self._manager
        self._has_failed_to_begin = False
        if manager.state is State.READY and manager.begin(self._sender.uses_version_2):
            return manager.number  # usual, and nothing has to be sent
        try:
            return await self._begin_when_ready(deadline)
        except BaseException:
            self._has_failed_to_begin = True
            raise

    async def _begin_when_ready(self, deadline: float) -> int:
        manager = self._manager
        manager.initialize()
        while True:
            await self._wait_until(lambda: manager.state in _RESTING, "begin_transaction", deadline)
            if manager.state is State.READY:
                if manager.begin(self._sender.uses_version_2):
                    return manager.number
                self._sender.handle_change()  # the version has changed: another epoch first
            elif manager.state is State.FATAL_ERROR:
                raise manager.error
            else:
                raise RuntimeError("a transaction is open already; transactions do not nest")

    def _check_begun(self, end: str) -> None:
        """Raise RuntimeError after a begin that failed: the caller would take the outcome of the previous transaction
        for that of its own.
        """
        if self._has_failed_to_begin and self._manager.state not in _OPEN_OR_FAILED:
            raise RuntimeError(f"there is no transaction to {end}: begin_transaction did not end, repeat it")
        self._has_failed_to_begin = False

    async def commit(self) -> None:
        """Commit; return when the coordinator has decided so.

        Another call after one that ended early returns its outcome, also when that is known already.
        """
        manager = self._manager
        self._check_begun("commit")
        if not self._has_unreported_end():
            manager.commit()
        number = self._unreported_number = manager.number
        await self._wait_until(
            lambda: manager.ended_number >= number or manager.state is not State.COMMITTING, "commit_transaction"
        )
        if manager.ended_number >= number:
            self._unreported_number = 0
            if not manager.ended_by_commit:
                raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the transaction was aborted meanwhile")
            return
        manager.raise_error()
        raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the transaction is aborted by another call")

    def keep_commit(self) -> None:
        """The caller of the last commit has not learned that it ended: its next one returns the outcome."""
        if self._manager.ended_by_commit:
            self._unreported_number = self._manager.ended_number

    def _has_unreported_end(self) -> bool:
        """Whether the last transaction has ended since a call for its end was given up."""
        manager = self._manager
        return 0 < self._unreported_number == manager.number == manager.ended_number

    async def abort(self) -> None:
        """Abort; return when the coordinator has decided so. May be repeated as `commit`."""
        manager = self._manager
        self._check_begun("abort")
        if not self._has_unreported_end():
            manager.abort()
        elif manager.ended_by_commit:
            self._unreported_number = 0
            raise RuntimeError("there is no transaction to abort, the last one was committed meanwhile")
        await self.wait_for_abort()

    async def wait_for_abort(self) -> None:
        """Wait for the end of an abort that has begun."""
        manager = self._manager
        number = self._unreported_number = manager.number
        await self._wait_until(
            lambda: manager.ended_number >= number or manager.state is not State.ABORTING, "abort_transaction"
        )
        if manager.ended_number < number:
            manager.raise_error()
        elif not manager.ended_by_commit:
            self._unreported_number = 0

    def is_open(self, number: int) -> bool:
        """Whether this transaction has begun, and neither a commit nor an abort."""
        manager = self._manager
        is_ending = manager.state in _ENDING
        return 0 < number == manager.number > manager.ended_number and not is_ending

    def has_ended(self, number: int) -> bool:
        """Whether the end of this transaction was acknowledged."""
        return self._manager.ended_number >= number

    async def send_offsets(
        self, to_commit: Mapping[TopicPartition, OffsetAndMetadata], group: ConsumerGroupMetadata | KafkaError
    ) -> None:
        """Commit a group's offsets with the open transaction; where the consumer says by an error that it is no member,
        the transaction can only be aborted, as after the same answer of the group's coordinator.
        """
        manager = self._manager
        number = manager.check_open()
        if not to_commit:
            return
        if isinstance(group, KafkaError):
            manager.handle_problem(group.code, f"the offsets cannot be committed: {group.message or group.code.name}")
            self._sender.handle_change()
            raise manager.error
        commit = manager.add_offsets(group, to_commit)

        def is_over() -> bool:
            return (
                commit.is_done
                or manager.number != number
                or manager.state
                not in (
                    State.IN_TRANSACTION,
                    State.COMMITTING,
                )
            )

        try:
            await self._wait_until(is_over, "send_offsets_to_transaction")
        except BaseException as error:
            if manager.number == number and not commit.is_done:
                cause = error.message if isinstance(error, TransactionTimeout) else "the call was cancelled"
                manager.handle_problem(ErrorCode.REQUEST_TIMED_OUT, f"the offsets may be committed or not: {cause}")
                self._sender.handle_change()
            if isinstance(error, TransactionTimeout):
                raise TransactionAbortable(error.code, error.message) from None
            raise
        if not commit.is_done:
            manager.raise_error()
            raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the transaction of these offsets was aborted")

    async def detach(self) -> DetachedTransaction | None:
        """Leave the open transaction open, when its records are delivered; None when it is empty.

        Another process ends it (`end_transaction`). This producer is of no more use.
        """
        manager = self._manager
        number = manager.check_open()
        await self._wait_until(
            lambda: (
                manager.number != number or manager.state is not State.IN_TRANSACTION or not manager.has_pending_offsets
            ),
            "detach_transaction",
        )
        manager.raise_error()
        if manager.number != number or manager.state is not State.IN_TRANSACTION:
            raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the transaction was ended by another call")
        self._is_detached = True
        if not manager.may_be_open:
            return None
        return DetachedTransaction(manager.transactional_id, *manager.identity, manager.uses_version_2)

    def abandon(self) -> bool:
        """Abort in the background. False when there is nothing to abort, or a commit was sent already."""
        if not self._manager.may_abort:
            return False
        self._manager.abort()
        self._sender.handle_change()
        return True

    @contextmanager
    def commit_ahead(self) -> Iterator[None]:
        """A commit was called, and begins after this: it waits for the records that were sent before it."""
        self._commits_ahead += 1
        self._has_none_ahead.clear()
        try:
            yield
        finally:
            self._commits_ahead -= 1
            if not self._commits_ahead:
                self._has_none_ahead.set()

    async def wait_for_commits_ahead(self) -> None:
        """A commit begins in the step of its task that ends `commit_ahead`, and so before this returns."""
        await self._has_none_ahead.wait()

    def begin_close(self) -> bool:
        """Abort an open transaction in the background. A commit that was called goes on, as in Java. Returns whether
        there was one to abort.
        """
        return not self._commits_ahead and self._abort_open()

    def _abort_open(self) -> bool:
        manager = self._manager
        if self._is_detached or manager.state is State.COMMITTING or not self.abandon():
            return False
        self._number_of_close = manager.number
        return True

    def check_not_closed(self, number: int) -> None:
        """Raise TransactionAborted if a close has aborted this transaction."""
        if number == self._number_of_close:
            raise TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, "the producer was closed before the commit")

    async def close(self, timeout_ms: float | None) -> bool:
        """Abort an open transaction, or wait for the end of one that ends, at most `max_block_ms`. False when it has
        not ended: nothing can commit its records any more.
        """
        manager = self._manager
        if self._is_detached:
            self._sender.close()
            return True
        limit_ms = self._config.max_block_ms if timeout_ms is None else min(timeout_ms, self._config.max_block_ms)
        deadline = self._deadline(limit_ms)
        try:
            # Again where the commit has failed meanwhile: only an abort ends the transaction then.
            while self._abort_open() or manager.state in _ENDING:
                await self._wait_until(lambda: manager.state not in _ENDING, "close", deadline)
        except TransactionTimeout:
            return False
        finally:
            if manager.has_transaction:  # also where the caller of `close` has no more time
                logger.warning(
                    "closed before the end of a transaction of %r, which may end only by its timeout: %s",
                    manager.transactional_id,
                    self._sender.waits_for,
                )
            self._sender.close()
        return True

    # -- waits

    def _deadline(self, timeout_ms: float | None = None) -> float:
        limit_ms = self._config.max_block_ms if timeout_ms is None else timeout_ms
        return asyncio.get_running_loop().time() + limit_ms / 1000

    async def _wait_until(self, condition: Callable[[], bool], call: str, deadline: float | None = None) -> None:
        """Wait for a state. Raises TransactionTimeout at the deadline, `max_block_ms` from now without one."""
        self._sender.handle_change()
        if condition():
            return  # usual for the begin, and cheaper than a timeout
        try:
            deadline = deadline or self._deadline()
            while not condition():
                await self._sender.wait_for_change(deadline)
        except TimeoutError:
            text = (
                f"{call} of transactional id {self._manager.transactional_id!r} did not end within "
                f"max_block_ms={self._config.max_block_ms}: {self._sender.waits_for}"
            )
            raise TransactionTimeout(ErrorCode.REQUEST_TIMED_OUT, text) from None


class TransactionScope:
    """`async with producer.transaction():` commits at the end and aborts on any exception.

    A commit or an abort inside the block is allowed: the end of the block then does nothing.
    """

    def __init__(self, begin: Callable[[], Awaitable[tuple[Transactions, int]]]) -> None:
        self._begin = begin
        self._transactions: Transactions | None = None
        self._number = 0

    async def __aenter__(self) -> None:
        self._transactions, self._number = await self._begin()

    @property
    def is_open(self) -> bool:
        """The transaction has begun, and its end has not."""
        return self._transactions is not None and self._transactions.is_open(self._number)

    def abandon(self) -> None:
        """Abort in the background."""
        assert self._transactions is not None
        self._transactions.abandon()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transactions = self._transactions
        assert transactions is not None
        if transactions.has_ended(self._number):
            if error is None:
                transactions.check_not_closed(self._number)
            return
        if error is None:
            try:
                await transactions.commit()
                return
            except TransactionTimeout as problem:
                if not transactions.abandon():
                    raise
                text = f"{problem.message}; it is aborted"
                raise TransactionAbortable(problem.code, text) from None
            except BaseException as problem:
                transactions.abandon()
                error = problem
        else:
            transactions.abandon()
        try:
            # A program that cancels its task, or is interrupted, wants it to end also while no coordinator answers.
            async with asyncio.timeout(None if isinstance(error, Exception) else INTERRUPTED_ABORT_S):
                await transactions.wait_for_abort()
        except TimeoutError:
            logger.warning("the abort after %r goes on in the background", error)
        except TransactionError as problem:
            # The program gets the error that led to the abort.
            logger.warning("the abort after %r failed: %s", error, problem)
        if kind is None:
            raise error
