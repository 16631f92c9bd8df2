"""Looking at the records of batches that take long, beside the loop and in its pauses: few at a time, the others wait.

What is looked for is `storage/inspection.py`'s business. Invariant: whoever asked is called back once, from the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.broker.turns import Turns
    from tidelog.storage.inspection import Unseen

log = logging.getLogger("tidelog.produce")

# At a time; each may hold 16 MiB of records, twice while they are decompressed.
AT_A_TIME_MAX: Final = 1
# What waits, each with a copy of its batch; beyond it a batch is looked at at once, as long as that takes.
WAITING_MAX: Final = 64

Looked = Callable[["memoryview | KafkaError"], None]
"""Told the batch to append, or what it is refused for."""


class Inspections:
    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor | None, turns: Turns) -> None:
        self._loop = loop
        self._executor = executor
        self._turns = turns
        self._places = asyncio.Semaphore(AT_A_TIME_MAX)
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, unseen: Unseen, looked: Looked) -> None:
        if len(self._tasks) >= WAITING_MAX:
            self._loop.call_soon(looked, _at_once(unseen))
            return
        task = self._loop.create_task(self._inspect(unseen, looked))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _inspect(self, unseen: Unseen, looked: Looked) -> None:
        looked(await self._outcome(unseen))

    async def _outcome(self, unseen: Unseen) -> memoryview | KafkaError:
        try:
            async with self._places:
                await self._loop.run_in_executor(self._executor, unseen.decompress)
                for _ in unseen.look():
                    await self._turns.pause(self._loop)
                await self._loop.run_in_executor(self._executor, unseen.rebuild)
        except Exception as error:
            return _refusal(error)
        return unseen.batches

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _at_once(unseen: Unseen) -> memoryview | KafkaError:
    try:
        unseen.decompress()
        for _ in unseen.look():
            pass
        unseen.rebuild()
    except Exception as error:
        return _refusal(error)
    return unseen.batches


def _refusal(error: Exception) -> KafkaError:
    """What the batch is refused with, without the frames that `error` came through: they hold megabytes of records."""
    if isinstance(error, KafkaError):
        return KafkaError(error.code, error.message, error.record_errors)
    log.error("a batch could not be looked at", exc_info=error)
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed; its log says why")
