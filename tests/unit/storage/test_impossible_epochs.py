"""A last batch that claims a later leader epoch than its partition has had: the CRC does not cover it, and no batch
behind it contradicts. A start takes it over; the metadata tells that it is damage."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack_into

import pytest

from tests.unit.replication.replicas import Replicas
from tests.unit.storage.batches import NOW, Logs, batch, offsets_of, records_of
from tests.unit.storage.test_damage import COUNT, batches_of, copy_of, damage, made, repair
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET
from tidelog.protocol.errors import ErrorCode, KafkaError

MakeLogs = Callable[..., Logs]
__all__ = ["made"]


def test_a_leader_epoch_that_never_was_is_damage_and_is_repaired(made: Logs) -> None:
    copy, end = copy_of(made), 2 * COUNT
    made.append(batch(value=b"of epoch 3"), epoch=3)
    made.log.flush()  # writes the epochs down
    copy |= copy_of(made)
    made.kill()
    path = made.folder / made.files("*.log")[-1]
    damage(path, len(batches_of(path)) - 1, "leader epoch")
    log = made.open(machine_ran_on=True)
    assert log.leader_epochs.latest == 77
    assert log.doubt_epochs_above(5)
    [(_, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (end, end + 1)
    assert list(log.leader_epochs) == [(0, 0), (1, 50), (2, 100), (3, end)], "as the file had them"
    assert not log.doubt_epochs_above(5)
    repair(log, copy)
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == list(range(end + 1))
    assert list(log.leader_epochs) == [(0, 0), (1, 50), (2, 100), (3, end)]


def test_an_epoch_file_that_names_an_epoch_that_never_was_is_corrected(made: Logs) -> None:
    made.close()
    path = made.folder / "leader-epoch-checkpoint"
    path.write_text("0\n3\n0 0\n1 50\n77 100\n")
    log = made.open()
    assert log.leader_epochs.latest == 77
    assert log.doubt_epochs_above(5)
    assert not log.damaged_ranges(), "the batches say what is right"
    assert list(log.leader_epochs) == [(0, 0), (1, 50), (2, 100)]


def test_a_whole_log_is_not_doubted(made: Logs) -> None:
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not log.doubt_epochs_above(2)
    assert not log.damaged_ranges()


@pytest.mark.parametrize("count", [1, 2])
def test_a_follower_takes_no_batch_of_a_later_epoch_than_its_leaders(logs: MakeLogs, count: int) -> None:
    made = logs()
    sent = [bytearray(batch()) for _ in range(count)]
    for number, each in enumerate(sent):
        pack_into(">q", each, 0, number)
        pack_into(">i", each, LEADER_EPOCH_OFFSET, 0)
    pack_into(">i", sent[-1], LEADER_EPOCH_OFFSET, 77)
    data = memoryview(bytearray(b"".join(sent)))
    with pytest.raises(KafkaError) as refused:
        made.log.append_as_follower(data, NOW, epoch_max=4)
    assert refused.value.code == ErrorCode.CORRUPT_MESSAGE
    assert made.log.log_end_offset == 0
    assert made.log.append_as_follower(data, NOW, epoch_max=77) is not None


@pytest.mark.parametrize("node_id", [1, 2])
def test_a_replica_with_such_a_batch_goes_on(node_id: int) -> None:
    """A follower asked its leader for the end of an epoch that never was, and was refused for ever."""
    cluster = Replicas(3)
    for value in (b"a", b"b"):
        cluster.nodes[1].produce(value)
        cluster.loop.run_for(600)
    cluster.stop(node_id)
    path = f"/data/t-0/{0:020d}.log"
    data = bytearray(cluster.disks[node_id].read_file(path))
    pack_into(">i", data, len(data) // 2 + LEADER_EPOCH_OFFSET, 77)
    cluster.disks[node_id].write_file(path, bytes(data), sync=True)
    node = cluster.start(node_id)
    assert len(node.log.damaged_ranges()) == 1
    cluster.loop.run_for(2000)
    cluster.nodes[1].produce(b"c")
    cluster.loop.run_for(2000)
    assert {each.log.log_end_offset for each in cluster.nodes.values()} == {3}
    assert cluster.nodes[2 if node_id != 2 else 3].log.leader_epochs.latest == 0
