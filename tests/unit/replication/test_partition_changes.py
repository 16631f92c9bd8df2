"""One partition's elections, against what must hold after any history: no leader without all that is committed."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import pytest

from tidelog.replication.controller.decisions.partition_changes import (
    Election,
    ElectionRules,
    PartitionChange,
    TopicRules,
)
from tidelog.replication.controller.metadata.image import RECOVERED, RECOVERING, PartitionImage
from tidelog.replication.controller.metadata.records import merge_partition_change

TOPIC_ID = b"t" * 16
DIRECTORY = b"d" * 16


def partition(**fields):
    values: dict[str, Any] = {
        "replicas": (1, 2, 3),
        "isr": (1, 2, 3),
        "leader": 1,
        "leader_epoch": 5,
        "partition_epoch": 9,
    }
    values |= fields
    values.setdefault("directories", (DIRECTORY,) * len(values["replicas"]))
    return PartitionImage(**values)


def change_of(before, *, live=(1, 2, 3), elr=True, minimum=1, unclean=False, metadata_version=30):
    rules = ElectionRules(
        MappingProxyType(dict.fromkeys(live, (DIRECTORY,))), elr, metadata_version, lambda broker: DIRECTORY
    )
    change = PartitionChange(before, 0, TopicRules(TOPIC_ID, minimum, unclean), rules)
    if unclean:
        change.election = Election.UNCLEAN
    return change


def applied(before, change):
    record = change.build()
    return before if record is None else merge_partition_change(before, record)


def without(before, *gone, unclean_shutdown=(), **options):
    live = [one for one in options.pop("live", (1, 2, 3)) if one not in gone]
    change = change_of(before, live=live, **options)
    change.isr = [one for one in before.isr if one not in gone]
    change.unclean_shutdown = unclean_shutdown
    return applied(before, change)


def facts(after):
    return after.leader, after.isr, after.elr, after.last_known_elr


def test_nothing_to_do_is_no_record():
    assert change_of(partition()).build() is None


def test_the_next_replica_in_order_leads_in_a_new_epoch():
    after = without(partition(replicas=(1, 3, 2)), 1)
    assert (after.leader, after.isr, after.leader_epoch, after.partition_epoch) == (3, (2, 3), 6, 10)


def test_a_follower_that_goes_does_not_cost_an_epoch():
    after = without(partition(), 2)
    assert (after.leader, after.isr, after.leader_epoch, after.partition_epoch) == (1, (1, 3), 5, 10)


def test_before_3_6_it_did():
    assert without(partition(), 2, metadata_version=11, elr=False).leader_epoch == 6


def test_never_a_replica_that_is_not_in_sync():
    after = without(partition(isr=(1,)), 1, elr=False)
    assert facts(after) == (-1, (1,), (), ())


def test_the_last_in_sync_stays_eligible_and_is_remembered():
    after = without(partition(isr=(1,)), 1)
    assert facts(after) == (-1, (), (1,), (1,))
    back = applied(after, change_of(after, live=(1,)))
    assert facts(back) == (1, (1,), (), ())
    assert back.leader_recovery_state == RECOVERED


def test_an_eligible_replica_leads_when_nobody_is_in_sync():
    after = without(partition(isr=(1, 2)), 2, minimum=2)
    assert facts(after) == (1, (1,), (2,), ())
    nobody = without(after, 1, 2, minimum=2)
    assert facts(nobody) == (-1, (), (2, 1), (1,))
    two = applied(nobody, change_of(nobody, live=(2,), minimum=2))
    assert facts(two) == (2, (2,), (1,), ())
    assert two.leader_recovery_state == RECOVERED


def test_where_one_replica_is_enough_the_one_elected_ends_the_eligibility_of_the_others():
    # It commits alone from now on; what the others have is no longer all of it.
    after = applied(before := partition(isr=(), elr=(3, 2), leader=-1), change_of(before, live=(3,), minimum=1))
    assert (after.leader, after.isr, after.elr) == (3, (3,), ())
    assert without(after, 3, live=(2, 3), minimum=1).leader == -1
    after = applied(before, change_of(before, live=(3,), minimum=2))
    assert (after.leader, after.isr, after.elr) == (3, (3,), (2,))


def test_an_eligible_replica_does_not_lead_over_those_in_sync():
    after = without(partition(isr=(1,), elr=(2,)), 3, minimum=2)
    assert after.leader == 1
    assert without(partition(isr=(1, 3), elr=(2,)), 1, minimum=3).leader == 3


def test_reaching_the_minimum_makes_eligibility_moot():
    before = partition(isr=(1,), elr=(2, 3))
    change = change_of(before, minimum=2)
    change.isr = [1, 2]
    assert facts(applied(before, change)) == (1, (1, 2), (), ())


def test_who_lost_its_tail_is_no_longer_eligible():
    before = partition(isr=(1,), elr=(2,))
    after = without(before, 2, unclean_shutdown=(2,), minimum=2)
    assert facts(after) == (1, (1,), (), ())


def test_the_last_known_leader_leads_where_nobody_else_can_and_recovers():
    before = partition(leader=-1, isr=(), elr=(), last_known_elr=(2,))
    assert change_of(before, live=(1, 3)).build() is None
    after = applied(before, change_of(before, live=(1, 2, 3)))
    assert facts(after) == (2, (2,), (), ())
    assert after.leader_recovery_state == RECOVERING


def test_not_the_last_known_leader_while_somebody_is_eligible():
    before = partition(leader=-1, isr=(), elr=(3,), last_known_elr=(2,))
    assert change_of(before, live=(1, 2)).build() is None


def test_a_leader_lost_while_it_is_in_sync_is_remembered():
    """Seed 60872 of the histories: the leader has registered and is fenced still when its last eligible replica goes;
    then it goes, too. None of them may lead any more, and nothing said who was the last.
    """
    before = partition(leader=2, isr=(2,), elr=(3,))
    leaderless = without(before, 3, unclean_shutdown=(3,), live=(1,), minimum=2)
    assert facts(leaderless) == (-1, (2,), (), (2,))
    left = without(leaderless, 2, unclean_shutdown=(2,), live=(1,), minimum=2)
    assert facts(left) == (-1, (), (), (2,))
    back = applied(left, change_of(left, minimum=2))
    assert (*facts(back), back.leader_recovery_state) == (2, (2,), (), (), RECOVERING)


@pytest.mark.parametrize("elr", [False, True])
def test_an_unclean_election_takes_anyone_who_lives(elr):
    before = partition(leader=-1, isr=() if elr else (1,), elr=(1,) if elr else (), last_known_elr=(1,) if elr else ())
    after = applied(before, change_of(before, live=(2, 3), unclean=True, elr=elr))
    assert facts(after) == (2, (2,), (), ())
    assert (after.leader_recovery_state, after.leader_epoch) == (RECOVERING, 6)


@pytest.mark.parametrize("elr", [False, True])
def test_an_unclean_election_takes_a_replica_that_is_being_added_last(elr):
    """It may have no record yet, and the others would be truncated to its log."""
    moving = partition(replicas=(3, 2, 1), isr=(1,), adding_replicas=(3,), removing_replicas=(1,))
    after = without(moving, 1, unclean=True, elr=elr)
    assert (after.leader, after.isr, after.adding_replicas) == (2, (2,), (3,))
    assert without(moving, 1, 2, unclean=True, elr=elr).leader == 3


def test_a_clean_choice_goes_before_an_unclean_one():
    assert without(partition(), 1, unclean=True).leader_recovery_state == RECOVERED


def test_the_preferred_replica_leads_if_it_is_in_sync():
    before = partition(leader=2)
    change = change_of(before)
    change.election = Election.PREFERRED
    assert applied(before, change).leader == 1
    before = partition(leader=2, isr=(2, 3))
    change = change_of(before)
    change.election = Election.PREFERRED
    assert change.build() is None


def test_a_replica_in_a_failed_directory_does_not_lead():
    before = partition(leader=-1, isr=(1, 2), replicas=(1, 2), directories=(b"x" * 16, DIRECTORY))
    assert applied(before, change_of(before)).leader == 2


def test_a_move_ends_when_all_that_were_added_are_in_sync():
    before = partition(replicas=(3, 4, 1, 2), isr=(1, 2), leader=1, adding_replicas=(3, 4), removing_replicas=(1, 2))
    change = change_of(before, live=(1, 2, 3, 4))
    change.isr = [1, 2, 3]
    middle = applied(before, change)
    assert (middle.replicas, middle.leader) == ((3, 4, 1, 2), 1)
    change = change_of(middle, live=(1, 2, 3, 4))
    change.isr = [1, 2, 3, 4]
    after = applied(middle, change)
    assert (after.replicas, after.isr, after.leader) == ((3, 4), (3, 4), 3)
    assert (after.adding_replicas, after.removing_replicas, after.leader_epoch) == ((), (), 6)
    assert len(after.directories) == 2


def test_a_replica_that_leaves_the_list_learns_of_it_by_a_new_epoch():
    before = partition(replicas=(1, 2, 3), removing_replicas=(3,), isr=(1, 2))
    after = applied(before, change_of(before))
    assert (after.replicas, after.leader, after.leader_epoch) == ((1, 2), 1, 6)


# -- random histories against a model of what is committed -------------------------------------------------------------


merge = merge_partition_change


class Replica:
    """A log as a number of records (with the epoch of each), and whether it is up."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int]] = []
        self.live = True


