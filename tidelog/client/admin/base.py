"""The base of the admin client: its lifecycle, retries, and requests to the controller.

Not here: the calls themselves, in the other modules of this package. Invariant: a request that may
have been carried out is sent again only when it is repeatable without harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Never, ParamSpec, Self, TypeVar

from tidelog.client.arguments import as_int, check_named_options
from tidelog.client.config import AdminConfig
from tidelog.client.model import BrokerErrors
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.shared_start import SharedStart
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_partitions import CreatePartitionsRequest
from tidelog.protocol.messages.create_topics import CreateTopicsRequest
from tidelog.protocol.messages.describe_cluster import DescribeClusterRequest, DescribeClusterResponse

CREATION_SPREADS_MS = 10_000
"""How long a broker may not know a topic that this client has created."""

WAIT_SHARE = 0.9
"""The share of a call's limit for which it waits for leaders, also of topics that the metadata does not have."""

Result = TypeVar("Result")
Key = TypeVar("Key")
Response = TypeVar("Response", bound=Message)
Arguments = ParamSpec("Arguments")


class _NotYetKnown(KafkaError):
    """UNKNOWN_TOPIC_OR_PARTITION for a topic that this client has just created."""


class _NotSent(KafkaError):
    """NETWORK_EXCEPTION of a request that no broker can have got: there was no connection."""


def in_one_limit(
    call: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]]:
    """For a method of several steps: `default_api_timeout_ms` limits all of them together, as in Java."""

    @wraps(call)
    async def limited(self: Any, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        limit_ms = self._config.default_api_timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                return await call(self, *arguments, **options)
        except TimeoutError:
            if self._cluster is None:
                await self._shared_start.wait_within(0, "default_api_timeout_ms")  # raises with the addresses
            raise timed_out(limit_ms) from None

    return limited


def timed_out(limit_ms: int, *, repeatable: bool = True) -> KafkaError:
    outcome = "" if repeatable else ": it may be under way"
    return KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"no answer within default_api_timeout_ms={limit_ms}{outcome}")


