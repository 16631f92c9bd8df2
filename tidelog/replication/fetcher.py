"""Fetching for the replicas that follow: one link and one fetch session for each leading broker.

`follower.py` decides, `protocol/hot_replication.py` encodes and decodes, `leader_link.py` handles one link. The caller
passes in the connections, the clock, the randomness, and callbacks for failures and for records that wait for the
device. Invariant: at most one link fetches a partition, the link to the leader last followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.hot_replication import RequestTemplate
from tidelog.replication.fetcher_settings import FetcherSettings
from tidelog.replication.followed_partition import FollowedPartition
from tidelog.replication.leader_link import ReplicaFetcher
from tidelog.replication.throttle import Throttle
from tidelog.replication.truncations import Truncations

if TYPE_CHECKING:
    import random

    from tidelog.replication.partition import Partition
    from tidelog.replication.ports import Connect, Endpoint
    from tidelog.storage.segments.append import UnexplainedGap
    from tidelog.storage.segments.reader import ColdRead


class ReplicaFetchers:
    """`endpoint_of(broker id)` is called at every attempt to connect; None: unknown now, so the link retries later.

    `on_failed(partition, error)`: the log cannot be used, and the fetching has ended. `on_appended(partition)`: records
    wait for the device (flush.messages); the caller calls `resume` when they are on it. `on_link(leader, is up)`: the
    link broke, or its leader has answered. `on_gap(partition, gap)`: offsets are missing in a leader's records.
    `on_shortage()`: a log has met a shortage of file descriptors or memory.
    `on_cold(read)`: a segment must be examined on a thread before the log is truncated.
    """

    def __init__(
        self,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        connect: Connect,
        endpoint_of: Callable[[int], Endpoint | None],
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        clock_ms: Callable[[], int],
        settings: FetcherSettings,
        on_failed: Callable[[Partition, Exception], None],
        on_appended: Callable[[Partition], None],
        on_link: Callable[[int, bool], None] = lambda leader_id, is_up: None,
        on_gap: Callable[[Partition, UnexplainedGap], None] = lambda partition, gap: None,
        on_shortage: Callable[[], None] = lambda: None,
        on_cold: Callable[[ColdRead], None] = lambda cold: cold.warm(),
    ) -> None:
        self.node_id = node_id
        self.broker_epoch = broker_epoch
        self.connect = connect
        self.endpoint_of = endpoint_of
        self.loop = loop
        self.rng = rng
        self.clock_ms = clock_ms
        self.settings = settings
        self.on_appended = on_appended
        self.throttle = Throttle()
        self.truncations = Truncations(loop)
        self.on_link = on_link
        self.on_gap = on_gap
        self.on_shortage = on_shortage
        self.on_cold = on_cold
        self.bytes_in = 0
        """Bytes of record batches fetched since the start."""
        self._on_failed = on_failed
        self._links: dict[int, ReplicaFetcher] = {}
        self._followed: dict[Partition, tuple[ReplicaFetcher, FollowedPartition]] = {}
        self._watchdog: asyncio.TimerHandle | None = None
        self._closed = False

    def template(self) -> RequestTemplate:
        """The part that all requests of this node share; it holds while the broker epoch stays the same."""
        settings = self.settings
        return RequestTemplate(
            self.node_id, self.broker_epoch(), settings.fetch_wait_ms, settings.min_bytes,
            settings.response_bytes_max, settings.partition_bytes_max,
        )  # fmt: skip

    @property
    def lag_records_max(self) -> int:
        """The number of committed records that the most lagging partition lacks (Kafka's MaxLag)."""
        lags = (each.leader_high_watermark - each.log.log_end_offset for _, each in self._followed.values())
        return max(0, max(lags, default=0))

    @property
    def failing_count(self) -> int:
        """Partitions whose last fetch was refused."""
        return sum(each.failures > 0 for _, each in self._followed.values())

    def follow(self, partition: Partition) -> None:
        """Fetch from the partition's leader at its leader epoch, instead of any earlier leader."""
        self.unfollow(partition)
        leader_id = partition.leader_id
        if self._closed or leader_id < 0 or leader_id == self.node_id or partition.offline:
            return
        link = self._links.get(leader_id)
        if link is None:
            link = self._links[leader_id] = ReplicaFetcher(self, leader_id)
            self._arm_watchdog()
        followed = FollowedPartition(partition)
        self._followed[partition] = (link, followed)
        link.add(followed)

    def unfollow(self, partition: Partition) -> None:
        link_and_partition = self._followed.pop(partition, None)
        if link_and_partition is None:
            return
        link, followed = link_and_partition
        link.remove(followed)
        if not link.followed:
            self._loop_soon(link)

    def resume(self, partition: Partition) -> None:
        """The partition's records are on the device: fetch it again."""
        followed = self._followed.get(partition)
        if followed is not None:
            followed[0].resume(followed[1])

    def brokers_changed(self, broker_ids: Iterable[int]) -> None:
        """Connect at once to brokers whose registration has changed, without the rest of the pause."""
        for broker_id in sorted(broker_ids):
            link = self._links.get(broker_id)
            if link is not None:
                link.retry_now()

    def failed(self, partition: Partition, error: Exception) -> None:
        self.unfollow(partition)
        self._on_failed(partition, error)

    def close(self) -> None:
        """Stop all fetching and appending."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._followed.clear()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _loop_soon(self, link: ReplicaFetcher) -> None:
        """Close an idle link in the next loop iteration, because the same image may still add a partition to it."""

        def close_if_idle() -> None:
            if not link.followed and self._links.get(link.leader_id) is link:
                del self._links[link.leader_id]
                link.close()

        self.loop.call_soon(close_if_idle)

    def _arm_watchdog(self) -> None:
        if self._watchdog is None and not self._closed:
            self._watchdog = self.loop.call_later(self.settings.request_timeout_ms / 2000, self._watch)

    def _watch(self) -> None:
        """One coarse deadline for all links: a link with no response between two checks, and without 16 KiB more of
        the present one, is closed at the second.
        """
        self._watchdog = None
        for link in list(self._links.values()):
            link.check_progress()
        if self._links:
            self._arm_watchdog()
