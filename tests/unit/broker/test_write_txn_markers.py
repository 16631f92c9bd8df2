"""WriteTxnMarkers: a coordinator ends transactions in the partitions that this node leads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.conftest import RunningNode, Wire
from tests.unit.broker.transactions import (
    FakeCoordinator,
    commit_offsets,
    marker,
    partition_of,
    produce,
    transactional,
    use,
    write_markers,
)
from tidelog.broker.apis.records import write_txn_markers
from tidelog.broker.coordinators.marker_writer import Marker
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from tidelog.protocol.messages.write_txn_markers import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from tidelog.replication.partition import Isolation

E = ErrorCode
T0 = ("t", 0)
OFFSETS = "__consumer_offsets"


@pytest.fixture
async def topic(running: RunningNode, wire: Wire) -> None:
    use(running, FakeCoordinator())
    await wire.create_topic("t", 3)


async def begin(wire: Wire, **options: int) -> None:
    assert await produce(wire, {T0: transactional(**options)}) == [E.NONE]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_commit", [True, False])
async def test_a_marker_ends_the_transaction(
    running: RunningNode, wire: Wire, topic: None, version: int, is_commit: bool
):
    await begin(wire)
    answered = await write_markers(wire, marker([T0], is_commit=is_commit), version=version)
    assert answered == {(7, "t", 0): E.NONE}
    log = partition_of(running).log
    assert log.last_stable_offset == log.log_end_offset == 2
    assert log.aborted_transactions(0, 2) == ([] if is_commit else [(7, 0, 1, 2)])


async def test_a_marker_is_committed_before_it_is_answered(running: RunningNode, wire: Wire, topic: None):
    await begin(wire)
    partition = partition_of(running)
    partition.awaits_followers = True  # as if a follower were in the ISR: the mark does not move by itself
    answer = asyncio.create_task(write_markers(wire, marker([T0])))
    await until(lambda: partition.log.log_end_offset == 2)
    assert (partition.high_watermark, partition.log.last_stable_offset) == (1, 0)
    assert not answer.done()
    partition.awaits_followers = False
    partition.advance_high_watermark()
    assert await answer == {(7, "t", 0): E.NONE}
    assert partition.log.last_stable_offset == 2


async def test_a_marker_that_is_not_committed_in_time_is_told_so(running: RunningNode, wire: Wire, topic: None):
    broker = running.node._broker
    assert broker is not None
    broker.markers._timeout_ms = 20
    partition_of(running).log.flush()  # so that the marker waits for the followers alone
    partition_of(running).awaits_followers = True
    assert await write_markers(wire, marker([T0])) == {(7, "t", 0): E.REQUEST_TIMED_OUT}


async def test_version_1_says_nothing_of_the_transaction_version(running: RunningNode, wire: Wire, topic: None):
    """Markers of an older coordinator are accepted at the producer's own epoch (KIP-1228)."""
    await begin(wire, epoch=3)
    strict = marker([T0], epoch=3, transaction_version=2)
    assert await write_markers(wire, strict) == {(7, "t", 0): E.INVALID_PRODUCER_EPOCH}
    assert await write_markers(wire, strict, version=1) == {(7, "t", 0): E.NONE}


async def test_a_repeated_marker_of_version_2_succeeds(running: RunningNode, wire: Wire, topic: None):
    await begin(wire, epoch=3)
    for _ in range(2):
        assert await write_markers(wire, marker([T0], epoch=4, transaction_version=2)) == {(7, "t", 0): E.NONE}


async def test_an_older_coordinator_is_fenced(wire: Wire, topic: None):
    await write_markers(wire, marker([T0], coordinator_epoch=5))
    answered = await write_markers(wire, marker([T0], coordinator_epoch=4))
    assert answered == {(7, "t", 0): E.TRANSACTION_COORDINATOR_FENCED}


async def test_each_partition_of_each_producer_is_answered(wire: Wire, topic: None):
    answered = await write_markers(
        wire,
        marker([T0, ("t", 1), ("t", 9)]),
        marker([("nowhere", 0), ("t", 2)], producer_id=8),
        marker([("t", 2)], producer_id=9, epoch=-1),
    )
    assert answered == {
        (7, "t", 0): E.NONE,
        (7, "t", 1): E.NONE,
        (7, "t", 9): E.UNKNOWN_TOPIC_OR_PARTITION,
        (8, "nowhere", 0): E.UNKNOWN_TOPIC_OR_PARTITION,
        (8, "t", 2): E.NONE,
        (9, "t", 2): E.INVALID_PRODUCER_EPOCH,
    }


