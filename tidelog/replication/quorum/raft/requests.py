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
        lane_state = self._lanes.get((peer_id, lane))
        return lane_state is None or (not lane_state.number and lane_state.not_before_ms <= now_ms)

    def ready_at_ms(self, peer_id: int, lane: str) -> float | None:
        """The time at which a pausing lane is ready again; None if it does not pause or has an open request."""
        lane_state = self._lanes.get((peer_id, lane))
        return (
            None
            if lane_state is None or lane_state.number or not lane_state.not_before_ms
            else lane_state.not_before_ms
        )

    def begin(self, peer_id: int, lane: str) -> int:
        lane_state = self._lanes.setdefault((peer_id, lane), _Lane())
        self._last_number += 1
        lane_state.number = self._last_number
        return self._last_number

    def is_open(self, peer_id: int, lane: str, number: int) -> bool:
        """Whether the request is neither answered nor dropped."""
        lane_state = self._lanes.get((peer_id, lane))
        return lane_state is not None and lane_state.number == number

    def done(self, peer_id: int, lane: str, number: int) -> bool:
        """The request is answered. Returns False if it was dropped before."""
        lane_state = self._lanes.get((peer_id, lane))
        if lane_state is None or lane_state.number != number:
            return False
        lane_state.number = lane_state.failures = 0
        lane_state.not_before_ms = 0.0
        return True

    def failed(self, peer_id: int, lane: str, number: int, now_ms: float) -> int:
        """The request has failed. Returns the number of failures in a row, or 0 if the request was dropped before. The
        first failure causes no pause.
        """
        lane_state = self._lanes.get((peer_id, lane))
        if lane_state is None or lane_state.number != number:
            return 0
        lane_state.number = 0
        lane_state.failures += 1
        if lane_state.failures > 1:
            delay_ms = min(self._backoff_max_ms, self._backoff_ms * 2 ** min(lane_state.failures - 2, 16))
            lane_state.not_before_ms = now_ms + delay_ms
        return lane_state.failures

    def rest(self, peer_id: int, lane: str, until_ms: float) -> None:
        """Pause the lane until this time, because the peer's answer did not help."""
        self._lanes.setdefault((peer_id, lane), _Lane()).not_before_ms = until_ms
