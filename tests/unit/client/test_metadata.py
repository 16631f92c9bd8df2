"""The cluster's image: newer epochs win, and what did not change stays the same object."""

from __future__ import annotations

from typing import Any

from tidelog.client.model import TopicPartition
from tidelog.client.network.metadata import EMPTY, TopicMetadata, merge_metadata
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)

ID, OTHER = b"a" * 16, b"b" * 16
TP = TopicPartition("t", 0)


def answer(leader: int, epoch: int, topic_id: bytes = ID, error: int = 0, partitions: int = 1) -> MetadataResponse:
    rows = [
        MetadataResponsePartition(partition_index=n, leader_id=leader, leader_epoch=epoch) for n in range(partitions)
    ]
    topic = MetadataResponseTopic(name="t", topic_id=topic_id, error_code=error, partitions=rows)
    return MetadataResponse(brokers=[MetadataResponseBroker(node_id=1, host="h", port=1)], topics=[topic])


def test_an_older_leader_epoch_does_not_replace_a_newer():
    now = merge_metadata(merge_metadata(EMPTY, answer(2, 5), ["t"]), answer(1, 4), ["t"])
    assert (now.leader(TP), now.leader_epoch(TP)) == (2, 5)
    assert merge_metadata(now, answer(1, 6), ["t"]).leader(TP) == 1


def test_a_topic_made_anew_starts_its_epochs_anew():
    now = merge_metadata(merge_metadata(EMPTY, answer(2, 5), ["t"]), answer(1, 0, OTHER), ["t"])
    assert (now.leader(TP), now.topic_id("t")) == (1, OTHER)


def test_what_did_not_change_is_the_same_object():
    first = merge_metadata(EMPTY, answer(2, 5), ["t"])
    second = merge_metadata(first, answer(2, 5), ["t"])
    assert second.topics["t"] is first.topics["t"]
    assert merge_metadata(second, answer(3, 6), ["t"]).topics["t"] is not first.topics["t"]


def test_a_passing_error_keeps_what_was_known():
    first = merge_metadata(EMPTY, answer(2, 5), ["t"])
    troubled = merge_metadata(first, answer(2, 5, bytes(16), ErrorCode.LEADER_NOT_AVAILABLE, 0), ["t"])
    assert troubled.leader(TP) == 2
    assert not troubled.topics["t"].is_usable


def test_topics_no_longer_wanted_are_dropped_and_unknown_ones_have_no_leader():
    first = merge_metadata(EMPTY, answer(2, 5), ["t"])
    assert merge_metadata(first, answer(2, 5), []).topics == {}
    assert first.leader(TopicPartition("t", 9)) == -1
    assert first.leader(TopicPartition("u", 0)) == -1


def test_partitions_without_a_leader_are_not_available_unless_none_has_one():
    response = answer(2, 5, partitions=3)
    response.topics[0].partitions[1].leader_id = -1
    assert merge_metadata(EMPTY, response, None).topics["t"].available_partitions == (0, 2)
    for partition in response.topics[0].partitions:
        partition.leader_id = -1
    assert merge_metadata(EMPTY, response, None).topics["t"].available_partitions == (0, 1, 2)


class _Reads(dict[str, TopicMetadata]):
    count = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.count += 1
        return super().get(name, default)


def test_an_answer_about_one_of_many_topics_does_not_look_at_each_of_them() -> None:
    """A producer names its topics one by one: 3,000 of them took seconds of the processor."""
    first = merge_metadata(EMPTY, answer(2, 5), ["t"])
    reads = _Reads(dict.fromkeys(("t", "gone", *map(str, range(1000))), first.topics["t"]))
    merged = merge_metadata(first._replace(topics=reads), answer(2, 6), reads.keys() - {"gone"})
    assert reads.count < 10
    assert merged.topics.keys() == reads.keys() - {"gone"}
    assert [name for name, topic in merged.topics.items() if topic is not first.topics["t"]] == ["t"]
