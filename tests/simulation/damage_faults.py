"""Damage to the files of simulated nodes, among the other faults of a history.

One node of a history has a bad disk, sometimes a second: then each loses single batches only, and never the same, so
that of every record two copies are whole. Two faults bring about what chance seldom does: a leader with damage that a
replica which was away has not read yet, and damage where a replica still has what an older leader wrote. Invariant:
what is damaged is damaged on the device too, whatever was synced.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.cluster.damage.injuries import DATA_TARGETS, DIRECTORY_FILES, ONE_BATCH_WAYS, Injury, choose, damaged, find
from tests.cluster.damage.replicas import parse_batches
from tests.simulation.cluster import DATA, Cluster, SimulatedNode
from tests.simulation.cluster_faults import Faults
from tests.simulation.cluster_invariants import RECENTLY_S
from tests.simulation.simulated_disk import Directory, Inode, SimulatedDisk

DAMAGE_WEIGHTS = {
    "damage_running": 10,
    "damage_stopped": 10,
    "damage_killed": 10,
    "damage_all_killed": 6,
    "damage_before_a_laggard": 6,
    "damage_beside_a_stale_replica": 6,
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


def _end_offset(node: SimulatedNode, directory: str) -> int:
    """Of the log in this directory, read from outside."""
    files = files_of(node.host.disk)
    logs = [name for name in sorted(files) if name.startswith(f"{directory}/") and name.endswith(".log")]
    batches = [each for name in logs for each in parse_batches(bytes(files[name].data), name, [])]
    return batches[-1].next_offset if batches else 0


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

    def damage_before_a_laggard(self, node: SimulatedNode, amount: float) -> None:
        """A leader's disk fails where another replica, which was killed, is about to read on."""
        victim = self._victim()
        led = [each for each in victim.partitions() if each.leads and each.topic in self.topics] if victim.ready else []
        others = [each for each in self.cluster.running() if each.ready and each.node_id not in self.victims]
        others = [each for each in others if each.node_id in self.cluster.layout.brokers]
        if not led or not others:
            return
        replica, laggard = self.rng.choice(led), self.rng.choice(others)
        behind = laggard.replica(replica.topic, replica.index)
        if behind is None:
            return
        end = behind.log.log_end_offset
        laggard.kill()

        def damage() -> None:
            if victim.running:
                self._damage_from(
                    victim, replica.topic, replica.index, end, ("base_offset", "base_offset", "zero_batch")
                )
            self._start(laggard)

        self.world.after(0.3 + 0.7 * amount, damage)

    def damage_beside_a_stale_replica(self, node: SimulatedNode, amount: float) -> None:
        """The old leader still has what it alone had written, while the victim's copy of what the new one wrote instead
        is damaged, and the new one is away."""
        victim = self._victim()
        led: list[tuple[str, int, SimulatedNode]] = []
        for topic, count in sorted(self.topics.items()):
            for index in range(count):
                leader = self.cluster.leader_of(topic, index)
                if leader is not None and leader.node_id not in self.victims:
                    led.append((topic, index, leader))
        if not led or not victim.ready:
            return
        topic, index, old = self.rng.choice(led)
        known = (victim.node_id, old.node_id)
        [new] = [self.cluster.nodes[each] for each in self.cluster.layout.brokers if each not in known]
        end = old.replica(topic, index).log.log_end_offset
        network = self.cluster.network
        network.cut(str(old), str(new))
        network.cut(str(old), str(victim))

        def replace() -> None:
            network.heal()
            network.cut(str(old), str(new))
            if old.running:
                old.kill()
            self.world.after(0.1, self._start, old)

        def damage() -> None:
            if self._is_over or self.cluster.leader_of(topic, index) is not new or not victim.running:
                network.heal()
                return
            victim.kill()
            self._damage_from(victim, topic, index, end, ("payload_bit", "zero_batch", "crc"))
            new.kill()
            self._start(victim)
            self.world.after(0.8, self._start, new)
            self.world.after(1.0, network.heal)

        self.world.after(0.25, replace)
        self.world.after(0.8 + 0.6 * amount, damage)

    # What

    def _damage_from(self, node: SimulatedNode, topic: str, index: int, offset: int, ways: tuple[str, ...]) -> None:
        """One of the batches from `offset` on, but not the last."""
        files = files_of(node.host.disk)
        logs = [name for name in sorted(files) if name.startswith(f"{topic}-{index}/") and name.endswith(".log")]
        places = []
        for number, name in enumerate(logs):
            batches = parse_batches(bytes(files[name].data), name, [])
            if number == len(logs) - 1:
                batches = batches[:-1]
            places += [(number, at, len(batches)) for at, batch in enumerate(batches) if batch.base_offset >= offset]
        if not places or self._is_over or len(self.victims) > 1:
            return
        number, at, count = places[0] if self.rng.random() < 0.7 else self.rng.choice(places)
        is_active = number == len(logs) - 1
        place = (at + 0.5) / (count + is_active)
        file_at = 0.0 if is_active else (number + 0.5) / (len(logs) - 1)
        target = "active" if is_active else "sealed"
        self._inflict(
            node, Injury(target, self.rng.choice(ways), file_at, place, self.rng.random()), f"{topic}-{index}"
        )

    def _cut_of_known_end(self, injury: Injury, files: dict[str, Inode], partition: str) -> Injury:
        """A cut that some file tells of: part of a batch is left, a checkpoint knows of what is gone, or all is gone.

        A log that ends between two batches, above all checkpoints, is what a process leaves that was killed before it
        wrote more. Only the other replicas know better (docs/decisions/0016-damage-and-repair.md, limits).
        """
        if injury.way != "cut_batches" or injury.target == "metadata_log":
            return injury
        name = find(injury, {path: len(inode.data) for path, inode in files.items()}, partition)
        batches = [] if name is None else parse_batches(bytes(files[name].data), name, [])
        if name is None or not batches:
            return injury
        topic, _, index = name.partition("/")[0].rpartition("-")
        known_end = 0
        for each in ("high_watermarks", "recovery_points"):
            inode = files.get(DIRECTORY_FILES[each])
            lines = [] if inode is None else bytes(inode.data).decode(errors="replace").splitlines()
            for line in lines:
                if line.startswith(f"{topic} {index} ") and line.rpartition(" ")[2].isdecimal():
                    known_end = max(known_end, int(line.rpartition(" ")[2]))
        first_lost = batches[int(injury.place * len(batches))]
        # A segment is begun behind others when there is a record for it: an empty one tells of a loss.
        empties = not first_lost.position and known_end < first_lost.base_offset == int(name[-24:-4]) > 0
        return injury if first_lost.base_offset < known_end or empties else replace(injury, way="cut_tail")

    def _damage(self, node: SimulatedNode) -> None:
        if self._is_over:
            return
        topic = self.rng.choice(sorted(self.topics))
        self._inflict(node, choose(self.rng), f"{topic}-{self.rng.randrange(self.topics[topic])}")

    def _inflict(self, node: SimulatedNode, injury: Injury, partition: str) -> None:
        files = files_of(node.host.disk)
        if len(self.victims) > 1:
            injury = self._of_one_batch(injury, node, files, partition)
        injury = self._cut_of_known_end(injury, files, partition)
        name = find(injury, {path: len(inode.data) for path, inode in files.items()}, partition)
        if name is None or not any(path.startswith(f"{name.partition('/')[0]}/") for path in files):
            return  # a reassignment has removed the replica
        if self._is_only_trusted_copy(node, injury, name):
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

    def reassign_to_a_bad_disk(self, node: SimulatedNode, amount: float) -> None:
        """One replica is left, that of a bad disk, which has no damage from then on: nobody could repair it."""
        from tidelog.client.model import TopicPartition

        self._is_over = True
        topic = self.rng.choice(sorted(self.topics))
        target = TopicPartition(topic, self.rng.randrange(self.topics[topic]))

        async def order(admin: Any) -> None:
            await admin.alter_partition_reassignments({target: self.victims[:1]})

        self.administrator.ask(order)

    def _is_only_trusted_copy(self, node: SimulatedNode, injury: Injury, name: str) -> bool:
        """Whether only this node has the records, and another one lost power lately.

        The controller does not trust that one's log, so that the victim may be alone in the ISR, without an eligible
        replica. After a kill it does not know what it had committed, and gives nothing up
        (docs/decisions/0016-damage-and-repair.md, limits).
        """
        if injury.target not in ("sealed", "active"):
            return False
        others = [self.cluster.nodes[each] for each in self.cluster.layout.brokers if each != node.node_id]
        if all(each.power_lost_at < self.world.now - RECENTLY_S for each in others):
            return False
        directory = name.partition("/")[0]
        batches = parse_batches(bytes(files_of(node.host.disk)[name].data), name, [])
        if not batches:
            return False
        first_damaged = batches[min(int(injury.place * len(batches)), len(batches) - 1)]
        return all(_end_offset(each, directory) <= first_damaged.base_offset for each in others)

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
