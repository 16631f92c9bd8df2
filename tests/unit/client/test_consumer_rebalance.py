"""Rebalances that are disturbed: a poll is cancelled, a listener raises, commits meet a group that waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Collection
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import DROP, FakeCluster, FakeNode, FakePartition
from tests.unit.client.test_consumer import T0, T1, consumer, fill, read, until
from tidelog.client import Consumer, ConsumerGroupMetadata, RebalanceListener, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

COOPERATIVE = {"group_id": "g", "partition_assignment_strategy": "cooperative-sticky"}
EVERY_STRATEGY = pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])


class Recorded(RebalanceListener):
    """Records what it is called with; `trouble` runs inside each call."""

    def __init__(self) -> None:
        self.events: list[tuple[str, set[TopicPartition]]] = []

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", set(revoked)))
        await self.trouble("revoked")

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.events.append(("assigned", set(assigned)))
        await self.trouble("assigned")

    async def trouble(self, what: str) -> None:
        return


class Slow(Recorded):
    async def trouble(self, what: str) -> None:
        await asyncio.sleep(0.05)


class Raising(Recorded):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.raised = 0

    async def trouble(self, what: str) -> None:
        if what == self.when and not self.raised:
            self.raised += 1
            raise LookupError(f"the listener's own trouble when {what}")


async def poll_and_cancel(consuming: Consumer, after_s: float) -> None:
    try:
        async with asyncio.timeout(after_s):
            await consuming.poll(1000)
    except TimeoutError:
        pass


class TestACancelledPoll:
    @EVERY_STRATEGY
    async def test_an_assignment_is_taken_on_although_each_poll_is_cancelled_in_the_listener(self, strategy):
        async with FakeCluster(t=2) as cluster:
            options = {"group_id": "g", "partition_assignment_strategy": strategy}
            consuming, listener = consumer(cluster, **options), Slow()
            async with consuming:
                consuming.subscribe(["t"], listener=listener)
                async with asyncio.timeout(PATIENCE_S):
                    while consuming.assignment() != {T0, T1}:
                        await poll_and_cancel(consuming, 0.005)
                    await until(lambda: ("assigned", {T0, T1}) in listener.events)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [0, 1, 2]
                assert listener.events.count(("assigned", {T0, T1})) == 1

    async def test_every_partition_has_a_reader_after_a_cooperative_rebalance_with_cancelled_polls(self):
        async with FakeCluster(t=4) as cluster:
            first, listener = consumer(cluster, **COOPERATIVE), Slow()
            async with first:
                first.subscribe(["t"], listener=listener)
                await until(lambda: len(first.assignment()) == 4, first)
                async with consumer(cluster, "t", **COOPERATIVE) as second:
                    async with asyncio.timeout(PATIENCE_S):
                        while len(first.assignment()) != 2 or len(second.assignment()) != 2:
                            await asyncio.gather(poll_and_cancel(first, 0.01), second.poll(10))
                    assert not first.assignment() & second.assignment()
                    assert first.assignment() | second.assignment() == {TopicPartition("t", n) for n in range(4)}

    async def test_positions_are_committed_before_partitions_go_although_the_poll_is_cancelled_in_the_commit(self):
        async def slowly(request: OffsetCommitRequest, node: FakeNode) -> Any:
            await asyncio.sleep(0.05)
            return node.on_group(request)

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            async with consumer(cluster, "t", group_id="g", auto_commit_interval_ms=600_000) as consuming:
                await read(consuming, 5)  # all: what a poll returns is consumed, and more would be committed
                cluster.script(OffsetCommitRequest, slowly)
                cluster.script(HeartbeatRequest, lambda request, node: HeartbeatResponse(error_code=27))
                await until(lambda: len(cluster.sent(HeartbeatRequest)) > 1)
                before = len(cluster.sent(JoinGroupRequest))
                async with asyncio.timeout(PATIENCE_S):
                    while len(cluster.sent(JoinGroupRequest)) == before:
                        await poll_and_cancel(consuming, 0.005)
                assert cluster.groups.group("g").offsets["t", 0][0] == 5


class TestAListenerThatRaises:
    @EVERY_STRATEGY
    @pytest.mark.parametrize("when", ["assigned", "revoked"])
    async def test_the_poll_raises_once_and_the_group_goes_on(self, strategy, when):
        async with FakeCluster(t=4) as cluster:
            options = {"group_id": "g", "partition_assignment_strategy": strategy}
            first, listener = consumer(cluster, **options), Raising(when)
            async with first, consumer(cluster, "t", **options) as second:
                first.subscribe(["t"], listener=listener)
                raised = 0

                async def poll_first() -> None:
                    nonlocal raised
                    try:
                        await first.poll(20)
                    except LookupError:
                        raised += 1

                async with asyncio.timeout(PATIENCE_S):
                    while len(first.assignment()) != 4:
                        await poll_first()
                    while len(first.assignment()) != 2 or len(second.assignment()) != 2:
                        await asyncio.gather(poll_first(), second.poll(20))
                    while not raised:
                        await poll_first()
                assert raised == listener.raised == 1
                assert first.assignment() | second.assignment() == {TopicPartition("t", n) for n in range(4)}

    async def test_closing_leaves_the_group_all_the_same(self):
        async with FakeCluster(t=1) as cluster:
            consuming, listener = consumer(cluster, group_id="g"), Raising("revoked")
            await consuming.start()
            consuming.subscribe(["t"], listener=listener)
            await until(lambda: consuming.assignment(), consuming)
            with pytest.raises(LookupError):
                await consuming.close()
            assert cluster.sent(LeaveGroupRequest)
            heartbeats = len(cluster.sent(HeartbeatRequest))
            await asyncio.sleep(0.1)
            assert len(cluster.sent(HeartbeatRequest)) <= heartbeats + 1

    @pytest.mark.parametrize("call", ["poll", "close", "unsubscribe"])
    async def test_a_call_that_would_wait_for_its_own_listener_is_refused(self, call):
        async with FakeCluster(t=1) as cluster, consumer(cluster, group_id="g") as consuming:

            class Reentrant(Recorded):
                async def trouble(self, what: str) -> None:
                    if what == "assigned":
                        await asyncio.wait_for(getattr(consuming, call)(), PATIENCE_S)

            consuming.subscribe(["t"], listener=Reentrant())
            with pytest.raises(RuntimeError, match=rf"{call}\(\) cannot be called in a rebalance listener"):
                await until(lambda: False, consuming)
            assert consuming.assignment() == {T0}

    async def test_a_listener_that_closes_the_consumer_while_close_calls_it_is_refused(self):
        async with FakeCluster(t=1) as cluster:
            consuming = consumer(cluster, group_id="g")

            class Reentrant(Recorded):
                async def trouble(self, what: str) -> None:
                    if what == "revoked":
                        await asyncio.gather(consuming.close())  # in a task of the listener

            consuming.subscribe(["t"], listener=Reentrant())
            await until(lambda: consuming.assignment(), consuming)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(RuntimeError, match=r"close\(\) cannot be called in a rebalance listener"):
                    await consuming.close()
                await consuming.close()


class TestMembershipThatIsLost:
    async def test_an_assignment_of_a_membership_that_was_lost_since_is_not_taken_on(self):
        async with FakeCluster(t=1) as cluster:
            consuming, listener = consumer(cluster, **COOPERATIVE), Recorded()
            async with consuming:
                consuming.subscribe(["t"], listener=listener)
                await consuming.poll(0)
                await until(lambda: cluster.sent(HeartbeatRequest))
                [member] = cluster.groups.group("g").members
                cluster.groups.expel("g", member)
                heartbeats = len(cluster.sent(HeartbeatRequest))
                await until(lambda: len(cluster.sent(HeartbeatRequest)) > heartbeats)
                await asyncio.sleep(0.05)
                await consuming.poll(0)
                assert consuming.assignment() == set(), "the group has given it to another member by now"
                await until(lambda: consuming.assignment() == {T0}, consuming)

    async def test_a_fenced_static_member_raises_in_every_poll_and_joins_no_more(self):
        async with FakeCluster(t=1) as cluster:
            options = {"group_id": "g", "group_instance_id": "i"}
            async with consumer(cluster, "t", **options) as consuming:
                await until(lambda: consuming.assignment() == {T0}, consuming)
                fenced = HeartbeatResponse(error_code=ErrorCode.FENCED_INSTANCE_ID)
                cluster.script(HeartbeatRequest, lambda request, node: fenced)
                joins = len(cluster.sent(JoinGroupRequest))
                with pytest.raises(KafkaError) as caught:
                    await until(lambda: False, consuming)
                assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID
                depths = []
                for _ in range(5):
                    with pytest.raises(KafkaError) as caught:
                        await consuming.poll(20)
                    assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID
                    depths.append(len(caught.traceback))
                assert len(set(depths)) == 1, "each error has the traceback of its own poll"
                assert len(cluster.sent(JoinGroupRequest)) == joins
                assert consuming.assignment() == set()

    async def test_the_commits_of_a_fenced_static_member_fail_as_fenced_and_advise_an_id_of_its_own(self):
        async with (
            FakeCluster(t=1) as cluster,
            consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming,
        ):
            await until(lambda: consuming.assignment() == {T0}, consuming)
            row = OffsetCommitResponsePartition(error_code=ErrorCode.FENCED_INSTANCE_ID)
            fenced = OffsetCommitResponse(topics=[OffsetCommitResponseTopic(name="t", partitions=[row])])
            cluster.script(OffsetCommitRequest, lambda request, node: fenced)
            for _ in range(2):  # the broker refuses the first, the consumer itself the second
                with pytest.raises(KafkaError, match="group_instance_id of its own") as caught:
                    await consuming.commit({T0: 5})
                assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID
            with pytest.raises(KafkaError) as caught:
                consuming.group_metadata()
            assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID
            assert len(cluster.sent(OffsetCommitRequest)) == 1

    async def test_a_static_member_that_is_fenced_while_it_joins_joins_no_more(self):
        async with FakeCluster(t=1) as cluster:
            fenced = JoinGroupResponse(error_code=ErrorCode.FENCED_INSTANCE_ID)
            cluster.script(JoinGroupRequest, lambda request, node: fenced)
            async with consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming:
                for _ in range(5):
                    with pytest.raises(KafkaError) as caught:
                        await until(lambda: False, consuming)
                    assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID
                assert len(cluster.sent(JoinGroupRequest)) == 1

    @pytest.mark.parametrize("has_answer", [True, False])
    async def test_a_static_member_drops_an_id_that_only_a_replaced_coordinator_knows(self, has_answer):
        """A coordinator that had hung took it for new and answered its JoinGroup; the next one fenced it for good."""
        moved = SyncGroupResponse(error_code=ErrorCode.NOT_COORDINATOR)
        async with (
            FakeCluster(t=1) as cluster,
            consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming,
        ):
            cluster.script(SyncGroupRequest, lambda request, node: moved if has_answer else DROP)
            await until(lambda: consuming.assignment() == {T0}, consuming)
            assert [request.member_id for request in cluster.sent(JoinGroupRequest)][:2] == ["", ""]

    async def test_an_id_that_joined_again_before_its_coordinator_was_replaced_is_dropped_too(self):
        again = SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        moved = SyncGroupResponse(error_code=ErrorCode.NOT_COORDINATOR)
        async with (
            FakeCluster(t=1) as cluster,
            consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming,
        ):
            cluster.script(SyncGroupRequest, lambda request, node: again, lambda request, node: moved)
            await until(lambda: consuming.assignment() == {T0}, consuming)
            names = [request.member_id for request in cluster.sent(JoinGroupRequest)]
            assert [bool(name) for name in names[:3]] == [False, True, False]

    async def test_a_static_member_keeps_the_id_that_the_next_coordinator_knows(self):
        moved = SyncGroupResponse(error_code=ErrorCode.NOT_COORDINATOR)
        rebalance = HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        async with (
            FakeCluster(t=1) as cluster,
            consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming,
        ):
            await until(lambda: consuming.assignment() == {T0}, consuming)
            joins = len(cluster.sent(JoinGroupRequest))
            cluster.script(SyncGroupRequest, lambda request, node: moved)
            cluster.script(HeartbeatRequest, lambda request, node: rebalance)
            await until(lambda: len(cluster.sent(JoinGroupRequest)) >= joins + 2, consuming)
            assert all(request.member_id for request in cluster.sent(JoinGroupRequest)[joins:])

    async def test_a_commit_without_a_membership_is_refused_here(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
            with pytest.raises(KafkaError) as caught:
                await consuming.commit({T0: 5})
            assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
            assert not cluster.sent(OffsetCommitRequest), "the broker would take it for a consumer without a group"

    async def test_a_refused_commit_whose_caller_was_cancelled_is_no_error_of_the_program(self):
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await consuming.commit({T0: 5})
            (await consuming.commit_async({T0: 5})).cancel()
            await asyncio.sleep(0)
            gc.collect()
        assert not problems

    async def test_a_transaction_is_told_the_membership_and_nothing_without_one(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
            with pytest.raises(KafkaError) as caught:
                consuming.group_metadata()
            assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID, "without a generation no broker checks it"
            await until(lambda: consuming.assignment() == {T0}, consuming)
            metadata = consuming.group_metadata()
            assert metadata.group_id == "g"
            assert metadata.generation_id == cluster.groups.group("g").generation
            assert metadata.member_id in cluster.groups.group("g").members

    async def test_assigned_partitions_are_committed_without_a_membership(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, group_id="g") as consuming:
            consuming.assign([T0])
            await consuming.poll()
            assert consuming.group_metadata() == ConsumerGroupMetadata("g")


async def test_a_partition_that_is_added_while_the_leader_waits_for_its_assignment_is_dealt_out_too():
    async def add_one_meanwhile(request: Any, node: FakeNode) -> Any:
        cluster.topics["t"].append(FakePartition(1))
        assert consuming._cluster is not None
        assert await consuming._cluster.wait_for_metadata(PATIENCE_S * 1000)
        return await node.on_group(request)

    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
        cluster.script(SyncGroupRequest, add_one_meanwhile)
        await until(lambda: consuming.assignment() == {T0, T1}, consuming)


class TestCommitsWhileTheGroupWaits:
    @pytest.mark.parametrize("waiting", [JoinGroupRequest, SyncGroupRequest])
    async def test_a_commit_does_not_wait_behind_the_join(self, waiting):
        released = asyncio.Event()

        async def hold(request: Any, node: FakeNode) -> Any:
            await released.wait()
            answer = node.on_group(request)
            return await answer

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            options = {**COOPERATIVE, "enable_auto_commit": False, "default_api_timeout_ms": 5_000}
            async with consumer(cluster, "t", **options) as consuming:
                assert await read(consuming, 5) == [0, 1, 2, 3, 4]
                cluster.script(waiting, hold)
                before = len(cluster.sent(waiting))
                cluster.script(HeartbeatRequest, lambda request, node: HeartbeatResponse(error_code=27))
                await until(lambda: len(cluster.sent(waiting)) > before, consuming)
                if waiting is JoinGroupRequest:
                    await asyncio.wait_for(consuming.commit(), PATIENCE_S)
                    assert cluster.groups.group("g").offsets["t", 0][0] == 5
                else:
                    await asyncio.wait_for(consuming.commit({T0: 5}), PATIENCE_S)
                assert len(cluster.sent(waiting)) == before + 1, "the join was not cut"
                released.set()
                fill(cluster, "t", 0, 2)
                assert await read(consuming, 2) == [5, 6]


class Clearing(RebalanceListener):
    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        assert isinstance(revoked, list)
        revoked.clear()


async def test_a_listener_may_change_the_list_of_partitions_that_it_is_given():
    async with FakeCluster(t=1, u=1) as cluster, consumer(cluster, **COOPERATIVE) as consuming:
        consuming.subscribe(["t"])
        await until(lambda: consuming.assignment() == {T0}, consuming)
        joining: list[set[TopicPartition]] = []

        def note(request: Any, node: FakeNode) -> Any:
            joining.append(consuming.assignment())
            return node.on_group(request)

        cluster.script(JoinGroupRequest, note)
        consuming.subscribe(["u"], listener=Clearing())
        await until(lambda: joining, consuming)
        assert joining == [set()]
