"""The six handlers at every version: what a client sends can be decoded, and what it gets can be encoded."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.broker.coordinators.fakes import Reply, World, context
from tidelog.broker.apis.groups import heartbeat, join_group, leave_group, offset_commit, offset_fetch, sync_group
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.heartbeat import HeartbeatRequest
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

E = ErrorCode
TOPIC_ID = b"t" * 16
GONE_ID = b"g" * 16
MODULES = (join_group, sync_group, heartbeat, leave_group, offset_commit, offset_fetch)


class Node:
    """Handlers called as dispatch calls them, over encoded bytes."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)
        topic = SimpleNamespace(name="t", topic_id=TOPIC_ID, partitions={0: None, 1: None})
        self.image = SimpleNamespace(topics_by_name={"t": topic}, topics_by_id={TOPIC_ID: topic})
        self.services: Any = SimpleNamespace(image=lambda: self.image, groups=self.world.service)

    def ask(self, module: ModuleType, request: Any, version: int) -> Reply:
        decoded = module.REQUEST.decode(request.encode(version), version)
        return Reply(lambda: module.handle(self.services, context(module.REQUEST.API_KEY, version), decoded))

    def answer(self, module: ModuleType, request: Any, version: int) -> Any:
        reply = self.ask(module, request, version)
        assert not reply.is_parked
        response = reply.response
        if isinstance(response, KafkaError):
            response = module.refuse(request, response, version)
        return type(response).decode(response.encode(version), version)


def versions(module: ModuleType) -> list[Any]:
    return [
        pytest.param(module, version, id=f"{module.REQUEST.__name__}-{version}") for version in module.REQUEST.VERSIONS
    ]


@pytest.mark.parametrize("version", join_group.REQUEST.VERSIONS)
def test_a_member_joins_syncs_beats_and_leaves_at_every_version(version: int):
    node = Node()
    at = {module: min(version, module.REQUEST.VERSIONS[-1]) for module in MODULES}
    join = JoinGroupRequest(
        group_id="g", session_timeout_ms=10_000, rebalance_timeout_ms=10_000 if version else -1,
        protocol_type="consumer", protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )  # fmt: skip
    if version >= 4:
        refused = node.answer(join_group, join, version)
        assert refused.error_code == E.MEMBER_ID_REQUIRED
        join.member_id = refused.member_id
    reply = node.ask(join_group, join, version)
    node.world.advance(6000)
    joined = type(reply.response).decode(reply.response.encode(version), version)
    assert (joined.error_code, joined.generation_id, joined.protocol_name) == (0, 1, "range")
    assert joined.protocol_type == ("consumer" if version >= 7 else None)
    assert [(member.member_id, member.metadata) for member in joined.members] == [(joined.member_id, b"m")]
    sync = SyncGroupRequest(
        group_id="g", generation_id=1, member_id=joined.member_id,
        assignments=[SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"all")],
    )  # fmt: skip
    if at[sync_group] >= 5:
        sync.protocol_type, sync.protocol_name = "consumer", "range"
    assert node.answer(sync_group, sync, at[sync_group]).assignment == b"all"
    beat = HeartbeatRequest(group_id="g", generation_id=1, member_id=joined.member_id)
    assert node.answer(heartbeat, beat, at[heartbeat]).error_code == 0
    leave = LeaveGroupRequest(group_id="g", member_id=joined.member_id)
    if at[leave_group] >= 3:
        leave = LeaveGroupRequest(group_id="g", members=[MemberIdentity(member_id=joined.member_id)])
    left = node.answer(leave_group, leave, at[leave_group])
    assert left.error_code == 0
    assert [member.error_code for member in left.members] == ([0] if at[leave_group] >= 3 else [])
    assert node.answer(heartbeat, beat, at[heartbeat]).error_code == E.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("group_id", ["", "g"])
def test_a_sync_without_a_protocol_is_refused_for_that_first(group_id: str):
    request = SyncGroupRequest(group_id=group_id, protocol_type=None, protocol_name="range")
    assert Node().answer(sync_group, request, 5).error_code == E.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize(("module", "version"), [each for module in MODULES for each in versions(module)])
def test_a_refusal_can_be_encoded_at_every_version(module: ModuleType, version: int):
    request: Any = module.REQUEST.decode(module.REQUEST(**filled(module, version)).encode(version), version)
    response = module.refuse(request, KafkaError(E.NOT_COORDINATOR), version)
    decoded = type(response).decode(response.encode(version), version)
    assert int(E.NOT_COORDINATOR) in set(error_codes(decoded))


def filled(module: ModuleType, version: int) -> dict[str, Any]:
    if module is offset_commit:
        return {"topics": [commit_topic("t", 0)]}
    if module is offset_fetch and version < 8:
        return {"topics": [OffsetFetchRequestTopic(name="t", partition_indexes=[0])]}
    if module is offset_fetch:
        return {"groups": [OffsetFetchRequestGroup(group_id="g", topics=None)]}
    return {"group_id": "g"}


