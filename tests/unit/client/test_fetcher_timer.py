"""The timer of a consumer's fetches is armed again by what happens in the moment in which it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from tidelog.client.config import ConsumerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.consuming.subscription import PartitionState
from tidelog.client.model import TopicPartition
from tidelog.client.network.metadata import EMPTY


class Loop:
    """A clock that stands still while a callback runs, and that a timer may precede by a rounding error (uvloop)."""

    def __init__(self) -> None:
        self.now_s = 24638.759
        self.armed: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        entry = (when, callback)
        self.armed.append(entry)
        return SimpleNamespace(
            when=lambda: when, cancelled=lambda: entry not in self.armed, cancel=lambda: self.armed.remove(entry)
        )

    def fire(self) -> None:
        when, callback = self.armed[0]
        self.now_s = when - 2e-12
        callback()


async def test_a_timer_that_fires_a_hair_early_is_armed_again() -> None:
    loop = Loop()
    config = ConsumerConfig.from_options({"bootstrap_servers": "127.0.0.1:1", "retry_backoff_ms": 50})
    refused: list[float] = []

    def fetchable(_: Any, now_ms: float) -> list[Any]:
        """A partition whose fetch is refused at once, each time."""
        refused.append(now_ms)
        fetcher._backoff_until_ms = now_ms + 50
        fetcher._schedule_send(50)
        return []

    subscription = SimpleNamespace(
        assigned={TopicPartition("t", 0): PartitionState()}, pause_changes=set(), fetchable_partitions=fetchable
    )
    fetcher = Fetcher(cast(Any, SimpleNamespace(metadata=EMPTY)), config, cast(Any, subscription), lambda: None)
    fetcher._loop = cast(asyncio.AbstractEventLoop, loop)
    fetcher.send_fetches()
    for _ in range(5):
        before = len(refused)
        armed = loop.armed[0]
        loop.fire()
        loop.armed.remove(armed)
        assert len(refused) == before + 1
        assert len(loop.armed) == 1, "nothing would fetch again"
