"""Outcomes of background work that may have no reader."""

from __future__ import annotations

import asyncio
from typing import Any


def retrieve_exception(outcome: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved. The calls that wait for the outcome get it; there may be none, and that is not
    a program error. A callback of `add_done_callback`.
    """
    if not outcome.cancelled():
        outcome.exception()
