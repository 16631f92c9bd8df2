"""The producer's sending half: takes ready batches, one request per broker, and settles what comes back.

Here: leaders, requests, retries, timers, InitProducerId. What is ready is the accumulator's decision, what an error
means for a sequence the session's. No task per request: `wake` schedules one pass over the waiting partitions, and
answers are callbacks. Invariant: a batch that was taken is acknowledged, put back or failed, exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial

from tidelog.client.config import ProducerConfig
from tidelog.client.model import RecordMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.producing.accumulator import Accumulator, PartitionQueue, ProducerBatch
from tidelog.client.producing.log_inquirer import LogInquirer
from tidelog.client.producing.producer_session import ProducerSession, Verdict
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

logger = logging.getLogger(__name__)

Ticket = asyncio.Future[RecordMetadata]
Batch = ProducerBatch[Ticket]
Queue = PartitionQueue[Ticket]

_NEWEST_BY_NAME = 12
_EXPIRY_CHECK_MS = 50.0
_ATTEMPTS_AT_ONCE = 10
_TOO_LARGE = (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE)
_REQUEST_OVERHEAD_BYTES = 512
_PARTITION_OVERHEAD_BYTES = 32


class Sender:
    """One per producer. `wake` it whenever something may have become ready."""

    def __init__(
        self, cluster: Cluster, config: ProducerConfig, accumulator: Accumulator[Ticket], session: ProducerSession
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._accumulator = accumulator
        self._session = session
        self._log_inquirer = LogInquirer(cluster, session, self._learned, self._unanswerable)
        self._loop = asyncio.get_running_loop()
        self._acks = config.required_acks
        self._pass_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry_check_ms = 0.0
        self._identity_task: asyncio.Task[None] | None = None
        self._throttled_until_ms: dict[int, float] = {}
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._end_waiters: list[asyncio.Future[None]] = []
        self._closed = False

    # -- waking up

    def wake(self) -> None:
        """Look at the queues soon. Cheap, and many calls make one pass."""
        if not self._pass_scheduled and not self._closed:
            self._pass_scheduled = True
            self._loop.call_soon(self._pass)

    def _wake_after(self, _: object) -> None:
        self.wake()

    def _wake_at(self, at_ms: float) -> None:
        at = at_ms / 1000
        if self._timer is not None:
            if self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()

    def close(self) -> None:
        """Stop for good; what has not ended fails."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._identity_task is not None:
            self._identity_task.cancel()
        self._log_inquirer.close()
        self.fail_all(KafkaError(ErrorCode.NETWORK_EXCEPTION, "the producer was closed before this was delivered"))

    # -- one pass

    def _pass(self) -> None:
        self._pass_scheduled = False
        if self._closed:
            return
        now_ms = self._loop.time() * 1000
        if now_ms >= self._next_expiry_check_ms:
            self._next_expiry_check_ms = now_ms + _EXPIRY_CHECK_MS
            self._expire(now_ms)
        if self._session.restart_pending:
            for partition in self._session.settle():
                logger.info("%s: sequences start anew under producer epoch %d", partition, self._session.identity[1])
        self._log_inquirer.ask(self._session.inquiries())
        if self._session.needs_identity:
            if self._accumulator.unended_count:
                self._ask_identity()
        else:
            for node_id, queues in self._ready_by_node(now_ms).items():
                self._send_to(node_id, queues, now_ms)
        if self._accumulator.unended_count:
            # Something may run into its delivery timeout even if nothing else happens.
            self._wake_at(now_ms + _EXPIRY_CHECK_MS * 4)

    def _ready_by_node(self, now_ms: float) -> dict[int, list[Queue]]:
        by_node: dict[int, list[Queue]] = {}
        accumulator, session, metadata = self._accumulator, self._session, self._cluster.metadata
        soonest_ms = float("inf")
        for queue in accumulator.active():
            wait_ms = accumulator.ready_in_ms(queue, now_ms)
            if wait_ms > 0:
                soonest_ms = min(soonest_ms, wait_ms)
            elif session.may_send(queue.head):
                leader = metadata.leader(queue.partition)
                if leader < 0:
                    self._cluster.request_refresh()
                else:
                    by_node.setdefault(leader, []).append(queue)
        if soonest_ms < float("inf"):
            self._wake_at(now_ms + soonest_ms)
        return by_node

    def _send_to(self, node_id: int, queues: list[Queue], now_ms: float) -> None:
        throttled_until_ms = self._throttled_until_ms.get(node_id, 0.0)
        if throttled_until_ms > now_ms:
            self._wake_at(throttled_until_ms)
            return
        connection = self._cluster.ready(node_id)
        if connection is None:
            self._cluster.start_connecting(node_id).add_done_callback(self._wake_after)
            return
        if not connection.writable:
            self._wake_at(now_ms + 1)
            return
        if connection.in_flight >= self._config.max_in_flight_requests_per_connection:
            return
        room = self._config.max_request_size - _REQUEST_OVERHEAD_BYTES
        batches: list[Batch] = []
        for queue in queues:
            size_bytes = queue.head.size_bytes + _PARTITION_OVERHEAD_BYTES
            if batches and size_bytes > room:
                break
            room -= size_bytes
            batch = self._accumulator.take(queue)
            self._session.begin(batch, now_ms)
            batches.append(batch)
        self._send(connection, batches)
        self.wake()

    def _send(self, connection: Connection, batches: list[Batch]) -> None:
        try:
            version = connection.version_of(ProduceRequest)
            ids = {batch.partition.topic: self._cluster.metadata.topic_id(batch.partition.topic) for batch in batches}
            if version > _NEWEST_BY_NAME and NO_TOPIC_ID in ids.values():
                version = connection.version_of(ProduceRequest, _NEWEST_BY_NAME)
            by_id = version > _NEWEST_BY_NAME
            request = self._request(batches, ids)
            if self._acks == 0:
                connection.send_without_response(request, version)
            else:
                answer = connection.send(request, ProduceResponse, version, self._config.request_timeout_ms)
                answer.add_done_callback(partial(self._answered, connection.node_id, batches, ids if by_id else None))
                return
        except KafkaError as error:
            for batch in batches:
                self._refused(batch, error.code, error.message, connection.node_id)
            return
        for batch in batches:
            self._acknowledged(batch, -1, -1)

    def _request(self, batches: list[Batch], ids: dict[str, bytes]) -> ProduceRequest:
        topics: dict[str, TopicProduceData] = {}
        for batch in batches:
            name, number = batch.partition
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = TopicProduceData(name=name, topic_id=ids[name])
            records = batch.builder.build(batch.producer_id, batch.producer_epoch, batch.base_sequence)
            topic.partition_data.append(PartitionProduceData(index=number, records=records))
        return ProduceRequest(
            acks=self._acks, timeout_ms=self._config.request_timeout_ms, topic_data=list(topics.values())
        )

    # -- what comes back

    def _answered(
        self,
        node_id: int,
        batches: list[Batch],
        ids: dict[str, bytes] | None,
        answer: asyncio.Future[ProduceResponse],
    ) -> None:
        self.wake()
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            code = error.code if isinstance(error, KafkaError) else ErrorCode.UNKNOWN_SERVER_ERROR
            self._cluster.request_refresh()
            for batch in batches:
                self._refused(batch, code, str(error), node_id)
            return
        response = answer.result()
        if response.throttle_time_ms > 0:
            self._throttled_until_ms[node_id] = self._loop.time() * 1000 + response.throttle_time_ms
        found: dict[tuple[str | bytes, int], PartitionProduceResponse] = {}
        for topic in response.responses:
            for partition in topic.partition_responses:
                found[topic.topic_id if ids is not None else topic.name, partition.index] = partition
        for batch in batches:
            topic_name, number = batch.partition
            outcome = found.get((ids[topic_name] if ids is not None else topic_name, number))
            if outcome is None:
                text = "the answer does not mention this partition"
                self._refused(batch, ErrorCode.UNKNOWN_SERVER_ERROR, text, node_id)
            elif outcome.error_code == 0:
                self._acknowledged(batch, outcome.base_offset, outcome.log_append_time_ms)
            else:
                self._refused(batch, ErrorCode.of(outcome.error_code), outcome.error_message, node_id)

    def _acknowledged(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        if batch.ended:
            return
        for earlier in self._session.vouched_for(batch):
            self._settle(earlier, -1, -1)
        self._settle(batch, base_offset, log_append_time_ms)

    def _settle(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        self._session.acknowledged(batch)
        self._end(batch)
        topic, partition = batch.partition
        offset = base_offset
        step = 0 if base_offset < 0 else 1
        for ticket, timestamp_ms in zip(batch.tickets, batch.timestamps_ms):
            if not ticket.done():
                if log_append_time_ms >= 0:
                    timestamp_ms = log_append_time_ms
                ticket.set_result(RecordMetadata(topic, partition, offset, timestamp_ms))
            offset += step

    def _refused(self, batch: Batch, code: ErrorCode, message: str | None, node_id: int) -> None:
        """An error of the broker, or no answer at all: again, unless that is pointless or out of time."""
        if batch.ended:
            return
        if code.invalidates_metadata:
            self._cluster.request_refresh()
        verdict = self._session.refused(batch, code, node_id)
        if verdict is Verdict.SUCCEED:
            self._acknowledged(batch, -1, -1)
        elif verdict is Verdict.RETRY and batch.attempts <= self._config.retries:
            now_ms = self._loop.time() * 1000
            # Out of sequence means that it waits for those before it, or for the log to be asked. Neither takes time of
            # its own, unless it is said again and again.
            in_turn = code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.attempts <= _ATTEMPTS_AT_ONCE
            wait_ms = 0.0 if in_turn else self._cluster.retry_backoff.wait_ms(batch.attempts)
            logger.debug("%s: sending again in %.0f ms after %s", batch.partition, wait_ms, code.name)
            self._accumulator.put_back(batch, now_ms + wait_ms)
            self.wake()
        elif code in _TOO_LARGE and batch.record_count > 1:
            logger.debug("%s: a batch of %d records is too large and is divided", batch.partition, batch.record_count)
            self._session.divided(batch, self._accumulator.divide(batch))
            self.wake()
        else:
            self._fail(batch, KafkaError(code, f"{batch.partition}: {message or 'refused by the broker'}"))

    def _learned(self, next_batch: Batch | None) -> None:
        if next_batch is not None:
            self._accumulator.prefer(next_batch)
        self.wake()

    def _unanswerable(self, partition: TopicPartition, in_doubt: list[Batch], reason: KafkaError) -> None:
        text = (
            f"{partition}: may be in the log or not. An attempt was not answered, the broker forgot what it took "
            f"and cannot say how far its log reaches ({reason}); sending it again could write it twice"
        )
        for batch in in_doubt:
            self._fail(batch, KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, text))
        self.wake()

    def _expire(self, now_ms: float) -> None:
        for batch in self._accumulator.expired(now_ms):
            limit = self._config.delivery_timeout_ms
            text = (
                f"{batch.partition}: not delivered within delivery_timeout_ms={limit}, after {batch.attempts} attempts"
            )
            self._fail(batch, KafkaError(ErrorCode.REQUEST_TIMED_OUT, text))

    def _fail(self, batch: Batch, error: KafkaError) -> None:
        self._session.abandoned(batch)
        self._end(batch)
        unwatched = 0
        for ticket in batch.tickets:
            if not ticket.done():
                ticket.set_exception(error)
                # Said once below: a program that does not look at its futures would get one complaint per record.
                ticket.exception()
                unwatched += 1
        if unwatched:
            logger.error("%d record%s not delivered: %s", unwatched, " was" if unwatched == 1 else "s were", error)

    def fail_all(self, error: KafkaError) -> None:
        """Everything that has not ended fails."""
        for batch in list(self._accumulator.unended()):
            self._fail(batch, error)

    def _end(self, batch: Batch) -> None:
        self._accumulator.end(batch)
        while self._room_waiters:
            waiter = self._room_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._accumulator.exhausted = False
        if self._end_waiters:
            for waiter in self._end_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._end_waiters.clear()

    # -- waiting for it

    async def wait_for_room(self) -> None:
        """Until some batch ended."""
        self._accumulator.exhausted = True
        self.wake()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._room_waiters.append(waiter)
        await waiter

    async def flush(self) -> None:
        """Until everything appended so far has ended, well or badly."""
        self._accumulator.flush()
        self.wake()
        waiting = list(self._accumulator.unended())
        while waiting:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._end_waiters.append(waiter)
            await waiter
            waiting = [each for batch in waiting for each in batch.unended()]

    # -- identity

    def _ask_identity(self) -> None:
        if self._identity_task is None:
            self._identity_task = self._loop.create_task(self._init_producer_id())

    async def _init_producer_id(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    answer = await self._cluster.call_any(
                        InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=2**31 - 1),
                        InitProducerIdResponse,
                    )
                    code = ErrorCode.of(answer.error_code)
                    if code is ErrorCode.NONE:
                        self._session.adopt_identity(answer.producer_id, answer.producer_epoch)
                        return
                    problem = KafkaError(code, "the broker gave no producer id")
                except KafkaError as error:
                    problem = error
                if not problem.retriable:
                    self.fail_all(problem)  # what is sent later asks again
                    return
                failures += 1
                await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        finally:
            self._identity_task = None
            self.wake()
