"""Random commits, deletions, transactions, expiries, topics made anew and members of two groups, while the coordinator
does everything in steps of one to three records; commits lag or are late, appends fail, and the coordinator moves or
loses its log between steps, also those of a load.

What requests were told is true of the log in some order of theirs, and nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.properties.coordinator_history import CoordinatorHistory
from tests.unit.broker.coordinators.fakes import Reply, World, context
from tidelog.broker.coordinators import runtime
from tidelog.broker.coordinators.group import coordinator as group_coordinator
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.memory import (
    PENDING_OFFSET_BYTES,
    group_offsets_size_bytes,
    offset_size_bytes,
    topic_offsets_size_bytes,
)
from tidelog.broker.coordinators.group.offsets import OffsetStore, TopicOffsets, commit_refusal
from tidelog.broker.coordinators.group.records import OffsetCommit, decode
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.broker.coordinators.loading import replay_log
from tidelog.broker.coordinators.outcome import Now, Outcome, TransactionEnd, WriteTransaction
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import ControlRecordType, control_record_type, decode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

HISTORIES = 20
STEPS = 80
GROUPS = ("g", "h")
PARTITIONS = 4
PRODUCERS = (5, 6)
NO_PRODUCER = -1
# Of topic u, whose offsets have no topic id in the log; t is deleted and made anew.
RETENTION_MS = 20
CHECK_INTERVAL_MS = 15
WRITE_TIMEOUT_MS = 30
JOIN = b"\0\1\0\0\0\1\0\1t\0\0\0\0"  # subscribes to t

Key = tuple[str, str, int]
ON_FAILED = GroupCoordinator.on_failed


class Commit(NamedTuple):
    sent: int  # in which step of the history
    group: str
    topic: str
    partitions: tuple[int, ...]
    topic_id: bytes
    expires: bool
    producer_id: int
    reply: Reply


class Deletion(NamedTuple):
    """Of the whole group for no partitions."""

    sent: int
    log_end: int
    group: str
    partitions: tuple[int, ...]
    reply: Reply

    def covers(self, key: Key) -> bool:
        return key[0] == self.group and (not self.partitions or (key[1] == "t" and key[2] in self.partitions))


class History(CoordinatorHistory):
    def __init__(self, seed: int) -> None:
        choice = Random(seed)
        config = GroupCoordinatorConfig(
            group_initial_rebalance_delay_ms=0,
            offsets_retention_check_interval_ms=CHECK_INTERVAL_MS,
            offsets_commit_timeout_ms=choice.choice((WRITE_TIMEOUT_MS, 5_000)),
        )
        super().__init__(choice, World(config, commits_at_once=choice.random() < 0.4))
        self.at = 0
        self.commits: dict[int, Commit] = {}  # by position
        self.deletions: list[Deletion] = []
        self.members: dict[str, str] = {}
        self.answered: dict[int, int] = {}  # by the id of the reply
        self.lost: set[int] = set()

    # -- steps -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        group, topic = self.choice.choice(GROUPS), self.choice.choice("tu")
        partitions = tuple(self.choice.sample(range(PARTITIONS), self.choice.randint(1, PARTITIONS)))
        expires = topic == "u" and self.choice.random() < 0.5
        self.send(group, topic, partitions, expires, NO_PRODUCER)

    def commit_in_transaction(self) -> None:
        partitions = tuple(self.choice.sample(range(PARTITIONS), self.choice.randint(1, PARTITIONS)))
        self.send(self.choice.choice(GROUPS), "t", partitions, False, self.choice.choice(PRODUCERS))

    def send(self, group: str, topic: str, partitions: tuple[int, ...], expires: bool, producer_id: int) -> None:
        position = len(self.commits) + 1
        topic_id = self.topic_id if topic == "t" else bytes(16)
        if producer_id == NO_PRODUCER:
            reply = self.world.commit(
                group, {(topic, index): position for index in partitions}, topic_id=topic_id, version=9 - 5 * expires,
                retention_ms=RETENTION_MS if expires else -1,
            )  # fmt: skip
        else:
            offsets = [
                TxnOffsetCommitRequestPartition(
                    partition_index=index, committed_offset=position, committed_metadata="x" * (position % 3)
                )
                for index in partitions
            ]
            request = TxnOffsetCommitRequest(
                group_id=group, producer_id=producer_id, producer_epoch=0,
                topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=offsets)],
            )  # fmt: skip
            commit = self.world.service.commit_offsets_of_transaction
            reply = self.world.ask(lambda: commit(context(28, 2), request, {topic: topic_id}, None))
        self.commits[position] = Commit(self.at, group, topic, partitions, topic_id, expires, producer_id, reply)

    def end_one(self, producer_id: int | None = None) -> None:
        transaction = WriteTransaction(self.choice.choice(PRODUCERS) if producer_id is None else producer_id, 0)
        end = TransactionEnd(self.choice.random() < 0.6, 0)
        self.world.ask(lambda: self.world.service.end_transaction(0, transaction, end))

    def delete_group(self) -> None:
        group, service = self.choice.choice(GROUPS), self.world.service
        end_offset = self.end_offset
        reply = self.world.ask(lambda: service.delete_group(context(42, 2), group))
        self.deletions.append(Deletion(self.at, end_offset, group, (), reply))

    def delete_offsets(self) -> None:
        group, service = self.choice.choice(GROUPS), self.world.service
        partitions = self.choice.sample(range(2 * PARTITIONS), self.choice.randint(1, 2 * PARTITIONS))
        end_offset = self.end_offset
        reply = self.world.ask(lambda: service.delete_offsets(context(47, 0), group, [("t", partitions)]))
        self.deletions.append(Deletion(self.at, end_offset, group, tuple(partitions), reply))

    def join_or_leave(self) -> None:
        group = self.choice.choice(GROUPS)
        if group in self.members:
            self.world.leave(group, self.members.pop(group))
            return
        joined = self.world.join(group, version=3, protocols={"range": JOIN}, session_ms=6_000, rebalance_ms=1_000)
        self.world.advance(1)
        if not joined.is_parked and joined.error == 0:
            member = joined.response.member_id
            self.world.sync(group, member, joined.response.generation_id, assignments={member: b"a"})
            self.members[group] = member

    def turn(self) -> None:
        self.world.ports.turn()
        self.world.ports.time_ms += 1

    def pass_time(self) -> None:
        self.world.advance(self.choice.choice((CHECK_INTERVAL_MS, WRITE_TIMEOUT_MS, 7_000)))

    def resign(self) -> None:
        """To a broker that may have only what is replicated."""
        if not self.world.ports.commits_at_once and self.choice.random() < 0.5:
            self.world.ports.truncate_uncommitted(0)
        self.has_moved = True
        self.world.service.on_partition_resigned(0)
        for each in self.requests:
            assert not each.reply.is_parked or id(each.reply) in self.lost, f"moved without an answer: {each}"

    def lose_log(self) -> None:
        self.has_moved = True
        self.world.ports.lose(0, KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER))

    def is_active(self) -> bool:
        return bool(self.world.service._runtime.active_partitions())

    def elect(self) -> None:
        if not self.is_active():
            self.world.epoch += self.choice.random() < 0.7
            self.world.service.on_partition_elected(0, self.world.epoch)

    def move(self) -> None:
        if not self.world.ports.commits_at_once:
            self.world.ports.truncate_uncommitted(0)
        self.has_moved = True
        self.lost |= {id(each.reply) for each in self.requests if each.reply.is_parked}
        self.world.restart()
        self.world.ports.commit(0)

    @property
    def requests(self) -> list[Commit | Deletion]:
        return [*self.commits.values(), *self.deletions]

    def step(self) -> None:
        is_deleting = self.is_active() and any(each.is_being_deleted for each in self.live.groups.values())
        steps = {
            self.commit: 16 + 16 * is_deleting, self.commit_in_transaction: 6, self.end_one: 5, self.delete_group: 4,
            self.delete_offsets: 4, self.make_anew: 2, self.replicate: 8, self.join_or_leave: 2 + 6 * is_deleting,
            self.turn: 30, self.move: 0.5,
            self.resign: 0.6, self.lose_log: 0.3, self.elect: 30 * (not self.is_active()), self.pass_time: 0.5,
            self.refuse_or_take: 2 + 10 * (self.world.ports.refuse_appends is not None),
        }  # fmt: skip
        self.at += 1
        self.choice.choices(list(steps), list(steps.values()))[0]()
        self.note_answers()

    def note_answers(self) -> None:
        for each in self.requests:
            if not each.reply.is_parked or id(each.reply) in self.lost:
                self.answered.setdefault(id(each.reply), self.at)

    def settle(self) -> None:
        self.world.ports.refuse_appends = None
        self.elect()
        self.world.advance(1)
        self.world.ports.commit(0)
        self.world.advance(1)
        self.check_members(self.load())
        for group, member in self.members.items():
            self.world.leave(group, member)
        for _ in range(9):
            for producer_id in PRODUCERS:
                self.end_one(producer_id)
            self.world.ports.commit(0)
            self.world.advance(1000)
        self.note_answers()

    # -- what must be true -------------------------------------------------------------------------------------------

    def effective(self) -> dict[Key, tuple[int, int]]:
        """The last commit of each partition in the order of the log: its offset in the log, and its position."""
        found: dict[Key, tuple[int, int]] = {}
        pending: dict[int, list[tuple[Key, tuple[int, int]]]] = {}
        for batch in self.world.ports.logs.get(0, []):
            header = read_header(batch)
            for record in decode_batch(batch):
                if header.is_control:
                    for key, commit in pending.pop(header.producer_id, []):
                        if control_record_type(record.key) is ControlRecordType.COMMIT:
                            found[key] = max(found.get(key, (-1, 0)), commit)
                    continue
                decoded = decode(record.key or b"", record.value)
                if isinstance(decoded, OffsetCommit) and decoded.value is not None:
                    key = decoded.group_id, decoded.topic, decoded.partition
                    commit = record.offset, decoded.value.offset
                    if header.is_transactional:
                        pending.setdefault(header.producer_id, []).append((key, commit))
                    else:
                        found[key] = commit
        return found

    def has_refused(self, deletion: Deletion) -> bool:
        """Without having deleted anything."""
        response = deletion.reply.response
        refusals = (ErrorCode.NON_EMPTY_GROUP, ErrorCode.GROUP_ID_NOT_FOUND)
        return response is not None and not isinstance(response, dict) and deletion.reply.error in refusals

    def has_deleted(self, deletion: Deletion, key: Key) -> bool:
        response = deletion.reply.response
        if response is None or isinstance(response, KafkaError):
            return False
        error = response[key[1], key[2]] if isinstance(response, dict) else response.error_code
        return bool(error == ErrorCode.NONE)

    def may_be_gone(self, key: Key, commit: Commit) -> bool:
        if commit.expires or (key[1] == "t" and commit.topic_id != self.topic_id):
            return True
        return any(
            each.covers(key) and not (self.has_refused(each) and not each.partitions)
            for each in self.deletions
            if self.answered[id(each.reply)] >= commit.sent
        )

    def check(self) -> None:
        for each in self.requests:
            assert not each.reply.is_parked or id(each.reply) in self.lost, f"not answered: {each}"
        coordinator = self.world.coordinator()
        present = {
            (group, topic, index): entry
            for group, topics in coordinator.offsets._groups.items()
            for topic, partitions in topics.items()
            for index, entry in partitions.items()
        }
        effective = self.effective()
        assert set(present) <= set(effective), "not in the log"
        for key, (log_offset, position) in effective.items():
            commit = self.commits[position]
            if key not in present:
                assert self.may_be_gone(key, commit), f"lost: {key} {commit}"
                continue
            assert present[key].offset == position, f"gone back: {key} {present[key]}, not {commit}"
            for deletion in self.deletions:
                if deletion.covers(key) and deletion.log_end > log_offset:
                    assert not self.has_deleted(deletion, key), f"said to be deleted: {key} {commit} {deletion}"
            assert not commit.expires, f"not expired: {key}"
            assert self.has_moved or key[1] == "u" or commit.topic_id == self.topic_id, f"of a deleted topic: {key}"
        self.check_whole_deletions(set(present), effective)
        check_rest(coordinator)
        self.check_load(coordinator)
        self.check_memory(coordinator)

    def check_whole_deletions(self, present: set[Key], effective: dict[Key, tuple[int, int]]) -> None:
        """A commit is there with all its partitions or none where only the whole group was deleted."""
        for position, commit in self.commits.items():
            keys = {(commit.group, commit.topic, index) for index in commit.partitions}
            is_last = all(effective.get(key, (0, 0))[1] == position for key in keys)
            has_failed = any(
                each.group == commit.group and (each.partitions or isinstance(each.reply.response, KafkaError | None))
                for each in self.deletions
                if self.answered[id(each.reply)] >= commit.sent and not self.has_refused(each)
            )
            is_over = commit.expires or (commit.topic == "t" and commit.topic_id != self.topic_id)
            if is_last and not has_failed and not is_over and commit.reply.response is not None:
                assert keys <= present or not keys & present, f"a part is there: {keys & present} of {commit}"

    def check_memory(self, coordinator: GroupCoordinator) -> None:
        """Former coordinators hold none."""
        service = self.world.service
        assert (service._runtime._pending_bytes, service._runtime._parked_count) == (0, 0)
        assert service._offsets_memory.used_bytes == coordinator.offsets.memory.held_bytes
        assert service._memory.used_bytes == sum(group.memory.held_bytes for group in coordinator.groups.values())
        service.close()
        assert (service._offsets_memory.used_bytes, service._memory.used_bytes) == (0, 0)

    @property
    def live(self) -> GroupCoordinator:
        return self.world.coordinator()

    def load(self) -> GroupCoordinator:
        loaded = GroupCoordinator(self.world.config, self.world.rng)
        for _ in replay_log(loaded, [memoryview(batch) for batch in self.world.ports.logs.get(0, [])]):
            pass
        loaded.on_loaded(self.world.service._runtime._now())
        return loaded

    def check_members(self, loaded: GroupCoordinator) -> None:
        for group in self.live.groups.values():
            if group.state is GroupState.STABLE:
                other = loaded.groups[group.group_id]
                assert (other.state, other.generation) == (GroupState.STABLE, group.generation)
                assert {each.member_id: each.assignment for each in other.members.values()} == {
                    each.member_id: each.assignment for each in group.members.values()
                }

    def check_load(self, live: GroupCoordinator) -> None:
        loaded = self.load()
        assert loaded.offsets._groups == live.offsets._groups
        assert set(loaded.groups) == set(live.groups)


def sizes(groups: dict[str, TopicOffsets], more_bytes: int = 0) -> Iterator[int]:
    for group_id, topics in groups.items():
        yield group_offsets_size_bytes(group_id)
        for topic, partitions in topics.items():
            yield topic_offsets_size_bytes(topic)
            yield from (offset_size_bytes(entry.metadata) + more_bytes for entry in partitions.values())


def check_rest(coordinator: GroupCoordinator) -> None:
    """At rest nothing is under way, and the charged memory is that of what is there."""
    offsets = coordinator.offsets
    assert not any((offsets._in_flight, coordinator._deletions, coordinator._deleted_topics))
    assert not coordinator._groups_to_sweep
    assert not coordinator._groups_to_sweep_later
    assert not offsets._pending
    held_bytes = sum(sizes(offsets._groups))
    held_bytes += sum(sum(sizes(of, PENDING_OFFSET_BYTES)) for of in offsets._pending._by_producer.values())
    assert offsets.memory.held_bytes == held_bytes
    for group in coordinator.groups.values():
        assert not group.writes_in_flight, group.group_id
        assert not group.is_being_deleted, group.group_id
        assert group.group_id in offsets, f"{group.group_id} should have expired"


def lower_the_constants(monkeypatch: pytest.MonkeyPatch, choice: Random) -> None:
    """Now and then one is left as it is."""
    for module, name in (
        (group_coordinator, "EXPIRY_GROUPS_PER_TURN"),
        (group_coordinator, "EXPIRY_RECORDS_PER_TURN"),
        (group_coordinator, "SWEPT_PER_TURN"),
        (group_coordinator, "DELETED_PER_STEP"),
        (group_coordinator, "DEADLINES_PER_TURN"),
        (group_coordinator, "MEMBERS_PER_STEP"),
        (runtime, "REPLAYED_PER_TURN"),
        (runtime, "IDLE_STEPS_MAX"),
    ):
        value = choice.choice((1, 1, 2, 3, getattr(module, name)))
        monkeypatch.setattr(module, name, value)


def run(seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lower_the_constants(monkeypatch, Random(seed))
        history = History(seed)
        for _ in range(STEPS):
            history.step()
        history.settle()
        history.check()


def run_all(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5 * HISTORIES, HISTORIES))
def test_answers_are_true(first: int) -> None:
    run_all(range(first, first + HISTORIES))


# -- the bugs that must be found ---------------------------------------------------------------------------------------


def ignore_refusals(
    self: GroupCoordinator, context: Any, error: ErrorCode, in_log: bool, now: Now, original: Any = ON_FAILED
) -> Outcome:
    outcome: Outcome = original(self, context, error, in_log or isinstance(context, group_coordinator.Deletion), now)
    return outcome


def take_commits_always(group: Group | None, request: Any, version: int, original: Any = commit_refusal) -> ErrorCode:
    is_being_deleted = group is not None and group.is_being_deleted
    if group is not None:
        group.is_being_deleted = False
    error: ErrorCode = original(group, request, version)
    if group is not None:
        group.is_being_deleted = is_being_deleted
    return error


def join_always(self: GroupCoordinator, request: Any, *others: Any, original: Any = GroupCoordinator.join) -> Outcome:
    group = self.groups.get(request.group_id)
    is_being_deleted = group is not None and group.is_being_deleted
    if group is not None:
        group.is_being_deleted = False
    outcome: Outcome = original(self, request, *others)
    if group is not None:
        group.is_being_deleted = is_being_deleted
    return outcome


def forget_deletions(self: Any, shard: Any, state: Any, original: Any = runtime.CoordinatorRuntime._close) -> None:
    for deletion in shard.coordinator._deletions:
        shard.parked_requests.pop(deletion.token, None)
    original(self, shard, state)


def end_early(self: OffsetStore, *arguments: Any, original: Any = OffsetStore.replay_end_transaction) -> int:
    return min(original(self, *arguments), max(arguments[-1] - 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        pytest.param(GroupCoordinator, "on_failed", ignore_refusals, id="a part that is refused"),
        pytest.param(group_coordinator, "commit_refusal", take_commits_always, id="a commit between two parts"),
        pytest.param(GroupCoordinator, "join", join_always, id="a join between two parts"),
        pytest.param(runtime.CoordinatorRuntime, "_close", forget_deletions, id="a move between two parts"),
        pytest.param(OffsetStore, "replay_end_transaction", end_early, id="a transaction that ends in steps"),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, bug: Any) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(
        AssertionError, match=r"said to be deleted|a part is there|lost|without an answer|not in the log"
    ):
        run_all(range(200))
