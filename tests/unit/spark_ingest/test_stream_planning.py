from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.stream_planning import (
    StreamState,
    available_offsets,
    backlog,
    from_offset,
    limit_offsets,
    missing_partitions,
    must_wait,
    ranges_between,
    recreated_partitions,
    to_offset,
)


def of(*offsets: int, topic: str = "t") -> dict[TopicPartition, int]:
    """Offsets by partition number."""
    return {TopicPartition(topic, number): offset for number, offset in enumerate(offsets)}


T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def test_an_offset_has_the_form_of_sparks_kafka_source():
    offsets = {TopicPartition("b", 10): 5, TopicPartition("b", 9): 4, TopicPartition("a", 0): 2**62}
    assert json.dumps(to_offset(offsets)) == '{"a": {"0": 4611686018427387904}, "b": {"9": 4, "10": 5}}'
    assert from_offset(json.loads(json.dumps(to_offset(offsets)))) == offsets
    assert from_offset({}) == {}


@pytest.mark.parametrize("value", [{"t": 5}, {"t": {"x": 1}}, {"t": {"0": "1"}}, {"logOffset": 3}])
def test_an_offset_of_another_source_is_refused(value):
    with pytest.raises(ConfigError, match="the offset in the checkpoint must be JSON like"):
        from_offset(value)


def test_all_that_is_there_can_be_read():
    state = StreamState(of(9, 4), {}, {})
    assert available_offsets(of(5, 4), state) == (of(9, 4), ())


def test_a_new_partition_is_read_from_its_beginning():
    state = StreamState(of(9, 4), {T1: 0}, {})
    assert available_offsets(of(5), state) == (of(9, 4), ())
    assert backlog(of(5), of(9, 4), {T1: 0}) == {T0: 4, T1: 4}
    assert ranges_between(of(5), of(9, 4)) == ((("t", 0, 5, 9), ("t", 1, 0, 4)), (T1,), ())


def test_a_new_partition_that_lost_records_is_named():
    state = StreamState(of(9, 4), {T1: 2}, {})
    assert available_offsets(of(5), state).losses == ("the new t-1 begins at 2 instead of 0",)
    assert backlog(of(5), of(9, 4), {T1: 2}) == {T0: 4, T1: 2}


def test_a_deleted_partition_leaves_the_offset_and_is_named():
    assert available_offsets(of(5, 4), StreamState(of(6), {}, {})) == (of(6), ("t-1 is gone",))
    assert ranges_between(of(5, 4), of(6)).losses == ("t-1 is gone, or the options did not name it",)


def test_a_topic_that_was_created_again_is_read_from_its_beginning_in_the_next_batch():
    ends, losses = available_offsets(of(5), StreamState(of(9), {}, {T0: 0}))
    assert (ends, losses) == (of(0), ("t-0 was deleted and created again; the stream was at offset 5",))
    planned = ranges_between(of(5), of(0))
    assert (planned.ranges, planned.losses) == ((), ("t-0 went back from offset 5 to 0",))
    assert ranges_between(of(0), of(9)).ranges == (("t", 0, 0, 9),)


def test_a_topic_id_that_changed_says_that_a_topic_was_created_again():
    assert recreated_partitions(of(5), of(9), {"t": b"1"}, {"t": b"2"}) == [T0]
    assert recreated_partitions(of(5), of(9), {"t": b"1"}, {"t": b"1"}) == []
    assert recreated_partitions(of(5), of(4), {"t": b"1"}, {"t": b"1"}) == []  # records were lost


def test_after_a_restart_only_the_offsets_say_it():
    assert recreated_partitions(of(5), of(4), {}, {"t": b"2"}) == [T0]
    assert recreated_partitions(of(5), of(5), {}, {"t": b"2"}) == []


def test_partitions_that_an_answer_lacks_are_missing():
    assert missing_partitions(of(5, 4), of(6), {}, {"t": b"1"}) == [T1]
    assert missing_partitions(of(5), of(6), {"t": b"1"}, {"t": b"1"}) == []
    assert missing_partitions(of(5), of(6), {"t": b"1"}, {"t": b"2"}) == [T0]
    assert missing_partitions({}, of(6), {}, {"t": b"1"}) == []


def test_a_log_that_ends_before_the_stream_is_gone_on_with_at_its_end():
    ends, losses = available_offsets(of(5, 1), StreamState(of(3, 2), {}, {}))
    assert (ends, losses) == (of(3, 2), ("t-0 ends at 3, before offset 5 of the stream",))


def test_replaced_records_are_read_in_the_next_batch_and_named():
    # The log of t-1 ends at 8 at this time, after the first replaced record and before the stream's offset.
    ends, losses = available_offsets(of(10, 10), StreamState(of(15, 8), {}, {}, of(5, 6)))
    assert ends == of(5, 6)
    assert losses == tuple(
        f"the records of t-{number} from offset {first} to 9 were replaced by an unclean election after the stream "
        "had read them"
        for number, first in ((0, 5), (1, 6))
    )


def test_a_limit_is_shared_in_proportion_to_the_backlog():
    # As Spark's connector shares it: the whole part, and at least one offset for each.
    assert limit_offsets(of(0, 0, 0), of(100, 10, 1), {}, 50) == of(45, 4, 1)
    assert limit_offsets(of(0, 0), of(10, 10), {}, 20) == of(10, 10)
    assert limit_offsets(of(0, 0), of(10, 10), {}, 1) == of(1, 1)
    assert limit_offsets(of(0), of(10, 10), {T1: 4}, 8) == of(5, 7)


offsets_list = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**40)), min_size=1, max_size=6)


@given(offsets_list, st.integers(1, 2**41))
def test_limited_batches_lead_to_the_end_and_are_not_far_above_the_limit(rows, max_offsets):
    start = of(*(first for first, _ in rows))
    ends = of(*(first + size for first, size in rows))
    limited = limit_offsets(start, ends, {}, max_offsets)
    pending = backlog(start, ends, {})
    taken = backlog(start, limited, {})
    assert taken.keys() == pending.keys()
    assert all(taken[partition] <= pending[partition] for partition in taken)
    assert sum(taken.values()) <= max_offsets + len(rows)


def test_a_batch_waits_for_its_minimum_but_not_for_ever():
    assert must_wait(4, 5, 999, 1000)
    assert not must_wait(5, 5, 0, 1000)
    assert not must_wait(4, 5, 1000, 1000)


@given(offsets_list)
def test_ranges_join_without_gap_or_overlap(rows):
    start = of(*(first for first, _ in rows))
    middle = of(*(first + size // 2 for first, size in rows))
    end = of(*(first + size for first, size in rows))
    for number, (first, size) in enumerate(rows):
        one, other = ranges_between(start, middle).ranges[number], ranges_between(middle, end).ranges[number]
        assert (one.start, one.end, other.end) == (first, other.start, first + size)
