"""The assignors on the worked examples of Kafka's documents, and where members come, go or lie."""

from __future__ import annotations

from random import Random

import pytest

from tidelog.client.assignment import sticky_assignor
from tidelog.client.assignment.assignors import RangeAssignor, RoundRobinAssignor, assignor_named
from tidelog.client.assignment.protocol import Assignment, MemberSubscription, encode_sticky_user_data
from tidelog.client.assignment.sticky_assignor import CooperativeStickyAssignor, StickyAssignor
from tidelog.client.model import TopicPartition


def shown(assignment: Assignment) -> dict[str, str]:
    """ "T0P0 T1P2" per member, in the order given."""
    return {member: " ".join(f"{topic}P{number}" for topic, number in parts) for member, parts in assignment.items()}


def partitions(text: str) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(word.split("P")[0], int(word.split("P")[1])) for word in text.split())


def members(*names: str, topics: tuple[str, ...] = ("T0",)) -> dict[str, MemberSubscription]:
    return {name: MemberSubscription(topics) for name in names}


def owning(topics: tuple[str, ...], owned: str, generation: int = 1) -> MemberSubscription:
    """A member that comes back with an assignment, told both ways."""
    held = partitions(owned)
    return MemberSubscription(topics, held, generation, user_data=encode_sticky_user_data(held, generation))


UNEVEN = {"T0": 1, "T1": 2, "T2": 3}
UNEVEN_MEMBERS = {
    "C0": MemberSubscription(("T0",)),
    "C1": MemberSubscription(("T0", "T1")),
    "C2": MemberSubscription(("T0", "T1", "T2")),
}


class TestRange:
    def test_two_members_halve_a_topic_of_four(self):
        assert shown(RangeAssignor().assign({"T0": 4}, members("C0", "C1"))) == {"C0": "T0P0 T0P1", "C1": "T0P2 T0P3"}

    def test_of_three_members_the_first_has_one_more(self):
        found = RangeAssignor().assign({"T0": 4}, members("C0", "C1", "C2"))
        assert shown(found) == {"C0": "T0P0 T0P1", "C1": "T0P2", "C2": "T0P3"}

    def test_of_five_members_the_last_has_none(self):
        found = RangeAssignor().assign({"T0": 4}, members("C0", "C1", "C2", "C3", "C4"))
        assert shown(found) == {"C0": "T0P0", "C1": "T0P1", "C2": "T0P2", "C3": "T0P3", "C4": ""}

    def test_every_topic_is_divided_alone(self):
        found = RangeAssignor().assign({"T0": 4, "T1": 4}, members("C0", "C1", "C2", topics=("T0", "T1")))
        assert shown(found) == {"C0": "T0P0 T0P1 T1P0 T1P1", "C1": "T0P2 T1P2", "C2": "T0P3 T1P3"}

    def test_static_members_come_first_and_by_their_instance_id(self):
        group = {
            "zz": MemberSubscription(("T0",), instance_id="i1"),
            "aa": MemberSubscription(("T0",), instance_id="i2"),
            "00": MemberSubscription(("T0",)),
        }
        assert shown(RangeAssignor().assign({"T0": 3}, group)) == {"zz": "T0P0", "aa": "T0P1", "00": "T0P2"}


class TestRoundRobin:
    def test_partitions_go_round(self):
        found = RoundRobinAssignor().assign({"T0": 4}, members("C0", "C1", "C2"))
        assert shown(found) == {"C0": "T0P0 T0P3", "C1": "T0P1", "C2": "T0P2"}

    def test_members_without_the_topic_are_passed_over(self):
        found = RoundRobinAssignor().assign(UNEVEN, UNEVEN_MEMBERS)
        assert shown(found) == {"C0": "T0P0", "C1": "T1P0", "C2": "T1P1 T2P0 T2P1 T2P2"}


