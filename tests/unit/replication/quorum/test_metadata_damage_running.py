"""Damage to the metadata log of a node that runs: it is found, cut off and fetched again; nothing committed is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import THREE, Listener, Member, Quorum, endpoint, stop_all, three, until
from tests.unit.replication.quorum.test_metadata_damage import committed, flip, logs_of
from tidelog.protocol.messages.metadata_records import ConfigRecord
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, encode_record
from tidelog.replication.controller.metadata.tracker import MetadataTracker
from tidelog.replication.quorum.files.records_lost import LACKING_FILE
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.storage.log.partition_log import CorruptLog

SCRUB: dict[str, Any] = {"scrub_interval_ms": 50, "scrub_bytes_per_s": 1 << 30}


def cut(folder: Path) -> None:
    path = folder / f"{0:020d}.log"
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(data) // 2)


def flip_in_the_middle(folder: Path) -> None:
    path = folder / f"{0:020d}.log"
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))


def content(folder: Path) -> bytes:
    return (folder / f"{0:020d}.log").read_bytes()


def whole_again(member: Member, other: Member) -> Callable[[], bool]:
    def is_whole() -> bool:
        folders = [Path(one.raft.log.directory) for one in (member, other)]
        is_recovered = not member.raft.raft.lacks_records and not (folders[0] / LACKING_FILE).exists()
        return is_recovered and content(folders[0]) == content(folders[1])

    return is_whole


@pytest.mark.parametrize("damage", [cut, flip_in_the_middle])
def test_a_follower_fetches_again_what_is_damaged_while_it_runs(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path, **SCRUB)
        values = await committed(quorum, 20)
        (leader,) = quorum.leaders
        follower = next(member for member in quorum.up.values() if member is not leader)
        damage(Path(follower.raft.log.directory))
        await until(lambda: list(Path(follower.raft.log.directory).glob("*.damaged")))
        await until(whole_again(follower, leader))
        leader.raft.append([b"more"], 0)
        await follower.listener.has([*values, b"more"])
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("damage", [cut, flip_in_the_middle])
def test_a_leader_whose_records_are_damaged_resigns_and_fetches_them_from_the_next(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path, **SCRUB)
        values = await committed(quorum, 20)
        (leader,) = quorum.leaders
        damage(Path(leader.raft.log.directory))
        await until(lambda: any(kind == "resign" for kind, *_ in leader.listener.told))
        (successor,) = await until(lambda: quorum.leaders)
        await until(whole_again(leader, successor))
        assert successor is not leader
        successor.raft.append([b"more"], 0)
        for member in quorum.up.values():
            await member.listener.has([*values, b"more"])
        await stop_all(quorum)

    asyncio.run(run())


def test_an_observer_fetches_again_what_is_damaged(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {1: endpoint(1)})
        leader = await Member(quorum, 1).start()
        observer = await Member(quorum, 2, can_vote=False, **SCRUB).start()
        await committed(quorum, 20)
        folder = Path(observer.raft.log.directory)
        flip_in_the_middle(folder)
        await until(lambda: list(folder.glob("*.damaged")))
        await until(whole_again(observer, leader))
        await stop_all(quorum)

    asyncio.run(run())


def test_a_follower_that_meets_damage_in_the_leader_has_it_repaired(tmp_path: Path) -> None:
    """Without the scrubber: a voter that comes back fetches from the damaged place."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        absent = next(member for member in quorum.up.values() if member is not leader)
        await absent.stop()
        values = [b"%d" % number for number in range(20)]
        for value in values:
            leader.raft.append([value], 0)
        await until(lambda: all(member.listener.values == values for member in quorum.up.values()))
        flip_in_the_middle(Path(leader.raft.log.directory))
        for _ in range(2):
            leader.raft._plain_log.segments.age_trust()
        back = await Member(quorum, absent.node_id).start()
        await back.listener.has(values)
        await until(whole_again(leader, back))
        await stop_all(quorum)

    asyncio.run(run())


def test_a_listener_that_is_behind_the_damage_reads_on_when_it_is_repaired(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path, **SCRUB)
        (leader,) = await until(lambda: quorum.leaders)
        follower = next(member for member in quorum.up.values() if member is not leader)
        report, follower.listener.on_high_watermark = follower.listener.on_high_watermark, lambda offset: None  # type: ignore[method-assign]
        values = [b"%d" % number for number in range(20)]
        for value in values:
            leader.raft.append([value], 0)
        await until(lambda: follower.raft.high_watermark == leader.raft.end_offset)
        follower.listener.on_high_watermark = report  # type: ignore[method-assign]
        flip_in_the_middle(Path(follower.raft.log.directory))
        await follower.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("later_values", [0, 3])
