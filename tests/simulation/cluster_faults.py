"""What goes wrong in a history, and when: drawn from the seed before anything runs, so that a fault taken out of the
list leaves the others as they were.

A fault is a name with arguments, done by the method of that name. Invariant: after `heal` nothing is wrong any more.
"""

from __future__ import annotations

import errno
from random import Random
from typing import Any, NamedTuple

from tests.simulation.cluster import Cluster, SimulatedNode
from tidelog.protocol.errors import KafkaError


class Fault(NamedTuple):
    at_s: float
    name: str
    node: int
    amount: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f}s {self.name}(n{self.node}, {self.amount:.3f})"


WEIGHTS = {
    "kill": 10,
    "kill_leader": 6,
    "kill_controller": 5,
    "kill_all": 1,
    "lose_power": 6,
    "lose_power_in_a_write": 4,
    "lose_power_everywhere": 1,
    "stop": 4,
    "pause": 6,
    "pause_leader": 4,
    "cut_pair": 5,
    "cut_one_way": 4,
    "isolate": 6,
    "reset_connections": 5,
    "jump_clock": 2,
    "slow_threads": 3,
    "elect_preferred": 2,
    "reassign": 3,
    "change_voters": 4,
    "fill_disk": 2,
    "fail_syncs": 2,
}
# For nodes with more than one log directory.
DIRECTORY_WEIGHTS = {**WEIGHTS, "break_directory": 40, "move_replica": 40, "reassign": 6}
MOVING_WEIGHTS = {**WEIGHTS, "move_replica": 90, "reassign": 6}
DISK_FAULTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (errno.ENOSPC, ("write", "create")),
    (errno.EROFS, ()),
    (errno.EIO, ()),
    (errno.EIO, ("sync",)),
    (errno.EIO, ("read",)),
    (errno.EIO, ("read", "write", "sync", "create")),
)
# Without a sync before every acknowledgement, what several machines lose at once is lost.
CACHE_ONLY = ("lose_power", "lose_power_in_a_write", "lose_power_everywhere")


def schedule(rng: Random, cluster: Cluster, duration_s: float, weights: dict[str, int]) -> list[Fault]:
    names = list(weights)
    faults: list[Fault] = []
    at_s = 0.3 + rng.random() * 0.7
    while at_s < duration_s:
        name = rng.choices(names, list(weights.values()))[0]
        faults.append(Fault(at_s, name, rng.choice(cluster.layout.nodes), rng.random()))
        at_s += rng.choice((0.05, 0.3, 0.8, 1.5)) * (0.5 + rng.random())
    return faults


