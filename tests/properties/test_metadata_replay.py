"""The metadata log is replayed in turns of the loop: whatever happens meanwhile, the images are those of one turn.

The loop is played: between two turns records are appended, committed, lost to damage and fetched again, the leader's
snapshot replaces the log, and the lead is won and lost. Each published image is that of all records below its offset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replication.controller_harness import Batch
from tidelog.protocol.messages.metadata_records import (
    BeginTransactionRecord,
    EndTransactionRecord,
    FeatureLevelRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from tidelog.replication.controller.metadata import tracker as tracker_module
from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.image_records import image_records
from tidelog.replication.controller.metadata.loader import MetadataLoader
from tidelog.replication.controller.metadata.record_codec import encode_record
from tidelog.replication.controller.metadata.tracker import MetadataTracker
from tidelog.replication.controller.raft_port import RaftLog
from tidelog.replication.quorum.listener import ListenerCalls
from tidelog.replication.quorum.raft.snapshot import SnapshotId

CHOICES = [
    *("append", "commit", "turn") * 4, "append many", "transaction", "damage", "repair", "snapshot", "lead", "resign",
]  # fmt: skip


class PlayedLoop:
    """`call_soon` alone; `turn` is one turn."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def call_soon(self, call: Callable[[], None]) -> Any:
        self._due.append(call)

    def turn(self) -> None:
        for _ in range(len(self._due)):
            self._due.popleft()()

    @property
    def is_idle(self) -> bool:
        return not self._due


