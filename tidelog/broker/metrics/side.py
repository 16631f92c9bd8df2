"""The part of a node that is looked at from outside: metrics and health over HTTP, where `metrics.port` asks for it.

Put together by `node.py`; nothing else knows of it, and without it nothing is missing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from tidelog.broker.metrics.collector import Metrics
from tidelog.broker.metrics.http_pages import NodePages, what_is_sick, what_is_unready
from tidelog.broker.metrics.loop import LoopDelay
from tidelog.broker.metrics.sources import Sources
from tidelog.broker.network.http_server import HttpServer

if TYPE_CHECKING:
    from tidelog.broker.node_ports import NodePorts
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage

logger = logging.getLogger("tidelog.metrics")


class MetricsSide:
    def __init__(self, sources: Sources, ports: NodePorts, loop: asyncio.AbstractEventLoop) -> None:
        self._sources = sources
        self._delay = LoopDelay(loop, ports.stopwatch or loop.time)
        self._metrics = Metrics(sources, self._delay, lambda: self.unready() is None, loop, ports.executor)
        self._server = HttpServer(NodePages(self._metrics, self.sick, self.unready), loop)

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound socket: at once, for a node that is still recovering its logs is alive and not ready."""
        self._delay.start()
        await self._server.listen(sock)
        host, port = sock.getsockname()[:2]
        logger.info("metrics and health at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self._metrics.cluster.on_image(image, delta)

    def sick(self) -> str | None:
        return what_is_sick(self._sources.metadata)

    def unready(self) -> str | None:
        return what_is_unready(self._sources.metadata, self._sources.broker)

    async def close(self) -> None:
        self._delay.close()
        await self._server.close()
        await self._metrics.close()
