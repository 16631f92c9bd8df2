"""The start that the calls of a client share: once, whatever becomes of the calls that wait for it."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.config import ClientConfig
from tidelog.client.network.shared_start import SharedStart
from tidelog.protocol.errors import ErrorCode, KafkaError


class Start:
    """A start that ends, or fails, when the test says so."""

    def __init__(self) -> None:
        self.count = 0
        self.succeeded_count = 0
        self.may_end = asyncio.Event()
        self.fails = False
        self.shared = SharedStart(ClientConfig.from_options({}), self.run, "client")

    async def run(self) -> None:
        self.count += 1
        await self.may_end.wait()
        if self.fails:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "no broker")
        self.succeeded_count += 1


async def test_a_call_that_is_cancelled_after_the_end_of_the_start_does_not_cause_another_start():
    start = Start()
    assert not await start.shared.wait(0)
    start.may_end.set()
    while not start.succeeded_count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    call = asyncio.create_task(start.shared.wait(1000 * PATIENCE_S))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert await start.shared.wait()
    assert start.count == 1


@pytest.mark.parametrize("seed", range(200))
async def test_calls_that_end_at_any_moment_start_a_client_once(seed):
    chance = random.Random(seed)
    start = Start()

    async def call() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(chance.choice([None, 0, 0, 0.0005])):
                await start.shared.wait(chance.choice([None, 0, 0.5]))
        except (TimeoutError, KafkaError):
            pass

    calls = [asyncio.create_task(call()) for _ in range(chance.randrange(1, 6))]
    start.fails = chance.random() < 0.3
    for _ in range(chance.randrange(8)):
        await asyncio.sleep(0)
        if chance.random() < 0.2:
            chance.choice(calls).cancel()
    start.may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait(calls)
        start.fails = False
        calls = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.wait(calls)
        while not start.succeeded_count:
            try:
                await start.shared.wait()
            except KafkaError:
                pass  # of the start that failed while nobody waited for it
        assert await start.shared.wait()
    assert start.succeeded_count == 1


async def test_no_call_waits_after_the_stop():
    start = Start()
    call = asyncio.create_task(start.shared.wait(1000 * PATIENCE_S))
    await asyncio.sleep(0)
    await start.shared.stop()
    with pytest.raises(RuntimeError, match="this client is closed"):
        await call
    with pytest.raises(RuntimeError, match="this client is closed"):
        await start.shared.wait()
    assert start.succeeded_count == 0
