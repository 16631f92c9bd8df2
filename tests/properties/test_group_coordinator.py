"""Random lives of a group: members join, sync, beat, leave, fall silent; appends fail, commits lag, the node
restarts.

The properties, each a class below, are checked after every step. A machine that cannot fail proves nothing, so the
second half plants one bug for each and demands that it is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.broker.coordinators.fakes import Reply, World, context
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.joins import JoinHandler
from tidelog.broker.coordinators.group.memory import pending_id_size_bytes, topics_size_bytes
from tidelog.broker.coordinators.group.offsets import OffsetStore
from tidelog.broker.coordinators.group.rebalance import Rebalancer, TimerKey
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit, decode
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.broker.coordinators.loading import replay_log
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import decode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError

E = ErrorCode
SESSION_MS = 10_000
JOIN_TIMEOUT_MS = 300_000
CLIENTS = 4
LONG_MS = 100_000_000


class Client:
    """What a consumer knows of itself. `live_until_ms`: so long the coordinator has no reason to doubt it."""

    def __init__(self, number: int, instance: str | None) -> None:
        self.number = number
        self.instance = instance
        self.forget()

    def forget(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.leads: list[str] | None = None  # the members it is to assign to
        self.synced = False
        self.join: Reply | None = None
        self.sync: Reply | None = None
        self.live_until_ms = -1
        self.metadata = 0

    def waits(self) -> bool:
        return self.join is not None


def who(member_id: str) -> str:
    """A static member is the same under whatever id it comes back."""
    return member_id.split("-")[0] if member_id.startswith("i") else member_id


class OneGeneration:
    """All who are told of a generation are told the same, and generations only grow while the node lives."""

    def __init__(self) -> None:
        self.latest = -1
        self.told: dict[int, tuple[str, str]] = {}

    def on_joined(self, response: Any) -> None:
        assert response.generation_id >= self.latest, "a generation came back"
        self.latest = response.generation_id
        facts = (who(response.leader), response.protocol_name)
        assert self.told.setdefault(response.generation_id, facts) == facts, "two stories about one generation"
        assert response.member_id == response.leader or not response.members


class LeadersAssignment:
    """Whoever gets an assignment gets what the leader of that generation first handed in for it."""

    def __init__(self) -> None:
        self.given: dict[int, list[dict[str, bytes]]] = {}
        self.settled: dict[int, dict[str, bytes]] = {}

    def on_handed_in(self, generation: int, assignments: dict[str, bytes]) -> None:
        self.given.setdefault(generation, []).append({who(member): value for member, value in assignments.items()})

    def on_synced(self, generation: int, member_id: str, assignment: bytes) -> None:
        possible = [given for given in self.given.get(generation, []) if given.get(who(member_id), b"") == assignment]
        assert possible, f"{member_id} of generation {generation} got {assignment!r}, which nobody assigned to it"
        known = self.settled.get(generation)
        if known is None:
            self.settled[generation] = possible[0]
        else:
            assert known.get(who(member_id), b"") == assignment, "two assignments for one generation"


class CommittedOffsets:
    """What was acknowledged is there, or something committed later is; what was never sent is not.

    -1 is what is there once an offset is forgotten. That takes effect some time between the request and its answer.
    """

    def __init__(self) -> None:
        self._possible: dict[int, list[tuple[int, int]]] = {0: [(0, -1)], 1: [(0, -1)]}
        self._forgetting: set[int] = set()
        self._serial = 0

    def on_sent(self, partition: int, offset: int) -> int:
        self._serial += 1
        self._possible[partition].append((self._serial, offset))
        return self._serial

    def on_acknowledged(self, partition: int, serial: int) -> None:
        values = self._possible[partition]
        self._possible[partition] = [each for each in values if each[0] >= serial or each[0] in self._forgetting]

    def on_forget_sent(self, *partitions: int) -> list[tuple[int, int]]:
        sent = [(partition, self.on_sent(partition, -1)) for partition in partitions]
        self._forgetting.update(serial for _, serial in sent)
        return sent

    def on_forgotten(self, sent: list[tuple[int, int]]) -> None:
        for partition, serial in sent:
            self._forgetting.discard(serial)
            if any(each[0] == serial for each in self._possible[partition]):
                self.on_acknowledged(partition, serial)
            self.on_sent(partition, -1)

    def check(self, world: World) -> None:
        for partition, values in self._possible.items():
            found = world.coordinator().offsets.fetch("g", [("t", bytes(16), [partition])], False)
            assert found[0][1][0].offset in {offset for _, offset in values}, "an acknowledged offset is lost"


def projection(group: Group) -> tuple[Any, ...]:
    """What a restart must not change about a group at rest."""
    return (
        group.state,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader,
        sorted(
            (m.member_id, m.instance_id or "", m.session_timeout_ms, m.rebalance_timeout_ms, m.assignment)
            for m in group.members.values()
        ),
    )


class ReplayEqualsLive:
    """A coordinator made from the committed log is the one that lives."""

    @staticmethod
    def check(world: World) -> None:
        live = world.coordinator()
        loaded = GroupCoordinator(world.config, world.rng)
        high_watermark = world.ports.high_watermarks.get(0, 0)
        committed = [b for b in world.ports.logs.get(0, []) if read_header(b).next_offset <= high_watermark]
        for _ in replay_log(loaded, [memoryview(batch) for batch in committed]):
            pass
        loaded.on_loaded(world.service._runtime._now())
        assert loaded.offsets._groups == live.offsets._groups
        for group_id, group in live.groups.items():
            restored = loaded.groups.get(group_id)
            if group.persisted_generation is None:
                assert restored is None or restored.persisted_generation is None
                continue
            assert restored is not None
            assert restored.persisted_generation == group.persisted_generation
            at_rest = (
                group.state in (GroupState.STABLE, GroupState.EMPTY)
                and not world.service._runtime._shards[0].pending_writes
            )
            # That a group became empty may fail to be stored, and is then found out again after a restart.
            if at_rest and group.persisted_generation == group.generation:
                assert projection(restored) == projection(group)
        assert set(loaded.groups) <= set(live.groups)


def check_whole(coordinator: GroupCoordinator) -> None:
    """What is always true of a group's inside."""
    assert coordinator._memory.used_bytes == sum(group.memory.held_bytes for group in coordinator.groups.values())
    for group in coordinator.groups.values():
        assert set(group.awaiting_join) <= set(group.members)
        assert set(group.awaiting_sync) <= set(group.members)
        assert set(group.pending_sync) <= set(group.members)
        assert not set(group.pending_members) & set(group.members)
        assert group.leader in group.members if group.members else group.leader is None
        static = {m.instance_id: m.member_id for m in group.members.values() if m.instance_id is not None}
        assert group.static_members == static
        names = [name for member in group.members.values() for name in member.protocols]
        assert group._supporter_counts == {name: names.count(name) for name in set(names)}
        held_bytes = sum(member.size_bytes for member in group.members.values())
        held_bytes += sum(map(pending_id_size_bytes, group.pending_members))
        held_bytes += topics_size_bytes(group.subscribed_topics or ()) + group._in_flight_bytes
        is_used = bool(group.members or group.pending_members)
        assert group.memory.held_bytes == (held_bytes + group._base_bytes if is_used else 0)
        assert group.assignment_in_flight is not None or not group._in_flight_bytes
        assert bool(group.members) or group.state in (GroupState.EMPTY, GroupState.PREPARING_REBALANCE)
        assert not group.awaiting_sync or group.state is GroupState.COMPLETING_REBALANCE
        if group.state is not GroupState.PREPARING_REBALANCE:
            # But for static members that are back, until that is stored.
            assert all(group.members[each].is_static for each in group.awaiting_join)
            assert not group.awaiting_join or group.writes_in_flight
        for member_id in [*group.members, *group.pending_members]:
            waits = member_id in group.awaiting_join or member_id in group.awaiting_sync
            assert waits or TimerKey("session", group.group_id, member_id) in coordinator.timers, (
                "it would never expire"
            )
        if group.state is GroupState.PREPARING_REBALANCE:
            assert TimerKey("join", group.group_id) in coordinator.timers, "the join phase would never end"