class History:
    """`batches` is what the quorum has committed or will; the node has it from `first` to `damaged_at`."""

    def __init__(self) -> None:
        self.loop = PlayedLoop()
        self.calls = ListenerCalls(cast(asyncio.AbstractEventLoop, self.loop))
        self.batches: list[Batch] = []
        self.first = 0  # the start offset of the node's log
        self.damaged_at: int | None = None
        self.high_watermark = 0
        self.epoch = 1
        self.is_leader = False
        self.is_alone = self.has_lost_majority = False
        self.leads: list[tuple[int, int]] = []
        self.resigned = 0
        self.published: list[MetadataImage] = []
        self.names: deque[str] = deque()
        self.number = 0
        self.tracker = MetadataTracker(
            on_image=self._publish,
            loop=cast(asyncio.AbstractEventLoop, self.loop),
            run_in_executor=cast(Any, None),
            clock_ms=lambda: 0,
            snapshot_bytes_min=1 << 40,
        )
        self.tracker.raft = cast(RaftLog, self)
        self.tracker.controller = cast(Any, self)

    # -- as a RaftLog ------------------------------------------------------------------------------------------------

    def read(self, from_offset: int) -> Iterator[Batch]:
        if from_offset < self.first:
            return
        for batch in self.batches:
            if self.damaged_at is not None and batch.last_offset >= self.damaged_at:
                return
            if from_offset <= batch.last_offset < self.high_watermark:
                yield batch

    def resign(self) -> None:
        self.resigned += 1
        if self.is_leader:
            self.lose_lead()

    # -- as the controller -------------------------------------------------------------------------------------------

    def on_lead(self, epoch: int, *, in_transaction: bool) -> None:
        self.leads.append((epoch, self.tracker.offset))

    def on_resign(self, epoch: int) -> None:
        pass

    def take_committed(self, end_offset: int) -> None:
        return None

    def on_published(self, end_offset: int) -> None:
        pass

    # -- what happens ------------------------------------------------------------------------------------------------

    @property
    def end_offset(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else 0

    def _publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.published.append(image)

    def append(self, records: Sequence[Any]) -> None:
        values = [encode_record(record, 30) for record in records]
        self.batches.append(Batch(self.end_offset + max(len(values), 1) - 1, self.epoch, 5, values))

    def topic(self) -> list[Any]:
        self.number += 1
        name = f"t{self.number}"
        topic_id = self.number.to_bytes(16, "big")
        self.names.append(name)
        partition = PartitionRecord(partition_id=0, topic_id=topic_id, replicas=[1], isr=[1], leader=1)
        records = [TopicRecord(name=name, topic_id=topic_id), partition]
        if self.number > 3:
            records.append(RemoveTopicRecord(topic_id=(self.number - 3).to_bytes(16, "big")))
        return records

    def commit(self) -> None:
        if self.damaged_at is None and self.end_offset > self.high_watermark:
            self.high_watermark = self.end_offset
            self.tell()

    def tell(self) -> None:
        self.calls.add(partial(self.tracker.on_high_watermark, self.high_watermark))

    def damage(self, offset: int) -> None:
        """Committed records are lost; a node that leads gives it up."""
        if self.damaged_at is None and self.first < self.high_watermark:
            self.damaged_at = self.first + offset % (self.high_watermark - self.first)
            self.lose_lead()

    def repair(self) -> None:
        if self.damaged_at is not None:
            self.damaged_at = None
            self.tell()

    def install(self) -> None:
        """The leader's snapshot replaces all that is committed, or what the node lacks."""
        end = self.high_watermark
        if self.is_leader or end <= self.first:
            return
        image = plain_image(self.batches, end)
        if image.offset != end - 1:
            return  # in a transaction no snapshot is made
        self.first, was_damaged, self.damaged_at = end, self.damaged_at is not None, None
        values = [encode_record(record, 30) for record in image_records(image)]
        self.calls.add(partial(self.tracker.on_snapshot, SnapshotId(end, image.epoch), values, image.timestamp_ms))
        if was_damaged:
            self.tell()

    def win_lead(self) -> None:
        if self.is_leader or self.damaged_at is not None:
            return
        self.epoch += 1
        self.append([])
        self.is_leader = True
        self.commit()
        self.calls.add(partial(self.tracker.on_lead, self.epoch))

    def lose_lead(self) -> None:
        if self.is_leader:
            self.is_leader = False
            self.calls.add(partial(self.tracker.on_resign, self.epoch))


def plain_image(batches: Sequence[Batch], end_offset: int) -> MetadataImage:
    """All records below the offset, in one turn."""
    loader = MetadataLoader()
    for batch in batches:
        if batch.last_offset < end_offset:
            loader.feed(batch.values, batch.last_offset, batch.epoch, batch.timestamp_ms)
    return loader.finish()[0]


def content(image: MetadataImage) -> Any:
    return {name: (topic.topic_id, dict(topic.partitions)) for name, topic in image.topics_by_name.items()}


def play(history: History, events: Sequence[tuple[str, int]]) -> None:
    transaction: list[list[Any]] = []
    for what, number in events:
        if what == "append":
            history.append(history.topic())
        elif what == "append many":
            for _ in range(number):
                history.append(history.topic())
        elif what == "transaction":
            transaction = [[BeginTransactionRecord(name="t"), *history.topic()], history.topic()]
            for records in (*transaction, [EndTransactionRecord()]):
                history.append(records)
                if number % 2:
                    history.commit()
        elif what == "commit":
            history.commit()
        elif what == "turn":
            history.loop.turn()
        elif what == "damage":
            history.damage(number)
        elif what == "repair":
            history.repair()
        elif what == "snapshot":
            history.install()
        elif what == "lead":
            history.win_lead()
        else:
            history.lose_lead()


@pytest.mark.parametrize("at_once", [1, 7, 2_000])
@settings(max_examples=150)
@given(events=st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 40)), max_size=60))
def test_whatever_comes_between_the_steps_the_images_are_those_of_one_turn(
    at_once: int, events: list[tuple[str, int]]
) -> None:
    history = History()
    history.append([FeatureLevelRecord(name="metadata.version", feature_level=30)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker_module, "REPLAYED_AT_ONCE", at_once)
        play(history, events)
        history.repair()
        history.commit()
        turns = 0
        while not history.loop.is_idle:
            history.loop.turn()
            turns += 1
            assert turns <= 2 * history.end_offset + len(events) + 10
    assert history.tracker.failure is None
    assert history.tracker.offset == history.end_offset - 1
    assert content(history.tracker.image) == content(plain_image(history.batches, history.end_offset))
    offsets = [image.offset for image in history.published]
    assert offsets == sorted(offsets)
    for image in history.published:
        assert content(image) == content(plain_image(history.batches, image.offset + 1))
    for epoch, offset in history.leads:  # the controller takes over what was committed before its epoch, and all of it
        assert offset >= max(batch.last_offset for batch in history.batches if batch.epoch < epoch)
