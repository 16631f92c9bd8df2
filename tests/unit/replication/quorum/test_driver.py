from __future__ import annotations

import asyncio
import errno
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.quorum.quorum_nodes import FAST, THREE, Member, Quorum, endpoint, stop_all, three, until
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.add_raft_voter import AddRaftVoterRequest, Listener
from tidelog.protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumRequestPartitionData,
    DescribeQuorumRequestTopicData,
)
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.protocol.messages.fetch_snapshot import (
    FetchSnapshotRequest,
    FetchSnapshotRequestPartitionSnapshot,
    FetchSnapshotRequestSnapshotId,
    FetchSnapshotRequestTopicSnapshot,
)
from tidelog.protocol.messages.remove_raft_voter import RemoveRaftVoterRequest
from tidelog.replication.quorum.driver import InconsistentVoters, NotLeader
from tidelog.replication.quorum.raft.commit import OBSERVER_SESSION_MS, Progress
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterSet
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.segments.segment import Segment


def test_a_quorum_of_one_leads_without_waiting(tmp_path):
    async def run():
        quorum = Quorum(tmp_path, {})
        began = time.perf_counter()
        member = await Member(quorum, 1, election_timeout_ms=60_000).start()
        await until(lambda: ("lead", 1) in member.listener.told)
        assert time.perf_counter() - began < PATIENCE_S / 2
        assert member.listener.told == [("leader", -1, 1), ("leader", 1, 1), ("lead", 1)]
        last = member.raft.append([b"a", b"b"], 0)
        await until(lambda: member.raft.high_watermark > last)
        await until(lambda: member.listener.values == [b"a", b"b"])
        await member.stop()
        assert member.listener.told[-2:] == [("resign", 1), ("leader", -1, 1)]
        with pytest.raises(NotLeader):
            member.raft.append([b"c"], 0)
        again = await Member(quorum, 1).start()
        await until(lambda: ("lead", 2) in again.listener.told)
        assert again.listener.values == [b"a", b"b"]
        assert quorum.asked == []
        await again.stop()

    asyncio.run(run())


def test_three_elect_one_and_agree(tmp_path):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        for number in range(20):
            leader.raft.append([b"%d" % number], 0)
        expected = [b"%d" % number for number in range(20)]
        await until(lambda: all(member.listener.values == expected for member in members))
        assert {member.raft.leader_id for member in members} == {leader.node_id}
        for member in members:
            if member is not leader:
                with pytest.raises(NotLeader):
                    member.raft.append([b"x"], 0)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_leader_whose_port_refuses_is_replaced_long_before_the_fetch_timeout(tmp_path):
    async def run():
        quorum, members = await three(tmp_path, fetch_timeout_ms=60_000)
        (leader,) = await until(lambda: quorum.leaders)
        last = leader.raft.append([b"kept"], 0)
        await until(lambda: all(member.raft.high_watermark > last for member in members))
        await leader.crash()
        began = time.perf_counter()
        (second,) = await until(lambda: quorum.leaders)
        assert time.perf_counter() - began < PATIENCE_S / 2
        assert second.raft.epoch > leader.raft.epoch
        second.raft.append([b"more"], 0)
        back = await Member(quorum, leader.node_id).start()
        await until(lambda: back.listener.values == [b"kept", b"more"])
        assert quorum.leaders == [second]
        await stop_all(quorum)

    asyncio.run(run())


def test_a_leader_that_closes_hands_over(tmp_path):
    async def run():
        quorum, _ = await three(tmp_path, fetch_timeout_ms=60_000)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(m.raft.high_watermark >= 1 for m in quorum.up.values()))
        began = time.perf_counter()
        await leader.stop()
        await until(lambda: quorum.leaders)
        assert time.perf_counter() - began < PATIENCE_S / 2
        assert any("EndQuorumEpochRequest" in one for one in quorum.asked)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
