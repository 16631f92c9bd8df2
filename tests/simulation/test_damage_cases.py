"""Named cases of damaged logs, told step by step on a simulated cluster."""

from __future__ import annotations

import errno

import pytest

from tests.cluster.damage.replicas import Batch, parse_batches
from tests.simulation import planted
from tests.simulation.cluster import DATA
from tests.simulation.damage_faults import files_of
from tests.simulation.damage_history import faults_of_copies
from tests.simulation.simulated_disk import Inode
from tests.simulation.stage import TOPIC, Stage, stage
from tests.simulation.world import Broken
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.hot_replication import INLINE_BYTES_MAX
from tidelog.storage.files.checkpoints import (
    EXPLAINED_GAPS_FILE,
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    ExplainedGaps,
    encode_explained_gaps,
)

pytestmark = pytest.mark.usefixtures("quiet")

LARGE = b"x" * (INLINE_BYTES_MAX + 1)
"""Followers are sent smaller records from memory."""


def segments(play: Stage, node_id: int) -> list[tuple[str, Inode]]:
    files = sorted(files_of(play.node(node_id).host.disk).items())
    return [(path, inode) for path, inode in files if path.startswith(f"{TOPIC}-0/") and path.endswith(".log")]


def batches(play: Stage, node_id: int) -> list[Batch]:
    """Read from outside."""
    return [each for path, inode in segments(play, node_id) for each in parse_batches(bytes(inode.data), path, [])]


def zero_batch(play: Stage, node_id: int, offset: int) -> None:
    """The device loses one batch of the replica."""
    batch = next(each for each in batches(play, node_id) if each.base_offset == offset)
    inode = dict(segments(play, node_id))[batch.file]
    inode.sync()
    inode.data[batch.position : batch.position + batch.size_bytes] = bytes(batch.size_bytes)
    inode.durable = bytes(inode.data)
    play.invariants.clear()  # they would read the log, and find the damage for its node


def damage_what_is_not_read(
    play: Stage, behind: tuple[int, ...], offset_lost: int = 4, copied_by: int | None = None
) -> None:
    """An offset of node 1's log, before any of the replicas `behind` has read it. Node 1 acknowledged 1 to 5 alone.
    With `copied_by` this replica has copied all before.

    What comes first answers the fetches that wait.
    """
    for node_id in behind:
        play.pause(node_id)
    for offset in range(1, 6):
        assert play.send(LARGE, acks="1") == offset
    if copied_by is not None:
        play.until("one follower has all", lambda: play.replica(copied_by).log.log_end_offset == 6)
    zero_batch(play, 1, offset_lost)


def put(play: Stage, node_id: int, name: str, content: bytes) -> None:
    """The content of a small file beside the log, on the device."""
    inode = files_of(play.node(node_id).host.disk)[f"{TOPIC}-0/{name}"]
    inode.sync()
    inode.data, inode.durable = bytearray(content), content


def content_of(play: Stage, node_id: int, name: str) -> bytes:
    """Of a small file beside the log."""
    return bytes(files_of(play.node(node_id).host.disk)[f"{TOPIC}-0/{name}"].data)


def is_whole(play: Stage) -> bool:
    return play.cluster.all_in_sync() and not faults_of_copies(play.cluster)


def test_another_replica_leads_where_the_leader_lost_what_its_followers_have_not_read_yet() -> None:
    """They cannot copy past the damage, and until somebody else leads nothing more is committed."""
    with stage(min_insync_replicas="2") as play:
        play.up()
        play.send(b"0")
        damage_what_is_not_read(play, behind=(2, 3))
        for node_id in (2, 3):
            play.resume(node_id)
        play.until("another replica leads", lambda: play.leader in (2, 3))
        play.until("all are in sync", lambda: is_whole(play))
        assert play.refused(b"on") == ErrorCode.NONE
        assert play.values(play.leader) == [b"0", LARGE, LARGE, LARGE, b"on"]


@pytest.mark.parametrize("min_insync_replicas", ["1", "2"])
def test_a_leader_that_lost_records_waits_for_the_word_of_a_replica_that_is_away(min_insync_replicas: str) -> None:
    """It could have them. Who has all that can be copied stays in sync, so that what is lost here is not committed."""
    with stage(min_insync_replicas=min_insync_replicas) as play:
        play.up()
        play.send(b"0")
        play.node(3).kill()
        play.until("3 has left", lambda: play.isr == [1, 2])
        damage_what_is_not_read(play, behind=(2,))
        play.resume(2)
        play.wait(6)
        assert (play.leader, play.isr, play.replica(1).high_watermark) == (1, [1, 2], 4)
        play.node(3).start()
        play.until("the other replica in sync leads", lambda: play.leader == 2)
        play.until("all are in sync", lambda: is_whole(play))
        assert play.refused(b"on") == ErrorCode.NONE


