"""Sends the requests of a `TransactionManager`, one at a time, to the coordinators.

Here: lookup of coordinators, versions, retries with backoff, and the effects of a changed state on
the batches. The manager decides what to send and what an answer means. EndTxn over an idle connection,
the usual request, is written at once and answered in a callback; all others need a task. Invariants: at
most one request is unanswered. A retriable error is retried until the manager no longer has the request.
Every change of the manager wakes the calls that wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ProducerConfig
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.client.network.outcomes import start_task
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.sender import Sender, wait_for_end_ms
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.producing.transaction_manager import (
    AddOffsets,
    AddPartitions,
    CommitOffsets,
    EndTxn,
    InitProducerId,
    Request,
    State,
    TransactionManager,
)
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)

logger = client_logger(__name__)
Response = TypeVar("Response", bound=Message)

TRANSACTION_VERSION = "transaction.version"
_GROUP, _TRANSACTION = 0, 1
_ANY_VERSION = 32767
_FIRST_VERSION_WITH_IDENTITY = 3
"""Of InitProducerId: a producer names the identity it had (KIP-360)."""
_FIRST_VERSION_WITH_MEMBER = 3
"""Of TxnOffsetCommit (KIP-447)."""
_LAST_CLIENT_VERSION_OF_ADD_PARTITIONS = 3
_LAST_VERSIONS_1 = {EndTxnRequest: 4, TxnOffsetCommitRequest: 4}
"""The last versions with the meaning of transaction version 1."""
_MOVED_ERRORS = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))
_UNANSWERED_ERRORS = frozenset((ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT))


class _Refused(Exception):
    """An answer with an error code."""

    def __init__(self, code: ErrorCode, subject: str) -> None:
        super().__init__(f"{subject} was refused with {code.name}")
        self.code = code


class _Superseded(Exception):
    """The state has changed before the request was sent."""


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


class TransactionSender:
    """The transactional requests of one producer."""

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        manager: TransactionManager,
        session: ProducerSession,
        sender: Sender,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._manager = manager
        self._session = session
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._id_key = _TRANSACTION, manager.transactional_id
        self._coordinators: dict[tuple[int, str], int] = {}
        self._task: asyncio.Task[None] | None = None
        self._lookup: asyncio.Task[None] | None = None
        self._awaits_end = False
        """An EndTxn without a task is unanswered."""
        self._published_revision = -1
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False
        self._last_problem = ""
        sender.on_pass = self.handle_change

    @property
    def uses_version_2(self) -> bool:
        """Whether the cluster has finalized version 2; the versions of its APIs do not say it."""
        return self._cluster.finalized_level(TRANSACTION_VERSION) >= 2

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        for task in (self._task, self._lookup):
            if task is not None:
                task.cancel()
        self._wake_waiters()

    def handle_other_cluster(self) -> None:
        """The cluster is another one now, where this producer's id is not known. It says so once the transactional id
        has a coordinator; a cluster without transactions makes its coordinators at the first lookup. Until then it
        answers NOT_ENOUGH_REPLICAS to every batch of version 2.
        """
        self._coordinators.clear()
        if self._lookup is None and not self._closed:
            self._lookup = start_task(self._look_up_again())

    async def _look_up_again(self) -> None:
        try:
            async with asyncio.timeout(self._config.delivery_timeout_ms / 1000):
                failures = 0
                while True:
                    try:
                        self._coordinators[self._id_key] = await self._find_coordinator(self._id_key)
                        return
                    except KafkaError as error:
                        if not error.retriable:
                            return
                    failures += 1
                    await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        except TimeoutError:
            return  # by now the batches have failed, too
        finally:
            self._lookup = None

    # -- changes of the state

    def handle_change(self) -> None:
        """Apply the state to the batches, wake waiting calls, and send what is due. Cheap without a change."""
        manager = self._manager
        while True:
            if manager.revision != self._published_revision:
                self._published_revision = manager.revision
                self._publish()
            if self._task is None and not self._awaits_end and not self._closed:
                request = manager.next_request(self._sender.has_incomplete_batches)
                if request is not None and not (isinstance(request, EndTxn) and self._end_at_once(request)):
                    self._start(self._send_requests(request))
            if manager.revision == self._published_revision:
                return

    def _publish(self) -> None:
        manager = self._manager
        if manager.identity != self._session.identity:
            self._session.adopt_identity(*manager.identity)
        if manager.state is State.FATAL_ERROR:
            self._sender.fail_all(manager.error)
        elif manager.state is State.ABORTABLE_ERROR:
            self._sender.fail_unsent(TransactionAborted(manager.error.code, manager.error.message))
        elif manager.state is State.ABORTING:
            text = "its transaction was aborted before it was sent"
            self._sender.fail_unsent(TransactionAborted(ErrorCode.TRANSACTION_ABORTABLE, text))
        elif manager.state is State.COMMITTING:
            self._sender.send_all()
        self._wake_waiters()
        self._sender.wake()

    @property
    def waits_for(self) -> str:
        """Why the end of a call is not reached, for a message."""
        if self._last_problem:
            return self._last_problem
        if self._sender.has_incomplete_batches:
            return "records are not delivered yet"
        return "no answer yet"

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait_for_change(self, deadline: float) -> None:
        """Wait until the state may be another. Raises TimeoutError at the deadline, in the loop's time."""
        if self._closed:
            raise RuntimeError("this producer is closed")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        timer = self._loop.call_at(deadline, _end_wait, waiter)  # cheaper than asyncio.timeout_at
        try:
            await waiter
        finally:
            timer.cancel()

    # -- requests

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        self._task = start_task(sending)
        self._task.add_done_callback(self._handle_task_end)

    async def _send_requests(self, request: Request | None, failures: int = 0) -> None:
        while request is not None:
            wait_ms = await self._send(request, failures + 1)
            failures = failures + 1 if wait_ms else 0
            self.handle_change()
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)
            request = self._manager.next_request(self._sender.has_incomplete_batches)

    async def _send_after_failure(self, wait_ms: float) -> None:
        await asyncio.sleep(wait_ms / 1000)
        await self._send_requests(self._manager.next_request(self._sender.has_incomplete_batches), 1)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail_by_fault(error)
        self.handle_change()

    def _fail_by_fault(self, error: BaseException) -> None:
        logger.error(
            "the transactions of %r end by a fault of the client", self._manager.transactional_id, exc_info=error
        )
        self._manager.fail(ErrorCode.UNKNOWN_SERVER_ERROR, f"a fault of the client: {error!r}")

    async def _send(self, request: Request, attempt: int) -> float:
        """Send once. Returns the wait before the next attempt, 0 when none is needed."""
        try:
            await self._dispatch(request)
        except _Superseded:
            return 0.0
        except (_Refused, KafkaError) as error:
            return self._handle_error(request, error, attempt)
        self._last_problem = ""
        return 0.0

    def _handle_error(self, request: Request, error: _Refused | KafkaError, attempt: int) -> float:
        """An attempt failed. Returns the wait before the next one, 0 when none is needed."""
        manager = self._manager
        code, message = error.code, str(error)
        is_answered = isinstance(error, _Refused) or code not in _UNANSWERED_ERRORS
        if not is_answered:
            manager.handle_unanswered(request)
        if not code.retriable:
            manager.handle_refusal(request, code, message)
            return 0.0
        self._last_problem = message
        logger.debug("transactional id %r: sending again after: %s", manager.transactional_id, message)
        if code is ErrorCode.CONCURRENT_TRANSACTIONS:
            return wait_for_end_ms(self._cluster.retry_backoff, attempt)
        return self._cluster.retry_backoff.wait_ms(attempt)

    async def _dispatch(self, request: Request) -> None:
        if isinstance(request, InitProducerId):
            await self._init_producer_id(request)
        elif isinstance(request, AddPartitions):
            await self._add_partitions(request)
        elif isinstance(request, AddOffsets):
            await self._add_offsets(request)
        elif isinstance(request, CommitOffsets):
            await self._commit_offsets(request)
        else:
            await self._end_txn(request)

    async def _call(
        self,
        cause: Request,
        request: Message,
        response: type[Response],
        *,
        key: tuple[int, str],
        max_version: int = _ANY_VERSION,
        min_version: int = 0,
    ) -> Response:
        """One request to a coordinator, which is looked up again after a lost answer. Raises KafkaError."""
        node_id = self._coordinators.get(key)
        if node_id is None:
            node_id = self._coordinators[key] = await self._find_coordinator(key)
        try:
            connection = await self._cluster.connection(node_id)
            if connection.in_flight:
                # Produce requests, which wait for replicas.
                connection = await self._cluster.connection(node_id, COORDINATOR)
        except KafkaError as error:
            self._coordinators.pop(key, None)
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)) from None
        version = connection.version_of(type(request), max_version)
        if version < min_version:
            name = type(request).__name__.removesuffix("Request")
            text = f"{connection.address} has {name} up to version {version}, version {min_version} is needed"
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text)
        if not self._manager.confirm_sending(cause):
            raise _Superseded
        try:
            return await connection.call(request, response, self._config.request_timeout_ms, max_version)
        except KafkaError:
            self._coordinators.pop(key, None)
            raise

    async def _find_coordinator(self, key: tuple[int, str]) -> int:
        """The node that coordinates a group or transactional id. Raises KafkaError."""
        try:
            return await self._cluster.find_coordinator(key[1], key[0])
        except KafkaError as error:
            kind = "group" if key[0] == _GROUP else "transactional id"
            # A lookup without an answer changes nothing, so it does not count as an unanswered request.
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE if error.code in _UNANSWERED_ERRORS else error.code
            raise KafkaError(code, f"no coordinator of {kind} {key[1]!r}: {error}") from None

    async def _call_transaction_coordinator(
        self,
        cause: Request,
        request: Message,
        response: type[Response],
        *,
        max_version: int = _ANY_VERSION,
        min_version: int = 0,
    ) -> Response:
        return await self._call(
            cause, request, response, key=self._id_key, max_version=max_version, min_version=min_version
        )

    def _check(self, code: int, subject: str, key: tuple[int, str] | None = None) -> None:
        error = ErrorCode.of(code)
        if error in _MOVED_ERRORS:
            self._coordinators.pop(key or self._id_key, None)
        if error is not ErrorCode.NONE:
            raise _Refused(error, subject)

    def _max_version(self, request: type[Message]) -> int:
        return _ANY_VERSION if self._manager.uses_version_2 else _LAST_VERSIONS_1[request]

    async def _init_producer_id(self, request: InitProducerId) -> None:
        message = InitProducerIdRequest(
            transactional_id=self._manager.transactional_id,
            transaction_timeout_ms=self._config.transaction_timeout_ms,
            producer_id=request.producer_id,
            producer_epoch=request.producer_epoch,
        )
        # Without the identity in the request a producer could not tell that it is fenced.
        min_version = _FIRST_VERSION_WITH_IDENTITY if request.producer_id >= 0 else 0
        answer = await self._call_transaction_coordinator(
            request, message, InitProducerIdResponse, min_version=min_version
        )
        self._check(answer.error_code, "InitProducerId")
        self._manager.handle_identity(answer.producer_id, answer.producer_epoch)

    async def _add_partitions(self, request: AddPartitions) -> None:
        topics: dict[str, AddPartitionsToTxnTopic] = {}
        for topic, number in sorted(request.partitions):
            topics.setdefault(topic, AddPartitionsToTxnTopic(name=topic)).partitions.append(number)
        message = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._manager.transactional_id,
            v3_and_below_producer_id=self._manager.producer_id,
            v3_and_below_producer_epoch=self._manager.producer_epoch,
            v3_and_below_topics=list(topics.values()),
        )
        answer = await self._call_transaction_coordinator(
            request, message, AddPartitionsToTxnResponse, max_version=_LAST_CLIENT_VERSION_OF_ADD_PARTITIONS
        )
        codes = {
            TopicPartition(topic.name, result.partition_index): result.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        }
        missing = request.partitions - codes.keys()
        if missing:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"AddPartitionsToTxn: no answer for {min(missing)}")
        # OPERATION_NOT_ATTEMPTED says only that another partition was refused.
        for partition, code in sorted(codes.items(), key=lambda item: item[1] == ErrorCode.OPERATION_NOT_ATTEMPTED):
            self._check(code, f"AddPartitionsToTxn of {partition}")
        self._manager.handle_partitions_added(request)

    async def _add_offsets(self, request: AddOffsets) -> None:
        message = AddOffsetsToTxnRequest(
            transactional_id=self._manager.transactional_id,
            producer_id=self._manager.producer_id,
            producer_epoch=self._manager.producer_epoch,
            group_id=request.group_id,
        )
        answer = await self._call_transaction_coordinator(request, message, AddOffsetsToTxnResponse)
        self._check(answer.error_code, f"AddOffsetsToTxn of group {request.group_id!r}")
        self._manager.handle_group_added(request)

    async def _commit_offsets(self, request: CommitOffsets) -> None:
        group, offsets = request.commit.group, request.commit.offsets
        topics: dict[str, TxnOffsetCommitRequestTopic] = {}
        for (topic, number), offset in offsets.items():
            topics.setdefault(topic, TxnOffsetCommitRequestTopic(name=topic)).partitions.append(
                TxnOffsetCommitRequestPartition(
                    partition_index=number,
                    committed_offset=offset.offset,
                    committed_leader_epoch=offset.leader_epoch,
                    committed_metadata=offset.metadata,
                )
            )
        message = TxnOffsetCommitRequest(
            transactional_id=self._manager.transactional_id,
            group_id=group.group_id,
            producer_id=self._manager.producer_id,
            producer_epoch=self._manager.producer_epoch,
            generation_id=group.generation_id,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=list(topics.values()),
        )
        key = _GROUP, group.group_id
        answer = await self._call(
            request,
            message,
            TxnOffsetCommitResponse,
            key=key,
            max_version=self._max_version(TxnOffsetCommitRequest),
            min_version=_FIRST_VERSION_WITH_MEMBER if group.member_id or group.group_instance_id is not None else 0,
        )
        codes = {
            TopicPartition(topic.name, result.partition_index): result.error_code
            for topic in answer.topics
            for result in topic.partitions
        }
        missing = offsets.keys() - codes.keys()
        if missing:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"TxnOffsetCommit: no answer for {min(missing)}")
        # An error that cannot be retried decides before one that can.
        for partition, code in sorted(codes.items(), key=lambda item: ErrorCode.of(item[1]).retriable):
            self._check(code, f"TxnOffsetCommit of {partition} for group {group.group_id!r}", key)
        self._manager.handle_offsets_committed(request)

    # -- EndTxn

    @property
    def _min_end_version(self) -> int:
        """Version 2 needs the answer's identity."""
        return _LAST_VERSIONS_1[EndTxnRequest] + 1 if self._manager.uses_version_2 else 0

    def _end_txn_request(self, request: EndTxn) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=self._manager.transactional_id,
            producer_id=self._manager.producer_id,
            producer_epoch=self._manager.producer_epoch,
            committed=request.committed,
        )

    async def _end_txn(self, request: EndTxn) -> None:
        answer = await self._call_transaction_coordinator(
            request,
            self._end_txn_request(request),
            EndTxnResponse,
            max_version=self._max_version(EndTxnRequest),
            min_version=self._min_end_version,
        )
        self._handle_end(request, answer)

    def _handle_end(self, request: EndTxn, answer: EndTxnResponse) -> None:
        self._check(answer.error_code, "EndTxn")
        self._manager.handle_ended(request, answer.producer_id, answer.producer_epoch)

    def _end_at_once(self, request: EndTxn) -> bool:
        """Write EndTxn, when the coordinator's connection is open and idle. False leaves it to a task."""
        node_id = self._coordinators.get(self._id_key)
        connection = None if node_id is None else self._cluster.ready(node_id)
        if connection is None or connection.in_flight:
            return False
        try:
            version = connection.version_of(EndTxnRequest, self._max_version(EndTxnRequest))
        except KafkaError:
            return False
        if version < self._min_end_version or not self._manager.confirm_sending(request):
            return False
        self._awaits_end = True
        handle = partial(self._handle_end_answer, request)
        message, timeout_ms = self._end_txn_request(request), self._config.request_timeout_ms
        try:
            connection.send_with_callback(message, EndTxnResponse, version, timeout_ms, handle)
        except KafkaError as error:
            self._loop.call_soon(handle, None, error)
        return True

    def _handle_end_answer(self, request: EndTxn, answer: EndTxnResponse | None, error: Exception | None) -> None:
        self._awaits_end = False
        if self._closed:
            return
        try:
            if answer is not None:
                self._handle_end(request, answer)
                self._last_problem = ""
            else:
                assert error is not None
                self._coordinators.pop(self._id_key, None)
                raise error
        except (_Refused, KafkaError) as problem:
            wait_ms = self._handle_error(request, problem, 1)
            if wait_ms:
                self._start(self._send_after_failure(wait_ms))
        except Exception as fault:
            self._fail_by_fault(fault)
        self.handle_change()
