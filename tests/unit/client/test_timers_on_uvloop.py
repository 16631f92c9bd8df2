"""Timers of the client on uvloop, whose handle for a time that is past is no timer: it has no `when`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from tidelog.client.config import ConsumerConfig, ProducerConfig
from tidelog.client.consuming.fetcher import Fetcher
from tidelog.client.producing.producer_session import ProducerSession
from tidelog.client.producing.sender import Sender


async def _sender() -> tuple[Any, Any]:
    config = ProducerConfig.from_options({"bootstrap_servers": "127.0.0.1:1"})
    accumulator = SimpleNamespace(queues={}, incomplete_count=0)
    sender = Sender(cast(Any, SimpleNamespace()), config, cast(Any, accumulator), ProducerSession(idempotent=False))
    return sender, lambda: sender._wake_at(asyncio.get_running_loop().time() * 1000 - 1)


async def _fetcher() -> tuple[Any, Any]:
    config = ConsumerConfig.from_options({"bootstrap_servers": "127.0.0.1:1"})
    fetcher = Fetcher(cast(Any, None), config, cast(Any, SimpleNamespace(assigned={})), lambda: None)
    return fetcher, lambda: fetcher._schedule_send(-1)


@pytest.mark.parametrize("make", [_sender, _fetcher])
def test_a_wake_up_for_the_past_may_be_asked_for_twice(make: Any) -> None:
    async def main() -> None:
        user, arm = await make()
        user._on_timer = lambda: None
        arm()
        assert not hasattr(user._timer, "when"), "uvloop has changed: this test shows nothing"
        arm()
        user._timer.cancel()

    uvloop.run(main())
