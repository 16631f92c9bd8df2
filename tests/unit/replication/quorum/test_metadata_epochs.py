"""A damaged leader epoch in the metadata log or in `quorum-state` elects no stale log, and stops no observer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from struct import pack_into

import pytest

from tests.unit.replication.quorum.quorum_nodes import THREE, Member, Quorum, endpoint, stop_all, three, until
from tests.unit.replication.quorum.test_metadata_damage import committed, committed_without, killed, last_batch, logs_of
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.quorum.acknowledged import FILE_NAME as ACKNOWLEDGED_FILE
from tidelog.replication.quorum.raft.messages import Ask, BeginAsk, EndAsk, VoteAsk
from tidelog.replication.quorum.raft.replica import EPOCH_FREE_MAX, EPOCH_STEP_MAX
from tidelog.replication.quorum.raft.voters import ReplicaKey
from tidelog.replication.quorum.wire import VERSIONS, request_of
from tidelog.storage.log.loader import Ending


def set_last_epoch(folder: Path, epoch: int) -> None:
    path = folder / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    pack_into(">i", data, last_batch(data)[0] + LEADER_EPOCH_OFFSET, epoch)
    path.write_bytes(data)


@pytest.mark.parametrize("is_remembered", [True, False])
@pytest.mark.parametrize("epoch", [9, 1000])
def test_a_voter_whose_last_record_claims_a_later_epoch_does_not_lead_without_what_the_others_have(
    tmp_path: Path, epoch: int, is_remembered: bool
) -> None:
    """Its log was the newest of all, so it was elected, and the others had to cut what was committed."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 5)
        values = await committed_without(quorum, 3, b"3 lacks it")
        await stop_all(quorum)
        set_last_epoch(logs_of(tmp_path, 3), epoch)
        if not is_remembered:
            (logs_of(tmp_path, 3) / ACKNOWLEDGED_FILE).write_bytes(b"damaged as well")
        damaged = await killed(quorum, 3)
        assert damaged.raft.raft.lacks_records
        assert damaged.raft.raft.epoch < epoch
        for node_id in (1, 2):
            await killed(quorum, node_id)
        for member in quorum.up.values():
            await member.listener.has(values)
        await until(lambda: not damaged.raft.raft.lacks_records)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_later_epoch_of_the_first_record_of_an_epoch_is_known_from_what_was_acknowledged(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        epoch, end_offset = leader.raft.raft.epoch, leader.raft.end_offset
        await until(lambda: all(member.raft.log.synced_offset == end_offset for member in quorum.up.values()))
        await stop_all(quorum)
        set_last_epoch(logs_of(tmp_path, 3), epoch + 5)
        damaged = await killed(quorum, 3)
        assert damaged.raft.raft.lacks_records
        assert damaged.raft.raft.epoch < epoch + 5
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_voter_that_is_alone_writes_the_right_epoch(tmp_path: Path, is_remembered: bool) -> None:
    """No other voter has a copy. Its observers have the record in the right epoch, and would have to cut it."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {1: endpoint(1)})
        voter = await Member(quorum, 1).start()
        observer = await Member(quorum, 2, can_vote=False).start()
        values = await committed(quorum, 5)
        await voter.stop()
        path = logs_of(tmp_path, 1) / f"{0:020d}.log"
        whole = path.read_bytes()
        set_last_epoch(logs_of(tmp_path, 1), 9)
        if not is_remembered:
            (logs_of(tmp_path, 1) / ACKNOWLEDGED_FILE).unlink()
        voter = await killed(quorum, 1)
        assert path.read_bytes().startswith(whole)
        await until(lambda: quorum.leaders)
        voter.raft.append([b"more"], 0)
        for member in (voter, observer):
            await member.listener.has([*values, b"more"])
        assert not voter.raft.raft.lacks_records
        await stop_all(quorum)

    asyncio.run(run())


def test_epochs_that_leaders_have_begun_are_believed(tmp_path: Path) -> None:
    """Also of a log that has only the LeaderChange record of the last one."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        values = await committed(quorum, 3)
        (leader,) = quorum.leaders
        await leader.stop()
        (second,) = await until(lambda: quorum.leaders)
        end_offset = second.raft.end_offset
        await until(lambda: all(member.raft.log.synced_offset == end_offset for member in quorum.up.values()))
        await stop_all(quorum)
        for node_id in THREE:
            (logs_of(tmp_path, node_id) / ACKNOWLEDGED_FILE).unlink()
        for node_id in THREE:
            member = await killed(quorum, node_id)
            assert not member.raft.raft.lacks_records
        for member in quorum.up.values():
            await member.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


def damaged_epoch(folder: Path) -> None:
    set_last_epoch(folder, 9)


def later_epoch_in_vote_file(folder: Path) -> None:
    path = folder / "quorum-state"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"leaderEpoch": 9}))


