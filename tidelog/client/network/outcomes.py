"""Background work of the clients: its tasks, and outcomes that may have no reader."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from copy import copy
from typing import Any, TypeVar

from tidelog.protocol.errors import KafkaError

Result = TypeVar("Result")
ErrorType = TypeVar("ErrorType", bound=BaseException | None)


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


def own_error(error: ErrorType) -> ErrorType:
    """A KafkaError of its own for one of several that get the same error: a raise changes it, and all of them together
    would give it a traceback as long as their number.
    """
    return copy(error) if isinstance(error, KafkaError) else error


def kept_error(error: BaseException) -> BaseException:
    """Return an error for a future, without tracebacks. The reader of the future may keep the error for long.

    The frames of a traceback refer to the record and to the future. Only the garbage collector would free these.
    If the exception comes from the program, for example from a serializer, a note has the lines of its traceback.
    """
    if isinstance(error, KafkaError):
        return copy(error)
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        pending += (each.__cause__, each.__context__)
        trace = each.__traceback__
        BaseException.with_traceback(each, None)
        if trace is not None and not hasattr(each, "__notes__"):  # the program may raise one exception again and again
            with suppress(Exception):
                each.add_note("Raised in:\n" + "".join(traceback.format_tb(trace)))
    return error


def without_handled(error: ErrorType) -> ErrorType:
    """The error without the exception that the caller handles at the moment, which Python has made its context: that
    one is still the program's, with its traceback.
    """
    handled = sys.exc_info()[1]
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if each.__context__ is handled:
            each.__context__ = None
        each = each.__context__
    return error


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
