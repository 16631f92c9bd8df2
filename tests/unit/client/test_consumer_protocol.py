"""The consumer in a group of the consumer protocol (KIP-848): reconciliation, commits, fencing, leaving."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster
from tests.unit.client.test_consumer import T0, T1, fill, read
from tidelog.client import Consumer, RebalanceListener, TopicPartition
from tidelog.client.groups.consumer_member import ConsumerMember, TopicSelection
from tidelog.client.groups.consumer_membership import ConsumerMembership
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest

FAST = {
    "retry_backoff_ms": 5,
    "retry_backoff_max_ms": 10,
    "reconnect_backoff_ms": 5,
    "reconnect_backoff_max_ms": 10,
    "fetch_max_wait_ms": 30,
    "auto_offset_reset": "earliest",
    "group_id": "g",
    "group_protocol": "consumer",
}


def consumer(cluster: FakeCluster, *topics: str, **options: Any) -> Consumer:
    return Consumer(*topics, **{"bootstrap_servers": cluster.bootstrap, **FAST, **options})


class Recorder(RebalanceListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, set[TopicPartition]]] = []

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", set(revoked)))

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.events.append(("assigned", set(assigned)))

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        self.events.append(("lost", set(lost)))


async def poll_until(condition: Any, *members: Consumer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            for member in members:
                await member.poll(5)


def member_of(cluster: FakeCluster) -> Any:
    (member,) = cluster.consumer_groups.group("g").members.items()
    return member


async def test_two_members_share_and_one_takes_over() -> None:
    async with FakeCluster(t=2) as cluster:
        fill(cluster, "t", 0, 10)
        fill(cluster, "t", 1, 10)
        recorder = Recorder()
        async with consumer(cluster) as first:
            first.subscribe(["t"], listener=recorder)
            assert len(await read(first, 20)) == 20
            async with consumer(cluster, "t") as second:
                await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
                assert first.assignment() | second.assignment() == {T0, T1}
                # The second begins where the first has committed before it gave its partition up.
                (taken,) = second.assignment()
                assert await second.position(taken) == 10
            await poll_until(lambda: len(first.assignment()) == 2, first)
        (shared,) = {T0, T1} - {taken}
        assert recorder.events == [
            ("assigned", {T0, T1}),
            ("revoked", {taken}),
            ("assigned", set()),
            ("assigned", {taken}),
            ("revoked", {taken, shared}),
        ]


async def test_partitions_are_given_up_after_the_commit_and_the_listener() -> None:
    """Until the acknowledgement no other member has them."""
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t") as second:
        fill(cluster, "t", 0, 5)
        fill(cluster, "t", 1, 5)
        seen: list[Any] = []

        class Watching(RebalanceListener):
            async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
                committed = cluster.groups.group("g").offsets
                for _ in range(5):
                    await second.poll(5)
                seen.append((set(revoked), {each: committed.get(each, (-1, ""))[0] for each in revoked}))
                assert not second.assignment() & set(revoked)

        async with consumer(cluster) as first:
            first.subscribe(["t"], listener=Watching())
            assert len(await read(first, 10)) == 10
            await poll_until(lambda: second.assignment(), first, second)
            ((revoked, committed),) = seen
            assert committed == dict.fromkeys(revoked, 5)


async def test_a_fenced_member_loses_all_and_joins_again_from_what_was_committed() -> None:
    async with FakeCluster(t=2) as cluster:
        fill(cluster, "t", 0, 5)
        recorder = Recorder()
        async with consumer(cluster, enable_auto_commit=False) as reading:
            reading.subscribe(["t"], listener=recorder)
            await read(reading, 5)
            cluster.consumer_groups.expel("g", member_of(cluster)[0])
            await poll_until(lambda: len(recorder.events) >= 3, reading)
            assert recorder.events == [("assigned", {T0, T1}), ("lost", {T0, T1}), ("assigned", {T0, T1})]
            assert sorted(await read(reading, 5)) == list(range(5))


async def test_a_commit_with_a_stale_epoch_is_sent_again_with_the_new_one() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", enable_auto_commit=False) as reading:
        fill(cluster, "t", 0, 5)
        await read(reading, 5)
        group = cluster.consumer_groups.group("g")

        def judge(request: OffsetCommitRequest, node: Any) -> Any:
            if len(cluster.sent(OffsetCommitRequest)) == 1:
                # A new epoch, in which this member keeps its partitions; its commit is on its way with the old one.
                cluster.consumer_groups._assign(group)
            is_stale = request.generation_id_or_member_epoch < group.epoch
            return cluster.groups.commit(request, ErrorCode.STALE_MEMBER_EPOCH if is_stale else ErrorCode.NONE)

        cluster.script(OffsetCommitRequest, *[judge] * 1000)
        await asyncio.wait_for(reading.commit(), PATIENCE_S)
        epochs = [each.generation_id_or_member_epoch for each in cluster.sent(OffsetCommitRequest)]
        assert epochs[0] == epochs[-1] - 1
        assert cluster.groups.group("g").offsets["t", 0][0] == 5


async def test_a_commit_of_revoked_partitions_is_not_sent_under_a_later_epoch() -> None:
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t", enable_auto_commit=False) as first:
        fill(cluster, "t", 0, 5)
        fill(cluster, "t", 1, 5)
        await read(first, 10)
        cluster.script(
            OffsetCommitRequest,
            *[lambda request, node: cluster.groups.commit(request, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)] * 100,
        )
        pending = await first.commit_async()
        async with consumer(cluster, "t") as second:
            await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
            cluster.scripts[OffsetCommitRequest].clear()
            with pytest.raises(KafkaError, match="dealt its partitions anew") as caught:
                await asyncio.wait_for(pending, PATIENCE_S)
            assert caught.value.code is ErrorCode.ILLEGAL_GENERATION
            assert not cluster.groups.group("g").offsets


async def test_a_commit_of_partitions_that_have_come_back_is_not_sent_under_a_later_epoch() -> None:
    """It waited for a retry while another member had them, and took its offsets back."""
    slow = {"enable_auto_commit": False, "retry_backoff_ms": 1500, "retry_backoff_max_ms": 1500}
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t", **slow) as first:
        fill(cluster, "t", 0, 5)
        fill(cluster, "t", 1, 5)
        await read(first, 10)
        name, _ = member_of(cluster)

        def judge(request: OffsetCommitRequest, node: Any) -> Any:
            is_refused = request.member_id == name
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if is_refused else ErrorCode.NONE
            return cluster.groups.commit(request, code)

        cluster.script(OffsetCommitRequest, *[judge] * 1000)
        pending = await first.commit_async({T0: 3, T1: 3})
        await until(lambda: len(cluster.sent(OffsetCommitRequest)) == 1)
        async with consumer(cluster, "t", enable_auto_commit=False) as second:
            await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
            (moved,) = second.assignment()
            await second.commit({moved: 5})
        await poll_until(lambda: len(first.assignment()) == 2, first)
        assert len(cluster.sent(OffsetCommitRequest)) == 2  # the retry is still to come
        cluster.scripts[OffsetCommitRequest].clear()
        with pytest.raises(KafkaError, match="dealt its partitions anew"):
            await asyncio.wait_for(pending, PATIENCE_S)
        offsets = cluster.groups.group("g").offsets
        assert {partition: offset[0] for partition, offset in offsets.items()} == {tuple(moved): 5}


async def test_a_waiting_commit_of_a_partition_that_stays_is_sent_when_another_one_has_come() -> None:
    slow = {"enable_auto_commit": False, "retry_backoff_ms": 1500, "retry_backoff_max_ms": 1500}
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t", **slow) as first:
        async with consumer(cluster, "t", enable_auto_commit=False) as second:
            await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
            (kept,) = first.assignment()

            def refuse(request: OffsetCommitRequest, node: Any) -> Any:
                return cluster.groups.commit(request, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

            cluster.script(OffsetCommitRequest, *[refuse] * 1000)
            pending = await first.commit_async({kept: 3})
            await until(lambda: len(cluster.sent(OffsetCommitRequest)) == 1)
        await poll_until(lambda: len(first.assignment()) == 2, first)
        assert len(cluster.sent(OffsetCommitRequest)) == 1  # the retry is still to come
        cluster.scripts[OffsetCommitRequest].clear()
        await asyncio.wait_for(pending, PATIENCE_S)
        offsets = cluster.groups.group("g").offsets
        assert {partition: offset[0] for partition, offset in offsets.items()} == {tuple(kept): 3}


async def test_a_member_that_has_joined_again_by_a_heartbeat_commits_nothing_of_what_it_has_lost() -> None:
    """The epoch of the new membership is valid: a commit before the next poll, or in the listener for what is lost,
    took the offsets of the next owner back.
    """

    events: list[Any] = []

    class Committing(RebalanceListener):
        def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
            events.append(set(assigned))

        async def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
            with pytest.raises(KafkaError) as caught:
                await reading.commit({T0: 5})
            events.append(caught.value.code)

    async with FakeCluster(t=1) as cluster, consumer(cluster, enable_auto_commit=False) as reading:
        fill(cluster, "t", 0, 5)
        reading.subscribe(["t"], listener=Committing())
        await read(reading, 5)
        group = cluster.consumer_groups.group("g")
        name, _ = member_of(cluster)
        cluster.consumer_groups.expel("g", name)
        await until(lambda: name in group.members and group.members[name].assigned)
        await asyncio.sleep(0.05)  # until the answer is there
        with pytest.raises(KafkaError, match="no longer a member of its group"):
            await reading.commit()
        with pytest.raises(KafkaError, match="not a member of its group now"):
            reading.group_metadata()
        await poll_until(lambda: len(events) == 3, reading)
        assert events == [{T0}, ErrorCode.UNKNOWN_MEMBER_ID, {T0}]
        assert not cluster.groups.group("g").offsets
        await reading.commit({T0: 3})
        assert cluster.groups.group("g").offsets["t", 0][0] == 3


async def test_a_commit_from_before_a_loss_is_not_sent_under_the_epoch_of_the_next_membership() -> None:
    recorder = Recorder()
    async with FakeCluster(t=1) as cluster, consumer(cluster, enable_auto_commit=False) as reading:
        fill(cluster, "t", 0, 5)
        reading.subscribe(["t"], listener=recorder)
        await read(reading, 5)

        def judge(request: OffsetCommitRequest, node: Any) -> Any:
            return cluster.groups.commit(request, ErrorCode.STALE_MEMBER_EPOCH)

        cluster.script(OffsetCommitRequest, *[judge] * 1000)
        pending = await reading.commit_async()
        cluster.consumer_groups.expel("g", member_of(cluster)[0])
        await poll_until(lambda: len(recorder.events) == 3, reading)
        assert recorder.events == [("assigned", {T0}), ("lost", {T0}), ("assigned", {T0})]
        cluster.scripts[OffsetCommitRequest].clear()
        with pytest.raises(KafkaError, match="dealt its partitions anew"):
            await asyncio.wait_for(pending, PATIENCE_S)
        assert not cluster.groups.group("g").offsets


async def test_committed_offsets_are_fetched_as_a_member() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        await poll_until(lambda: cluster.sent(OffsetFetchRequest), reading)
        (group,) = cluster.sent(OffsetFetchRequest)[0].groups
        member_id, member = member_of(cluster)
        assert (group.member_id, group.member_epoch) == (member_id, member.epoch)


async def test_a_member_that_the_coordinator_does_not_know_when_it_fetches_offsets_joins_again() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        fill(cluster, "t", 0, 3)
        cluster.consumer_groups.interval_ms = 3_600_000  # only the refusal makes it ask

        def expel(request: Any, node: Any) -> Any:
            cluster.consumer_groups.expel("g", member_of(cluster)[0])
            return node.on_group(request)

        cluster.script(OffsetFetchRequest, expel)
        assert await read(reading, 3) == [0, 1, 2]


async def test_a_pattern_is_the_brokers_to_evaluate() -> None:
    async with FakeCluster(flights=1, trains=1) as cluster, consumer(cluster) as reading:
        reading.subscribe(pattern="fl.*")
        await poll_until(lambda: reading.assignment(), reading)
        assert reading.assignment() == {TopicPartition("flights", 0)}
        assert reading.subscription() == {"flights"}
        joined = cluster.sent(ConsumerGroupHeartbeatRequest)[0]
        assert (joined.subscribed_topic_regex, joined.subscribed_topic_names) == ("fl.*", [])


async def test_a_topic_whose_id_is_not_known_yet_is_taken_when_it_is() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster) as reading:
        fill(cluster, "t", 0, 3)
        reading.subscribe(pattern="t|later")
        await read(reading, 3)
        cluster.create("later", 1)
        cluster.consumer_groups._assign(cluster.consumer_groups.group("g"))
        asked = len(cluster.sent(MetadataRequest))
        await poll_until(lambda: len(reading.assignment()) == 2, reading)
        assert len(cluster.sent(MetadataRequest)) > asked
        await poll_until(
            lambda: not cluster.consumer_groups.group("g").members[member_of(cluster)[0]].revoking, reading
        )


async def test_a_changed_subscription_is_told_at_once() -> None:
    async with FakeCluster(t=1, u=1) as cluster, consumer(cluster, "t") as reading:
        cluster.consumer_groups.interval_ms = 3_600_000
        await poll_until(lambda: reading.assignment(), reading)
        reading.subscribe(["u"])
        await poll_until(lambda: reading.assignment() == {TopicPartition("u", 0)}, reading)


async def test_without_an_answer_everything_is_sent_again() -> None:
    async with FakeCluster(t=2) as cluster, consumer(cluster, "t") as reading:
        await poll_until(lambda: len(reading.assignment()) == 2, reading)
        cluster.script(ConsumerGroupHeartbeatRequest, lambda request, node: DROP)
        before = len(cluster.sent(ConsumerGroupHeartbeatRequest))
        await poll_until(lambda: len(cluster.sent(ConsumerGroupHeartbeatRequest)) >= before + 2, reading)
        full = [each for each in cluster.sent(ConsumerGroupHeartbeatRequest)[before:] if each.rebalance_timeout_ms >= 0]
        assert full
        assert full[0].subscribed_topic_names == ["t"]
        assert full[0].member_epoch > 0
        assert sum(len(topic.partitions) for topic in full[0].topic_partitions) == 2
        assert len(reading.assignment()) == 2


async def test_names_end_the_pattern_of_an_earlier_process_with_the_instance_id() -> None:
    """Kafka keeps the expression of a static member until it gets another one: it assigned what no member read."""
    async with FakeCluster(t=1, u=1) as cluster:
        async with consumer(cluster, group_instance_id="i") as first:
            first.subscribe(pattern="t")
            await poll_until(lambda: first.assignment() == {T0}, first)
        async with consumer(cluster, "u", group_instance_id="i") as second:
            await poll_until(lambda: second.assignment() == {TopicPartition("u", 0)}, second)
            assert len(member_of(cluster)[1].assigned) == 1  # what it has beyond that, no other member gets


async def test_names_end_a_pattern_also_when_the_first_word_of_it_is_lost() -> None:
    async with FakeCluster(t=1, u=1) as cluster, consumer(cluster) as reading:
        reading.subscribe(pattern="t")
        await poll_until(lambda: reading.assignment() == {T0}, reading)
        cluster.consumer_groups.interval_ms = 3_600_000
        await poll_until(lambda: member_of(cluster)[1].revoking == set(), reading)
        cluster.script(ConsumerGroupHeartbeatRequest, *[lambda request, node: DROP] * 5)
        reading.subscribe(["u"])
        await poll_until(lambda: reading.assignment() == {TopicPartition("u", 0)}, reading)


@pytest.mark.parametrize(("instance", "epoch"), [(None, -1), ("i", -2)])
async def test_closing_leaves_or_says_that_it_may_return(instance: str | None, epoch: int) -> None:
    async with FakeCluster(t=1) as cluster:
        async with consumer(cluster, "t", group_instance_id=instance) as reading:
            await poll_until(lambda: reading.assignment(), reading)
        assert cluster.sent(ConsumerGroupHeartbeatRequest)[-1].member_epoch == epoch
        async with consumer(cluster, "t", group_instance_id=instance) as returned:
            await poll_until(lambda: returned.assignment(), returned)
        assert len(cluster.consumer_groups.group("g").members) == (0 if instance is None else 1)


async def test_a_close_that_is_cancelled_leaves_too() -> None:
    async with FakeCluster(t=1) as cluster:
        cluster.consumer_groups.interval_ms = 600_000  # after SILENCE the answer to a heartbeat would be out of turn
        fill(cluster, "t", 0, 2)
        recorder = Recorder()
        reading = consumer(cluster, request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        reading.subscribe(["t"], listener=recorder)
        assert await read(reading, 2) == [0, 1]
        cluster.script(OffsetCommitRequest, lambda request, node: SILENCE)
        closing = asyncio.create_task(reading.close(timeout_ms=600_000))
        await until(lambda: cluster.sent(OffsetCommitRequest))
        closing.cancel()
        await asyncio.wait([closing], timeout=PATIENCE_S)
        assert closing.cancelled()
        assert recorder.events[-1] == ("revoked", {T0})
        await until(lambda: not cluster.consumer_groups.group("g").members)


async def test_an_unsubscribed_consumer_joins_again_with_its_next_subscription() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as reading:
        await poll_until(lambda: reading.assignment(), reading)
        await reading.unsubscribe()
        assert not cluster.consumer_groups.group("g").members
        reading.subscribe(["t"])
        await poll_until(lambda: reading.assignment(), reading)


async def test_a_member_that_does_not_poll_leaves_until_it_does() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, max_poll_interval_ms=300) as reading:
        recorder = Recorder()
        reading.subscribe(["t"], listener=recorder)
        await poll_until(lambda: reading.assignment(), reading)
        await until(lambda: not cluster.consumer_groups.group("g").members)
        await poll_until(lambda: len(recorder.events) == 3, reading)
        assert [event for event, _ in recorder.events] == ["assigned", "lost", "assigned"]


async def test_a_member_that_polls_while_it_leaves_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll between the request that leaves and its response: nothing sent heartbeats any more."""
    leaves, response = asyncio.Event(), asyncio.Event()
    send_leave = ConsumerMembership._send_leave

    async def slow(self: ConsumerMembership, request: ConsumerGroupHeartbeatRequest | None) -> None:
        leaves.set()
        await response.wait()
        await send_leave(self, request)

    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", max_poll_interval_ms=300) as reading:
        await poll_until(lambda: reading.assignment(), reading)
        monkeypatch.setattr(ConsumerMembership, "_send_leave", slow)
        await asyncio.wait_for(leaves.wait(), PATIENCE_S)
        await poll_until(lambda: not reading.assignment(), reading)
        await reading.poll(5)
        response.set()
        await poll_until(lambda: reading.assignment(), reading)