class TestSticky:
    FOUR = {f"T{number}": 2 for number in range(4)}
    TOPICS = ("T0", "T1", "T2", "T3")

    def test_at_first_it_goes_round(self):
        found = StickyAssignor().assign(self.FOUR, members("C0", "C1", "C2", topics=self.TOPICS))
        assert shown(found) == {"C0": "T0P0 T1P1 T3P0", "C1": "T0P1 T2P0 T3P1", "C2": "T1P0 T2P1"}

    @pytest.mark.parametrize("assignor", [StickyAssignor(), CooperativeStickyAssignor()])
    def test_when_a_member_leaves_the_others_keep_what_they_have(self, assignor):
        left = {"C0": owning(self.TOPICS, "T0P0 T1P1 T3P0"), "C2": owning(self.TOPICS, "T1P0 T2P1")}
        found = assignor.assign(self.FOUR, left)
        assert {member: set(parts) for member, parts in found.items()} == {
            "C0": set(partitions("T0P0 T1P1 T3P0 T2P0")),
            "C2": set(partitions("T1P0 T2P1 T0P1 T3P1")),
        }

    def test_unequal_subscriptions_are_balanced_as_far_as_they_allow(self):
        found = StickyAssignor().assign(UNEVEN, UNEVEN_MEMBERS)
        assert shown(found) == {"C0": "T0P0", "C1": "T1P0 T1P1", "C2": "T2P0 T2P1 T2P2"}

    def test_of_unequal_members_the_lightest_that_may_takes_over(self):
        left = {"C1": owning(("T0", "T1"), "T1P0 T1P1"), "C2": owning(("T0", "T1", "T2"), "T2P0 T2P1 T2P2")}
        found = StickyAssignor().assign(UNEVEN, left)
        assert {member: set(parts) for member, parts in found.items()} == {
            "C1": set(partitions("T1P0 T1P1 T0P0")),
            "C2": set(partitions("T2P0 T2P1 T2P2")),
        }

    def test_a_chain_of_moves_is_found_where_no_single_move_helps(self):
        group = {
            "A": owning(("T0",), "T0P0 T0P1"),
            "B": owning(("T0", "T1"), "T1P0"),
            "C": owning(("T1",), ""),
        }
        found = StickyAssignor().assign({"T0": 2, "T1": 1}, group)
        assert shown(found) == {"A": "T0P0", "B": "T0P1", "C": "T1P0"}

    def test_the_newer_generations_claim_counts(self):
        group = {"old": owning(("T0",), "T0P0", generation=3), "new": owning(("T0",), "T0P0", generation=4)}
        assert shown(StickyAssignor().assign({"T0": 2}, group)) == {"new": "T0P0", "old": "T0P1"}

    def test_two_claims_of_one_generation_are_both_void(self):
        group = {"A": owning(("T0",), "T0P1"), "B": owning(("T0",), "T0P1")}
        assert shown(StickyAssignor().assign({"T0": 2}, group)) == {"A": "T0P0", "B": "T0P1"}

    def test_partitions_of_a_topic_no_longer_subscribed_or_existing_are_given_up(self):
        group = {"A": owning(("T0",), "T0P0 T1P0 T0P9"), "B": owning(("T0", "T1"), "")}
        assert shown(StickyAssignor().assign({"T0": 1, "T1": 1}, group)) == {"A": "T0P0", "B": "T1P0"}

    def test_its_user_data_is_what_the_member_was_assigned(self):
        assignor = StickyAssignor()
        told = assignor.user_data(partitions("T0P1"), 9)
        assert assignor.user_data((), -1) is None
        group = {"A": MemberSubscription(("T0",)), "B": MemberSubscription(("T0",), user_data=told)}
        assert shown(assignor.assign({"T0": 2}, group)) == {"A": "T0P0", "B": "T0P1"}


class TestCooperativeSticky:
    def test_a_partition_that_moves_is_withheld_until_it_was_given_up(self):
        assignor = CooperativeStickyAssignor()
        first = assignor.assign({"T0": 2}, {"A": owning(("T0",), "T0P0 T0P1"), "B": owning(("T0",), "")})
        assert shown(first) == {"A": "T0P0", "B": ""}
        second = assignor.assign({"T0": 2}, {"A": owning(("T0",), "T0P0", 2), "B": owning(("T0",), "", 2)})
        assert shown(second) == {"A": "T0P0", "B": "T0P1"}

    def test_what_a_member_keeps_is_not_withheld_for_the_stale_claim_of_another(self):
        group = {"A": owning(("T0",), "T0P0", generation=5), "stale": owning(("T0",), "T0P0", generation=2)}
        assert shown(CooperativeStickyAssignor().assign({"T0": 2}, group)) == {"A": "T0P0", "stale": "T0P1"}

    def test_what_moves_to_a_member_with_a_stale_claim_is_withheld_until_its_owner_has_given_it_up(self):
        """It went to that member at once: two members read it meanwhile. Java withholds it too (KIP-792)."""
        group = {"A": owning(("T0",), "T0P0 T0P1", generation=5), "stale": owning(("T0",), "T0P1", generation=2)}
        assert shown(CooperativeStickyAssignor().assign({"T0": 2}, group)) == {"A": "T0P0", "stale": ""}

    def test_the_generation_in_the_user_data_serves_where_the_subscription_has_none(self):
        assignor = CooperativeStickyAssignor()
        held = partitions("T0P0")
        group = {
            "A": MemberSubscription(("T0",), held, -1, user_data=assignor.user_data(held, 7)),
            "B": MemberSubscription(("T0",), held, -1, user_data=assignor.user_data(held, 6)),
        }
        assert shown(assignor.assign({"T0": 2}, group)) == {"A": "T0P0", "B": "T0P1"}


