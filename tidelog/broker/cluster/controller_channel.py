"""The channel to the active controller, which runs in this process or on another node.

The channel finds the controller, sends requests, and retries while the controller changes. Clients'
requests that only the controller can answer travel in an Envelope (KIP-590). Invariants: a caller
gets the answer of a controller that was active when it answered, or REQUEST_TIMED_OUT. A client that
has its answer finds what it changed in the metadata of this node (`_catch_up`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

from tidelog.broker.network.channel import response_type
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from tidelog.protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumRequestPartitionData,
    DescribeQuorumRequestTopicData,
)
from tidelog.protocol.messages.envelope import EnvelopeRequest
from tidelog.protocol.messages.list_partition_reassignments import ListPartitionReassignmentsRequest
from tidelog.replication.backoff import Backoff
from tidelog.replication.controller.decisions.topic_names import METADATA_TOPIC
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable

if TYPE_CHECKING:
    import random

    from tidelog.replication.controller.decisions.state import NewTopic

CREATE_TOPICS_VERSION = 7
ENVELOPE_VERSION = 0
BACKOFF_MIN_MS = 20
BACKOFF_MAX_MS = 500
TIMEOUT_MS = 30_000
# Large requests wait at the controller for their turn (LARGE_UNDER_WAY_MAX there); others need connections meanwhile.
FORWARDED_REQUESTS_MAX = 160
FORWARDING_GRACE_MS = 500
DESCRIBE_QUORUM_VERSION = 0
CATCH_UP_MS_MAX = 2_000
"""How long an answer waits for this node's metadata at most."""
_READ_APIS = frozenset({DescribeQuorumRequest.API_KEY, ListPartitionReassignmentsRequest.API_KEY})
"""Forwarded APIs that change nothing."""
_HEADER = Struct(">hhih")  # API key, version, correlation id, length of the client id (-1 for none)

# Kafka's DefaultPrincipalData, version 0: User:ANONYMOUS, not by token. Without
# security it is the only principal.
_ANONYMOUS = b"\x00\x00\x05User\x0aANONYMOUS\x00\x00"

LocalController = Callable[[Any, int], Awaitable[Any]]

logger = logging.getLogger("tidelog.forwarding")