def history(seed: int, *, elr: bool, unclean_shutdowns: bool) -> None:
    """Brokers die, return, catch up, and clients write with acks=all; what was acknowledged must stay.

    The invariants: a leader epoch has one leader, the epoch grows with every change of leader, and whoever leads
    without an unclean election has every acknowledged record. A record is acknowledged when all of an ISR of at least
    the minimum have it. A broker that dies uncleanly loses what others had and it had not synced, but never all of an
    ISR at once.
    """
    rng = random.Random(seed)
    minimum = rng.choice([1, 2, 2, 3])
    replicas = {one: Replica() for one in (1, 2, 3)}
    state = partition(leader_epoch=0)
    leaders: dict[int, int] = {0: 1}
    acknowledged: list[tuple[int, int]] = []
    counter = 0

    def step(change) -> None:
        nonlocal state
        record = change.build()
        if record is None:
            return
        after = merge(state, record)
        if after.leader != state.leader:
            assert after.leader_epoch > state.leader_epoch, "a new leader without a new epoch"
        if after.leader >= 0:
            assert leaders.setdefault(after.leader_epoch, after.leader) == after.leader, "two leaders of one epoch"
            assert after.leader in after.isr, "a leader that is not in sync"
            assert replicas[after.leader].live, "a dead leader"
        assert not set(after.isr) & set(after.elr)
        state = after
        if state.leader >= 0 and state.leader_recovery_state == RECOVERED:
            assert set(acknowledged) <= set(replicas[state.leader].records), "an acknowledged record is gone"

    def live():
        return [one for one, replica in replicas.items() if replica.live]

    for _ in range(120):
        action = rng.randrange(5)
        one = rng.randrange(1, 4)
        replica = replicas[one]
        if action == 0 and state.leader >= 0:
            counter += 1
            leader = replicas[state.leader]
            leader.records.append((state.leader_epoch, counter))
            reached = [member for member in state.isr if member == state.leader or rng.random() < 0.7]
            for member in reached:
                replicas[member].records = list(leader.records)
            if len(reached) == len(state.isr) >= minimum:
                acknowledged[:] = leader.records
        elif action == 1 and replica.live:
            # Alone or with others, at one moment.
            dead = {one} | {other for other in replicas if rng.random() < 0.25}
            for other in dead:
                replicas[other].live = False
            change = change_of(state, live=live(), elr=elr, minimum=minimum)
            change.isr = [member for member in state.isr if member not in dead]
            step(change)
        elif action == 2 and not replica.live:
            others = [two for two in (*state.isr, *state.elr) if two != one and replicas[two].live]
            lost = unclean_shutdowns and bool(others) and rng.random() < 0.5
            change = change_of(state, live=live(), elr=elr, minimum=minimum)
            if lost:
                replica.records = replica.records[: rng.randrange(len(replica.records) + 1)]
                change.unclean_shutdown = (one,)
                change.isr = [member for member in state.isr if member != one]
                step(change)
            replica.live = True
            step(change_of(state, live=live(), elr=elr, minimum=minimum))
        elif action >= 3 and state.leader >= 0 and replica.live and one not in state.isr:
            replica.records = list(replicas[state.leader].records)
            change = change_of(state, live=live(), elr=elr, minimum=minimum)
            change.isr = [*state.isr, one]
            change.recovery_state = RECOVERED
            step(change)