def test_a_leader_that_hangs_is_replaced_and_steps_down(tmp_path):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(m.raft.high_watermark >= 1 for m in members))
        for member in members:
            await member.expect_leader_within(600)
        quorum.hung.add(leader.node_id)
        others = [member for member in members if member is not leader]
        await until(lambda: any(member.raft.is_leader for member in others))
        lost = leader.raft.append([b"lost"], 0) if leader.raft.is_leader else -1
        await until(lambda: not leader.raft.is_leader)  # check quorum
        await until(lambda: "resign" in [what[0] for what in leader.listener.told])
        for member in members:
            await member.expect_leader_within(FAST["fetch_timeout_ms"])
        (second,) = await until(lambda: [member for member in others if member.raft.is_leader])
        second.raft.append([b"kept"], 0)
        quorum.hung.clear()
        await until(lambda: all(member.listener.values == [b"kept"] for member in members))
        assert lost < leader.raft.high_watermark
        await stop_all(quorum)

    asyncio.run(run())


def test_fetches_of_strangers_are_answered_a_few_in_a_turn_and_those_of_brokers_before_them(tmp_path, monkeypatch):
    """Each record of the metadata answered a thousand at once, which took a second of the leader's loop."""

    async def run():
        quorum = Quorum(tmp_path, {})
        leader = (await Member(quorum, 1).start()).raft
        await until(lambda: leader.is_leader and leader.high_watermark > 0)
        leader.registered_brokers = lambda: {50}
        sizes, woken = [], []
        turn = 0
        with_records = leader._service._with_records

        async def note(ask, *rest):
            woken.append((turn, ask.replica.id))  # a thread reads the records then: several may come in one turn
            return await with_records(ask, *rest)

        async def fetch(replica_id):
            response = await leader.fetch(fetched(replica_id, leader), 13)
            sizes.append(len(response.responses[0].partitions[0].records))

        fetches = [asyncio.create_task(fetch(1000 + number)) for number in range(100)]
        fetches.append(asyncio.create_task(fetch(50)))
        await until(lambda: len(leader._service._parked) == 101)
        monkeypatch.setattr(leader._service, "_with_records", note)
        leader.append([b"a"], 0)
        async with asyncio.timeout(PATIENCE_S):
            while len(sizes) < 101:
                turn += 1
                await asyncio.sleep(0)
        assert 50 in [replica_id for _, replica_id in woken[:11]]
        assert all(sizes)
        turns = [turn for turn, _ in woken]
        assert len(turns) == 101
        assert max(turns.count(each) for each in turns) <= 11
        await asyncio.gather(*fetches)
        await stop_all(quorum)

    asyncio.run(run())


def fetched(replica_id, leader):
    partition = FetchPartition(
        partition=0,
        current_leader_epoch=leader.raft.epoch,
        fetch_offset=leader.log.end_offset,
        last_fetched_epoch=leader.raft.epoch,
        partition_max_bytes=1 << 20,
        high_watermark=leader.high_watermark,
    )
    topic = FetchTopic(topic_id=bytes(15) + b"\1", partitions=[partition])
    return FetchRequest(replica_id=replica_id, max_wait_ms=300_000, min_bytes=0, max_bytes=1 << 20, topics=[topic])


def test_very_many_unknown_observers_are_not_looked_through_for_each_one():
    own = ReplicaKey(1, bytes(16))
    progress = Progress(own, VoterSet(()), 0, 0.0)
    for number in range(100):
        progress.on_fetch(ReplicaKey(100 + number, bytes(16)), 5, 5, 1.0)
    observers = CountingDict(progress._observers)
    progress._observers = observers
    for number in range(100):
        progress.on_fetch(ReplicaKey(300 + number, bytes(16)), 5, 5, 2.0)
    assert observers.walks == 0
    progress.on_fetch(ReplicaKey(500, bytes(16)), 5, 5, OBSERVER_SESSION_MS + 1.5)
    assert [replica.key.id for replica in progress.observers] == [*range(300, 400), 500]


class CountingDict(dict[Any, Any]):
    walks = 0

    def items(self):
        self.walks += 1
        return super().items()


