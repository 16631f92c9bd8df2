"""A whole node whose topics are compacted, killed and cut off from power while it cleans: clients see a dict.

__consumer_offsets is one of those topics: the group finds the offset that it committed last.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.host import Host
from tests.simulation.simulated_client import simulated_client
from tests.simulation.simulated_network import Network
from tests.simulation.single_node import CONFIG
from tests.simulation.world import World, without_collector
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import NodePorts
from tidelog.client.consuming.consumer import Consumer
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.producing.producer import Producer
from tidelog.protocol.errors import KafkaError

pytestmark = pytest.mark.usefixtures("quiet")

RECORDS = 120
SETTINGS = {
    "log.cleanup.policy": "compact",
    "log.roll.ms": "300",
    "log.flush.interval.messages": "1",
    "log.cleaner.backoff.ms": "400",
    "log.cleaner.min.cleanable.ratio": "0.05",
    "log.segment.delete.delay.ms": "100",
    "group.initial.rebalance.delay.ms": "0",
}
PARTITION = TopicPartition("t", 0)


class Life:
    """One seed's history: `acknowledged` the newest value of every key, `committed` the last offset that was."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        network = Network(self.world)
        self.host = Host(self.world, network, "n1")
        self.client = Host(self.world, network, "c1")
        self.config = NodeConfig.load(None, {**CONFIG, **SETTINGS})
        self.nodes: list[Node] = []
        self.acknowledged: dict[bytes, bytes] = {}
        self.committed = 0
        self.found: tuple[dict[bytes, bytes], int, int] | None = None
        self.cleanings: dict[str, int] = {}

    async def serve(self) -> None:
        host = self.host
        node = Node(self.config, NodePorts(host.disk, host.bind, host.clock_ms, host.rng, None, host.boot_id))
        self.nodes.append(node)
        await node.start()
        await asyncio.get_running_loop().create_future()

    async def use(self) -> None:
        rng = self.world.rng
        options = {"bootstrap_servers": "n1:9092", "client_id": "sim", "reconnect_backoff_max_ms": 200}
        async with (
            Producer(**options) as producer,
            Consumer(**options, group_id="g", enable_auto_commit=False) as group,
        ):
            group.assign([PARTITION])
            for number in range(RECORDS):
                key, value = b"k%d" % rng.randrange(7), b"%d" % number
                await (await producer.send("t", value, key=key))
                self.acknowledged[key] = value
                await self._commit(group, number + 1)
                await asyncio.sleep(0.05)
        await asyncio.sleep(5)
        async with Consumer(**options, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
            consumer.assign([PARTITION])
            seen: list[tuple[bytes, bytes]] = []
            while not seen or seen[-1][1] != b"%d" % (RECORDS - 1):
                for records in (await consumer.poll(timeout_ms=500)).values():
                    seen.extend((record.key or b"", record.value or b"") for record in records)
        async with Consumer(**options, group_id="g", enable_auto_commit=False) as group:
            position = (await group.committed(PARTITION))[PARTITION]
        self.found = dict(seen), len(seen), position.offset if position else -1

    async def _commit(self, group: Consumer, offset: int) -> None:
        while self.committed < offset:
            try:
                await group.commit({PARTITION: OffsetAndMetadata(offset)})
                self.committed = offset
            except KafkaError:  # the node is away, or loads the group
                await asyncio.sleep(0.1)

    def run(self) -> None:
        self.host.start(self.serve)
        self.client.start(self.use)
        world = self.world
        for _ in range(3):
            world.run_for(0.5 + 2 * world.rng.random())
            if world.rng.random() < 0.6:
                self.host.lose_power()
            else:
                self.host.kill()
            world.run_for(0.1 + world.rng.random())
            self.host.start(self.serve)
        world.run_for(120, lambda: self.found is not None)
        world.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_compacted_topic_and_a_groups_offsets(seed: int) -> None:
    with without_collector(), simulated_client():
        life = Life(seed)
        life.run()
    assert life.found is not None
    contents, count, committed = life.found
    assert contents == life.acknowledged
    assert committed == life.committed == RECORDS
    assert count < RECORDS / 2
    side = life.nodes[-1]._broker
    assert side is not None
    logs = {log.topic: log for directory in side.cleaner._directories for log in directory.logs.values()}
    assert logs["t"].cleaned_offset > RECORDS / 2
    offsets = logs["__consumer_offsets"]
    assert offsets.cleaned_offset > 0
    assert offsets.size_bytes < 5000
