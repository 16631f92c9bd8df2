"""The producer's sender: sends due batches, one request per broker, and handles the responses.

Here: leaders, requests, retries, timers, InitProducerId. The accumulator decides which batches are
due; the session decides the meaning of an error for a sequence. There is no task per request:
`wake` schedules one pass over the waiting partitions, and responses arrive in callbacks. Invariant:
every batch that was taken is acknowledged, put back or failed, exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ProducerConfig
from tidelog.client.model import TopicPartition
from tidelog.client.network.backoff import ExponentialBackoff
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection, FrameReader, Request
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.outcomes import start_task
from tidelog.client.producing.accumulator import Accumulator, PartitionQueue, ProducerBatch
from tidelog.client.producing.interceptors import Interceptors
from tidelog.client.producing.log_inquirer import LogInquirer
from tidelog.client.producing.one_batch import FIRST_VERSION, OneBatchRequest, one_batch_form
from tidelog.client.producing.producer_session import ProducerSession, Verdict
from tidelog.client.producing.send_group import SendGroup
from tidelog.client.producing.sender_totals import SenderTotals
from tidelog.client.producing.transaction_errors import TransactionAborted
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

logger = client_logger(__name__)

Ticket = SendGroup | None
"""The call that sends the record together with others; None for one that is observed through its batch's delivery."""
Batch = ProducerBatch[Ticket]
Queue = PartitionQueue[Ticket]

LAST_VERSION_WITH_NAMES = 12
_LAST_VERSION_OF_TRANSACTION_VERSION_1 = 11
"""From Produce 12 on the leader adds the partition to the transaction (KIP-890)."""
CLOSED_BEFORE_DELIVERY = "the producer was closed before this was delivered"
_CONCURRENT_TRANSACTIONS_WAIT_MS = 20.0
"""The wait for the end of the previous transaction, which takes milliseconds (as in Java)."""
_EXPIRY_CHECK_MS = 50.0
_IMMEDIATE_ATTEMPTS_MAX = 10
_TOO_LARGE = (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE)
_REQUEST_OVERHEAD_BYTES = 512
_PARTITION_OVERHEAD_BYTES = 32


