"""Waiting for what must come to pass, as long as a slow and busy machine needs: only a failure takes the whole time.

A test that waits says for what, never how long; how long something takes is measured where that is what is tested.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


async def until(condition: Callable[[], Any], every_s: float = 0.005) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], Any], every_s: float = 0.01) -> None:
    """The same where no event loop runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(every_s)
