"""Sends a record that a call waits for, and reads its answer, without a turn of the event loop in between.

It is the short way of a producer that sends one record at a time to a broker that answers within microseconds.
Invariants: a record goes this way only while the producer has no other record that is not delivered, so records keep
the order of the calls. The request has the bytes that the sender would write. A record whose answer is not there in
time, or is not the usual one, is in flight afterwards as if the sender had sent it. The loop is held for at most
`_HELD_S` and one exchange.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from time import monotonic
from typing import Final

from tidelog.client.assignment.partitioner import positive_hash
from tidelog.client.config import ProducerConfig
from tidelog.client.model import RecordMetadata
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.producing.accumulator import Accumulator, PartitionQueue
from tidelog.client.producing.busy_poll import PROMPT_S
from tidelog.client.producing.one_batch import FIRST_VERSION, OneBatchForm, OneBatchRequest, one_batch_form
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.record_appender import Place, RecordAppender
from tidelog.client.producing.record_waiter import RecordWaiter
from tidelog.client.producing.sender import LAST_VERSION_WITH_NAMES, Sender, Ticket
from tidelog.client.producing.topic_routes import RECORD_OVERHEAD_BYTES
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.messages.produce import ProduceRequest

Appended = tuple[Place, RecordWaiter] | tuple[None, None]
"""The batch of a record and the waiter of its call."""
NOT_APPENDED: Final[Appended] = None, None

_HELD_S = 0.00025
"""The time in which direct sends may follow each other without a turn of the event loop."""
_USE_NOTED_MS = 1_000
"""So often a topic is noted as one in use. One that is not loses its metadata, and its sequences with it."""
_RECORD_BYTES_MAX = 16 * 1024
"""To write a larger record takes longer than a turn of the loop."""


def allows_direct_sends(config: ProducerConfig) -> bool:
    """Whether a producer with these options may send a record directly: idempotent, so with acks=all, and without what
    needs a look at each record or a wait for more of them.
    """
    return (
        config.busy_poll_us > 0
        and config.idempotent
        and config.transactional_id is None
        and not config.linger_ms
        and not config.interceptors
        and config.key_serializer is None
        and config.value_serializer is None
        and config.partitioner == "default"
    )


class _Lane:
    """What all direct sends to one partition need, as long as the metadata stays."""

    __slots__ = ("connection", "form", "used_ms", "version")

    def __init__(self, connection: Connection, form: OneBatchForm, version: int) -> None:
        self.connection = connection
        self.form = form
        self.version = version
        self.used_ms = -math.inf
        """When the topic was last noted as one in use, by the event loop's time."""


