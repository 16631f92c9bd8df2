"""Records without a key keep away from a broker that takes nothing (KIP-794)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import until
from tests.unit.client.fake_broker import SILENCE, FakeCluster
from tests.unit.client.test_producer import producer
from tidelog import TopicPartition
from tidelog.protocol.messages.produce import ProduceRequest


async def chosen_while_a_node_is_silent(**options: Any) -> list[int]:
    """How many records are not delivered, and are, when the leader of partition 0 answers nothing."""
    async with FakeCluster(nodes=2, t=2) as cluster:
        silent = cluster.topics["t"][0].leader
        assert silent != cluster.topics["t"][1].leader

        def answer(request: Any, node: Any) -> Any:
            return SILENCE if node.node_id == silent else node.on_produce(request)

        cluster.script(ProduceRequest, *[answer] * 1_000)
        sending = producer(cluster, batch_size=100, **options)
        try:
            await sending.send("t", b"x" * 80, partition=0)
            await sending.send("t", b"x" * 80, partition=0)
            await asyncio.sleep(0.2)
            tickets = []
            other_queue = sending._accumulator.queue(TopicPartition("t", 1))
            for _ in range(200):
                tickets.append(await sending.send("t", b"x" * 80))
                await until(lambda: not other_queue.waiting_batches and not other_queue.in_flight)
            return [sum(not ticket.done() for ticket in tickets), sum(ticket.done() for ticket in tickets)]
        finally:
            await sending.close(0)


@pytest.mark.slow
async def test_a_leader_that_takes_no_batch_for_too_long_is_avoided() -> None:
    waiting, delivered = await chosen_while_a_node_is_silent(partitioner_availability_timeout_ms=100)
    assert (waiting, delivered) == (0, 200)


@pytest.mark.slow
@pytest.mark.parametrize("is_adaptive", [True, False])
async def test_a_longer_queue_gets_less(is_adaptive: bool) -> None:
    waiting, _ = await chosen_while_a_node_is_silent(partitioner_adaptive_partitioning_enable=is_adaptive)
    if is_adaptive:
        assert waiting < 60
    else:
        assert 95 <= waiting <= 105