class GroupMachine(RuleBasedStateMachine):
    @initialize(
        rebalance_ms=st.sampled_from([15_000, LONG_MS]),
        instances=st.lists(st.booleans(), min_size=CLIENTS, max_size=CLIENTS),
        delay_ms=st.sampled_from([0, 3000]),
    )
    def begin(self, rebalance_ms: int, instances: list[bool], delay_ms: int) -> None:
        config = GroupCoordinatorConfig(
            group_initial_rebalance_delay_ms=delay_ms, offsets_retention_check_interval_ms=LONG_MS * 10
        )
        self.world = World(config)
        self.rebalance_ms = rebalance_ms
        self.clients = [Client(n, f"i{n}" if static else None) for n, static in enumerate(instances)]
        self.pending: list[tuple[Callable[[Any], None], Reply]] = []
        self.offsets = CommittedOffsets()
        self.next_offset = 0
        self.deletions = 0
        self.new_incarnation()

    def new_incarnation(self) -> None:
        self.generations = OneGeneration()
        self.assignments = LeadersAssignment()

    # -- requests and their answers ----------------------------------------------------------------------------------

    def send(self, reply: Reply, on_answer: Callable[[Any], None]) -> Reply:
        self.pending.append((on_answer, reply))
        self.collect()
        return reply

    def collect(self) -> None:
        waiting, self.pending = self.pending, []
        for on_answer, reply in waiting:
            if reply.is_parked:
                self.pending.append((on_answer, reply))
            else:
                on_answer(reply)

    def touch(self, client: Client, reply: Reply) -> None:
        if self.deletions and client.generation < 0:
            return  # an id handed out goes with its group
        client.live_until_ms = reply.answered_at_ms + SESSION_MS

    def check_liveness(self, client: Client, error: int) -> None:
        """A member that keeps its session, and whose rebalances cannot time out, is never unknown."""
        if error != E.UNKNOWN_MEMBER_ID:
            return
        live = self.world.ports.time_ms < client.live_until_ms and self.rebalance_ms == LONG_MS
        assert not live, f"live member {client.member_id} was answered UNKNOWN_MEMBER_ID"
        client.forget()

    @rule(number=st.integers(0, CLIENTS - 1), changed=st.booleans(), old=st.booleans())
    def join(self, number: int, changed: bool, old: bool) -> None:
        client = self.clients[number]
        client.metadata += changed
        asked_as = client.member_id
        was_static = client.instance
        joined_at_ms = self.world.ports.time_ms

        def answered(reply: Reply) -> None:
            error, response = reply.error, reply.response
            if client.join is reply:
                client.join = None
            if error == E.NONE:
                self.generations.on_joined(response)
                if client.member_id == asked_as:
                    if response.generation_id > client.generation:
                        self.touch(client, reply)  # told again of the same one, it gains no time
                    client.member_id, client.generation = response.member_id, response.generation_id
                    is_leader = response.leader == response.member_id and not response.skip_assignment
                    client.leads = [member.member_id for member in response.members] if is_leader else None
                    client.synced = False
            elif error == E.MEMBER_ID_REQUIRED:
                client.member_id = response.member_id
                self.touch(client, reply)
            elif error == E.UNKNOWN_MEMBER_ID and client.member_id == asked_as:
                if reply.answered_at_ms - joined_at_ms >= JOIN_TIMEOUT_MS:
                    client.live_until_ms = -1
                if asked_as:
                    self.check_liveness(client, error)
            elif error == E.FENCED_INSTANCE_ID and client.member_id == asked_as:
                assert was_static is not None
                client.live_until_ms = -1

        reply = self.world.join(
            member=asked_as, instance=client.instance, session_ms=SESSION_MS, rebalance_ms=self.rebalance_ms,
            protocols={"range": b"m%d" % client.metadata, "sticky": b"s"},
            version=3 if old and not client.instance else 9,
        )  # fmt: skip
        if asked_as and reply.is_parked:
            client.live_until_ms = LONG_MS * 10  # as long as it waits for us, plus what its answer grants
        client.join = self.send(reply, answered)

    @rule(number=st.integers(0, CLIENTS - 1), gap=st.booleans())
    def sync(self, number: int, gap: bool) -> None:
        client = self.clients[number]
        if not client.member_id or client.generation < 0:
            return
        member_id, generation = client.member_id, client.generation
        assignments: dict[str, bytes] = {}
        if client.leads is not None:
            self.next_offset += 1
            given = client.leads[1:] if gap else client.leads
            assignments = {member: b"%s/%d" % (member.encode(), self.next_offset) for member in given}
            self.assignments.on_handed_in(generation, assignments)

        group = self.world.coordinator().groups.get("g")
        waits = group is not None and group.state is GroupState.COMPLETING_REBALANCE
        until_ms = client.live_until_ms

        def answered(reply: Reply) -> None:
            if reply.error == E.NONE:
                self.assignments.on_synced(generation, member_id, reply.response.assignment)
                client.synced = client.synced or client.member_id == member_id
            if client.member_id == member_id:
                if was_parked or (waits and reply.error == E.NONE):
                    self.touch(client, reply)  # a sync in a stable group gains no time
                elif client.live_until_ms > LONG_MS:
                    client.live_until_ms = until_ms
                self.check_liveness(client, reply.error)

        reply = self.world.sync(
            member=member_id, generation=generation, instance=client.instance, assignments=assignments
        )
        was_parked = reply.is_parked
        if was_parked:
            client.live_until_ms = max(client.live_until_ms, LONG_MS * 10)
        self.send(reply, answered)

    @rule(number=st.integers(0, CLIENTS - 1))
    def beat(self, number: int) -> None:
        client = self.clients[number]
        if client.member_id and client.generation >= 0:
            reply = self.world.heartbeat(
                member=client.member_id, generation=client.generation, instance=client.instance
            )
            self.check_liveness(client, reply.error)
            parked = client.live_until_ms > LONG_MS
            if reply.error in (E.NONE, E.REBALANCE_IN_PROGRESS) and not parked:
                self.touch(client, reply)

    @rule(number=st.integers(0, CLIENTS - 1))
    def leave(self, number: int) -> None:
        client = self.clients[number]
        if client.member_id:
            reply = self.world.leave("g", client.member_id)
            assert reply.response.members[0].error_code in (E.NONE, E.UNKNOWN_MEMBER_ID)
            client.forget()

    @rule(number=st.integers(0, CLIENTS - 1))
    def fall_silent(self, number: int) -> None:
        """The process is gone; its successor starts from nothing."""
        self.clients[number].forget()

    @rule(number=st.integers(-1, CLIENTS - 1), partition=st.integers(0, 1))
    def commit(self, number: int, partition: int) -> None:
        self.next_offset += 1
        offset = self.next_offset
        client = self.clients[number] if number >= 0 and self.clients[number].generation >= 0 else Client(-1, None)
        serial = self.offsets.on_sent(partition, offset)

        def answered(reply: Reply) -> None:
            if isinstance(reply.response, KafkaError):
                if client.member_id:
                    self.check_liveness(client, reply.error)
            elif reply.response.topics[0].partitions[0].error_code == 0:
                self.offsets.on_acknowledged(partition, serial)
                if client.member_id and client.live_until_ms < LONG_MS:
                    client.live_until_ms = max(client.live_until_ms, self.world.ports.time_ms)

        reply = self.world.commit(
            offsets={("t", partition): offset}, member=client.member_id, generation=client.generation,
            instance=client.instance,
        )  # fmt: skip
        self.send(reply, answered)

    @rule(partitions=st.sampled_from([(0,), (0, 1)]))
    def forget_offsets(self, partitions: tuple[int, ...]) -> None:
        sent = self.offsets.on_forget_sent(*partitions)

        def answered(reply: Reply) -> None:
            if not isinstance(reply.response, KafkaError) and set(reply.response.values()) == {E.NONE}:
                self.offsets.on_forgotten(sent)

        ask = [("t", list(partitions))]
        self.send(self.world.ask(lambda: self.world.service.delete_offsets(context(47, 0), "g", ask)), answered)

    @rule()
    def delete_group(self) -> None:
        sent = self.offsets.on_forget_sent(0, 1)
        self.deletions += 1
        self.no_claims()

        def answered(reply: Reply) -> None:
            self.deletions -= 1
            self.no_claims()
            if isinstance(reply.response, KafkaError) or reply.error:
                return
            self.offsets.on_forgotten(sent)
            if "g" not in self.world.coordinator().groups:
                self.new_incarnation()  # generations are counted from 1 again

        self.send(self.world.ask(lambda: self.world.service.delete_group(context(42, 2), "g")), answered)

    def no_claims(self) -> None:
        """Whoever has an id but is no member yet may have to begin again."""
        for client in self.clients:
            if client.generation < 0:
                client.live_until_ms = -1

    # -- the world ---------------------------------------------------------------------------------------------------

    @rule(by_ms=st.sampled_from([1, 500, 3000, 5000, 9000, 20_000]))
    def time_passes(self, by_ms: int) -> None:
        self.world.advance(by_ms)
        self.collect()

    @rule()
    def everybody_behaves(self) -> None:
        """What well-behaved consumers do until they have an assignment: this is what makes stable generations."""
        self.world.ports.refuse_appends = None
        for _ in range(4):
            for client in self.clients:
                beat = None
                if client.generation >= 0:
                    beat = self.world.heartbeat(
                        member=client.member_id, generation=client.generation, instance=client.instance
                    ).error
                    self.check_liveness(client, beat)
                if client.join is None and (
                    not client.member_id or client.generation < 0 or beat not in (None, E.NONE)
                ):
                    self.join(client.number, False, False)
                    if client.member_id and client.generation < 0 and not client.waits():
                        self.join(client.number, False, False)
            self.world.advance(3000)
            self.collect()
            for client in self.clients:
                if client.member_id and client.generation >= 0 and not client.synced and client.join is None:
                    self.sync(client.number, False)
            self.catch_up()

    @rule(late=st.booleans())
    def replication_lags(self, late: bool) -> None:
        self.world.ports.commits_at_once = not late
        if not late:
            self.catch_up()

    @rule()
    def catch_up(self) -> None:
        self.world.ports.commit(0)
        self.collect()

    @rule(error=st.sampled_from([None, E.NOT_ENOUGH_REPLICAS, E.MESSAGE_TOO_LARGE]))
    def appends_fail(self, error: ErrorCode | None) -> None:
        self.world.ports.refuse_appends = None if error is None else KafkaError(error)

    @rule(lost=st.booleans())
    def restart(self, lost: bool) -> None:
        """The node dies; what was not committed is lost, or it is not."""
        if lost:
            self.world.ports.truncate_uncommitted(0)
        self.world.ports.refuse_appends = None
        self.pending.clear()
        self.deletions = 0
        self.world.restart()
        self.new_incarnation()
        known: dict[str, bytes] = {}
        for batch in self.world.ports.logs.get(0, []):
            for record in decode_batch(batch):
                decoded = decode(record.key or b"", record.value)
                if isinstance(decoded, GroupMetadata):
                    members = [] if decoded.value is None else decoded.value.members
                    known = {each.member_id: each.assignment for each in members}
        group = self.world.coordinator().groups.get("g")
        assert set(known) == (set(group.members) if group is not None else set())
        for client in self.clients:
            client.join = client.sync = None
            client.live_until_ms = self.world.ports.time_ms + SESSION_MS if client.member_id in known else -1
            # It is a member of whatever generation was stored last, which may not be the one it was told of.
            if client.leads is not None and group is not None and group.generation != client.generation:
                client.leads = None
        if group is not None and group.persisted_generation is not None:
            self.assignments.on_handed_in(group.generation, known)

    @precondition(lambda self: any(client.instance for client in self.clients))
    @rule(number=st.integers(0, CLIENTS - 1))
    def static_process_restarts(self, number: int) -> None:
        """It forgets its member id and joins under its instance id; its old parked requests are somebody else's."""
        client = self.clients[number]
        if client.instance is not None:
            client.forget()
            self.join(number, False, False)

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        check_whole(self.world.coordinator())
        ReplayEqualsLive.check(self.world)
        self.offsets.check(self.world)

    def teardown(self) -> None:
        """Left alone, everything that was asked is answered, and nobody is left behind."""
        if not hasattr(self, "world"):
            return
        self.world.ports.refuse_appends = None
        for _ in range(3):
            self.world.ports.commits_at_once = True
            self.world.ports.commit(0)
            self.world.advance(JOIN_TIMEOUT_MS + SESSION_MS + self.rebalance_ms)
            self.collect()
        assert all(not reply.is_parked for _, reply in self.pending)
        group = self.world.coordinator().groups.get("g")
        assert group is None or group.state is GroupState.EMPTY


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refused appends are no news here."""
    caplog.set_level(logging.CRITICAL, "tidelog.coordinator")


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))


# -- the bugs that must be found ---------------------------------------------------------------------------------------


def forget_other_members(
    self: Rebalancer, group: Group, outcome: Any, original: Any = Rebalancer.complete_join
) -> None:
    """Static or not, whoever has not rejoined is out, and nobody waits for the rest."""
    for member_id in list(group.members):
        if member_id not in group.awaiting_join:
            group.remove(member_id)
    original(self, group, outcome)


def eager_completion(self: Group) -> bool:
    return bool(self.awaiting_join)


def swapped(self: Group, value: Any, original: Any = Group.adopt_assignment) -> None:
    original(self, value)
    members = list(self.members.values())
    if len(members) > 1:
        members[0].assignment, members[1].assignment = members[1].assignment, members[0].assignment


def newest_first(
    self: OffsetStore, offset: int, record: OffsetCommit, producer: int, original: Any = OffsetStore.replay
) -> None:
    if record.partition not in self.of_group(record.group_id).get(record.topic, {}):
        original(self, offset, record, producer)


def same_generation(self: Group, now: int, original: Any = Group.start_generation) -> None:
    original(self, now)
    self.generation = max(self.generation - 1, 1)


def believe_at_once(
    self: GroupCoordinator, request: Any, caller: Any, now: Any, prepared: Any = None,
    original: Any = GroupCoordinator.commit_offsets,
) -> Any:  # fmt: skip
    """State changes before the record is committed."""
    outcome = original(self, request, caller, now, prepared)
    for write in outcome.writes:
        for record in write.records:
            self.offsets.replay(0, record, -1)
    return outcome


def nothing_to_forget(self: OffsetStore, group_id: str, topic: str, partition: int) -> OffsetCommit | None:
    """A group that is deleted without its offsets."""
    return None


def unknown_while_rebalancing(
    self: JoinHandler, group: Group, request: Any, caller: Any, outcome: Any, original: Any = JoinHandler.join
) -> None:
    """The trap of other brokers: a known member that joins while others do is not recognised."""
    if group.state is GroupState.PREPARING_REBALANCE and request.member_id in group.members and group.generation > 0:
        self._rebalancer.remove_member(group, request.member_id, outcome)
    original(self, group, request, caller, outcome)


BUGS = [
    pytest.param(
        Group,
        "all_members_joined",
        property(eager_completion),
        id="a rebalance that does not wait",
        marks=pytest.mark.slow,
    ),
    pytest.param(Group, "adopt_assignment", swapped, id="two members with each other's assignment"),
    pytest.param(Group, "start_generation", same_generation, id="a generation used twice"),
    pytest.param(OffsetStore, "replay", newest_first, id="an offset that is not replaced"),
    pytest.param(GroupCoordinator, "commit_offsets", believe_at_once, id="state ahead of the log"),
    pytest.param(
        OffsetStore, "tombstone", nothing_to_forget, id="offsets that outlive their group", marks=pytest.mark.slow
    ),
    pytest.param(
        JoinHandler, "join", unknown_while_rebalancing, id="a live member that is unknown", marks=pytest.mark.slow
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name", "bug"), BUGS)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, where: type, name: str, bug: Any):
    monkeypatch.setattr(where, name, bug)
    quick = settings(
        max_examples=300, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(GroupMachine, settings=quick)
