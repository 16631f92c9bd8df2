"""The committed image of a node: published in order, once, whole transactions only; snapshots replace it."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.controller_harness import Batch, Broker, Member, Quorum
from tidelog.protocol.messages.metadata_records import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    EndTransactionRecord,
    FeatureLevelRecord,
    PartitionRecord,
    TopicRecord,
)
from tidelog.protocol.messages.update_features import UpdateFeaturesRequest
from tidelog.replication.controller.metadata import tracker as tracker_module
from tidelog.replication.controller.metadata.image_records import image_records
from tidelog.replication.controller.metadata.record_codec import encode_record
from tidelog.replication.quorum.raft.snapshot import SnapshotId

FEATURE = FeatureLevelRecord(name="metadata.version", feature_level=30)


def topic(name):
    topic_id = name.encode() * 16
    return [
        TopicRecord(name=name, topic_id=topic_id),
        PartitionRecord(partition_id=0, topic_id=topic_id, replicas=[1], isr=[1], leader=1),
    ]


@pytest.fixture
async def quorum():
    return Quorum()


def write(quorum, *records, commit=True):
    values = [encode_record(record, 30) for record in records]
    quorum.batches.append(Batch(quorum.end_offset + max(len(values), 1) - 1, 1, 5, values))
    if commit:
        quorum.commit()


def names(member):
    return list(member.tracker.image.topics_by_name)


async def test_what_is_committed_together_is_published_once(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, commit=False)
    write(quorum, *topic("a"), commit=False)
    write(quorum, *topic("b"))
    ((image, delta),) = member.told
    assert sorted(one.name for one in delta.created_topics.values()) == ["a", "b"]
    assert image.offset == member.tracker.offset == 4


async def test_many_records_are_replayed_in_steps_and_published_as_one_change(quorum, monkeypatch):
    """350,000 in one turn took 1.9 s of CPU, in which a voter gave no sign: the lead moved from each to the next."""
    monkeypatch.setattr(tracker_module, "REPLAYED_AT_ONCE", 3)
    member = Member(quorum, 1)
    for name in "abcde":
        write(quorum, *topic(name), commit=False)
    quorum.high_watermark = quorum.end_offset
    waiting = member.tracker.wait_for(quorum.end_offset - 1)
    steps = member.tracker.on_high_watermark(quorum.end_offset)
    assert steps is not None
    for _ in range(4):
        assert names(member) == []
        assert member.tracker.offset == -1
        next(steps)
    assert next(steps, "done") == "done"
    assert names(member) == list("abcde")
    assert len(member.told) == 1
    assert waiting.done()
    assert member.tracker.on_high_watermark(quorum.end_offset) is None


async def test_a_notice_is_of_what_is_below_it_and_no_more(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, commit=False)
    write(quorum, *topic("a"), commit=False)
    quorum.high_watermark = quorum.end_offset
    member.tracker.on_high_watermark(1)
    assert names(member) == []
    member.tracker.on_high_watermark(3)
    assert names(member) == ["a"]
    member.tracker.on_high_watermark(3)
    assert len(member.told) == 2


async def test_control_batches_move_the_offset_and_publish_nothing(quorum):
    member = Member(quorum, 1)
    write(quorum)
    assert (member.told, member.tracker.offset) == ([], 0)


async def test_a_transaction_counts_when_it_has_ended_in_whatever_notices_it_comes(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, BeginTransactionRecord(name="t"), *topic("a"))
    write(quorum, *topic("b"))
    assert names(member) == []
    write(quorum, EndTransactionRecord(), *topic("c"))
    assert names(member) == ["a", "b", "c"]
    write(quorum, BeginTransactionRecord(name="u"), *topic("d"))
    write(quorum, AbortTransactionRecord(reason="no"))
    assert names(member) == ["a", "b", "c"]


async def test_a_controller_that_takes_over_ends_the_transaction_of_the_one_before(quorum):
    member, other = Member(quorum, 1), Member(quorum, 2)
    write(quorum, FEATURE, BeginTransactionRecord(name="t"), *topic("a"))
    quorum.lead(member.log)
    await member.controller.update_features(UpdateFeaturesRequest(), 2)
    assert names(member) == names(other) == []
    quorum.lead(other.log)
    assert other.tracker.failure is member.tracker.failure is None
    write(quorum, *topic("b"))
    assert names(member) == ["b"]


async def test_a_log_that_contradicts_itself_stops_the_following_and_not_the_node(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, *topic("a"))
    write(quorum, *topic("a"))
    assert member.tracker.failure is not None
    write(quorum, *topic("b"))
    assert names(member) == ["a"]


async def test_a_snapshot_replaces_everything_and_says_what_differs(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, *topic("a"), *topic("b"))
    elsewhere = Member(Quorum(), 2)
    write(elsewhere.log.quorum, FEATURE, *topic("b"), *topic("c"))
    values = [encode_record(record, 30) for record in image_records(elsewhere.tracker.image)]
    member.tracker.on_snapshot(SnapshotId(50, 3), values, 7)
    assert names(member) == ["b", "c"]
    _, delta = member.told[-1]
    assert [one.name for one in delta.deleted_topics.values()] == ["a"]
    assert [one.name for one in delta.created_topics.values()] == ["c"]
    assert list(delta.changed_partitions) == [b"c" * 16]
    assert (member.tracker.offset, member.tracker.image.epoch) == (49, 3)


async def test_waiting_for_an_offset(quorum):
    member = Member(quorum, 1)
    first, later = member.tracker.wait_for(0), member.tracker.wait_for(2)
    cancelled = member.tracker.wait_for(0)
    cancelled.cancel()
    write(quorum, FEATURE)
    assert (first.done(), later.done()) == (True, False)
    write(quorum, *topic("a"))
    await later
    assert member.tracker.wait_for(1).done()
    never = member.tracker.wait_for(99)
    await member.tracker.close()
    assert never.cancelled()


async def test_no_snapshot_inside_a_transaction(quorum):
    member = Member(quorum, 1, snapshot_bytes_min=1)
    write(quorum, FEATURE, BeginTransactionRecord(name="t"), *topic("a"))
    await asyncio.sleep(0)
    assert member.log.snapshots == []
    write(quorum, EndTransactionRecord())
    await asyncio.sleep(0)
    assert len(member.log.snapshots) == 1


async def test_the_active_controller_hands_on_what_it_built(quorum, monkeypatch):
    member = Member(quorum, 1)
    quorum.lead(member.log)
    monkeypatch.setattr(member.log, "read", lambda offset: pytest.fail("decoded twice"))
    await member.controller.register_broker(Broker(1).registration())
    assert list(member.tracker.image.brokers) == [1]


async def test_few_records_make_a_snapshot_once_the_interval_is_over(quorum):
    member = Member(quorum, 1)
    member.tracker._snapshot_interval_ms = 1000
    now = [5_000]
    member.tracker._clock_ms = lambda: now[0]
    member.tracker._begin_counting()
    now[0] += 999
    write(quorum, FEATURE, *topic("a"))
    await asyncio.sleep(0)
    assert member.log.snapshots == []
    now[0] += 1
    write(quorum, *topic("b"))
    await asyncio.sleep(0)
    assert len(member.log.snapshots) == 1
    write(quorum, *topic("c"))
    await asyncio.sleep(0)
    assert len(member.log.snapshots) == 1


async def test_records_that_cannot_be_read_yet_are_read_when_the_high_watermark_is_reported_again(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, commit=False)
    write(quorum, *topic("a"), commit=False)
    write(quorum, *topic("b"), commit=False)
    quorum.high_watermark = quorum.end_offset
    whole, quorum.batches = quorum.batches, quorum.batches[:2]
    member.tracker.on_high_watermark(5)
    waiting = member.tracker.wait_for(4)
    assert (names(member), member.tracker.offset, waiting.done()) == (["a"], 2, False)
    quorum.batches = whole
    member.tracker.on_high_watermark(5)
    assert (names(member), member.tracker.offset, waiting.done()) == (["a", "b"], 4, True)


async def test_a_snapshot_of_less_than_is_known_changes_nothing(quorum):
    member = Member(quorum, 1)
    write(quorum, FEATURE, *topic("a"))
    older = [encode_record(record, 30) for record in image_records(member.tracker.image)]
    identity = SnapshotId(member.tracker.offset + 1, 1)
    write(quorum, *topic("b"))
    member.tracker.on_snapshot(identity, older, 0)
    assert (names(member), member.tracker.offset) == (["a", "b"], 4)


async def test_damage_has_a_snapshot_written_that_takes_its_place(quorum, monkeypatch, caplog):
    """A follower that has fetched a snapshot writes a second one, too: what is usual is no error."""
    member = Member(quorum, 1)
    write(quorum, FEATURE, *topic("a"))
    written = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(member.log, "snapshot_written", written.set_result)
    member.tracker.on_damage()
    assert await asyncio.wait_for(written, PATIENCE_S) == SnapshotId(3, 1)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("is_short", [False, True], ids=["a record that it does not know", "a log that is damaged"])
async def test_a_node_with_a_part_of_the_metadata_gives_up_the_lead(quorum, is_short):
    """It had no metadata.version, and wrote the records of a new cluster behind those of an old one."""
    member = Member(quorum, 1)
    write(quorum, FeatureLevelRecord(name="metadata.version", feature_level=30 if is_short else 31), commit=False)
    write(quorum, *topic("a"), commit=False)
    quorum.high_watermark, quorum.epoch, quorum.leader = quorum.end_offset, 7, member.log
    written = len(quorum.batches)
    if is_short:
        quorum.batches.pop()
        written -= 1
    member.tracker.on_high_watermark(quorum.high_watermark)
    member.tracker.on_lead(7)
    assert not member.controller.is_active
    assert quorum.leader is None
    assert len(quorum.batches) == written
