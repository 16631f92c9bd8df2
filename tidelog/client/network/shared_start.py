"""The start of a client: one task, which all calls that need it wait for.

Invariants: a client starts once, and belongs to the event loop and the process of its start. A call that is cancelled,
or whose time is over, does not end the start; `stop` does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from tidelog.client.config import ClientConfig
from tidelog.client.network.outcomes import retrieve_exception, start_task
from tidelog.protocol.errors import ErrorCode, KafkaError


class SharedStart:
    """The start of one client. A start that has failed is tried again by the next call."""

    def __init__(self, config: ClientConfig, start: Callable[[], Coroutine[Any, Any, None]], client: str) -> None:
        self._config = config
        self._start = start
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = 0
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_stopped = False

    async def wait(self, timeout_ms: float | None = None) -> bool:
        """Start, or wait for the start that is under way; False when `timeout_ms` passes before its end.

        Raises what the start raises, and RuntimeError after `stop` and in another event loop.
        """
        self._check_not_stopped()
        self.check_loop()
        if self._is_over:
            return True
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._loop, self._process_id = loop, os.getpid()
            self._task = start_task(self._run())
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

    def check_loop(self) -> None:
        """Raise RuntimeError for a call in another event loop than that of the start: its parts would work for the loop
        of the start, or for none, and such a call would wait without an end.
        """
        if (self._is_over or self._task is not None) and asyncio.get_running_loop() is not self._loop:
            if self.is_of_parent():
                raise RuntimeError(f"this {self._client} was started before a fork; make one after the fork")
            raise RuntimeError(f"this {self._client} was started in another event loop; make one in each loop")

    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the one that started the client. Both have its sockets and the loop's
        selector, so that closing them here would end them there.
        """
        return self._process_id not in (0, os.getpid())

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
