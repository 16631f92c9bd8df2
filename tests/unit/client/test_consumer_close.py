"""The end of a consumer, called from another task than the one that reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import SILENCE, FakeCluster
from tests.unit.client.test_consumer import T0, consumer, fill, read, until
from tests.unit.client.test_starts_and_ends import tasks_of_clients
from tidelog.client import Consumer, RebalanceListener, TopicPartition
from tidelog.client.groups import leave_limit, membership
from tidelog.client.network.cluster import COORDINATOR
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest

SOON_S = 20.0
"""Well under the minute for which a poll of an iteration waits."""


def held(cluster: FakeCluster, request_type: Any, answer: Callable[[Any, Any], Any]) -> asyncio.Event:
    """The next request of this type is answered once the event is set."""
    gate = asyncio.Event()

    async def hold(request: Any, node: Any) -> Any:
        await gate.wait()
        return answer(request, node)

    cluster.script(request_type, hold)
    return gate


@pytest.mark.parametrize("group", [None, "g"])
async def test_an_iteration_ends_when_another_task_closes_the_consumer(group):
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, "t", group_id=group)
        seen: list[int] = []

        async def work() -> None:
            async for record in consuming:
                seen.append(record.offset)  # noqa: PERF401 (read while it grows)

        working = asyncio.create_task(work())
        await until(lambda: len(seen) == 2)
        await consuming.close()
        await asyncio.wait_for(working, SOON_S)
        assert seen == [0, 1]


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_poll_under_way_returns_nothing_and_the_next_one_is_refused(group):
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, "t", group_id=group)
        polling = asyncio.create_task(consuming.poll(120_000))
        await until(lambda: consuming.assignment() or group)
        await asyncio.sleep(0.05)
        await consuming.close()
        assert await asyncio.wait_for(polling, SOON_S) == {}
        with pytest.raises(RuntimeError, match="closed"):
            await consuming.poll()
        with pytest.raises(RuntimeError, match="closed"):
            async for _ in consuming:
                pass


async def test_closing_while_the_start_is_under_way_leaves_nothing_behind():
    async with FakeCluster(t=1) as cluster:
        gate = held(cluster, MetadataRequest, lambda request, node: node.on_metadata(request))
        before = asyncio.all_tasks()
        consuming = consumer(cluster, "t")
        starting = asyncio.create_task(consuming.start())
        await until(lambda: cluster.sent(MetadataRequest))
        await consuming.close()
        gate.set()
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(starting, PATIENCE_S)
        left = {task for task in asyncio.all_tasks() - before if "StreamServer" not in repr(task)}
        assert not left


async def test_a_poll_that_waits_for_the_start_returns_nothing_when_another_task_closes():
    async with FakeCluster(t=1) as cluster:
        gate = held(cluster, MetadataRequest, lambda request, node: node.on_metadata(request))
        consuming = consumer(cluster, "t")
        polling = asyncio.create_task(consuming.poll(120_000))
        await until(lambda: cluster.sent(MetadataRequest))
        await consuming.close()
        gate.set()
        assert await asyncio.wait_for(polling, PATIENCE_S) == {}


async def test_two_tasks_that_start_it_at_once_make_one_client():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        async with consumer(cluster) as consuming:
            consuming.assign([T0])
        consuming = consumer(cluster)
        consuming.assign([T0])
        await asyncio.gather(*(consuming.start() for _ in range(5)))
        assert cluster.nodes[1].connections == 1
        assert await read(consuming, 2) == [0, 1]
        await consuming.close()
        await until(lambda: not cluster.nodes[1].connections)


async def test_a_position_that_is_waited_for_ends_with_the_consumer():
    async with FakeCluster(t=1) as cluster:
        cluster.script(ListOffsetsRequest, lambda request, node: SILENCE)
        consuming = consumer(cluster)
        consuming.assign([T0])
        finding = asyncio.create_task(consuming.position(T0))
        await until(lambda: cluster.sent(ListOffsetsRequest))
        await consuming.close()
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(finding, SOON_S)


async def test_a_subscription_made_before_an_unsubscribing_that_nobody_waits_for_has_ended_stands():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 3)
        async with consumer(cluster, "t", group_id="g") as consuming:
            assert await read(consuming, 3) == [0, 1, 2]
            gate = held(cluster, OffsetCommitRequest, lambda request, node: node.on_group(request))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consuming.unsubscribe(), 0.01)
            consuming.subscribe(["t"])
            gate.set()
            await until(lambda: consuming.assignment() == {T0}, consuming)
            await until(lambda: cluster.sent(LeaveGroupRequest), consuming)
            fill(cluster, "t", 0, 3)
            assert await read(consuming, 3) == [3, 4, 5]


async def test_unsubscribing_is_done_although_the_caller_is_cancelled():
    async with FakeCluster(t=1) as cluster:

        async def slowly(request, node):
            await asyncio.sleep(0.05)
            return node.on_group(request)

        async with consumer(cluster, "t", group_id="g") as consuming:
            await until(lambda: consuming.assignment(), consuming)
            cluster.script(LeaveGroupRequest, slowly)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consuming.unsubscribe(), 0.01)
            await until(lambda: cluster.sent(LeaveGroupRequest))
            assert consuming.assignment() == set()
            consuming.subscribe(["t"])
            await until(lambda: consuming.assignment() == {T0}, consuming)


@pytest.mark.parametrize("way", ["close", "unsubscribe"])
async def test_a_consumer_that_ends_before_its_member_id_arrives_leaves_the_group_with_it(way: str) -> None:
    """A rebalance of the others would wait for it until its session timeout."""
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
        answer = JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id="late")
        gate = held(cluster, JoinGroupRequest, lambda request, node: answer)
        await until(lambda: cluster.sent(JoinGroupRequest), consuming)
        ending = asyncio.create_task(getattr(consuming, way)())
        await asyncio.sleep(0.05)
        assert not ending.done()
        gate.set()
        await asyncio.wait_for(ending, SOON_S)
        (request,) = cluster.sent(LeaveGroupRequest)
        assert [member.member_id for member in request.members] == ["late"]
        assert len(cluster.sent(JoinGroupRequest)) == 1


async def test_a_consumer_does_not_wait_long_for_its_member_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_MEMBER_ID_WAIT_S", 0.05)
    before = tasks_of_clients()
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, "t", group_id="g")
        cluster.script(JoinGroupRequest, lambda request, node: SILENCE)
        await until(lambda: cluster.sent(JoinGroupRequest), consuming)
        await asyncio.wait_for(consuming.close(), SOON_S)
        assert not cluster.sent(LeaveGroupRequest)
        assert tasks_of_clients() == before


@pytest.mark.parametrize("silent", [OffsetCommitRequest, LeaveGroupRequest])
async def test_a_broker_that_does_not_answer_is_waited_for_as_long_as_the_caller_says(silent):
    """Java's `close(Duration)`; the listener is told all the same."""
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        revoked: list[object] = []

        class Listener(RebalanceListener):
            async def on_partitions_revoked(self, partitions):
                revoked.append(partitions)

        consuming = consumer(cluster, group_id="g", request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        consuming.subscribe(["t"], listener=Listener())
        assert await read(consuming, 2) == [0, 1]
        cluster.script(silent, lambda request, node: SILENCE)
        await asyncio.wait_for(consuming.close(timeout_ms=100), SOON_S)
        await until(lambda: cluster.sent(silent) and cluster.sent(LeaveGroupRequest))
        assert revoked == [[T0]]


async def test_a_listener_may_seek_and_pause_and_commit_also_while_the_consumer_closes():
    """In Java a consumer counts as closed once `close` has ended."""
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, group_id="g", enable_auto_commit=False)
        positions: list[int] = []

        class Listener(RebalanceListener):
            async def on_partitions_revoked(self, partitions):
                consuming.pause(T0)
                consuming.resume(T0)
                consuming.seek(T0, 1)
                positions.append(await consuming.position(T0))
                await consuming.commit({T0: 1})

        consuming.subscribe(["t"], listener=Listener())
        assert await read(consuming, 2) == [0, 1]
        await consuming.close()
        assert positions == [1]
        assert cluster.groups.group("g").offsets["t", 0][0] == 1
        for call in (lambda: consuming.seek(T0, 0), lambda: consuming.pause(T0), lambda: consuming.resume(T0)):
            with pytest.raises(RuntimeError, match="closed"):
                call()