def error_codes(message: Any) -> list[int]:
    found = []
    for name, _ in message.FIELDS:
        value = getattr(message, name)
        if name == "error_code":
            found.append(value)
        elif isinstance(value, list):
            found += [code for each in value if hasattr(each, "FIELDS") for code in error_codes(each)]
    return found


def commit_topic(
    name: str, *indexes: int, topic_id: bytes = TOPIC_ID, metadata: str = "note"
) -> OffsetCommitRequestTopic:
    partitions = [
        OffsetCommitRequestPartition(partition_index=index, committed_offset=100 + index, committed_metadata=metadata)
        for index in indexes
    ]
    return OffsetCommitRequestTopic(name=name, topic_id=topic_id, partitions=partitions)


def results(response: OffsetCommitResponse) -> dict[tuple[str | bytes, int], int]:
    return {
        (topic.name or topic.topic_id, partition.partition_index): partition.error_code
        for topic in response.topics
        for partition in topic.partitions
    }


def fetch_request(version: int, topics: dict[str, list[int]] | None, ids: dict[str, bytes] | None = None) -> Any:
    if version < 8:
        asked = None if topics is None else [
            OffsetFetchRequestTopic(name=name, partition_indexes=indexes) for name, indexes in topics.items()
        ]  # fmt: skip
        return OffsetFetchRequest(group_id="g", topics=asked)
    many = None if topics is None else [
        OffsetFetchRequestTopics(name=name, topic_id=(ids or {}).get(name, TOPIC_ID), partition_indexes=indexes)
        for name, indexes in topics.items()
    ]  # fmt: skip
    return OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=many)])


def offsets(response: OffsetFetchResponse, version: int) -> dict[tuple[str | bytes, int], tuple[int, str | None, int]]:
    topics: Any = response.topics
    if version >= 8:
        (group,) = response.groups
        assert (group.group_id, group.error_code) == ("g", 0)
        topics = group.topics
    return {
        (topic.name if version < 10 else topic.topic_id, entry.partition_index): (
            entry.committed_offset, entry.metadata, entry.error_code,
        )
        for topic in topics
        for entry in topic.partitions
    }  # fmt: skip


@pytest.mark.parametrize("version", offset_commit.REQUEST.VERSIONS)
def test_offsets_are_committed_and_fetched_at_every_version(version: int):
    node = Node()
    request = OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0, 1)])
    name = "t" if version < 10 else TOPIC_ID
    assert results(node.answer(offset_commit, request, version)) == {(name, 0): 0, (name, 1): 0}
    fetched = node.answer(offset_fetch, fetch_request(version, {"t": [0, 5]}), version)
    assert offsets(fetched, version) == {(name, 0): (100, "note", 0), (name, 5): (-1, "", 0)}
    everything = node.answer(offset_fetch, fetch_request(version, None), version)
    assert offsets(everything, version) == {(name, 0): (100, "note", 0), (name, 1): (101, "note", 0)}


def test_the_oldest_fetch():
    node = Node()
    node.answer(offset_commit, OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0)]), 2)
    fetched = node.answer(offset_fetch, fetch_request(1, {"t": [0]}), 1)
    assert offsets(fetched, 1) == {("t", 0): (100, "note", 0)}


def test_partitions_that_do_not_exist_are_refused_one_by_one():
    node = Node()
    request = OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0, 7), commit_topic("nowhere", 0)])
    assert results(node.answer(offset_commit, request, 9)) == {
        ("t", 0): 0,
        ("t", 7): E.UNKNOWN_TOPIC_OR_PARTITION,
        ("nowhere", 0): E.UNKNOWN_TOPIC_OR_PARTITION,
    }
    by_id = OffsetCommitRequest(group_id="g", topics=[commit_topic("", 1, 7), commit_topic("", 0, topic_id=GONE_ID)])
    assert results(node.answer(offset_commit, by_id, 10)) == {
        (TOPIC_ID, 1): 0,
        (TOPIC_ID, 7): E.UNKNOWN_TOPIC_OR_PARTITION,
        (GONE_ID, 0): E.UNKNOWN_TOPIC_ID,
    }
    only_unknown = OffsetCommitRequest(group_id="", topics=[commit_topic("nowhere", 0)])
    assert results(node.answer(offset_commit, only_unknown, 9)) == {("nowhere", 0): E.UNKNOWN_TOPIC_OR_PARTITION}


