"""A loss of power that leaves a log's records and takes its topic id: the file was written when the log was created.

No record is acknowledged before the id is on the device, as in Kafka: a log with records and without an id could
belong to a deleted topic of the name, or to the topic of now.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.cluster import DATA
from tests.simulation.stage import TOPIC, Stage, stage
from tidelog.client.admin.client import Admin
from tidelog.client.model import NewTopic

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = [18, 26, *range(6)]
"""With the first two, the simulated device loses the id and keeps the record where neither is waited for."""


def device(play: Stage, node_id: int, seed: int) -> Any:
    disk: Any = play.node(node_id).host.disk
    disk._rng.seed(seed)
    return disk


@pytest.mark.parametrize("seed", SEEDS)
def test_a_topic_that_is_created_again_does_not_begin_with_the_records_of_the_old_one(seed: int) -> None:
    with stage() as play:
        play.invariants.clear()  # without a flush policy, a loss of power may take what is acknowledged
        play.up((3,))
        device(play, 3, seed)
        play.send(b"old")
        play.node(3).lose_power()

        async def create_again(admin: Admin) -> None:
            await admin.delete_topics([TOPIC])
            await admin.create_topics([NewTopic(TOPIC, replica_assignments={0: [3]})])

        play.admin(create_again)
        play.node(3).start()
        play.until(
            "it leads", lambda: play.cluster.all_in_sync() and play.replica(3) is not None and play.replica(3).leads
        )
        assert play.values(3) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_an_unclean_leader_has_put_no_record_of_its_topic_aside(seed: int) -> None:
    with stage((1, 3)) as play:
        play.invariants.clear()
        play.up((1, 3), unclean_leader_election_enable="true")
        disk = device(play, 3, seed)
        play.send(b"old")
        play.wait(1)
        play.node(3).lose_power()
        play.until("3 has left", lambda: play.isr == [1])
        play.node(1).kill()
        play.until("none leads", lambda: play.leader == -1)
        play.node(3).start()
        play.until("3 leads", lambda: play.leader == 3 and play.replica(3) is not None and play.replica(3).leads, 60)
        strays = [f"{DATA}/{each.name}" for each in disk.list_directory(DATA) if each.name.endswith("-stray")]
        logs = [f"{stray}/{each.name}" for stray in strays for each in disk.list_directory(stray)]
        assert not [path for path in logs if path.endswith(".log") and disk.size_of(path)]