async def test_a_partition_that_is_named_twice_gets_one_marker(running: RunningNode, wire: Wire, topic: None):
    assert await write_markers(wire, marker([T0, T0])) == {(7, "t", 0): E.NONE}
    assert partition_of(running).log.log_end_offset == 1


async def test_a_partition_that_is_not_led_here_is_told_so(running: RunningNode, wire: Wire, topic: None):
    partition_of(running).leads = False
    assert await write_markers(wire, marker([T0])) == {(7, "t", 0): E.NOT_LEADER_OR_FOLLOWER}


@pytest.mark.parametrize("wrong", [{"producer_id": -1}, {"producer_id": -(2**63)}, {"transaction_version": -1}])
async def test_what_no_coordinator_sends_is_refused(
    running: RunningNode, wire: Wire, topic: None, wrong: dict[str, Any]
):
    answered = await write_markers(wire, marker([T0], **wrong))
    assert list(answered.values()) == [E.INVALID_REQUEST]
    assert partition_of(running).log.log_end_offset == 0


async def test_epochs_of_coordinators_may_not_fall(running: RunningNode, wire: Wire, topic: None):
    """-1 is before the first marker of a producer, as in Kafka: operators send what DescribeProducers shows."""
    for epoch, error in (
        (-2, E.TRANSACTION_COORDINATOR_FENCED), (-1, E.NONE), (-1, E.NONE), (-2, E.TRANSACTION_COORDINATOR_FENCED),
        (0, E.NONE), (-1, E.TRANSACTION_COORDINATOR_FENCED),
    ):  # fmt: skip
        assert list((await write_markers(wire, marker([T0], coordinator_epoch=epoch))).values()) == [error]
    assert partition_of(running).log.log_end_offset == 3


async def test_no_markers_at_all_are_answered(wire: Wire, topic: None):
    assert await write_markers(wire) == {}
    assert await write_markers(wire, marker([])) == {}


async def test_too_many_markers_are_refused(wire: Wire, topic: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_txn_markers, "MARKERS_MAX", 2)
    answered = await write_markers(wire, marker([("t", index) for index in range(3)]))
    assert set(answered.values()) == {E.INVALID_REQUEST}


