"""The open requests of the core, and the pauses after failures. Pure.

A peer has at most one open request per lane. A change of role drops all open requests; of an answer to a dropped
request, only the peer's epoch counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, repr=False)
class _Lane:
    number: int = 0
    """The number of the open request, 0 for none."""
    failures: int = 0
    not_before_ms: float = 0.0


class Requests:
    def __init__(self, backoff_ms: float, backoff_max_ms: float) -> None:
        self._backoff_ms = backoff_ms
        self._backoff_max_ms = backoff_max_ms
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._last_number = 0

    def reset(self) -> None:
        self._lanes.clear()

    def is_ready(self, peer_id: int, lane: str, now_ms: float) -> bool:
        found = self._lanes.get((peer_id, lane))
        return found is None or (not found.number and found.not_before_ms <= now_ms)

    def ready_at_ms(self, peer_id: int, lane: str) -> float | None:
        """The time at which a pausing lane is ready again; None if it does not pause or has an open request."""
        found = self._lanes.get((peer_id, lane))
        return None if found is None or found.number or not found.not_before_ms else found.not_before_ms

    def begin(self, peer_id: int, lane: str) -> int:
        found = self._lanes.setdefault((peer_id, lane), _Lane())
        self._last_number += 1
        found.number = self._last_number
        return self._last_number

    def done(self, peer_id: int, lane: str, number: int) -> bool:
        """The request is answered. Returns False if it was dropped before."""
        found = self._lanes.get((peer_id, lane))
        if found is None or found.number != number:
            return False
        found.number = found.failures = 0
        found.not_before_ms = 0.0
        return True

    def failed(self, peer_id: int, lane: str, number: int, now_ms: float) -> int:
        """The request has failed. Returns the number of failures in a row, or 0 if the request was dropped before. The
        first failure causes no pause.
        """
        found = self._lanes.get((peer_id, lane))
        if found is None or found.number != number:
            return 0
        found.number = 0
        found.failures += 1
        if found.failures > 1:
            delay_ms = min(self._backoff_max_ms, self._backoff_ms * 2 ** min(found.failures - 2, 16))
            found.not_before_ms = now_ms + delay_ms
        return found.failures

    def rest(self, peer_id: int, lane: str, until_ms: float) -> None:
        """Pause the lane until this time, because the peer's answer did not help."""
        self._lanes.setdefault((peer_id, lane), _Lane()).not_before_ms = until_ms
