"""Damage to the files of simulated nodes, among the other faults of a history.

One node of a history has a bad disk, sometimes a second: then each loses single batches only, and never the same, so
that of every record two copies are whole. Invariant: what is damaged is damaged on the device too, whatever was synced.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.cluster.damage.injuries import DATA_TARGETS, ONE_BATCH_WAYS, Injury, choose, damaged, find
from tests.cluster.damage.replicas import parse_batches
from tests.simulation.cluster import DATA, Cluster, SimulatedNode
from tests.simulation.cluster_faults import Faults
from tests.simulation.simulated_disk import Directory, Inode, SimulatedDisk

DAMAGE_WEIGHTS = {
    "damage_running": 10,
    "damage_stopped": 10,
    "damage_killed": 10,
    "damage_all_killed": 6,
    "kill": 3,
    "kill_leader": 5,
    "kill_controller": 2,
    "stop": 2,
    "pause": 2,
    "pause_leader": 2,
    "cut_pair": 1,
    "isolate": 2,
    "lose_power": 2,
    "elect_preferred": 5,
}


def files_of(disk: SimulatedDisk) -> dict[str, Inode]:
    """Every file below the data directory, by its path there."""
    found: dict[str, Inode] = {}

    def walk(directory: Directory, prefix: str) -> None:
        for name, node in directory.entries.items():
            if isinstance(node, Directory):
                walk(node, f"{prefix}{name}/")
            else:
                found[prefix + name] = node

    walk(disk._directory(DATA), "")
    return found


class DamageFaults(Faults):
    """`victims` are the nodes with bad disks."""

    def __init__(
        self, cluster: Cluster, administrator: Any, topics: dict[str, int], rng: Random, victims: list[int]
    ) -> None:
        super().__init__(cluster, administrator, topics, rng)
        self.victims = victims
        self.inflicted = 0

    def _victim(self) -> SimulatedNode:
        return self.cluster.nodes[self.rng.choice(self.victims)]

    # When

    def damage_running(self, node: SimulatedNode, amount: float) -> None:
        self._damage(self._victim())

    def damage_stopped(self, node: SimulatedNode, amount: float) -> None:
        victim = self._victim()
        if not victim.ready:
            return
        loop = victim.host.loop
        victim.stop()

        def damage() -> None:
            if self._is_over or victim.host.loop is not loop:
                return
            if victim.running:
                victim.kill()
            self._damage(victim)
            self._back(victim, amount)

        self.world.after(3.0, damage)

    def damage_killed(self, node: SimulatedNode, amount: float) -> None:
        victim = self._victim()
        if victim.running:
            victim.kill()
            self._damage(victim)
            self._back(victim, amount)

    def damage_all_killed(self, node: SimulatedNode, amount: float) -> None:
        """The victim comes back first or last."""
        victim = self._victim()
        for each in self.cluster.running():
            each.kill()
            if each is not victim:
                self._back(each, self.rng.random())
        self._damage(victim)
        self.world.after(0.01 if amount < 0.6 else 2.5, self._start, victim)

    # What

    def _damage(self, node: SimulatedNode) -> None:
        if self._is_over:
            return
        topic = self.rng.choice(sorted(self.topics))
        partition = f"{topic}-{self.rng.randrange(self.topics[topic])}"
        injury = choose(self.rng)
        files = files_of(node.host.disk)
        if len(self.victims) > 1:
            injury = self._of_one_batch(injury, node, files, partition)
        name = find(injury, {path: len(inode.data) for path, inode in files.items()}, partition)
        if name is None:
            return
        inode = files.get(name)
        data, what = damaged(injury, b"" if inode is None else bytes(inode.data))
        disk, path = node.host.disk, f"{DATA}/{name}"
        parent, last = disk._parent(path)
        if data is None:
            for entries in (parent.entries, parent.durable):
                entries.pop(last, None)
        elif inode is None:
            inode = parent.entries[last] = parent.durable[last] = Inode()
        if inode is not None and data is not None:
            # What is pending is on the device before the damage is.
            inode.sync()
            inode.data, inode.durable = bytearray(data), data
        self.inflicted += 1
        self.steps.append(f"{self.world.now - 1000:.3f}s damage on n{node.node_id} {name}: {what}")

    def _of_one_batch(self, injury: Injury, node: SimulatedNode, files: dict[str, Inode], partition: str) -> Injury:
        """Of a batch that this victim may lose: the even offsets are one victim's, the odd ones the other's."""
        if injury.target not in DATA_TARGETS:
            injury = replace(injury, target="sealed")
        if injury.way not in ONE_BATCH_WAYS:
            injury = replace(injury, way=self.rng.choice(ONE_BATCH_WAYS))
        name = find(injury, {path: len(inode.data) for path, inode in files.items()}, partition)
        if name is None:
            return injury
        batches = parse_batches(bytes(files[name].data), name, [])
        parity = self.victims.index(node.node_id)
        places = [at for at, batch in enumerate(batches) if batch.base_offset // 4 % 2 == parity]
        if not places:
            return replace(injury, target="txnindex", way="garbage")
        return replace(injury, place=(self.rng.choice(places) + 0.5) / len(batches))
