"""A node's part for metrics and health over HTTP, which runs if `metrics.port` is set.

`node.py` creates it. No other part depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from tidelog.broker.metrics.collector import Metrics
from tidelog.broker.metrics.http_pages import NodePages, liveness_problem, readiness_problem
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
        self._metrics = Metrics(sources, self._delay, lambda: self.readiness_problem() is None, loop, ports.executor)
        self._server = HttpServer(NodePages(self._metrics, self.liveness_problem, self.readiness_problem), loop)

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound socket, before the recovery of logs, during which
        the node is alive and not ready.
        """
        self._delay.start()
        await self._server.listen(sock)
        host, port = sock.getsockname()[:2]
        logger.info("metrics and health at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self._metrics.cluster.on_image(image, delta)

    def liveness_problem(self) -> str | None:
        return liveness_problem(self._sources.metadata)

    def readiness_problem(self) -> str | None:
        return readiness_problem(self._sources.metadata, self._sources.broker)

    async def close(self) -> None:
        self._delay.close()
        await self._server.close()
        await self._metrics.close()
