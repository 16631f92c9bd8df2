"""The metadata over a slow link: a node learns all of it, though an answer of the usual size takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import THREE, Member, Quorum, endpoint, response_type, stop_all, until
from tidelog.replication.answer_size import ARRIVING_BYTES, HALVINGS_MAX, AnswerSize
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.replication.quorum.raft import leading
from tidelog.replication.quorum.raft.replica import RaftReplica
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey

FAR = 9
BYTES_PER_S = 1_000_000
TIMEOUT_MS = 300
VALUES = [bytes([number]) * 20_000 for number in range(60)]


class SlowQuorum(Quorum):
    """Answers to the slow nodes take their time. One that goes on arriving is awaited, as by `Channels.exchange`."""

    slow: Container[int] = (FAR,)
    bytes_per_s = BYTES_PER_S

    async def exchange(self, source: int, target: Endpoint, request: Any, version: int, **options: Any) -> Any:
        response = await super().exchange(source, target, request, version, **options)
        assert type(response) is response_type(request)
        left_bytes = len(response.encode(version)) if source in self.slow else 0
        timeout_s = options["timeout_ms"] / 1000
        while left_bytes > 0:
            piece_s = min(left_bytes, ARRIVING_BYTES) / self.bytes_per_s
            await asyncio.sleep(min(piece_s, timeout_s))
            if piece_s > timeout_s:
                raise PeerUnreachable("no answer in time")
            left_bytes -= ARRIVING_BYTES
            if left_bytes > 0:
                options["on_arriving"]()
        return response


def member(quorum: Quorum, node_id: int, *, can_vote: bool = True) -> Member:
    times: dict[str, Any] = {"request_timeout_ms": TIMEOUT_MS, "fetch_timeout_ms": TIMEOUT_MS, "fetch_wait_ms": 50}
    return Member(quorum, node_id, can_vote=can_vote, **times)


@pytest.mark.slow
@pytest.mark.parametrize("as_snapshot", [False, True])
def test_a_node_behind_a_slow_link_learns_all_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_snapshot: bool
) -> None:
    on_sending, sizes = leading.on_sending, list[int]()

    def note(raft: RaftReplica, key: ReplicaKey, size_bytes: int, now_ms: float) -> None:
        sizes.append(size_bytes)
        on_sending(raft, key, size_bytes, now_ms)

    monkeypatch.setattr(leading, "on_sending", note)

    async def run() -> None:
        quorum = SlowQuorum(tmp_path, {1: endpoint(1)}, segment_bytes=1 << 19)
        leader = await Member(quorum, 1).start()
        await until(lambda: leader.raft.is_leader)
        for value in VALUES:
            last = leader.raft.append([value], 0)
        await until(lambda: leader.raft.high_watermark > last)
        if as_snapshot:
            for end_offset, count in ((30, 29), (last, len(VALUES) - 1), (last + 1, len(VALUES))):
                identity = SnapshotId(end_offset, leader.raft.epoch)
                leader.raft.write_snapshot(VALUES[:count], identity, 7, 8)
                leader.raft.snapshot_written(identity)
            assert leader.raft.log.start_offset == last
        far = await member(quorum, FAR, can_vote=False).start()
        await far.listener.has(VALUES)
        assert sum(sizes) > sum(map(len, VALUES)), "the leader knows how much it sends to a replica"
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("slow", [(1, 2, 3), (2, 3), (3,)])
def test_one_large_batch_comes_to_voters_behind_slow_links(tmp_path: Path, slow: tuple[int]) -> None:
    """It takes ten times as long as a leader is awaited. There was a new leader each few seconds, without end."""

    async def run() -> None:
        quorum = SlowQuorum(tmp_path, THREE, segment_bytes=1 << 22)
        quorum.bytes_per_s = 400_000
        members = [await member(quorum, node_id).start() for node_id in THREE]
        (leader,) = await until(lambda: quorum.leaders)
        quorum.slow = slow
        last = leader.raft.append(VALUES, 0)
        await until(lambda: all(each.raft.high_watermark > last for each in members))
        await stop_all(quorum)

    asyncio.run(run())


def test_a_leader_that_sends_a_large_answer_is_lost_once_nothing_of_it_arrives(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = SlowQuorum(tmp_path, THREE, segment_bytes=1 << 22)
        quorum.bytes_per_s = 40_000  # no 16 KiB within the timeout
        members = [await member(quorum, node_id).start() for node_id in THREE]
        (leader,) = await until(lambda: quorum.leaders)
        leader.raft.append(VALUES, 0)
        quorum.slow = THREE
        quorum.hung.add(leader.node_id)
        others = [each for each in members if each is not leader]
        await until(lambda: any(each.raft.is_leader for each in others))
        await until(lambda: not leader.raft.is_leader)
        await stop_all(quorum)

    asyncio.run(run())


def test_the_size_follows_what_the_link_brings() -> None:
    size = AnswerSize(2000)
    assert size.limit(1 << 20) == 1 << 20
    for _ in range(3):
        size.on_lost()
    assert size.limit(1 << 20) == 1 << 17
    size.on_answer(1500, is_large=True)
    size.on_answer(2500, is_large=False)  # it went on arriving
    assert size.limit(1 << 20) == 1 << 16
    size.on_answer(400, is_large=True)
    size.on_answer(10, is_large=False)
    assert size.limit(1 << 20) == 1 << 17
    for _ in range(4):
        size.on_answer(400, is_large=True)
    assert size.limit(1 << 20) == 1 << 20
    for _ in range(100):
        size.on_lost()
    assert size.limit(1 << 20) == 1 << 20 - HALVINGS_MAX
    assert size.limit(1) == 1
