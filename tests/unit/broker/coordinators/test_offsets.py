from __future__ import annotations

from typing import Any

import pytest

from tests.unit.broker.coordinators.fakes import Reply, World
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.offsets import DeletedTopic, OffsetStore
from tidelog.broker.coordinators.group.records import OffsetCommit
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.group_records import OffsetCommitValue

E = ErrorCode
DAY_MS = 24 * 3600 * 1000


def errors(reply: Reply) -> list[int]:
    return [each.error_code for topic in reply.response.topics for each in topic.partitions]


def test_a_consumer_without_a_group_commits_and_fetches():
    world = World()
    assert errors(world.commit(offsets={("t", 0): 10, ("t", 1): 20})) == [0, 0]
    assert [world.committed(partition=index) for index in range(3)] == [10, 20, -1]
    assert world.committed(group="other") == -1
    world.restart()
    assert world.committed(partition=1) == 20


def test_metadata_and_leader_epoch_come_back():
    world = World()
    world.commit(metadata="from row 7")
    ((_, [entry]),) = world.coordinator().offsets.fetch("g", None, False)
    assert (entry.partition, entry.offset, entry.metadata, entry.leader_epoch) == (0, 1, "from row 7", -1)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ("x" * 4096, E.NONE),
        ("x" * 4097, E.OFFSET_METADATA_TOO_LARGE),
        ("ü" * 4096, E.NONE),
        ("🛫" * 2048, E.NONE),
        ("🛫" * 2049, E.OFFSET_METADATA_TOO_LARGE),
        (None, E.NONE),
    ],
)
def test_metadata_is_limited_as_java_counts_it(metadata, error):
    world = World()
    assert errors(world.commit(metadata=metadata)) == [error]
    assert world.committed() == (1 if error == E.NONE else -1)


def test_members_commit_for_their_generation_and_nobody_else_does():
    world = World()
    (member,) = world.stable()
    assert errors(world.commit(member=member, generation=1)) == [0]
    assert world.commit(member=member, generation=2).error == E.ILLEGAL_GENERATION
    assert world.commit(member="ghost", generation=1).error == E.UNKNOWN_MEMBER_ID
    assert world.commit().error == E.UNKNOWN_MEMBER_ID
    assert world.commit(member=member).error == E.ILLEGAL_GENERATION


def test_the_generation_that_ends_may_still_commit_but_not_while_the_next_is_assigned():
    world = World()
    leader, follower = world.stable(size=2)
    again = world.join(member=leader)
    assert errors(world.commit(member=follower, generation=1)) == [0]
    world.join(member=follower)
    assert again.error == E.NONE
    assert world.commit(member=follower, generation=2).error == E.REBALANCE_IN_PROGRESS
    assert world.commit(member=follower, generation=1).error == E.ILLEGAL_GENERATION


@pytest.mark.parametrize(("version", "error"), [(8, E.ILLEGAL_GENERATION), (9, E.GROUP_ID_NOT_FOUND)])
def test_a_generation_of_an_unknown_group(version, error):
    assert World().commit(generation=3, member="m", version=version).error == error


def test_a_commit_keeps_the_session_alive():
    world = World()
    (member,) = world.stable(session_ms=6000)
    for _ in range(3):
        world.advance(5000)
        assert errors(world.commit(member=member, generation=1)) == [0]


def test_a_commit_is_answered_and_seen_once_it_is_committed():
    world = World(commits_at_once=False)
    first = world.commit(offsets={("t", 0): 1})
    second = world.commit(offsets={("t", 0): 2})
    waiting = world.committed(stable=True)
    assert (first.is_parked, second.is_parked, waiting.is_parked) == (True, True, True)
    assert world.committed() == -1
    world.ports.commit(0, 1)
    assert (errors(first), second.is_parked, world.committed()) == ([0], True, 1)
    world.ports.commit(0)
    assert errors(second) == [0]
    assert waiting.response[0][1][0].offset == 2


def test_a_commit_that_takes_too_long_is_refused_but_counts_when_it_comes():
    world = World(commits_at_once=False)
    reply = world.commit()
    stable = world.committed(stable=True)
    world.advance(5000)
    assert reply.error == E.COORDINATOR_NOT_AVAILABLE
    assert stable.error == E.COORDINATOR_NOT_AVAILABLE
    world.ports.commit(0)
    assert world.committed() == 1