@pytest.mark.parametrize("name", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_topics_that_do_not_exist_and_members_without_topics_do_no_harm(name):
    assignor = assignor_named(name)
    assert assignor is not None
    group = {"A": MemberSubscription(("T0", "nowhere")), "B": MemberSubscription(())}
    assert shown(assignor.assign({"T0": 2}, group)) == {"A": "T0P0 T0P1", "B": ""}


def test_assignors_are_known_by_kafkas_names_and_javas_classes():
    assert isinstance(assignor_named("range"), RangeAssignor)
    assert isinstance(assignor_named("org.apache.kafka.clients.consumer.StickyAssignor"), StickyAssignor)
    assert isinstance(assignor_named("CooperativeStickyAssignor"), CooperativeStickyAssignor)
    assert assignor_named("random") is None


@pytest.mark.parametrize("owned", [0, 3])
@pytest.mark.parametrize("others", [{}, {"other": ()}, {"other": ("small",)}, {"other": ("T0",)}])
def test_the_search_for_a_better_balance_ends_with_the_members_that_are_left_to_find(monkeypatch, owned, others):
    """It went through all topics of all members for each of these: seconds in which the client's loop stood still. Also
    where a member that reads other topics stays lighter for good.
    """

    class Looked(dict[str, list[str]]):
        count = 0

        def __getitem__(self, topic: str) -> list[str]:
            Looked.count += 1
            return super().__getitem__(topic)

    keep_owned = sticky_assignor._AssignmentBuilder._keep_owned

    def kept(builder: sticky_assignor._AssignmentBuilder) -> None:
        keep_owned(builder)
        monkeypatch.setattr(builder, "_subscribers", Looked(builder._subscribers))

    monkeypatch.setattr(sticky_assignor._AssignmentBuilder, "_keep_owned", kept)
    topics = tuple(f"T{number}" for number in range(30))
    held = [" ".join(f"T{n}P{p}" for n in range(30) for p in (2 * m, 2 * m + 1)) if m < owned else "" for m in range(6)]
    group = {f"m{m}": owning(topics, held[m]) for m in range(6)} | {name: owning(others[name], "") for name in others}
    assignment = StickyAssignor().assign(dict.fromkeys(topics, 6) | {"small": 1}, group)
    loads = [len(assignment[name]) for name in group]
    assert loads == ([29] * 6 + [6] if "T0" in others.get("other", ()) else [30] * 6 + [len(others[n]) for n in others])
    assert Looked.count <= 300, "once for a partition that is free, or that moves"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_cooperative", [False, True])
def test_members_with_the_same_topics_get_what_the_search_for_chains_gives(monkeypatch, is_cooperative, seed):
    rng = Random(seed)
    assignor = CooperativeStickyAssignor() if is_cooperative else StickyAssignor()
    counts = {name: rng.choice([0, 1, 7, 30]) for name in ("a", "b", "c", "d")}
    held: Assignment = {}
    for generation in range(15):
        group = {
            f"m{number}": MemberSubscription(
                tuple(counts),
                tuple(owned) if is_cooperative else (),
                generation if is_cooperative else -1,
                user_data=assignor.user_data(owned, generation),
            )
            for number in rng.sample(range(12), rng.randrange(1, 12))
            for owned in (held.get(f"m{number}", ()),)
        }
        counts[rng.choice("abcd")] += rng.randrange(3)
        quick = assignor.assign(counts, group)
        with monkeypatch.context() as context:
            context.setattr(sticky_assignor._AssignmentBuilder, "_are_equals", lambda _: False)
            assert quick == assignor.assign(counts, group)
        held = quick


@pytest.mark.parametrize("topic_count", [1, 300])
def test_many_members_that_join_one_are_given_their_share_without_a_search(monkeypatch, topic_count):
    """99 that join one with 30,000 partitions took 2.7 s of the processor; with all of them in one topic much more."""
    monkeypatch.delattr(sticky_assignor._AssignmentBuilder, "_find_chain")
    counts = {f"t{number}": 3000 // topic_count for number in range(topic_count)}
    owned = [TopicPartition(topic, number) for topic in counts for number in range(counts[topic])]
    members = {"m00": MemberSubscription(tuple(counts), user_data=StickyAssignor().user_data(owned, 1))}
    members |= {f"m{number:02}": MemberSubscription(tuple(counts)) for number in range(1, 100)}
    assignment = StickyAssignor().assign(counts, members)
    assert {len(partitions) for partitions in assignment.values()} == {30}