def test_observers_follow_from_leader_to_leader(tmp_path):
    async def run():
        quorum, _ = await three(tmp_path)
        observer = await Member(quorum, 9, can_vote=False).start()
        (leader,) = await until(lambda: quorum.leaders)
        leader.raft.append([b"a"], 0)
        await until(lambda: observer.listener.values == [b"a"])
        await leader.crash()
        (second,) = await until(lambda: quorum.leaders)
        second.raft.append([b"b"], 0)
        await until(lambda: observer.listener.values == [b"a", b"b"])
        request = DescribeQuorumRequest(
            topics=[
                DescribeQuorumRequestTopicData(
                    topic_name="__cluster_metadata", partitions=[DescribeQuorumRequestPartitionData(partition_index=0)]
                )
            ]
        )
        response = await second.raft.describe_quorum(request, 2)
        (data,) = response.topics[0].partitions
        assert (data.error_code, data.leader_id) == (0, second.node_id)
        assert [voter.replica_id for voter in data.current_voters] == [1, 2, 3]
        assert [one.replica_id for one in data.observers] == [9]
        assert [node.node_id for node in response.nodes] == [1, 2, 3]
        await stop_all(quorum)

    asyncio.run(run())


def test_who_was_away_too_long_loads_a_snapshot(tmp_path):
    async def run():
        quorum = Quorum(tmp_path, THREE, segment_bytes=1 << 14)
        retention = MetadataRetention(bytes_max=1 << 14)
        members = [await Member(quorum, node_id, retention=retention).start() for node_id in THREE]
        (leader,) = await until(lambda: quorum.leaders)
        away = next(member for member in members if member is not leader)
        await away.crash()
        values = [b"%06d" % number * 100 for number in range(300)]
        for value in values:
            last = leader.raft.append([value], 0)
        await until(lambda: leader.raft.high_watermark > last)
        earlier, kept, identity = [SnapshotId(end, leader.raft.epoch) for end in (100, last, last + 1)]
        for count, snapshot in ((99, earlier), (-1, kept)):
            leader.raft.write_snapshot(values[:count], snapshot, 7, 8)
            leader.raft.snapshot_written(snapshot)
            assert leader.raft.log.start_offset == 0
        segments = leader.raft.log._log.segment_count
        leader.raft.write_snapshot(values, identity, 7, 8)
        leader.raft.snapshot_written(identity)
        assert leader.raft.log.start_offset == kept.end_offset
        assert leader.raft.log._log.segment_count == 1 < segments
        leader.raft.append([b"behind"], 0)
        back = await Member(quorum, away.node_id).start()
        fresh = await Member(quorum, 9, can_vote=False, snapshot_part_bytes=5000).start()
        for member in (back, fresh):
            await member.listener.has([*values, b"behind"])
            assert ("snapshot", identity) in member.listener.told
            assert list(member.raft.read(0)) == []  # a listener may still be in the middle of them
            assert member.raft.log.start_offset == identity.end_offset
        await back.stop()
        again = await Member(quorum, away.node_id).start()
        await until(lambda: again.listener.values == [*values, b"behind"])
        await stop_all(quorum)

    asyncio.run(run())


def test_a_leader_knows_at_once_that_it_has_lost_its_majority(tmp_path, monkeypatch):
    """After a pause of the process, others may ask before its timer has made it resign."""

    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        assert not any(member.raft.has_lost_majority for member in members)
        later_ms = 2 * leader.raft.settings.fetch_timeout_ms
        for member in members:
            monkeypatch.setattr(member.raft, "now_ms", lambda: asyncio.get_running_loop().time() * 1000 + later_ms)
        assert [member for member in members if member.raft.has_lost_majority] == [leader]
        monkeypatch.undo()
        await stop_all(quorum)

    asyncio.run(run())


def same_mark(one: Member, other: Member) -> bool:
    return one.raft.high_watermark == other.raft.high_watermark


def add(member: Member) -> AddRaftVoterRequest:
    at = endpoint(member.node_id)
    return AddRaftVoterRequest(
        cluster_id=None,
        timeout_ms=5000,
        voter_id=member.node_id,
        voter_directory_id=member.directory.directory_id,
        listeners=[Listener(name="CONTROLLER", host=at.host, port=at.port)],
    )


def remove(member: Member) -> RemoveRaftVoterRequest:
    return RemoveRaftVoterRequest(
        cluster_id=None, voter_id=member.node_id, voter_directory_id=member.directory.directory_id
    )


