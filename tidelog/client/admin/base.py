"""What every call of the admin client rests on: its life, and asking again until an answer stands.

Not here: what can be asked, which is in `admin` and `admin_cluster`. Invariant: a request that was perhaps carried out
is not sent again unless doing it twice does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from tidelog.client.config import AdminConfig
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError

Outcome = TypeVar("Outcome")
Response = TypeVar("Response", bound=Message)


class AdminBase:
    """An administrator's connection to a cluster."""

    def __init__(self, **options: Any) -> None:
        self._config = AdminConfig.from_options(options)
        self._cluster: Cluster | None = None
        self._closed = False
        self._forwarding = True

    # -- life

    async def start(self) -> None:
        """Reach the cluster; every call does it too. Raises KafkaError(NETWORK_EXCEPTION)."""
        if self._closed:
            raise RuntimeError("this admin client is closed")
        if self._cluster is None:
            cluster = Cluster(self._config)
            try:
                await cluster.start()
            except BaseException:
                await cluster.close()
                raise
            self._cluster = cluster

    async def close(self) -> None:
        self._closed = True
        if self._cluster is not None:
            await self._cluster.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _reach(self) -> Cluster:
        await self.start()
        assert self._cluster is not None
        return self._cluster

    async def _until(self, attempt: Callable[[], Awaitable[Outcome]], *, repeatable: bool = True) -> Outcome:
        """Attempt until it succeeds or fails for good. A request that cannot be repeated is, after a refusal only."""
        cluster = await self._reach()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.default_api_timeout_ms / 1000
        failures = 0
        while True:
            try:
                return await attempt()
            except KafkaError as error:
                failures += 1
                wait_s = cluster.retry_backoff.wait_ms(failures) / 1000
                unheard = error.code in (ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT)
                final = not error.retriable or error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if final or (unheard and not repeatable) or loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)

    async def _controller(self) -> Connection:
        """Where requests for the controller go: to any broker, which forwards them; to the named one if it did not."""
        cluster = await self._reach()
        named = cluster.metadata.controller_id
        if self._forwarding or named not in cluster.metadata.nodes:
            return await cluster.any_connection()
        return await cluster.connection(named)

    def _redirect(self, cluster: Cluster, codes: Iterable[int]) -> None:
        if ErrorCode.NOT_CONTROLLER in set(codes):
            self._forwarding = not self._forwarding
            cluster.request_refresh()
            raise KafkaError(ErrorCode.NOT_CONTROLLER)

    async def _ask_controller(
        self,
        request: Message,
        response: type[Response],
        codes: Callable[[Response], Iterable[int]],
        *,
        repeatable: bool = True,
    ) -> Response:
        """The answer of a controller that is the active one. `codes`: the errors in an answer."""

        async def attempt() -> Response:
            connection = await self._controller()
            answer = await connection.call(request, response, self._config.request_timeout_ms)
            self._redirect(await self._reach(), codes(answer))
            return answer

        return await self._until(attempt, repeatable=repeatable)


def check(code: int, message: str | None, what: str) -> None:
    error = refusal(code, message, what)
    if error is not None:
        raise error


def refusal(code: int, message: str | None, what: str) -> KafkaError | None:
    """The KafkaError that an error code and message of an answer stand for."""
    return KafkaError(ErrorCode.of(code), f"{what}: {message}" if message else what) if code else None
