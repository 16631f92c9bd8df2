"""A follower's settings: the sizes of its fetches, and its waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class FetcherSettings:
    fetch_wait_ms: int = 500
    min_bytes: int = 1
    response_bytes_max: int = 10 * 1024 * 1024
    partition_bytes_max: int = 1024 * 1024
    backoff_ms_initial: int = 10
    backoff_ms_max: int = 1000
    request_timeout_ms: int = 30_000

    @classmethod
    def from_node(cls, integer: Callable[[str], int]) -> FetcherSettings:
        """`integer`: returns the value of a configuration by its name."""
        return cls(
            fetch_wait_ms=integer("replica.fetch.wait.max.ms"),
            min_bytes=integer("replica.fetch.min.bytes"),
            response_bytes_max=integer("replica.fetch.response.max.bytes"),
            partition_bytes_max=integer("replica.fetch.max.bytes"),
            backoff_ms_max=integer("replica.fetch.backoff.ms"),
            request_timeout_ms=integer("replica.socket.timeout.ms"),
        )