def test_a_voter_that_is_alone_writes_a_snapshot_in_place_of_damaged_records(tmp_path: Path, later_values: int) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1, **SCRUB).start()
        values = await committed(quorum, 20)
        folder = logs_of(tmp_path, 1)
        end_offset = member.raft.end_offset
        flip_in_the_middle(folder)
        await until(lambda: ("damage",) in member.listener.told)
        assert member.raft.is_leader
        for number in range(later_values):
            values.append(b"later %d" % number)
            member.raft.append([values[-1]], 0)
        await member.listener.has(values)
        identity = SnapshotId(end_offset, member.raft.epoch)
        member.raft.write_snapshot(values[:20], identity, 0, 0)
        member.raft.snapshot_written(identity)
        assert not member.raft.log.is_damaged
        assert member.raft.log.start_offset == end_offset
        await member.stop()
        assert not (folder / LACKING_FILE).exists()
        again = await Member(quorum, 1).start()
        await again.listener.has(values)
        await again.stop()

    asyncio.run(run())


def test_records_below_a_snapshot_may_be_damaged_while_the_node_is_stopped(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        values = await committed(quorum, 20)
        identity = SnapshotId(member.raft.end_offset, member.raft.epoch)
        member.raft.write_snapshot(values, identity, 0, 0)
        member.raft.snapshot_written(identity)
        member.raft.append([b"later"], 0)
        await member.listener.has([*values, b"later"])
        await member.stop()
        flip(logs_of(tmp_path, 1), 0.3)
        again = await Member(quorum, 1).start()
        await again.listener.has([*values, b"later"])
        await again.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_record_that_changes_after_it_was_checked_is_not_replayed(tmp_path: Path, is_alone: bool) -> None:
    """An image that was built from it would stay wrong for good."""

    async def run() -> None:
        voters = {1: endpoint(1)} if is_alone else THREE
        quorum = Quorum(tmp_path, voters)
        for node_id in voters:
            await Member(quorum, node_id).start()
        values = await committed(quorum, 20)
        (leader,) = quorum.leaders
        member = next((each for each in quorum.up.values() if each is not leader), leader)
        flip_in_the_middle(Path(member.raft.log.directory))
        read = [value for each in member.raft.read(0) for value in each.values]
        assert read == values[: len(read)]
        assert 0 < len(read) < len(values)
        if not is_alone:
            await until(whole_again(member, leader))
            assert [value for each in member.raft.read(0) for value in each.values] == values
        await stop_all(quorum)

    asyncio.run(run())


class NoController:
    """No lead of a part of the metadata gets here."""

    def on_lead(self, epoch: int, *, in_transaction: bool) -> None:
        raise AssertionError("the controller takes over")

    def on_resign(self, epoch: int) -> None:
        pass

    def take_committed(self, end_offset: int) -> None:
        return None

    def on_published(self, end_offset: int) -> None:
        pass


class Replaying(Listener):
    """A node's image of the metadata. The log is damaged between the check at the start and the first replay."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.failures: list[Exception] = []
        self.leads = 0
        self._is_damaged = False
        loop = asyncio.get_running_loop()
        self.tracker = MetadataTracker(
            on_image=lambda image, delta: None,
            loop=loop,
            run_in_executor=partial(loop.run_in_executor, None),
            clock_ms=lambda: 0,
            on_failure=self.failures.append,
        )
        self.tracker.controller = NoController()

    def on_high_watermark(self, offset: int) -> None:
        assert self.raft is not None
        if not self._is_damaged:
            flip_in_the_middle(self.folder)
            self._is_damaged = True
        self.tracker.raft = self.raft
        for _ in self.tracker.on_high_watermark(offset) or ():
            pass

    def on_lead(self, epoch: int) -> None:
        self.leads += 1
        self.tracker.on_lead(epoch)

    def on_resign(self, epoch: int) -> None:
        self.tracker.on_resign(epoch)

    def on_damage(self) -> None:
        self.tracker.on_damage()


def test_a_voter_that_is_alone_and_cannot_read_the_metadata_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It gave up the lead and was elected again, without end. The log has one line of it, without a traceback."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        await until(lambda: member.raft.is_leader)
        for number in range(20):
            record = ConfigRecord(resource_type=2, resource_name="a", name="retention.ms", value=str(number))
            member.raft.append([encode_record(record, LATEST_METADATA_VERSION)], 0)
        await until(lambda: member.raft.high_watermark == member.raft.end_offset)
        await member.stop()
        folder = logs_of(tmp_path, 1)
        again = Member(quorum, 1)
        again.new_listener = partial(Replaying, folder)
        await again.start()
        listener = again.listener
        assert isinstance(listener, Replaying)
        await until(lambda: listener.failures or listener.leads > 5)
        assert listener.leads == 1
        assert "no other voter has a copy" in str(listener.failures[0])
        [line] = [record for record in caplog.records if "cannot replay" in record.message]
        assert not line.exc_info
        epoch = again.raft.epoch
        await asyncio.sleep(0.1)
        assert (again.raft.epoch, listener.leads) == (epoch, 1)
        await again.stop()
        with pytest.raises(CorruptLog, match="no other voter has a copy"):
            await Member(quorum, 1).start()

    asyncio.run(run())
