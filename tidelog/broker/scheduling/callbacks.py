"""Calls several callbacks. One that raises is logged, and the rest are still called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("tidelog.callbacks")


def call_all(callbacks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
    for callback in callbacks:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("%r failed", callback)
