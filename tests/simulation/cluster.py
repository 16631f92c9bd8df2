"""A simulated cluster: machines, their nodes with the real broker and controller code, and what one may look at inside.

Here: how a cluster is laid out, formatted, started, stopped. Not here: faults (`cluster_faults`), clients
(`cluster_clients`), what must hold (`cluster_invariants`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.host import Host
from tests.simulation.simulated_loop import SimulatedLoop
from tests.simulation.simulated_network import Network, Weather
from tests.simulation.world import World
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import NodePorts
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.files.initial_voters import write_initial_voters
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet
from tidelog.storage.log.directory import LogDirectory

CLUSTER_ID = "simulated-cluster-0001"
DATA = "/data"
BROKER_PORT, CONTROLLER_PORT = 9092, 9093
RACK_SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"

# Shorter than Kafka's defaults, so that little virtual time holds many elections.
CONFIG = {
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "400",
    "controller.quorum.election.timeout.ms": "300",
    "controller.quorum.fetch.timeout.ms": "800",
    "controller.quorum.request.timeout.ms": "600",
    "controller.quorum.election.backoff.max.ms": "200",
    "replica.lag.time.max.ms": "1200",
    "replica.fetch.wait.max.ms": "300",
    "replica.fetch.backoff.ms": "100",
    "replica.high.watermark.checkpoint.interval.ms": "900",
    "default.replication.factor": "3",
    "num.partitions": "2",
    "min.insync.replicas": "2",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "group.initial.rebalance.delay.ms": "100",
    "group.min.session.timeout.ms": "500",
    "leader.imbalance.check.interval.seconds": "3",
    "metadata.log.max.record.bytes.between.snapshots": "3000",
    "auto.create.topics.enable": "false",
}


@dataclass(frozen=True)
class Layout:
    """Ids of the nodes that are controllers and of those that are brokers; one may be both.

    `first_voters`: if given, the quorum's voters can change (kraft.version 1), and these are the first.
    """

    controllers: tuple[int, ...]
    brokers: tuple[int, ...]
    config: Mapping[str, str] = field(default_factory=dict)
    first_voters: tuple[int, ...] = ()
    log_dirs: tuple[str, ...] = (DATA,)
    """Beginning with the one that has the metadata."""
    has_racks: bool = False
    """Whether each broker is a rack of its own, and consumers read from the replica in theirs (KIP-392)."""

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.controllers, *self.brokers}))

    @property
    def bootstrap(self) -> str:
        return ",".join(f"n{node}:{BROKER_PORT}" for node in self.brokers)

    def config_of(self, node_id: int) -> NodeConfig:
        roles, listeners = [], []
        if node_id in self.brokers:
            roles.append("broker")
            listeners.append(f"PLAINTEXT://n{node_id}:{BROKER_PORT}")
        if node_id in self.controllers:
            roles.append("controller")
            listeners.append(f"CONTROLLER://n{node_id}:{CONTROLLER_PORT}")
        own = {
            "node.id": str(node_id),
            "process.roles": ",".join(roles),
            "listeners": ",".join(listeners),
            "controller.listener.names": "CONTROLLER",
            "log.dirs": ",".join(self.log_dirs),
        }
        if self.has_racks:
            own |= {"broker.rack": f"rack-{node_id}", "replica.selector.class": RACK_SELECTOR}
        if self.first_voters:
            own["controller.quorum.bootstrap.servers"] = ",".join(
                f"n{each}:{CONTROLLER_PORT}" for each in self.controllers
            )
        else:
            own["controller.quorum.voters"] = ",".join(f"{each}@n{each}:{CONTROLLER_PORT}" for each in self.controllers)
        return NodeConfig.load(None, {**CONFIG, **self.config, **own})


COMBINED = Layout((1, 2, 3), (1, 2, 3))


class SimulatedNode:
    """One node's machine, and the Node that runs there, if one does. `ready`: it has come up."""

    def __init__(self, cluster: Cluster, node_id: int, host: Host, config: NodeConfig) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.host = host
        self.config = config
        self.node: Node | None = None
        self.ready = False
        self.started_at = 0.0
        self.power_lost_at = -1e9
        self.directory_id = b""
        self.disk_was_bad = False
        """Since this process was started."""
        self.seen: dict[Any, Any] = {}
        """What invariants remember of this process."""

    def __repr__(self) -> str:
        return f"n{self.node_id}"

    @property
    def running(self) -> bool:
        return self.host.running

    def start(self) -> None:
        if self.host.running:
            return
        self.seen = {}
        self.ready = False
        self.disk_was_bad = bool(self.host.disk.broken)
        self.node = None
        self.started_at = self.host.world.now
        self.cluster.by_loop[self.host.start(self._main)] = self

    async def _main(self) -> None:
        host = self.host
        ports = NodePorts(host.disk, host.bind, host.clock_ms, host.rng, None, host.boot_id)
        node = self.node = Node(self.config, ports)
        # What was committed in this very turn is to be seen before its replica is gone.
        node._directories.on_offline.insert(0, lambda directory: self.cluster.look(self))
        try:
            await node.start()
            self.ready = True
            await node.failed()
        except Exception:
            if not self.disk_was_bad:
                raise
            self.cluster.look(self)
            asyncio.get_running_loop().call_soon(self.kill)  # it says why, and ends

    def kill(self) -> None:
        self.node, self.ready = None, False
        self.host.kill()

    def lose_power(self) -> None:
        self.node, self.ready = None, False
        self.power_lost_at = self.host.world.now
        self.host.lose_power()

    def stop(self) -> None:
        """Orderly, as by SIGTERM; the process is gone when that is done."""
        node, loop = self.node, self.host.loop
        if not self.ready or node is None or loop is None:
            return
        self.ready = False

        async def end() -> None:
            await node.stop()
            if loop.alive:
                asyncio.get_running_loop().call_soon(self.kill)

        loop.call_soon(lambda: loop.create_task(end()))
        loop.inject(lambda: None)

    def as_voter(self) -> Voter:
        endpoint = Endpoint(str(self), CONTROLLER_PORT)
        return Voter(ReplicaKey(self.node_id, self.directory_id), (("CONTROLLER", endpoint),))

    # Looking inside

    @property
    def _partitions(self) -> Any:
        broker = getattr(self.node, "_broker", None)
        return None if broker is None else broker.partitions

    def partitions(self) -> Iterator[Any]:
        """The replicas hosted by the process that runs here."""
        partitions = self._partitions
        return iter(()) if partitions is None else iter(partitions.hosted())

    def replica(self, topic: str | bytes, index: int) -> Any:
        partitions = self._partitions
        return None if partitions is None else partitions.find(topic, index)

    @property
    def raft(self) -> Any:
        metadata = getattr(self.node, "_metadata", None)
        return None if metadata is None else metadata.raft

    @property
    def metadata_log(self) -> Any:
        return self.raft._plain_log

    @property
    def metadata_offset(self) -> Any:
        metadata = getattr(self.node, "_metadata", None)
        return None if metadata is None else metadata.tracker.offset

    @property
    def image(self) -> Any:
        metadata = getattr(self.node, "_metadata", None)
        return None if metadata is None else metadata.tracker.image