async def test_a_consumer_whose_broker_has_died_closes_in_time():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, "t", group_id="g", request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        assert await read(consuming, 2) == [0, 1]
        for node in cluster.nodes.values():
            await node.stop()
        await asyncio.wait_for(consuming.close(timeout_ms=100), SOON_S)


async def test_a_second_close_waits_for_the_first_as_long_as_its_own_limit_says():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, "t", group_id="g", request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        assert await read(consuming, 2) == [0, 1]
        cluster.script(LeaveGroupRequest, lambda request, node: SILENCE)
        first = asyncio.create_task(consuming.close(timeout_ms=600_000))
        await until(lambda: cluster.sent(LeaveGroupRequest))
        await asyncio.wait_for(consuming.close(timeout_ms=10), SOON_S)
        assert not first.done()
        first.cancel()
        await asyncio.wait([first])


class Noting(RebalanceListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, list[TopicPartition]]] = []

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", sorted(revoked)))

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.events.append(("assigned", sorted(assigned)))


@pytest.mark.parametrize("end", ["poll", "close", "unsubscribe"])
async def test_a_poll_does_not_wait_beyond_its_time_for_the_commit_of_a_rebalance(end):
    """The rest of the rebalance, which changes the assignment, waits for the next poll."""
    async with FakeCluster(t=1, u=1) as cluster:
        fill(cluster, "t", 0, 2)
        listener = Noting()
        consuming = consumer(cluster, group_id="g", request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        consuming.subscribe(["t"], listener=listener)
        assert await read(consuming, 2) == [0, 1]
        gate = held(cluster, OffsetCommitRequest, lambda request, node: node.on_group(request))
        before = listener.events.copy()
        consuming.subscribe(["t", "u"], listener=listener)
        for timeout_ms in (0, 10, 0, 10):
            assert await asyncio.wait_for(consuming.poll(timeout_ms), SOON_S) == {}
        assert len(cluster.sent(OffsetCommitRequest)) == 1
        gate.set()
        await asyncio.sleep(0.05)
        assert consuming.assignment() == {T0}, "it changed outside of a poll"
        assert listener.events == before
        if end == "poll":
            await until(lambda: len(consuming.assignment()) == 2, consuming)
            assert ("revoked", [T0]) in listener.events
            committed = (await consuming.committed(T0))[T0]
            assert committed is not None
            assert committed.offset == 2
        elif end == "unsubscribe":
            await asyncio.wait_for(consuming.unsubscribe(), SOON_S)
            assert consuming.assignment() == set()
        await asyncio.wait_for(consuming.close(), SOON_S)
        assert ("revoked", [T0]) in listener.events


class Slow(Noting):
    """Notes the end of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.begun = 0

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:  # type: ignore[override]
        self.begun += 1
        await self.gate.wait()
        super().on_partitions_revoked(revoked)


async def reading_member(cluster: FakeCluster, listener: RebalanceListener) -> Consumer:
    """A member that sends nothing by itself: after SILENCE the answer to a heartbeat would be out of turn."""
    fill(cluster, "t", 0, 2)
    intervals = {"heartbeat_interval_ms": 600_000, "session_timeout_ms": 900_000, "auto_commit_interval_ms": 600_000}
    consuming = consumer(cluster, group_id="g", request_timeout_ms=600_000, **intervals)
    consuming.subscribe(["t"], listener=listener)
    assert await read(consuming, 2) == [0, 1]
    return consuming


@pytest.mark.parametrize("passes", [*range(1, 8), None])
async def test_a_close_that_is_cancelled_sends_all_and_calls_the_listener(passes: int | None) -> None:
    """It went straight to disconnecting: the next member waited for the session timeout."""
    async with FakeCluster(t=1) as cluster:
        listener = Noting()
        consuming = await reading_member(cluster, listener)
        for request_type in (OffsetCommitRequest, LeaveGroupRequest):
            cluster.script(request_type, lambda request, node: SILENCE)
        closing = asyncio.create_task(consuming.close(timeout_ms=600_000))
        if passes is None:
            await until(lambda: cluster.sent(OffsetCommitRequest))
        else:
            for _ in range(passes):
                await asyncio.sleep(0)
        closing.cancel()
        async with asyncio.timeout(SOON_S):
            await asyncio.wait([closing])
            await consuming.close()
        assert closing.cancelled()
        assert listener.events[-1] == ("revoked", [T0])
        await until(lambda: cluster.sent(OffsetCommitRequest))
        await until(lambda: cluster.sent(LeaveGroupRequest))
        assert not tasks_of_clients()


async def without_coordinator_connection(consuming: Consumer) -> None:
    """As after its loss, between two heartbeats."""
    assert consuming._cluster is not None
    (node_id,) = consuming._cluster.metadata.nodes
    (await consuming._cluster.connection(node_id, COORDINATOR)).close()


async def test_a_close_that_is_cancelled_connects_to_the_coordinator() -> None:
    """Without a connection it sent nothing: the next member read again what was not committed, after the timeout of
    the session.
    """
    async with FakeCluster(t=1) as cluster:
        consuming = await reading_member(cluster, Noting())
        await without_coordinator_connection(consuming)
        closing = asyncio.create_task(consuming.close(timeout_ms=600_000))
        await asyncio.sleep(0)
        closing.cancel()
        async with asyncio.timeout(SOON_S):
            await asyncio.wait([closing])
        assert closing.cancelled()
        await until(lambda: cluster.sent(OffsetCommitRequest))
        await until(lambda: cluster.sent(LeaveGroupRequest))
        assert not tasks_of_clients()


async def test_a_close_that_is_cancelled_waits_only_a_little_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_limit, "CUT_CONNECTION_S", 0.05)
    async with FakeCluster(t=1) as cluster:
        consuming = await reading_member(cluster, Noting())
        await without_coordinator_connection(consuming)
        earlier = len(cluster.sent(ApiVersionsRequest))
        cluster.script(ApiVersionsRequest, lambda request, node: SILENCE)
        closing = asyncio.create_task(consuming.close(timeout_ms=600_000))
        await until(lambda: len(cluster.sent(ApiVersionsRequest)) > earlier)
        closing.cancel()
        async with asyncio.timeout(SOON_S):
            await asyncio.wait([closing])
        assert closing.cancelled()
        assert not tasks_of_clients()


@pytest.mark.parametrize("limit_s", [SOON_S, 0.05])
async def test_a_listener_that_runs_when_a_close_is_cancelled_has_some_time(
    limit_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leave_limit, "CUT_LISTENER_S", limit_s)
    async with FakeCluster(t=1) as cluster:
        listener = Slow()
        consuming = await reading_member(cluster, listener)
        closing = asyncio.create_task(consuming.close(timeout_ms=600_000))
        await until(lambda: listener.begun)
        closing.cancel()
        is_cut = limit_s < 1
        if not is_cut:
            asyncio.get_running_loop().call_later(0.1, listener.gate.set)
        async with asyncio.timeout(SOON_S):
            await asyncio.wait([closing])
        assert closing.cancelled()
        assert (listener.events[-1] == ("revoked", [T0])) is not is_cut
        assert ("the listener was cancelled" in caplog.text) is is_cut
        assert listener.begun == 1
        await until(lambda: cluster.sent(LeaveGroupRequest))


async def test_the_listener_of_a_rebalance_ends_when_a_close_is_cancelled() -> None:
    async with FakeCluster(t=1, u=1) as cluster:
        listener = Slow()
        consuming = await reading_member(cluster, listener)
        consuming.subscribe(["t", "u"], listener=listener)
        polling = asyncio.create_task(consuming.poll(600_000))
        await until(lambda: listener.begun)
        closing = asyncio.create_task(consuming.close(timeout_ms=600_000))
        await asyncio.sleep(0.05)
        closing.cancel()
        asyncio.get_running_loop().call_later(0.1, listener.gate.set)
        async with asyncio.timeout(SOON_S):
            await asyncio.wait([closing, polling])
        assert closing.cancelled()
        assert (listener.begun, listener.events[-1]) == (1, ("revoked", [T0]))
        await until(lambda: cluster.sent(LeaveGroupRequest))


@pytest.mark.parametrize("passes", range(1, 5))
async def test_a_close_that_is_cancelled_twice_leaves_no_task(passes: int) -> None:
    """The second cancellation ended the wait for a lookup, and the heartbeats of the group went on for good."""
    async with FakeCluster(t=1) as cluster:
        consuming = consumer(cluster, "t", group_id="g")
        gate = held(cluster, ListOffsetsRequest, lambda request, node: node.on_list_offsets(request))
        await until(lambda: cluster.sent(ListOffsetsRequest), consuming)
        closing = asyncio.create_task(consuming.close())
        for _ in range(2):
            for _ in range(passes):
                await asyncio.sleep(0)
            closing.cancel()
        await asyncio.wait([closing])
        async with asyncio.timeout(PATIENCE_S):
            await consuming.close()
        assert not tasks_of_clients()
        gate.set()


@pytest.mark.parametrize("is_starting", [False, True])
async def test_close_does_not_wait_after_a_consumer_without_a_connection_was_abandoned(is_starting):
    consuming = Consumer("t", bootstrap_servers="127.0.0.1:1")
    start = asyncio.ensure_future(consuming.start()) if is_starting else None
    await asyncio.sleep(0)
    await consuming.abandon()
    await asyncio.wait_for(consuming.close(timeout_ms=10 * PATIENCE_S * 1000), PATIENCE_S)
    if start is not None:
        with pytest.raises(RuntimeError, match="closed"):
            await start
