"""Odd questions of administrators about groups, to Tidelog and to Kafka 4.3 alike: describe, list, delete, forget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers, Each
from tests.compatibility.test_differential_groups import assigned, coordinated, join, member_of, sync

__all__ = ["coordinated"]

NewTopic = Callable[..., str]
CONSUMER_METADATA = b"\0\1\0\0\0\1\0\1t\xff\xff\xff\xff\0\0\0\0"
_numbers = itertools.count(1)


@pytest.fixture
def group(brokers: Brokers, coordinated: None) -> str:
    return f"administered-{next(_numbers)}-"


def subscription(*topics: str) -> bytes:
    """A consumer's metadata, version 0."""
    names = b"".join(len(topic).to_bytes(2, "big") + topic.encode() for topic in topics)
    return b"\0\0" + len(topics).to_bytes(4, "big") + names + b"\xff\xff\xff\xff"


def commit(brokers: Brokers, group: str, topic: str, *partitions: int, **who: Any) -> None:
    entries = [
        {"partition_index": index, "committed_offset": 5 + index, "committed_metadata": ""} for index in partitions
    ]
    told = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "", **who}
    brokers.same("offset_commit", 8, topics=[{"name": topic, "partitions": entries}], **told)


def stable(brokers: Brokers, group: str, metadata: bytes = b"m1", **values: Any) -> Each:
    """A group of one member, with an assignment; returns the member."""
    protocols = [{"name": "range", "metadata": metadata}]
    member = member_of(brokers, group, protocols=protocols, **{"session_timeout": 60_000, **values})
    named = {key: value for key, value in values.items() if key in ("group_instance_id", "protocol_type")}
    sync(brokers, 5, group, 1, member, assignments=assigned(member), **named)
    return member


def leave(brokers: Brokers, group: str, member: Each) -> None:
    brokers.same("leave_group", 3, group_id=group, members=[{"member_id": member}])


# ------------------------------------------------------------------------------------------------------------ describe