class Faults:
    """Does them. `steps` is what was done, for the report."""

    def __init__(self, cluster: Cluster, administrator: Any, topics: dict[str, int], rng: Random) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.administrator = administrator
        self.topics = topics
        self.rng = rng
        self.steps: list[str] = []
        self._is_over = False

    def plan(self, faults: list[Fault]) -> None:
        for fault in faults:
            self.world.after(fault.at_s, self._do, fault)

    def _do(self, fault: Fault) -> None:
        if self._is_over:
            return
        self.steps.append(str(fault))
        self.world.record(fault.name.encode())
        getattr(self, fault.name)(self.cluster.nodes[fault.node], fault.amount)

    def _back(self, node: SimulatedNode, amount: float) -> None:
        """Start it again: soon, or after those who wait for it have given up."""
        delay_s = 0.02 + 0.3 * amount if amount < 0.6 else 3.5 * (amount - 0.5)
        self.world.after(delay_s, self._start, node)

    def _start(self, node: SimulatedNode) -> None:
        if not self._is_over and not node.running:
            node.start()

    # Ends

    def kill(self, node: SimulatedNode, amount: float) -> None:
        if node.running and not self._is_over:  # an operator who replaces a disk comes later, and may come too late
            node.kill()
            self._back(node, amount)

    def kill_leader(self, node: SimulatedNode, amount: float) -> None:
        topic = self.rng.choice(sorted(self.topics))
        self.kill(self.cluster.leader_of(topic, self.rng.randrange(self.topics[topic])) or node, amount)

    def kill_controller(self, node: SimulatedNode, amount: float) -> None:
        self.kill(self.cluster.controller() or node, amount)

    def kill_all(self, node: SimulatedNode, amount: float) -> None:
        for each in self.cluster.running():
            self.kill(each, self.rng.random())

    def stop(self, node: SimulatedNode, amount: float) -> None:
        if node.ready:
            loop = node.host.loop
            node.stop()
            self.world.after(6, self._end_stop, node, loop)
            for delay_s in (0.5 + amount, 3, 6.1):
                self.world.after(delay_s, self._start, node)

    def _end_stop(self, node: SimulatedNode, loop: Any) -> None:
        """If it takes too long."""
        if node.host.loop is loop and node.running:
            node.kill()

    def lose_power(self, node: SimulatedNode, amount: float) -> None:
        if node.running:
            node.lose_power()
            self._back(node, amount)

    def lose_power_in_a_write(self, node: SimulatedNode, amount: float) -> None:
        if node.running:
            node.power_lost_at = self.world.now
            node.host.disk.fail_after(1 + int(amount * amount * 40))
            self.world.after(2.5 * amount, self._start, node)
            self.world.after(3, self._start, node)

    def lose_power_everywhere(self, node: SimulatedNode, amount: float) -> None:
        for each in self.cluster.running():
            self.lose_power(each, self.rng.random())

    # Disks

    def fill_disk(self, node: SimulatedNode, amount: float) -> None:
        if node.running:
            node.host.disk.full = True
            self._replace_soon(node, amount)

    def fail_syncs(self, node: SimulatedNode, amount: float) -> None:
        if node.running:
            node.host.disk.sync_fails = True
            self._replace_soon(node, amount)

    def break_directory(self, node: SimulatedNode, amount: float) -> None:
        """One of its log directories, seldom that of the metadata; an operator comes, mends it and restarts."""
        disk, homes = node.host.disk, node.cluster.layout.log_dirs
        path = homes[0] if self.rng.random() < 0.2 else self.rng.choice(homes[1:])
        code, kinds = self.rng.choice(DISK_FAULTS)
        disk.break_directory(path, code, *kinds)
        node.disk_was_bad = True
        self.world.after(0.2 + 5 * amount, self._mend, node, amount)

    def move_replica(self, node: SimulatedNode, amount: float) -> None:
        """To another log directory of the same node, seldom back to where it is."""
        hosted = [each for each in node.partitions() if each.topic in self.topics] if node.ready else []
        broker = getattr(node.node, "_broker", None)
        if not hosted or broker is None:
            return
        replica = self.rng.choice(hosted)
        here = replica.log.directory.rpartition("/")[0]
        elsewhere = [path for path in node.cluster.layout.log_dirs if path != here]
        try:
            broker.moves.order(replica.topic, replica.index, here if amount < 0.2 else self.rng.choice(elsewhere))
        except KafkaError:
            pass  # a directory is offline

    def _mend(self, node: SimulatedNode, amount: float) -> None:
        if node.host.disk.broken:
            node.host.disk.broken.clear()
            self.kill(node, amount)

    def _replace_soon(self, node: SimulatedNode, amount: float) -> None:
        """What could not be written stays offline until the node is restarted."""
        node.disk_was_bad = True
        self.world.after(0.1 + 1.5 * amount, self.kill, node, amount)

    # Hangs

    def pause(self, node: SimulatedNode, amount: float) -> None:
        loop = node.host.loop
        if node.running and loop is not None and not loop.paused:
            loop.pause()
            self.world.after(0.05 + 3 * amount * amount, loop.resume)

    def pause_leader(self, node: SimulatedNode, amount: float) -> None:
        topic = self.rng.choice(sorted(self.topics))
        self.pause(self.cluster.leader_of(topic, self.rng.randrange(self.topics[topic])) or node, amount)

    def slow_threads(self, node: SimulatedNode, amount: float) -> None:
        loop = node.host.loop
        if loop is not None:
            loop.threads_slow = 1 + 100 * amount

    def jump_clock(self, node: SimulatedNode, amount: float) -> None:
        node.host.wall_offset_ms += int((amount - 0.5) * 20_000)

    # Network

    def _others(self, node: SimulatedNode) -> list[str]:
        return [f"n{each}" for each in self.cluster.layout.nodes if each != node.node_id]

    def cut_pair(self, node: SimulatedNode, amount: float) -> None:
        self.cluster.network.cut(str(node), self.rng.choice(self._others(node)))
        self._heal_later(amount)

    def cut_one_way(self, node: SimulatedNode, amount: float) -> None:
        self.cluster.network.cut(str(node), self.rng.choice(self._others(node)), one_way=True)
        self._heal_later(amount)

    def isolate(self, node: SimulatedNode, amount: float) -> None:
        others = self._others(node)
        if amount < 0.5:
            others += [host.name for host in self.cluster.clients]
        self.cluster.network.isolate(str(node), others)
        self._heal_later(amount)

    def _heal_later(self, amount: float) -> None:
        self.world.after(0.1 + 3 * amount, self.cluster.network.heal)

    def reset_connections(self, node: SimulatedNode, amount: float) -> None:
        for transport in list(self.cluster.network.transports):
            if transport.host is node.host and self.rng.random() < amount:
                self.cluster.network.reset(transport)

    # What an operator does

    def elect_preferred(self, node: SimulatedNode, amount: float) -> None:
        async def order(admin: Any) -> None:
            await admin.elect_leaders()

        self.administrator.ask(order)

    def reassign(self, node: SimulatedNode, amount: float) -> None:
        brokers = list(self.cluster.layout.brokers)
        self.rng.shuffle(brokers)
        topic = self.rng.choice(sorted(self.topics))
        index = self.rng.randrange(self.topics[topic])
        count = self.rng.randint(2, len(brokers)) if len(brokers) > 2 else len(brokers)
        from tidelog.client.model import TopicPartition

        async def order(admin: Any) -> None:
            await admin.alter_partition_reassignments({TopicPartition(topic, index): brokers[:count]})

        self.administrator.ask(order)

    def change_voters(self, node: SimulatedNode, amount: float) -> None:
        """Add the node to the metadata quorum, or take it out, where that can be done while it runs."""
        layout, controller = self.cluster.layout, self.cluster.controller()
        if not layout.first_voters or controller is None or node.node_id not in layout.controllers:
            return
        voters = [voter.key.id for voter in controller.raft.voters()]
        voter = node.as_voter()

        async def order(admin: Any) -> None:
            if node.node_id not in voters:
                endpoints = [(name, endpoint.host, endpoint.port) for name, endpoint in voter.endpoints]
                await admin.add_raft_voter(node.node_id, node.directory_id, endpoints)
            elif len(voters) > 2:
                await admin.remove_raft_voter(node.node_id, node.directory_id)

        self.administrator.ask(order)

    # The end of it

    def heal(self) -> None:
        self._is_over = True
        self.cluster.network.heal()
        for node in self.cluster.nodes.values():
            loop = node.host.loop
            if node.running and loop is not None:
                loop.threads_slow = 1.0
                if loop.paused:
                    loop.resume()
            node.host.disk.fail_at = 1 << 60
            node.host.disk.full = node.host.disk.sync_fails = False
            node.host.disk.broken.clear()
            if node.disk_was_bad:
                node.kill()
            self._revive(node)

    def _revive(self, node: SimulatedNode) -> None:
        if not node.running:
            node.start()
        self.world.after(1.0, self._revive, node)
