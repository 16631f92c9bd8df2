"""The metadata over a slow link: a node learns all of it, though an answer of the usual size takes too long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, response_type, stop_all, until
from tidelog.replication.answer_size import HALVINGS_MAX, AnswerSize
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.replication.quorum.raft.snapshot import SnapshotId

FAR = 9
BYTES_PER_S = 1_000_000
TIMEOUT_MS = 300
VALUES = [bytes([number]) * 20_000 for number in range(60)]


class SlowQuorum(Quorum):
    """Answers to the node FAR take their time."""

    async def exchange(
        self, source: int, target: Endpoint, request: Any, version: int, *, timeout_ms: int, lane: str = ""
    ) -> Any:
        response = await super().exchange(source, target, request, version, timeout_ms=timeout_ms, lane=lane)
        if source == FAR:
            size_bytes = len(response.encode(version))
            await asyncio.sleep(min(size_bytes / BYTES_PER_S, timeout_ms / 1000))
            if size_bytes / BYTES_PER_S > timeout_ms / 1000:
                raise PeerUnreachable("no answer in time")
            assert type(response) is response_type(request)
        return response


@pytest.mark.parametrize("as_snapshot", [False, True])
def test_a_node_behind_a_slow_link_learns_all_metadata(tmp_path: Path, as_snapshot: bool) -> None:
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
        far = await Member(
            quorum, FAR, can_vote=False, request_timeout_ms=TIMEOUT_MS, fetch_timeout_ms=TIMEOUT_MS, fetch_wait_ms=50
        ).start()
        await far.listener.has(VALUES)
        await stop_all(quorum)

    asyncio.run(run())


def test_the_size_follows_what_the_link_brings() -> None:
    size = AnswerSize(2000)
    assert size.limit(1 << 20) == 1 << 20
    for _ in range(3):
        size.on_lost()
    assert size.limit(1 << 20) == 1 << 17
    size.on_answer(1500, is_large=True)
    size.on_answer(10, is_large=False)
    assert size.limit(1 << 20) == 1 << 17
    for _ in range(4):
        size.on_answer(400, is_large=True)
    assert size.limit(1 << 20) == 1 << 20
    for _ in range(100):
        size.on_lost()
    assert size.limit(1 << 20) == 1 << 20 - HALVINGS_MAX
    assert size.limit(1) == 1
