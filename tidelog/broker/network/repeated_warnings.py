"""Rate-limits warnings that any client can cause: each kind is logged at intervals, with the number of omitted ones.

`logs.py` limits all repeated lines too, but only if `tidelog start` configured logging, and only after the cost of a
log record. This limit applies before that, and in an embedded node too. Invariant: at most one warning of a kind per
INTERVAL_S.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 10.0
# The code chooses the kinds, not the clients. The bound guards against a mistake there.
KINDS_MAX = 100


class RepeatedWarnings:
    def __init__(self, logger: logging.Logger, loop_time: Callable[[], float]) -> None:
        self._logger = logger
        self._loop_time = loop_time
        self._kinds: dict[str, tuple[float, int]] = {}  # time of the last warning, number omitted since

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
