from __future__ import annotations

import pytest

from tests.unit.broker.coordinators.fakes import World, context
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_groups import DescribeGroupsResponse

E = ErrorCode


def delete(world: World, group: str = "g"):
    return world.ask(lambda: world.service.delete_group(context(42, 2), group))


def delete_offsets(world: World, *partitions: int, group: str = "g", topic: str = "t"):
    return world.ask(lambda: world.service.delete_offsets(context(47, 0), group, [(topic, list(partitions))]))


def test_a_stable_group_shows_who_reads_what():
    world = World()
    leader, follower = world.stable(size=2)
    (group,) = world.service.describe_groups(["g"], 6)
    assert (group.error_code, group.group_state, group.protocol_type) == (0, "Stable", "consumer")
    assert group.protocol_data == "range"
    shown = {(each.member_id, each.client_host, each.member_metadata, each.member_assignment) for each in group.members}
    assert shown == {(each, "/127.0.0.1", b"meta", each.encode()) for each in (leader, follower)}
    world.join(member=leader)
    (group,) = world.service.describe_groups(["g"], 6)
    assert (group.group_state, group.protocol_data) == ("PreparingRebalance", "")
    assert {each.member_metadata for each in group.members} == {b""}
    assert {each.member_assignment for each in group.members} == {leader.encode(), follower.encode()}, "still"


@pytest.mark.parametrize(("version", "error"), [(5, E.NONE), (6, E.GROUP_ID_NOT_FOUND)])
def test_an_unknown_group_is_dead(version: int, error: ErrorCode):
    (group,) = World().service.describe_groups(["g"], version)
    assert (group.group_state, group.error_code) == ("Dead", error)
    DescribeGroupsResponse(groups=[group]).encode(version)


def test_groups_are_listed_by_state_and_type():
    world = World(partitions=4)
    world.stable("reads", session_ms=300_000)
    world.commit("commits")
    listed = {each.group_id: (each.group_state, each.protocol_type) for each in world.list_groups([], [])}
    assert listed == {"reads": ("Stable", "consumer"), "commits": ("Empty", "")}
    assert [each.group_id for each in world.list_groups(["STABLE"], ["Classic"])] == ["reads"]
    assert world.list_groups([], ["consumer"]) == []
    world.service.on_partition_elected(0, 9)
    with pytest.raises(KafkaError, match="LOAD_IN_PROGRESS"):
        world.list_groups([], [])
    errors = {each.error_code for each in world.service.describe_groups([f"g{n}" for n in range(20)], 5)}
    assert errors == {E.NONE, E.COORDINATOR_LOAD_IN_PROGRESS}


def test_an_empty_group_is_deleted_with_its_offsets_and_stays_so():
    world = World()
    (member,) = world.stable()
    world.commit(member=member, generation=1)
    assert delete(world).error == E.NON_EMPTY_GROUP
    world.leave("g", member)
    assert delete(world).error == E.NONE
    for _ in range(2):
        assert world.committed() == -1
        assert world.coordinator().groups == {}
        assert delete(world).error == E.GROUP_ID_NOT_FOUND
        world.restart()


def test_a_deletion_waits_for_what_is_being_committed():
    world = World(commits_at_once=False)
    world.commit()
    world.ports.commit(0)
    late = world.commit(offsets={("t", 1): 7})
    deletion = delete(world)
    assert late.is_parked
    assert deletion.is_parked
    world.ports.commit(0)
    world.ports.commit(0)
    assert deletion.error == E.NONE
    assert (world.committed(), world.committed(partition=1)) == (-1, -1)
    assert world.coordinator().groups == {}


def test_a_deletion_that_cannot_be_stored_deletes_nothing():
    world = World()
    world.commit()
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    assert delete(world).error == E.COORDINATOR_NOT_AVAILABLE
    assert world.committed() == 1
    world.ports.refuse_appends = None
    assert delete(world).error == E.NONE