async def until_done(request, call):
    """As an operator would: again until it is not refused for being early."""
    for _ in range(100):
        response = await call(request, 0)
        if response.error_code != ErrorCode.REQUEST_TIMED_OUT:
            return response
        await asyncio.sleep(0.01)
    return response


@pytest.mark.slow
def test_a_leader_that_cannot_sync_leaves_and_says_so(tmp_path):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(m.raft.high_watermark >= 1 for m in members))
        epoch = leader.raft.epoch

        def failing(work: Any) -> Any:
            task = getattr(work, "__self__", None)
            if isinstance(task, FlushTask):
                task.error = OSError(5, "device is gone")
                return asyncio.sleep(0)
            return asyncio.get_running_loop().run_in_executor(None, work)

        leader.raft._sync._run_in_executor = failing
        for member in members:  # its port does not refuse
            await member.expect_leader_within(600)
        leader.raft.append([b"unsynced"], 0)
        await until(lambda: "failure" in [what[0] for what in leader.listener.told])
        assert ("resign", epoch) in leader.listener.told
        with pytest.raises(NotLeader):
            leader.raft.append([b"more"], 0)
        with pytest.raises(KafkaError, match="the metadata log failed"):
            await leader.raft.describe_quorum(None, 2)
        await until(lambda: any(one is not leader for one in quorum.leaders))
        await leader.crash()
        await stop_all(quorum)

    asyncio.run(run())


def test_a_sync_that_outlasts_its_directory_is_the_last(tmp_path):
    async def run():
        member = await Member(Quorum(tmp_path, {}), 1).start()
        await until(lambda: member.raft.log.synced_offset == member.raft.end_offset and not member.raft._sync._task)
        ends, began = asyncio.Event(), []

        async def held(work: Any) -> None:
            began.append(work)
            await ends.wait()
            work()

        member.raft._sync._run_in_executor = held
        member.raft.append([b"a"], 0)
        await until(lambda: began)
        member.directory.fail("something else in it could not be written")
        ends.set()
        await member.raft.close()
        assert len(began) == 1, "who has failed is written no more"

    asyncio.run(run())


def failures(*members: Member) -> list[Any]:
    return [told for member in members for told in member.listener.told if told[0] == "failure"]


def is_refused(member: Member, name: str = "") -> bool:
    return any(name in path for path in member.quorum.disk(member.node_id).refused)


def test_a_leader_without_descriptors_hands_over_and_stays_a_voter(tmp_path):
    async def run():
        quorum = Quorum(tmp_path, THREE, segment_bytes=1 << 14)
        retention = MetadataRetention(bytes_max=1 << 14)
        members = [await Member(quorum, node_id, retention=retention).start() for node_id in THREE]
        (leader,) = await until(lambda: quorum.leaders)
        kept = [b"%06d" % number * 100 for number in range(10)]
        for value in kept:
            leader.raft.append([value], 0)
        await until(lambda: all(member.listener.values == kept for member in members))
        disk = quorum.disk(leader.node_id)
        disk.code = errno.EMFILE
        for _ in range(100):  # until a new segment is to begin
            with suppress(OSError, NotLeader):
                leader.raft.append([b"x" * 600], 0)
                kept.append(b"x" * 600)
        with pytest.raises(NotLeader):
            leader.raft.append([b"more"], 0)
        (second,) = await until(lambda: [one for one in quorum.leaders if one is not leader])
        kept += [b"%06d" % number * 100 for number in range(50)]
        for value in kept[-50:]:
            second.raft.append([value], 0)
        others = [member for member in members if member is not leader]
        await until(lambda: all(member.listener.values[-1:] == kept[-1:] for member in others))
        assert leader.raft.end_offset < second.raft.end_offset
        disk.code = 0
        await until(lambda: leader.listener.values == second.listener.values)
        assert set(kept) >= set(second.listener.values)
        assert not failures(*members)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_voter_alone_without_descriptors_goes_on_when_it_has_some(tmp_path, code):
    async def run():
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        await until(lambda: member.raft.high_watermark >= 1)
        last = member.raft.append([b"a"], 0)
        await until(lambda: member.raft.high_watermark > last)
        disk = quorum.disk(1)
        disk.code = code
        member.raft.resign()
        await until(lambda: is_refused(member, "quorum-state"))
        await asyncio.sleep(0.05)
        assert not member.raft.is_leader
        disk.code = 0
        await until(lambda: member.raft.is_leader)
        last = member.raft.append([b"b"], 0)
        await until(lambda: member.raft.high_watermark > last)
        await until(lambda: member.listener.values == [b"a", b"b"])
        assert not failures(member)
        await member.stop()

    asyncio.run(run())