@pytest.mark.parametrize("offset_lost", [4, 5])
def test_a_leader_is_repaired_from_the_one_follower_that_has_what_it_lost(offset_lost: int) -> None:
    """Though it is not committed, as the other follower cannot read it; the last record of the log as any."""
    # One batch at a time is read from the file; a map of it would be a copy here, which no repair changes.
    with stage(min_insync_replicas="2", replica_fetch_max_bytes="1000") as play:
        play.up()
        play.send(b"0")
        damage_what_is_not_read(play, behind=(2,), offset_lost=offset_lost, copied_by=3)
        play.resume(2)
        play.until("all are in sync", lambda: is_whole(play))
        assert play.leader == 1
        assert play.values(2) == [b"0", *[LARGE] * 5]


@pytest.mark.parametrize("min_insync_replicas", ["1", "2"])
def test_a_wrong_last_offset_after_a_clean_stop_of_all_moves_no_log_end(min_insync_replicas: str) -> None:
    """The last one that stopped led with an end and a high watermark that no replica reached: they were not in sync
    again, and readers stood still."""
    with stage(min_insync_replicas=min_insync_replicas) as play:
        play.up()
        for number in range(4):
            assert play.send(b"%d" % number) == number
        for node_id in (3, 2, 1):
            play.node(node_id).stop()
            play.wait(5)
            assert not play.node(node_id).running
        last = batches(play, 1)[-1]
        inode = dict(segments(play, 1))[last.file]
        inode.data[last.position + 26] ^= 64
        inode.durable = bytes(inode.data)
        play.invariants.clear()
        for node_id in (1, 2, 3):
            play.node(node_id).start()
            play.wait(1)
        play.until("all are in sync", lambda: is_whole(play))
        assert play.send(b"on") == 4
        assert play.values(1) == [b"0", b"1", b"2", b"3", b"on"]


@pytest.mark.parametrize("begin", [b"1 6", b"1 7"])
def test_a_wrong_epoch_file_gives_no_record_of_an_older_leader_the_place_of_a_committed_one(begin: bytes) -> None:
    """The file of the new leader fits the log of the old one, which has records that no other replica has: it was in
    sync with them, and the new leader took its copy of a record that contradicts the file.
    """
    with stage(min_insync_replicas="2") as play:
        play.up()
        for number in range(4):
            assert play.send(b"%d" % number) == number
        play.wait(1)
        play.pause(2)
        play.pause(3)
        for value in (b"x4", b"x5"):
            play.send(value, acks="1")
        play.node(1).kill()
        play.resume(2)
        play.resume(3)
        play.until("another leads", lambda: play.leader in (2, 3) and 1 not in play.isr)
        for value in (b"y0", b"y1", b"y2"):
            play.send(value)
        other, expected = play.leader, play.values(play.leader)
        assert expected[-4:] == [b"x4", b"y0", b"y1", b"y2"]
        victim = 5 - other
        play.wait(2)
        play.node(victim).stop()
        play.wait(6)
        content = content_of(play, victim, LEADER_EPOCH_FILE)
        assert b"\n1 5\n" in content
        put(play, victim, LEADER_EPOCH_FILE, content.replace(b"1 5", begin))
        play.invariants.clear()
        play.node(victim).start()
        play.until("it is in sync", lambda: victim in play.isr)
        play.node(other).kill()
        play.until("it leads", lambda: play.leader == victim)
        play.node(1).start()
        play.wait(3)
        play.node(other).start()
        play.until("all are in sync", lambda: is_whole(play))
        assert [play.values(node_id) for node_id in play.brokers] == [expected] * 3


def test_a_leader_that_lost_records_does_not_wait_for_ever_for_a_replica_that_is_dead() -> None:
    with stage(min_insync_replicas="2") as play:
        play.up()
        play.send(b"0")
        play.node(3).kill()
        play.until("3 has left", lambda: play.isr == [1, 2])
        damage_what_is_not_read(play, behind=(2,))
        play.resume(2)
        play.until("the other replica in sync leads", lambda: play.leader == 2, 60)
        play.until("the old leader follows", lambda: play.isr == [1, 2])
        assert play.refused(b"on") == ErrorCode.NONE


