"""A node's metrics, gathered when somebody asks: pulled from the parts' public attributes, rendered for Prometheus.

Nothing here is on a request's way; what is counted there is in `metrics_counters.py`. Gathering and rendering are cut
into slices of the loop's time, however many partitions there are, and label values are bounded. Invariant: one scrape
runs at a time, and whoever asks meanwhile gets the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tidelog.broker.metrics.cluster import ClusterCounts, tell_controller, tell_quorum
from tidelog.broker.metrics.node import tell_connections, tell_groups, tell_info, tell_requests, tell_waiting
from tidelog.broker.metrics.partitions import (
    TopicSeries,
    survey,
    tell_cleaner,
    tell_damage,
    tell_disks,
    tell_replicas,
    tell_topics,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.broker.metrics.loop import LoopDelay
    from tidelog.broker.metrics.sources import Sources


class Metrics:
    """`await scrape()` is the page of this moment and its content type. `is_ready` is what /readyz says."""

    def __init__(
        self,
        sources: Sources,
        delay: LoopDelay,
        is_ready: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        executor: Executor | None,
    ) -> None:
        self._sources = sources
        self._delay = delay
        self._is_ready = is_ready
        self._loop = loop
        self._executor = executor
        self._registry: Any = None
        self._series = TopicSeries(sources.config.integer("metrics.topics.max"))
        self.cluster = ClusterCounts()
        self._scraping: asyncio.Task[tuple[bytes, str]] | None = None

    async def scrape(self) -> tuple[bytes, str]:
        if self._scraping is None:
            self._scraping = self._loop.create_task(self._scrape(), name="metrics scrape")
            self._scraping.add_done_callback(self._scraped)
        return await asyncio.shield(self._scraping)

    def _scraped(self, done: asyncio.Task[tuple[bytes, str]]) -> None:
        self._scraping = None
        if not done.cancelled():
            done.exception()  # whoever asked is told

    async def close(self) -> None:
        if self._scraping is not None:
            self._scraping.cancel()
            await asyncio.gather(self._scraping, return_exceptions=True)

    async def _scrape(self) -> tuple[bytes, str]:
        # The first time it is imported, on a thread: it takes as long as starting a node.
        exposition: Any = await self._loop.run_in_executor(self._executor, _import_exposition)
        if self._registry is None:
            self._registry = exposition.process_registry()
        out: Exposition = exposition.Exposition()
        await self._gather(out)
        text = bytearray()
        families: Iterable[Any] = [*out.families(), *exposition.process_families(self._registry)]
        for family in families:
            text += exposition.render(family)
            await asyncio.sleep(0)
        return bytes(text), exposition.CONTENT_TYPE

    async def _gather(self, out: Exposition) -> None:
        sources = self._sources
        broker, metadata = sources.broker, sources.metadata
        tell_info(sources, self._is_ready(), out)
        self._delay.tell(out)
        tell_requests(sources.requests, broker, out)
        tell_connections(sources, out)
        await asyncio.sleep(0)
        tell_quorum(metadata, out)
        await tell_controller(metadata, self.cluster, out)
        if broker is None:
            tell_waiting(sources, None, None, out)
            return
        found = await survey(broker, metadata.image)
        tell_waiting(sources, broker, found, out)
        tell_replicas(found, broker, out)
        await asyncio.sleep(0)
        tell_topics(found, broker, self._series, out)
        await asyncio.sleep(0)
        tell_disks(found, broker, out)
        tell_damage(found, broker, out)
        tell_cleaner(broker, out)
        tell_groups(broker, out)


def _import_exposition() -> Any:
    from tidelog.broker.metrics import exposition as metrics_exposition

    return metrics_exposition