class Cluster:
    def __init__(self, world: World, layout: Layout = COMBINED, weather: Weather | None = None) -> None:
        self.world = world
        self.layout = layout
        self.network = Network(world, weather)
        self.by_loop: dict[SimulatedLoop, SimulatedNode] = {}
        self.nodes: dict[int, SimulatedNode] = {}
        for node_id in layout.nodes:
            host = Host(world, self.network, f"n{node_id}")
            directory = LogDirectory.open(host.disk, DATA, node_id=node_id, cluster_id=CLUSTER_ID)
            directory.close()
            node = self.nodes[node_id] = SimulatedNode(self, node_id, host, layout.config_of(node_id))
            node.directory_id = directory.directory_id
        voters = VoterSet([self.nodes[each].as_voter() for each in layout.first_voters])
        for node in self.nodes.values():
            if node.node_id in layout.first_voters:
                write_initial_voters(node.host.disk, DATA, voters, node.host.clock_ms())
            node.host.disk.sync_everything()
        self.clients: list[Host] = []
        self.look: Callable[[SimulatedNode], None] = lambda node: None
        """Whoever checks the nodes may do so now."""

    def client(self) -> Host:
        """A machine that runs no node."""
        host = Host(self.world, self.network, f"c{len(self.clients) + 1}")
        self.clients.append(host)
        return host

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def wait(self, what: str, seconds: float, done: Callable[[], bool]) -> None:
        """Until it is so. Raises AssertionError."""
        assert self.world.run_for(seconds, done), f"within {seconds} s: {what}"

    def is_up(self) -> bool:
        return all(node.ready for node in self.nodes.values())

    def running(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.running]

    def leader_of(self, topic: str, index: int = 0) -> SimulatedNode | None:
        """The node that leads it in the highest epoch, as far as running nodes say."""
        best: tuple[int, SimulatedNode] | None = None
        for node in self.running():
            replica = node.replica(topic, index)
            if replica is not None and replica.leads and (best is None or replica.leader_epoch > best[0]):
                best = replica.leader_epoch, node
        return None if best is None else best[1]

    def controller(self) -> SimulatedNode | None:
        leaders = [node for node in self.running() if node.raft is not None and node.raft.is_leader]
        return max(leaders, key=lambda node: node.raft.epoch, default=None)

    def placed(self, topic: str, index: int = 0) -> Any:
        """The partition in the newest image anybody has."""
        best: Any = None
        for node in self.running():
            image = node.image
            found = None if image is None else image.topics_by_name.get(topic)
            placed = None if found is None else found.partitions.get(index)
            if placed is not None and (best is None or placed.partition_epoch > best.partition_epoch):
                best = placed
        return best

    def all_in_sync(self, *, internal: bool = True) -> bool:
        """Every partition has a leader and all its replicas, everywhere the same."""
        images = [node.image for node in self.nodes.values() if node.ready]
        if len(images) < len(self.nodes) or any(image is None for image in images):
            return False
        if len({node.metadata_offset for node in self.nodes.values()}) > 1:
            return False
        for topic in images[0].topics_by_name.values():
            if not internal and topic.name.startswith("__"):
                continue
            for index, placed in topic.partitions.items():
                if placed.leader < 0 or len(placed.isr) != len(placed.replicas):
                    return False
                leader = self.nodes[placed.leader].replica(topic.name, index)
                if leader is None or not leader.leads or leader.offline:
                    return False
                end = leader.log.log_end_offset
                for replica_id in placed.replicas:
                    replica = self.nodes[replica_id].replica(topic.name, index)
                    if replica is None or replica.log.log_end_offset != end or replica.high_watermark != end:
                        return False
        return True
