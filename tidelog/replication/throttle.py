"""The rate limit for throttled replicas: one for the leader's side, one for the follower's (KIP-73).

Pure; the caller passes in monotonic times in milliseconds. Kafka averages over a window. Here every byte delays the
next one, so that the rate holds over any span, except for the last response. Invariant: replicas in the ISR are never
throttled; the callers ensure it.
"""

from __future__ import annotations

from functools import lru_cache

UNLIMITED = 2**63 - 1
EVERYTHING = "*"
_PAUSE_MS_MAX = 500.0


class Throttle:
    __slots__ = ("_bytes_per_s", "_free_at_ms")

    def __init__(self) -> None:
        self._bytes_per_s = UNLIMITED
        self._free_at_ms = 0.0

    @property
    def bytes_per_s(self) -> int:
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, bytes_per_s: int) -> None:
        """A new rate forgets the bytes that went before: their delay is as long as the old rate made it."""
        if bytes_per_s != self._bytes_per_s:
            self._bytes_per_s = bytes_per_s
            self._free_at_ms = 0.0

    def record(self, size_bytes: int, now_ms: float) -> None:
        """Count bytes of throttled replicas that went over the network."""
        if self._bytes_per_s < UNLIMITED:
            self._free_at_ms = max(self._free_at_ms, now_ms) + size_bytes * 1000 / max(self._bytes_per_s, 1)

    def pause_ms(self, now_ms: float) -> float:
        """The wait before the caller asks again; 0 when more bytes may go. It is short, because the rate and the list
        of throttled replicas may change.
        """
        return min(max(0.0, self._free_at_ms - now_ms), _PAUSE_MS_MAX)


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
