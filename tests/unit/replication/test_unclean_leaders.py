"""A leader that was elected uncleanly: what the others have behind its log's end is taken over before it leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.replication.replicas import Replicas
from tidelog.broker.replicas.unclean_leaders import UncleanLeaders
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.metadata.image import RECOVERING
from tidelog.replication.future_replica import FutureReplica
from tidelog.replication.partition import Partition
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.log.damaged_end import damaged_end
from tidelog.storage.log.directory import LogDirectory


class Others:
    """The other replicas, asked without a network."""

    def __init__(self, cluster: Replicas, node_id: int) -> None:
        self.cluster, self.node_id = cluster, node_id
        self.silent: set[int] = set()

    def others(self, partition: Partition) -> list[int]:
        return [each for each in self.cluster.placed.replicas if each != self.node_id]

    async def fetch(self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes:
        await asyncio.sleep(0)
        node = self.cluster.nodes.get(source)
        if node is None or source in self.silent:
            raise PeerUnreachable("refused")
        log = node.log
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        return b"".join(map(bytes, log.read(offset, 150, log.log_end_offset).regions))


VALUES = [b"%d" % number for number in range(6)]


def lead_uncleanly(cluster: Replicas, node_id: int) -> UncleanLeaders:
    """The node is to lead, and asks the others first."""
    node = cluster.nodes[node_id]
    others: Any = Others(cluster, node_id)
    leaders = UncleanLeaders(node.partitions, others, asyncio.get_running_loop(), node.clock_ms)
    node.hosting.set_unclean_leaders(leaders)
    cluster.others = others  # type: ignore[attr-defined]
    cluster.placed = replace(cluster.placed, leader_recovery_state=RECOVERING)
    return leaders


@pytest.fixture
async def cluster() -> AsyncIterator[Replicas]:
    """Node 2 lost the last four of six acknowledged records while all were away; the others lost power."""
    cluster = Replicas(3)
    for number, value in enumerate(VALUES):
        if number == 4:
            cluster.elect(1, [1, 2, 3])
        cluster.nodes[1].produce(value)
        cluster.loop.run_for(600)
    cluster.stop(2)
    path = f"/data/t-0/{0:020d}.log"
    data = cluster.disks[2].read_file(path)
    cluster.disks[2].write_file(path, data[: len(data) // 3], sync=True)
    cluster.elect(-1, [])
    node = cluster.start(2)
    assert node.log.log_end_offset == 2
    leaders = lead_uncleanly(cluster, 2)
    yield cluster
    await leaders.close()


async def test_it_takes_over_what_the_others_have_before_it_leads(cluster: Replicas) -> None:
    cluster.elect(2, [2])
    node = cluster.nodes[2]
    assert not node.partition.leads, "the others would cut their logs to its end"
    await until(lambda: node.partition.leads)
    cluster.loop.run_for(600)
    assert [each.values() for each in cluster.nodes.values()] == [VALUES] * 3
    assert list(node.log.leader_epochs) == [(0, 0), (1, 4), (3, 6)]
    assert node.produce(b"on", acks=1).code == 0


async def test_it_awaits_the_batches_that_the_leader_before_may_have_refused(cluster: Replicas) -> None:
    cluster.elect(2, [2])
    node = cluster.nodes[2]
    await until(lambda: node.partition.leads)
    cluster.loop.run_for(600)
    behind = node.produce(b"behind a gap", acks=1, producer_id=7, producer_epoch=0, base_sequence=3)
    assert behind.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert node.produce(b"first", acks=1, producer_id=7, producer_epoch=0, base_sequence=0).code == 0


async def test_it_leads_with_what_it_has_where_none_of_them_answers(cluster: Replicas) -> None:
    cluster.others.silent = {1, 3}  # type: ignore[attr-defined]
    cluster.elect(2, [2], tell=[2])
    await until(lambda: cluster.nodes[2].partition.leads)
    assert cluster.nodes[2].values() == VALUES[:2]


async def test_it_takes_all_also_where_its_log_moves_to_another_directory_meanwhile(cluster: Replicas) -> None:
    """A move that a start resumes may end between two answers: the rest belongs to the log that took over."""
    node = cluster.nodes[2]
    partition, former = node.partition, node.log
    home = LogDirectory.open(cluster.disks[2], "/other", node_id=2, cluster_id="C" * 22)
    home.create_future("t", 0, partition.topic_id, former.config, node.clock_ms())
    future = home.futures["t", 0]
    move = FutureReplica(partition, future, bytes(16), bytes(16))
    others = cluster.others  # type: ignore[attr-defined]
    fetch = others.fetch

    async def fetch_and_move(asked: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes:
        found: bytes = await fetch(asked, source, offset, up_to_log_end=up_to_log_end)
        if offset == former.log_end_offset and partition.log is former:
            batches = move.read_next(1 << 20)
            assert batches is not None
            move.append(batches, node.clock_ms())
            move.take_over()
        return found

    others.fetch = fetch_and_move
    cluster.elect(2, [2])
    await until(lambda: partition.leads)
    assert partition.log is future
    cluster.loop.run_for(600)
    assert [each.values() for each in cluster.nodes.values()] == [VALUES] * 3


async def test_another_leader_ends_the_questions(cluster: Replicas) -> None:
    cluster.elect(2, [2])
    cluster.placed = replace(cluster.placed, leader_recovery_state=0)
    cluster.elect(1, [1])
    cluster.loop.run_for(600)
    await asyncio.sleep(0.05)
    assert not cluster.nodes[2].partition.leads
    assert cluster.nodes[2].values() == VALUES


async def test_a_log_that_went_another_way_is_not_taken(cluster: Replicas) -> None:
    """Its batch before the end is of another leader epoch."""
    cluster.nodes[2].log.leader_epochs.clear()
    cluster.nodes[2].log.leader_epochs.assign(1, 0)
    cluster.elect(2, [2], tell=[2])
    await until(lambda: cluster.nodes[2].partition.leads)
    assert cluster.nodes[2].log.log_end_offset == 2


LAST = (b"3", b"4", b"5")


@pytest.fixture
async def damaged() -> AsyncIterator[Replicas]:
    """Node 2 lost all batches but the first; its checkpoints name an offset inside of the last one, of offsets 3 to 5,
    in which the other replicas began another leader epoch."""
    cluster = Replicas(3)
    for value in (b"0", b"1", b"2"):
        cluster.nodes[1].produce(value)
        cluster.loop.run_for(600)
    cluster.elect(1, [1, 2, 3])
    cluster.nodes[1].produce(*LAST)
    cluster.loop.run_for(600)
    cluster.nodes[2].log.flush()
    cluster.nodes[2].checkpoint()
    cluster.stop(2)
    path = f"/data/t-0/{0:020d}.log"
    data = cluster.disks[2].read_file(path)
    cluster.disks[2].write_file(path, data[: [position for position, _ in iter_headers(data)][1]], sync=True)
    cluster.elect(-1, [])
    node = cluster.start(2)
    damage = damaged_end(node.log)
    assert damage is not None
    assert (damage.first_offset, damage.end_offset) == (1, 5)
    leaders = lead_uncleanly(cluster, 2)
    yield cluster
    await leaders.close()


async def test_the_others_keep_a_batch_that_the_damaged_end_of_its_log_lies_in(damaged: Replicas) -> None:
    """They would cut it as a whole, though only the lower bound of what this one had lies there."""
    damaged.elect(2, [2])
    node = damaged.nodes[2]
    await until(lambda: node.partition.leads)
    damaged.loop.run_for(600)
    assert node.log.log_end_offset == 6
    assert [(each.first_offset, each.end_offset) for _, each in node.log.damaged_ranges()] == [(1, 6)]
    for each in (1, 3):
        assert damaged.nodes[each].values() == [b"0", b"1", b"2", *LAST]
    assert node.produce(b"on", acks=1).code == 0
    damaged.loop.run_for(600)
    assert damaged.nodes[3].values()[-1] == b"on"


async def test_it_takes_over_what_follows_its_damaged_end(damaged: Replicas) -> None:
    damaged.elect(1, [1, 3], tell=[1, 3])
    damaged.nodes[1].produce(b"6")
    damaged.loop.run_for(600)
    damaged.elect(2, [2])
    await until(lambda: damaged.nodes[2].partition.leads)
    damaged.loop.run_for(600)
    assert damaged.nodes[2].log.log_end_offset == 7
    assert list(damaged.nodes[2].log.leader_epochs)[-1][1] == 7
    for each in (1, 3):
        assert damaged.nodes[each].values() == [b"0", b"1", b"2", *LAST, b"6"]


async def test_one_that_lacks_its_last_whole_batch_is_not_asked_where_it_ends(damaged: Replicas) -> None:
    damaged.nodes[2].log.leader_epochs.clear()
    damaged.nodes[2].log.leader_epochs.assign(1, 0)
    damaged.elect(2, [2], tell=[2])
    await until(lambda: damaged.nodes[2].partition.leads)
    assert damaged.nodes[2].log.log_end_offset == 5
