"""A client's view of the cluster: connections by node, current metadata, requests to nodes.

Here: bootstrap, reconnects with backoff, metadata refreshes, lookup of leaders and coordinators.
Not here: the content of the requests. Invariants: at most one connection and one connection attempt
exist per (node, purpose). Metadata covers only the topics in use and drops idle ones. Every wait
ends by a timeout, a response or `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Container, Iterable
from functools import partial
from typing import TypeVar

from tidelog.client.client_logging import client_logger
from tidelog.client.config import ClientConfig
from tidelog.client.model import Node
from tidelog.client.network.backoff import ExponentialBackoff
from tidelog.client.network.connection import AnswerTooLarge, Connection, connect, first_success
from tidelog.client.network.metadata import EMPTY, ClusterMetadata, TopicMetadata, merge_metadata
from tidelog.client.network.outcomes import cancel_all, retrieve_exception, start_task
from tidelog.protocol.addresses import address_text
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.version import __version__

logger = client_logger(__name__)
Response = TypeVar("Response", bound=Message)

DATA = "data"
COORDINATOR = "coordinator"
"""A separate connection for the group coordinator: heartbeats must not wait behind a fetch that
waits for data.
"""
JOINING = "joining"
"""A separate connection for JoinGroup and SyncGroup: they wait for other members, and commits must
not.
"""
_BROKER_WAIT_S = 1.0
"""The time that one broker has before the next one is tried as well: a host that is down may not even refuse."""
_ANSWER_WAIT_S = 3.0
"""The time that a broker has for what any broker answers before another one is asked as well: it may hang."""
_UNREACHABLE_S = 3.0
"""A broker that cannot be reached for so long is logged: a poll waits for it without an error."""
_LOG_INTERVAL_S = 60.0
"""The least time between two log lines of the same failure."""
_PROMPT_LEADER_ROUNDS = 10
"""How many refreshes in a row may look for leaders in vain before they wait: an election ends soon, a lost replica
stays lost (KIP-580).
"""
_IDLE_LOOK_S_MIN = 1.0
"""The least time between two looks for idle connections."""
CLOSE_TIMEOUT_S = 1.0
"""The time for written requests to leave when a client closes: a broker that hangs does not read
them.
"""


class _Link:
    """The connection to one node for one purpose, and its number of consecutive failures with the last one's reason."""

    __slots__ = ("connect_task", "connection", "failing_since_s", "failures", "reason", "retry_at_s", "silent_until_s")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.connect_task: asyncio.Task[Connection] | None = None
        self.failures = 0
        self.reason = ""
        self.retry_at_s = 0.0
        self.failing_since_s: float | None = None
        self.silent_until_s = 0.0

    def count_failure(self, reason: str, node_id: int, now_s: float) -> None:
        """Note that an attempt to connect has failed, and log it when all have failed for some seconds."""
        if self.failing_since_s is None or now_s - self.retry_at_s > _LOG_INTERVAL_S:  # or long without an attempt
            self.failing_since_s, self.silent_until_s = now_s, now_s + _UNREACHABLE_S
        self.failures += 1
        self.reason = reason
        if now_s >= self.silent_until_s:
            self.silent_until_s = now_s + _LOG_INTERVAL_S
            logger.warning(
                "broker %d cannot be reached at its advertised address for %.0f s: %s",
                node_id, now_s - self.failing_since_s, reason,
            )  # fmt: skip