class AdminBase:
    """An administrator's connection to a cluster."""

    def __init__(self, *positional: Never, **options: Any) -> None:
        check_named_options("Admin", positional)
        self._config = AdminConfig.from_options(options)
        self._cluster: Cluster | None = None
        self._shared_start = SharedStart(self._config, self._connect, "admin client")
        self._uses_forwarding = True
        self._created_topics: dict[str, float] = {}
        """Topics that a broker may not know yet, with the time from which each is to be known."""

    # -- lifecycle

    async def start(self) -> None:
        """Connect to the cluster; every call does it too. Raises KafkaError(NETWORK_EXCEPTION)."""
        await self._shared_start.wait()

    async def _connect(self) -> None:
        cluster = Cluster(self._config)
        cluster.keeps_broker = True
        # Longer than any call. With one topic deleted the metadata of all would be asked for again and again.
        cluster.forget_idle_topics_after(2 * self._config.default_api_timeout_ms)
        await cluster.start()
        self._cluster = cluster

    async def close(self) -> None:
        """Disconnect. A call after it raises RuntimeError. Does nothing in the child of a fork."""
        if self._shared_start.is_of_parent():
            return
        self._shared_start.check_loop()
        await self._shared_start.stop()
        if self._cluster is not None:
            await self._cluster.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()  # `__aexit__` does not run after this, so the start must end here
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected_cluster(self) -> Cluster:
        """The cluster, once it is connected. Raises KafkaError(REQUEST_TIMED_OUT) after `default_api_timeout_ms`."""
        await self._shared_start.wait_within(self._config.default_api_timeout_ms, "default_api_timeout_ms")
        assert self._cluster is not None
        return self._cluster

    async def _await_topics(self, cluster: Cluster, names: Iterable[str], deadline: float) -> None:
        """Wait until the metadata tells of these topics, also that one does not exist, or until `deadline`."""
        loop = asyncio.get_running_loop()
        topics = set(names)
        cluster.track(topics)  # so that one request asks for all of them
        while any(name not in cluster.metadata.topics for name in topics):
            if not await cluster.wait_for_metadata((deadline - loop.time()) * 1000):
                return

    def _timeout_ms(self, timeout_ms: int | None) -> int:
        """The time that a broker has for a request."""
        return self._config.request_timeout_ms if timeout_ms is None else as_int("timeout_ms", timeout_ms, 1)

    def _deadline(self, share: float = 1) -> float:
        """The end, in loop time, of this share of a call that begins now."""
        return asyncio.get_running_loop().time() + share * self._config.default_api_timeout_ms / 1000

    async def _retry(
        self, attempt: Callable[[], Awaitable[Result]], *, repeatable: bool = True, deadline: float | None = None
    ) -> Result:
        """Run `attempt` until it succeeds or fails for good, until `deadline` (None: `_deadline`). A call of several
        such steps is `in_one_limit`.

        A request that is not repeatable is sent again only after an error response, or where it was not sent.
        """
        loop = asyncio.get_running_loop()
        deadline = self._deadline() if deadline is None else deadline
        cluster = await self._connected_cluster()
        failures = 0
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await attempt()
            except TimeoutError:
                raise timed_out(self._config.default_api_timeout_ms, repeatable=repeatable) from None
            except KafkaError as error:
                failures += 1
                wait_s = cluster.retry_backoff.wait_ms(failures) / 1000
                may_be_done = is_unanswered(error) and not repeatable and not isinstance(error, _NotSent)
                if is_final(error) or may_be_done or loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)

    def _note_created(self, topic: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._created_topics = {name: until_s for name, until_s in self._created_topics.items() if until_s > now_s}
        self._created_topics[topic] = now_s + CREATION_SPREADS_MS / 1000

    def _note_deleted(self, topic: str) -> None:
        self._created_topics.pop(topic, None)

    def _retry_if_new(self, topic: str | None, code: int) -> None:
        """Inside an attempt: raise the error of a topic that this client has just created, for another
        attempt. Kafka's brokers learn of a topic one after the other.
        """
        until_s = self._created_topics.get(topic or "", 0.0)
        if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and asyncio.get_running_loop().time() < until_s:
            raise _NotYetKnown(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic!r}")

    async def _controller(self) -> Connection:
        """The connection for controller requests: any broker that forwards them, else the named
        controller.
        """
        cluster = await self._connected_cluster()
        try:
            if self._asks_any(cluster):
                return await cluster.any_connection()
            return await cluster.connection(cluster.metadata.controller_id)
        except KafkaError as error:
            if error.code is ErrorCode.NETWORK_EXCEPTION:
                raise _NotSent(error.code, error.message) from None
            raise

    def _asks_any(self, cluster: Cluster) -> bool:
        """Whether any broker takes controller requests."""
        return self._uses_forwarding or cluster.metadata.controller_id not in cluster.metadata.nodes

    async def _ask_controller(self, ask: Callable[[Connection], Awaitable[Response]]) -> Response:
        """What `ask` returns for the connection of `_controller`; another broker is asked, too, where that one hangs.
        Only for requests that change nothing.
        """
        cluster = await self._connected_cluster()
        return await (cluster.ask_any(ask) if self._asks_any(cluster) else ask(await self._controller()))

    async def _connection_to(self, broker_id: int) -> Connection:
        """In an attempt: the connection to this broker. Raises KafkaError: BROKER_NOT_AVAILABLE once fresh metadata
        does not have it, NETWORK_EXCEPTION while it is down.
        """
        cluster = await self._connected_cluster()
        nodes = cluster.metadata.nodes
        if broker_id not in nodes and await cluster.wait_for_metadata(self._config.request_timeout_ms):
            nodes = cluster.metadata.nodes
        if broker_id not in nodes:
            await self._raise_for_missing_broker(cluster, broker_id)
        return await cluster.connection(broker_id)

    async def _raise_for_missing_broker(self, cluster: Cluster, broker_id: int) -> None:
        """Brokers before Kafka 4.0 do not tell of those that are registered and down."""
        connection = await cluster.any_connection()
        if connection.supports(DescribeClusterRequest, 2):
            request = DescribeClusterRequest(include_fenced_brokers=True)
            answer = await connection.call(request, DescribeClusterResponse, self._config.request_timeout_ms)
            raise_on_error(answer.error_code, answer.error_message, "the cluster")
            if any(broker.broker_id == broker_id for broker in answer.brokers):
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id} is registered, and down")
        known = ", ".join(map(str, sorted(cluster.metadata.nodes)))
        text = f"there is no broker {broker_id}; those that run: {known}"
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, text)

    def _redirect(self, cluster: Cluster, codes: Iterable[int]) -> None:
        if ErrorCode.NOT_CONTROLLER in set(codes):
            self._uses_forwarding = not self._uses_forwarding
            cluster.request_refresh()
            raise KafkaError(ErrorCode.NOT_CONTROLLER)

    async def _call_controller(
        self,
        request: Message,
        response: type[Response],
        codes: Callable[[Response], Iterable[int]],
        *,
        repeatable: bool = True,
        changes_nothing: bool = False,
        deadline: float | None = None,
    ) -> Response:
        """The response of the active controller. `codes` returns the error codes in a response."""

        async def ask(connection: Connection) -> Response:
            return await connection.call(request, response, self._config.request_timeout_ms)

        async def attempt() -> Response:
            response_message = await (self._ask_controller(ask) if changes_nothing else ask(await self._controller()))
            self._redirect(await self._connected_cluster(), codes(response_message))
            return response_message

        return await self._retry(attempt, repeatable=repeatable, deadline=deadline)

    async def _within_quota(
        self,
        ask: Callable[[float], Awaitable[Response]],
        results: Callable[[Response], Sequence[Any]],
        keep: Callable[[set[str]], None],
    ) -> list[Any]:
        """The results of a request for topics, each with `name` and `error_code`. Topics beyond the quota of the
        controller (KIP-599) are sent again, after the time that it names, within the limit of the call.

        `ask` sends the request, within a deadline; `keep` reduces it to these topics.
        """
        loop = asyncio.get_running_loop()
        deadline, cluster = self._deadline(), await self._connected_cluster()
        settled: list[Any] = []
        refusals = 0
        while True:
            response: Any = await ask(deadline)
            answered = results(response)
            refused = {each.name for each in answered if each.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED}
            refusals += 1
            wait_s = max(response.throttle_time_ms, cluster.retry_backoff.wait_ms(refusals)) / 1000
            if not refused or loop.time() + wait_s >= deadline:
                return [*settled, *answered]
            settled += [each for each in answered if each.name not in refused]
            keep(refused)
            await asyncio.sleep(wait_s)

    async def _call_controller_within_quota(
        self,
        request: CreateTopicsRequest | CreatePartitionsRequest,
        response: type[Response],
        results: Callable[[Response], Sequence[Any]],
    ) -> list[Any]:
        """The results of a request that the active controller answers, as `_within_quota`."""
        topics: list[Any] = request.topics

        async def ask(deadline: float) -> Response:
            return await self._call_controller(
                request,
                response,
                lambda answer: [result.error_code for result in results(answer)],
                repeatable=False,
                deadline=deadline,
            )

        def keep(refused: set[str]) -> None:
            topics[:] = [topic for topic in topics if topic.name in refused]

        return await self._within_quota(ask, results, keep)