def lose_a_segment_unnoticed(play: Stage) -> None:
    """Node 1 leads without offset 2, and a small file, damaged too, says that nothing is missing. Node 3 is away since
    offset 1."""
    play.up()
    for number in range(5):
        play.send(b"%d" % number)
        play.wait(0.5)
        if number == 1:
            play.node(3).kill()
    play.invariants.clear()  # they would read the log of node 1
    play.node(1).kill()
    play.until("2 leads", lambda: play.leader == 2)
    disk, home = play.node(1).host.disk, f"{DATA}/{TOPIC}-0"
    directory = disk._directory(home)
    lost = [name for name in directory.entries if name.startswith(f"{2:020}")]
    assert f"{2:020}.log" in lost
    for name in lost:
        del directory.entries[name]
        directory.durable.pop(name, None)
    explained = ExplainedGaps(5, frozenset({(1, 3)}))  # the segment before ends early
    disk.write_file(f"{home}/{EXPLAINED_GAPS_FILE}", encode_explained_gaps(explained), sync=True)
    play.node(1).start()
    play.until("1 is back", lambda: play.isr == [1, 2])
    play.elect()
    play.until("1 leads", lambda: play.leader == 1)


def follow_a_leader_with_a_gap() -> None:
    """The follower takes the records that its leader lacks from the replica that has them, before what comes behind."""
    with stage(log_roll_ms="300", min_insync_replicas="2") as play:
        lose_a_segment_unnoticed(play)
        play.node(3).start()
        play.until("3 is up", lambda: play.node(3).ready)
        play.wait(3)
        if [each.base_offset for each in batches(play, 3)] != [0, 1, 2, 3, 4]:
            raise Broken("FollowersTakeNoGap: 3 has taken what comes behind records that 2 has and 1 lacks")
        play.node(1).kill()
        play.until("3 has caught up", lambda: play.isr == [2, 3])
        assert play.values(3) == [b"%d" % number for number in range(5)]


def test_a_follower_fills_a_gap_of_its_leader_from_another_replica() -> None:
    follow_a_leader_with_a_gap()


def test_a_follower_that_takes_any_gap_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.accept_any_gap(monkeypatch)
    with pytest.raises(Broken, match="FollowersTakeNoGap"):
        follow_a_leader_with_a_gap()


@pytest.mark.slow
def test_followers_cut_nothing_for_a_wrong_epoch_file_of_a_leader_that_lost_a_batch() -> None:
    """Both cut what was committed at the offset in the file, and the only copies of the lost batch with it."""
    with stage(log_roll_ms="300", min_insync_replicas="2") as play:
        play.up()
        for number in range(5):
            play.send(b"%d" % number)
            play.wait(0.5)
        play.invariants.clear()  # they would read the log of node 1
        play.node(1).stop()  # a start after a kill would read the batches
        play.until("2 leads, and 1 is gone", lambda: play.leader == 2 and not play.node(1).running)
        put(play, 1, LEADER_EPOCH_FILE, b"0\n2\n0 0\n1 2\n")
        zero_batch(play, 1, 3)
        play.node(1).start()
        play.until("1 is back", lambda: play.isr == [1, 2, 3])
        play.node(2).kill()
        play.until("1 leads", lambda: play.leader == 1)
        play.node(2).start()
        play.send(b"5")
        play.until("all are in sync", lambda: is_whole(play), 60)
        assert play.values(2) == play.values(3) == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize("is_kafkas", [False, True])
def test_a_log_with_a_changed_bit_in_its_topic_id_keeps_its_records(is_kafkas: bool) -> None:
    """It would be set aside as that of a deleted topic, and its topic would begin anew at offset 0. Kafka's file has no
    checksum, and gets one at the first start."""
    with stage() as play:
        play.up((1,))
        assert play.send(b"0") == 0
        node = play.node(1)

        def restart(content: bytes) -> None:
            node.stop()
            play.until("1 is gone", lambda: not node.running)
            put(play, 1, PARTITION_METADATA_FILE, content)
            node.start()
            play.until("1 leads", lambda: node.ready and play.leader == 1 and play.replica(1) is not None)

        whole = content_of(play, 1, PARTITION_METADATA_FILE)
        if is_kafkas:
            restart(b"\n".join(whole.splitlines()[:2]))
            assert content_of(play, 1, PARTITION_METADATA_FILE) == whole
        changed = bytearray(whole)
        changed[whole.index(b"topic_id: ") + 12] ^= 1
        restart(bytes(changed))
        assert play.values(1) == [b"0"]
        assert play.send(b"1") == 1
        assert content_of(play, 1, PARTITION_METADATA_FILE) == whole


