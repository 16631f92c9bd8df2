"""Waits for work on threads. A task can be cancelled, its work on a thread cannot: it runs on until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def until_done(work: Awaitable[T]) -> T:
    """Wait for work on a thread, also if the task is cancelled meanwhile: that takes effect when the work has ended.

    So what the work uses can be given up, unpinned or closed after this call, however it ends.
    """
    done = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with suppress(asyncio.CancelledError):  # cancelled again
                await asyncio.wait([done])
        if not done.cancelled():
            done.exception()  # a cancelled task cannot raise it
        raise
