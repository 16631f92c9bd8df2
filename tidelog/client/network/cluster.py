"""The cluster as a client uses it: connections by node, metadata kept fresh, and requests sent to whoever answers them.

Here: bootstrap, reconnecting with backoff, refreshing metadata, finding leaders and coordinators. Not here: what the
requests are for. Invariants: at most one connection and one attempt per (node, purpose); metadata covers only the
topics in use, which are forgotten when idle; every wait ends by a timeout, an answer or `close`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from tidelog.client.config import ClientConfig
from tidelog.client.model import Node
from tidelog.client.network.backoff import Backoff
from tidelog.client.network.connection import Connection, connect
from tidelog.client.network.metadata import EMPTY, ClusterMetadata, TopicMetadata, merged
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse

logger = logging.getLogger(__name__)
Response = TypeVar("Response", bound=Message)

DATA = "data"
COORDINATOR = "coordinator"
"""A connection of its own for the group coordinator: heartbeats must not wait behind a fetch that waits for data."""
JOINING = "joining"
"""A connection of its own for JoinGroup and SyncGroup, which wait for other members: commits must not."""
BOOTSTRAP_NODE = -1
SOFTWARE_VERSION = "0.1.0"
# For what was written when a client is closed: a broker that hangs does not read it.
LET_GO_S = 1.0


class _Link:
    """The connection to one node for one purpose, and how often it failed in a row."""

    __slots__ = ("attempt", "connection", "failures", "retry_at")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.attempt: asyncio.Task[Connection] | None = None
        self.failures = 0
        self.retry_at = 0.0


class Cluster:
    """Shared by everything inside one client. Call `start`, and `close` at the end."""

    def __init__(
        self, config: ClientConfig, *, auto_create_topics: bool = False, rng: random.Random | None = None
    ) -> None:
        self.config = config
        self.metadata: ClusterMetadata = EMPTY
        self.on_metadata: Callable[[], None] | None = None
        self.all_topics = False
        """Ask for every topic there is, as a subscription by pattern needs."""
        rng = rng or random.Random()
        self.rng = rng
        self.retry_backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, rng)
        self._reconnect_backoff = Backoff(config.reconnect_backoff_ms, config.reconnect_backoff_max_ms, rng)
        self._auto_create_topics = auto_create_topics
        self._addresses = config.bootstrap_addresses()
        self._links: dict[tuple[int, str], _Link] = {}
        self._bootstrap: Connection | None = None
        self._bootstrap_attempt: asyncio.Task[Connection] | None = None
        self._topics: dict[str, float] = {}
        self._topic_max_idle_ms: float | None = None
        self._refresh_wanted = asyncio.Event()
        self._refresh_urgent = asyncio.Event()
        self._refreshed: asyncio.Future[None] | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._closed = False

    # -- life

    async def start(self) -> None:
        """Reach a bootstrap server and learn the cluster. Raises KafkaError(NETWORK_EXCEPTION) when none answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.socket_connection_setup_timeout_ms / 1000
        failures = 0
        while True:
            try:
                await self._refresh_once()
                break
            except KafkaError as error:
                failures += 1
                wait = self._reconnect_backoff.wait_ms(failures) / 1000
                if loop.time() + wait >= deadline:
                    servers = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                    reason = f"no broker reached at {servers}: {error.message or error}"
                    raise KafkaError(ErrorCode.NETWORK_EXCEPTION, reason) from None
                await asyncio.sleep(wait)
        self._refresher = loop.create_task(self._keep_fresh())

    async def close(self) -> None:
        """Close every connection; waiting calls fail with NETWORK_EXCEPTION."""
        self._closed = True
        tasks: list[asyncio.Task[Connection] | asyncio.Task[None]] = []
        if self._refresher is not None:
            tasks.append(self._refresher)
        connections = [link.connection for link in self._links.values()]
        tasks += [link.attempt for link in self._links.values() if link.attempt is not None]
        closing = [connection for connection in (*connections, self._bootstrap) if connection is not None]
        for connection in closing:
            connection.close()
        if self._bootstrap_attempt is not None:
            tasks.append(self._bootstrap_attempt)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.let_go(LET_GO_S) for connection in closing))
        if self._refreshed is not None and not self._refreshed.done():
            self._refreshed.set_result(None)

    # -- connections

    def ready(self, node_id: int, purpose: str = DATA) -> Connection | None:
        """The connection if it is up; otherwise None, at no cost."""
        link = self._links.get((node_id, purpose))
        return None if link is None else link.connection

    def attempt(self, node_id: int, purpose: str = DATA) -> asyncio.Task[Connection]:
        """Connect in the background, after the backoff if the last attempt failed; one attempt for all who ask."""
        link = self._links.setdefault((node_id, purpose), _Link())
        if link.attempt is None:
            link.attempt = asyncio.get_running_loop().create_task(self._connect(link, node_id))
            link.attempt.add_done_callback(_retrieve)
        return link.attempt

    async def connection(self, node_id: int, purpose: str = DATA) -> Connection:
        """A connection that is up. Raises KafkaError(NETWORK_EXCEPTION)."""
        found = self.ready(node_id, purpose)
        if found is not None:
            return found
        return await self._result_of(self.attempt(node_id, purpose))

    async def _result_of(self, attempt: asyncio.Task[Connection]) -> Connection:
        """Wait for an attempt that others may wait for too. `close` ends it, which is an error and no cancellation,
        unless the caller is cancelled too.
        """
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            is_cancelled = caller is not None and caller.cancelling() > 0
            if self._closed and attempt.cancelled() and not is_cancelled:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed") from None
            raise

    async def _connect(self, link: _Link, node_id: int) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, link.retry_at - loop.time()))
            node = self.metadata.nodes.get(node_id)
            if self._closed or node is None:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} is not in the cluster")
            connection = await self._open(node.host, node.port)
            if connection.closed:  # in the moment between its last answer and now: nobody has been told
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} closed the connection")
        except KafkaError:
            link.failures += 1
            link.retry_at = loop.time() + self._reconnect_backoff.wait_ms(link.failures) / 1000
            # Perhaps it moved, or another has taken over what it led.
            self.request_refresh()
            raise
        finally:
            link.attempt = None
        connection.node_id = node_id
        connection.on_close = lambda closed: self._lost(link, closed)
        link.connection = connection
        link.failures = 0
        return connection

    async def _open(self, host: str, port: int) -> Connection:
        config = self.config
        if self._closed:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed")
        return await connect(
            host,
            port,
            client_id=config.client_id,
            max_frame_bytes=config.receive_message_max_bytes,
            software_version=SOFTWARE_VERSION,
            timeout_ms=config.socket_connection_setup_timeout_ms,
        )

    def _lost(self, link: _Link, connection: Connection) -> None:
        if link.connection is connection:
            link.connection = None
            link.failures = max(link.failures, 1)
            link.retry_at = asyncio.get_running_loop().time() + self._reconnect_backoff.wait_ms(1) / 1000
        if not self._closed:
            self.request_refresh()

    async def any_connection(self) -> Connection:
        """A connection to any broker: one that is up, the least busy, or the first that can be reached."""
        up = [link.connection for (_, purpose), link in self._links.items() if link.connection and purpose == DATA]
        if self._bootstrap is not None and not self._bootstrap.closed:
            up.append(self._bootstrap)
        if up:
            return min(up, key=lambda connection: connection.in_flight)
        if self._bootstrap_attempt is None:
            self._bootstrap_attempt = asyncio.get_running_loop().create_task(self._reach_any())
            self._bootstrap_attempt.add_done_callback(_retrieve)
        return await self._result_of(self._bootstrap_attempt)

    async def _reach_any(self) -> Connection:
        try:
            self._bootstrap = await self._first_reachable()
            return self._bootstrap
        finally:
            self._bootstrap_attempt = None

    async def _first_reachable(self) -> Connection:
        candidates = [(node.host, node.port) for node in self.metadata.nodes.values()]
        self.rng.shuffle(candidates)
        problem: KafkaError | None = None
        for host, port in dict.fromkeys(candidates + self._addresses):
            try:
                return await self._open(host, port)
            except KafkaError as error:
                problem = error
        raise problem or KafkaError(ErrorCode.NETWORK_EXCEPTION, "no address to connect to")

    def close_idle(self) -> None:
        """Close connections unused for longer than `connections_max_idle_ms`, before the broker does."""
        oldest = asyncio.get_running_loop().time() - self.config.connections_max_idle_ms / 1000
        open_ones = [link.connection for link in self._links.values()] + [self._bootstrap]
        for connection in open_ones:
            if connection is not None and not connection.in_flight and connection.last_used < oldest:
                connection.close()

    # -- metadata

    def forget_idle_topics_after(self, idle_ms: float) -> None:
        """Drop topics nobody used for so long (`metadata.max.idle.ms`)."""
        self._topic_max_idle_ms = idle_ms

    def track(self, topics: Iterable[str]) -> bool:
        """Keep metadata of these topics; True when one of them is new, and then a refresh is on its way."""
        now = asyncio.get_running_loop().time()
        new = False
        for topic in topics:
            new = new or (topic not in self._topics)
            self._topics[topic] = now
        if new:
            self._refresh_urgent.set()
            self.request_refresh()
        return new

    def track_only(self, topics: Iterable[str]) -> None:
        """Keep metadata of these topics and no others."""
        wanted = dict.fromkeys(topics)
        for topic in [topic for topic in self._topics if topic not in wanted]:
            del self._topics[topic]
        self.track(wanted)

    def request_refresh(self) -> None:
        """Ask for fresh metadata soon; many requests make one."""
        self._refresh_wanted.set()

    async def wait_for_metadata(self, timeout_ms: float) -> bool:
        """Ask for fresh metadata and wait for it; False when it did not come in time. Raises KafkaError when closed."""
        self._refuse_when_closed()
        self.request_refresh()
        if self._refreshed is None or self._refreshed.done():
            self._refreshed = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._refreshed], timeout=max(0.0, timeout_ms) / 1000)
        self._refuse_when_closed()
        return bool(done)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed")

    async def topic(self, name: str, timeout_ms: float) -> TopicMetadata:
        """A topic that can be used, created by the broker if it may. Raises KafkaError when there is none in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        self.track((name,))
        while True:
            found = self.metadata.topics.get(name)
            if found is not None and found.usable:
                return found
            if found is not None and found.error is not ErrorCode.NONE and not found.error.retriable:
                raise KafkaError(found.error, f"topic {name!r}")
            left_ms = (deadline - loop.time()) * 1000
            if left_ms <= 0:
                code = found.error if found is not None and found.error else ErrorCode.REQUEST_TIMED_OUT
                raise KafkaError(code, f"topic {name!r} did not come into the metadata in time")
            await self.wait_for_metadata(left_ms)

    async def _keep_fresh(self) -> None:
        max_age = self.config.metadata_max_age_ms / 1000
        failures = 0
        while True:
            try:
                async with asyncio.timeout(max_age):
                    await self._refresh_wanted.wait()
            except TimeoutError:
                self.close_idle()
            self._refresh_wanted.clear()
            self._refresh_urgent.clear()
            try:
                await self._refresh_once()
                failures = 0
            except KafkaError as error:
                failures += 1
                logger.debug("metadata could not be refreshed: %s", error)
                self._refresh_wanted.set()
            # At most one request per backoff, however many ask; only a topic that is new does not wait.
            try:
                async with asyncio.timeout(self.retry_backoff.wait_ms(max(failures, 1)) / 1000):
                    await self._refresh_urgent.wait()
            except TimeoutError:
                pass

    async def _refresh_once(self) -> None:
        if self._topic_max_idle_ms is not None:
            oldest = asyncio.get_running_loop().time() - self._topic_max_idle_ms / 1000
            for topic in [topic for topic, used in self._topics.items() if used < oldest]:
                del self._topics[topic]
        wanted = None if self.all_topics else list(self._topics)
        response = await self.ask_metadata(wanted, create=self._auto_create_topics)
        if not response.brokers:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "the cluster named no brokers")
        self.metadata = merged(self.metadata, response, wanted)
        if any(topic.error.retriable for topic in self.metadata.topics.values()):
            self.request_refresh()
        if self._refreshed is not None and not self._refreshed.done():
            self._refreshed.set_result(None)
        if self.on_metadata is not None:
            self.on_metadata()

    async def ask_metadata(self, topics: list[str] | None, *, create: bool = False) -> MetadataResponse:
        """One Metadata answer, of these topics or of all; what is kept does not change."""
        connection = await self.any_connection()
        request = MetadataRequest(
            topics=None if topics is None else [MetadataRequestTopic(name=topic) for topic in topics],
            allow_auto_topic_creation=create or not connection.supports(MetadataRequest, 4),
        )
        return await connection.call(request, MetadataResponse, self.config.request_timeout_ms)

    # -- requests

    async def call(
        self,
        node_id: int,
        request: Message,
        response: type[Response],
        *,
        purpose: str = DATA,
        timeout_ms: float | None = None,
        newest: int = 32767,
    ) -> Response:
        """Ask one node. Raises KafkaError: NETWORK_EXCEPTION, REQUEST_TIMED_OUT, UNSUPPORTED_VERSION.

        A connection with something in flight is passed over: that may be a fetch which waits for data.
        """
        if purpose == DATA:
            busy = self.ready(node_id)
            if busy is not None and busy.in_flight:
                purpose = COORDINATOR
        connection = await self.connection(node_id, purpose)
        return await connection.call(request, response, timeout_ms or self.config.request_timeout_ms, newest)

    async def call_any(self, request: Message, response: type[Response], *, newest: int = 32767) -> Response:
        """Ask whichever broker is at hand."""
        connection = await self.any_connection()
        return await connection.call(request, response, self.config.request_timeout_ms, newest)

    async def find_coordinator(self, key: str, key_type: int = 0) -> int:
        """The node that coordinates a group (key type 0) or a transactional id (1). Raises KafkaError."""
        connection = await self.any_connection()
        batched = connection.supports(FindCoordinatorRequest, 4)
        request = (
            FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
            if batched
            else FindCoordinatorRequest(key=key, key_type=key_type)
        )
        answer = await connection.call(request, FindCoordinatorResponse, self.config.request_timeout_ms)
        if batched and answer.coordinators:
            first = answer.coordinators[0]
            code, message, node = first.error_code, first.error_message, Node(first.node_id, first.host, first.port)
        else:
            code, message, node = (
                answer.error_code,
                answer.error_message,
                Node(answer.node_id, answer.host, answer.port),
            )
        if code:
            raise KafkaError(ErrorCode.of(code), message or f"no coordinator for {key!r}")
        if node.node_id not in self.metadata.nodes:
            self.metadata = self.metadata._replace(nodes={**self.metadata.nodes, node.node_id: node})
        return node.node_id


def _retrieve(task: asyncio.Task[Connection]) -> None:
    """The attempt's failure is also heard by whoever awaits it; when nobody does, that is no error of the program."""
    if not task.cancelled():
        task.exception()
