"""A queue in which hosts take turns, so that many connections from one of them hold no other host up.

`REQUEST_HOST` is the client's address in the task of a request, for what waits on its behalf. Invariant: those of one
host leave in order, and between two of them one of each other host that waits.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

REQUEST_HOST: ContextVar[str] = ContextVar("REQUEST_HOST", default="")
"""Empty outside the task of a request. At the active controller it is that of the forwarded request's client."""


class HostQueue(Generic[T]):
    __slots__ = ("_count", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # by host, the host that is next at the front
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, item: T, host: str) -> None:
        self._waiting.setdefault(host, deque()).append(item)
        self._count += 1

    def popleft(self) -> T:
        """Raises StopIteration if the queue is empty."""
        host = next(iter(self._waiting))
        items = self._waiting.pop(host)
        item = items.popleft()
        if items:
            self._waiting[host] = items
        self._count -= 1
        return item
