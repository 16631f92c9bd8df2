"""The cases by which Kafka's replication is known, on real processes: outages, elections, the ISR, the two of KIP-101.

SIGKILL takes a process and leaves the page cache, so nothing that was written is lost here; what a power cut takes is
the simulator's to lose.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from tests.cluster.asking import (
    Sender,
    await_equal_replicas,
    await_in_sync,
    await_leader,
    await_partition,
    confluent,
    create_topic,
    end_offset,
    partition_state,
    read,
    refusal,
    send,
    set_feature,
)
from tests.cluster.conftest import SWIFT, NewCluster
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow

TOPIC = "case"
CAREFUL = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}
LAG_S = int(SWIFT["replica.lag.time.max.ms"]) / 1000


def numbers(first: int, following: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, following)]


# KIP-101


def test_loss_is_cured_a_follower_that_restarts_and_then_leads_has_what_was_acknowledged(new_cluster: NewCluster):
    """The follower dies before it learns of the high watermark, returns, and the leader dies at once."""
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1, 2]])
    sent: list[bytes] = []
    leader, follower = 1, 2
    for round_ in range(3):
        more = numbers(10 * round_, 10 * round_ + 10)
        send(cluster, TOPIC, more)
        sent += more
        cluster.kill(follower)
        cluster.restart(follower)
        await_in_sync(cluster.nodes[3].port, TOPIC, [1, 2])
        send(cluster, TOPIC, [b"last %d" % round_])
        sent.append(b"last %d" % round_)
        cluster.kill(leader)
        await_leader(cluster.nodes[3].port, TOPIC, follower)
        assert read(cluster, TOPIC, len(sent)) == sent
        cluster.restart(leader)
        await_in_sync(cluster.nodes[3].port, TOPIC, [1, 2])
        leader, follower = follower, leader
    await_equal_replicas(cluster, TOPIC, 0, [1, 2])


def test_divergence_is_cured_by_epochs_a_record_only_the_old_leader_had_gives_way(new_cluster: NewCluster):
    """With acks=1 the leader alone takes a record and dies; its successor takes another at the same offset."""
    cluster = new_cluster(3, controllers=1, linked=True)
    assert cluster.links is not None
    create_topic(cluster, TOPIC, [[1, 2]])
    send(cluster, TOPIC, numbers(0, 5))
    cluster.links.cut([1], [2])
    assert send(cluster, TOPIC, [b"only the old leader has it"], acks=1) == [5]
    cluster.kill(1)
    cluster.links.heal(reset=True)
    await_leader(cluster.nodes[3].port, TOPIC, 2)
    assert send(cluster, TOPIC, [b"the new leader's"]) == [5]
    cluster.restart(1)
    await_in_sync(cluster.nodes[3].port, TOPIC, [1, 2])
    assert read(cluster, TOPIC, 6) == [*numbers(0, 5), b"the new leader's"]
    await_equal_replicas(cluster, TOPIC, 0, [1, 2])


# Three outages: RF 3, ISR (1, 2), acks=all, min.insync.replicas 2, clean election; as they are without eligible leader
# replicas (KIP-966), which the documents do not know, and the second one with them


def with_two_in_sync(new_cluster: NewCluster, *, eligible: int = 0):
    # A leader that is alone below the minimum shows what it knows to be committed, so let it know soon.
    cluster = new_cluster(4, controllers=1, options={"replica.high.watermark.checkpoint.interval.ms": "200"})
    set_feature(cluster, "eligible.leader.replicas.version", eligible)
    create_topic(cluster, TOPIC, [[1, 2, 3]], CAREFUL)
    cluster.kill(3)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1, 2])
    send(cluster, TOPIC, numbers(0, 5))
    return cluster


def await_known_as_committed(cluster: EmbeddedCluster, offset: int, members: Iterable[int]) -> None:
    """Whichever of them leads next, and alone: it shows no more than it had written down."""
    deadline = time.monotonic() + 60
    for node in members:
        checkpoint = cluster.nodes[node].data_directory / "replication-offset-checkpoint"
        while not checkpoint.exists() or f"{TOPIC} 0 {offset}" not in checkpoint.read_text().splitlines():
            assert time.monotonic() < deadline, f"node {node} does not know"
            time.sleep(0.05)


def test_outage_of_one_reads_go_on_and_writes_are_refused(new_cluster: NewCluster):
    cluster = with_two_in_sync(new_cluster)
    cluster.kill(2)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1])
    assert read(cluster, TOPIC, 5) == numbers(0, 5)
    assert refusal(cluster, TOPIC) in ("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND")
    cluster.restart(2)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1, 2])
    send(cluster, TOPIC, numbers(5, 6))


def test_outage_of_one_after_the_other_nothing_works_until_the_last_returns(new_cluster: NewCluster):
    cluster = with_two_in_sync(new_cluster)
    cluster.kill(2)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1])
    assert send(cluster, TOPIC, [b"only 1 has it"], acks=1) == [5]
    cluster.kill(1)
    await_leader(cluster.nodes[4].port, TOPIC, -1)
    cluster.restart(2)
    cluster.restart(3)
    time.sleep(1)
    assert partition_state(cluster.nodes[4].port, TOPIC).leader == -1, "those that may lack records must not lead"
    cluster.restart(1)
    await_leader(cluster.nodes[4].port, TOPIC, 1)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1, 2, 3])
    assert read(cluster, TOPIC, 6) == [*numbers(0, 5), b"only 1 has it"]
    send(cluster, TOPIC, numbers(6, 7))
    await_equal_replicas(cluster, TOPIC, 0, [1, 2, 3])


def test_with_eligible_leaders_the_first_of_them_to_return_leads_with_all_that_was_acknowledged_by_all(
    new_cluster: NewCluster,
):
    """Below the minimum nothing is committed, so 2, which left when it was reached, lacks only what acks=1 risked."""
    cluster = with_two_in_sync(new_cluster, eligible=1)
    cluster.kill(2)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1])
    cluster.kill(1)
    await_leader(cluster.nodes[4].port, TOPIC, -1)
    cluster.restart(3)
    time.sleep(1)
    assert partition_state(cluster.nodes[4].port, TOPIC).leader == -1, "3 was never there when it counted"
    cluster.restart(2)
    await_leader(cluster.nodes[4].port, TOPIC, 2)
    assert read(cluster, TOPIC, 5) == numbers(0, 5)
    cluster.restart(1)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1, 2, 3])
    await_equal_replicas(cluster, TOPIC, 0, [1, 2, 3])


def test_outage_of_both_at_once_reads_with_the_first_back_writes_with_both(new_cluster: NewCluster):
    cluster = with_two_in_sync(new_cluster)
    await_known_as_committed(cluster, 5, [1, 2])
    cluster.kill(1, 2)
    await_leader(cluster.nodes[4].port, TOPIC, -1)
    state = partition_state(cluster.nodes[4].port, TOPIC)
    first = 2 if state.in_sync == (2,) else 1
    cluster.restart(first)
    await_leader(cluster.nodes[4].port, TOPIC, first)
    assert read(cluster, TOPIC, 5) == numbers(0, 5)
    assert refusal(cluster, TOPIC) in ("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND")
    cluster.restart(3 - first)
    await_in_sync(cluster.nodes[4].port, TOPIC, [1, 2])
    send(cluster, TOPIC, [b"both"])
    assert read(cluster, TOPIC, 6)[:5] == numbers(0, 5)


# Unclean election


@pytest.mark.parametrize("is_allowed", [False, True])
def test_unclean_election(new_cluster: NewCluster, is_allowed: bool):
    """2 is out of sync when 1, the last in sync, dies: with the switch 2 leads, a record is gone; without, it waits."""
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1, 2]], {"unclean.leader.election.enable": str(is_allowed).lower()})
    send(cluster, TOPIC, numbers(0, 5))
    cluster.kill(2)
    await_in_sync(cluster.nodes[3].port, TOPIC, [1])
    send(cluster, TOPIC, [b"2 never saw it"])
    cluster.kill(1)
    await_leader(cluster.nodes[3].port, TOPIC, -1)
    cluster.restart(2)
    if is_allowed:
        await_leader(cluster.nodes[3].port, TOPIC, 2)
        assert send(cluster, TOPIC, [b"instead"]) == [5]
        expected = [*numbers(0, 5), b"instead"]
    else:
        time.sleep(1)
        assert partition_state(cluster.nodes[3].port, TOPIC).leader == -1
        expected = [*numbers(0, 5), b"2 never saw it"]
    cluster.restart(1)
    await_in_sync(cluster.nodes[3].port, TOPIC, [1, 2])
    assert read(cluster, TOPIC, 6) == expected
    await_equal_replicas(cluster, TOPIC, 0, [1, 2])


# The ISR and the high watermark


def test_a_follower_that_falls_behind_leaves_the_isr_and_returns_when_it_has_caught_up(new_cluster: NewCluster):
    cluster = new_cluster(3, controllers=1, linked=True)
    assert cluster.links is not None
    create_topic(cluster, TOPIC, [[1, 2, 3]], CAREFUL)
    send(cluster, TOPIC, numbers(0, 5))
    cluster.links.cut([3], [1])
    time.sleep(2 * LAG_S)
    assert set(partition_state(cluster.nodes[1].port, TOPIC).in_sync) == {1, 2, 3}, "who has everything is not late"
    began = time.monotonic()
    # With acks=all this waits for 3, until that is no longer waited for.
    send(cluster, TOPIC, numbers(5, 10))
    assert time.monotonic() - began < 3 * LAG_S + 20, "a machine may be slow, but the client would go on for minutes"
    await_in_sync(cluster.nodes[1].port, TOPIC, [1, 2])
    assert partition_state(cluster.nodes[2].port, TOPIC).leader == 1
    cluster.links.heal()
    await_in_sync(cluster.nodes[1].port, TOPIC, [1, 2, 3])
    assert read(cluster, TOPIC, 10) == numbers(0, 10)
    await_equal_replicas(cluster, TOPIC, 0, [1, 2, 3])


def test_the_high_watermark_waits_for_every_member_of_the_isr(new_cluster: NewCluster):
    """The walk of two fetch rounds: written, not shown; fetched, not shown; stated by the next fetch, shown."""
    cluster = new_cluster(3, controllers=1, options={"replica.lag.time.max.ms": "30000"}, linked=True)
    assert cluster.links is not None
    create_topic(cluster, TOPIC, [[1, 2, 3]])
    send(cluster, TOPIC, numbers(0, 5))
    cluster.links.cut([3], [1])
    assert send(cluster, TOPIC, numbers(5, 8), acks=1) == [5, 6, 7]
    time.sleep(0.5)
    assert end_offset(cluster, TOPIC) == 5, "2 has them, 3 has not"
    cluster.links.heal()
    deadline = time.monotonic() + 60
    while end_offset(cluster, TOPIC) != 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert set(partition_state(cluster.nodes[1].port, TOPIC).in_sync) == {1, 2, 3}


def test_a_leader_cut_off_from_everybody_acknowledges_nothing_more(new_cluster: NewCluster):
    """It still believes that it leads. What it takes meanwhile is never acknowledged and gives way."""
    cluster = new_cluster(3, controllers=1, linked=True)
    assert cluster.links is not None
    create_topic(cluster, TOPIC, [[1, 2, 3]], CAREFUL)
    send(cluster, TOPIC, numbers(0, 5))
    cluster.links.cut([1], [2, 3, 4])
    alone = cluster.nodes[1].bootstrap_servers
    # Its own view is all that this producer has.
    refused = refusal_of(alone)
    assert refused in ("_MSG_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REQUEST_TIMED_OUT")
    for node in (2, 3):
        port = cluster.nodes[node].port
        await_partition(port, TOPIC, lambda state: state.leader in (2, 3), "a leader that is reached")
    following = [cluster.nodes[2].bootstrap_servers, cluster.nodes[3].bootstrap_servers]
    assert Sender(",".join(following)).send(TOPIC, numbers(5, 10)) == [5, 6, 7, 8, 9]
    cluster.links.heal()
    await_in_sync(cluster.nodes[2].port, TOPIC, [1, 2, 3])
    assert read(cluster, TOPIC, 10) == numbers(0, 10)
    await_equal_replicas(cluster, TOPIC, 0, [1, 2, 3])


def refusal_of(bootstrap: str) -> str:
    with pytest.raises(confluent.KafkaException) as caught:
        Sender(bootstrap, message_timeout_ms=1000).send(TOPIC, [b"never acknowledged"])
    return str(caught.value.args[0].name())
