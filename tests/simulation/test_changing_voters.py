"""Histories of clusters whose voters come and go while everything else goes wrong too (KIP-853, kraft.version 1).

The same world, clients and invariants as `cluster_history`; added are the voters named in the log, nodes that join as
observers, and an operator who adds and removes them. TIDELOG_VOTER_SEEDS=1000 runs that many.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.doses import seeds
from tests.simulation.cluster import BROKER_PORT, CONFIG, CONTROLLER_PORT, DATA, Layout, SimulatedNode
from tests.simulation.cluster_faults import WEIGHTS, Faults, schedule
from tests.simulation.cluster_history import TOPICS, ClusterHistory
from tests.simulation.simulated_loop import SimulatedLoop
from tidelog.broker.config.node_config import NodeConfig
from tidelog.protocol.uuids import uuid_from_text
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.files.initial_voters import write_initial_voters
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet

FAST = 2


class DynamicLayout(Layout):
    """Every controller is told where to ask; who votes is in the log."""

    def config_of(self, node_id: int) -> NodeConfig:
        assert node_id in self.controllers
        values = {
            "node.id": str(node_id),
            "process.roles": "broker,controller" if node_id in self.brokers else "controller",
            "listeners": f"PLAINTEXT://n{node_id}:{BROKER_PORT}," * (node_id in self.brokers)
            + f"CONTROLLER://n{node_id}:{CONTROLLER_PORT}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": DATA,
        }
        values["controller.quorum.bootstrap.servers"] = ",".join(
            f"n{each}:{CONTROLLER_PORT}" for each in self.controllers
        )
        return NodeConfig.load(None, {**CONFIG, **self.config, **values})


class ChangingFaults(Faults):
    def directory_id(self, node: SimulatedNode) -> bytes:
        properties = node.host.disk.read_file(f"{DATA}/meta.properties").decode().splitlines()
        return uuid_from_text(dict(line.split("=", 1) for line in properties if "=" in line)["directory.id"])

    def change_voters(self, node: SimulatedNode, amount: float) -> None:
        """One that votes leaves, one that does not comes in."""
        leader = self.cluster.controller()
        if leader is None:
            return
        voters = leader.raft.voter_ids()
        node_id = self.rng.choice(self.cluster.layout.controllers)
        directory_id = self.directory_id(self.cluster.nodes[node_id])

        async def order(admin: Any) -> None:
            if node_id in voters:
                await admin.remove_raft_voter(node_id, directory_id)
            else:
                await admin.add_raft_voter(node_id, directory_id, [("CONTROLLER", f"n{node_id}", CONTROLLER_PORT)])

        self.administrator.ask(order)


class VoterHistory(ClusterHistory):
    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        controllers = rng.choice(((1, 2, 3), (1, 2, 3, 4)))
        layout = DynamicLayout(
            controllers,
            (1, 2, 3),
            {
                "default.replication.factor": "3",
                "min.insync.replicas": str(rng.choice((1, 2))),
                "offsets.topic.replication.factor": "3",
                "log.flush.interval.messages": "1",
            },
        )
        weights = {**WEIGHTS, "change_voters": 25}
        super().__init__(seed, [], layout=layout, syncs=True, weights=weights)
        self.faults: ChangingFaults = ChangingFaults(
            self.cluster, self.administrator, TOPICS, Random(seed * 104729 + 3)
        )
        self.planned = schedule(self.rng, self.cluster, self.duration_s, weights)
        self._format(rng.choice(controllers[:3]) if rng.random() < 0.5 else 3)

    def _format(self, count: int) -> None:
        """The first `count` controllers begin it."""
        first = [self.cluster.nodes[node_id] for node_id in self.cluster.layout.controllers[:count]]
        voters = VoterSet(
            Voter(
                ReplicaKey(node.node_id, self.faults.directory_id(node)),
                (("CONTROLLER", Endpoint(f"n{node.node_id}", CONTROLLER_PORT)),),
            )
            for node in first
        )
        for node in first:
            assert write_initial_voters(node.host.disk, DATA, voters, 0)
            node.host.disk.sync_everything()


@pytest.mark.slow
def test_voters_really_change():
    seen: dict[tuple[int, ...], None] = {}
    for seed in range(FAST):
        history = VoterHistory(seed)
        check = history.world.on_step
        assert check is not None

        def look(loop: SimulatedLoop, history: VoterHistory = history, check: Any = check) -> None:
            node = history.cluster.by_loop.get(loop)
            if node is not None and node.raft is not None:
                seen[tuple(node.raft.voter_ids())] = None
            check(loop)

        history.world.on_step = look
        history.run()
    assert len(seen) > 3, seen


@pytest.mark.parametrize("chosen", seeds("TIDELOG_VOTER_SEEDS", chunk=5, fast=0, full=5))
def test_a_cluster_survives_while_its_voters_change(chosen: range):
    for seed in chosen:
        VoterHistory(seed).run()
