"""Background work of the clients: its tasks, and outcomes that may have no reader."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def start_task(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that begins after this call, whatever the task factory of the program's loop. An eager one runs the work
    inside the call: work that ends at once would then clear the caller's reference to it before that is set.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop())


def retrieve_exception(outcome: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved. The calls that wait for the outcome get it; there may be none, and that is not
    a program error. A callback of `add_done_callback`.
    """
    if not outcome.cancelled():
        outcome.exception()


def text_of(error: BaseException) -> str:
    """What an exception says. One of the program's own classes may raise another when it is asked for its text."""
    try:
        return str(error) or repr(error)
    except Exception:
        return type(error).__name__


def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks whose outcome has no reader any more."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(retrieve_exception)