def test_an_offset_of_a_topic_made_again_under_its_name_is_not_found():
    world = World()
    old, new = b"a" * 16, b"b" * 16
    world.commit(topic_id=old)

    def found(topic_id: bytes) -> int:
        return world.coordinator().offsets.fetch("g", [("t", topic_id, [0])], False)[0][1][0].offset

    assert (found(old), found(new), found(bytes(16))) == (1, -1, 1)
    world.service.on_topics_deleted([("t", new)])
    world.advance(0)
    assert found(old) == 1
    world.service.on_topics_deleted([("t", old), ("u", old)])
    world.advance(0)
    assert found(old) == -1
    world.restart()
    assert found(old) == -1
    assert [each.group_state for each in world.list_groups([], [])] == ["Empty"], "as long as in Kafka"
    world.advance(600_000)
    for _ in range(2):
        assert world.coordinator().groups == {}
        world.restart()


def test_deleted_topics_are_not_looked_for_in_every_group():
    """Thousands of each would hold the loop for seconds: a group is asked for the topics that it has."""

    class Counted(dict[str, list[DeletedTopic]]):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    store = OffsetStore()
    for topic in ("t", "u"):
        store.replay(0, OffsetCommit("g", topic, 0, OffsetCommitValue(offset=1, topic_id=bytes([1]) * 16)), -1)
    deleted = Counted({name: [DeletedTopic(bytes([2]) * 16, 9)] for name in ("u", "t", "v", "w")})
    deleted["t"].append(DeletedTopic(bytes([1]) * 16, 9))
    assert [
        (each.group_id, each.topic)
        for each in store.tombstones_of_topics("g", deleted, store.keys("g", deleted.keys()))[0]
    ] == [("g", "t")]
    assert deleted.times == 0


def test_an_offset_written_after_its_topic_was_deleted_is_that_of_another_one():
    """The offsets are deleted some time after the topic, which may be there again by then."""
    world = World(commits_at_once=False)
    world.commit("before", {("t", 0): 1})
    world.ports.commit(0)
    under_way = world.commit("before", {("t", 1): 1})
    world.service.on_topics_deleted([("t", bytes(16))])
    world.service.on_topics_deleted([("t", bytes(16))])
    world.commit("after", {("t", 0): 2})
    for _ in range(2):
        world.ports.commit(0)
        world.advance(1000)
    world.ports.commit(0)
    assert not under_way.is_parked
    store = world.coordinator().offsets
    assert [store.of_group(group_id) == {} for group_id in ("before", "after")] == [True, False]


def test_a_commit_under_way_for_the_new_topic_is_not_deleted_with_the_offset_of_the_old_one():
    """The tombstone would follow the commit in the log."""
    world = World(commits_at_once=False)
    world.commit(offsets={("t", 0): 1, ("t", 1): 1})
    world.ports.commit(0)
    world.service.on_topics_deleted([("x", bytes(16))])
    world.service.on_topics_deleted([("t", bytes(16))])  # has its turn after the other one
    renewed = world.commit(offsets={("t", 0): 2})
    world.advance(0)
    world.ports.commit(0)
    assert renewed.response is not None
    assert (world.committed(partition=0), world.committed(partition=1)) == (2, -1)
    world.advance(1000)
    world.ports.commit(0)
    assert (world.committed(partition=0), world.committed(partition=1)) == (2, -1)
    deadline_ms = world.coordinator().next_deadline_ms()
    assert deadline_ms is not None
    assert deadline_ms > world.ports.time_ms + 1000, "nothing is left to be done"


def test_a_commit_under_way_at_the_moment_its_topic_is_deleted_is_deleted_too():
    world = World(commits_at_once=False)
    world.commit()
    world.service.on_topics_deleted([("t", bytes(16))])
    for _ in range(3):
        world.ports.commit(0)
        world.advance(1000)
    assert world.committed() == -1


def test_offsets_whose_tombstones_are_under_way_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch):
    """There may be hundreds of thousands, for as long as a follower hangs."""
    world = World(commits_at_once=False)
    world.commit(offsets={("t", index): 1 for index in range(50)})
    world.ports.commit(0)
    looks: list[str] = []
    look = OffsetStore.tombstones_of_topics

    def counted(store: OffsetStore, group_id: str, topics: Any, keys: Any) -> Any:
        looks.append(group_id)
        return look(store, group_id, topics, keys)

    monkeypatch.setattr(OffsetStore, "tombstones_of_topics", counted)
    world.service.on_topics_deleted([("t", bytes(16))])
    world.advance(4000)
    assert looks == ["g"]
    world.ports.commit(0)
    world.advance(1000)
    assert looks == ["g", "g"]
    assert world.coordinator().offsets.group_ids() == []


def test_offsets_of_a_deleted_topic_are_deleted_when_the_log_takes_records_again():
    world = World()
    world.commit()
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    world.service.on_topics_deleted([("t", bytes(16))])
    world.advance(1000)
    assert world.committed() == 1
    world.ports.refuse_appends = None
    world.advance(1000)
    assert world.committed() == -1


