"""Connects the tasks and the driver of a query to brokers that may be away for a while.

A client gives up its start after `socket.connection.setup.timeout.ms`, 10 s. A restart of a whole cluster can take
longer, and would end the query.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidelog.client.config import ClientConfig
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError

logger = logging.getLogger(__name__)
Started = TypeVar("Started")

_PAUSE_S = 0.1


async def connect(config: ClientConfig, timeout_ms: float) -> Cluster:
    """A started cluster. Raises what the last start raises, after `timeout_ms`."""

    async def start() -> Cluster:
        cluster = Cluster(config)  # one that has not started is closed
        await cluster.start()
        return cluster

    return await start_within(start, timeout_ms)


async def start_within(start: Callable[[], Awaitable[Started]], timeout_ms: float) -> Started:
    """Await `start`, again while it reaches no broker and `timeout_ms` has not passed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        try:
            return await start()
        except KafkaError as error:
            if error.code is not ErrorCode.NETWORK_EXCEPTION or loop.time() >= deadline:
                raise
            logger.warning("the brokers are asked again: %s", error)
        await asyncio.sleep(_PAUSE_S)