class Sender:
    """The sender of one producer. Call `wake` when a batch may have become due."""

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        accumulator: Accumulator[Ticket],
        session: ProducerSession,
        transactions: TransactionManager | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._accumulator = accumulator
        self._session = session
        self._transactions = transactions
        self.on_pass: Callable[[], None] | None = None
        """For a transactional producer: called at the begin of each pass, and when the last batch is answered."""
        self._log_inquirer = LogInquirer(cluster, session, self._handle_log_end, self._fail_unknown_outcomes)
        self._loop = asyncio.get_running_loop()
        self._acks = config.required_acks
        self._pass_scheduled = False
        self._is_in_pass = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0  # uvloop's handle of a time that is past has no `when`
        self._next_expiry_check_ms = 0.0
        self._identity_task: asyncio.Task[None] | None = None
        self._identity_refusals = 0
        self._identity_due_s = 0.0
        """When an identity may be asked for again. A program that sends on did so with every record."""
        self._throttled_until_ms: dict[int, float] = {}
        self._stuck_since_ms: dict[int, float] = {}
        """By node the time since which due batches could not be sent to it."""
        self.interceptors: Interceptors | None = None
        self.totals = SenderTotals()
        self._memory_waiters: deque[asyncio.Future[None]] = deque()
        self._completion_waiters: list[asyncio.Future[None]] = []
        self._closed = False

    # -- wake-ups

    def wake(self) -> None:
        """Schedule a pass over the queues. Cheap; several calls make one pass."""
        if not self._pass_scheduled and not self._closed:
            self._pass_scheduled = True
            self._loop.call_soon(self._run_pass)

    def _wake_on_completion(self, _: object) -> None:
        self.wake()

    def _wake_at(self, at_ms: float) -> None:
        due_s = at_ms / 1000
        if self._timer is not None:
            if self._timer_due_s <= due_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()

    def close(self) -> None:
        """Stop for good. Batches that are not complete fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._identity_task is not None:
            self._identity_task.cancel()
        self._log_inquirer.close()
        self.fail_all(KafkaError(ErrorCode.NETWORK_EXCEPTION, CLOSED_BEFORE_DELIVERY))

    # -- one pass

    def _run_pass(self) -> None:
        self._pass_scheduled = False
        if self._closed:
            return
        self._is_in_pass = True
        try:
            self._send_due()
        finally:
            self._is_in_pass = False

    def _send_due(self) -> None:
        session = self._session
        now_ms = self._loop.time() * 1000
        if now_ms >= self._next_expiry_check_ms:
            self._next_expiry_check_ms = now_ms + _EXPIRY_CHECK_MS
            self._expire(now_ms)
        if session.pending_restarts:
            for partition in session.restart_partitions():
                logger.info("%s: sequences start anew under producer epoch %d", partition, session.identity[1])
        if session.open_inquiries:
            self._log_inquirer.start(session.inquiries())
        if self.on_pass is not None:
            self.on_pass()
        if session.needs_identity:
            if self._transactions is None and self._accumulator.incomplete_count:
                self._request_identity()
        else:
            for node_id, queues in self._ready_by_node(now_ms).items():
                self._send_to(node_id, queues, now_ms)
        if self._accumulator.incomplete_count:
            # A batch may reach its delivery timeout without any other event.
            self._wake_at(now_ms + _EXPIRY_CHECK_MS * 4)

    def _ready_by_node(self, now_ms: float) -> dict[int, list[Queue]]:
        by_node: dict[int, list[Queue]] = {}
        due_nodes: set[int] = set()
        accumulator, session, metadata = self._accumulator, self._session, self._cluster.metadata
        transactions = self._transactions
        soonest_ms = math.inf
        for queue in accumulator.active_queues():
            wait_ms = accumulator.ready_in_ms(queue, now_ms)
            if wait_ms > 0:
                soonest_ms = min(soonest_ms, wait_ms)
                continue
            head = queue.head
            if transactions is not None and not transactions.may_send(
                queue.partition, is_resend=head.base_sequence >= 0
            ):
                continue
            leader = metadata.leader(queue.partition)
            due_nodes.add(leader)
            if not session.may_send(head):
                continue
            if leader < 0:
                self._cluster.request_leaders()
            else:
                by_node.setdefault(leader, []).append(queue)
        if self._config.partitioner_availability_timeout_ms:
            since_ms = self._stuck_since_ms
            self._stuck_since_ms = {node_id: since_ms.get(node_id, now_ms) for node_id in due_nodes}
        if soonest_ms < math.inf:
            self._wake_at(now_ms + soonest_ms)
        return by_node

    def is_stuck(self, partition: TopicPartition) -> bool:
        """Whether the partition's leader takes no batch for longer than the availability timeout (KIP-794)."""
        timeout_ms = self._config.partitioner_availability_timeout_ms
        if not timeout_ms or not self._stuck_since_ms:
            return False
        since_ms = self._stuck_since_ms.get(self._cluster.metadata.leader(partition))
        return since_ms is not None and self._loop.time() * 1000 - since_ms > timeout_ms

    def _send_to(self, node_id: int, queues: list[Queue], now_ms: float) -> None:
        throttled_until_ms = self._throttled_until_ms.get(node_id, 0.0)
        if throttled_until_ms > now_ms:
            self._wake_at(throttled_until_ms)
            return
        connection = self._cluster.ready(node_id)
        if connection is None:
            self._cluster.start_connecting(node_id).add_done_callback(self._wake_on_completion)
            return
        if not connection.writable:
            self._wake_at(now_ms + 1)
            return
        if connection.in_flight >= self._config.max_in_flight_requests_per_connection:
            return
        self._stuck_since_ms.pop(node_id, None)
        remaining_bytes = self._config.max_request_size - _REQUEST_OVERHEAD_BYTES
        batches: list[Batch] = []
        for queue in queues:
            if batches and queue.head.size_bytes + _PARTITION_OVERHEAD_BYTES > remaining_bytes:
                break
            batch = self._accumulator.take(queue)
            remaining_bytes -= batch.size_bytes + _PARTITION_OVERHEAD_BYTES
            self._session.prepare_send(batch, now_ms)
            batches.append(batch)
        if self._transactions is not None:
            self._transactions.note_batch_sent()
        self._send(connection, batches)
        if self._accumulator.has_waiting_batches:
            self.wake()

    def _send(self, connection: Connection, batches: list[Batch]) -> None:
        try:
            version = self._produce_version(connection)
            topic_id_of = self._cluster.metadata.topic_id
            ids = {batch.partition.topic: topic_id_of(batch.partition.topic) for batch in batches}
            if version > LAST_VERSION_WITH_NAMES and NO_TOPIC_ID in ids.values():
                version = connection.version_of(ProduceRequest, LAST_VERSION_WITH_NAMES)
            by_id = version > LAST_VERSION_WITH_NAMES
            timeout_ms = self._config.request_timeout_ms
            request: Request
            read = None
            if len(batches) == 1 and version >= FIRST_VERSION:
                batch = batches[0]
                form = one_batch_form(
                    batch.partition,
                    ids[batch.partition.topic] if by_id else NO_TOPIC_ID,
                    version,
                    self._config.transactional_id,
                    self._acks,
                    timeout_ms,
                )
                request, read = OneBatchRequest(form, self._records_of(batch)), form.read
            else:
                request = self._request(batches, ids)
            self.totals.requests += 1
            if self._acks == 0:
                connection.send_without_response(request, version)
            else:
                handle = self._answer_handler(connection, batches, ids if by_id else None)
                connection.send_with_callback(request, ProduceResponse, version, timeout_ms, handle, read)
                self.totals.requests_in_flight += 1
                return
        except KafkaError as error:
            for batch in batches:
                self._handle_error(batch, error.code, error.message, connection.node_id)
            return
        for batch in batches:
            self._handle_acknowledgement(batch, -1, -1)

    def _produce_version(self, connection: Connection) -> int:
        if self._transactions is None:
            return connection.version_of(ProduceRequest)
        if not self._transactions.uses_version_2:
            return connection.version_of(ProduceRequest, _LAST_VERSION_OF_TRANSACTION_VERSION_1)
        version = connection.version_of(ProduceRequest)
        if version <= _LAST_VERSION_OF_TRANSACTION_VERSION_1:
            text = f"{connection.address} has Produce up to version {version}, transaction.version=2 needs version 12"
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text)
        return version

    def _request(self, batches: list[Batch], ids: dict[str, bytes]) -> ProduceRequest:
        topics: dict[str, TopicProduceData] = {}
        for batch in batches:
            name, number = batch.partition
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = TopicProduceData(name=name, topic_id=ids[name])
            topic.partition_data.append(PartitionProduceData(index=number, records=self._records_of(batch)))
        return ProduceRequest(
            transactional_id=self._config.transactional_id,
            acks=self._acks,
            timeout_ms=self._config.request_timeout_ms,
            topic_data=list(topics.values()),
        )

    def _records_of(self, batch: Batch) -> bytearray:
        records = batch.builder.build(batch.producer_id, batch.producer_epoch, batch.base_sequence)
        self.totals.bytes_sent += len(records)
        if batch.attempts > 1:
            self.totals.records_retried += batch.record_count
        return records

    @property
    def now_ms(self) -> float:
        """The time of the event loop, which counts for the accumulator and the session."""
        return self._loop.time() * 1000

    def is_throttled(self, connection: Connection, now_ms: float) -> bool:
        """Whether the node asks for a pause before the next request."""
        return self._throttled_until_ms.get(connection.node_id, 0.0) > now_ms

    def await_answer(
        self, connection: Connection, batch: Batch, version: int, read: FrameReader, written_bytes: int
    ) -> None:
        """Handle the answer to a batch that is in flight: `Connection.exchange` has written it, as so many bytes, and
        read no answer.
        """
        topic = batch.partition.topic
        ids = {topic: self._cluster.metadata.topic_id(topic)} if version > LAST_VERSION_WITH_NAMES else None
        self.totals.requests += 1
        self.totals.requests_in_flight += 1
        self.totals.bytes_sent += written_bytes
        handle = self._answer_handler(connection, [batch], ids)
        connection.await_answer(ProduceResponse, version, self._config.request_timeout_ms, handle, read)
        self._wake_at(self.now_ms + _EXPIRY_CHECK_MS * 4)  # as after a pass

    # -- responses

    def _answer_handler(
        self, connection: Connection, batches: list[Batch], ids: dict[str, bytes] | None
    ) -> Callable[[Any, Exception | None], None]:
        """What handles the answer to a request that is sent now; with the topics' ids where it names topics by them."""
        return partial(self._handle_response, connection.node_id, batches, ids, time.monotonic() * 1000)

    def _handle_response(
        self,
        node_id: int,
        batches: list[Batch],
        ids: dict[str, bytes] | None,
        sent_ms: float,
        response: ProduceResponse | tuple[int, int] | None,
        error: Exception | None,
    ) -> None:
        try:
            # uvloop's `time` counts whole milliseconds.
            self.totals.handle_end(time.monotonic() * 1000 - sent_ms, response is not None)
            if isinstance(response, tuple):
                self._handle_acknowledgement(batches[0], *response)
            elif response is not None:
                self._settle(node_id, batches, ids, response)
            else:
                code = error.code if isinstance(error, KafkaError) else ErrorCode.UNKNOWN_SERVER_ERROR
                self._cluster.request_refresh()
                for batch in batches:
                    self._handle_error(batch, code, str(error), node_id)
        finally:
            if self.on_pass is not None and not self._accumulator.incomplete_count:
                self.on_pass()  # the end of the transaction may be due
            # After the records' futures: a caller that waited for one sends its next record before this pass.
            self.wake()

    def _settle(
        self,
        node_id: int,
        batches: list[Batch],
        ids: dict[str, bytes] | None,
        response: ProduceResponse,
    ) -> None:
        if response.throttle_time_ms > 0:
            self._throttled_until_ms[node_id] = self._loop.time() * 1000 + response.throttle_time_ms
        results: dict[tuple[str | bytes, int], PartitionProduceResponse] = {}
        for topic in response.responses:
            for partition in topic.partition_responses:
                results[topic.topic_id if ids is not None else topic.name, partition.index] = partition
        for batch in batches:
            topic_name, number = batch.partition
            result = results.get((ids[topic_name] if ids is not None else topic_name, number))
            if result is None:
                text = "the answer does not mention this partition"
                self._handle_error(batch, ErrorCode.UNKNOWN_SERVER_ERROR, text, node_id)
            elif result.error_code == 0:
                self._handle_acknowledgement(batch, result.base_offset, result.log_append_time_ms)
            else:
                self._handle_error(batch, ErrorCode.of(result.error_code), _message_of(result), node_id)

    def _handle_acknowledgement(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        if batch.is_complete:
            return
        for earlier_batch in self._session.batches_acknowledged_with(batch):
            self._complete_acknowledged(earlier_batch, -1, -1)
        self._complete_acknowledged(batch, base_offset, log_append_time_ms)

    def _complete_acknowledged(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        self.totals.records_delivered += batch.builder.record_count
        self._session.handle_acknowledgement(batch)
        self._complete(batch)
        if batch.group is not None:
            batch.group.acknowledge(batch.partition.partition, base_offset, batch.record_count)
            return
        batch.delivery.acknowledge(base_offset, log_append_time_ms)
        if self.interceptors is not None:
            for index in range(batch.record_count):
                self.interceptors.on_acknowledgement(batch.delivery.metadata(index), None)
        tickets: Sequence[Any] = batch.tickets
        # The first one is looked at first: to compare an object with None costs much more than None with None.
        if tickets[0] is not None or tickets.count(None) < len(tickets):
            self._acknowledge_groups(batch, base_offset)

    @staticmethod
    def _acknowledge_groups(batch: Batch, base_offset: int) -> None:
        first = 0
        for group, records in groupby(batch.tickets):
            count = len(list(records))
            if group is not None:
                offset = base_offset if base_offset < 0 else base_offset + first
                group.acknowledge(batch.partition.partition, offset, count)
            first += count

    def _handle_error(self, batch: Batch, code: ErrorCode, message: str | None, node_id: int) -> None:
        """Retry after a broker's error or a missing response, unless that cannot help or time is
        over.
        """
        if batch.is_complete:
            return
        if code.invalidates_metadata:
            self._cluster.request_refresh()
        verdict = self._session.handle_error(batch, code, node_id)
        if verdict is Verdict.SUCCEED:
            self._handle_acknowledgement(batch, -1, -1)
        elif verdict is Verdict.UNKNOWN:
            text = (
                f"{batch.partition}: in the leader's log, but not acknowledged and refused now ({code.name}): it may "
                "have been appended in one batch with others, which is too large by now. Sending it again could "
                "write it twice"
            )
            for unknown_batch in self._session.batches_until(batch):
                self._fail(unknown_batch, KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, text))
            self.wake()
        elif verdict is Verdict.RETRY and batch.attempts <= self._config.retries:
            now_ms = self._loop.time() * 1000
            # After OUT_OF_ORDER_SEQUENCE_NUMBER the batch waits for earlier batches or for an
            # inquiry of the log. Both need no extra wait, except after many such errors.
            retries_at_once = (
                code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.attempts <= _IMMEDIATE_ATTEMPTS_MAX
            )
            wait_ms = 0.0 if retries_at_once else self._cluster.retry_backoff.wait_ms(batch.attempts)
            if code is ErrorCode.CONCURRENT_TRANSACTIONS:
                wait_ms = wait_for_end_ms(self._cluster.retry_backoff, batch.attempts)
            logger.debug("%s: sending again in %.0f ms after %s", batch.partition, wait_ms, code.name)
            batch.refusal = f"{code.name}: {message}" if message else code.name
            self._accumulator.put_back(batch, now_ms + wait_ms)
            self.wake()
        elif code in _TOO_LARGE and batch.record_count > 1 and (batch.group is None or batch.group.is_divisible):
            logger.debug("%s: a batch of %d records is too large and is divided", batch.partition, batch.record_count)
            self.totals.batches_split += 1
            self._session.handle_split(batch, self._accumulator.split(batch))
            self.wake()
        else:
            self._fail(batch, KafkaError(code, f"{batch.partition}: {message or 'refused by the broker'}"))

    def _handle_log_end(self, next_batch: Batch | None) -> None:
        if next_batch is not None:
            self._accumulator.prefer(next_batch)
        self.wake()

    def _fail_unknown_outcomes(
        self, partition: TopicPartition, uncertain_batches: list[Batch], reason: KafkaError
    ) -> None:
        text = (
            f"{partition}: may be in the log or not. An attempt was not answered, the broker forgot what it took "
            f"and cannot say how far its log reaches ({reason}); sending it again could write it twice"
        )
        for batch in uncertain_batches:
            self._fail(batch, KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, text))
        self.wake()

    def _expire(self, now_ms: float) -> None:
        refusals: dict[TopicPartition, str] = {}
        for batch in self._accumulator.expired_batches(now_ms):
            refusal = refusals[batch.partition] = batch.refusal or refusals.get(batch.partition, "")
            limit = self._config.delivery_timeout_ms
            text = (
                f"{batch.partition}: not delivered within delivery_timeout_ms={limit}, after {batch.attempts} attempts"
            )
            leader = self._cluster.metadata.leader(batch.partition)
            cause = self._cluster.failure_of(leader) or refusal if leader >= 0 else "the partition has no leader"
            self._fail(batch, KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{text}: {cause}" if cause else text))

    def _fail(self, batch: Batch, error: KafkaError) -> None:
        self._log_failure(self._fail_unlogged(batch, error), error)

    def _fail_unlogged(self, batch: Batch, error: KafkaError) -> int:
        """Fail a batch. Returns the number of its records whose futures were not done."""
        self.totals.records_failed += batch.record_count
        self._session.handle_failure(batch)
        self._complete(batch)
        is_aborted = isinstance(error, TransactionAborted)
        if self._transactions is not None and not is_aborted:
            self._transactions.handle_batch_failure(error, had_sequence=batch.base_sequence >= 0)
            self.wake()
        failed_count = 0
        if batch.group is not None:
            failed_count = batch.record_count
            batch.group.fail(error, failed_count)
        for ticket in batch.tickets:
            if self.interceptors is not None:
                self.interceptors.on_acknowledgement(None, error)
            failed_count += 1
            if ticket is not None:
                ticket.fail(error, 1)
        if batch.group is None:
            failed_count -= batch.delivery.cancelled_count
            batch.delivery.fail(error)
        return failed_count

    @staticmethod
    def _log_failure(record_count: int, error: KafkaError) -> None:
        if record_count:
            logger.log(
                logging.DEBUG if isinstance(error, TransactionAborted) else logging.ERROR,
                "%d record%s not delivered: %s",
                record_count,
                " was" if record_count == 1 else "s were",
                error,
            )

    def fail_all(self, error: KafkaError) -> None:
        """Fail every batch that is not complete, and log it once: there may be thousands."""
        batches = list(self._accumulator.incomplete_batches())
        self._log_failure(sum(self._fail_unlogged(batch, error) for batch in batches), error)

    def fail_unsent(self, error: TransactionAborted) -> None:
        """Fail every batch without a sequence. The others may be in the log and must be settled."""
        for batch in list(self._accumulator.incomplete_batches()):
            if batch.base_sequence < 0:
                self._fail(batch, error)

    @property
    def has_incomplete_batches(self) -> bool:
        """Whether a batch is not delivered and has not failed."""
        return self._accumulator.incomplete_count > 0

    def send_all(self) -> None:
        """Send all records appended so far without a wait for more."""
        self._accumulator.flush()
        if self._accumulator.incomplete_count and not self._is_in_pass:
            self._run_pass()

    def _complete(self, batch: Batch) -> None:
        self._accumulator.complete(batch)
        while self._memory_waiters:
            waiter = self._memory_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._accumulator.is_exhausted = False
        if self._transactions is not None and not self._accumulator.incomplete_count:
            self.wake()  # the end of the transaction may be due
        if self._completion_waiters:
            for waiter in self._completion_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._completion_waiters.clear()

    # -- waiting

    async def wait_for_memory(self) -> None:
        """Wait until any batch is complete."""
        self._accumulator.is_exhausted = True
        self.wake()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._memory_waiters.append(waiter)
        await waiter

    async def flush(self) -> None:
        """Wait until everything appended so far is complete, delivered or failed."""
        self._accumulator.flush()
        self.wake()
        remaining = list(self._accumulator.incomplete_batches())
        while remaining:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._completion_waiters.append(waiter)
            await waiter
            remaining = [part for batch in remaining for part in batch.incomplete_batches()]
        # The callbacks of the last records are due in this pass of the loop.
        await asyncio.sleep(0)

    # -- identity

    def _request_identity(self) -> None:
        if self._identity_task is None:
            self._identity_task = start_task(self._init_producer_id())

    async def _init_producer_id(self) -> None:
        failures = 0
        try:
            if (wait_s := self._identity_due_s - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            while True:
                try:
                    answer = await self._cluster.call_any(
                        InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=2**31 - 1),
                        InitProducerIdResponse,
                    )
                    code = ErrorCode.of(answer.error_code)
                    if code is ErrorCode.NONE:
                        self._session.adopt_identity(answer.producer_id, answer.producer_epoch)
                        self._identity_refusals = 0
                        return
                    last_error = KafkaError(code, "the broker gave no producer id")
                except KafkaError as error:
                    last_error = error
                if not last_error.retriable:
                    self._identity_refusals += 1
                    wait_ms = self._cluster.retry_backoff.wait_ms(self._identity_refusals)
                    self._identity_due_s = self._loop.time() + wait_ms / 1000
                    self.fail_all(last_error)  # a later batch requests an identity again
                    return
                failures += 1
                await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._identity_task = None
            self.wake()


def wait_for_end_ms(backoff: ExponentialBackoff, attempts: int) -> float:
    """The wait after so many attempts of which the last met CONCURRENT_TRANSACTIONS: short at first, then the backoff.

    The previous transaction cannot end while a partition of it has no leader. All its producers ask meanwhile.
    """
    if attempts > _IMMEDIATE_ATTEMPTS_MAX:
        return backoff.wait_ms(attempts - _IMMEDIATE_ATTEMPTS_MAX)
    return min(backoff.wait_ms(attempts), _CONCURRENT_TRANSACTIONS_WAIT_MS)


def _message_of(result: PartitionProduceResponse) -> str | None:
    """The broker's text, with its reason for the first record that it refuses (KIP-467)."""
    reasons = [each for each in result.record_errors if each.batch_index_error_message]
    if not reasons:
        return result.error_message
    first, more = reasons[0], len(reasons) - 1
    reason = f"record {first.batch_index} of the batch: {first.batch_index_error_message}"
    others = f" (and {more:,} more)" if more else ""
    return f"{result.error_message or 'refused by the broker'}: {reason}{others}"