def test_what_cannot_be_synced_for_want_of_descriptors_is_not_committed_until_it_is(tmp_path):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(member.raft.log.synced_offset >= 1 for member in members))  # their epochs, too
        short = [member for member in members if member is not leader]
        for member in short:
            plain = member.raft._plain_log
            plain.durability.note_path(f"{plain.directory}/partition.metadata")
            quorum.disk(member.node_id).code = errno.EMFILE
        last = leader.raft.append([b"a"], 0)
        await until(lambda: all(is_refused(member, "partition.metadata") for member in short))
        await asyncio.sleep(0.05)
        assert leader.raft.high_watermark <= last, "no majority has it on the device"
        assert all(member.raft.log.synced_offset <= last for member in short)
        for member in short:
            quorum.disk(member.node_id).code = 0
        await until(lambda: all(member.listener.values == [b"a"] for member in members))
        assert not failures(*members)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_vote_that_cannot_be_written_is_told_to_nobody(tmp_path, code):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(member.raft.high_watermark >= 1 for member in members))
        first, second = [member for member in members if member is not leader]
        disk = quorum.disk(first.node_id)
        disk.code, disk.path = code, "quorum-state"
        await leader.crash()
        await until(lambda: len(disk.refused) > 3 or failures(first))
        assert not quorum.leaders, "one vote of three is none"
        disk.code = 0
        if code == errno.EMFILE:
            await until(lambda: quorum.leaders)
        assert bool(failures(first)) == (code == errno.EIO)
        assert not failures(second)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_log_to_be_cut_without_descriptors(tmp_path, monkeypatch, is_whole):
    """Where the shortage is met before anything was cut, it is cut later; a log that is cut in part is lost."""

    def refuse(segment: Segment, position: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        await until(lambda: all(member.raft.high_watermark >= 1 for member in members))
        others = [member for member in members if member is not leader]
        for member in others:  # the leader itself goes on to lead while nobody hears it
            await member.expect_leader_within(600)
        quorum.hung.add(leader.node_id)
        await until(lambda: not leader.raft._service._parked)
        leader.raft.append([b"lost"], 0)
        await until(lambda: any(member.raft.is_leader for member in others))
        for member in others:
            await member.expect_leader_within(FAST["fetch_timeout_ms"])
        (second,) = await until(lambda: [member for member in others if member.raft.is_leader])
        second.raft.append([b"kept"], 0)
        disk = quorum.disk(leader.node_id)
        if is_whole:
            disk.code, disk.kind = errno.EMFILE, "list_directory"
        else:
            monkeypatch.setattr(Segment, "cut", refuse)
        quorum.hung.clear()
        if is_whole:
            await until(lambda: is_refused(leader))
            disk.code = 0
            await until(lambda: all(member.listener.values == [b"kept"] for member in members))
        else:
            await until(lambda: failures(leader))
        assert bool(failures(*members)) != is_whole
        await stop_all(quorum)

    asyncio.run(run())


def test_voters_come_and_go(tmp_path):
    async def run():
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1).start()
        await until(lambda: first.raft.is_leader)
        joining: dict[str, Any] = {"bootstrap_servers": [endpoint(1)]}
        second, third = [await Member(quorum, node_id, **joining).start() for node_id in (2, 3)]
        for member in (second, third):
            await until(partial(same_mark, member, first))
            response = await until_done(add(member), first.raft.add_voter)
            assert (response.error_code, response.error_message) == (0, None)
        assert (await first.raft.add_voter(add(second), 0)).error_code == ErrorCode.DUPLICATE_VOTER
        first.raft.append([b"of three"], 0)
        await until(lambda: all(m.listener.values == [b"of three"] for m in quorum.up.values()))
        assert all(member.raft.voter_ids() == [1, 2, 3] for member in quorum.up.values())

        # A leader that is removed commits its own leave, and is an observer from then on.
        response = await until_done(remove(first), first.raft.remove_voter)
        assert response.error_code == 0
        (leader,) = await until(lambda: [one for one in (second, third) if one.raft.is_leader])
        leader.raft.append([b"of two"], 0)
        await until(lambda: all(m.listener.values == [b"of three", b"of two"] for m in quorum.up.values()))
        assert first.raft.voter_ids() == [2, 3]
        assert (await leader.raft.remove_voter(remove(first), 0)).error_code == ErrorCode.VOTER_NOT_FOUND

        # All of it is in the log: whoever starts again knows it.
        for member in (first, second, third):
            await member.stop()
        second, third = [await Member(quorum, node_id, **joining).start() for node_id in (2, 3)]
        (leader,) = await until(lambda: quorum.leaders)
        assert leader.raft.voter_ids() == [2, 3]
        await until(lambda: leader.listener.values == [b"of three", b"of two"])
        await stop_all(quorum)

    asyncio.run(run())


