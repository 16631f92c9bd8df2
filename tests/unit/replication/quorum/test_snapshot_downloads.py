"""A snapshot is fetched while the lead moves: what a thread checks and what comes from the next leader do not mix."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.quorum.quorum_nodes import THREE, Member, Quorum, RefusingDisk, stop_all, until
from tidelog.protocol.messages.fetch_snapshot import FetchSnapshotRequest
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum import metadata_scrubber
from tidelog.replication.quorum.files.metadata_log import FETCHED_PART
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.snapshot import SnapshotId, decode_snapshot

VALUES = [b"%06d" % number * 100 for number in range(300)]
PART_BYTES = 5_000


class SlowDisk(RefusingDisk):
    """The first sync of a fetched snapshot waits until `may_go_on` is set."""

    __slots__ = ("is_held", "may_go_on")

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def sync_file(self, path: str) -> None:
        if path.endswith(FETCHED_PART) and not self.is_held.is_set():
            self.is_held.set()
            assert self.may_go_on.wait(PATIENCE_S)
        super().sync_file(path)


class HaltingQuorum(Quorum):
    """From `halt` on, `halted` gets one part of a snapshot, and further ones after `may_go_on`."""

    halted = -1

    def halt(self, halted: Member) -> None:
        self.halted, self.first_came, self.may_go_on = halted.node_id, asyncio.Event(), asyncio.Event()

    async def exchange(self, source: int, target: Endpoint, request: Any, version: int, **options: Any) -> Any:
        is_of_halted = source == self.halted and isinstance(request, FetchSnapshotRequest)
        if is_of_halted and self.first_came.is_set():
            await self.may_go_on.wait()
        response = await super().exchange(source, target, request, version, **options)
        if is_of_halted:
            self.first_came.set()
        return response


async def with_a_voter_that_needs_a_snapshot(quorum: Quorum, **settings: Any) -> tuple[Member, int, SnapshotId]:
    """(the leader, the id of the voter, which is down, the snapshot that both others have)."""
    retention = MetadataRetention(bytes_max=1 << 14)
    members = [await Member(quorum, node_id, retention=retention, **settings).start() for node_id in THREE]
    (leader,) = await until(lambda: quorum.leaders)
    away, other = (member for member in members if member is not leader)
    await away.crash()
    for value in VALUES:
        last = leader.raft.append([value], 0)
    await until(lambda: min(leader.raft.high_watermark, other.raft.high_watermark) > last)
    earlier, kept, identity = [SnapshotId(end, leader.raft.epoch) for end in (100, last, last + 1)]
    for member in (leader, other):
        for snapshot, count in ((earlier, 99), (kept, len(VALUES) - 1), (identity, len(VALUES))):
            member.raft.write_snapshot(VALUES[:count], snapshot, 7, 8)
            member.raft.snapshot_written(snapshot)
    return leader, away.node_id, identity


def test_a_snapshot_that_a_thread_checks_stays_whole_when_the_next_leader_sends_it_too(tmp_path):
    """The next leader's first part began the file anew, and the thread gave a part of the snapshot its name."""

    async def run():
        quorum = HaltingQuorum(tmp_path, THREE, segment_bytes=1 << 14)
        leader, away_id, identity = await with_a_voter_that_needs_a_snapshot(quorum)
        disk = quorum.disks[away_id] = SlowDisk()
        back = await Member(quorum, away_id, snapshot_part_bytes=PART_BYTES).start()
        await until(disk.is_held.is_set)
        quorum.halt(back)
        leader.raft.resign()
        async with asyncio.timeout(PATIENCE_S):
            await quorum.first_came.wait()
        await asyncio.sleep(0.1)  # the node stores the part, or leaves it
        disk.may_go_on.set()
        path = back.raft.log.path_of(identity)
        await until(lambda: disk.exists(path) and not disk.exists(path + FETCHED_PART))
        await asyncio.sleep(0.1)  # the node installs what the thread has checked, or leaves it
        quorum.may_go_on.set()
        await back.listener.has(VALUES)
        assert decode_snapshot(disk.read_file(path)).values == VALUES
        await back.crash()
        again = await Member(quorum, away_id).start()
        assert not again.raft.raft.lacks_records
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(("damaged", "rate"), [("the newest", 1 << 30), ("the newest", 0), ("both", 1 << 30)])
def test_a_node_that_fetches_a_damaged_snapshot_gets_another_one(tmp_path, monkeypatch, damaged, rate):
    """It fetched the same one every second, until the daily scrub or the next hourly snapshot."""
    monkeypatch.setattr(metadata_scrubber, "LOOK_S", 0.2)

    async def run():
        quorum = Quorum(tmp_path, THREE, segment_bytes=1 << 14)
        leader, away_id, identity = await with_a_voter_that_needs_a_snapshot(quorum, scrub_bytes_per_s=rate)
        log, disk = leader.raft.log, quorum.disk(leader.node_id)
        assert log.snapshots is not None
        oldest, newest = log.snapshots
        assert newest == identity != oldest
        await asyncio.sleep(1)  # the first look, and one behind a fetch of the other voter, read the whole snapshots
        for each in (newest,) if damaged == "the newest" else (newest, oldest):
            content = bytearray(disk.read_file(log.path_of(each)))
            content[len(content) // 2] ^= 1
            disk.write_file(log.path_of(each), content, sync=True)
        await asyncio.sleep(0.5)
        assert not [told for told in leader.listener.told if told[0] == "damage"], "no fetch has met it"
        back = await Member(quorum, away_id, snapshot_part_bytes=PART_BYTES).start()
        if damaged == "both":
            await until(lambda: ("damage",) in leader.listener.told)
            last = leader.raft.append([b"another"], 0)
            await until(lambda: leader.raft.high_watermark > last)
            another = SnapshotId(last + 1, leader.raft.epoch)
            leader.raft.write_snapshot([*VALUES, b"another"], another, 7, 8)
            leader.raft.snapshot_written(another)
            await back.listener.has([*VALUES, b"another"])
        else:
            await back.listener.has(VALUES)
        await stop_all(quorum)

    asyncio.run(run())
