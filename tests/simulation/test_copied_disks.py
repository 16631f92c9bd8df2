"""A broker's disk is not what its last process left: a copy on another machine, a restored backup, a volume that was
mounted again after an error.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.cluster import BROKER_PORT, CONFIG, CONTROLLER_PORT, DATA, SimulatedNode
from tests.simulation.host import Host
from tests.simulation.simulated_disk import SimulatedDisk
from tests.simulation.stage import TOPIC, Stage, stage
from tidelog.broker.config.node_config import NodeConfig

pytestmark = pytest.mark.usefixtures("quiet")


def copy_of(play: Stage, node_id: int) -> SimulatedNode:
    """A node with the id and the directories of this one, on a machine of its own, at an address of its own."""
    original = play.node(node_id)
    host = Host(play.world, play.cluster.network, f"copy-of-n{node_id}")
    host.disk.copy_back(original.host.disk)
    own = {
        "node.id": str(node_id),
        "process.roles": "broker",
        "listeners": f"PLAINTEXT://{host.name}:{BROKER_PORT}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": DATA,
        "controller.quorum.voters": f"9@n9:{CONTROLLER_PORT}",
    }
    config = NodeConfig.load(None, {**CONFIG, **play.cluster.layout.config, **own})
    return SimulatedNode(play.cluster, node_id, host, config)


def leading(*nodes: SimulatedNode) -> int:
    replicas = [node.replica(TOPIC, 0) for node in nodes if node.running]
    return sum(replica is not None and replica.leads for replica in replicas)


@pytest.mark.parametrize("replicas", [(1,), (1, 2, 3)], ids=["only", "of three"])
def test_it_takes_nothing_from_the_broker_that_lives(replicas):
    with stage() as play:
        play.up(replicas)
        play.send(b"before the copy")
        copied = copy_of(play, 1)
        play.send(b"after it")
        epoch, placed = play.node(9).image.brokers[1].epoch, play.cluster.placed(TOPIC)
        copied.start()
        for number in range(40):
            play.wait(0.1)
            assert leading(play.node(1), copied) == 1
            assert play.node(9).image.brokers[1].epoch == epoch
            if number % 10 == 0:
                play.send(b"%d" % number)
        assert play.cluster.placed(TOPIC) == placed
        assert play.values(1) == [b"before the copy", b"after it", b"0", b"10", b"20", b"30"]


def test_it_waits_without_haste():
    """Both fetch the metadata as the same replica: neither ends the wait of the other's fetch."""
    with stage() as play:
        play.up((1,))
        copy_of(play, 1).start()
        play.wait(1)
        events = play.world.events
        play.wait(1)
        assert play.world.events - events < 1_000


def test_it_takes_nothing_while_another_controller_takes_over():
    """The controller that takes over has heard of no broker yet, and the copy asks again and again."""
    with stage() as play:
        play.up((1,))
        copied = copy_of(play, 1)
        play.send(b"after the copy")
        epoch = play.node(9).image.brokers[1].epoch
        copied.start()
        for _ in range(8):
            play.wait(0.3)
            play.node(9).kill()
            play.node(9).start()
            play.until("the controller is back", lambda: play.cluster.controller() is play.node(9))
            play.wait(1.0)
            assert play.node(9).image.brokers[1].epoch == epoch
        assert play.values(1) == [b"after the copy"]


def test_it_serves_when_the_broker_has_ended():
    with stage() as play:
        play.up((1,))
        play.send(b"m")
        copied = copy_of(play, 1)
        copied.start()
        play.wait(1)
        play.node(1).lose_power()
        play.until("the copy is up", lambda: copied.ready)
        play.until("it leads", lambda: leading(copied) == 1)


@pytest.mark.parametrize("replicas", [(1,), (1, 2, 3)], ids=["only", "of three"])
def test_a_broker_that_hung_ends_when_another_has_taken_its_place(replicas):
    """It would lead where the metadata name its id, and acknowledge what the other never has."""
    with stage() as play:
        play.up(replicas)
        play.send(b"before")
        play.wait(1)
        copied = copy_of(play, 1)
        play.pause(1)
        copied.start()
        play.until("the copy is up", lambda: copied.ready)
        play.elect()
        play.until("the copy leads", lambda: leading(copied) == 1)
        play.node(1).disk_was_bad = True  # its end is expected
        play.resume(1)
        play.until("it has ended", lambda: not play.node(1).running, 1)
        play.wait(2)
        assert leading(copied) == leading(*play.cluster.nodes.values(), copied) == 1


def test_a_killed_broker_need_not_wait_for_its_session():
    """The session of the old process would last another 1.5 s."""
    with stage() as play:
        play.up((1,))
        play.send(b"m")
        play.wait(1)
        play.node(1).kill()
        begun = play.world.now
        play.node(1).start()
        play.until("it leads again", lambda: leading(play.node(1)) == 1)
        assert play.world.now - begun < 0.6


def test_a_directory_that_was_copied_back_does_not_speak_for_what_it_lacks():
    """Copied while the broker ran, copied back after a kill: the same boot, the same broker epoch, but older."""
    with stage() as play:
        play.up(min_insync_replicas="2")
        play.node(3).kill()
        play.until("3 has left", lambda: play.isr == [1, 2])
        play.send(b"before")
        backup = SimulatedDisk(Random(1))
        backup.copy_back(play.node(1).host.disk)
        play.send(b"after")
        play.node(1).kill()
        play.node(2).kill()
        play.until("nobody leads", lambda: play.leader == -1)
        play.node(1).host.disk.copy_back(backup)
        play.node(1).start()
        play.wait(5)
        assert play.leader == -1
        play.node(2).start()
        play.until("2 leads", lambda: play.leader == 2)
        play.until("1 is back", lambda: play.isr == [1, 2])
        assert play.values(1) == play.values(2) == [b"before", b"after"]


def test_a_volume_that_was_mounted_again_does_not_speak_for_what_an_error_kept_from_it():
    """ext4 becomes read-only, is checked and mounted again: the same boot and file, without what was not synced."""
    with stage() as play:
        play.up(min_insync_replicas="2")
        play.node(3).kill()
        play.until("3 has left", lambda: play.isr == [1, 2])
        play.send(b"before")
        disk = play.node(1).host.disk
        disk.sync_everything()
        play.send(b"after")
        play.node(1).kill()
        play.node(2).kill()
        play.until("nobody leads", lambda: play.leader == -1)
        disk.forgets = True
        disk.lose_power()
        disk.mounts += 1
        play.node(1).start()
        play.wait(5)
        assert play.leader == -1
        play.node(2).start()
        play.until("2 leads", lambda: play.leader == 2)
        play.until("1 is back", lambda: play.isr == [1, 2])
        assert play.values(1) == play.values(2) == [b"before", b"after"]
