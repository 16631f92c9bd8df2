"""Counters of requests and topics: plain numbers in slots, because they change with every request.

Only the metrics page reads them (`metrics/node.py`). Pure; times are arguments. Invariant: a number only grows until
its topic leaves this node.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from tidelog.protocol.api import SERVED, ApiKey
from tidelog.protocol.errors import ErrorCode

# Upper bounds of request durations: from 100 us, a small produce on loopback, to 30 s, a fetch that waits long.
DURATION_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


SHORTEST_S = DURATION_BOUNDS_S[0]


class Histogram:
    """`counts[i]` is the number of values above bound `i - 1` and not above bound `i`; the last one has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class ApiCounters:
    """The counters of one API: answered requests by duration, requests by version, errors by code.

    `stopwatch` returns seconds. It is finer than the loop's time, which does not change within a turn.
    """

    __slots__ = ("durations", "errors", "name", "stopwatch", "versions")

    def __init__(self, name: str, versions: range, stopwatch: Callable[[], float]) -> None:
        self.name = name
        self.stopwatch = stopwatch
        self.durations = Histogram()
        self.versions = dict.fromkeys(versions, 0)
        self.errors: dict[int, int] = {}

    def begun(self, version: int) -> float:
        """Count a new request. Its start time, which the caller passes to `answered`."""
        self.versions[version] += 1
        return self.stopwatch()

    def answered(self, began: float) -> None:
        elapsed = self.stopwatch() - began
        durations = self.durations
        durations.counts[bisect_left(DURATION_BOUNDS_S, elapsed)] += 1
        durations.total += elapsed

    def failed(self, code: int, times: int = 1) -> None:
        self.errors[code] = self.errors.get(code, 0) + times


class RequestCounters:
    """The counters of all APIs of a node, created on first use. Fetches of consumers and followers are separate."""

    def __init__(self, stopwatch: Callable[[], float] = lambda: 0.0) -> None:
        self.stopwatch = stopwatch
        self.apis: dict[str, ApiCounters] = {}
        self.produce = self.of("Produce", SERVED[ApiKey.PRODUCE])
        self.fetch_consumer = self.of("FetchConsumer", SERVED[ApiKey.FETCH])
        self.fetch_follower = self.of("FetchFollower", SERVED[ApiKey.FETCH])

    def of(self, name: str, versions: range) -> ApiCounters:
        counters = self.apis.get(name)
        if counters is None:
            counters = self.apis[name] = ApiCounters(name, versions, self.stopwatch)
        return counters


_NO_FAILURES = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.RECORD_LIST_TOO_LARGE,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)


class TopicTraffic:
    """The counters of one topic for which this node leads partitions (Kafka's BrokerTopicMetrics)."""

    __slots__ = ("bytes_in", "bytes_out", "bytes_rejected", "produce_failures", "records_in")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.records_in = 0
        self.bytes_out = 0
        self.bytes_rejected = 0
        self.produce_failures = 0

    def refused(self, code: int, size_bytes: int) -> None:
        """Count a refused append. Expected errors are no failures of the broker (Kafka's appendToLocalLog)."""
        if code == ErrorCode.MESSAGE_TOO_LARGE:
            self.bytes_rejected += size_bytes
        if code not in _NO_FAILURES:
            self.produce_failures += 1
