"""A voter whose `quorum-state` is damaged or gone: no vote is given twice, and it votes again without an operator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, three, until
from tests.unit.replication.quorum.test_driver import add, same_mark, until_done
from tests.unit.replication.quorum.test_metadata_damage import SERVERS, committed, flip, logs_of, with_added_voters
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.quorum.files.vote_store import CorruptQuorumState, decode_quorum_state
from tidelog.replication.quorum.raft.messages import OffsetAndEpoch, VoteAsk
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey
from tidelog.replication.quorum.vote_recovery import PAUSE_S


def changed(path: Path, **fields: int) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, separators=(",", ":")))


def epoch_in(path: Path) -> int:
    """-1 while the vote file is not whole."""
    try:
        return decode_quorum_state(path.read_bytes()).leader_epoch
    except (FileNotFoundError, CorruptQuorumState):
        return -1


LOSSES: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: path.write_bytes(b""),
    # A follower whose leader has stopped has no leader already.
    lambda path: changed(path, leaderId=-1 if json.loads(path.read_text())["leaderId"] != -1 else 1),
    lambda path: changed(path, leaderEpoch=0),
    lambda path: changed(path, leaderEpoch=99),
    lambda path: changed(path, votedId=1 if json.loads(path.read_text())["votedId"] == 2 else 2),
    lambda path: path.unlink(),
]


async def without_vote(tmp_path: Path, lose: Callable[[Path], object]) -> tuple[Quorum, Member]:
    """Three voters that have committed records. The third is started again, when its vote is lost, while the others are
    away.
    """
    quorum, _ = await three(tmp_path)
    await committed(quorum, 3)
    await stop_all(quorum)
    lose(logs_of(tmp_path, 3) / "quorum-state")
    return quorum, await Member(quorum, 3).start()


async def with_stopped_follower(tmp_path: Path) -> tuple[Quorum, list[bytes], Member, Member, Member]:
    """Three voters and the records that they have committed: the leader, a follower that is stopped, the other one."""
    quorum, members = await three(tmp_path)
    values = await committed(quorum, 3)
    (leader,) = await until(lambda: quorum.leaders)
    follower, other = [member for member in members if member is not leader]
    await follower.stop()
    return quorum, values, leader, follower, other


@pytest.mark.slow
@pytest.mark.parametrize("lose", LOSSES)
def test_a_voter_without_its_vote_votes_again_when_all_others_have_answered(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    async def run() -> None:
        quorum, damaged = await without_vote(tmp_path, lose)
        raft = damaged.raft.raft
        assert raft.vote_is_unknown
        assert "for whom it voted" in damaged.raft.loss
        for node_id in (1, 2):
            await Member(quorum, node_id).start()
        await until(lambda: not raft.vote_is_unknown and quorum.leaders)
        assert not damaged.raft.loss
        first = raft.epoch
        await until(lambda: epoch_in(logs_of(tmp_path, 3) / "quorum-state") >= first)
        [leader] = quorum.leaders
        if leader is not damaged:
            await leader.stop()
        else:
            await quorum.up[1].stop()
        (leader,) = await until(lambda: quorum.leaders)  # its vote is needed
        await until(lambda: damaged.raft.high_watermark == leader.raft.high_watermark >= 5)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_vote_may_be_lost_that_was_given_before_the_first_record(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await stop_all(quorum)
        directory = logs_of(tmp_path, 3)
        for path in directory.glob("0*"):
            path.unlink()
        (directory / "quorum-state").write_bytes(b"damaged")
        damaged = await Member(quorum, 3).start()
        assert damaged.raft.log.end_offset == 0
        assert damaged.raft.raft.vote_is_unknown
        await stop_all(quorum)

    asyncio.run(run())


def test_it_gives_no_vote_before_and_none_in_an_epoch_in_which_it_may_have_voted(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, damaged = await without_vote(tmp_path, Path.unlink)
        raft = damaged.raft.raft
        own, end = raft.own, OffsetAndEpoch(raft.log.last_epoch, raft.log.end_offset)

        def is_granted(epoch: int, *, pre_vote: bool) -> bool:
            ask = VoteAsk(epoch, ReplicaKey(1), own, end.epoch, end.end_offset, pre_vote)
            answer = raft.on_vote(ask, damaged.raft.now_ms())
            assert answer.error == ErrorCode.NONE
            return answer.granted

        for pre_vote in (True, False):
            assert not is_granted(raft.epoch + 1, pre_vote=pre_vote)
        raft.recover_vote(raft.epoch + 2, damaged.raft.now_ms())
        highest = raft.epoch
        assert not is_granted(highest, pre_vote=False)
        assert is_granted(highest + 1, pre_vote=False)
        damaged.raft.drive()
        await stop_all(quorum)
        again = await Member(quorum, 3).start()
        assert not again.raft.raft.vote_is_unknown
        await stop_all(quorum)

    asyncio.run(run())


def test_it_waits_for_every_other_voter_but_follows_a_leader_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, values, leader, follower, other = await with_stopped_follower(tmp_path)
        (logs_of(tmp_path, follower.node_id) / "quorum-state").write_bytes(b"damaged")
        await other.stop()
        damaged = await Member(quorum, follower.node_id).start()
        leader.raft.append([b"more"], 0)
        await damaged.listener.has([*values, b"more"])
        assert damaged.raft.raft.vote_is_unknown
        await other.start()
        await until(lambda: not damaged.raft.raft.vote_is_unknown)
        await stop_all(quorum)

    asyncio.run(run())


def test_two_voters_without_their_votes_do_not_help_each_other(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, first = await without_vote(tmp_path, Path.unlink)
        (logs_of(tmp_path, 2) / "quorum-state").unlink()
        second = await Member(quorum, 2).start()
        await Member(quorum, 1).start()
        asked = len(quorum.asked)
        await until(lambda: quorum.asked[asked:].count("3>2 FetchRequest") > 2)
        assert first.raft.raft.vote_is_unknown
        assert second.raft.raft.vote_is_unknown
        assert not quorum.leaders
        await stop_all(quorum)

    asyncio.run(run())


def test_a_leader_that_only_a_file_without_a_checksum_names_is_given_up_for_the_one_that_leads(tmp_path: Path) -> None:
    """It asked the wrong voter for records for ever. Kafka writes no checksum."""

    async def run() -> None:
        quorum, values, leader, follower, other = await with_stopped_follower(tmp_path)
        path = logs_of(tmp_path, follower.node_id) / "quorum-state"
        state = json.loads(path.read_text()) | {"leaderId": other.node_id}
        del state["checksum"]
        path.write_text(json.dumps(state))
        again = await Member(quorum, follower.node_id).start()
        assert again.raft.leader_id == other.node_id
        leader.raft.append([b"more"], 0)
        await again.listener.has([*values, b"more"])
        assert again.raft.leader_id == leader.node_id
        await stop_all(quorum)

    asyncio.run(run())


async def write_snapshot(leader: Member, away: Member) -> None:
    """Let the leader's log begin behind the end of another's."""
    for number in range(300):
        last = leader.raft.append([b"%06d" % number * 100], 0)
    await until(lambda: leader.raft.high_watermark > last)
    end = last + 1
    for identity in (SnapshotId(end - 1, leader.raft.epoch), SnapshotId(end, leader.raft.epoch)):
        leader.raft.write_snapshot([], identity, 7, 8)
        leader.raft.snapshot_written(identity)
    assert leader.raft.log.start_offset == end - 1 > away.raft.log.end_offset


@pytest.mark.slow
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_voter_whose_log_is_behind_waits_for_the_voters_that_it_does_not_know(
    tmp_path: Path, is_trimmed: bool
) -> None:
    """It had voted for one that was added while it was away, and asked only those that its own log names."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {}, segment_bytes=1 << 14)
        quorum.format_dynamic(1, 2)
        servers: dict[str, Any] = {
            "bootstrap_servers": [endpoint(1), endpoint(2), endpoint(3)],
            "retention": MetadataRetention(bytes_max=1 << 14),
        }
        members = [await Member(quorum, node_id, **servers).start() for node_id in (1, 2)]
        await committed(quorum, 3)
        (leader,) = await until(lambda: quorum.leaders)
        away = next(member for member in members if member is not leader)
        added = await Member(quorum, 3, **servers).start()
        await until(partial(same_mark, added, leader))
        await away.crash()
        assert (await until_done(add(added), leader.raft.add_voter)).error_code == 0
        if is_trimmed:
            await write_snapshot(leader, away)
        await added.crash()
        (logs_of(tmp_path, away.node_id) / "quorum-state").unlink()
        back = await Member(quorum, away.node_id, **servers).start()
        assert back.raft.voter_ids() == [1, 2]
        assert back.raft.raft.vote_is_unknown
        await asyncio.sleep(2 * PAUSE_S)
        assert back.raft.raft.vote_is_unknown, "the third voter has not answered"
        await Member(quorum, 3, **servers).start()
        await until(lambda: not back.raft.raft.vote_is_unknown)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize(("share", "is_empty"), [(0.02, True), (0.12, False)])
def test_a_voter_whose_damaged_log_names_no_other_waits_for_those_that_the_bootstrap_servers_name(
    tmp_path: Path, share: float, is_empty: bool
) -> None:
    """Its damaged records named them. It asked none, and voted at once. Without any record it looked like a new one."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        await with_added_voters(quorum)
        await committed(quorum, 20)
        await stop_all(quorum)
        (logs_of(tmp_path, 1) / "quorum-state").unlink()
        flip(logs_of(tmp_path, 1), share)
        raft = (await Member(quorum, 1, **SERVERS).start()).raft.raft
        assert raft.voters.latest.ids == [1]
        assert (raft.log.end_offset == 0) is is_empty
        await Member(quorum, 2, **SERVERS).start()
        asked = len(quorum.asked)
        await until(lambda: quorum.asked[asked:].count("1>2 FetchRequest") > 2)
        assert raft.vote_is_unknown
        assert raft.lacks_records
        await Member(quorum, 3, **SERVERS).start()
        await until(lambda: not raft.vote_is_unknown and not raft.lacks_records)
        assert raft.voters.latest.ids == [1, 2, 3]
        await stop_all(quorum)

    asyncio.run(run())