def unreadable_vote_file(folder: Path) -> None:
    (folder / "quorum-state").write_bytes(bytes(100))


@pytest.mark.parametrize("damage", [damaged_epoch, later_epoch_in_vote_file, unreadable_vote_file])
def test_an_observer_comes_back(tmp_path: Path, damage: object) -> None:
    """The quorum refuses fetches of a later epoch than its own, and an observer cannot begin one."""
    assert callable(damage)

    async def run() -> None:
        quorum = Quorum(tmp_path, {1: endpoint(1)})
        await Member(quorum, 1).start()
        observer = await Member(quorum, 2, can_vote=False).start()
        values = await committed(quorum, 5)
        await observer.stop()
        damage(logs_of(tmp_path, 2))
        observer.ending = Ending.KILLED
        await observer.start()
        await observer.listener.has(values)
        await until(lambda: not observer.raft.raft.lacks_records)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["vote", "pre-vote", "begin", "end"])
@pytest.mark.parametrize("beyond", [1, 2**30 - 1 - EPOCH_STEP_MAX])
def test_an_epoch_that_no_elections_explain_is_refused(tmp_path: Path, kind: str, beyond: int) -> None:
    """After one request with the largest epoch there was no number left for an election: no leader ever again."""
    own = ReplicaKey(1)

    async def run() -> None:
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        epoch = EPOCH_FREE_MAX + EPOCH_STEP_MAX + beyond
        asks: dict[str, Ask] = {
            "vote": VoteAsk(epoch, own, ReplicaKey(-1), 0, 0, False),
            "pre-vote": VoteAsk(epoch, own, ReplicaKey(-1), 0, 0, True),
            "begin": BeginAsk(epoch, 1, ReplicaKey(-1), None),
            "end": EndAsk(epoch, 1, (), None),
        }
        request = request_of(asks[kind], quorum.cluster_id, (), 1)
        for member in members:
            core = member.raft.raft
            before = core.epoch
            serve = {"begin": member.raft.begin_quorum_epoch, "end": member.raft.end_quorum_epoch}
            response = await serve.get(kind, member.raft.vote)(request, VERSIONS[type(asks[kind])])
            assert response.topics[0].partitions[0].error_code == ErrorCode.INVALID_REQUEST
            assert core.epoch == before
        await committed(quorum, 1)
        assert leader.raft.is_leader
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
def test_a_quorum_goes_on_from_the_largest_epoch_that_it_takes(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, members = await three(tmp_path)
        await until(lambda: quorum.leaders)
        epoch = EPOCH_FREE_MAX + EPOCH_STEP_MAX
        request = request_of(BeginAsk(epoch, 1, ReplicaKey(-1), None), quorum.cluster_id, (), 1)
        for member in members[1:]:
            await member.raft.begin_quorum_epoch(request, VERSIONS[BeginAsk])
            assert member.raft.raft.epoch == epoch
        (leader,) = await until(lambda: [each for each in quorum.leaders if each.raft.raft.epoch > epoch])
        values = await committed(quorum, 3)
        for member in members:
            await member.listener.has(values)
        late = await Member(quorum, 4, can_vote=False).start()
        await late.listener.has(values)
        assert late.raft.raft.epoch == leader.raft.raft.epoch
        await stop_all(quorum)

    asyncio.run(run())
