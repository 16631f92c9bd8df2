"""A controller that is cut off from the others answers the broker of its own process until it gives up the lead.

The broker must not take that for a session with the controllers: the next one has fenced it, and others lead its
partitions.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.simulation.cluster import COMBINED, Cluster
from tests.simulation.simulated_loop import SimulatedLoop
from tests.simulation.world import World, without_collector

SESSION_S = 1.5


@pytest.mark.parametrize("phase_s", [0.0, 0.05, 0.15, 0.25, 0.35])
def test_a_broker_has_no_session_when_the_next_controller_has_fenced_it(phase_s: float) -> None:
    logging.disable(logging.CRITICAL)
    try:
        with without_collector():
            cut_off_after(phase_s)
    finally:
        logging.disable(logging.NOTSET)


def cut_off_after(phase_s: float) -> None:
    world = World(1)
    cluster = Cluster(world, COMBINED)
    cluster.start()
    cluster.wait("all are up", 30, cluster.is_up)
    world.run_for(2 + phase_s)
    deposed = cluster.controller()
    assert deposed is not None
    assert deposed.node is not None
    others = [node for node in cluster.nodes.values() if node is not deposed]
    broker: Any = deposed.node._broker
    lifecycle = broker.lifecycle
    fenced: list[float] = []
    claimed: list[float] = []

    def look(loop: SimulatedLoop) -> None:
        if any(node.image.brokers[deposed.node_id].fenced for node in others):
            fenced.append(world.now)
            if lifecycle.has_session():
                claimed.append(world.now)

    world.on_step = look
    cluster.network.isolate(str(deposed), [str(node) for node in others])
    world.run_for(4 * SESSION_S)
    assert fenced
    assert not claimed, f"for {claimed[-1] - claimed[0]:.2f} s"
    cluster.network.heal()
    world.on_step = None
    cluster.wait("it has a session again", 30, lifecycle.has_session)
    world.end()
