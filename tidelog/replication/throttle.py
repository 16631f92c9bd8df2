"""The rate limit for throttled replicas: one for the leader's side, one for the follower's (KIP-73).

Pure; the caller passes in monotonic times in milliseconds. Kafka averages over a window. Here every byte delays the
next one, so that the rate holds over any span, except for the last response. Invariant: replicas in the ISR are never
throttled; the callers ensure it.
"""

from __future__ import annotations

from collections.abc import Iterable

UNLIMITED = 2**63 - 1
EVERYTHING = "*"


class Throttle:
    __slots__ = ("_free_at_ms", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s = UNLIMITED
        self._free_at_ms = 0.0

    def record(self, size_bytes: int, now_ms: float) -> None:
        """Count bytes of throttled replicas that went over the network."""
        if self.bytes_per_s < UNLIMITED:
            self._free_at_ms = max(self._free_at_ms, now_ms) + size_bytes * 1000 / max(self.bytes_per_s, 1)

    def pause_ms(self, now_ms: float) -> float:
        """The wait before more bytes may go; 0 for no wait."""
        return max(0.0, self._free_at_ms - now_ms) if self.bytes_per_s < UNLIMITED else 0.0


def is_throttled(replicas: str | None, index: int, node_id: int) -> bool:
    """Whether a topic's `leader.` or `follower.replication.throttled.replicas` names this replica."""
    entries: Iterable[str] = (entry.strip() for entry in (replicas or "").split(","))
    return any(entry in (EVERYTHING, f"{index}:{node_id}") for entry in entries)
