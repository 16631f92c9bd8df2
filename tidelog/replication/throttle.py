"""The rate limit for throttled replicas: one for the leader's side, one for the follower's (KIP-73).

Pure; the caller passes in monotonic times in milliseconds. Kafka averages over a window. Here every byte delays the
next one, so that the rate holds over any span, except for the last response. Invariant: replicas in the ISR are never
throttled; the callers ensure it.
"""

from __future__ import annotations

from functools import lru_cache

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
    if not replicas:
        return False
    entries = _entries(replicas)
    return EVERYTHING in entries or f"{index}:{node_id}" in entries


@lru_cache(maxsize=4)
def _entries(replicas: str) -> frozenset[str]:
    """A tool that moves a topic names all its replicas, and each of its partitions looks itself up."""
    return frozenset(entry.strip() for entry in replicas.split(","))
