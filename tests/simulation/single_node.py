"""One node and our own producer in a simulated world: the smallest history, and the measure of what a node costs."""

from __future__ import annotations

import asyncio

from tests.simulation.host import Host
from tests.simulation.simulated_client import simulated_client
from tests.simulation.simulated_network import Network
from tests.simulation.world import World, without_collector
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import NodePorts
from tidelog.client.consuming.consumer import Consumer
from tidelog.client.model import TopicPartition
from tidelog.client.producing.producer import Producer

CONFIG = {
    "node.id": "1",
    "process.roles": "broker,controller",
    "listeners": "PLAINTEXT://n1:9092",
    "log.dirs": "/data",
    "num.partitions": "1",
    "offsets.topic.num.partitions": "1",
}
RECORDS = 50


def run(seed: int) -> str:
    """Produce, end the node now and then, consume; returns the trace."""
    with without_collector(), simulated_client():
        return _run(World(seed))


def _run(world: World) -> str:
    network = Network(world)
    host = Host(world, network, "n1")
    client = Host(world, network, "c1")
    config = NodeConfig.load(None, {**CONFIG, "log.flush.interval.messages": "1"})
    acknowledged: list[bytes] = []
    consumed: list[bytes] = []

    async def serve() -> None:
        ports = NodePorts(host.disk, host.bind, host.clock_ms, host.rng, None, host.boot_id)
        await Node(config, ports).start()
        await asyncio.get_running_loop().create_future()

    async def use() -> None:
        options = {"bootstrap_servers": "n1:9092", "client_id": "sim", "reconnect_backoff_max_ms": 200}
        async with Producer(**options) as producer:
            for number in range(RECORDS):
                value = b"%d" % number
                await (await producer.send("t", value))
                acknowledged.append(value)
                await asyncio.sleep(0.01)
        async with Consumer(**options, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            while len(consumed) < RECORDS:
                for records in (await consumer.poll(timeout_ms=500)).values():
                    consumed.extend(record.value or b"" for record in records)

    host.start(serve)
    client.start(use)
    for _ in range(2):
        world.run_for(0.2 + 0.2 * world.rng.random())
        if world.rng.random() < 0.5:
            host.lose_power()
        else:
            host.kill()
        world.run_for(0.1 + 2 * world.rng.random())
        host.start(serve)
    world.run_for(120, lambda: len(consumed) >= RECORDS)
    assert consumed == acknowledged, (len(consumed), len(acknowledged))
    trace = world.trace
    world.end()
    return trace