async def test_a_broker_without_the_protocol_is_one_clear_line() -> None:
    async with FakeCluster(t=1) as cluster:
        cluster.versions[68] = (0, -1)
        began_s = time.monotonic()
        async with consumer(cluster, "t") as reading:
            with pytest.raises(KafkaError, match=r"does not serve group_protocol='consumer'.*use 'classic'") as caught:
                await asyncio.wait_for(anext(reading), PATIENCE_S)
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
        assert "\n" not in str(caught.value)
        assert time.monotonic() - began_s < PATIENCE_S / 2


async def test_a_pattern_on_a_broker_that_evaluates_none_is_one_clear_line() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster) as reading:
        cluster.versions[68] = (0, 0)
        reading.subscribe(pattern="t.*")
        with pytest.raises(KafkaError, match="does not evaluate patterns"):
            await asyncio.wait_for(anext(reading), PATIENCE_S)


@pytest.mark.parametrize("code", [ErrorCode.GROUP_MAX_SIZE_REACHED, ErrorCode.UNSUPPORTED_ASSIGNOR])
async def test_a_refusal_of_the_group_is_raised_and_may_be_tried_again(code: ErrorCode) -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_remote_assignor="range") as reading:
        refusal = ConsumerGroupHeartbeatResponse(error_code=code, error_message="not today")
        cluster.script(ConsumerGroupHeartbeatRequest, lambda request, node: refusal)
        with pytest.raises(KafkaError, match="not today") as caught:
            await asyncio.wait_for(anext(reading), PATIENCE_S)
        assert caught.value.code is code
        await poll_until(lambda: reading.assignment(), reading)
        assert cluster.sent(ConsumerGroupHeartbeatRequest)[0].server_assignor == "range"


