"""The part of a node that is looked at from outside: metrics and health over HTTP, where `metrics.port` asks for it.

Put together by `node.py`; nothing else knows of it, and without it nothing is missing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

from tidelog.broker.http_pages import NodePages, what_is_sick, what_is_unready
from tidelog.broker.http_server import HttpServer
from tidelog.broker.metrics import Metrics, Sources

if TYPE_CHECKING:
    from tidelog.broker.node_ports import NodePorts

log = logging.getLogger("tidelog.metrics")


class MetricsSide:
    def __init__(self, sources: Sources, ports: NodePorts, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = Metrics(sources, loop, ports.executor)
        pages = NodePages(
            self._metrics,
            partial(what_is_sick, sources.metadata),
            partial(what_is_unready, sources.metadata, sources.broker),
        )
        self._server = HttpServer(pages, loop)

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound socket: at once, for a node that is still recovering its logs is alive and not ready."""
        await self._server.listen(sock)
        host, port = sock.getsockname()[:2]
        log.info("metrics and health at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def close(self) -> None:
        await self._server.close()
        await self._metrics.close()
