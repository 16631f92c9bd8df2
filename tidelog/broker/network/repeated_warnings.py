"""Warnings that strangers can cause as often as they like: each kind is logged now and then, and says how many more.

`logs.py` cuts repeated lines of every kind, but only where `tidelog start` set the log up, and after each has cost its
record; this is before that, and in an embedded node too. Invariant: of one kind at most a warning in INTERVAL_S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 10.0
# Kinds are ours, not the stranger's; the bound is for who forgets that.
KINDS_MAX = 100


class RepeatedWarnings:
    def __init__(self, logger: logging.Logger, loop_time: Callable[[], float]) -> None:
        self._logger = logger
        self._loop_time = loop_time
        self._kinds: dict[str, tuple[float, int]] = {}  # when it was last said, and how many were kept back since

    def warn(self, kind: str, text: str) -> None:
        now = self._loop_time()
        last, kept_back = self._kinds.get(kind, (now - INTERVAL_S, 0))
        if now - last < INTERVAL_S:
            self._kinds[kind] = (last, kept_back + 1)
            return
        if len(self._kinds) < KINDS_MAX or kind in self._kinds:
            self._kinds[kind] = (now, 0)
        if kept_back:
            self._logger.warning("%s (and %d times more in the last %.0f s)", text, kept_back, now - last)
        else:
            self._logger.warning("%s", text)