def histories(*, elr: bool) -> None:
    for seed in range(300):
        history(seed, elr=elr, unclean_shutdowns=elr)


@pytest.mark.parametrize("elr", [False, True])
def test_random_histories_keep_what_was_acknowledged(elr):
    histories(elr=elr)


@pytest.mark.parametrize(
    ("bug", "finding"),
    [
        ("outside the isr", "not in sync"),
        ("outside isr and elr", "not in sync"),
        ("no new epoch", "without a new epoch"),
        ("keeps who lost its tail", "acknowledged"),
        ("keeps the others eligible", "acknowledged"),
    ],
)
def test_the_histories_find_planted_bugs(bug, finding, monkeypatch):
    if bug == "outside the isr":
        monkeypatch.setattr(PartitionChange, "_may_lead", lambda self, one: self._is_electable(one))
    if bug == "outside isr and elr":

        def may_lead(self, one):
            return (one in self.isr or not self.isr) and self._is_electable(one)

        monkeypatch.setattr(PartitionChange, "_may_lead", may_lead)
    if bug == "keeps who lost its tail":

        def populate(self):
            self.unclean_shutdown = ()
            original(self)

        original = PartitionChange._populate_elr
        monkeypatch.setattr(PartitionChange, "_populate_elr", populate)

    if bug == "keeps the others eligible":

        def elect(self, record):
            minimum = self._topic.min_insync_replicas
            self._topic.min_insync_replicas = 99
            elect_rightly(self, record)
            self._topic.min_insync_replicas = minimum

        elect_rightly = PartitionChange._elect
        monkeypatch.setattr(PartitionChange, "_elect", elect)

    if bug == "no new epoch":

        def without_epoch(before, record):
            after = merge_partition_change(before, record)
            after.leader_epoch = before.leader_epoch
            return after

        monkeypatch.setitem(globals(), "merge", without_epoch)
    with pytest.raises(AssertionError, match=finding):
        histories(elr=True)