async def test_very_many_markers_are_written_in_pieces(
    running: RunningNode, wire: Wire, topic: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(write_txn_markers, "PIECE_ELEMENTS_MAX", 2)
    ends: list[int] = []
    pause = FairScheduler.pause

    async def noted(scheduler: FairScheduler, *, for_records: bool) -> None:
        ends.append(partition_of(running).log.log_end_offset)
        await pause(scheduler, for_records=for_records)

    monkeypatch.setattr(FairScheduler, "pause", noted)
    answered = await write_markers(wire, *(marker([T0], producer_id=producer_id) for producer_id in range(5)))
    assert answered == {(producer_id, "t", 0): E.NONE for producer_id in range(5)}
    assert ends == [0, 2, 4]


async def test_other_internal_topics_take_no_markers(wire: Wire, topic: None):
    await wire.create_topic("__transaction_state")
    answered = await write_markers(wire, marker([("__transaction_state", 0)]))
    assert list(answered.values()) == [E.INVALID_TOPIC_EXCEPTION]


async def test_data_and_aborted_ranges_are_of_one_moment(running: RunningNode, wire: Wire, topic: None):
    """What a read_committed fetch returns ends at the stable offset, and names each aborted transaction in it."""
    await begin(wire)
    await begin_other(wire)
    await write_markers(wire, marker([T0], is_commit=False))
    partition = partition_of(running)
    assert partition.read_bound(Isolation.READ_COMMITTED) == 1
    request = FetchRequest(
        max_wait_ms=0, min_bytes=0, max_bytes=10**6, isolation_level=1,
        topics=[FetchTopic(topic="t", partitions=[FetchPartition(partition=0, partition_max_bytes=10**6)])],
    )  # fmt: skip
    for isolation, records in ((1, 1), (0, 3)):
        request.isolation_level = isolation
        answer = (await wire.call(request, 11, FetchResponse)).responses[0].partitions[0]
        assert (answer.high_watermark, answer.last_stable_offset) == (3, 1)
        assert count_batches(answer.records) == records, "an uncommitted read has the aborted batch, too"
        aborted = [(each.producer_id, each.first_offset) for each in answer.aborted_transactions or []]
        assert aborted == ([(7, 0)] if isolation else [])


async def begin_other(wire: Wire) -> None:
    assert await produce(wire, {T0: transactional(producer_id=8)}) == [E.NONE]


def count_batches(records: bytes) -> int:
    count = position = 0
    while position < len(records):
        position += 12 + int.from_bytes(records[position + 8 : position + 12], "big")
        count += 1
    return count


class TestOffsets:
    """Markers of `__consumer_offsets` go through the group coordinator."""

    async def fetched(self, wire: Wire) -> tuple[int, int]:
        group = OffsetFetchRequestGroup(
            group_id="g", topics=[OffsetFetchRequestTopics(name="t", partition_indexes=[0])]
        )
        request = OffsetFetchRequest(groups=[group], require_stable=True)
        answer = await wire.call(request, 8, OffsetFetchResponse)
        partition = answer.groups[0].topics[0].partitions[0]
        return partition.committed_offset, partition.error_code

    @pytest.fixture
    async def offsets(self, running: RunningNode, wire: Wire, topic: None) -> tuple[str, int]:
        """The partition that holds the group."""
        await wire.create_topic(OFFSETS, 2)
        broker = running.node._broker
        assert broker is not None
        await until(lambda: not broker.groups.is_loading())
        return OFFSETS, broker.groups.partition_for("g")

    @pytest.mark.parametrize("is_commit", [True, False])
    async def test_they_appear_or_vanish_with_the_marker(self, wire: Wire, offsets: tuple[str, int], is_commit: bool):
        assert await commit_offsets(wire, {T0: 40}) == {T0: E.NONE}
        assert await self.fetched(wire) == (-1, E.UNSTABLE_OFFSET_COMMIT)
        assert await write_markers(wire, marker([offsets], is_commit=is_commit)) == {(7, *offsets): E.NONE}
        assert await self.fetched(wire) == (40 if is_commit else -1, E.NONE)

    async def test_a_partition_that_is_not_coordinated_here_is_not_led_here(
        self, running: RunningNode, wire: Wire, offsets: tuple[str, int]
    ):
        broker = running.node._broker
        assert broker is not None
        broker.groups.on_partition_resigned(offsets[1])
        assert await write_markers(wire, marker([offsets])) == {(7, *offsets): E.NOT_LEADER_OR_FOLLOWER}

    @pytest.mark.parametrize("index", [2, 99, -1])
    async def test_a_partition_that_does_not_exist_is_unknown(self, wire: Wire, offsets: tuple[str, int], index: int):
        answered = await write_markers(wire, marker([(OFFSETS, index)]))
        assert answered == {(7, OFFSETS, index): E.UNKNOWN_TOPIC_OR_PARTITION}

    async def test_late_markers_of_version_2_are_refused_there_too(self, wire: Wire, offsets: tuple[str, int]):
        await commit_offsets(wire, {T0: 40}, epoch=3)
        late = marker([offsets], epoch=3, transaction_version=2)
        assert await write_markers(wire, late) == {(7, *offsets): E.INVALID_PRODUCER_EPOCH}
        assert await write_markers(wire, marker([offsets], epoch=4, transaction_version=2)) == {(7, *offsets): E.NONE}
        assert await self.fetched(wire) == (40, E.NONE)


async def test_a_producer_without_partitions_is_left_out_of_the_answer(wire: Wire, topic: None):
    request = WriteTxnMarkersRequest(markers=[marker([T0]), marker([], producer_id=8)])
    response = await wire.call(request, 2, WriteTxnMarkersResponse)
    assert [each.producer_id for each in response.markers] == [7]


async def test_a_marker_that_the_next_leader_may_lack_is_not_answered_as_written(
    running: RunningNode, wire: Wire, topic: None
):
    await begin(wire)
    partition = partition_of(running)
    partition.awaits_followers = True
    answer = asyncio.create_task(write_markers(wire, marker([T0])))
    await until(lambda: partition.log.log_end_offset == 2)
    for waiting in partition.watch.writes.take_all():
        waiting(KafkaError(E.NOT_LEADER_OR_FOLLOWER))
    assert await answer == {(7, "t", 0): E.NOT_LEADER_OR_FOLLOWER}


async def test_a_marker_that_is_committed_after_its_time_has_one_result(running: RunningNode, topic: None):
    broker = running.node._broker
    assert broker is not None
    broker.markers._timeout_ms = 20
    partition = partition_of(running)
    partition.log.flush()
    partition.awaits_followers = True
    results: list[ErrorCode] = []
    broker.markers.write(Marker(7, 0, True, 0, 0), [T0], lambda _, error: results.append(error))
    await until(lambda: results)
    partition.awaits_followers = False
    partition.advance_high_watermark()
    await until(lambda: partition.high_watermark == 1)
    assert results == [E.REQUEST_TIMED_OUT]
