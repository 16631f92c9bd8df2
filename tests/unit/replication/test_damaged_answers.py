"""What a leader with a damaged log sends: a follower keeps what it has, whatever offsets the bytes name."""

from __future__ import annotations

from struct import pack_into

import pytest

from tests.unit.replication.replicas import Replicas
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import KafkaError


def lagging(before: int, after: int) -> tuple[Replicas, bytearray, list[tuple[int, int]]]:
    """Node 3 is stopped after `before` batches of two records; the leader's file, and where its batches are."""
    cluster = Replicas(3)
    for n in range(before):
        cluster.nodes[1].produce(b"%d" % n, b"x")
        cluster.loop.settle()
    cluster.loop.run_for(600)
    for node in cluster.nodes.values():
        node.log.flush()
        node.checkpoint()
    cluster.stop(3)
    cluster.elect(1, [1, 2])
    for n in range(before, before + after):
        cluster.nodes[1].produce(b"%d" % n, b"x")
        cluster.loop.settle()
    data = cluster.disks[1]._inode("/data/t-0/00000000000000000000.log").data
    places = [(position, header.size_bytes) for position, header in iter_headers(bytes(data))]
    return cluster, data, places


@pytest.mark.parametrize("base_offset", [0, 4, 8, 9, -1, 1 << 62])
def test_a_follower_cuts_nothing_for_a_batch_whose_base_offset_is_damaged(base_offset: int) -> None:
    cluster, data, places = lagging(5, 4)
    position, _ = places[5]
    assert cluster.nodes[1].log.high_watermark == 18
    pack_into(">q", data, position, base_offset)
    cluster.start(3)
    cluster.requests.clear()
    ends = set()
    for _ in range(40):
        cluster.loop.run_for(5)
        ends.add(cluster.nodes[3].log.log_end_offset)
        assert cluster.nodes[3].log.high_watermark == 10
    assert ends == {10}
    assert cluster.nodes[3].values() == cluster.nodes[1].values()[:10]
    assert len(cluster.requests) < 200, "it asks again after a pause"


def test_the_first_batch_of_an_empty_log_is_not_of_a_later_leader() -> None:
    """The CRC does not cover the epoch. The batch begins before the log, as where the leader's begins inside it."""
    cluster = Replicas(2)
    follower = cluster.nodes[2].partition
    follower.log.truncate_fully_and_start_at(1)
    records = [(0, None, b"v", ())] * 2
    later = encode_batch(records, base_offset=0, leader_epoch=follower.leader_epoch + 1)
    with pytest.raises(KafkaError, match=f"of leader epoch {follower.leader_epoch + 1}"):
        follower.append_as_follower(memoryview(later), 0)
    assert follower.log.log_end_offset <= 1
    own = encode_batch(records, base_offset=follower.log.log_end_offset, leader_epoch=follower.leader_epoch)
    follower.append_as_follower(memoryview(own), 0)
    later = encode_batch(records, base_offset=follower.log.log_end_offset, leader_epoch=follower.leader_epoch + 1)
    with pytest.raises(KafkaError, match=f"of leader epoch {follower.leader_epoch + 1}"):
        follower.append_as_follower(memoryview(later), 0)


def test_a_follower_cuts_nothing_for_zeros() -> None:
    cluster, data, places = lagging(5, 4)
    position, size_bytes = places[5]
    data[position : position + size_bytes] = bytes(size_bytes)
    cluster.start(3)
    for _ in range(40):
        cluster.loop.run_for(5)
        assert cluster.nodes[3].log.log_end_offset == 10
