"""The start of a client: one task, which all calls that need it wait for.

Invariants: a client starts once. A call that is cancelled, or whose time is over, does not end the start; `stop` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tidelog.client.config import ClientConfig
from tidelog.client.network.outcomes import retrieve_exception
from tidelog.protocol.errors import ErrorCode, KafkaError


class SharedStart:
    """The start of one client. A start that has failed is tried again by the next call."""

    def __init__(self, config: ClientConfig, start: Callable[[], Coroutine[Any, Any, None]], client: str) -> None:
        self._config = config
        self._start = start
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_stopped = False

    async def wait(self, timeout_ms: float | None = None) -> bool:
        """Start, or wait for the start that is under way; False when `timeout_ms` passes before its end.

        Raises what the start raises, and RuntimeError after `stop` and in another event loop.
        """
        self._check_not_stopped()
        loop = asyncio.get_running_loop()
        if (self._is_over or self._task is not None) and loop is not self._loop:
            raise RuntimeError(f"this {self._client} was started in another event loop; make one in each loop")
        if self._is_over:
            return True
        if self._task is None:
            self._loop = loop
            self._task = loop.create_task(self._run())
            self._task.add_done_callback(retrieve_exception)
        task = self._task
        try:
            await asyncio.wait([task], timeout=None if timeout_ms is None else max(timeout_ms, 0.0) / 1000)
        finally:
            if task.done() and self._task is task:
                self._task = None
        if not task.done():
            return False
        self._check_not_stopped()
        task.result()
        return True

    async def _run(self) -> None:
        await self._start()
        self._is_over = True  # here, because the calls that wait for it may be cancelled at this moment

    async def wait_within(self, timeout_ms: float, option: str) -> None:
        """As `wait`, for a call that the value of `option` limits.

        Raises KafkaError(REQUEST_TIMED_OUT) at the timeout; the start then goes on.
        """
        if not await self.wait(timeout_ms):
            limit_ms = getattr(self._config, option)
            text = f"no broker of {self._config.bootstrap_servers} reached within {option}={limit_ms}"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise RuntimeError(f"this {self._client} is closed")

    async def stop(self) -> None:
        """End a start that is under way, and allow no other one."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