def is_final(error: KafkaError) -> bool:
    """Whether another attempt is of no use."""
    is_unknown = error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not isinstance(error, _NotYetKnown)
    return not error.retriable or is_unknown


def is_unanswered(error: KafkaError) -> bool:
    """Whether the request may be carried out yet, although there was no answer in time."""
    return error.code in (ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT)


async def outcomes_of(
    calls: Mapping[Key, Coroutine[Any, Any, Result]],
) -> tuple[dict[Key, Result], dict[Key, KafkaError]]:
    """The results of calls that go on at the same time, to several brokers for example; and the errors of those that
    fail.
    """
    results: dict[Key, Result] = {}
    errors: dict[Key, KafkaError] = {}
    for key, outcome in zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True):
        if not isinstance(outcome, BaseException):
            results[key] = outcome
        elif isinstance(outcome, KafkaError):
            errors[key] = outcome
        else:
            raise outcome
    return results, errors


def raise_broker_errors(errors: Mapping[int, KafkaError], answers: Mapping[Any, Any]) -> None:
    """Raise the first error, where there is one; as BrokerErrors with the answers of other brokers."""
    for error in errors.values():
        raise BrokerErrors(error.code, error.message, answers, errors) if answers else error


async def run_all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all calls, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def raise_on_error(code: int, message: str | None, subject: str) -> None:
    error = error_of(code, message, subject)
    if error is not None:
        raise error


def error_of(code: int, message: str | None, subject: str) -> KafkaError | None:
    """The KafkaError for an error code and message in a response, None without an error."""
    return KafkaError(ErrorCode.of(code), f"{subject}: {message}" if message else subject) if code else None
