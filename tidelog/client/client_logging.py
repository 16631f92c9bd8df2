"""What the clients log: the program's handlers and filters can neither stop a client nor hold it up.

A handler holds its lock while it handles a record. One that sends the records by a blocking producer may wait with it
for the thread of that client, so that thread waits for no handler: another one passes on what it logs. Invariants: a
call of a client's logger raises no Exception, and in the thread of a blocking client it ends within a second.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

_WAIT_S = 1.0
_EXIT_WAIT_S = 5.0
_RECORDS_MAX = 1000
"""The oldest of those that wait for a handler are dropped for later ones."""

_of_thread = threading.local()
_running: set[threading.Thread] = set()
"""Those that pass records on."""


class _PassingThreads:
    """Passes on the records of one thread, in their order, by another one that ends when there are no more."""

    def __init__(self) -> None:
        self._records: deque[logging.LogRecord] = deque(maxlen=_RECORDS_MAX)
        self._is_passing = False

    def pass_on(self, record: logging.LogRecord) -> None:
        """Wait for the handlers, so that a line is written before what comes after it. While one of them holds a
        record up for longer than that, no later one is waited for.
        """
        self._records.append(record)
        if not self._is_passing:
            self._is_passing = True
            thread = threading.Thread(target=self._run, name="tidelog-client-log", daemon=True)
            _running.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: they wait for the next record
                _running.discard(thread)
                self._is_passing = False
            else:
                thread.join(_WAIT_S)

    def _run(self) -> None:
        while self._records:
            try:
                record = self._records.popleft()
                logging.getLogger(record.name).handle(record)
            except BaseException:  # as in the thread of the client, a SystemExit of the program's code ends nothing
                _report()
            if not self._records:
                # Clear the flag first, then look again: a record that saw the flag is in the queue by then.
                self._is_passing = False
        _running.discard(threading.current_thread())


def _wait_at_exit() -> None:
    """The program ends, and its handlers may not have come to the last records."""
    end_s = time.monotonic() + _EXIT_WAIT_S
    for thread in list(_running):
        thread.join(max(0.0, end_s - time.monotonic()))


atexit.register(_wait_at_exit)  # before `logging` closes the handlers, whose function is registered already


def pass_on_in_this_thread() -> None:
    """Have another thread pass on what this one logs from now on."""
    _of_thread.passing = _PassingThreads()


def _is_for_this_thread(record: logging.LogRecord) -> bool:
    """The filter of each logger that a client's thread uses."""
    passing: _PassingThreads | None = getattr(_of_thread, "passing", None)
    if passing is None:
        return True
    passing.pass_on(record)
    return False


class _ClientLogger(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if self.isEnabledFor(level):
            try:
                self.logger.log(level, msg, *args, stacklevel=2, **options)
            except Exception:
                _report()


def _report() -> None:
    """Write the exception of a handler or filter where `logging` writes those of handlers."""
    if logging.raiseExceptions:
        with suppress(Exception):
            traceback.print_exc(file=sys.stderr)


def client_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of a module of the clients."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_for_this_thread)
    return _ClientLogger(logger, {})


client_logger("asyncio")  # the loop of a blocking client logs there
