"""Replication's named cases, told step by step: what Kafka's documents say must happen, and the two failures that
leader epochs cure, shown to happen without them.
"""

from __future__ import annotations

import pytest

from tests.old_truncation import truncate_by_high_watermark
from tests.simulation.cluster import DATA
from tests.simulation.stage import TOPIC, Stage, stage
from tidelog.client.admin.client import Admin
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.storage.files.checkpoints import PARTITION_METADATA_FILE

pytestmark = pytest.mark.usefixtures("quiet")


def isr_of_0_and_1(play: Stage) -> None:
    """The three outage cases begin here: three replicas, of which brokers 1 and 2 are in sync."""
    play.up((1, 2, 3), min_insync_replicas="2")
    play.node(3).kill()
    play.until("3 has left", lambda: play.isr == [1, 2])
    assert play.refused(b"first") == ErrorCode.NONE


def test_one_in_sync_replica_dies_and_reads_go_on_while_writes_are_refused():
    with stage() as play:
        isr_of_0_and_1(play)
        play.node(2).kill()
        play.until("2 has left", lambda: play.isr == [1])
        assert play.leader == 1
        assert play.refused() in (ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
        assert play.replica(1).high_watermark == 1


def test_then_the_second_dies_and_only_who_has_every_acknowledged_record_brings_the_partition_back():
    """The documents say: the last one that died. With eligible leader replicas (KIP-966) the other one of the last
    in-sync pair has everything as well, as nothing was acknowledged without it; the third does not, and never leads."""
    with stage() as play:
        isr_of_0_and_1(play)
        play.node(2).kill()
        play.until("2 has left", lambda: play.isr == [1])
        play.node(1).kill()
        play.until("nobody leads", lambda: play.leader == -1)
        play.node(3).start()
        play.wait(8)
        assert play.leader == -1
        play.node(2).start()
        play.wait(5)
        assert play.leader in (-1, 2)
        play.node(1).start()
        play.until("all are back", play.cluster.all_in_sync, 60)
        assert play.values(1)[0] == b"first"
        assert play.refused(b"second") == ErrorCode.NONE


def test_both_die_at_once_and_writes_resume_when_both_are_back():
    with stage() as play:
        isr_of_0_and_1(play)
        play.node(1).kill()
        play.node(2).kill()
        play.until("nobody leads", lambda: play.leader == -1)
        play.node(1).start()
        play.node(2).start()
        play.until("somebody leads", lambda: play.leader in (1, 2))
        play.until("both are in sync", lambda: play.isr == [1, 2])
        assert play.refused(b"second") == ErrorCode.NONE
        assert play.values(play.leader) == [b"first", b"second"]


def test_the_minimum_may_be_lowered_while_nobody_leads():
    """What an operator tries first. It cleared the eligible replicas, and no replica could lead any more."""
    with stage() as play:
        isr_of_0_and_1(play)
        play.node(1).kill()
        play.node(2).kill()
        play.node(3).start()
        play.until("nobody leads", lambda: play.leader == -1)
        play.until("3 is back", lambda: play.node(3).ready)

        async def lower(admin: Admin) -> None:
            await admin.incremental_alter_configs(topics={TOPIC: {"min.insync.replicas": "1"}})

        play.admin(lower)
        play.wait(3)
        assert play.leader == -1
        play.node(2).start()
        play.until("2 leads", lambda: play.leader == 2)
        play.node(1).start()
        play.until("all are in sync", lambda: play.isr == [1, 2, 3])
        assert play.refused(b"second") == ErrorCode.NONE
        assert play.values(1) == play.values(2) == play.values(3) == [b"first", b"second"]


@pytest.mark.parametrize("unclean", [False, True])
def test_a_replica_out_of_sync_leads_only_when_unclean_election_is_on(unclean: bool):
    with stage((1, 2)) as play:
        play.invariants.clear()  # what was committed may go
        play.up((1, 2), unclean_leader_election_enable=str(unclean).lower())
        play.send(b"both")
        play.node(2).kill()
        play.until("2 has left", lambda: play.isr == [1])
        play.send(b"only 1", acks="1")
        play.node(1).kill()
        play.until("nobody leads", lambda: play.leader == -1)
        play.node(2).start()
        if unclean:
            play.until("2 leads", lambda: play.leader == 2)
            play.send(b"only 2", acks="1")
            play.node(1).start()
            play.until("1 follows", play.cluster.all_in_sync, 60)
            assert play.values(1) == play.values(2) == [b"both", b"only 2"]
        else:
            play.wait(10)
            assert play.leader == -1
            play.node(1).start()
            play.until("1 leads again", play.cluster.all_in_sync, 60)
            assert play.values(1) == play.values(2) == [b"both", b"only 1"]


def test_a_follower_that_lags_leaves_the_isr_and_returns_when_it_has_caught_up():
    with stage() as play:
        play.up()
        play.pause(3)
        play.until("3 has left", lambda: play.isr == [1, 2])
        for number in range(5):
            play.send(b"%d" % number)
        play.resume(3)
        play.until("3 is back", lambda: play.isr == [1, 2, 3])
        play.until("all the same", play.cluster.all_in_sync)
        assert play.values(3) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_follower_that_only_the_controller_missed_returns_though_nothing_new_is_written():
    with stage() as play:
        play.up()
        play.send(b"m")
        play.cluster.network.cut("n3", "n9")
        play.until("3 has left", lambda: play.isr == [1, 2])
        play.cluster.network.heal()
        play.until("3 is back", lambda: play.isr == [1, 2, 3])


def test_a_burst_does_not_make_the_isr_flap():
    with stage() as play:
        play.up()
        for number in range(50):
            play.send(b"%d" % number, acks="1")
            assert play.isr == [1, 2, 3]


def test_the_high_watermark_follows_the_log_end_in_two_rounds_of_fetching():
    with stage((1, 2)) as play:
        play.up((1, 2))
        play.cluster.network.cut("n1", "n2", one_way=True)  # the leader's answers do not come through
        play.send(b"m", acks="1")
        leader, follower = play.replica(1), play.replica(2)
        assert (leader.log.log_end_offset, leader.high_watermark) == (1, 0)
        assert (follower.log.log_end_offset, follower.high_watermark) == (0, 0)
        play.cluster.network.heal()
        play.until("the first round brings the record", lambda: follower.log.log_end_offset == 1)
        assert (leader.high_watermark, follower.high_watermark) == (0, 0)
        play.until("the second tells the leader", lambda: leader.high_watermark == 1)
        assert follower.high_watermark == 0
        play.until("whose answer tells the follower", lambda: follower.high_watermark == 1)


def test_the_preferred_leader_returns_by_hand():
    with stage() as play:
        play.up()
        play.node(1).kill()
        play.until("another leads", lambda: play.leader in (2, 3))
        play.node(1).start()
        play.until("1 is in sync", lambda: play.isr == [1, 2, 3])
        assert play.leader != 1
        play.elect()
        play.until("1 leads", lambda: play.leader == 1)


def test_the_preferred_leader_returns_by_itself():
    with stage(auto_leader_rebalance_enable="true", leader_imbalance_check_interval_seconds="2") as play:
        play.up()
        play.node(1).kill()
        play.until("another leads", lambda: play.leader in (2, 3))
        play.node(1).start()
        play.until("1 leads", lambda: play.leader == 1)


def test_a_replica_list_grows_and_shrinks():
    from tidelog.client.model import TopicPartition

    with stage((1, 2, 3, 4)) as play:
        play.up((1, 2))
        play.send(b"before")

        async def grow(admin):
            await admin.alter_partition_reassignments({TopicPartition("t", 0): [1, 2, 3, 4]})

        async def shrink(admin):
            await admin.alter_partition_reassignments({TopicPartition("t", 0): [4, 3]})

        play.admin(grow)
        play.until("four are in sync", lambda: play.isr == [1, 2, 3, 4])
        assert list(play.cluster.placed("t").replicas) == [1, 2, 3, 4]
        play.send(b"between")
        play.admin(shrink)
        play.until("two are left", lambda: play.isr == [3, 4] and len(play.cluster.placed("t").replicas) == 2)
        play.until("one of them leads", lambda: play.leader in (3, 4))
        play.send(b"after")
        play.until("all the same", play.cluster.all_in_sync)
        assert play.values(3) == play.values(4) == [b"before", b"between", b"after"]
        assert play.replica(1) is None


def lose_by_high_watermark(play: Stage) -> list[bytes]:
    """KIP-101, scenario 1: all three have the record, but the followers do not know yet that it is committed. One is
    elected, the other must not cut the record off before it is asked to lead itself."""
    play.up((1, 2, 3))
    assert play.send(b"m") == 0
    assert play.replica(1).high_watermark == 1
    assert [play.replica(each).log.log_end_offset for each in (2, 3)] == [1, 1]
    assert play.replica(3).high_watermark == 0, "it has not heard yet"
    play.cluster.network.cut("n3", "n2")
    play.node(1).kill()
    play.until("2 leads", lambda: play.leader == 2 and play.replica(3).leader_epoch == play.replica(2).leader_epoch)
    play.wait(0.05)
    play.node(2).kill()
    play.until("3 leads", lambda: play.leader == 3 and play.replica(3).leads)
    return play.values(3)


def test_kip_101_loss_does_not_happen():
    with stage() as play:
        assert lose_by_high_watermark(play) == [b"m"]


def test_kip_101_loss_happens_when_followers_truncate_by_high_watermark(monkeypatch: pytest.MonkeyPatch):
    truncate_by_high_watermark(monkeypatch)
    with stage() as play:
        assert lose_by_high_watermark(play) == []


def diverge_by_high_watermark(play: Stage) -> tuple[list[bytes], list[bytes]]:
    """KIP-101, scenario 2: both lose power, the one that lost the last record comes back first and takes another."""
    play.invariants.clear()  # with unclean election on, what was committed may go
    play.up((1, 2), unclean_leader_election_enable="true")
    play.send(b"1")
    play.wait(2)
    play.node(2).host.disk.sync_everything()
    play.send(b"2")
    play.wait(2)
    play.node(1).host.disk.sync_everything()
    play.node(2).host.disk.forgets = True
    play.node(1).lose_power()
    play.node(2).lose_power()
    play.wait(4)
    play.node(2).start()
    play.until("2 leads", lambda: play.leader == 2 and play.node(2).ready and play.replica(2).leads)
    assert play.values(2) == [b"1"]
    play.send(b"other 2", acks="1")
    play.node(1).start()
    play.until("1 follows", lambda: play.node(1).ready and play.isr == [1, 2], 60)
    play.wait(2)
    return play.values(1), play.values(2)


def test_kip_101_divergence_does_not_happen():
    with stage((1, 2)) as play:
        assert diverge_by_high_watermark(play) == ([b"1", b"other 2"], [b"1", b"other 2"])


def test_kip_101_divergence_happens_when_followers_truncate_by_high_watermark(monkeypatch: pytest.MonkeyPatch):
    truncate_by_high_watermark(monkeypatch)
    with stage((1, 2)) as play:
        assert diverge_by_high_watermark(play) == ([b"1", b"2"], [b"1", b"other 2"])


def test_a_log_that_starts_in_the_middle_of_a_batch_is_followed_by_a_new_replica():
    """DeleteRecords may end anywhere; the batch that holds the log start is there whole."""
    with stage() as play:
        play.up((1, 2))
        leader, partitions = play.replica(1), play.node(1)._partitions
        records = memoryview(bytearray(encode_batch([(0, None, b"%d" % number, ()) for number in range(5)])))
        partitions.append(leader, records, 0, -1)
        play.until("all have it", lambda: play.replica(2).log.log_end_offset == 5 == leader.high_watermark)
        partitions.delete_records(leader, 3)

        async def add(admin: Admin) -> None:
            await admin.alter_partition_reassignments({TopicPartition(TOPIC, 0): [1, 2, 3]})

        play.admin(add)
        play.until("the new one is in sync", lambda: play.isr == [1, 2, 3])
        assert play.replica(3).log.log_end_offset == 5
        play.until("it knows where the log starts", lambda: play.replica(3).log.log_start_offset == 3)


def lose_the_topic_id(play: Stage, node_id: int) -> None:
    """As a loss of power does, soon after the log was created."""
    play.node(node_id).kill()
    play.node(node_id).host.disk.remove(f"{DATA}/{TOPIC}-0/{PARTITION_METADATA_FILE}")


def test_a_log_without_a_topic_id_is_not_taken_for_that_of_a_new_topic_of_the_name():
    """The new records had the same offsets and epochs, so the old ones stayed, in a replica that was in sync."""
    with stage() as play:
        play.invariants.clear()  # they know one topic of a name
        play.up()
        play.send(b"old")
        lose_the_topic_id(play, 3)
        play.until("3 has left", lambda: play.isr == [1, 2])

        async def create_again(admin: Admin) -> None:
            await admin.delete_topics([TOPIC])
            await admin.create_topics([NewTopic(TOPIC, replica_assignments={0: [1, 2, 3]})])

        play.admin(create_again)
        play.send(b"new")
        play.node(3).start()
        play.until("all are back", lambda: play.cluster.all_in_sync() and play.isr == [1, 2, 3])
        assert play.values(3) == [b"new"]


def test_the_last_in_sync_replica_keeps_its_log_without_a_topic_id():
    with stage() as play:
        play.up((2,))
        play.send(b"only here")
        lose_the_topic_id(play, 2)
        play.until("none leads", lambda: play.leader == -1)
        play.node(2).start()
        play.until("it leads", lambda: play.leader == 2 and play.replica(2) is not None)
        assert play.values(2) == [b"only here"]