async def test_a_second_process_of_a_static_member_ends_the_first() -> None:
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_instance_id="i") as first:
        await poll_until(lambda: first.assignment(), first)
        cluster.consumer_groups.group("g").members[member_of(cluster)[0]].has_left_to_return = True
        async with consumer(cluster, "t", group_instance_id="i") as second:
            await poll_until(lambda: second.assignment(), second)
            for _ in range(2):  # it never joins again, which would end the second, and so on
                with pytest.raises(KafkaError) as caught:
                    await asyncio.wait_for(anext(first), PATIENCE_S)
                assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID


async def test_a_coordinator_that_moves_is_found_again() -> None:
    async with FakeCluster(t=1, nodes=2) as cluster, consumer(cluster, "t") as reading:
        await poll_until(lambda: reading.assignment(), reading)
        cluster.coordinator = 2
        moved = ConsumerGroupHeartbeatResponse(error_code=ErrorCode.NOT_COORDINATOR)
        cluster.script(ConsumerGroupHeartbeatRequest, lambda request, node: moved)
        fill(cluster, "t", 0, 3)
        assert await read(reading, 3) == [0, 1, 2]
        await poll_until(
            lambda: any(
                node == 2 and isinstance(each, ConsumerGroupHeartbeatRequest) for node, _, each in cluster.requests
            ),
            reading,
        )
        assert reading.assignment() == {T0}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"group_id": None}, "needs a group_id"),
        ({"partition_assignment_strategy": "range"}, "partition_assignment_strategy is the broker's"),
        ({"session_timeout_ms": 10_000}, "session_timeout_ms is the broker's"),
        ({"heartbeat_interval_ms": 10}, "heartbeat_interval_ms is the broker's"),
        ({"group_protocol": "classic", "group_remote_assignor": "range"}, "needs group_protocol='consumer'"),
        ({"group_protocol": "newest"}, "one of classic, consumer"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Consumer("t", **{**FAST, **options})


async def test_a_pattern_is_the_brokers_to_understand() -> None:
    """RE2 has classes of characters that Python does not know."""
    async with FakeCluster(t=1) as cluster, consumer(cluster) as member:
        member.subscribe(pattern=r"\pL+")
        await member.poll(0)
        await until(lambda: cluster.sent(ConsumerGroupHeartbeatRequest))
        assert cluster.sent(ConsumerGroupHeartbeatRequest)[0].subscribed_topic_regex == r"\pL+"
        member.subscribe(pattern=re.compile("(?i)T"))  # type: ignore[arg-type]
        await poll_until(lambda: member.assignment() == {T0}, member)
        with pytest.raises(ValueError, match=r"the flags of .* do not reach the broker"):
            member.subscribe(pattern=re.compile("T", re.IGNORECASE))  # type: ignore[arg-type]


def test_an_assignment_that_is_worked_on_while_a_heartbeat_is_under_way_is_acknowledged_at_once() -> None:
    """The coordinator waits to hear so before it gives the partitions that are free now to others."""
    member = ConsumerMember("g", "m", rebalance_timeout_ms=1000, backoff_ms=lambda failures: 100.0)
    member.subscribe(TopicSelection(names=("t",)), 0)
    answer = ConsumerGroupHeartbeatResponse(member_epoch=1, heartbeat_interval_ms=5000)
    member.next_heartbeat()
    member.handle_response(answer, 0)
    assert member.ms_until_heartbeat(0) == 5000
    member.heartbeat_now(0)
    member.next_heartbeat()
    member.acknowledge((), frozenset(), 10)
    member.handle_response(answer, 20)
    assert member.ms_until_heartbeat(20) == 0
    assert member.next_heartbeat().topic_partitions == []


@pytest.mark.parametrize("is_in_step", [False, True])
async def test_a_partition_that_comes_and_goes_between_two_steps_is_free_for_others(is_in_step: bool) -> None:
    """The coordinator waits to hear that the partition is not owned, although the member never had it, or has it only
    once the listener returns.
    """
    is_slow, may_return = asyncio.Event(), asyncio.Event()

    class Slow(RebalanceListener):
        async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
            if is_slow.is_set():
                await may_return.wait()

    async with FakeCluster(t=2) as cluster, consumer(cluster) as first:
        first.subscribe(["t"], listener=Slow())
        group = cluster.consumer_groups.group("g")
        await poll_until(first.assignment, first)
        name, member = member_of(cluster)
        async with consumer(cluster, "t") as second:
            await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
        await until(lambda: len(member.assigned) == 2)
        is_slow.set()
        if is_in_step:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await first.poll(10_000)
        async with consumer(cluster, "t") as third:
            polls = asyncio.ensure_future(poll_until(third.assignment, third))
            await until(lambda: member.revoking)
            await asyncio.sleep(0.05)  # some heartbeats
            may_return.set()
            await poll_until(third.assignment, first)
            await polls
            assert group.members[name].epoch == group.epoch
            assert len(first.assignment()) == 1
            assert not first.assignment() & third.assignment()
