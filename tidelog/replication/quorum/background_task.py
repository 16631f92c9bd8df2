"""A task of a node beside its core, from a start until it is stopped or ends by itself."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class BackgroundTask(ABC):
    """Subclasses have the work in `_run`, and call `_begin` if there is any."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _run(self) -> None: ...

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run(), name=self._name)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop, and wait for the end."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
