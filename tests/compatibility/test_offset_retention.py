"""When offsets and groups go: Tidelog and Kafka 4.3 with a retention of a minute, through the same minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compatibility.conftest import WITH_KAFKA, start
from tests.compatibility.side_by_side import Brokers, Each
from tests.compatibility.test_differential_group_admin import commit, leave, stable, subscription

RETENTION_S = 60
OPTIONS = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
HOUR_MS = 3_600_000


@pytest.fixture
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    if not WITH_KAFKA:
        pytest.skip("needs Apache Kafka beside Tidelog: make compat")
    with (
        start("kafka", tmp_path_factory.mktemp("kafka"), **OPTIONS) as kafka,
        start("tidelog", tmp_path_factory.mktemp("tidelog"), **OPTIONS) as tidelog,
    ):
        pair = Brokers(kafka.port, tidelog.port)
        pair.get("find_coordinator", 3, key="g", key_type=0)
        until(pair, lambda: not any(answer.error_code for answer in pair.get("list_groups", 4)))
        until(pair, lambda: all(offsets_of(pair, f"g{number}") == {} for number in range(8)))
        yield pair
        pair.close()


def until(brokers: Brokers, condition: Callable[[], bool], wait_s: float = 20) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def offsets_of(brokers: Brokers, group: str) -> dict[str, list[int]] | None:
    """The partitions that a group has offsets of, by topic; None while the brokers differ."""
    answers = brokers.get("offset_fetch", 7, group_id=group, topics=None)
    found = [
        {topic.name: sorted(each.partition_index for each in topic.partitions) for topic in answer.topics}
        for answer in answers
        if not answer.error_code
    ]
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def known(brokers: Brokers) -> list[str] | None:
    """The groups listed; None while the brokers differ."""
    found = [sorted((each.group_id, each.group_state) for each in a.groups) for a in brokers.get("list_groups", 4)]
    return [" ".join(each) for each in found[0]] if found[0] == found[1] else None


def sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0))


def test_offsets_go_when_kafkas_do(brokers: Brokers) -> None:
    read, other, doomed = (brokers.topic(name, 2) for name in ("read", "other", "doomed"))

    def member(group: str, metadata: bytes, **values: Any) -> Each:
        who = stable(brokers, group, metadata, session_timeout=300_000, rebalance_timeout=300_000, **values)
        for topic in (read, other):
            commit(brokers, group, topic, 0, generation_id_or_member_epoch=1, member_id=who)
        return who

    commit(brokers, "alone", read, 0, 1)
    old_style = {"group_id": "named", "generation_id_or_member_epoch": -1, "member_id": ""}
    for index, retention_ms in enumerate((1000, HOUR_MS)):
        entry = {"partition_index": index, "committed_offset": 1, "committed_metadata": ""}
        topics = [{"name": read, "partitions": [entry]}]
        brokers.same("offset_commit", 3, topics=topics, retention_time=retention_ms, **old_style)
    commit(brokers, "topic-gone", doomed, 0)
    commit(brokers, "topic-gone", read, 0)
    gone = member("left", subscription(read))
    leave(brokers, "left", gone)
    late = member("left-late", subscription(read))
    member("reading", subscription(read))
    member("unreadable", b"\0\0\7")
    member("connect", subscription(read), protocol_type="connect")
    begun = time.monotonic()

    brokers.get("delete_topics", 5, topic_names=[doomed], timeout=10_000)
    until(brokers, lambda: offsets_of(brokers, "topic-gone") == {read: [0]})
    until(brokers, lambda: offsets_of(brokers, "named") == {read: [1]})
    sleep_until(begun + RETENTION_S / 2)
    commit(brokers, "alone", read, 1)
    leave(brokers, "left-late", late)
    both = {read: [0], other: [0]}
    assert offsets_of(brokers, "alone") == {read: [0, 1]}
    assert offsets_of(brokers, "left") == both

    sleep_until(begun + RETENTION_S + 6)
    for group, expected in {
        "alone": {read: [1]},
        "named": {read: [1]},
        "topic-gone": {},
        "left": {},
        "left-late": both,
        "reading": {read: [0]},
        "unreadable": both,
        "connect": both,
    }.items():
        assert offsets_of(brokers, group) == expected, group
    listed = ["alone Empty", "connect Stable", "left-late Empty", "named Empty", "reading Stable", "unreadable Stable"]
    assert known(brokers) == listed

    sleep_until(begun + 1.5 * RETENTION_S + 6)
    until(brokers, lambda: offsets_of(brokers, "alone") == {} == offsets_of(brokers, "left-late"))
    until(brokers, lambda: known(brokers) == [each for each in listed if each[0] not in "al"])
