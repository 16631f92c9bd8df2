"""A cluster of raft cores alone, on virtual time: no loop, no bytes. Everything that can go wrong does, by the seed.

Messages are lost, delayed, repeated and reordered; links are cut one way; nodes crash at any moment, even between two
effects, and keep only what was synced. Where voters change, nodes also come back with an empty disk and another
directory id. `Violation` is raised at the step that breaks an invariant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft import following, leading, lost_vote, reconfiguration
from tidelog.replication.quorum.raft.lost_vote import LostVote
from tidelog.replication.quorum.raft.messages import (
    AppendLeaderChange,
    AppendRecords,
    AppendVoters,
    BeginAsk,
    ElectionState,
    EndAsk,
    FetchAsk,
    KeepSnapshotPart,
    OffsetAndEpoch,
    Persist,
    ReportHighWatermark,
    ReportLead,
    ReportLeader,
    ReportResign,
    Send,
    SnapshotAnswer,
    SnapshotAsk,
    Truncate,
    UpdateVoterAnswer,
    UpdateVoterAsk,
    VoteAsk,
)
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.state import Leader
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterHistory, VoterSet

SETTINGS = QuorumSettings(
    election_timeout_ms=100,
    fetch_timeout_ms=200,
    election_backoff_max_ms=100,
    request_timeout_ms=200,
    fetch_wait_ms=25,
    start_delay_max_ms=20,
    gone_delay_max_ms=10,
    pre_vote_retry_ms=10,
    retry_backoff_ms=5,
    retry_backoff_max_ms=50,
)


class Violation(AssertionError):
    """An invariant does not hold."""


def check(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


class Records(bytes):
    """Stands for the bytes of batches."""

    entries: list[tuple[int, Any]]
    first: int

    @staticmethod
    def of(first: int, entries: list[tuple[int, Any]]) -> Records:
        records = Records(len(entries))
        records.first, records.entries = first, list(entries)
        return records


class Log:
    """Entries are (epoch, value); a VoterSet as value is a voters record."""

    def __init__(self) -> None:
        self.start_offset = 0
        self.entries: list[tuple[int, Any]] = []
        self.synced_offset = 0
        self.snapshot: SnapshotId | None = None
        self.truncated_to = 1 << 60

    @property
    def end_offset(self) -> int:
        return self.start_offset + len(self.entries)

    @property
    def last_epoch(self) -> int:
        if self.entries:
            return self.entries[-1][0]
        return self.snapshot.epoch if self.snapshot else 0

    @property
    def snapshots(self) -> tuple[SnapshotId, SnapshotId] | None:
        return (self.snapshot, self.snapshot) if self.snapshot else None

    def end_of_epoch(self, epoch: int) -> OffsetAndEpoch:
        found, end = -1, 0
        for index, (at, _) in enumerate(self.entries):
            if at > epoch:
                end = self.start_offset + index
                break
            found = at
        else:
            return OffsetAndEpoch(self.last_epoch, self.end_offset)
        if found < 0:
            if self.snapshot is not None:
                return OffsetAndEpoch(self.snapshot.epoch, self.snapshot.end_offset)
            return OffsetAndEpoch(epoch, end)
        return OffsetAndEpoch(found, end)

    def identity_of(self, end_offset: int) -> SnapshotId:
        end_offset = max(end_offset, self.start_offset)
        if self.snapshot is not None and self.snapshot.end_offset == end_offset:
            return self.snapshot
        return SnapshotId(end_offset, self.at(end_offset - 1)[0])

    def holds(self, identity: SnapshotId) -> bool:
        if not self.start_offset < identity.end_offset <= self.end_offset:
            return identity.end_offset <= self.start_offset
        return bool(self.at(identity.end_offset - 1)[0] == identity.epoch)

    def at(self, offset: int) -> tuple[int, Any]:
        return self.entries[offset - self.start_offset]

    def cut(self, end_offset: int) -> None:
        del self.entries[max(0, end_offset - self.start_offset) :]
        self.synced_offset = min(self.synced_offset, self.end_offset)
        self.truncated_to = min(self.truncated_to, self.end_offset)

    def begin_at(self, snapshot: SnapshotId) -> None:
        self.start_offset, self.entries, self.snapshot = snapshot.end_offset, [], snapshot
        self.synced_offset, self.truncated_to = snapshot.end_offset, -1

    def lose_unsynced(self) -> None:
        del self.entries[max(0, self.synced_offset - self.start_offset) :]


class Node:
    def __init__(self, world: World, node_id: int, can_vote: bool) -> None:
        self.world = world
        self.key = ReplicaKey(node_id, bytes([node_id]) * 16)
        self.can_vote = can_vote
        self.log = Log()
        self.file = ElectionState()
        self.has_file = True
        self.life = 0
        self.is_up = False
        self.timer = 0
        self.raft: Raft

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.is_up = True
        self.flush_ms = world.rng.choice([4, 4, 4, 60])
        history = VoterHistory(world.static)
        if world.is_dynamic:
            history.add_version(-1, 1)
        if self.log.snapshot is not None:
            history.add_voters(self.log.snapshot.end_offset - 1, world.snapshot_voters[self.log.snapshot])
        self.history = history
        self._scan(self.log.start_offset)
        self.world.knows_its_voters(self)
        self.wanted = self.persisted = 0
        self.is_persisting = self.is_flushing = False
        self.state_to_write = self.file
        self.waiting: list[tuple[int, Callable[[], None]]] = []
        self.reported = -1
        endpoints = (("CONTROLLER", Endpoint("node", self.key.id)),)
        servers = [Endpoint("node", node_id) for node_id in world.nodes] if world.is_dynamic else []
        self.raft = Raft(
            own=self.key,
            own_endpoints=endpoints,
            can_vote=self.can_vote,
            settings=replace(SETTINGS, bootstrap_servers=servers),
            log=self.log,
            voters=history,
            rng=Random(world.rng.random()),
        )
        self.raft.vote_is_unknown = not self.has_file
        self.raft.start(self.file, world.now)
        self._flush()
        if not self.has_file:
            self._recover_vote(LostVote(self.raft))
        self.drive()

    def _scan(self, offset: int) -> None:
        for at in range(offset, self.log.end_offset):
            value = self.log.at(at)[1]
            if isinstance(value, VoterSet):
                self.history.add_voters(at, value)

    def crash(self) -> None:
        self.is_up = False
        self.life += 1
        if self.log.synced_offset < self.log.end_offset and self.world.rng.random() < 0.8:
            self.log.lose_unsynced()
        else:
            self.log.synced_offset = self.log.end_offset

    def replace_disk(self) -> None:
        """Come back later as another replica, with nothing."""
        self.crash()
        self.world.lost_logs[self.key] = self.log
        self.key = ReplicaKey(self.key.id, bytes([self.key.id, 100 + len(self.world.lost_logs)]) * 8)
        self.log, self.file = Log(), ElectionState()

    def lose_file(self) -> None:
        """While it is down. A voter without records would look like a new one."""
        if self.log.end_offset > 0 and all(other.has_file for other in self.world.nodes.values()):
            self.file, self.has_file = ElectionState(), False

    def _recover_vote(self, lost: LostVote) -> None:
        """As `vote_recovery.py` does it."""
        if lost.is_found:
            self.raft.recover_vote(lost.epoch, self.world.now)
            self.drive()
            return
        for voter_id in lost.others():
            self.world.ask_for_vote(self, voter_id, lost)
        self.later(30, lambda: self._recover_vote(lost))

    def later(self, delay_ms: float, what: Callable[[], None]) -> None:
        life = self.life
        self.world.at(delay_ms, lambda: what() if self.life == life else None)

    # -- driving, as the driver does it ------------------------------------------------------------------------------

    def drive(self) -> None:
        life = self.life
        while self.is_up and self.life == life:
            effects = self.raft.take_effects()
            if not effects:
                self.raft.poll(self.world.now)
                effects = self.raft.take_effects()
                if not effects:
                    break
            for effect in effects:
                self._carry_out(effect)
                if self.world.rng.random() < self.world.crash_probability:
                    self.world.crash(self)
                    return
        if self.is_up:
            deadline = self.raft.deadline_ms
            if deadline != float("inf"):
                self.timer += 1
                number = self.timer
                delay_ms = max(0.01, deadline - self.world.now)
                self.later(delay_ms, lambda: self.drive() if self.timer == number else None)

    def _carry_out(self, effect: Any) -> None:
        world, log = self.world, self.log
        if isinstance(effect, Persist):
            self.wanted += 1
            self.state_to_write = effect.state
            if not self.is_persisting:
                self.is_persisting = True
                self._write_file()
        elif isinstance(effect, Send):
            self.when_persisted(lambda: world.send(self, effect))
        elif isinstance(effect, AppendLeaderChange):
            world.elected(self, effect)
            self.append(("leader", self.key.id))
        elif isinstance(effect, AppendVoters):
            self.append(effect.voters)
            self.raft.on_voters_changed(world.now)
        elif isinstance(effect, AppendRecords):
            assert isinstance(effect.records, Records)
            if effect.records.first == log.end_offset:
                log.entries += effect.records.entries
                self._scan(effect.records.first)
                world.knows_its_voters(self)
                self._flush()
        elif isinstance(effect, Truncate):
            log.cut(effect.end_offset)
            self.history.truncate_to(log.end_offset)
            world.knows_its_voters(self)
        elif isinstance(effect, KeepSnapshotPart):
            self.later(world.rng.random() * 5, lambda: self._install(effect.snapshot))
        elif isinstance(effect, ReportHighWatermark):
            check(effect.offset > self.reported, f"node {self.key.id}: high watermark went back")
            self.reported = effect.offset
            if isinstance(self.raft.state, Leader):
                world.counted(self, effect.offset)
            world.committed(self, effect.offset)
        elif isinstance(effect, ReportLead):
            world.leads(self, effect.epoch)
        elif isinstance(effect, ReportLeader | ReportResign):
            world.told(self, effect)

    def append(self, value: Any) -> None:
        self.log.entries.append((self.raft.epoch, value))
        self._scan(self.log.end_offset - 1)
        self._flush()

    def _write_file(self) -> None:
        number, state = self.wanted, self.state_to_write
        if number == self.persisted:
            self.is_persisting = False
            return

        def written() -> None:
            self.world.write_file(self, state)
            self.persisted = number
            waiting, self.waiting = self.waiting, []
            for wanted, what in waiting:
                if wanted <= number:
                    what()
                else:
                    self.waiting.append((wanted, what))
            self._write_file()

        self.later(self.world.rng.random() * 3, written)

    def when_persisted(self, what: Callable[[], None]) -> None:
        if self.persisted < self.wanted:
            self.waiting.append((self.wanted, what))
        else:
            what()

    def _flush(self) -> None:
        log = self.log
        if self.is_flushing or log.synced_offset >= log.end_offset:
            return
        self.is_flushing = True
        log.truncated_to = 1 << 60
        target = log.end_offset

        def flushed() -> None:
            self.is_flushing = False
            log.synced_offset = max(log.synced_offset, min(target, log.truncated_to))
            self.drive()
            if self.is_up:
                self._flush()

        self.later(self.world.rng.random() * self.flush_ms, flushed)

    def _install(self, snapshot: SnapshotId) -> None:
        state = self.raft.state
        download = getattr(state, "download", None)
        if download is not None and download.snapshot == snapshot:
            check(snapshot.end_offset >= self.reported, "a snapshot takes back what was committed")
            self.log.begin_at(snapshot)
            self.history.clear()
            if self.world.is_dynamic:
                self.history.add_version(-1, 1)
            self.history.add_voters(snapshot.end_offset - 1, self.world.snapshot_voters[snapshot])
            self.world.knows_its_voters(self)
            following.on_snapshot_installed(self.raft, snapshot, self.world.now)
            self.reported = max(self.reported, snapshot.end_offset)
        self.drive()

    def compact(self) -> None:
        """A snapshot of all that is committed, and the log cut behind it."""
        end = min(self.raft.high_watermark, self.log.synced_offset)
        if end > self.log.start_offset:
            snapshot = SnapshotId(end, self.log.at(end - 1)[0])
            _, voters = self.history.at(end)
            self.world.snapshot_voters[snapshot] = voters or self.world.static
            del self.log.entries[: end - self.log.start_offset]
            self.log.start_offset, self.log.snapshot = end, snapshot
            self.history.forget_before(end)

    def serve(self, ask: Any, reply: Callable[[Any], None]) -> None:
        raft, now = self.raft, self.world.now
        if isinstance(ask, VoteAsk):
            answer: Any = raft.on_vote(ask, now)
        elif isinstance(ask, BeginAsk):
            answer = raft.on_begin(ask, now)
        elif isinstance(ask, EndAsk):
            answer = raft.on_end(ask, now)
        elif isinstance(ask, FetchAsk):
            answer = raft.on_fetch(ask, now)
            self.drive()
            if not self.is_up:
                return
            if ask.max_wait_ms and not leading.is_worth_answering(raft, ask, answer):
                # As a parked fetch, but looking again only now and then.
                self.later(ask.max_wait_ms, lambda: self.serve(ask._replace(max_wait_ms=0), reply))
                return
            if not answer.error and answer.diverging is None and answer.snapshot is None:
                first, end = (at - self.log.start_offset for at in (ask.end_offset, leading.fetchable_end(raft)))
                count = self.world.rng.randint(1, 5)
                entries = self.log.entries[first : min(first + count, end)]
                answer = answer._replace(records=Records.of(ask.end_offset, entries))
        elif isinstance(ask, SnapshotAsk):
            error = leading.on_fetch_snapshot(raft, ask, now)
            if not error and self.log.snapshot != ask.snapshot:
                error = ErrorCode.SNAPSHOT_NOT_FOUND
            answer = SnapshotAnswer(error, raft.epoch, raft.leader_id, None, 1, 0, b"" if error else b"x")
        else:
            assert isinstance(ask, UpdateVoterAsk)
            answer = UpdateVoterAnswer(ErrorCode.NONE, raft.epoch, raft.leader_id)
        self.drive()
        if self.is_up:
            self.when_persisted(lambda: self._tell(ask, answer, reply))

    def _tell(self, ask: Any, answer: Any, reply: Callable[[Any], None]) -> None:
        if isinstance(ask, VoteAsk) and answer.granted and not ask.pre_vote:
            self.world.granted(self, ask)
        reply(answer)


class World:
    """`history(seed)` is the whole of it."""

    def __init__(self, seed: int, *, dynamic: bool = False, size: int = 0, loses_votes: bool = False) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.is_dynamic = dynamic
        self.loses_votes = loses_votes
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.steps = 0
        self.crash_probability = 0.0
        self.loss = 0.0
        self.delay_ms = 4.0
        self.cut: set[tuple[int, int]] = set()
        self.snapshot_voters: dict[SnapshotId, VoterSet] = {}
        self.truth: list[tuple[int, Any]] = []
        self.leader_of: dict[int, int] = {}
        self.votes: dict[tuple[ReplicaKey, int], ReplicaKey] = {}
        self.lost_logs: dict[ReplicaKey, Log] = {}
        self.value = 0
        size = size or self.rng.choice([3, 3, 5] if not dynamic else [1, 2, 3, 3, 5])
        self.static = VoterSet(
            Voter(ReplicaKey(i, bytes([i]) * 16 if dynamic else bytes(16)), (("C", Endpoint("node", i)),))
            for i in range(1, size + 1)
        )
        extra = 1 if not dynamic else 3
        self.nodes = {i: Node(self, i, dynamic or i <= size) for i in range(1, size + extra + 1)}

    # -- events ------------------------------------------------------------------------------------------------------

    def at(self, delay_ms: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay_ms, self.count, what))

    def run_until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            self.now, _, what = heapq.heappop(self.events)
            self.steps += 1
            what()
        self.now = end

    def send(self, source: Node, send: Send) -> None:
        target = self.nodes[send.peer.endpoint.port]
        rng = self.rng

        def answered(answer: Any) -> None:
            if self._lost(target, source):
                source.later(SETTINGS.request_timeout_ms * 0.3, failed)
            else:
                source.later(rng.random() * self.delay_ms, lambda: took(answer))

        def took(answer: Any) -> None:
            source.raft.on_answer(send, answer, self.now)
            source.drive()

        def failed(refused: bool = False) -> None:
            source.raft.on_failure(send, refused, self.now)
            source.drive()

        def arrive() -> None:
            if target.is_up:
                target.serve(send.ask, answered)

        if not target.is_up:
            source.later(0.3, lambda: failed(refused=True))
            return
        if self._lost(source, target):
            source.later(SETTINGS.request_timeout_ms * 0.3, failed)
            return
        life = source.life
        for _ in range(1 if rng.random() > 0.05 else 2):
            self.at(rng.random() * self.delay_ms, arrive)
        # An answer that a crash of the other swallowed: the request times out. Numbers make the second one harmless.
        self.at(SETTINGS.request_timeout_ms, lambda: failed() if source.life == life else None)

    def ask_for_vote(self, source: Node, target_id: int, lost: LostVote) -> None:
        target = self.nodes[target_id]

        def arrive() -> None:
            if target.is_up and not self._lost(target, source):
                answer = lost_vote.answer(target.raft)
                source.later(self.rng.random() * self.delay_ms, lambda: lost.on_answer(target_id, answer))

        if not self._lost(source, target):
            self.at(self.rng.random() * self.delay_ms, arrive)

    def _lost(self, source: Node, target: Node) -> bool:
        return (source.key.id, target.key.id) in self.cut or self.rng.random() < self.loss

    def crash(self, node: Node) -> None:
        node.crash()
        if self.loses_votes and self.rng.random() < 0.4:
            node.lose_file()
        self.at(self.rng.random() * 300, lambda: node.start() if not node.is_up else None)

    def write_file(self, node: Node, state: ElectionState) -> None:
        node.file, node.has_file = state, True

    # -- invariants --------------------------------------------------------------------------------------------------

    def told(self, node: Node, effect: Any) -> None:
        if isinstance(effect, ReportLeader) and effect.leader_id >= 0:
            known = self.leader_of.setdefault(effect.epoch, effect.leader_id)
            check(known == effect.leader_id, f"epoch {effect.epoch} has leaders {known} and {effect.leader_id}")

    def granted(self, node: Node, ask: VoteAsk) -> None:
        known = self.votes.setdefault((node.key, ask.epoch), ask.candidate)
        check(known == ask.candidate, f"node {node.key.id} votes twice in epoch {ask.epoch}")

    def votes_of(self, node: Node) -> list[ReplicaKey]:
        return [vote for (key, _), vote in self.votes.items() if key == node.key]

    def voters_in(self, node: Node) -> VoterSet:
        """The last voters that its log or its snapshot names."""
        log = node.log
        named = (value for _, value in reversed(log.entries) if isinstance(value, VoterSet))
        return next(named, self.snapshot_voters[log.snapshot] if log.snapshot else self.static)

    def knows_its_voters(self, node: Node) -> None:
        check(node.history.latest == self.voters_in(node), f"node {node.key.id} does not use the voters in its log")

    def elected(self, node: Node, effect: AppendLeaderChange) -> None:
        """By a majority of the voters in its log; each of the others has given it its vote in this epoch."""
        voters, own = self.voters_in(node), node.key
        granting = [key for key in effect.granting if voters.includes(key)]
        check(len(granting) >= voters.majority, f"node {own.id} leads in epoch {effect.epoch} without a majority")
        if not self.is_dynamic:
            return  # static voters have no directory ids
        for key in granting:
            vote = self.votes.get((key, effect.epoch))
            check(key == own or vote == own, f"node {own.id} leads by the vote of {key}, which went to {vote}")

    def counted(self, node: Node, offset: int) -> None:
        """A leader takes as committed what a majority of the voters in its log has synced."""
        voters, ids = self.voters_in(node), []
        for voter in voters:
            other = self.nodes[voter.key.id]
            log = other.log if voter.key.matches(other.key) else self.lost_logs[voter.key]
            if log.synced_offset >= offset:
                ids.append(voter.key.id)
        check(len(ids) >= voters.majority, f"node {node.key.id} commits {offset}: only {ids} of {voters} have it")

    def keeps_a_majority(self, voters: VoterSet, without: int = -1) -> bool:
        """Whether enough of these voters have their disks."""
        intact = [one for one in voters if one.key.id != without and one.key.matches(self.nodes[one.key.id].key)]
        return len(intact) >= voters.majority

    def committed(self, node: Node, offset: int) -> None:
        log = node.log
        check(offset <= log.end_offset, "more is committed than is there")
        for at in range(max(log.start_offset, min(len(self.truth), offset) - 40), offset):
            entry = log.at(at)
            if at < len(self.truth):
                check(
                    self.truth[at] == entry, f"node {node.key.id}: offset {at} is {entry}, committed {self.truth[at]}"
                )
            else:
                check(at == len(self.truth), "a hole in what is committed")
                self.truth.append(entry)

    def leads(self, node: Node, epoch: int) -> None:
        check(node.log.end_offset >= len(self.truth), f"leader {node.key.id} of {epoch} lacks what is committed")
        for at in range(max(node.log.start_offset, len(self.truth) - 100), len(self.truth)):
            check(node.log.at(at) == self.truth[at], f"leader {node.key.id} of {epoch} differs at {at}")

    # -- what happens ------------------------------------------------------------------------------------------------

    def leader(self) -> Node | None:
        found = [node for node in self.nodes.values() if node.is_up and node.raft.is_active_leader]
        return max(found, key=lambda node: node.raft.epoch) if found else None

    def misfortune(self) -> None:
        rng = self.rng
        node = rng.choice(list(self.nodes.values()))
        kind = rng.randrange(11)
        if kind < 3 and node.is_up:
            self.crash(node)
        elif kind == 3:
            self.loss = rng.choice([0, 0, 0.05, 0.3])
        elif kind == 4:
            self.delay_ms = rng.choice([1, 4, 30])
        elif kind == 5:
            ids = list(self.nodes)
            self.cut = {(a, b) for a in ids for b in ids if a != b and rng.random() < rng.choice([0, 0.2, 0.5])}
        elif kind == 6 and node.is_up:
            node.compact()
        elif kind == 7:
            self.crash_probability = rng.choice([0, 0, 0.0005, 0.003])
        elif kind > 8:
            for other in list(self.nodes.values()):
                if other.is_up and rng.random() < 0.6:
                    self.crash(other)
        elif kind == 8 and node.is_up and isinstance(node.raft.state, Leader):
            node.raft.resign(self.now)
            node.drive()
        elif kind == 8 and self.is_dynamic and not self.loses_votes:  # with its disk a voter loses its epoch, too
            known = [self.voters_in(each) for each in self.nodes.values()]
            if all(self.keeps_a_majority(voters, node.key.id) for voters in known):
                node.replace_disk()
                self.at(rng.random() * 300, lambda: node.start() if not node.is_up else None)

    def produce(self) -> None:
        for node in list(self.nodes.values()):
            if node.is_up and node.raft.is_active_leader and self.rng.random() < 0.7:
                self.value += 1
                node.append(self.value)
                node.drive()

    def reconfigure(self) -> None:
        for node in self.nodes.values():
            if not node.is_up or not node.raft.is_active_leader:
                continue
            other = self.rng.choice(list(self.nodes.values()))
            present = node.history.latest.get(other.key.id)
            try:
                if present is None:
                    voter = Voter(other.key, (("C", Endpoint("node", other.key.id)),))
                    reconfiguration.add_voter(node.raft, voter, self.now)
                elif self.keeps_a_majority(node.history.latest.without(present.key)):
                    reconfiguration.remove_voter(node.raft, present.key)
            except KafkaError:
                continue
            node.drive()

    def history(self, duration_ms: float = 2500) -> None:
        """A life full of misfortune, then peace, in which all must agree and go on."""
        for node in self.nodes.values():
            node.start()
        end = 0.0
        while end < duration_ms:
            end += self.rng.random() * 60
            self.run_until(end)
            if self.rng.random() < 0.3:
                self.misfortune()
            if self.is_dynamic and self.rng.random() < 0.3:
                self.reconfigure()
            self.produce()
        self.loss, self.crash_probability, self.delay_ms = 0.0, 0.0, 2.0
        self.cut.clear()
        self.run_until(self.now + 300)
        for node in self.nodes.values():
            if not node.is_up:
                node.start()
        self.run_until(self.now + 1500)
        leader = self.leader()
        check(leader is not None, "nobody leads though all is well")
        assert leader is not None
        leader.append("last")
        leader.drive()
        last = leader.log.end_offset
        self.run_until(self.now + 500)
        for node in self.nodes.values():
            check(node.raft.high_watermark >= last, f"node {node.key.id} has not heard of the last record")