def test_others_get_a_change_of_the_voters_as_soon_as_the_leader_has_synced_it(tmp_path):
    """Not before, and not only when the wait of their fetch ends."""

    async def run():
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1).start()
        await until(lambda: first.raft.is_leader)
        joining: dict[str, Any] = {"bootstrap_servers": [endpoint(1)], "fetch_wait_ms": 600_000}
        second = await Member(quorum, 2, **joining).start()
        await until(partial(same_mark, second, first))
        await until(lambda: not first.raft._sync._task)
        begins, ends = asyncio.Event(), asyncio.Event()

        async def held(work: Any) -> None:
            begins.set()
            await ends.wait()
            work()

        first.raft._sync._run_in_executor = held
        fetch = fetched(1000, first.raft)
        fetch.max_wait_ms = 0
        addition = asyncio.ensure_future(until_done(add(second), first.raft.add_voter))
        async with asyncio.timeout(PATIENCE_S):
            await begins.wait()
        assert first.raft.voter_ids() == [1, 2]
        asked = len(quorum.asked)
        await asyncio.sleep(0.1)
        assert second.raft.end_offset < first.raft.end_offset
        assert len(quorum.asked) <= asked + 1, "it waits"
        assert not (await first.raft.fetch(fetch, 13)).responses[0].partitions[0].records
        ends.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await addition).error_code == 0
        assert second.raft.voter_ids() == [1, 2]
        await stop_all(quorum)

    asyncio.run(run())


def test_a_fetch_waits_for_voters_that_are_not_synced_also_below_the_high_watermark(tmp_path):
    """The followers have synced more than their leader. One without that is told of it by each answer, without end."""

    async def run():
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1, 2, 3)
        members = [await Member(quorum, node_id).start() for node_id in (1, 2, 3)]
        (leader,) = await until(lambda: quorum.leaders)
        joining: dict[str, Any] = {"bootstrap_servers": [endpoint(1)], "fetch_wait_ms": 600_000}
        fourth = await Member(quorum, 4, **joining).start()
        await until(lambda: all(same_mark(one, leader) for one in quorum.up.values()))
        await until(lambda: not leader.raft._sync._task)
        ends = asyncio.Event()

        async def held(work: Any) -> None:
            await ends.wait()
            work()

        leader.raft._sync._run_in_executor = held
        last = leader.raft.append([b"not on the leader's device"], 0)
        await until(lambda: all(member.raft.high_watermark > last for member in members))
        addition = asyncio.ensure_future(until_done(add(fourth), leader.raft.add_voter))
        await until(lambda: leader.raft.voter_ids() == [1, 2, 3, 4])
        fifth = await Member(quorum, 5, **joining).start()
        await until(lambda: fifth.raft.end_offset >= last)
        asked = len(quorum.asked)
        await asyncio.sleep(0.1)
        assert len([each for each in quorum.asked[asked:] if each.startswith("5>")]) <= 1, "it waits"
        ends.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await addition).error_code == 0
        await until(partial(same_mark, fifth, leader))
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("removes", [False, True])
def test_a_change_of_voters_that_could_not_be_written_is_not_answered_as_done(tmp_path, monkeypatch, code, removes):
    """The voters before it are committed, and their offset was taken for that of the change."""

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    async def run():
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1).start()
        await until(lambda: first.raft.is_leader)
        second = await Member(quorum, 2, bootstrap_servers=[endpoint(1)]).start()
        await until(partial(same_mark, second, first))
        if removes:
            assert (await until_done(add(second), first.raft.add_voter)).error_code == 0
        voters = first.raft.voter_ids()
        monkeypatch.setattr(first.raft.log, "append_voters", refuse)
        change = first.raft.remove_voter if removes else first.raft.add_voter
        response = await until_done(remove(second) if removes else add(second), change)
        assert first.raft.voter_ids() == voters
        assert response.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        await stop_all(quorum)

    asyncio.run(run())


