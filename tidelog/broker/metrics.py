"""A node's metrics, gathered when somebody asks: pulled from the parts' public attributes, rendered for Prometheus.

Nothing here is on a request's way; what is counted there is in `metrics_counters.py`. Gathering is cut into slices of
the loop's time, however many partitions there are, and label values are bounded. Invariant: one scrape runs at a time,
and whoever asks meanwhile gets the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.config import NodeConfig
    from tidelog.broker.dispatch import Dispatcher
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.metrics_exposition import Exposition
    from tidelog.broker.server import Server

# Partitions looked at in one turn of the loop.
SLICE = 500
# Topics with series of their own; what further ones do is told together.
TOPICS_MAX = 200
OTHER_TOPICS = "(others)"


@dataclass(slots=True)
class Sources:
    """The parts that are asked; `broker` is None on a node without that role."""

    config: NodeConfig
    metadata: MetadataSide
    broker: BrokerSide | None
    servers: list[Server]
    dispatchers: list[Dispatcher]


class Metrics:
    """`await scrape()` is the page of this moment and its content type."""

    def __init__(self, sources: Sources, loop: asyncio.AbstractEventLoop, executor: Executor | None) -> None:
        self._sources = sources
        self._loop = loop
        self._executor = executor
        self._registry: Any = None
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
        return bytes(text), exposition.CONTENT_TYPE_LATEST

    async def _gather(self, out: Exposition) -> None:
        sources = self._sources
        for collect in _COLLECTORS:
            collect(sources, out)
            await asyncio.sleep(0)


def _import_exposition() -> Any:
    from tidelog.broker import metrics_exposition

    return metrics_exposition


def _connections(sources: Sources, out: Exposition) -> None:
    for server in sources.servers:
        by_listener: dict[str, int] = {}
        for connection in server.connections:
            by_listener[connection.listener_name] = by_listener.get(connection.listener_name, 0) + 1
        for listener, count in by_listener.items():
            out.add("tidelog_connections", count, listener)


def _partitions(sources: Sources, out: Exposition) -> None:
    if sources.broker is None:
        return
    partitions = sources.broker.partitions
    hosted = list(partitions.hosted())
    out.add("tidelog_partitions", len(hosted))
    out.add("tidelog_leader_partitions", sum(partition.leads for partition in hosted))
    for topic, traffic in partitions.traffic.items():
        out.add("tidelog_topic_bytes_in_total", traffic.bytes_in, topic)
        out.add("tidelog_topic_records_in_total", traffic.records_in, topic)
        out.add("tidelog_topic_bytes_out_total", traffic.bytes_out, topic)


_COLLECTORS: tuple[Callable[[Sources, Any], None], ...] = (_connections, _partitions)