def test_topics_deleted_while_the_partition_loads_are_forgotten_too():
    world = World()
    world.commit()
    world.service.on_partition_elected(0, 2)
    world.service.on_topics_deleted([("t", bytes(16))])
    world.advance(0)
    assert world.committed() == -1


SUBSCRIBED_TO_T = b"\0\1" + b"\0\0\0\1" + b"\0\1t" + b"\xff\xff\xff\xff"


class TestExpiry:
    config = GroupCoordinatorConfig(offsets_retention_ms=DAY_MS)

    def test_offsets_of_a_consumer_without_a_group_expire_a_retention_after_the_commit(self):
        world = World(self.config)
        world.commit(offsets={("t", 0): 1})
        world.advance(DAY_MS // 2)
        world.commit(offsets={("t", 1): 1})
        world.advance(DAY_MS // 2 + 600_000)
        assert (world.committed(partition=0), world.committed(partition=1)) == (-1, 1)
        world.advance(DAY_MS)
        assert world.coordinator().groups == {}
        world.restart()
        assert world.coordinator().groups == {}

    def test_an_empty_groups_offsets_count_from_when_it_became_empty(self):
        world = World(self.config)
        (member,) = world.stable(session_ms=1_800_000)
        world.commit(member=member, generation=1)
        for _ in range(100):
            world.advance(1_000_000)
            assert world.heartbeat(member=member).error == 0
        assert world.committed() == 1, "the commit is older than the retention, but the group lives"
        world.leave("g", member)
        world.advance(DAY_MS - 600_000)
        assert world.committed() == 1
        world.advance(1_300_000)
        assert world.committed() == -1
        assert "g" not in world.coordinator().groups
        world.restart()
        assert "g" not in world.coordinator().groups

    def test_topics_that_nobody_subscribes_to_any_more_expire_in_a_living_group(self):
        world = World(self.config)
        (member,) = world.stable(session_ms=1_800_000, protocols={"range": SUBSCRIBED_TO_T})
        world.commit(member=member, generation=1, offsets={("t", 0): 1, ("left", 0): 2})
        for _ in range(90):
            world.advance(1_000_000)
            world.heartbeat(member=member)
        assert (world.committed(), world.committed(topic="left")) == (1, -1)

    def test_a_group_with_members_stays_when_all_its_offsets_go(self):
        world = World(self.config)
        (member,) = world.stable(session_ms=1_800_000, protocols={"range": SUBSCRIBED_TO_T})
        world.commit(member=member, generation=1, offsets={("left", 0): 2})
        for _ in range(90):
            world.advance(1_000_000)
            assert world.heartbeat(member=member).error == E.NONE
        assert world.committed(topic="left") == -1
        world.restart()
        assert world.heartbeat(member=member).error == E.NONE

    @pytest.mark.parametrize(
        ("protocol_type", "metadata"), [("consumer", b"\0\0\7"), ("connect", b"\0\0\7"), ("connect", SUBSCRIBED_TO_T)]
    )
    def test_who_does_not_say_what_it_reads_keeps_all(self, protocol_type: str, metadata: bytes):
        world = World(self.config)
        protocols = {"range": metadata}
        joined = world.join(version=3, session_ms=1_800_000, protocol_type=protocol_type, protocols=protocols)
        world.advance(3000)
        member = joined.response.member_id
        world.sync(member=member, protocol_type=protocol_type, assignments={member: b"x"})
        world.commit(member=member, generation=1, offsets={("left", 0): 2})
        for _ in range(90):
            world.advance(1_000_000)
            assert world.heartbeat(member=member).error == E.NONE
        assert world.committed(topic="left") == 2

    def test_a_commit_that_named_its_retention_is_taken_at_its_word(self):
        world = World(self.config)
        world.commit(retention_ms=1000, version=2)
        world.commit(group="late", retention_ms=3 * DAY_MS, version=2)
        world.restart()
        world.advance(600_000)
        assert world.committed() == -1
        world.advance(2 * DAY_MS)
        assert world.committed(group="late") == 1

    def test_a_group_that_comes_back_while_its_deletion_is_stored_lives_on(self):
        world = World(self.config, commits_at_once=False)
        (member,) = world.stable()
        world.leave("g", member)
        world.ports.commit(0)
        end_offset = world.ports.end_offsets[0]
        world.advance(DAY_MS - 1)
        joined = world.join(version=3, session_ms=1_800_000)
        world.leave("g", world.coordinator().groups["g"].leader or "")
        world.advance(3000)
        assert joined.error == E.UNKNOWN_MEMBER_ID
        world.ports.commit(0)
        world.advance(DAY_MS + 600_000)
        assert world.ports.end_offsets[0] > end_offset + 1
        back = world.join(version=3)
        world.ports.commit(0)
        assert "g" in world.coordinator().groups
        world.advance(3000)
        assert back.error == E.NONE

    def test_an_offset_that_is_being_committed_anew_does_not_expire(self):
        """It is acknowledged a moment after the look, and the tombstone would lie behind it in the log."""
        world = World(self.config)
        world.commit(offsets={("t", 0): 1, ("t", 1): 1})
        world.ports.commits_at_once = False
        world.advance(DAY_MS - 1)
        renewed = world.commit(offsets={("t", 0): 2})
        assert renewed.is_parked
        world.advance(5)  # the look, a day after the first commits
        world.ports.commit(0)
        assert errors(renewed) == [0]
        world.ports.commit(0)
        assert (world.committed(), world.committed(partition=1)) == (2, -1)
        assert not world.coordinator().offsets._in_flight

    def test_a_commit_that_failed_holds_no_expiry_up(self):
        world = World(self.config)
        world.commit()
        world.ports.refuse_appends = KafkaError(E.NOT_LEADER_OR_FOLLOWER)
        assert isinstance(world.commit(offsets={("t", 0): 2}).response, KafkaError)
        world.ports.refuse_appends = None
        world.advance(2 * DAY_MS)
        assert world.committed() == -1

    @pytest.mark.slow
    def test_thousands_of_groups_expire_a_few_at_a_time(self):
        world = World(self.config)
        for number in range(1000):
            world.commit(group=f"g{number}")
        batches = len(world.ports.logs[0])
        world.advance(DAY_MS + 600_000 + 100)
        assert world.coordinator().groups == {}
        assert len(world.ports.logs[0]) - batches == 1000


def committed(offset: int, **options) -> OffsetCommit:
    values = {"metadata": "", "commit_timestamp": 5, **options}
    return OffsetCommit("g", "t", 0, OffsetCommitValue(offset=offset, **values))


class TestTransactions:
    def offset(self, store: OffsetStore, stable: bool = False) -> int:
        return store.fetch("g", [("t", bytes(16), [0])], stable)[0][1][0].offset

    def test_an_offset_counts_when_its_transaction_commits(self):
        store = OffsetStore()
        store.replay(0, committed(1), -1)
        store.replay(1, committed(2), 77)
        assert self.offset(store) == 1
        assert store.fetch("g", [("t", bytes(16), [0])], True)[0][1][0].error == E.UNSTABLE_OFFSET_COMMIT
        store.replay_end_transaction(77, True)
        assert self.offset(store, stable=True) == 2

    def test_an_aborted_one_never_does(self):
        store = OffsetStore()
        store.replay(1, committed(2), 77)
        assert "g" in store
        store.replay_end_transaction(77, False)
        assert self.offset(store) == -1
        assert "g" not in store

    def test_a_later_plain_commit_is_not_overwritten_by_a_transaction_that_ends_afterwards(self):
        store = OffsetStore()
        store.replay(0, committed(1), 77)
        store.replay(1, committed(2), -1)
        store.replay_end_transaction(77, True)
        assert self.offset(store) == 2

    @pytest.mark.parametrize(("first", "second"), [((9, 77), (2, -1)), ((9, -1), (2, 77))])
    def test_the_later_record_wins_at_the_end_of_a_transaction_though_its_offset_is_lower(self, first, second):
        """A consumer that goes back on purpose, in the transaction or beside it."""
        store = OffsetStore()
        for record_offset, (offset, producer_id) in enumerate((first, second)):
            store.replay(record_offset, committed(offset), producer_id)
        store.replay_end_transaction(77, True)
        assert self.offset(store) == 2

    def test_a_tombstone_takes_the_pending_one_along(self):
        store = OffsetStore()
        store.replay(0, committed(1), 77)
        store.replay(1, OffsetCommit("g", "t", 0, None), -1)
        store.replay_end_transaction(77, True)
        assert self.offset(store) == -1

    def test_a_pending_offset_does_not_expire(self):
        store = OffsetStore()
        store.replay(0, committed(1), -1)
        store.replay(1, committed(2), 77)
        group = Group("g", 0)
        assert store.expiration_records(group, store.keys("g"), DAY_MS, 1) == ([], False)
        store.replay_end_transaction(77, False)
        assert store.expiration_records(group, store.keys("g"), DAY_MS, 1) == ([OffsetCommit("g", "t", 0, None)], True)


def test_groups_in_motion_do_not_lose_offsets():
    store = OffsetStore()
    store.replay(0, committed(1), -1)
    group = Group("g", 0)
    group.protocol_type = "consumer"
    group.subscribed_topics = frozenset({"another"})
    for state in (GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE):
        group.state = state
        assert store.expiration_records(group, store.keys("g"), DAY_MS, 1) == ([], False)