def test_offsets_of_topics_that_are_read_are_kept():
    world = World()
    subscription = b"\0\1" + b"\0\0\0\1" + b"\0\1t" + b"\xff\xff\xff\xff"
    (member,) = world.stable(protocols={"range": subscription})
    world.commit(member=member, generation=1, offsets={("t", 0): 1, ("old", 0): 2})
    assert delete_offsets(world, 0).response == {("t", 0): E.GROUP_SUBSCRIBED_TO_TOPIC}
    assert delete_offsets(world, 0, 5, topic="old").response == {("old", 0): 0, ("old", 5): 0}
    assert (world.committed(), world.committed(topic="old")) == (1, -1)
    world.leave("g", member)
    assert delete_offsets(world, 0).response == {("t", 0): 0}
    world.restart()
    assert world.committed() == -1


def test_offsets_of_a_group_whose_protocol_says_nothing_of_topics_are_kept():
    world = World()
    world.join(protocol_type="connect", version=3)
    assert delete_offsets(world, 0).error == E.NON_EMPTY_GROUP
    assert delete_offsets(world, 0, group="nowhere").error == E.GROUP_ID_NOT_FOUND
    assert delete_offsets(world, 0, group="").error == E.INVALID_GROUP_ID


def test_a_group_without_offsets_left_stays_until_the_next_look():
    world = World()
    world.commit()
    assert delete_offsets(world, 0).response == {("t", 0): 0}
    written = world.ports.end_offsets[0]
    assert delete_offsets(world, 0, 1).response == {("t", 0): 0, ("t", 1): 0}
    assert world.ports.end_offsets[0] == written, "there is nothing left to forget"
    world.advance(600_000)
    assert delete_offsets(world, 0).error == E.GROUP_ID_NOT_FOUND


def test_member_ids_handed_out_go_with_their_group():
    world = World()
    world.commit()
    waiting = world.join().response.member_id
    assert delete(world).error == E.NONE
    assert world.join(member=waiting).error == E.UNKNOWN_MEMBER_ID
    assert len(world.coordinator().timers) == 1, "only the next look for what has expired"


def test_states_are_asked_for_in_any_spelling():
    world = World()
    world.stable("reads")
    assert [each.group_id for each in world.list_groups([" sTable "], [])] == ["reads"]


def test_thousands_of_offsets_go_in_batches_that_fit():
    world = World()
    topic = "t" * 249
    for start in range(0, 5000, 1000):
        world.commit(offsets={(topic, index): 1 for index in range(start, start + 1000)})
    before = len(world.ports.logs[0])
    deleted = delete(world)
    world.ports.turns_after(0)
    assert deleted.error == E.NONE
    assert len(world.ports.logs[0]) > before + 1
    assert max(len(batch) for batch in world.ports.logs[0][before:]) < 500_000
    world.restart()
    assert world.list_groups([], []) == []


def test_lags_are_told_of_partitions_that_are_here():
    world = World(partitions=4)
    world.ports.topic_ends = {("t", 0): 10, ("t", 1): 3, ("u", 0): 5}
    world.commit("a", {("t", 0): 4, ("t", 1): 7, ("elsewhere", 0): 1})
    world.commit("b", {("u", 0): 5})
    lags, are_all = world.service.lags()
    assert (sorted(lags), are_all) == ([("a", "t", 0, 6), ("a", "t", 1, 0), ("b", "u", 0, 0)], True)
    assert world.service.lags(limit=3)[1]
    lags, are_all = world.service.lags(limit=2)
    assert (len(lags), are_all) == (2, False)
    world.service.on_partition_resigned(world.service.partition_for("b"))
    assert ("b", "u", 0, 0) not in world.service.lags()[0]


def test_of_commits_to_partitions_elsewhere_no_more_than_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    world = World()
    world.commit("a", {("elsewhere", index): 1 for index in range(100)})
    asked: list[int] = []
    monkeypatch.setattr(world.ports, "high_watermark", lambda topic, partition: asked.append(partition))
    assert world.service.lags(limit=3) == ([], False)
    assert len(asked) == 30
