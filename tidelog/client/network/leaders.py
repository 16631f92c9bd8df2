"""Calls to the leaders of many partitions, with retries for each leader by itself.

Here: who is asked, when again, and for how long. Not here: the requests and their answers. Stateless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.outcomes import cancel_all, start_task


async def ask_leaders(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    ask: Callable[[list[TopicPartition]], Awaitable[Iterable[TopicPartition]]],
    deadline: float,
) -> None:
    """`ask` the leader of each partition until no partition is left, at the longest until `deadline`, in loop time.

    It gets the partitions of one leader, or of none, and returns those to ask for again. A leader that does not answer
    holds back only its own: a partition that has moved away from another one is asked for again meanwhile. Raises the
    first error of `ask`.
    """
    loop = asyncio.get_running_loop()

    async def ask_one(led: list[TopicPartition], failures: int) -> None:
        again = list(await ask(led))
        if not again:
            return
        failures += 1
        wait_ms = cluster.retry_backoff.wait_ms(failures)
        remaining_ms = (deadline - loop.time()) * 1000
        if remaining_ms <= wait_ms:
            return
        # Leave time for another attempt, also when no broker answers.
        await cluster.wait_for_metadata(remaining_ms - wait_ms)
        if failures > 1:
            await asyncio.sleep(wait_ms / 1000)
        await ask_all(again, failures)

    async def ask_all(partitions: Iterable[TopicPartition], failures: int) -> None:
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            by_leader.setdefault(cluster.metadata.leader(partition), []).append(partition)
        await _run_until_failure(ask_one(led, failures) for led in by_leader.values())

    try:
        async with asyncio.timeout_at(deadline):
            await ask_all(partitions, 0)
    except TimeoutError:
        pass


async def _run_until_failure(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all calls, or for the first one that fails: its error is raised, and the others are cancelled."""
    tasks = [start_task(call) for call in calls]
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        cancel_all(tasks)
