"""Voters on devices whose syncs take about as long as the election timeout."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.quorum.quorum_nodes import THREE, Member, Quorum, RefusingDisk, stop_all, until
from tidelog.replication.quorum.files.vote_store import VoteStore
from tidelog.replication.quorum.files.vote_writer import VoteWriter
from tidelog.replication.quorum.raft.messages import ElectionState
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterHistory, VoterSet

SYNC_S = 0.1


class SlowDisk(RefusingDisk):
    """A vote takes two of these syncs."""

    __slots__ = ()

    def write_file(self, path: str, data: bytes | bytearray | memoryview, *, sync: bool) -> None:
        if sync:
            time.sleep(SYNC_S)
        super().write_file(path, data, sync=sync)

    def sync_directory(self, path: str) -> None:
        time.sleep(SYNC_S)
        super().sync_directory(path)


@pytest.mark.slow
def test_voters_whose_votes_take_as_long_as_the_election_timeout_elect_a_leader(tmp_path):
    """Its own vote and a voter's last 0.4 s, an attempt 0.2 to 0.4 s."""

    async def run():
        quorum = Quorum(tmp_path, THREE)
        quorum.disks.update({node_id: SlowDisk() for node_id in THREE})
        members = [await Member(quorum, node_id, election_timeout_ms=200).start() for node_id in THREE]
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(member.raft.leader_id == leader.node_id for member in members))
        await stop_all(quorum)

    asyncio.run(run())


def held_writer(store, may_write):
    """It writes while `may_write` is set."""

    async def write(work):
        async with asyncio.timeout(PATIENCE_S):
            await may_write.wait()
        work()

    loop = asyncio.get_running_loop()
    return VoteWriter(store, VoterHistory(VoterSet([])), loop, write, lambda error: False)


async def test_requests_wait_for_a_vote_but_not_for_the_leaders_id(tmp_path):
    loop = asyncio.get_running_loop()
    may_write = asyncio.Event()
    store = VoteStore(RefusingDisk(), str(tmp_path))
    writer = held_writer(store, may_write)
    writer.write(ElectionState(1, -1, ReplicaKey(7)))
    waits = loop.create_task(writer.written())
    await asyncio.sleep(0.01)
    assert not waits.done()
    assert writer.is_waiting
    may_write.set()
    async with asyncio.timeout(PATIENCE_S):
        await waits
    waited_ms = writer.waited_ms
    assert not writer.is_waiting
    assert waited_ms >= 9
    may_write.clear()
    writer.write(ElectionState(1, 7, ReplicaKey(7)))
    async with asyncio.timeout(PATIENCE_S):
        await writer.written()
    assert not writer.is_waiting
    assert writer.waited_ms == waited_ms
    may_write.set()
    await writer.close()
    state = store.read()
    assert state is not None
    assert state.leader_id == 7, "it is written all the same"


@pytest.mark.parametrize(("epoch", "voted"), [(1, 7), (2, 7), (2, -1)])
async def test_requests_wait_for_a_vote_or_an_epoch_behind_a_stored_epoch(tmp_path, epoch, voted):
    may_write = asyncio.Event()
    may_write.set()
    store = VoteStore(RefusingDisk(), str(tmp_path))
    writer = held_writer(store, may_write)
    writer.write(ElectionState(1))
    async with asyncio.timeout(PATIENCE_S):
        await writer.written()
    may_write.clear()
    key = ReplicaKey(voted) if voted >= 0 else None
    writer.write(ElectionState(epoch, -1, key))
    writer.write(ElectionState(epoch, 7, key))
    waits = asyncio.create_task(writer.written())
    await asyncio.sleep(0.01)
    assert not waits.done()
    may_write.set()
    async with asyncio.timeout(PATIENCE_S):
        await waits
    state = store.read()
    assert state is not None
    assert (state.leader_epoch, state.voted_id) == (epoch, voted)
    await writer.close()