def test_a_node_that_is_only_a_broker_does_not_become_a_voter(tmp_path):
    """It would count as a voter and never vote."""

    async def run():
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1).start()
        await until(lambda: first.raft.is_leader)
        broker = await Member(quorum, 2, can_vote=False, bootstrap_servers=[endpoint(1)]).start()
        await until(partial(same_mark, broker, first))
        response = await until_done(add(broker), first.raft.add_voter)
        at = endpoint(2)
        assert (response.error_code, response.error_message) == (
            ErrorCode.INVALID_REQUEST, f"{at.host}:{at.port} is no listener of a controller: it takes no votes"
        )  # fmt: skip
        assert first.raft.voter_ids() == [1]
        await stop_all(quorum)

    asyncio.run(run())


def test_static_voters_do_not_change(tmp_path):
    async def run():
        quorum, members = await three(tmp_path)
        (leader,) = await until(lambda: quorum.leaders)
        observer = await Member(quorum, 4).start()
        assert (await leader.raft.add_voter(add(observer), 0)).error_code == ErrorCode.UNSUPPORTED_VERSION
        follower = next(member for member in members if member is not leader)
        assert (await follower.raft.remove_voter(remove(leader), 0)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        await stop_all(quorum)
        quorum.voters = {1: endpoint(1), 2: endpoint(2), 4: endpoint(4)}
        with pytest.raises(InconsistentVoters):
            await Member(quorum, 1).start()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("bytes_max", "position", "error", "has_data"),
    [
        (-1, 0, ErrorCode.NONE, False),
        (0, 0, ErrorCode.NONE, False),
        (2**31 - 1, 0, ErrorCode.NONE, True),
        (10, -(2**63), ErrorCode.POSITION_OUT_OF_RANGE, False),
        (10, 2**63 - 1, ErrorCode.POSITION_OUT_OF_RANGE, False),
    ],
)
def test_no_position_or_size_in_a_snapshot_is_taken_for_a_failing_device(
    tmp_path, bytes_max, position, error, has_data
):
    async def run():
        quorum = Quorum(tmp_path, {1: endpoint(1)})
        member = await Member(quorum, 1).start()
        await until(lambda: quorum.leaders)
        last = member.raft.append([b"value"], 0)
        await until(lambda: member.raft.high_watermark > last)
        identity = SnapshotId(last + 1, member.raft.epoch)
        member.raft.write_snapshot([b"value"], identity, 1, 1)
        member.raft.snapshot_written(identity)
        asked = FetchSnapshotRequestPartitionSnapshot(
            partition=0,
            current_leader_epoch=member.raft.epoch,
            snapshot_id=FetchSnapshotRequestSnapshotId(end_offset=identity.end_offset, epoch=identity.epoch),
            position=position,
        )
        topic = FetchSnapshotRequestTopicSnapshot(name="__cluster_metadata", partitions=[asked])
        request = FetchSnapshotRequest(cluster_id=None, replica_id=5, max_bytes=bytes_max, topics=[topic])
        response = await member.raft.fetch_snapshot(request, 1)
        (answer,) = response.topics[0].partitions
        assert (answer.error_code, len(answer.unaligned_records) > 0) == (error, has_data)
        assert member.raft.is_leader
        await stop_all(quorum)

    asyncio.run(run())