@pytest.mark.parametrize("version", range(7))
def test_groups_are_described(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    def describe(*groups: str, **values: Any) -> None:
        brokers.same("describe_groups", version, groups=list(groups), **values)

    describe()
    describe("nobody")
    describe("")
    describe("nobody", "", "nobody", "a b/é")
    first, second, third = (group + name for name in ("members", "offsets", "static"))
    topic = topic_in_both()
    commit(brokers, second, topic, 0)
    describe(second)
    member = stable(brokers, first)
    static = stable(brokers, third, subscription(topic), group_instance_id="i1")
    describe(first)
    describe(third)
    describe(first, second, third, "nobody", first)
    if version >= 3:
        describe(first, "nobody", second, include_authorized_operations=True)
    again = [{"name": "range", "metadata": b"other"}, {"name": "sticky", "metadata": b"m2"}]
    join(brokers, 9, first, member, protocols=again)
    describe(first)
    sync(brokers, 5, first, 2, member, assignments=assigned(member, b"B"))
    describe(first)
    leave(brokers, first, member)
    describe(first)
    join(brokers, 9, third, static, group_instance_id="i1", protocols=[{"name": "zzz", "metadata": b""}])
    describe(third)


# ---------------------------------------------------------------------------------------------------------------- list


def listed(brokers: Brokers, group: str, version: int, **values: Any) -> list[str]:
    """What is listed of this test's own groups must be the same; their names without what they begin with."""
    answers = brokers.get("list_groups", version, **values)
    own = Each(
        dataclasses.replace(answer, groups=tuple(each for each in answer.groups if each.group_id.startswith(group)))
        for answer in answers
    )
    brokers.compare(own)
    return sorted(each.group_id.removeprefix(group) for each in own[0].groups)


STATES: list[list[str]] = [
    [], ["Stable"], ["STABLE", "empty"], [" stable "], ["preparingrebalance"], ["PreparingRebalance", "Stable"], [""],
    ["Dead"], ["nonsense"], ["Empty", "nonsense"], ["completing_rebalance"], ["CompletingRebalance"],
]  # fmt: skip
TYPES: list[list[str]] = [
    [], ["classic"], ["CLASSIC"], [" classic"], ["consumer"], ["classic", "consumer"], ["nonsense"], [""],
    ["classic", "nonsense"], ["share"], ["unknown"], ["streams"],
]  # fmt: skip


@pytest.mark.parametrize("version", range(6))
def test_groups_are_listed(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    commit(brokers, group + "offsets", topic_in_both(), 0)
    stable(brokers, group + "stable")
    stable(brokers, group + "connect", protocol_type="connect")
    gone = stable(brokers, group + "gone")
    leave(brokers, group + "gone", gone)
    member_of(brokers, group + "completing")
    assert listed(brokers, group, version) == ["completing", "connect", "gone", "offsets", "stable"]
    found = [listed(brokers, group, version, states_filter=states) for states in STATES] if version >= 4 else []
    assert not found or ["stable", "connect"] not in found
    for types in TYPES if version >= 5 else []:
        for states in ([], ["Stable"], ["nonsense"]):
            listed(brokers, group, version, states_filter=states, types_filter=types)


# -------------------------------------------------------------------------------------------------------------- delete


@pytest.mark.parametrize("version", range(3))
def test_groups_are_deleted(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    def delete(*groups: str) -> None:
        brokers.same("delete_groups", version, groups_names=list(groups))

    topic = topic_in_both(2)
    delete()
    delete("nobody", "", "a b/é")
    delete("nobody", "nobody")
    offsets, members = group + "offsets", group + "members"
    commit(brokers, offsets, topic, 0, 1)
    member = stable(brokers, members)
    commit(brokers, members, topic, 0, generation_id_or_member_epoch=1, member_id=member)
    delete(members, "nobody", offsets, offsets)
    delete(offsets)
    for one in (offsets, members):
        brokers.same("offset_fetch", 7, group_id=one, topics=None)
        brokers.same("describe_groups", 6, groups=[one])
    leave(brokers, members, member)
    delete(members)
    brokers.same("offset_fetch", 7, group_id=members, topics=None)
    assert listed(brokers, group, 5) == []
    again = stable(brokers, members)
    leave(brokers, members, again)
    waiting = join(brokers, 4, members).of("member_id")
    delete(members)
    join(brokers, 4, members, waiting)


# ------------------------------------------------------------------------------------------------------ forget offsets


def test_offsets_are_forgotten(brokers: Brokers, group: str, topic_in_both: NewTopic) -> None:
    topic, other = topic_in_both(3), topic_in_both(1)

    def forget(of: str, *topics: tuple[str, list[int]]) -> None:
        asked = [
            {"name": name, "partitions": [{"partition_index": index} for index in indexes]} for name, indexes in topics
        ]
        brokers.same("offset_delete", 0, group_id=of, topics=asked)
        brokers.same("offset_fetch", 7, group_id=of, topics=None)

    for unknown in ("nobody", ""):
        for topics in ((), ((topic, [0]),), (("nowhere", [0]),), ((topic, [0, 9]), ("nowhere", [0]))):
            forget(unknown, *topics)
    alone = group + "alone"
    commit(brokers, alone, topic, 0, 1, 2)
    commit(brokers, alone, other, 0)
    forget(alone)
    forget(alone, (topic, []))
    forget(alone, ("nowhere", [0, 1]), ("", [0]))
    forget(alone, (topic, [1]))
    forget(alone, (topic, [1, 0, 0, 7, -1]))
    forget(alone, (topic, [2]), (topic, [1, 9]), (other, [0]))
    forget(alone, (other, [0]))
    assert listed(brokers, alone, 5) == [""], "until the next look for what has expired"


@pytest.mark.parametrize("protocol_type", ["consumer", "connect"])
@pytest.mark.parametrize("readable", [True, False])
def test_a_group_with_members_keeps_some_offsets(
    brokers: Brokers, group: str, topic_in_both: NewTopic, protocol_type: str, readable: bool
) -> None:
    subscribed, other = topic_in_both(2), topic_in_both(2)
    metadata = subscription(subscribed) if readable else b"\0\0\7"
    member = stable(brokers, group, metadata, protocol_type=protocol_type)
    for topic in (subscribed, other):
        commit(brokers, group, topic, 0, 1, generation_id_or_member_epoch=1, member_id=member)

    def forget_all() -> None:
        asked = [
            {"name": name, "partitions": [{"partition_index": 0}, {"partition_index": 5}]}
            for name in (subscribed, other, "nowhere")
        ]
        brokers.same("offset_delete", 0, group_id=group, topics=asked)
        brokers.same("offset_fetch", 7, group_id=group, topics=None)

    forget_all()
    join(brokers, 9, group, member, protocol_type=protocol_type, protocols=[{"name": "range", "metadata": b"\0\0"}])
    forget_all()
    leave(brokers, group, member)
    forget_all()
