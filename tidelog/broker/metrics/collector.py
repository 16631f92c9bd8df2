"""The scrape of a node's metrics: it reads the parts' public attributes and renders them for
Prometheus.

No request runs code of this module; `broker/network/counters.py` counts requests. A scrape pauses
for the event loop, with any number of partitions, and label values are bounded. Invariant: one
scrape runs at a time, and concurrent callers share its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tidelog.broker.metrics.cluster import ClusterCounts, collect_controller, collect_quorum
from tidelog.broker.metrics.node import (
    collect_connections,
    collect_groups,
    collect_info,
    collect_requests,
    collect_waiting,
)
from tidelog.broker.metrics.partitions import (
    TopicSeries,
    collect_cleaner,
    collect_damage,
    collect_disks,
    collect_replicas,
    collect_topics,
    collect_transactions,
    partition_totals,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.broker.metrics.loop import LoopDelay
    from tidelog.broker.metrics.sources import Sources


class Metrics:
    """`await scrape()` returns the page and its content type. `is_ready` is the state that /readyz
    shows.
    """

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
        self._scrape_task: asyncio.Task[tuple[bytes, str]] | None = None

    async def scrape(self) -> tuple[bytes, str]:
        if self._scrape_task is None:
            self._scrape_task = self._loop.create_task(self._scrape(), name="metrics scrape")
            self._scrape_task.add_done_callback(self._on_scraped)
        return await asyncio.shield(self._scrape_task)

    def _on_scraped(self, task: asyncio.Task[tuple[bytes, str]]) -> None:
        self._scrape_task = None
        if not task.cancelled():
            task.exception()  # the callers of `scrape` raise it

    async def close(self) -> None:
        if self._scrape_task is not None:
            self._scrape_task.cancel()
            await asyncio.gather(self._scrape_task, return_exceptions=True)

    async def _scrape(self) -> tuple[bytes, str]:
        # The first import takes as long as the start of a node, so it runs on a thread.
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
        collect_info(sources, self._is_ready(), out)
        self._delay.collect(out)
        collect_requests(sources.requests, broker, out)
        collect_connections(sources, out)
        await asyncio.sleep(0)
        collect_quorum(metadata, out)
        await collect_controller(metadata, self.cluster, out)
        if broker is None:
            collect_waiting(sources, None, None, out)
            return
        totals = await partition_totals(broker, metadata.image)
        collect_waiting(sources, broker, totals, out)
        collect_replicas(totals, broker, out)
        collect_transactions(totals, broker, out)
        await asyncio.sleep(0)
        collect_topics(totals, broker, self._series, out)
        await asyncio.sleep(0)
        collect_disks(totals, broker, out)
        collect_damage(totals, broker, out)
        collect_cleaner(broker, out)
        collect_groups(broker, out)


def _import_exposition() -> Any:
    from tidelog.broker.metrics import exposition as metrics_exposition

    return metrics_exposition