class _LanePool:
    """A bounded pool of connections, one for each forwarded request; further requests wait for one.

    Requests must not share a connection: an answer would wait for the answers before it, and a
    request that times out closes its connection. The others would be sent again, and might take
    effect twice.
    """

    def __init__(self, count: int) -> None:
        self._free = [f"forward-{number}" for number in reversed(range(count))]
        self._slots = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def acquire(self, timeout_ms: float) -> AsyncIterator[str]:
        """The name of a free lane. Raises KafkaError(REQUEST_TIMED_OUT)."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._slots.acquire()
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "too many requests to the controller are under way") from None
        lane = self._free.pop()  # the lane used last, which has an open connection
        try:
            yield lane
        finally:
            self._free.append(lane)
            self._slots.release()


def forwarding_ms(request: Any) -> int:
    """The timeout of a forwarded request: the request's own, and a grace for
    the controller's answer to it.
    """
    timeout_ms = getattr(request, "timeout_ms", 0)
    return min(timeout_ms + FORWARDING_GRACE_MS, TIMEOUT_MS) if timeout_ms > 0 else TIMEOUT_MS


class ControllerChannel:
    """`local(request, version)` answers as the active controller; `is_local` is whether this node
    is active.

    `leader()` is the endpoint of the active controller, or None while it is unknown.
    `published(offset)` is done when this node has published the metadata record at `offset`.
    """

    def __init__(
        self,
        *,
        is_local: Callable[[], bool],
        local: LocalController,
        leader: Callable[[], Endpoint | None],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        published: Callable[[int], asyncio.Future[None]] | None = None,
    ) -> None:
        self.is_local = is_local
        self._published = published
        self._local = local
        self._leader = leader
        self._exchange = exchange
        self._loop = loop
        self._rng = rng
        self._lanes = _LanePool(FORWARDED_REQUESTS_MAX)
        self._leader_change = asyncio.Event()

    def on_leader_changed(self) -> None:
        """The active controller has changed: requests to the previous one,
        which may hang, go to the next.
        """
        self._leader_change.set()
        self._leader_change = asyncio.Event()

    async def attempt(self, request: Any, version: int, *, timeout_ms: int, lane: str = "controller") -> Any:
        """Send once. Raises PeerUnreachable, also while the controller is unknown."""
        if self.is_local():
            return await self._local(request, version)
        endpoint = self._leader()
        if endpoint is None:
            raise PeerUnreachable("no active controller is known")
        return await self._exchange(endpoint, request, version, timeout_ms=timeout_ms, lane=lane)

    async def _attempt_while_leader(self, request: Any, version: int, *, timeout_ms: int, lane: str) -> Any:
        """As `attempt`, but raises PeerUnreachable as soon as another controller is active."""
        endpoint = self._leader()
        if self.is_local() or endpoint is None:
            return await self.attempt(request, version, timeout_ms=timeout_ms, lane=lane)
        attempt = self._loop.create_task(self.attempt(request, version, timeout_ms=timeout_ms, lane=lane))
        watch = self._loop.create_task(self._wait_for_other_leader(endpoint))
        try:
            await asyncio.wait((attempt, watch), return_when=asyncio.FIRST_COMPLETED)
            if attempt.done():
                return attempt.result()
            raise PeerUnreachable(f"{endpoint} is no longer the active controller")
        finally:
            for task in (attempt, watch):
                task.cancel()
            await asyncio.gather(attempt, watch, return_exceptions=True)

    async def _wait_for_other_leader(self, endpoint: Endpoint) -> None:
        while self._leader() in (None, endpoint) and not self.is_local():
            await self._leader_change.wait()

    async def call(self, request: Any, version: int, *, timeout_ms: int = TIMEOUT_MS, lane: str = "controller") -> Any:
        """Retry until the active controller has answered. Raises KafkaError(REQUEST_TIMED_OUT).

        The request may take effect twice when a controller dies before its answer. The caller must
        accept that.
        """
        deadline = self._loop.time() + timeout_ms / 1000
        backoff = Backoff(BACKOFF_MIN_MS, BACKOFF_MAX_MS)
        while (remaining_s := deadline - self._loop.time()) > 0:
            try:
                remaining_ms = max(1, int(remaining_s * 1000))
                response = await self._attempt_while_leader(request, version, timeout_ms=remaining_ms, lane=lane)
                if getattr(response, "error_code", 0) != ErrorCode.NOT_CONTROLLER:
                    return response
            except PeerUnreachable:
                pass
            await asyncio.sleep(min(remaining_s, backoff.next_ms(self._rng) / 1000))
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the active controller could not be reached in time")

    async def _call_on_own_connection(self, request: Any, version: int, timeout_ms: int) -> Any:
        """As `call`, on a connection of its own; without a connection when this node is the
        controller.
        """
        if self.is_local():
            with contextlib.suppress(PeerUnreachable):
                response = await self.attempt(request, version, timeout_ms=timeout_ms)
                if getattr(response, "error_code", 0) != ErrorCode.NOT_CONTROLLER:
                    return response
        deadline = self._loop.time() + timeout_ms / 1000
        async with self._lanes.acquire(timeout_ms) as lane:
            remaining_ms = max(1, int((deadline - self._loop.time()) * 1000))
            return await self.call(request, version, timeout_ms=remaining_ms, lane=lane)

    async def forward(self, request: bytes, client_host: str, timeout_ms: int = TIMEOUT_MS) -> bytes:
        """Send a client's request with its header to the controller; returns the response with its
        header, when this node has the metadata that the controller had as it answered.
        """
        deadline = self._loop.time() + timeout_ms / 1000
        try:
            address = ipaddress.ip_address(client_host).packed
        except ValueError:
            address = bytes(4)
        envelope = EnvelopeRequest(request_data=request, request_principal=_ANONYMOUS, client_host_address=address)
        response = await self._call_on_own_connection(envelope, ENVELOPE_VERSION, timeout_ms)
        if response.error_code:
            raise KafkaError(ErrorCode.of(response.error_code))
        data = response.response_data
        if data is None:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "an empty envelope came back")
        if self._published is not None and int.from_bytes(request[:2], "big") not in _READ_APIS:
            wait_ms = min((deadline - self._loop.time()) * 1000, CATCH_UP_MS_MAX)
            try:
                async with asyncio.timeout(max(wait_ms, 0) / 1000):
                    await self._catch_up(self._published, CATCH_UP_MS_MAX)
            except (TimeoutError, KafkaError):
                logger.info("sending an answer of the controller before this node has its metadata, which is late")
        return bytes(data)

    async def _catch_up(self, published: Callable[[int], asyncio.Future[None]], timeout_ms: int) -> None:
        """Wait until this node has published all that the controller has committed by now.

        A client that creates a topic and then describes it asks this node both times. Raises
        KafkaError.
        """
        topic = DescribeQuorumRequestTopicData(
            topic_name=METADATA_TOPIC, partitions=[DescribeQuorumRequestPartitionData(partition_index=0)]
        )
        request = DescribeQuorumRequest(topics=[topic])
        response = await self._call_on_own_connection(request, DESCRIBE_QUORUM_VERSION, timeout_ms)
        for described_topic in response.topics:
            for partition in described_topic.partitions:
                if not partition.error_code:
                    await published(partition.high_watermark - 1)

    async def forward_message(self, request: Any, version: int, client_host: str) -> Any:
        """As `forward`, for a request message of this broker; returns the
        response message. Raises KafkaError.
        """
        key = request.API_KEY
        tags = b"\0" if request_header_version(key, version) == 2 else b""
        response = await self.forward(_HEADER.pack(key, version, 0, -1) + tags + request.encode(version), client_host)
        header_bytes = 5 if response_header_version(key, version) == 1 else 4
        return response_type(type(request)).decode(response[header_bytes:], version)

    async def create_topics(self, topics: Sequence[NewTopic]) -> dict[str, KafkaError | None]:
        """The error of each topic, or None for a created topic. Raises
        KafkaError(REQUEST_TIMED_OUT).
        """
        request = CreateTopicsRequest(topics=[_creatable(topic) for topic in topics], timeout_ms=TIMEOUT_MS)
        deadline = self._loop.time() + TIMEOUT_MS / 1000
        while True:
            response = await self._call_on_own_connection(request, CREATE_TOPICS_VERSION, TIMEOUT_MS)
            outcomes = {result.name: _outcome(result.error_code, result.error_message) for result in response.topics}
            has_moved = any(error is not None and error.code == ErrorCode.NOT_CONTROLLER for error in outcomes.values())
            if not has_moved or self._loop.time() > deadline:
                return outcomes
            await asyncio.sleep(BACKOFF_MIN_MS / 1000)


def _creatable(topic: NewTopic) -> CreatableTopic:
    return CreatableTopic(
        name=topic.name,
        num_partitions=topic.partition_count,
        replication_factor=topic.replication_factor,
        assignments=[
            CreatableReplicaAssignment(partition_index=index, broker_ids=list(brokers))
            for index, brokers in topic.assignments
        ],
        configs=[CreatableTopicConfig(name=name, value=value) for name, value in topic.configs],
    )


def _outcome(code: int, message: str | None) -> KafkaError | None:
    return KafkaError(ErrorCode.of(code), message) if code else None