class DirectSend:
    """The direct sends of one producer, which is connected and whose options allow them."""

    def __init__(
        self,
        config: ProducerConfig,
        appender: RecordAppender,
        accumulator: Accumulator[Ticket],
        session: ProducerSession,
        new_builder: Callable[[], BatchBuilder],
        cluster: Cluster,
        sender: Sender,
    ) -> None:
        self._config = config
        self._appender = appender
        self._accumulator = accumulator
        self._session = session
        self._new_builder = new_builder
        self._cluster = cluster
        self._sender = sender
        self._exchange_s = min(PROMPT_S, config.busy_poll_us / 1_000_000)
        self._bytes_max = min(_RECORD_BYTES_MAX, config.max_request_size)
        self._metadata = cluster.metadata
        self._lanes: dict[PartitionQueue[Ticket], _Lane] = {}
        """Of this metadata."""
        self._turn_s = 0.0
        self._is_giving_turn = False

    # -- turns of the loop

    def is_turn_due(self, now_s: float, topic: str) -> bool:
        """Whether the event loop has to run before the next direct send, which is to this topic.

        Not where the record goes the usual way: nothing but a direct send holds the loop.
        """
        return (
            now_s - self._turn_s > _HELD_S
            and not self._is_giving_turn
            and not self._accumulator.incomplete_count
            and topic.__class__ is str
            and self._appender.open_route(topic) is not None
        )

    async def give_turn(self, append: Callable[[], Appended]) -> Appended:
        """Let the event loop run once. Calls that begin meanwhile are not alone, so they are not sent directly.

        The first of them calls `append` before it takes its own record, so that records keep the order of the calls.
        Returns what that returned; NOT_APPENDED if the record is not taken.
        """
        appended = NOT_APPENDED

        def append_now() -> None:
            nonlocal appended
            appended = append()

        self._is_giving_turn = True
        self._appender.yield_to_later(append_now)
        try:
            await asyncio.sleep(0)
        except BaseException:
            _, waiter = appended
            if waiter is not None:
                waiter.future.cancel()
            raise
        finally:
            self._is_giving_turn = False
            self._turn_s = monotonic()
            self._appender.end_yield(append_now)
        return appended

    # -- one record

    def send(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int | None
    ) -> RecordMetadata | Place | None:
        """Send a record without headers, with the time of now.

        Returns:
            The record's metadata, if the leader's usual answer is already there. Its batch, which is in flight, if the
            answer is still to come. None if the record has to go through the accumulator: then nothing is sent.
        """
        if self._accumulator.incomplete_count or self._is_giving_turn or topic.__class__ is not str:
            return None
        route = self._appender.open_route(topic)
        if route is None or value.__class__ is not bytes or (key is not None and key.__class__ is not bytes):
            return None
        assert value is not None
        size_bytes = len(value) if key is None else len(value) + len(key)
        if size_bytes > self._bytes_max:
            return None
        is_spread = False
        if partition is None:
            is_spread = key is None or self._config.partitioner_ignore_keys
            partition = (
                route.unkeyed_partitioner.choose(route.available_partitions)
                if key is None or is_spread
                else positive_hash(key) % route.count
            )
        elif partition.__class__ is not int or not 0 <= partition < route.count:
            return None
        queue = route.queues[partition]
        lane = self._lane(queue)
        now_ms = self._sender.now_ms
        if lane is None or not lane.connection.can_exchange or self._sender.is_throttled(lane.connection, now_ms):
            return None
        identity = self._session.lone_identity(queue.partition, now_ms)
        if identity is None:
            return None
        self._appender.check_loop()  # the child of a fork has the parent's sockets
        if is_spread:
            route.unkeyed_partitioner.record_sent(RECORD_OVERHEAD_BYTES + size_bytes)
        if now_ms - lane.used_ms > _USE_NOTED_MS:
            lane.used_ms = now_ms
            self._cluster.track((topic,))
        return self._exchange(lane, queue, identity, value, key, now_ms)

    def _exchange(
        self,
        lane: _Lane,
        queue: PartitionQueue[Ticket],
        identity: tuple[int, int, int],
        value: bytes,
        key: bytes | None,
        now_ms: float,
    ) -> RecordMetadata | Place:
        started_s = monotonic()
        timestamp_ms = time.time_ns() // 1_000_000
        builder = self._new_builder()
        builder.append(timestamp_ms, key, value)
        records = builder.build(*identity)
        request = OneBatchRequest(lane.form, records)
        read = lane.form.read
        # An interrupt may come between any two of the next steps. Each leaves the sequence used.
        self._session.begin_lone_send(queue.partition, now_ms)
        answer = lane.connection.exchange(request, lane.version, read, started_s + self._exchange_s)
        if answer is None:
            batch = self._accumulator.add_in_flight(queue, builder, None, timestamp_ms, key, value, now_ms)
            self._session.adopt_lone_batch(batch, identity)
            self._sender.await_answer(lane.connection, batch, lane.version, read, len(records))
            return batch
        self._session.handle_lone_acknowledgement(queue.partition)
        self._sender.totals.note_direct_send(len(records), (monotonic() - started_s) * 1000)
        topic, partition = queue.partition
        base_offset, append_time_ms = answer
        return RecordMetadata(topic, partition, base_offset, timestamp_ms if append_time_ms < 0 else append_time_ms)

    def _lane(self, queue: PartitionQueue[Ticket]) -> _Lane | None:
        """The lane of a partition; None when its leader is not connected, or is too old."""
        metadata = self._cluster.metadata
        if metadata is not self._metadata:
            self._metadata = metadata
            self._lanes.clear()
        lane = self._lanes.get(queue)
        if lane is not None:
            return lane
        leader = metadata.leader(queue.partition)
        connection = None if leader < 0 else self._cluster.ready(leader)
        if connection is None or not connection.supports(ProduceRequest, FIRST_VERSION):
            return None
        version = connection.version_of(ProduceRequest)
        topic_id = NO_TOPIC_ID
        if version > LAST_VERSION_WITH_NAMES:
            topic_id = metadata.topic_id(queue.partition.topic)
            if topic_id == NO_TOPIC_ID:
                return None
        acks, timeout_ms = self._config.required_acks, self._config.request_timeout_ms
        form = one_batch_form(queue.partition, topic_id, version, None, acks, timeout_ms)
        lane = self._lanes[queue] = _Lane(connection, form, version)
        return lane
