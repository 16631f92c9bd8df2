"""What a consumer reads and how far it is."""

from __future__ import annotations

import re

import pytest

from tidelog.client.consuming.subscription import Subscription
from tidelog.client.model import OffsetAndMetadata, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def assigned(*partitions: TopicPartition) -> Subscription:
    subscription = Subscription()
    subscription.assign(partitions)
    return subscription


def test_subscribing_and_assigning_exclude_each_other():
    subscription = assigned(A)
    with pytest.raises(ValueError, match="given partitions by assign"):
        subscription.subscribe(["t"], None, None)
    subscription.unsubscribe()
    subscription.subscribe([], re.compile("t.*"), None)
    with pytest.raises(ValueError, match="subscribed to topics"):
        subscription.assign([A])


def test_a_partition_that_stays_assigned_keeps_its_position():
    subscription = assigned(A)
    subscription.seek(A, 5)
    subscription.assign([A, B])
    assert subscription.assigned[A].position == 5
    assert subscription.partitions_without_position() == [B]
    subscription.assign([B])
    subscription.assign([A])
    assert subscription.partitions_without_position() == [A]


def test_only_partitions_with_a_position_are_fetched_and_none_that_is_paused_or_backing_off():
    subscription = assigned(A, B)
    subscription.seek(A, 0)
    assert subscription.fetchable_partitions(subscription.assigned, 0) == [A]
    subscription.seek(B, 0)
    subscription.pause([A])
    assert subscription.fetchable_partitions(subscription.assigned, 0) == [B]
    assert subscription.paused() == {A}
    subscription.resume([A])
    subscription.assigned[B].retry_at_ms = 100
    assert subscription.fetchable_partitions(subscription.assigned, 50) == [A]
    assert subscription.fetchable_partitions(subscription.assigned, 100) == [A, B]


def test_records_count_as_consumed_only_where_they_continue():
    subscription = assigned(A)
    subscription.seek(A, 5)
    assert subscription.advance_position(A, 5, 8, 2)
    assert not subscription.advance_position(A, 5, 8, 2)
    assert not subscription.advance_position(B, 0, 1, 0)
    assert subscription.positions() == {A: OffsetAndMetadata(8, "", 2)}
    subscription.rewind(A, 6, 1)
    assert subscription.positions() == {A: OffsetAndMetadata(6, "", 1)}


def test_a_reset_is_finished_only_while_it_is_wanted():
    subscription = assigned(A)
    subscription.request_reset(A, -2)
    assert subscription.pending_resets(0) == {A: -2}
    assert subscription.partitions_without_position() == []
    assert not subscription.finish_reset(A, -1, 9, 0, 3)
    assert subscription.finish_reset(A, -2, 3, 0, 3)
    assert not subscription.finish_reset(A, -2, 4, 0, 3)
    subscription.request_reset(A, -1)
    subscription.seek(A, 7)
    assert not subscription.finish_reset(A, -1, 9, 0, 3)
    assert subscription.assigned[A].position == 7


def test_seeking_needs_an_assigned_partition_and_an_offset():
    subscription = assigned(A)
    with pytest.raises(ValueError, match="t-1 is not assigned"):
        subscription.seek(B, 0)
    with pytest.raises(ValueError, match="not negative"):
        subscription.seek(A, -1)


def test_topics_that_change_are_noticed():
    subscription = Subscription()
    subscription.subscribe(["a"], None, None)
    before = subscription.topic_change_count
    assert not subscription.set_topics(["a"])
    assert subscription.topic_change_count == before
    assert subscription.set_topics(["a", "b"])
    assert subscription.topic_change_count == before + 1


def test_lag_is_what_lies_between_position_and_end():
    subscription = assigned(A)
    assert subscription.lag(A) is None
    subscription.seek(A, 5)
    subscription.assigned[A].high_watermark = 8
    assert subscription.lag(A) == 3