class Cluster:
    """The connections and the metadata of one client. Call `start` first and `close` at the end."""

    def __init__(
        self, config: ClientConfig, *, auto_create_topics: bool = False, rng: random.Random | None = None
    ) -> None:
        self.config = config
        self.metadata: ClusterMetadata = EMPTY
        self.refreshes_begun = 0
        self.metadata_refresh = 0
        """The number of the refresh of all topics that `metadata` comes from, counted as `refreshes_begun`. A clock
        would not tell what was asked for after a moment: uvloop's counts milliseconds.
        """
        self._metadata_asked_s = -math.inf
        """When that refresh was begun, in loop time."""
        self.on_metadata: Callable[[], None] | None = None
        self.on_loop_end: Callable[[], None] | None = None
        """Called when the tasks of the event loop are cancelled before `close`, as at the end of `asyncio.run`."""
        self.all_topics = False
        """Request the metadata of all topics, as a subscription by pattern needs."""
        self.names_new_topics_alone = False
        """A refresh that only new topics need names only them, as in Kafka's producer (KIP-526)."""
        rng = rng or random.Random()
        self.rng = rng
        self.retry_backoff = ExponentialBackoff(config.retry_backoff_ms, config.retry_backoff_max_ms, rng)
        self._reconnect_backoff = ExponentialBackoff(config.reconnect_backoff_ms, config.reconnect_backoff_max_ms, rng)
        self._auto_create_topics = auto_create_topics
        self._addresses = config.bootstrap_addresses()
        self._links: dict[tuple[int, str], _Link] = {}
        self.keeps_broker = False
        """Send requests that any broker answers to the same broker while it is connected: it knows
        at once what it has changed, and others a moment later.
        """
        self._kept_connection: Connection | None = None
        self._bootstrap: Connection | None = None
        self._bootstrap_attempt: asyncio.Task[Connection] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._last_idle_look_s = 0.0
        self._topics: dict[str, float] = {}
        self._topic_max_idle_ms: float | None = None
        self._kept_topics: Callable[[], Container[str]] = tuple
        self._new_topics: set[str] = set()
        """Topics that the metadata does not have yet, if `names_new_topics_alone`. Their refresh is requested, or on
        its way.
        """
        self._all_are_due = False
        """The next refresh is for other topics than the new ones, too."""
        self._all_due_s = -math.inf
        """When a refresh of all topics is due by itself, in loop time."""
        self._failed_topics: set[str] = set()
        """Topics with passing errors in the metadata."""
        self._failed_rounds = 0
        """How many refreshes in a row have left them as they are."""
        self._leaders_wanted = False
        """The next refresh of all topics looks for leaders that the metadata does not have."""
        self._leader_rounds = 0
        """How many such refreshes in a row have changed nothing."""
        self._leaders_due_s = -math.inf
        """When the next one may begin, in loop time."""
        self._leader_timer: asyncio.TimerHandle | None = None
        self._refresh_requested = asyncio.Event()
        self._refresh_is_urgent = asyncio.Event()
        self._refresh_future: asyncio.Future[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._closed = False
        self._close_event = asyncio.Event()
        self._finalized_features: dict[str, int] = {}
        self._finalized_features_epoch = -1
        self._too_large_silent_until_s = 0.0

    # -- lifecycle

    async def start(self) -> None:
        """Connect to a bootstrap server and fetch metadata.

        A start that raises, or is cancelled, leaves the cluster closed. Raises KafkaError(NETWORK_EXCEPTION) without
        any answer, and at once when `close` is called.
        """
        try:
            await self._fetch_first_metadata()
            self._check_open()
            self._refresh_task = start_task(self._refresh_loop())
            self._refresh_task.add_done_callback(self._handle_refresh_end)
        except BaseException:
            await self.close()
            raise

    async def _fetch_first_metadata(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.socket_connection_setup_timeout_ms / 1000
        failures = 0
        while True:
            try:
                await self._refresh_once()
                return
            except KafkaError as error:
                self._check_open()
                failures += 1
                delay_s = self._reconnect_backoff.wait_ms(failures) / 1000
                if loop.time() + delay_s >= deadline:
                    servers = ", ".join(address_text(*each) for each in self._addresses)
                    reason = f"no broker reached at {servers}: {error.message or error}"
                    raise KafkaError(ErrorCode.NETWORK_EXCEPTION, reason) from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._close_event.wait()

    async def close(self) -> None:
        """Close every connection; waiting calls fail with NETWORK_EXCEPTION."""
        self._closed = True
        self._close_event.set()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._cancel_leader_timer()
        tasks: list[asyncio.Task[Connection] | asyncio.Task[None]] = []
        if self._refresh_task is not None:
            tasks.append(self._refresh_task)
        tasks += [link.connect_task for link in self._links.values() if link.connect_task is not None]
        connections_to_close = self._connections()
        for connection in connections_to_close:
            connection.close()
        if self._bootstrap_attempt is not None:
            tasks.append(self._bootstrap_attempt)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.wait_closed(CLOSE_TIMEOUT_S) for connection in connections_to_close))
        if self._refresh_future is not None and not self._refresh_future.done():
            self._refresh_future.set_result(None)

    # -- connections

    def ready(self, node_id: int, purpose: str = DATA) -> Connection | None:
        """The open connection, or None. Does not connect."""
        link = self._links.get((node_id, purpose))
        return None if link is None else link.connection

    def failure_of(self, node_id: int, purpose: str = DATA) -> str:
        """Why the last attempt to connect to a node failed; empty if none has failed since it was connected."""
        link = self._links.get((node_id, purpose))
        return link.reason if link is not None and link.failures else ""

    def start_connecting(self, node_id: int, purpose: str = DATA) -> asyncio.Task[Connection]:
        """Connect in the background, after the backoff of a failed attempt.

        All callers share one attempt.
        """
        link = self._links.setdefault((node_id, purpose), _Link())
        if link.connect_task is None:
            link.connect_task = start_task(self._connect(link, node_id))
            link.connect_task.add_done_callback(retrieve_exception)
        return link.connect_task

    async def connection(self, node_id: int, purpose: str = DATA) -> Connection:
        """An open connection. Raises KafkaError(NETWORK_EXCEPTION)."""
        connection = self.ready(node_id, purpose)
        if connection is not None:
            return connection
        return await self._await_attempt(self.start_connecting(node_id, purpose))

    async def _await_attempt(self, connect_task: asyncio.Task[Connection]) -> Connection:
        """Wait for a shared connection attempt.

        `close` cancels the attempt. The caller gets an error then, or a cancellation when it is
        cancelled too.
        """
        try:
            return await asyncio.shield(connect_task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            is_cancelled = caller is not None and caller.cancelling() > 0
            if self._closed and connect_task.cancelled() and not is_cancelled:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed") from None
            raise

    async def _connect(self, link: _Link, node_id: int) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(max(0.0, link.retry_at_s - loop.time()))
            node = self.metadata.nodes.get(node_id)
            if self._closed or node is None:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} is not in the cluster")
            connection = await self._open_connection(node.host, node.port)
            if connection.closed:  # it closed after its last response, before `on_close` was set
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} closed the connection")
            if self._has_moved(node_id, connection):
                connection.close()
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} has another address now")
        except Exception as error:  # of any kind: without a wait callers would try again at once, and again
            link.count_failure((isinstance(error, KafkaError) and error.message) or str(error), node_id, loop.time())
            link.retry_at_s = loop.time() + self._reconnect_backoff.wait_ms(link.failures) / 1000
            # The node may have moved, or another node may lead its partitions now.
            self.request_refresh()
            raise
        finally:
            link.connect_task = None
        connection.node_id = node_id
        connection.on_close = lambda closed: self._handle_close(link, closed)
        link.connection = connection
        link.failures = 0
        link.failing_since_s = None
        return connection

    async def _open_connection(self, host: str, port: int) -> Connection:
        config = self.config
        if self._closed:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed")
        connection = await connect(
            host,
            port,
            client_id=config.client_id,
            max_frame_bytes=config.receive_message_max_bytes,
            software_version=__version__,
            timeout_ms=config.socket_connection_setup_timeout_ms,
        )
        if config.connections_max_idle_ms >= 0:
            self._await_idle(config.connections_max_idle_ms / 1000)
        if connection.finalized_features_epoch >= self._finalized_features_epoch:
            self._finalized_features_epoch = connection.finalized_features_epoch
            self._finalized_features = connection.finalized_features
        return connection

    def _has_moved(self, node_id: int, connection: Connection) -> bool:
        """Whether the metadata has another address of the node than the connection's."""
        node = self.metadata.nodes.get(node_id)
        return node is not None and connection.address != address_text(node.host, node.port)

    def _close_moved(self) -> None:
        """Close the connections to addresses that nodes have left: another node may listen there by now. It would
        refuse every request as not the leader, and the connection would never break.
        """
        for (node_id, _), link in self._links.items():
            if link.connection is not None and self._has_moved(node_id, link.connection):
                link.connection.close()

    def finalized_level(self, feature: str) -> int:
        """The latest known finalized level of a feature; 0 when it is not finalized."""
        return self._finalized_features.get(feature, 0)

    def _handle_close(self, link: _Link, connection: Connection) -> None:
        if link.connection is connection:
            link.connection = None
            link.failures = max(link.failures, 1)
            link.retry_at_s = asyncio.get_running_loop().time() + self._reconnect_backoff.wait_ms(1) / 1000
        if not self._closed:
            self.request_refresh()

    async def any_connection(self) -> Connection:
        """A connection to any broker: the least busy open one, else the first reachable broker.

        The same as before with `keeps_broker`.
        """
        if not self.keeps_broker:
            return await self._any_connection()
        if self._kept_connection is None or self._kept_connection.closed:
            self._kept_connection = await self._any_connection()
        return self._kept_connection

    async def _any_connection(self) -> Connection:
        candidates = [
            link.connection for (_, purpose), link in self._links.items() if link.connection and purpose == DATA
        ]
        if self._bootstrap is not None and not self._bootstrap.closed:
            candidates.append(self._bootstrap)
        if candidates:
            return min(candidates, key=lambda connection: connection.in_flight)
        if self._bootstrap_attempt is None:
            self._bootstrap_attempt = start_task(self._open_bootstrap())
            self._bootstrap_attempt.add_done_callback(retrieve_exception)
        return await self._await_attempt(self._bootstrap_attempt)

    async def _open_bootstrap(self) -> Connection:
        try:
            connection = await self._connect_first_reachable()
            if self._bootstrap is None or self._bootstrap.closed:
                self._bootstrap = connection
            else:
                connection.close()  # `_ask_address` came first
            return self._bootstrap
        finally:
            self._bootstrap_attempt = None

    async def _connect_first_reachable(self) -> Connection:
        candidates = [(node.host, node.port) for node in self.metadata.nodes.values()]
        self.rng.shuffle(candidates)
        addresses = list(dict.fromkeys(candidates + self._addresses))
        return await first_success(lambda address: self._open_connection(*address), addresses, _BROKER_WAIT_S)

    def _await_idle(self, delay_s: float) -> None:
        """Look for idle connections after this time, unless a look is due already."""
        if self._idle_timer is None and not self._closed:
            delay_s = max(delay_s, _IDLE_LOOK_S_MIN)
            self._idle_timer = asyncio.get_running_loop().call_later(delay_s, self._close_idle)

    def _close_idle(self) -> None:
        """Close connections unused for `connections_max_idle_ms` and since the last look, before the broker does. The
        next look is due when the first of the others may be idle; without any, with the next connection.

        A loop that stood still for so long looks before the caller that has waited for a connection can use it.
        """
        self._idle_timer = None
        now_s, max_idle_s = asyncio.get_running_loop().time(), self.config.connections_max_idle_ms / 1000
        before_s, self._last_idle_look_s = min(now_s - max_idle_s, self._last_idle_look_s), now_s
        for link in self._links.values():
            if link.connection is not None and link.connection.is_idle(before_s):
                # Closed on purpose: unlike the loss of a broker it is no reason to fetch metadata, and to connect.
                idle, link.connection = link.connection, None
                idle.on_close = None
                idle.close()
        if self._bootstrap is not None and self._bootstrap.is_idle(before_s):
            self._bootstrap.close()
            self._bootstrap = None
        unused_s = [connection.unused_s(now_s) for connection in self._connections()]
        if unused_s:
            self._await_idle(max_idle_s - max(unused_s))

    def close_connections(self) -> None:
        """Close every connection. The next request that any broker answers goes to a broker taken at random: for a
        caller that doubts the answer of one.
        """
        for connection in self._connections():
            connection.close()

    def _connections(self) -> list[Connection]:
        connections = [link.connection for link in self._links.values()] + [self._bootstrap]
        return [connection for connection in connections if connection is not None]

    # -- metadata

    def forget_idle_topics_after(self, idle_ms: float, kept_topics: Callable[[], Container[str]] = tuple) -> None:
        """Drop topics that were unused for this time (`metadata.max.idle.ms`), except those of `kept_topics()`."""
        self._topic_max_idle_ms = idle_ms
        self._kept_topics = kept_topics

    def track(self, topics: Iterable[str]) -> bool:
        """Keep metadata of these topics.

        Returns True, and requests a refresh, when one of them is new.
        """
        now_s = asyncio.get_running_loop().time()
        new_topics = []
        for topic in topics:
            if topic not in self._topics:
                new_topics.append(topic)
            self._topics[topic] = now_s
        if new_topics:
            self._refresh_is_urgent.set()
            if self.names_new_topics_alone:
                self._new_topics.update(new_topics)
                self._refresh_requested.set()
            else:
                self.request_refresh()
        return bool(new_topics)

    def track_only(self, topics: Iterable[str]) -> None:
        """Keep metadata of these topics and no others."""
        topic_names = dict.fromkeys(topics)
        for topic in [topic for topic in self._topics if topic not in topic_names]:
            del self._topics[topic]
        self.track(topic_names)

    def request_refresh(self) -> None:
        """Schedule a metadata refresh of all topics. Several calls make one refresh."""
        self._all_are_due = True
        self._refresh_requested.set()

    def request_leaders(self) -> None:
        """Schedule a refresh because the metadata has no leader of a partition: at once for the first ones, later and
        later while they change nothing. A refused topic, for one, has no leader until it is allowed.
        """
        if self._leader_timer is not None or self._closed:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._leaders_due_s:
            self._leader_timer = loop.call_at(self._leaders_due_s, self._refresh_leaders)
        else:
            self._refresh_leaders()

    def _refresh_leaders(self) -> None:
        self._leader_timer = None
        self._leaders_wanted = True
        self.request_refresh()

    def _cancel_leader_timer(self) -> None:
        if self._leader_timer is not None:
            self._leader_timer.cancel()
            self._leader_timer = None

    async def wait_for_leaders(self, timeout_ms: float) -> None:
        """`request_leaders`, and wait for the next refresh or the timeout. Raises KafkaError when closed."""
        self._check_open()
        self.request_leaders()
        await self._wait_for_refresh(timeout_ms)

    async def wait_for_metadata(self, timeout_ms: float) -> bool:
        """Schedule a refresh and wait for it; False after the timeout.

        Raises KafkaError when closed.
        """
        self._check_open()
        self.request_refresh()
        return await self._wait_for_refresh(timeout_ms)

    async def _wait_for_refresh(self, timeout_ms: float) -> bool:
        """Wait for the next end of a refresh that is scheduled, or on its way; False after the timeout."""
        if self._refresh_future is None or self._refresh_future.done():
            self._refresh_future = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._refresh_future], timeout=max(0.0, timeout_ms) / 1000)
        self._check_open()
        return bool(done)

    def _check_open(self) -> None:
        if self._closed:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "this client is closed")

    def topic_id(self, name: str) -> bytes:
        """The topic's id in the latest metadata, all zero without one."""
        return self.metadata.topic_id(name)

    async def topic(self, name: str, timeout_ms: float, waited_ms: float = 0.0) -> TopicMetadata:
        """A usable topic, created by the broker where allowed.

        Raises KafkaError without one in time, or with an error that stays. An error from before the call, or from
        before the `waited_ms` that its caller has waited already, is asked for again: the topic may be allowed by now.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        is_answered = waited_ms > 0 and self._metadata_asked_s >= loop.time() - waited_ms / 1000
        refreshes_before = self.refreshes_begun if name in self.metadata.topics and not is_answered else -1
        while True:
            self.track((name,))  # each time: the wait may be longer than `metadata_max_idle_ms`
            topic = self.metadata.topics.get(name)
            if topic is not None and topic.is_usable:
                return topic
            is_refused = topic is not None and topic.error is not ErrorCode.NONE and not topic.error.retriable
            if topic is not None and is_refused and self.metadata_refresh > refreshes_before:
                raise KafkaError(topic.error, f"topic {name!r}")
            remaining_ms = (deadline - loop.time()) * 1000
            if remaining_ms <= 0:
                code = topic.error if topic is not None and topic.error else ErrorCode.REQUEST_TIMED_OUT
                raise KafkaError(code, f"topic {name!r} did not come into the metadata in time")
            if name in self._new_topics:
                self._check_open()
                await self._wait_for_refresh(remaining_ms)
            else:
                await self.wait_for_metadata(remaining_ms)

    async def _refresh_loop(self) -> None:
        failures = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._all_due_s):
                    await self._refresh_requested.wait()
            try:
                await self._refresh_once()
                failures = 0
            except KafkaError as error:
                failures += 1
                self._log_refresh_failure(error)
                self.request_refresh()
            except Exception:
                # Without this loop the client would stand still with no word of the cause.
                failures += 1
                logger.exception("a metadata refresh failed by a fault of the client")
                self.request_refresh()
            # At most one request per backoff, whatever the number of callers. Only a new topic
            # skips the wait.
            try:
                async with asyncio.timeout(self.retry_backoff.wait_ms(max(failures, 1)) / 1000):
                    await self._refresh_is_urgent.wait()
            except TimeoutError:
                pass

    def _log_refresh_failure(self, error: KafkaError) -> None:
        """Warn of an answer that is too large, at most once a minute: no later attempt helps."""
        now_s = asyncio.get_running_loop().time()
        level = logging.DEBUG
        if isinstance(error, AnswerTooLarge) and now_s >= self._too_large_silent_until_s:
            level, self._too_large_silent_until_s = logging.WARNING, now_s + _LOG_INTERVAL_S
        logger.log(level, "metadata could not be refreshed: %s", error)

    def _handle_refresh_end(self, task: asyncio.Task[None]) -> None:
        if not self._closed and self.on_loop_end is not None:
            self.on_loop_end()

    async def _refresh_once(self) -> None:
        self._refresh_requested.clear()
        self._refresh_is_urgent.clear()
        now_s = asyncio.get_running_loop().time()
        if self._topic_max_idle_ms is not None:
            oldest_use_s = now_s - self._topic_max_idle_ms / 1000
            idle_topics = [topic for topic, last_used_s in self._topics.items() if last_used_s < oldest_use_s]
            kept_topics = self._kept_topics() if idle_topics else ()
            for topic in idle_topics:
                if topic not in kept_topics:
                    del self._topics[topic]
        wanted = None if self.all_topics else dict(self._topics).keys()  # in order, and as they are now
        self._new_topics &= self._topics.keys()
        is_of_all = self._all_are_due or now_s >= self._all_due_s or not self._new_topics
        asked = (None if wanted is None else list(wanted)) if is_of_all else list(self._new_topics)
        self._all_are_due = self._all_are_due and not is_of_all
        if is_of_all:
            self._begin_leader_round(now_s)
        self.refreshes_begun += 1
        refresh = self.refreshes_begun
        response = await self.fetch_metadata(asked, create=self._auto_create_topics)
        if not response.brokers:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "the cluster named no brokers")
        if is_of_all:
            self.metadata_refresh, self._all_due_s = refresh, now_s + self.config.metadata_max_age_ms / 1000
        before, self.metadata = self.metadata, merge_metadata(self.metadata, response, wanted)
        if is_of_all and (before.nodes, before.topics) != (self.metadata.nodes, self.metadata.topics):
            self._leader_rounds, self._leaders_due_s = 0, -math.inf
            self._cancel_leader_timer()  # those who still miss a leader ask again
        self._close_moved()
        if is_of_all:
            self._metadata_asked_s = now_s
        self._request_missing(asked)
        if self._refresh_future is not None and not self._refresh_future.done():
            self._refresh_future.set_result(None)
        if self.on_metadata is not None:
            self.on_metadata()

    def _begin_leader_round(self, now_s: float) -> None:
        if self._leaders_wanted:
            self._leaders_wanted = False
            self._leader_rounds += 1
        if self._leader_rounds > _PROMPT_LEADER_ROUNDS:
            wait_ms = self.retry_backoff.wait_ms(self._leader_rounds - _PROMPT_LEADER_ROUNDS)
            self._leaders_due_s = now_s + wait_ms / 1000

    def _request_missing(self, asked: Iterable[str] | None) -> None:
        """Request another refresh if topics have passing errors: of those that are new and stay it, one by itself. Of
        all there is one later and later, as in Java (KIP-580): a topic that was misspelt is missing for good.
        """
        topics = self.metadata.topics
        failed = {name for name, topic in topics.items() if topic.error is not ErrorCode.NONE and topic.error.retriable}
        self._new_topics -= {name for name in asked or () if name not in failed or topics[name].partitions}
        if self._new_topics:
            self._refresh_requested.set()
        self._failed_rounds = self._failed_rounds + 1 if failed == self._failed_topics else 1
        self._failed_topics = failed
        if failed - self._new_topics:
            wait_s = self.retry_backoff.wait_ms(self._failed_rounds) / 1000
            self._all_due_s = min(self._all_due_s, asyncio.get_running_loop().time() + wait_s)

    async def fetch_metadata(
        self, topics: list[str] | None, *, create: bool = False, node_id: int | None = None
    ) -> MetadataResponse:
        """One Metadata response for these topics, or for all (None), of this node or of any. `metadata` does not
        change.
        """

        async def ask(connection: Connection) -> MetadataResponse:
            request = MetadataRequest(
                topics=None if topics is None else [MetadataRequestTopic(name=topic) for topic in topics],
                allow_auto_topic_creation=create or not connection.supports(MetadataRequest, 4),
            )
            return await connection.call(request, MetadataResponse, self.config.request_timeout_ms)

        return await (self.ask_any(ask) if node_id is None else self._ask(ask, node_id))

    async def fetch_metadata_within(self, topics: list[str] | None, timeout_ms: float) -> MetadataResponse:
        """As `fetch_metadata`, with retries for `timeout_ms`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        failures = 0
        last_error: KafkaError | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    self._check_open()
                    try:
                        return await self.fetch_metadata(topics)
                    except KafkaError as error:
                        if not error.retriable:
                            raise
                        last_error = error
                    failures += 1
                    await asyncio.sleep(self.retry_backoff.wait_ms(failures) / 1000)
        except TimeoutError:
            text = f"no broker described the topics in {timeout_ms:.0f} ms: {last_error or 'none answered'}"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text) from None

    # -- requests

    async def call(
        self,
        node_id: int,
        request: Message,
        response: type[Response],
        *,
        purpose: str = DATA,
        timeout_ms: float | None = None,
        max_version: int = 32767,
    ) -> Response:
        """Send a request to one node and wait. Raises KafkaError: NETWORK_EXCEPTION,
        REQUEST_TIMED_OUT, UNSUPPORTED_VERSION.

        Skips a data connection with a request in flight, which may be a fetch that waits for data.
        """
        if purpose == DATA:
            data_connection = self.ready(node_id)
            if data_connection is not None and data_connection.in_flight:
                purpose = COORDINATOR
        connection = await self.connection(node_id, purpose)
        return await connection.call(request, response, timeout_ms or self.config.request_timeout_ms, max_version)

    async def ask_any(self, ask: Callable[[Connection], Awaitable[Response]]) -> Response:
        """What `ask` returns for any broker; another one is asked, too, whenever none has answered for
        `_ANSWER_WAIT_S`: a broker that hangs must not hide what the others know until the request's timeout. Only for
        what may be asked twice. `close` ends it with NETWORK_EXCEPTION, whatever it waits for.
        """
        others = [partial(self._ask_node, ask, node_id) for node_id in self.metadata.nodes]
        if not others:
            others = [partial(self._ask_address, ask, *address) for address in self._addresses]
        self.rng.shuffle(others)

        closing = start_task(self._close_event.wait())
        asked = {start_task(self._ask(ask, None))}
        try:
            while True:
                wait_s = _ANSWER_WAIT_S if others else None
                await asyncio.wait({*asked, closing}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                done = {task for task in asked if task.done()}
                asked -= done
                for task in done:
                    if task.exception() is None:
                        return task.result()
                if done and not asked:
                    return done.pop().result()
                self._check_open()
                if not done:
                    asked.add(start_task(others.pop()()))
        finally:
            cancel_all([*asked, closing])

    async def _ask_node(self, ask: Callable[[Connection], Awaitable[Response]], node_id: int) -> Response:
        connection = await self.connection(node_id, COORDINATOR)
        answer = await ask(connection)
        self._kept_connection = connection  # later calls need not wait for the one that hangs
        return answer

    async def _ask_address(self, ask: Callable[[Connection], Awaitable[Response]], host: str, port: int) -> Response:
        connection = await self._open_connection(host, port)
        try:
            answer = await ask(connection)
        except BaseException:
            connection.close()
            raise
        hanging, self._bootstrap = self._bootstrap, connection
        if hanging is not None:
            hanging.close()
        return answer

    async def _ask(self, ask: Callable[[Connection], Awaitable[Response]], node_id: int | None) -> Response:
        return await ask(await (self.any_connection() if node_id is None else self.connection(node_id, COORDINATOR)))

    async def call_any(self, request: Message, response: type[Response], *, max_version: int = 32767) -> Response:
        """Send a request that may be asked twice to any broker and wait."""
        timeout_ms = self.config.request_timeout_ms
        return await self.ask_any(lambda connection: connection.call(request, response, timeout_ms, max_version))

    async def find_coordinator(self, key: str, key_type: int = 0) -> int:
        """The node that coordinates a group (key type 0) or a transactional id (1).

        Raises KafkaError.
        """

        async def ask(connection: Connection) -> FindCoordinatorResponse:
            request = (
                FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
                if connection.supports(FindCoordinatorRequest, 4)
                else FindCoordinatorRequest(key=key, key_type=key_type)
            )
            return await connection.call(request, FindCoordinatorResponse, self.config.request_timeout_ms)

        response = await self.ask_any(ask)
        if response.coordinators:
            first = response.coordinators[0]
            code, message, node = first.error_code, first.error_message, Node(first.node_id, first.host, first.port)
        else:
            code, message, node = (
                response.error_code,
                response.error_message,
                Node(response.node_id, response.host, response.port),
            )
        if code:
            raise KafkaError(ErrorCode.of(code), message or f"no coordinator for {key!r}")
        if node.node_id not in self.metadata.nodes:
            self.metadata = self.metadata._replace(nodes={**self.metadata.nodes, node.node_id: node})
        return node.node_id