@pytest.mark.slow
def test_damage_that_is_found_on_a_full_volume_is_repaired_there() -> None:
    """The rebuilt indexes have no space. That says nothing against the device, and takes no node down."""
    with stage(
        min_insync_replicas="2", log_roll_ms="1000", log_index_interval_bytes="200", log_scrub_interval_ms="2000"
    ) as play:
        play.up()
        for number in range(12):
            play.send(b"%d" % number * 40)
            play.wait(0.35)
        node = play.node(1)
        first = next(each.base_offset for each in batches(play, 1) if each.file == segments(play, 1)[1][0])
        zero_batch(play, 1, first)
        node.host.disk.break_directory(f"{DATA}/{TOPIC}-0", errno.ENOSPC, "write", "create")
        node.disk_was_bad = True
        play.wait(10)
        assert node.running
        assert play.leader == 1
        assert [each.first_offset for _, each in play.replica(1).log.damaged_ranges()] == [first]
        node.host.disk.broken.clear()
        play.until("it is repaired", lambda: is_whole(play), 60)
        assert play.send(b"on") == 12
        assert len(play.values(1)) == 13


def reassign(play: Stage, replicas: list[int] | None) -> None:
    play.admin(lambda admin: admin.alter_partition_reassignments({TopicPartition(TOPIC, 0): replicas}))


def replicas_of(play: Stage) -> tuple[int, ...]:
    return tuple(play.cluster.placed(TOPIC).replicas)


def has_whole_copies(play: Stage) -> bool:
    return not any(faults_of_copies(play.cluster))


@pytest.mark.slow
@pytest.mark.parametrize("staying", [[1], [2], [2, 3], [3, 1]])
def test_damage_that_nobody_has_met_is_repaired_before_the_whole_copies_are_removed(staying: list[int]) -> None:
    with stage((1, 2, 3, 4)) as play:
        play.up((1, 2, 3, 4))
        for offset in range(4):
            assert play.send(LARGE) == offset
        for node_id in (1, 2, 3):
            zero_batch(play, node_id, 2)
        reassign(play, staying)
        play.until("the others are removed", lambda: replicas_of(play) == tuple(staying))
        assert play.leader in staying
        play.until("all copies are whole", lambda: has_whole_copies(play) and play.cluster.all_in_sync())
        assert play.values(play.leader) == [LARGE] * 4
        assert play.send(b"after") == 4


def test_a_removal_waits_for_the_one_whole_copy_and_can_be_cancelled() -> None:
    with stage() as play:
        play.up()
        for offset in range(3):
            assert play.send(LARGE) == offset
        zero_batch(play, 1, 1)
        zero_batch(play, 2, 1)
        play.pause(3)
        reassign(play, [1])
        play.wait(20)
        assert replicas_of(play) == (1, 2, 3)
        reassign(play, None)
        assert not play.cluster.placed(TOPIC).removing_replicas
        reassign(play, [1])
        play.resume(3)
        play.until("the others are removed", lambda: replicas_of(play) == (1,))
        assert play.values(1) == [LARGE] * 3


def test_a_removal_goes_on_with_another_leader() -> None:
    with stage() as play:
        play.up()
        for offset in range(3):
            assert play.send(LARGE) == offset
        for node_id in (1, 2):
            zero_batch(play, node_id, 1)
        play.pause(3)  # the reassignment waits for its copy
        reassign(play, [1, 2])
        play.node(1).kill()
        play.until("another leads", lambda: play.leader == 2)
        play.wait(3)
        assert len(replicas_of(play)) == 3
        play.resume(3)
        play.node(1).start()
        play.until("3 is removed", lambda: replicas_of(play) == (1, 2))
        play.until("all copies are whole", lambda: is_whole(play))
        assert play.send(b"after") == 3


@pytest.mark.slow
def test_a_removal_does_not_wait_for_ever_for_replicas_that_are_dead() -> None:
    with stage() as play:
        play.up()
        for offset in range(3):
            assert play.send(LARGE) == offset
        zero_batch(play, 1, 1)
        for node_id in (2, 3):
            play.node(node_id).kill()
        play.until("1 is alone", lambda: play.isr == [1])
        reassign(play, [1])
        play.wait(60)
        assert len(replicas_of(play)) == 3
        play.until("the others are removed", lambda: replicas_of(play) == (1,), 700)


def test_a_removal_ends_where_no_replica_has_a_whole_copy() -> None:
    with stage() as play:
        play.up()
        for offset in range(3):
            assert play.send(LARGE) == offset
        for node_id in (1, 2, 3):
            zero_batch(play, node_id, 1)
        reassign(play, [1, 2])
        play.until("3 is removed", lambda: replicas_of(play) == (1, 2))


def test_a_removal_goes_on_after_a_restart_of_the_controller() -> None:
    with stage() as play:
        play.up()
        for offset in range(3):
            assert play.send(LARGE) == offset
        zero_batch(play, 1, 1)
        controller = play.cluster.controller()
        assert controller is not None
        reassign(play, [1])
        controller.kill()
        play.wait(3)
        assert len(replicas_of(play)) == 3
        controller.start()
        play.until("the others are removed", lambda: replicas_of(play) == (1,))
        play.until("the log is whole", lambda: has_whole_copies(play))