def test_the_refused_partitions_of_a_topic_named_twice_are_in_one_entry():
    """As in Kafka, whether others are committed or not."""
    node = Node()
    for more in ([], [commit_topic("t", 0)]):
        topics = [commit_topic("nowhere", 0), *more, commit_topic("nowhere", 1)]
        answer = node.answer(offset_commit, OffsetCommitRequest(group_id="g", topics=topics), 9)
        assert [(topic.name, len(topic.partitions)) for topic in answer.topics] == [
            ("nowhere", 2),
            *(("t", 1) for _ in more),
        ]


def test_a_refused_commit_answers_for_every_partition():
    node = Node()
    request = OffsetCommitRequest(
        group_id="g", generation_id_or_member_epoch=5, member_id="m", topics=[commit_topic("t", 0, 7)]
    )
    answer = results(node.answer(offset_commit, request, 8))
    assert answer == {("t", 0): E.ILLEGAL_GENERATION, ("t", 7): E.UNKNOWN_TOPIC_OR_PARTITION}


def test_a_commit_that_fails_later_answers_for_every_partition():
    node = Node(commits_at_once=False)
    request = OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0, 1)])
    reply = node.ask(offset_commit, request, 9)
    partly_unknown = node.ask(offset_commit, OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0, 7)]), 9)
    assert reply.is_parked
    node.world.advance(5000)
    assert reply.error == E.COORDINATOR_NOT_AVAILABLE
    assert set(results(offset_commit.refuse(request, reply.response, 9)).values()) == {E.COORDINATOR_NOT_AVAILABLE}
    assert results(partly_unknown.response) == {
        ("t", 0): E.COORDINATOR_NOT_AVAILABLE,
        ("t", 7): E.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_an_unknown_topic_id_is_said_and_a_deleted_topic_has_no_name_left():
    node = Node()
    node.answer(offset_commit, OffsetCommitRequest(group_id="g", topics=[commit_topic("", 0)]), 10)
    fetched = node.answer(offset_fetch, fetch_request(10, {"": [0]}, {"": GONE_ID}), 10)
    assert offsets(fetched, 10) == {(GONE_ID, 0): (-1, "", E.UNKNOWN_TOPIC_ID)}
    node.image.topics_by_name.clear()
    assert offsets(node.answer(offset_fetch, fetch_request(10, None), 10), 10) == {}
    assert offsets(node.answer(offset_fetch, fetch_request(9, None), 9), 9) == {("t", 0): (100, "note", 0)}


@pytest.mark.parametrize("version", offset_commit.REQUEST.VERSIONS)
def test_a_topic_gets_no_offset_of_a_former_topic_of_its_name(version: int):
    """The former coordinator moved or died before it had deleted the offset."""
    node = Node()
    node.answer(offset_commit, OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 0, 1)]), version)
    new_id = b"n" * 16
    topic = SimpleNamespace(name="t", topic_id=new_id, partitions={0: None, 1: None})
    node.image.topics_by_name, node.image.topics_by_id = {"t": topic}, {new_id: topic}
    name = "t" if version < 10 else new_id
    asked = fetch_request(version, {"t": [0]}, {"t": new_id})
    assert offsets(node.answer(offset_fetch, asked, version), version) == {(name, 0): (-1, "", 0)}
    assert offsets(node.answer(offset_fetch, fetch_request(version, None), version), version) == {}
    node.answer(
        offset_commit, OffsetCommitRequest(group_id="g", topics=[commit_topic("t", 1, topic_id=new_id)]), version
    )
    found = offsets(node.answer(offset_fetch, fetch_request(version, None), version), version)
    assert found == {(name, 1): (101, "note", 0)}


def test_many_groups_in_many_places():
    node = Node(partitions=8, commits_at_once=False)
    groups = [f"g{number}" for number in range(6)]
    for group in groups:
        node.ask(offset_commit, OffsetCommitRequest(group_id=group, topics=[commit_topic("t", 0)]), 9)
    request = OffsetFetchRequest(
        require_stable=True, groups=[OffsetFetchRequestGroup(group_id=group, topics=None) for group in groups]
    )
    reply = node.ask(offset_fetch, request, 9)
    for partition in range(8):
        assert reply.is_parked
        node.world.ports.commit(partition)
        if partition == max(node.world.service.partition_for(group) for group in groups):
            break
    assert [group.topics[0].partitions[0].committed_offset for group in reply.response.groups] == [100] * 6
    node.world.service.on_partition_resigned(node.world.service.partition_for("g2"))
    errors = {group.group_id: group.error_code for group in node.answer(offset_fetch, request, 9).groups}
    assert errors["g2"] == E.NOT_COORDINATOR
    assert 0 in errors.values()
    old = node.answer(offset_fetch, OffsetFetchRequest(group_id="g2", topics=[]), 7)
    assert old.error_code == E.NOT_COORDINATOR


def test_no_groups_asked_none_answered():
    assert Node().answer(offset_fetch, OffsetFetchRequest(groups=[]), 8).groups == []
